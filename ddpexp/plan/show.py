"""Printing the plan in human-readable form."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpexp.data.batch_plan import epochs_text
from ddpexp.plan.outcome import Outcome
from ddpexp.plan.speed import crowd
from ddpexp.strategy.estimator import Traffic
from ddpexp.sweep import grid
from ddpexp.system.text import counted, duration, one_line, size_text

if TYPE_CHECKING:
    from rich.console import RenderableType

_TRANSPORTS = {
    "none": "", "shared_memory": ", gradients through shared memory", "in_rank_order": (
        ", gradients in the order of the ranks"
    ),
    "backend": "",
}  # fmt: skip
_MOMENTS = {"start": ("at the start", "of the model"), "evaluation": ("in evaluations", "of the model, and what stays")}
_UNCOUNTED = "Not counted: Python and torch themselves, what the allocator keeps in reserve"
_OF_SHARES = (
    "Not counted: Python and torch themselves, and what glibc keeps of freed memory, which may be as much again: "
    "MALLOC_MMAP_THRESHOLD_=1048576 in the environment has it returned, and steps take longer"
)
_OF_GPUS = (
    "Not counted: Python and torch themselves, CUDA's context, NCCL's buffers, what the allocator keeps in reserve"
)


def show(outcome: Outcome) -> None:
    """Print the plan."""
    grid.show(render(outcome))


def render(outcome: Outcome) -> RenderableType:
    """Return the plan as lines and tables."""
    from rich.console import Group as Lines
    from rich.text import Text

    lines = [
        *(Text(f"{name:<12}{one_line(text)}") for name, text in _lines(outcome).items()),
        "",
        *_groups(outcome),
        _memory(outcome),
        Text(_uncounted(outcome), style="dim"),
        "",
        *(Text(f"{name:<12}{one_line(text)}") for name, text in _rest(outcome).items()),
        *(Text(f"note: {one_line(text)}", style="dim") for text in outcome.notes()),
    ]
    return Lines(*lines)


def _uncounted(outcome: Outcome) -> str:
    layout = outcome.assumed.layout
    if layout.device == "cuda":
        return _OF_GPUS
    return _OF_SHARES if outcome.estimator.weights_share(layout) > 1 else _UNCOUNTED


def _lines(outcome: Outcome) -> dict[str, str]:
    """Return what would run, as in the headline of a run."""
    experiment = outcome.experiment
    layout = outcome.assumed.layout
    batch = outcome.batch
    kind = "GPU" if layout.device == "cuda" else "CPU"
    where = "" if layout.nodes == 1 else f" on {layout.nodes:,} machines, {outcome.assumed.workers} each"
    workers = f"{counted(layout.world_size, f'{kind} worker')}{where}"
    busy = outcome.assumed.workers * layout.threads
    crowded = f"; {busy} threads share {outcome.assumed.cores} cores" if busy > outcome.assumed.cores else ""
    threads = counted(layout.threads, "thread")
    epochs = epochs_text(outcome.num_steps / outcome.steps_per_epoch, outcome.steps_per_epoch)
    frozen = outcome.num_parameters - outcome.num_trained
    parts = f" ({outcome.num_trained:,} trained, {frozen:,} frozen)" if frozen else ""
    model = experiment.model.target.rpartition(".")[2]
    data = outcome.facts.notes.get("samples", experiment.data.target)
    mesh = experiment.strategy.mesh(layout.world_size).drawn()
    lines = {
        "recipe": experiment.recipe.name,
        "data": f"{data}; {outcome.facts.num_samples:,} samples to train",
        "model": f"{model}, {outcome.num_parameters:,} parameters{parts}, {experiment.trainer.computes_in}",
        "world": f"{workers} ({layout.backend}{_TRANSPORTS[outcome.traffic().transport]}), {threads} each{crowded}",
        **({"mesh": "; ".join(mesh)} if mesh else {}),
        "batch": f"{batch.global_batch_size:,} = {batch.formula(experiment.data.batch_tokens)}",
        "steps": f"{outcome.num_steps:,}: {epochs}, each leaves out {outcome.dropped_samples:,} samples",
        "folder": outcome.folder + (", which is resumed" if outcome.resumes else ""),
    }
    request = outcome.assumed.request
    if request is not None:
        lines[request.scheduler.name] = request.summary
    return lines


def _groups(outcome: Outcome) -> list[RenderableType]:
    """Return the table of parameter groups, where there is more than one or some parameters are frozen."""
    from rich.table import Table

    facts = outcome.facts
    if len(facts.groups) < 2 and outcome.num_trained == outcome.num_parameters and not facts.late_starts:
        return []
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("parameter group")
    for title in ("tensors", "trained", "frozen", "lr", "weight decay"):
        table.add_column(title, justify="right")
    table.add_column("")
    several = len({group.optimizer for group in facts.groups}) > 1
    for group in facts.groups:
        name = f"{group.optimizer}/{group.name}" if several else group.name
        table.add_row(
            one_line(name), f"{group.num_parameters:,}", f"{group.num_trained:,}",
            f"{group.num_elements - group.num_trained:,}", f"{group.lr:.6g}",
            "" if group.weight_decay is None else f"{group.weight_decay:.6g}", one_line(group.conditions),
        )  # fmt: skip
    return [table, *map(one_line, facts.late_starts), ""]


def _memory(outcome: Outcome) -> RenderableType:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("memory of a rank")
    table.add_column("", justify="right")
    table.add_column("")
    for part in outcome.parts():
        where = "on the host; " if outcome.is_on_host(part) else ""
        size = "?" if part.num_bytes is None else size_text(part.num_bytes)
        table.add_row(
            part.name,
            size,
            f"{where}{one_line(part.note)}".removesuffix("; "),
            style="dim" if part.num_bytes is None else "",
        )
    on_gpu = outcome.assumed.layout.device == "cuda"
    table.add_row("together", size_text(outcome.rank_bytes(on_host=False)), "on a GPU" if on_gpu else "", style="bold")
    if on_gpu:
        table.add_row("", size_text(outcome.rank_bytes(on_host=True)), "of a rank on its host", style="bold")
    for moment, num_bytes in outcome.moments().items():
        table.add_row(_MOMENTS[moment][0], size_text(num_bytes), _MOMENTS[moment][1])
    return table


def _rest(outcome: Outcome) -> dict[str, str]:
    files = outcome.files()
    made, at_once = outcome.checkpoints()
    split = " + ".join(f"{name} {size_text(size)}" for name, size in files.items() if size)
    lines = {"buckets": _buckets(outcome.traffic())}
    lines["checkpoint"] = (
        f"{size_text(sum(files.values()))} = {split}; {made:,} made, at most {at_once:,} there: "
        f"{size_text(at_once * sum(files.values()))}"
    )
    lines |= _step(outcome)
    return {name: text for name, text in lines.items() if text}


def _step(outcome: Outcome) -> dict[str, str]:
    step = outcome.step()
    if isinstance(step, str):
        return {"step": step}
    assert outcome.costs is not None
    costs, passes = outcome.costs, outcome.batch.gradient_accumulation_steps
    stretch = crowd(costs, outcome.place)
    rate = 1e3 * outcome.batch.global_batch_size / step.total_ms
    terms = f"{stretch:.3g} x ({passes} x {costs.pass_ms:.3g} + {costs.update_ms:.3g})"
    lines = {
        "model": (
            "step = crowding x (passes x pass + update) + reduction - what of it hides behind backward (docs/plan.md)"
        )
    }
    lines["step"] = (
        f"{step.total_ms:.3g} ms = {terms} + {step.reduction_ms:.3g} - {step.hidden_ms:.3g} ms: {rate:,.0f} samples/s"
    )
    if outcome.place.way != "none":
        lines["reduction"] = f"alpha {costs.alpha_us:.3g} us, bandwidth {costs.bandwidth_gbps:.3g} Gb/s"
    seconds = outcome.num_steps * step.total_ms / 1e3
    lines["training"] = f"{duration(seconds)}, without evaluations, checkpoints and the start"
    return lines


def _buckets(traffic: Traffic) -> str:
    sizes = [bucket.num_bytes for bucket in traffic.buckets]
    if not sizes:
        return ""
    spread = (
        size_text(sizes[0])
        if len(sizes) == 1
        else f"{size_text(min(sizes))} to {size_text(max(sizes))}, the last one {size_text(sizes[-1])}"
    )
    return f"{len(sizes):,} of {traffic.bucket_cap_mb:g} MiB: {size_text(sum(sizes))} a step, {spread}"

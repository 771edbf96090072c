"""Estimates of memory and disk space: buckets, memory of a rank, size of a checkpoint. Pure, and free of torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ddpexp.config.schema import Trainer
from ddpexp.launch import Layout
from ddpexp.strategy.options import Options as Strategy
from ddpexp.system.limits import human

_MIB = 1 << 20
_GATHERED = 128 << 10  # ddpexp.strategy.comm.reduce.GATHERED_BYTES, which a test holds this to


@dataclass(frozen=True)
class Parameter:
    """One parameter of a model, in the order in which the model names them."""

    model: str
    num_elements: int
    num_bytes: int
    dtype: str
    trained: bool


@dataclass(frozen=True)
class Facts:
    """What was learnt from building the model, its optimizers and the data; `ddpexp.plan.build` says how."""

    parameters: Sequence[Parameter]  # each once, tied ones too
    buffers_bytes: int
    state_bytes: Mapping[str, int]  # of each model's state_dict: a file of a checkpoint
    optimizer_bytes: int
    activations_bytes: int | None  # of a micro-batch; None: not measured
    batch_bytes: int | None
    data_bytes: int | None  # of the data sets, of each rank's own
    num_samples: int
    device_data_bytes: int = 0  # of the data sets where they lie on the device
    sums_bytes: int = 0  # of trainer.reduction=exact
    shared_bytes: int = 0  # the memory through which the workers of a machine reduce; 0: they do not
    notes: Mapping[str, str] = field(default_factory=dict)  # by what they are about


@dataclass(frozen=True)
class Bucket:
    """Gradients that are reduced together."""

    model: str
    dtype: str
    num_bytes: int
    num_parameters: int


@dataclass(frozen=True)
class Part:
    """A part of what a rank holds."""

    name: str
    num_bytes: int | None  # None: not known
    note: str = ""
    on_host: bool = False  # in the host's memory, also where the workers have GPUs


def buckets(parameters: Iterable[Parameter], options: Strategy, rebuilt: bool = True) -> list[Bucket]:
    """Cut the trained parameters into DDP's buckets, those first whose gradients are ready first.

    A bucket closes as soon as it holds `strategy.bucket_cap_mb` or more, so a large parameter may overflow it; each
    kind of number has its own. `rebuilt` is DDP's layout from the second step on, in the order in which gradients
    become ready, for which the reverse of the models' order stands in; without it the buckets are cut in the models'
    order.
    Source: torch, csrc/distributed/c10d/reducer.cpp, compute_bucket_assignment_by_size and Reducer::rebuild_buckets.
    """
    cap = int(options.bucket_cap_mb * _MIB)
    models: dict[str, list[Parameter]] = {}
    for parameter in parameters:
        if parameter.trained:
            models.setdefault(parameter.model, []).append(parameter)
    result = []
    for name, members in models.items():
        cut = _cut(name, members[::-1] if rebuilt else members, cap)
        result += cut if rebuilt else cut[::-1]
    return result


def _cut(model: str, members: Sequence[Parameter], cap: int) -> list[Bucket]:
    full: list[Bucket] = []
    filling: dict[str, Bucket] = {}
    for parameter in members:
        bucket = filling.get(parameter.dtype, Bucket(model, parameter.dtype, 0, 0))
        filling[parameter.dtype] = Bucket(
            model, parameter.dtype, bucket.num_bytes + parameter.num_bytes, bucket.num_parameters + 1
        )
        if filling[parameter.dtype].num_bytes >= cap:
            full.append(filling.pop(parameter.dtype))
    return [*full, *filling.values()]


def layout_stays(trainer: Trainer, options: Strategy, layout: Layout) -> bool:
    """Return whether DDP keeps its initial buckets; see `ddpexp.strategy.ddp`."""
    orders = layout.device == "cuda" and trainer.deterministic
    fixed = layout.world_size > 2 and (options.comm_hook != "none" or orders)
    return (options.find_unused_parameters or fixed) and not options.static_graph


def reducer(
    trainer: Trainer, options: Strategy, layout: Layout
) -> Literal["none", "shared_memory", "in_rank_order", "backend"]:
    """Return what carries the gradients: see `ddpexp.strategy.comm.reduce`, and `exchange` for the exact reduction."""
    if layout.world_size == 1:
        return "none"
    if layout.device == "cuda" or (options.comm_hook != "none" and trainer.reduction == "fast"):
        return "backend"
    if layout.nodes == 1 and options.reduce_through != "backend":
        return "shared_memory"
    return "backend" if layout.world_size == 2 and trainer.reduction == "fast" else "in_rank_order"


def exchange_bytes(sizes: Iterable[int], world_size: int) -> int:
    """Return what a rank holds while gradients are summed in the order of the ranks through the backend.

    A small bucket is gathered from all ranks; of a large one this rank sends all chunks and receives its own from all.
    """
    return sum(
        world_size * size if (world_size - 2) * size < _GATHERED else 2 * -(-size // world_size) * world_size
        for size in sizes
    )


def parts(facts: Facts, trainer: Trainer, options: Strategy, layout: Layout) -> list[Part]:
    """Return what one rank holds at the end of a forward pass, and while gradients are reduced."""
    trained = sum(parameter.num_bytes for parameter in facts.parameters if parameter.trained)
    weights = sum(parameter.num_bytes for parameter in facts.parameters)
    by_ddp = layout.world_size > 1 and trainer.reduction == "fast"
    local = layout.world_size // layout.nodes
    result = [
        Part("parameters", weights, f"{sum(parameter.num_elements for parameter in facts.parameters):,} numbers"),
        Part("gradients", trained, "views of the buckets" if by_ddp and options.gradient_as_bucket_view else ""),
    ]
    if by_ddp and not options.gradient_as_bucket_view:
        result.append(Part("buckets", trained, "beside the gradients: strategy.gradient_as_bucket_view=false"))
    result.append(Part("optimizer", facts.optimizer_bytes, facts.notes.get("optimizer", "")))
    result.append(Part("buffers", facts.buffers_bytes))
    if trainer.ema_decay is not None:
        result.append(Part("average of the weights", weights, "trainer.ema_decay"))
    if trainer.reduction == "exact":
        result.append(Part("sums of micro-batches", facts.sums_bytes, "trainer.reduction=exact"))
    way = reducer(trainer, options, layout)
    if way == "shared_memory":
        result.append(
            Part("shared memory", facts.shared_bytes // local, f"{human(facts.shared_bytes)} for {local} workers")
        )
    elif way == "in_rank_order":
        if trainer.reduction == "exact":
            sizes = [facts.sums_bytes]
        else:
            sizes = [
                bucket.num_bytes
                for bucket in buckets(facts.parameters, options, not layout_stays(trainer, options, layout))
            ]
        result.append(
            Part(
                "exchange",
                exchange_bytes(sizes, layout.world_size),
                "what the ranks send one another, in the order of the sum",
            )
        )
    elif way == "backend" and options.comm_hook == "powersgd":
        result.append(Part("PowerSGD's memory", trained, "the error that it feeds back, and its factors beside that"))
    if trainer.precision != "fp32":
        halves = sum(2 * parameter.num_elements for parameter in facts.parameters)
        result.append(Part(f"copies in {trainer.precision}", halves, "of the weights during a pass, at most"))
    result.append(Part("activations", facts.activations_bytes, facts.notes.get("activations", "")))
    result.append(Part("batch", facts.batch_bytes))
    if layout.device == "cuda":
        result.append(Part("samples", facts.device_data_bytes, "data.on_device=true"))
    result.append(Part("data", facts.data_bytes, facts.notes.get("data", ""), on_host=True))
    saved = sum(checkpoint_files(facts, trainer).values())
    result.append(
        Part("checkpoint", -(-saved // layout.world_size), "the copy of its share, while one is written", on_host=True)
    )
    return [part for part in result if part.num_bytes != 0]


def checkpoint_files(facts: Facts, trainer: Trainer) -> dict[str, int]:
    """Return how much each file of a checkpoint takes, without its header. Units: bytes."""
    files = {f"{name}.safetensors": size for name, size in facts.state_bytes.items()}
    if trainer.ema_decay is not None:
        files |= {f"{name}.ema.safetensors": size for name, size in facts.state_bytes.items()}
    return files | {"state.optimizers.safetensors": facts.optimizer_bytes}


def checkpoints_at_once(trainer: Trainer, num_checkpoints: int) -> int:
    """Return how many checkpoints are on the disk at most.

    The oldest goes when the newest is complete, the best stays.
    """
    kept = num_checkpoints if trainer.keep_last is None else trainer.keep_last + 1
    return min(num_checkpoints, kept + (trainer.keep_best is not None))


def num_checkpoints(trainer: Trainer, num_steps: int, steps_per_epoch: int) -> int:
    """Return how many checkpoints a run makes: one each period, and one at its end."""
    every = steps_per_epoch if trainer.checkpoint_every == "epoch" else trainer.checkpoint_every
    return -(-num_steps // every) if every else 1

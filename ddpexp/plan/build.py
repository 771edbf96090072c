"""Collect the facts about a run by building it without memory.

The model, its optimizers and one forward pass on torch's meta device.

This runs in a separate process, which trusts the same code as the run's workers would, since it loads the same
configuration.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ddpexp.config.instantiate import instantiate
from ddpexp.config.parse import load
from ddpexp.config.sampling import training_plan
from ddpexp.config.schema import Experiment
from ddpexp.config.strategies import estimator_of
from ddpexp.data.adapters import MapStyle, sized
from ddpexp.data.base import Subset
from ddpexp.data.batches import EvalBatches, TrainBatches
from ddpexp.data.datasets import Splits, device_bytes, prefer_device
from ddpexp.data.order import Listed
from ddpexp.data.samples import tensors_of
from ddpexp.data.streams import Stream
from ddpexp.data.token_batches import ByTokens
from ddpexp.data.weights import Passes
from ddpexp.distributed.transfers import to_device
from ddpexp.distributed.world import World
from ddpexp.errors import RefusedError
from ddpexp.launch import Layout
from ddpexp.plan.activations import measure
from ddpexp.plan.rate_curves import curves_of
from ddpexp.strategy.estimator import Facts, Parameter, ParamGroup
from ddpexp.strategy.replica import Models, modules_of
from ddpexp.system.limits import reason
from ddpexp.system.oom import bound_memory
from ddpexp.train.build import build_model, count_steps, open_data
from ddpexp.train.build_optimizers import build_optimizers
from ddpexp.train.freezing import LateStarts
from ddpexp.train.optimizer_average import HasModes
from ddpexp.train.param_groups import describe, groups_of

_META, _CPU = torch.device("meta"), torch.device("cpu")
_MOST_SAMPLES = 256  # of the batch that activations are measured with: they grow with it


def collect_all(request: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the facts of each run of a request, or why there are none."""
    wanted = request["data"], request["num_samples"], request["curves"]
    return [_result(run, *wanted) for run in request["runs"]]


def _result(
    run: Mapping[str, Any], prepared: Mapping[str, Any] | None, num_samples: int | None, curves: bool
) -> dict[str, Any]:
    """Return the facts about a run, with the learning rates if `curves`, or why there are none."""
    try:
        experiment, layout = load(run["config"]), Layout(**run["layout"])
        experiment.trust.make_importable()
        facts, steps, optimizers = collect(experiment, layout, prepared, num_samples)
        lines = curves_of(experiment, optimizers, **steps) if curves else {}
        return {"facts": asdict(facts), "steps": steps, "curves": lines}
    except RefusedError as error:
        return {"refused": error.as_dict()}
    except Exception as error:  # of the user's own code, as it would end a run
        traceback.print_exc()
        limit = reason(error)
        return {"failed": f"{type(error).__name__}: {error}{f' ({limit})' if limit else ''}"}


def collect(
    experiment: Experiment, layout: Layout, prepared: Mapping[str, Any] | None, num_samples: int | None
) -> tuple[Facts, dict[str, int], Mapping[str, Optimizer]]:
    """Return what the run holds, its steps and its optimizers; `num_samples` stands in for the data where given.

    Raises:
        RefusedError: as a run would.
    """
    trainer = experiment.trainer
    data_size = experiment.strategy.data_rank(0, layout.world_size).size
    plan = training_plan(experiment, data_size)
    before = _own_memory()
    if num_samples is None:
        splits = open_data(experiment, prepared, World.alone())
    else:
        splits = _placeholder(experiment, num_samples)
    train, there = splits.train, num_samples is None and _on_device(experiment, splits)
    data_bytes = max(0, _own_memory() - before) if num_samples is None else None
    if isinstance(train, Stream):
        train, steps_per_epoch = sized(train, plan.micro_batch_size), trainer.max_steps or 0
        samples_per_epoch = steps_per_epoch * trainer.global_batch_size
    else:
        batches = TrainBatches(train, plan, 0, trainer.seed, _CPU, order=splits.order)
        steps_per_epoch, samples_per_epoch = batches.steps_per_epoch, batches.samples_per_epoch
    steps = {"steps_per_epoch": steps_per_epoch, "num_steps": count_steps(trainer, steps_per_epoch)}
    notes = {
        "data": "measured: what each worker has for itself" if data_bytes is not None else "left out: --num_samples"
    }
    models, single, device = _models(experiment, notes)
    named, optimizers = _named(models), _optimizers(experiment, models, single)
    of_the_model = _of_the_model(experiment, models, single, optimizers, notes)
    estimator = estimator_of(experiment.strategy)
    estimator.divide_models(models)
    divided = list(_described(_named(models))) if experiment.strategy.divides_layers else []
    if num_samples is None:
        size, passes = plan.micro_batch_size, plan.gradient_accumulation_steps
        if isinstance(splits.order, ByTokens):
            size = len(splits.order.largest)
            train = Subset(train, Listed(splits.order.largest), 0, size)
        of_a_pass = _of_a_pass(experiment, models, single, train, size, device, notes, passes)
    else:
        of_a_pass = {"activations_bytes": None, "batch_bytes": None}
        notes["activations"] = "left out: --num_samples gives no samples to measure them with"
    sums_bytes, shared_bytes = estimator.reserved_bytes(
        [p for _, p in named if p.requires_grad],
        [buffer for module in models.values() for buffer in module.buffers()],
        trainer, layout, plan.gradient_accumulation_steps,
    )  # fmt: skip
    facts = Facts(
        **of_the_model,
        divided=divided,
        buffers_bytes=_num_bytes([buffer for module in models.values() for buffer in module.buffers()]),
        data_bytes=data_bytes,
        device_data_bytes=device_bytes(splits) if there else 0,
        num_samples=samples_per_epoch,
        sums_bytes=sums_bytes,
        shared_bytes=shared_bytes,
        **of_a_pass,
        num_passes=plan.gradient_accumulation_steps,
        blocks_bytes=estimator.blocks_bytes(models) if layout.world_size > 1 else [],
        notes=notes,
    )
    return facts, steps, optimizers


def _of_the_model(
    experiment: Experiment, models: Models, single: bool, optimizers: Mapping[str, Optimizer], notes: dict[str, str]
) -> dict[str, Any]:
    """Return the facts about whole models and their optimizers, by the fields of `Facts`."""
    return {
        "parameters": list(_described(_named(models))),
        "state_bytes": {
            name: _num_bytes(module.state_dict(keep_vars=True).values()) for name, module in models.items()
        },
        "optimizer_bytes": _optimizer_bytes(optimizers, models, notes),
        "groups": list(_groups(experiment, models, single, optimizers)),
        "late_starts": LateStarts.of(experiment.trainer, models, single).texts(),
        "averaged_by": next((type(one).__name__ for one in optimizers.values() if isinstance(one, HasModes)), None),
    }


def _described(named: Sequence[tuple[str, nn.Parameter]]) -> Iterator[Parameter]:
    for name, p in named:
        dtype = str(p.dtype).removeprefix("torch.")
        yield Parameter(name, p.numel(), p.numel() * p.element_size(), dtype, p.requires_grad)


def _on_device(experiment: Experiment, splits: Splits) -> bool:
    """Return whether the samples are in the memory of a GPU, if there is one, which `auto` finds out when it runs."""
    wanted = experiment.data.on_device
    return prefer_device(splits) if wanted == "auto" else wanted


def _of_a_pass(
    experiment: Experiment, models: Models, single: bool, train: Any, num_samples: int, device: torch.device,
    notes: dict[str, str], num_passes: int,
) -> dict[str, Any]:  # fmt: skip
    """Return the facts about a pass, by the fields of `Facts`: its batch, and what is kept for backward."""
    samples = min(num_samples, len(train), _MOST_SAMPLES)
    on_device = experiment.data.on_device is True
    batch = to_device(EvalBatches(train, samples, 0, 1, _CPU, on_device=on_device).first(), device)
    scale = num_samples / samples
    found: dict[str, Any] = {
        "batch_bytes": round(scale * sum(t.numel() * t.element_size() for t in tensors_of(batch))),
        "activations_bytes": None,
    }
    measured = measure(experiment, models, single, batch, notes)
    if measured is not None:
        kept = estimator_of(experiment.strategy).kept_bytes(measured.of_stages, num_passes)
        found["activations_bytes"] = round(scale * kept)
        found["recomputed_bytes"] = round(scale * measured.again_bytes)
        found["temporary_bytes"] = round(scale * measured.temporary_bytes)
    return found


def _placeholder(experiment: Experiment, num_samples: int) -> Splits:
    """Return data sets of this size without samples."""
    length, per_epoch = experiment.trainer.limit_train_samples or num_samples, experiment.data.samples_per_epoch
    samples = MapStyle(range(min(num_samples, length)))
    return Splits(samples, {}, Passes(per_epoch, len(samples)) if per_epoch is not None else None)


def _models(experiment: Experiment, notes: dict[str, str]) -> tuple[Models, bool, torch.device]:
    """Build the models as a worker does, without memory; where their code does not work so, in memory."""
    device = _META
    try:
        with _META:
            built = build_model(experiment)
    except RefusedError:
        raise
    except Exception as error:
        notes["model"] = (
            f"built in memory, because its code does not work on torch's meta device ({type(error).__name__}: {error})"
        )
        device = _CPU
        bound_memory()
        built = build_model(experiment)
    models = modules_of(built)
    for name, module in models.items():
        if any(map(is_lazy, [*module.parameters(), *module.buffers()])):
            raise RefusedError(
                f"{name} has lazy parameters, whose size is known only after the first batch: a plan needs sizes",
                suggestion="Give its layers their input sizes.",
            )
        module.to(device)
    return models, isinstance(built, nn.Module), device


def _optimizers(experiment: Experiment, models: Models, single: bool) -> Mapping[str, Optimizer]:
    task = instantiate(experiment.task, experiment.trust, "task")
    parameters = [p for module in models.values() for p in module.parameters()]
    return build_optimizers(experiment, task, models, single, lambda: parameters)


def _groups(
    experiment: Experiment, models: Models, single: bool, optimizers: Mapping[str, Optimizer]
) -> Iterator[ParamGroup]:
    """Yield the parameter groups of the optimizers."""
    described = list(describe(models, single).values())
    conditions = {group.name: "; ".join(group.conditions) for group in groups_of(experiment, described) or ()}
    for optimizer, one in optimizers.items():
        for number, group in enumerate(one.param_groups):
            parameters, name = group["params"], str(group.get("name", number))
            yield ParamGroup(
                optimizer, name, conditions.get(name, ""), len(parameters), sum(p.numel() for p in parameters),
                sum(p.numel() for p in parameters if p.requires_grad), float(group["lr"]), group.get("weight_decay"),
            )  # fmt: skip


def _optimizer_bytes(optimizers: Mapping[str, Optimizer], models: Models, notes: dict[str, str]) -> int:
    """Have each optimizer take a step, after which it holds what it keeps."""
    parameters = [p for module in models.values() for p in module.parameters()]
    for p in parameters:
        p.grad = torch.empty_like(p) if p.requires_grad else None
    try:
        for optimizer in optimizers.values():
            if isinstance(optimizer, HasModes):
                optimizer.train()
            optimizer.step()
        tensors = [
            value
            for optimizer in optimizers.values()
            for state in optimizer.state.values()
            for value in tensors_of(state)
        ]
        notes["optimizer"] = (
            "measured after a step on the meta device" if "model" not in notes else "measured after a step"
        )
        return _num_bytes(tensors)
    except Exception as error:
        notes["optimizer"] = (
            "assumed: two numbers for each trained one, because a step was not possible "
            f"({type(error).__name__}: {error})"
        )
        return 2 * _num_bytes([p for p in parameters if p.requires_grad])
    finally:
        for p in parameters:
            p.grad = None


def _named(models: Models) -> list[tuple[str, nn.Parameter]]:
    """Return every parameter once, with the model that has it first."""
    named: dict[int, tuple[str, nn.Parameter]] = {}
    for name, module in models.items():
        for p in module.parameters():
            named.setdefault(id(p), (name, p))
    return list(named.values())


def _num_bytes(tensors: Any) -> int:
    """Add up the tensors among some values, each once."""
    return sum(t.numel() * t.element_size() for t in {id(t): t for t in tensors if isinstance(t, Tensor)}.values())


def _own_memory() -> int:
    """Return the memory that this process has for itself alone. Units: bytes. Source: proc(5), RssAnon."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))

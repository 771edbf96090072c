"""Collect the facts about a run by building it without memory.

The model, its optimizers and one forward pass on torch's meta device.

This runs in a separate process, which trusts the same code as the run's workers would, since it loads the same
configuration.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ddpexp.config.instantiate import instantiate
from ddpexp.config.sampling import training_plan
from ddpexp.config.schema import Experiment
from ddpexp.config.strategies import estimator_of
from ddpexp.data.adapters import MapStyle, sized
from ddpexp.data.base import Subset
from ddpexp.data.batch_plan import BatchPlan
from ddpexp.data.batches import TrainBatches
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
from ddpexp.plan.meta import build_on_meta, first_batch, found_or_error, load_experiment
from ddpexp.plan.rate_curves import curves_of
from ddpexp.strategy.estimator import Facts, Parameter, ParamGroup
from ddpexp.strategy.replica import Models, modules_of
from ddpexp.system.process import anonymous_bytes
from ddpexp.train.build import count_steps, open_data
from ddpexp.train.build_optimizers import build_optimizers
from ddpexp.train.freezing import LateStarts
from ddpexp.train.optimizer_average import HasModes
from ddpexp.train.param_groups import describe, groups_of

_CPU = torch.device("cpu")
_MOST_SAMPLES = 256  # of the batch that activations are measured with: they grow with it


def collect_all(request: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the facts of each run of a request, or why there are none."""
    wanted = request["data"], request["num_samples"], request["curves"]
    return [_result(run, *wanted) for run in request["runs"]]


def _result(
    run: Mapping[str, Any], prepared: Mapping[str, Any] | None, num_samples: int | None, curves: bool
) -> dict[str, Any]:
    """Return the facts about a run, with the learning rates if `curves`, or why there are none."""

    def find() -> dict[str, Any]:
        experiment, layout = load_experiment(run["config"]), Layout(**run["layout"])
        facts, steps, optimizers = collect(experiment, layout, prepared, num_samples)
        lines = curves_of(experiment, optimizers, **steps) if curves else {}
        return {"facts": asdict(facts), "steps": steps, "curves": lines}

    return found_or_error(find)


def collect(
    experiment: Experiment, layout: Layout, prepared: Mapping[str, Any] | None, num_samples: int | None
) -> tuple[Facts, dict[str, int], Mapping[str, Optimizer]]:
    """Return what the run holds, its steps and its optimizers; `num_samples` stands in for the data where given.

    Raises:
        RefusedError: as a run would.
    """
    plan = training_plan(experiment, experiment.strategy.data_rank(0, layout.world_size).size)
    before = anonymous_bytes()
    with_data = num_samples is None
    if num_samples is None:
        splits = open_data(experiment, prepared, World.alone())
    else:
        splits = _placeholder(experiment, num_samples)
    on_device = with_data and _on_device(experiment, splits)
    data_bytes = max(0, anonymous_bytes() - before) if with_data else None
    train, steps_per_epoch, samples_per_epoch = _sized(experiment, splits, plan)
    built = _Built.of(experiment)
    built.notes["data"] = "measured: what each worker has for itself" if with_data else "left out: --num_samples"
    estimator = estimator_of(experiment.strategy)
    of_whole_models, trained = built.facts(), [p for _, p in built.named() if p.requires_grad]
    estimator.divide_models(built.models)
    num_passes = plan.gradient_accumulation_steps
    if with_data:
        size = plan.micro_batch_size
        if isinstance(splits.order, ByTokens):
            size = len(splits.order.largest)
            train = Subset(train, Listed(splits.order.largest), 0, size)
        of_a_pass = _of_a_pass(built, train, size, num_passes)
    else:
        of_a_pass = {"activations_bytes": None, "batch_bytes": None}
        built.notes["activations"] = "left out: --num_samples gives no samples to measure them with"
    sums_bytes, shared_bytes = estimator.reserved_bytes(
        trained, built.buffers(), experiment.trainer, layout, num_passes
    )
    facts = Facts(
        **of_whole_models,
        divided=list(_described(built.named())) if experiment.strategy.divides_layers else [],
        buffers_bytes=_num_bytes(built.buffers()),
        data_bytes=data_bytes,
        device_data_bytes=device_bytes(splits) if on_device else 0,
        num_samples=samples_per_epoch,
        sums_bytes=sums_bytes,
        shared_bytes=shared_bytes,
        **of_a_pass,
        num_passes=num_passes,
        blocks_bytes=estimator.blocks_bytes(built.models, experiment.trainer) if layout.world_size > 1 else [],
        notes=built.notes,
    )
    steps = {"steps_per_epoch": steps_per_epoch, "num_steps": count_steps(experiment.trainer, steps_per_epoch)}
    return facts, steps, built.optimizers


def _sized(experiment: Experiment, splits: Splits, plan: BatchPlan) -> tuple[Any, int, int]:
    """Return the training data, of a stream a few samples, with the steps and the samples of an epoch."""
    trainer = experiment.trainer
    if isinstance(splits.train, Stream):
        steps_per_epoch = trainer.max_steps or 0
        return sized(splits.train, plan.micro_batch_size), steps_per_epoch, steps_per_epoch * trainer.global_batch_size
    batches = TrainBatches(splits.train, plan, 0, trainer.seed, _CPU, order=splits.order)
    return splits.train, batches.steps_per_epoch, batches.samples_per_epoch


@dataclass(frozen=True)
class _Built:
    """The models of a run and their optimizers, without memory where their code works so."""

    experiment: Experiment
    models: Models
    is_single: bool  # one module, not several by name
    device: torch.device
    optimizers: Mapping[str, Optimizer]
    notes: dict[str, str]  # by what they are about

    @classmethod
    def of(cls, experiment: Experiment) -> _Built:
        notes: dict[str, str] = {}
        built, device = build_on_meta(experiment, notes)
        models, is_single = modules_of(built), isinstance(built, nn.Module)
        for name, module in models.items():
            if any(map(is_lazy, [*module.parameters(), *module.buffers()])):
                raise RefusedError(
                    f"{name} has lazy parameters, whose size is known only after the first batch: a plan needs sizes",
                    suggestion="Give its layers their input sizes.",
                )
            module.to(device)
        task = instantiate(experiment.task, experiment.trust, "task")
        parameters = [p for module in models.values() for p in module.parameters()]
        optimizers = build_optimizers(experiment, task, models, is_single, lambda: parameters)
        return cls(experiment, models, is_single, device, optimizers, notes)

    def named(self) -> list[tuple[str, nn.Parameter]]:
        """Return every parameter once, with the model that has it first."""
        named: dict[int, tuple[str, nn.Parameter]] = {}
        for name, module in self.models.items():
            for p in module.parameters():
                named.setdefault(id(p), (name, p))
        return list(named.values())

    def buffers(self) -> list[Tensor]:
        """Return the buffers of all models."""
        return [buffer for module in self.models.values() for buffer in module.buffers()]

    def facts(self) -> dict[str, Any]:
        """Return the facts about whole models and their optimizers, by the fields of `Facts`."""
        return {
            "parameters": list(_described(self.named())),
            "state_bytes": {
                name: _num_bytes(module.state_dict(keep_vars=True).values()) for name, module in self.models.items()
            },
            "optimizer_bytes": self._optimizer_bytes(),
            "groups": list(self._groups()),
            "late_starts": LateStarts.of(self.experiment.trainer, self.models, self.is_single).texts(),
            "averaged_by": next(
                (type(optimizer).__name__ for optimizer in self.optimizers.values() if isinstance(optimizer, HasModes)),
                None,
            ),
        }

    def _groups(self) -> Iterator[ParamGroup]:
        described = list(describe(self.models, self.is_single).values())
        conditions = {group.name: "; ".join(group.conditions) for group in groups_of(self.experiment, described) or ()}
        for optimizer, one in self.optimizers.items():
            for number, group in enumerate(one.param_groups):
                parameters, name = group["params"], str(group.get("name", number))
                yield ParamGroup(
                    optimizer=optimizer,
                    name=name,
                    conditions=conditions.get(name, ""),
                    num_parameters=len(parameters),
                    num_elements=sum(p.numel() for p in parameters),
                    num_trained=sum(p.numel() for p in parameters if p.requires_grad),
                    lr=float(group["lr"]),
                    weight_decay=group.get("weight_decay"),
                )

    def _optimizer_bytes(self) -> int:
        """Have each optimizer take a step, after which its state exists."""
        parameters = [p for _, p in self.named()]
        for p in parameters:
            p.grad = torch.empty_like(p) if p.requires_grad else None
        try:
            for optimizer in self.optimizers.values():
                if isinstance(optimizer, HasModes):
                    optimizer.train()
                optimizer.step()
            states = [state for optimizer in self.optimizers.values() for state in optimizer.state.values()]
            self.notes["optimizer"] = (
                "measured after a step on the meta device" if "model" not in self.notes else "measured after a step"
            )
            return _num_bytes(tensor for state in states for tensor in tensors_of(state))
        except Exception as error:
            self.notes["optimizer"] = (
                "assumed: two numbers for each trained one, because a step was not possible "
                f"({type(error).__name__}: {error})"
            )
            return 2 * _num_bytes(p for p in parameters if p.requires_grad)
        finally:
            for p in parameters:
                p.grad = None


def _described(named: Sequence[tuple[str, nn.Parameter]]) -> Iterator[Parameter]:
    for name, p in named:
        dtype = str(p.dtype).removeprefix("torch.")
        yield Parameter(name, p.numel(), p.numel() * p.element_size(), dtype, p.requires_grad)


def _on_device(experiment: Experiment, splits: Splits) -> bool:
    """Return whether the samples are in the memory of a GPU, if there is one, which `auto` finds out when it runs."""
    wanted = experiment.data.on_device
    return prefer_device(splits) if wanted == "auto" else wanted


def _of_a_pass(built: _Built, train: Any, num_samples: int, num_passes: int) -> dict[str, Any]:
    """Return the facts about a pass, by the fields of `Facts`: its batch, and what is kept for backward."""
    experiment = built.experiment
    samples = min(num_samples, len(train), _MOST_SAMPLES)
    batch = to_device(first_batch(experiment, train, samples), built.device)
    scale = num_samples / samples
    found: dict[str, Any] = {
        "batch_bytes": round(scale * sum(t.numel() * t.element_size() for t in tensors_of(batch))),
        "activations_bytes": None,
    }
    measured = measure(experiment, built.models, built.is_single, batch, built.notes)
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


def _num_bytes(tensors: Iterable[Any]) -> int:
    """Add up the tensors among some values, each once."""
    return sum(t.numel() * t.element_size() for t in {id(t): t for t in tensors if isinstance(t, Tensor)}.values())

"""Find out what a model consists of, and what one pass takes, without memory where its code works so.

This runs in a separate process, as `ddpexp.plan.build` does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.flop_counter import FlopCounterMode

from ddpexp.config.instantiate import instantiate
from ddpexp.config.schema import Experiment
from ddpexp.data.adapters import sized
from ddpexp.data.samples import tensors_of
from ddpexp.distributed.transfers import to_device
from ddpexp.distributed.world import World
from ddpexp.errors import DdpexpError
from ddpexp.plan.activations import measure
from ddpexp.plan.meta import META, build_in_memory, build_on_meta, first_batch, found_or_error, load_experiment
from ddpexp.plan.model_tree import Module, Summary
from ddpexp.strategy.base import num_elements
from ddpexp.strategy.replica import Models, modules_of
from ddpexp.system.oom import bound_memory
from ddpexp.system.text import first_few, message_of
from ddpexp.task import HasTrainStep
from ddpexp.train.build import open_data
from ddpexp.train.losses import losses_of
from ddpexp.train.task_step import CurrentProgress, step_of

_SAMPLES = 2  # BatchNorm refuses one
_UNCALLABLE = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_LINE = 160  # characters of an error


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the summary that a request asks for, or why there is none."""
    if "memory_part" in request:
        bound_memory(request["memory_part"])

    def find() -> dict[str, Any]:
        return summarize(load_experiment(request["config"]), request["data"], request["without_data"]).as_dict()

    return found_or_error(find)


def summarize(experiment: Experiment, prepared: Mapping[str, Any] | None, without_data: str | None = None) -> Summary:
    """Return the summary of the model; `without_data` says why there are no samples for a pass.

    Raises:
        RefusedError: the model is refused, as in a run.
    """
    notes: dict[str, str] = {}
    built, device = build_on_meta(experiment, notes)
    passed: _Pass | None = None
    try:
        if without_data is None:
            built, passed = _first_possible_pass(experiment, built, device, _Batch.of(experiment, prepared), notes)
    except DdpexpError as error:
        without_data = str(error)
    if without_data is not None:
        notes["shapes"] = f"left out, with FLOPs and activations: {without_data}"
    models, is_single = modules_of(built), isinstance(built, nn.Module)
    activations = None
    if passed is not None:
        activations = measure(experiment, models, is_single, passed.batch.values, notes)
        if isinstance(instantiate(experiment.task, experiment.trust, "task"), HasTrainStep):
            notes["FLOPs"] = "of the task's step, which evaluates: its train_step may call the models more often"
    named = [pair for model in models.values() for pair in model.named_parameters(remove_duplicate=False)]
    unsized = [name for name, p in named if is_lazy(p)]
    if unsized:
        notes["parameters"] = f"without those that get a size in the first pass: {first_few(unsized)}"
    parameters = _once(p for _, p in named)
    return Summary(
        modules=list(_modules(models, is_single, passed)),
        trainable=sum(num_elements(p) for p in parameters if p.requires_grad),
        frozen=sum(num_elements(p) for p in parameters if not p.requires_grad),
        shared=sum(num_elements(p) for _, p in named if not is_lazy(p)) - sum(map(num_elements, parameters)),
        parameters_bytes=_num_bytes(parameters),
        buffers_bytes=_num_bytes(_once(buffer for model in models.values() for buffer in model.buffers())),
        samples=None if passed is None else passed.batch.samples,
        forward_flops=None if passed is None else passed.forward // passed.batch.samples,
        backward_flops=None if passed is None else passed.backward // passed.batch.samples,
        activations_bytes=(
            None if passed is None or activations is None else sum(activations.of_stages) // passed.batch.samples
        ),
        notes=notes,
    )


@dataclass(frozen=True)
class _Batch:
    """The first samples of the training data."""

    values: Any
    samples: int

    @classmethod
    def of(cls, experiment: Experiment, prepared: Mapping[str, Any] | None) -> _Batch:
        """Read them. Raises: DdpexpError, if that is not possible."""
        train = sized(open_data(experiment, prepared, World.alone()).train, _SAMPLES)
        samples = min(_SAMPLES, len(train))
        return cls(first_batch(experiment, train, samples), samples)

    def on(self, device: torch.device) -> _Batch:
        """Return a copy on a device."""
        return _Batch(to_device(self.values, device), self.samples)


@dataclass
class _Calls:
    """The calls of a module in a forward pass."""

    number: int = 0
    shapes: list[list[int]] = field(default_factory=list)
    flops: int = 0
    before: int = 0  # the FLOPs of the pass when the last call began


@dataclass(frozen=True)
class _Pass:
    """A forward and backward pass of a batch. Units: FLOPs."""

    calls: Mapping[nn.Module, _Calls]
    forward: int
    backward: int
    batch: _Batch


def _first_possible_pass(
    experiment: Experiment, built: Any, device: torch.device, batch: _Batch, notes: dict[str, str]
) -> tuple[Any, _Pass | None]:
    """Take a pass without memory, else one in memory; return the model that took it, which may be another one."""
    try:
        return built, _pass(experiment, built, batch.on(device))
    except Exception as error:  # whatever the user's code raises
        why = _described(error)
    if device == META:
        try:
            in_memory = build_in_memory(experiment)
            passed = _pass(experiment, in_memory, batch)
            notes["shapes"] = f"of a pass in memory, because one on torch's meta device is not possible ({why})"
            return in_memory, passed
        except Exception as error:
            why = _described(error)
    notes["shapes"] = f"left out, with FLOPs and activations: a forward and backward pass is not possible ({why})"
    return built, None


def _described(error: Exception) -> str:
    """Return a line for an error: those of torch's operators may be long."""
    return shorten(f"{type(error).__name__}: {message_of(error)}", _LINE, placeholder=" ...")


def _pass(experiment: Experiment, built: Any, batch: _Batch) -> _Pass:
    """Take a forward and backward pass of the task's `step` in training mode."""
    task = instantiate(experiment.task, experiment.trust, "task")
    calls: dict[nn.Module, _Calls] = defaultdict(_Calls)
    counter = FlopCounterMode(display=False)

    def enter(module: nn.Module, _arguments: Any) -> None:
        calls[module].before = counter.get_total_flops()

    def leave(module: nn.Module, _arguments: Any, output: Any) -> None:
        call = calls[module]
        if not call.number:
            call.shapes = [list(tensor.shape) for tensor in tensors_of(output)]
        call.number += 1
        call.flops += counter.get_total_flops() - call.before

    models = modules_of(built)
    modules = {module for model in models.values() for module in model.train().modules()}
    hooks = [module.register_forward_pre_hook(enter) for module in modules]
    hooks += [module.register_forward_hook(leave) for module in modules]
    with counter:
        try:
            sums: Any = step_of(task, CurrentProgress())(
                built if isinstance(built, nn.Module) else models, batch.values
            )
        finally:
            for hook in hooks:  # a module that is computed again in backward is not called again
                hook.remove()
        forward = counter.get_total_flops()
        losses = [loss for loss, _ in losses_of(sums).values() if loss.requires_grad]
        if losses:
            reduce(add, losses).backward()  # type: ignore[no-untyped-call]
        backward = counter.get_total_flops() - forward
    return _Pass(calls, forward, backward, batch)


def _modules(models: Models, is_single: bool, passed: _Pass | None) -> Iterator[Module]:
    """Yield the modules from the top; those below a module that stands above already are left out."""
    first: dict[nn.Module, str] = {}
    owners: dict[int, str] = {}
    named = [
        (".".join(filter(None, ["" if is_single else model_name, name])), module)
        for model_name, model in models.items()
        for name, module in model.named_modules(remove_duplicate=False)
    ]
    for path, module in named:
        for p in module.parameters(recurse=False):
            owners.setdefault(id(p), path)
    repeated: list[str] = []
    for path, module in named:
        if any(_is_below(path, above) for above in repeated):
            continue
        same_as = first.setdefault(module, path)
        repeated += [path] * (same_as != path)
        parameters = _once(module.parameters())
        shared = [p for p in parameters if owners[id(p)] != path and not _is_below(owners[id(p)], path)]
        call = None
        if passed is not None and same_as == path:
            call = passed.calls.get(module, None if isinstance(module, _UNCALLABLE) else _Calls())
        yield Module(
            path=path,
            kind=type(module).__name__,
            depth=path.count(".") + (1 if is_single and path else 0),
            trainable=sum(num_elements(p) for p in parameters if p.requires_grad),
            frozen=sum(num_elements(p) for p in parameters if not p.requires_grad),
            shared=sum(num_elements(p) for p in shared),
            shared_with=list(dict.fromkeys(owners[id(p)] for p in shared)),
            same_as=same_as if same_as != path else None,
            calls=None if call is None else call.number,
            shapes=None if call is None else call.shapes,
            flops=None if passed is None or call is None else call.flops // passed.batch.samples,
        )


def _is_below(path: str, above: str) -> bool:
    return path.startswith(f"{above}." if above else "") and path != above


def _once(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the tensors that have a size, each once."""
    return list({id(tensor): tensor for tensor in tensors if not is_lazy(tensor)}.values())


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(num_elements(tensor) * tensor.element_size() for tensor in tensors)

"""The forward and backward passes of a stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ddpexp.distributed.rng import MODEL, seed_of, seeder
from ddpexp.errors import DdpexpError
from ddpexp.strategy.pipeline.groups import Groups
from ddpexp.strategy.pipeline.links import kind_of_batch
from ddpexp.strategy.pipeline.schedule import Pass
from ddpexp.strategy.pipeline.stages import Division
from ddpexp.task import MicroBatch, OptimizerStep, Sums


class _Sent(BaseException):
    """Ends a task's step on a stage that has no output to compute a loss from; a task may catch any `Exception`."""


@dataclass
class _InProgress:
    """A micro-batch that is between its forward and its backward pass on this stage."""

    received: Tensor | None  # the activations of the stage before
    output: Tensor | None = None  # of this stage; None on the last one
    sums: Sums | None = None  # on the last stage


class Passes:
    """Runs the passes of this worker's stages, and passes activations and gradients on."""

    def __init__(self, module: nn.Module, division: Division, groups: Groups) -> None:
        """Compute the layers of this rank's stages."""
        self._groups, self._links = groups, groups.links
        self._stages = division.pipe.stages_of(groups.place)
        self.model = StageModel(module, division, groups.links.device)
        self._names: dict[str, Any] | None = None  # what the task returns: see `_description`
        self._anchor = torch.zeros((), requires_grad=True, device=groups.links.device)

    def run(self, step: OptimizerStep, passes: Sequence[Pass], micro_batches: Sequence[Any]) -> list[Sums]:
        """Do the passes of a step; return the task's sums of each micro-batch, on other workers than the last zeros.

        Ranks: all; communicates.
        """
        begun: dict[tuple[int, int], _InProgress] = {}
        contexts = [step.micro_batch(last=number == len(micro_batches)) for number in range(1, len(micro_batches) + 1)]
        sums: list[Sums] = []
        for one in passes:
            number = one.micro_batch
            micro_batch = contexts[number]
            if one.forward:
                with micro_batch if one.stage == self._stages[0] else micro_batch.forward_pass():
                    begun[number, one.stage] = self._forward(micro_batch, one.stage, micro_batches[number])
            else:
                with micro_batch.backward_pass():
                    found = self._backward(micro_batch, one.stage, begun.pop((number, one.stage)))
                sums += [] if found is None else [found]
        self._links.finish()
        return sums

    def _forward(self, micro_batch: MicroBatch, stage: int, batch: Any) -> _InProgress:
        """Compute a stage's layers for a micro-batch; send the result to the next stage."""
        kind = kind_of_batch(batch)
        received = None if stage == 0 else self._links.receive(stage, kind)
        self.model.begin(stage, received)
        try:
            sums = micro_batch.forward(batch)
        except _Sent:
            output = self.model.output
            assert output is not None
            self._links.send(stage, kind, output)
            return _InProgress(received, output)
        if self.model.output is None:
            raise DdpexpError(
                "the task's step returned without calling the model, and strategy=pipeline passes batches "
                "from stage to stage where it does",
                suggestion="Call model(...) once, or use strategy=ddp.",
            )
        return _InProgress(received, sums=sums)

    def _backward(self, micro_batch: MicroBatch, stage: int, begun: _InProgress) -> Sums | None:
        """Compute the gradients of a micro-batch; send that of what was received to the stage before.

        Returns the sums of the micro-batch after the last of this worker's stages, which comes first.
        """
        sums = None
        if begun.sums is not None:
            sums = begun.sums
            self._note_names(sums)
            micro_batch.backward(sums[0], sums[1])
        else:
            assert begun.output is not None
            if stage == self._stages[-1]:
                self._note_names(None)
                sums = self._zeros()
            gradient = self._links.receive_gradient(begun.output) if begun.output.requires_grad else None
            if sums is not None:
                loss = _Given.apply(begun.output, self._anchor, gradient)  # type: ignore[no-untyped-call]
                micro_batch.backward(loss, sums[1])
            elif gradient is not None:
                torch.autograd.backward(begun.output, gradient)
        if begun.received is not None and begun.received.requires_grad:
            gradient = begun.received.grad
            self._links.send_gradient(torch.zeros_like(begun.received) if gradient is None else gradient)
        if sums is None:
            return None
        loss, count, metrics = sums
        return loss.detach(), count, metrics

    def _note_names(self, sums: Sums | None) -> None:
        """Tell the other workers of the pipe what the task returns. Ranks: all; communicates the first time.

        Raises:
            DdpexpError: it is something else than before.
        """
        names = None if sums is None else _description(sums)
        if self._names is None:
            self._names = self._groups.pipe.gather_values(names)[-1]
        elif names is not None and self._names["metrics"].keys() != names["metrics"].keys():
            raise DdpexpError(
                f"the task's step returned the metrics {', '.join(names['metrics']) or 'none'}, and "
                f"{', '.join(self._names['metrics']) or 'none'} before",
                suggestion="Return the same in every step.",
            )

    def _zeros(self) -> Sums:
        """Return what the task returns on the last stage, with sums of zero, which are not counted."""
        assert self._names is not None
        zero = torch.zeros((), device=self._links.device)
        count = self._names["count"]
        return zero, zero if count is None else count, dict.fromkeys(self._names["metrics"], (zero, 0))


class StageModel:
    """What a task calls as its model in training: the layers of this stage."""

    def __init__(self, module: nn.Module, division: Division, device: torch.device) -> None:
        """Stand for the module."""
        self._module = module
        self._division = division
        self._device = device
        self._stage = 0  # in progress
        self._received: Tensor | None = None
        self.output: Tensor | None = None  # of the micro-batch in progress, once it is computed

    def begin(self, stage: int, received: Tensor | None) -> None:
        """Begin a micro-batch in a stage, with what the stage before has sent."""
        self._stage = stage
        self._received = received
        self.output = None

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the module."""
        return getattr(self._module, name)

    def __call__(self, x: Any, /, *arguments: Any, **named: Any) -> Tensor:
        """Compute this stage's layers; on stages before the last one the task's step ends here.

        Random numbers are others on each stage, and those of the whole model on the first.

        Raises:
            DdpexpError: the task calls the model twice, or a layer returns something else than a tensor.
        """
        if self.output is not None:
            raise DdpexpError(
                "the task's step calls the model twice in a micro-batch, and strategy=pipeline passes each "
                "micro-batch through its stages once",
                suggestion="Call it once, or use strategy=ddp.",
            )
        if self._received is not None:
            x = self._received
            seeder(self._device)(seed_of(torch.initial_seed(), MODEL, self._stage, 0))
        output = self._division.forward(self._division.of_stage(self._stage), x, *arguments, **named)
        self.output = output = tensor_of(self._stage, output)
        if self._stage < self._division.pipe.num_stages - 1:
            raise _Sent
        return output


def tensor_of(stage: int, output: Any) -> Tensor:
    """Return what a stage has returned. Raises: DdpexpError, if it is no tensor."""
    if not isinstance(output, Tensor):
        raise DdpexpError(
            f"stage {stage} of the pipeline returned a {type(output).__name__}, and stages pass on one tensor",
            suggestion="Let strategy.split_before name another layer.",
        )
    return output


class _Given(torch.autograd.Function):
    """Stands for the loss on stages that do not have it: its backward pass begins with a gradient that was received."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, anchor: Tensor, gradient: Tensor | None) -> Tensor:
        """Return 0, which requires a gradient as `anchor` does."""
        ctx.gradient = gradient
        return torch.zeros_like(anchor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, None, None]:
        """Return the gradient of the output."""
        return ctx.gradient, None, None


def _description(sums: Sums) -> dict[str, Any]:
    """Return what the other stages must know of the task's sums: a count that is a number, and the metrics."""
    _, count, metrics = sums
    return {"count": None if isinstance(count, Tensor) else count, "metrics": dict.fromkeys(metrics, 0)}

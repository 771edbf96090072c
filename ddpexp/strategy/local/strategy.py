"""Local SGD and DiLoCo: ranks train on their own for a round of steps, and then average their weights.

Source: Stich, "Local SGD converges fast and communicates little", 2019; Lin et al., "Don't use large mini-batches, use
local SGD", 2020 (steps with averaged gradients first); Douillard et al., "DiLoCo: distributed low-communication
training of language models", 2023.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddpexp.distributed.world import World
from ddpexp.settings.trainer import Trainer
from ddpexp.strategy.local.options import DiLoCoOptions, LocalOptions
from ddpexp.strategy.options import Compilation
from ddpexp.strategy.replica import Gradients, Models, Replicas
from ddpexp.task import OptimizerStep, Sums

_LARGE_BYTES = 1 << 20  # of a tensor that is worth a message of its own


def build(
    options: LocalOptions,
    world: World,
    factory: Callable[[], Any],
    *,
    trainer: Trainer,
    gradient_accumulation_steps: int,
    prepare: Callable[[Any], None],
) -> LocalSGD:
    """Build the replicas and, for DiLoCo, the outer optimizer."""
    common: dict[str, Any] = {
        "channels_last": trainer.channels_last, "compilation": Compilation.of(trainer), "prepare": prepare,
    }  # fmt: skip
    if isinstance(options, DiLoCoOptions):
        return DiLoCo(options, world, factory, **common)
    return LocalSGD(options, world, factory, **common)


class LocalSGD(Replicas):
    """One replica on this rank, whose weights are its own until they are averaged at the end of a round."""

    def __init__(
        self,
        options: LocalOptions,
        world: World,
        factory: Callable[[], nn.Module | Mapping[str, nn.Module]],
        *,
        channels_last: bool = False,
        compilation: Compilation | None = None,
        prepare: Callable[[Models], None] = lambda models: None,
    ) -> None:
        """Build the model on this rank's device. Ranks: all; broadcasts rank zero's weights."""
        super().__init__(world, factory, channels_last=channels_last, compilation=compilation, prepare=prepare)
        self._options, self._world = options, world
        self.gradient_weight = float(world.world_size)  # the loss is that of this rank's share of the global batch
        self.share_initial_weights(world)
        trained = {
            name: {f"{name}.{key}": p for key, p in module.named_parameters() if p.requires_grad}
            for name, module in self.modules.items()
        }
        self._trained = {key: p for parameters in trained.values() for key, p in parameters.items()}
        self._gradients = [Gradients(parameters) for parameters in trained.values() if parameters]
        self._optimizers: Mapping[str, Optimizer] = {}
        self._sums_gradients = False  # in the step in progress

    def build_optimizers(self, build: Callable[[Any], Mapping[str, Optimizer]]) -> Mapping[str, Optimizer]:
        """Return the optimizers that `build(model)` makes; each rank has a state of its own."""
        self._optimizers = super().build_optimizers(build)
        return self._optimizers

    def train_step(self, step: OptimizerStep, micro_batches: Sequence[Any]) -> list[Sums]:
        """Do a step with the gradient of this rank's micro-batches; at the end of a round average the weights.

        Ranks: all; communicates in the first `strategy.warmup_steps` steps, and at the end of a round.
        """
        self._begin_step(step.step)
        self._sums_gradients = step.step < self._options.warmup_steps
        sums = super().train_step(step, micro_batches)
        local_steps = step.step + 1 - self._options.warmup_steps
        if local_steps > 0 and local_steps % self._options.sync_every == 0:
            self._end_round()
        return sums

    def _begin_step(self, step: int) -> None:
        """Prepare for a step. Units: steps, from 0."""

    def _end_round(self) -> None:
        """Average weights and buffers. Ranks: all; communicates."""
        average(self._model_tensors().values(), self._world)

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Return a context for forward and backward of one micro-batch."""
        yield
        for gradients in self._gradients:
            gradients.check(last)
        if last and self._sums_gradients:
            self.reduce_gradients()

    def reduce_gradients(self) -> None:
        """Average the gradients of all ranks. Ranks: all; communicates."""
        average(self.gradient_values(self._trained.values()), self._world)

    def on_any_rank(self, flag: Tensor) -> Tensor:
        """Return the largest value of a flag on the ranks; NaN if one is. Ranks: all; communicates."""
        flags = flag.new_zeros(self._world.world_size)
        flags[self._world.rank] = flag
        return self._world.sum(flags).max()

    def gradient_norm(self, parameters: Sequence[Tensor]) -> Tensor:
        """Return the largest 2-norm of the gradient on a rank. Ranks: all, with the same result; communicates."""
        return self.on_any_rank(super().gradient_norm(parameters))

    def clip(self, parameters: Sequence[Tensor], limit: float) -> Tensor:
        """Clip the norm of this rank's gradient; return it as it was before."""
        return self._clip(parameters, super().gradient_norm(parameters), limit)

    def norm_to_record(self, norm: Tensor) -> Tensor:
        """Return the largest norm of a rank. Ranks: all; communicates."""
        return self.on_any_rank(norm)

    @contextmanager
    def evaluation(self) -> Iterator[Any]:
        """Yield `eval_model` in evaluation mode, with the mean of the ranks' weights. Ranks: all; communicates."""
        with self._averaged(self._model_tensors()):
            self.train(False)
            try:
                yield self.eval_model
            finally:
                self.train(True)

    @contextmanager
    def synced_buffers(self) -> Iterator[None]:
        """Give every rank the mean of weights, buffers and optimizer states inside the block.

        Ranks: all; communicates.
        """
        with self._averaged({**self._model_tensors(), **self._state_tensors()}):
            yield

    def local_buffers(self) -> Mapping[str, Tensor]:
        """Return all tensors of the models and of the optimizers that may differ between ranks, by name."""
        if self._world.world_size == 1:
            return {}
        return {**self._model_tensors(), **self._state_tensors()}

    @contextmanager
    def _averaged(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Replace tensors by their means over the ranks inside the block. Ranks: all; communicates."""
        if self._world.world_size == 1:
            yield
            return
        local = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        average(tensors.values(), self._world)
        try:
            yield
        finally:
            with torch.no_grad():
                for name, saved in local.items():
                    tensors[name].copy_(saved)

    def _model_tensors(self) -> dict[str, Tensor]:
        """Return the trained parameters and the buffers, by name."""
        buffers = {f"{name}.{key}": b for name, module in self.modules.items() for key, b in module.named_buffers()}
        return {**self._trained, **buffers}

    def _state_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the optimizers' states, by the names of optimizer, parameter and state."""
        names: dict[Tensor, str] = {parameter: name for name, parameter in self._trained.items()}
        return {
            f"{optimizer_name}:{names[parameter]}:{key}": value
            for optimizer_name, optimizer in self._optimizers.items()
            for parameter, state in optimizer.state.items()
            for key, value in state.items()
            if parameter in names and isinstance(value, Tensor)
        }


class DiLoCo(LocalSGD):
    """Local SGD whose rounds are the steps of an outer optimizer: SGD with Nesterov's momentum."""

    _options: DiLoCoOptions

    def __init__(self, options: DiLoCoOptions, *arguments: Any, **named: Any) -> None:
        """Build the model on this rank's device. Ranks: all; broadcasts rank zero's weights."""
        super().__init__(options, *arguments, **named)
        self._last_round: dict[str, Tensor] = {}  # the weights at its end; empty until they are needed
        self._momentum: dict[str, Tensor] = {}

    def local_buffers(self) -> Mapping[str, Tensor]:
        """Return what may differ between ranks, and the state of the outer optimizer, by name."""
        self._build_outer_state()
        outer = {f"{name}:{key}": state[key] for key in self._trained for name, state in self._outer_state.items()}
        return {**super().local_buffers(), **outer}

    @property
    def _outer_state(self) -> dict[str, dict[str, Tensor]]:
        return {"last_round": self._last_round, "outer_momentum": self._momentum}

    def _build_outer_state(self) -> None:
        if not self._last_round:
            self._last_round = {name: parameter.detach().clone() for name, parameter in self._trained.items()}
            self._momentum = {name: torch.zeros_like(weights) for name, weights in self._last_round.items()}

    def _begin_step(self, step: int) -> None:
        if step == self._options.warmup_steps:
            self._last_round = {}  # the rounds begin with the weights of now
        self._build_outer_state()

    @torch.no_grad()
    def _end_round(self) -> None:
        super()._end_round()
        for name, parameter in self._trained.items():
            outer_gradient = self._last_round[name] - parameter
            momentum = self._momentum[name].mul_(self._options.outer_momentum).add_(outer_gradient)
            outer_gradient.add_(momentum, alpha=self._options.outer_momentum)
            self._last_round[name].sub_(outer_gradient, alpha=self._options.outer_lr)
            parameter.copy_(self._last_round[name])


@torch.no_grad()
def average(tensors: Iterable[Tensor], world: World) -> None:
    """Replace tensors by their means over the ranks, which are computed in fp32 or fp64; others by rank zero's.

    Ranks: all, with tensors of the same shapes; communicates.
    """
    if world.world_size == 1:
        return
    groups: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if not _has_mean(tensor):
            tensor.copy_(world.broadcast(tensor.detach().to(world.device)))
            continue
        values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        wide = torch.promote_types(values.dtype, torch.float32)
        if values.numel() * values.element_size() >= _LARGE_BYTES and values.is_contiguous() and wide == values.dtype:
            world.sum(values.detach().view(-1)).div_(world.world_size)
        else:
            groups.setdefault(wide, []).append(values)
    for wide, group in groups.items():
        flat = torch.cat([values.detach().reshape(-1).to(wide).to(world.device) for values in group])
        world.sum(flat).div_(world.world_size)
        for values, mean in zip(group, torch.split(flat, [values.numel() for values in group]), strict=True):
            values.copy_(mean.view_as(values))


def _has_mean(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()

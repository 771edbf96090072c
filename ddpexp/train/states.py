"""The state of a run: named parts, which checkpoints save and restore one after the other.

A name is the place in the checkpoint: `progress/window` is the key `window` of the part `progress`. What begins with
`rank/` is saved by each rank for itself; everything else is the same on all ranks, or shards of it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from ddpexp.checkpoint.format import Checkpoint
from ddpexp.checkpoint.layout import lay_out
from ddpexp.checkpoint.reader import copy_into, open_model, read_all, read_rank_state
from ddpexp.data.streams import StreamBatches
from ddpexp.distributed.rng import HostRandom
from ddpexp.distributed.world import World
from ddpexp.errors import DdpexpError, RefusedError
from ddpexp.strategy.base import Shard, Strategy
from ddpexp.train.average import WeightAverage, assign
from ddpexp.train.callbacks.hooks import Callbacks
from ddpexp.train.progress import TrainingProgress

OWN = "rank/"
"""How the names of states begin that each rank has for itself."""
_MODEL_NAME = re.compile(r"[\w-]+")


class Stateful(Protocol):
    """A part of a run whose state checkpoints hold."""

    def state(self) -> Any:
        """Return plain values and tensors, or the shards of tensors. Ranks: all; may communicate."""
        ...

    def restore(self, saved: Any) -> None:
        """Restore what `state` returned; of a name below `rank/` all ranks' states (`RankStates`). Ranks: all.

        Raises:
            RefusedError: it does not fit this run; its place, if any, is a part of the checkpoint.
        """
        ...


States = Mapping[str, Stateful]


class Saves(Protocol):
    """What saves the states of a run: `ddpexp.train.checkpointer.Checkpointer`."""

    def save(self, states: States, progress: TrainingProgress, epoch: float, end: bool) -> str | None:
        """Save the states after a step; at the `end` of the run return the hash of the weights. Ranks: all."""
        ...

    def check(self) -> None:
        """Re-raise an error of a write in the background, if there was one. Ranks: any."""
        ...

    def finish(self) -> None:
        """Wait until the last checkpoint is complete. Ranks: all."""
        ...

    def best_weights(self, states: States, step: int) -> AbstractContextManager[int]:
        """Give the models the weights of the best checkpoint inside the block; yield its step. Ranks: all."""
        ...


@dataclass(frozen=True)
class RankStates:
    """The states that the ranks of a checkpoint have saved under a name below `rank/`, read when they are asked for."""

    checkpoint: Checkpoint
    name: str
    size: int  # number of ranks
    read: Callable[[Checkpoint, int], Any] = read_rank_state

    def __getitem__(self, rank: int) -> Any:
        """Return the state of a rank; empty if it saved none."""
        return (self.read(self.checkpoint, rank) or {}).get(self.name) or {}

    def __iter__(self) -> Iterator[Any]:
        return (self[rank] for rank in range(self.size))

    def mine(self, world: World) -> Any:
        """Return this rank's state, which fits only the same number of ranks: else it is empty."""
        return self[world.rank] if self.size == world.world_size else {}


@dataclass(frozen=True)
class ModelStates:
    """The tensors of the models, and of the average of their weights, in a file each."""

    strategy: Strategy
    average: WeightAverage | None
    world: World

    def state(self) -> dict[str, dict[str, Shard]]:
        """Return what this rank writes into each file, without its ending."""
        models = {name: module.state_dict() for name, module in self.strategy.modules.items()}
        files = {name: _to_save(self.strategy, name, values) for name, values in models.items()}
        if self.average is not None:
            files |= {f"{name}.ema": _to_save(self.strategy, name, self.average.tensors(name)) for name in models}
        return files

    def restore(self, saved: Checkpoint) -> None:
        """Read this rank's share; an average that the checkpoint lacks starts from the weights."""
        for name, module in self.strategy.modules.items():
            held = _shards(self.strategy, name, module.state_dict())
            copy_into(held, open_model(saved, name) or {}, f"{name}.safetensors")
            if self.average is None:
                continue
            averaged = open_model(saved, name, average=True)
            if averaged is None:
                self.average.reset()
                if self.world.is_rank_zero:
                    _warn(saved, "holds no average of the weights: it starts from the weights")
                continue
            held = _shards(self.strategy, name, self.average.tensors(name))
            copy_into(held, averaged, f"{name}.ema.safetensors")

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Put the weights, and their average, back at the end of the block. Units: their bytes, on the CPU."""
        tensors = [shard.tensor for shard in self._held()]
        before = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
        try:
            yield
        finally:
            assign(tensors, before)

    def _held(self) -> Iterator[Shard]:
        for name, module in self.strategy.modules.items():
            yield from _shards(self.strategy, name, module.state_dict()).values()
            if self.average is not None:
                yield from _shards(self.strategy, name, self.average.tensors(name)).values()


@dataclass(frozen=True)
class ModuleStates:
    """What `state_dict` leaves out of the models' files: non-persistent buffers, and extra states."""

    strategy: Strategy

    def state(self) -> dict[str, Any]:
        """Return them by model and kind, but for empty ones."""
        found = {}
        for name, module in self.strategy.modules.items():
            values = module.state_dict()
            extra = {key: value for key, value in values.items() if not isinstance(value, Tensor)}
            found[name] = _non_empty({"buffers": _non_persistent_buffers(module, values), "extra": extra})
        return _non_empty(found)

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Copy the buffers, and load the extra states."""
        for name, module in self.strategy.modules.items():
            state = read_all(saved.get(name) or {})
            copy_into(
                _wholes(_non_persistent_buffers(module, module.state_dict())), state.get("buffers") or {}, "buffers"
            )
            if extra := state.get("extra"):
                module.load_state_dict({**module.state_dict(), **extra})


@dataclass(frozen=True)
class AverageCount:
    """How many values the average of the weights is the mean of."""

    average: WeightAverage | None

    def state(self) -> int:
        """Return the number; 0 without an average."""
        return self.average.count if self.average is not None else 0

    def restore(self, saved: int) -> None:
        """Set the number."""
        if self.average is not None:
            self.average.count = saved


@dataclass(frozen=True)
class RandomNumbers:
    """The generators of numpy and Python of each rank."""

    random: HostRandom
    world: World

    def state(self) -> Mapping[str, Tensor]:
        """Return the states that have changed."""
        return self.random.state()

    def restore(self, saved: RankStates) -> None:
        """Restore this rank's, if the number of ranks is the same."""
        self.random.restore(saved.mine(self.world))


@dataclass(frozen=True)
class LocalBuffers:
    """The buffers that each rank has for itself with a strategy."""

    strategy: Strategy
    world: World

    def state(self) -> Mapping[str, Tensor]:
        """Return copies: what follows may change the buffers."""
        return {name: tensor.detach().clone() for name, tensor in self.strategy.local_buffers().items()}

    def restore(self, saved: RankStates) -> None:
        """Copy this rank's, if the number of ranks and the buffers are the same."""
        if saved.size != self.world.world_size:
            return
        buffers, own = self.strategy.local_buffers(), saved.mine(self.world)
        if buffers.keys() == own.keys():
            copy_into(_wholes(buffers), own, f"rank {self.world.rank}'s buffers")
        elif self.world.is_rank_zero:
            _warn(
                saved.checkpoint,
                "was saved with a strategy with which workers have other buffers of their own: all start with what "
                "they had in common there",
            )


@dataclass(frozen=True)
class CallbackStates:
    """The states of the callbacks: rank zero's, which every rank restores."""

    callbacks: Callbacks
    world: World

    def state(self) -> Mapping[str, Any]:
        """Return rank zero's; nothing on the others."""
        return self.callbacks.state() if self.world.is_rank_zero else {}

    def restore(self, saved: RankStates) -> None:
        """Restore rank zero's."""
        if not self.callbacks.members:
            return
        missing = self.callbacks.restore(saved[0])
        if missing and self.world.is_rank_zero:
            _warn(saved.checkpoint, f"holds no state of callbacks.{', callbacks.'.join(missing)}, which starts afresh")


@dataclass(frozen=True)
class StreamPositions:
    """The positions of the shards of a stream; of several ranks that share them, one has them."""

    stream: StreamBatches
    strategy: Strategy

    def state(self) -> Mapping[str, Any]:
        """Return the positions of this rank's shards."""
        return self.stream.state() if self.strategy.data.reports else {}

    def restore(self, saved: RankStates) -> None:
        """Continue where the ranks were, perhaps another number of them."""
        self.stream.restore(saved)


def check_models(strategy: Strategy) -> None:
    """Check at the start that a checkpoint can hold the models, not hours later.

    Raises:
        RefusedError: a model's name cannot be a file name, or a tensor has a type that safetensors does not support.
    """
    for name, module in strategy.modules.items():
        if not _MODEL_NAME.fullmatch(name):
            raise RefusedError(
                f"the model section builds a model named {name!r}, but a checkpoint needs a name for its file",
                suggestion="Name the model with letters, digits, - and _.",
            )
        try:
            tensors = {key: tensor for key, tensor in _tensors(module.state_dict()).items() if not is_lazy(tensor)}
            lay_out(name, {key: strategy.shard(f"{name}.{key}", tensor) for key, tensor in tensors.items()})
        except DdpexpError as error:
            raise RefusedError(f"the model cannot be saved: {error}") from None


def _shards(strategy: Strategy, model: str, values: Mapping[str, Any]) -> dict[str, Shard]:
    """Return what this rank holds of the tensors of a model."""
    return {name: strategy.shard(f"{model}.{name}", tensor) for name, tensor in _tensors(values).items()}


def _to_save(strategy: Strategy, model: str, values: Mapping[str, Any]) -> dict[str, Shard]:
    """Return what this rank writes of the tensors of a model; of a tied one the same. Ranks: all; may communicate."""
    written: dict[Any, Shard] = {}
    shards = {}
    for name, tensor in _tensors(values).items():
        shard = strategy.shard(f"{model}.{name}", tensor)
        if not shard.is_contiguous:
            key = (shard.tensor.data_ptr(), shard.tensor.shape, shard.tensor.stride(), shard.tensor.dtype)
            if key not in written:
                written[key] = strategy.shard_to_save(f"{model}.{name}", tensor)
            shard = written[key]
        shards[name] = shard
    return shards


def _wholes(tensors: Mapping[str, Tensor]) -> dict[str, Shard]:
    return {name: Shard.whole(tensor) for name, tensor in tensors.items()}


def _non_empty(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in tree.items() if value}


def _tensors(values: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def _non_persistent_buffers(module: torch.nn.Module, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the buffers of a module that its `state_dict` leaves out."""
    return {name: buffer for name, buffer in module.named_buffers() if name not in state}


def _warn(checkpoint: Checkpoint, text: str) -> None:
    logging.getLogger("ddpexp").warning("the checkpoint of step %s %s", checkpoint.step, text)

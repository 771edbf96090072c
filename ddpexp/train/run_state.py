"""The state of a run in its checkpoints, and resuming from one of them."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from ddpexp.checkpoint.format import CONFIG, Checkpoint
from ddpexp.checkpoint.layout import lay_out
from ddpexp.checkpoint.reader import copy_into, open_model, open_part, read_part, read_rank_state, weights_sha256
from ddpexp.checkpoint.writer import Content, Writer
from ddpexp.data.streams import StreamBatches
from ddpexp.distributed.rng import HostRandom
from ddpexp.distributed.world import World
from ddpexp.errors import DdpexpError, RefusedError
from ddpexp.loggers.base import Logger, Truncatable
from ddpexp.run.directory import RunDir
from ddpexp.run.lost_files import removed_records
from ddpexp.settings.trainer import Trainer
from ddpexp.strategy.base import Shard, Strategy
from ddpexp.system.secrets import masked_tree
from ddpexp.train.average import WeightAverage
from ddpexp.train.callbacks.hooks import Callbacks
from ddpexp.train.loop import Loop
from ddpexp.train.state import TrainState

_MODEL_NAME = re.compile(r"[\w-]+")
_PART_BYTES = 16 << 20  # of a sharded tensor on rank zero while the weights are hashed


@dataclass
class RunState:
    """Everything a checkpoint holds, collected when the loop saves."""

    writer: Writer
    strategy: Strategy
    average: WeightAverage | None
    random: HostRandom
    logger: Logger
    world: World
    run: Path
    resumed_from: int | None = None  # the step that this start resumed from
    inputs: Mapping[str, Any] = field(default_factory=dict)  # identifies the configuration, code and data of this start
    recorded: Mapping[str, Any] = field(default_factory=dict)  # positions of loggers, as the checkpoint stores them
    callbacks: Callbacks = field(default_factory=Callbacks)
    config: bytes | None = None  # config.yaml as this start read it
    stream: StreamBatches | None = None  # what this rank trains on, if that is a stream

    @classmethod
    def from_config(
        cls, run: RunDir, trainer: Trainer, strategy: Strategy, average: WeightAverage | None, logger: Logger,
        world: World,
    ) -> RunState:  # fmt: skip
        """Build the state and its writer from the trainer's configuration.

        Raises:
            RefusedError: a checkpoint cannot hold the models.
        """
        _check_models(strategy)
        writer = Writer(
            run.checkpoints,
            world,
            keep_last=trainer.keep_last,
            keep_best=trainer.keep_best,
            keep_best_k=trainer.keep_best_k,
            keep_every=trainer.keep_every,
            stops=trainer.on_save_error == "stop",
        )
        random = HostRandom(trainer.seed, world.rank)
        return cls(writer, strategy, average, random, logger, world, run.path, config=run.config.read_bytes())

    def save(
        self, state: TrainState, optimizers: Mapping[str, Any], precision: Mapping[str, Any], epoch: float, end: bool
    ) -> str | None:
        """Save the run; see `ddpexp.train.state.Checkpointer`."""
        callbacks = self.callbacks.state() if self.world.is_rank_zero else {}
        buffers = _cloned(self.strategy.local_buffers())
        local = _non_empty({
            "random": self.random.state(), "buffers": buffers, "callbacks": callbacks, "stream": self.stream_state(),
        })  # fmt: skip
        with self.strategy.synced_buffers():
            digest = self._weights_sha256() if end else None
            if state.step == self.resumed_from:  # this checkpoint exists already
                return digest
            states = {name: module.state_dict() for name, module in self.strategy.modules.items()}
            models: dict[str, Any] = {name: _to_save(self.strategy, name, values) for name, values in states.items()}
            non_persistent = {
                name: _non_persistent_buffers(module, models[name]) for name, module in self.strategy.modules.items()
            }
            modules = {
                name: _non_empty({"buffers": non_persistent[name], "extra": _others(states[name])}) for name in states
            }
            if self.average is not None:
                models |= {f"{name}.ema": _to_save(self.strategy, name, self.average.tensors(name)) for name in states}
                state.averaged = self.average.count
            progress, clock = _split(state)
            parts = {
                "optimizers": optimizers,
                "progress": {**progress, "precision": precision},
                "modules": _non_empty(modules),
                "clock": clock,
                "world": {"world_size": self.world.world_size},
            }
            facts: dict[str, Any] = {"epoch": epoch, "metrics": state.metrics, "inputs": dict(self.inputs)}
            if state.evaluated_at is not None:
                facts["evaluated_at"] = state.evaluated_at
            if digest is not None:
                facts["weights_sha256"] = digest
            texts = {CONFIG: self.config} if self.config is not None else {}
            positions = self.logger.position() if isinstance(self.logger, Truncatable) else {}
            files = [self.run / name for name, value in positions.items() if isinstance(value, int)]
            records = {**self.recorded, **positions}  # those of a logger that this start does not have stay as they are
            self.writer.save(state.step, Content(models, parts, local or None, texts, facts, records, files))
        return digest

    def stream_state(self) -> dict[str, Any]:
        """Return the positions of this rank's shards of the stream; of several ranks that share them, one has them."""
        return self.stream.state() if self.stream is not None and self.strategy.data.reports else {}

    def _weights_sha256(self) -> str | None:
        """Return the hash of the weights. Ranks: rank zero, the others None; communicates if tensors are sharded."""

        def parts(name: str, tensor: Tensor) -> Iterable[Tensor]:
            shard = self.strategy.shard(name, tensor)
            if shard.first_row is not None:
                return _gathered(shard, self.world)
            return (shard.tensor,) if self.world.is_rank_zero else ()

        digest = weights_sha256(
            self.strategy.modules, parts, lambda name, tensor: self.strategy.shard(name, tensor).shape
        )
        return digest if self.world.is_rank_zero else None

    def check(self) -> None:
        """Re-raise a background write error, if there was one."""
        self.writer.check()

    def drain(self) -> None:
        """Give a write in progress a short grace period, because this rank is failing."""
        self.writer.drain()

    def finish(self) -> None:
        """Wait until the last checkpoint is complete. Ranks: all.

        Raises:
            CheckpointError: it could not be written.
        """
        self.writer.wait(end=True)


def restore_checkpoint(checkpoint: Checkpoint, loop: Loop, checkpointer: RunState) -> None:
    """Restore everything that the checkpoint holds.

    Ranks: all.

    Raises:
        RefusedError: it is of another model or of other optimizers, or was not made by a run.
    """
    where = f"the checkpoint of step {checkpoint.step}"
    parts = {name: read_part(checkpoint, name) for name in ("modules", "progress", "clock", "world")}
    parts["optimizers"] = open_part(checkpoint, "optimizers")  # each rank reads its share
    missing = next((name for name, part in parts.items() if not isinstance(part, Mapping)), None)
    if missing is not None:
        raise RefusedError(f"holds no {missing}: it was not saved by a run", place=where)
    modules, progress, clock = parts["modules"], dict(parts["progress"]), parts["clock"]
    for name, module in loop.strategy.modules.items():
        current = module.state_dict()
        saved = modules.get(name) or {}
        held = _shards(loop.strategy, name, current)
        copy_into(held, open_model(checkpoint, name) or {}, f"{where} ({name}.safetensors)")
        buffers = _wholes(_non_persistent_buffers(module, current))
        copy_into(buffers, saved.get("buffers") or {}, f"{where} (buffers)")
        if saved.get("extra"):
            module.load_state_dict({**module.state_dict(), **saved["extra"]})
        if checkpointer.average is not None:
            _restore_average(checkpoint, checkpointer.average, name, where, loop)
    try:
        loop.restore(parts["optimizers"], progress.pop("precision"))
        loop.state = _join(progress, clock)
        if checkpointer.average is not None:
            checkpointer.average.count = loop.state.averaged
        world_size = int(parts["world"]["world_size"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RefusedError(f"was not saved by a run ({type(error).__name__}: {error})", place=where) from None
    checkpointer.resumed_from = checkpoint.step
    _restore_callbacks(checkpoint, checkpointer.callbacks, loop.world)
    _restore_local(checkpoint, world_size, loop.strategy, checkpointer, loop.world)
    if checkpointer.stream is not None:
        states = (read_rank_state(checkpoint, rank) or {} for rank in range(world_size))
        checkpointer.stream.restore((state.get("stream") for state in states), where)


def _restore_average(checkpoint: Checkpoint, average: WeightAverage, name: str, where: str, loop: Loop) -> None:
    """Restore the average of a model; without one in the checkpoint it starts from the restored weights."""
    target = _shards(loop.strategy, name, average.tensors(name))
    saved = open_model(checkpoint, name, average=True)
    if saved is None:
        average.reset()
        if loop.world.is_rank_zero:
            logging.getLogger("ddpexp").warning("%s holds no average of the weights: it starts from the weights", where)
        return
    copy_into(target, saved, f"{where} ({name}.ema.safetensors)")


def _restore_callbacks(checkpoint: Checkpoint, callbacks: Callbacks, world: World) -> None:
    """Restore rank zero's state of the callbacks on every rank. Ranks: all."""
    if not callbacks.members:
        return
    missing = callbacks.restore((read_rank_state(checkpoint, 0) or {}).get("callbacks") or {})
    if missing and world.is_rank_zero:
        logging.getLogger("ddpexp").warning(
            "the checkpoint of step %s holds no state of callbacks.%s, which starts afresh",
            checkpoint.step, ", callbacks.".join(missing),
        )  # fmt: skip


def truncate_records(run: RunDir, logger: Logger, checkpoint: Checkpoint | None) -> Mapping[str, Any]:
    """Cut the records back to the checkpoint, so that every step is recorded once; return the positions it stores.

    Ranks: all, before anything is recorded.
    """
    positions: Mapping[str, Any] = checkpoint.manifest.get("records", {}) if checkpoint else {}
    if isinstance(logger, Truncatable):
        for name in removed_records(run, positions):
            logging.getLogger("ddpexp").warning("%s is missing: its records up to the checkpoint are lost", name)
        logger.truncate(positions if checkpoint else None, checkpoint.step if checkpoint else 0)
    return positions


def _restore_local(
    checkpoint: Checkpoint, world_size: int, strategy: Strategy, checkpointer: RunState, world: World
) -> None:
    """Restore what each rank holds for itself, which fits only the same number of ranks."""
    buffers = strategy.local_buffers()
    if world_size != world.world_size:
        if world.is_rank_zero and any(name.startswith(("state.rank-", "rank-")) for name in checkpoint.files):
            logging.getLogger("ddpexp").warning(
                "the checkpoint was made by %s workers, so what each of them had for itself (random numbers of numpy "
                "and Python, buffers that are not shared) starts afresh",
                world_size,
            )
        return
    local = read_rank_state(checkpoint, world.rank) or {}
    checkpointer.random.restore(local.get("random") or {})
    saved = local.get("buffers") or {}
    if buffers.keys() == saved.keys():
        copy_into(_wholes(buffers), saved, f"rank {world.rank}'s part of the checkpoint of step {checkpoint.step}")
    elif world.is_rank_zero:
        logging.getLogger("ddpexp").warning(
            "what each worker has for itself with this strategy is not what it had with that of the checkpoint of step "
            "%s: all start with what they had in common there",
            checkpoint.step,
        )


def _split(state: TrainState) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the reproducible part of a state, and its times, which differ between equal runs."""
    progress = {**asdict(state), "metrics": masked_tree(state.metrics)}
    window = progress["window"]
    clock = {
        "train_seconds": progress.pop("train_seconds"),
        "elapsed_seconds": progress.pop("elapsed_seconds"),
        "since_record": sum(entry["seconds"] for entry in window),
    }
    progress["window"] = [{key: value for key, value in entry.items() if key != "seconds"} for entry in window]
    return progress, clock


def _join(progress: Mapping[str, Any], clock: Mapping[str, Any]) -> TrainState:
    """Invert `_split`."""
    fields = {name: progress[name] for name in TrainState.__dataclass_fields__ if name in progress}
    since = float(clock["since_record"])
    window = [{**entry, "seconds": since if number == 0 else 0.0} for number, entry in enumerate(progress["window"])]
    if not isinstance(best := fields.get("best", []), list):  # older checkpoints have one value or none
        fields["best"] = [] if best is None else [best]
    seconds = float(clock["train_seconds"])
    elapsed = float(clock.get("elapsed_seconds", seconds))  # older checkpoints do not have it
    return TrainState(**{**fields, "window": window, "train_seconds": seconds, "elapsed_seconds": elapsed})


def _check_models(strategy: Strategy) -> None:
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


def _gathered(shard: Shard, world: World) -> Iterator[Tensor]:
    """Yield the whole tensor on rank zero, some rows at a time; nothing on the others. Ranks: all; communicates."""
    dtype, num_rows = shard.tensor.dtype, shard.shape[0]
    row_bytes = math.prod(shard.shape[1:]) * dtype.itemsize
    for begin in range(0, num_rows, step := max(1, _PART_BYTES // max(row_bytes, 1))):
        end = min(begin + step, num_rows)
        part = torch.zeros((end - begin, *shard.shape[1:]), dtype=dtype, device=world.device)
        if shard.replica == 0:
            _put(shard, part, begin)
        world.sum(part.view(-1).view(torch.uint8))  # exact: of each byte all summands but one are zero
        if world.is_rank_zero:
            yield part


def _put(shard: Shard, out: Tensor, begin: int) -> None:
    """Copy into `out`, the whole rows from `begin`, what this rank holds of them."""
    position, end = 0, begin + len(out)
    for rows in shard.blocks:
        low, high = max(begin, rows.start), min(end, rows.stop)
        if low < high:
            held = shard.tensor[position + low - rows.start : position + high - rows.start]
            into = out[low - begin : high - begin]
            if shard.columns is None:
                into.copy_(held)
            else:
                sizes = [len(columns) for columns in shard.columns]
                for columns, values in zip(shard.columns, torch.split(held, sizes, 1), strict=True):
                    into[:, columns.start : columns.stop] = values
        position += len(rows)


def _cloned(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def _non_empty(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Drop empty values."""
    return {key: value for key, value in tree.items() if value}


def _tensors(values: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def _others(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `get_extra_state` has added to a module's state."""
    return {name: value for name, value in values.items() if not isinstance(value, Tensor)}


def _non_persistent_buffers(module: torch.nn.Module, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the buffers of a module that its `state_dict` leaves out."""
    return {name: buffer for name, buffer in module.named_buffers() if name not in state}

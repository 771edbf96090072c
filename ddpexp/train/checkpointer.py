"""Saving the states of a run in checkpoints, and restoring them from one."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from ddpexp.checkpoint.format import CONFIG, Checkpoint
from ddpexp.checkpoint.reader import open_part
from ddpexp.checkpoint.writer import Content, Writer
from ddpexp.distributed.world import World
from ddpexp.errors import RefusedError
from ddpexp.loggers.base import Logger, Truncatable
from ddpexp.run.directory import RunDir
from ddpexp.run.lost_files import removed_records
from ddpexp.settings.trainer import Trainer
from ddpexp.strategy.base import Strategy
from ddpexp.train.choose_checkpoint import choose_best
from ddpexp.train.progress import TrainingProgress
from ddpexp.train.states import OWN, ModelStates, RankStates, States
from ddpexp.train.weights_hash import hash_weights


@dataclass
class Checkpointer:
    """Saves the states of a run; training continues while the files are written.

    Attributes:
        inputs: Identifies the configuration, the code and the data of this start.
        positions: How far loggers had recorded at the checkpoint; those that this start does not have stay so.
        resumed_from: The step that this start resumed from, whose checkpoint exists already.
    """

    run: RunDir
    writer: Writer
    strategy: Strategy
    logger: Logger
    world: World
    inputs: Mapping[str, Any]
    positions: Mapping[str, Any]
    config: bytes  # config.yaml as this start read it
    resumed_from: int | None = None
    _saved: Mapping[str, Any] | None = None  # the progress of the last save

    def save(self, states: States, progress: TrainingProgress, epoch: float, end: bool) -> str | None:
        """Save the states after a step; at the `end` of the run return the hash of the weights on rank zero.

        Ranks: all; communicates. Training may continue as soon as this returns.

        Raises:
            CheckpointError: the checkpoint before this one could not be written, and trainer.on_save_error=stop.
        """
        own = {name: state for name, state in _collected(states, OWN) if state}
        with self.strategy.synced_buffers():
            digest = hash_weights(self.strategy, self.world) if end else None
            if progress.step == self.resumed_from or progress.state() == self._saved:
                return digest
            self._saved = progress.state()
            parts: dict[str, Any] = {}
            for name, state in _collected(states):
                part, _, key = name.partition("/")
                if key:
                    parts[part] = {**parts[part], key: state}
                else:
                    parts[part] = state
            models = parts.pop("models")
            parts["world"] = {"world_size": self.world.world_size}
            facts: dict[str, Any] = {"epoch": epoch, "metrics": progress.metrics, "inputs": dict(self.inputs)}
            if progress.evaluated_at is not None:
                facts["evaluated_at"] = progress.evaluated_at
            if digest is not None:
                facts["weights_sha256"] = digest
            positions = self.logger.position() if isinstance(self.logger, Truncatable) else {}
            files = [self.run.path / name for name, value in positions.items() if isinstance(value, int)]
            self.writer.save(
                progress.step,
                Content(
                    models, parts, own or None, {CONFIG: self.config}, facts, {**self.positions, **positions}, files
                ),
            )
        return digest

    def restore(self, checkpoint: Checkpoint, states: States) -> None:
        """Restore the states. Ranks: all.

        Raises:
            RefusedError: they are of another model or of other optimizers, or were not saved by a run.
        """
        where = f"the checkpoint of step {checkpoint.step}"
        names = {name.partition("/")[0] for name in states if not name.startswith(OWN)} - {"models"}
        parts = {name: open_part(checkpoint, name) for name in sorted({*names, "world"})}
        missing = next((name for name, part in parts.items() if not isinstance(part, Mapping)), None)
        if missing is not None:
            raise RefusedError(f"holds no {missing}: it was not saved by a run", place=where)
        try:
            size = int(parts["world"]["world_size"])
            for name, state in states.items():
                part, _, key = name.partition("/")
                if name == "models":
                    state.restore(checkpoint)
                elif name.startswith(OWN):
                    state.restore(RankStates(checkpoint, key, size))
                else:
                    state.restore(parts[part][key] if key else parts[part])
        except RefusedError as error:
            error.place = where if error.place is None else f"{where} ({error.place})"
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise RefusedError(f"was not saved by a run ({type(error).__name__}: {error})", place=where) from None
        self.resumed_from = checkpoint.step
        if size != self.world.world_size and self.world.is_rank_zero and _has_own_states(checkpoint):
            logging.getLogger("ddpexp").warning(
                "the checkpoint was made by %s workers, so what each of them had for itself (random numbers of numpy "
                "and Python, buffers that are not shared) starts afresh",
                size,
            )

    @contextmanager
    def best_weights(self, states: States, step: int) -> Iterator[int]:
        """Give the models the weights of the best checkpoint inside the block; yield its step.

        They are what was evaluated then, with an average where there is one. Without an intact one, or if it is that of
        `step`, which is the last one, nothing changes. Ranks: all; communicates.

        Raises:
            CheckpointError: the last checkpoint could not be written.
        """
        self.finish()
        self.world.barrier()
        best = choose_best(self.run, self.world)
        if best is None or best.step == step:
            yield step
            return
        models, modules, count = states["models"], states["modules"], states["progress/averaged"]
        assert isinstance(models, ModelStates)
        before = deepcopy(modules.state()), count.state()
        with models.kept():
            try:
                models.restore(best)
                modules.restore(open_part(best, "modules"))
                count.restore(open_part(best, "progress")["averaged"])
                yield best.step
            finally:
                modules.restore(before[0])
                count.restore(before[1])

    def check(self) -> None:
        """Re-raise an error of a write in the background, if there was one. Ranks: any."""
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


def writer_of(run: RunDir, trainer: Trainer, world: World) -> Writer:
    """Return the writer of a run's checkpoints, as the section `trainer` wants them."""
    return Writer(
        run.checkpoints,
        world,
        keep_last=trainer.keep_last,
        keep_best=trainer.keep_best,
        keep_best_k=trainer.keep_best_k,
        keep_every=trainer.keep_every,
        stops=trainer.on_save_error == "stop",
    )


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


def _collected(states: States, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the states with this prefix, without it in their names; the empty prefix stands for all shared states."""
    for name, state in states.items():
        if name.startswith(OWN) == bool(prefix):
            yield name.removeprefix(prefix), state.state()


def _has_own_states(checkpoint: Checkpoint) -> bool:
    return any(name.startswith(("state.rank-", "rank-")) for name in checkpoint.files)

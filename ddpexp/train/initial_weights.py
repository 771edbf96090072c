"""Loading the weights of run.init_from into new models, and recording what was taken."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ddpexp.checkpoint import initial
from ddpexp.checkpoint.format import Checkpoint
from ddpexp.checkpoint.loading import load_weights
from ddpexp.strategy.base import Shard, shard_of
from ddpexp.system import files
from ddpexp.system.files import relative
from ddpexp.train.build import RunContext


class InitialWeights:
    """What `run.init_from` names; nothing if the run is resumed."""

    def __init__(self, context: RunContext, newest: Checkpoint | None) -> None:
        """Find the weights; the command has done so already, unless it counted on checkpoints that are damaged."""
        self._context, run = context, context.experiment.run
        self._path: Path | None = None
        self._resumes = newest is not None
        if run.init_from is not None and newest is None:
            source = Path(context.init_from) if context.init_from is not None else None
            self._path = initial.find(run, context.log.warning, source)

    @property
    def _is_converted(self) -> bool:
        return self._path is not None and self._path.parent == self._context.run.path.resolve()

    @property
    def are_complete(self) -> bool:
        """Return whether all parameters get values from files, so that those of the construction do not matter."""
        experiment = self._context.experiment
        leaves_none = not experiment.run.init_skip and experiment.trainer.lora is None
        return self._resumes or (self._path is not None and leaves_none)

    def load(self, models: Mapping[str, nn.Module]) -> None:
        """Load the weights, or what this rank holds of them, into new models.

        Raises:
            RefusedError: they are damaged, or those of another model.
        """
        run, log = self._context.experiment.run, self._context.log
        if self._path is None:
            return
        override = initial.override(run)
        found = load_weights(
            models, self._path, override, run.init_weights == "ema", initial.selection(run), held,
            self._context.experiment.trainer.lora,
        )  # fmt: skip
        shown = Path(run.init_from or "") if self._is_converted else self._path
        log.info(f"{override}: the weights of {relative(shown)}")
        facts = {}
        for name, match in found.items():
            log.info(f"{f'{name}: ' if len(found) > 1 else ''}{match.summary()}")
            facts[name] = match.facts()
        if self._context.world.is_rank_zero:
            self._record({"weights": str(shown.absolute()), "models": facts})

    def finish(self) -> None:
        """Remove the converted copy of a file of torch.save. Ranks: all, after `load`; may communicate."""
        if not self._is_converted:
            return
        self._context.world.barrier()
        if self._context.world.is_rank_zero:
            initial.remove_converted(self._context.run.path)

    def _record(self, facts: Mapping[str, Any]) -> None:
        manifest = self._context.run.manifest
        files.write_json(manifest, {**files.read_json(manifest), "init_from": facts})


def held(tensor: Tensor) -> Shard:
    """Return what this rank holds of a parameter or buffer."""
    if (shard := shard_of(tensor)) is not None:
        return shard
    if "torch.distributed.tensor" not in sys.modules:  # whose import takes long, and without which nothing is sharded
        return Shard.whole(tensor)
    from ddpexp.strategy.fsdp.sharding import held

    return held(tensor)

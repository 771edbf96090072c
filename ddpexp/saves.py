"""What a run's checkpoints hold, and how a run goes on from one of them."""

from __future__ import annotations

import logging
import os
import resource
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddpexp import checkpoint
from ddpexp.average import Average
from ddpexp.checkpoint import Checkpoint, Writer
from ddpexp.config import Trainer
from ddpexp.errors import RefusedError
from ddpexp.loop import Loop, Position
from ddpexp.rundir import RunDir, relative
from ddpexp.secrets import masked_tree
from ddpexp.seeds import HostRandom
from ddpexp.strategy.contract import Strategy
from ddpexp.track import Tracker
from ddpexp.world import World


@dataclass
class Saves:
    """Everything that a checkpoint holds, gathered when the loop asks for one."""

    writer: Writer
    strategy: Strategy
    average: Average | None
    random: HostRandom
    tracker: Tracker
    world: World
    loaded: int | None = None  # the step that this start went on from
    recorded: Mapping[Path, int] = field(default_factory=dict)  # what earlier starts have recorded, in bytes of each file

    @classmethod
    def of(
        cls, run: RunDir, trainer: Trainer, strategy: Strategy, average: Average | None, tracker: Tracker, world: World,
    ) -> Saves:  # fmt: skip
        """Make the writer that a trainer's keys ask for."""
        writer = Writer(
            run.checkpoints, world, keep_last=trainer.keep_last, keep_best=trainer.keep_best, stops=trainer.on_save_error == "stop"
        )
        return cls(writer, strategy, average, HostRandom(trainer.seed, world.rank), tracker, world)

    def save(self, position: Position, state: Mapping[str, Any], epoch: float, end: bool) -> str | None:
        """Save the run; see `ddpexp.loop.Saves`."""
        own = {f"random.{name}": tensor for name, tensor in self.random.state().items()}
        own |= {f"buffers.{name}": buffer.detach().clone() for name, buffer in self.strategy.own_buffers().items()}
        with self.strategy.common_buffers():
            digest = checkpoint.weights_sha256(self.strategy.bare) if end and self.world.is_rank_zero else None
            if position.step == self.loaded:  # it is there
                return digest
            states = {name: module.state_dict() for name, module in self.strategy.bare.items()}
            files = {name: _tensors(values) for name, values in states.items()}
            hidden = {name: _not_in_state(module, files[name]) for name, module in self.strategy.bare.items()}
            if self.average is not None:
                files |= {f"{name}.ema": _tensors(self.average.tensors(name)) for name in states}
            whole = {
                **state,
                "position": {**asdict(position), "metrics": masked_tree(position.metrics)},
                "hidden_buffers": hidden,
                "extra": {name: _others(values) for name, values in states.items()},
            }
            facts: dict[str, Any] = {"epoch": epoch, "metrics": position.metrics}
            if position.evaluated_at is not None:
                facts["evaluated_at"] = position.evaluated_at
            if digest is not None:
                facts["weights_sha256"] = digest
            self.writer.save(position.step, files, own, whole, facts, {**self.recorded, **self.tracker.flush()})
        return digest

    def check(self) -> None:
        """Raise what went wrong behind, if anything did."""
        self.writer.check()

    def settle(self) -> None:
        """Give a checkpoint that is being written the time for it, for a moment: this rank fails."""
        self.writer.settle()

    def finish(self) -> None:
        """Wait until the last checkpoint counts. Ranks: all.

        Raises:
            CheckpointError: it could not be written.
        """
        self.writer.wait(end=True)


def choose(run: RunDir, world: World, required: bool) -> Checkpoint | None:
    """Return the newest complete and undamaged checkpoint, None where there is none; every rank reads a share of the bytes.

    Ranks: all; communicates.

    Raises:
        RefusedError: with `required`, there is none, or the newest is damaged.
    """
    log = logging.getLogger("ddpexp")
    if world.is_rank_zero:
        checkpoint.clean(run.checkpoints)
    found = checkpoint.complete(run.checkpoints) if world.is_rank_zero else []
    steps = [one.step for one in found]
    for number in range(_agreed(world, len(steps))):
        step = _agreed(world, steps[number] if world.is_rank_zero else 0)
        one = found[number] if world.is_rank_zero else _at(run, step)
        problem = one.problem(world.rank, world.world_size) if one else f"{run.checkpoints} of this host lacks it"
        if not int(world.sum(torch.tensor(int(problem is not None), device=world.device))):
            return one
        text = f"the checkpoint of step {step} in {relative(run.path)} cannot be used"
        if required:
            world.barrier()
            raise RefusedError(f"{text}{f' ({problem})' if problem else ''}, and run.resume=require takes no older one: use auto.")
        if problem is not None:
            log.warning("%s (%s): going on from the one before it, or from the beginning", text, problem)
    if required:
        raise RefusedError(f"run.resume=require, but {relative(run.checkpoints)} holds no complete checkpoint.")
    return None


def refuse_without_room(run: RunDir, trainer: Trainer, loop: Loop, average: Average | None) -> None:
    """Compare what a checkpoint takes with what the disk and the shell give. Ranks: rank zero.

    Raises:
        RefusedError: not even one fits, and a checkpoint that cannot be written ends the run.
    """
    files = _expected_bytes(loop, average)
    wanted, largest = sum(files), max(files)
    disk = os.statvfs(run.path)
    free = disk.f_bavail * disk.f_frsize
    problem = None
    if free < wanted:
        problem = f"a checkpoint takes {_mb(wanted)} and {run.path} has {_mb(free)} free"
        cure = "make room, or choose another place with run.dir=... ."
    elif (allowed := resource.getrlimit(resource.RLIMIT_FSIZE)[0]) != resource.RLIM_INFINITY and largest > allowed:
        problem = f"a file of a checkpoint takes {_mb(largest)} and this shell allows {allowed // 1024:,} KiB a file (ulimit -f)"
        cure = "raise that limit."
    if problem is not None and trainer.on_save_error == "stop":
        raise RefusedError(f"{problem}, so that nothing of this run could be saved: {cure}")
    there = sum(path.stat().st_size for path in run.checkpoints.glob("step-*/*") if path.is_file())
    kept = (trainer.keep_last or 1) + 1  # the oldest goes when the newest is complete
    if problem is not None:
        logging.getLogger("ddpexp").warning("%s: %s", problem, cure)
    elif free + there < kept * wanted:
        text = "%s has %s free, and %d checkpoints of %s are there at the same time (trainer.keep_last=%s): saving will fail later"
        shown = "null" if trainer.keep_last is None else trainer.keep_last
        logging.getLogger("ddpexp").warning(text, relative(run.path), _mb(free + there), kept, _mb(wanted), shown)


def _expected_bytes(loop: Loop, average: Average | None) -> list[int]:
    """Return how much each file of a checkpoint takes, at least. Units: bytes."""
    modules = [_num_bytes(_tensors(module.state_dict()).values()) for module in loop.strategy.bare.values()]
    averaged = [_num_bytes(average.tensors(name).values()) for name in loop.strategy.bare] if average is not None else []
    return [*modules, *averaged, sum(map(_state_bytes, loop.optimizers.values()))]


def _num_bytes(tensors: Iterable[Any]) -> int:
    """Add up tensors, of which some may be the same one."""
    sizes = {tensor.data_ptr(): tensor.numel() * tensor.element_size() for tensor in tensors if isinstance(tensor, Tensor)}
    return sum(sizes.values())


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return what an optimizer will keep for its parameters: torch's own ones take it with their first step."""
    if not type(optimizer).__module__.startswith("torch.optim"):
        return 0
    total = 0
    for group in optimizer.param_groups:
        copies = 2 * ("betas" in group or "rho" in group) + bool(group.get("amsgrad")) + bool(group.get("momentum"))
        copies += ("alpha" in group) + bool(group.get("centered"))
        total += copies * _num_bytes(parameter for parameter in group["params"] if parameter.requires_grad)
    return total


def _mb(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"


def take_up(one: Checkpoint, loop: Loop, saves: Saves) -> None:
    """Give everything the state that the checkpoint holds.

    Ranks: all.

    Raises:
        RefusedError: it is of another model, or of other optimizers.
    """
    state = one.state()
    where = f"the checkpoint of step {one.step}"
    strategy, world = loop.strategy, loop.world
    for name, module in strategy.bare.items():
        current = module.state_dict()
        checkpoint.copy_into(_tensors(current), one.tensors(name), f"{where} ({name}.safetensors)")
        checkpoint.copy_into(_not_in_state(module, current), state["hidden_buffers"].get(name, {}), f"{where} (buffers)")
        extra = state["extra"].get(name)
        if extra:
            module.load_state_dict({**module.state_dict(), **extra})
        if saves.average is not None:
            if (one.folder / f"{name}.ema.safetensors").is_file():
                checkpoint.copy_into(_tensors(saves.average.tensors(name)), one.tensors(f"{name}.ema"), f"{where} (ema)")
            elif world.is_rank_zero:
                logging.getLogger("ddpexp").warning("%s holds no average of the weights: it begins with the weights", where)
    if saves.average is not None and not list(one.folder.glob("*.ema.safetensors")):
        saves.average.begin()
    loop.restore(state)
    known = {name: state["position"][name] for name in Position.__dataclass_fields__ if name in state["position"]}
    loop.position = Position(**known)
    saves.loaded = one.step
    _take_own(one, strategy, saves, world)


def cut_back(run: RunDir, one: Checkpoint | None) -> dict[Path, int]:
    """Remove from the records what came after the checkpoint, so that every step is recorded once; return what is left.

    Units: bytes. Ranks: rank zero, before anything is recorded.
    """
    sizes = {run.path / name: size for name, size in (one.manifest.get("records", {}) if one else {}).items()}
    for path in run.tensorboard.glob("events.*"):
        if path not in sizes:
            path.unlink()
    left = {}
    for path in [run.metrics, *run.tensorboard.glob("events.*")]:
        if not path.is_file():
            continue
        left[path] = sizes.get(path, 0)
        if path.stat().st_size > left[path]:
            _truncate(path, left[path])
        elif path.stat().st_size < left[path]:
            text = "%s is shorter than at the checkpoint: some of its records are lost"
            logging.getLogger("ddpexp").warning(text, path.name)
    return left


def _truncate(path: Path, num_bytes: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.ftruncate(descriptor, num_bytes)
    finally:
        os.close(descriptor)


def _take_own(one: Checkpoint, strategy: Strategy, saves: Saves, world: World) -> None:
    """Restore what ranks have for themselves, which only fits as many ranks."""
    buffers = strategy.own_buffers()
    if int(one.manifest["world_size"]) != world.world_size:
        if world.is_rank_zero and list(one.folder.glob("rank-*.safetensors")):
            logging.getLogger("ddpexp").warning(
                "the checkpoint was made by %s workers, so what each of them had for itself (random numbers of numpy and Python, "
                "buffers that are not shared) begins anew",
                one.manifest["world_size"],
            )
        return
    own = one.own(world.rank)
    saves.random.restore({name.removeprefix("random."): t for name, t in own.items() if name.startswith("random.")})
    if buffers:
        kept = {name.removeprefix("buffers."): t for name, t in own.items() if name.startswith("buffers.")}
        checkpoint.copy_into(buffers, kept, f"rank {world.rank}'s part of the checkpoint of step {one.step}")


def _agreed(world: World, number: int) -> int:
    """Return rank zero's number. Ranks: all; communicates."""
    return int(world.broadcast(torch.tensor(number, device=world.device)))


def _at(run: RunDir, step: int) -> Checkpoint | None:
    return next((one for one in checkpoint.complete(run.checkpoints) if one.step == step), None)


def _tensors(values: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def _others(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a module's own `get_extra_state` has put into its state."""
    return {name: value for name, value in values.items() if not isinstance(value, Tensor)}


def _not_in_state(module: torch.nn.Module, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the buffers that a module keeps out of its `state_dict`."""
    return {name: buffer for name, buffer in module.named_buffers() if name not in state}

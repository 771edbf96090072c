"""What a run's checkpoints hold, and how a run resumes from one of them."""

from __future__ import annotations

import logging
import os
import re
import resource
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from ddpexp.checkpoint import format as on_disk
from ddpexp.checkpoint.format import CONFIG, OLDER, Checkpoint, Damaged
from ddpexp.checkpoint.layout import lay_out
from ddpexp.checkpoint.reader import copy_into, read_model, read_own, read_part, weights_sha256
from ddpexp.checkpoint.writer import Content, Writer
from ddpexp.config.schema import Trainer
from ddpexp.distributed.rng import HostRandom
from ddpexp.distributed.world import World
from ddpexp.errors import DdpexpError, RefusedError
from ddpexp.loggers.base import Tracker
from ddpexp.run.directory import RunDir
from ddpexp.strategy.base import Strategy
from ddpexp.system.files import relative, whole_lines
from ddpexp.system.limits import human, told_apart
from ddpexp.system.secrets import masked_tree
from ddpexp.train.ema import EMA
from ddpexp.train.loop import Loop, TrainState

_OTHER_FILES = 8  # of a checkpoint, beside those of tensors: five parts, config.yaml and the manifest, and their folder
_TEXT_BYTES = 1024
_MODEL_NAME = re.compile(r"[\w-]+")


@dataclass
class RunState:
    """Everything that a checkpoint holds, gathered when the loop asks for one."""

    writer: Writer
    strategy: Strategy
    average: EMA | None
    random: HostRandom
    tracker: Tracker
    world: World
    loaded: int | None = None  # the step that this start resumed from
    inputs: Mapping[str, Any] = field(default_factory=dict)  # what this start trains with: configuration, code, data
    recorded: Mapping[Path, int] = field(
        default_factory=dict
    )  # what earlier starts have recorded, in bytes of each file
    config: bytes | None = None  # config.yaml as this start has read it

    @classmethod
    def of(
        cls, run: RunDir, trainer: Trainer, strategy: Strategy, average: EMA | None, tracker: Tracker, world: World,
    ) -> RunState:  # fmt: skip
        """Build from the trainer's configuration.

        Raises:
            RefusedError: a checkpoint could not hold the models.
        """
        _check_models(strategy.modules)
        writer = Writer(
            run.checkpoints,
            world,
            keep_last=trainer.keep_last,
            keep_best=trainer.keep_best,
            stops=trainer.on_save_error == "stop",
        )
        random = HostRandom(trainer.seed, world.rank)
        return cls(writer, strategy, average, random, tracker, world, config=run.config.read_bytes())

    def save(
        self, position: TrainState, optimizers: Mapping[str, Any], precision: Mapping[str, Any], epoch: float, end: bool
    ) -> str | None:
        """Save the run; see `ddpexp.train.loop.RunState`."""
        own = _without_nothing({"random": self.random.state(), "buffers": _cloned(self.strategy.local_buffers())})
        with self.strategy.synced_buffers():
            digest = weights_sha256(self.strategy.modules) if end and self.world.is_rank_zero else None
            if position.step == self.loaded:  # it is there
                return digest
            states = {name: module.state_dict() for name, module in self.strategy.modules.items()}
            models = {name: _tensors(values) for name, values in states.items()}
            hidden = {name: _not_in_state(module, models[name]) for name, module in self.strategy.modules.items()}
            modules = {
                name: _without_nothing({"buffers": hidden[name], "extra": _others(states[name])}) for name in states
            }
            if self.average is not None:
                models |= {f"{name}.ema": _tensors(self.average.tensors(name)) for name in states}
            progress, clock = _split(position)
            parts = {
                "optimizers": optimizers,
                "progress": {**progress, "precision": precision},
                "modules": _without_nothing(modules),
                "clock": clock,
                "world": {"world_size": self.world.world_size},
            }
            facts: dict[str, Any] = {"epoch": epoch, "metrics": position.metrics, "inputs": dict(self.inputs)}
            if position.evaluated_at is not None:
                facts["evaluated_at"] = position.evaluated_at
            if digest is not None:
                facts["weights_sha256"] = digest
            texts = {CONFIG: self.config} if self.config is not None else {}
            records = {**self.recorded, **self.tracker.flush()}
            self.writer.save(position.step, Content(models, parts, own or None, texts, facts, records))
        return digest

    def check(self) -> None:
        """Re-raise an error of the thread that writes, if there was one."""
        self.writer.check()

    def drain(self) -> None:
        """Give a checkpoint that is being written a short grace: this rank fails."""
        self.writer.drain()

    def finish(self) -> None:
        """Wait until the last checkpoint counts. Ranks: all.

        Raises:
            CheckpointError: it could not be written.
        """
        self.writer.wait(end=True)


def choose(run: RunDir, world: World, required: bool) -> tuple[Checkpoint | None, list[Damaged]]:
    """Return the newest checkpoint of which every byte is right, None where there is none, and the newer ones.

    That are damaged.

    Ranks: all, each reads a share of the bytes; communicates. The damaged ones are known to rank zero alone.

    Raises:
        RefusedError: with `required`, there is none, or the newest is damaged; or another rank reads other bytes than
        rank zero.
    """
    if world.is_rank_zero:
        on_disk.clean(run.checkpoints)
    found = on_disk.scan(run.checkpoints) if world.is_rank_zero else on_disk.Found()
    steps = [one.step for one in found.complete]
    damaged, chosen = list(found.damaged), None
    for number in range(_agreed(world, len(steps))):
        step = _agreed(world, steps[number] if world.is_rank_zero else 0)
        one = found.complete[number] if world.is_rank_zero else _at(run, step)
        problem = one.problem(world.rank, world.world_size) if one else f"{run.checkpoints} of this host lacks it"
        problems = int(world.sum(torch.tensor(int(problem is not None), device=world.device)))
        if not problems:
            chosen = one
            break
        confirmed = (problem or found.complete[number].problem()) if world.is_rank_zero else None
        if not _agreed(world, int(confirmed is not None)):
            raise RefusedError(
                f"the checkpoint of step {step} in {relative(run.path)} is whole where rank zero reads it, but not on "
                "every host "
                f"({problem or 'see the other ranks'}): see that all hosts have the same file system there, then start "
                "again."
            )
        if confirmed is not None:
            damaged.append(Damaged(found.complete[number].folder, confirmed))
    newer = [one for one in damaged if chosen is None or one.step > chosen.step]
    if required:
        _check_required(run, world, chosen, newer)
    return chosen, newer


def _check_required(run: RunDir, world: World, chosen: Checkpoint | None, newer: Sequence[Damaged]) -> None:
    """Refuse what `run.resume=require` does not take, on all ranks alike. Ranks: all; communicates."""
    if _agreed(world, len(newer)):
        latest = max(newer, key=lambda one: one.step) if newer else None
        what = _of_rank_zero(world, f"{latest.folder.name}: {latest.problem}" if latest else "")
        raise RefusedError(
            f"the newest checkpoint in {relative(run.path)} cannot be used ({what}), and run.resume=require takes no "
            "older one: "
            f"use run.resume=auto."
        )
    if chosen is None:
        raise RefusedError(f"run.resume=require, but {relative(run.checkpoints)} holds no complete checkpoint.")


def check_room(run: RunDir, trainer: Trainer, loop: Loop, average: EMA | None) -> None:
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
        takes, has = told_apart(wanted, free)
        problem = f"a checkpoint takes {takes} and {run.path} has {has} free"
        cure = "make room, or choose another place with run.dir=... ."
    elif disk.f_files and disk.f_favail < (num_files := sum(map(bool, files)) + _OTHER_FILES):
        problem = (
            f"a checkpoint takes {num_files} files and the file system of {run.path} can hold {disk.f_favail:,} more "
            "of its "
            f"{disk.f_files:,} (inodes; {human(free)} are free)"
        )
        cure = "remove files, or choose another place with run.dir=... ."
    elif (allowed := resource.getrlimit(resource.RLIMIT_FSIZE)[0]) != resource.RLIM_INFINITY and largest > allowed:
        problem = (
            f"a file of a checkpoint takes {human(largest)} and this shell allows {allowed // 1024:,} KiB a file "
            "(ulimit -f)"
        )
        cure = "raise that limit."
    if problem is not None and trainer.on_save_error == "stop":
        raise RefusedError(f"{problem}, so that nothing of this run could be saved: {cure}")
    found = on_disk.scan(run.checkpoints).complete
    there = sum(file.num_bytes for one in found for file in one.files.values())
    kept = (trainer.keep_last or 1) + 1  # the oldest goes when the newest is complete
    if problem is not None:
        logging.getLogger("ddpexp").warning("%s: %s", problem, cure)
    elif free + there < kept * wanted:
        text = (
            "%s has %s free, and %d checkpoints of %s are there at the same time (trainer.keep_last=%s): saving "
            "will fail later"
        )
        shown = "null" if trainer.keep_last is None else trainer.keep_last
        logging.getLogger("ddpexp").warning(text, relative(run.path), human(free + there), kept, human(wanted), shown)


def _expected_bytes(loop: Loop, average: EMA | None) -> list[int]:
    """Return how much each file of a checkpoint takes, at least. Units: bytes."""
    modules = [_num_bytes(_tensors(module.state_dict()).values()) for module in loop.strategy.modules.values()]
    averaged = (
        [_num_bytes(average.tensors(name).values()) for name in loop.strategy.modules] if average is not None else []
    )
    return [*modules, *averaged, sum(map(_state_bytes, loop.optimizers.values()))]


def _num_bytes(tensors: Iterable[Any]) -> int:
    """Add up tensors, of which some may be the same one."""
    sizes = {
        tensor.data_ptr(): tensor.numel() * tensor.element_size() for tensor in tensors if isinstance(tensor, Tensor)
    }
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


def restore(one: Checkpoint, loop: Loop, checkpointer: RunState) -> None:
    """Restore everything that the checkpoint holds.

    Ranks: all.

    Raises:
        RefusedError: it is of another model, or of other optimizers, or not that of a run.
    """
    where = f"the checkpoint of step {one.step}"
    if one.version == 1 and loop.world.is_rank_zero:
        logging.getLogger("ddpexp").warning(OLDER, where)
    parts = {name: read_part(one, name) for name in ("modules", "optimizers", "progress", "clock", "world")}
    missing = next((name for name, part in parts.items() if not isinstance(part, Mapping)), None)
    if missing is not None:
        raise RefusedError(f"{where} holds no {missing}: it is not that of a run.")
    modules, progress, clock = parts["modules"], dict(parts["progress"]), parts["clock"]
    for name, module in loop.strategy.modules.items():
        current = module.state_dict()
        kept = modules.get(name) or {}
        copy_into(_tensors(current), read_model(one, name) or {}, f"{where} ({name}.safetensors)")
        copy_into(_not_in_state(module, current), kept.get("buffers") or {}, f"{where} (buffers)")
        if kept.get("extra"):
            module.load_state_dict({**module.state_dict(), **kept["extra"]})
        if checkpointer.average is not None:
            _restore_average(one, checkpointer.average, name, where, loop.world)
    try:
        loop.restore(parts["optimizers"], progress.pop("precision"))
        loop.position = _joined(progress, clock)
        world_size = int(parts["world"]["world_size"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RefusedError(f"{where} is not that of a run ({type(error).__name__}: {error}).") from None
    checkpointer.loaded = one.step
    _restore_own(one, world_size, loop.strategy, checkpointer, loop.world)


def _restore_average(one: Checkpoint, average: EMA, name: str, where: str, world: World) -> None:
    """Restore the average of a model, which starts from the restored weights where the checkpoint has none."""
    target = _tensors(average.tensors(name))
    kept = read_model(one, name, average=True)
    if kept is None:
        average.begin()
        if world.is_rank_zero:
            logging.getLogger("ddpexp").warning("%s holds no average of the weights: it starts from the weights", where)
        return
    if one.version == 1:  # averages had the type of their parameters
        kept = {key: tensor.to(target[key].dtype) if key in target else tensor for key, tensor in kept.items()}
    copy_into(target, kept, f"{where} ({name}.ema.safetensors)")


def truncate_records(run: RunDir, one: Checkpoint | None) -> dict[Path, int]:
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
            if path == run.metrics:
                _truncate(path, whole_lines(path))  # the next record begins a line
            left[path] = path.stat().st_size
    return left


def _truncate(path: Path, num_bytes: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.ftruncate(descriptor, num_bytes)
    finally:
        os.close(descriptor)


def _restore_own(one: Checkpoint, world_size: int, strategy: Strategy, checkpointer: RunState, world: World) -> None:
    """Restore what ranks have for themselves, which only fits as many ranks."""
    buffers = strategy.local_buffers()
    if world_size != world.world_size:
        if world.is_rank_zero and any(name.startswith(("state.rank-", "rank-")) for name in one.files):
            logging.getLogger("ddpexp").warning(
                "the checkpoint was made by %s workers, so what each of them had for itself (random numbers of numpy "
                "and Python, "
                "buffers that are not shared) starts afresh",
                world_size,
            )
        return
    own = read_own(one, world.rank) or {}
    checkpointer.random.restore(own.get("random") or {})
    if buffers:
        copy_into(buffers, own.get("buffers") or {}, f"rank {world.rank}'s part of the checkpoint of step {one.step}")


def _split(position: TrainState) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what a position says of the training, and what the clock says of it: that differs in equal runs."""
    progress = {**asdict(position), "metrics": masked_tree(position.metrics)}
    window = progress["window"]
    clock = {"train_seconds": progress.pop("train_seconds"), "since_record": sum(entry["seconds"] for entry in window)}
    progress["window"] = [{key: value for key, value in entry.items() if key != "seconds"} for entry in window]
    return progress, clock


def _joined(progress: Mapping[str, Any], clock: Mapping[str, Any]) -> TrainState:
    """Return what `_split` was given."""
    known = {name: progress[name] for name in TrainState.__dataclass_fields__ if name in progress}
    since = float(clock["since_record"])
    window = [{**entry, "seconds": since if number == 0 else 0.0} for number, entry in enumerate(progress["window"])]
    return TrainState(**{**known, "window": window, "train_seconds": float(clock["train_seconds"])})


def _check_models(models: Mapping[str, torch.nn.Module]) -> None:
    """Refuse at the start what a checkpoint could not hold hours later.

    Raises:
        RefusedError: a model's name is none of a file, or a tensor has a type that safetensors does not know.
    """
    for name, module in models.items():
        if not _MODEL_NAME.fullmatch(name):
            raise RefusedError(
                f"the model section builds a model named {name!r}, and a checkpoint has a file for each: name it with "
                "letters, "
                f"digits, - and _."
            )
        try:
            lay_out(name, {key: tensor for key, tensor in _tensors(module.state_dict()).items() if not is_lazy(tensor)})
        except DdpexpError as error:
            raise RefusedError(f"the model cannot be saved: {error}") from None


def _cloned(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def _without_nothing(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what is empty."""
    return {key: value for key, value in tree.items() if value}


def _of_rank_zero(world: World, text: str) -> str:
    """Return rank zero's text, cut off where it is long: whichever rank is heard first says the same. Ranks: all.

    Communicates.
    """
    data = text.encode()[:_TEXT_BYTES] if world.is_rank_zero else b""
    numbers = torch.tensor([*data, *bytes(_TEXT_BYTES - len(data))], device=world.device)
    return bytes(world.broadcast(numbers).tolist()).rstrip(b"\0").decode(errors="ignore")


def _agreed(world: World, number: int) -> int:
    """Return rank zero's number. Ranks: all; communicates."""
    return int(world.broadcast(torch.tensor(number, device=world.device)))


def _at(run: RunDir, step: int) -> Checkpoint | None:
    return next((one for one in on_disk.scan(run.checkpoints).complete if one.step == step), None)


def _tensors(values: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def _others(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a module's own `get_extra_state` has put into its state."""
    return {name: value for name, value in values.items() if not isinstance(value, Tensor)}


def _not_in_state(module: torch.nn.Module, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the buffers that a module keeps out of its `state_dict`."""
    return {name: buffer for name, buffer in module.named_buffers() if name not in state}

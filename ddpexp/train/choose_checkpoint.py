"""Which checkpoint a start resumes from: the newest that is intact on every host."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from ddpexp.checkpoint import format as on_disk
from ddpexp.checkpoint.format import Checkpoint, Damaged
from ddpexp.checkpoint.weights import best_of
from ddpexp.distributed.world import World
from ddpexp.errors import RefusedError
from ddpexp.run.directory import RunDir
from ddpexp.system.files import relative

_TEXT_BYTES = 1024


def choose(run: RunDir, world: World, required: bool) -> tuple[Checkpoint | None, list[Damaged]]:
    """Return the newest intact checkpoint, or None, and the damaged ones that are newer.

    Ranks: all, each verifies a share of the bytes; communicates. Only rank zero gets the damaged ones.

    Raises:
        RefusedError: with `required`, there is none, or the newest is damaged; or another rank reads different bytes
        than rank zero.
    """
    if world.is_rank_zero:
        on_disk.clean(run.checkpoints)
    found = on_disk.scan(run.checkpoints) if world.is_rank_zero else on_disk.Found()
    steps = [checkpoint.step for checkpoint in found.complete]
    damaged, chosen = list(found.damaged), None
    for number in range(_agreed(world, len(steps))):
        step = _agreed(world, steps[number] if world.is_rank_zero else 0)
        checkpoint = found.complete[number] if world.is_rank_zero else _checkpoint_at(run, step)
        if checkpoint:
            problem = checkpoint.problem(world.rank, world.world_size)
        else:
            problem = f"{run.checkpoints} of this host lacks it"
        problems = int(world.sum(torch.tensor(int(problem is not None), device=world.device)))
        if not problems:
            chosen = checkpoint
            break
        confirmed = (problem or found.complete[number].problem()) if world.is_rank_zero else None
        if not _agreed(world, int(confirmed is not None)):
            raise RefusedError(
                f"the checkpoint of step {step} in {relative(run.path)} is complete on the host of rank zero, but not "
                f"on every host ({problem or 'see the other ranks'})",
                suggestion="Check that all hosts mount the same file system there, then start the command again.",
            )
        if confirmed is not None:
            damaged.append(Damaged(found.complete[number].folder, confirmed))
    newer = [checkpoint for checkpoint in damaged if chosen is None or checkpoint.step > chosen.step]
    if required:
        _check_required(run, world, chosen, newer)
    return chosen, newer


def choose_best(run: RunDir, world: World) -> Checkpoint | None:
    """Return the best checkpoint by trainer.keep_best whose weights are intact on every host, or None.

    Ranks: all, each verifies a share of the bytes; communicates.
    """
    complete = on_disk.scan(run.checkpoints).complete if world.is_rank_zero else []
    while True:
        best = best_of(complete)
        step = _agreed(world, -1 if best is None else best.step)
        if step < 0:
            return None
        checkpoint = best if world.is_rank_zero else _checkpoint_at(run, step)
        problem = "this host lacks it"
        if checkpoint is not None:
            problem = checkpoint.problem(world.rank, world.world_size, checkpoint.weights) or ""
        if not int(world.sum(torch.tensor(int(bool(problem)), device=world.device))):
            return checkpoint
        if best is not None:
            why = problem or "another host reads other bytes"
            logging.getLogger("ddpexp").warning("%s, the best one, is not used: %s", relative(best.folder), why)
            complete = [other for other in complete if other is not best]


def _check_required(run: RunDir, world: World, chosen: Checkpoint | None, newer: Sequence[Damaged]) -> None:
    """Raise on all ranks if `run.resume=require` cannot be met. Ranks: all; communicates."""
    if _agreed(world, len(newer)):
        latest = max(newer, key=lambda checkpoint: checkpoint.step) if newer else None
        what = _text_of_rank_zero(world, f"{latest.folder.name}: {latest.problem}" if latest else "")
        raise RefusedError(
            f"the newest checkpoint in {relative(run.path)} cannot be used ({what}), and run.resume=require does not "
            "use an older one",
            suggestion="Use run.resume=auto.",
        )
    if chosen is None:
        place = relative(run.checkpoints)
        raise RefusedError("holds no complete checkpoint", key="run.resume", value="require", place=place)


def _text_of_rank_zero(world: World, text: str) -> str:
    """Return rank zero's text, truncated if it is long, so that all ranks report the same.

    Ranks: all; communicates.
    """
    data = text.encode()[:_TEXT_BYTES] if world.is_rank_zero else b""
    numbers = torch.tensor([*data, *bytes(_TEXT_BYTES - len(data))], device=world.device)
    return bytes(world.broadcast(numbers).tolist()).rstrip(b"\0").decode(errors="ignore")


def _agreed(world: World, number: int) -> int:
    """Return rank zero's number. Ranks: all; communicates."""
    return int(world.broadcast(torch.tensor(number, device=world.device)))


def _checkpoint_at(run: RunDir, step: int) -> Checkpoint | None:
    return next((checkpoint for checkpoint in on_disk.scan(run.checkpoints).complete if checkpoint.step == step), None)

"""The actions after a step: by the periods of the trainer section, by requests, and by limits that are reached."""

from __future__ import annotations

from typing import NamedTuple

from ddpexp.settings.trainer import Trainer


class Due(NamedTuple):
    """What follows a step."""

    record: bool
    evaluation: bool
    checkpoint: bool
    comparison: bool
    is_last: bool

    @classmethod
    def after(cls, step: int, num_steps: int, steps_per_epoch: int, trainer: Trainer) -> Due:
        """Return what follows a step. Units: steps done."""
        is_last = step == num_steps
        return cls(
            record=step % trainer.log_every == 0 or is_last,
            evaluation=trainer.eval_every != 0 and (is_due(step, trainer.eval_every, steps_per_epoch) or is_last),
            checkpoint=is_due(step, trainer.checkpoint_every, steps_per_epoch)
            or is_due(step, trainer.keep_every or 0, steps_per_epoch),
            comparison=is_due(step, trainer.compare_replicas or 0, steps_per_epoch),
            is_last=is_last,
        )


NOTHING = Due(record=False, evaluation=False, checkpoint=False, comparison=False, is_last=False)


class End(NamedTuple):
    """The reason why a run does no further step."""

    stopped: str | None  # the run is done, as configured: a sentence without full stop; None: the run is interrupted


class Asked(NamedTuple):
    """The actions after a step that no period of the trainer section asks for. Ranks: all, with the same values."""

    save: bool = False  # a checkpoint, by a callback, by the metric to keep, by the time since the last one or a signal
    end: End | None = None
    profile: int = 0  # this many steps, from here on

    def __or__(self, other: Asked) -> Asked:
        """Return what either asks for; an interruption counts most, then the first reason."""
        ends = [asked.end for asked in (self, other) if asked.end is not None]
        end = min(ends, key=lambda end: end.stopped is not None, default=None)
        return Asked(self.save or other.save, end, max(self.profile, other.profile))


NOTHING_ASKED = Asked()
INTERRUPTED = Asked(end=End(None))


def next_due(step: int, num_steps: int, steps_per_epoch: int, trainer: Trainer) -> int:
    """Return the first step after `step` that anything follows. Units: steps done."""
    optional = (trainer.keep_every or 0, trainer.compare_replicas or 0)
    periods = (trainer.log_every, trainer.eval_every, trainer.checkpoint_every, *optional)
    lengths = [_length(every, steps_per_epoch) for every in periods]
    return min([num_steps, *(step + length - step % length for length in lengths if length)])


def next_evaluation(step: int, num_steps: int, steps_per_epoch: int, trainer: Trainer) -> int | None:
    """Return the first step after `step` that is evaluated; None if no step is. Units: steps done."""
    length = _length(trainer.eval_every, steps_per_epoch)
    return min(num_steps, step + length - step % length) if length else None


def is_due(step: int, every: int | str, steps_per_epoch: int) -> bool:
    """Return whether `step` ends a period of `every` steps, or an epoch; 0 is never."""
    length = _length(every, steps_per_epoch)
    return length != 0 and step % length == 0


def _length(every: int | str, steps_per_epoch: int) -> int:
    return steps_per_epoch if isinstance(every, str) else every

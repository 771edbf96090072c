"""The steps that are profiled, and of which the memory is written down."""

from __future__ import annotations

from typing import NamedTuple

from ddpexp.errors import RefusedError
from ddpexp.settings.trainer import Trainer

KEY = "trainer.profile"
MOST_STEPS = 1000  # in one trace: larger ones fill the memory, and no viewer opens them


class StepWindow(NamedTuple):
    """The steps after step `begin`, up to and including step `end`. Units: steps done."""

    begin: int
    end: int

    @classmethod
    def parse(cls, text: str) -> StepWindow:
        """Return what `trainer.profile=begin:end` names.

        Raises:
            RefusedError: it names no step, or too many.
        """
        begin, end = map(int, text.split(":"))
        if end <= begin:
            other = f"{end}:{begin}" if end < begin else f"{begin}:{begin + 10}"
            raise RefusedError(
                f"names no step: it stands for the steps after step {begin}, up to step {end}",
                key=KEY,
                value=text,
                suggestion=f"Did you mean {KEY}={other}?",
            )
        if end - begin > MOST_STEPS:
            raise RefusedError(
                f"names {end - begin:,} steps, and a trace holds at most {MOST_STEPS:,}",
                key=KEY,
                value=text,
                suggestion=f"A few show as much: {KEY}={begin}:{begin + 10}.",
            )
        return cls(begin, end)

    def __str__(self) -> str:
        """Return the steps for messages, by their numbers in records."""
        return f"step {self.end}" if self.end == self.begin + 1 else f"steps {self.begin + 1} to {self.end}"


def check_profiled(trainer: Trainer, num_steps: int | None) -> None:
    """Check the keys that name steps to look at; `num_steps` of the run, where that is known.

    Raises:
        RefusedError: they name no step, or one that the run does not have.
    """
    profile = None if trainer.profile is None else StepWindow.parse(trainer.profile)
    if num_steps is None:
        return
    if profile is not None and profile.end > num_steps:
        begin = max(0, num_steps - (profile.end - profile.begin))
        raise RefusedError(
            f"ends beyond the last step of the run, step {num_steps}",
            key=KEY,
            value=trainer.profile,
            suggestion=f"Use {KEY}={begin}:{num_steps}, or a longer run.",
        )
    if isinstance(trainer.memory_snapshot, int) and trainer.memory_snapshot > num_steps:
        raise RefusedError(
            f"is beyond the last step of the run, step {num_steps}",
            key="trainer.memory_snapshot",
            value=trainer.memory_snapshot,
            suggestion=f"Use trainer.memory_snapshot={num_steps}, or an earlier step.",
        )

"""What follows a step, and the next step that anything follows."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Literal

from ddpexp.train.due import NOTHING, Due, next_due
from tests.fitting import TRAINER

EPOCH = 5
PERIODS: list[Literal["epoch"] | int] = [0, "epoch", 4]


def test_nothing_follows_the_steps_before_the_next_one_that_is_due() -> None:
    for log, evaluation, checkpoint, keep, num_steps in product([1, 3, 50], PERIODS, PERIODS, [None, 6], [1, 23]):
        trainer = replace(TRAINER, log_every=log, eval_every=evaluation, checkpoint_every=checkpoint, keep_every=keep)
        due = [Due.after(step, num_steps, EPOCH, trainer) for step in range(1, num_steps + 1)]
        for step in range(num_steps):
            later = next(number for number in range(step + 1, num_steps + 1) if due[number - 1] != NOTHING)
            assert next_due(step, num_steps, EPOCH, trainer) == later

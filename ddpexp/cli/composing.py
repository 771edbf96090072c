"""Compose the experiment that the overrides of a verb describe, as a training with them would."""

from __future__ import annotations

from collections.abc import Sequence

from ddpexp.config.compose import compose
from ddpexp.config.parse import parse
from ddpexp.config.resolve import Composed
from ddpexp.config.schema import Experiment
from ddpexp.system.terminal import print_message


def compose_experiment(overrides: Sequence[str]) -> tuple[Experiment, Composed]:
    """Return the experiment and what it was parsed from; print the warnings.

    Raises:
        RefusedError: a training would be refused.
    """
    composed = compose(list(overrides))
    assert composed is not None  # a verb has no option that only asks for the configuration
    experiment = parse(composed.values)
    for warning in composed.warnings:
        print_message(f"ddpexp: warning: {warning}")
    return experiment, composed

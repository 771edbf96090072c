"""`ddpexp.compose`: an experiment in this process, with its parts built as a worker builds them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ddpexp.config.schema import Experiment
from ddpexp.errors import RefusedError

if TYPE_CHECKING:
    from ddpexp.data.datasets import Splits


def compose(arguments: Sequence[str]) -> Composed:
    """Compose an experiment by the rules of `python -m ddpexp` with these arguments; nothing is started or written.

    `--config-dir DIR` among them trusts the code beside DIR.

        experiment = ddpexp.compose(["recipe=mnist", "model=linear"])
        model, images = experiment.model(), experiment.data().train

    Raises:
        RefusedError: The command would be refused, with the same sentence.
    """
    from ddpexp.cli.api.start import checked
    from ddpexp.cli.verb import MULTIRUN
    from ddpexp.config.compose import compose as compose_run
    from ddpexp.config.parse import parse

    words = checked(arguments, "compose")
    if any(word in MULTIRUN for word in words):
        raise RefusedError(
            "ddpexp.compose composes one experiment", suggestion="Leave -m out, and give each key one value."
        )
    composed = compose_run(words)
    for text in composed.warnings:
        warnings.warn(text, stacklevel=2)
    return Composed(parse(composed.values), tuple(composed.overrides), dict(composed.values))


@dataclass(frozen=True)
class Composed:
    """An experiment that a command would train.

    Attributes:
        experiment: The typed, frozen configuration, such as `experiment.trainer.seed`.
        overrides: The overrides that it was composed from.
    """

    experiment: Experiment = field(repr=False)
    overrides: tuple[str, ...]
    _values: dict[str, Any] = field(repr=False)

    @property
    def config(self) -> dict[str, Any]:
        """The configuration as plain values."""
        return copy.deepcopy(self._values)

    def model(self) -> Any:
        """Return a new model with the weights that a run starts with, to the bit; on the CPU, in training mode.

        Of a recipe with several models, a mapping of names to modules. The global random generators stay unchanged.
        """
        from ddpexp.cli.api.build import new_model

        return new_model(self._with_facts())

    def _with_facts(self) -> Experiment:
        """Return the experiment with the facts of the data that it refers to; prepares the data if it does."""
        from ddpexp.cli.api.build import facts_of
        from ddpexp.config import facts
        from ddpexp.config.parse import parse

        return (
            parse(facts.resolve(self._values, found))
            if (found := facts_of(self.experiment, self._values))
            else self.experiment
        )

    def data(self) -> Splits:
        """Return the data sets that a run reads, `train` and `evals` by name; prepares the data if necessary."""
        from ddpexp.cli.api.build import open_splits

        return open_splits(self.experiment)

    def task(self) -> Any:
        """Return the recipe's task."""
        from ddpexp.cli.api.build import new_task

        return new_task(self._with_facts())

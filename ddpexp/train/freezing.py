"""Parameters that are not trained: trainer.freeze for a whole run, trainer.freeze_until up to a step."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ddpexp.config.param_groups import late_starts
from ddpexp.errors import RefusedError
from ddpexp.settings.parameters import as_tuple
from ddpexp.settings.trainer import Trainer
from ddpexp.strategy.base import num_elements
from ddpexp.system.text import size_text
from ddpexp.train.param_groups import Described, check_patterns, describe, matched


def freeze(model: Any, trainer: Trainer) -> None:
    """Freeze the parameters that trainer.freeze names, in a module or a mapping of them.

    Raises:
        RefusedError: a pattern matches nothing, or nothing is left to train.
    """
    if not trainer.freeze:
        return
    patterns = as_tuple(trainer.freeze)
    models, single = ({"model": model}, True) if isinstance(model, nn.Module) else (model, False)
    parameters = {id(p): p for module in models.values() for p in module.parameters()}
    described = describe(models, single)
    check_patterns(patterns, list(described.values()), "trainer.freeze")
    keys = list(described)
    for position in matched(patterns, list(described.values())):
        parameters[keys[position]].requires_grad_(False)
    if not any(p.requires_grad for p in parameters.values()):
        raise RefusedError(
            "leaves nothing to train",
            key="trainer.freeze",
            value=f"[{','.join(patterns)}]",
            suggestion="Leave out the layers to train, such as a head.",
        )


@dataclass(frozen=True)
class LateStart:
    """Parameters that are trained from a step on."""

    step: int
    patterns: Sequence[str]
    parameters: Sequence[Tensor]

    def __str__(self) -> str:
        """Return how much is frozen, as in the first lines of a run."""
        return f"{sum(num_elements(p) for p in self.parameters):,} frozen until step {self.step:,}"


@dataclass(frozen=True)
class LateStarts:
    """What trainer.freeze_until names: gradients are computed and reduced as ever, and dropped before they are used.

    Without a gradient, an optimizer neither changes a parameter nor keeps state for it, and weight decay does nothing.
    """

    entries: Sequence[LateStart] = ()

    @classmethod
    def of(cls, trainer: Trainer, models: Mapping[str, nn.Module], single: bool) -> LateStarts:
        """Return the parameters as the models have them.

        Raises:
            RefusedError: a pattern matches nothing that is trained, or nothing would be trained at first.
        """
        starts = late_starts(trainer.freeze_until)
        if not starts:
            return cls()
        parameters = {id(p): p for module in models.values() for p in module.parameters()}
        described = describe(models, single)
        trained = {key: value for key, value in described.items() if parameters[key].requires_grad}
        keys, entries = list(trained), []
        for where, entry in starts:
            check_patterns(entry.patterns, list(described.values()), f"{where}.match")
            for pattern in entry.patterns:
                if not matched([pattern], list(trained.values())):
                    raise RefusedError(
                        "matches only frozen parameters",
                        key=f"{where}.match",
                        value=f"[{pattern}]",
                        suggestion="Take them out of trainer.freeze, or of this key.",
                    )
            chosen = [parameters[keys[position]] for position in matched(entry.patterns, list(trained.values()))]
            entries.append(LateStart(entry.step, entry.patterns, chosen))
        _check_some_trained(entries, trained)
        return cls(entries)

    def texts(self) -> list[str]:
        """Return what is frozen at first, an entry each."""
        return [f"{', '.join(entry.patterns)}: {entry}" for entry in self.entries]

    def never_reached(self, num_steps: int) -> list[str]:
        """Return a sentence for each entry whose step a run of so many steps does not reach."""
        return [
            f"trainer.freeze_until.step={entry.step} is not reached in {num_steps:,} steps: "
            f"{', '.join(entry.patterns)} will not be trained, as with "
            f"trainer.freeze=[{','.join(entry.patterns)}], which costs less."
            for entry in self.entries
            if entry.step >= num_steps
        ]

    def drop_gradients(self, step: int) -> None:
        """Drop the gradients that are not to be used in a step. Units: steps, from 0."""
        for entry in self.entries:
            if step < entry.step:
                for parameter in entry.parameters:
                    parameter.grad = None

    def report(self, step: int) -> None:
        """Log what is trained from this step on. Units: steps, from 0."""
        for entry in self.entries:
            if step == entry.step:
                size = sum(num_elements(parameter) for parameter in entry.parameters)
                names = ", ".join(entry.patterns)
                logging.getLogger("ddpexp").info(f"after step {step:,} {names} is trained, too: {size:,} parameters")


def count_text(trainer: Trainer, models: Mapping[str, nn.Module], single: bool) -> str:
    """Return how many parameters the models have, their size, and how many are trained where some are not."""
    parameters = [p for module in models.values() for p in module.parameters()]
    total, trained = (sum(num_elements(p) for p in parameters if p.requires_grad or every) for every in (True, False))
    parts = [size_text(sum(num_elements(p) * p.dtype.itemsize for p in parameters))]
    parts += [f"{trained:,} trained, {total - trained:,} frozen"] if trained < total else []
    parts += [str(entry) for entry in LateStarts.of(trainer, models, single).entries]
    return f"{total:,} parameters ({'; '.join(parts)})"


def _check_some_trained(entries: Sequence[LateStart], trained: Mapping[int, Described]) -> None:
    waiting = {id(p) for entry in entries for p in entry.parameters}
    if len(waiting) == len(trained):
        first = min(entry.step for entry in entries)
        patterns = ",".join(pattern for entry in entries for pattern in entry.patterns)
        raise RefusedError(
            f"with match=[{patterns}] leaves nothing to train before step {first}",
            key="trainer.freeze_until",
            suggestion="Leave out the layers to train from the start, such as a head.",
        )

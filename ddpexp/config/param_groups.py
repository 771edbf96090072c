"""Keys of the trainer that choose parameters by name: groups, layer-wise rates, what is frozen. Free of torch."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from ddpexp.config.build import nearest, unknown_key
from ddpexp.errors import RefusedError, shown
from ddpexp.settings.parameters import FreezeUntil, ParamGroup, as_tuple
from ddpexp.settings.trainer import Trainer

LAYER_DECAY_EXAMPLE = "trainer.layer_decay={decay:0.75,layers:[blocks.*]}"
_SELECTORS = ("match", "ndim", "type", "name", "lr_scale")


def late_starts(freeze_until: FreezeUntil | tuple[FreezeUntil, ...] | None) -> list[tuple[str, FreezeUntil]]:
    """Return the entries of trainer.freeze_until with the key of each."""
    if freeze_until is None or isinstance(freeze_until, FreezeUntil):
        return [] if freeze_until is None else [("trainer.freeze_until", freeze_until)]
    return [(f"trainer.freeze_until[{index}]", entry) for index, entry in enumerate(freeze_until)]


def check_param_groups(entries: Sequence[ParamGroup], arguments: Sequence[str] | None) -> None:
    """Check trainer.param_groups; `arguments` are those of the optimizer, None if that is not one of torch.

    Raises:
        RefusedError: an entry chooses nothing, changes nothing, or has a setting that means nothing.
    """
    for index, entry in enumerate(entries):
        where = f"trainer.param_groups[{index}]"
        _check_settings(entry, where, arguments)
        if not (entry.patterns or entry.dimensions or entry.types):
            raise RefusedError(
                "does not say which parameters it is for",
                key=where,
                suggestion="Give it match=[...] with patterns of names, ndim=[...] or type=[...] with classes of "
                "layers.",
            )
        for dimensions in entry.dimensions:
            if dimensions < 0:
                raise RefusedError(
                    key=f"{where}.ndim", value=dimensions, suggestion="Use a number of dimensions from 0."
                )
        if entry.name is not None and not re.fullmatch(r"[\w.-]+", entry.name):
            raise RefusedError(
                "is a part of the names of metrics",
                key=f"{where}.name",
                value=entry.name,
                suggestion="Use letters, digits, '_', '-' and '.'.",
            )


def _check_settings(entry: ParamGroup, where: str, arguments: Sequence[str] | None) -> None:
    for key, value in entry.settings.items():
        if key == "weight_decay" and value == 0 and not isinstance(value, bool):
            continue  # so that a recipe may leave vectors without it, whichever optimizer is chosen
        may_be_known = nearest(key, _SELECTORS, 0.8) is None if arguments is None else key in arguments
        if not may_be_known:
            raise unknown_key(key, [*_SELECTORS, *(arguments or ())], where)
        if key in ("lr", "weight_decay"):
            _check_number(value, f"{where}.{key}")
    if entry.lr_scale is not None and "lr" in entry.settings:
        raise RefusedError(
            f"sets the learning rate twice, by lr={shown(entry.settings['lr'])} and lr_scale={entry.lr_scale}",
            key=where,
            suggestion="Leave one of them out.",
        )
    if entry.lr_scale is None and not entry.settings:
        raise RefusedError(
            "changes nothing",
            key=where,
            suggestion="Give it lr_scale, lr, weight_decay or another setting of the optimizer.",
        )


def _check_number(value: Any, key: str) -> None:
    if isinstance(value, bool) or not isinstance(value, float | int) or not 0 <= value < math.inf:
        raise RefusedError(key=key, value=value, suggestion="Use a number from 0.")


def check_layers_and_late_starts(trainer: Trainer) -> None:
    """Check that trainer.layer_decay names layers, and each entry of trainer.freeze_until parameters.

    Raises:
        RefusedError: one names none.
    """
    if trainer.layer_decay is not None and not as_tuple(trainer.layer_decay.layers):
        raise RefusedError(
            "names no layers",
            key="trainer.layer_decay.layers",
            value=[],
            suggestion=f"Name some, as in {LAYER_DECAY_EXAMPLE}.",
        )
    for where, entry in late_starts(trainer.freeze_until):
        if not entry.patterns:
            raise RefusedError(
                "names no parameters", key=f"{where}.match", value=[], suggestion="Give it patterns such as backbone.*."
            )

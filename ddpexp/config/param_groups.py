"""Keys of the trainer that choose parameters by name: groups, layer-wise rates, what is frozen. Free of torch."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ddpexp.config.build import nearest, shown, unknown_key
from ddpexp.errors import RefusedError

Patterns = str | tuple[str, ...]

LAYER_DECAY_EXAMPLE = "trainer.layer_decay={decay:0.75,layers:[blocks.*]}"
_SELECTORS = ("match", "ndim", "type", "name", "lr_scale")


@dataclass(frozen=True)
class ParamGroup:
    """An entry of trainer.param_groups: the parameters that meet all its conditions get its settings."""

    match: Patterns = ()  # globs on names; one of them must match
    ndim: int | tuple[int, ...] = ()
    type: Patterns = ()  # globs on the classes of the layers that hold a parameter
    name: str | None = None  # of the group, in records; None: made from the conditions
    lr_scale: float | None = None  # times optimizer.lr
    settings: Mapping[str, Any] = field(default_factory=dict, metadata={"rest": True})  # of the optimizer

    @property
    def patterns(self) -> tuple[str, ...]:
        """Return the globs on names."""
        return as_tuple(self.match)

    @property
    def dimensions(self) -> tuple[int, ...]:
        """Return the numbers of dimensions."""
        return self.ndim if isinstance(self.ndim, tuple) else (self.ndim,)

    @property
    def types(self) -> tuple[str, ...]:
        """Return the globs on classes."""
        return as_tuple(self.type)

    def conditions(self) -> str:
        """Return the conditions as they are typed."""
        given = {"match": self.patterns, "ndim": self.dimensions, "type": self.types}
        return " ".join(f"{key}=[{','.join(map(str, values))}]" for key, values in given.items() if values)

    def settings_for(self, lr: float) -> dict[str, Any]:
        """Return the settings of the optimizer for the parameters of this entry; `lr` is optimizer.lr."""
        scaled = {} if self.lr_scale is None else {"lr": lr * self.lr_scale}
        lists = {key: tuple(value) if isinstance(value, list) else value for key, value in self.settings.items()}
        return {**scaled, **lists}


@dataclass(frozen=True)
class LayerDecay:
    """Learning rates that fall from layer to layer, from the output to the input."""

    decay: float
    layers: Patterns  # globs on names of modules, from the input to the output


@dataclass(frozen=True)
class FreezeUntil:
    """Parameters whose gradients are dropped before a step."""

    step: int
    match: Patterns

    @property
    def patterns(self) -> tuple[str, ...]:
        """Return the globs on names."""
        return as_tuple(self.match)


def as_tuple(patterns: Patterns) -> tuple[str, ...]:
    """Return one or several patterns as several."""
    return (patterns,) if isinstance(patterns, str) else patterns


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
                f"{where} does not say which parameters it is for: give it match=[...] with patterns of names, "
                "ndim=[...] or type=[...] with classes of layers."
            )
        for dimensions in entry.dimensions:
            if dimensions < 0:
                raise RefusedError(f"{where}.ndim={dimensions}: use a number of dimensions from 0.")
        if entry.name is not None and not re.fullmatch(r"[\w.-]+", entry.name):
            raise RefusedError(
                f"{where}.name={entry.name} is a part of the names of metrics: use letters, digits, '_', '-' and '.'."
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
    if entry.lr_scale is not None:
        _check_number(entry.lr_scale, f"{where}.lr_scale")
    if entry.lr_scale is not None and "lr" in entry.settings:
        raise RefusedError(
            f"{where}.lr={shown(entry.settings['lr'])} {where}.lr_scale={entry.lr_scale} both set the learning rate: "
            "leave one of them out."
        )
    if entry.lr_scale is None and not entry.settings:
        raise RefusedError(
            f"{where} changes nothing: give it lr_scale, lr, weight_decay or another setting of the optimizer."
        )


def _check_number(value: Any, key: str) -> None:
    if isinstance(value, bool) or not isinstance(value, float | int) or not 0 <= value < math.inf:
        raise RefusedError(f"{key}={shown(value)}: use a number from 0.")


def check_layer_decay(layer_decay: LayerDecay | None) -> None:
    """Check trainer.layer_decay.

    Raises:
        RefusedError: the decay is not between 0 and 1, or no layers are named.
    """
    if layer_decay is None:
        return
    if not 0 < layer_decay.decay < 1:
        raise RefusedError(
            f"trainer.layer_decay.decay={layer_decay.decay}: use a number between 0 and 1, such as 0.75, by which the "
            "learning rate is multiplied from layer to layer."
        )
    if not as_tuple(layer_decay.layers):
        raise RefusedError(f"trainer.layer_decay.layers=[] names no layers, as in {LAYER_DECAY_EXAMPLE}.")


def check_freeze_until(entries: Sequence[tuple[str, FreezeUntil]]) -> None:
    """Check trainer.freeze_until.

    Raises:
        RefusedError: a step below 1, or no patterns.
    """
    for where, entry in entries:
        if entry.step < 1:
            raise RefusedError(
                f"{where}.step={entry.step}: use a number of steps from 1, after which they are trained."
            )
        if not entry.patterns:
            raise RefusedError(f"{where}.match=[] names no parameters: give it patterns such as backbone.*.")

"""From plain mappings to frozen dataclasses: types checked, every error with the key as typed on the command line."""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar, Union

from ddpexp.config.declared import SECTIONS, declared, default_of
from ddpexp.config.foreign import advice_on_key, advice_on_value, value_here
from ddpexp.config.keys import MISSING
from ddpexp.config.plugins import full_name
from ddpexp.errors import RefusedError, shown
from ddpexp.settings.node import Node

_SURE, _NEAR = 0.85, 0.65  # how similar a word is to what it may be meant for; 1 is equal
_NUMBER = re.compile(r"[+-]?\d+\.?\d*(e[+-]?\d+)?", re.IGNORECASE)
_VARIABLE = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+")
_TRUTHS = {"yes": "true", "on": "true", "1": "true", "no": "false", "off": "false", "0": "false"}
_SECONDS = {
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1),
    **dict.fromkeys(("m", "min", "mins", "minute", "minutes"), 60),
    **dict.fromkeys(("h", "hour", "hours"), 3600),
    **dict.fromkeys(("d", "day", "days"), 86400),
}
_MEGABYTES = {**dict.fromkeys(("m", "mb", "mib"), 1), **dict.fromkeys(("g", "gb", "gib"), 1024)}
_COUNTS = {"%": 0.01, "k": 1_000}
_NO_SUCH_KEY = {  # advice for keys that only look right
    "strategy._target_": "An installed package brings your own strategy, as strategy=NAME: see docs/strategies.md.",
    "logger._target_": "Each logger has a name, as in +logger.mine._target_=mine.Logger: see docs/loggers.md.",
    "callbacks._target_": "Each callback has a name, as in +callbacks.mine._target_=mine.Mine: see docs/callbacks.md.",
    "scheduler.warmup": "The rise of scheduler=onecycle is scheduler.peak_at, or scheduler.warmup_steps.",
    "trainer.monitor": "The metric of the best weights is in trainer.keep_best=max:eval/accuracy, with its mode.",
    "wandb.project": "Choose the logger, too: 'logger=[tensorboard,wandb]' logger.wandb.project=NAME.",
    "logger.wandb.name": "A run is named after its directory: run.dir=outputs/first.",
    "launcher.nodes": "Did you mean trainer.nodes?",
    "launcher.gpus": "Did you mean launcher.gpus_per_node (Slurm's) or trainer.gpus (the workers of each node)?",
    "launcher.ntasks_per_node": "A node has one task, which starts its workers: did you mean trainer.gpus?",
    "launcher.ntasks": "A node has one task, which starts its workers: did you mean trainer.nodes and trainer.gpus?",
    "launcher.mail": "Did you mean launcher.mail_user?",
    "launcher.email": "Did you mean launcher.mail_user?",
    "hydra.sweeper.n_trials": "It is Optuna's: choose its sweeper with hydra/sweeper=optuna.",
}

T = TypeVar("T")


def build(cls: type[T], values: Any, where: str) -> T:
    """Make the frozen dataclass `cls` from the mapping `values` that stands at the key `where`.

    A key that is not there has the default in `conf`.

    Raises:
        RefusedError: an unknown key (with the nearest known one), a missing key, a value of another type or outside
        the range that is declared for the key.
    """
    names = _names(cls)
    if not isinstance(values, Mapping):
        is_number = isinstance(values, int | float)
        raise RefusedError(
            f"is not a section: it has the keys {_joined(names)}",
            key=where,
            value=values,
            suggestion=f"Type one of them, for example {where}.{names[0]}={values}." if is_number else "",
        )
    rest = next((field.name for field in dataclasses.fields(cls) if field.metadata.get("rest")), None)  # type: ignore[arg-type]
    if rest is not None:  # it takes the keys that no other field has
        others = {str(key): value for key, value in values.items() if key not in names or key == rest}
        values = {**{key: value for key, value in values.items() if key not in others}, rest: others}
    for key in values:
        if key not in names:
            raise unknown_key(str(key), names, where)
    hints = typing.get_type_hints(cls, include_extras=True)
    built: dict[str, Any] = {}
    for field in (field for field in dataclasses.fields(cls) if field.init):  # type: ignore[arg-type]
        key = f"{where}.{field.name}"
        has_default = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        value = values.get(field.name, MISSING)
        if field.name not in values and not has_default:
            value = default_of(key)
        if value is not MISSING:
            built[field.name] = convert(value, hints[field.name], key)
        elif not has_default:
            raise RefusedError(
                "is missing", key=key, suggestion=f"Give it a value, for example in the recipe or as {key}=... ."
            )
    return cls(**built)


def node_of(values: Any, where: str) -> Node:
    """Return the section at the key `where` with the full name of what it calls, and its other keys frozen.

    Raises:
        RefusedError: it is not a section, or names nothing to call.
    """
    if not isinstance(values, Mapping):
        raise RefusedError(
            key=where, value=values, suggestion=f"Name a function or class, {where}={{_target_: mine.function}}."
        )
    if "_target_" not in values:
        raise RefusedError("is missing: it names the class or function to call", key=f"{where}._target_")
    rest = {key: _frozen(value) for key, value in values.items() if key != "_target_"}
    return Node(full_name(where, values["_target_"]), types.MappingProxyType(rest))


def _frozen(value: Any) -> Any:
    if isinstance(value, Mapping):
        return types.MappingProxyType({key: _frozen(inner) for key, inner in value.items()})
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(inner) for inner in value)
    return value


def did_you_mean(word: str, known: Iterable[str], prefix: str = "", suffix: str = "") -> str:
    """Say which known word is nearest, or list all when none is near; `prefix` and `suffix` make it what to type."""
    known = [name for name in known if not name.startswith("_")]
    near = nearest(word, known)
    return f"Did you mean {prefix}{near}{suffix}?" if near else f"Available: {_joined(known)}."


def nearest(word: str, known: Iterable[str], cutoff: float = _NEAR) -> str | None:
    """Return the known word that `word` may be meant for.

    One that is near to it, or the only one that begins with it.
    """
    plain = {name.lower().replace("-", "_"): name for name in known}
    word = word.lower().replace("-", "_")
    if word in plain:
        return plain[word]
    if near := difflib.get_close_matches(word, plain, n=1, cutoff=cutoff):
        return plain[near[0]]
    longer = [name for name in plain if len(word) > 2 and name.startswith(f"{word}_")]
    return plain[longer[0]] if len(longer) == 1 else None


def unknown_key(
    key: str, known: Iterable[str], where: str, keys: Iterable[str] = (), kind: str = "key"
) -> RefusedError:
    """Refuse a key that the section at `where` does not have, with what may be meant.

    That is what is typed here for another framework's word, a key of this section or, as whole keys in `keys`, of
    another one.
    """
    known, keys = [name for name in known if not name.startswith("_")], list(keys)
    typed = f"{where}.{key}" if where else key
    if where.startswith(("trainer.", "run.")) and not known:
        return RefusedError(
            "is null and has no keys", key=where, suggestion=f"Set it as a whole, as in '{where}={{{key}:...}}'."
        )
    if not where and _VARIABLE.fullmatch(key):
        return RefusedError(
            "is a variable of the environment, not a key",
            key=key,
            suggestion=f"Type it before the command, as in {key}=... python -m ddpexp ... .",
        )
    head, _, rest = key.partition(".")
    last = key.rpartition(".")[2]
    advice = _NO_SUCH_KEY.get(typed, "") or advice_on_key(typed)
    if not advice and where in SECTIONS and SECTIONS[where].is_group and key in ("name", "type"):
        advice = f"An option is chosen as {where}=NAME, with the names that ddpexp help {where} lists."
    if not advice:
        named = [one for one in keys if one.rpartition(".")[2] == last]
        alike = nearest(head, known, _SURE) if not rest else None
        alike = alike or (named[0] if len(named) == 1 else nearest(typed.replace("/", "."), keys, _SURE))
        if alike is not None:
            advice = f"Did you mean {alike if '.' in alike or not where else f'{where}.{alike}'}?"
        else:
            advice = did_you_mean(head, known, f"{where}." if where else "", f".{rest}" if rest else "")
    return RefusedError(f"is not a known {kind}", key=typed, suggestion=advice)


def _names(cls: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(cls) if field.init]


def _joined(words: Iterable[str]) -> str:
    return ", ".join(words) or "nothing"


def convert(value: Any, hint: Any, key: str) -> Any:
    """Return `value` as the annotated type `hint`; a whole number may stand for a float, a list for a tuple.

    Raises:
        RefusedError: another type or a word outside the choices, with the nearest choice; a number out of range.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        plain, spec, *_ = arguments
        converted = convert(value, plain, key)
        spec.check(value, plain, key)  # as it was typed
        return converted
    if origin in (Union, types.UnionType):
        fitting = next((one for one in arguments if _fits(value, one)), None)
        if fitting is None:
            raise _wrong(value, hint, key)
        return convert(value, fitting, key)
    if hint is Node:
        return node_of(value, key)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return build(hint, value, key)
    if origin is tuple and isinstance(value, (list, tuple)):
        keys = [f"{key}[{index}]" if isinstance(item, Mapping) else key for index, item in enumerate(value)]
        return tuple(convert(item, arguments[0], item_key) for item, item_key in zip(value, keys, strict=True))
    if origin is Mapping and isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        items = {name: convert(item, arguments[1], f"{key}.{name}") for name, item in value.items()}
        return types.MappingProxyType(items)
    if not _fits(value, hint):
        raise _wrong(value, hint, key)
    return float(value) if hint is float else value


def _fits(value: Any, hint: Any) -> bool:
    """Return whether `value` is of the type `hint`; any mapping is of the type of a dataclass."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True
    if origin is Annotated:
        return _fits(value, arguments[0])
    if origin in (Union, types.UnionType):
        return any(_fits(value, one) for one in arguments)
    if dataclasses.is_dataclass(hint):
        return isinstance(value, Mapping)
    if origin is Literal:
        return value in arguments and not isinstance(value, bool)
    if origin is tuple:
        return isinstance(value, (list, tuple)) and all(_fits(item, arguments[0]) for item in value)
    if origin is Mapping:
        return isinstance(value, Mapping) and all(
            isinstance(name, str) and _fits(item, arguments[1]) for name, item in value.items()
        )
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, (int, float) if hint is float else origin or hint)


def _wrong(value: Any, hint: Any, key: str) -> RefusedError:
    parts = [hint, *typing.get_args(hint)]
    if isinstance(value, str) and _NUMBER.fullmatch(value) and {int, float} & set(parts):
        return RefusedError(
            f"is a text, and the key takes {spoken(hint)}",
            key=key,
            value=f"'{value}'",
            suggestion=f"Leave out the quotes: {key}={value}.",
        )
    if advice := advice_on_value(key, shown(value).lower()):
        return RefusedError(f"is not {spoken(hint)}", key=key, value=value, suggestion=advice)
    near = _meant(value, hint, parts, key)
    meant = f"Did you mean {key}={near}?" if near else ""
    if key == "trainer.gpus" and isinstance(value, list | tuple):
        meant = (
            f"It is a number of GPUs: CUDA_VISIBLE_DEVICES={','.join(map(str, value))} before the command chooses "
            f"them, with trainer.gpus={len(value)}."
        )
    elif not near and str in parts and key in declared() and (use := declared()[key][0].use):
        meant = f"Use {use}."
    return RefusedError(f"is not {spoken(hint)}", key=key, value=value, suggestion=meant)


def _meant(value: Any, hint: Any, parts: Sequence[Any], key: str) -> str | None:
    """Return the value that may be meant, as it is typed."""
    text = shown(value).lower()
    if typing.get_origin(hint) is tuple:
        if not isinstance(value, str) or not value:
            return None
        return f"[{value}]" if re.fullmatch(r"[^\s'\"]+", value) else f"['{value}']"
    if (here := value_here(key, text)) is not None:
        return here
    if type(None) in parts and text in ("", "none", "nil"):
        return "null"
    if bool in parts and text in _TRUTHS:
        return _TRUTHS[text]
    if int in parts and isinstance(value, float) and value.is_integer():
        return str(int(value))
    if (int in parts or float in parts) and isinstance(value, str) and (number := _without_unit(text, key)) is not None:
        if number.is_integer():
            return str(int(number))
        return f"{number:g}" if float in parts else None
    return nearest(shown(value), filter(_is_text, literals(hint)))


def _without_unit(text: str, key: str) -> float | None:
    """Return the number that a text with a unit stands for, in the unit of the key; None where it has none of these."""
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+) ?([a-z%]+)", text)
    if match is None:
        return None
    units: Mapping[str, float] = _COUNTS
    if key.endswith("_seconds"):
        units = _SECONDS
    elif key.endswith("_mb"):
        units = _MEGABYTES
    return float(match[1]) * units[match[2]] if match[2] in units else None


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def literals(hint: Any) -> list[Any]:
    """Return the words that a type names."""
    if typing.get_origin(hint) is Literal:
        return list(typing.get_args(hint))
    return [word for part in typing.get_args(hint) for word in literals(part)]


_SPOKEN = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", type(None): "null"}


def spoken(hint: Any) -> str:
    """Say in words what a value of a type may be."""
    origin = typing.get_origin(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(spoken(part) for part in typing.get_args(hint))
    if origin is Literal:
        words = [str(word) for word in typing.get_args(hint)]
        return words[0] if len(words) == 1 else f"one of {', '.join(words)}"
    if origin is tuple:
        return f"a list, each item {spoken(typing.get_args(hint)[0])}"
    if dataclasses.is_dataclass(hint):
        return f"a section with the keys {_joined(_names(hint))}"
    if origin is Mapping:
        return f"keys, each with {spoken(typing.get_args(hint)[1])}"
    return _SPOKEN.get(hint, getattr(hint, "__name__", str(hint)))

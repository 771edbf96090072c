"""Interpolations: within bounds, with the values of `${hydra:...}`, and only by the resolvers that are allowed.

A few lines of `${...}` can stand for more values, more text and more time than there are.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from operator import getitem
from typing import Any, cast

from omegaconf import Container, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ddpexp.compat.omegaconf import (
    Place,
    count_nodes,
    guarded_resolvers,
    observed_interpolations,
    register_resolver,
)
from ddpexp.config import facts
from ddpexp.config.sentences import refusal
from ddpexp.errors import RefusedError

_RESOLVED, _NODES = 10_000, 200_000
_CHARACTERS, _LONGEST = 8 << 20, 1 << 16  # of all results together, and of one
_HYDRA_VALUES = ("runtime.cwd", "runtime.version", "runtime.choices", "job.name", "job.config_name", "mode")
_HYDRA_REFERENCE = re.compile(r"\$\{hydra:([\w./-]+)\}")
_SECONDS = 3.0  # of this process's own work, however busy the machine is


class _Excess(BaseException):
    """A bound is reached; no `Exception`, of which OmegaConf would make another one."""


@contextmanager
def bounded_interpolations() -> Iterator[None]:
    """Have OmegaConf resolve no more than a configuration needs, in all that is done inside.

    Raises:
        RefusedError: there is more.
    """
    register_resolver("facts", facts.reference, replace=True)
    resolved = nodes = characters = 0
    deadline = time.process_time() + _SECONDS

    def count(value: Any) -> None:
        nonlocal resolved, nodes, characters
        resolved += 1
        if isinstance(value, Container):
            nodes += count_nodes(value, _NODES - nodes)
        elif isinstance(value, str):
            characters += len(value) if len(value) <= _LONGEST else _CHARACTERS + 1
        if resolved > _RESOLVED or nodes >= _NODES or characters > _CHARACTERS or time.process_time() > deadline:
            raise _Excess

    try:
        with observed_interpolations(count):
            yield
    except (_Excess, RecursionError):
        raise RefusedError(
            "The configuration refers to itself with ${...} so often, or so deeply, that this may have no "
            f"end: more than {_RESOLVED:,} times, for a text of more than {_LONGEST:,} characters, or for "
            f"more than {_SECONDS:g} s",
            suggestion="Write the values themselves.",
        ) from None


def hydra_values(section: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return the values of `${hydra:PATH}` by PATH, from Hydra's section; `overrides` are as typed."""
    values: dict[str, Any] = {name: reduce(getitem, name.split("."), section) for name in _HYDRA_VALUES}
    values["mode"] = values["mode"] or "RUN"
    values["job.override_dirname"] = override_dirname(section, overrides)
    return values


def override_dirname(section: Mapping[str, Any], overrides: Sequence[str]) -> str:
    """Return overrides as part of a path, as Hydra does; without those that may have such a part themselves."""
    conf = section["job"]["config"]["override_dirname"]
    left_out = ("run.dir", *conf["exclude_keys"])
    texts = [
        override
        for override in overrides
        if "${" not in override and not re.match(r"[+~]*hydra[./]", override)
        if override.partition("=")[0].lstrip("+~") not in left_out
    ]
    return str(conf["item_sep"]).join(sorted(texts)).replace("=", str(conf["kv_sep"]))


@contextmanager
def hydra_resolver(values: Mapping[str, Any]) -> Iterator[None]:
    """Have OmegaConf resolve `${hydra:PATH}` to one of these values inside the block; every other path is refused."""
    register_resolver("hydra", lambda path: _hydra_value(values, path), replace=True)
    try:
        yield
    finally:
        OmegaConf.clear_resolver("hydra")


def replace_hydra_references(text: str, values: Mapping[str, Any]) -> str:
    """Replace `${hydra:PATH}` in a text that keeps other references: only this command knows the values."""
    return _HYDRA_REFERENCE.sub(lambda reference: str(_hydra_value(values, reference[1])), text)


def _hydra_value(values: Mapping[str, Any], path: str) -> Any:
    """Return the value of `${hydra:PATH}`.

    Raises:
        ValueError: it has none, with the reason.
    """
    name = next((name for name in values if path == name or path.startswith(f"{name}.")), None)
    if name is not None:
        value = values[name]
        if path == name:
            return value
        rest = path[len(name) + 1 :]
        if isinstance(value, Mapping) and rest in value:
            return value[rest]
        raise ValueError(f"${{hydra:{path}}} has no value: no option of {rest} is chosen")
    if path in ("runtime.output_dir", "run.dir", "sweep.subdir"):
        raise ValueError(
            f"${{hydra:{path}}} has no value: the run directory is made when the configuration is accepted. Type "
            "run.dir=..., and write ${run.dir}"
        )
    if path in ("job.num", "sweep.dir"):
        raise ValueError(f"${{hydra:{path}}} has a value only in the jobs of a sweep (-m)")
    raise ValueError(f"${{hydra:{path}}} has no value here: there is {', '.join(values)}")


@contextmanager
def only_resolvers(allows: Callable[[Place, str], bool]) -> Iterator[dict[Place, str]]:
    """Let OmegaConf call only the resolver `facts`, and those for which `allows` returns true, inside the block.

    `allows` gets the place where the reference is written, as names and positions, and the text of the reference, such
    as `oc.env:NAME`. A refused reference stands for an empty text; the result has its text by its place.
    """
    refused: dict[Place, str] = {}

    def evaluate(resolver: str, arguments: tuple[Any, ...], place: Place, call: Callable[[], Any]) -> Any:
        name = f"{resolver}:{','.join(map(str, arguments))}"
        if resolver == "facts" or allows(place, name):
            return call()
        refused.setdefault(place, name)
        return ""

    with guarded_resolvers(evaluate):
        yield refused


def resolved(values: Mapping[str, Any], place: object = "config.yaml") -> dict[str, Any]:
    """Resolve the interpolations of a tree.

    Raises:
        RefusedError: there are too many, one leads to nothing, or a value is missing.
    """
    with bounded_interpolations():
        try:
            tree = OmegaConf.to_container(OmegaConf.create(dict(values)), resolve=True, throw_on_missing=True)
        except OmegaConfBaseException as error:
            raise RefusedError(f"cannot be resolved: {refusal(error)}", place=place) from None
    return {str(key): value for key, value in cast(dict[Any, Any], tree).items()}

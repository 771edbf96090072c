"""Prepare the data once, before any worker starts."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
import traceback
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddpexp.config import facts
from ddpexp.config.data_functions import check_description, check_takes_keys
from ddpexp.config.instantiate import Trust, instantiate, locate
from ddpexp.config.registry import key_of
from ddpexp.config.resolve import text_with_facts
from ddpexp.data.cache import only_own_caches
from ddpexp.data.mixture.facts import Source, shared_facts
from ddpexp.data.named_files import is_value_file
from ddpexp.data.schema import STATISTICS, Schema
from ddpexp.errors import RefusedError
from ddpexp.settings.data import Data
from ddpexp.settings.node import Node
from ddpexp.system import separate_process
from ddpexp.system.user_code import place_in_code
from ddpexp.system.yaml_text import load_yaml

_TABLES = ("arrays", "hf")
_PATHS = ("root", "path", "eval_path")
_REMOTE = ("hf", "tar_shards")  # their paths may be names on a hub, addresses and patterns
_DIVISION = ("validation_fraction", "fold", "folds", "stratify", "group_by")  # the keys that hold samples out


def prepare(data: Data, trust: Trust, stored: bool = False) -> dict[str, Any] | None:
    """Call `prepare` of the data section and return its description of the data; None if there is nothing to prepare.

    Data that a `stored` configuration names, that of a run directory, gets no cache beside it.

    ddpexp's own functions run in this process: they are fast and free of torch. A user's function may import torch, so
    it runs in a process of its own.

    Raises:
        RefusedError: the data is missing, damaged or cannot be stored.
    """
    with only_own_caches(stored):
        return _prepare(data, trust, stored)


def _prepare(data: Data, trust: Trust, stored: bool) -> dict[str, Any] | None:
    if data.sources:
        _check_sources(data)
        return _of_mixture(data, {name: _prepare_source(name, data, trust, stored) for name in data.sources})
    if data.prepare is None:
        _check_values(data, None)
        return None
    if key_of("data.prepare", data.prepare) is not None:
        description = instantiate(Node(data.prepare, _arguments(data)), trust, "data.prepare")
    else:
        description = _call_in_subprocess(data, trust, stored)
    _check_values(data, description.get("num_train") if "unit" not in description else None)
    return _with_statistics(data, description) if _needs_statistics(data, description) else dict(description)


def _prepare_source(name: str, mixture: Data, trust: Trust, stored: bool) -> dict[str, Any] | None:
    """Prepare a source of a mixture; an error about it has its keys as they are typed."""
    source = mixture.sources[name]
    try:
        return _prepare(source, trust, stored)
    except RefusedError as error:
        key = re.compile(rf"\bdata\.(?=({'|'.join(source.options)})\b)")
        fields = error.as_dict()
        texts = {field: key.sub(f"data.sources.{name}.", fields[field] or "") for field in ("reason", "suggestion")}
        typed = {"key": key.sub(f"data.sources.{name}.", error.key)} if error.key is not None else {}
        raise RefusedError.from_dict({**fields, **texts, **typed}) from None


def check_paths(data: Data, section: str = "data") -> None:
    """Check that the files and folders that ddpexp's own kinds of data are to read here exist; nothing is read.

    Raises:
        RefusedError: one does not.
    """
    for name, source in data.sources.items():
        check_paths(source, f"{section}.sources.{name}")
    kind = key_of("data.prepare", data.prepare)
    if kind is None or kind in _REMOTE or data.options.get("source") == "download":
        return
    for key in _PATHS:
        named = data.options.get(key) or ()
        for path in (named,) if isinstance(named, str) else named:
            full = os.path.expanduser(path)
            if not os.path.exists(full) and not (glob.has_magic(full) and glob.glob(full, recursive=True)):
                raise RefusedError(
                    "does not exist here", key=f"{section}.{key}", value=path, suggestion="Name what a run is to read."
                )


def prepare_to_predict(data: Data, trust: Trust, trained_on: Mapping[str, Any], stored: bool) -> dict[str, Any] | None:
    """Prepare the data for a trained model, by the schema of its run; targets may be missing.

    `trained_on` describes the data of the run, as its manifest does. A set without targets has `is_single_set` in its
    description: nothing is held out of it.

    Raises:
        RefusedError: as `prepare`, or the data does not fit the schema.
    """
    known = _schema_for(data, trained_on)
    if known is None or key_of("data.predict", data.prepare) is None:
        return prepare_to_resume(data, trust, trained_on, stored)
    with only_own_caches(stored):
        description = instantiate(Node(str(data.prepare), _arguments(data)), trust, "data.predict", known)
    if not description.get("is_single_set"):
        _check_values(data, description.get("num_train"))
    return dict(description)


def prepare_to_evaluate(data: Data, trust: Trust, trained_on: Mapping[str, Any], stored: bool) -> dict[str, Any] | None:
    """Prepare the data as `prepare_to_predict`; the targets are needed. Raises: RefusedError."""
    description = prepare_to_predict(data, trust, trained_on, stored)
    return prepare(data, trust, stored) if description and description.get("is_single_set") else description


def prepare_to_resume(data: Data, trust: Trust, trained_on: Mapping[str, Any], stored: bool) -> dict[str, Any] | None:
    """Prepare the data of a run by the schema of what it was `trained_on`, and so the sources of a mixture.

    Raises:
        RefusedError: as `prepare`, or the data does not fit the schema.
    """
    return prepare(_by_schema(data, trained_on), trust, stored)


def _by_schema(data: Data, trained_on: Mapping[str, Any]) -> Data:
    """Return a section in which the schema of the data that was trained on is given, if it is of this kind of data."""
    of_sources = trained_on.get("sources")
    of_sources = of_sources if isinstance(of_sources, Mapping) else {}
    sources = {name: _by_schema(source, of_sources.get(name) or {}) for name, source in data.sources.items()}
    known = _schema_for(data, trained_on)
    options = data.options if known is None else {**data.options, "schema": known}
    return replace(data, options=options, sources=sources)


def _schema_for(data: Data, trained_on: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the schema of the data that was trained on; None if there is none, or this is data of another kind."""
    kind = key_of("data.prepare", data.prepare)
    known = trained_on.get("schema")
    same = kind == trained_on.get("name") or {kind, trained_on.get("name")} <= set(_TABLES)
    return known if kind is not None and same and isinstance(known, Mapping) else None


def _arguments(data: Data) -> Mapping[str, Any]:
    """Return the arguments of one of our own functions: tables read the column by which samples are grouped, too."""
    return {**data.options, "group_by": data.group_by} if data.prepare in _TABLES else data.options


def _needs_statistics(data: Data, description: Mapping[str, Any]) -> bool:
    """Return whether the preparation leaves numbers open that depend on which samples are held out."""
    if data.prepare not in _TABLES or "schema" in data.options:
        return False
    return bool(description["standardize"]) or Schema.read(description["schema"]).needs_statistics


def _with_statistics(data: Data, description: Mapping[str, Any]) -> dict[str, Any]:
    from ddpexp.data.arrays.statistics import with_statistics  # late: few kinds of data need it

    return with_statistics(description, {key: getattr(data, key) for key in _DIVISION})


def _check_sources(data: Data) -> None:
    """Raise RefusedError if samples of a source would be held out after its statistics are computed."""
    for name, source in data.sources.items():
        rules = (source.options.get("missing") or {}).values()
        rule = next((f"missing={rule}" for rule in rules if rule in STATISTICS), None)
        if (source.options.get("standardize") or rule) and (data.validation_fraction or data.folds is not None):
            raise RefusedError(
                "is computed before the mixture holds samples out",
                key=f"data.sources.{name}.{rule or 'standardize=true'}",
                suggestion="Give the source a file to evaluate on (eval_path), or leave one of the two keys out.",
            )


def _of_mixture(data: Data, sources: Mapping[str, Mapping[str, Any] | None]) -> dict[str, Any]:
    """Return the description of a mixture: facts are those that all sources have alike.

    Raises:
        RefusedError: they differ in a fact that one model cannot learn both ways.
    """
    known = {name: source or {} for name, source in sources.items()}
    shared = shared_facts(
        [Source(name, source.get("facts") or {}, data.sources[name].options) for name, source in known.items()]
    )
    hashes = [
        next((str(source[key]) for key in ("sha256", "hash") if key in source), None) for source in known.values()
    ]
    notes = [
        f"{name}: {source.get('note') or source.get('name') or 'loaded by the workers'}"
        for name, source in known.items()
    ]
    described = {"name": "mixture", "sources": dict(sources), "facts": shared, "note": f"mixture of {'; '.join(notes)}"}
    if None in hashes:
        return described
    text = json.dumps([*zip(known, hashes, strict=True)])
    return {**described, "hash": hashlib.sha256(text.encode()).hexdigest()}


def used_facts(text: str, data: Data, prepared: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the facts of the prepared data that a configuration, as YAML, refers to.

    Raises:
        RefusedError: a fact that is not there, or a model that is too small for them.
    """
    given = (prepared or {}).get("facts") or {}
    if "vocab_size" in given:
        facts.check_model(load_yaml(text), given)
    return facts.used(load_yaml(text), given, f"data.prepare={data.prepare}") if facts.refers(text) else {}


def with_facts(text: str, data: Data, prepared: Mapping[str, Any] | None) -> str:
    """Return a configuration with the facts of the prepared data in place of its references to them.

    Raises:
        RefusedError: a fact that is not there.
    """
    return text_with_facts(text, used_facts(text, data, prepared))


def _check_values(data: Data, num_train: Any) -> None:
    """Check the files with a value for each training sample; where their number is not known yet, the workers do."""
    weighted = isinstance(data.weights, str) and data.weights != "balanced"
    by_file = [is_value_file(name) for name in (data.group_by, data.lengths)]
    if weighted or any(by_file):
        from ddpexp.data.weights import checked_amounts, checked_groups, checked_weights, read_values  # late: numpy

        count = num_train if isinstance(num_train, int) else None
        if weighted:
            checked_weights(read_values(str(data.weights), "data.weights"), count, f"data.weights={data.weights}")
        if data.group_by is not None and by_file[0]:
            checked_groups(read_values(data.group_by, "data.group_by"), count, data.group_by)
        if data.lengths is not None and by_file[1]:
            checked_amounts(read_values(data.lengths, "data.lengths"), count, "length", f"data.lengths={data.lengths}")


def call_prepare(request: Mapping[str, Any]) -> Any:
    """Call a user's function, in a process of its own."""
    trust = Trust(tuple(request["trust"]), Path(request["code"]) if request["code"] else None)
    trust.make_importable()
    target, options = request["target"], request["options"]
    check_takes_keys(locate(target, trust, "data.prepare"), options, "data.prepare", target)
    with only_own_caches(request["stored"]):
        try:
            returned = instantiate(Node(target, options), trust, "data.prepare")
        except RefusedError:
            raise
        except Exception as error:
            traceback.print_exc()
            raise RefusedError(
                f"failed: {type(error).__name__}: {error}",
                key="data.prepare",
                value=target,
                place=place_in_code(error),
                suggestion="The traceback is above.",
            ) from None
    return check_description(returned, target)


def _call_in_subprocess(data: Data, trust: Trust, stored: bool) -> Any:
    request = {
        "target": data.prepare,
        "options": _plain(data.options),
        "trust": list(trust.prefixes),
        "code": str(trust.code) if trust.code else None,
        "stored": stored,
    }
    try:
        return separate_process.call("ddpexp.run.prepare:call_prepare", request)
    except separate_process.NoAnswerError as error:
        raise RefusedError(
            f"failed with exit code {error.status}",
            key="data.prepare",
            value=data.prepare,
            suggestion="See its output above.",
        ) from None


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value

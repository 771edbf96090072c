"""Parse the values of a configuration, or a run directory's config.yaml, into a typed and checked experiment."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import types
import typing
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal

import yaml

from ddpexp.config import facts, fused, registry
from ddpexp.config.build import build, convert, did_you_mean, nearest, shown, unknown_key
from ddpexp.config.folders import LISTED, conf_folder, options
from ddpexp.config.instantiate import Node, Trust, check_target, check_trusted, locate
from ddpexp.config.plugins import full_name, installed
from ddpexp.config.schema import DATA_KEYS, TYPED_SECTIONS, Auto, Data, Experiment, Predict, Recipe, Run, Trainer
from ddpexp.config.validate import ALERT_URL, check, check_alert_url
from ddpexp.data.mixture.weights import check_mixture
from ddpexp.errors import RefusedError
from ddpexp.launch.launchers.base import Launcher
from ddpexp.strategy.options import Options
from ddpexp.system.yaml_text import load_yaml
from ddpexp.task import Schedule


def load(text: str) -> Experiment:
    """Read the experiment back from the text of a run directory's config.yaml, in any process.

    Raises:
        RefusedError: it is no configuration, or refers to what is not there.
    """
    try:
        values = load_yaml(text)
    except (ValueError, yaml.YAMLError) as error:
        raise RefusedError(f"config.yaml cannot be read: {error}.") from None
    if not isinstance(values, Mapping):
        raise RefusedError("config.yaml is not the configuration of a run.")
    if "${" in text:  # secrets stay references in the file; the library is only loaded where there are some
        from ddpexp.config.interpolations import resolved

        values = resolved(values)
    return parse(values)


def parse(values: Mapping[str, Any]) -> Experiment:
    """Turn the composed and resolved tree into an experiment; imports neither torch nor any user's code.

    Raises:
        RefusedError: an unknown key, a wrong type, a name outside the allowlist or keys that contradict one another.
    """
    values, sections = dict(values), list(Experiment.__dataclass_fields__)
    for key in values:
        if key not in sections:
            keys = [
                f"{name}.{field}" for name, section in TYPED_SECTIONS.items() for field in section.__dataclass_fields__
            ]
            raise unknown_key(str(key), sections, "", keys, kind="section")
    for name in sections:
        if name in (*LISTED, "predict") and values.get(name) is None:
            values[name] = {}
        if values.get(name) is None and name in ("model", "data"):
            continue  # below, when what is there is known to be right
        if values.get(name) is None:
            own = f"as {name}: {{_target_: mine.Name}}, or" if name == "task" else "for example"
            raise RefusedError(f"{name} is missing: a recipe gives it, {own} recipe=mnist.")
        if not isinstance(values[name], Mapping):
            raise RefusedError(f"{name}={values[name]} is not a section with keys.{_as_section(name, values[name])}")
    run = build(Run, values["run"], "run")
    trust = Trust(run.trust, Path(run.code) if run.code else None)
    check_trusted(values, trust)
    facts.check(values)
    trainer = build(Trainer, values["trainer"], "trainer")
    for name in ("model", "data"):
        if not _is_chosen(name, values.get(name)):
            raise RefusedError(_not_chosen(name, values))
    experiment = Experiment(
        recipe=build(Recipe, values["recipe"], "recipe"),
        task=_node(values["task"], "task"),
        model=_node(values["model"], "model"),
        data=_data(values["data"], trust),
        optimizer=fused.for_target(_node(values["optimizer"], "optimizer")),
        scheduler=_schedule(values["scheduler"]),
        strategy=_strategy(values["strategy"]),
        launcher=_call(values["launcher"], "launcher", Launcher),
        logger=_loggers(values["logger"]),
        callbacks=_callbacks(values["callbacks"]),
        trainer=trainer,
        run=run,
        predict=build(Predict, values["predict"], "predict"),
    )
    check(experiment)
    return experiment


def _is_chosen(name: str, section: Mapping[str, Any] | None) -> bool:
    """Return whether a recipe or an option gives a section; `data` always has the keys of every kind of data."""
    return section is not None and (name != "data" or not set(section) <= set(DATA_KEYS))


def _not_chosen(name: str, values: Mapping[str, Any]) -> str:
    recipe = values.get("recipe")
    title = f"recipe={recipe.get('name')}" if isinstance(recipe, Mapping) else "the recipe"
    example = {"model": "mine.Net", "data": "mine.load"}[name]
    known = " or ".join(f"{name}={option}" for option in options(name, [conf_folder()]))
    return (
        f"{name} is missing: {title} names none. Write {name}: {{_target_: {example}}} in the recipe, or choose an "
        f"option: {known}."
    )


def _as_section(name: str, value: object) -> str:
    """Return how a name in the place of a section is written as a section."""
    found = re.fullmatch(r"(?:_target_ *)?([A-Za-z_]\w*(?:\.\w+)+)", value) if isinstance(value, str) else None
    return f" Write {name}: {{_target_: {found[1]}}}." if found is not None else ""


def _node(values: Mapping[str, Any], where: str) -> Node:
    if "_target_" not in values:
        raise RefusedError(f"{where}._target_ is missing: it names the class or function to call.")
    rest = {key: _frozen(value) for key, value in values.items() if key != "_target_"}
    return Node(full_name(where, values["_target_"]), types.MappingProxyType(rest))


def _listed(values: Mapping[str, Any], section: str, called: str) -> Mapping[str, Node]:
    """Return the loggers or callbacks by the keys below their section; null switches one off."""
    if "_target_" in values:
        raise RefusedError(
            f"{section}._target_={values['_target_']}: several {called}s may be chosen, so each stands below a key of "
            "its own. Write, in the option's file, name: {_target_: ...} with a name in place of _target_ at the top."
        )
    for name, value in values.items():
        if not isinstance(value, Mapping | None):
            known = ("none", *registry.keys_of(section))
            meant = did_you_mean(str(value if name == "kind" else name), known, f"{section}=")
            raise RefusedError(
                f"{section}.{name}={shown(value)} is not a {called}, which is a section with a _target_.{meant}"
            )
        if value is not None and "_target_" not in value:
            known = (*registry.keys_of(section), *installed(section))
            near = nearest(str(name), {*known, *(other for other in values if other != name)} - {name})
            if name in known:
                raise RefusedError(f"{section}.{name} has keys and is not chosen: choose it as {section}={name}.")
            if near is not None:
                raise RefusedError(f"{section}.{name} is not a known {called}. Did you mean {section}.{near}?")
    return types.MappingProxyType(
        {str(name): _node(value, f"{section}.{name}") for name, value in values.items() if value is not None}
    )


def _loggers(values: Mapping[str, Any]) -> Mapping[str, Node]:
    """Return the loggers by their keys; the arguments of ours that are free of torch are checked."""
    check_alert_url(values.get(ALERT_URL))
    nodes = _listed({name: value for name, value in values.items() if name != ALERT_URL}, "logger", "logger")
    for name, node in nodes.items():
        where = f"logger.{name}"
        if registry.key_of(where, node.target) in registry.REMOTE_LOGGERS:
            _typed_arguments(locate(node.target, Trust(), where), node.kwargs, where, given=("info",))
    return nodes


def _callbacks(values: Mapping[str, Any]) -> Mapping[str, Node]:
    """Return the callbacks by their keys; ours, which are free of torch, are built to check their arguments."""
    nodes = _listed(values, "callbacks", "callback")
    for name, node in nodes.items():
        where = f"callbacks.{name}"
        if registry.key_of(where, node.target) is not None:
            callback = locate(node.target, Trust(), where)
            try:
                callback(**_typed_arguments(callback, node.kwargs, where))
            except ValueError as error:
                raise RefusedError(f"{where}.{error}") from None
    return nodes


def _strategy(values: Mapping[str, Any]) -> Options:
    """Build the options of the strategy that `strategy.kind` names."""
    kind = convert(values.get("kind", "ddp"), str, "strategy.kind")
    paths = {key: registry.path_of("strategy", key) for key in registry.keys_of("strategy")}
    if kind not in paths:
        paths = {**installed("strategy"), **paths}
    if kind not in paths:
        raise RefusedError(
            f"strategy.kind={kind} names no strategy.{did_you_mean(kind, paths, 'strategy=')} A strategy of your own "
            "is an installed package with an entry point in the group ddpexp.strategies (docs/strategies.md)."
        )
    module, _, name = paths[kind].rpartition(".")
    try:
        options = getattr(importlib.import_module(module), name)
    except Exception as error:
        raise RefusedError(
            f"strategy={kind}: {paths[kind]} cannot be imported: {type(error).__name__}: {error}. Is its package "
            "complete?"
        ) from error
    if not (isinstance(options, type) and issubclass(options, Options) and dataclasses.is_dataclass(options)):
        raise RefusedError(
            f"strategy={kind}: {paths[kind]} is not a dataclass derived from ddpexp.strategy.options.Options."
        )
    return build(options, values, "strategy")


def _data(values: Mapping[str, Any], trust: Trust, where: str = "data") -> Data:
    node = _node({key: value for key, value in values.items() if key not in DATA_KEYS}, where)
    key = f"{where}.prepare"
    prepare = convert(values.get("prepare"), str | None, key)
    if prepare is not None:
        check_target(prepare, trust, key)
        if registry.key_of(key, prepare) is not None:  # ours are quick to import; a user's may import torch
            _typed_arguments(locate(prepare, trust, key), node.kwargs, where)
    return Data(
        target=node.target,
        prepare=prepare,
        validation_fraction=convert(values.get("validation_fraction", 0.0), float, "data.validation_fraction"),
        num_workers=convert(values.get("num_workers", 0), int, "data.num_workers"),
        on_device=convert(values.get("on_device", False), Auto | bool, "data.on_device"),
        options=node.kwargs,
        stratify=convert(values.get("stratify"), bool | None, "data.stratify"),
        group_by=convert(values.get("group_by"), str | None, "data.group_by"),
        fold=convert(values.get("fold"), int | None, "data.fold"),
        folds=convert(values.get("folds"), int | None, "data.folds"),
        weights=_weights(values.get("weights")),
        samples_per_epoch=convert(values.get("samples_per_epoch"), int | None, "data.samples_per_epoch"),
        lengths=convert(values.get("lengths"), str | None, "data.lengths"),
        batch_tokens=convert(values.get("batch_tokens"), int | None, "data.batch_tokens"),
        transform=_functions(values.get("transform"), "data.transform"),
        eval_transform=_functions(values.get("eval_transform"), "data.eval_transform"),
        transform_of=convert(values.get("transform_of", "input"), Literal["input", "sample"], "data.transform_of"),
        collate=next(iter(_functions(values.get("collate"), "data.collate")), None),
        sources=_sources(node, trust, where) if registry.key_of("data", node.target) == "mixture" else {},
    )


def _sources(mixture: Node, trust: Trust, where: str) -> Mapping[str, Data]:
    """Return the sources of a mixture by name, once its other keys are checked."""
    _typed_arguments(check_mixture, mixture.kwargs, where)
    sources = mixture.kwargs.get("sources", {})
    check_mixture(**mixture.kwargs)
    for name, section in sources.items():
        here = f"{where}.sources.{name}"
        if not isinstance(section, Mapping):
            raise RefusedError(f"{here}={section} is no section with the keys of a kind of data.")
        if key := next((key for key in DATA_KEYS if key in section and key != "prepare"), None):
            raise RefusedError(f"{here}.{key} belongs to the whole mixture: use {where}.{key}.")
        if registry.key_of("data", section.get("_target_")) == "mixture":
            raise RefusedError(f"{here} is a mixture itself: list its sources in {where}.sources.")
    return types.MappingProxyType(
        {name: _data(section, trust, f"{where}.sources.{name}") for name, section in sources.items()}
    )


def _functions(value: Any, key: str) -> tuple[Node, ...]:
    """Return the functions or classes that a key names: none, one or, for transforms, a list of them."""
    if value is None:
        return ()
    nodes = value if isinstance(value, (list, tuple)) and key != "data.collate" else [value]
    for node in nodes:
        if not isinstance(node, Mapping):
            raise RefusedError(f"{key}={shown(value)}: name a function or class, {key}={{_target_: mine.function}}.")
    return tuple(_node(node, f"{key}[{place}]" if len(nodes) > 1 else key) for place, node in enumerate(nodes))


def _weights(value: Any) -> str | Node | None:
    if isinstance(value, Mapping):
        return _node(value, "data.weights")
    found: str | None = convert(value, str | None, "data.weights")
    return found


def _schedule(values: Mapping[str, Any]) -> Schedule | Node:
    """Build a schedule of ours, which checks itself, also around one of torch's; a user's own may import torch."""
    node = _node(values, "scheduler")
    if str(node.target).startswith("torch.optim.lr_scheduler."):
        values = {"_target_": "torch", "schedule": values}
        node = _node(values, "scheduler")
    found: Schedule | Node = (
        _call(values, "scheduler", Schedule) if registry.key_of("scheduler", node.target) is not None else node
    )
    return found


def _call(values: Mapping[str, Any], where: str, contract: type) -> Any:
    """Build a section whose class is free of torch, so that its arguments are checked before any worker starts."""
    node = _node(values, where)
    try:
        found = locate(node.target, Trust(), where)
    except RefusedError:
        raise
    except Exception as error:
        raise RefusedError(
            f"{where}._target_={node.target} cannot be imported: {type(error).__name__}: {error}. Is its package "
            "complete?"
        ) from error
    if not (dataclasses.is_dataclass(found) and isinstance(found, type) and issubclass(found, contract)):
        raise RefusedError(
            f"{where}._target_={node.target} is not a {where}: it must be a dataclass that derives from "
            f"{contract.__module__}.{contract.__name__}."
        )
    return found(**_typed_arguments(found, node.kwargs, where))


def _typed_arguments(
    function: Any, kwargs: Mapping[str, Any], where: str, given: Collection[str] = ()
) -> dict[str, Any]:
    """Check the arguments of a call; those that are `given` come from code."""
    parameters = {
        name: one
        for name, one in inspect.signature(function).parameters.items()
        if name not in given
        if isinstance(function, type)
        or one.kind is not one.KEYWORD_ONLY  # of a function those are for code, not for a config
    }
    hints = typing.get_type_hints(
        inspect.getattr_static(function, "__init__") if isinstance(function, type) else function
    )
    for key in kwargs:
        if key not in parameters:
            raise unknown_key(key, parameters, where)
    missing = [name for name, one in parameters.items() if one.default is one.empty and name not in kwargs]
    if missing:
        raise RefusedError(
            f"{where}.{missing[0]} is missing: give it a value, for example as {where}.{missing[0]}=... ."
        )
    return {key: convert(value, hints[key], f"{where}.{key}") for key, value in kwargs.items()}


def _frozen(value: Any) -> Any:
    if isinstance(value, Mapping):
        return types.MappingProxyType({key: _frozen(inner) for key, inner in value.items()})
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(inner) for inner in value)
    return value

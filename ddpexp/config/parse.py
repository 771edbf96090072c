"""Parse the values of a configuration, or a run directory's config.yaml, into a typed and checked experiment."""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import yaml

from ddpexp.config import facts, fused, registry, strategies
from ddpexp.config.build import build, convert, did_you_mean, nearest, node_of, unknown_key
from ddpexp.config.declared import declared, default_of
from ddpexp.config.folders import LISTED, conf_folder, options
from ddpexp.config.instantiate import Trust, check_target, check_trusted, locate
from ddpexp.config.plugins import installed
from ddpexp.config.schema import Experiment
from ddpexp.config.validate import ALERT_URL, check, check_alert_url
from ddpexp.data.mixture.weights import check_mixture
from ddpexp.errors import RefusedError
from ddpexp.launch.launchers.base import Launcher
from ddpexp.loggers.remote.base import Keys
from ddpexp.settings.data import DATA_KEYS, CommonData, Data
from ddpexp.settings.key import annotations_of
from ddpexp.settings.node import Node
from ddpexp.settings.run import Predict, Recipe, RunSettings
from ddpexp.settings.trainer import Trainer
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
        raise RefusedError(f"cannot be read: {error}", place="config.yaml") from None
    if not isinstance(values, Mapping):
        raise RefusedError("is not the configuration of a run", place="config.yaml")
    if "${" in text:  # secrets stay references in the file; the library is only loaded where there are some
        from ddpexp.config.interpolations import resolved

        values = resolved(values)
    return parse(values)


def parse(values: Mapping[str, Any]) -> Experiment:
    """Turn the composed and resolved tree into an experiment; imports neither torch nor any user's code.

    Raises:
        RefusedError: an unknown key, a wrong type, a name outside the allowlist or keys that contradict one another.
    """
    left_out = [name for name in (*LISTED, "predict") if values.get(name) is None]
    values = {**values, **{name: {} for name in left_out}}
    _check_sections(values)
    run = build(RunSettings, values["run"], "run")
    trust = Trust(run.trust, Path(run.code) if run.code else None)
    check_trusted(values, trust)
    facts.check(values)
    check_alert_url(values["logger"].get(ALERT_URL))
    trainer = build(Trainer, values["trainer"], "trainer")
    for name in ("model", "data"):
        if not _is_chosen(name, values.get(name)):
            raise _not_chosen(name, values)
    experiment = Experiment(
        recipe=build(Recipe, values["recipe"], "recipe"),
        task=node_of(values["task"], "task"),
        model=node_of(values["model"], "model"),
        data=_data(values["data"], trust),
        optimizer=fused.for_target(node_of(values["optimizer"], "optimizer")),
        scheduler=_schedule(node_of(values["scheduler"], "scheduler")),
        strategy=_strategy(values["strategy"]),
        launcher=_built(node_of(values["launcher"], "launcher"), "launcher", Launcher),
        logger=_nodes({name: value for name, value in values["logger"].items() if name != ALERT_URL}, "logger"),
        callbacks=_nodes(values["callbacks"], "callbacks"),
        trainer=trainer,
        run=run,
        predict=build(Predict, values["predict"], "predict"),
    )
    check(experiment)
    _check_listed(experiment)
    return experiment


def _check_sections(values: Mapping[str, Any]) -> None:
    """Check that there is each section and no other; `_not_chosen` reports a missing model and missing data."""
    sections = list(Experiment.__dataclass_fields__)
    for key in values:
        if key not in sections:
            raise unknown_key(str(key), sections, "", declared(), kind="section")
    for name in sections:
        section = values.get(name)
        if section is None and name not in ("model", "data"):
            own = f"as {name}: {{_target_: mine.Name}}, or" if name == "task" else "for example"
            raise RefusedError("is missing", key=name, suggestion=f"A recipe gives it, {own} recipe=mnist.")
        if section is not None and not isinstance(section, Mapping):
            raise RefusedError(
                "is not a section with keys", key=name, value=section, suggestion=_as_section(name, section)
            )


def _is_chosen(name: str, section: Mapping[str, Any] | None) -> bool:
    """Return whether a recipe or an option gives a section; `data` always has the keys of every kind of data."""
    return section is not None and (name != "data" or not set(section) <= set(DATA_KEYS))


def _not_chosen(name: str, values: Mapping[str, Any]) -> RefusedError:
    recipe = values.get("recipe")
    title = f"recipe={recipe.get('name')}" if isinstance(recipe, Mapping) else "the recipe"
    example = {"model": "mine.Net", "data": "mine.load"}[name]
    known = " or ".join(f"{name}={option}" for option in options(name, [conf_folder()]))
    return RefusedError(
        f"is missing: {title} names none",
        key=name,
        suggestion=f"Write {name}: {{_target_: {example}}} in the recipe, or choose an option: {known}.",
    )


def _as_section(name: str, value: object) -> str:
    """Return how a name in the place of a section is written as a section."""
    found = re.fullmatch(r"(?:_target_ *)?([A-Za-z_]\w*(?:\.\w+)+)", value) if isinstance(value, str) else None
    return f"Write {name}: {{_target_: {found[1]}}}." if found is not None else ""


def _nodes(values: Mapping[str, Any], section: str) -> Mapping[str, Node]:
    """Return the loggers or callbacks by the keys below their section; null switches one off."""
    called = section.removesuffix("s")
    if "_target_" in values:
        raise RefusedError(
            f"Several {called}s may be chosen, so each stands below a key of its own",
            key=f"{section}._target_",
            value=values["_target_"],
            suggestion="Write, in the option's file, name: {_target_: ...} with a name in place of _target_ "
            "at the top.",
        )
    for name, value in values.items():
        if not isinstance(value, Mapping | None):
            known = ("none", *registry.keys_of(section))
            meant = did_you_mean(str(value if name == "kind" else name), known, f"{section}=")
            raise RefusedError(
                f"is not a {called}, which is a section with a _target_",
                key=f"{section}.{name}",
                value=value,
                suggestion=meant,
            )
        if value is not None and "_target_" not in value:
            known = (*registry.keys_of(section), *installed(section))
            near = nearest(str(name), {*known, *(other for other in values if other != name)} - {name})
            if name in known:
                raise RefusedError(
                    "has keys and is not chosen", key=f"{section}.{name}", suggestion=f"Choose it as {section}={name}."
                )
            if near is not None:
                raise RefusedError(
                    f"is not a known {called}", key=f"{section}.{name}", suggestion=f"Did you mean {section}.{near}?"
                )
    return types.MappingProxyType(
        {str(name): node_of(value, f"{section}.{name}") for name, value in values.items() if value is not None}
    )


def _check_listed(experiment: Experiment) -> None:
    """Check our callbacks and remote loggers, which are free of torch; the others are checked by the workers."""
    for name, node in experiment.logger.items():
        where = f"logger.{name}"
        if registry.is_remote_logger(where, node.target):
            _check_arguments(locate(node.target, Trust(), where), node.kwargs, where, given=("info",))
            keys = {key: value for key, value in node.kwargs.items() if key in Keys.__dataclass_fields__}
            build(Keys, keys, where).check(experiment, where)
    for name, node in experiment.callbacks.items():
        where = f"callbacks.{name}"
        if registry.key_of(where, node.target) is not None:
            callback = build(locate(node.target, Trust(), where), node.kwargs, where)
            callback.check(experiment, where)


def _strategy(values: Mapping[str, Any]) -> Options:
    """Build the options of the strategy that `strategy.kind` names."""
    kind = convert(values.get("kind", "ddp"), str, "strategy.kind")
    options_class = strategies.options_of(kind)
    if options_class is None:
        meant = did_you_mean(kind, strategies.kinds(), "strategy=")
        raise RefusedError(
            "names no strategy",
            key="strategy.kind",
            value=kind,
            suggestion=f"{meant} A strategy of your own is an installed package with an entry point in the group "
            "ddpexp.strategies (docs/strategies.md).",
        )
    return build(options_class, values, "strategy")


def _data(values: Mapping[str, Any], trust: Trust, where: str = "data") -> Data:
    called = node_of({key: value for key, value in values.items() if key not in DATA_KEYS}, where)
    common = build(CommonData, {name: values.get(name, default_of(f"data.{name}")) for name in DATA_KEYS}, where)
    key = f"{where}.prepare"
    if common.prepare is not None:
        check_target(common.prepare, trust, key)
        if registry.key_of(key, common.prepare) is not None:  # ours are quick to import; a user's may import torch
            _check_arguments(locate(common.prepare, trust, key), called.kwargs, where)
    if (kind := registry.key_of("data", called.target)) in registry.keys_of("data.check"):
        locate(str(kind), trust, "data.check")(common)
    sources = _sources(called, trust, where) if registry.is_mixture(called.target) else {}
    return Data(**vars(common), target=called.target, options=called.kwargs, sources=sources)


def _sources(mixture: Node, trust: Trust, where: str) -> Mapping[str, Data]:
    """Return the sources of a mixture by name, once its other keys are checked."""
    _check_arguments(check_mixture, mixture.kwargs, where)
    sources = mixture.kwargs.get("sources", {})
    check_mixture(**mixture.kwargs)
    for name, section in sources.items():
        here = f"{where}.sources.{name}"
        if not isinstance(section, Mapping):
            raise RefusedError("is not a section with the keys of a kind of data", key=here, value=section)
        if key := next((key for key in DATA_KEYS if key in section and key != "prepare"), None):
            raise RefusedError("belongs to the whole mixture", key=f"{here}.{key}", suggestion=f"Use {where}.{key}.")
        if registry.is_mixture(section.get("_target_")):
            raise RefusedError("is a mixture itself", key=here, suggestion=f"List its sources in {where}.sources.")
    return types.MappingProxyType(
        {name: _data(section, trust, f"{where}.sources.{name}") for name, section in sources.items()}
    )


def _schedule(node: Node) -> Schedule | Node:
    """Build a schedule of ours, which checks itself, also around one of torch's; a user's own may import torch."""
    if str(node.target).startswith("torch.optim.lr_scheduler."):
        node = Node("torch", {"schedule": {"_target_": node.target, **node.kwargs}})
    if registry.key_of("scheduler", node.target) is None:
        return node
    schedule: Schedule = _built(node, "scheduler", Schedule)
    return schedule


def _built(node: Node, where: str, contract: type) -> Any:
    """Build a part whose class is free of torch, so that its arguments are checked before any worker starts."""
    try:
        found = locate(node.target, Trust(), where)
    except RefusedError:
        raise
    except Exception as error:
        raise RefusedError(
            f"cannot be imported: {type(error).__name__}: {error}",
            key=f"{where}._target_",
            value=node.target,
            suggestion="Is its package complete?",
        ) from error
    if not (dataclasses.is_dataclass(found) and isinstance(found, type) and issubclass(found, contract)):
        raise RefusedError(
            f"is not a {where}: it must be a dataclass that derives from {contract.__module__}.{contract.__name__}",
            key=f"{where}._target_",
            value=node.target,
        )
    return build(found, node.kwargs, where)


def _check_arguments(function: Any, kwargs: Mapping[str, Any], where: str, given: Collection[str] = ()) -> None:
    """Check the arguments of a call; those that are `given` come from code."""
    parameters = {
        name: one
        for name, one in inspect.signature(function).parameters.items()
        if name not in given
        if isinstance(function, type)
        or one.kind is not one.KEYWORD_ONLY  # of a function those are for code, not for a config
    }
    called = inspect.getattr_static(function, "__init__") if isinstance(function, type) else function
    hints = annotations_of(called)
    for key in kwargs:
        if key not in parameters:
            raise unknown_key(key, parameters, where)
    missing = [name for name, one in parameters.items() if one.default is one.empty and name not in kwargs]
    if missing:
        raise RefusedError(
            "is missing",
            suggestion=f"Give it a value, for example as {where}.{missing[0]}=... .",
            place=f"{where}.{missing[0]}",
        )
    for key, value in kwargs.items():
        convert(value, hints[key], f"{where}.{key}")

"""Which parameters get which settings of the optimizer: trainer.param_groups and trainer.layer_decay, resolved."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import nn
from torch.nn.parameter import is_lazy

from ddpexp.config.build import nearest
from ddpexp.config.param_groups import LAYER_DECAY_EXAMPLE
from ddpexp.config.schema import Experiment
from ddpexp.errors import RefusedError, shown
from ddpexp.settings.parameters import LayerDecay, ParamGroup, as_tuple
from ddpexp.strategy.base import num_elements
from ddpexp.system.text import first_few

OTHER, INPUT = "other", "input"  # groups of parameters that no entry, or no layer of trainer.layer_decay, names


@dataclass(frozen=True)
class Described:
    """A parameter, as patterns see it."""

    names: tuple[str, ...]  # a tied one has several
    ndim: int | None = None  # None: its shape is not known yet
    types: frozenset[str] = frozenset()  # classes of the modules that hold it, and their base classes


@dataclass(frozen=True)
class Group:
    """Parameters with the same settings."""

    name: str
    settings: Mapping[str, Any]  # that differ from the section `optimizer`
    members: tuple[int, ...]  # positions of the parameters
    sources: tuple[str, ...]  # the keys that these settings come from
    conditions: tuple[str, ...]  # by which these chose the parameters


class _Setting(NamedTuple):
    """A setting of a parameter, and where it comes from."""

    value: Any
    label: str
    source: str
    conditions: str


def describe(models: Mapping[str, nn.Module], single: bool) -> dict[int, Described]:
    """Return every parameter of the models by its identity, in their order.

    The names are those of `named_parameters`, after the name of its model where there are several.
    """
    names: dict[int, list[str]] = {}
    parameters: dict[int, nn.Parameter] = {}
    types: dict[int, set[str]] = {}
    for model, module in models.items():
        around: dict[str, set[str]] = {}  # the classes of each module and of those that it lies in
        for path, inner in module.named_modules(remove_duplicate=False):
            outer = around[path.rpartition(".")[0]] if path else set()
            around[path] = outer | {kind.__name__ for kind in type(inner).__mro__ if kind not in (object, nn.Module)}
            if isinstance(inner, nn.SyncBatchNorm):  # that strategy.sync_batchnorm has put in the place of one of these
                around[path] |= {"BatchNorm1d", "BatchNorm2d", "BatchNorm3d"}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            parameters[id(parameter)] = parameter
            names.setdefault(id(parameter), []).append(name if single else f"{model}.{name}")
            types.setdefault(id(parameter), set()).update(around[name.rpartition(".")[0]])
    return {
        key: Described(tuple(names[key]), None if is_lazy(p) else p.dim(), frozenset(types[key]))
        for key, p in parameters.items()
    }


def groups_of(experiment: Experiment, parameters: Sequence[Described]) -> list[Group] | None:
    """Return the parameter groups that the configuration asks for; None if it asks for none.

    Raises:
        RefusedError: an entry matches nothing or everything.
    """
    trainer, optimizer = experiment.trainer, experiment.optimizer
    if not trainer.param_groups and trainer.layer_decay is None:
        return None
    lr = float(optimizer.kwargs["lr"])
    settings: list[dict[str, _Setting]] = [{} for _ in parameters]
    if trainer.layer_decay is not None:
        for own, (label, scale) in zip(settings, layer_scales(parameters, trainer.layer_decay), strict=True):
            if scale != 1:
                own["lr"] = _Setting(lr * scale, label, "trainer.layer_decay", f"layer {label}")
    for index, entry in enumerate(trainer.param_groups or ()):
        where = f"trainer.param_groups[{index}]"
        chosen, label = matches(entry, parameters, where, lr), label_of(entry, index)
        for position in chosen:
            for key, value in entry.settings_for(lr).items():
                settings[position][key] = _Setting(value, label, where, entry.conditions())
    return _collected(settings)


def group_texts(experiment: Experiment, models: Mapping[str, nn.Module], single: bool) -> list[str]:
    """Return each parameter group as text, such as `backbone 1,200 (lr=0.001)`; without groups nothing.

    It counts what is trained. With `trainer.lora` the optimizer has no other parameters, and no other groups.
    """
    parameters = [p for module in models.values() for p in module.parameters()]
    sizes = {id(p): 0 if is_lazy(p) or not p.requires_grad else num_elements(p) for p in parameters}
    described = describe(models, single)
    keys, texts = list(described), []
    for group in groups_of(experiment, list(described.values())) or ():
        values = ", ".join(f"{key}={shown(value)}" for key, value in _rounded(group.settings).items())
        size = sum(sizes[keys[position]] for position in group.members)
        if experiment.trainer.lora is not None and not size:
            continue
        texts.append(f"{group.name} {size:,}{f' ({values})' if values else ''}")
    return texts


def _rounded(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: f"{value:.6g}" if isinstance(value, float) else value for key, value in settings.items()}


def _collected(settings: Sequence[Mapping[str, _Setting]]) -> list[Group]:
    """Put parameters with equal settings together, in the order in which the model has the first of each group."""
    members: dict[str, list[int]] = {}
    for position, own in enumerate(settings):
        members.setdefault(repr(sorted((key, one.value) for key, one in own.items())), []).append(position)
    groups: list[Group] = []
    counts: dict[str, int] = {}
    for positions in members.values():
        values = {key: one.value for key, one in settings[positions[0]].items()}
        origins = dict.fromkeys(one[1:] for position in positions for one in settings[position].values())
        labels, sources, conditions = (tuple(dict.fromkeys(origin[i] for origin in origins)) for i in range(3))
        name = "-".join(labels[:4]) or OTHER
        counts[name] = counts.get(name, 0) + 1
        numbered = f"{name}_{counts[name]}" if counts[name] > 1 else name
        groups.append(Group(numbered, values, tuple(positions), sources, conditions))
    return groups


def label_of(entry: ParamGroup, index: int) -> str:
    """Return what the group of an entry is called in records: `backbone` for match=["backbone.*"]."""
    if entry.name is not None:
        return entry.name
    words = [*entry.patterns[:2], *entry.types[:2], *(f"ndim{number}" for number in entry.dimensions[:2])]
    plain = [re.sub(r"[^\w.-]+", "", word).strip(".-_") for word in words]
    return "-".join(word for word in plain if word) or f"entry{index}"


def matches(entry: ParamGroup, parameters: Sequence[Described], where: str, lr: float) -> list[int]:
    """Return the positions of the parameters that an entry is for.

    Raises:
        RefusedError: these are none of them, or all.
    """
    if entry.patterns:
        check_patterns(entry.patterns, parameters, f"{where}.match")
    _check_types(entry.types, parameters, f"{where}.type")
    _check_dimensions(entry.dimensions, parameters, f"{where}.ndim")
    chosen = [
        position
        for position, parameter in enumerate(parameters)
        if (not entry.patterns or _any_match(parameter.names, entry.patterns))
        and (not entry.types or _any_match(parameter.types, entry.types))
        and (not entry.dimensions or parameter.ndim in entry.dimensions)
    ]
    if not chosen:
        raise RefusedError(f"No parameter meets all of its conditions, {entry.conditions()}", place=where)
    if len(chosen) == len(parameters):
        values = " ".join(f"optimizer.{key}={shown(value)}" for key, value in _rounded(entry.settings_for(lr)).items())
        raise RefusedError(
            f"matches every parameter of the model with {entry.conditions()}, so it makes no separate group",
            suggestion=f"Use {values}, or narrow the conditions.",
            place=where,
        )
    return chosen


def check_patterns(patterns: Sequence[str], parameters: Sequence[Described], where: str) -> None:
    """Check that each pattern matches the name of a parameter.

    Raises:
        RefusedError: one matches none; with one that does.
    """
    for pattern in patterns:
        if not any(_any_match(parameter.names, (pattern,)) for parameter in parameters):
            raise RefusedError(
                f"matches no parameter of the model.{_meant(pattern, parameters)}", key=where, value=f"[{pattern}]"
            )


def matched(patterns: Sequence[str], parameters: Sequence[Described]) -> list[int]:
    """Return the positions of the parameters of which a name matches one of the patterns."""
    return [position for position, parameter in enumerate(parameters) if _any_match(parameter.names, patterns)]


def _any_match(names: Iterable[str], patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


def _meant(pattern: str, parameters: Sequence[Described]) -> str:
    """Return what may be meant by a pattern that matches nothing."""
    names = [name for parameter in parameters for name in parameter.names]
    modules = dict.fromkeys(".".join(name.split(".")[:end]) for name in names for end in range(1, name.count(".") + 1))
    stripped = pattern.removeprefix("model.")
    if pattern in modules:
        return f" Did you mean {pattern}.*?"
    if stripped != pattern and any(fnmatchcase(name, stripped) for name in names):
        return f" Did you mean {stripped}?"
    ends = dict.fromkeys(f"*.{name.rpartition('.')[2]}" for name in names if "." in name)
    near = nearest(pattern, [*(f"{module}.*" for module in modules), *ends, *names])
    if near is not None:
        return f" Did you mean {near}?"
    tops = dict.fromkeys(f"{name.partition('.')[0]}.*" if "." in name else name for name in names)
    return f" Its parameters are {first_few(list(tops))}."


def _check_types(types: Sequence[str], parameters: Sequence[Described], where: str) -> None:
    for pattern in types:
        if not any(_any_match(parameter.types, (pattern,)) for parameter in parameters):
            there = sorted({kind for parameter in parameters for kind in parameter.types if not kind.startswith("_")})
            near = nearest(pattern.rpartition(".")[2], there)
            meant = f" Did you mean {near}?" if near else f" There are {first_few(there, 12)}."
            raise RefusedError(
                f"No parameter of the model is in a layer of that class.{meant}", key=where, value=f"[{pattern}]"
            )


def _check_dimensions(dimensions: Sequence[int], parameters: Sequence[Described], where: str) -> None:
    if dimensions and any(parameter.ndim is None for parameter in parameters):
        name = next(parameter.names[0] for parameter in parameters if parameter.ndim is None)
        raise RefusedError(
            f"cannot choose {name}, which has no shape before the first forward pass",
            key=where,
            value=f"[{','.join(map(str, dimensions))}]",
            suggestion="Give the layer its sizes, or choose by match.",
        )
    there = sorted({parameter.ndim for parameter in parameters if parameter.ndim is not None})
    if dimensions and not set(dimensions) & set(there):
        raise RefusedError(
            f"No parameter of the model has that many dimensions. Its parameters have {first_few(there)}",
            key=where,
            value=f"[{','.join(map(str, dimensions))}]",
        )


def layer_scales(parameters: Sequence[Described], layer_decay: LayerDecay) -> list[tuple[str, float]]:
    """Return the layer of each parameter, by its name, and the factor of its learning rate.

    The last layer gets `decay`, each one before it `decay` times that of the next. What the model has before its first
    layer counts as one more; what comes after the last layer, such as a head, keeps its rate. A parameter between
    layers belongs to the one before it.

    Raises:
        RefusedError: a pattern matches no module, or all layers together are a single one.
    """
    patterns = as_tuple(layer_decay.layers)
    layers = _layers(parameters, patterns)
    own = [_innermost(parameter.names[0], layers) for parameter in parameters]
    last = max(position for position, layer in enumerate(own) if layer is not None)
    scales: list[tuple[str, float]] = []
    for position, layer in enumerate(own):
        if layer is not None:
            scales.append((layers[layer], layer_decay.decay ** (len(layers) - layer)))
        elif position > last:
            scales.append((OTHER, 1.0))
        else:
            scales.append(scales[-1] if scales else (INPUT, layer_decay.decay ** (len(layers) + 1)))
    return scales


def _layers(parameters: Sequence[Described], patterns: Sequence[str]) -> list[str]:
    """Return the modules with parameters that match, in the order of the patterns, then of the model."""
    names = [parameter.names[0] for parameter in parameters]
    modules = list(dict.fromkeys(".".join(n.split(".")[:end]) for n in names for end in range(1, n.count(".") + 1)))
    layers: dict[str, None] = {}
    for pattern in patterns:
        there = [module for module in modules if _segments_match(module, pattern)]
        if not there:
            near = nearest(pattern, [*modules, *dict.fromkeys(re.sub(r"\.\d+$", ".*", module) for module in modules)])
            tops = list(dict.fromkeys(module.partition(".")[0] for module in modules))
            meant = f" Did you mean {near}?" if near else f" The model has {first_few(tops)}."
            raise RefusedError(
                f"matches no module with parameters.{meant}", key="trainer.layer_decay.layers", value=f"[{pattern}]"
            )
        layers |= dict.fromkeys(there)
    if len(layers) == 1:
        layer = next(iter(layers))
        inner = [module for module in modules if module.startswith(f"{layer}.")]
        meant = f" Did you mean {layer}.*?" if inner else ""
        raise RefusedError(
            f"matches one module, {layer}, but a rate that falls from layer to layer needs several, as in "
            f"{LAYER_DECAY_EXAMPLE}.{meant}",
            key="trainer.layer_decay.layers",
            value=f"[{','.join(patterns)}]",
        )
    return list(layers)


def _segments_match(module: str, pattern: str) -> bool:
    """Return whether each part of a name between dots matches that of the pattern."""
    parts, wanted = module.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _innermost(name: str, layers: Sequence[str]) -> int | None:
    inside = [i for i, layer in enumerate(layers) if name.startswith(f"{layer}.")]
    return max(inside, key=lambda i: len(layers[i]), default=None)

"""Optimizer state keyed by parameter names, so that it does not depend on the order of the parameters."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ddpexp.checkpoint.reader import read_all
from ddpexp.errors import RefusedError
from ddpexp.strategy.base import Stored, Strategy
from ddpexp.strategy.optimizer_state import load_optimizer
from ddpexp.strategy.sharded_optimizer import ShardedOptimizer
from ddpexp.system.text import counted

_SET_ANEW = ("params", "lr", "name")  # what a group has in each start anew


def parameter_names(models: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Return every parameter by each of its names, such as `model.0.weight`, sorted.

    A tied parameter appears under all of its names; its state is stored under the first.
    """
    named = {
        f"{model}.{name}": parameter
        for model, module in models.items()
        for name, parameter in module.named_parameters(remove_duplicate=False)
    }
    return dict(sorted(named.items()))


def settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the settings of each parameter group of an optimizer."""
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def group_suffixes(optimizers: Mapping[str, Optimizer], all_groups: bool = False) -> dict[str, int]:
    """Return the number of the parameter group whose rate is recorded under each suffix of `lr`.

    The suffix is empty for a single optimizer, `/head` for the optimizer `head` of several, and `/head/1` for its group
    1 if its groups have different rates, or a schedule may make them so (`all_groups`); a group with a name has that in
    place of its number. Groups are counted over all optimizers.
    """
    by_suffix: dict[str, int] = {}
    first = 0
    for name, optimizer in optimizers.items():
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        prefix = f"/{name}" if len(optimizers) > 1 else ""
        if len(set(rates)) > 1 or (all_groups and len(rates) > 1):
            labels = [group.get("name", number) for number, group in enumerate(optimizer.param_groups)]
            by_suffix |= {f"{prefix}/{label}": first + number for number, label in enumerate(labels)}
        else:
            by_suffix[prefix] = first
        first += len(rates)
    return by_suffix


def optimizer_state(
    optimizer: Optimizer, names: Mapping[str, Tensor], shard: Callable[[str, Tensor], Any] = lambda name, tensor: tensor
) -> dict[str, Any]:
    """Return the state of an optimizer, with the names of its parameters in place of their positions.

    `shard` is the strategy's: it returns what this rank holds of a tensor.
    """
    saved = optimizer.state_dict()
    by_position = _names_in_order(optimizer, names)
    groups = [
        {**group, "params": sorted(by_position[index] for index in group["params"])} for group in saved["param_groups"]
    ]
    state = {
        **{key: value for key, value in saved["state"].items() if not isinstance(key, int)},
        **{by_position[k]: _mapped(v, shard, by_position[k]) for k, v in saved["state"].items() if isinstance(k, int)},
    }
    others = {key: value for key, value in saved.items() if key not in ("state", "param_groups")}
    return {"groups": groups, "state": dict(sorted(state.items(), key=lambda item: str(item[0]))), "others": others}


class OptimizerStates:
    """The states of the optimizers of a run."""

    def __init__(self, optimizers: Mapping[str, Optimizer], strategy: Strategy) -> None:
        """Remember how they were built, before a checkpoint or the schedule changes them."""
        self._optimizers, self._strategy = optimizers, strategy
        self._names = parameter_names(strategy.modules)
        self._built = {name: settings(optimizer) for name, optimizer in optimizers.items()}

    def state(self) -> dict[str, Any]:
        """Return the state of each, with the settings that it was built with. Ranks: all; may communicate."""
        return {
            name: {**optimizer_state(one, self._names, self._strategy.shard_to_save), "built": self._built[name]}
            for name, one in self._optimizers.items()
        }

    def restore(self, saved: Mapping[str, Mapping[str, Any]]) -> None:
        """Restore what `state` returned. Raises RefusedError: it is of other optimizers."""
        for note in restore_optimizers(self._optimizers, saved, self._names, self._strategy):
            logging.getLogger("ddpexp").info(note)


def restore_optimizers(
    optimizers: Mapping[str, Optimizer],
    saved: Mapping[str, Mapping[str, Any]],
    names: Mapping[str, Tensor],
    strategy: Strategy | None = None,
) -> list[str]:
    """Load saved state into newly built optimizers; return what the user should know, a sentence each.

    Raises:
        RefusedError: the state is of other optimizers, or of other parameters.
    """
    if saved.keys() != optimizers.keys():
        raise RefusedError(f"holds the optimizers {', '.join(saved)}, but the run has {', '.join(optimizers)}")
    notes = [restore_optimizer(one, saved[name], names, name, strategy) for name, one in optimizers.items()]
    return [note for note in notes if note]


def restore_optimizer(
    optimizer: Optimizer,
    saved: Mapping[str, Any],
    names: Mapping[str, Tensor],
    name: str,
    strategy: Strategy | None = None,
) -> str:
    """Load saved state into a newly built optimizer; of the state of a parameter no more than this rank holds is read.

    Without a `strategy` every rank holds all.

    Settings such as betas are restored too, except those that the user has changed since: these were built with a
    different value than the one that the checkpoint records as built. If the same parameters are grouped in another
    way, each keeps its state and gets the settings of its new group; returns a sentence about that, else nothing.

    Raises:
        RefusedError: the state is of another kind of optimizer, or of other parameters.
    """
    state = dict(saved["by_position"] if "by_position" in saved else _by_position(optimizer, saved, names, name))
    by_position = _names_in_order(optimizer, names)
    states = state.pop("state", {})
    if isinstance(optimizer, ShardedOptimizer):  # which reads its rows itself
        states = {key: _nested_read(values) for key, values in states.items()}
    else:
        states = {
            key: _rows_read(values, by_position[key], names, strategy)
            if isinstance(key, int) and key < len(by_position)
            else values
            for key, values in states.items()
        }
        states = read_all(states)
    state = {**read_all(state), "state": states}
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    saved_sizes = [len(group["params"]) for group in state["param_groups"]]
    members = [set(group["params"]) for group in state["param_groups"]]
    positions = [set(group) for group in _positions(optimizer)]
    same_parameters = "by_position" not in saved and set().union(*members) == set().union(*positions)
    if members != positions and not same_parameters:
        raise RefusedError(
            f"holds groups of {saved_sizes} parameters, but in this run it has {sizes}: it is of another model",
            place=name,
        )
    note, start = "", read_all(saved["built"])
    if members == positions:
        groups = [
            _same_group(now, then, built)
            for now, then, built in zip(settings(optimizer), state["param_groups"], start, strict=True)
        ]
    else:
        groups = _other_groups(optimizer, state["param_groups"], start, name)
        note = (
            f"the checkpoint's {name} has {counted(len(members), 'parameter group')}, and this run's "
            f"{len(positions)}, of the same parameters: their state is kept, with the settings of the new groups"
        )
    try:
        load_optimizer(optimizer, {**state, "param_groups": groups})
    except (KeyError, ValueError, RuntimeError) as error:
        raise RefusedError(f"does not fit {type(optimizer).__name__}: {error}", place=name) from None
    return note


def _same_group(now: Mapping[str, Any], then: Mapping[str, Any], built: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a restored group: those of the checkpoint, but what was built otherwise in this run."""
    kept = {key: value for key, value in then.items() if key == "params" or now.get(key) == built.get(key)}
    return {**then, **{key: value for key, value in now.items() if key not in kept}}


def _other_groups(
    optimizer: Optimizer, saved: Sequence[Mapping[str, Any]], built: Sequence[Mapping[str, Any]], name: str
) -> list[dict[str, Any]]:
    """Return the groups of this run, with what the optimizer itself has changed in the settings of those saved.

    Raises:
        RefusedError: it has changed them differently in groups of which a new one has parameters.
    """
    changed = [
        {key: value for key, value in then.items() if key not in _SET_ANEW and value != start.get(key)}
        for then, start in zip(saved, built, strict=True)
    ]
    groups = []
    for now, positions in zip(settings(optimizer), _positions(optimizer), strict=True):
        sources = [kept for then, kept in zip(saved, changed, strict=True) if set(then["params"]) & set(positions)]
        if any(kept != sources[0] for kept in sources):
            key = next(key for kept in sources for key in kept)
            raise RefusedError(
                f"has other parameter groups, but {type(optimizer).__name__} keeps {key} for each of them, so they "
                "cannot be regrouped",
                suggestion="Resume with the groups that the run was started with.",
                place=name,
            )
        groups.append({**now, **sources[0], "params": positions})
    return groups


def _positions(optimizer: Optimizer) -> list[list[int]]:
    """Return the positions of the parameters of each group."""
    numbers = iter(range(sum(len(group["params"]) for group in optimizer.param_groups)))
    return [[next(numbers) for _ in group["params"]] for group in optimizer.param_groups]


def _by_position(
    optimizer: Optimizer, saved: Mapping[str, Any], names: Mapping[str, Tensor], name: str
) -> dict[str, Any]:
    """Return the state in the form of `state_dict`, by the positions of this optimizer's parameters.

    Raises:
        RefusedError: it is of other parameters.
    """
    positions = {id(parameter): index for index, parameter in enumerate(_parameters(optimizer))}
    position_of = {key: positions[id(parameter)] for key, parameter in names.items() if id(parameter) in positions}
    position_of |= {key: index for index, key in enumerate(_names_in_order(optimizer, names)) if key not in position_of}
    unknown = [key for group in saved["groups"] for key in group["params"] if key not in position_of]
    if unknown:
        raise RefusedError(
            f"holds state for {unknown[0]}, which it does not train in this run: it is of another model, or of other "
            "optimizers",
            place=name,
        )
    groups = [{**group, "params": sorted(position_of[key] for key in group["params"])} for group in saved["groups"]]
    state = {position_of.get(key, key): value for key, value in saved["state"].items()}
    return {"param_groups": groups, "state": state, **saved["others"]}


def _mapped(values: Any, function: Callable[[str, Tensor], Any], name: str) -> Any:
    """Return the state of a parameter with `function` applied to its tensors."""
    if not isinstance(values, Mapping):
        return values
    return {key: function(name, value) if isinstance(value, Tensor) else value for key, value in values.items()}


def _rows_read(values: Any, name: str, names: Mapping[str, Tensor], strategy: Strategy | None) -> Any:
    """Return the state of a parameter with what has its shape read, if this rank holds only some rows of it."""
    held = strategy.shard(name, names[name]) if strategy is not None and name in names else None
    if strategy is None or held is None or held.first_row is None or not isinstance(values, Mapping):
        return values
    return {
        key: strategy.from_local(name, held.read(value.read))
        if isinstance(value, Stored) and value.shape == held.shape
        else value
        for key, value in values.items()
    }


def _nested_read(values: Any) -> Any:
    """Return the state of a parameter with all tensors read but those that are its values."""
    if not isinstance(values, Mapping):
        return read_all(values)
    return {key: value if isinstance(value, Stored) else read_all(value) for key, value in values.items()}


def _names_in_order(optimizer: Optimizer, names: Mapping[str, Tensor]) -> list[str]:
    """Return the name of each parameter of an optimizer, in its order.

    A parameter that belongs to no model is named by its position.
    """
    first: dict[int, str] = {}
    for key, parameter in names.items():
        first.setdefault(id(parameter), key)
    return [first.get(id(parameter), f"#{index}") for index, parameter in enumerate(_parameters(optimizer))]


def _parameters(optimizer: Optimizer) -> Sequence[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]

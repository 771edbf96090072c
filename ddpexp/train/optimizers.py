"""Optimizer state keyed by parameter names, so that it does not depend on the order of the parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ddpexp.errors import RefusedError
from ddpexp.strategy.optimizer_state import load_optimizer


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
    1 if its groups have different rates, or a schedule may make them so (`all_groups`). Groups are counted over all
    optimizers.
    """
    by_suffix: dict[str, int] = {}
    first = 0
    for name, optimizer in optimizers.items():
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        prefix = f"/{name}" if len(optimizers) > 1 else ""
        if len(set(rates)) > 1 or (all_groups and len(rates) > 1):
            by_suffix |= {f"{prefix}/{number}": first + number for number in range(len(rates))}
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


def restore_optimizer(
    optimizer: Optimizer,
    saved: Mapping[str, Any],
    names: Mapping[str, Tensor],
    name: str,
    from_whole: Callable[[str, Tensor], Tensor] = lambda name, tensor: tensor,
) -> None:
    """Load saved state into a newly built optimizer; `from_whole` is the strategy's.

    Settings such as betas are restored too, except those that the user has changed since: these were built with a
    different value than the one that the checkpoint records as built.

    Raises:
        RefusedError: the state is of another kind of optimizer, or of other parameters.
    """
    state = dict(saved["by_position"] if "by_position" in saved else _by_position(optimizer, saved, names, name))
    by_position = _names_in_order(optimizer, names)
    state["state"] = {
        key: _mapped(value, from_whole, by_position[key]) if isinstance(key, int) and key < len(by_position) else value
        for key, value in state.get("state", {}).items()
    }
    fresh = settings(optimizer)
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    saved_sizes = [len(group["params"]) for group in state["param_groups"]]
    if sizes != saved_sizes:
        raise RefusedError(
            f"the checkpoint's {name} holds groups of {saved_sizes} parameters, and this run's has {sizes}: it is of "
            "another model."
        )
    groups = []
    for now, then, built in zip(fresh, state["param_groups"], saved["built"], strict=True):
        kept = {key: value for key, value in then.items() if key == "params" or now.get(key) == built.get(key)}
        groups.append({**then, **{key: value for key, value in now.items() if key not in kept}})
    try:
        load_optimizer(optimizer, {**state, "param_groups": groups})
    except (KeyError, ValueError, RuntimeError) as error:
        raise RefusedError(f"the checkpoint's {name} does not fit {type(optimizer).__name__}: {error}") from None


def _by_position(
    optimizer: Optimizer, saved: Mapping[str, Any], names: Mapping[str, Tensor], name: str
) -> dict[str, Any]:
    """Return the state in the form of `state_dict`, by the positions of this optimizer's parameters.

    Raises:
        RefusedError: it is of other parameters, or they are grouped differently.
    """
    positions = {id(parameter): index for index, parameter in enumerate(_parameters(optimizer))}
    position_of = {key: positions[id(parameter)] for key, parameter in names.items() if id(parameter) in positions}
    position_of |= {key: index for index, key in enumerate(_names_in_order(optimizer, names)) if key not in position_of}
    groups = []
    for now, then in zip(optimizer.param_groups, saved["groups"], strict=False):
        order = [positions[id(parameter)] for parameter in now["params"]]
        saved_positions = [position_of.get(key) for key in then["params"]]
        if sorted(order) != sorted(index for index in saved_positions if index is not None) or None in saved_positions:
            other = next(
                (key for key, index in zip(then["params"], saved_positions, strict=True) if index not in order), None
            )
            what = f"state for {other}" if other is not None else f"{len(saved_positions)} parameters"
            raise RefusedError(
                f"the checkpoint's {name} holds {what} in a group that has {len(order)} other parameters in this run: "
                "it is of another model, or of other groups."
            )
        groups.append({**then, "params": order})
    groups += [dict(group) for group in saved["groups"][len(groups) :]]
    state = {position_of.get(key, key): value for key, value in saved["state"].items()}
    return {"param_groups": groups, "state": state, **saved["others"]}


def _mapped(values: Any, function: Callable[[str, Tensor], Any], name: str) -> Any:
    """Return the state of a parameter with `function` applied to its tensors."""
    if not isinstance(values, Mapping):
        return values
    return {key: function(name, value) if isinstance(value, Tensor) else value for key, value in values.items()}


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

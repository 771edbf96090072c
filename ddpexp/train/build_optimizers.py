"""Build the optimizers of a run, with the parameter groups of the configuration."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ddpexp.config.build import did_you_mean
from ddpexp.config.fused import without_auto
from ddpexp.config.instantiate import instantiate, locate
from ddpexp.config.schema import Experiment
from ddpexp.errors import RefusedError, shown
from ddpexp.settings.node import Node
from ddpexp.system.text import first_few
from ddpexp.task import HasOptimizers
from ddpexp.train.combined_optimizer import ALGORITHM, divide_for, divided
from ddpexp.train.fuse import fuse
from ddpexp.train.optimizer_trial import check_divisible
from ddpexp.train.param_groups import OTHER, Group, describe, groups_of
from ddpexp.train.recipe_checks import check_optimizers


def build_optimizers(
    experiment: Experiment,
    task: Any,
    models: Mapping[str, nn.Module],
    single: bool,
    parameters: Callable[[], Iterable[nn.Parameter]],
    is_fused: bool = False,
) -> Mapping[str, Optimizer]:
    """Return the optimizers of the task, or a single one of the optimizer section for all `parameters()`.

    `is_fused` is the value of `optimizer.fused=auto`.

    Raises:
        RefusedError: the task returns something else, or the parameter groups cannot be applied.
    """
    maker, key = Maker(experiment, models, single, is_fused), experiment.strategy.divides_optimizer
    if not isinstance(task, HasOptimizers):
        adapts = experiment.trainer.lora is not None  # then the optimizer has what is trained only
        optimizer = maker.make(p for p in parameters() if p.requires_grad or not adapts)
        if key is not None:
            check_divisible(optimizer, f"optimizer._target_={experiment.optimizer.target}", key)
        return {"optimizer": optimizer}
    model = models["model"] if single else models
    optimizers: Mapping[str, Optimizer] = check_optimizers(task.optimizers(model, maker.make), task.optimizers)
    maker.check_applied(optimizers, f"{type(task).__name__}.optimizers")
    for name, optimizer in optimizers.items():
        if key is not None:
            check_divisible(optimizer, f"the optimizer {name!r} ({type(optimizer).__qualname__})", key)
    return optimizers


class Maker:
    """Builds optimizers from the optimizer section; tasks get its method `make`."""

    def __init__(
        self, experiment: Experiment, models: Mapping[str, nn.Module], single: bool, is_fused: bool = False
    ) -> None:
        """Resolve the parameter groups.

        Raises:
            RefusedError: an entry matches nothing or everything.
        """
        self._experiment, self._models = experiment, models
        self._is_fused = is_fused
        described = describe(models, single)
        groups, keys = groups_of(experiment, list(described.values())), list(described)
        self._names = {key: parameter.names[0] for key, parameter in described.items()}
        self._group_of = {keys[position]: group for group in groups or () for position in group.members}
        node = experiment.optimizer
        self._algorithms = divide_for(node.target, node.kwargs, described, models)
        # Of parameters that no model has, such as those of a task.
        self._rest = next((group for group in groups or () if not group.settings), Group(OTHER, {}, (), (), ()))
        self._grouped: set[int] = set()  # parameters in the optimizers that were made with these groups

    def make(self, parameters: Any) -> Optimizer:
        """Build an optimizer for parameters, in the configuration's groups, or for groups as torch takes them."""
        if not isinstance(parameters, Mapping | Tensor):
            parameters = list(parameters)
            if not parameters:
                raise RefusedError(
                    "an optimizer has no parameters: the model has none, or it keeps layers in a plain Python list, "
                    "where torch does not find them",
                    suggestion="Put them into a torch.nn.ModuleList.",
                )
        if not self._group_of or not all(isinstance(p, Tensor) for p in parameters):
            return self._without_groups(parameters)
        members: dict[str, list[Tensor]] = {}
        groups: dict[str, Group] = {group.name: group for group in (*self._group_of.values(), self._rest)}
        for parameter in parameters:
            members.setdefault(self._group_of.get(id(parameter), self._rest).name, []).append(parameter)
        ordered = [groups[name] for name in groups if name in members]
        for group in ordered:
            self._check_settings(group, members[group.name][0])
        wanted = [{"params": members[group.name], **group.settings} for group in ordered]
        parts = list(divided(wanted, self._algorithms))
        optimizer = self._instantiate([part for _, part in parts])
        for (number, part), built in zip(parts, optimizer.param_groups, strict=True):
            self._check_by_group(ordered[number], optimizer)
            names = [ordered[number].name, *([part[ALGORITHM]] if ALGORITHM in part else [])]
            built["name"] = "-".join(names)
        self._grouped |= {id(parameter) for parameter in parameters}
        return optimizer

    def _without_groups(self, parameters: Any) -> Optimizer:
        """Build an optimizer without groups of the configuration."""
        if not self._algorithms:
            return self._instantiate(parameters)
        groups = [{"params": parameters}] if all(isinstance(p, Tensor) for p in parameters) else parameters
        parts = list(divided(groups, self._algorithms))
        optimizer = self._instantiate([part for _, part in parts])
        for group in optimizer.param_groups:
            group.setdefault("name", group[ALGORITHM])
        return optimizer

    def check_applied(self, optimizers: Mapping[str, Optimizer], source: str) -> None:
        """Check that the optimizers of a task have the groups of the configuration.

        Raises:
            RefusedError: the task has built an optimizer itself, or with groups of its own, for a parameter that the
            configuration puts into another group.
        """
        for name, optimizer in optimizers.items():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    wanted = self._group_of.get(id(parameter))
                    if wanted is None or not wanted.settings or id(parameter) in self._grouped:
                        continue
                    raise RefusedError(
                        f"chooses settings for {self._names[id(parameter)]}, and {source} puts it into groups "
                        f"of its own in the optimizer {name!r}",
                        suggestion="Pass the parameters to make(...) as they are, or set their groups there "
                        "and leave the key out.",
                        place=first_few(wanted.sources),
                    )

    def _instantiate(self, parameters: Any, **settings: Any) -> Optimizer:
        node = without_auto(self._experiment.optimizer)
        node = Node(node.target, {**node.kwargs, **settings})
        try:
            optimizer: Optimizer = instantiate(node, self._experiment.trust, "optimizer", parameters)
        except ValueError as error:
            if not node.target.startswith("torch.optim.") or settings:
                raise
            raise RefusedError(
                f"cannot be built: {error}",
                key="optimizer._target_",
                value=node.target,
                suggestion=_advice(node.target),
            ) from None
        if self._is_fused:
            fuse(optimizer, self._models)
        return optimizer

    def _check_settings(self, group: Group, example: Tensor) -> None:
        """Build an optimizer with the settings of a group, which checks their names and values as those of `optimizer`.

        Raises:
            RefusedError: the optimizer has no such setting, or does not accept its value.
        """
        target = self._experiment.optimizer.target
        signature = inspect.signature(locate(target, self._experiment.trust, "optimizer")).parameters
        accepts = [key for key in list(signature)[1:] if signature[key].kind is not inspect.Parameter.VAR_KEYWORD]
        if not accepts:
            return  # everything is in the groups
        takes_any = len(accepts) < len(signature) - 1
        for key in group.settings:
            if key not in accepts and not takes_any:
                raise RefusedError(
                    f"sets {key}, which {target} does not have",
                    suggestion=did_you_mean(key, accepts),
                    place=first_few(group.sources),
                )
        try:
            parts = divided([{"params": [example]}], self._algorithms)
            self._instantiate([part for _, part in parts] if self._algorithms else [example], **group.settings)
        except Exception as error:
            values = " ".join(f"{key}={shown(value)}" for key, value in group.settings.items())
            reason = f"sets {values}, which {target} does not accept: {error}"
            raise RefusedError(reason, place=first_few(group.sources)) from error

    def _check_by_group(self, group: Group, optimizer: Optimizer) -> None:
        """Check that an optimizer has the settings of a group in its groups, and not for all parameters together."""
        wrong = [key for key in group.settings if optimizer.defaults and key not in optimizer.defaults]
        if wrong:
            raise RefusedError(
                f"sets {wrong[0]}, of which {type(optimizer).__name__} has a single value for all parameters",
                suggestion=f"Set optimizer.{wrong[0]}.",
                place=first_few(group.sources),
            )


def _advice(target: str) -> str:
    return "optimizer=muon gives the other parameters to AdamW." if target == "torch.optim.Muon" else ""

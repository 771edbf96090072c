"""Collect the facts about a run in a separate process, which imports torch and the user's code."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ddpexp.errors import DdpexpError, RefusedError
from ddpexp.launch import Layout
from ddpexp.strategy.estimator import Facts, Parameter, ParamGroup
from ddpexp.system import separate_process

Curves = Mapping[str, Sequence[tuple[int, float]]]  # steps and learning rates of each parameter group


@dataclass(frozen=True)
class Gathered:
    """The facts about a run, its steps (`steps_per_epoch` and `num_steps`), and the learning rates if wanted."""

    facts: Facts
    steps: Mapping[str, int]
    curves: Curves


def gather(
    runs: Sequence[tuple[str, Layout]],
    prepared: Mapping[str, Any] | None,
    num_samples: int | None,
    curves: bool = False,
) -> list[Gathered | DdpexpError]:
    """Return for each run, a configuration and a layout, the facts or why there are none.

    That is a RefusedError where a run would be refused, otherwise the error of the user's code. What the code prints
    goes to the standard error.

    Raises:
        DdpexpError: the process that looks for the facts has died, such as for lack of memory.
    """
    requested = [{"config": text, "layout": asdict(layout)} for text, layout in runs]
    request = {"runs": requested, "data": prepared, "num_samples": num_samples, "curves": curves}
    return list(map(_gathered, ask("ddpexp.plan.build:collect_all", request)))


def ask(function: str, request: Mapping[str, Any]) -> Any:
    """Call a function that builds models in a separate process; what their code prints goes to the standard error.

    Raises:
        DdpexpError: the process has died, such as for lack of memory.
    """
    try:
        return separate_process.call(function, request, stdout=sys.stderr.fileno())
    except separate_process.NoAnswerError as error:
        raise DdpexpError(
            f"the model could not be built: the process that built it ended with exit code {error.status}."
        ) from None


def error_of(result: Mapping[str, Any]) -> DdpexpError | None:
    """Return why a function that was asked has found nothing; None if it has found something."""
    if "refused" in result:
        return RefusedError.from_dict(result["refused"])
    if "failed" in result:
        return DdpexpError(f"the model could not be built: {result['failed']}")
    return None


def _gathered(result: Mapping[str, Any]) -> Gathered | DdpexpError:
    error = error_of(result)
    if error is not None:
        return error
    facts = result["facts"]
    parameters = [Parameter(**parameter) for parameter in facts["parameters"]]
    divided = [Parameter(**parameter) for parameter in facts["divided"]]
    groups = [ParamGroup(**group) for group in facts["groups"]]
    typed = {**facts, "parameters": parameters, "divided": divided, "groups": groups}
    return Gathered(Facts(**typed), result["steps"], result["curves"])

"""Collect the facts about a run in a separate process, which imports torch and the user's code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from ddpexp.errors import DdpexpError, RefusedError
from ddpexp.launch import Layout
from ddpexp.strategy.estimator import Facts, Parameter, ParamGroup
from ddpexp.system.programs import python

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
    reading, writing = os.pipe()
    command = python("ddpexp.plan.build:answer", os.getpid(), writing)
    requested = [{"config": text, "layout": asdict(layout)} for text, layout in runs]
    request = {"runs": requested, "data": prepared, "num_samples": num_samples, "curves": curves}
    process = subprocess.Popen(command, pass_fds=[writing], stdin=subprocess.PIPE, stdout=sys.stderr.fileno())
    os.close(writing)
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin as stdin:  # it may have ended before it has read everything
        stdin.write(json.dumps(request).encode())
    with open(reading) as file:
        answer = file.read()
    status = process.wait()
    if status or not answer:
        raise DdpexpError(f"the model could not be built: the process that built it ended with exit code {status}.")
    return [_gathered(result) for result in json.loads(answer)]


def _gathered(result: Mapping[str, Any]) -> Gathered | DdpexpError:
    if "refused" in result:
        return RefusedError.from_dict(result["refused"])
    if "failed" in result:
        return DdpexpError(f"the model could not be built: {result['failed']}")
    facts = result["facts"]
    parameters = [Parameter(**parameter) for parameter in facts["parameters"]]
    divided = [Parameter(**parameter) for parameter in facts["divided"]]
    groups = [ParamGroup(**group) for group in facts["groups"]]
    typed = {**facts, "parameters": parameters, "divided": divided, "groups": groups}
    return Gathered(Facts(**typed), result["steps"], result["curves"])

"""Collect the facts about a run in a separate process, which imports torch and the user's code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from ddpexp.errors import DdpexpError, RefusedError
from ddpexp.launch import Layout
from ddpexp.strategy.memory import Facts, Parameter, ParamGroup
from ddpexp.system.programs import python

Curves = Mapping[str, Sequence[tuple[int, float]]]  # steps and learning rates of each parameter group


def gather(
    text: str, layout: Layout, prepared: Mapping[str, Any] | None, num_samples: int | None, curves: bool = False
) -> tuple[Facts, dict[str, int], Curves]:
    """Return the facts, the steps of the run (`steps_per_epoch` and `num_steps`), and the learning rates if wanted.

    `text` is the configuration; what the user's code prints goes to the standard error.

    Raises:
        RefusedError: as a run would. DdpexpError: the user's code failed, or there was not enough memory for it.
    """
    reading, writing = os.pipe()
    command = python("ddpexp.plan.build:answer", os.getpid(), writing)
    request = {"config": text, "layout": asdict(layout), "data": prepared, "num_samples": num_samples, "curves": curves}
    process = subprocess.Popen(command, pass_fds=[writing], stdin=subprocess.PIPE, stdout=sys.stderr.fileno())
    os.close(writing)
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin as stdin:  # it may have ended before it has read everything
        stdin.write(json.dumps(request).encode())
    with open(reading) as file:
        answer = file.read()
    status = process.wait()
    if status or not answer:
        raise DdpexpError(f"the model could not be built: the process that did so ended with exit code {status}.")
    result = json.loads(answer)
    if "refused" in result:
        raise RefusedError(result["refused"])
    if "failed" in result:
        raise DdpexpError(f"the model could not be built: {result['failed']}")
    facts = result["facts"]
    parameters = [Parameter(**parameter) for parameter in facts["parameters"]]
    groups = [ParamGroup(**group) for group in facts["groups"]]
    return Facts(**{**facts, "parameters": parameters, "groups": groups}), result["steps"], result["curves"]

"""A function called in a process of its own, which may import what this one should not: torch, or a user's code."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any

from ddpexp.errors import DdpexpError, RefusedError
from ddpexp.system import files
from ddpexp.system.memory_file import memory_file, read_memory_file
from ddpexp.system.process import die_with_parent
from ddpexp.system.programs import python

_GRACE_SECONDS = 5.0  # from SIGTERM on


class NoAnswerError(DdpexpError):
    """The process has ended without an answer."""

    def __init__(self, status: int) -> None:
        """Take its exit code."""
        super().__init__(f"The process ended with exit code {status}")
        self.status = status


def call(
    function: str,
    request: Any,
    environ: Mapping[str, str] = MappingProxyType({}),
    stdout: int | None = None,
    stderr: int | None = None,
) -> Any:
    """Return what a function (module:function) returns for a request. Both are values that JSON can hold.

    The process ends with this one. `environ` are further variables; `stdout` and `stderr` are descriptors for output.

    Raises:
        RefusedError: the function raised it. NoAnswerError: the process ended otherwise.
    """
    reading, writing = os.pipe()
    with memory_file(request) as described:
        process = subprocess.Popen(
            python("ddpexp.system.separate_process:answer", os.getpid(), writing, described, function),
            pass_fds=[writing, described],
            env={**os.environ, **environ},
            stdout=stdout,
            stderr=stderr,
        )
    os.close(writing)
    try:
        with open(reading) as file:
            text = file.read()
        status = process.wait()
    except BaseException:  # a signal: the process removes what it has made
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_SECONDS)
        raise
    if status or not text:
        raise NoAnswerError(status)
    answer = json.loads(text)
    if "refused" in answer:
        raise RefusedError.from_dict(answer["refused"])
    return answer["returned"]


def answer(parent: int, answers: int, described: int, function: str) -> None:
    """Subprocess entry point: call the function; write its result to the descriptor `answers`."""
    die_with_parent(parent)
    module, _, name = function.partition(":")
    try:
        result = {"returned": getattr(importlib.import_module(module), name)(read_memory_file(described))}
    except RefusedError as error:
        result = {"refused": error.as_dict()}
    files.answer(answers, result)

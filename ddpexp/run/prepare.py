"""Make the data ready once, before any worker starts."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddpexp.config.instantiate import Node, Trust, instantiate
from ddpexp.config.registry import key_of
from ddpexp.config.schema import Data
from ddpexp.errors import RefusedError
from ddpexp.system.process import die_with_parent
from ddpexp.system.programs import python


def prepare(data: Data, trust: Trust) -> dict[str, Any] | None:
    """Call the data section's `prepare` and return what it says of the data; None when there is nothing to prepare.

    Ours runs here, for it is quick and free of torch. A user's may import torch, so it gets a process of its own.

    Raises:
        RefusedError: the data is missing, damaged or cannot be stored.
    """
    if data.prepare is None:
        return None
    if key_of("data.prepare", data.prepare) is not None:
        found = instantiate(Node(data.prepare, data.options), trust, "data.prepare")
    else:
        found = _call_elsewhere(data, trust)
    if not isinstance(found, Mapping) or not isinstance(found.get("name"), str):
        raise RefusedError(f"data.prepare={data.prepare} must return a mapping with at least a `name`, not {found!r}.")
    return dict(found)


def call_and_answer(
    parent: int, answers: int, target: str, options: Mapping[str, Any], prefixes: list[str], code: str | None
) -> None:
    """Be the other process: call the function and write what it returns to the descriptor `answers`."""
    die_with_parent(parent)
    trust = Trust(tuple(prefixes), Path(code) if code else None)
    trust.make_importable()
    try:
        answer = {"found": instantiate(Node(target, options), trust, "data.prepare")}
    except RefusedError as error:
        answer = {"refused": str(error)}
    with open(answers, "w") as file:
        json.dump(answer, file)


def _call_elsewhere(data: Data, trust: Trust) -> Any:
    code = str(trust.code) if trust.code else None
    reading, writing = os.pipe()
    words = os.getpid(), writing, data.prepare, _plain(data.options), list(trust.prefixes), code
    process = subprocess.Popen(python("ddpexp.run.prepare:call_and_answer", *words), pass_fds=[writing])
    os.close(writing)
    with open(reading) as file:
        text = file.read()
    status = process.wait()
    if status or not text:
        raise RefusedError(f"data.prepare={data.prepare} failed with exit code {status}: see its own words above.")
    answer = json.loads(text)
    if "refused" in answer:
        raise RefusedError(answer["refused"])
    return answer["found"]


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value

"""Make the data ready once, before any worker starts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddpexp.config import Data
from ddpexp.config.instantiate import Node, Trust, instantiate
from ddpexp.errors import RefusedError

_PROGRAM = (
    "import sys, json; path, *rest = json.loads(sys.argv[1]); sys.path[:] = path; "
    "from ddpexp.prepare import call_and_print; call_and_print(*rest)"
)
_ANSWER = "ddpexp-prepared "


def prepare(data: Data, trust: Trust) -> dict[str, Any] | None:
    """Call the data section's `prepare` and return what it says of the data; None when there is nothing to prepare.

    Ours runs here, for it is quick and free of torch. A user's may import torch, so it gets a process of its own.

    Raises:
        RefusedError: the data is missing, damaged or cannot be stored.
    """
    if data.prepare is None:
        return None
    if data.prepare.startswith("ddpexp."):
        found = instantiate(Node(data.prepare, data.options), trust, "data.prepare")
    else:
        found = _call_elsewhere(data, trust)
    if not isinstance(found, Mapping) or not isinstance(found.get("name"), str):
        raise RefusedError(f"data.prepare={data.prepare} must return a mapping with at least a `name`, not {found!r}.")
    return dict(found)


def call_and_print(target: str, options: Mapping[str, Any], prefixes: list[str], code: str | None) -> None:
    """Be the other process: call the function and print what it returns."""
    if code:
        sys.path.insert(0, code)
    trust = Trust(tuple(prefixes), Path(code) if code else None)
    try:
        found = instantiate(Node(target, options), trust, "data.prepare")
    except RefusedError as error:
        print(f"{_ANSWER}{json.dumps({'refused': str(error)})}")
    else:
        print(f"{_ANSWER}{json.dumps({'found': found})}")


def _call_elsewhere(data: Data, trust: Trust) -> Any:
    code = str(trust.code) if trust.code else None
    words = json.dumps([sys.path, data.prepare, _plain(data.options), list(trust.prefixes), code])
    done = subprocess.run([sys.executable, "-c", _PROGRAM, words], stdout=subprocess.PIPE, text=True, check=False)
    lines = done.stdout.splitlines()
    for line in lines:
        if not line.startswith(_ANSWER):
            print(line)
    answers = [json.loads(line.removeprefix(_ANSWER)) for line in lines if line.startswith(_ANSWER)]
    if done.returncode or not answers:
        raise RefusedError(f"data.prepare={data.prepare} failed with exit code {done.returncode}; its traceback is above.")
    if "refused" in answers[-1]:
        raise RefusedError(answers[-1]["refused"])
    return answers[-1]["found"]


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value

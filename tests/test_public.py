"""What `import ddpexp` offers: a list that changes only on purpose."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import ddpexp
import ddpexp.run.directory
import ddpexp.sweep.rows
from ddpexp.errors import DdpexpError
from tests.conftest import PATIENCE, ROOT

PUBLIC = {
    "__version__": [],
    "run": ["arguments", "cwd", "quiet"],
    "sweep": ["arguments", "cwd", "quiet"],
    "compose": ["arguments"],
    "diff": ["runs"],
    "open_run": ["directory", "config_dir", "trust"],
    "open_sweep": ["directory", "config_dir", "trust"],
    "Run": [
        "checkpoints", "config", "config_dir", "error", "evaluate", "experiment", "export", "load_into", "metrics",
        "model", "path", "predict", "rerun", "result", "status", "transform", "trust",
    ],
    "SavedCheckpoint": ["is_best", "is_complete", "metrics", "path", "step"],
    "Sweep": ["best", "config_dir", "groups", "path", "rows", "runs", "trust"],
    "Composed": ["config", "data", "experiment", "model", "overrides", "task"],
    "RunFailedError": [
        "as_dict", "exit_code", "failure", "from_dict", "key", "place", "quiet", "rank", "reason", "run", "suggestion",
        "sweep", "traceback", "typed_value", "value",
    ],
    "RunInterruptedError": ["run", "signum", "sweep"],
    "DdpexpError": [
        "as_dict", "exit_code", "from_dict", "key", "place", "quiet", "reason", "suggestion", "typed_value", "value",
    ],
    "RefusedError": [
        "as_dict", "exit_code", "from_dict", "key", "place", "quiet", "reason", "suggestion", "typed_value", "value",
    ],
    "Callback": [
        "check", "communicates", "load_state_dict", "on_end", "on_evaluated", "on_gradients", "on_start", "on_step",
        "rank_zero_only", "state_dict",
    ],
    "RunView": [
        "caller", "communicates", "device", "epoch", "gradients", "held", "is_recorded", "logger", "metrics",
        "micro_batch", "micro_batch_size", "models", "monitor", "num_steps", "optimizers", "options", "parameters",
        "rank", "samples", "save", "step", "steps_per_epoch", "stop", "world", "world_size",
    ],
    "metric_update": ["metric", "arguments", "keywords"],
}  # fmt: skip
"""The names, with the parameters of functions and the attributes of classes."""


def parts(value: object) -> list[str]:
    if inspect.isfunction(value):
        return list(inspect.signature(value).parameters)
    if not isinstance(value, type):
        return []
    own = {name for kind in value.__mro__ if kind.__module__.startswith("ddpexp") for name in vars(kind)}
    fields = {name for kind in value.__mro__ for name in inspect.get_annotations(kind)}
    stored = set(value.__init__.__code__.co_varnames[1:]) if issubclass(value, ddpexp.RunFailedError) else set()
    stored |= {"signum", "run", "sweep"} if issubclass(value, KeyboardInterrupt) else set()
    stored |= set(DdpexpError().as_dict()) if issubclass(value, DdpexpError) else set()
    names = {name for name in own | fields | stored if not name.startswith("_")} - {"sentence", "fields"}
    return sorted(names - set(dir(BaseException)))


def test_the_public_names_are_these() -> None:
    assert {name: parts(getattr(ddpexp, name)) for name in ddpexp.__all__} == PUBLIC
    assert set(ddpexp.__all__) <= set(dir(ddpexp))


def test_each_public_name_has_a_docstring() -> None:
    for name in ddpexp.__all__[1:]:
        value = getattr(ddpexp, name)
        assert inspect.getdoc(value), name
        for part, inner in vars(value).items() if isinstance(value, type) else ():
            if not part.startswith("_") and (inspect.isfunction(inner) or isinstance(inner, property)):
                assert inspect.getdoc(inner), f"{name}.{part}"


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse((ROOT / "ddpexp/__init__.py").read_text())
    typed = {
        alias.asname: node.module
        for block in tree.body
        if isinstance(block, ast.If)
        for node in ast.walk(block)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert typed == ddpexp._PUBLIC


def test_importing_ddpexp_imports_nothing_else() -> None:
    program = "import sys; before = set(sys.modules); import ddpexp; print(*set(sys.modules) - before)"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True, timeout=PATIENCE
    )
    assert done.stdout.split() == ["ddpexp"]


def test_the_functions_import_no_torch_before_they_need_it() -> None:
    names = ", ".join(ddpexp.__all__)
    program = f"import sys; from ddpexp import {names}; print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True, timeout=PATIENCE
    )
    assert done.stdout.split() == ["False", "False"]


def test_run_and_sweep_are_functions_whatever_has_been_imported() -> None:
    assert inspect.isfunction(ddpexp.run)
    assert inspect.isfunction(ddpexp.sweep)
    from ddpexp.run import directory

    assert directory.RunDir(Path("x")).log == Path("x/run.log")


def test_a_name_that_there_is_not_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'ddpexp' has no attribute 'fit'"):
        ddpexp.fit  # type: ignore[attr-defined]  # noqa: B018

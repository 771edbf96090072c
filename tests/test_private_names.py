"""The private names of other libraries stand in `ddpexp/compat/` alone, each with its versions, reason and remedy."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.conftest import ROOT
from tests.test_layering import FILES, parsed

COMPAT = ROOT / "ddpexp/compat"
OTHERS = sys.stdlib_module_names | {
    "datasets",
    "hydra",
    "mlflow",
    "numpy",
    "omegaconf",
    "torch",
    "torchmetrics",
    "wandb",
}

# Public under names that begin with an underscore: Python's manual has them, and Hydra's `_target_`.
DOCUMENTED = {"_asdict", "_exit", "_fields", "_make", "_replace", "_target_"}
OWN = {"_stepping"}  # of `RunView`, hidden from users, and set by the hooks that make it


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and len(name) > 1 and name not in DOCUMENTED


def is_private_path(path: str) -> bool:
    """Return whether a dotted name of another library passes through a private one."""
    head, *rest = path.split(".")
    return head in OTHERS and any(map(is_private, rest))


# Attributes of the objects of torch that ddpexp handles most: they are torch's, whatever else a file itself defines.
TORCHS = {name for owner in (torch.ones(1), nn.Module(), torch.UntypedStorage, torch) for name in dir(owner)}


def own_names(tree: ast.Module) -> set[str]:
    """Return the names that a file defines or assigns."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            names.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def private_names(tree: ast.Module) -> Iterator[str]:
    """Yield the private names of other libraries that a file uses, each with its line."""
    own = own_names(tree)
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if is_private_path(alias.name)]
        elif isinstance(node, ast.ImportFrom):
            paths = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [path for path in paths if is_private_path(path)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):  # to be imported, or looked up
            names = [node.value] if is_private_path(node.value) else []
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            owner = ast.unparse(node.value)
            known = node.attr in own | OWN and (node.attr not in TORCHS or owner == "super()")
            names = [] if owner in ("self", "cls") or known else [f"{owner}.{node.attr}"]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr", "delattr"):
            names = [str(word.value) for word in node.args[1:2] if isinstance(word, ast.Constant)]
            names = [name for name in names if is_private(name)]
        yield from (f"{node.lineno}: {name}" for name in names)  # type: ignore[attr-defined]


def test_private_names_of_others_stand_in_one_room() -> None:
    trees = (path for folder in ("recipes", "examples") for path in (ROOT / folder).rglob("*.py"))
    found = {}
    for path in (*FILES, *trees):
        names = list(private_names(parsed(path)))
        if names and COMPAT not in path.parents:
            found[str(path.relative_to(ROOT))] = names
    assert not found, f"write a function in ddpexp/compat/ that says in which versions, why, and what ends it: {found}"


@pytest.mark.parametrize(
    "text",
    [
        "import torch._dynamo.callback as callback",
        "from torch.nn.modules.batchnorm import _NormBase",
        "from omegaconf._utils import get_yaml_loader",
        "import_module('torch._inductor.async_compile')",
        "torch._foreach_copy_(a, b)",
        "storage._cdata",
        "self.reducer._rebuild_buckets()",
        "getattr(batches, '_workers', ())",
        "class A:\n    def __init__(self): self._version = tensor._version",
        "class A(B):\n    def _buffers(self): return module._buffers",
    ],
)
def test_a_private_name_is_seen(text: str) -> None:
    assert list(private_names(ast.parse(text)))


def test_names_of_ones_own_are_not_private_names_of_others() -> None:
    text = """
import os
class A(B):
    def __init__(self): self._state = 1
    def same(self, other): return other._state == self._theirs and super()._buffers()
    def _buffers(self): os._exit(pair._replace(a="torch is _meant_ here"))
"""
    assert list(private_names(ast.parse(text))) == []


REASONS = ("Private: ", "Why: ", "When it goes: ")


def public_docstrings(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the public names that a file defines with their docstrings, below the file's own if it has the reasons."""
    tree = parsed(path)
    for node, following in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name, ast.get_docstring(node) or ""
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            is_text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            yield ast.unparse(target), str(following.value.value) if is_text else ""  # type: ignore[union-attr]


def test_each_private_name_has_its_versions_reason_and_remedy() -> None:
    files = [path for path in COMPAT.rglob("*.py") if path.name != "__init__.py"]
    assert len(files) > 10
    for path in files:
        whole = ast.get_docstring(parsed(path)) or ""
        for name, text in public_docstrings(path):
            if not name.startswith("_"):
                missing = [reason for reason in REASONS if reason not in whole and reason not in text]
                assert not missing, f"{path.name}: {name} lacks {missing}"

"""The code that a run's numbers come from, as hashes.

The modules that `_target_` names and what they import beside them.

Nothing is imported for that: the files are found where Python would find them, and their imports are read from their
syntax.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import ddpexp

_MODULES = 500  # of one run at most: a recipe is a few files
_PARSED_BYTES = 1 << 20  # of a file; a larger one is data, and is hashed as it is
_HASHED_BYTES = 64 << 20
_RECIPES = "ddpexp.recipes"
_STDLIB = os.path.dirname(os.__file__)


@dataclass(frozen=True)
class Code:
    """The code of a run."""

    fingerprint: Mapping[str, Any]  # plain values, to be stored and given to `differences`
    files: Sequence[str]  # the files that are the user's own: of no installed package, and not ddpexp's


def find(targets: Sequence[str], code: Path | None, path: Sequence[str]) -> Code:
    """Return what the code of `targets` is.

    Modules are looked for as a worker would: in `code` (run.code) first, then along `path` (sys.path). Counted are
    those that `targets` name, ddpexp's own recipes among them, and what they import from the same folder tree or
    top-level package. Of an installed package its version counts. torch and the rest of ddpexp do not: the manifest has
    their versions.
    """
    wanted = sorted({target for target in targets if _is_of_others(target)})
    roots = ([str(code)] if code is not None else []) + [folder or os.curdir for folder in path]
    walk = _Walk([os.path.abspath(root) for root in roots])
    for target in wanted:
        walk.add_target(target)
    modules = dict(sorted(walk.found.items()))
    return Code({"python": "{}.{}".format(*sys.version_info), "targets": wanted, "modules": modules}, walk.files)


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return what has changed between two fingerprints, a phrase for each module: those of targets first.

    Two files are the same when their bytes are, or when the same Python reads the same code in them: a comment, a blank
    line or a docstring changes nothing.
    """
    old, new = _modules(before), _modules(now)
    same_python = before.get("python") == now.get("python")
    targets = _of_others(now)
    names = sorted({**new, **old}, key=lambda name: not any(target.rpartition(".")[0] == name for target in targets))
    found = []
    for name in names:
        was, is_now = old.get(name), new.get(name)
        if is_now is None:
            if _of_others(before) == targets:  # else it may have been another target's
                found.append(f"{_called(name, was)} is gone")
        elif was is None:
            found.append(f"{_called(name, is_now)} is new")
        elif was.get("version") != is_now.get("version"):
            found.append(f"{name} is {_version(is_now)} instead of {_version(was)}")
        elif was.get("sha256") != is_now.get("sha256") and not (
            same_python and was.get("syntax") == is_now.get("syntax", "none")
        ):
            found.append(f"{_called(name, is_now)} has changed")
    return found


def _of_others(fingerprint: Mapping[str, Any]) -> list[str]:
    targets = fingerprint.get("targets")
    return (
        [target for target in targets if isinstance(target, str) and _is_of_others(target)]
        if isinstance(targets, list)
        else []
    )


def _is_of_others(target: str) -> bool:
    """Tell whether code has a name of its own: not torch's, nor a part of ddpexp's, but a recipe of it."""
    root = target.partition(".")[0]
    return root not in (target, "torch", "ddpexp") or target.startswith(f"{_RECIPES}.")


def _modules(fingerprint: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the modules of a fingerprint that anybody may have stored."""
    modules = fingerprint.get("modules")
    return (
        {str(name): one for name, one in modules.items() if isinstance(one, Mapping)}
        if isinstance(modules, Mapping)
        else {}
    )


def _called(name: str, module: Mapping[str, Any] | None) -> str:
    file = module.get("file") if module else None
    return file if isinstance(file, str) else name


def _version(module: Mapping[str, Any]) -> str:
    return str(module.get("version") or "not installed")


@dataclass(frozen=True)
class _Place:
    """A module where Python would find it."""

    name: str
    file: str | None  # None: a folder without __init__.py
    folders: Sequence[str]  # where its submodules are
    root: str  # the folder that is searched for its top-level package

    @property
    def is_installed(self) -> bool:
        """Tell whether it is of a package that pip has installed, or Python's own."""
        parts = self.root.split(os.sep)
        return "site-packages" in parts or "dist-packages" in parts or self.root.startswith(_STDLIB)


@dataclass
class _Walk:
    """The modules found so far."""

    roots: Sequence[str]
    found: dict[str, dict[str, Any]] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    _own: set[str] = field(default_factory=set)  # the folders in which modules of targets lie
    _tops: dict[str, _Place | None] = field(default_factory=dict)

    def add_target(self, target: str) -> None:
        """Add the module that defines a target, and what that imports."""
        parts = target.split(".")[:-1]
        places = [
            place for end in range(len(parts), 0, -1) if (place := self._place(".".join(parts[:end]))) is not None
        ]
        first = next((place for place in places if place.file is not None), None)
        if first is None or (parts[0] == "ddpexp" and not first.name.startswith(f"{_RECIPES}.")):
            return
        if parts[0] != "ddpexp":
            if first.is_installed:
                self._add_installed(first)
                return
            self._own.add(first.root)
        self._add(first.name)

    def _add_installed(self, place: _Place) -> None:
        top = place.name.partition(".")[0]
        try:
            self.found[top] = {"version": metadata.version(top)}
        except metadata.PackageNotFoundError:  # a distribution of another name: looking for it would mean to read all
            self._hash(place)

    def _add(self, name: str) -> None:
        """Add a module of our user's, the packages that it lies in, and what all of them import beside them."""
        waiting = [name]
        while waiting and len(self.found) < _MODULES:
            module = waiting.pop()
            parts = module.split(".")
            for end in range(1, len(parts) + 1):
                place = self._place(".".join(parts[:end]))
                if place is None or place.file is None or place.name in self.found or not self._is_counted(place, name):
                    continue
                tree = self._hash(place)
                if tree is not None:
                    waiting += _imported(tree, place)

    def _is_counted(self, place: _Place, by: str) -> bool:
        if place.name.partition(".")[0] == "ddpexp":
            return place.name.startswith(f"{_RECIPES}.")
        return place.root in self._own or (
            not place.is_installed and place.name.partition(".")[0] == by.partition(".")[0]
        )

    def _hash(self, place: _Place) -> ast.Module | None:
        """Add what a file is; return its syntax, None where it cannot be read as Python."""
        assert place.file is not None
        try:
            with open(place.file, "rb") as file:
                content = file.read(_HASHED_BYTES)
        except OSError:
            return None
        if not place.is_installed and place.name.partition(".")[0] != "ddpexp":
            self.files.append(place.file)
        one = self.found[place.name] = {"file": _shown(place), "sha256": hashlib.sha256(content).hexdigest()}
        if len(content) > _PARSED_BYTES:
            return None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the user's code: Python says it when that is imported
                tree = ast.parse(content)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None
        try:
            one["syntax"] = hashlib.sha256(_without_docstrings(tree).encode("utf-8", "surrogatepass")).hexdigest()
        except RecursionError:  # nested more deeply than can be written down
            pass
        return tree

    def _place(self, name: str) -> _Place | None:
        """Look where Python would find a module; None where there is none."""
        top, *rest = name.split(".")
        if top not in self._tops:
            self._tops[top] = self._top(top)
        place = self._tops[top]
        for part in rest:
            if place is None:
                return None
            found = _look(part, place.folders)
            place = _Place(f"{place.name}.{part}", found[0], found[1], place.root) if found is not None else None
        return place

    def _top(self, top: str) -> _Place | None:
        if top == "ddpexp":
            return _Place(
                top, ddpexp.__file__, list(ddpexp.__path__), os.path.dirname(os.path.dirname(ddpexp.__file__))
            )
        for root in self.roots:
            found = _look(top, [root])
            if found is not None and found[0] is not None:
                return _Place(top, found[0], found[1], root)
        found = _look(top, self.roots)  # a package without __init__.py, in whatever folders
        if found is not None:
            return _Place(top, None, found[1], os.path.dirname(found[1][0]))
        return _installed_editable(top)


def _installed_editable(top: str) -> _Place | None:
    """Ask the finders that `pip install -e` leaves; of a top-level name that imports nothing."""
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError, AttributeError):
        return None
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    folders = list(spec.submodule_search_locations or ())
    return _Place(top, spec.origin, folders, os.path.dirname(folders[0] if folders else spec.origin))


def _look(name: str, folders: Sequence[str]) -> tuple[str | None, list[str]] | None:
    """Look for a module in folders.

    Its file, None where it is a folder without one, and the folders of its submodules.
    """
    portions = []
    for folder in folders:
        base = os.path.join(folder, name)
        if os.path.isfile(file := os.path.join(base, "__init__.py")):
            return file, [base]
        if os.path.isfile(file := f"{base}.py"):
            return file, []
        if os.path.isdir(base):
            portions.append(base)
    return (None, portions) if portions else None


def _imported(tree: ast.Module, place: _Place) -> Iterator[str]:
    """Yield the names of all that may be a module in a file's imports."""
    package = place.name.split(".") if place.folders else place.name.split(".")[:-1]
    for statement in _statements(tree):
        if isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom):
            up = package[: len(package) + 1 - statement.level] if statement.level else []
            base = ".".join([*up, *([statement.module] if statement.module else [])])
            if base:
                yield base
                yield from (f"{base}.{alias.name}" for alias in statement.names if alias.name != "*")


def _statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield every statement of a file; expressions, which hold no imports, are not walked."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            inner = getattr(node, name, None)
            if isinstance(inner, list):
                waiting += inner


def _without_docstrings(tree: ast.Module) -> str:
    """Write a file's syntax down, as this Python does, without the texts that document it. Changes the tree."""
    for node in _statements(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                del node.body[0]
    return ast.dump(tree)


def _shown(place: _Place) -> str:
    """Return a file's path below the folder that its package was found in."""
    assert place.file is not None
    name = place.name.replace(".", "/")
    return f"{name}/__init__.py" if os.path.basename(place.file) == "__init__.py" else f"{name}.py"

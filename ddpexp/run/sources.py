"""Hashes of the code that a run depends on: the modules named by `_target_`, and those they import beside them.

Nothing is imported: files are located where Python would find them, and their imports are read from the syntax tree.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder
from pathlib import Path
from typing import Any

import ddpexp
from ddpexp.system.text import first_few

_MODULES = 500  # at most, in a run: a recipe has a few files
_PARSED_BYTES = 1 << 20  # larger files are data, and are hashed without parsing
_HASHED_BYTES = 64 << 20
_RECIPES = "ddpexp.recipes"
_ONLY_SHOW = ("on_eval",)  # methods that log something of an evaluation, and compute nothing of the steps
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_REST = "statements outside of functions and classes"
_DIGITS = 16  # of the hash of a part
_LISTED = 4  # parts in a message
_STDLIB = os.path.dirname(os.__file__)
_OF_PYTHON = (BuiltinImporter, FrozenImporter, PathFinder)  # what they find is found here, in the folders of `find`


@dataclass(frozen=True)
class Code:
    """The code of a run."""

    fingerprint: Mapping[str, Any]  # plain values, for storage and for `differences`
    files: Sequence[str]  # the user's files: not of an installed package, and not of ddpexp


def find(targets: Sequence[str], code: Path | None, path: Sequence[str]) -> Code:
    """Return the code of `targets`.

    Modules are located as in a worker: first in `code` (run.code), then along `path` (sys.path). Included are the
    modules of `targets`, also in ddpexp's own recipes, and what they import from the same folder tree or top-level
    package. Installed packages are represented by their version. torch and the rest of ddpexp are not included: the
    manifest has their versions.
    """
    wanted = sorted({target for target in targets if _is_recipe_code(target)})
    roots = ([str(code)] if code is not None else []) + [folder or os.curdir for folder in path]
    walk = _Walk([os.path.abspath(root) for root in roots])
    for target in wanted:
        walk.add_target(target)
    modules = dict(sorted(walk.modules.items()))
    return Code({"python": "{}.{}".format(*sys.version_info), "targets": wanted, "modules": modules}, walk.files)


def differences(before: Mapping[str, Any], now: Mapping[str, Any], with_parts: bool = False) -> list[str]:
    """Return the changes between two fingerprints, a phrase for each module, those of targets first.

    `with_parts` names the functions and classes of a file that have changed, where they are recorded.

    Two files are equal if their bytes are, or if the same version of Python parses them to the same code: comments,
    blank lines, docstrings and the methods `on_eval` of classes do not count.
    """
    old, new = _modules(before), _modules(now)
    same_python = before.get("python") == now.get("python")
    targets = _recipe_targets(now)
    names = sorted({**new, **old}, key=lambda name: not any(target.rpartition(".")[0] == name for target in targets))
    changes = []
    for name in names:
        was, is_now = old.get(name), new.get(name)
        if is_now is None:
            if _recipe_targets(before) == targets:  # else it may have been another target's
                changes.append(f"{_called(name, was)} is gone")
        elif was is None:
            changes.append(f"{_called(name, is_now)} is new")
        elif was.get("version") != is_now.get("version"):
            changes.append(f"{name} is {_version(is_now)} instead of {_version(was)}")
        elif was.get("sha256") != is_now.get("sha256") and not (same_python and _is_same_code(was, is_now)):
            parts = _changed_parts(was, is_now) if with_parts and same_python else ""
            changes.append(f"{_called(name, is_now)} has changed{parts}")
    return changes


def _is_same_code(was: Mapping[str, Any], is_now: Mapping[str, Any]) -> bool:
    """Return whether a file does the same by the records of its syntax, in which `on_eval` does not count."""
    if was.get("syntax") == is_now.get("syntax", "none"):
        return True
    return "parts" in was and json.dumps(was["parts"]) == json.dumps(is_now.get("parts"))  # in the same order, too


def _changed_parts(was: Mapping[str, Any], is_now: Mapping[str, Any]) -> str:
    """Return which functions and classes of a file have changed, in parentheses; empty if nothing is known of them."""
    before, now = was.get("parts"), is_now.get("parts")
    if not isinstance(before, Mapping) or not isinstance(now, Mapping):
        return ""
    names = [str(name) for name in {**now, **before} if before.get(name) != now.get(name)]
    return f" ({first_few(names, _LISTED)})" if names else ""


def _recipe_targets(fingerprint: Mapping[str, Any]) -> list[str]:
    targets = fingerprint.get("targets")
    return (
        [target for target in targets if isinstance(target, str) and _is_recipe_code(target)]
        if isinstance(targets, list)
        else []
    )


def _is_recipe_code(target: str) -> bool:
    """Return whether a target is recipe code: not torch's, and of ddpexp only its recipes."""
    root = target.partition(".")[0]
    return root not in (target, "torch", "ddpexp") or target.startswith(f"{_RECIPES}.")


def _modules(fingerprint: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the modules of a stored fingerprint, which is not trusted."""
    modules = fingerprint.get("modules")
    return (
        {str(name): module for name, module in modules.items() if isinstance(module, Mapping)}
        if isinstance(modules, Mapping)
        else {}
    )


def _called(name: str, module: Mapping[str, Any] | None) -> str:
    file = module.get("file") if module else None
    return file if isinstance(file, str) else name


def _version(module: Mapping[str, Any]) -> str:
    return str(module.get("version") or "not installed")


@dataclass(frozen=True)
class _Module:
    """The location of a module."""

    name: str
    file: str | None  # None: a folder without __init__.py
    folders: Sequence[str]  # that contain its submodules
    root: str  # the folder on the search path that contains its top-level package

    @property
    def is_installed(self) -> bool:
        """Return whether it belongs to an installed package or to Python's standard library."""
        parts = self.root.split(os.sep)
        return "site-packages" in parts or "dist-packages" in parts or self.root.startswith(_STDLIB)


@dataclass
class _Walk:
    """Collects modules by following their imports."""

    roots: Sequence[str]
    modules: dict[str, dict[str, Any]] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    _target_roots: set[str] = field(default_factory=set)  # the roots of the modules of targets
    _tops: dict[str, _Module | None] = field(default_factory=dict)

    def add_target(self, target: str) -> None:
        """Add the module that defines a target, and its imports."""
        parts = target.split(".")[:-1]
        modules = [
            module for end in range(len(parts), 0, -1) if (module := self._locate(".".join(parts[:end]))) is not None
        ]
        first = next((module for module in modules if module.file is not None), None)
        if first is None or (parts[0] == "ddpexp" and not first.name.startswith(f"{_RECIPES}.")):
            return
        if parts[0] != "ddpexp":
            if first.is_installed:
                self._add_installed(first)
                return
            self._target_roots.add(first.root)
        self._add(first.name)

    def _add_installed(self, place: _Module) -> None:
        top = place.name.partition(".")[0]
        try:
            self.modules[top] = {"version": metadata.version(top)}
        except metadata.PackageNotFoundError:  # finding the distribution of that name would take long
            self._hash(place)

    def _add(self, name: str) -> None:
        """Add a module of the user, the packages that contain it, and what all of them import beside them."""
        waiting = [name]
        while waiting and len(self.modules) < _MODULES:
            module = waiting.pop()
            parts = module.split(".")
            for end in range(1, len(parts) + 1):
                place = self._locate(".".join(parts[:end]))
                if (
                    place is None
                    or place.file is None
                    or place.name in self.modules
                    or not self._is_counted(place, name)
                ):
                    continue
                tree = self._hash(place)
                if tree is not None:
                    waiting += _imported(tree, place)

    def _is_counted(self, place: _Module, by: str) -> bool:
        if place.name.partition(".")[0] == "ddpexp":
            return place.name.startswith(f"{_RECIPES}.")
        return place.root in self._target_roots or (
            not place.is_installed and place.name.partition(".")[0] == by.partition(".")[0]
        )

    def _hash(self, place: _Module) -> ast.Module | None:
        """Add the hashes of a file; return its syntax tree, or None if it cannot be parsed."""
        assert place.file is not None
        try:
            with open(place.file, "rb") as file:
                content = file.read(_HASHED_BYTES)
        except OSError:
            return None
        if not place.is_installed and place.name.partition(".")[0] != "ddpexp":
            self.files.append(place.file)
        entry = self.modules[place.name] = {"file": _shown(place), "sha256": hashlib.sha256(content).hexdigest()}
        if len(content) > _PARSED_BYTES:
            return None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Python shows warnings about the user's code when it is imported
                tree = ast.parse(content)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None
        try:
            _remove_docstrings(tree)
            entry["syntax"] = _digest(ast.dump(tree))
            entry["parts"] = _parts(tree)
        except RecursionError:  # nested too deeply to be dumped
            pass
        return tree

    def _locate(self, name: str) -> _Module | None:
        """Locate a module as Python would; None if there is none."""
        top, *rest = name.split(".")
        if top not in self._tops:
            self._tops[top] = self._top(top)
        place = self._tops[top]
        for part in rest:
            if place is None:
                return None
            module = _look(part, place.folders)
            place = _Module(f"{place.name}.{part}", module[0], module[1], place.root) if module is not None else None
        return place

    def _top(self, top: str) -> _Module | None:
        if top == "ddpexp":
            return _Module(
                top, ddpexp.__file__, list(ddpexp.__path__), os.path.dirname(os.path.dirname(ddpexp.__file__))
            )
        for root in self.roots:
            module = _look(top, [root])
            if module is not None and module[0] is not None:
                return _Module(top, module[0], module[1], root)
        if (place := _installed_editable(top)) is not None:
            return place
        module = _look(top, self.roots)  # a package without __init__.py, in whatever folders
        return None if module is None else _Module(top, None, module[1], os.path.dirname(module[1][0]))


def _installed_editable(top: str) -> _Module | None:
    """Ask the import finders of `pip install -e`; for a top-level name this imports nothing.

    In the folder above a project Python takes the project's folder for a package without __init__.py, and asks these
    finders for the modules in it.
    """
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        if find is None or finder in _OF_PYTHON:
            continue
        try:
            spec = find(top, None)
        except (ImportError, ValueError, AttributeError):
            continue
        if spec is not None and spec.origin is not None and spec.origin.endswith(".py"):
            folders = list(spec.submodule_search_locations or ())
            return _Module(top, spec.origin, folders, os.path.dirname(folders[0] if folders else spec.origin))
    return None


def _look(name: str, folders: Sequence[str]) -> tuple[str | None, list[str]] | None:
    """Return the file of a module in `folders` (None for a folder without __init__.py) and its submodule folders."""
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


def _imported(tree: ast.Module, place: _Module) -> Iterator[str]:
    """Yield every name in a file's imports that may be a module."""
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
    """Yield every statement of a file; expressions, which contain no imports, are skipped."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            inner = getattr(node, name, None)
            if isinstance(inner, list):
                waiting += inner


def _parts(tree: ast.Module) -> dict[str, str]:
    """Return a hash of each function, method, rest of a class and rest of the file, by name, in their order.

    Methods that compute nothing of a run, by `_ONLY_SHOW`, are left out.
    """
    found: dict[str, str] = {}

    def add(name: str, node: ast.AST) -> None:
        found[name] = found.get(name, "") + ast.dump(node)

    for statement in tree.body:
        if isinstance(statement, _FUNCTIONS):
            add(statement.name, statement)
        elif isinstance(statement, ast.ClassDef):
            for inner in statement.body:
                if isinstance(inner, _FUNCTIONS) and inner.name not in _ONLY_SHOW:
                    add(f"{statement.name}.{inner.name}", inner)
            statement.body = [inner for inner in statement.body if not isinstance(inner, _FUNCTIONS)]
            add(statement.name, statement)
        else:
            add(_REST, statement)
    return {name: _digest(dump)[:_DIGITS] for name, dump in found.items()}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _remove_docstrings(tree: ast.Module) -> None:
    """Remove the docstrings of a syntax tree."""
    for node in _statements(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                del node.body[0]


def _shown(place: _Module) -> str:
    """Return a file's path relative to the folder that contains its top-level package."""
    assert place.file is not None
    name = place.name.replace(".", "/")
    return f"{name}/__init__.py" if os.path.basename(place.file) == "__init__.py" else f"{name}.py"

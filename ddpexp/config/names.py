"""Whether the classes and functions that a configuration names are there.

Their modules' files are read, nothing is imported.
"""

from __future__ import annotations

import ast
import importlib.util
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from ddpexp.config.build import did_you_mean, nearest
from ddpexp.config.instantiate import Trust, targets
from ddpexp.errors import RefusedError

_PARSED_BYTES = 1 << 20  # of a file; what a larger one defines is left to the workers


def named(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a configuration names, by the keys."""
    found = dict(targets(values, ""))
    data = values.get("data")
    if isinstance(data, Mapping) and data.get("prepare") is not None:
        found["data.prepare"] = data["prepare"]
    return found


def check_present(values: Mapping[str, Any], trust: Trust) -> None:
    """Look for what a configuration names of the code that is trusted beside ours and torch's.

    What the files do not show passes: the workers import it and fail then.

    Raises:
        RefusedError: a module is not there, or does not define the name.
    """
    for key, target in named(values).items():
        where = key.removesuffix("._target_")
        if isinstance(target, str) and trust.allows(target, where) and not Trust().allows(target, where):
            _check_present(key, target, trust)


def _check_present(key: str, target: str, trust: Trust) -> None:
    root, *rest = target.split(".")
    folders = [trust.code] if trust.code is not None else []
    folders += [*_homes(root), Path.cwd()]
    home = next((folder for folder in folders if (folder / root).is_dir() or (folder / f"{root}.py").is_file()), None)
    if home is None:
        return  # compiled, in an archive, or not there: import tells
    path, module = home, ""
    names = [root, *rest]
    while names and (path / names[0]).is_dir():
        path, module = path / names[0], f"{module}.{names.pop(0)}".lstrip(".")
    file = path / "__init__.py"
    if names and (path / f"{names[0]}.py").is_file():
        file, module = path / f"{names[0]}.py", f"{module}.{names.pop(0)}".lstrip(".")
    if not names or not file.is_file():
        if not names or file.name != "__init__.py" or any(path.glob(f"{names[0]}.*")):
            return
        raise RefusedError(f"There is no module {module}.{names[0]}", key=key, value=target)
    known, imported = _defined(file)
    if names[0] == "py" and len(names) > 1 and known is not None and names[1] in known:
        raise RefusedError(
            "A module is named without .py", key=key, value=target, suggestion=f"Did you mean {module}.{names[1]}?"
        )
    if known is not None and names[0] not in known and names[0] not in imported:
        beside = file.with_name(f"{names[0]}.py")
        if len(names) > 1 and beside.is_file() and file.name != "__init__.py":
            suggestion = ".".join([*module.split(".")[:-1], *names])
            raise RefusedError(
                f"The module {beside} is beside {file}, not in it",
                key=key,
                value=target,
                suggestion=f"Did you mean {suggestion}?",
            )
        alike = nearest(names[0], [*known, *imported])
        suggestion = f"Did you mean {alike}?" if alike else did_you_mean(names[0], known or imported)
        raise RefusedError(f"The file {file} defines no {names[0]}", key=key, value=target, suggestion=suggestion)


def _homes(root: str) -> list[Path]:
    """Return the folders in which Python finds a top-level module."""
    try:
        spec = importlib.util.find_spec(root)
    except (ImportError, ValueError):
        return []
    places = [Path(place) for place in spec.submodule_search_locations or ()] if spec is not None else []
    return [place.parent for place in places] or (
        [Path(spec.origin).parent] if spec is not None and spec.origin else []
    )


@lru_cache(maxsize=32)
def _defined(file: Path) -> tuple[Sequence[str] | None, Sequence[str]]:
    """Return the names that a module defines, None where its text does not tell, and those that it imports."""
    try:
        if file.stat().st_size > _PARSED_BYTES:
            return None, ()
        text = file.read_text()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a module's own syntax, which Python says when it is imported
            tree = ast.parse(text)
    except (OSError, ValueError, SyntaxError, RecursionError):
        return None, ()
    found, imported = list(_names(tree.body)), list(_names(tree.body, imports=True))
    dynamic = "*" in imported or "__getattr__" in found or "globals(" in text or "sys.modules" in text
    return None if dynamic else list(dict.fromkeys(found)), imported


def _names(body: Sequence[ast.stmt], imports: bool = False) -> Iterator[str]:
    """Yield the names that statements bind: by definitions and assignments or, with `imports`, by imports."""
    for statement in body:
        if isinstance(statement, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            if not imports:
                yield statement.name
            continue
        if isinstance(statement, (ast.Import, ast.ImportFrom)) and imports:
            yield from ((alias.asname or alias.name).partition(".")[0] for alias in statement.names)
        elif isinstance(statement, (ast.Assign, ast.AnnAssign, ast.For, ast.With, ast.Delete)) and not imports:
            yield from (
                name.id
                for name in ast.walk(statement)
                if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
            )
        for part in ("body", "orelse", "finalbody"):
            yield from _names(getattr(statement, part, []), imports)
        for handler in getattr(statement, "handlers", []):
            yield from _names(handler.body, imports)

"""`ddpexp new`: a folder with a project of one's own, which trains, is tested and swept at once."""

from __future__ import annotations

import importlib.util
import keyword
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

from ddpexp.cli.verb import Call
from ddpexp.config.build import did_you_mean
from ddpexp.config.folders import conf_folder
from ddpexp.errors import EXIT_DONE, RefusedError
from ddpexp.system.files import write_data

PROJECTS = Path(__file__).parent / "projects"
DEFAULT = "points"
_TEMPLATE = "myproject"  # the name of the package in them all
_NAME = re.compile(r"[a-z][a-z0-9_]*")
_ARGUMENTS = {  # what the recipe needs beside
    "gpt": "data.path=TEXT ", "images": "data.root=PICTURES ", "table": "data.path=TABLE data.targets=COLUMN ",
}  # fmt: skip
_RENAMED = {"gitignore": ".gitignore"}  # with the dot it would apply to the file itself


def new(call: Call) -> int:
    """Make the folder; return the exit code.

    Raises:
        RefusedError: the name cannot be a package's, or is taken; or the folder cannot be written.
    """
    place, kind = _project(call)
    name = place.name.replace("-", "_")
    _check_name(name, str(place))
    if os.path.lexists(place):
        raise RefusedError(
            "There is a file or folder of that name already", place=f"new {place}", suggestion="Choose another name."
        )
    try:
        _write(PROJECTS / kind, place, name)
    except OSError as error:
        raise RefusedError(f"The folder cannot be written ({error.strerror})", place=f"new {place}") from None
    typed = shlex.quote(str(place))
    print(f"{place} is ready ({_summary(kind)}); {place / 'README.md'} says what is where. Next:\n")
    print(f"    cd {typed}")
    print("    pip install -e .")
    print(f"    python -m ddpexp recipe={name} {_ARGUMENTS.get(kind, '')}trainer.gpus=2")
    return EXIT_DONE


def kinds() -> list[str]:
    """Return what a project can begin with, the default first."""
    found = sorted(entry.name for entry in PROJECTS.iterdir() if (entry / "README.md").is_file())
    return sorted(found, key=lambda kind: kind != DEFAULT)


def explained() -> list[str]:
    """Return a line for each kind of project, for the help of `ddpexp new`."""
    return [f"  {kind:<8} {_summary(kind)}" for kind in kinds()]


def _summary(kind: str) -> str:
    """Return the first line of text of its README, which says what it trains."""
    text = (PROJECTS / kind / "README.md").read_text()
    return text.split("\n\n")[1].partition(":")[0].replace("\n", " ")


def _project(call: Call) -> tuple[Path, str]:
    """Return the folder to make, and the kind of project."""
    kind, available = call.options.get("--like", DEFAULT), kinds()
    if kind not in available:
        raise RefusedError(
            "There is no such project", place=f"new --like {kind}", suggestion=did_you_mean(kind, available)
        )
    if len(call.operands) > 1:
        raise RefusedError(place=f"new {' '.join(call.operands)}", suggestion="Give one name at a time.")
    return Path(call.operands[0]), kind


def _check_name(name: str, typed: str) -> None:
    if not _NAME.fullmatch(name) or keyword.iskeyword(name):
        raise RefusedError(
            "The name is not one that a package and a recipe can have",
            place=f"new {typed}",
            suggestion="Use lower-case letters, digits, underscores and hyphens, with a letter first.",
        )
    if (conf_folder() / "recipe" / f"{name}.yaml").is_file():
        raise RefusedError(
            f"The recipe {name} is one of ddpexp's own", place=f"new {typed}", suggestion="Choose another name."
        )
    if name in sys.stdlib_module_names or importlib.util.find_spec(name) is not None:
        raise RefusedError(
            f"There is a Python module {name} already", place=f"new {typed}", suggestion="Choose another name."
        )


def _write(source: Path, place: Path, name: str) -> None:
    """Copy a project under another name: complete, or not at all."""
    unfinished = place.parent / f".{place.name}-{os.getpid()}"
    try:
        os.mkdir(unfinished)
        for path in sorted(source.rglob("*")):
            if not path.is_file() or "__pycache__" in path.parts:
                continue
            parts = [_RENAMED.get(part, part.replace(_TEMPLATE, name)) for part in path.relative_to(source).parts]
            target = unfinished.joinpath(*parts)
            target.parent.mkdir(parents=True, exist_ok=True)
            write_data(target, path.read_text().replace(_TEMPLATE, name).encode())
        os.rename(unfinished, place)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise

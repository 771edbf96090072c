"""`ddpexp new`: a folder with a project of one's own, which trains, is tested and swept at once."""

from __future__ import annotations

import importlib.util
import keyword
import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from ddpexp.cli.verb import Call
from ddpexp.config.build import did_you_mean, nearest
from ddpexp.config.folders import conf_folder
from ddpexp.errors import EXIT_DONE, RefusedError
from ddpexp.system.files import write_data

PROJECTS = Path(__file__).parent / "projects"
DEFAULT = "points"
_COMMON = PROJECTS / "common"  # the files of every project
_TEMPLATE = "myproject"  # the name of the package in them all
_NAME = re.compile(r"[a-z][a-z0-9_]*")
_ARGUMENTS = {  # what the recipe needs beside
    "contrastive": "data.root=PICTURES ",
    "fine-tuning": "data.root=PICTURES run.init_from=WEIGHTS ",
    "images": "data.root=PICTURES ",
    "table": "data.path=TABLE data.targets=COLUMN ",
    "text": "data.path=TEXT ",
}
_ALSO = {  # other names for what a project begins with
    "contrastive": "simclr clip moco byol dino ssl self-supervised pretraining",
    "fine-tuning": "finetune transfer transfer-learning pretrained lora",
    "images": "pictures photos vision cv cifar10 mnist imagenet classification resnet",
    "points": "default minimal empty blank basic lightning",
    "table": "csv tabular parquet regression",
    "text": "gpt gpt2 llm language-model lm nlp nanogpt",
}
_RENAMED = {"gitignore": ".gitignore"}  # with the dot it would apply to the file itself


def new(call: Call) -> int:
    """Make the folder; return the exit code.

    Raises:
        RefusedError: the name cannot be a package's, or is taken; or the folder cannot be written.
    """
    place, kind = _project(call)
    name = place.name.replace("-", "_")
    try:
        _write((_COMMON, _folder(kind)), place, name)
    except OSError as error:
        raise RefusedError(f"The folder cannot be written ({error.strerror})", place=f"new {place}") from None
    print(f"{place} is ready ({_summary(kind)}); {place / 'README.md'} says what is where. Next:\n")
    print(f"    pip install -e {shlex.quote(os.path.join(os.curdir, place) if place.parent == Path() else str(place))}")
    print(f"    python -m ddpexp recipe={name} {_ARGUMENTS.get(kind, '')}trainer.gpus=2")
    return EXIT_DONE


def kinds() -> list[str]:
    """Return what a project can begin with, the default first."""
    found = sorted(entry.name.replace("_", "-") for entry in PROJECTS.iterdir() if (entry / "README.md").is_file())
    return sorted(found, key=lambda kind: kind != DEFAULT)


def explained() -> list[str]:
    """Return a line for each kind of project, for the help of `ddpexp new`."""
    return [f"  {kind:<11} {_summary(kind)}" for kind in kinds()]


def _summary(kind: str) -> str:
    """Return the first line of text of its README, which says what it trains."""
    text = (_folder(kind) / "README.md").read_text()
    return text.split("\n\n")[1].partition(":")[0].replace("\n", " ")


def _folder(kind: str) -> Path:
    return PROJECTS / kind.replace("-", "_")


def _project(call: Call) -> tuple[Path, str]:
    """Return the folder to make, and the kind of project.

    Raises:
        RefusedError: the name or the kind is wrong; what is suggested mends both.
    """
    kind, available = call.options.get("--like", DEFAULT), kinds()
    others = {name: kind for kind, names in _ALSO.items() for name in names.split()}
    meant = others.get(kind.lower().replace("_", "-")) or nearest(kind, available)
    like = f" --like {meant}" if "--like" in call.options and meant is not None else ""
    if len(call.operands) > 1:
        name, second, *_ = call.operands
        if not like and (named := others.get(second) or (second if second in available else None)):
            typed = f"{name} --like {named}"
        else:
            typed = f"{'_'.join(call.operands)}{like}"
        words = f"new {' '.join(call.operands)}"
        raise RefusedError(place=words, suggestion=f"Give one name at a time, as in ddpexp new {typed}.")
    place = Path(call.operands[0])
    _check_name(place, like)
    if kind not in available:
        raise RefusedError(
            "There is no such project",
            place=f"new --like {kind}",
            suggestion=f"Did you mean ddpexp new {call.operands[0]}{like}?" if like else did_you_mean(kind, available),
        )
    return place, kind


def _check_name(place: Path, like: str) -> None:
    """Refuse a name that the package or the folder cannot have."""
    name = place.name.replace("-", "_")
    if not _NAME.fullmatch(name):
        plain = re.sub("[^a-z0-9]+", "_", name.lower()).strip("_")
        usable = _NAME.fullmatch(plain) and not keyword.iskeyword(plain)
        raise RefusedError(
            "The name is not one that a package and a recipe can have",
            place=f"new {place}",
            suggestion=f"Did you mean ddpexp new {shlex.quote(str(place.with_name(plain)))}{like}?"
            if usable
            else "Use lower-case letters, digits, underscores and hyphens, with a letter first.",
        )
    taken = ""
    if keyword.iskeyword(name):
        taken = "The name is a word of Python's own"
    elif (conf_folder() / "recipe" / f"{name}.yaml").is_file():
        taken = f"The recipe {name} is one of ddpexp's own"
    elif os.path.lexists(place):
        taken = "There is a file or folder of that name already"
    elif name in sys.stdlib_module_names or importlib.util.find_spec(name) is not None:
        taken = f"There is a Python module {name} already"
    if taken:
        raise RefusedError(taken, place=f"new {place}", suggestion=f"Choose another name, such as my_{name}.")


def _write(sources: Sequence[Path], place: Path, name: str) -> None:
    """Copy a project under another name: complete, or not at all."""
    unfinished = place.parent / f".{place.name}-{os.getpid()}"
    try:
        os.mkdir(unfinished)
        for source in sources:
            for path in sorted(path for path in source.rglob("*") if path.is_file()):
                parts = path.relative_to(source).parts
                if "__pycache__" in parts:
                    continue
                target = unfinished.joinpath(*(_RENAMED.get(part, part.replace(_TEMPLATE, name)) for part in parts))
                target.parent.mkdir(parents=True, exist_ok=True)
                write_data(target, path.read_text().replace(_TEMPLATE, name).encode())
        os.rename(unfinished, place)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise

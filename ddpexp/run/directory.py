"""The run on disk: its name, its creation, its files; written atomically, readable by anyone."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ddpexp.errors import Failure, RefusedError
from ddpexp.launch import Layout
from ddpexp.run import lock
from ddpexp.system.files import check_yaml, dumps, first_free, first_free_name, read_json, whole_lines, write
from ddpexp.system.limits import said_with_limit

_LATEST = 50  # run directories that are looked at for one that the same process has begun
_TEMPORARY = re.compile(
    r"\.(config\.yaml|overrides\.yaml|manifest\.json|code(?:-\d+)?\.diff|result\.json|error\.json)\.[0-9a-f]{8}"
)


@dataclass(frozen=True)
class RunDir:
    """The paths of one run."""

    path: Path

    @property
    def config(self) -> Path:
        """What was asked, resolved enough to run again."""
        return self.path / "config.yaml"

    @property
    def overrides(self) -> Path:
        """What was typed."""
        return self.path / "overrides.yaml"

    @property
    def manifest(self) -> Path:
        """What really ran: commit, packages, hosts, world, data."""
        return self.path / "manifest.json"

    @property
    def diff(self) -> Path:
        """What no commit holds of the code that ran."""
        return self.path / "code.diff"

    @property
    def log(self) -> Path:
        """Rank zero's log."""
        return self.path / "run.log"

    @property
    def ranks(self) -> Path:
        """The folder of every rank's output."""
        return self.path / "ranks"

    @property
    def metrics(self) -> Path:
        """One JSON object a line."""
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        """The folder that TensorBoard reads."""
        return self.path / "tb"

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def result(self) -> Path:
        """How the run ended."""
        return self.path / "result.json"

    @property
    def error(self) -> Path:
        """Why the run failed."""
        return self.path / "error.json"

    def layout(self) -> Layout:
        """Read the layout that the run was started with.

        Raises:
            RefusedError: the manifest is missing or damaged.
        """
        manifest = self.read(self.manifest)
        try:
            return Layout(**{name: manifest["world"][name] for name in Layout.__dataclass_fields__})
        except (KeyError, TypeError):
            raise RefusedError(f"{self.path} is not a run directory: manifest.json names no world.") from None

    def read(self, path: Path) -> dict[str, Any]:
        """Read one of the JSON files.

        Raises:
            RefusedError: it is missing or damaged, so this is not a run directory.
        """
        try:
            found = read_json(path)
        except (OSError, ValueError) as error:
            raise RefusedError(f"{self.path} is not a run directory: {path.name} cannot be read ({error}).") from None
        if not isinstance(found, dict):
            raise RefusedError(f"{self.path} is not a run directory: {path.name} holds no object.")
        return found

    def found(self, path: Path) -> dict[str, Any] | None:
        """Read one of the JSON files; None when there is none yet.

        Raises:
            RefusedError: it is damaged, so this is not a run directory.
        """
        return self.read(path) if os.path.lexists(path) else None

    def words(self) -> list[str]:
        """Return what was typed for the run; nothing where that cannot be read."""
        try:
            check_yaml(self.overrides)
            words = yaml.load(self.overrides.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        except (OSError, ValueError, RecursionError, yaml.YAMLError):
            return []
        return [str(word) for word in words] if isinstance(words, list) else []

    def options(self) -> list[str]:
        """Return the typed words that have added an option of the user's own groups, such as `+experiment=big`."""
        return [word for word in self.words() if re.match(r"\+{1,2}[\w/]+(@\w+)?=", word)]

    def command(self) -> list[str]:
        """Return the command line of the run's last start, or of its submission; nothing where that cannot be read."""
        for path in (self.manifest, self.result):
            try:
                words = self.read(path).get("command")
            except RefusedError:
                continue
            if isinstance(words, list) and words:
                return [str(word) for word in words]
        return []

    def status(self) -> str | None:
        """Return what the result says of how far the run is; None while there is none."""
        try:
            return str(self.read(self.result).get("status"))
        except RefusedError:
            return None

    def fail(self, failure: Failure) -> None:
        """Write error.json and a result that says so."""
        write(self.error, dumps(failure.as_dict()))
        self._end("failed", failure.step)

    def interrupt(self, step: int | None = None) -> None:
        """Write a result that says that the run was interrupted, after `step` where that is known."""
        self._end("interrupted", step)

    def _end(self, status: str, step: int | None) -> None:
        """Write how far the records go; a result that rank zero has written already is the truth."""
        if self.status() == "done":
            return
        try:
            lines = [json.loads(line) for line in self.metrics.read_bytes()[: whole_lines(self.metrics)].splitlines()]
        except (OSError, ValueError):
            lines = []
        try:
            world_size = self.layout().world_size
        except (RefusedError, KeyError):
            world_size = None  # nothing may keep a failure from being written down
        evals = [line for line in lines if "train/loss" not in line]
        metrics = {name: value for name, value in evals[-1].items() if "/" in name} if evals else {}
        result = {
            "status": status,
            "step": step if step is not None else lines[-1]["step"] if lines else 0,
            "epoch": lines[-1]["epoch"] if lines else 0,
            "world_size": world_size,
            "metrics": metrics,
            "weights_sha256": None,
            "ended_at": time.time(),
        }
        write(self.result, dumps(result))


def parent(asked: str | None, recipe: str) -> Path:
    """Return the folder in which the run directory will be made."""
    return Path(asked).absolute().parent if asked else Path("outputs").absolute() / recipe


def create(asked: str | None, recipe: str) -> RunDir:
    """Make the run directory, which did not exist or was empty before; two starts in one second get two.

    Raises:
        RefusedError: the asked directory holds something, or none can be made there.
    """
    path = Path(asked) if asked else Path("outputs") / recipe / time.strftime("%Y-%m-%d_%H-%M-%S")
    try:
        if not asked:
            path.parent.mkdir(parents=True, exist_ok=True)
            return RunDir(first_free(path))
        check_free(path)
        path.mkdir(parents=True, exist_ok=True)
        run = RunDir(path)
        try:
            run.ranks.mkdir()  # of several starts in one empty directory, the one that makes this folder has it
        except FileExistsError:
            raise _taken(path) from None
        return run
    except OSError as error:
        why = said_with_limit(error, path)
        raise RefusedError(f"run.dir={path} cannot be made: {why}. Choose another place with run.dir=... .") from None


def missing_folders(folder: Path) -> list[Path]:
    """Return which of a folder and those above it do not exist yet, the innermost first."""
    return [path for path in (folder, *folder.parents) if not path.exists()]


def has_trained(run: RunDir) -> bool:
    """Tell whether a run has anything of a step: a record or a checkpoint."""
    recorded = run.metrics.is_file() and run.metrics.stat().st_size > 0
    return recorded or (run.checkpoints.is_dir() and any(run.checkpoints.iterdir()))


def remove(run: RunDir, made: Sequence[Path]) -> None:
    """Remove the files of a run that was refused, and those of the folders in `made`, the innermost first.

    That are empty then.
    """
    for path, _ in [*_written(run), (run.ranks, ()), (run.tensorboard, ()), (run.checkpoints, ())]:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    for folder in made:
        with suppress(OSError):  # something else has come into it
            folder.rmdir()


def check_free(path: Path) -> None:
    """Look whether a run directory can be made at a path; changes nothing.

    Raises:
        RefusedError: there is a file, or a folder that holds something.
    """
    if path.is_file() or (path.is_dir() and any(path.iterdir())):
        raise _taken(path)


def _taken(path: Path) -> RefusedError:
    return RefusedError(f"run.dir={path} exists and is not empty: choose another one, or remove it.")


def owned(asked: str | None, recipe: str, owners: Sequence[str]) -> RunDir | None:
    """Return the unfinished run that one of `owners` has begun, which started the commands of this run.

    And starts them again.
    """
    if not owners:
        return None
    candidates = [Path(asked)] if asked else sorted((Path("outputs") / recipe).glob("*"), reverse=True)[:_LATEST]
    for run in map(RunDir, candidates):
        try:
            manifest = run.read(run.manifest)
        except RefusedError:
            continue
        if run.status() != "done" and set(owners) & set(manifest.get("owners") or ()):
            return run
    return None


def is_ours(path: Path) -> bool:
    """Tell whether a run of ours lies in a folder, or what a start leaves there.

    That is killed before it has written much.
    """
    run = RunDir(path)
    if run.config.is_file() and run.manifest.is_file():
        return True
    try:
        names = {entry.name for entry in path.iterdir()}
    except OSError:
        return False
    taken = lock.NAME in names and lock.read(path / lock.NAME) is not None
    if taken or {lock.NAME, run.config.name} <= names:
        return True
    empty = lock.NAME not in names or (path / lock.NAME).lstat().st_size == 0
    return bool(names) and names <= {lock.NAME, run.ranks.name} and empty and not any(run.ranks.glob("*"))


def is_fresh(run: RunDir) -> bool:
    """Tell whether nothing has begun in a directory that was made for a start."""
    return {entry.name for entry in run.path.iterdir()} <= {lock.NAME, run.ranks.name}


def check_no_links(run: RunDir, name: str) -> None:
    """Look at everything that a start writes through: a directory that somebody else has made may lead anywhere.

    Raises:
        RefusedError: there is a link or a pipe where a file or a folder of ours belongs; `name` is what the run is
        called.
    """
    check_kinds(run.path, _written(run), name)


def check_kinds(folder: Path, places: Iterable[tuple[Path, Sequence[str]]], name: str) -> None:
    """Look at places in a folder, each with what it must be where it is there: "a file" or "a folder".

    Raises:
        RefusedError: one of them is something else; `name` is what the folder is called.
    """
    for path, wanted in places:
        try:
            mode = path.lstat().st_mode
        except OSError:
            continue
        kind = "a folder" if stat.S_ISDIR(mode) else "a file" if stat.S_ISREG(mode) else None
        if kind is not None and kind in wanted:
            continue
        what = (
            f"a symbolic link to {os.readlink(path)}" if stat.S_ISLNK(mode) else kind or "neither a file nor a folder"
        )
        raise RefusedError(
            f"{name}: {path.relative_to(folder)} is {what}, where this start would write to {' or '.join(wanted)} of "
            "its own: remove it, or copy it without its links."
        )


def _written(run: RunDir) -> Iterator[tuple[Path, Sequence[str]]]:
    """Yield what a start may write to or through, with what it must be where it is there."""
    files = (run.config, run.overrides, run.manifest, run.diff, run.log, run.metrics, run.result, run.error)
    for path in (*files, run.path / lock.NAME, run.path / "job.sbatch"):
        yield path, ["a file"]
    for folder in (run.ranks, run.tensorboard, run.checkpoints):
        yield folder, ["a folder"]
        for path in folder.iterdir() if folder.is_dir() else ():
            yield path, ["a file", "a folder"]
            if folder == run.checkpoints and path.name.startswith(".") and path.is_dir():
                yield from ((inner, ["a file"]) for inner in path.iterdir())


def reopen(run: RunDir) -> None:
    """Make an unfinished run ready to go on; what it has recorded stays, and why it failed is kept beside."""
    if run.error.is_file():
        run.error.rename(first_free_name(run.error))
    run.result.unlink(missing_ok=True)
    for path in run.path.iterdir():
        if _TEMPORARY.fullmatch(path.name):
            path.unlink(missing_ok=True)  # of a write that was killed


def host() -> str:
    """Return this host's name."""
    return platform.node()

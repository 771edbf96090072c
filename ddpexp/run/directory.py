"""The run directory: its name, its creation and its files."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ddpexp import __version__
from ddpexp.checkpoint.format import complete_checkpoints
from ddpexp.checkpoint.initial import CONVERTED
from ddpexp.errors import Failure, RefusedError
from ddpexp.launch import Layout
from ddpexp.run import lock
from ddpexp.system.files import (
    check_yaml,
    first_free_name,
    make_numbered_folder,
    missing_folders,
    read_json,
    remove_empty,
    whole_lines,
    write_json,
)
from ddpexp.system.limits import reason_with_limit
from ddpexp.system.secrets import held_in, masked
from ddpexp.system.yaml_text import load_yaml

FORMAT = 1  # of run directories, as `manifest.json` says; increase it when an older one cannot be read any more
OUTPUTS = Path("outputs")
"""The folder, in the current one, of runs without run.dir, and of sweeps."""
_LATEST = 50  # run directories that `owned` searches
_REMEDIES = {  # for damaged files
    "result.json": " Remove it, and resume: the run writes it again when it ends.",
    "manifest.json": " Put a copy back, or remove it, and with it what it recorded of the starts of the run.",
}
_TEMPORARY = re.compile(
    r"\.(config\.yaml|overrides\.yaml|manifest\.json|code(?:-\d+)?\.diff|result\.json|error\.json)\.[0-9a-f]{8}"
)


@dataclass(frozen=True)
class RunDir:
    """The paths of one run."""

    path: Path

    @property
    def config(self) -> Path:
        """The composed configuration, complete enough to run again."""
        return self.path / "config.yaml"

    @property
    def overrides(self) -> Path:
        """The overrides of the command line."""
        return self.path / "overrides.yaml"

    @property
    def manifest(self) -> Path:
        """What actually ran: commit, packages, hosts, world, data."""
        return self.path / "manifest.json"

    @property
    def diff(self) -> Path:
        """The uncommitted changes of the code that ran."""
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
        """Metrics, one JSON object per line."""
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
    def requests(self) -> Path:
        """The folder of other commands' requests, which is there while the run takes them."""
        return self.path / "requests"

    @property
    def profiles(self) -> Path:
        """The folder of the profiles."""
        return self.path / "profiles"

    def profile(self, step: int) -> Path:
        """Return the folder of the profile that begins after a step."""
        return self.profiles / f"step{step}"

    @property
    def result(self) -> Path:
        """The status of the run, and how it ended."""
        return self.path / "result.json"

    @property
    def labels(self) -> Path:
        """What `ddpexp tag` has written."""
        return self.path / "labels.json"

    @property
    def error(self) -> Path:
        """Why the run failed."""
        return self.path / "error.json"

    def layout(self) -> Layout:
        """Read the layout of the last start.

        Raises:
            RefusedError: the manifest is missing or damaged.
        """
        manifest = self.read(self.manifest)
        try:
            return Layout(**{name: manifest["world"][name] for name in Layout.__dataclass_fields__})
        except (KeyError, TypeError):
            raise RefusedError(
                "is not a run directory: manifest.json does not describe its workers", place=self.path
            ) from None

    def read(self, path: Path) -> dict[str, Any]:
        """Read one of the JSON files.

        Raises:
            RefusedError: it is missing, so this is not a run directory, it is damaged, or of another format.
        """
        remedy = _REMEDIES.get(path.name, "")
        try:
            content = read_json(path)
        except FileNotFoundError as error:
            raise RefusedError(
                f"is not a run directory: {path.name} cannot be read ({error})", place=self.path
            ) from None
        except OSError as error:
            raise RefusedError(f"cannot be read: {error.strerror or error}", place=path) from None
        except ValueError as error:
            raise RefusedError(f"is damaged and cannot be read: {error}.{remedy}", place=path) from None
        if not isinstance(content, dict):
            raise RefusedError(f"is damaged: it does not hold a JSON object.{remedy}", place=path)
        if path == self.manifest and content.get("format") != FORMAT:
            raise RefusedError(
                f"was written by another version of ddpexp (format {content.get('format')}), but this is "
                f"{__version__}, which reads format {FORMAT}",
                suggestion="Use another run.dir, or install that version.",
                place=self.path,
            )
        return content

    def read_if_present(self, path: Path) -> dict[str, Any] | None:
        """Read one of the JSON files; None if it does not exist yet.

        Raises:
            RefusedError: it is damaged.
        """
        return self.read(path) if os.path.lexists(path) else None

    def read_overrides(self) -> list[str]:
        """Return the overrides of the run; nothing if they cannot be read."""
        return self.overrides_if_intact() or []

    def overrides_if_intact(self) -> list[str] | None:
        """Return the overrides of the run; None if they cannot be read."""
        try:
            check_yaml(self.overrides)
            overrides = load_yaml(self.overrides.read_text())
        except (OSError, ValueError, RecursionError, yaml.YAMLError):
            return None
        return [str(override) for override in overrides] if isinstance(overrides, list) else None

    def options(self) -> list[str]:
        """Return the overrides that add an option of the user's own config groups, such as `+experiment=big`."""
        return [override for override in self.read_overrides() if re.match(r"\+{1,2}[\w/]+(@\w+)?=", override)]

    def command(self) -> list[str]:
        """Return the command line of the run's last start, or of its submission; nothing if it cannot be read."""
        for path in (self.manifest, self.result):
            try:
                argv = self.read(path).get("command")
            except RefusedError:
                continue
            if isinstance(argv, list) and argv:
                return [str(argument) for argument in argv]
        return []

    def status(self) -> str | None:
        """Return the status in result.json; None if there is none."""
        try:
            return str(self.read(self.result).get("status"))
        except RefusedError:
            return None

    def fail(self, failure: Failure) -> None:
        """Write error.json, and status `failed` to result.json."""
        write_json(self.error, failure.as_dict())
        self._end("failed", failure.step)

    def interrupt(self, step: int | None = None) -> None:
        """Write status `interrupted` to result.json, with the last `step` if it is known."""
        self._end("interrupted", step)

    def _end(self, status: str, step: int | None) -> None:
        """Write the result from what was recorded, unless rank zero has already written a final result."""
        if self.status() == "done":
            return
        try:
            lines = [json.loads(line) for line in self.metrics.read_bytes()[: whole_lines(self.metrics)].splitlines()]
        except (OSError, ValueError):
            lines = []
        try:
            world_size = self.layout().world_size
        except (RefusedError, KeyError):
            world_size = None  # nothing may prevent a failure from being recorded
        last = lines[-1] if lines else {"step": 0, "epoch": 0}
        evals = [line for line in lines if "train/loss" not in line]
        metrics = {name: value for name, value in evals[-1].items() if "/" in name} if evals else {}
        result = {
            "status": status,
            "step": step if step is not None else last["step"],
            "epoch": last["epoch"],
            "world_size": world_size,
            "metrics": metrics,
            "weights_sha256": None,
            "ended_at": time.time(),
        }
        write_json(self.result, result)


def parent(run_dir: str | None, recipe: str) -> Path:
    """Return the folder in which the run directory will be created."""
    return Path(run_dir).absolute().parent if run_dir else OUTPUTS.absolute() / recipe


def create(run_dir: str | None, recipe: str) -> RunDir:
    """Create the run directory, or use an empty one; two starts in the same second get different directories.

    Raises:
        RefusedError: the given directory is not empty, or cannot be created.
    """
    path = Path(run_dir) if run_dir else OUTPUTS / recipe / time.strftime("%Y-%m-%d_%H-%M-%S")
    missing = missing_folders(path)
    try:
        if not run_dir:
            check_name(path, "run.dir")
            path.parent.mkdir(parents=True, exist_ok=True)
            return RunDir(make_numbered_folder(path))
        check_free(path)
        path.mkdir(parents=True, exist_ok=True)
        run = RunDir(path)
        try:
            run.ranks.mkdir()  # of several starts in one empty directory, the one that creates this folder wins
        except FileExistsError:
            raise _taken(path) from None
        return run
    except OSError as error:
        remove_empty(missing)
        why = reason_with_limit(error, path)
        raise RefusedError(
            f"cannot be made: {why}", key="run.dir", value=path, suggestion="Choose another place with run.dir=... ."
        ) from None


def check_name(path: Path, key: str) -> None:
    """Check that a folder that is to be made, and those to be made above it, have no secret in their names.

    Raises:
        RefusedError: one has; `key` is that of the path.
    """
    for folder in missing_folders(path):
        if (what := held_in(folder.name)) is not None:
            raise RefusedError(
                f"The name of a folder would hold {what}, where everybody who lists folders or processes sees it",
                key=key,
                value=masked(str(path)),
                suggestion="Choose another name.",
            )


def has_trained(run: RunDir) -> bool:
    """Return whether a run has recorded or saved any step."""
    recorded = run.metrics.is_file() and run.metrics.stat().st_size > 0
    return recorded or (run.checkpoints.is_dir() and any(run.checkpoints.iterdir()))


def remove(run: RunDir, created: Sequence[Path]) -> None:
    """Remove the files of a run that was refused, then the folders in `created` that are empty, innermost first."""
    for path, _ in [*written_paths(run), (run.ranks, ()), (run.tensorboard, ()), (run.checkpoints, ())]:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    remove_empty(created)


def check_free(path: Path) -> None:
    """Check that a run directory can be created at a path; changes nothing.

    Raises:
        RefusedError: there is a file, or a folder that is not empty.
    """
    check_name(path, "run.dir")
    if path.exists() and not path.is_dir():
        raise RefusedError(
            "is a file, but a run needs a folder", key="run.dir", value=path, suggestion="Choose another name."
        )
    if path.is_dir() and any(path.iterdir()):
        raise _taken(path)


def _taken(path: Path) -> RefusedError:
    return RefusedError(
        "exists and is not empty", key="run.dir", value=path, suggestion="Choose another directory, or remove this one."
    )


def owned(run_dir: str | None, recipe: str, owners: Sequence[str]) -> RunDir | None:
    """Return the unfinished run that one of `owners` started: the external processes that (re)start the commands."""
    if not owners:
        return None
    candidates = [Path(run_dir)] if run_dir else sorted((OUTPUTS / recipe).glob("*"), reverse=True)[:_LATEST]
    for run in map(RunDir, candidates):
        try:
            manifest = run.read(run.manifest)
        except RefusedError:
            continue
        if run.status() != "done" and set(owners) & set(manifest.get("owners") or ()):
            return run
    return None


def is_ours(path: Path) -> bool:
    """Return whether a folder holds a run of ddpexp, or what a start leaves that was killed early."""
    run = RunDir(path)
    if (run.config.is_file() and run.manifest.is_file()) or complete_checkpoints(run.checkpoints):
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
    """Return whether a new run directory is still unused."""
    return {entry.name for entry in run.path.iterdir()} <= {lock.NAME, run.ranks.name}


def written_paths(run: RunDir) -> Iterator[tuple[Path, Sequence[str]]]:
    """Yield the paths that a start may write to, with the kinds they may have."""
    files = (run.config, run.overrides, run.manifest, run.diff, run.log, run.metrics, run.result, run.error)
    names = (lock.NAME, "job.sbatch", "media.jsonl", CONVERTED, f".{CONVERTED}.partial")
    for path in (*files, *(run.path / name for name in names)):
        yield path, ["a file"]
    yield run.path / "wandb", ["a folder"]  # in which wandb makes links
    for folder in (
        run.ranks,
        run.tensorboard,
        run.checkpoints,
        run.profiles,
        run.requests,
        run.path / "csv",
        run.path / "remote",
    ):
        yield folder, ["a folder"]
        for path in folder.iterdir() if folder.is_dir() else ():
            yield path, ["a file", "a folder"]
            if folder == run.checkpoints and path.name.startswith(".") and path.is_dir():
                yield from ((inner, ["a file"]) for inner in path.iterdir())


def reopen(run: RunDir) -> None:
    """Prepare an unfinished run for resume: keep an old error.json beside, remove result.json and temporary files."""
    if run.error.is_file():
        run.error.rename(first_free_name(run.error))
    run.result.unlink(missing_ok=True)
    for path in run.path.iterdir():
        if _TEMPORARY.fullmatch(path.name):
            path.unlink(missing_ok=True)  # of an interrupted write


def host() -> str:
    """Return this host's name."""
    return platform.node()

"""The sweep on disk: its directory, the names of the jobs' directories, and the log of events."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ddpexp.config.keys import override_key
from ddpexp.config.restated import Grants, records_setting
from ddpexp.errors import RefusedError
from ddpexp.run import links
from ddpexp.system import files
from ddpexp.system.files import open_to_append
from ddpexp.system.json_lines import json_lines
from ddpexp.system.limits import reason_with_limit
from ddpexp.system.secrets import masked
from ddpexp.system.terminal import print_message
from ddpexp.system.yaml_text import load_yaml

_NAME_BYTES = 120  # file systems take 255; a path has other parts too
_OVERRIDES_CHARACTERS = 1 << 13  # of all overrides: Hydra takes seconds for more
_OF_SWEEPERS = ("multirun.yaml", "optimization_results.yaml")  # written by Hydra's sweepers
IS_JOB = re.compile(r"(\d{4,9})(?:_.*)?", re.DOTALL)
"""The name of a job's directory."""

# Options of a sweeper that are only numbers or names.
_HARMLESS = re.compile(
    r"hydra/sweeper(/sampler)?=\w+$|"
    r"hydra\.sweeper\.(n_trials|n_jobs|direction|study_name|max_batch_size|max_failure_rate|sampler\.seed)="
)
_OF_SWEEPER = "hydra.sweeper.params."  # behind it stands a key of the jobs
_OVERRIDE = re.compile(r"[+~]{0,2}[A-Za-z_][^\s=]*(=.*)?", re.DOTALL)


@dataclass(frozen=True)
class SweepDir:
    """The paths of one sweep; its jobs are run directories right below it."""

    path: Path

    @property
    def command(self) -> Path:
        """The overrides of the sweep, and its options."""
        return self.path / "sweep.yaml"

    @property
    def record(self) -> Path:
        """The log of events, one JSON object per line."""
        return self.path / "sweep.jsonl"

    @property
    def logs(self) -> Path:
        """The folder with the output of each job's command."""
        return self.path / "logs"

    def is_sweep(self) -> bool:
        """Return whether the directory contains a sweep."""
        return self.record.is_file()

    def check_no_links(self) -> None:
        """Check every path that a start writes to, and the size of what it reads: the directory is not trusted.

        Raises:
            RefusedError: there is a link or a pipe where a file or a folder of ours belongs, or a record that no sweep
            writes.
        """
        name = files.relative(self.path)
        links.check_kinds(self.path, self._written(), name)
        size = self.record.stat().st_size if self.record.exists() else 0
        if size > files.JSON_BYTES:
            raise RefusedError(
                f"{name}: {self.record.name} has {size:,} bytes, more than {files.JSON_BYTES:,}",
                suggestion="Start a new sweep.",
            )

    def _written(self) -> Iterator[tuple[Path, Sequence[str]]]:
        """Yield the paths that a start may write to, with the kinds they may have."""
        for path in self.path.iterdir():
            if path.name in (self.command.name, self.record.name, *_OF_SWEEPERS):
                yield path, ["a file"]
            elif path == self.logs or IS_JOB.fullmatch(path.name):
                yield path, ["a folder"]
        if self.logs.is_dir() and not self.logs.is_symlink():
            yield from ((path, ["a file"]) for path in self.logs.iterdir())

    def mask_records(self) -> None:
        """Mask the secrets in what Hydra's sweepers have written by themselves. Raises OSError."""
        for path in (self.path / name for name in _OF_SWEEPERS):
            if path.is_file() and masked(text := path.read_text(errors="surrogateescape")) != text:
                files.write(path, text)

    def not_writable(self, error: OSError) -> RefusedError:
        """Return the error for a directory that cannot be written."""
        reason = reason_with_limit(error, self.path)
        return RefusedError(f"cannot be written: {reason}", key="hydra.sweep.dir", value=self.path)

    def log(self, number: int) -> Path:
        """Return the file with the output of a job's command."""
        return self.logs / f"{number:04d}.log"

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield the logged events, oldest first; a truncated line is left out.

        Each has `event` and `time` (seconds since 1970), and by the kind of event:

        - `sweep`, once a start: `words` (as typed), `slots` (how many), `kind` (gpu or cpu), `objective`, `mode`
        - `planned`: `job` (its number), `name` (of its directory), `overrides` (those in which the jobs differ)
        - `started`: `job`, `attempt` (from 1), `slots` (their numbers), `gpus` (what CUDA_VISIBLE_DEVICES calls them)
        - `submitted`: `job`, `job_id` (the scheduler's, such as Slurm's 123_4), `job_scheduler` unless it is Slurm
        - `ended`: `job`, `status` (done, failed, interrupted, stopped), `exit_code`, `seconds`, `objective`, `message`
        """
        return (
            event
            for event in json_lines(self.record)
            if isinstance(event.get("event"), str) and files.is_shallow(event, 2)
        )


class EventLog:
    """Writes the log of events; each event is in the file when `add` returns."""

    def __init__(self, folder: SweepDir) -> None:
        """Open the file to append on a new line."""
        cut_off = folder.record.is_file() and folder.record.read_bytes()[-1:] not in (b"", b"\n")
        self._file, self._failed = open_to_append(folder.record), False
        if cut_off:
            self._file.write("\n")

    def add(self, event: str, **facts: Any) -> None:
        """Write an event; if that fails, as on a full disk, it is retried with the next one."""
        try:
            self._file.buffer.write(files.json_line({"event": event, "time": time.time(), **facts}))
            self._file.flush()
        except OSError as error:  # the jobs' own files record how far they are
            if not self._failed:
                print_message(
                    f"ddpexp: warning: {self._file.name} cannot be written ({error.strerror}): what happens is not "
                    "recorded"
                )
            self._failed = True

    def close(self) -> None:
        """Close the file."""
        with suppress(OSError):
            self._file.close()


def job_name(number: int, overrides: Sequence[str]) -> str:
    """Return a job's directory name: number and swept overrides, such as `0007_optimizer.lr=0.03,trainer.seed=1`.

    Only characters that neither a shell nor a file system minds; a name that would be too long ends in a digest.
    """
    values = ",".join(re.sub(r"[^\w.=+-]+", "-", override.lstrip("+~"), flags=re.ASCII) for override in overrides)
    name = f"{number:04d}_{values}" if values else f"{number:04d}"
    if len(name) <= _NAME_BYTES:
        return name
    digest = hashlib.sha256("\0".join(overrides).encode()).hexdigest()[:8]
    return f"{name[: _NAME_BYTES - 9]}-{digest}"


def restated_overrides(overrides: Sequence[str], typed: Sequence[str] = ()) -> list[str]:
    """Return the overrides of a sweep that must be restated with `ddpexp resume`; `typed` are those of that command."""
    grants = Grants.of(typed)
    return [override for override in overrides if runs_code(override) or records_setting(override, grants)]


def runs_code(override: str) -> bool:
    """Return whether an override affects what code runs, or where, what is connected to, or the initial weights.

    So does one that may refer to a file with such settings.
    """
    key, value = override_key(override), override.partition("=")[2]
    if key.startswith(_OF_SWEEPER) and not override.startswith(("+", "~")):
        return runs_code(override.removeprefix(_OF_SWEEPER))
    if key.startswith("hydra"):
        return not _HARMLESS.match(override) and key != "hydra.sweep.dir"
    if not re.fullmatch(r"[\w.-]+", key):
        return True  # an option put into a section of another name, or a folder of options
    if "." not in key:  # another way to start the jobs; a file outside of the groups' folders, or a whole section
        return key == "launcher" or bool(set("/{$") & set(value))
    return key.startswith(("run.trust", "run.init_from", "launcher."))


def read_command(folder: SweepDir) -> tuple[list[str], list[str]]:
    """Return the overrides of a sweep, and the options that name its config folder.

    Raises:
        RefusedError: the file is damaged.
    """
    try:
        files.check_yaml(folder.command)
        command = load_yaml(folder.command.read_text())
        overrides, options = command["words"], command["options"]
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise RefusedError(
            f"cannot be read ({reason})",
            suggestion=f"Restate the sweep's own overrides, with hydra.sweep.dir={folder.path}.",
            place=folder.command,
        ) from None
    if not all(isinstance(part, list) and all(isinstance(text, str) for text in part) for part in (overrides, options)):
        raise RefusedError("cannot be read: it holds no overrides", place=folder.command)
    if sum(map(len, overrides)) > _OVERRIDES_CHARACTERS:
        raise RefusedError(
            f"cannot be read: its overrides have more than {_OVERRIDES_CHARACTERS:,} characters", place=folder.command
        )
    for override in overrides:
        if not _OVERRIDE.fullmatch(override):  # an option could choose the code that runs
            raise RefusedError(
                f"cannot be read: {override} is not an override, and it holds nothing else", place=folder.command
            )
    return overrides, options

"""The sweep on disk: its directory, the names of its jobs' directories, and the record of what happened."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ddpexp import rundir
from ddpexp.errors import RefusedError
from ddpexp.rundir import open_to_append
from ddpexp.secrets import masked_tree

_NAME_BYTES = 120  # file systems take 255; a path has other parts too
_LINE_BYTES = 1 << 20

# What a sweeper understands that is no more than a number or a name.
_HARMLESS = re.compile(
    r"hydra/sweeper(/sampler)?=\w+$|"
    r"hydra\.sweeper\.(n_trials|n_jobs|direction|study_name|max_batch_size|max_failure_rate|sampler\.seed|params\.[\w.]+)="
)


@dataclass(frozen=True)
class SweepDir:
    """The paths of one sweep; its jobs are run directories right below it."""

    path: Path

    @property
    def asked(self) -> Path:
        """What was typed."""
        return self.path / "sweep.yaml"

    @property
    def record(self) -> Path:
        """What happened, one JSON object a line."""
        return self.path / "sweep.jsonl"

    @property
    def logs(self) -> Path:
        """The folder of what each job's command has printed."""
        return self.path / "logs"

    def is_sweep(self) -> bool:
        """Tell whether a sweep lies here."""
        return self.record.is_file()

    def log(self, number: int) -> Path:
        """Return the file of what a job's command has printed."""
        return self.logs / f"{number:04d}.log"

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield the events of the record, the oldest first; a line that was cut off by a power cut is left out.

        Each has `event` and `time` (seconds since 1970), and by the kind of event:

        - `sweep`, once a start: `words` (as typed), `slots` (how many), `kind` (gpu or cpu), `objective`, `mode`
        - `planned`: `job` (its number), `name` (of its directory), `overrides` (its own words)
        - `started`: `job`, `attempt` (from 1), `slots` (their numbers), `gpus` (what CUDA_VISIBLE_DEVICES calls them)
        - `submitted`: `job`, `job_id` (Slurm's, such as 123_4)
        - `ended`: `job`, `status` (done, failed, interrupted, stopped), `exit_code`, `seconds`, `objective`, `message`
        """
        try:
            file = open(self.record, encoding="utf-8", errors="replace")  # noqa: SIM115
        except OSError:
            return
        with file:
            while line := file.readline(_LINE_BYTES):
                try:
                    event = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                if isinstance(event, dict) and isinstance(event.get("event"), str):
                    yield event


class Record:
    """Writes the record; every event is in the file when `add` returns."""

    def __init__(self, folder: SweepDir) -> None:
        """Open the file to go on at its end, on a line of its own."""
        cut_off = folder.record.is_file() and folder.record.read_bytes()[-1:] not in (b"", b"\n")
        self._file = open_to_append(folder.record)
        if cut_off:
            self._file.write("\n")

    def add(self, event: str, **facts: Any) -> None:
        """Write one event."""
        self._file.write(json.dumps(masked_tree({"event": event, "time": time.time(), **facts})) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def job_name(number: int, overrides: Sequence[str]) -> str:
    """Name a job's directory: its number and what is its own, such as `0007_optimizer.lr=0.03,trainer.seed=1`.

    Only characters that neither a shell nor a file system minds; a name that would be too long ends in a digest.
    """
    own = ",".join(re.sub(r"[^\w.=+-]+", "-", word.lstrip("+~"), flags=re.ASCII) for word in overrides)
    name = f"{number:04d}_{own}" if own else f"{number:04d}"
    if len(name) <= _NAME_BYTES:
        return name
    digest = hashlib.sha256("\0".join(overrides).encode()).hexdigest()[:8]
    return f"{name[: _NAME_BYTES - 9]}-{digest}"


def words_of(event: Mapping[str, Any]) -> list[str] | None:
    """Return the overrides of a `planned` event; None where it does not say."""
    words = event.get("overrides")
    return words if isinstance(words, list) and all(isinstance(word, str) for word in words) else None


def latest(events: Sequence[Mapping[str, Any]], kind: str) -> dict[int, Mapping[str, Any]]:
    """Return each job's newest event of a kind, by the job's number."""
    return {event["job"]: event for event in events if event["event"] == kind and isinstance(event.get("job"), int)}


def again_words(words: Sequence[str]) -> list[str]:
    """Return those words of a sweep that have to be typed again with `ddpexp resume`."""
    return [word for word in words if runs_code(word)]


def runs_code(word: str) -> bool:
    """Tell whether a word says what code runs, or whom the sweep connects to."""
    key = key_of(word)
    if key.startswith("hydra"):
        return not _HARMLESS.match(word) and key != "hydra.sweep.dir"
    return key == "run.trust" or key.startswith("launcher.")


def key_of(word: str) -> str:
    """Return the key of a typed word."""
    return word.lstrip("+~").partition("=")[0]


def asked_of(folder: SweepDir) -> tuple[list[str], list[str]]:
    """Return the words of a sweep, and those that say where its configs are.

    Raises:
        RefusedError: the file is damaged.
    """
    try:
        rundir.check_yaml(folder.asked)
        found = yaml.safe_load(folder.asked.read_text())
        words, options = found["words"], found["options"]
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise RefusedError(
            f"{folder.asked} cannot be read ({reason}): type the sweep's own words again, with hydra.sweep.dir={folder.path}."
        ) from None
    if not all(isinstance(part, list) and all(isinstance(word, str) for word in part) for part in (words, options)):
        raise RefusedError(f"{folder.asked} cannot be read: it holds no words.")
    return words, options

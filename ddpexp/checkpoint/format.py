"""Checkpoints on disk: a folder in which every byte is hashed.

Free of torch, so that the command can use it, too.

    step-00000500/
      <model>.safetensors        parameters and buffers, one file per model
      <model>.ema.safetensors    their moving average
      state.<part>.json          everything else, in named parts: optimizers, progress, modules, clock, world, ...
      state.<part>.safetensors   the tensors of a part
      state.rank-00001.json      state of a single rank
      config.yaml                the configuration that wrote it
      checkpoint.json            the manifest: facts, and size and hashes of every file

A part is a tree of plain values and tensors (`ddpexp.checkpoint.codec`). A reader ignores unknown parts, and returns
None for missing ones, so that new kinds of state are new parts, not a new format. The manifest ends with
the SHA-256 of all its preceding bytes.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddpexp import __version__
from ddpexp.errors import RefusedError
from ddpexp.system.files import dumps, parse_json, read_plain_file, relative

FORMAT = 2
MANIFEST = "checkpoint.json"
CONFIG = "config.yaml"
_FOLDER = re.compile(r"step-(\d{8,})")
_SEAL = ',\n  "sha256": "'
_END = '"\n}\n'
_HEX = 64  # digits of a SHA-256
_BLOCK = 1 << 20


@dataclass(frozen=True)
class Piece:
    """A contiguous part of a file, written by one rank. Units: bytes."""

    offset: int
    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class File:
    """A file as described by the manifest; its pieces, in order, cover it without gaps."""

    num_bytes: int
    pieces: Sequence[Piece]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint with an intact manifest; `problem` checks its files."""

    folder: Path
    manifest: Mapping[str, Any]
    files: Mapping[str, File]

    @property
    def step(self) -> int:
        """Return the number of optimizer steps that were done."""
        return int(self.manifest["step"])

    @property
    def metrics(self) -> Mapping[str, Any]:
        """Return the metrics of the last evaluation if it was after this step."""
        evaluated = self.manifest.get("evaluated_at") == self.step
        return self.manifest.get("metrics") or {} if evaluated else {}

    @property
    def weights(self) -> list[str]:
        """Return the names of the weights files: of models and of their averages."""
        return [
            name for name in self.files if name.endswith(".safetensors") and not name.startswith(("state.", "rank-"))
        ]

    @property
    def has_average(self) -> bool:
        """Return whether it holds an average of the weights, too."""
        return any(name.endswith(".ema.safetensors") for name in self.weights)

    @property
    def config(self) -> str | None:
        """Return the configuration that wrote it, or None if there is none. Raises OSError, ValueError."""
        return read_plain_file(self.folder / CONFIG).decode() if CONFIG in self.files else None

    def problem(self, rank: int = 0, world_size: int = 1, files: Sequence[str] | None = None) -> str | None:
        """Compare the files with the manifest; return the first difference, or None.

        Ranks: all, or a single one; each checks all sizes and the hashes of an equal share of the bytes.
        """
        wrong = self.wrong_size(files)
        if wrong is not None:
            return wrong
        pieces = [(name, piece) for name in files or self.files for piece in self.files[name].pieces]
        total, end = max(sum(piece.num_bytes for _, piece in pieces), 1), 0
        try:
            for name, piece in pieces:
                end += piece.num_bytes
                owner = int((end - piece.num_bytes / 2) * world_size / total)  # by where its middle lies
                if rank == min(owner, world_size - 1) and _sha256(self.folder / name, piece) != piece.sha256:
                    return f"{name} is damaged: its hash is not the one in the manifest"
        except OSError as error:
            return _message(error)
        return None

    def wrong_size(self, files: Sequence[str] | None = None) -> str | None:
        """Compare only the sizes of the files with the manifest; return the first difference, or None."""
        for name in files or self.files:
            if name not in self.files:
                return f"{name} is not in the manifest"
            expected = self.files[name].num_bytes
            try:
                size = _size(self.folder / name)
            except OSError as error:
                return _message(error)
            if size < expected:
                return f"{name} is cut off: it has {size:,} of its {expected:,} bytes"
            if size > expected:
                return f"{name} has {size:,} bytes where {expected:,} were written"
        return None


@dataclass(frozen=True)
class Damaged:
    """A folder with the name of a checkpoint that is not an intact one."""

    folder: Path
    problem: str

    @property
    def step(self) -> int:
        """Return the step in its name."""
        return _step(self.folder)


@dataclass(frozen=True)
class Found:
    """The checkpoints in a folder, newest first."""

    complete: list[Checkpoint] = field(default_factory=list)
    damaged: list[Damaged] = field(default_factory=list)


def scan(folder: Path) -> Found:
    """Read the manifests of all checkpoints in a folder, but none of their files.

    Raises:
        RefusedError: another version of ddpexp has written one of them in another format.
    """
    found = Found()
    for path in _folders(folder):
        try:
            found.complete.append(open_checkpoint(path))
        except (OSError, ValueError) as error:
            found.damaged.append(Damaged(path, _message(error)))
    return found


def newest(folder: Path) -> Checkpoint | None:
    """Return the newest checkpoint with an intact manifest. Raises RefusedError, as `scan`."""
    return next(iter(scan(folder).complete), None)


def newest_intact(folder: Path, weights_only: bool = False) -> tuple[Checkpoint | None, list[Damaged]]:
    """Return the newest intact checkpoint, and the newer damaged ones.

    `weights_only` checks only the weights files.
    Raises: RefusedError, as `scan`.
    """
    found = scan(folder)
    damaged = list(found.damaged)
    chosen = None
    for checkpoint in found.complete:
        problem = checkpoint.problem(files=checkpoint.weights if weights_only else None)
        if problem is None:
            chosen = checkpoint
            break
        damaged.append(Damaged(checkpoint.folder, problem))
    newer = [entry for entry in damaged if chosen is None or entry.step > chosen.step]
    return chosen, sorted(newer, key=lambda entry: entry.step, reverse=True)


def best_first(checkpoints: Sequence[Checkpoint], keep_best: str) -> list[Checkpoint]:
    """Return those that have the metric of trainer.keep_best, the best first and of equal ones the earliest.

    A checkpoint also has the metrics of an evaluation before its step: of several with the same evaluation only the
    earliest counts.
    """
    mode, _, name = keep_best.partition(":")
    rated: dict[int, Checkpoint] = {}
    for checkpoint in sorted(checkpoints, key=lambda checkpoint: checkpoint.step):
        value = checkpoint.metrics.get(name)
        if value is not None and not math.isnan(float(value)):
            rated.setdefault(checkpoint.manifest.get("evaluated_at", checkpoint.step), checkpoint)
    sign = -1 if mode == "max" else 1
    return sorted(rated.values(), key=lambda checkpoint: (sign * float(checkpoint.metrics[name]), checkpoint.step))


def open_checkpoint(folder: Path) -> Checkpoint:
    """Read the manifest of one checkpoint.

    Raises:
        RefusedError: another version of ddpexp has written it in another format. OSError, ValueError: it is damaged.
    """
    try:
        return _open(folder)
    except (TypeError, KeyError, AttributeError, OverflowError) as error:
        raise ValueError(f"its manifest is none of a checkpoint ({type(error).__name__}: {error})") from None


def _open(folder: Path) -> Checkpoint:
    manifest = _unsealed(read_plain_file(folder / MANIFEST))
    if int(manifest["format"]) != FORMAT:
        raise RefusedError(
            f"was written by ddpexp {manifest.get('ddpexp')} (format {manifest['format']}), but this is "
            f"{__version__}, which reads format {FORMAT}",
            suggestion="Install that version.",
            place=folder,
        )
    files = {str(name): _file(record) for name, record in manifest["files"].items()}
    if _FOLDER.fullmatch(folder.name) and manifest["step"] != _step(folder):  # copies may have any name
        raise ValueError("its manifest is that of another step")
    for name, file in files.items():
        _check_file(name, file)
    if any(
        isinstance(position, int | float) and not position >= 0 for position in manifest.get("records", {}).values()
    ):
        raise ValueError("its manifest holds numbers that cannot be")
    _check_metrics(manifest)
    return Checkpoint(folder, manifest, files)


def _check_metrics(manifest: Mapping[str, Any]) -> None:
    """Check the metrics of a manifest, by which the best checkpoint is found: numbers, or null for NaN."""
    for name, value in (manifest.get("metrics") or {}).items():
        if value is not None and not isinstance(value, int | float):
            raise ValueError(f"its manifest has no number for the metric {name}")
        float(value or 0)  # a whole number may be too large
    if not isinstance(manifest.get("evaluated_at"), int | None):
        raise ValueError("its manifest names no step for its evaluation")


def is_checkpoint(folder: Path) -> bool:
    """Return whether a folder has the manifest of a checkpoint; run directories have a `manifest.json`, too."""
    return (folder / MANIFEST).is_file()


def is_named_so(folder: Path) -> bool:
    """Return whether a folder has the name of a checkpoint."""
    return bool(_FOLDER.fullmatch(folder.name))


def complete_checkpoints(folder: Path) -> list[Path]:
    """Return the folders that have a manifest, newest first, without reading the manifests."""
    return [path for path in _folders(folder) if is_checkpoint(path)]


def clean(folder: Path) -> None:
    """Remove incomplete writes and removals, and put back what was to be replaced.

    Ranks: rank zero, while no rank writes.
    """
    for path in folder.glob(".step-*.replaced"):
        final = path.with_name(path.name.removeprefix(".").removesuffix(".replaced"))
        if final.exists():
            shutil.rmtree(path, ignore_errors=True)
        else:
            os.rename(path, final)
    for path in [*folder.glob(".step-*.partial"), *folder.glob(".step-*.removed")]:
        shutil.rmtree(path, ignore_errors=True)


def set_aside(damaged: Iterable[Damaged]) -> None:
    """Rename damaged checkpoints, so that their names are free for new ones.

    They are kept in case something can be recovered from them. Ranks: rank zero, while no rank writes.
    """
    log = logging.getLogger("ddpexp")
    for entry in damaged:
        try:
            renamed = set_folder_aside(entry.folder)
        except OSError as error:
            log.warning("%s is damaged and cannot be renamed: %s", relative(entry.folder), error.strerror)
        else:
            log.warning("%s cannot be used (%s): it is kept as %s", relative(entry.folder), entry.problem, renamed.name)


def set_folder_aside(folder: Path) -> Path:
    """Rename a damaged checkpoint to the first free name ending in `.damaged`. Raises OSError."""
    number = 1
    while os.path.lexists(target := folder.with_name(f"{folder.name}.damaged{'' if number == 1 else f'-{number}'}")):
        number += 1
    os.rename(folder, target)
    return target


def folder_name(step: int) -> str:
    """Return the name of the folder of a step."""
    return f"step-{step:08d}"


def seal(manifest: Mapping[str, Any]) -> bytes:
    """Return a manifest as JSON whose last entry is the hash of all preceding bytes."""
    text = dumps(manifest).removesuffix("\n}\n") + _SEAL
    return f"{text}{hashlib.sha256(text.encode()).hexdigest()}{_END}".encode()


def _unsealed(raw: bytes) -> dict[str, Any]:
    """Invert `seal`. Raises ValueError: a byte has changed."""
    text = raw[: -_HEX - len(_END)]
    digest = raw[-_HEX - len(_END) : -len(_END)]
    end = raw[-len(_END) :]
    if end != _END.encode() or digest != hashlib.sha256(text).hexdigest().encode():
        raise ValueError(f"{MANIFEST} is damaged: it does not have its own hash")
    manifest = parse_json(raw)
    if not isinstance(manifest, dict):
        raise ValueError(f"{MANIFEST} holds no object")
    return manifest


def _file(record: Mapping[str, Any]) -> File:
    pieces = [Piece(piece["offset"], piece["num_bytes"], piece["sha256"]) for piece in record["pieces"]]
    return File(record["num_bytes"], pieces)  # later versions may add entries


def _check_file(name: str, file: File) -> None:
    """Raise ValueError if the description of a file is invalid."""
    if not name or Path(name).name != name:
        raise ValueError(f"{name!r} is no name of a file")
    end = 0
    for piece in file.pieces:
        if not isinstance(piece.num_bytes, int) or piece.offset != end or piece.num_bytes < 0:
            raise ValueError(
                f"a piece of {name} has {piece.num_bytes} bytes at {piece.offset}, and the one before ends at {end}"
            )
        end += piece.num_bytes
    if end != file.num_bytes:
        raise ValueError(f"the pieces of {name} have {end} bytes, and the file {file.num_bytes}")


def _message(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename:
        return f"{Path(error.filename).name}: {error.strerror}"
    return str(error)


def _folders(folder: Path) -> Iterator[Path]:
    """Yield the folders with the name of a checkpoint, newest first."""
    named = [path for path in folder.glob("step-*") if _FOLDER.fullmatch(path.name) and path.is_dir()]
    yield from sorted(named, key=_step, reverse=True)


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def _size(path: Path) -> int:
    if not path.is_file():
        raise OSError(0, "it is not a regular file" if path.exists() else "it is missing", str(path))
    return path.stat().st_size


def _sha256(path: Path, piece: Piece) -> str:
    digest, left = hashlib.sha256(), piece.num_bytes
    block = memoryview(bytearray(min(left, _BLOCK)))
    with path.open("rb", buffering=0) as file:
        file.seek(piece.offset)
        while left and (num_bytes := file.readinto(block[:left])):
            digest.update(block[:num_bytes])
            left -= num_bytes
    return digest.hexdigest()

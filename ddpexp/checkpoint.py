"""Checkpoints: tensors in safetensors, the rest in JSON, written by all ranks behind the training; complete or not there.

A checkpoint is a folder. Every rank knows the bytes of all its files, for the ranks hold the same tensors, and writes its
share of them; rank zero then writes down the hash of every share, and gives the folder its name. What has no such name, or
lacks a byte of what its manifest says, is never read.
"""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ddpexp import __version__
from ddpexp.errors import DdpexpError, RefusedError
from ddpexp.faults import reach
from ddpexp.launch.limits import said_with_limit
from ddpexp.plain import DTYPES, decode, encode
from ddpexp.rundir import JSON_BYTES, complete_checkpoints, dumps, read_json, write
from ddpexp.world import World

Models = Mapping[str, nn.Module]
Files = Mapping[str, Mapping[str, Tensor]]

FORMAT = 1
_PIECE = 1 << 20  # bytes; ranks write whole pieces of a file, so that no two hosts ever write into one page of it
_TRIES = 4
_PAUSE_SECONDS = 0.5  # before the second try; twice as long before each further one
_POLL_SECONDS = 0.02
_SETTLE_SECONDS = 2.0  # a run that fails ends within five
_NICE = 10  # the thread that writes stands back behind the training

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class CheckpointError(DdpexpError):
    """A checkpoint could not be written."""


@dataclass(frozen=True)
class Piece:
    """Bytes of one file, written by one rank."""

    file: str
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class _File:
    """One safetensors file before it is written: its header, and where each tensor begins."""

    name: str
    header: bytes
    places: Sequence[tuple[int, int, str]]  # begin, end, name

    @property
    def num_bytes(self) -> int:
        return self.places[-1][1] if self.places else len(self.header)


def weights_sha256(models: Models) -> str:
    """Hash parameters and buffers, sorted by name, each as name, dtype, shape and bytes."""
    digest = hashlib.sha256()
    named = {
        name if prefix == "model" else f"{prefix}.{name}": tensor
        for prefix, module in models.items()
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]
    }
    for name in sorted(named):
        tensor = named[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class Writer:
    """Writes this rank's share of each checkpoint, behind the training.

    `save` returns as soon as this rank's share is copied; a second one waits until the first is written.
    """

    def __init__(
        self,
        folder: Path,
        world: World,
        *,
        keep_last: int | None = 2,
        keep_best: str | None = None,
        stops: bool = True,
    ) -> None:
        """Write into `folder`; `stops` says whether a checkpoint that cannot be written ends the run."""
        self._folder = folder
        self._world = world
        self._keep_last, self._keep_best, self._stops = keep_last, keep_best, stops
        self._board = world.board()
        self._stage = _Stage(world.device)
        self._plan: tuple[Any, list[_File]] | None = None
        self._thread: threading.Thread | None = None
        self._problem: str | None = None
        self._number = 0

    def save(
        self, step: int, files: Files, own: Mapping[str, Tensor], state: Any, facts: Mapping[str, Any], records: Mapping[Path, int]
    ) -> None:
        """Copy this rank's share of `files` and have it written; rank zero also writes `state` and the manifest's `facts`.

        `own` is what this rank alone has; `records` are files that must be on the disk, so far, before the checkpoint counts.
        Ranks: all, with the same `files` but for buffers, of which each rank copies its own.

        Raises:
            CheckpointError: the one before could not be written, and that is to end the run.
        """
        self.wait()
        tensors: dict[str, Tensor] = {}
        plain = encode(state, tensors)
        everything = {**files, "state": tensors}
        planned = self._planned(everything)
        pieces = share(planned, self._world.rank, self._world.world_size)
        copied = self._stage.copy(planned, everything, pieces)
        mine: dict[str, bytes] = {}
        if own:
            mine[f"rank-{self._world.rank:05}.safetensors"] = _serialised({name: t.detach().clone() for name, t in own.items()})
        if self._world.is_rank_zero:
            mine["state.json"] = json.dumps(plain).encode()
            if len(mine["state.json"]) > JSON_BYTES:
                raise CheckpointError(
                    f"the plain values of the checkpoint of step {step} take {len(mine['state.json']):,} bytes, more than the "
                    f"{JSON_BYTES:,} that are read back: keep large states as tensors."
                )
        self._number += 1
        manifest = {
            "format": FORMAT, "ddpexp": __version__, "torch": torch.__version__, "step": step,
            "world_size": self._world.world_size, **facts,
            "records": {os.path.relpath(path, self._folder.parent): size for path, size in records.items()},
        }  # fmt: skip
        job = _Job(step, self._number, pieces, copied, mine, manifest, list(records))
        self._thread = threading.Thread(target=self._work, args=(job,), daemon=True, name=f"checkpoint {step}")
        self._thread.start()

    def check(self) -> None:
        """Look whether what was written behind went wrong.

        Raises:
            CheckpointError: it did, and that is to end the run.
        """
        self._look(self._stops)

    def _look(self, stops: bool) -> None:
        problem, self._problem = self._problem, None
        if problem is None:
            return
        if stops:
            raise CheckpointError(problem)
        logging.getLogger("ddpexp").warning("%s The run goes on (trainer.on_save_error=continue).", problem)

    def wait(self, end: bool = False) -> None:
        """Wait until the last save is done: on rank zero until it counts, on others until their share is written.

        Raises:
            CheckpointError: it could not be written, and that is to end the run, or this is its `end`.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._look(self._stops or end)

    def settle(self) -> None:
        """Let what is being written become complete, but wait for a moment only: another rank's share may never come."""
        if self._thread is not None:
            self._thread.join(_SETTLE_SECONDS)

    def _planned(self, files: Files) -> list[_File]:
        signature = [(name, [(key, t.dtype, t.shape) for key, t in tensors.items()]) for name, tensors in files.items()]
        if self._plan is None or self._plan[0] != signature:
            self._plan = signature, [lay_out(name, tensors) for name, tensors in files.items()]
        return self._plan[1]

    def _work(self, job: _Job) -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        try:
            hashes = _tried(lambda: self._write_share(job))
            report = json.dumps({"pieces": hashes})
        except OSError as error:
            report = json.dumps({"problem": self._describe(error, job)})
        name = f"ddpexp/checkpoint/{job.number}"
        try:
            if not self._world.is_rank_zero:
                self._board.put(f"{name}/{self._world.rank}", report)
                return
            reports = [json.loads(report)]
            reports += [json.loads(self._awaited(f"{name}/{rank}")) for rank in range(1, self._world.world_size)]
            problem = next((one["problem"] for one in reports if "problem" in one), None)
            if problem is None:
                try:
                    _tried(lambda: self._complete(job, [piece for one in reports for piece in one["pieces"]]))
                except OSError as error:
                    problem = self._describe(error, job)
            if problem is not None:
                shutil.rmtree(self._partial(job.step), ignore_errors=True)
                self._problem = problem
        except RuntimeError:
            return  # the ranks' store has gone with its rank, and the run ends for that reason

    def _awaited(self, name: str) -> str:
        while (text := self._board.take(name)) is None:
            time.sleep(_POLL_SECONDS)
        return text

    def _partial(self, step: int) -> Path:
        return self._folder / f".{_name(step)}.partial"

    def _write_share(self, job: _Job) -> list[dict[str, Any]]:
        """Write this rank's pieces to the disk; return them with their hashes."""
        folder = self._partial(job.step)
        folder.mkdir(parents=True, exist_ok=True)
        reach("checkpoint.begun")
        hashes = []
        copied: Any = job.copied.numpy().data
        begin = 0
        for piece in job.pieces:
            data = copied[begin : begin + piece.num_bytes]
            begin += piece.num_bytes
            _write_at(folder / piece.file, piece.offset, data)
            reach("checkpoint.written")
            hashes.append({**asdict(piece), "sha256": hashlib.sha256(data).hexdigest()})
        for file, content in job.mine.items():
            (folder / file).unlink(missing_ok=True)  # of a try before
            _write_at(folder / file, 0, memoryview(content))
            hashes.append({**asdict(Piece(file, 0, len(content))), "sha256": hashlib.sha256(content).hexdigest()})
        _sync(folder)
        reach("checkpoint.share")
        return hashes

    def _complete(self, job: _Job, pieces: Sequence[Mapping[str, Any]]) -> None:
        """Make the folder count, once all shares are on the disk; then remove those that are not kept."""
        folder, final = self._partial(job.step), self._folder / _name(job.step)
        if not final.exists():  # a try before may have come that far
            for path in job.records:
                with suppress(FileNotFoundError):
                    _sync(path)
            reach("checkpoint.recorded")
            write(folder / "manifest.json", dumps({**job.manifest, "pieces": list(pieces)}))
            reach("checkpoint.manifest")
            _sync(folder)
            os.rename(folder, final)
            reach("checkpoint.renamed")
        _sync(self._folder)
        self._prune()

    def _prune(self) -> None:
        complete = complete_checkpoints(self._folder)
        kept = set(complete if self._keep_last is None else complete[: self._keep_last])
        if self._keep_best is not None:
            kept |= set(_best(complete, self._keep_best))
        for folder in complete:
            if folder not in kept:
                removed = folder.with_name(f".{folder.name}.removed")
                os.rename(folder, removed)  # at once: what is half removed must not look complete
                reach("checkpoint.pruning")
                shutil.rmtree(removed)

    def _describe(self, error: OSError, job: _Job) -> str:
        free = ""
        with suppress(OSError):
            free = f" ({shutil.disk_usage(self._folder.parent).free / 1e6:,.1f} MB free)"
        size = job.copied.numel() / 1e6
        return (
            f"the checkpoint of step {job.step} could not be written in {self._folder}: {said_with_limit(error)}{free}, "
            f"rank {self._world.rank} writes {size:,.1f} MB of it; the checkpoints before it are as they were. "
            f"Make room or mend the disk, then resume."
        )


@dataclass(frozen=True)
class _Job:
    """One save, as handed to the thread that writes."""

    step: int
    number: int
    pieces: Sequence[Piece]
    copied: Tensor  # the bytes of the pieces, one after the other
    mine: Mapping[str, bytes]  # whole small files of this rank
    manifest: Mapping[str, Any]
    records: Sequence[Path]


class _Stage:
    """Memory that keeps this rank's share while it is written; taken once, for fresh memory is slow to fill."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def copy(self, planned: Sequence[_File], files: Files, pieces: Sequence[Piece]) -> Tensor:
        """Copy the bytes of the pieces. Shapes: (bytes,) uint8, on the CPU."""
        wanted = sum(piece.num_bytes for piece in pieces)
        if self._buffer.numel() < wanted:
            self._buffer = _memory(wanted, self._device)
        by_name = {file.name: file for file in planned}
        begin = 0
        for piece in pieces:
            file = by_name[piece.file]
            _copy(file, files[file.name.removesuffix(".safetensors")], piece, self._buffer[begin : begin + piece.num_bytes])
            begin += piece.num_bytes
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return self._buffer[:wanted]


def lay_out(name: str, tensors: Mapping[str, Tensor]) -> _File:
    """Decide every byte of a safetensors file but the tensors' own.

    A tensor that is another one (a tied weight) is written once; the metadata name the other.
    Source: the description of the safetensors format.
    """
    header: dict[str, Any] = {}
    same: dict[str, str] = {}
    seen: dict[Any, str] = {}
    sizes: list[tuple[str, int]] = []
    begin = 0
    for key, tensor in tensors.items():
        identity = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) if tensor.numel() else key
        if identity in seen:
            same[key] = seen[identity]
            continue
        seen[identity] = key
        size = tensor.numel() * tensor.element_size()
        if tensor.dtype not in _NAMES:
            raise DdpexpError(f"{key} is of {tensor.dtype}, which the safetensors format does not know.")
        header[key] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, begin + size]}
        sizes.append((key, size))
        begin += size
    text = json.dumps({"__metadata__": {"format": "pt", **same}, **header}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    places, position = [], 8 + len(text)
    for key, size in sizes:
        places.append((position, position + size, key))
        position += size
    return _File(f"{name}.safetensors", len(text).to_bytes(8, "little") + text, places)


def share(files: Iterable[_File], rank: int, world_size: int) -> list[Piece]:
    """Return what one rank writes: of all files' bytes, one after the other, the rank-th of `world_size` equal parts."""
    cut = [(file, offset) for file in files for offset in range(0, file.num_bytes, _PIECE)]
    mine = cut[rank * len(cut) // world_size : (rank + 1) * len(cut) // world_size]
    pieces: list[Piece] = []
    for file, offset in mine:
        size = min(_PIECE, file.num_bytes - offset)
        if pieces and pieces[-1].file == file.name:
            pieces[-1] = Piece(file.name, pieces[-1].offset, pieces[-1].num_bytes + size)
        else:
            pieces.append(Piece(file.name, offset, size))
    return pieces


def _copy(file: _File, tensors: Mapping[str, Tensor], piece: Piece, out: Tensor) -> None:
    """Copy a piece's bytes of the header and of the tensors in it. Shapes: `out` is (piece.num_bytes,) uint8."""
    first, last = piece.offset, piece.offset + piece.num_bytes
    if first < len(file.header):
        head = file.header[first:last]
        out[: len(head)].copy_(torch.frombuffer(bytearray(head), dtype=torch.uint8))
    for begin, end, key in file.places:
        low, high = max(begin, first), min(end, last)
        if low < high:
            source = _bytes(tensors[key])[low - begin : high - begin]
            out[low - first : high - first].copy_(source, non_blocking=True)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _memory(num_bytes: int, device: torch.device) -> Tensor:
    if device.type == "cuda":
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    block = mmap.mmap(-1, max(num_bytes, 1))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):
            block.madvise(mmap.MADV_HUGEPAGE)  # a fault for two megabytes, not for every four kilobytes
    return torch.frombuffer(block, dtype=torch.uint8)[:num_bytes]


def _tried(work: Callable[[], Any]) -> Any:
    """Do what may fail for a moment; the last failure is raised."""
    for number in range(_TRIES - 1):
        try:
            return work()
        except OSError:
            time.sleep(_PAUSE_SECONDS * 2**number)
    return work()


def _write_at(path: Path, offset: int, data: memoryview) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        while data:
            written = os.pwrite(descriptor, data[: 1 << 26], offset)
            data, offset = data[written:], offset + written
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _serialised(tensors: Mapping[str, Tensor]) -> bytes:
    from safetensors.torch import save

    return save({name: tensor.cpu().contiguous() for name, tensor in tensors.items()})


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _best(complete: Sequence[Path], keep_best: str) -> Iterator[Path]:
    """Yield the checkpoint with the best value of a metric, if one has it; of equal ones the earliest."""
    mode, _, name = keep_best.partition(":")
    found: list[tuple[float, Path]] = []
    for folder in reversed(complete):
        manifest = read_json(folder / "manifest.json")
        value = manifest.get("metrics", {}).get(name)
        if value is not None and manifest.get("evaluated_at") == manifest["step"]:
            found.append((value, folder))
    if found:
        yield (max if mode == "max" else min)(found, key=lambda one: one[0])[1]


# Reading


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on the disk."""

    folder: Path
    manifest: Mapping[str, Any]

    @property
    def step(self) -> int:
        """Return the number of optimizer steps that were done."""
        return int(self.manifest["step"])

    def problem(self, rank: int = 0, world_size: int = 1, files: Sequence[str] | None = None) -> str | None:
        """Read this rank's share of the bytes and say what is not as it was written, or None.

        Ranks: all, or one alone; each looks at every `world_size`-th piece.
        """
        try:
            pieces = [piece for piece in self.manifest["pieces"] if files is None or piece["file"] in files]
            for piece in pieces[rank::world_size]:
                path = self.folder / piece["file"]
                if path.name != piece["file"]:
                    return f"{piece['file']!r} is no name of a file"
                digest = _sha256(path, piece["offset"], piece["num_bytes"])
                if digest != piece["sha256"]:
                    return f"{path.name} is damaged: its hash is not the one in manifest.json"
        except (OSError, KeyError, TypeError, ValueError) as error:
            return f"{error.__class__.__name__}: {error}"
        return None

    def state(self) -> Any:
        """Return what was given to `Writer.save` as `state`. Raises RefusedError where it cannot be read."""
        tensors = self.tensors("state")
        try:
            plain = read_json(self.folder / "state.json")
            return decode(plain, lambda name: _known(tensors, name, self.folder))
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise RefusedError(f"{self.folder / 'state.json'} cannot be read: {error}.") from None

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Return the tensors of `<name>.safetensors`, tied ones under each of their names. Raises RefusedError."""
        return read_tensors(self.folder / f"{name}.safetensors")

    def own(self, rank: int) -> dict[str, Tensor]:
        """Return what the rank had that others had not."""
        path = self.folder / f"rank-{rank:05}.safetensors"
        return read_tensors(path) if path.is_file() else {}


def complete(folder: Path) -> list[Checkpoint]:
    """Return the complete checkpoints in a folder, the newest first; what cannot be read is left out with a warning.

    Raises:
        RefusedError: one was written by a newer version of ddpexp.
    """
    found = []
    for path in complete_checkpoints(folder):
        try:
            manifest = read_json(path / "manifest.json")
            if int(manifest.get("format", 0)) > FORMAT:
                raise RefusedError(
                    f"{path} was written by ddpexp {manifest.get('ddpexp')} (format {manifest['format']}), and this is "
                    f"{__version__}, which reads up to format {FORMAT}: install that version."
                )
            if manifest["step"] != int(path.name.removeprefix("step-")) or "pieces" not in manifest:
                raise ValueError("it is not that of a checkpoint of this step")
            if int(manifest["world_size"]) < 1 or not all(size >= 0 for size in manifest.get("records", {}).values()):
                raise ValueError("it holds numbers that cannot be")
            found.append(Checkpoint(path, manifest))
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            logging.getLogger("ddpexp").warning("%s is left out: manifest.json cannot be read (%s).", path, error)
    return found


def clean(folder: Path) -> None:
    """Remove what writes and removals before have left half done. Ranks: rank zero, while nobody writes."""
    for path in [*folder.glob(".step-*.partial"), *folder.glob(".step-*.removed")]:
        shutil.rmtree(path, ignore_errors=True)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file, tied tensors under each of their names.

    Raises:
        RefusedError: it cannot be read as one.
    """
    from safetensors import SafetensorError, safe_open

    try:
        _refuse_odd(path)
        with safe_open(str(path), framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
            same = {name: kept for name, kept in (file.metadata() or {}).items() if kept in tensors and name not in tensors}
    except (OSError, SafetensorError, ValueError) as error:
        raise RefusedError(f"{path} cannot be read as safetensors ({error}).") from None
    return {**tensors, **{name: tensors[kept] for name, kept in same.items()}}


def copy_into(target: Mapping[str, Tensor], source: Mapping[str, Tensor], where: str) -> None:
    """Copy tensors by name into those of the same shapes and types.

    Raises:
        RefusedError: a name, a shape or a type that differs; names the first ones.
    """

    def form(tensor: Tensor) -> str:
        return f"{tuple(tensor.shape)} of {tensor.dtype}"

    missing, extra = [name for name in target if name not in source], [name for name in source if name not in target]
    shapes = [
        f"{name} is {form(source[name])} there and {form(tensor)} here"
        for name, tensor in target.items()
        if name in source and (source[name].shape, source[name].dtype) != (tensor.shape, tensor.dtype)
    ]
    if missing or extra or shapes:
        parts = [*shapes, *([f"it lacks {_few(missing)}"] if missing else []), *([f"it has {_few(extra)} more"] if extra else [])]
        raise RefusedError(f"{where} holds the weights of another model: {_few(parts, '; ')}.")
    with torch.no_grad():
        for name, tensor in target.items():
            tensor.copy_(source[name])


def load_weights(models: Models, source: Path, asked: str, averaged: bool = False) -> None:
    """Load weights from a safetensors file, or a checkpoint folder with one file a model, of which the `averaged` ones.

    Raises:
        RefusedError: no such file, damaged, or of another model; `asked` is how the user named it.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_model

    ending = ".ema.safetensors" if averaged else ".safetensors"
    files = {name: source / f"{name}{ending}" for name in models} if source.is_dir() else dict.fromkeys(models, source)
    if len(models) > 1 and not source.is_dir():
        raise RefusedError(f"{asked} is one file, but there are several models: name the checkpoint's folder.")
    for name, path in files.items():
        try:
            _refuse_odd(path)
            _check_hash(path)
            load_model(models[name], str(path))
        except (OSError, ValueError, SafetensorError) as error:
            raise RefusedError(f"{asked}: {path.name} cannot be read as safetensors ({error}).") from None
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:300]
            raise RefusedError(f"{asked} holds the weights of another model: {reason}") from None


def _check_hash(path: Path) -> None:
    manifest = path.parent / "manifest.json"
    if not manifest.is_file():
        return
    problem = Checkpoint(path.parent, read_json(manifest)).problem(files=[path.name])
    if problem is not None:
        raise OSError(problem)


def _known(tensors: Mapping[str, Tensor], name: str, folder: Path) -> Tensor:
    if name not in tensors:
        raise RefusedError(f"{folder / 'state.safetensors'} holds no {name}, which state.json names.")
    return tensors[name]


def _few(names: Sequence[str], between: str = ", ") -> str:
    return between.join(names[:3]) + (f"{between}and {len(names) - 3} more" if len(names) > 3 else "")


def _sha256(path: Path, offset: int, num_bytes: int) -> str:
    digest = hashlib.sha256()
    if min(offset, num_bytes) < 0:
        raise ValueError(f"a piece of {path.name} has {num_bytes} bytes at {offset}")
    _refuse_odd(path)
    with path.open("rb") as file:
        file.seek(offset)
        while num_bytes:
            block = file.read(min(num_bytes, 1 << 20))
            if not block:
                raise OSError(f"{path.name} is cut off")
            digest.update(block)
            num_bytes -= len(block)
    return digest.hexdigest()


def _refuse_odd(path: Path) -> None:
    """Raise OSError where a path is there and no plain file: a pipe would keep its reader waiting."""
    if path.exists() and not path.is_file():
        raise OSError(f"{path.name} is no plain file")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

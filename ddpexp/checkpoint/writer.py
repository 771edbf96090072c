"""Writing checkpoints: by all ranks, asynchronously and atomically.

Every rank knows the layout of all files, and writes what it alone holds and its share of what all ranks hold. Rank zero
then writes the manifest with the hash of every piece, and renames the folder.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddpexp import __version__
from ddpexp.checkpoint.codec import encode
from ddpexp.checkpoint.format import FORMAT, MANIFEST, best_first, folder_name, scan, seal, set_folder_aside
from ddpexp.checkpoint.layout import Span
from ddpexp.checkpoint.planner import Planner
from ddpexp.checkpoint.staging import Stage
from ddpexp.distributed.world import World
from ddpexp.errors import DdpexpError, PeerError
from ddpexp.strategy.base import Shard
from ddpexp.system.fault_injection import fault_point
from ddpexp.system.files import JSON_BYTES, Anchor, MovedError, flush, write_data
from ddpexp.system.limits import reason_with_limit
from ddpexp.system.text import size_text

Files = Mapping[str, Mapping[str, Tensor | Shard]]

_ATTEMPTS = 4
_PAUSE_SECONDS = 0.5  # before the second attempt; doubled for each further one
_POLL_SECONDS = 0.02
_GRACE_SECONDS = 2.0  # a failing run ends within five
_NICE = 10  # the writing thread yields to training


class CheckpointError(DdpexpError):
    """A checkpoint could not be written."""


@dataclass(frozen=True)
class Content:
    """The contents of a checkpoint."""

    models: Files  # by the name of their file, without its ending
    parts: Mapping[str, Any] = field(default_factory=dict)  # trees of values and tensors or shards, by name
    own: Any = None  # a tree of this rank alone; tensors that only rank zero has belong here, too
    texts: Mapping[str, bytes] = field(default_factory=dict)  # small files, by name
    facts: Mapping[str, Any] = field(default_factory=dict)  # for the manifest
    records: Mapping[str, Any] = field(default_factory=dict)  # how far the loggers have recorded, for the manifest
    log_files: Sequence[Path] = ()  # to flush before the checkpoint counts as complete


@dataclass(frozen=True)
class _Job:
    """One save, as handed to the thread that writes."""

    step: int
    number: int
    spans: Sequence[Span]
    copied: Tensor  # the bytes of the spans, one after the other
    pages: Sequence[tuple[Span, memoryview]]  # of which other hosts hold bytes, too
    own_files: Mapping[str, bytes]  # whole small files of this rank
    manifest: Mapping[str, Any]
    log_files: Sequence[Path]


class Writer:
    """Writes this rank's share of each checkpoint while the training continues.

    `save` returns as soon as this rank's share is copied; a second one waits until the first is written.
    """

    def __init__(
        self,
        folder: Path,
        world: World,
        *,
        keep_last: int | None = 2,
        keep_best: str | None = None,
        keep_best_k: int = 1,
        keep_every: int | None = None,
        stops: bool = True,
    ) -> None:
        """Write into `folder`, which is made; `stops` says whether a checkpoint that cannot be written ends the run."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._anchor = Anchor(folder.parent)
        self._world = world
        self._keep_last = keep_last
        self._keep_best = keep_best
        self._keep_best_k = keep_best_k
        self._keep_every, self._stops = keep_every, stops
        self._mailbox = world.mailbox()
        self._stage = Stage(world.device)
        self._planner = Planner(world)
        self._thread: threading.Thread | None = None
        self._problem: DdpexpError | None = None
        self._number = 0
        self._completed: int | None = None  # the step of the last complete one

    def save(self, step: int, content: Content) -> None:
        """Copy this rank's share and start writing it; rank zero also writes plain values and the manifest.

        Ranks: all, with the same models and parts, of which each may hold other rows; `own` may differ.

        Raises:
            CheckpointError: the previous one could not be written, and trainer.on_save_error=stop.
        """
        self.wait()
        plain, tensors = _encoded(content.parts)
        files = {
            name: {key: Shard.of(value) for key, value in values.items()}
            for name, values in {**content.models, **tensors}.items()
        }
        planned, routing = self._planner.plan(files)
        copied = self._stage.copy(planned, files, routing.kept)
        pages = routing.exchange(planned, files, self._world)
        own_files = self._own_files(content.own)
        if self._world.is_rank_zero:
            own_files |= {**_texts(plain), **content.texts}
        for name, data in own_files.items():
            if len(data) > JSON_BYTES and not name.endswith(".safetensors"):
                raise CheckpointError(
                    f"the plain values in {name} of the checkpoint of step {step} take {len(data):,} bytes, "
                    f"more than the {JSON_BYTES:,} that are read back",
                    suggestion="Keep large states as tensors.",
                )
        self._number += 1
        manifest = {
            "format": FORMAT, "ddpexp": __version__, "torch": torch.__version__, "step": step, **content.facts,
            "records": dict(content.records),
        }  # fmt: skip
        job = _Job(
            step=step,
            number=self._number,
            spans=routing.kept,
            copied=copied,
            pages=pages,
            own_files=own_files,
            manifest=manifest,
            log_files=content.log_files,
        )
        thread = threading.Thread(target=self._work, args=(job,), daemon=True, name=f"checkpoint {step}")
        try:
            thread.start()
        except (RuntimeError, MemoryError) as error:  # no thread or memory left: this rank's share cannot be written
            self._report(job, self._failed(error, job), waits=False)
        else:
            self._thread = thread

    def check(self) -> None:
        """Re-raise an error of the writing thread, if there was one.

        Raises:
            CheckpointError: a checkpoint could not be written, and trainer.on_save_error=stop. MovedError: the run
            directory was moved.
        """
        self._look(self._stops)

    def _look(self, stops: bool) -> None:
        problem, self._problem = self._problem, None
        if problem is None:
            return
        if stops or isinstance(problem, MovedError):
            raise problem
        logging.getLogger("ddpexp").warning("%s Training continues (trainer.on_save_error=continue).", problem)

    def wait(self, end: bool = False) -> None:
        """Wait until the last save is done: on rank zero until it is complete, on others until their share is written.

        Raises:
            CheckpointError: it could not be written, and trainer.on_save_error=stop, or this is the `end` of the run.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._look(self._stops or end)

    def drain(self) -> None:
        """Give a write in progress a short grace period: the share of another rank may never come."""
        if self._thread is not None:
            self._thread.join(_GRACE_SECONDS)

    def _own_files(self, own: Any) -> dict[str, bytes]:
        if own is None:
            return {}
        plain, tensors = _encoded({f"rank-{self._world.rank:05}": own})
        return _texts(plain) | {f"{name}.safetensors": _serialised(found) for name, found in tensors.items()}

    def _work(self, job: _Job) -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        try:
            report: dict[str, Any] = {"files": _retried(lambda: self._write_share(job))}
        except BaseException as error:  # of any kind: rank zero waits for this report
            report = self._failed(error, job)
        try:
            self._report(job, report)
        except BaseException as error:  # no save may fail silently
            self._problem = CheckpointError(self._failed(error, job)["problem"])

    def _report(self, job: _Job, report: Mapping[str, Any], waits: bool = True) -> None:
        """Report this rank's share to rank zero, which completes the checkpoint when it has all reports.

        Even if its own share failed, rank zero waits for the others if `waits` is set: they write to the same folder.
        """
        name = f"ddpexp/checkpoint/{job.number}"
        try:
            if not self._world.is_rank_zero:
                self._mailbox.put(f"{name}/{self._world.rank}", json.dumps(report))
                return
            others = range(1, self._world.world_size) if waits else ()
            reports = [report, *(json.loads(self._awaited(f"{name}/{rank}")) for rank in others)]
        except RuntimeError as error:  # of the store, which ends with rank zero: usually a consequence of another error
            self._problem = PeerError(
                f"the checkpoint of step {job.step} could not be completed: {type(error).__name__}: {error}"
            )
            return
        failed = next((report for report in reports if "problem" in report), None)
        if failed is None:
            try:
                _retried(lambda: self._complete(job, reports))
                return
            except BaseException as error:
                failed = self._failed(error, job)
        shutil.rmtree(self._partial(job.step), ignore_errors=True)  # a full disk needs the room
        self._problem = (MovedError if failed.get("moved") else CheckpointError)(failed["problem"])

    def _failed(self, error: BaseException, job: _Job) -> dict[str, Any]:
        """Return the report for a share that could not be written. Never raises: rank zero waits for it."""
        try:
            problem = self._describe(error, job)
        except Exception:  # there may be no memory left for more
            problem = f"the checkpoint of step {job.step} could not be written: {type(error).__name__}"
        return {"problem": problem, "moved": isinstance(error, MovedError)}

    def _awaited(self, name: str) -> str:
        while (text := self._mailbox.take(name)) is None:
            time.sleep(_POLL_SECONDS)
        return text

    def _partial(self, step: int) -> Path:
        return self._folder / f".{folder_name(step)}.partial"

    def _write_share(self, job: _Job) -> dict[str, list[dict[str, Any]]]:
        """Write this rank's spans to disk; return the pieces of each file with their hashes."""
        self._anchor.check()
        folder = self._partial(job.step)
        folder.mkdir(exist_ok=True)
        fault_point("checkpoint.begun")
        written: dict[str, list[dict[str, Any]]] = {}
        copied: Any = job.copied.numpy().data
        begin = 0
        by_file: dict[str, list[tuple[int, memoryview]]] = {}
        for span in job.spans:
            by_file.setdefault(span.file, []).append((span.offset, copied[begin : begin + span.num_bytes]))
            begin += span.num_bytes
        for span, page in job.pages:
            by_file.setdefault(span.file, []).append((span.offset, page))
        for file, parts in by_file.items():
            _write_at(folder / file, parts)
            written[file] = [_piece(offset, data) for offset, data in parts]
            fault_point("checkpoint.written")
        for file, content in job.own_files.items():
            (folder / file).unlink(missing_ok=True)  # of an earlier attempt
            _write_at(folder / file, [(0, memoryview(content))])
            written[file] = [_piece(0, memoryview(content))]
        flush(folder)
        fault_point("checkpoint.share")
        return written

    def _complete(self, job: _Job, reports: Sequence[Mapping[str, Any]]) -> None:
        """Complete the checkpoint once all shares are on disk; then remove old ones."""
        folder, final = self._partial(job.step), self._folder / folder_name(job.step)
        if folder.exists() or not final.exists():  # otherwise an earlier attempt has renamed it
            for path in job.log_files:
                with suppress(FileNotFoundError):
                    flush(path)
            fault_point("checkpoint.recorded")
            files = _files(reports)
            _check_complete(folder, files)
            write_data(folder / MANIFEST, seal({**job.manifest, "files": files}))
            fault_point("checkpoint.manifest")
            flush(folder)
            replaced = final.with_name(f".{final.name}.replaced")
            if final.exists() and job.step == self._completed:  # with what followed at the end of the run
                os.rename(final, replaced)
                fault_point("checkpoint.replaced")
            elif final.exists():  # the run has not resumed from it
                set_folder_aside(final)
            os.rename(folder, final)
            shutil.rmtree(replaced, ignore_errors=True)
            fault_point("checkpoint.renamed")
        self._completed = job.step
        flush(self._folder)
        self._prune()

    def _prune(self) -> None:
        complete = scan(self._folder).complete
        kept = list(complete if self._keep_last is None else complete[: self._keep_last])
        if self._keep_best is not None:
            kept += best_first(complete, self._keep_best)[: self._keep_best_k]
        if self._keep_every is not None:
            kept += [checkpoint for checkpoint in complete if checkpoint.step % self._keep_every == 0]
        for checkpoint in complete:
            if checkpoint not in kept:
                removed = checkpoint.folder.with_name(f".{checkpoint.folder.name}.removed")
                os.rename(checkpoint.folder, removed)  # atomic: a partly removed one must not look complete
                fault_point("checkpoint.pruning")
                shutil.rmtree(removed)

    def _describe(self, error: BaseException, job: _Job) -> str:
        if isinstance(error, MovedError):
            return str(error)
        remedy = " Make room or mend the disk, then resume." if isinstance(error, OSError) else ""
        return (
            f"the checkpoint of step {job.step} could not be written in {self._folder}: "
            f"{reason_with_limit(error, self._folder)}; rank {self._world.rank} writes "
            f"{size_text(job.copied.numel())} of it. The checkpoints before it are as they were.{remedy}"
        )


def _encoded(parts: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return each part as JSON, and the tensors of parts that have any, by file names without their ending."""
    plain, files = {}, {}
    for name, value in parts.items():
        tensors: dict[str, Tensor | Shard] = {}
        plain[f"state.{name}"] = encode(value, tensors)
        if tensors:
            files[f"state.{name}"] = tensors
    return plain, files


def _texts(plain: Mapping[str, Any]) -> dict[str, bytes]:
    return {f"{name}.json": json.dumps(value, separators=(",", ":")).encode() for name, value in plain.items()}


def _files(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the pieces of all ranks: the size of each file, and its pieces in order."""
    pieces: dict[str, list[dict[str, Any]]] = {}
    for report in reports:
        for name, found in report["files"].items():
            pieces.setdefault(name, []).extend(found)
    ordered = {name: sorted(found, key=lambda piece: piece["offset"]) for name, found in sorted(pieces.items())}
    return {
        name: {"num_bytes": sum(piece["num_bytes"] for piece in found), "pieces": found}
        for name, found in ordered.items()
    }


def _check_complete(folder: Path, files: Mapping[str, Any]) -> None:
    """Raise OSError if a file is not complete here: a host may have written to a disk of its own."""
    for name, file in files.items():
        size = (folder / name).stat().st_size
        if size != file["num_bytes"]:
            raise OSError(0, f"{name} has {size:,} bytes where {file['num_bytes']:,} were written")


def _piece(offset: int, data: memoryview) -> dict[str, Any]:
    return {"offset": offset, "num_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _retried(work: Callable[[], Any]) -> Any:
    """Retry what may fail temporarily; the last error is raised."""
    for number in range(_ATTEMPTS - 1):
        try:
            return work()
        except OSError:
            time.sleep(_PAUSE_SECONDS * 2**number)
    return work()


def _write_at(path: Path, parts: Iterable[tuple[int, memoryview]]) -> None:
    """Write data at offsets of a file, to disk."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        for offset, data in parts:
            while data:
                written = os.pwrite(descriptor, data[: 1 << 26], offset)
                data, offset = data[written:], offset + written
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _serialised(tensors: Mapping[str, Tensor]) -> bytes:
    from safetensors.torch import save

    return save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})

"""Threads or processes that measure, check and decode images before training, and what they report meanwhile."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing, contextmanager
from typing import IO, Any

import xxhash

from ddpexp.data.image_folder.options import StoredSize
from ddpexp.errors import RefusedError
from ddpexp.system.files import open_regular
from ddpexp.system.preparation import preparation
from ddpexp.system.process import die_with_parent, how_ended
from ddpexp.system.programs import python

_ALONE = 32  # this many images are done by one thread
_IN_THREADS = 4000  # images up to which threads do it: Pillow decodes without the interpreter's lock, and 0.2 s of a
# core, which the start of a process takes, decode 150 photographs; of more images dozens of cores would wait for it


@contextmanager
def workers(num_images: int, stored: StoredSize, channels: int) -> Iterator[Pool]:
    """Yield a pool for so many images, and end its processes afterwards."""
    number = min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1, -(-num_images // _ALONE))
    pool = Pool(number, stored, channels, in_threads=number == 1 or num_images <= _IN_THREADS)
    try:
        with warnings.catch_warnings():  # restores what `decode`, in several threads at once, may leave changed
            yield pool
    finally:
        pool.close()


class Pool:
    """Threads or processes, each of which handles a chunk of images at a time."""

    def __init__(self, number: int, stored: StoredSize, channels: int, in_threads: bool) -> None:
        """Start the processes; `stored` and `channels` are those of `decode`."""
        self._number = number
        self._form = stored, channels
        command = python("ddpexp.data.image_folder.pool:serve", os.getpid(), *stored, channels)
        self._processes = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for _ in range(0 if in_threads else number)
        ]
        self._idle: queue.SimpleQueue[subprocess.Popen[str]] = queue.SimpleQueue()
        for process in self._processes:
            self._idle.put(process)

    def run(self, chunks: Sequence[dict[str, Any]], title: str, finish: Callable[[int, dict[str, Any]], None]) -> None:
        """Handle all chunks and call `finish` in this thread with the number of each and its answer, in any order.

        Raises:
            OSError: nothing can be written. RefusedError: a process ended.
        """
        total = sum(len(chunk["images"]) for chunk in chunks)
        with preparation(total, title, "images") as advance, closing(self._answers(chunks)) as answers:
            for number, answer in answers:
                if "error" in answer:
                    raise OSError(*answer["error"])
                finish(number, answer)
                advance(len(chunks[number]["images"]))

    def _answers(self, chunks: Sequence[dict[str, Any]]) -> Generator[tuple[int, dict[str, Any]], None, None]:
        """Yield the number of each chunk and its answer, in any order; ends the processes if it is closed before."""
        if self._number == 1:
            yield from ((number, self._answer(chunk)) for number, chunk in enumerate(chunks))
            return
        with ThreadPoolExecutor(self._number) as threads:
            numbers = {threads.submit(self._answer, chunk): number for number, chunk in enumerate(chunks)}
            try:
                for future in as_completed(numbers):
                    yield numbers[future], future.result()
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                self.close()
                raise

    def run_all(self, chunks: Sequence[dict[str, Any]], title: str) -> list[dict[str, Any]]:
        """Handle all chunks and return their answers. Raises: as `run`."""
        answers: dict[int, dict[str, Any]] = {}
        self.run(chunks, title, answers.__setitem__)
        return [answers[number] for number in range(len(chunks))]

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    _close(stream)

    def _answer(self, chunk: dict[str, Any]) -> dict[str, Any]:
        if not self._processes:
            return handle(chunk, *self._form)
        process = self._idle.get()
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps(chunk) + "\n")
            process.stdin.flush()
            answer: dict[str, Any] = json.loads(process.stdout.readline())
            return answer
        except (OSError, ValueError):  # nothing is no JSON
            raise _death(process.wait()) from None
        finally:
            self._idle.put(process)


def serve(parent: int, side: int, largest: int, channels: int) -> None:
    """Subprocess entry point: handle chunks, one in each line of standard input, until it ends."""
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command decides when to end
    for line in sys.stdin:
        answer = json.dumps(handle(json.loads(line), StoredSize(side, largest), channels))
        sys.stdout.buffer.write(f"{answer}\n".encode())
        sys.stdout.buffer.flush()


def handle(chunk: dict[str, Any], stored: StoredSize, channels: int) -> dict[str, Any]:
    """Handle a chunk; its `work` is to `measure` images, to `check` them, or to write their `pixels` or `bytes`.

    Its `images` are pairs of a path and an offset in the file `target`, where `lengths` are reserved. The answer has
    the `sizes` of measured images (height and width, None for broken ones), or the `broken` ones of the others (number
    and reason, with zeros in their places) and the `hash` of all that was written; or the `error` of the system.
    """
    from ddpexp.data.image_folder.decode import BrokenImageError, size_of  # late: it imports Pillow

    sizes: list[list[int] | None] = []
    broken, digest = [], xxhash.xxh3_128()
    target = os.open(chunk["target"], os.O_WRONLY) if chunk.get("target") else None
    try:
        for number, (path, offset) in enumerate(chunk["images"]):
            content = b""
            try:
                if chunk["work"] == "measure":
                    sizes.append(list(size_of(path, stored)))
                    continue
                content = _content(path, chunk["work"], stored, channels)
                if target is not None and len(content) != chunk["lengths"][number]:
                    raise BrokenImageError("it changed while it was read")
            except (BrokenImageError, OSError) as error:
                reason = error.strerror if isinstance(error, OSError) else str(error)
                if chunk["work"] == "measure":
                    sizes.append(None)
                    continue
                broken.append([number, reason])
                content = bytes(chunk["lengths"][number])
            if target is not None:
                _write(target, content, offset)
                digest.update(content)
    except OSError as error:
        return {"error": [error.errno, error.strerror]}
    finally:
        if target is not None:
            os.close(target)
    return {"sizes": sizes, "broken": broken, "hash": digest.hexdigest()}


def _content(path: str, work: str, stored: StoredSize, channels: int) -> bytes:
    """Return what a cache holds of an image: its pixels, or the bytes of its file, which can be decoded."""
    from ddpexp.data.image_folder.decode import decode  # late: it imports Pillow

    with open_regular(path) as file:
        data = file.read()
    image = decode(data, stored, channels)
    return image.tobytes() if work == "pixels" else data


def _write(target: int, content: bytes, offset: int) -> None:
    view = memoryview(content)
    while view:
        written = os.pwrite(target, view, offset)
        view, offset = view[written:], offset + written


def _close(stream: IO[str]) -> None:
    try:
        stream.close()
    except OSError:  # what was not yet written to a process that has ended
        pass


def _death(code: int) -> RefusedError:
    hint = "perhaps because memory ran out" if code == -signal.SIGKILL else "see its output above"
    return RefusedError(
        f"A process that prepares the images {how_ended(code)}: {hint}",
        key="data.root",
        suggestion="Start again to resume the preparation.",
    )

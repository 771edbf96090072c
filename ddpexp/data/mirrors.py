"""Downloading the files of a data set from mirrors that may be slow, wrong or out of reach.

Standard library only, and fast to import: the launching command imports this module.
"""

from __future__ import annotations

import contextlib
import io
import os
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpexp.data.cache import CACHES, put, wait_for_lock
from ddpexp.data.published_files import PublishedFile, WrongError, is_web_page
from ddpexp.data.user_cache import user_cache
from ddpexp.system.preparation import preparation

if TYPE_CHECKING:
    from http.client import HTTPResponse

_RETRY_AFTER = 600.0  # seconds: `auto` without a network must not wait for one at every start
_CHUNK = 1 << 16


@dataclass(frozen=True)
class Patience:
    """How long a download may take: to the first bytes from any mirror, without a byte after that, and in all.

    Units: seconds.
    """

    first: float
    stall: float
    total: float


AUTO_PATIENCE = Patience(first=5.0, stall=10.0, total=120.0)
DOWNLOAD_PATIENCE = Patience(first=60.0, stall=30.0, total=900.0)


@dataclass(frozen=True)
class Answer:
    """A mirror's answer whose first bytes have come."""

    mirror: str
    response: HTTPResponse
    start: bytes


class DownloadError(Exception):
    """No mirror gave all files; the text says why, mirror by mirror."""


@contextlib.contextmanager
def alone(seconds: float) -> Iterator[None]:
    """Let one command of this user at a time run the block; others wait for it, at most `seconds`.

    The kernel's lock on the folder is released when the process ends, however it ends, and leaves no file.
    """
    folder = user_cache() / CACHES
    try:
        os.makedirs(folder.parent, mode=0o700, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # the block reports why, if it has to write there
        yield
        return
    try:
        wait_for_lock(descriptor, "downloading the data", seconds)
        yield
    finally:
        os.close(descriptor)


def download_unless_failed(
    files: Sequence[PublishedFile], mirrors: Sequence[str], patience: Patience, retry: bool, name: str
) -> list[tuple[PublishedFile, bytes, bytes]]:
    """Download files of the data set `name`; return each with its content as read and as received.

    Without `retry` a recent failure stands, which a note in the user's cache remembers.
    """
    note = user_cache() / CACHES / f"download-failed-{name}"
    if not retry:
        with contextlib.suppress(OSError):
            if 0 <= time.time() - note.stat().st_mtime < _RETRY_AFTER:
                raise DownloadError(f"tried less than {_RETRY_AFTER / 60:.0f} minutes ago: {note.read_text()[:1000]}")
    try:
        received = _download(files, mirrors, patience)
    except DownloadError as error:
        with contextlib.suppress(OSError):  # without the note the next start tries again, no more
            put(user_cache(), note, str(error).encode())
        raise
    with contextlib.suppress(OSError):
        note.unlink()
    return received


def _download(
    files: Sequence[PublishedFile], mirrors: Sequence[str], patience: Patience
) -> list[tuple[PublishedFile, bytes, bytes]]:
    """Fetch the files from the first mirror that gives them, leaving a mirror at its first wrong answer."""
    usable = list(mirrors)
    problems: list[str] = []
    begin = time.monotonic()
    heard = False
    received = []
    for file in files:
        while True:
            left = patience.total - (time.monotonic() - begin)
            wait = max(0.0, min(left, patience.stall if heard else patience.first))
            answer = _first_answer(usable, file, wait, patience.stall, problems)
            heard = True
            try:
                packed = _receive(answer, file, begin + patience.total)
                received.append((file, file.read(io.BytesIO(packed)), packed))
                break
            except WrongError as error:
                problems.append(f"{answer.mirror}: {file.remote_name} {error}")
                usable.remove(answer.mirror)
    return received


def _first_answer(mirrors: list[str], file: PublishedFile, wait: float, stall: float, problems: list[str]) -> Answer:
    """Ask the mirrors for a file, the next one when the last has failed or kept silent for its share of the time.

    Each is asked in a thread of its own, as nothing else bounds the time of a name look-up; a thread that hangs is left
    behind and ends with the process. A mirror that fails is removed from `mirrors`, with its reason in `problems`.

    Raises: DownloadError.
    """
    answers: queue.SimpleQueue[Answer | tuple[str, str]] = queue.SimpleQueue()
    over = threading.Event()
    begin = time.monotonic()
    waiting = list(mirrors)
    share = wait / max(1, len(waiting))
    asked = 0
    open_questions = 0
    try:
        while mirrors:
            elapsed = time.monotonic() - begin
            if elapsed >= wait:
                problems.append(f"no answer from {', '.join(mirrors)} within {wait:.0f} seconds")
                break
            if waiting and (open_questions == 0 or elapsed >= asked * share):
                arguments = (waiting.pop(0), file, stall, answers, over)
                threading.Thread(target=_ask, args=arguments, name="mirror", daemon=True).start()
                asked += 1
                open_questions += 1
            pause = (min(wait, asked * share) if waiting else wait) - elapsed
            try:
                answer = answers.get(timeout=max(pause, 0.0))
            except queue.Empty:
                continue
            if isinstance(answer, Answer):
                return answer
            open_questions -= 1
            mirror, problem = answer
            mirrors.remove(mirror)
            problems.append(f"{mirror}: {problem}")
    finally:
        over.set()
    raise DownloadError(" ".join("; ".join(problems).split()))


def _ask(
    mirror: str,
    file: PublishedFile,
    stall: float,
    answers: queue.SimpleQueue[Answer | tuple[str, str]],
    over: threading.Event,
) -> None:
    """Ask one mirror for a file, and report its first bytes or its failure."""
    from http.client import HTTPException
    from urllib.request import Request, urlopen  # late: these two take longer to import than all the rest

    url = f"{mirror.rstrip('/')}/{file.remote_name}"
    try:
        response = urlopen(Request(url, headers={"User-Agent": "ddpexp"}), timeout=stall)
        start = response.read1(_CHUNK)
    except (OSError, HTTPException, ValueError) as error:
        answers.put((mirror, f"{file.remote_name}: {error}"))
        return
    if over.is_set():
        response.close()
    elif not start or is_web_page(start):
        response.close()
        answers.put((mirror, f"{file.remote_name} is {'a web page' if start else 'empty'}, not data"))
    else:
        answers.put(Answer(mirror, response, start))


def _receive(answer: Answer, file: PublishedFile, end: float) -> bytes:
    """Read the rest of an answer, no more than the file may have.

    Raises: WrongError.
    """
    from http.client import HTTPException

    content = bytearray(answer.start)
    length = answer.response.headers.get("Content-Length") or ""
    size = int(length) if length.isdecimal() else file.size
    with answer.response, preparation(size, f"downloading {file.remote_name}", "bytes") as advance:
        advance(len(content))
        try:
            while chunk := answer.response.read1(_CHUNK):
                content += chunk
                advance(len(chunk))
                if len(content) > file.size:
                    raise WrongError(f"continues after {file.size:,} bytes")
                if time.monotonic() > end:
                    raise WrongError(f"came too slowly: {len(content):,} bytes when time was up")
        except TimeoutError:
            raise WrongError(f"stopped coming after {len(content):,} bytes") from None
        except (OSError, HTTPException) as error:
            raise WrongError(f"broke off after {len(content):,} bytes ({error})") from None
    return bytes(content)

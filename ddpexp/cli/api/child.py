"""A command as a child process: its output is shown as it comes, interrupts are passed on, and it ends with its caller.

The child has a session of its own: Ctrl-C on a terminal and a notebook's interrupt reach it once, from here.
"""

from __future__ import annotations

import os
import selectors
import shutil
import signal
import subprocess
import sys
import threading
import time
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ddpexp.errors import RefusedError
from ddpexp.system import caller, programs
from ddpexp.system.start import NOT_LINUX
from ddpexp.system.text import sanitize

_BLOCK = 1 << 16
_DRAIN_SECONDS = 1.0  # for output that is left in the pipes when the child has ended
_BAR = 20  # characters
_HOME = str(Path(__file__).resolve().parents[3])  # the folder that holds ddpexp


@dataclass
class Ended:
    """How the command ended."""

    code: int  # -n after signal n
    directory: caller.Directory | None = None  # of the run or the sweep
    end: caller.End | None = None  # None: with success, or without a report
    interrupted: bool = False  # from here
    out: str = ""  # what it has printed on standard output, where that is captured
    last: str = ""  # the last of its lines on standard error


def run_command(arguments: Sequence[str], cwd: str | Path | None, quiet: bool, captures: bool = False) -> Ended:
    """Run `python -m ddpexp` with these arguments and wait for its end.

    `quiet` shows nothing of what it prints; `captures` returns its standard output instead of showing it.

    Raises:
        RefusedError: there is no such folder, or this is not Linux.
    """
    if not sys.platform.startswith("linux"):
        raise RefusedError(NOT_LINUX)
    if cwd is not None and not Path(cwd).is_dir():
        raise RefusedError("There is no such directory", key="cwd", value=cwd)
    show = _Show(quiet, captures)
    reading, writing = os.pipe()
    with _interrupts() as interrupts:
        try:
            process = subprocess.Popen(
                [sys.executable, *programs.COMMAND, *arguments],
                cwd=cwd,
                env=_environ(cwd, caller.variable(os.getpid(), writing, show.is_live)),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[writing],
                start_new_session=True,
            )
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        try:
            show.when_ready = partial(interrupts.pass_on, process)
            with open(reading, "rb", buffering=0) as channel:
                _relay(process, channel, show)
        except BaseException:  # such as SystemExit from a signal handler of the program
            process.send_signal(signal.SIGTERM)
            raise
        finally:
            code = process.wait()
            for stream in (process.stdout, process.stderr):
                assert stream is not None
                stream.close()
            show.close()
    return Ended(code, show.directory, show.end, interrupts.count > 0, show.out, show.last)


def _environ(cwd: str | Path | None, variable: str) -> dict[str, str]:
    """Return the environment of the command, which finds this ddpexp and nothing in its current folder."""
    folder = str(cwd) if cwd is not None else None
    environ = {**programs.environ_of_others(os.environ, folder), caller.VARIABLE: variable}
    if os.path.basename(_HOME) not in ("site-packages", "dist-packages"):  # a clone, installed or not
        paths = environ.get("PYTHONPATH", "").split(os.pathsep)
        if _HOME not in paths:
            environ["PYTHONPATH"] = os.pathsep.join([*filter(None, paths), _HOME])
    return environ


class Interrupts:
    """Passes interrupts on to the child, once it handles them; before, Python would print a traceback."""

    def __init__(self) -> None:
        """Wait for the child."""
        self.count = 0
        self._process: subprocess.Popen[bytes] | None = None

    def handle(self, _number: int, _frame: Any) -> None:
        """Handle the signal."""
        self.count += 1
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)

    def pass_on(self, process: subprocess.Popen[bytes]) -> None:
        """Pass interrupts on to this process, earlier ones too."""
        self._process = process
        if self.count:
            process.send_signal(signal.SIGINT)


@contextmanager
def _interrupts() -> Iterator[Interrupts]:
    """Handle SIGINT inside the block: an exception could arise anywhere, and lose what the child has sent.

    Signals arrive in the main thread; in another one nothing changes.
    """
    interrupts = Interrupts()
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) in (signal.SIG_IGN, None):
        yield interrupts
        return
    before = signal.signal(signal.SIGINT, interrupts.handle)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)


def _relay(process: subprocess.Popen[bytes], channel: Any, show: _Show) -> None:
    """Show what the child prints and reports until it has ended.

    Its end counts, not that of its output, which something that it has started may hold open.
    """
    ended = os.pidfd_open(process.pid)
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(ended, selectors.EVENT_READ)
            selector.register(channel, selectors.EVENT_READ, show.reported)
            assert process.stdout is not None
            assert process.stderr is not None
            selector.register(process.stdout, selectors.EVENT_READ, show.printed)
            selector.register(process.stderr, selectors.EVENT_READ, show.warned)
            deadline = None
            while selector.get_map():
                ready = selector.select(None if deadline is None else deadline - time.monotonic())
                if deadline is not None and time.monotonic() > deadline:
                    return
                for key, _ in ready:
                    if key.fd == ended:
                        deadline = time.monotonic() + _DRAIN_SECONDS
                        selector.unregister(ended)
                        continue
                    data = os.read(key.fd, _BLOCK)
                    key.data(data)
                    if not data:
                        selector.unregister(key.fileobj)
    finally:
        os.close(ended)


@dataclass
class _Show:
    """What the child prints and reports, shown in this process, with a line of progress that is redrawn."""

    quiet: bool
    captures: bool
    directory: caller.Directory | None = None
    end: caller.End | None = None
    out: str = ""
    last: str = ""
    when_ready: Callable[[], None] = lambda: None
    _rest: bytes = b""
    _bar: str = ""
    _decoders: dict[str, Any] = field(default_factory=dict)

    @property
    def is_live(self) -> bool:
        """Whether a line can be redrawn: on a terminal and in a notebook."""
        return not self.quiet and (_is_terminal() or _in_notebook())

    def reported(self, data: bytes) -> None:
        """Take what came over the channel."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            with suppress(ValueError, KeyError, TypeError):
                message = caller.parse(line)
                if isinstance(message, caller.Ready):
                    self.when_ready()
                elif isinstance(message, caller.Directory):
                    self.directory = message
                elif isinstance(message, caller.End):
                    self.end = message
                else:
                    self._progress(message)

    def printed(self, data: bytes) -> None:
        """Take what the child has printed on standard output."""
        text = self._decoded("out", data)
        if self.captures:
            self.out += text
        else:
            self._write(lambda: sys.stdout, text)

    def warned(self, data: bytes) -> None:
        """Take what the child has printed on standard error."""
        text = self._decoded("err", data)
        self.last = next((line for line in reversed(text.splitlines()) if line.strip()), self.last)
        self._write(lambda: sys.stderr, text)

    def close(self) -> None:
        """End the line of progress."""
        if self._bar:
            self._bar = ""
            self._put(lambda: sys.stdout, "\n")

    def _decoded(self, stream: str, data: bytes) -> str:
        decoder = self._decoders.setdefault(stream, getincrementaldecoder("utf-8")("replace"))
        return str(decoder.decode(data, final=not data))

    def _progress(self, message: caller.ProgressLine) -> None:
        filled = round(_BAR * message.done / max(1, message.total))
        bar = f"{'━' * filled}{'─' * (_BAR - filled)} {message.done:,}/{message.total:,}  {sanitize(message.text)}"
        bar = bar[: shutil.get_terminal_size().columns - 1]
        self._put(lambda: sys.stdout, f"\r{bar:<{len(self._bar)}}")
        self._bar = bar
        if message.done >= message.total:
            self.close()

    def _write(self, stream: Callable[[], Any], text: str) -> None:
        """Write lines above the line of progress, which is drawn again below them."""
        if not text or self.quiet:
            return
        bar, blank = self._bar, f"\r{' ' * len(self._bar)}\r" if self._bar else ""
        if bar:
            self._put(lambda: sys.stdout, blank)
        self._put(stream, text)
        if bar and text.endswith("\n"):
            self._put(lambda: sys.stdout, bar)
        elif bar:
            self._bar = ""

    def _put(self, stream: Callable[[], Any], text: str) -> None:
        if self.quiet:
            return
        try:
            encoding = getattr(stream(), "encoding", None) or "utf-8"
            stream().write(text.encode(encoding, "replace").decode(encoding))
            stream().flush()
        except (OSError, ValueError):  # nobody reads: the run continues, and its log has every line
            self.quiet = True


def _is_terminal() -> bool:
    try:
        return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    except (AttributeError, ValueError):
        return False


def _in_notebook() -> bool:
    shell = sys.modules.get("IPython")
    if shell is None:
        return False
    found = shell.get_ipython()
    return getattr(found, "kernel", None) is not None

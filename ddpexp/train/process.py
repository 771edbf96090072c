"""The process of one rank: its signals, its log, and how it leaves."""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import platform
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from ddpexp.config.suggestions import drop_refused
from ddpexp.distributed.world import World
from ddpexp.errors import EXIT_DONE, EXIT_FAILED, CodeError, DdpexpError, LoaderError, RefusedError
from ddpexp.launch.workers.control import SIGNALS, TERMINAL_FD, Control
from ddpexp.system.files import open_to_append
from ddpexp.system.limits import reason
from ddpexp.system.streams import mask_standard_streams
from ddpexp.system.text import MESSAGE_BYTES, TRACEBACK_BYTES, cut, message_of, one_line, sanitize
from ddpexp.system.user_code import place_in_code
from ddpexp.train import debugger

EXIT_STOPPED = 128 + signal.SIGTERM


class Interrupted(Exception):
    """The work stopped early on request, and everything is saved."""

    def __init__(self, step: int) -> None:
        """`step` is the last step that was done."""
        super().__init__(step)
        self.step = step


class _Stopped(BaseException):
    """The supervisor ended this worker."""


def run_rank(work: Callable[[Control], None], control: Control | None = None) -> int:
    """Do the work, report to the supervisor how it ended, and exit the process: this does not return.

    Where the process is the command's own it passes its `control`, and gets the exit code.
    """
    in_process = control is not None
    control = control or Control.from_environ()
    os.environ.pop(TERMINAL_FD, None)  # a command that a recipe starts has not inherited it
    _prepare_process(control)
    code = _run(work, control)
    return code if in_process else _leave(code)


def _run(work: Callable[[Control], None], control: Control) -> int:
    """Do the work, report to the supervisor how it ended, and return the exit code."""
    code = EXIT_FAILED
    try:
        work(control)
        control.status.set_phase("leave")
        code = EXIT_DONE
        control.send("done")
    except Interrupted as end:
        code = EXIT_STOPPED
        control.send("stopped", step=end.step)
    except _Stopped:
        code = EXIT_STOPPED
    except debugger.QuitError:  # raised by debuggers with a `quit` of their own
        code = EXIT_STOPPED
        control.send("quit", at_once=True)
    except SystemExit as end:
        code = _exit_code(end)
        _report(control, "SystemExit", f"the recipe ended the process: sys.exit({_shown(end.code)})", code)
    except CodeError as error:
        _report(control, error.kind, error.message, code, error.trace, place=error.place)
    except DdpexpError as error:
        code = error.exit_code
        drop_refused(error)
        refused = isinstance(error, RefusedError)
        _report(control, type(error).__name__, str(error), code, refused=refused, **error.as_dict())
    except LoaderError as error:
        code = error.exit_code
        _report(control, type(error).__name__, str(error), code)
    except BaseException as error:
        limit = reason(error)
        _report(
            control,
            type(error).__name__,
            message_or_place(error) + (f" ({limit})" if limit else ""),
            code,
            _traceback_of(error),
            limit=limit,
            place=place_in_code(error),
        )
    return code


def _leave(code: int) -> int:
    """Exit at once, with everything flushed, and skip interpreter shutdown.

    torch 2.13 with gloo can abort or hang in its destructors after the work is done: the reducer's destructor joins a
    thread that waits for the GIL. The destructors do nothing that is needed.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    logging.shutdown()
    os._exit(code)


def _prepare_process(control: Control) -> None:
    sys.argv = sys.argv[:1]  # the rest is not for a recipe that parses arguments where it is imported
    faulthandler.enable()
    debugger.install(debugger.of_process(control, os.environ))
    mask_standard_streams()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    # What a fork of this rank inherits is not its to collect: in the worker of another loader, an iterator of torch's
    # would try to end its own workers, and raise (pytorch/pytorch#149837).
    os.register_at_fork(after_in_child=gc.freeze)

    def leave(number: int, _frame: FrameType | None) -> None:
        if control.at_prompt:
            control.forward(number)
        if number == signal.SIGTERM and control.leaves_at_once:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            raise _Stopped

    if control.signals is None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C: the process that started the workers coordinates the end
        signal.signal(signal.SIGTERM, leave)
        return
    faulthandler.unregister(signal.SIGQUIT)
    signal.set_wakeup_fd(control.signals, warn_on_full_buffer=False)
    for number in SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores it
            signal.signal(number, leave)
            signal.siginterrupt(number, False)  # system calls of libraries are restarted
    faulthandler.register(signal.SIGQUIT, chain=True)
    os.register_at_fork(after_in_child=_forget_signals)


def _forget_signals() -> None:
    """Reset signal handling in processes that a recipe forks: their signals are not this rank's."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for number in set(SIGNALS) - {signal.SIGTERM, signal.SIGQUIT}:
        signal.signal(number, signal.SIG_IGN)


def _report(control: Control, kind: str, message: str, code: int, trace: str | None = None, **fields: Any) -> None:
    """Send the error to the supervisor, which shows it once; without a supervisor print it here.

    `fields` are those of a DdpexpError, or of another exception its place and limit.
    """
    kind, message = one_line(kind), sanitize(message, MESSAGE_BYTES)
    fields = {name: sanitize(text, MESSAGE_BYTES) if isinstance(text, str) else text for name, text in fields.items()}
    limited = sanitize(trace, TRACEBACK_BYTES) if trace else None
    control.send(
        "error", host=platform.node(), error=kind, message=message, traceback=limited, step=control.status.step,
        exit_code=code, **fields,
    )  # fmt: skip
    if not control.is_supervised:
        print(limited or f"{kind}: {message}", file=sys.stderr)


def message_or_place(error: BaseException) -> str:
    """Return an exception's text or, of one without a text, such as that of a bare assert, where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    text = message_of(error)
    return text if text or not frames else f"{frames[-1].line} ({frames[-1].filename}:{frames[-1].lineno})"


def _traceback_of(error: BaseException) -> str:
    """Format an exception with its causes; each message is truncated on its own, so that the causes stay readable."""
    try:
        lines = list(traceback.TracebackException.from_exception(error, compact=True).format())
    except Exception as second:  # str() fails, or the class misbehaves
        where = "".join(traceback.format_tb(error.__traceback__))
        text = f"{type(error).__name__}: {message_of(error)}"
        lines = [
            f"Traceback (most recent call last):\n{where}{text}\n(and {type(second).__name__} while this was written "
            "down)\n"
        ]
    return "".join(cut(line, MESSAGE_BYTES) for line in lines)


def _shown(code: object) -> str:
    try:
        return repr(code)
    except Exception:
        return f"a {type(code).__name__}"


def _exit_code(end: SystemExit) -> int:
    if end.code is None:
        return EXIT_FAILED  # a recipe that exits early has not done its work
    return end.code if isinstance(end.code, int) and 3 <= end.code <= 125 else EXIT_FAILED


def open_log(world: World, control: Control, path: Path | None) -> logging.Logger:
    """Return the log: rank zero's goes to `path` and stdout; of other ranks the supervisor shows new warnings."""
    log = logging.getLogger("ddpexp")
    log.setLevel(logging.INFO)
    log.propagate = False
    logging.captureWarnings(True)
    handlers: list[logging.Handler] = [_ToSupervisor(control)]
    if world.is_rank_zero:
        console = _Lines(sys.stdout)
        console.addFilter(lambda record: not getattr(record, "watched", False))  # the supervisor shows progress itself
        handlers.append(console)
        if path is not None:
            file = _Lines(open_to_append(path))
            file.setFormatter(_Sanitized("%(asctime)s %(message)s"))
            handlers.append(file)
    else:
        console = _Lines(sys.stderr)
        console.setLevel(logging.WARNING)
        handlers.append(console)
    for handler in handlers:
        if handler.formatter is None:
            handler.setFormatter(_Sanitized())
    for logger in (log, logging.getLogger("py.warnings")):
        logger.handlers = handlers
    return log


class _Lines(logging.StreamHandler):  # type: ignore[type-arg]  # Python 3.10 takes no argument here
    """Writes lines; while the disk is full they are written later or lost, and what matters is said elsewhere."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


class _Sanitized(logging.Formatter):
    """Sanitizes log messages, which may contain untrusted text, unless the record is marked `printable`.

    What a recipe prints itself is not changed.
    """

    def format(self, record: logging.LogRecord) -> str:
        console = super().format(record)
        return console if getattr(record, "printable", False) else sanitize(console)


class _ToSupervisor(logging.Handler):
    def __init__(self, control: Control) -> None:
        super().__init__(logging.WARNING)
        self._control = control

    def emit(self, record: logging.LogRecord) -> None:
        if self._control.watched:
            self._control.send_nowait("warning", text=self.format(record).strip())

"""pdb in a worker: its turn at the command's terminal, and what its commands and signals mean in a run.

`breakpoint()`, `pdb.set_trace()`, `torch.distributed.breakpoint()` and the debuggers that derive from pdb all come
through two methods of `pdb.Pdb`, which are wrapped here; those with a connection of their own are left alone.
"""

from __future__ import annotations

import bdb
import errno
import os
import pdb
import select
import signal
import sys
import termios
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from ddpexp.compat.python import calling_frame
from ddpexp.errors import DdpexpError
from ddpexp.launch.workers.control import Control

QuitError = bdb.BdbQuit  # raised by debuggers with a `quit` of their own

_PACKAGES = ("pdb", "bdb", "ipdb", "IPython", "torch")  # packages whose frames are not the user's call
_ADVICE = (
    "PYTHONBREAKPOINT=0 ignores every breakpoint(); a debugger with a connection of its own works, for example "
    "PYTHONBREAKPOINT=remote_pdb.set_trace."
)
_END_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)
_UNHANDLED_SECONDS = 0.05  # for Python to handle a signal
_DISABLED = b"\0"  # in place of a key. Source: _POSIX_VDISABLE of Linux


class _PromptClosed(BaseException):
    """A signal ends the run, and with it the prompt."""


class Debugger:
    """The debugger of this process."""

    def __init__(self, control: Control, rank: int, world_size: int) -> None:
        """Name the rank in the prompt, if there are several."""
        self._control, self._terminal = control, control.terminal
        self._name = f"(Pdb rank {rank}) " if world_size > 1 else "(Pdb) "
        self._pid = os.getpid()
        self._is_over = False  # the run stops: breakpoints are ignored

    def start(self, frame: FrameType) -> bool:
        """Return whether a debugger may start at this place; False: the run stops, and it is ignored.

        Raises:
            DdpexpError: there is no terminal.
        """
        if os.getpid() != self._pid:
            raise DdpexpError(
                "starts a debugger in a process that a worker has started, such as a DataLoader worker, "
                "which has no terminal",
                suggestion=f"Use data.num_workers=0. {_ADVICE}",
                place=_place(frame),
            )
        if self._terminal is None and not self._control.in_process:
            raise DdpexpError(
                "starts a debugger, and this worker has no terminal to type into",
                suggestion="Use launcher=inline, where the command itself is the only worker, or type the "
                f"command with launcher=spawn on a terminal. {_ADVICE}",
                place=_place(frame),
            )
        return not self._is_over

    def prompt(self, debugger: pdb.Pdb, interact: Callable[[], None]) -> None:
        """Call `interact`, which shows the prompt, when it is this rank's turn at the terminal."""
        if debugger.prompt == "(Pdb) ":
            debugger.prompt = self._name
        if self._terminal is None:
            self._interact(debugger, interact)
        elif self._is_over or not self._control.request_terminal():
            self._end(debugger)
        else:
            try:
                with _standard_streams(self._terminal):
                    self._interact(debugger, interact)
            except termios.error:
                if not _is_closed(self._terminal):
                    raise
                self.quit(debugger)
            finally:
                self._control.return_terminal(stepping=debugger.stoplineno != -1)

    def _interact(self, debugger: pdb.Pdb, interact: Callable[[], None]) -> None:
        try:
            with self._handling_signals():
                interact()
        except _PromptClosed:
            with suppress(OSError):  # the terminal is closed
                debugger.message("")  # what was typed stays without an answer
            debugger.forget()
            self._end(debugger)
        except OSError:
            if not _is_closed(0):
                raise
            debugger.forget()
            self.quit(debugger)

    def quit(self, debugger: pdb.Pdb) -> None:
        """Stop the run as Ctrl-C does, or where the terminal is closed as SIGHUP: finish the step, save and leave."""
        if _is_closed(0 if self._terminal is None else self._terminal):
            self._control.hang_up()
        else:
            self._control.quit_debugger()
        self._end(debugger)

    def _end(self, debugger: pdb.Pdb) -> None:
        self._is_over = True
        debugger.clear_all_breaks()
        debugger.set_continue()

    @contextmanager
    def _handling_signals(self) -> Iterator[None]:
        """Make Ctrl-C do what it does in pdb, and signals that end the run close the prompt."""
        if threading.current_thread() is not threading.main_thread():
            yield  # a hook of autograd: only the main thread can handle signals
            return
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, *_END_SIGNALS)}
        before = {number: handler for number, handler in handlers.items() if handler != signal.SIG_IGN}  # nohup's
        is_open = True

        def close(number: int, frame: FrameType | None) -> None:
            nonlocal is_open
            handler = before[signal.Signals(number)]
            if callable(handler):
                handler(number, frame)
            if is_open:
                is_open = False
                raise _PromptClosed

        self._control.at_prompt = True
        try:
            with _resending_interrupts():
                for number in before.keys() - {signal.SIGINT}:
                    signal.signal(number, close)
                yield
        finally:
            is_open = False
            for number, handler in before.items():
                signal.signal(number, handler)
                signal.siginterrupt(number, False)
            self._control.at_prompt = False


@contextmanager
def _resending_interrupts() -> Iterator[None]:
    """Make SIGINT interrupt the prompt, also when it arrives just before readline waits for a key.

    Python handles a signal when the system call that it interrupts returns. One that arrives between the display of the
    prompt and readline's `select` interrupts nothing, and would be handled after the next key. So a thread waits for
    the bytes that Python writes for each signal, and sends SIGINT again while nobody has read them.
    """
    unhandled, wakeup = os.pipe()
    ended, end = os.pipe()
    os.set_blocking(unhandled, False)
    os.set_blocking(wakeup, False)
    main = threading.get_ident()

    def interrupt(number: int, frame: FrameType | None) -> None:
        with suppress(BlockingIOError):  # sent again, and handled in the meantime
            if signal.SIGINT in os.read(unhandled, 4096):
                signal.default_int_handler(number, frame)

    def resend() -> None:
        while ended not in select.select([unhandled, ended], [], [])[0]:
            if not select.select([ended], [], [], _UNHANDLED_SECONDS)[0] and select.select([unhandled], [], [], 0)[0]:
                signal.pthread_kill(main, signal.SIGINT)

    before = signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)  # the one before would forward SIGINT
    handler = signal.signal(signal.SIGINT, interrupt)
    thread = threading.Thread(target=resend, name="ddpexp-interrupts", daemon=True)
    thread.start()
    try:
        yield
    finally:
        os.write(end, b"\0")
        thread.join()
        signal.signal(signal.SIGINT, handler)
        signal.set_wakeup_fd(before, warn_on_full_buffer=False)
        for number in (unhandled, wakeup, ended, end):
            os.close(number)


def install(debugger: Debugger) -> None:
    """Wrap the methods of pdb through which every prompt in this process comes."""
    start, interaction = pdb.Pdb.set_trace, pdb.Pdb.interaction
    commands = {name: getattr(pdb.Pdb, name) for name in ("do_quit", "do_q", "do_exit", "do_EOF")}

    def set_trace(self: pdb.Pdb, frame: FrameType | None = None, **options: Any) -> None:
        frame = frame or calling_frame()
        if _has_own_connection(self) or debugger.start(frame):
            start(self, frame, **options)

    def interact(self: pdb.Pdb, frame: FrameType | None, *arguments: Any) -> None:
        if _has_own_connection(self):
            interaction(self, frame, *arguments)
        elif frame is not None or debugger.start(calling_frame()):  # post-mortem has no frame, and no `set_trace`
            debugger.prompt(self, lambda: interaction(self, frame, *arguments))

    def leave(name: str) -> Any:
        def command(self: pdb.Pdb, argument: str) -> Any:
            if _has_own_connection(self):
                return commands[name](self, argument)
            if name == "do_EOF":
                with suppress(OSError):  # the terminal is closed
                    self.message("")  # Ctrl-D shows nothing
            debugger.quit(self)
            return 1

        command.__doc__ = "Stop the run: finish the step, save and leave."
        return command

    pdb.Pdb.set_trace = set_trace  # type: ignore[method-assign,assignment]
    pdb.Pdb.interaction = interact  # type: ignore[method-assign,assignment]
    for name in commands:
        setattr(pdb.Pdb, name, leave(name))


def of_process(control: Control, environ: Mapping[str, str]) -> Debugger:
    """Return the debugger of a worker with these variables."""
    return Debugger(control, int(environ.get("RANK", 0)), int(environ.get("WORLD_SIZE", 1)))


def _has_own_connection(debugger: pdb.Pdb) -> bool:
    return debugger.stdin not in (sys.stdin, sys.__stdin__)


def _place(frame: FrameType) -> str:
    """Return where the user's code is that started a debugger."""
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _PACKAGES:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


@contextmanager
def _standard_streams(terminal: int) -> Iterator[None]:
    """Make the terminal standard input, output and error: pdb, and what is called at its prompt, use these.

    Ctrl-Z is disabled, since it would stop the command and leave this process reading beside the shell.
    """
    attributes = termios.tcgetattr(terminal)
    kept = [os.dup(number) for number in (0, 1, 2)]
    stdin = sys.stdin
    _flush()
    try:
        for number in (0, 1, 2):
            os.dup2(terminal, number)
        sys.stdin = sys.__stdin__
        changed = termios.tcgetattr(terminal)
        changed[6][termios.VSUSP] = _DISABLED
        termios.tcsetattr(terminal, termios.TCSADRAIN, changed)
        yield
    finally:
        _flush()
        with suppress(termios.error):  # the terminal is gone
            termios.tcsetattr(terminal, termios.TCSADRAIN, attributes)
        sys.stdin = stdin
        for number, before in enumerate(kept):
            os.dup2(before, number)
            os.close(before)


def _is_closed(terminal: int) -> bool:
    """Return whether the terminal is gone: its window was closed, or its connection was lost."""
    try:
        termios.tcgetattr(terminal)
    except termios.error as error:
        return bool(error.args[0] == errno.EIO)
    return False


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()

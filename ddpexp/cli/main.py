"""The command line: which command it is for, and a fork server that starts while that is prepared."""

from __future__ import annotations

import gc
import os
import re
import sys
from contextlib import ExitStack, suppress
from functools import partial
from types import FrameType
from typing import TextIO

from ddpexp.cli import verbs
from ddpexp.cli.forks import will_fork
from ddpexp.cli.verb import HELP, Verb
from ddpexp.compat.python import calling_frame
from ddpexp.errors import EXIT_DONE, EXIT_REFUSED, RefusedError, SweptError
from ddpexp.launch.workers.client import Server
from ddpexp.run import outcome
from ddpexp.system import caller, secrets
from ddpexp.system.containers import name_user
from ddpexp.system.limits import holds_command, raise_files
from ddpexp.system.programs import OURS, SAFE_PATH, safe_path
from ddpexp.system.start import NOT_LINUX
from ddpexp.system.streams import mask_standard_streams
from ddpexp.system.terminal import print_message, show, within_patience

# Packages that the process of a command imports; it has no torch.
_REQUIRED = {"hydra", "omegaconf", "yaml", "rich", "numpy", "xxhash"}
_WORKER = "ddpexp.train.process"  # imported where this process was a worker


def main() -> int:
    """Run the command line and return the exit code."""
    if (
        os.environ.get(SAFE_PATH) == OURS
    ):  # of the command that has started this one; not meant for what a recipe starts
        del os.environ[SAFE_PATH]
    caller.follow()
    name_user()
    os.environ["PATH"] = safe_path()  # libraries start programs too: Python's own `platform` asks uname
    sys.argv[1:] = _take_secrets(sys.argv[1:])
    argv = _take_local_rank(sys.argv[1:])
    if not sys.platform.startswith("linux"):
        print_message(NOT_LINUX)
        return EXIT_REFUSED
    with ExitStack() as leaving:
        return outcome.exit_code_of(lambda: _dispatch(argv, leaving), "--json" in argv)


def _dispatch(argv: list[str], leaving: ExitStack) -> int:
    """Do what the arguments ask for.

    Until there is something to undo a signal ends this process where it is (`start`): as an error it would go through
    imports and through Hydra, and libraries catch more than they know.
    """
    if (wrong := secrets.unusable()) is not None:
        raise RefusedError(wrong)
    raise_files()
    verbs.check_lines_end_plainly(argv)
    verb = verbs.BY_NAME.get(argv[0]) if argv else None
    if argv and verb is None:
        verbs.check_is_no_verb(argv[0], argv[1:])
    # The fork server imports torch while Hydra composes here: it is the longer of the two, so it starts first.
    server = Server() if will_fork(verb, argv) and holds_command() else None
    if server is not None:
        leaving.callback(server.close)
    try:
        if verb is not None:
            return _call(verb, argv[1:], server)
        return _train(argv, server) if argv and not HELP & set(argv) else _explain(argv)
    except ModuleNotFoundError as error:
        if error.name not in _REQUIRED:
            raise
        raise RefusedError(
            f"{error.name} is not installed for this Python ({sys.executable})",
            suggestion="Install ddpexp with what it requires, in a clone "
            f"{sys.executable} -m pip install -e . -c constraints.txt.",
        ) from None


def _call(verb: Verb, argv: list[str], server: Server | None) -> int:
    """Call the function of a verb, or print what that explains of itself."""
    if HELP & set(argv):
        show(verb.help())
        return EXIT_DONE
    call = verb.parse(argv, sys.argv, server)
    function = verb.load()
    if verb.is_interruptible:
        outcome.stop_on_signals()
    try:
        return function(call)
    except SweptError as error:
        has_values = error.reason.startswith("gives several values")
        what = "Give each key one value" if has_values else "Leave it out"
        error.suggestion = f"{what}: the command takes one run."
        raise


def _explain(argv: list[str]) -> int:
    """Print what can be typed."""
    from ddpexp.cli import help as answers

    if argv:
        return answers.explain([argument for argument in argv if argument not in HELP], by_name=False)
    print_message(answers.first())
    return EXIT_REFUSED


def _train(argv: list[str], server: Server | None) -> int:
    """Train the run or the sweep of a command line, or print what an option such as `--cfg job` asks for."""
    verbs.check_stands_first(argv)
    gc.disable()  # next to nothing of what is imported and composed is garbage: 20 ms of a start
    try:
        from ddpexp.cli import start
        from ddpexp.config.compose import compose_command
        from ddpexp.config.parse import parse
        from ddpexp.config.sweeps import Swept
        from ddpexp.run.training import Training

        composed = compose_command(argv)
    finally:
        gc.enable()
    if composed is None:
        return EXIT_DONE
    if isinstance(composed, Swept):
        return start.sweep(composed, server)
    experiment = parse(composed.values)
    start.print_warnings(composed)
    training = Training(experiment, composed.text, composed.overrides, sys.argv)
    return start.launch(experiment.launcher, training.job, server)


def _take_local_rank(argv: list[str]) -> list[str]:
    """Take out the argument that `python -m torch.distributed.launch` puts before the others."""
    if argv and (found := re.fullmatch(r"--local[-_]rank=(\d+)", argv[0])):
        os.environ.setdefault("LOCAL_RANK", found[1])
        return argv[1:]
    return argv


def _take_secrets(argv: list[str]) -> list[str]:
    """Put references for the secrets that the shell has put into `key=$TOKEN`.

    What is typed is written down in many places.
    """
    arguments, said = secrets.referenced(argv)
    for text in said if os.environ.get("RANK", "0") == "0" else ():
        print_message(f"ddpexp: {text}: the value stays out of the run's files")
    return arguments


def _open_standard_streams() -> None:
    """Open what the shell has closed (`>&-`): the next file or socket would get its number, and what is printed."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest number that is free
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115


def run() -> None:
    """Leave with the exit code of `main`, without the interpreter's slow shutdown.

    A command that was the worker (launcher=inline) shuts down in the usual way: profilers write their results then.
    Under `python -m pdb`, which would start the command again, it does not.
    """
    _open_standard_streams()
    mask_standard_streams()
    code = main()
    for stream in (sys.stdout, sys.stderr):
        within_patience(partial(_flush, stream))
    if _WORKER in sys.modules and not _is_run_by_pdb():
        sys.exit(code)
    os._exit(code)


def _is_run_by_pdb() -> bool:
    frame: FrameType | None = calling_frame()
    while frame is not None and frame.f_globals.get("__name__") not in ("pdb", "bdb"):
        frame = frame.f_back
    return frame is not None


def _flush(stream: TextIO) -> None:
    with suppress(OSError, ValueError):  # the reader has gone
        stream.flush()

"""The command line: which command it is for, and a fork server that starts while that is prepared."""

from __future__ import annotations

import gc
import os
import re
import sys
from collections.abc import Mapping
from contextlib import ExitStack, redirect_stdout, suppress
from functools import partial
from pathlib import Path
from typing import TextIO

from ddpexp.cli.forks import will_fork
from ddpexp.config import commands
from ddpexp.errors import EXIT_DONE, EXIT_REFUSED, RefusedError
from ddpexp.launch import Job
from ddpexp.launch.launchers.base import Launcher
from ddpexp.launch.launchers.inline import Inline
from ddpexp.launch.launchers.local import Spawn
from ddpexp.launch.rendezvous.environment import externally_started, ignored_variables
from ddpexp.launch.workers.client import Server
from ddpexp.run import outcome
from ddpexp.system import caller, secrets
from ddpexp.system.containers import name_user
from ddpexp.system.limits import holds_command, raise_files
from ddpexp.system.programs import OURS, SAFE_PATH, safe_path
from ddpexp.system.start import NOT_LINUX
from ddpexp.system.streams import mask_standard_streams
from ddpexp.system.terminal import print_json, print_message, show, within_patience

_HELP = {"--help", "-h"}
_REQUIRED = {"hydra", "omegaconf", "yaml", "rich", "numpy"}  # imported by the process of a command, which has no torch
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
        return outcome.exit_code_of(lambda: _answer(argv, leaving), "--json" in argv)


def _answer(argv: list[str], leaving: ExitStack) -> int:
    """Do what the arguments ask for.

    Until there is something to undo a signal ends this process where it is (`start`): as an error it would go through
    imports and through Hydra, and libraries catch more than they know.
    """
    if (wrong := secrets.unusable()) is not None:
        raise RefusedError(wrong)
    raise_files()
    # The fork server imports torch while Hydra composes here: it is the longer of the two, so it starts first.
    server = Server() if will_fork(argv) and holds_command() else None
    if server is not None:
        leaving.callback(server.close)
    try:
        return _COMMANDS.get(argv[0] if argv else "", _train)(argv, server)
    except ModuleNotFoundError as error:
        if error.name not in _REQUIRED:
            raise
        raise RefusedError(
            f"{error.name} is not installed for this Python ({sys.executable}): install ddpexp with what it "
            f"requires, in a clone {sys.executable} -m pip install -e . -c constraints.txt."
        ) from None


def _evaluate(argv: list[str], server: Server | None) -> int:
    from ddpexp.cli.subcommands import evaluate

    found = evaluate(argv[1:], sys.argv)
    if found is None or "--json" not in argv:
        return EXIT_DONE if found is None else _launch(*found, server)
    with redirect_stdout(sys.stderr):  # standard output is for the answer alone
        code = _launch(*found, server)
    if (answer := found[1].answer()) is not None:
        print_json(answer)
    return code


def _predict(argv: list[str], server: Server | None) -> int:
    from ddpexp.cli.predict import predict

    return EXIT_DONE if (found := predict(argv[1:], sys.argv)) is None else _launch(*found, server)


def _export(argv: list[str], _server: Server | None) -> int:
    from ddpexp.cli.export import run_export

    outcome.stop_on_signals()
    return run_export(argv[1:], sys.argv)


def _generate(argv: list[str], _server: Server | None) -> int:
    from ddpexp.cli.generate import generate

    return generate(argv[1:], sys.argv)


def _resume(argv: list[str], server: Server | None) -> int:
    from ddpexp.cli.subcommands import resume
    from ddpexp.sweep.folder import SweepDir

    if any(SweepDir(Path(argument)).is_sweep() for argument in argv[1:]):
        from ddpexp.sweep.again import resumed
        from ddpexp.sweep.run import run_sweep

        again = resumed(argv[1:], sys.argv)
        _check_runs_once("run the whole sweep")
        outcome.stop_on_signals()
        return run_sweep(again, server)
    run = resume(argv[1:], sys.argv)
    return EXIT_DONE if run is None else _launch(*run, server)


def _member(argv: list[str], server: Server | None) -> int:
    from ddpexp.cli.subcommands import member

    launcher, job = member(argv[1:])
    return outcome.launch(launcher, job, server, as_member=True)


def _look(argv: list[str], _server: Server | None) -> int:
    from ddpexp.sweep import verbs

    outcome.stop_on_signals()
    return {"table": verbs.table, "status": verbs.status}[argv[0]](argv[1:])


def _plan(argv: list[str], _server: Server | None) -> int:
    from ddpexp.plan.verb import plan

    outcome.stop_on_signals()
    return plan(argv[1:])


def _data(argv: list[str], _server: Server | None) -> int:
    from ddpexp.cli.data import data

    outcome.stop_on_signals()
    return data(argv[1:])


def _sync(argv: list[str], _server: Server | None) -> int:
    from ddpexp.cli.sync import sync

    outcome.stop_on_signals()
    return sync(argv[1:], sys.argv)


def _doctor(argv: list[str], server: Server | None) -> int:
    from ddpexp.doctor import verb

    prepared = verb.prepare(argv[1:])
    if prepared is None:
        return EXIT_DONE
    launcher, job = prepared
    check_started_once(launcher, job)
    return verb.diagnose(launcher, job, partial(outcome.launch, launcher, job, server), "--json" in argv)


def _check(argv: list[str], server: Server | None) -> int:
    from ddpexp.cli.check import check

    _check_runs_once("check the recipe")
    return check(argv[1:], server)


def _trust(argv: list[str], _server: Server | None) -> int:
    from ddpexp.cli.trust import trust

    return trust(argv[1:])


def _new(argv: list[str], _server: Server | None) -> int:
    from ddpexp.cli.new import new

    return new(argv[1:])


def _help(argv: list[str], server: Server | None) -> int:
    arguments = [argument for argument in argv[1:] if argument not in _HELP]
    return _explain(arguments or (["help"] if len(argv) > 1 else []), server, by_name=True)


def _explain(arguments: list[str], server: Server | None, by_name: bool) -> int:
    """Print what the arguments ask for; a command explains itself."""
    gc.disable()  # nothing lives long here: a tenth of the time
    from ddpexp.cli import help as answers

    named = [argument for argument in arguments if argument in commands.NAMES]
    for name in named:
        if name == "help":
            show(answers.USAGE)
        else:
            _COMMANDS[name]([name, "--help"], server)
    others = [argument for argument in arguments if argument not in named]
    if others or not named:
        show(answers.answer(others, by_name))
    return EXIT_DONE


def _completion(argv: list[str], _server: Server | None) -> int:
    gc.disable()
    from ddpexp.cli.completion import completion

    return completion(argv[1:])


def _train(argv: list[str], server: Server | None) -> int:
    if not argv:
        from ddpexp.cli import help as answers

        print_message(answers.first())
        return EXIT_REFUSED
    if (wrong := commands.unknown(argv[0])) is not None:
        raise RefusedError(wrong)
    if _HELP & set(argv):
        return _explain([argument for argument in argv if argument not in _HELP], server, by_name=False)
    from ddpexp.config.compose import compose_command
    from ddpexp.config.parse import parse
    from ddpexp.config.sweeps import Swept

    composed = compose_command(argv)
    if composed is None:
        return 0
    if isinstance(composed, Swept):
        from ddpexp.sweep.run import run_sweep

        _check_runs_once("run the whole sweep")
        outcome.stop_on_signals()
        return run_sweep(composed, server)
    experiment = parse(composed.values)
    for warning in composed.warnings:
        if os.environ.get("RANK", "0") == "0":
            print_message(f"ddpexp: warning: {warning}")

    from ddpexp.run.training import Training

    return _launch(experiment.launcher, Training(experiment, composed.text, composed.overrides, sys.argv), server)


def _launch(launcher: Launcher, job: Job, server: Server | None) -> int:
    check_started_once(launcher, job)
    return outcome.launch(launcher, job, server)


def check_started_once(launcher: Launcher, job: Job, environ: Mapping[str, str] = os.environ) -> None:
    """Check that nothing has started several of this command where each of them would run the whole job.

    Raises:
        RefusedError: torchrun, mpirun or srun has, and the launcher is the one for a command that stands alone.
    """
    if not isinstance(launcher, Spawn | Inline) or job.request.nodes not in ("auto", 1):
        return
    if (started := externally_started(environ)) is not None:
        starter, count, right = started
        name, verb = ("spawn", "add") if isinstance(launcher, Spawn) else ("inline", "use")
        raise RefusedError(
            f"{starter} has started {count} of these commands, and launcher={name} would run each alone: "
            f"{verb} launcher={right}."
        )
    if (warning := ignored_variables(environ)) is not None:
        print_message(f"ddpexp: warning: {warning}")


def _check_runs_once(what: str) -> None:
    """Check that nothing has started several of a command that does all of its work by itself."""
    if (started := externally_started()) is not None:
        starter, count, _ = started
        raise RefusedError(
            f"{starter} has started {count} of these commands, and each would {what}: type the command without "
            f"{starter}."
        )


_COMMANDS = {
    "resume": _resume,
    "evaluate": _evaluate,
    "predict": _predict,
    "export": _export,
    "generate": _generate,
    "status": _look,
    "table": _look,
    "sync": _sync,
    "plan": _plan,
    "doctor": _doctor,
    "check": _check,
    "data": _data,
    "trust": _trust,
    "new": _new,
    "help": _help,
    "completion": _completion,
    "member": _member,  # what launchers start, and no person types
}


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
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_globals.get("__name__") in ("pdb", "bdb"):
            return True
    return False


def _flush(stream: TextIO) -> None:
    with suppress(OSError, ValueError):  # the reader has gone
        stream.flush()

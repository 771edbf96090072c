"""The command: `python -m ddpexp key=value ...`, and its verbs."""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import sys
import time
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import TextIO

from ddpexp import secrets
from ddpexp.errors import DdpexpError, Failure, FinishedError, RefusedError, StoppedError, WorkerError, first_end
from ddpexp.launch import Job, Launcher
from ddpexp.launch.fork_server import Server
from ddpexp.launch.limits import raise_files
from ddpexp.launch.terminal import say, within_patience

_FORK_HERE = ("spawn", "torchrun-env", "mpi")  # launchers whose workers are forked by the command itself
_NOTHING_TO_REQUEUE = "there is nothing to requeue: that is for launcher=slurm"


def main() -> int:
    """Run the command line and return the exit code."""
    sys.argv[1:] = _take_secrets(sys.argv[1:])
    argv = _take_local_rank(sys.argv[1:])
    if not sys.platform.startswith("linux"):
        return _say("ddpexp runs on Linux; on Windows use the Windows Subsystem for Linux, on macOS a container.", 2)
    _stop_on_signals()
    # The fork server imports torch while Hydra composes here: it is the longer of the two, so it starts first.
    server = None
    try:
        raise_files()
        server = Server() if _will_fork(argv) else None
        if argv[:1] == ["evaluate"]:
            from ddpexp.verbs import evaluate

            found = evaluate(argv[1:])
            return 0 if found is None else _launch(*found, server)
        if argv[:1] == ["resume"]:
            from ddpexp.verbs import resume

            run = resume(argv[1:], sys.argv)
            return 0 if run is None else _launch(*run, server)
        if argv[:1] == ["member"]:
            from ddpexp.verbs import member

            launcher, job = member(argv[1:])
            return _launch(launcher, job, server, as_member=True)
        if argv[:1] in (["table"], ["status"]):
            from ddpexp.sweep import verbs

            return {"table": verbs.table, "status": verbs.status}[argv[0]](argv[1:])
        return _train(argv, server)
    except FinishedError as error:
        if not error.quiet:
            say(f"ddpexp: {error}", sys.stdout)
        return error.exit_code
    except WorkerError as error:
        _hear_no_more_signals()
        _tell_torchrun(error)
        return error.exit_code if error.quiet else _say(_first_cause(error), error.exit_code)
    except DdpexpError as error:
        _hear_no_more_signals()
        _tell_torchrun(error)
        if not error.quiet:
            _say(f"ddpexp: {error}", error.exit_code)
        if isinstance(error, StoppedError) and error.then is not None:
            _say(f"ddpexp: {error.then()}", error.exit_code)
        return error.exit_code
    finally:
        if server is not None:
            server.close()


def _train(argv: list[str], server: Server | None) -> int:
    from ddpexp.config import parse
    from ddpexp.config.compose import compose

    composed = compose(argv)
    if composed is None:
        return 0
    experiment = parse(composed.values)
    for warning in composed.warnings:
        if os.environ.get("RANK", "0") == "0":
            _say(f"ddpexp: warning: {warning}", 0)

    from ddpexp.jobs import Training

    return _launch(experiment.launcher, Training(experiment, composed.text, composed.overrides, sys.argv), server)


def _launch(launcher: Launcher, job: Job, server: Server | None, as_member: bool = False) -> int:
    """Run the job and have its end written down, by one of the commands that run it."""
    try:
        run = launcher.member if as_member else launcher.launch  # type: ignore[attr-defined]
        code: int = run(job, server)
        return code
    except (WorkerError, RefusedError) as error:
        _record(job, error)
        raise
    except StoppedError as error:
        _hear_no_more_signals()
        end = first_end(error)
        if not isinstance(end, StoppedError):
            assert isinstance(end, WorkerError | RefusedError)
            _record(job, end)
            raise end from None
        if end.told:
            end.quiet = True
            raise end from None
        stopped = StoppedError(end.signum, job.interrupt(end.step, end.saved), end.step)
        stopped.quiet = not job.leads  # the leading command says it
        if job.leads:
            nothing = (lambda: _NOTHING_TO_REQUEUE) if end.signum == signal.SIGUSR2 else None
            stopped.then = end.then or nothing
        raise stopped from None
    finally:
        job.close()


def _record(job: Job, error: WorkerError | RefusedError) -> None:
    _hear_no_more_signals()
    if isinstance(error, WorkerError):
        if error.leader is None:
            job.fail(error.failure)
    elif not error.quiet:
        job.fail(Failure(rank=0, host=platform.node(), kind="RefusedError", message=str(error), exit_code=error.exit_code))


def _take_local_rank(argv: list[str]) -> list[str]:
    """Take out the word that `python -m torch.distributed.launch` puts before the others."""
    if argv and (found := re.fullmatch(r"--local[-_]rank=(\d+)", argv[0])):
        os.environ.setdefault("LOCAL_RANK", found[1])
        return argv[1:]
    return argv


def _take_secrets(argv: list[str]) -> list[str]:
    """Put references for the secrets that the shell has put into `key=$TOKEN`: what is typed is written down in many places."""
    words, said = secrets.referenced(argv)
    for text in said if os.environ.get("RANK", "0") == "0" else ():
        say(f"ddpexp: {text}: the value stays out of the run's files")
    return words


def _tell_torchrun(error: DdpexpError) -> None:
    """Leave the error where torchrun looks for it, so that its summary shows it. Source: torch's ErrorHandler."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    trace = error.failure.traceback if isinstance(error, WorkerError) else None
    summary = _first_line(error)
    extra = {"py_callstack": f"{trace}{summary}" if trace else summary, "timestamp": str(int(time.time()))}
    try:
        with open(path, "w") as file:
            json.dump(secrets.masked_tree({"message": {"message": summary, "extraInfo": extra}}), file)
    except OSError:
        pass  # its folder is gone with it


def _stop_on_signals() -> None:
    """Turn stop signals into an error from the first moment on; while workers run, their watch hears the signals instead."""

    def stop(number: int, _frame: FrameType | None) -> None:
        raise StoppedError(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, stop)
    for number in (signal.SIGUSR1, signal.SIGQUIT):  # there is nothing to save and no rank to look at yet
        signal.signal(number, signal.SIG_IGN)


def _hear_no_more_signals() -> None:
    """What started this command may send it a signal while it says how it ended."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)


def _will_fork(argv: list[str]) -> bool:
    """Guess from the words alone whether workers will be forked here; a wrong guess costs time, nothing else."""
    if argv[:1] == ["member"]:
        return True
    if argv[:1] in (["table"], ["status"]):
        return False
    chosen = [word.partition("=")[2] for word in argv if word.startswith("launcher=")]
    if argv[:1] == ["resume"]:
        chosen = chosen or _launcher_of_run(argv[1:])
    fresh = any(word.startswith("launcher.start_method=") and word != "launcher.start_method=forkserver" for word in argv)
    here = all(name in _FORK_HERE or (name == "slurm" and "SLURM_STEP_ID" in os.environ) for name in chosen)
    if argv[:1] in (["evaluate"], ["resume"]):
        return here and not fresh and len(argv) > 1 and not {"--help", "-h"} & set(argv)
    asks = any(word.startswith("-") and not word.startswith(("--config-dir", "-cd", "--config-name", "-cn")) for word in argv)
    return here and not asks and not fresh


def _launcher_of_run(words: list[str]) -> list[str]:
    """Read from the run directory among the words which launcher it was started with; nothing where that is not plain to see."""
    for word in words:
        try:
            with open(os.path.join(word, "config.yaml")) as file:
                found = re.search(r"^launcher:\n  _target_: [\w.]*\.launch\.(\w+)\.\w+$", file.read(1 << 16), re.MULTILINE)
        except (OSError, ValueError):
            continue
        return [found[1].replace("_", "-")] if found else []
    return []


def _first_cause(error: WorkerError) -> str:
    failure = error.failure
    place = f" at step {failure.step}" if failure.step is not None else ""
    phase = f" ({failure.phase}{place})" if failure.phase else place
    summary = f"ddpexp: rank {failure.rank} on {failure.host} failed{phase}: {failure.kind}: {failure.message}"
    if error.leader is not None:
        return f"{summary} (the whole report is with rank zero, on {error.leader})"
    lines = [] if error.shown or not failure.traceback else [failure.traceback.rstrip()]
    if error.others:
        ranks = ", ".join(map(str, error.others))
        summary += f" (rank{'s' if len(error.others) > 1 else ''} {ranks} ended with it)"
    return "\n".join([*lines, summary])


def _first_line(error: DdpexpError) -> str:
    """Return the error in one line, with its rank where it has one."""
    if isinstance(error, WorkerError):
        failure = error.failure
        return f"rank {failure.rank} on {failure.host}: {failure.kind}: {failure.message}"
    return str(error)


def _say(text: str, code: int) -> int:
    say(text)
    return code


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
    """Leave with the exit code of `main`, without the interpreter's slow farewell."""
    _open_standard_streams()
    code = main()
    for stream in (sys.stdout, sys.stderr):
        within_patience(partial(_flush, stream))
    os._exit(code)


def _flush(stream: TextIO) -> None:
    with suppress(OSError, ValueError):  # the reader has gone
        stream.flush()


if __name__ == "__main__":
    run()

"""The command: `python -m ddpexp key=value ...`, and its verbs."""

from __future__ import annotations

import os
import platform
import signal
import sys
from pathlib import Path
from types import FrameType

from ddpexp.errors import DdpexpError, Failure, RefusedError, StoppedError, WorkerError
from ddpexp.launch.spawn import Server


def main() -> int:
    """Run the command line and return the exit code."""
    argv = sys.argv[1:]
    if not sys.platform.startswith("linux"):
        return _say("ddpexp runs on Linux; on Windows use the Windows Subsystem for Linux, on macOS a container.", 2)
    _stop_on_signals()
    # The fork server imports torch while Hydra composes here: it is the longer of the two, so it starts first.
    server = Server() if _will_fork(argv) else None
    try:
        if argv[:1] == ["evaluate"]:
            from ddpexp.verbs import evaluate

            return evaluate(argv[1:], server)
        return _train(argv, server)
    except WorkerError as error:
        return _say(_first_cause(error), error.exit_code)
    except DdpexpError as error:
        return _say(f"ddpexp: {error}", error.exit_code)
    finally:
        if server is not None:
            server.close()


def _train(argv: list[str], server: Server | None) -> int:
    from ddpexp.config import layout, parse
    from ddpexp.config.compose import compose

    composed = compose(argv)
    if composed is None:
        return 0
    experiment = parse(composed.values)
    found = layout(experiment)
    for warning in composed.warnings:
        _say(f"ddpexp: warning: {warning}", 0)

    from ddpexp import rundir
    from ddpexp.launch import Job
    from ddpexp.prepare import prepare

    source = experiment.run.init_from
    if source is not None and not Path(source).exists():
        raise RefusedError(f"run.init_from={source}: there is no such file.")
    data = prepare(experiment.data, experiment.trust)
    run = rundir.create(experiment.run.dir, experiment.recipe.name)
    rundir.write(run.config, composed.text)
    rundir.write(run.overrides, "".join(f"- {word}\n" for word in composed.overrides) or "[]\n")
    rundir.write(run.manifest, rundir.dumps(rundir.describe(found, data, sys.argv)))
    job = Job("ddpexp.worker:main", [str(run.path.resolve())], found, run.ranks)
    try:
        return experiment.launcher.launch(job, server)
    except WorkerError as error:
        run.fail(error.failure)
        raise
    except RefusedError as error:
        run.fail(Failure(rank=0, host=platform.node(), kind="RefusedError", message=str(error), exit_code=error.exit_code))
        raise
    except StoppedError as error:
        run.interrupt()
        raise StoppedError(error.signum, f"what was recorded is in {rundir.relative(run.path)}") from None


def _stop_on_signals() -> None:
    """Turn stop signals into an error from the first moment on; while workers run, their watch hears the signals instead."""

    def stop(number: int, _frame: FrameType | None) -> None:
        raise StoppedError(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, stop)


def _will_fork(argv: list[str]) -> bool:
    """Guess from the words alone whether workers will be forked here; a wrong guess costs time, nothing else."""
    if argv[:1] == ["evaluate"]:
        return len(argv) > 1 and not {"--help", "-h"} & set(argv)
    launchers = [word for word in argv if word.startswith(("launcher=", "launcher.start_method="))]
    asks = any(word.startswith("-") and not word.startswith(("--config-dir", "-cd", "--config-name", "-cn")) for word in argv)
    return not asks and all(word in ("launcher=spawn", "launcher.start_method=forkserver") for word in launchers)


def _first_cause(error: WorkerError) -> str:
    failure = error.failure
    place = f" at step {failure.step}" if failure.step is not None else ""
    phase = f" ({failure.phase}{place})" if failure.phase else place
    lines = [] if error.shown or not failure.traceback else [failure.traceback.rstrip()]
    summary = f"ddpexp: rank {failure.rank} on {failure.host} failed{phase}: {failure.kind}: {failure.message}"
    if error.others:
        ranks = ", ".join(map(str, error.others))
        summary += f" (rank{'s' if len(error.others) > 1 else ''} {ranks} ended with it)"
    return "\n".join([*lines, summary])


def _say(text: str, code: int) -> int:
    print(text, file=sys.stderr, flush=True)
    return code


def run() -> None:
    """Leave with the exit code of `main`, without the interpreter's slow farewell."""
    code = main()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            pass  # the reader has gone
    os._exit(code)


if __name__ == "__main__":
    run()

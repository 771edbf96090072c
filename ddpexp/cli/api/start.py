"""`ddpexp.run` and `ddpexp.sweep`: commands as child processes, whose errors become exceptions."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ddpexp.cli import verbs
from ddpexp.cli.api.child import Ended, run_command
from ddpexp.cli.api.errors import RunFailedError, RunInterruptedError, WorkerTraceback
from ddpexp.cli.api.opened import Run
from ddpexp.cli.api.opened_sweep import Sweep
from ddpexp.cli.verb import MULTIRUN
from ddpexp.errors import EXIT_DONE, EXIT_REFUSED, Failure, RefusedError
from ddpexp.run.directory import RunDir
from ddpexp.run.resume_arguments import config_options, config_path, names_to_trust
from ddpexp.system import caller
from ddpexp.system.text import sanitize

_QUESTIONS = ("--help", "-h", "--version", "--cfg", "-c", "--info", "-i", "--resolve", "--package", "-p")


def run(arguments: Sequence[str], *, cwd: str | Path | None = None, quiet: bool = False) -> Run:
    """Train, as `python -m ddpexp` with these arguments does, and return the run when it has ended.

    The command is a child process: this process imports no torch and forks no workers. In a notebook and on a terminal
    a line shows the progress. An interrupt (the notebook's stop button, Ctrl-C) reaches the command once, which saves
    and ends. The command ends in the same way when this process dies.

        run = ddpexp.run(["recipe=mnist", "trainer.gpus=2"])
        run = ddpexp.run(["resume", run.path, "trainer.epochs=4"])

    Args:
        arguments: The overrides and options of the command, a list with an item for each.
        cwd: The current folder of the command, in which `outputs` lies; this process's own if None.
        quiet: Show nothing. Errors are raised all the same.

    Raises:
        RefusedError: The start was refused: configuration, usage, environment or data. Nothing was changed.
        RunFailedError: The run failed; has `rank`, `traceback` and `run`.
        RunInterruptedError: A signal ended it; a KeyboardInterrupt, with the command to resume and `run`.
    """
    words = checked(arguments, "run")
    if (first := words[0] if words else "") not in ("resume", "rerun") and first in verbs.NAMES:
        raise RefusedError(f"ddpexp.run trains or resumes, and {first} does neither", suggestion=_instead(first))
    if any(word in MULTIRUN for word in words):
        raise RefusedError("ddpexp.run starts one run, and -m makes a sweep", suggestion="Use ddpexp.sweep.")
    ended = run_command(words, cwd, quiet)
    found = ended.directory
    if found is not None and found.is_sweep:
        check_success(ended, sweep=Sweep(Path(found.path)))
        raise RefusedError(
            "The command was a sweep, which has ended",
            suggestion=f"Use ddpexp.sweep or ddpexp.open_sweep({found.path!r}).",
        )
    result = Run(Path(found.path), *trust_of(words, cwd)) if found is not None else None
    check_success(ended, run=result)
    if result is None:
        raise RefusedError(
            "The command started no run", suggestion="Use the command line for what only prints something."
        )
    return replace(result, trust=(*result.trust, *names_to_trust(RunDir(result.path))))


def sweep(arguments: Sequence[str], *, cwd: str | Path | None = None, quiet: bool = False) -> Sweep:
    """Run a sweep, as `python -m ddpexp -m` with these arguments does, and return it when it has ended.

    The arguments and the behavior are those of `ddpexp.run`.

        sweep = ddpexp.sweep(["recipe=mnist", "optimizer.lr=0.01,0.03", "sweep.objective=eval/loss"])
        sweep.best.model()

    Raises:
        RefusedError: The start was refused, and nothing was started.
        RunFailedError: Jobs failed; the text lists them. Has `sweep`.
        RunInterruptedError: A signal ended it; a KeyboardInterrupt, with the command to resume and `sweep`.
    """
    words = checked(arguments, "sweep")
    first = words[0] if words else ""
    if first in verbs.NAMES and first != "resume":
        raise RefusedError(
            f"ddpexp.sweep runs or resumes a sweep, and {first} does neither", suggestion=_instead(first)
        )
    if first != "resume" and not any(word in MULTIRUN for word in words):
        words = ["-m", *words]
    ended = run_command(words, cwd, quiet)
    found = ended.directory
    result = Sweep(Path(found.path), *trust_of(words, cwd)) if found is not None and found.is_sweep else None
    check_success(ended, sweep=result)
    if result is None:
        raise RefusedError(
            "The command started no sweep", suggestion="Name values that differ, as in optimizer.lr=0.01,0.03."
        )
    names = dict.fromkeys(name for run in result.runs for name in names_to_trust(RunDir(run.path)))
    return replace(result, trust=(*result.trust, *names))


def checked(arguments: Sequence[str], name: str) -> list[str]:
    """Return the arguments as texts.

    Raises:
        RefusedError: they are not a list, or ask about the configuration, which starts nothing.
    """
    if isinstance(arguments, str | bytes):
        raise RefusedError(
            f"ddpexp.{name} takes a list with an item for each argument, as in "
            f'ddpexp.{name}(["recipe=mnist", "trainer.gpus=2"]).'
        )
    words = [str(argument) for argument in arguments]
    if not words:
        raise RefusedError(f'ddpexp.{name} needs arguments, as in ddpexp.{name}(["recipe=mnist", "trainer.gpus=2"]).')
    question = next((word for word in words if word.partition("=")[0] in _QUESTIONS), None)
    if question is not None:
        raise RefusedError(
            f"The option {question} only prints something",
            place=f"ddpexp.{name}",
            suggestion="Use it on the command line.",
        )
    return words


def check_success(ended: Ended, run: Run | None = None, sweep: Sweep | None = None) -> None:
    """Check how a command ended.

    Raises:
        RefusedError, RunFailedError, RunInterruptedError: with the command's own sentence.
    """
    code, end = ended.code, ended.end
    if end is not None and end.kind == "refused":
        raise RefusedError.from_dict(_fields(end))
    if end is not None and end.kind == "stopped":
        raise RunInterruptedError(sanitize(end.sentence), end.signum or 0, run, sweep)
    if end is not None:
        failure = Failure(**end.failure) if end.failure is not None else None
        error = RunFailedError(sanitize(end.sentence), code, failure, run, sweep, _fields(end))
        cause = WorkerTraceback(sanitize(failure.traceback)) if failure is not None and failure.traceback else None
        raise error from cause
    if code == EXIT_DONE and not ended.interrupted:
        return
    if code == EXIT_DONE:
        raise RunInterruptedError("interrupted by SIGINT; the command was finished by then", signal.SIGINT, run, sweep)
    if code == EXIT_REFUSED:
        raise RefusedError(_last_line(ended))
    number = -code if code < 0 else code - 128
    if ended.interrupted and number == signal.SIGINT:
        raise RunInterruptedError("interrupted by SIGINT; nothing was started", signal.SIGINT, run, sweep)
    raise RunFailedError(_unreported(ended, number, run), code, None, run, sweep)


def _unreported(ended: Ended, number: int, run: Run | None) -> str:
    """Return the sentence for a command that has reported nothing about its end."""
    if number in set(signal.Signals):
        text = f"the command was killed by {signal.Signals(number).name}"
        return f"{text}; resume it with ddpexp.run(['resume', {str(run.path)!r}])" if run is not None else text
    return _last_line(ended)


def _fields(end: caller.End) -> dict[str, str]:
    """Return the fields of the error that ended the command, or of its worker's."""
    fields = end.failure or end.fields or {}
    names = ("reason", "key", "value", "suggestion", "place")
    given = {name: sanitize(text) for name in names if (text := fields.get(name)) is not None}
    return {"reason": sanitize(fields.get("message") or end.sentence), **given}


def _last_line(ended: Ended) -> str:
    return sanitize(ended.last.removeprefix("ddpexp: ")) or f"the command ended with exit code {ended.code}"


def trust_of(words: Sequence[str], cwd: str | Path | None) -> tuple[str | None, tuple[str, ...]]:
    """Return the config folder and the trusted names that the arguments name, to open the run with the same."""
    folder = config_path(config_options(words))
    trusted = next((word.partition("=")[2] for word in words if word.lstrip("+").startswith("run.trust=")), "")
    names = [name.strip().strip("'\"") for name in trusted.strip("[]").split(",")]
    return str(Path(cwd or ".", folder).absolute()) if folder else None, tuple(filter(None, names))


def _instead(name: str) -> str:
    found = {
        "evaluate": "Use ddpexp.open_run(DIR).evaluate().",
        "status": "Use ddpexp.open_run(DIR).status or ddpexp.open_sweep(DIR).rows().",
        "diff": "Use ddpexp.diff([DIR, DIR]).",
        "table": "Use ddpexp.open_sweep(DIR).rows().",
    }
    return found.get(name, f"Use the command line, ddpexp {name}, with --json where it has that.")

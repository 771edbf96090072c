"""The parts of `ddpexp check`, run one after another in a temporary folder, and judged."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard, get_args

from ddpexp.check.job import Answer, Check, Finding, Part, temporary_folder
from ddpexp.check.quiet_launch import run_quietly
from ddpexp.check.short_run import shortened
from ddpexp.check.verdict import judge
from ddpexp.config.parse import load
from ddpexp.config.plugins import launcher_name
from ddpexp.config.schema import Experiment
from ddpexp.errors import RefusedError, WorkerError
from ddpexp.launch.launchers.local import Spawn
from ddpexp.launch.workers.client import Server


def examine(experiment: Experiment, text: str, server: Server) -> list[Finding]:
    """Return what two steps of an experiment, with its configuration as YAML, show of its recipe.

    Raises:
        RefusedError, WorkerError: the experiment cannot be built.
    """
    with temporary_folder() as folder:
        short_text = shortened(text, experiment, str(folder))
        short = load(short_text)
        answers = _run_parts(short, short_text, folder, server)
        records = {part: _records(folder / part / "metrics.jsonl") for part in get_args(Part)}
        return [*_notes(experiment), *judge(answers, records, short)]


def _run_parts(experiment: Experiment, text: str, folder: Path, server: Server) -> dict[Part, Answer]:
    """Run each part that can show more than those before it; the first one must succeed.

    Raises:
        RefusedError, WorkerError: it does not.
    """
    answers: dict[Part, Answer] = {}

    def run(part: Part) -> Answer:
        check = Check(experiment, text, folder, part)
        try:
            run_quietly(check.job, server)
            answers[part] = check.answer()
        except (RefusedError, WorkerError) as error:
            if part == "one":
                raise
            answers[part] = str(error)
            if isinstance(error, WorkerError):
                failure = error.failure
                answers[part] = f"rank {failure.rank}: {failure.kind}: {failure.message}"
        return answers[part]

    if _has_trained(one := run("one")):
        run("one_resumed")
        calls_differ = any(finding["check"] == "calls" and finding["ok"] is False for finding in one["findings"])
        if not calls_differ and _has_trained(run("two")):
            run("two_resumed")
    return answers


def _has_trained(answer: Answer) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(answer, Mapping) and answer["weights"] is not None


def _records(path: Path) -> dict[int, Mapping[str, float]]:
    """Return the records of the training steps, by step."""
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {line["step"]: line for line in lines if "train/loss" in line}


def _notes(experiment: Experiment) -> list[Finding]:
    """Return a finding for each setting that the check replaces."""
    name = launcher_name(type(experiment.launcher))
    notes = []
    if name != launcher_name(Spawn):
        notes.append(Finding("launcher", None, f"launcher={name} is not used: two workers of this machine at most"))
    if experiment.trainer.compiles:
        notes.append(Finding("compile", None, "not checked: nothing is compiled here"))
    return notes

"""The command `ddpexp check`: two steps of an experiment in a temporary folder, and what they show of its recipe."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from ddpexp.check.job import Check, Finding, Part, temporary_folder
from ddpexp.check.verdict import judge
from ddpexp.cli.start import check_runs_once, compose_experiment
from ddpexp.cli.verb import Call
from ddpexp.config.folders import conf_folder
from ddpexp.config.parse import load
from ddpexp.config.plugins import launcher_name
from ddpexp.config.sampling import training_plan
from ddpexp.config.schema import Experiment
from ddpexp.errors import EXIT_DONE, EXIT_FAILED, RefusedError, WorkerError
from ddpexp.launch import Job
from ddpexp.launch.launchers.local import Spawn
from ddpexp.launch.rendezvous.environment import LaunchEnvironment
from ddpexp.launch.rendezvous.layout import check_workers, resolve
from ddpexp.launch.supervise import coordinator
from ddpexp.launch.workers.client import Server
from ddpexp.run import outcome
from ddpexp.run.worker_request import worker_request
from ddpexp.system.terminal import show
from ddpexp.system.text import one_line
from ddpexp.system.yaml_text import load_yaml

_STEP_SECONDS = 120  # after which workers that wait for one another are a finding


@dataclass(frozen=True)
class _Here(Spawn):
    """Start the workers from a server that serves several jobs."""

    def launch(self, job: Job, server: Server | None = None) -> int:
        """Run the job and return its exit code."""
        assert server is not None
        return coordinator.run(job, LaunchEnvironment(), None, server)


def check(call: Call) -> int:
    """Check the experiment of a command line, print the findings, and return the exit code.

    Raises:
        RefusedError: a run would be refused.
    """
    check_runs_once("check the recipe")
    began = time.monotonic()
    experiment, composed = compose_experiment(call.operands)
    server = call.server if call.server is not None and call.server.start_method == "forkserver" else Server()
    outcome.stop_on_signals()
    try:
        with temporary_folder() as folder:
            text = shortened(composed.text, experiment, str(folder))
            findings = _examine(load(text), text, folder, server)
    finally:
        server.close()
    findings = [*_notes(experiment), *findings]
    if call.as_json:
        show("\n".join(json.dumps(asdict(finding)) for finding in findings))
    else:
        show(_as_text(findings, time.monotonic() - began))
    return EXIT_FAILED if any(finding.ok is False for finding in findings) else EXIT_DONE


def shortened(text: str, experiment: Experiment, folder: str) -> str:
    """Return the configuration of a short run, as YAML.

    The micro-batch is that of the run, unless one worker has all of it: then it is split for two.
    """
    tree: dict[str, Any] = load_yaml(text)
    trainer = experiment.trainer
    micro = training_plan(experiment, _num_workers(experiment)).micro_batch_size
    if micro == trainer.global_batch_size and micro > 1:
        micro //= 2
    with (conf_folder() / "launcher" / "spawn.yaml").open() as file:
        tree["launcher"] = load_yaml(file.read())
    tree["logger"] = {}
    tree["callbacks"] = {
        name: node
        for name, node in (tree.get("callbacks") or {}).items()
        if name in experiment.callbacks and experiment.callbacks[name].target != "histograms"  # which need a logger
    }
    tree["run"] |= {"dir": folder, "resume": "auto"}
    tree["data"] |= {"num_workers": 0} if "num_workers" in tree["data"] else {}
    tree["trainer"] |= {
        "nodes": 1,
        "gpus": 1,
        "backend": "auto",
        "threads": 1 if trainer.threads == "auto" else trainer.threads,
        "epochs": None,
        "max_steps": 2,
        "max_seconds": None,
        "global_batch_size": 2 * micro,
        "micro_batch_size": micro,
        "swa_start": None if trainer.swa_start is None else 0,
        "swa_every": "epoch" if trainer.swa_start is None else 1,
        "average_batch_norm": None if trainer.average_batch_norm is None else 1,
        "compile": False,
        "compile_blocks": None,
        "log_every": 1,
        "eval_every": 2 if trainer.eval_every or trainer.eval_at_start else 0,
        "eval_at_start": False,
        "limit_eval_batches": 2,
        "checkpoint_every": 1,
        "checkpoint_every_seconds": None,
        "keep_last": None,
        "keep_every": None,
        "on_save_error": "stop",
        "timeout": {
            **tree["trainer"]["timeout"],
            "step_seconds": min(trainer.timeout.step_seconds, _STEP_SECONDS),
        },
    }
    return yaml.safe_dump(tree, sort_keys=False)


def _num_workers(experiment: Experiment) -> int:
    """Return how many workers the run would have, as far as that can be seen on this machine.

    Raises:
        RefusedError: numbers of workers or machines that no run can have.
    """
    trainer = experiment.trainer
    nodes, _ = worker_request(experiment).node_range
    if trainer.gpus == "auto":
        gpus = resolve("auto", trainer.device, trainer.backend, 1).world_size
    else:
        gpus = trainer.gpus
        check_workers(gpus)
    size: int = experiment.strategy.data_rank(0, nodes * gpus).size
    return size


def _examine(experiment: Experiment, text: str, folder: Path, server: Server) -> list[Finding]:
    """Run the parts and judge them.

    Raises:
        RefusedError, WorkerError: the experiment cannot be built.
    """
    here = _Here(start_method="forkserver")
    parts: dict[str, Mapping[str, Any] | str | None] = {}

    def run(part: Part) -> Mapping[str, Any] | str | None:
        """Return the answer of a part, or why there is none."""
        job = Check(experiment, text, folder, part)
        output = io.StringIO()
        try:
            with redirect_stdout(output), redirect_stderr(output):
                outcome.launch(here, job, server)
        except WorkerError as error:
            if part == "one":
                raise
            failure = error.failure
            return f"rank {failure.rank}: {failure.kind}: {failure.message}"
        except RefusedError as error:
            if part == "one":
                raise
            return str(error)
        return job.answer()

    parts["one"] = one = run("one")
    assert isinstance(one, Mapping)
    if one["weights"] is not None:
        parts["resumed"] = run("resumed")
        if not any(finding["check"] == "calls" and finding["ok"] is False for finding in one["findings"]):
            parts["two"] = two = run("two")
            if isinstance(two, Mapping) and two["weights"] is not None:
                parts["two_resumed"] = run("two_resumed")
    records = {part: _records(folder / part / "metrics.jsonl") for part in ("one", "resumed", "two", "two_resumed")}
    return judge(parts, records, experiment)


def _records(path: Path) -> dict[int, Mapping[str, float]]:
    """Return the records of the training steps, by step."""
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {line["step"]: line for line in lines if "train/loss" in line}


def _notes(experiment: Experiment) -> list[Finding]:
    """Return what is checked otherwise than it would run."""
    name = launcher_name(type(experiment.launcher))
    notes = []
    if name != launcher_name(Spawn):
        notes.append(Finding("launcher", None, f"launcher={name} is not used: two workers of this machine at most"))
    if experiment.trainer.compile:
        notes.append(Finding("compile", None, "not checked: the model is not compiled here"))
    return notes


def _as_text(findings: Sequence[Finding], seconds: float) -> str:
    words = {True: "ok", False: "problem", None: "-"}
    lines = [f"{words[finding.ok]:<8}{finding.check:<11}{one_line(finding.text)}" for finding in findings]
    count = sum(finding.ok is False for finding in findings)
    verdict = "no problem found" if not count else f"{count} problem{'s' if count > 1 else ''} found"
    return "\n".join([*lines, f"{verdict} in {seconds:.1f} s"])

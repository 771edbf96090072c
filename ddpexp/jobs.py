"""What a command asks a launcher to run: a training, or the evaluation of weights."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from ddpexp import rundir
from ddpexp.config import Experiment, check_layout
from ddpexp.data.batch_plan import plan_batches
from ddpexp.errors import Failure, RefusedError
from ddpexp.launch import Asked, Crew, Job, Layout
from ddpexp.prepare import prepare
from ddpexp.rundir import RunDir

_PROBE_SECONDS = 10.0  # a network file system may show another host's file late


class Training(Job):
    """Train an experiment in a run directory, which the leading command makes."""

    entry = "ddpexp.worker:main"

    def __init__(
        self, experiment: Experiment, text: str, overrides: Sequence[str], argv: Sequence[str], run: RunDir | None = None
    ) -> None:
        """Take the experiment, its YAML, what was typed, and the run directory where a command before this one has made it."""
        self.experiment, self.asked = experiment, asked(experiment)
        self.name = experiment.recipe.name
        self.identity = _identity(text)
        self.run = run
        self.folder = run.path if run else rundir.parent(experiment.run.dir, experiment.recipe.name)
        self._text, self._overrides, self._argv = text, overrides, argv
        self._layout: Layout | None = None
        self._began = False

    def check(self, layout: Layout) -> None:
        """Refuse a batch that does not split, options that the device does not have, weights that are not there."""
        check_layout(self.experiment, layout)
        source = self.experiment.run.init_from
        if source is not None and not Path(source).exists():
            raise RefusedError(f"run.init_from={source}: there is no such file.")

    def prepare(self) -> None:
        """Make the data ready where this command runs."""
        prepare(self.experiment.data, self.experiment.trust)

    def create(self, owners: Sequence[str] = ()) -> Path:
        """Make the run directory and write down what was asked; after a failure `owners` start again in the same one."""
        self.run, self._began = rundir.create(self.experiment.run.dir, self.experiment.recipe.name, owners), True
        if self.run.manifest.is_file():
            print(f"ddpexp: starting again in {rundir.relative(self.run.path)}", file=sys.stderr, flush=True)
        rundir.write(self.run.config, self._text)
        rundir.write(self.run.overrides, "".join(f"- {word}\n" for word in self._overrides) or "[]\n")
        return self.run.path

    def described(self) -> dict[str, Any]:
        """Return what `ddpexp member FILE` needs: the experiment and what was typed."""
        return {"config": self._text, "overrides": list(self._overrides), "command": list(self._argv)}

    def note(self, status: str, **facts: Any) -> None:
        """Write a result that says how far the job is."""
        assert self.run is not None
        rundir.write(self.run.result, rundir.dumps({"status": status, **facts}))

    def begin(self, layout: Layout, crew: Crew) -> None:
        """Prepare the data, make the run directory, write down what will run."""
        data = prepare(self.experiment.data, self.experiment.trust)
        if self.run is None:
            self.create(crew.owners)
        else:
            if self.vacant is not None:
                self.vacant()
            rundir.start_over(self.run)
        run, self._began = self.run, True
        assert run is not None
        rundir.write(run.manifest, rundir.dumps(rundir.describe(layout, data, self._argv, crew)))
        self._enter(run, data)

    def shared(self) -> dict[str, Any]:
        """Return where the run directory is, and what proves that a host sees the same one."""
        assert self.run is not None
        return {"run": str(self.run.path.resolve()), "manifest": _digest(self.run.manifest)}

    def enter(self, shared: Mapping[str, Any], layout: Layout) -> None:
        """See that this host has the run directory and the data.

        Raises:
            RefusedError: the directory is not the one that the leading command made, or the data cannot be made ready.
        """
        run = RunDir(Path(shared["run"]))
        deadline = time.monotonic() + _PROBE_SECONDS
        while _digest(run.manifest) != shared["manifest"]:
            if time.monotonic() > deadline:
                raise RefusedError(
                    f"run.dir={run.path}, made on the first host, is not seen on {rundir.host()}: put it where all hosts see it."
                )
            time.sleep(0.1)
        self._enter(run, prepare(self.experiment.data, self.experiment.trust))

    def fail(self, failure: Failure) -> None:
        """Write error.json and the result, unless the run is another's: finished, or without a result because it runs."""
        if self.run is None or (not self._began and self.run.status() in ("done", None)):
            return
        self.run.fail(failure)

    def interrupt(self, step: int | None = None, saved: bool = False) -> str:
        """Write the result."""
        if self.run is None or not (self._began or self.run.status() == "submitted"):
            return "nothing was started"
        self.run.interrupt()
        return f"what was recorded is in {rundir.relative(self.run.path)}"

    def _enter(self, run: RunDir, data: Mapping[str, Any] | None) -> None:
        self.run, self.logs = run, run.ranks
        self.arguments = [str(run.path.resolve()), json.dumps(data)]


class Evaluation(Job):
    """Evaluate weights; writes nothing."""

    entry = "ddpexp.worker:evaluate"

    def __init__(self, experiment: Experiment, text: str, weights: Path) -> None:
        """Take the experiment, its YAML and the weights."""
        self.experiment, self.asked = experiment, asked(experiment)
        self.identity = _identity(text)
        self._text, self._weights = text, weights

    def check(self, layout: Layout) -> None:
        """Refuse a batch that does not split, options that the device does not have."""
        check_layout(self.experiment, layout)

    def begin(self, layout: Layout, crew: Crew) -> None:
        """Prepare the data."""
        self.enter({}, layout)

    def enter(self, shared: Mapping[str, Any], layout: Layout) -> None:
        """Prepare the data.

        Raises:
            RefusedError: the weights are not seen on this host.
        """
        if not self._weights.exists():
            raise RefusedError(f"evaluate {self._weights}: there is no such file on {rundir.host()}.")
        trainer = self.experiment.trainer
        described = {
            "config": self._text,
            "layout": asdict(layout),
            "data": prepare(self.experiment.data, self.experiment.trust),
            "weights": str(self._weights.resolve()),
            "batch_size": plan_batches(trainer.global_batch_size, trainer.micro_batch_size, layout.world_size).micro_batch_size,
        }
        self.arguments = [json.dumps(described)]


def asked(experiment: Experiment) -> Asked:
    """Return what an experiment says of its workers."""
    trainer = experiment.trainer
    # Sums inside one worker depend on its threads, whose number would follow that of the workers.
    threads = 1 if trainer.threads == "auto" and trainer.reduction == "exact" else trainer.threads
    return Asked(
        trainer.nodes, trainer.gpus, trainer.device, trainer.backend, threads, trainer.timeout.init_seconds, trainer.grace_seconds
    )  # fmt: skip


def _identity(text: str) -> dict[str, Any]:
    """Return what all commands of a job must agree on: everything but the number of the machine."""
    values: dict[str, Any] = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    launcher = values.get("launcher")
    if isinstance(launcher, dict):
        launcher.pop("node_rank", None)
    return values


def _digest(path: Path) -> str | None:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None

"""The job that evaluates weights."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from ddpexp.config import fitted
from ddpexp.config.sampling import eval_batch_size
from ddpexp.config.validate import check_layouts
from ddpexp.errors import RefusedError
from ddpexp.launch import Job, Layout, Lifecycle, Participants, Work
from ddpexp.run import directory
from ddpexp.run.prepare import prepare_to_evaluate
from ddpexp.run.stored_config import job_identity, trained_data
from ddpexp.run.stored_run import StoredWeights
from ddpexp.run.worker_request import worker_request


@dataclass(eq=False)
class Evaluation(Lifecycle):
    """Evaluate weights; writes no files."""

    weights: StoredWeights
    split: Sequence[str] = ()  # names of evaluation sets; empty: all but `test`
    answers: bool = False  # rank zero hands the metrics to this command
    _answer: int | None = field(default=None, init=False)  # a file in memory

    @property
    def job(self) -> Job:
        """What its launcher runs."""
        run = self.weights.run
        request, check = worker_request(run.experiment), partial(check_layouts, run.experiment)
        return Job(self, request, identity=job_identity(run.text), check=check)

    def begin(self, layout: Layout, participants: Participants) -> Work:
        """Announce the weights, and prepare the data and a place for the answer of rank zero."""
        self.weights.announce()
        if self.answers:
            self._answer = os.memfd_create("ddpexp-evaluate")
        return self.enter({}, layout)

    def answer(self) -> dict[str, Any] | None:
        """Return what rank zero has computed: `weights`, `weights_sha256` and `metrics`; None in other commands."""
        if self._answer is None:
            return None
        answer: dict[str, Any] = json.loads(os.pread(self._answer, os.fstat(self._answer).st_size, 0))
        return answer

    def enter(self, shared: Mapping[str, Any], layout: Layout) -> Work:
        """Prepare the data.

        Raises:
            RefusedError: this host cannot see the weights.
        """
        path, run = self.weights.path, self.weights.run
        if not path.exists():
            raise RefusedError(f"There is no such file on {directory.host()}", place=f"evaluate {path}")
        experiment = run.experiment
        data_size = experiment.strategy.data_rank(0, layout.world_size).size
        evaluation = {
            "config": run.text,
            "layout": asdict(layout),
            "data": prepare_to_evaluate(
                experiment.data, experiment.trust, trained_data(run.manifest), run.home is not None
            ),
            "weights": str(path.resolve()),
            "split": self.split,
            "answer": f"/proc/{os.getpid()}/fd/{self._answer}" if self._answer is not None else None,
            "batch_size": eval_batch_size(fitted.resolved(experiment, run.manifest), data_size),
        }
        return Work("ddpexp.train.worker:evaluate", [json.dumps(evaluation)])

"""The job that evaluates weights."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from ddpexp.config.sampling import eval_batch_size
from ddpexp.config.validate import check_layouts
from ddpexp.errors import RefusedError
from ddpexp.launch import Job, Layout, Lifecycle, Participants, Work
from ddpexp.run import directory
from ddpexp.run.prepare import prepare_to_evaluate
from ddpexp.run.stored_config import job_identity, trained_data
from ddpexp.run.stored_run import StoredWeights
from ddpexp.run.worker_request import worker_request


class Evaluation(Lifecycle):
    """Evaluate weights; writes no files."""

    def __init__(self, weights: StoredWeights, split: Sequence[str] = (), answers: bool = False) -> None:
        """Take the weights.

        `split` names evaluation sets; empty: all but `test`. `answers`: rank zero hands the metrics to this command.
        """
        self.experiment = weights.run.experiment
        self.job = Job(
            self,
            worker_request(self.experiment),
            identity=job_identity(weights.run.text),
            check=partial(check_layouts, self.experiment),
        )
        self._weights = weights
        self._split = tuple(split)
        self._answers = answers
        self._answer: int | None = None  # a file in memory

    def begin(self, layout: Layout, participants: Participants) -> Work:
        """Prepare the data, and a place for the answer of rank zero."""
        if self._answers:
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
        path, run = self._weights.path, self._weights.run
        if not path.exists():
            raise RefusedError(f"There is no such file on {directory.host()}", place=f"evaluate {path}")
        data_size = self.experiment.strategy.data_rank(0, layout.world_size).size
        evaluation = {
            "config": run.text,
            "layout": asdict(layout),
            "data": prepare_to_evaluate(
                self.experiment.data, self.experiment.trust, trained_data(run.manifest), run.home is not None
            ),
            "weights": str(path.resolve()),
            "split": self._split,
            "answer": f"/proc/{os.getpid()}/fd/{self._answer}" if self._answer is not None else None,
            "batch_size": eval_batch_size(self.experiment, data_size),
        }
        return Work("ddpexp.train.worker:evaluate", [json.dumps(evaluation)])

"""The job of a trial: a short run in a temporary folder, of which the records and the memory are read."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ddpexp.check.job import make_run
from ddpexp.check.quiet_launch import run_quietly
from ddpexp.checkpoint import initial
from ddpexp.config.parse import load
from ddpexp.config.validate import check_layouts
from ddpexp.errors import Failure, WorkerError
from ddpexp.launch import Job, Layout, Lifecycle, Outcome, Participants, Work
from ddpexp.launch.workers.client import Server
from ddpexp.run import pretrained
from ddpexp.run.directory import RunDir
from ddpexp.run.stored_config import job_identity
from ddpexp.run.worker_request import worker_request

KEPT = ("trainer.compile", "trainer.compile_blocks", "trainer.compile_step")  # keys of the run that a trial has, too
_ANSWER = "answer.json"
_KINDS = ("OutOfMemoryError", "MemoryError")
# Of torch's allocator on CPUs, of CUDA's libraries, of C++, of the system, and of `ddpexp.system.oom`.
_NO_MEMORY = re.compile(
    r"(can't|cannot) allocate memory|not enough memory|bad_alloc|out of memory|_STATUS_ALLOC_FAILED", re.IGNORECASE
)


@dataclass(frozen=True)
class Observed:
    """What a trial has shown. Units: bytes."""

    peak_bytes: int  # of the fullest rank: what it took of its device's memory
    limit_bytes: int  # what a rank may take of it, the least of all ranks
    is_on_gpu: bool
    changes: str  # what another micro-batch changes in the numbers
    records: Sequence[Mapping[str, float]] = ()


class Trial(Lifecycle):
    """Train a short run; writes only into its folder."""

    def __init__(self, text: str, folder: Path, rising: tuple[float, float] | None = None) -> None:
        """Take the run's configuration as YAML, which has `folder` as the run directory.

        `rising`: the rates grow from the first to the second multiple of optimizer.lr, until the training diverges.
        """
        self._text, self._rising = text, rising
        self.experiment = load(text)
        self.run = RunDir(folder)
        self.job = Job(self, worker_request(self.experiment), identity=job_identity(text), check=self._check)

    def _check(self, layouts: Sequence[Layout]) -> None:
        check_layouts(self.experiment, layouts)

    def begin(self, layout: Layout, participants: Participants) -> Work:
        """Prepare the data and a run directory."""
        text, data = make_run(self.run, self.experiment, self._text)
        pretrained.fetch(self.experiment.model, text)
        found = initial.located(self.experiment.run, lambda warning: None)
        weights = initial.as_safetensors(self.experiment.run, found, self.run.path, [])
        request = {
            "config": text,
            "run": str(self.run.path),
            "layout": asdict(layout),
            "data": data,
            "init_from": weights.get("init_from"),
            "answer": str(self.run.path / _ANSWER),
            "rising": self._rising,
        }
        return Work("ddpexp.find.worker:main", [json.dumps(request)])

    def end(self, outcome: Outcome | None) -> str:
        """Return what is left: nothing."""
        return "the search is not finished, and its folder is removed"

    def observe(self, server: Server) -> Observed:
        """Run it.

        Raises:
            RefusedError, WorkerError: it has not come to its end.
        """
        run_quietly(self.job, server)
        answer = json.loads((self.run.path / _ANSWER).read_text())
        return Observed(**answer, records=self.records())

    def records(self) -> list[dict[str, float]]:
        """Return the records of its training steps so far."""
        path = self.run.metrics
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [line for line in lines if "train/samples_per_second" in line]


def workers_here(layout: Layout, workers: int) -> dict[str, Any]:
    """Return the keys of `trainer` with which so many workers of a layout run on this machine."""
    backend = "auto" if layout.backend == "mpi" else layout.backend  # which only mpirun connects
    return {"gpus": workers, "device": layout.device, "backend": backend, "threads": layout.threads}


def is_out_of_memory(error: WorkerError) -> bool:
    """Return whether a run has ended for lack of memory: of a GPU, of a limit, or killed by the system."""
    failure: Failure = error.failure
    return failure.kind in _KINDS or _NO_MEMORY.search(failure.message) is not None

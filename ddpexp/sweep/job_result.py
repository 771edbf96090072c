"""How a job of a sweep ended, as its exit code and its run directory record it."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from ddpexp.errors import EXIT_DONE, EXIT_REFUSED, RefusedError
from ddpexp.run import directory
from ddpexp.run.directory import RunDir
from ddpexp.sweep.files import RunFiles
from ddpexp.sweep.folder import SweepDir
from ddpexp.sweep.job import Planned
from ddpexp.sweep.record import Goal
from ddpexp.system import files
from ddpexp.system.process import how_ended
from ddpexp.system.secrets import masker


@dataclass(frozen=True)
class Ended:
    """How a job ended."""

    status: str  # done, failed, interrupted, stopped or submitted
    objective: float | None = None
    message: str = ""
    diverged: bool = False  # it failed because a loss or a gradient is not finite


@dataclass(frozen=True)
class ResultReader:
    """Reads how the jobs of a sweep ended."""

    folder: SweepDir
    goal: Goal  # of the sweep

    def result(self, job: Planned, code: int) -> Ended:
        """Return how a job ended whose command has exited with this code."""
        status = job.run.status() if directory.is_ours(job.run.path) else None
        if code == EXIT_DONE or (status == "done" and code != EXIT_REFUSED):  # a signal may come when all is done
            return Ended("done", self.objective(job))
        if status == "interrupted" and code != EXIT_REFUSED:
            return Ended("interrupted", self.objective(job), "it was stopped by a signal, and saved")
        return Ended("failed", self.objective(job), self._reason(job, code), code != EXIT_REFUSED and diverged(job.run))

    def objective(self, job: Planned) -> float | None:
        """Return the objective: the best value where the run keeps it, else the newest; NaN if it was not finite."""
        if self.goal.metric is None:
            return None
        found = RunFiles.of(job.run, self.goal.metric, masker())
        if found.best is not None and self.goal.keeps(job.experiment.trainer.keep_best):
            return found.best.value
        return found.metrics.get(self.goal.metric)

    def _reason(self, job: Planned, code: int) -> str:
        """Return in one line why a job failed."""
        if code < 0:
            return f"its command {how_ended(code)}"
        if code != EXIT_REFUSED or job.submits:  # a start that is refused leaves what an earlier one has written
            with suppress(RefusedError, KeyError):
                error = job.run.read(job.run.error)
                rank = f"rank {error['rank']}: " if code != EXIT_REFUSED else ""
                return " ".join(f"{rank}{error['kind']}: {error['message']}".split())
        if job.submits:  # its log is in its run directory
            return f"exit code {code}"
        log = self.folder.log(job.number)
        try:
            lines = log.read_text(errors="replace").splitlines()
        except OSError as error:  # what keeps it from being written ends the job
            return f"exit code {code}, and its log {files.relative(log)} cannot be read: {error.strerror}"
        return next((line.removeprefix("ddpexp: ") for line in reversed(lines) if line), f"exit code {code}")


def diverged(run: RunDir) -> bool:
    """Return whether a run has failed because a loss or a gradient is not finite."""
    with suppress(RefusedError):
        return run.status() == "failed" and run.read(run.error).get("kind") == "NonFiniteError"
    return False

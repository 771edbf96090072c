"""Run the jobs of a sweep: on this machine, or through a job scheduler; finished jobs are left as they are."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ddpexp.config.keys import override_key
from ddpexp.config.sweeps import Swept
from ddpexp.errors import DdpexpError, FinishedError, RefusedError, StoppedError
from ddpexp.launch.workers.client import Server
from ddpexp.run import directory, resume
from ddpexp.sweep.folder import restated_overrides
from ddpexp.sweep.hydra_sweeper import is_grid
from ddpexp.sweep.job import Planned
from ddpexp.sweep.job_planner import JobPlanner
from ddpexp.sweep.job_result import Ended, ResultReader, diverged
from ddpexp.sweep.job_status import FINAL
from ddpexp.sweep.local_jobs import LocalJobs, WarmServer
from ddpexp.sweep.record import SweepRecord
from ddpexp.sweep.slots import Slots
from ddpexp.sweep.submission import Submissions, submitter_of
from ddpexp.sweep.sweep_log import SweepLog
from ddpexp.system import files
from ddpexp.system.terminal import print_message
from ddpexp.system.text import counted


class SweepFailed(DdpexpError):
    """Jobs of a sweep failed: the text lists them."""


class SweepRunner:
    """Runs the jobs of a sweep in its directory, batch by batch."""

    def __init__(self, swept: Swept, log: SweepLog, server: Server | None) -> None:
        """Take the sweep, the log in its directory (which this command has locked), and a warm server, if any."""
        self.log = log
        self._settings = log.settings
        self._folder = log.folder
        self._swept, self._grid = swept, is_grid(swept)
        self._options = ["--config-dir", swept.config_dir] if swept.config_dir else []
        self._slots = Slots(log.settings.slots)
        self._earlier = SweepRecord.of(log.folder.events()).jobs
        self._planner = JobPlanner(swept, log.folder, self._slots, self._earlier)
        self._server = WarmServer(server)
        self._results = ResultReader(log.folder, log.goal)
        self._submissions = Submissions(log, self._results, self._options)
        self._local = LocalJobs(log, self._slots, self._results, self._server, self._options)

    def run(self, batch: Sequence[Sequence[str]]) -> list[Ended]:
        """Run the jobs with these overrides, as many at a time as there are slots; return how each ended.

        Raises:
            RefusedError: one of them cannot run; none has been started. StoppedError: a signal ended the sweep.
        """
        jobs = list({job.number: job for job in map(self._planner.plan, batch)}.values())
        if not jobs:
            swept = " ".join(
                override for override in self._swept.overrides if override_key(override) in self._planner.keys
            )
            raise RefusedError(f"the sweep has no jobs: one of {swept} gives no value.")
        self._check_kept(jobs)
        submitter = submitter_of(jobs, self._settings, self._grid)
        if submitter is not None and submitter.dry_run:
            self._submissions.show(submitter, [job for job in jobs if job.submits])
            return [Ended("submitted") for _ in batch]
        waiting = self._unfinished(jobs)
        to_submit = [job for job in waiting if job.submits]
        to_run = deque(job for job in waiting if not job.submits)
        self._prepare(to_run)  # before anything is written, so that missing data leaves no trace
        self._begin(jobs)
        if submitter is not None and to_submit:
            try:
                self._submissions.submit(submitter, to_submit)
            except RefusedError:
                self.log.refuse()
                raise
        self._local.run(to_run)
        if submitter is not None and submitter.wait and self._local.stopped_by is None:
            self._submissions.follow(submitter, jobs)
        if self._local.stopped_by is not None:
            raise StoppedError(self._local.stopped_by)
        if not self._grid and (lost := self.log.lost_objective()) is not None:
            raise SweepFailed(lost)
        return [self.log.ended.get(self._planner.plan(overrides).number, Ended("waiting")) for overrides in batch]

    def _check_kept(self, jobs: Sequence[Planned]) -> None:
        """Check that all jobs are compared by their best values, or all by their last ones.

        Raises:
            RefusedError: trainer.keep_best keeps the objective of some of them only, or in the other direction.
        """
        goal = self.log.goal
        every = {job.number: job for job in (*self.log.planned.values(), *jobs)}.values()
        names: dict[bool, str] = {}
        for job in every:
            names.setdefault(goal.of_run(job.experiment.trainer.keep_best).by_best, job.name)
        if len(names) > 1:
            kept = f"{goal.mode}:{goal.metric}"
            raise RefusedError(
                f"is not set for all jobs: {names[True]} would be compared by its best {goal.metric}, and "
                f"{names[False]} by its last",
                key="trainer.keep_best",
                value=kept,
                suggestion=f"Set trainer.keep_best={kept} for all of them, or for none.",
            )

    def left_out(self) -> list[str]:
        """Return the names of jobs of earlier starts that are not finished, and that this start does not include."""
        return [
            name
            for number, name in self._planner.names.items()
            if number not in self.log.planned and self._earlier[number].status not in FINAL
        ]

    def resume_arguments(self) -> list[str]:
        """Return the arguments with which to resume this sweep."""
        return ["resume", files.shortest(self._folder.path), *self._options, *restated_overrides(self._swept.overrides)]

    def close(self) -> None:
        """Close the log, and the server if this object has created it."""
        self.log.close()
        self._server.close()

    def _unfinished(self, jobs: Sequence[Planned]) -> list[Planned]:
        """Return the jobs that are to be run, and note how the others ended."""
        undecided = {job.number for job in jobs} - self.log.ended.keys()
        queued = self._submissions.find_queued(job for job in self._earlier.values() if job.number in undecided)
        waiting = []
        for job in jobs:
            ended = self.log.ended.get(job.number) or queued.get(job.number) or self._ended_earlier(job)
            if ended is None:
                waiting.append(job)
            else:
                self.log.ended[job.number] = ended
        return waiting

    def _ended_earlier(self, job: Planned) -> Ended | None:
        """Return how a job ended in an earlier start, if that is final."""
        before = self._earlier.get(job.number)
        if before is not None and before.status == "stopped" and self._settings.early_stop is not None:
            return Ended("stopped", self._results.objective(job), before.message or "")
        if not directory.is_ours(job.run.path):
            return None
        new_start = resume.Start(job.name, job.text, job.arguments)
        try:
            resume.inspect(job.run, new_start)
        except FinishedError:
            return Ended("done", self._results.objective(job))
        except RefusedError as error:
            if job.run.status() != "done":
                return None  # its own command reports that
            changes = resume.changes_of(job.run, new_start)
            drift = ", ".join(str(change) for change in changes if change.kind != "free")
            print_message(
                f"ddpexp: warning: {job.name} is finished, and its configuration would be another now ({drift}): it "
                "stays as it is."
                if drift
                else f"ddpexp: warning: {error}"  # it has lost files
            )
            return Ended("done", self._results.objective(job))
        if diverged(job.run) and not resume.changes_of(job.run, new_start):
            before = self._earlier.get(job.number)
            message = (before.message if before is not None else None) or "it has diverged"
            return Ended("failed", self._results.objective(job), message, diverged=True)
        return None

    def _prepare(self, jobs: Sequence[Planned]) -> None:
        """Prepare the data once, not in each job: all would start together, and report the same errors."""
        prepared = []
        for job in jobs:
            if job.workers is not None and job.experiment.data not in prepared:
                prepared.append(job.experiment.data)
                job.training(self._options).prepare()

    def _begin(self, jobs: Sequence[Planned]) -> None:
        """Record the sweep and the jobs of a batch."""
        what = f"of {counted(len(jobs), 'job')}" if self._grid else f"by {self._swept.sweeper_choice}"
        where = "" if all(job.submits for job in jobs) else f" on {self._slots}"
        title = f"sweep {what}{where} in {files.relative(self._folder.path)}"
        slots = {"slots": self._slots.count, "kind": "gpu" if self._slots.gpus else "cpu"}
        self.log.begin(self._swept.overrides, self._options, title, **slots)
        self.log.add_jobs(jobs)

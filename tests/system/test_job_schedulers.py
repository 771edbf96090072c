"""The job schedulers: this process's job, the jobs that records name, and a scheduler beside Slurm."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from ddpexp.run import lock, resume
from ddpexp.run.lock import Owner
from ddpexp.system import job_schedulers
from ddpexp.system.job_schedulers import ScheduledJob, current_job, recorded_job, restart_count, states
from ddpexp.system.job_schedulers.base import UNKNOWN, JobScheduler, JobState
from ddpexp.system.job_schedulers.slurm import SLURM
from tests.refusals import refused


@dataclass(frozen=True)
class Queue:
    """A second scheduler: the job `here` is this process's, jobs in `running` are not over."""

    name: str = "queue"
    label: str = "Queue"
    here: str | None = None
    running: tuple[str, ...] = ()

    def job_id(self) -> str | None:
        return self.here

    def unique_job_id(self) -> str | None:
        return self.here

    def restart_count(self) -> int | None:
        return None if self.here is None else 2

    def is_job_id(self, text: object) -> bool:
        return isinstance(text, str) and text.startswith("job-")

    def is_over(self, job_id: str) -> bool | None:
        return job_id not in self.running

    def states(self, job_ids: Iterable[str]) -> dict[str, JobState]:
        return {
            job_id: JobState("OVER" if self.is_over(job_id) else "HERE", self.is_over(job_id)) for job_id in job_ids
        }

    def submit(self, script: Path) -> str:
        raise NotImplementedError

    def cancel_command(self, job_ids: Sequence[str]) -> str:
        return f"unqueue {' '.join(job_ids)}"


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    scheduler: JobScheduler = (queue := Queue(here="job-1", running=("job-1", "job-2")))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setattr(job_schedulers, "SCHEDULERS", (SLURM, scheduler))
    return queue


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"job_id": 7},
        {"job_id": None},
        {"job_id": "12", "job_scheduler": "of a later version"},
        {"job_scheduler": "slurm"},
    ],
)
def test_a_record_without_a_job_names_none(record: dict[str, object]) -> None:
    assert recorded_job(record) is None


def test_a_record_of_an_earlier_version_is_slurms_and_stays_the_same() -> None:
    record = {"job_id": "12_0"}
    job = recorded_job(record)
    assert job == ScheduledJob(SLURM, "12_0")
    assert (str(job), job.as_record(), job.cancel_command()) == ("Slurm job 12_0", record, "scancel 12_0")


def test_a_lock_of_an_earlier_version_is_read_and_written_the_same(tmp_path: Path) -> None:
    record = {"host": "a", "boot_id": "b", "pid": 7, "started": "8", "slurm_job": "12", "since": "now"}
    (tmp_path / lock.NAME).write_text(json.dumps(record))
    owner = lock.read(tmp_path / lock.NAME)
    assert owner is not None
    assert (owner.job, list(owner.as_record().items())) == (ScheduledJob(SLURM, "12"), list(record.items()))
    assert str(owner) == "process 7 on a (Slurm job 12)"
    (tmp_path / lock.NAME).write_text(json.dumps({**record, "slurm_job": "--help"}))
    assert lock.read(tmp_path / lock.NAME) is None


def test_an_id_from_a_record_that_is_none_is_not_passed_to_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("squeue", "scontrol"):
        (tmp_path / name).write_text(f"#!/bin/sh\ntouch {tmp_path}/called\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    job = ScheduledJob(SLURM, "--help")
    assert (job.is_over(), states([job])[job].name) == (None, UNKNOWN)
    assert not (tmp_path / "called").exists()


def test_outside_of_all_schedulers_there_is_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    assert (current_job(), restart_count()) == (None, None)


def test_another_scheduler_needs_no_more_than_its_class(queue: Queue, tmp_path: Path) -> None:
    job = current_job()
    assert job == ScheduledJob(queue, "job-1")
    assert (job.is_current(), restart_count(), recorded_job(job.as_record())) == (True, 2, job)
    slurms = ScheduledJob(SLURM, "none")
    assert {job.id: state.name for job, state in states([job, slurms]).items()} == {"job-1": "HERE", "none": UNKNOWN}
    (tmp_path / lock.NAME).write_text(json.dumps(replace(Owner.here(), host="elsewhere").as_record()))
    owner = lock.read(tmp_path / lock.NAME)
    assert owner is not None
    assert (owner.job, owner.is_alive(), str(owner).endswith("elsewhere (Queue job job-1)")) == (job, True, True)
    resume._check_not_queued("x", job.as_record())  # this process is the job
    with refused("x: submitted"):
        resume._check_not_queued("x", ScheduledJob(queue, "job-2").as_record())

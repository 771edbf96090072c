"""The job of `ddpexp doctor`: every command gathers the facts of its host, and its workers measure the links."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ddpexp.config.schema import Experiment
from ddpexp.doctor import storage
from ddpexp.doctor.checks import probes
from ddpexp.doctor.gather import Facts, Gathering
from ddpexp.doctor.request import Request
from ddpexp.doctor.setting import Setting
from ddpexp.errors import RefusedError
from ddpexp.launch import Job, Layout, Lifecycle, Outcome, Participants, Work
from ddpexp.run.stored_config import job_identity
from ddpexp.run.worker_request import worker_request
from ddpexp.settings.trainer import Timeout

GATHER_SECONDS = 15.0  # for all probes, which run beside each other
_START_SECONDS = 45.0  # to start and to join: CUDA and NCCL take some 10 s on a machine with eight GPUs
_MEET_SECONDS = 120.0  # where a person starts the command on each machine
_MEASURE_SECONDS = 30.0
_FOLDER_SECONDS = 5.0  # for a file system to answer at all
_LOOK_SECONDS, _POLL_SECONDS = 3.0, 0.1  # for a file of another host
# Which task of a host this is, by the program that started it.
_LOCAL_RANKS = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")


class NoAnswerError(RefusedError):
    """The file system of run directories gives no answer, so that a run would hang."""


class Diagnosis(Lifecycle):
    """Gather the facts of every host and measure the links between the workers; writes no files of its own."""

    def __init__(self, experiment: Experiment, text: str, environ: Mapping[str, str] = os.environ) -> None:
        """Take the experiment that would run, and its YAML."""
        request = worker_request(experiment)
        self.request = replace(request, timeout=_bounded(request.timeout, request.nodes not in ("auto", 1)))
        self._identity = job_identity(text)
        self.setting = Setting.of(experiment, request)
        self._nearest = Gathering.start({"folder": partial(_nearest, self.setting.folder)})
        self.layout: Layout | None = None
        self.entered = False  # the job of another command, which reports
        self.hosts: Sequence[str] = ()
        self._code = experiment.run.code
        self._gathering: Gathering | None = None
        self._descriptors: list[int] = []
        self._probe: Path | None = None  # a file of the leading command, which the other hosts look for
        self._environ = environ

    @property
    def folder_hangs(self) -> bool:
        """Return whether the file system of run directories gives no answer, so that nothing can be started."""
        return "hung" in self._nearest.facts(_FOLDER_SECONDS)["folder"]

    @property
    def job(self) -> Job:
        """What its launcher runs."""
        return Job(self, self.request, identity=self._identity, folder=self._folder())

    def _folder(self) -> Path:
        """Return the nearest folder above the run directory that exists, where commands of several hosts meet."""
        return Path(self._nearest.facts(_FOLDER_SECONDS)["folder"].get("path", self.setting.folder))

    def facts(self) -> dict[str, Facts]:
        """Return the facts of this host, which are gathered from the first call on."""
        if self._gathering is None:
            self._gathering = Gathering.start(probes(self.setting, self._code))
        return self._gathering.facts(GATHER_SECONDS)

    def wait(self) -> None:
        """Wait for the probes, so that none leaves a file behind when the process ends."""
        if self._gathering is not None:
            self._gathering.facts(GATHER_SECONDS)

    def gather(self, ranks_started_externally: bool) -> None:
        """Start to gather the facts, unless another command of this host does."""
        if ranks_started_externally and any(self._environ.get(name, "0") != "0" for name in _LOCAL_RANKS):
            return
        self._gathering = Gathering.start(probes(self.setting, self._code))

    def begin(self, layout: Layout, participants: Participants) -> Work:
        """Make room for the answers of rank zero."""
        self.layout, self.hosts = layout, participants.hosts
        self._descriptors.append(os.memfd_create("ddpexp-doctor"))
        if layout.nodes > 1:
            with suppress(OSError):  # the file system has a line of its own
                descriptor, path = tempfile.mkstemp(prefix=".ddpexp-doctor-", dir=self._folder())
                os.close(descriptor)
                self._probe = Path(path)
        work = self._work(layout, answer=f"/proc/{os.getpid()}/fd/{self._descriptors[0]}")
        return replace(work, shared={"probe": str(self._probe) if self._probe is not None else None})

    def enter(self, shared: Mapping[str, Any], layout: Layout) -> Work:
        """Look for the leading command's file, and hand the facts of this host to its worker for rank zero."""
        self.layout, self.entered, path = layout, True, ""
        if self._gathering is not None:
            descriptor = os.memfd_create("ddpexp-doctor")
            self._descriptors.append(descriptor)
            facts = {**self.facts(), "shared_folder": _look_for(shared["probe"])}
            os.write(descriptor, json.dumps(facts).encode())
            path = f"/proc/{os.getpid()}/fd/{descriptor}"
        return self._work(layout, facts=path)

    def _work(self, layout: Layout, facts: str = "", answer: str = "") -> Work:
        timeout = self.request.timeout
        seconds = 2 * (timeout.init_seconds + timeout.step_seconds)  # the supervisor reports first which rank is late
        return Work("ddpexp.doctor.worker:measure", [str(Request(layout, facts, answer, seconds))])

    def answers(self, kind: str) -> list[dict[str, Any]]:
        """Return the answers of rank zero of one kind, as far as it came."""
        if not self._descriptors:
            return []
        text = os.pread(self._descriptors[0], os.fstat(self._descriptors[0]).st_size, 0).decode()
        parsed = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return [answer for answer in parsed if answer["kind"] == kind]

    def end(self, outcome: Outcome | None) -> str:
        """Remove the file. The answers stay: they are read after the job has ended."""
        if self._probe is not None:
            self._probe.unlink(missing_ok=True)
        return super().end(outcome)


def _nearest(folder: str) -> Facts:
    return {"path": str(storage.nearest_folder(folder))}


def _look_for(path: str | None) -> Facts:
    """Return whether a file of another host is visible here; None: there is none to look for."""
    if path is None:
        return {"visible": None, "folder": None}
    deadline = time.monotonic() + _LOOK_SECONDS
    while not (visible := os.path.exists(path)) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        with suppress(OSError):
            os.listdir(os.path.dirname(path))  # makes a network file system refresh its cache
    return {"visible": visible, "folder": os.path.dirname(path)}


def _bounded(timeout: Timeout, by_people: bool) -> Timeout:
    """Return shorter timeouts: what hangs is reported soon."""
    init_seconds = min(timeout.init_seconds, _MEET_SECONDS if by_people else _START_SECONDS)
    return replace(timeout, init_seconds=init_seconds, step_seconds=min(timeout.step_seconds, _MEASURE_SECONDS))

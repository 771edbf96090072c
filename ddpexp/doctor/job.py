"""The job of `ddpexp doctor`: every command gathers the facts of its host, and its workers measure the links."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddpexp.config.schema import Experiment
from ddpexp.doctor.checks import probes
from ddpexp.doctor.gather import Facts, Gathering
from ddpexp.doctor.request import Request
from ddpexp.doctor.setting import Setting
from ddpexp.errors import RefusedError
from ddpexp.launch import Job, Layout, Participants, Timeout
from ddpexp.run.stored_config import job_identity
from ddpexp.run.worker_request import worker_request

GATHER_SECONDS = 10.0  # for all probes, which run beside each other
_START_SECONDS = 45.0  # to start and to join: CUDA and NCCL take some 10 s on a machine with eight GPUs
_MEET_SECONDS = 120.0  # where a person starts the command on each machine
_MEASURE_SECONDS = 30.0
# Which task of a host this is, by the program that started it.
_LOCAL_RANKS = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")


class ElsewhereError(RefusedError):
    """The launcher would start further commands, and this job is for those that are there."""


class Diagnosis(Job):
    """Gather the facts of every host and measure the links between the workers; writes no files of its own."""

    name = "ddpexp-doctor"
    entry = "ddpexp.doctor.worker:measure"

    def __init__(self, experiment: Experiment, text: str, environ: Mapping[str, str] = os.environ) -> None:
        """Take the experiment that would run, and its YAML."""
        request = worker_request(experiment)
        self.request = replace(request, timeout=_bounded(request.timeout, request.nodes not in ("auto", 1)))
        self.identity = job_identity(text)
        self.setting = Setting.of(experiment, request)
        places = (Path(self.setting.folder), *Path(self.setting.folder).parents)
        self.folder = next(place for place in places if place.is_dir())
        self.layout: Layout | None = None
        self.hosts: Sequence[str] = ()
        self._code = experiment.run.code
        self._gathering: Gathering | None = None
        self._descriptors: list[int] = []
        self._environ = environ

    def facts(self) -> dict[str, Facts]:
        """Return the facts of this host, which are gathered from the first call on."""
        if self._gathering is None:
            self._gathering = Gathering.start(probes(self.setting, self._code))
        return self._gathering.facts(GATHER_SECONDS)

    def gather(self, ranks_started_externally: bool) -> None:
        """Start to gather the facts, unless another command of this host does."""
        if ranks_started_externally and any(self._environ.get(name, "0") != "0" for name in _LOCAL_RANKS):
            return
        self._gathering = Gathering.start(probes(self.setting, self._code))

    def begin(self, layout: Layout, participants: Participants) -> None:
        """Make room for the answers of rank zero."""
        self.layout, self.hosts = layout, participants.hosts
        self._descriptors.append(os.memfd_create("ddpexp-doctor"))
        self._request("", f"/proc/{os.getpid()}/fd/{self._descriptors[0]}")

    def enter(self, shared: Mapping[str, Any], layout: Layout) -> None:
        """Hand the facts of this host to its worker, which sends them to rank zero."""
        self.layout, path = layout, ""
        if self._gathering is not None:
            descriptor = os.memfd_create("ddpexp-doctor")
            self._descriptors.append(descriptor)
            os.write(descriptor, json.dumps(self.facts()).encode())
            path = f"/proc/{os.getpid()}/fd/{descriptor}"
        self._request(path, "")

    def _request(self, facts: str, answer: str) -> None:
        assert self.layout is not None
        timeout = self.request.timeout
        seconds = 2 * (timeout.init_seconds + timeout.step_seconds)  # the supervisor reports first which rank is late
        self.arguments = [str(Request(self.layout, facts, answer, seconds))]

    def answers(self, kind: str) -> list[dict[str, Any]]:
        """Return the answers of rank zero of one kind, as far as it came."""
        if not self._descriptors:
            return []
        text = os.pread(self._descriptors[0], os.fstat(self._descriptors[0]).st_size, 0).decode()
        parsed = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return [answer for answer in parsed if answer["kind"] == kind]

    def create(self) -> Path:
        """Refuse: nothing is submitted, and no further command is started."""
        raise ElsewhereError(self._elsewhere())

    def described(self) -> dict[str, Any]:
        """Refuse, like `create`."""
        raise ElsewhereError(self._elsewhere())

    def _elsewhere(self) -> str:
        return f"launcher={self.setting.launcher} would start further commands here, on machines that are not looked at"

    def close(self) -> None:
        """Keep the answers: they are read after the job has ended, and go with the process."""


def _bounded(timeout: Timeout, by_people: bool) -> Timeout:
    """Return shorter timeouts: what hangs is reported soon."""
    init_seconds = min(timeout.init_seconds, _MEET_SECONDS if by_people else _START_SECONDS)
    return replace(timeout, init_seconds=init_seconds, step_seconds=min(timeout.step_seconds, _MEASURE_SECONDS))

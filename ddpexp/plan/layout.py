"""The workers a run would have, on machines that need not exist."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ddpexp.errors import RefusedError
from ddpexp.launch import Job, Layout
from ddpexp.launch.launchers.base import Launcher, ResourceRequest
from ddpexp.launch.rendezvous.layout import resolve
from ddpexp.system.hardware import count_gpus, usable_cores


@dataclass(frozen=True)
class Assumed:
    """The workers, and what is assumed about their machines."""

    layout: Layout
    cores: int  # of a machine, that its workers share
    request: ResourceRequest | None = None  # to the job scheduler
    notes: tuple[str, ...] = ()

    @property
    def workers(self) -> int:
        """Return the workers of one machine."""
        return self.layout.world_size // self.layout.nodes


def assume(job: Job, launcher: Launcher, cores: int | None = None) -> Assumed:
    """Return the layout for the overrides; what they leave open is taken from this machine.

    A missing device is noted, not refused.

    `cores` are those of a machine; None takes as many as this one has.

    Raises:
        RefusedError: what a run would refuse on whatever machine.
    """
    wanted = launcher.adapt(job.request)
    first, last = wanted.node_range
    sizes = range(first, last + 1)
    gpus = wanted.gpus
    device = wanted.device
    threads = wanted.threads
    notes: list[str] = []
    request = launcher.resource_request(job, sizes[-1])
    if request is not None:
        if request.layout is not None:
            gpus, device = request.layout.world_size // request.layout.nodes, request.layout.device
        cores = cores if request.cores is None else request.cores
    else:
        try:
            resolve(gpus, device, job.request.backend, threads)
        except RefusedError as error:
            notes.append(f"on this machine it would be refused: {error}")
    if device == "auto":
        device = "cuda" if count_gpus() else "cpu"
        notes.append(f"trainer.device=auto is planned as {device}, which this machine has")
    present = count_gpus() if gpus == "auto" else gpus
    if device == "cuda" and gpus == "auto" and not present:
        raise RefusedError(
            "uses the GPUs that this machine shows, but it shows no GPU",
            key="trainer.gpus",
            value="auto",
            suggestion="Type the number of GPUs of a machine.",
        )
    if cores is None:
        cores = usable_cores()
        notes.append(f"each machine is assumed to have {cores} cores, as this one: --cores sets another number")
    workers = gpus if gpus != "auto" else 1
    if gpus == "auto" and device == "cuda":
        workers = max(1, present)
    each = resolve(
        gpus, device, job.request.backend, max(1, cores // max(1, workers)) if threads == "auto" else threads,
        present=max(1, present) if device == "cuda" else 0,
    )  # fmt: skip
    layouts = [replace(each, nodes=nodes, world_size=nodes * each.world_size) for nodes in sizes]
    job.check(layouts)
    if len(layouts) > 1:
        notes.append(f"trainer.nodes={job.request.nodes} is planned as {sizes[-1]}")
    return Assumed(layouts[-1], cores, request, tuple(notes))

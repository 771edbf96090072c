"""launcher=inline: the command itself becomes the only worker, so that debuggers and profilers work as in a script."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from ddpexp.errors import RefusedError
from ddpexp.launch import Job, WorkerRequest
from ddpexp.launch.launchers.base import Launcher

if TYPE_CHECKING:
    from ddpexp.launch.workers.client import Server


@dataclass(frozen=True)
class Inline(Launcher):
    """Run one worker in this process, without a watchdog."""

    takes_slots: ClassVar[bool] = True
    stands_alone: ClassVar[bool] = True

    def launch(self, job: Job, server: Server | None = None) -> int:
        """Run the worker here and return its exit code.

        Raises:
            RefusedError: more than one worker is requested. WorkerError: the worker failed. StoppedError: a signal
            ended the run.
        """
        from ddpexp.launch.supervise import in_process  # imported late: other commands need only the fields

        if server is not None:
            server.close()
        return in_process.run(job, self.adapt(job.request))

    def adapt(self, request: WorkerRequest) -> WorkerRequest:
        """Return the request with one worker.

        Raises:
            RefusedError: more than one is requested.
        """
        for name, number in (("gpus", request.gpus), ("nodes", request.nodes)):
            if number not in ("auto", 1) and (isinstance(number, str) or number > 1):
                raise RefusedError(
                    f"runs a single worker, in the command's own process, and trainer.{name}={number} is for several",
                    key="launcher",
                    value="inline",
                    suggestion=f"Use trainer.{name}=1, or launcher=spawn, where breakpoint() works in every rank.",
                )
        return replace(request, gpus=1) if request.gpus == "auto" else request

"""Start the workers of one job and watch over them; knows nothing of training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ddpexp.errors import RefusedError

if TYPE_CHECKING:
    from ddpexp.errors import Failure


_NOT_ELSEWHERE = (
    "this launcher starts commands of its own, which only a training can have: use launcher=spawn, or start the ranks "
    "yourself "
    "(srun or torchrun) with launcher=slurm or launcher=torchrun-env."
)


@dataclass(frozen=True)
class Timeout:
    """How long a phase may take without progress; every field is explained in conf/trainer/default.yaml."""

    init_seconds: float = 300.0
    step_seconds: float = 600.0
    save_seconds: float = 1800.0
    data_seconds: float = 300.0


@dataclass(frozen=True)
class WorkerRequest:
    """How many workers of which kind the user asked for: the `trainer.` keys of the same names."""

    nodes: Literal["auto"] | int | str = "auto"  # a text is a range, such as 1:4
    gpus: Literal["auto"] | int = "auto"
    device: str = "auto"
    backend: str = "auto"
    threads: Literal["auto"] | int = "auto"
    grace_seconds: float = 25.0  # from a stop signal to the end
    timeout: Timeout = Timeout()


@dataclass(frozen=True)
class Layout:
    """How many workers of which kind there are: resolved once per run directory, the same for all of them."""

    nodes: int
    world_size: int
    device: str  # cpu or cuda
    backend: str  # gloo, nccl or mpi
    threads: int  # CPU threads a worker


@dataclass(frozen=True)
class Participants:
    """Who runs a job together: one entry for each command."""

    hosts: Sequence[str] = ()
    owners: Sequence[str] = ()  # what started the commands and may start them again, where that is known
    restarted: bool | None = None  # whether it has done so; None: not known

    @property
    def earlier(self) -> Sequence[str]:
        """Return what may have begun this job before."""
        return () if self.restarted is False else self.owners


class Job:
    """What the workers are to do: call `entry` with `arguments` in every process.

    A job may run from several commands (one a node, or one a rank): the first begins it, the others enter what it has
    begun.
    """

    name: str = "ddpexp"  # in the lists of a scheduler
    entry: str = ""  # module:function
    arguments: Sequence[str] = ()  # complete when begun or entered
    logs: Path | None = None  # the folder for each rank's output; None keeps it only as long as the job runs
    request: WorkerRequest = WorkerRequest()
    identity: Mapping[str, Any] = {}  # what must be the same for all commands of the job
    leads: bool = True  # this command begins the job; False once it has entered what another one began
    vacant: Callable[[], None] | None = (
        None  # raises RefusedError while somebody else has the folder; asked when all have met
    )
    needs: object = None  # what `prepare` makes ready; of jobs that need the same one prepares. None: not known
    folder: Path = Path()  # one that every host sees, where the commands of several hosts find one another

    def check(self, layout: Layout) -> None:
        """Refuse a layout that the job cannot run on. Called by every command before anything is opened or written."""

    def foresee(self) -> object:
        """Look at what a start would find, and change nothing.

        Raises:
            RefusedError: as a start would. FinishedError: there is nothing left to do.
        """
        return None

    def begin(self, layout: Layout, participants: Participants) -> None:
        """Do what is done once. Called by one command, when all have met and before any worker starts."""

    def shared(self) -> dict[str, Any]:
        """Return, as plain values, what the other commands need to enter."""
        return {}

    def enter(self, shared: Mapping[str, Any], layout: Layout) -> None:
        """Take over what another command has begun. Called by all but that one."""

    # What launchers need that start further commands, elsewhere or later.

    def prepare(self) -> None:
        """Make the data ready where this command runs."""

    def create(self) -> Path:
        """Make the folder from which another command can join with `ddpexp member FOLDER`.

        Raises:
            RefusedError: this kind of job cannot be taken up by another command.
        """
        raise RefusedError(_NOT_ELSEWHERE)

    def described(self) -> dict[str, Any]:
        """Return, as plain values, what `ddpexp member FILE` needs to join. Raises RefusedError like `create`."""
        raise RefusedError(_NOT_ELSEWHERE)

    def note(self, status: str, **facts: Any) -> None:
        """Write down how far the job is, as its result so far."""

    def fail(self, failure: Failure) -> None:
        """Write down why the job failed. Called by one command."""

    def interrupt(self, step: int | None = None, saved: bool = False) -> str:
        """Write down that a signal ended the job, and say what is left. Called by one command.

        `step` is the last one that all workers have done, where that is known, and `saved` tells that it was saved.
        """
        return "nothing was started"

    def close(self) -> None:
        """Let go of what the job holds. Called at the end of every command."""

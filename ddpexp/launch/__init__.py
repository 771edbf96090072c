"""Start the workers of one job and watch over them; knows nothing of training."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from ddpexp.errors import RefusedError

if TYPE_CHECKING:
    from ddpexp.errors import Failure
    from ddpexp.launch.fork_server import Server


_NOT_ELSEWHERE = (
    "this launcher starts commands of its own, which only a training can have: use launcher=spawn, or start the ranks yourself "
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
class Asked:
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
class Crew:
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

    A job may run from several commands (one a node, or one a rank): the first begins it, the others enter what it has begun.
    """

    name: str = "ddpexp"  # in the lists of a scheduler
    entry: str = ""  # module:function
    arguments: Sequence[str] = ()  # complete when begun or entered
    logs: Path | None = None  # the folder for each rank's output; None keeps it only as long as the job runs
    asked: Asked = Asked()
    identity: Mapping[str, Any] = {}  # what must be the same for all commands of the job
    leads: bool = True  # this command begins the job; False once it has entered what another one began
    vacant: Callable[[], None] | None = None  # raises RefusedError while somebody else has the folder; asked when all have met
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

    def begin(self, layout: Layout, crew: Crew) -> None:
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


@runtime_checkable
class Launcher(Protocol):
    """Chosen by `launcher=`: runs a job in as many processes as it asks for."""

    def launch(self, job: Job, server: Server | None = None) -> int:
        """Run the workers, watch them and return the exit code; `server` is a fork server started early, if there is one.

        Raises:
            RefusedError: the job cannot run here. WorkerError: a worker failed; the first genuine cause, the others are
            only named. StoppedError: a signal to this process ended the run.
        """
        ...


@runtime_checkable
class Starter(Protocol):
    """A launcher that starts further commands (`ddpexp member ...`), each of which joins the job with this call."""

    def member(self, job: Job, server: Server | None = None) -> int:
        """Do this command's part of the job, like `Launcher.launch`."""
        ...


@runtime_checkable
class StartedByOthers(Protocol):
    """A launcher whose ranks somebody else starts, such as torchrun, and has to start again."""

    @property
    def is_told(self) -> bool:
        """Tell whether it is so here."""
        ...

    def started_by(self, argv: Sequence[str]) -> tuple[str, str]:
        """Return what starts the ranks again when ddpexp's own words follow it, and where that is typed; `argv` is this command."""
        ...


@runtime_checkable
class Submitter(Protocol):
    """A launcher that hands jobs to a scheduler, many at once, and need not wait for them."""

    @property
    def submits(self) -> bool:
        """Tell whether it does so here: elsewhere, such as inside an allocation, `launch` runs a job."""
        ...

    @property
    def wait(self) -> bool:
        """Tell whether the command is asked to stay until the jobs have ended."""
        ...

    @property
    def dry_run(self) -> bool:
        """Tell whether `submit` is asked to print what it would do, and to write nothing."""
        ...

    def submit(self, jobs: Sequence[tuple[Launcher, Job]], folder: Path, submitted: Callable[[int, str], None]) -> None:
        """Submit jobs, each with its own launcher of this kind; `folder` is for the scripts and their logs.

        Calls `submitted` with a job's place in `jobs` and its id as soon as it has one; the job has noted it by then, or soon.
        A job that is finished is left out.

        Raises:
            RefusedError: a job cannot be submitted; of those that have no id each that was made says why it failed.
            StoppedError: a signal to this process; those that have no id are interrupted.
        """
        ...

    def follow(self, job_ids: Sequence[str], ended: Callable[[int, str, int], None]) -> None:
        """Wait until all have ended; call `ended` once for each with its place in `job_ids`, its last state and exit code.

        The exit code is 0 alone for what ended well, and for what the scheduler has FORGOTTEN: the run directory tells.

        Raises:
            StoppedError: a signal to this process, which leaves the jobs alone and says so.
        """
        ...


def typed_again(launcher: Launcher) -> list[str]:
    """Return, as they are typed, the settings of a launcher that run code or connect to others, and that are set.

    A launcher names them as `typed_again`: they never count on the word of a run directory.
    """
    names: Sequence[str] = getattr(launcher, "typed_again", ())
    return [f"launcher.{name}={json.dumps(value)}" for name in names if (value := getattr(launcher, name))]

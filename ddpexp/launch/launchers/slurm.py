"""launcher=slurm: on the login node it submits a job, inside an allocation it starts a step.

Inside a step it is a worker.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar, Literal

from ddpexp.errors import EXIT_DONE, EXIT_FAILED, EXIT_REFUSED, Failure, RefusedError, StoppedError, first_end
from ddpexp.launch import Job, Layout, WorkerRequest
from ddpexp.launch.launchers import slurm_array
from ddpexp.launch.launchers.base import Launcher
from ddpexp.launch.launchers.slurm_array import status
from ddpexp.launch.rendezvous import started_by
from ddpexp.launch.rendezvous.environment import LaunchEnvironment, of_slurm_task, tasks_per_node
from ddpexp.launch.rendezvous.meeting import Published, by_key
from ddpexp.launch.supervise import coordinator
from ddpexp.launch.workers import foreign
from ddpexp.launch.workers.client import Server
from ddpexp.launch.workers.rank_log import Log
from ddpexp.system import start
from ddpexp.system.process import end_with_parent
from ddpexp.system.programs import find, located
from ddpexp.system.slurm import ENDED, RUNNING, exact_id, own_id, sbatch, signals_wait, state, states
from ddpexp.system.terminal import Terminal, say

_POLL_SECONDS = 1.0
_TIME = re.compile(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}|unlimited|infinite", re.IGNORECASE)  # sbatch's --time


def _time_meant(text: str) -> str:
    match = re.fullmatch(r"(\d+) ?(m|min|minutes?|h|hours?|d|days?)", text.lower())
    if match is None:
        return ""
    return f" Did you mean launcher.time={match[1]}{ {'m': '', 'h': ':00:00', 'd': '-0'}[match[2][0]] }?"


@dataclass(frozen=True)
class Slurm(Launcher):
    """One task a node, which forks the node's workers from a warm server.

    Options have the names that Slurm gives them.
    """

    restate_on_resume: ClassVar = ("setup", "container_image", "container_mounts", "python", "sbatch_args", "srun_args")

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: str | int | None = None
    mem: str | int | None = None
    cpus_per_task: int | None = None
    gpus_per_node: int | str | None = None
    gres: str | None = None
    constraint: str | None = None
    nodelist: str | None = None
    exclude: str | None = None
    reservation: str | None = None
    job_name: str | None = None
    setup: tuple[str, ...] = ()
    container_image: str | None = None
    container_mounts: str | None = None
    python: str | None = None
    sbatch_args: tuple[str, ...] = ()
    srun_args: tuple[str, ...] = ()
    requeue: bool = True
    signal_seconds: int | None = None
    array_parallelism: int | None = None
    wait: bool = False
    dry_run: bool = False

    def __post_init__(self) -> None:
        """Refuse a limit of time that sbatch would not read."""
        if isinstance(self.time, str) and not _TIME.fullmatch(self.time):
            raise RefusedError(
                f"launcher.time={self.time} is no time for Slurm: write minutes, hours:minutes:seconds, or "
                f"days-hours.{_time_meant(self.time)}"
            )

    @property
    def ranks_started_externally(self) -> bool:
        """Tell that somebody else starts the ranks: the user's own srun."""
        return where() == "step"

    def started_by(self, argv: Sequence[str]) -> tuple[str, str]:
        """Return how the ranks are started again, and where that is typed."""
        return started_by.srun()

    def words_of_allocation(self, job: Job, layout: Layout) -> list[str]:
        """Return the words that ask for as many nodes and GPUs as a job has got from an allocation.

        Where none are typed.
        """
        nodes = [f"trainer.nodes={layout.nodes}"] if job.request.nodes == "auto" and layout.nodes > 1 else []
        gpus = layout.device == "cuda" and not self._gpus()
        return nodes + ([f"launcher.gpus_per_node={layout.world_size // layout.nodes}"] if gpus else [])

    def launch(self, job: Job, server: Server | None = None) -> int:
        """Do what the place asks for: submit and exit, run a step, or be a worker of one.

        Raises:
            RefusedError: Slurm is not there or refuses the job. WorkerError: this worker failed. StoppedError: a signal
            to this process ended the run.
        """
        here = where()
        if here == "step":
            if self.dry_run:
                raise RefusedError("launcher.dry_run=true: this is a task of srun already, there is nothing to submit.")
            return self._task(job, server)
        if server is not None:
            server.close()
        self._check_has(("srun",) if here == "allocation" else ("sbatch", "srun"))
        nodes = self._nodes(job, here)
        self._check(job, nodes)
        return self._submit(job, nodes) if here == "login" else self._step(job, nodes)

    @property
    def submits(self) -> bool:
        """Tell whether this is the login node, where jobs are submitted and nothing runs."""
        return where() == "login"

    def submit(self, jobs: Sequence[tuple[Launcher, Job]], folder: Path, submitted: Callable[[int, str], None]) -> None:
        """Submit many jobs as one array, or a few; like `Submitter.submit`."""
        self._check_has(("sbatch", "srun"))
        kinds = []
        for launcher, job in jobs:
            assert isinstance(launcher, Slurm)
            kinds.append(launcher.kind(job, launcher._nodes(job, "login"), folder.resolve()))
        jobs_of = slurm_array.by_kind(kinds, [job for _, job in jobs])
        if self.dry_run:
            slurm_array.show(jobs_of, folder.resolve())
        else:
            slurm_array.submit(jobs_of, folder.resolve(), submitted)

    def follow(self, job_ids: Sequence[str], ended: Callable[[int, str, int], None]) -> None:
        """Wait for jobs that were submitted; like `Submitter.follow`."""
        slurm_array.follow(job_ids, ended)

    def member(self, job: Job, server: Server | None = None) -> int:
        """Be the task of one node: start the node's workers; like `Launcher.launch`."""
        if "SLURM_STEP_ID" not in os.environ:  # written down nowhere: a job may be running there
            text = f"{job.folder} waits for srun: type sbatch {shlex.quote(str(job.folder / 'job.sbatch'))}"
            say(f"ddpexp: {text}")
            return EXIT_REFUSED
        job.vacant = partial(_check_not_running, job.folder)
        job.request = replace(job.request, nodes="auto", gpus=self.workers(job))
        place = of_slurm_task(WorkerRequest())
        server = server or Server()
        try:
            way = Published.under(job.folder, _step_key()) if place.size > 1 else None
            with self._ends_in_requeue():
                return coordinator.run(
                    job, LaunchEnvironment(place.index, place.size, nodes=place.size, starter="srun"), way, server
                )
        finally:
            server.close()

    def _task(self, job: Job, server: Server | None) -> int:
        place = of_slurm_task(job.request)
        server = server or Server()
        try:
            way = by_key(_step_key(), job.folder, place.nodes == 1) if place.size > 1 else None
            with self._ends_in_requeue():
                return coordinator.run(job, place, way, server)
        finally:
            server.close()

    @contextmanager
    def _ends_in_requeue(self) -> Iterator[None]:
        """Have the job start again later when it is stopped for that, and say which start this is."""
        restarts = os.environ.get("SLURM_RESTART_COUNT", "0")
        if restarts != "0" and os.environ.get("SLURM_PROCID") == "0":
            say(f"ddpexp: restart {restarts} of Slurm job {own_id()}")
        try:
            yield
        except StoppedError as error:
            end = first_end(error)
            if isinstance(end, StoppedError) and end.signum == signal.SIGUSR2:
                end.then = (
                    partial(_requeue, end) if self.requeue else lambda: f"job {own_id()} ends: launcher.requeue=false"
                )
            raise

    def _submit(self, job: Job, nodes: int) -> int:
        planned = self.script(
            job, nodes, job.folder / "RUN_DIR"
        )  # refuses what no script can hold before anything is written
        if self.dry_run:
            print(planned, end="")
            return EXIT_DONE
        job.prepare()
        run = job.create().resolve()
        script = run / "job.sbatch"
        script.write_bytes(os.fsencode(self.script(job, nodes, run)))
        job.note("submitted")  # before: it may begin at once
        job_id = ""
        try:
            with signals_wait():
                job_id = sbatch(script)
                if status(run) == "submitted":  # not begun yet
                    job.note("submitted", job_id=job_id)
        except StoppedError as error:
            if not job_id:
                raise
            return _goes_on(job_id, error)
        output = run / _log_name(run, job_id)
        say(f"submitted job {job_id}  run directory {os.path.relpath(run)}", sys.stdout)
        if not self.wait:
            shown = shlex.quote(os.path.relpath(output))
            say(f"follow it: tail -F {shown}    queue: squeue -j {job_id}    end it: scancel {job_id}", sys.stdout)
            return EXIT_DONE
        return self._wait(job, job_id, run, output)

    def _wait(self, job: Job, job_id: str, run: Path, output: Path) -> int:
        """Show what the job says, write down its end where it could not itself, and return its exit code."""
        try:
            found, code = _follow(job_id, output)
        except StoppedError as error:
            return _goes_on(job_id, error)
        if found == "FORGOTTEN":  # long ago, while this command was not looking
            return EXIT_DONE if status(run) == "done" else EXIT_FAILED
        if code and status(run) == "submitted":
            text = f"job {job_id} ended as {found} before its command began: see {output}"
            job.fail(Failure(rank=0, host=os.uname().nodename, kind="SlurmError", message=text, exit_code=code))
        if code:
            say(f"ddpexp: job {job_id} ended as {found}")
        return code

    def _step(self, job: Job, nodes: int) -> int:
        if self.dry_run:
            print(shlex.join(_forwarding(self.srun(job, nodes, job.folder / "RUN_DIR"))))
            return EXIT_DONE
        if start.parent_name() == "salloc":  # no shell in which this command was typed
            end_with_parent(EXIT_FAILED, partial(coordinator.starter_lost, job, "salloc", True), start.parent())
        job.prepare()
        run = job.create().resolve()
        job.note("submitted")
        environ = {name: value for name, value in os.environ.items() if name not in _OF_OTHER_TASKS}
        environ |= started_by.salloc(sys.argv)
        try:
            words = _forwarding(self.srun(job, nodes, run))
            passed = (signal.SIGUSR1, signal.SIGUSR2)
            code = foreign.run(words, environ, job.request.grace_seconds, passed, asks_with=signal.SIGINT)
        except StoppedError as error:
            error.told = status(run) == "interrupted"
            raise
        if code and status(run) == "submitted":
            text = f"srun ended with exit code {code} before the job began: see what it says above"
            job.fail(Failure(rank=0, host=os.uname().nodename, kind="SrunError", message=text, exit_code=code))
        return code

    def script(self, job: Job, nodes: int, run: Path) -> str:
        """Return the text of job.sbatch: the options, the setup lines, and the step."""
        return (
            "#!/bin/bash\n"
            f"# Written by ddpexp. To submit it again: sbatch {shlex.quote(str(run / 'job.sbatch'))}\n"
            + "".join(f"{line}\n" for line in self._options(job, nodes, _output(run)))
            + "\n"
            + "".join(f"{line}\n" for line in self.setup)
            + f"exec {shlex.join(self.srun(job, nodes, run))}\n"
        )

    def kind(self, job: Job, nodes: int, folder: Path) -> slurm_array.Kind:
        """Return what this job and others may have in common, to be tasks of one array whose log lies in `folder`.

        Raises:
            RefusedError: what no script can hold, or Slurm would not take.
        """
        self._check(job, nodes)
        options = self._options(job, nodes, _output(folder / "logs", "slurm-%A.log"))
        step = shlex.join(self.srun(job, nodes, folder)[:-1])
        return slurm_array.Kind(tuple(options), self.setup, step, self.array_parallelism)

    def _options(self, job: Job, nodes: int, log: str) -> list[str]:
        """Return the lines of a script that are for Slurm."""
        options = {
            "job-name": job.name if self.job_name is None else self.job_name,
            "output": log,
            "open-mode": "append",
            "chdir": str(Path.cwd()),
            "nodes": nodes,
            "ntasks-per-node": 1,
            "cpus-per-task": self._cpus(job),
            **{name.replace("_", "-"): getattr(self, name) for name in _PLAIN},
            "signal": f"USR2@{self._signal_seconds(job)}" if self.requeue else None,
        }
        lines = [
            f"#SBATCH --{name}={_quoted(str(value), name)}" for name, value in options.items() if value is not None
        ]
        lines.append("#SBATCH --requeue" if self.requeue else "#SBATCH --no-requeue")
        return lines + [f"#SBATCH {_quoted(word, 'sbatch_args')}" for word in self.sbatch_args]

    def srun(self, job: Job, nodes: int, run: Path) -> list[str]:
        """Return the words of the step: one task a node, all ended when one fails."""
        cpus = self._cpus(job)
        container = {"container-image": self.container_image, "container-mounts": self.container_mounts}
        return [
            "srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--kill-on-bad-exit=1",
            *([f"--cpus-per-task={cpus}"] if cpus else []),  # srun does not take over what sbatch was told
            # The shell that this is typed in holds the same cores.
            *(["--overlap"] if "SLURM_STEP_ID" in os.environ else []),
            *(f"--{name}={value}" for name, value in container.items() if value),
            *_gpus_of_all_tasks(os.environ, nodes),
            *self.srun_args,
            self.python or sys.executable, "-m", "ddpexp", "member", str(run),
        ]  # fmt: skip

    def _signal_seconds(self, job: Job) -> int:
        """Return how long before the end of its time the job is told; Slurm may do so a minute earlier."""
        return math.ceil(job.request.grace_seconds) + 60 if self.signal_seconds is None else self.signal_seconds

    def workers(self, job: Job) -> Literal["auto"] | int:
        """Return the workers a node that the options imply; auto leaves it to what the node shows."""
        return job.request.gpus if job.request.gpus != "auto" else self._gpus() or "auto"

    def _gpus(self) -> int:
        """Return the GPUs of a node that the options ask for.

        `4`, `a100:4`, and in a gres `gpu:4`, `gpu:a100:2,gpu:v100:2`.
        """
        if self.gpus_per_node is not None:
            asked = str(self.gpus_per_node).split(",")
        else:
            asked = [part for part in (self.gres or "").split(",") if part.partition(":")[0] == "gpu"]
        last = [part.rpartition(":")[2] for part in asked]
        return sum(int(word) if word.isdecimal() else 1 for word in last)

    def _cpus(self, job: Job) -> int | None:
        """Return the cores of our one task a node: those of all its workers."""
        workers = self.workers(job)
        return None if self.cpus_per_task is None else self.cpus_per_task * (1 if workers == "auto" else workers)

    def _nodes(self, job: Job, here: str) -> int:
        asked = job.request.nodes
        if isinstance(asked, str) and asked != "auto":
            raise RefusedError(f"trainer.nodes={asked} is a range, which only launcher=elastic understands.")
        if here == "login":
            return 1 if asked == "auto" else int(asked)
        there = int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))
        if asked != "auto" and int(asked) > there:
            raise RefusedError(
                f"trainer.nodes={asked}, but this allocation has {there}: ask for more with salloc or sbatch."
            )
        return there if asked == "auto" else int(asked)

    def _check_has(self, programs: Sequence[str]) -> None:
        for program in programs:
            if find(program) is None and not self.dry_run:
                raise RefusedError(
                    f"launcher=slurm: there is no {program} on this machine, it is not in a Slurm cluster. Use "
                    "launcher=spawn."
                )

    def _check(self, job: Job, nodes: int) -> None:
        """Refuse what the words alone show; the devices are looked at on the nodes."""
        if nodes < 1:
            raise RefusedError(f"trainer.nodes={nodes} leaves no machine: use 1 or more.")
        if self.cpus_per_task is not None and self.cpus_per_task < 1:
            raise RefusedError(f"launcher.cpus_per_task={self.cpus_per_task}: use 1 or more.")
        if not 0 <= self._signal_seconds(job) < 1 << 16:
            raise RefusedError(f"launcher.signal_seconds={self._signal_seconds(job)}: Slurm takes 0 to 65535.")
        if self.array_parallelism is not None and self.array_parallelism < 1:
            raise RefusedError(
                f"launcher.array_parallelism={self.array_parallelism} lets no job run: use 1 or more, or null."
            )
        limit = _limit_seconds(self.time)
        if self.requeue and limit is not None and limit <= self._signal_seconds(job):
            raise RefusedError(
                f"launcher.time={self.time} is {limit} s, and Slurm would tell the job {self._signal_seconds(job)} s "
                "before the "
                f"end to save and start again: it would do nothing else. Use more, a smaller launcher.signal_seconds, "
                "or "
                f"launcher.requeue=false."
            )
        layout = self.layout(job, nodes)
        if layout is not None:
            job.check(layout)

    def layout(self, job: Job, nodes: int) -> Layout | None:
        """Return the layout that the words alone show; None where the nodes say how many workers there are.

        Raises:
            RefusedError: a number of workers that starts none.
        """
        workers = self.workers(job)
        if workers == "auto":
            return None
        if workers < 1:
            raise RefusedError(f"trainer.gpus={workers} starts no worker: use 1 or more, or auto for all GPUs.")
        gpus = self._gpus() > 0 or job.request.device == "cuda"
        device, backend = ("cuda", "nccl") if gpus and job.request.device != "cpu" else ("cpu", "gloo")
        backend = backend if job.request.backend == "auto" else job.request.backend
        return Layout(nodes, nodes * workers, device, backend, self.cpus_per_task or 1)


_PLAIN = (
    "partition",
    "account",
    "qos",
    "time",
    "mem",
    "gpus_per_node",
    "gres",
    "constraint",
    "nodelist",
    "exclude",
    "reservation",
)
# What an allocation says of the tasks it was made for, which srun would apply to our one task a node.
_OF_OTHER_TASKS = (
    "SLURM_NTASKS_PER_NODE", "SLURM_NTASKS_PER_SOCKET", "SLURM_NTASKS_PER_CORE", "SLURM_NTASKS_PER_GPU",
    "SLURM_NTASKS_PER_TRES",
    "SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK", "SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_CPU_BIND",
    "SLURM_GPU_BIND", "SLURM_TRES_BIND", "SLURM_DISTRIBUTION",
)  # fmt: skip


def _forwarding(srun: list[str]) -> list[str]:
    """Have srun forward SIGINT to its tasks, instead of showing where they are. With SIGTERM it kills them at once."""
    return [srun[0], "--disable-status", *srun[1:]]


def _gpus_of_all_tasks(environ: Mapping[str, str], nodes: int) -> list[str]:
    """Ask for all GPUs of an allocation that was made with --gpus-per-task.

    Slurm would give our task those of one of its tasks.
    """
    kind, _, each = environ.get("SLURM_GPUS_PER_TASK", "").rpartition(":")
    if "SLURM_JOB_ID" not in environ or not each.isdecimal():
        return []
    count = int(each) * sum(tasks_per_node(environ.get("SLURM_TASKS_PER_NODE", ""))[:nodes])
    return [f"--gpus={kind}{':' if kind else ''}{count}"] if count else []


def _limit_seconds(text: str | int | None) -> int | None:
    """Return a time limit in seconds; None where there is none, or where it is Slurm that says what is wrong with it.

    Source: sbatch(1), --time: minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes and so
    on.
    """
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", "" if text is None else str(text))
    if found is None:
        return None
    days, *numbers = (None if number is None else int(number) for number in found.groups())
    given = [number for number in numbers if number is not None]
    units = (3600, 60, 1) if days is not None or len(given) == 3 else (60, 1)
    seconds = (days or 0) * 86400 + sum(number * unit for number, unit in zip(given, units, strict=False))
    return seconds or None  # 0 is no limit


def _requeue(error: StoppedError) -> str:
    """Put the job back into the queue, unless it would only do the same again."""
    job_id = own_id()
    if not error.saved or error.step is None or error.step <= (error.began or 0):
        return f"job {job_id} is not requeued: it has saved no step since it started, and would do the same again"
    try:
        words = [located("scontrol"), "requeue", exact_id() or ""]
        done = subprocess.run(words, capture_output=True, text=True, errors="replace")
    except OSError as problem:
        return f"job {job_id} is not requeued: scontrol: {problem.strerror}"
    if done.returncode:
        return f"job {job_id} is not requeued: {' '.join(done.stderr.split()) or done.returncode}"
    return f"job {job_id} is requeued"


def where(
    environ: Mapping[str, str] = os.environ, pid: int | None = None, has_terminal: Callable[[str], bool] | None = None
) -> Literal["login", "allocation", "step"]:
    """Tell the three places apart.

    A batch script has SLURM_PROCID like a task of srun, but no step. A shell that `srun --pty` opened is a task itself,
    and what is typed in it is not: it is inside an allocation. Only there a terminal is in play, and the task is
    another process; SLURM_PTY_PORT tells less, for the steps that are started in that shell inherit it.
    """
    if "SLURM_JOB_ID" not in environ:
        return "login"
    step = environ.get("SLURM_STEP_ID")
    if step is None or not step.isdigit() or int(step) >= 0xFFFFFFF0:  # the batch script's, the interactive step's
        return "allocation"
    me, task = str(os.getpid() if pid is None else pid), environ.get("SLURM_TASK_PID", "")
    if task != me and any(map(has_terminal or _has_terminal, (me, task))):
        return "allocation"
    return "step"


def _has_terminal(pid: str) -> bool:
    """Tell whether a process has a controlling terminal. Source: proc(5), tty_nr."""
    try:
        return Path("/proc", pid, "stat").read_text().rsplit(")", 1)[1].split()[4] != "0"
    except (OSError, IndexError):
        return False  # it has ended, or is in another container


def _check_not_running(run: Path) -> None:
    """Refuse a run directory in which another job runs, such as the same script submitted twice."""
    others = {path.stem.removeprefix("slurm-") for path in run.glob("slurm-*.log")} - {
        own_id(),
        os.environ["SLURM_JOB_ID"],
    }
    for job_id, found in sorted(states(others).items()):
        if found in RUNNING:
            raise RefusedError(f"job {job_id} still runs in {run}: wait for its end, or end it with scancel {job_id}.")


def _step_key() -> str:
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    return "slurm " + ".".join(os.environ.get(name, "0") for name in names)


_NAMES = {"output": "run.dir", "chdir": "the path of the current folder"}


def _quoted(value: str, name: str) -> str:
    """Quote for an #SBATCH line, which Slurm splits into words like a shell, but without any expansion."""
    if "\n" in value or "\0" in value:
        name = _NAMES.get(name, f"launcher.{name.replace('-', '_')}")
        raise RefusedError(f"{name} has a line break, which a job script cannot hold: {value!r}.")
    if re.fullmatch(r"[\w@%+=:,./-]+", value, re.ASCII):
        return value
    escaped = re.sub(r'(["\\])', r"\\\1", value)
    return f'"{escaped}"'


def _log_name(run: Path, job_id: str) -> str:
    """Name the job's log. In a path with a backslash Slurm expands nothing, so that its number has no place."""
    return "slurm.log" if "\\" in str(run) else f"slurm-{job_id}.log"


def _output(folder: Path, name: str = "slurm-%j.log") -> str:
    """Return the log of a job, or of an array, as Slurm's pattern."""
    if "\\" in str(folder):
        return str(folder / _log_name(folder, "")).replace("\\", "\\\\")
    return str(folder).replace("%", "%%") + f"/{name}"


def _goes_on(job_id: str, error: StoppedError) -> int:
    """Say that a signal to the command, which has nothing more to do, is none to the job; return the exit code."""
    say(f"ddpexp: job {job_id} goes on; end it with scancel {job_id}")
    return error.exit_code


def _follow(job_id: str, output: Path) -> tuple[str, int]:
    """Show the job's output until it has ended; return its state and exit code."""
    terminal = Terminal()
    shown: Log | None = None
    try:
        while True:
            found, code = state(job_id)
            if shown is None and output.is_file():
                shown = Log.reading(output)
            for line in shown.new_lines(last=found in ENDED) if shown is not None else ():
                terminal.line(line)
            if found in ENDED:
                return found, EXIT_FAILED if code == EXIT_DONE and found != "COMPLETED" else code
            time.sleep(_POLL_SECONDS)
    finally:
        terminal.close()
        if shown is not None:
            shown.close()

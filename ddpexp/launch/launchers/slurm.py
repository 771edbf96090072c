"""launcher=slurm: submits a job on a login node, starts a step in an allocation, runs a worker in a step."""

from __future__ import annotations

import math
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from ddpexp.errors import EXIT_DONE, EXIT_FAILED, EXIT_REFUSED, Failure, RefusedError, StoppedError, first_end
from ddpexp.launch import Failed, Job, Layout, WorkerRequest
from ddpexp.launch.launchers import slurm_array
from ddpexp.launch.launchers.base import Launcher, ResourceRequest
from ddpexp.launch.launchers.slurm_context import (
    OF_OTHER_TASKS,
    check_lives,
    check_not_running,
    check_programs,
    requeue_job,
    step_key,
    unused_components,
    where,
)
from ddpexp.launch.launchers.slurm_demand import Demand, check, gpus_by_type, idle_gpus, known_nodes
from ddpexp.launch.launchers.slurm_follow import of_unstarted, refusal, status
from ddpexp.launch.launchers.slurm_submit import submit_job
from ddpexp.launch.launchers.slurm_text import (
    check_mail_types,
    check_time,
    checked_script,
    container_warnings,
    forwarding_sigint,
    gpus_of_all_tasks,
    output_pattern,
    quoted,
)
from ddpexp.launch.rendezvous import started_by
from ddpexp.launch.rendezvous.environment import LaunchEnvironment, of_slurm_task
from ddpexp.launch.rendezvous.kinds import Published, by_key
from ddpexp.launch.supervise import coordinator
from ddpexp.launch.workers import foreign
from ddpexp.launch.workers.client import Server
from ddpexp.settings.key import Key
from ddpexp.system import files, start
from ddpexp.system.job_schedulers.slurm import SLURM, seconds_of
from ddpexp.system.process import end_with_parent
from ddpexp.system.programs import COMMAND
from ddpexp.system.terminal import print_message
from ddpexp.system.text import counted


@dataclass(frozen=True)
class Slurm(Launcher):
    """One task per node, which forks the node's workers from a warm fork server.

    The options have Slurm's own names.
    """

    restate_on_resume: ClassVar[tuple[str, ...]] = (
        "setup",
        "container_image",
        "container_mounts",
        "python",
        "mail_user",
        "sbatch_args",
        "srun_args",
    )

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: str | int | None = None
    mem: str | int | None = None
    cpus_per_task: Annotated[int | None, Key(at_least=1)] = None
    gpus_per_node: int | str | None = None
    gres: str | None = None
    constraint: str | None = None
    nodelist: str | None = None
    exclude: str | None = None
    reservation: str | None = None
    job_name: str | None = None
    mail_user: str | None = None
    mail_type: str | tuple[str, ...] | None = None
    setup: tuple[str, ...] = ()
    container_image: str | None = None
    container_mounts: str | None = None
    python: str | None = None
    sbatch_args: tuple[str, ...] = ()
    srun_args: tuple[str, ...] = ()
    requeue: bool = True
    signal_seconds: Annotated[int | None, Key(at_least=0, at_most=65535)] = None
    array_parallelism: Annotated[int | None, Key(at_least=1)] = None
    wait: bool = False
    dry_run: bool = False

    def __post_init__(self) -> None:
        """Refuse a limit of time and occasions for mail that sbatch would not read."""
        check_time(self.time)
        check_mail_types(self._mail_types)

    @property
    def ranks_started_externally(self) -> bool:
        """Return whether the user's own srun starts the ranks."""
        return where() == "step"

    def started_by(self, argv: Sequence[str]) -> tuple[str, str]:
        """Return srun's command line; like `Launcher.started_by`."""
        return started_by.srun()

    def arguments_for_allocation(self, layout: Layout) -> list[str]:
        """Return overrides for the nodes and GPUs that a job got from its allocation."""
        nodes = [f"trainer.nodes={layout.nodes}"] if layout.nodes > 1 else []
        gpus = layout.device == "cuda" and not self._gpus()
        return nodes + ([f"launcher.gpus_per_node={layout.world_size // layout.nodes}"] if gpus else [])

    def launch(self, job: Job, server: Server | None = None) -> int:
        """Submit a job and exit, run a step, or run a worker of a step, depending on where this process runs.

        Raises:
            RefusedError: Slurm is missing or refuses the job. WorkerError: this worker failed. StoppedError: a signal
            to this process ended the run.
        """
        here = where()
        if here == "step":
            if self.dry_run:
                raise RefusedError(
                    "has nothing to submit: this process is a task of srun already", key="launcher.dry_run", value=True
                )
            return self._task(job, server)
        if server is not None:
            server.close()
        if not self.dry_run:
            check_programs(("srun",) if here == "allocation" else ("sbatch", "srun"), self._to_wait("scontrol"))
        nodes = self._nodes(job, here)
        self._check(job, nodes)
        self._warn(job)
        return self._submit(job, nodes) if here == "login" else self._step(job, nodes)

    @property
    def submits(self) -> bool:
        """Return whether this is a login node, where jobs are submitted and nothing runs."""
        return where() == "login"

    def submit(self, jobs: Sequence[tuple[Launcher, Job]], folder: Path, submitted: Callable[[int, str], None]) -> None:
        """Submit many jobs as one array or several; like `Submitter.submit`."""
        if not self.dry_run:
            check_programs(("sbatch", "srun"), self._to_wait("squeue", "scontrol"))
        kinds = []
        for launcher, job in jobs:
            assert isinstance(launcher, Slurm)
            kinds.append(launcher.kind(job, launcher._nodes(job, "login"), folder.resolve()))
        for launcher, job in jobs:
            assert isinstance(launcher, Slurm)
            launcher._check_cluster(launcher.demand(job, launcher._nodes(job, "login")))
            launcher._warn(job)
        jobs_of = slurm_array.by_kind(kinds, [job for _, job in jobs])
        if self.dry_run:
            slurm_array.show(jobs_of, folder.resolve())
        else:
            slurm_array.submit(jobs_of, folder.resolve(), submitted)

    def follow(self, job_ids: Sequence[str], ended: Callable[[int, str, int], None]) -> None:
        """Wait for submitted jobs; like `Submitter.follow`."""
        slurm_array.follow(job_ids, ended)

    def member(self, job: Job, server: Server | None = None) -> int:
        """Run the task of one node: start the node's workers; like `Launcher.launch`."""
        if "SLURM_STEP_ID" not in os.environ:  # recorded nowhere, since a job may be running there
            text = f"{job.folder} waits for srun: type sbatch {shlex.quote(str(job.folder / 'job.sbatch'))}"
            print_message(f"ddpexp: {text}")
            return EXIT_REFUSED
        request = replace(job.request, nodes="auto", gpus=self.workers(job))
        job = replace(job, request=request, check_vacant=partial(check_not_running, job.folder))
        task = of_slurm_task(WorkerRequest())
        environment = LaunchEnvironment(task.index, task.size, nodes=task.size, starter="srun")
        server = server or Server()
        try:
            rendezvous = Published.under(job.folder, step_key()) if task.size > 1 else None
            with self._requeues_when_stopped():
                return coordinator.run(job, environment, rendezvous, server)
        finally:
            server.close()

    def _task(self, job: Job, server: Server | None) -> int:
        environment = of_slurm_task(job.request)
        server = server or Server()
        try:
            one_host = environment.nodes == 1
            rendezvous = by_key(step_key(), job.folder, one_host) if environment.size > 1 else None
            with self._requeues_when_stopped():
                return coordinator.run(job, environment, rendezvous, server)
        finally:
            server.close()

    @contextmanager
    def _requeues_when_stopped(self) -> Iterator[None]:
        """Requeue the job when SIGUSR2 stops it, and print which restart this is."""
        restarts = os.environ.get("SLURM_RESTART_COUNT", "0")
        if restarts != "0" and os.environ.get("SLURM_PROCID") == "0":
            print_message(f"ddpexp: restart {restarts} of Slurm job {SLURM.job_id()}")
        try:
            yield
        except StoppedError as error:
            end = first_end(error)
            if isinstance(end, StoppedError) and end.signum == signal.SIGUSR2:
                end.then = partial(requeue_job, end) if self.requeue else _explain_no_requeue
            raise

    def _submit(self, job: Job, nodes: int) -> int:
        # Refuses values that a script cannot hold, before anything is written.
        text = self.script(job, nodes, self._foreseen(job))
        checked_script(text, "job.sbatch")
        self._check_cluster(self.demand(job, nodes))
        if self.dry_run:
            print(text, end="")
            return EXIT_DONE
        return submit_job(job, partial(self.script, job, nodes), self.wait)

    def _foreseen(self, job: Job) -> Path:
        """Return the run directory as a dry run shows it."""
        if job.run_dir is not None:
            return job.run_dir
        if self.dry_run:
            print_once(
                f"DATE_TIME stands for when the job is submitted, as in {files.relative(job.folder)}/"
                "2030-01-31_12-00-00; run.dir=outputs/first names the directory"
            )
        return job.folder / "DATE_TIME"

    def _step(self, job: Job, nodes: int) -> int:
        if self.dry_run:
            print(shlex.join(forwarding_sigint(self.srun(job, nodes, self._foreseen(job)))))
            return EXIT_DONE
        check_lives(SLURM.job_id())
        if (warning := unused_components(os.environ)) is not None:
            print_message(f"ddpexp: warning: {warning}")
        if start.parent_name() == "salloc":  # this command was not run in a shell
            end_with_parent(EXIT_FAILED, partial(coordinator.starter_lost, job, "salloc", True), start.parent())
        portable = job.require_portable()
        portable.prepare()
        run = portable.create()
        environ = {name: value for name, value in os.environ.items() if name not in OF_OTHER_TASKS}
        environ |= started_by.salloc(sys.argv)
        try:
            argv = forwarding_sigint(self.srun(job, nodes, run))
            forwarded = (signal.SIGUSR1, signal.SIGUSR2)
            code = foreign.run(argv, environ, job.request.grace_seconds, forwarded, stop_signal=signal.SIGINT)
        except StoppedError as error:
            error.quiet = status(run) == "interrupted"
            raise
        if code and status(run) == "submitted":
            code = of_unstarted(code)
            text = f"srun ended with exit code {code} before the job began: see its output above"
            job.lifecycle.end(Failed(Failure.of_command("SrunError", text, exit_code=code)))
        elif code == EXIT_REFUSED and (failure := refusal(run)) is not None:
            job.lifecycle.end(Failed(failure))  # the job's own command could not remove what this one has made
        return code

    def script(self, job: Job, nodes: int, run: Path) -> str:
        """Return the text of job.sbatch: the options, the setup lines, and the step."""
        return (
            "#!/bin/bash\n"
            f"# Written by ddpexp. To submit it again: sbatch {shlex.quote(str(run / 'job.sbatch'))}\n"
            + "".join(f"{line}\n" for line in self._options(job, nodes, output_pattern(run)))
            + "\n"
            + "".join(f"{line}\n" for line in self.setup)
            + f"exec {shlex.join(self.srun(job, nodes, run))}\n"
        )

    def kind(self, job: Job, nodes: int, folder: Path) -> slurm_array.Kind:
        """Return what this job may share with others as tasks of one array, whose log is in `folder`.

        Raises:
            RefusedError: a value that a script cannot hold, or that Slurm would not accept.
        """
        self._check(job, nodes)
        options = self._options(job, nodes, output_pattern(folder / "logs", "slurm-%A.log"))
        step = shlex.join(self.srun(job, nodes, folder)[:-1])
        return slurm_array.Kind(tuple(options), self.setup, step, self.array_parallelism)

    def _options(self, job: Job, nodes: int, log: str) -> list[str]:
        """Return the #SBATCH lines of a script."""
        options = {
            "job-name": job.name if self.job_name is None else self.job_name,
            "output": log,
            "open-mode": "append",
            "chdir": str(Path.cwd()),
            "nodes": nodes,
            "ntasks-per-node": 1,
            "cpus-per-task": self._cpus(job),
            **{name.replace("_", "-"): getattr(self, name) for name in _PASSED_THROUGH},
            "mail-user": self.mail_user,
            "mail-type": ",".join(self._mail_types) or None,
            "signal": f"USR2@{self._signal_seconds(job)}" if self.requeue else None,
        }
        lines = [f"#SBATCH --{name}={quoted(str(value), name)}" for name, value in options.items() if value is not None]
        lines.append("#SBATCH --requeue" if self.requeue else "#SBATCH --no-requeue")
        return lines + [f"#SBATCH {quoted(argument, 'sbatch_args')}" for argument in self.sbatch_args]

    def srun(self, job: Job, nodes: int, run: Path) -> list[str]:
        """Return the command line of the step: one task per node, all ended when one fails."""
        cpus = self._cpus(job)
        container = {"container-image": self.container_image, "container-mounts": self.container_mounts}
        elsewhere = self.python or self.container_image  # where this interpreter's files need not be
        command = [self.python or sys.executable, *(("-m", "ddpexp") if elsewhere else COMMAND)]
        return [
            "srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--kill-on-bad-exit=1",
            *([f"--cpus-per-task={cpus}"] if cpus else []),  # srun does not inherit it from sbatch
            # The shell in which this command runs occupies the same cores.
            *(["--overlap"] if "SLURM_STEP_ID" in os.environ else []),
            *(f"--{name}={value}" for name, value in container.items() if value),
            *gpus_of_all_tasks(os.environ, nodes),
            *self.srun_args,
            *command, "member", str(run),
        ]  # fmt: skip

    def resource_request(self, job: Job, nodes: int) -> ResourceRequest:
        """Return what is requested from Slurm; like `Launcher.resource_request`."""
        lines = [line for line in self.kind(job, nodes, job.folder).options if not line.startswith(_NO_RESOURCES)]
        summary = "  ".join(line.removeprefix("#SBATCH ") for line in lines)
        return ResourceRequest(SLURM, tuple(lines), summary, self.layout(job, nodes), self._cpus(job))

    def demand(self, job: Job, nodes: int) -> Demand:
        """Return what a job asks of the nodes of a cluster."""
        key, request = self._gpu_request()
        return Demand(
            nodes=nodes,
            workers=self.workers(job),
            device=job.request.device,
            gpus=gpus_by_type(request) if self._gpus() else {},
            gpus_key=f"{key}={request}",
            cores=self._cpus(job),
            memory=None if self.mem is None else str(self.mem),
            seconds=seconds_of(self.time),
            time=None if self.time is None else str(self.time),
            has_limits_of_its_own=self.qos is not None,
        )

    def _check_cluster(self, demand: Demand) -> None:
        """Check that the cluster has nodes that can run a job, as far as it says; a dry run says what is asked for.

        Raises:
            RefusedError: the job would wait forever.
        """
        known = known_nodes(self.partition, self.sbatch_args)
        if not isinstance(known, str):
            check(demand, known)
        if self.dry_run:
            print_once(str(demand))
            if isinstance(known, str):
                print_once(f"whether the cluster has such nodes is not checked: {known}")

    def _warn(self, job: Job) -> None:
        """Print what a container may lack, and which GPUs no worker would use."""
        texts = container_warnings(self.container_image, self.container_mounts, self.python, job.folder)
        workers = 0 if job.request.device == "cpu" else self.workers(job)
        for text in [*texts, *idle_gpus(*self._gpu_request(), workers)]:
            print_once(f"warning: {text}")

    @property
    def _mail_types(self) -> tuple[str, ...]:
        """Return on which occasions Slurm writes a mail."""
        if self.mail_type is None:
            return ("END", "FAIL") if self.mail_user is not None else ()
        return tuple(self.mail_type.split(",")) if isinstance(self.mail_type, str) else self.mail_type

    def _signal_seconds(self, job: Job) -> int:
        """Return how long before its time limit the job gets a signal; Slurm may send it a minute earlier."""
        return math.ceil(job.request.grace_seconds) + 60 if self.signal_seconds is None else self.signal_seconds

    def workers(self, job: Job) -> Literal["auto"] | int:
        """Return the number of workers per node that the options imply; auto: all GPUs that the node shows."""
        return job.request.gpus if job.request.gpus != "auto" else self._gpus() or "auto"

    def _gpus(self) -> int:
        """Return the number of GPUs per node that the options request.

        `4`, `a100:4`, and in a gres `gpu:4`, `gpu:a100:2,gpu:v100:2`.
        """
        _, request = self._gpu_request()
        return sum(gpus_by_type(request).values())

    def _gpu_request(self) -> tuple[str, str]:
        """Return the key that requests GPUs of each node, and the request; empty if there is none."""
        if self.gpus_per_node is not None:
            return "launcher.gpus_per_node", str(self.gpus_per_node)
        requests = [part for part in (self.gres or "").split(",") if part.partition(":")[0] == "gpu"]
        return "launcher.gres", ",".join(requests)

    def _cpus(self, job: Job) -> int | None:
        """Return the cores of the task of a node: those of all its workers."""
        workers = self.workers(job)
        return None if self.cpus_per_task is None else self.cpus_per_task * (1 if workers == "auto" else workers)

    def _nodes(self, job: Job, here: str) -> int:
        requested = job.request.nodes
        if here == "login":
            return 1 if requested == "auto" else int(requested)
        allocated = int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))
        if requested != "auto" and int(requested) > allocated:
            raise RefusedError(
                f"is more than the number of nodes in this allocation, {allocated}",
                key="trainer.nodes",
                value=requested,
                suggestion="Ask for more with salloc or sbatch.",
            )
        return allocated if requested == "auto" else int(requested)

    def _to_wait(self, *programs: str) -> tuple[str, ...]:
        """Return which of the programs this command needs, if it waits for its jobs."""
        return programs if self.wait else ()

    def _check(self, job: Job, nodes: int) -> None:
        """Check the options without looking at the devices, which the nodes do."""
        if not 0 <= self._signal_seconds(job) < 1 << 16:
            raise RefusedError("Slurm takes 0 to 65535", key="launcher.signal_seconds", value=self._signal_seconds(job))
        limit = seconds_of(self.time)
        if self.requeue and limit is not None and limit <= self._signal_seconds(job):
            raise RefusedError(
                f"is {limit} s, but Slurm would signal the job {self._signal_seconds(job)} s before its end to save "
                "and requeue: it would have no time to train",
                key="launcher.time",
                value=self.time,
                suggestion="Use a longer time, a smaller launcher.signal_seconds, or launcher.requeue=false.",
            )
        layout = self.layout(job, nodes)
        if layout is None:
            return
        (key, request), gpus, workers = self._gpu_request(), self._gpus(), layout.world_size // layout.nodes
        if layout.device == "cuda" and 0 < gpus < workers:
            raise RefusedError(
                f"asks for {counted(gpus, 'GPU')} of each node, and trainer.gpus={workers} workers there need one each",
                key=key,
                value=request,
                suggestion=f"Use trainer.gpus={gpus} and more trainer.nodes, or ask for {workers}.",
            )
        job.check([layout])

    def layout(self, job: Job, nodes: int) -> Layout | None:
        """Return the layout that the options imply; None where it depends on the GPUs of the nodes."""
        workers = self.workers(job)
        if workers == "auto":
            return None
        gpus = self._gpus() > 0 or job.request.device == "cuda"
        device, backend = ("cuda", "nccl") if gpus and job.request.device != "cpu" else ("cpu", "gloo")
        backend = backend if job.request.backend == "auto" else job.request.backend
        return Layout(nodes, nodes * workers, device, backend, self.cpus_per_task or 1)


# Options that are passed to sbatch as they are.
_PASSED_THROUGH = (
    "partition", "account", "qos", "time", "mem", "gpus_per_node", "gres", "constraint", "nodelist", "exclude",
    "reservation",
)  # fmt: skip

_NO_RESOURCES = tuple(f"#SBATCH --{name}" for name in ("output", "open-mode", "chdir", "job-name", "mail-"))


@cache  # once for all jobs of a sweep
def print_once(text: str) -> None:
    """Print a line of ddpexp that this command has not printed yet."""
    print_message(f"ddpexp: {text}")


def _explain_no_requeue() -> str:
    return f"job {SLURM.job_id()} ends: launcher.requeue=false"

"""launcher=slurm: on the login node it submits a job, inside an allocation it starts a step, inside a step it is a worker."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ddpexp.errors import EXIT_DONE, EXIT_FAILED, Failure, RefusedError, StoppedError
from ddpexp.launch import Job, Layout, child, team
from ddpexp.launch.fork_server import Server
from ddpexp.launch.log import Log
from ddpexp.launch.meeting import Published
from ddpexp.launch.place import Place, of_slurm_task

_POLL_SECONDS = 1.0
_ENDED = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT")


@dataclass(frozen=True)
class Slurm:
    """One task a node, which forks the node's workers from a warm server; options have the names that Slurm gives them."""

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
    wait: bool = False
    dry_run: bool = False

    def launch(self, job: Job, server: Server | None = None) -> int:
        """Do what the place asks for: submit and exit, run a step, or be a worker of one.

        Raises:
            RefusedError: Slurm is not there or refuses the job. WorkerError: this worker failed. StoppedError: a signal to
            this process ended the run.
        """
        here = where()
        if here == "step":
            if self.dry_run:
                raise RefusedError("launcher.dry_run=true: this is a task of srun already, there is nothing to submit.")
            return self._task(job, server)
        if server is not None:
            server.close()
        for program in ("srun",) if here == "allocation" else ("sbatch", "srun"):
            if shutil.which(program) is None:
                raise RefusedError(
                    f"launcher=slurm: there is no {program} on this machine, it is not in a Slurm cluster. Use launcher=spawn."
                )
        nodes = self._nodes(job, here)
        self._check(job, nodes)
        return self._submit(job, nodes) if here == "login" else self._step(job, nodes)

    def member(self, job: Job, server: Server | None = None) -> int:
        """Be the task of one node: start the node's workers; like `Launcher.launch`."""
        job.asked = replace(job.asked, nodes="auto", gpus=self._workers(job))
        rank, size = int(os.environ["SLURM_PROCID"]), int(os.environ.get("SLURM_STEP_NUM_TASKS", os.environ["SLURM_NTASKS"]))
        server = server or Server()
        try:
            way = Published.under(job.folder, _step_key(), size == 1) if size > 1 else None
            return team.run(job, Place(rank, size, nodes=size, starter="srun"), way, server)
        finally:
            server.close()

    def _task(self, job: Job, server: Server | None) -> int:
        place = of_slurm_task(job.asked)
        server = server or Server()
        try:
            way = Published.under(job.folder, _step_key(), place.nodes == 1) if place.size > 1 else None
            return team.run(job, place, way, server)
        finally:
            server.close()

    def _submit(self, job: Job, nodes: int) -> int:
        if self.dry_run:
            print(self.script(job, nodes, job.folder / "RUN_DIR"), end="")
            return EXIT_DONE
        job.prepare()
        run = job.create().resolve()
        script = run / "job.sbatch"
        script.write_text(self.script(job, nodes, run))
        done = subprocess.run(["sbatch", "--parsable", str(script)], capture_output=True, text=True)
        if done.returncode:
            raise RefusedError(f"sbatch did not take the job: {' '.join(done.stderr.split()) or done.returncode} ({script})")
        job_id = done.stdout.strip().split(";")[0]
        job.note("submitted", job_id=job_id)
        output = run / f"slurm-{job_id}.log"
        shown = os.path.relpath(output)
        print(f"submitted job {job_id}  run directory {os.path.relpath(run)}", flush=True)
        if not self.wait:
            print(f"follow it: tail -F {shlex.quote(shown)}    queue: squeue -j {job_id}    end it: scancel {job_id}")
            return EXIT_DONE
        return _follow(job_id, output)

    def _step(self, job: Job, nodes: int) -> int:
        if self.dry_run:
            print(shlex.join(self.srun(job, nodes, job.folder / "RUN_DIR")))
            return EXIT_DONE
        job.prepare()
        run = job.create().resolve()
        code = child.run(self.srun(job, nodes, run), os.environ)
        if code and not (run / "result.json").is_file():
            text = f"srun ended with exit code {code} before the job began: see what it says above"
            job.fail(Failure(rank=0, host=os.uname().nodename, kind="SrunError", message=text, exit_code=code))
        return code

    def script(self, job: Job, nodes: int, run: Path) -> str:
        """Return the text of job.sbatch: the options, the setup lines, and the step."""
        output = str(run).replace("\\", "\\\\").replace("%", "%%") + "/slurm-%j.log"
        options = {
            "job-name": self.job_name or run.parent.name,
            "output": output,
            "open-mode": "append",
            "chdir": str(Path.cwd()),
            "nodes": nodes,
            "ntasks-per-node": 1,
            "cpus-per-task": self._cpus(job),
            **{name.replace("_", "-"): getattr(self, name) for name in _PLAIN},
        }
        lines = [f"#SBATCH --{name}={_quoted(str(value), name)}" for name, value in options.items() if value is not None]
        lines += [f"#SBATCH {_quoted(word, 'launcher.sbatch_args')}" for word in self.sbatch_args]
        setup = "".join(f"{line}\n" for line in self.setup)
        return (
            "#!/bin/bash\n"
            f"# Written by ddpexp. To submit it again: sbatch {shlex.quote(str(run / 'job.sbatch'))}\n"
            + "\n".join(lines)
            + f"\n\n{setup}exec {shlex.join(self.srun(job, nodes, run))}\n"
        )

    def srun(self, job: Job, nodes: int, run: Path) -> list[str]:
        """Return the words of the step: one task a node, all ended when one fails."""
        cpus = self._cpus(job)
        container = {"container-image": self.container_image, "container-mounts": self.container_mounts}
        return [
            "srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--kill-on-bad-exit=1",
            *([f"--cpus-per-task={cpus}"] if cpus else []),  # srun does not take over what sbatch was told
            *(["--overlap"] if "SLURM_STEP_ID" in os.environ else []),  # the shell that this is typed in holds the same cores
            *(f"--{name}={value}" for name, value in container.items() if value),
            *self.srun_args,
            self.python or sys.executable, "-m", "ddpexp", "member", str(run),
        ]  # fmt: skip

    def _workers(self, job: Job) -> Literal["auto"] | int:
        """Return the workers a node that the options imply; auto leaves it to what the node shows."""
        if job.asked.gpus != "auto":
            return job.asked.gpus
        for text in (self.gpus_per_node, self.gres):
            found = (
                re.search(r"(?:^|:)(\d+)$", str(text))
                if text is not None and (text is not self.gres or "gpu" in str(text))
                else None
            )
            if found:
                return int(found[1])
        return "auto"

    def _cpus(self, job: Job) -> int | None:
        """Return the cores of our one task a node: those of all its workers."""
        workers = self._workers(job)
        return None if self.cpus_per_task is None else self.cpus_per_task * (1 if workers == "auto" else workers)

    def _nodes(self, job: Job, here: str) -> int:
        asked = job.asked.nodes
        if isinstance(asked, str) and asked != "auto":
            raise RefusedError(f"trainer.nodes={asked} is a range, which only launcher=elastic understands.")
        if here == "login":
            return 1 if asked == "auto" else int(asked)
        there = int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))
        if asked != "auto" and int(asked) > there:
            raise RefusedError(f"trainer.nodes={asked}, but this allocation has {there}: ask for more with salloc or sbatch.")
        return there if asked == "auto" else int(asked)

    def _check(self, job: Job, nodes: int) -> None:
        """Refuse what the words alone show; the devices are looked at on the nodes."""
        if nodes < 1:
            raise RefusedError(f"trainer.nodes={nodes} leaves no machine: use 1 or more.")
        if self.cpus_per_task is not None and self.cpus_per_task < 1:
            raise RefusedError(f"launcher.cpus_per_task={self.cpus_per_task}: use 1 or more.")
        workers = self._workers(job)
        if workers != "auto":
            if workers < 1:
                raise RefusedError(f"trainer.gpus={workers} starts no worker: use 1 or more.")
            gpus = self.gpus_per_node is not None or "gpu" in (self.gres or "") or job.asked.device == "cuda"
            device, backend = ("cuda", "nccl") if gpus and job.asked.device != "cpu" else ("cpu", "gloo")
            backend = backend if job.asked.backend == "auto" else job.asked.backend
            job.check(Layout(nodes, nodes * workers, device, backend, 1))


_PLAIN = ("partition", "account", "qos", "time", "mem", "gpus_per_node", "gres", "constraint", "nodelist", "exclude", "reservation")


def where(environ: Mapping[str, str] = os.environ, pid: int | None = None) -> Literal["login", "allocation", "step"]:
    """Tell the three places apart.

    A batch script has SLURM_PROCID like a task of srun, but no step. A shell that `srun --pty` opened is a task itself, and
    what is typed in it is not: it is inside an allocation.
    """
    if "SLURM_JOB_ID" not in environ:
        return "login"
    step = environ.get("SLURM_STEP_ID")
    if step is None or not step.isdigit() or int(step) >= 0xFFFFFFF0:  # the batch script's, the interactive step's
        return "allocation"
    if "SLURM_PTY_PORT" in environ and environ.get("SLURM_TASK_PID") != str(os.getpid() if pid is None else pid):
        return "allocation"
    return "step"


def _step_key() -> str:
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    return "slurm " + ".".join(os.environ.get(name, "0") for name in names)


def _quoted(value: str, name: str) -> str:
    """Quote for an #SBATCH line, which Slurm splits into words like a shell, but without any expansion."""
    if "\n" in value or "\0" in value:
        raise RefusedError(
            f"launcher.{name.removeprefix('launcher.').replace('-', '_')} has a line break, which a job script cannot hold."
        )
    if re.fullmatch(r"[\w@%+=:,./-]+", value, re.ASCII):
        return value
    escaped = re.sub(r'(["\\])', r"\\\1", value)
    return f'"{escaped}"'


def _follow(job_id: str, output: Path) -> int:
    """Show the job's output until it has ended; return its exit code."""
    shown: Log | None = None
    try:
        while True:
            state, code = _state(job_id)
            if shown is None and output.is_file():
                shown = Log.reading(output)
            for line in shown.new_lines(last=state in _ENDED) if shown is not None else ():
                print(line, flush=True)
            if state in _ENDED:
                if code == EXIT_DONE and state != "COMPLETED":
                    code = EXIT_FAILED
                if code:
                    print(f"ddpexp: job {job_id} ended as {state}", file=sys.stderr, flush=True)
                return code
            time.sleep(_POLL_SECONDS)
    except StoppedError:
        print(f"ddpexp: job {job_id} goes on; end it with scancel {job_id}", file=sys.stderr, flush=True)
        raise
    finally:
        if shown is not None:
            shown.close()


def _state(job_id: str) -> tuple[str, int]:
    """Ask Slurm for a job's state and exit code; scontrol knows them without an accounting database."""
    done = subprocess.run(["scontrol", "show", "job", "-o", job_id], capture_output=True, text=True)
    state = re.search(r"\bJobState=(\w+)", done.stdout)
    code = re.search(r"\bExitCode=(\d+):(\d+)", done.stdout)
    if done.returncode or state is None:
        if "Invalid job id" in done.stderr:
            return "COMPLETED", EXIT_FAILED  # forgotten already: nobody knows how it ended
        return "UNKNOWN", 0
    if code is None:
        return state[1], 0
    return state[1], 128 + int(code[2]) if int(code[2]) else int(code[1])

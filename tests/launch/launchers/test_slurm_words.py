"""launcher=slurm without a cluster: which of the three places this is, and the text that goes to Slurm."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ddpexp.errors import RefusedError
from ddpexp.launch import Job, WorkerRequest
from ddpexp.launch.launchers.slurm import Slurm
from ddpexp.launch.launchers.slurm_context import unused_components, where
from ddpexp.launch.launchers.slurm_follow import Silence
from ddpexp.launch.launchers.slurm_text import (
    checked_script,
    gpus_of_all_tasks,
    log_name,
    output_pattern,
    quoted,
)
from ddpexp.launch.rendezvous.environment import _has_terminal, tasks_per_node
from ddpexp.system.job_schedulers import slurm
from ddpexp.system.job_schedulers.base import UNKNOWN, JobState
from ddpexp.system.job_schedulers.slurm import seconds_of
from tests.conftest import PATIENCE, Ddpexp, calling
from tests.points import Recipe
from tests.refusals import is_about, refused

# What Slurm 22.05 sets in each place, as far as it distinguishes them.
ALLOCATION = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_JOB_NUM_NODES": "2"}
BATCH = {**ALLOCATION, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_TASK_PID": "100"}
TASK = {**BATCH, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
PTY = {**TASK, "SLURM_PTY_PORT": "40000"}


@pytest.mark.parametrize(
    ("environ", "pid", "terminals", "place"),
    [
        ({}, 100, (), "login"),
        ({"SLURM_CONF": "/etc/slurm.conf"}, 100, ("100",), "login"),
        (ALLOCATION, 200, ("200",), "allocation"),
        (BATCH, 101, (), "allocation"),
        ({**BATCH, "SLURM_STEP_ID": "4294967291"}, 101, (), "allocation"),
        ({**TASK, "SLURM_STEP_ID": "4294967290"}, 101, ("100", "101"), "allocation"),
        (TASK, 100, (), "step"),
        ({**TASK, "SLURM_STEP_ID": "17"}, 101, (), "step"),
        (PTY, 100, ("100",), "step"),
        (PTY, 101, ("100", "101"), "allocation"),
        (PTY, 101, ("100",), "allocation"),
        (TASK, 101, ("101",), "allocation"),
        (PTY, 100, (), "step"),
        (PTY, 101, (), "step"),
    ],
    ids=[
        "none", "a cluster alone", "salloc", "batch script", "batch script of newer versions", "interactive step",
        "task",
        "wrapped task", "srun --pty python", "typed in a shell of srun --pty", (
            "the same, without a terminal of its "
            "own"
        ),
        "typed in a terminal that a task opened", "task of srun in a shell of srun --pty", "wrapped task of that",
    ],
)  # fmt: skip
def test_the_environment_distinguishes_the_three_places(
    environ: dict[str, str], pid: int, terminals: tuple[str, ...], place: str
) -> None:
    assert where(environ, pid, lambda process: process in terminals) == place


def test_a_process_without_a_terminal_has_none() -> None:
    inner, outer = os.openpty()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.open(os.ttyname(outer), os.O_RDWR)  # the first one that the leader of a session opens is its terminal
        os._exit(10 + _has_terminal(str(os.getpid())))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 11
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os._exit(10 + _has_terminal(str(os.getpid())))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 10
    assert not _has_terminal("")
    os.close(inner)
    os.close(outer)


@pytest.mark.fault(71, "S9")
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("plain-1.0/a,b:c=d@e%j+", "plain-1.0/a,b:c=d@e%j+"),
        ("", '""'),
        ("two words", '"two words"'),
        ('a"b', '"a\\"b"'),
        ("it's", '"it\'s"'),
        ("a\\b", '"a\\\\b"'),
        ("#no comment", '"#no comment"'),
        ("$(x)`y`;z", '"$(x)`y`;z"'),  # Slurm expands nothing
        ("ü", '"ü"'),
    ],
)
def test_a_value_is_quoted_as_slurm_reads_it(value: str, expected: str) -> None:
    assert quoted(value, "job-name") == expected


@pytest.mark.fault(71, "S9")
@pytest.mark.parametrize(
    ("name", "key"),
    [("job-name", "launcher.job_name"), ("output", "run.dir"), ("chdir", "the path of the current folder")],
)
def test_a_line_break_is_refused_with_the_key_that_has_it(name: str, key: str) -> None:
    with refused(key):
        quoted("a\nb", name)


@pytest.mark.parametrize(
    ("run", "pattern", "log"),
    [
        ("/a b/run", "/a b/run/slurm-%j.log", "slurm-7.log"),
        ("/100%/%j", "/100%%/%%j/slurm-%j.log", "slurm-7.log"),
        ("/a\\%j", "/a\\\\%j/slurm.log", "slurm.log"),
    ],
)
def test_the_logs_pattern_stands_for_the_file_in_the_run_directory(run: str, pattern: str, log: str) -> None:
    assert (output_pattern(Path(run)), log_name(Path(run), "7")) == (pattern, log)


@pytest.mark.parametrize(
    ("text", "counts"), [("", []), ("1", [1]), ("2(x3),1", [2, 2, 2, 1]), ("4,2(x2)", [4, 2, 2]), ("1(x2)", [1, 1])]
)
def test_slurms_short_form_of_tasks_is_read(text: str, counts: list[int]) -> None:
    assert tasks_per_node(text) == counts


def job(**asked: Any) -> Job:
    return calling("module:function", [], asked=WorkerRequest(**asked))


@pytest.mark.parametrize(
    ("options", "workers"),
    [
        ({}, "auto"),
        ({"gres": "gpu:8"}, 8),
        ({"gres": "gpu:a100:4"}, 4),
        ({"gres": "gpu"}, 1),
        ({"gres": "gpu:a100"}, 1),
        ({"gres": "gpu:0"}, "auto"),
        ({"gres": "shard:2"}, "auto"),
        ({"gres": "shard:2,gpu:4"}, 4),
        ({"gres": "gpu:4,shard:2"}, 4),
        ({"gres": "gpu:a100:2,gpu:v100:1"}, 3),
        ({"gres": "none"}, "auto"),
        ({"gres": "mygpu:3"}, "auto"),
        ({"gpus_per_node": 4}, 4),
        ({"gpus_per_node": "a100:4"}, 4),
        ({"gpus_per_node": "a100:2,v100:1"}, 3),
        ({"gpus_per_node": 0}, "auto"),
        ({"gpus_per_node": 2, "gres": "gpu:4"}, 2),
    ],
)
def test_the_gpus_of_a_node_are_its_workers(options: dict[str, Any], workers: int | str) -> None:
    assert Slurm(**options).workers(job()) == workers
    assert Slurm(**options).workers(job(gpus=5)) == 5


def lines(launcher: Slurm, job: Job) -> list[str]:
    return launcher.script(job, 2, Path("/runs/one")).splitlines()


@pytest.mark.parametrize(
    ("launcher", "gpus", "cpus"),
    [
        (Slurm(cpus_per_task=3, gpus_per_node=4), "auto", 12),
        (Slurm(cpus_per_task=3), 2, 6),
        (Slurm(cpus_per_task=3), "auto", 3),
        (Slurm(gpus_per_node=4), "auto", None),
    ],
)
def test_the_one_task_of_a_node_gets_the_cores_of_all_its_workers(launcher: Slurm, gpus: Any, cpus: int | None) -> None:
    found = lines(launcher, job(gpus=gpus))
    assert [line for line in found if "cpus" in line and line.startswith("#SBATCH")] == (
        [] if cpus is None else [f"#SBATCH --cpus-per-task={cpus}"]
    )
    assert (f"--cpus-per-task={cpus}" in found[-1].split()) == (cpus is not None)


def test_every_option_has_its_line() -> None:
    names = ("partition", "account", "qos", "time", "mem", "gpus_per_node", "gres", "constraint", "nodelist", "exclude",
             "reservation", "job_name")  # fmt: skip
    values: dict[str, Any] = {name: f"{name} 1" for name in names} | {"time": "1-02:03:04"}
    found = lines(Slurm(**values, sbatch_args=("--exclusive", "--comment=a b")), job())
    for name in names:
        value = values[name] if name == "time" else f'"{values[name]}"'  # quoted where it has a space
        assert f"#SBATCH --{name.replace('_', '-')}={value}" in found
    assert found[found.index("#SBATCH --exclusive") + 1] == '#SBATCH "--comment=a b"'
    assert "#SBATCH --nodes=2" in found
    assert "#SBATCH --output=/runs/one/slurm-%j.log" in found
    # None of them is there when it was not requested; the name is the job's.
    assert [line for line in lines(Slurm(), job()) if line.startswith("#SBATCH")] == [
        "#SBATCH --job-name=ddpexp", "#SBATCH --output=/runs/one/slurm-%j.log", "#SBATCH --open-mode=append",
        f"#SBATCH --chdir={quoted(str(Path.cwd()), 'chdir')}", "#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=1",
        "#SBATCH --signal=USR2@85", "#SBATCH --requeue",
    ]  # fmt: skip


def test_a_job_is_signalled_before_its_end_so_that_it_can_resume_later() -> None:
    def found(launcher: Slurm, **asked: Any) -> list[str]:
        return [line[8:] for line in lines(launcher, job(**asked)) if "requeue" in line or "signal" in line]

    assert found(Slurm(), grace_seconds=99.5) == ["--signal=USR2@160", "--requeue"]
    assert found(Slurm(signal_seconds=30)) == ["--signal=USR2@30", "--requeue"]
    assert found(Slurm(requeue=False)) == ["--no-requeue"]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400), (90, 5400), ("1:30", 90), ("1:02:03", 3723), ("2-3", 183600), ("2-3:04", 183840), ("2-3:04:05",
            183845),
        ("0", None), (None, None), ("infinite", None), ("1:2:3:4", None),
    ],
)  # fmt: skip
def test_a_time_limit_is_read_as_slurm_reads_it(text: Any, seconds: int | None) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize(
    ("launcher", "sentence"),
    [
        (
            Slurm(time="1:25"),
            "launcher.time=1:25",
        ),
        (Slurm(signal_seconds=70000), "launcher.signal_seconds=70000"),
        (Slurm(signal_seconds=-1), "launcher.signal_seconds=-1"),
    ],
)
def test_a_time_that_leaves_none_to_train_is_refused(launcher: Slurm, sentence: str) -> None:
    with pytest.raises(RefusedError) as caught:
        launcher._check(job(), 1)
    assert is_about(caught.value, sentence)
    Slurm(time="1:25", requeue=False)._check(job(), 1)
    Slurm(time="1:26")._check(job(), 1)


def test_the_container_and_its_python_are_passed_to_srun() -> None:
    launcher = Slurm(
        container_image="a image.sqsh", container_mounts="/data:/data", python="python3", srun_args=("--mpi=none",)
    )
    assert launcher.srun(job(), 1, Path("/runs/one"))[-8:] == [
        "--container-image=a image.sqsh", "--container-mounts=/data:/data", "--mpi=none",
        "python3", "-m", "ddpexp", "member", "/runs/one",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("each", "tasks", "nodes", "overrides"),
    [
        ("", "4", 1, []),
        ("1", "4(x2)", 2, ["--gpus=8"]),
        ("1", "4(x2)", 1, ["--gpus=4"]),
        ("2", "2,1", 2, ["--gpus=6"]),
        ("a100:1", "2", 1, ["--gpus=a100:2"]),
    ],
)
def test_an_allocation_by_task_gives_the_step_all_its_gpus(
    each: str, tasks: str, nodes: int, overrides: list[str]
) -> None:
    environ = {**ALLOCATION, "SLURM_GPUS_PER_TASK": each, "SLURM_TASKS_PER_NODE": tasks}
    assert gpus_of_all_tasks(environ, nodes) == overrides


@pytest.mark.fault(70)
def test_a_member_without_srun_is_refused_with_the_command_and_writes_nothing(ddpexp: Ddpexp, tmp_path: Path) -> None:
    recipe = Recipe(ddpexp)
    for name in ("sbatch", "srun"):  # takes the job and starts nothing: a run directory that waits for srun
        (tmp_path / name).write_text("#!/bin/sh\necho 1\n")
        (tmp_path / name).chmod(0o755)
    done = recipe("launcher=slurm", environ={"PATH": str(tmp_path)})
    assert (done.code, done.err) == (0, "")
    before = {path: path.read_bytes() for path in done.run.iterdir() if path.is_file()}
    command = [sys.executable, "-m", "ddpexp", "member", str(done.run)]
    again = subprocess.run(command, env=ddpexp.environ, capture_output=True, text=True, timeout=PATIENCE)
    assert (again.returncode, again.stdout) == (2, "")
    assert again.stderr == f"ddpexp: {done.run} waits for srun: type sbatch {done.run}/job.sbatch\n"
    assert {path: path.read_bytes() for path in done.run.iterdir() if path.is_file()} == before


def test_a_signal_while_sbatch_runs_does_not_lose_the_job(ddpexp: Ddpexp, tmp_path: Path) -> None:
    recipe = Recipe(ddpexp)
    for name, text in {"sbatch": "kill -TERM $PPID; sleep 0.2; echo 12", "srun": ""}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    done = recipe("launcher=slurm", environ={"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert (done.code, done.out, done.err) == (
        128 + signal.SIGTERM,
        "",
        "ddpexp: job 12 keeps running; cancel it with scancel 12\n",
    )
    found = done.result()
    assert (found["status"], found["job_id"]) == ("submitted", "12")


def test_a_slurm_that_does_not_answer_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("squeue", "scontrol"):
        (tmp_path / name).write_text("#!/bin/sh\nexec sleep 60\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(slurm, "_ANSWER_SECONDS", 0.2)
    unknown = JobState(UNKNOWN, None, "squeue: no answer within 0.2 s")
    assert slurm.SLURM.states(["12_0", "13"]) == dict.fromkeys(("12_0", "13"), unknown)
    assert slurm.SLURM.is_over("12_0") is None


LEFT = {"SLURM_MEM_PER_CPU": "10", "SLURM_CPU_BIND_LIST": "0x1", "SLURM_HINT": "nomultithread", "SLURM_TIMELIMIT": "1"}
SET = {"SLURM_CONF": "/etc/slurm.conf", "SBATCH_ACCOUNT": "lab", "SLURM_MPI_TYPE": "pmix", "HOME": "/home/me"}


@pytest.mark.parametrize(
    ("environ", "kept"),
    [
        (SET, SET),
        ({**SET, **LEFT}, SET),
        ({**SET, **LEFT, **TASK, "PMI_RANK": "0", "PMIX_RANK": "0", "SRUN_DEBUG": "3", "SLURMD_NODENAME": "node0"},
         {name: value for name, value in SET.items() if name != "SLURM_MPI_TYPE"}),
        ({**SET, "SLURM_SUBMIT_HOST": "login", "SLURM_UMASK": "22"},  # of a job whose number was unset
         {name: value for name, value in SET.items() if name != "SLURM_MPI_TYPE"}),
        ({**SET, "SBATCH_ARRAY_INX": "0-3"}, SET),
    ],
    ids=["on a login node", "options of srun", "in a step", "after a job", "of an array"],
)  # fmt: skip
def test_a_job_inherits_nothing_of_other_jobs_and_steps(environ: dict[str, str], kept: dict[str, str]) -> None:
    assert slurm.environ_of_a_job(environ) == (kept, sorted(environ.keys() - kept.keys()))


@pytest.mark.parametrize(("size", "warns"), [(None, False), ("1", False), ("2", True), ("x", False)])
def test_components_that_are_not_used_are_warned_of(size: str | None, warns: bool) -> None:
    warning = unused_components({} if size is None else {"SLURM_HET_SIZE": size})
    assert (warning is not None) == warns
    assert not warns or "srun python -m ddpexp ... launcher=slurm : python -m ddpexp" in str(warning)


def test_a_script_with_a_secret_is_refused_with_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "q5zk-planted")
    assert checked_script("#!/bin/bash\nexport X=$MY_TOKEN\n", "job.sbatch") == b"#!/bin/bash\nexport X=$MY_TOKEN\n"
    with refused("job.sbatch"):
        checked_script("#!/bin/bash\nexport X=q5zk-planted\n", "job.sbatch")


def test_a_silence_of_slurm_is_said_once_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    silence = Silence("7", "8_2")
    for state, seconds in [("", 0), ("RUNNING", 50), ("", 30), ("", 50), ("", 30), ("", 90), ("RUNNING", 1), ("", 70)]:
        now += seconds
        silence.note(JobState(state, False) if state else JobState(UNKNOWN, None, "squeue: no answer within 15 s"))
    assert capsys.readouterr().err == (
        "ddpexp: Slurm has not reported the state of jobs 7, 8_2 for 80 s: squeue: no answer within 15 s. This command keeps "
        "asking; Ctrl-C ends the command alone, and nothing in Slurm.\n"
    )

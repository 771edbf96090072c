"""launcher=slurm on a real cluster of two hosts: the login node, allocations, steps, and what ends them."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pexpect
import pytest

from ddpexp.launch.launchers.slurm import Slurm
from ddpexp.launch.launchers.slurm_follow import follow_job
from ddpexp.launch.launchers.slurm_text import log_name
from ddpexp.system.job_schedulers.slurm import SLURM
from tests.conftest import OWN_SERVER, PATIENCE, ZYGOTES, Ddpexp, Done, calling, ddpexp_processes, finish
from tests.points import Recipe, wait_for
from tests.refusals import command_refused

pytestmark = pytest.mark.slurm

CODE = """\
from pathlib import Path

from ddpexp.errors import RefusedError


class Act(Sides):
    # Does `how` in rank `rank` at its first step.
    def __init__(self, how, rank=1):
        self.how, self.rank = how, rank

    def step(self, model, batch):
        if RANK == self.rank:
            WAYS[self.how]()
        return super().step(model, batch)


def raises():
    raise ValueError("no luck")


def refuses():
    raise RefusedError("data.train=96 is not to my taste: use another number.")


WAYS = {
    "raise": raises,
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "sys.exit(7)": lambda: sys.exit(7),
    "refuse": refuses,
}


class Slow(Sides):
    # Twenty milliseconds a step, with a mark for every rank that has begun to train.
    def __init__(self, folder):
        self.folder = folder

    def step(self, model, batch):
        open(f"{self.folder}/train{RANK}", "w").close()
        time.sleep(0.02)
        return super().step(model, batch)


def load_when_there(folder, **options):
    if not Path(folder, "there").exists():
        raise RuntimeError("nothing is there")
    return load(**options)


def load_never(folder, **options):
    open(f"{folder}/train{RANK}", "w").close()
    time.sleep(600)


class Shows(Sides):
    # Writes the GPUs that Slurm shows to each rank, and the job's name.
    def __init__(self, folder):
        Path(folder, f"{RANK}.gpus").write_text(os.environ.get("CUDA_VISIBLE_DEVICES", "none"))
        Path(folder, f"{RANK}.name").write_text(os.environ["SLURM_JOB_NAME"])


class Keeps(Sides):
    # Records the arguments it got.
    def __init__(self, folder, text):
        Path(folder, f"{RANK}.text").write_text(text)
"""

NODES = ("node0", "node1")
WAIT = ("launcher=slurm", "launcher.wait=true", "trainer.threads=1")
TWO_HOSTS = ("salloc", "-Q", "-N2")
FOUR_TASKS = ("srun", "-Q", "-N2", "-n4", "--ntasks-per-node=2")
TWO_BY_TWO = ("trainer.nodes=2", "trainer.gpus=2")


@pytest.fixture(scope="module")
def environ(warm_environ: dict[str, str]) -> dict[str, str]:
    """The environment of jobs whose fork servers are forks: no processes of a step's, so signals need OWN_SERVER."""
    return warm_environ


@pytest.fixture(scope="module")
def cluster() -> str:
    """The file in which Slurm's commands find the cluster."""
    conf = os.environ.get("SLURM_CONF")
    if not conf:
        pytest.skip("SLURM_CONF is not set: there is no Slurm cluster to run on")
    return conf


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, environ: dict[str, str], cluster: str) -> Recipe:
    # As from a login node, wherever these tests run themselves.
    login = {
        name: value for name, value in environ.items() if not name.startswith(("SLURM_", "SBATCH_", "SALLOC_", "SRUN_"))
    }
    return Recipe(Ddpexp(tmp_path_factory.mktemp("slurm"), {**login, "SLURM_CONF": cluster}), CODE)


@pytest.fixture(scope="module")
def spawned(recipe: Recipe) -> Callable[[int], Done]:
    """The same training with launcher=spawn, once for each world size."""
    known: dict[int, Done] = {}

    def run(size: int) -> Done:
        if size not in known:
            environ = OWN_SERVER if size == 4 else None  # another seed of Python's hashes than the jobs have
            known[size] = recipe(f"trainer.gpus={size}", "trainer.threads=1", environ=environ)
            assert known[size].code == 0, known[size].err
        return known[size]

    return run


def typed(recipe: Recipe, program: Sequence[str], *overrides: str, timeout: float = PATIENCE) -> Done:
    """Run the command as the last words of another program: salloc, srun."""
    process, run = start(recipe, program, *overrides)
    return finish(process, run, timeout)


def start(
    recipe: Recipe, program: Sequence[str], *overrides: str, environ: Mapping[str, str] = MappingProxyType({})
) -> tuple[subprocess.Popen[str], Path]:
    ours, run = recipe.words("launcher=slurm", "trainer.threads=1", *overrides)
    process = subprocess.Popen(
        [*program, sys.executable, "-m", "ddpexp", *ours],
        cwd=recipe.ddpexp.folder, env={**recipe.ddpexp.environ, **environ}, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    return process, run


def slurm_output(*overrides: str) -> str:
    """Run one of Slurm's commands and return its output."""
    return subprocess.run(overrides, capture_output=True, text=True, timeout=PATIENCE, check=True).stdout


def job_of(done: Done) -> str:
    found = re.match(r"submitted job (\d+)  run directory ", done.out)
    assert found, done.out + done.err
    return found[1]


def shown_job(job_id: str) -> str:
    return slurm_output("scontrol", "show", "job", job_id)


def state_of(job_id: str) -> tuple[str, str]:
    """Return a job's state and exit code as Slurm keeps them, after its end."""
    wait_for(
        lambda: not re.search(r"^ +JobState=(PENDING|CONFIGURING|RUNNING|COMPLETING)", shown_job(job_id), re.MULTILINE)
    )
    text = shown_job(job_id)
    found = re.search(r"^ +JobState=(\w+) .*^ +Requeue=\d [^\n]* ExitCode=(\S+)", text, re.MULTILINE | re.DOTALL)
    assert found
    return found[1], found[2]


def error_of(run: Path) -> dict[str, Any]:
    error: dict[str, Any] = json.loads((run / "error.json").read_text())
    return error


def quiet() -> bool:
    return not ddpexp_processes(but=ZYGOTES)


# The login node.


def test_the_login_node_submits_says_how_to_follow_and_exits(recipe: Recipe, spawned: Callable[[int], Done]) -> None:
    done = recipe("launcher=slurm", "trainer.threads=1", *TWO_BY_TWO)
    assert (done.code, done.err) == (0, "")
    result = done.result()
    job_id = job_of(done)
    log = done.run / f"slurm-{job_id}.log"
    assert done.out.splitlines() == [
        f"submitted job {job_id}  run directory {done.run.name}",
        f"follow it: tail -F {done.run.name}/{log.name}    queue: squeue -j {job_id}    end it: scancel {job_id}",
    ]
    assert (result["status"], result["job_id"]) == ("submitted", job_id)
    assert state_of(job_id) == ("COMPLETED", "0:0")
    result = done.result()
    assert (result["status"], result["world_size"]) == ("done", 4)
    assert result["weights_sha256"] == spawned(4).result()["weights_sha256"]
    assert done.manifest()["hosts"] == list(NODES)
    assert "done    eval/loss" in log.read_text()
    # A finished run stays as it is when somebody submits it again.
    before = {path.name: path.read_bytes() for path in done.run.iterdir() if path.is_file()}
    again = slurm_output("sbatch", "--parsable", str(done.run / "job.sbatch")).strip()
    assert state_of(again) == ("COMPLETED", "0:0")
    text = (done.run / f"slurm-{again}.log").read_text()
    assert "is finished at step" in text
    assert {name: (done.run / name).read_bytes() for name in before} == before
    assert not (done.run / "error.json").exists()
    # Trained again, the job compares itself with it.
    trust = ["--config-dir", str(recipe.folder / "conf")]
    repeated = recipe.ddpexp("rerun", done.run.name, *trust, "--exact", "run.dir=repeated")
    job_id = job_of(repeated)
    assert state_of(job_id) == ("COMPLETED", "0:0")
    log = recipe.ddpexp.folder / f"repeated/slurm-{job_id}.log"
    assert f"the weights and the metrics are those of {done.run}, to the bit" in log.read_text()


@pytest.mark.slow
def test_a_failed_job_can_be_resubmitted_with_sbatch(recipe: Recipe, tmp_path: Path) -> None:
    marks = ("data._target_=points.load_when_there", f"+data.folder={tmp_path}")
    done = recipe(*WAIT, *TWO_BY_TWO, *marks)
    assert done.code == 1
    assert done.result()["status"] == "failed"
    assert error_of(done.run)["message"] == "nothing is there"
    (tmp_path / "there").touch()
    again = slurm_output("sbatch", "--parsable", str(done.run / "job.sbatch")).strip()
    assert state_of(again) == ("COMPLETED", "0:0")
    assert done.result()["status"] == "done"
    assert not (done.run / "error.json").exists()  # why it failed is kept beside
    assert len(list(done.run.glob("error-*.json"))) == 1


@pytest.mark.slow
def test_waiting_shows_the_jobs_log_once(recipe: Recipe, tmp_path: Path) -> None:
    odd = tmp_path / "odd"
    odd.write_bytes(b"\x1b[31mred\n 1%\r 2%\r\x1b[2Jcleared\0\n")
    done = recipe(*WAIT, *TWO_BY_TWO, f"launcher.setup=[cat {odd}]")
    assert (done.code, done.err) == (0, "")
    first, *lines = done.out.splitlines()
    assert first.startswith("submitted job ")
    assert lines[:2] == ["\x1b[31mred\x1b[m", r"\x1b[2Jcleared"]
    assert lines[2:] == (done.run / f"slurm-{job_of(done)}.log").read_bytes().decode().split("\n")[2:-1]
    assert [line.split()[0] for line in lines if line.startswith(("recipe", "done"))] == ["recipe", "done"]
    assert "Warning" not in done.out


FAILURES = [
    ("raise", 1, 1, "ValueError", "no luck", "node0"),
    ("SIGKILL", 3, 1, "SIGKILL", "killed by SIGKILL", "node1"),
    ("sys.exit(7)", 2, 7, "SystemExit", "the recipe ended the process: sys.exit(7)", "node1"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "rank", "code", "kind", "message", "host"), FAILURES, ids=[case[0] for case in FAILURES]
)
def test_one_failed_rank_ends_the_job_at_once_with_its_cause(
    recipe: Recipe, how: str, rank: int, code: int, kind: str, message: str, host: str
) -> None:
    done = recipe(
        *WAIT,
        *TWO_BY_TWO,
        "task._target_=points.Act",
        f"+task.how='{how}'",
        f"+task.rank={rank}",
        "trainer.epochs=50000",
    )
    job_id = job_of(done)
    assert done.code == code
    assert done.err.endswith(f"ddpexp: job {job_id} ended as FAILED\n")
    assert state_of(job_id) == ("FAILED", f"{code}:0")
    error = error_of(done.run)
    assert (error["rank"], error["kind"], error["message"], error["host"]) == (rank, kind, message, host)
    assert done.result()["status"] == "failed"
    log = (done.run / f"slurm-{job_id}.log").read_text()
    assert f"ddpexp: rank {rank} on {host} failed (train" in log
    if how == "raise":
        assert "Traceback" in log
        assert 'points.py", line ' in log
    assert message.rpartition(" ")[2] in (done.run / f"ranks/{rank}.log").read_text() or how == "SIGKILL"


@pytest.mark.slow
def test_what_the_workers_refuse_is_one_sentence_and_2(recipe: Recipe) -> None:
    done = recipe(*WAIT, *TWO_BY_TWO, "task._target_=points.Act", "+task.how=refuse", "+task.rank=3")
    job_id = job_of(done)
    assert done.code == 2
    assert state_of(job_id) == ("FAILED", "2:0")
    assert "ddpexp: data.train=96 is not to my taste: use another number.\n" in done.out
    assert "Traceback" not in done.out + done.err
    assert not done.run.exists()  # as any refused start


def test_a_job_that_ends_before_its_command_begins_is_written_down(recipe: Recipe) -> None:
    done = recipe(*WAIT, "launcher.setup=[exit 3]")
    job_id = job_of(done)
    assert (done.code, done.err) == (3, f"ddpexp: job {job_id} ended as FAILED\n")
    assert done.result()["status"] == "failed"
    assert error_of(done.run)["message"].startswith(f"job {job_id} ended as FAILED before its command began")


def test_a_batch_that_does_not_split_is_refused_before_anything_is_written(recipe: Recipe) -> None:
    done = recipe("launcher=slurm", "trainer.nodes=5", "trainer.gpus=1")
    assert (done.code, done.out) == (2, "")
    assert "does not split over 5 workers" in done.err
    assert not done.run.exists()


@pytest.mark.fault(70)
def test_a_machine_without_slurm_says_what_to_do(recipe: Recipe, tmp_path: Path) -> None:
    done = recipe("launcher=slurm", environ={"PATH": str(tmp_path)})
    assert (done.code, done.out) == (2, "")
    assert done.err == (
        "ddpexp: launcher=slurm needs sbatch, which this machine does not have: it is not in a Slurm cluster. Use "
        "launcher=spawn.\n"
    )
    assert not done.run.exists()


def container(tmp_path: Path, cluster: str, *programs: str) -> dict[str, str]:
    """Return the variables of a container that has its own scontrol, which the cluster does not answer."""
    conf, folder = tmp_path / "slurm.conf", tmp_path / "bin"
    conf.write_text(f"{Path(cluster).read_text()}\nAuthInfo=socket={tmp_path}/no-munge\n")
    folder.mkdir()
    for program in programs:
        (folder / program).symlink_to(found) if (found := shutil.which(program)) else None
    own = folder / "scontrol"
    own.write_text(f'#!/bin/sh\nSLURM_CONF={conf} exec {shutil.which("scontrol")} "$@"\n')
    own.chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def test_a_part_of_slurm_alone_is_refused(recipe: Recipe, tmp_path: Path, cluster: str) -> None:
    environ = {"PATH": f"{container(tmp_path, cluster, 'sbatch', 'srun')['PATH'].partition(':')[0]}"}
    Path(environ["PATH"], "scontrol").unlink()
    done = recipe(*WAIT, environ=environ)
    assert (done.code, done.out) == (2, "")
    assert "sbatch is on this machine, and scontrol is not" in done.err
    assert "launcher.wait=false." in done.err
    assert not done.run.exists()


@pytest.mark.slow
def test_a_job_of_which_slurm_tells_nothing_tells_its_end_itself(recipe: Recipe, tmp_path: Path, cluster: str) -> None:
    environ = container(tmp_path, cluster)
    refused = subprocess.run(
        [f"{tmp_path}/bin/scontrol", "show", "job"], capture_output=True, text=True, timeout=PATIENCE
    )
    assert "Munge" in refused.stderr
    done = recipe(*WAIT, *TWO_BY_TWO, environ=environ)
    assert (done.code, done.err) == (0, "")
    assert "done    eval/loss" in done.out
    failed = recipe(*WAIT, *TWO_BY_TWO, "task._target_=points.Act", "+task.how=raise", environ=environ)
    assert (failed.code, failed.result()["status"]) == (1, "failed")


def test_every_option_reaches_slurm(recipe: Recipe) -> None:
    options = {
        "partition": "main", "time": "1:02:00", "mem": "2G", "cpus_per_task": "3", "gres": "gpu:2", "nodelist": "node1",
        "account": "somebody", "job_name": "named",
    }  # fmt: skip
    overrides = [f"launcher.{name}={value}" for name, value in options.items()]
    done = recipe(
        "launcher=slurm", *overrides, "launcher.sbatch_args=['--begin=now+1hour','--comment=two words']",
        "launcher.setup=['module() { echo \"loads $*\"; }','module load \"a b\"']", "launcher.srun_args=[--unbuffered]",
    )  # fmt: skip
    assert (done.code, done.err) == (0, "")
    job_id = job_of(done)
    text = shown_job(job_id)
    for shown in (
        "JobName=named", "Partition=main", "TimeLimit=01:02:00", "MinMemoryNode=2G", "CPUs/Task=6", "ReqNodeList=node1",
        "Account=somebody", "Comment=two words", f"WorkDir={recipe.ddpexp.folder}",
        f"StdOut={done.run}/slurm-{job_id}.log",
    ):  # fmt: skip
        assert f"{shown}\n" in text or f"{shown} " in text, (shown, text)
    assert "TresPerNode=gres:gpu:2\n" in text
    slurm_output("scancel", job_id)
    assert (done.run / "job.sbatch").read_text().splitlines()[-4:] == [
        "",
        'module() { echo "loads $*"; }',
        'module load "a b"',
        "exec srun --nodes=1 --ntasks=1 --ntasks-per-node=1 --kill-on-bad-exit=1 --cpus-per-task=6 --unbuffered "
        f"{sys.executable} -m ddpexp member {done.run}",
    ]


@pytest.mark.fault(70)
@pytest.mark.parametrize(
    ("option", "overrides"),
    [
        ("constraint=nosuch", "Invalid feature specification"),
        ("reservation=nosuch", "Requested reservation is invalid"),
        ("exclude='node[0-1]'", "Requested node configuration is not available"),
        ("partition=nosuch", "invalid partition specified: nosuch"),
    ],
)
def test_what_sbatch_refuses_is_2_with_its_message(recipe: Recipe, option: str, overrides: str) -> None:
    done = recipe("launcher=slurm", f"launcher.{option}", "trainer.gpus=1", "trainer.device=cpu")
    assert (done.code, done.out) == (2, "")
    assert re.fullmatch(
        rf"ddpexp: sbatch rejected the job: .*{overrides}.* launcher.dry_run=true prints its script.\n", done.err
    )
    assert not done.run.exists()


def test_a_dry_run_prints_the_script_and_writes_nothing(recipe: Recipe) -> None:
    done = recipe("launcher=slurm", "launcher.dry_run=true", *TWO_BY_TWO)
    assert done.code == 0
    assert done.err.startswith("ddpexp: asks for 2 nodes, each with no GPUs (launcher.gpus_per_node=2 asks for them)")
    assert "not checked" not in done.err
    lines = done.out.splitlines()
    assert lines[0] == "#!/bin/bash"
    assert "#SBATCH --nodes=2" in lines
    assert lines[-1].startswith("exec srun --nodes=2 --ntasks=2 --ntasks-per-node=1 ")
    assert lines[-1].endswith(f" member {done.run}")
    assert not done.run.exists()
    # On a machine without Slurm too.
    elsewhere = recipe("launcher=slurm", "launcher.dry_run=true", environ={"PATH": ""})
    assert elsewhere.code == 0
    assert elsewhere.err.endswith("is not checked: sinfo: it is not on this machine\n")


@pytest.mark.variants(1)
@pytest.mark.parametrize("is_dry", [False, True])
def test_what_no_node_can_run_is_refused_before_anything_is_written(recipe: Recipe, is_dry: bool) -> None:
    done = recipe("launcher=slurm", "launcher.gpus_per_node=12", f"launcher.dry_run={is_dry}")
    command_refused(done, "launcher.gpus_per_node=12: launcher.gpus_per_node=8")
    done = recipe("launcher=slurm", "launcher.gpus_per_node=4", "trainer.gpus=8", f"launcher.dry_run={is_dry}")
    command_refused(done, "launcher.gpus_per_node=4: trainer.gpus=4")
    assert not done.run.exists()


HOSTILE = [
    "two  words", "\"double' quotes", "$(touch pwned)`touch pwned`;touch pwned", "back\\slash", "back\\%j",
    "\\", "ünï☃ ",
    "-x --wrap=y", "#%j 100%", "~", "a JobState=COMPLETED Reason=None ExitCode=0:0", "n" * 250,
]  # fmt: skip


@pytest.mark.variants(5)
@pytest.mark.fault(71, "S9")
@pytest.mark.parametrize("name", ["", *HOSTILE])
def test_hostile_names_and_paths_reach_slurm_unchanged_and_run_nothing(
    cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    run = tmp_path / name / "run"
    run.mkdir(parents=True)
    monkeypatch.chdir(run.parent)
    setup = ('printf "%s\\n%s" "$SLURM_JOB_NAME" "$PWD"', "exit 5")
    script = run / "job.sbatch"
    script.write_text(
        Slurm(job_name=name, setup=setup, sbatch_args=(f"--comment={name}",)).script(calling("none", []), 1, run)
    )
    done = subprocess.run(["sbatch", "--parsable", str(script)], capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stderr) == (0, "")
    job_id = done.stdout.strip()
    assert state_of(job_id) == ("FAILED", "5:0")
    state, code = SLURM.state(job_id)
    assert (state.name, state.is_over, code) == ("FAILED", True, 5)
    assert follow_job(job_id, run / "none") == ("FAILED", 5)
    assert (run / log_name(run, job_id)).read_text() == f"{name}\n{run.parent}"
    assert sorted(path.name for path in run.iterdir()) == ["job.sbatch", log_name(run, job_id)]
    assert not list(tmp_path.rglob("pwned"))


@pytest.mark.slow
@pytest.mark.fault(71, "S9")
def test_a_training_with_a_hostile_name_and_run_directory_ends_well(recipe: Recipe) -> None:
    hostile = 'it\'s "a" $(touch pwned);`touch pwned` 100% %j b\\s ünï☃'
    run = recipe.ddpexp.folder / hostile / "run"
    quoted = hostile.replace("'", "\\'")
    done = recipe(*WAIT, *TWO_BY_TWO, f"launcher.job_name='{quoted}'", f"run.dir='{recipe.ddpexp.folder}/{quoted}/run'")
    assert (done.code, done.err) == (0, "")
    assert json.loads((run / "result.json").read_text())["status"] == "done"
    assert f"JobName={hostile} UserId" in slurm_output("scontrol", "show", "job", "-o", job_of(done))
    assert "done    eval/loss" in (run / "slurm.log").read_text()
    assert not list(recipe.ddpexp.folder.rglob("pwned"))


@pytest.mark.variants(1)
@pytest.mark.fault(71, "S9")
@pytest.mark.parametrize("where", ["sbatch", "salloc", "srun"])
def test_hostile_overrides_reach_every_rank_unchanged(recipe: Recipe, tmp_path: Path, where: str) -> None:
    text = (
        "-x --wrap=y  \n$(touch pwned) `touch pwned`; touch pwned & 'one' \"two\": 100% # %j b\\s ünï☃ " + "long" * 75
    )
    quoted = text.replace("'", "\\'")
    overrides = (
        "task._target_=points.Keeps",
        f"+task.folder={tmp_path}",
        f"+task.text='{quoted}'",
        "launcher.job_name=" + "n" * 300,
    )
    if where == "sbatch":
        done = recipe(*WAIT, *TWO_BY_TWO, *overrides)
    else:
        done = typed(
            recipe,
            TWO_HOSTS if where == "salloc" else FOUR_TASKS,
            *overrides,
            *(("trainer.gpus=2",) if where == "salloc" else ()),
        )
    assert done.code == 0, done.err
    assert {path.name: path.read_text() for path in tmp_path.glob("*.text")} == {
        f"{rank}.text": text for rank in range(4)
    }
    assert not [*recipe.ddpexp.folder.rglob("pwned"), *tmp_path.rglob("pwned"), *Path.cwd().glob("pwned")]
    if where == "sbatch":
        assert f"JobName={'n' * 300} " in slurm_output("scontrol", "show", "job", "-o", job_of(done))


@pytest.mark.slow
@pytest.mark.fault(70)
def test_a_controller_that_is_down_ends_with_2_and_slurms_message(recipe: Recipe, cluster: str, tmp_path: Path) -> None:
    conf = tmp_path / "slurm.conf"
    conf.write_text(Path(cluster).read_text() + "SlurmctldPort=9\n")  # where nobody listens, as when it is down
    done = recipe("launcher=slurm", environ={"SLURM_CONF": str(conf)})
    assert (done.code, done.out) == (2, "")
    assert re.match(r"ddpexp: sbatch rejected the job: .*Unable to contact slurm controller", done.err), done.err
    assert not done.run.exists()


@pytest.mark.fault(71, "S9")
def test_a_line_break_is_refused_before_anything_is_written(recipe: Recipe) -> None:
    for word in ("launcher.job_name='a\nb'", "launcher.sbatch_args=['--comment=a\nb']"):
        done = recipe("launcher=slurm", word)
        assert (done.code, done.out) == (2, "")
        key = word.partition("=")[0]
        assert done.err.startswith(f"ddpexp: {key} has a line break, which a job script cannot hold: ")
        assert not done.run.exists()


def slow(tmp_path: Path) -> tuple[str, ...]:
    """Words for a run that lasts until it is ended."""
    return ("task._target_=points.Slow", f"+task.folder={tmp_path}", "trainer.epochs=50000", "trainer.log_every=1")


def begun(folder: Path, size: int) -> bool:
    return len(list(folder.glob("train*"))) == size


def test_a_running_job_listens_on_its_hosts_own_addresses_alone_and_scancel_leaves_nothing(
    recipe: Recipe, tmp_path: Path
) -> None:
    done = recipe("launcher=slurm", *TWO_BY_TWO, *slow(tmp_path), environ=OWN_SERVER)
    wait_for(lambda: begun(tmp_path, 4))
    found = listening()
    assert found  # the store, and gloo's connections
    assert found <= {"127.0.0.1", *map(socket.gethostbyname, NODES)}
    slurm_output("scancel", job_of(done))
    wait_for(quiet)
    assert state_of(job_of(done))[0] == "CANCELLED"
    assert done.result()["status"] == "interrupted"
    assert done.result()["step"] > 0
    assert not (done.run / "error.json").exists()


def listening() -> set[str]:
    """Return the addresses on which the Python processes of these tests listen, each seen in its own network."""
    found = set()
    for pid in ddpexp_processes():
        proc = Path("/proc", str(pid))
        try:
            if not (proc / "comm").read_text().startswith("python"):
                continue
            inodes = {
                os.readlink(link)[8:-1] for link in (proc / "fd").iterdir() if os.readlink(link).startswith("socket:[")
            }
            lines = [
                line.split() for name in ("tcp", "tcp6") for line in (proc / "net" / name).read_text().splitlines()[1:]
            ]
        except OSError:
            continue  # it has ended meanwhile
        for line in lines:
            if line[3] == "0A" and line[9] in inodes:  # Source: proc(5), TCP_LISTEN
                raw = bytes.fromhex(line[1].partition(":")[0])
                overrides = [raw[place : place + 4][::-1] for place in range(0, len(raw), 4)]
                found.add(
                    socket.inet_ntop(socket.AF_INET if len(overrides) == 1 else socket.AF_INET6, b"".join(overrides))
                )
    return found


@pytest.mark.slow
def test_ctrl_c_while_waiting_leaves_the_job_alone(recipe: Recipe, tmp_path: Path) -> None:
    process, run = recipe.start(*WAIT, *slow(tmp_path), "trainer.gpus=2", environ=OWN_SERVER)
    wait_for(lambda: begun(tmp_path, 2))
    process.send_signal(signal.SIGINT)
    done = finish(process, run)
    job_id = job_of(done)
    assert done.code == 128 + signal.SIGINT
    assert done.err == f"ddpexp: job {job_id} keeps running; cancel it with scancel {job_id}\n"
    assert not (run / "result.json").exists()
    assert re.search(r"JobState=RUNNING", shown_job(job_id))
    slurm_output("scancel", job_id)
    wait_for(quiet)
    assert done.result()["status"] == "interrupted"


@pytest.mark.slow
def test_a_second_job_in_the_run_directory_of_a_running_one_is_refused(recipe: Recipe, tmp_path: Path) -> None:
    done = recipe("launcher=slurm", *TWO_BY_TWO, *slow(tmp_path), environ=OWN_SERVER)
    wait_for(lambda: begun(tmp_path, 4))
    again = slurm_output("sbatch", "--parsable", str(done.run / "job.sbatch")).strip()
    assert state_of(again) == ("FAILED", "2:0")
    text = (done.run / f"slurm-{again}.log").read_text()
    assert f"ddpexp: job {job_of(done)} still runs in {done.run}. Wait for its end" in text
    assert not (done.run / "error.json").exists()
    assert not (done.run / "result.json").exists()
    records = done.run / "metrics.jsonl"
    size = records.stat().st_size
    wait_for(lambda: records.stat().st_size > size)
    slurm_output("scancel", job_of(done))
    wait_for(quiet)
    assert done.result()["status"] == "interrupted"


# Inside an allocation.


def test_an_allocation_of_two_hosts_runs_a_step_on_both(recipe: Recipe, spawned: Callable[[int], Done]) -> None:
    done = typed(recipe, TWO_HOSTS, "trainer.gpus=2")
    assert (done.code, done.err) == (0, "")
    assert done.manifest()["hosts"] == list(NODES)
    assert done.result()["weights_sha256"] == spawned(4).result()["weights_sha256"]
    assert "done    eval/loss" in done.out
    assert not list(done.run.glob("*.sbatch"))


def test_the_users_own_batch_script_is_an_allocation(recipe: Recipe, spawned: Callable[[int], Done]) -> None:
    overrides, run = recipe.words("launcher=slurm", "trainer.threads=1", "trainer.gpus=1")
    script = recipe.ddpexp.folder / "own.sbatch"
    script.write_text(
        f"#!/bin/bash\n#SBATCH -N2 --ntasks-per-node=1\n{shlex.join([sys.executable, '-m', 'ddpexp', *overrides])}\n"
    )
    log = recipe.ddpexp.folder / "own.log"
    done = subprocess.run(
        ["sbatch", "--parsable", f"--output={log}", str(script)],
        cwd=recipe.ddpexp.folder, env=recipe.ddpexp.environ, capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    assert state_of(done.stdout.strip()) == ("COMPLETED", "0:0"), log.read_text()
    ended = Done(0, log.read_text(), "", run)
    assert ended.manifest()["hosts"] == list(NODES)
    assert ended.result()["weights_sha256"] == spawned(2).result()["weights_sha256"]


def test_a_failed_step_gives_an_allocation_its_exit_code(recipe: Recipe) -> None:
    done = typed(recipe, TWO_HOSTS, "trainer.gpus=1", "task._target_=points.Act", "+task.how='sys.exit(7)'")
    assert done.code == 7
    error = error_of(done.run)
    assert (error["rank"], error["host"], done.result()["status"]) == (1, "node1", "failed")
    assert "ddpexp: rank 1 on node1 failed (train" in done.err


@pytest.mark.slow
def test_ctrl_c_in_an_allocation_ends_the_step_and_is_written_down(recipe: Recipe, tmp_path: Path) -> None:
    process, run = start(recipe, TWO_HOSTS, "trainer.gpus=1", *slow(tmp_path), environ=OWN_SERVER)
    wait_for(lambda: begun(tmp_path, 2))
    [ours] = [pid for pid in ddpexp_processes() if parent(pid) == process.pid]
    os.kill(ours, signal.SIGINT)
    done = finish(process, run)
    assert done.code == 128 + signal.SIGINT
    assert done.result()["status"] == "interrupted"
    assert done.err.count("ddpexp: interrupted by SIGINT; saved at step ") == 1
    assert f"step-{done.result()['step']:08}" in [path.name for path in (run / "checkpoints").iterdir()]
    assert not (run / "error.json").exists()
    wait_for(quiet)


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def test_a_dry_run_in_an_allocation_prints_the_srun_line(recipe: Recipe) -> None:
    done = typed(recipe, TWO_HOSTS, "launcher.dry_run=true", "launcher.cpus_per_task=2", "trainer.gpus=3")
    assert (done.code, done.err) == (0, "")
    command = shlex.split(done.out)
    options = [
        "--disable-status",
        "--nodes=2",
        "--ntasks=2",
        "--ntasks-per-node=1",
        "--kill-on-bad-exit=1",
        "--cpus-per-task=6",
    ]
    assert command[:7] == ["srun", *options]
    assert command[7:-1] == [sys.executable, "-m", "ddpexp", "member"]
    assert not done.run.exists()


@pytest.mark.variants(1)
@pytest.mark.parametrize(
    ("options", "shown"),
    [(("--ntasks-per-node=2", "--gpus-per-task=2"), "0,1,2,3"), (("--gpus-per-node=3",), "0,1,2"), ((), "none")],
    ids=["per-task", "per-node", "none"],
)
def test_the_step_sees_all_gpus_of_an_allocation(
    recipe: Recipe, tmp_path: Path, options: tuple[str, ...], shown: str
) -> None:
    task = ("task._target_=points.Shows", f"+task.folder={tmp_path}")
    done = typed(recipe, [*TWO_HOSTS, *options], *task, "trainer.gpus=1", "trainer.device=cpu")
    assert (done.code, done.err) == (0, "")
    assert {path.name: path.read_text() for path in tmp_path.glob("*.gpus")} == {"0.gpus": shown, "1.gpus": shown}


def test_more_nodes_than_the_allocation_has_are_refused(recipe: Recipe) -> None:
    done = typed(recipe, TWO_HOSTS, "trainer.nodes=3")
    assert (done.code, done.out) == (2, "")
    assert (
        done.err
        == "ddpexp: trainer.nodes=3 is more than the number of nodes in this allocation, 2. Ask for more with salloc or sbatch.\n"
    )
    assert not done.run.exists()


@pytest.mark.variants(1)
@pytest.mark.parametrize("program", [TWO_HOSTS, ("srun", "-Q", "-N2", "-n2")], ids=["allocation", "step"])
def test_what_the_ranks_refuse_leaves_no_folder(recipe: Recipe, program: tuple[str, ...]) -> None:
    refused = ("trainer.freeze=[nothing]", "run.dir=made/here/run")
    done = typed(recipe, program, *refused)
    assert done.code == 2
    assert "ddpexp: trainer.freeze=[nothing] matches no parameter" in done.err
    assert not (recipe.ddpexp.folder / "made").exists()


# Inside a step.


@pytest.mark.variants(1)
@pytest.mark.parametrize("tasks", [4, 3], ids=["even", "uneven"])
def test_each_task_of_srun_is_a_rank(recipe: Recipe, spawned: Callable[[int], Done], tasks: int) -> None:
    done = typed(recipe, ["srun", "-Q", "-N2", f"-n{tasks}"])
    assert (done.code, done.err) == (0, "")
    assert (done.manifest()["hosts"], done.manifest()["world"]["nodes"]) == (list(NODES), 2)
    assert done.result()["weights_sha256"] == spawned(tasks).result()["weights_sha256"]
    assert done.out.count("recipe  points") == 1
    assert sorted(path.name for path in (done.run / "ranks").iterdir()) == [f"{rank}.log" for rank in range(tasks)]
    assert not list(done.run.parent.glob(".meeting-*"))


@pytest.mark.slow
def test_a_wrapper_script_around_a_task_changes_nothing(recipe: Recipe, spawned: Callable[[int], Done]) -> None:
    wrapper = recipe.ddpexp.folder / "wrapper"
    wrapper.write_text('#!/bin/bash\nulimit -c 0\n"$@"\n')
    wrapper.chmod(0o755)
    done = typed(recipe, ["srun", "-Q", "-N2", "-n2", str(wrapper)])
    assert (done.code, done.err) == (0, "")
    assert done.result()["weights_sha256"] == spawned(2).result()["weights_sha256"]


@pytest.mark.slow
def test_each_task_sees_the_gpu_that_srun_gave_it(recipe: Recipe, tmp_path: Path) -> None:
    task = ("task._target_=points.Shows", f"+task.folder={tmp_path}")
    done = typed(recipe, [*FOUR_TASKS, "--gpus-per-task=1"], *task, "trainer.device=cpu")
    assert (done.code, done.err) == (0, "")
    shown = {path.name: path.read_text() for path in tmp_path.glob("*.gpus")}
    assert shown == {"0.gpus": "0", "1.gpus": "1", "2.gpus": "0", "3.gpus": "1"}


@pytest.mark.variants(1)
@pytest.mark.parametrize("how", ["raise", "SIGKILL"])
def test_one_failed_task_ends_the_step(recipe: Recipe, how: str) -> None:
    overrides = ("task._target_=points.Act", f"+task.how='{how}'", "+task.rank=3", "trainer.epochs=50000")
    done = typed(recipe, FOUR_TASKS, *overrides)
    assert done.code == 1
    error = error_of(done.run)
    assert (error["rank"], error["host"], done.result()["status"]) == (3, "node1", "failed")
    assert "ddpexp: rank 3 on node1 failed (train" in done.err


@pytest.mark.variants(1)
@pytest.mark.parametrize(
    ("override", "word"),
    [("trainer.gpus=4", "srun"), ("trainer.nodes=3", "srun"), ("launcher.dry_run=true", "submit")],
)
def test_what_contradicts_the_step_is_refused(recipe: Recipe, override: str, word: str) -> None:
    done = typed(recipe, FOUR_TASKS, override)
    assert done.code == 2
    assert re.search(rf"^ddpexp: {override} .*{word}", done.err, re.MULTILINE), done.err
    assert "Traceback" not in done.err
    assert not done.run.exists()


# Shells of srun --pty.


def in_pty(recipe: Recipe, options: Sequence[str], line: Callable[[str], str], *overrides: str) -> Done:
    """Type one line in a shell that `srun --pty` opened, and leave it."""
    ours, run = recipe.words("launcher=slurm", "trainer.threads=1", *overrides)
    command = line(shlex.join([sys.executable, "-m", "ddpexp", *ours]))
    environ: Any = {**recipe.ddpexp.environ, "TERM": "dumb", "PS1": "$ "}
    shell = pexpect.spawn(
        "srun", ["-Q", *options, "--pty", "bash", "--norc", "--noprofile"], env=environ, cwd=str(recipe.ddpexp.folder),
        encoding="utf-8", timeout=PATIENCE, dimensions=(24, 400),
    )  # fmt: skip
    shell.sendline(f"{command}; echo code $?.")
    shell.expect(r"code (\d+)\.")
    code, out = int(shell.match.group(1)), shell.before
    shell.sendline("exit")
    shell.expect(pexpect.EOF)
    shell.close()
    return Done(code, out, "", run)


@pytest.mark.slow
def test_a_command_in_a_pty_shell_is_inside_an_allocation(recipe: Recipe, spawned: Callable[[int], Done]) -> None:
    done = in_pty(recipe, ["-N1"], lambda line: line, "trainer.gpus=2")
    assert done.code == 0, done.out
    assert done.result()["weights_sha256"] == spawned(2).result()["weights_sha256"]
    assert done.manifest()["world"]["world_size"] == 2  # of a step of its own, not the shell's one task
    assert "--config-dir" in done.manifest()["command"]


@pytest.mark.slow
def test_a_wrapped_task_of_a_step_from_a_pty_shell_is_a_task(recipe: Recipe, spawned: Callable[[int], Done]) -> None:
    done = in_pty(
        recipe, ["-N1", "-c2"], lambda line: f"srun -Q --overlap -n2 bash -c {shlex.quote(line + '; exit $?')}"
    )
    assert done.code == 0, done.out
    assert done.result()["weights_sha256"] == spawned(2).result()["weights_sha256"]


@pytest.mark.slow
def test_the_program_of_srun_pty_itself_is_a_task(recipe: Recipe, spawned: Callable[[int], Done]) -> None:
    ours, run = recipe.words("launcher=slurm", "trainer.threads=1")
    environ: Any = {**recipe.ddpexp.environ, "TERM": "dumb"}
    options = ["-Q", "--pty", sys.executable, "-m", "ddpexp", *ours]
    child = pexpect.spawn(
        "srun", options, env=environ, cwd=str(recipe.ddpexp.folder), encoding="utf-8", timeout=PATIENCE
    )
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0, child.before
    done = Done(0, child.before, "", run)
    assert done.result()["weights_sha256"] == spawned(1).result()["weights_sha256"]
    assert "-m" in done.manifest()["command"] or done.manifest()["command"][0] != "ddpexp"  # no member of another step


# A job that is requeued.


def restarts(job_id: str) -> int:
    found = re.search(r" Restarts=(\d+) ", shown_job(job_id))
    assert found
    return int(found[1])


def is_requeued(job_id: str) -> bool:
    return "JobState=PENDING" in shown_job(job_id) and restarts(job_id) == 1


def requeue_now(*job_ids: str) -> None:
    """Wait until jobs are in the queue again, and spare them the two minutes that Slurm has them wait."""
    for job_id in job_ids:
        wait_for(partial(is_requeued, job_id))
    time.sleep(2.1)  # a start in the second of the end is taken for the old one
    for job_id in job_ids:
        slurm_output("scontrol", "update", f"JobId={job_id}", "StartTime=now")


def steps(run: Path) -> list[int]:
    """Return the steps whose training was recorded."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["step"] for line in lines if "train/loss" in line]


def test_a_preempted_job_saves_is_requeued_once_and_ends_as_if_undisturbed(recipe: Recipe, tmp_path: Path) -> None:
    overrides = (*TWO_BY_TWO, *slow(tmp_path), "trainer.threads=1", "trainer.epochs=15")
    done = recipe("launcher=slurm", *overrides, environ=OWN_SERVER)
    job_id = job_of(done)
    wait_for(lambda: begun(tmp_path, 4))
    slurm_output("scancel", "--signal=USR2", job_id)
    requeue_now(job_id)
    assert done.result()["status"] == "interrupted"
    stopped = done.result()["step"]
    assert 0 < stopped < 60
    assert state_of(job_id) == ("COMPLETED", "0:0")
    text = (done.run / f"slurm-{job_id}.log").read_text()
    assert text.count(f"ddpexp: requeueing job {job_id}\n") == 1
    assert text.count(f"ddpexp: restart 1 of Slurm job {job_id}\n") == 1
    assert text.count("ddpexp: interrupted by SIGUSR2; saved at step ") == 1
    assert restarts(job_id) == 1
    assert (done.result()["status"], steps(done.run)) == ("done", list(range(1, 61)))
    alone = recipe("trainer.gpus=4", "trainer.threads=1", "trainer.epochs=15", "trainer.log_every=1")
    assert done.result()["weights_sha256"] == alone.result()["weights_sha256"]


@pytest.mark.slow
def test_a_job_that_has_made_no_step_is_not_requeued(recipe: Recipe, tmp_path: Path) -> None:
    done = recipe(
        "launcher=slurm", *TWO_BY_TWO, "data._target_=points.load_never", f"+data.folder={tmp_path}", environ=OWN_SERVER
    )
    job_id = job_of(done)
    wait_for(lambda: begun(tmp_path, 4))
    slurm_output("scancel", "--signal=USR2", job_id)
    assert state_of(job_id) == ("FAILED", "140:0")
    text = (done.run / f"slurm-{job_id}.log").read_text()
    assert (
        f"ddpexp: job {job_id} is not requeued: it has saved no step since it started, and would do the same again"
        in text
    )
    assert (done.result()["status"], restarts(job_id)) == ("interrupted", 0)


@pytest.mark.slow
def test_a_job_that_is_cancelled_saves_and_is_not_requeued(recipe: Recipe, tmp_path: Path) -> None:
    done = recipe("launcher=slurm", *TWO_BY_TWO, *slow(tmp_path), environ=OWN_SERVER)
    job_id = job_of(done)
    wait_for(lambda: begun(tmp_path, 4))
    slurm_output("scancel", job_id)
    assert state_of(job_id)[0] == "CANCELLED"
    wait_for(quiet)
    assert (done.result()["status"], restarts(job_id)) == ("interrupted", 0)
    assert f"step-{done.result()['step']:08}" in [path.name for path in (done.run / "checkpoints").iterdir()]


@pytest.mark.slow
def test_a_job_may_profile_or_save_and_continue(recipe: Recipe, tmp_path: Path) -> None:
    done = recipe(
        "launcher=slurm",
        *TWO_BY_TWO,
        *slow(tmp_path),
        "trainer.checkpoint_every=0",
        "trainer.epochs=20",
        environ=OWN_SERVER,
    )
    wait_for(lambda: begun(tmp_path, 4))
    asked = recipe.ddpexp("profile", str(done.run), "--steps=2", "--json")
    assert asked.code == 0, asked.err
    assert len(list(Path(json.loads(asked.out)["directory"]).glob("rank*"))) == 2 * 4
    slurm_output("scancel", "--signal=USR1", job_of(done))
    wait_for(lambda: any((done.run / "checkpoints").glob("step-*/checkpoint.json")))
    assert state_of(job_of(done)) == ("COMPLETED", "0:0")
    assert steps(done.run) == list(range(1, 81))


@pytest.mark.slow
def test_the_users_own_srun_resumes_in_its_directory(recipe: Recipe, tmp_path: Path) -> None:
    typed, _ = recipe.words("launcher=slurm", "trainer.threads=1", *slow(tmp_path), "trainer.epochs=15")
    command = shlex.join([sys.executable, "-m", "ddpexp", *(word for word in typed if not word.startswith("run.dir="))])
    script, log = tmp_path / "own.sbatch", tmp_path / "own.log"
    # Two of them: the second is another run, and has the first one's words.
    script.write_text(
        f"#!/bin/bash\n#SBATCH -N2 --ntasks-per-node=1 --open-mode=append\nsrun {command}\nsrun {command}\n"
    )
    submitted = subprocess.run(
        ["sbatch", "--parsable", f"--output={log}", str(script)],
        cwd=tmp_path, env={**recipe.ddpexp.environ, **OWN_SERVER}, capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    job_id = submitted.stdout.strip()
    wait_for(lambda: begun(tmp_path, 2))
    slurm_output("scancel", "--signal=USR2", job_id)
    requeue_now(job_id)
    assert state_of(job_id) == ("COMPLETED", "0:0"), log.read_text()
    runs = sorted((tmp_path / "outputs/points").iterdir())
    assert [json.loads((run / "result.json").read_text())["status"] for run in runs] == ["done", "done"]
    assert [steps(run) for run in runs] == [list(range(1, 61))] * 2
    assert log.read_text().count(f"ddpexp: restart 1 of Slurm job {job_id}\n") == 2


@pytest.mark.slow
def test_the_time_limit_is_no_end(recipe: Recipe, tmp_path: Path) -> None:
    overrides = (
        "launcher.time=2",
        "launcher.signal_seconds=30",
        "trainer.gpus=2",
        *slow(tmp_path),
        "trainer.epochs=100000",
    )
    done = recipe("launcher=slurm", *overrides, environ=OWN_SERVER)
    job_id = job_of(done)
    wait_for(lambda: "JobState=PENDING" in shown_job(job_id) and restarts(job_id) == 1, 2 * PATIENCE)
    assert done.result()["status"] == "interrupted"
    slurm_output("scancel", job_id)


# What other jobs and steps leave in a shell.


@pytest.mark.slow
def test_commands_typed_in_a_shell_of_a_step_of_two_tasks_run_once(recipe: Recipe) -> None:
    """Trained alone, trained with launcher=slurm and evaluated: each was typed once."""
    alone, run = recipe.words("launcher=inline", "trainer.threads=1")
    step, of_step = recipe.words("launcher=slurm", "trainer.threads=1", "trainer.gpus=1")
    evaluate = ["evaluate", str(run), "--config-dir", str(recipe.folder / "conf")]
    shell = pexpect.spawn(
        "srun", ["-Q", "-N1", "-n2", "--pty", "bash", "--norc"], cwd=str(recipe.ddpexp.folder),
        env={**recipe.ddpexp.environ, "PS1": "$ "}, encoding="utf-8", timeout=PATIENCE,
    )  # fmt: skip
    for words in (alone, step, evaluate):
        shell.sendline(f"{shlex.join([sys.executable, '-m', 'ddpexp', *words])}; echo code=$?.")
        shell.expect(r"code=(\d+)\.")
        assert shell.match[1] == "0", shell.before
    shown = shell.before
    shell.sendline("exit")
    shell.expect(pexpect.EOF)
    shell.close()
    results = [json.loads((path / "result.json").read_text()) for path in (run, of_step)]
    assert results[0]["weights_sha256"] == results[1]["weights_sha256"]
    assert results[0]["weights_sha256"] in shown


@pytest.mark.slow
def test_options_of_other_steps_do_not_reach_a_job(recipe: Recipe, spawned: Callable[[int], Done]) -> None:
    left = {
        "SLURM_MEM_PER_CPU": "10", "SLURM_CPU_BIND": "quiet,mask_cpu:0x1", "SLURM_CPU_BIND_LIST": "0x1",
        "SLURM_HINT": "nomultithread", "SLURM_TIMELIMIT": "1",
    }  # fmt: skip
    done = recipe(*WAIT, "trainer.gpus=2", "launcher.mem=1G", environ=left)
    assert done.code == 0, done.err
    assert done.result()["weights_sha256"] == spawned(2).result()["weights_sha256"]
    assert f"does not inherit {', '.join(sorted(left))} of this shell" in done.err


@pytest.mark.slow
def test_a_heterogeneous_allocation_is_warned_of_and_used_with_srun(recipe: Recipe) -> None:
    done = typed(recipe, ["salloc", "-Q", "-N1", ":", "-N1"], "trainer.gpus=1")
    assert done.code == 0
    assert "this allocation has 2 components, and launcher=slurm takes the first of them alone" in done.err
    words, run = recipe.words("launcher=slurm", "trainer.threads=1")
    command = [sys.executable, "-m", "ddpexp", *words]
    both = ["salloc", "-Q", "-N1", ":", "-N1", "srun", "-Q", "-n1", *command, ":", "-n1", *command]
    used = subprocess.run(
        both, cwd=recipe.ddpexp.folder, env=recipe.ddpexp.environ, capture_output=True, text=True, timeout=PATIENCE
    )
    assert used.returncode == 0, used.stderr
    assert json.loads((run / "result.json").read_text())["world_size"] == 2


def test_a_job_that_has_ended_is_named_before_anything_is_written(recipe: Recipe) -> None:
    done = recipe("launcher=slurm", environ={"SLURM_JOB_ID": "99999", "SLURM_JOB_NUM_NODES": "1"})
    assert (done.code, done.out) == (2, "")
    assert "SLURM_JOB_ID=99999 is exported here, and job 99999 has ended. Unset SLURM_JOB_ID to submit" in done.err
    assert not done.run.exists()


@pytest.mark.slow
def test_the_advice_on_a_number_of_workers_gives_that_number(recipe: Recipe) -> None:
    refused = typed(recipe, ["srun", "-Q", "-N1"], "trainer.gpus=2")
    [advice] = re.findall("so type (srun .*?), or", refused.err)
    done = typed(recipe, [*shlex.split(advice), "-Q", "-N1"], "trainer.gpus=2")
    assert (done.code, done.result()["world_size"]) == (0, 2)


@pytest.mark.slow
def test_a_torchrun_in_each_task_is_refused(recipe: Recipe) -> None:
    words, run = recipe.words("launcher=torchrun-env", "trainer.threads=1")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", "-m", "ddpexp"]
    done = subprocess.run(
        ["srun", "-Q", "-N1", "-n2", *torchrun, *words], cwd=recipe.ddpexp.folder, env=recipe.ddpexp.environ,
        capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode
    assert "ddpexp: srun has started 2 torchrun commands" in done.stderr
    assert not run.exists()


@pytest.mark.slow
def test_a_job_whose_program_is_not_there_has_failed_and_was_not_refused(recipe: Recipe) -> None:
    done = recipe(*WAIT, "launcher.python=/nonexistent")
    assert (done.code, done.result()["status"]) == (1, "failed")
    done = typed(recipe, ["salloc", "-Q", "-N1"], "launcher.python=/nonexistent")
    assert (done.code, done.result()["status"]) == (1, "failed")

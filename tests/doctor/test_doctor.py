"""The command `ddpexp doctor` as it is typed, on this machine."""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from ddpexp.cli.doctor import diagnose, doctor, prepare
from ddpexp.doctor import job as job_module
from ddpexp.doctor import storage
from ddpexp.doctor.job import Diagnosis
from ddpexp.doctor.judge import judge
from ddpexp.errors import Failure, RefusedError, WorkerError
from ddpexp.launch import NotPortableError
from tests.conftest import Ddpexp, finish
from tests.refusals import refused
from tests.typed import call

WITHOUT_GPUS = {"CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture
def environ(warm_environ: dict[str, str]) -> dict[str, str]:
    return {**warm_environ, **WITHOUT_GPUS}


def test_each_line_of_json_is_a_finding(ddpexp: Ddpexp) -> None:
    done = ddpexp("doctor", "--json", "trainer.gpus=2", "trainer.device=cpu", "trainer.global_batch_size=3")
    findings = [json.loads(line) for line in done.out.splitlines()]
    assert all(set(found) == {"check", "level", "hosts", "text", "advice", "facts"} for found in findings)
    by_check: dict[str, Any] = {found["check"]: found for found in findings}
    assert by_check["workers"]["text"] == "2 cpu workers over gloo, launcher=spawn"
    measured = by_check["all_reduce"]["facts"]
    assert (measured["ranks"], measured["correct"]) == (2, True)
    assert measured["bus_gigabytes_a_second"] > 0
    assert by_check["file_system"]["facts"]["folder"] == str(ddpexp.folder / "outputs/mnist")
    expected = {"versions", "torch_build", "code", "gpu", "cores", "memory", "shm", "open_files", "processes", "tmp",
                "network", "hostname", "clock", "scheduler"}  # fmt: skip
    assert expected <= by_check.keys()
    assert done.code == any(found["level"] == "bad" for found in findings)
    assert list(ddpexp.folder.iterdir()) == [], "nothing is written"


@pytest.mark.slow
def test_under_torchrun_one_rank_reports_for_all(ddpexp: Ddpexp) -> None:
    python = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2"
    process = ddpexp.paste(f"{python} -m ddpexp doctor launcher=torchrun-env trainer.device=cpu")
    done = finish(process, ddpexp.folder)
    assert done.out.count("ddpexp doctor on ") == 1, done.err
    assert "2 cpu workers over gloo, launcher=torchrun-env" in done.out
    assert "2 ranks on this host over gloo, 8 MB at" in done.out


def test_what_a_run_would_refuse_is_bad(ddpexp: Ddpexp) -> None:
    done = ddpexp("doctor", "trainer.device=cuda")
    assert done.code == 1
    assert "bad       workers       a run would be refused: trainer.device=cuda needs a GPU" in done.out
    assert "good      scheduler" in done.out  # the rest is examined
    assert "1 bad in" in done.out.splitlines()[-1]


@pytest.mark.slow
def test_two_machines_are_examined_together(ddpexp: Ddpexp) -> None:
    words = "-m ddpexp doctor trainer.nodes=2 trainer.gpus=2 launcher.master_addr=127.0.0.1 launcher.master_port=29556"
    line = f"{sys.executable} {words} launcher.node_rank="
    other = ddpexp.paste(f'exec unshare -u sh -c "hostname other; exec {line}1"')
    first = ddpexp.paste(f"exec {line}0")
    done = finish(first, ddpexp.folder)
    assert finish(other, ddpexp.folder).out == ""
    assert "2 ranks on other over gloo" in done.out, done.err
    assert "4 ranks of 2 hosts over gloo" in done.out
    assert "all hosts see the folder of run directories" in done.out
    assert list(ddpexp.folder.iterdir()) == []


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="there is no mpirun here")
def test_under_mpirun_one_rank_reports_for_all(ddpexp: Ddpexp) -> None:
    ddpexp.environ |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    line = f"mpirun --oversubscribe -n 2 {sys.executable} -m ddpexp doctor launcher=mpi trainer.device=cpu"
    done = finish(ddpexp.paste(line), ddpexp.folder)
    assert done.out.count("ddpexp doctor on ") == 1, done.err
    assert "2 ranks on this host over gloo" in done.out


@pytest.mark.slow
@pytest.mark.slurm
@pytest.mark.skipif("SLURM_CONF" not in os.environ, reason="there is no Slurm cluster")
def test_under_srun_one_task_reports_for_all(ddpexp: Ddpexp) -> None:
    environ = {"SLURM_CONF": os.environ.get("SLURM_CONF", "")}
    line = f"srun -N2 -n4 {sys.executable} -m ddpexp doctor launcher=slurm trainer.device=cpu"
    done = finish(ddpexp.paste(line, environ=environ), ddpexp.folder)
    assert done.out.count("ddpexp doctor on ") == 1, done.err
    assert "4 ranks of 2 hosts over gloo" in done.out
    assert "Slurm job " in done.out


@pytest.mark.parametrize(
    ("argv", "answer"),
    [
        (["--jsn"], "doctor --jsn"),
        (["what"], "what is neither an override"),
        (["-m", "trainer.seed=1,2"], "doctor -m"),
        (["trainer.gpu=2"], "trainer.gpu is not a known key"),
        (["trainer.precision=fp31"], "trainer.precision=fp31"),
    ],
)
def test_wrong_arguments_are_refused(argv: list[str], answer: str) -> None:
    with pytest.raises(RefusedError) as caught:
        doctor(call("doctor", *argv))
    assert str(caught.value).startswith(answer)


@pytest.fixture
def diagnosis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Diagnosis:
    monkeypatch.chdir(tmp_path)
    return prepare(["trainer.gpus=2", "trainer.device=cpu"])[1]


FACTS = {name: {"hung": 1.0} for name in ("software", "gpus", "infiniband", "cores", "memory", "shared_memory",
         "limits", "files", "temporary", "data", "network", "clock", "scheduler")}  # fmt: skip


@pytest.mark.parametrize(
    ("failure", "level", "text"),
    [
        (
            WorkerError(Failure(1, "gpu02", "RuntimeError", "CUDA error", phase="join")),
            "bad",
            "rank 1 on gpu02 failed (join): RuntimeError: CUDA error",
        ),
        (RefusedError("too many."), "bad", "a run would be refused: too many."),
        (
            NotPortableError(),
            "doubtful",
            "not measured: launcher=spawn would start further commands here, on machines that are not looked at",
        ),
    ],
)
def test_why_nothing_was_measured_is_a_line(
    diagnosis: Diagnosis, failure: RefusedError | WorkerError, level: str, text: str
) -> None:
    hosts, findings = judge(diagnosis, FACTS, failure)
    assert len(hosts) == 1
    assert (findings[0].check, findings[0].level, findings[0].text) == ("workers", level, text)


def test_a_launcher_that_starts_further_commands_is_not_followed(diagnosis: Diagnosis) -> None:
    with refused("further", NotPortableError):
        diagnosis.job.require_portable()


def test_only_the_first_task_of_a_host_gathers(diagnosis: Diagnosis) -> None:
    diagnosis._environ = {"SLURM_LOCALID": "1"}
    diagnosis.gather(ranks_started_externally=True)
    assert diagnosis._gathering is None


def test_a_file_system_that_hangs_is_reported_and_nothing_is_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    release, started = threading.Event(), threading.Event()
    monkeypatch.setattr(storage, "nearest_folder", lambda _: release.wait(60))
    monkeypatch.setattr(job_module, "_FOLDER_SECONDS", 0.2)
    monkeypatch.setattr(job_module, "GATHER_SECONDS", 2.0)
    prepared = prepare(["trainer.device=cpu"])
    assert prepared is not None

    def launch() -> int:
        started.set()
        return 0

    code = diagnose(*prepared, launch, json=False)
    release.set()
    out = capsys.readouterr().out
    assert (code, started.is_set()) == (1, False)
    assert f"nothing was started: the file system of {Path.cwd()}/outputs/mnist does not answer" in out
    assert "bad       file_system   no answer within 2 s" in out
    assert "bad: workers, file_system" in (tmp_path / "error.json").read_text()
    assert "good      cores" in out or "doubtful  cores" in out


DEAD = """
import ctypes, os, subprocess, sys
device = os.open("/dev/fuse", os.O_RDWR)
libc = ctypes.CDLL(None, use_errno=True)
options = f"fd={device},rootmode=40000,user_id=0,group_id=0".encode()
if (
    libc.unshare(0x20000)  # CLONE_NEWNS
    or libc.mount(None, b"/", None, 0x44000, None)  # MS_REC | MS_PRIVATE
    or libc.mount(b"dead", sys.argv[1].encode(), b"fuse.dead", 0, options)
):
    sys.exit(77)
command = [sys.executable, "-m", "ddpexp", "doctor", f"run.dir={sys.argv[1]}/outputs/a", "trainer.device=cpu"]
sys.exit(subprocess.run(command, timeout=100).returncode)
"""


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0 or not os.path.exists("/dev/fuse"), reason="needs root and FUSE")
def test_a_file_system_whose_server_is_gone_holds_up_no_other_check(ddpexp: Ddpexp) -> None:
    (ddpexp.folder / "dead").mkdir()
    (ddpexp.folder / "mount.py").write_text(DEAD)
    done = finish(ddpexp.paste(f"exec {sys.executable} mount.py {ddpexp.folder}/dead"), ddpexp.folder)
    if done.code == 77:
        pytest.skip("this container may not mount")
    assert done.code == 1, done.err
    assert "bad       file_system   no answer within" in done.out
    assert "good      tmp" in done.out


def test_a_hang_is_reported_soon(diagnosis: Diagnosis) -> None:
    timeout = diagnosis.request.timeout
    assert (timeout.init_seconds, timeout.step_seconds) == (45.0, 30.0)

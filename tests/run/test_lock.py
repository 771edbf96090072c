"""Who has a run directory: commands that meet in one, and what a killed one leaves."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ddpexp.errors import RefusedError
from ddpexp.launch.workers.rank_log import held_logs
from ddpexp.run import lock
from ddpexp.run.lock import Owner, read, take
from ddpexp.system.containers import HOST_PID_NAMESPACE
from ddpexp.system.job_schedulers import ScheduledJob
from ddpexp.system.job_schedulers.slurm import SLURM, SlurmScheduler
from tests.conftest import PATIENCE, Ddpexp, finish, starts_of
from tests.points import Recipe, wait_for
from tests.refusals import command_refused

SLOW = """\
import time


class Slow(Sides):
    def step(self, model, batch):
        time.sleep(0.05)
        return super().step(model, batch)
"""
WAITS = ("task._target_=points.Slow", "trainer.epochs=50000", "trainer.log_every=1")
HOLDS = (
    "import fcntl, os, sys; file = open(sys.argv[1], 'a'); fcntl.flock(file, fcntl.LOCK_EX); print(flush=True); "
    "sys.stdin.read()"
)


@pytest.fixture(scope="session")
def environ(warm_environ: dict[str, str]) -> dict[str, str]:
    """Who may write a run directory is tested, not how fork servers start."""
    return warm_environ


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "ranks").mkdir()
    return tmp_path


@pytest.fixture
def no_flock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without locks, as NFS and Lustre are mounted in places."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", refuse)


def taken(folder: Path) -> lock.Lock:
    return take(folder, folder / "ranks", "run.dir=x")


def refused(folder: Path) -> str:
    with pytest.raises(RefusedError) as caught:
        taken(folder)
    return str(caught.value)


@pytest.fixture
def holder(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock of the folder, and writes nothing into it."""
    command = [sys.executable, "-c", HOLDS, str(folder / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def write(folder: Path, owner: Owner) -> None:
    (folder / "lock").write_text(json.dumps(owner.as_record()))


def gone() -> Owner:
    """Return what a process of this host that has ended wrote."""
    return replace(Owner.here(), started="0")


def test_the_lock_says_who_has_it_and_is_free_at_the_end(folder: Path) -> None:
    held = taken(folder)
    owner = read(folder / "lock")
    assert owner is not None
    assert (owner.pid, owner.host, owner.is_alive()) == (os.getpid(), os.uname().nodename, True)
    assert f"run.dir=x is in use by process {os.getpid()} on {owner.host} since {owner.since}" in refused(folder)
    held.release()
    held.release()
    assert read(folder / "lock") is None  # this process lives on, and has it no more
    taken(folder).release()


def test_a_process_of_the_same_number_is_another_one() -> None:
    assert Owner.here().is_alive() is True
    assert gone().is_alive() is False
    assert replace(Owner.here(), pid=2**22 + 1).is_alive() is False
    assert replace(Owner.here(), boot_id="before a restart", pid_namespace=HOST_PID_NAMESPACE).is_alive() is False
    assert replace(Owner.here(), host="another").is_alive() is None


def test_a_command_in_another_container_of_the_same_name_cannot_be_checked() -> None:
    here = Owner.here()
    assert here.pid_namespace
    assert Owner.of_record(here.as_record()) == here
    assert replace(here, pid_namespace="4026999999").is_alive() is None  # docker run --network host
    assert replace(here, pid_namespace="4026999999", started="0").is_alive() is None
    assert replace(here, pid_namespace="4026999999", boot_id="another machine's").is_alive() is None
    assert replace(here, pid_namespace=HOST_PID_NAMESPACE, boot_id="before a restart").is_alive() is False
    earlier = {key: value for key, value in here.as_record().items() if key != "pid_namespace"}
    assert Owner.of_record(earlier).is_alive() is True  # as earlier versions wrote it


def test_the_rest_of_a_command_that_is_gone_is_waited_for(
    folder: Path, holder: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "_WAIT_SECONDS", PATIENCE)
    write(folder, gone())
    timer = threading.Timer(1.0, holder.kill)
    timer.start()
    taken(folder).release()  # which nobody can have before the other has gone
    timer.join()


def test_what_does_not_go_is_refused_in_the_end(
    folder: Path, holder: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lock, "_WAIT_SECONDS", 1.2)
    write(folder, gone())
    assert refused(folder).startswith(
        f"run.dir=x is still in use after 1 s: {folder}/lock is locked, and process {os.getpid()} on "
    )
    assert "ddpexp: run.dir=x is locked by a command that has exited" in capsys.readouterr().err
    (folder / "lock").write_text("no words of ours")
    assert "and its owner cannot be checked from this host" in refused(folder)


def test_ranks_that_live_on_are_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "_WAIT_SECONDS", 0.5)
    (folder / "ranks/0.log").touch()
    log = folder / "ranks/1.log"
    with log.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert held_logs(folder / "ranks") == [log]
        sentence = f"rank 1 of a command that has exited is still alive and writes to {log}. End it (fuser -k {log})."
        assert sentence in refused(folder)
    assert held_logs(folder / "ranks") == []
    taken(folder).release()


@pytest.mark.parametrize(
    ("changes", "remains"),
    [({}, False), ({"boot_id": "another"}, True), ({"host": "another"}, True), ({"since": "never"}, True)],
)
def test_shared_memory_of_a_command_that_was_killed_with_all_ranks_is_removed(
    folder: Path, changes: dict[str, str], remains: bool
) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    owner = replace(Owner.here(), pid=gone.pid, started="1")
    left = Path(f"/dev/shm/torch_{gone.pid}_{time.time_ns()}_0")
    left.touch()
    try:
        (folder / "lock").write_text(json.dumps({**owner.as_record(), **changes}))
        taken(folder).release()
        assert left.exists() == remains
        taken(folder).release()  # the owner has removed its record: it was not killed
        assert left.exists() == remains
    finally:
        left.unlink(missing_ok=True)


def test_a_lock_that_is_a_link_or_no_file_is_not_followed(folder: Path) -> None:
    target = folder / "target"
    (folder / "lock").symlink_to(target)
    assert refused(folder) == f"run.dir=x cannot be locked: {folder}/lock: it is a symbolic link."
    assert not target.exists()
    (folder / "lock").unlink()
    os.mkfifo(folder / "lock")
    assert refused(folder) == f"run.dir=x cannot be locked: {folder}/lock: it is not a regular file."


@pytest.mark.parametrize("text", ["", "[]", "{}", "\0", '{"pid": "/etc"}', '{"host": 1'])
def test_a_damaged_lock_that_nobody_holds_is_taken(folder: Path, text: str) -> None:
    (folder / "lock").write_text(text)
    assert read(folder / "lock") is None
    taken(folder).release()


@pytest.mark.usefixtures("no_flock")
def test_without_file_system_locks_the_lock_files_text_decides(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = taken(folder)
    assert "is in use by process" in refused(folder)
    held.release()
    assert read(folder / "lock") is None
    for owner in (gone(), replace(Owner.here(), boot_id="before", pid_namespace=HOST_PID_NAMESPACE)):
        write(folder, owner)
        taken(folder).release()
    elsewhere = replace(Owner.here(), host="node7")
    write(folder, elsewhere)
    taken_elsewhere = refused(folder)
    assert f"run.dir=x was taken by process {os.getpid()} on node7 at {elsewhere.since}" in taken_elsewhere
    assert f"{folder}/lock" in taken_elsewhere
    write(folder, replace(elsewhere, job=ScheduledJob(SLURM, "12")))
    for over, lives in ((None, "cannot be checked"), (False, "is in use by process")):
        monkeypatch.setattr(SlurmScheduler, "is_over", lambda scheduler, job_id, over=over: over)
        assert lives in refused(folder)
    monkeypatch.setattr(SlurmScheduler, "is_over", lambda scheduler, job_id: job_id == "12")
    taken(folder).release()


# Whole commands.


def test_a_second_command_in_the_directory_of_a_living_one_is_refused_at_once(ddpexp: Ddpexp) -> None:
    recipe = Recipe(ddpexp, SLOW)
    process, run = recipe.start(*WAITS)
    wait_for(lambda: (run / "metrics.jsonl").exists())
    before = {path: path.read_bytes() for path in run.glob("*.*") if path.suffix in (".yaml", ".json")}
    for overrides in (
        (*recipe.words(*WAITS)[0], f"run.dir={run}"),
        ("resume", str(run), "--config-dir", str(recipe.folder / "conf")),
    ):
        second = finish(*ddpexp.start(*overrides))
        subject = run.name if overrides[0] == "resume" else f"run.dir={run.name}"
        command_refused(second, f"{subject}: process {process.pid} on {os.uname().nodename}")
        assert second.err.count("\n") == 1, second.err  # a command that waits says so after a second
    assert {path: path.read_bytes() for path in before} == before
    assert not (run / "error.json").exists()
    assert not (run / "result.json").exists()
    process.send_signal(signal.SIGTERM)
    assert finish(process, run).code == 128 + signal.SIGTERM


def test_a_command_that_was_killed_is_started_again_at_once(ddpexp: Ddpexp) -> None:
    recipe = Recipe(ddpexp, SLOW)
    process, run = recipe.start(*WAITS, "trainer.gpus=2")
    wait_for(lambda: (run / "metrics.jsonl").exists())
    process.kill()
    again = recipe(*WAITS, "trainer.gpus=2", f"run.dir={run}", "task._target_=points.Sides", "trainer.epochs=25")
    assert process.wait(PATIENCE) == -signal.SIGKILL
    assert again.code == 0, again.err
    assert f"ddpexp: resuming {run.name}, up to trainer.epochs=25 in all\n" in again.err
    first, second = starts_of(run)
    assert first["hosts"] == second["hosts"] == [os.uname().nodename]
    assert first["started"] < second["started"]
    for stream in (process.stdout, process.stderr):
        assert stream is not None
        stream.close()

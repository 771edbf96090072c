"""Shared memory of processes that were killed: theirs goes, and nobody else's."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ddpexp.launch.workers import cleanup
from tests.conftest import PATIENCE


@pytest.fixture
def gone() -> int:
    """The number of a process that has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return process.pid


def test_what_a_dead_process_has_made_is_removed(tmp_path: Path, gone: int) -> None:
    left = tmp_path / f"torch_{gone}_123_0"
    left.write_bytes(b"0")
    cleanup.clear(time.time() - 60, tmp_path)
    assert not left.exists()


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that no other container shares the folder, as on a host."""
    monkeypatch.setattr(cleanup, "_sees_all_processes", lambda: True)


def test_what_nccl_and_cuda_leave_behind_is_removed_after_a_run_on_gpus(tmp_path: Path, gone: int, host: None) -> None:
    names = ["nccl-aB3xY9", "nccl-shm-recv-1462445a6f01cbfc-1-2-3", f"cuda.shm.{os.getuid():x}.{gone:x}.1"]
    for name in names:
        (tmp_path / name).write_bytes(b"0")
    cleanup.clear(time.time() - 60, tmp_path)
    assert len(list(tmp_path.iterdir())) == 3  # a run on CPU has made none of them
    cleanup.clear(time.time() - 60, tmp_path, of_gpus=True)
    assert not list(tmp_path.iterdir())


def test_what_nccl_and_cuda_still_use_or_others_own_stays(tmp_path: Path, host: None) -> None:
    names = [
        "nccl-opened",
        "nccl-mapped",
        f"cuda.shm.0.{os.getpid():x}.1",
        "nccl-topology.xml",
        "nccl-1",
        "nccl-toolong",
    ]
    for name in names:
        (tmp_path / name).write_bytes(b"0")
    mapped = (tmp_path / "nccl-mapped").open("rb")
    with (tmp_path / "nccl-opened").open("rb"), mmap.mmap(mapped.fileno(), 1, access=mmap.ACCESS_READ):
        mapped.close()
        cleanup.clear(time.time() - 60, tmp_path, of_gpus=True)
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)


def test_nccls_files_stay_where_another_container_may_use_them(
    tmp_path: Path, gone: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("nccl-aB3xY9", f"torch_{gone}_123_0"):
        (tmp_path / name).write_bytes(b"0")
    monkeypatch.setattr(cleanup, "_sees_all_processes", lambda: False)
    cleanup.clear(time.time() - 60, tmp_path, of_gpus=True)
    assert [path.name for path in tmp_path.iterdir()] == ["nccl-aB3xY9"]


def test_what_may_be_somebody_elses_stays(tmp_path: Path, gone: int) -> None:
    names = [
        f"torch_{os.getpid()}_123_0",
        f"torch_{gone}",
        f"torchx_{gone}_123_0",
        f"sem.{gone}_123_0",
        f"torch_{gone}_123_0.txt",
    ]
    for name in names:
        (tmp_path / name).write_bytes(b"0")
    cleanup.clear(time.time() - 60, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)


def test_what_is_older_than_the_run_stays(tmp_path: Path, gone: int) -> None:
    old = tmp_path / f"torch_{gone}_123_0"
    old.write_bytes(b"0")
    cleanup.clear(time.time() + 60, tmp_path)
    assert old.exists()


def test_what_a_living_process_has_mapped_stays_until_it_lets_go(tmp_path: Path, gone: int) -> None:
    used = tmp_path / f"torch_{gone}_123_0"
    used.write_bytes(b"0")
    with used.open("rb") as file, mmap.mmap(file.fileno(), 1, access=mmap.ACCESS_READ):
        cleanup.clear(time.time() - 60, tmp_path)
        assert used.exists()
    cleanup.clear(time.time() - 60, tmp_path)
    assert not used.exists()


@pytest.mark.skipif(os.getuid() != 0, reason="only root may give a file away")
def test_another_users_stays(tmp_path: Path, gone: int) -> None:
    other = tmp_path / f"torch_{gone}_123_0"
    other.write_bytes(b"0")
    os.chown(other, 65534, 65534)
    cleanup.clear(time.time() - 60, tmp_path)
    assert other.exists()


def test_a_process_that_is_about_to_end_is_given_the_time(tmp_path: Path) -> None:
    script = f"""
import os, time
if os.fork() == 0:
    open({str(tmp_path)!r} + f"/torch_{{os.getpid()}}_1_0", "w").close()
    time.sleep(0.2)
    os._exit(0)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=PATIENCE)
    while not list(tmp_path.iterdir()):
        time.sleep(0.001)
    cleanup.clear(time.time() - 60, tmp_path)
    assert not list(tmp_path.iterdir())

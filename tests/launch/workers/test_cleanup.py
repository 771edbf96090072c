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

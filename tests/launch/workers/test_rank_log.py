"""The lock on a rank's log: held by whoever still writes to it, and free with the last of them."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddpexp.errors import RefusedError
from ddpexp.launch.workers import rank_log
from ddpexp.launch.workers.rank_log import Log, held_logs


@pytest.fixture
def child(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has got the descriptor of a log that its opener has closed, as a worker has."""
    ours = Log(tmp_path, 3)
    program = "import sys; print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=ours.fileno(), text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        ours.close()
        yield process
        process.kill()


def test_without_a_temporary_folder_the_log_is_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp', '/work']")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)  # a container with a read-only root file system
    log = Log(None, 0)
    subprocess.run([sys.executable, "-c", "print('prepared')"], stdout=log.fileno(), check=True)
    assert log.new_lines() == ["prepared"]
    log.close()


def test_a_log_is_held_as_long_as_a_process_has_it(tmp_path: Path, child: subprocess.Popen[str]) -> None:
    Log(tmp_path, 4).close()
    (tmp_path / "other.log").touch()
    (tmp_path / "5.log").symlink_to(tmp_path / "3.log")
    assert held_logs(tmp_path) == [tmp_path / "3.log"]
    child.kill()
    child.wait()
    assert held_logs(tmp_path) == []
    Log(tmp_path, 3).close()
    assert held_logs(tmp_path / "nowhere") == []


def test_a_log_that_is_held_is_refused_with_its_holder(
    tmp_path: Path, child: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_log, "_LOCK_SECONDS", 0.2)
    with pytest.raises(RefusedError) as refused:
        Log(tmp_path, 3)
    assert str(refused.value) == (
        f"{tmp_path}/3.log is in use by process {child.pid}: another start of this run has not ended. Wait for it, or "
        "end it."
    )


def test_a_log_whose_holder_ends_is_waited_for(tmp_path: Path, child: subprocess.Popen[str]) -> None:
    assert child.stdin is not None
    child.stdin.close()  # it ends with that
    Log(tmp_path, 3).close()


def test_a_line_that_never_ends_does_not_fill_the_memory(tmp_path: Path) -> None:
    path = tmp_path / "job.log"
    path.write_bytes(b"begun\n")
    log = Log.reading(path)
    assert log.new_lines() == ["begun"]
    with path.open("ab") as file:
        file.write(b"%9d of 1000000\r" * 20_000 % tuple(range(20_000)))
    assert log.new_lines() == []
    with path.open("ab") as file:
        file.write(b"all\r\nlong " + b"x" * 100_000)
    bar, *parts = log.new_lines() + log.new_lines(last=True)
    assert bar == "    19999 of 1000000\rall"
    assert "".join(parts) == "long " + "x" * 100_000
    os.truncate(path, path.stat().st_size + (1 << 20))  # a hole, as a disk leaves that has lost what was written
    with path.open("ab") as file:
        file.write(b"\nafter\n")
    assert log.new_lines() == ["", "after"]
    log.close()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, "no locks here")

    monkeypatch.setattr(fcntl, "flock", refuse)
    Log(tmp_path, 0).close()
    assert held_logs(tmp_path) == []

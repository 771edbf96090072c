"""Which limit an error means, which number it has, and how that was found."""

from __future__ import annotations

import errno
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddpexp.system import limits
from ddpexp.system.limits import _describe_process_limit, holds_command, reason, reason_with_limit
from ddpexp.system.text import distinct_size_texts, size_text
from tests.conftest import PATIENCE, ROOT


def test_bytes_are_shown_in_units_of_a_thousand() -> None:
    assert [size_text(size) for size in (0, 999, 1000, 1_234_567, 4e9, 1.5e12, 999_999)] == [
        "0 bytes", "999 bytes", "1 kB", "1.23 MB", "4 GB", "1.5 TB", "1,000 kB",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        (464, 0, ("464 bytes", "0 bytes")),
        (4096, 4095, ("4.1 kB", "4.09 kB")),
        (8_400_000, 6_100_000, ("8.4 MB", "6.1 MB")),
        (1_234_567_890, 1_234_567_000, ("1.234568 GB", "1.234567 GB")),
        (5, 5, ("5 bytes", "5 bytes")),
    ],
)
def test_two_sizes_are_shown_with_as_many_digits_as_distinguish_them(
    one: int, other: int, said: tuple[str, str]
) -> None:
    assert distinct_size_texts(one, other) == said


# --------------------------------------------------------------------------------------------------- processes and
# threads

SLEEPERS = """
import os, signal, sys, time
sys.path.insert(0, {root!r})
from ddpexp.system.limits import reason_with_limit
started, said = [], "nothing was refused"
{before}
try:
    while len(started) < {most}:
        pid = os.fork()
        if pid == 0:
            time.sleep(1000)
        started.append(pid)
except OSError as error:
    said = reason_with_limit(error)
finally:
    for pid in started:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
print(said)
"""


def refused(*overrides: str, before: str = "", most: int = 1000) -> str:
    """Start processes until one is refused; return what is said of that."""
    program = SLEEPERS.format(root=str(ROOT), most=most, before=before)
    done = subprocess.run([*overrides, sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.fault(23)
def test_the_kernels_pid_max_is_named_where_it_is_the_limit() -> None:
    """In a pid namespace, which has a limit of its own: that of the machine is everybody's."""
    if os.getuid() != 0 or tuple(map(int, platform.release().split(".")[:2])) < (6, 14):
        pytest.skip(f"a pid_max for some processes alone takes root and Linux 6.14, this is {platform.release()}")
    limited = 'ulimit -u 4000; echo 350 >/proc/sys/kernel/pid_max; exec "$@"'
    said = refused("unshare", "--pid", "--fork", "--mount-proc", "bash", "-c", limited, "bash")
    assert said.startswith("Resource temporarily unavailable (kernel.pid_max allows 350 processes and threads and 3")
    assert said.endswith(" are there: raise it with sysctl, as root, or use fewer workers)")
    assert "ulimit" not in said


@pytest.mark.fault(23)
def test_a_users_limit_is_named_where_it_is_the_limit() -> None:
    if os.getuid() != 0:
        pytest.skip("only root can be a user who has no other processes")
    user = 54321
    said = refused(before=f"import resource; resource.setrlimit(resource.RLIMIT_NPROC, (25, 25)); os.setuid({user})")
    assert said.startswith(
        f"Resource temporarily unavailable (this shell (ulimit -u, user {user}) allows 25 processes and threads and 2"
    )
    assert said.endswith(" are there: raise that limit, or use fewer workers)")


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({}, None),
        (
            {"proc/sys/kernel/pid_max": "4"},
            "kernel.pid_max allows 4 processes and threads and 4 are there: raise it with sysctl",
        ),
        (
            {"proc/loadavg": "0.1 0.1 0.1 1/395 7"},
            "kernel.threads-max allows 400 processes and threads and 395 are there: raise",
        ),
        ({"proc/sys/kernel/pid_max": "390", "proc/loadavg": "0.1 0.1 0.1 1/395 7"}, "kernel.threads-max allows 400"),
        (
            {"sys/fs/cgroup/pids/a/pids.max": "20", "sys/fs/cgroup/pids/a/pids.current": "19"},
            "{root}/sys/fs/cgroup/pids/a/pids.max allows 20 processes and threads and 19 are there: raise that limit, "
            "or use fewer",
        ),
        (
            {"sys/fs/cgroup/c/pids.max": "5", "sys/fs/cgroup/c/pids.current": "5"},
            "{root}/sys/fs/cgroup/c/pids.max allows 5 processes",
        ),
        (
            {"proc/self/cgroup": "0::/the/host's", "sys/fs/cgroup/pids.max": "5", "sys/fs/cgroup/pids.current": "5"},
            "{root}/sys/fs/cgroup/pids.max allows 5 processes",
        ),
        (
            {"sys/fs/cgroup/c/pids.max": "10", "sys/fs/cgroup/c/pids.current": "5"},
            "it is no longer possible to see which limit it was; the fullest now is: {root}/sys/fs/cgroup/c/pids.max allows 10 "
            "processes "
            "and threads and 5 are there: raise that limit",
        ),
    ],
    ids=[
        "nothing is limited",
        "pid_max",
        "threads-max",
        "a container's own pid_max",
        "version 1",
        "version 2",
        "a container's own group",
        "has room again",
    ],
)
def test_the_limit_that_is_reached_is_found_among_those_of_the_kernel(
    tmp_path: Path, files: dict[str, str], says: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of our own stand for the kernel's: those limits are everybody's."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    before = {
        "proc/self/cgroup": "5:pids:/a/b\n0::/c",
        "proc/7/status": "Name:\tx\nUid:\t7\t7\t7\t7\nThreads:\t3",
        "proc/8/status": "Name:\tx\nUid:\t8\t8\t8\t8\nThreads:\t1",
        "sys/fs/cgroup/pids/a/b/pids.max": "max",
        "sys/fs/cgroup/c/pids.max": "max",
    }
    kernel = {
        "proc/sys/kernel/pid_max": "32768",
        "proc/sys/kernel/threads-max": "400",
        "proc/loadavg": "0.1 0.1 0.1 1/40 7",
    }
    for name, text in ({**before, **kernel, **files} if files else before).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    found = _describe_process_limit(tmp_path)
    assert (found is None) == (says is None)
    if says is not None:
        assert str(found).startswith(says.format(root=tmp_path))


# -------------------------------------------------------------------------------------------------------------------
# disks


def mounted(place: Path, options: str) -> Iterator[Path]:
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(place)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A disk of two megabytes that can hold twenty files."""
    yield from mounted(tmp_path / "small", "size=2m,nr_inodes=20")


@pytest.mark.fault(23)
def test_a_disk_without_inodes_says_so_and_not_how_many_bytes_are_free(small: Path) -> None:
    error: OSError | None = None
    for number in range(30):
        try:
            (small / str(number)).touch()
        except OSError as found:
            error = found
    assert error is not None
    assert reason_with_limit(error) == (
        f"No space left on device (no inodes are left: the file system of {small} holds all 20 files that it can, "
        "though 2.1 MB "
        f"are free: remove files)"
    )


@pytest.mark.fault(23)
def test_a_full_disk_says_how_many_bytes_it_has(small: Path) -> None:
    with (small / "full").open("wb", buffering=0) as file:
        while file.tell() < 2 << 20:
            file.write(bytes(1 << 16))
        with pytest.raises(OSError, match="No space left") as caught:
            file.write(b"x")
    assert reason(caught.value) is None  # what a write was about, the error does not know
    said = f"No space left on device (0 bytes of 2.1 MB and 18 files are free on the file system of {small})"
    assert reason_with_limit(caught.value, small / "not/there/yet") == said


def test_a_quota_is_not_taken_for_a_full_disk(tmp_path: Path) -> None:
    said = reason_with_limit(OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)), tmp_path)
    assert said.startswith(f"Disk quota exceeded (a quota on the file system of {tmp_path} is used up, though ")
    assert said.endswith(" are free there: quota -s shows yours)")


def test_the_machines_limit_on_open_files_is_named() -> None:
    said = str(reason(OSError(errno.ENFILE, os.strerror(errno.ENFILE))))
    most = int(Path("/proc/sys/fs/file-max").read_text())
    assert said.startswith(f"fs.file-max allows {most:,} open files on this machine, and ")


def test_without_a_temporary_folder_the_variable_that_names_one_is_named() -> None:
    error = FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp', '/var/tmp', '/work']")
    assert reason(error) == "set TMPDIR to a folder that can be written, or start the container with --tmpfs /tmp"


def test_other_errors_mean_no_limit() -> None:
    assert reason(OSError(errno.ENOENT, "x")) is None
    assert reason(OSError(errno.ENOSPC, "x")) is None
    assert limits.reason_with_limit(ValueError("x")) == "ValueError: x"


@pytest.mark.parametrize(("limit", "holds"), [(19, False), (20, True), (resource.RLIM_INFINITY, True)])
def test_without_files_for_the_command_itself_no_fork_server_is_started(
    monkeypatch: pytest.MonkeyPatch, limit: int, holds: bool
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda number: (limit, limit))
    assert holds_command() is holds


def test_memory_that_runs_out_is_named_with_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda number: (1 << 20, 1 << 20))
    limit = "this shell allows 1,024 KiB of address space (ulimit -v): raise that limit"
    assert reason("MemoryError: ") == limit  # as a fork server reports it
    assert reason_with_limit(MemoryError()) == f"MemoryError ({limit})"

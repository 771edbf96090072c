"""The fork server and what it starts: what is loaded, where it listens, and that nothing outlives the command."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from ddpexp.launch.launchers.local import Spawn
from ddpexp.launch.workers.client import PRELOAD, Server, check_answer
from ddpexp.system.process import children
from tests.conftest import PATIENCE, Ddpexp, calling, finish
from tests.points import ITEMS, Recipe, session, wait_for
from tests.refusals import refused

CODE = """\
class Marks(Sides):
    # Trains slowly and for long, with a mark in `folder` for every rank that has begun.
    def __init__(self, folder):
        self.folder = folder

    def step(self, model, batch):
        open(f"{self.folder}/{RANK}", "w").close()
        time.sleep(0.02)
        return super().step(model, batch)
"""


@pytest.fixture
def recipe(ddpexp: Ddpexp, tmp_path: Path) -> Recipe:
    (tmp_path / "marks").mkdir()
    return Recipe(ddpexp, CODE)


def start(recipe: Recipe, *overrides: str, **environ: str) -> tuple[subprocess.Popen[str], Path]:
    """Start a run of 2 workers that trains until it is ended."""
    task = ("task._target_=points.Marks", f"+task.folder={recipe.ddpexp.folder}/marks")
    return recipe.start(*task, "trainer.gpus=2", "trainer.epochs=50000", *overrides, environ=environ)


def trains(recipe: Recipe) -> bool:
    return len(list((recipe.ddpexp.folder / "marks").iterdir())) == 2


# In the order of a run's life: how many processes there are at least, and whether the ranks have begun.
MOMENTS = {"importing": (2, False), "joining": (4, False), "training": (4, True), "loading": (8, True)}


@pytest.mark.variants(1)
@pytest.mark.fault(7)
@pytest.mark.parametrize("moment", MOMENTS)
def test_nothing_outlives_a_killed_command(recipe: Recipe, moment: str) -> None:
    count, begun = MOMENTS[moment]
    process, run = start(recipe, *(ITEMS if moment == "loading" else ()))
    wait_for(lambda: len(session(process.pid)) >= count and (trains(recipe) or not begun))
    process.kill()
    wait_for(lambda: not session(process.pid))
    assert finish(process, run).code == -signal.SIGKILL


@pytest.mark.variants(1)
@pytest.mark.fault(7)
@pytest.mark.parametrize("moment", ["importing", "training"])
def test_a_killed_fork_server_ends_the_command_with_1_saying_so(recipe: Recipe, moment: str) -> None:
    count, begun = MOMENTS[moment]
    process, run = start(recipe)
    wait_for(lambda: len(session(process.pid)) >= count and (trains(recipe) or not begun))
    [server] = [pid for pid, parent in session(process.pid).items() if parent == process.pid]
    os.kill(server, signal.SIGKILL)
    wait_for(lambda: not session(process.pid))
    done = finish(process, run)
    assert done.code == 1
    assert "the process that starts the workers was killed" in done.err
    assert "Traceback" not in done.err
    assert done.result()["status"] == "failed"


@pytest.mark.slow
@pytest.mark.fault(5)
def test_a_run_that_finishes_with_a_stopped_fork_server_is_done(recipe: Recipe) -> None:
    process, run = start(recipe, "trainer.epochs=10", "trainer.timeout.step_seconds=1")
    wait_for(lambda: trains(recipe))
    server = server_of(process)
    os.kill(server, signal.SIGSTOP)
    done = finish(process, run)
    assert (done.code, done.err) == (0, "")
    assert done.result()["status"] == "done"
    assert f"ddpexp: warning: the fork server, process {server}, is stopped (by SIGSTOP or a debugger)" in done.out


@pytest.mark.slow
@pytest.mark.fault(2)
def test_a_rank_that_is_killed_while_the_fork_server_is_stopped_is_named(recipe: Recipe) -> None:
    process, run = start(recipe)
    wait_for(lambda: trains(recipe))
    server = server_of(process)
    rank = children(server)[0]
    for pid, number in ((server, signal.SIGSTOP), (rank, signal.SIGKILL)):
        os.kill(pid, number)
    done = finish(process, run)
    assert done.code == 1
    assert re.search(
        r"^ddpexp: rank [01] on \S+ failed \(train.*\): SIGKILL: killed by SIGKILL", done.err, re.MULTILINE
    ), done.err


@pytest.mark.slow
@pytest.mark.fault(5)
def test_a_stopped_fork_server_is_named_when_a_rank_hangs(recipe: Recipe) -> None:
    process, run = start(recipe, "trainer.timeout.step_seconds=1", DDPEXP_FAULT="forward:sleep:1:30")
    wait_for(lambda: trains(recipe))
    server = server_of(process)
    os.kill(server, signal.SIGSTOP)
    done = finish(process, run)
    assert done.code == 1
    assert f"the fork server of its host, process {server}, is stopped (by SIGSTOP or a debugger)" in done.err


def server_of(process: subprocess.Popen[str]) -> int:
    return next(pid for pid, parent in session(process.pid).items() if parent == process.pid)


@pytest.mark.fault("S6")
def test_a_run_listens_on_loopback_alone_and_the_command_never_loads_torch(recipe: Recipe, tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    # An evaluation has loader workers of its own.
    process, run = start(recipe, *ITEMS, "trainer.eval_every=0", TMPDIR=str(temporary))
    wait_for(lambda: trains(recipe))
    processes = session(process.pid)
    assert len(processes) == 8  # the command, the server, 2 ranks, 2 loader workers each
    assert not re.search(r"libtorch|libc10|numpy", Path(f"/proc/{process.pid}/maps").read_text())
    addresses = {address for pid in processes for address in inet_addresses(pid)}
    assert {address.split(":")[0] for address in addresses} == {"127.0.0.1"}
    process.terminate()
    assert finish(process, run).code == 128 + signal.SIGTERM
    assert list(temporary.rglob("*")) == []


def inet_addresses(pid: int) -> set[str]:
    """Return the local addresses of a process's TCP and UDP sockets, as `127.0.0.1:port` or hexadecimal for IPv6."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed since it was listed
            if found := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(link)):
                inodes.add(found[1])
    addresses = set()
    for name in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in inodes:
                host, port = fields[1].split(":")
                readable = (
                    ".".join(str(byte) for byte in reversed(bytes.fromhex(host))) if len(host) == 8 else loopback6(host)
                )
                addresses.add(f"{readable}:{int(port, 16)}")
    return addresses


def loopback6(host: str) -> str:
    """Return 127.0.0.1 for ::1 and ::ffff:127.0.0.1 as the kernel writes them."""
    return "127.0.0.1" if host in ("0" * 24 + "01000000", "0" * 16 + "FFFF0000" + "0100007F") else host


def test_a_preload_that_fails_is_refused_with_its_name(tmp_path: Path) -> None:
    server = Server(preload=["json", "nowhere.to_be_found"])
    with refused("The fork server: nowhere.to_be_found"):
        Spawn().launch(calling("time:sleep", ["60"], tmp_path), server)


LARGE = "x" * (3 << 20)  # more than a packet, or an argument of a program, may have


@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_a_process_gets_arguments_of_any_size(start_method: str) -> None:
    server = Server(start_method, preload=[])
    server.channel.settimeout(PATIENCE)
    try:
        assert server.call("builtins:len", [LARGE + "seven x"]) == (len(LARGE + "seven x") % 256, "")  # the exit code
    finally:
        server.close()


def test_a_copy_of_the_server_gets_an_environment_of_any_size() -> None:
    server = Server(preload=[])
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.channel.settimeout(PATIENCE)
    ours.settimeout(PATIENCE)
    try:
        server.clone(theirs.fileno(), {"DDPEXP_LARGE": LARGE, "DDPEXP_CODE": "7"})
        theirs.close()
        assert Server.of(ours).call("os:getenv", ["DDPEXP_CODE"]) == (7, "")
    finally:
        ours.close()
        server.close()


def test_the_preload_list_does_not_initialize_cuda(environ: dict[str, str]) -> None:
    # No GPU is here to break: the questions themselves are made to fail, after torch's own import.
    program = """
import importlib, sys, torch
def initialized(*_, **__):
    raise AssertionError("CUDA was initialized")
for module, name in ((torch.cuda, "_lazy_init"), (torch.cuda, "is_available"), (torch.cuda, "device_count"),
                     (torch._C, "_cuda_getDeviceCount"), (torch._C, "_cuda_init")):
    setattr(module, name, initialized)
for name in sys.argv[1:]:
    importlib.import_module(name)
assert not torch.cuda.is_initialized()
"""
    done = subprocess.run(
        [sys.executable, "-c", program, *PRELOAD], env=environ, capture_output=True, text=True, timeout=PATIENCE
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.smoke
def test_workers_find_what_is_documented_beside_whatever_users_import(tmp_path: Path) -> None:
    server = Server(preload=["tests.crowded"])
    ours, theirs = os.pipe()
    other, others = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.clone(others.fileno(), {})
    others.close()
    cloned = Server.of(other)
    found = []
    with (tmp_path / "log").open("w") as log:
        for number, one in enumerate((server, cloned, server)):
            path = tmp_path / str(number)
            one.start(number, "tests.crowded:describe", [str(path)], {}, log.fileno(), {"CONTROL": theirs})
            while (answer := one.receive() or pytest.fail("the server is gone"))["kind"] != "exit":
                check_answer(answer)
            assert answer["code"] == 7, (tmp_path / "log").read_text()
            found.append(json.loads(path.read_text()))
    assert (tmp_path / "log").read_text() == ""
    pipe, at_import = os.readlink(f"/proc/self/fd/{theirs}"), set(found[0]["at_import"])
    for one in found:
        assert [one["descriptors"][number] for number in "012"] == ["/dev/null", *[str(tmp_path / "log")] * 2]
        rest = {name for number, name in one["descriptors"].items() if number not in "012"}
        assert rest - at_import == {pipe}  # none of the server's own
        assert list(one["descriptors"].values()).count(pipe) == 1
        assert one["wakeup"] == -1
        assert (one["awaited"], one["threaded"], one["threads"]) == (5, [1, 2], [1, True])
        assert one["multiplied"] == 2 * 300.0**3
        assert one["blocked"] == []
        for name, handler in one["handlers"].items():
            ends = name in ("SIGCHLD", "SIGTERM", "SIGHUP")
            assert (handler == "<Handlers.SIG_DFL: 0>") == ends, (name, handler)
    for one in (cloned, server):
        one.close()
    for number in (ours, theirs):
        os.close(number)

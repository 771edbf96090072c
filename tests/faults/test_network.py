"""What a network does to a run.

Ports that are taken, ranks that never come, hosts that are cut off, strangers that speak.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddpexp.checkpoint.format import complete_checkpoints
from tests.conftest import PATIENCE, Done, finish
from tests.faults.harness import trained
from tests.faults.hosts import Both, Hosts
from tests.launch.starters import DDPEXP, SPAWN, free_port, host
from tests.points import ITEMS, Recipe, session, wait_for
from tests.refusals import command_refused
from tests.warm.popen import start_command

MACHINES = ("trainer.nodes=2", "launcher.node_rank=N", "launcher.master_addr=node0", "launcher.master_port=29810")
"""Two machines, started manually."""
STEPS = (
    "trainer.epochs=null",
    "trainer.max_steps=120",
    "trainer.eval_every=0",
    "trainer.checkpoint_every=10",
    "trainer.log_every=1",
)


@pytest.fixture(scope="module")
def environ(warm_environ: dict[str, str]) -> dict[str, str]:
    """The environment in which commands on this host, and their fork servers, are forks."""
    return warm_environ


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """The two hosts, restored after the test, for the tests after it."""
    if "SLURM_CONF" not in os.environ:
        pytest.skip("no cluster of hosts: SLURM_CONF is not set")
    found = Hosts()
    yield found
    found.restore()


def undisturbed(recipe: Recipe, *overrides: str) -> Done:
    """Run without a fault and without a pace; what else is different is the launcher."""
    done = SPAWN(recipe, 2, *overrides, "task._target_=points.Sides")
    assert done.code == 0, done.err
    return done


def shell(recipe: Recipe, run: Path, *overrides: str, **variables: str) -> subprocess.Popen[str]:
    """Start one rank manually, with the variables that a user exports."""
    arguments, _ = recipe.words("trainer.threads=1", "launcher=torchrun-env", *overrides, run=run)
    return start_command(arguments, recipe.folder, {**recipe.ddpexp.environ, **variables})


# ------------------------------------------------------------------------------------------- before the ranks have met


@pytest.mark.slow
@pytest.mark.fault(24)
def test_a_port_that_another_program_has_is_refused_by_all_ranks_in_seconds(recipe: Recipe) -> None:
    run = recipe.words()[1]
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]

        def serve() -> None:
            while True:
                try:
                    channel, _ = other.accept()
                except OSError:
                    return
                with channel:
                    channel.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        serving = threading.Thread(target=serve)
        serving.start()
        variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        ranks = [shell(recipe, run, RANK=str(rank), **variables) for rank in (0, 1)]
        first, second = (finish(process, run) for process in ranks)
        other.shutdown(socket.SHUT_RDWR)
        serving.join()
    name = Path("/proc/self/comm").read_text().strip()
    command_refused(first, f"MASTER_PORT={port}: Address already in use by {name} (process {os.getpid()})")
    command_refused(second, f"rank 1: 127.0.0.1:{port}")
    assert not run.exists()


def namespaced(recipe: Recipe, namespaces: tuple[str, ...], before: str, *overrides: str) -> Done:
    """Run the command in namespaces of its own, after a command of the shell."""
    arguments, run = recipe.words("trainer.threads=1", "trainer.gpus=2", *overrides)
    command = shlex.join([sys.executable, "-m", "ddpexp", *arguments])
    process = subprocess.Popen(
        ["unshare", *namespaces, "sh", "-c", f"{before}; exec {command}"], cwd=recipe.folder,
        env=recipe.ddpexp.environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    return finish(process, run)


@pytest.mark.variants(1)
@pytest.mark.fault(75)
@pytest.mark.skipif(os.geteuid() != 0, reason="a namespace of its own takes root")
@pytest.mark.parametrize("launcher", ["spawn", "elastic"])
def test_a_loopback_interface_that_is_down_is_refused_with_the_cure(recipe: Recipe, launcher: str) -> None:
    done = namespaced(recipe, ("--net",), "true", f"launcher={launcher}")
    command_refused(done, "the loopback interface: ip link set lo up")
    assert done.err.count("\n") == 1
    assert not done.run.exists()
    assert namespaced(recipe, ("--net",), "ip link set lo up", f"launcher={launcher}").code == 0


@pytest.mark.slow
@pytest.mark.fault(75)
@pytest.mark.skipif(os.geteuid() != 0, reason="a namespace of its own takes root")
def test_a_host_whose_own_name_stands_for_no_address_trains(recipe: Recipe) -> None:
    for launcher in ("elastic", "spawn"):
        done = namespaced(recipe, ("--uts",), "hostname no-such-host", f"launcher={launcher}")
        assert done.code == 0, done.err


@pytest.mark.fault(75)
@pytest.mark.variants(1)
@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        ("no-such-host.invalid:1", "launcher.rdzv_endpoint=no-such-host.invalid:1: no address"),
        ("192.0.2.1:1", "launcher.rdzv_endpoint=192.0.2.1:1: does not answer"),
        ("127.0.0.1:PORT", "launcher.rdzv_endpoint: 2 machines of trainer.nodes"),
    ],
)
def test_machines_that_do_not_meet_are_waited_for_no_longer_than_the_limit(
    recipe: Recipe, endpoint: str, expected: str
) -> None:
    where = f"launcher.rdzv_endpoint={endpoint.replace('PORT', str(free_port()))}"
    done = recipe("launcher=elastic", "trainer.nodes=2", where, "trainer.timeout.init_seconds=4")
    command_refused(done, expected)
    assert not done.run.exists()


@pytest.mark.fault(26)
@pytest.mark.slurm
def test_an_address_that_no_way_leads_to_is_named_in_time(recipe: Recipe, hosts: Hosts) -> None:
    address = "203.0.113.7"  # of documents, of no host
    overrides = (
        "trainer.nodes=2",
        "launcher.node_rank=1",
        f"launcher.master_addr={address}",
        "launcher.master_port=29811",
    )
    arguments, run = recipe.words("trainer.timeout.init_seconds=2", *overrides)
    done = subprocess.run(
        [*host(1), *DDPEXP, *arguments],
        cwd=recipe.folder, env=recipe.ddpexp.environ, capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    command_refused(
        Done(done.returncode, done.stdout, done.stderr, run), f"node 1: 2 s: nobody answered at {address}:29811"
    )
    assert not run.exists()


@pytest.mark.fault(27)
def test_two_ranks_zero_are_refused_with_the_one_that_was_first(recipe: Recipe) -> None:
    run = recipe.words()[1]
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "RANK": "0"}
    first = shell(recipe, run, **variables)
    wait_for(lambda: is_open(int(variables["MASTER_PORT"])))
    second = finish(shell(recipe, run, **variables), run)
    command_refused(second, f"MASTER_PORT: (process {first.pid})")
    other = finish(shell(recipe, run, **{**variables, "RANK": "1"}), run)
    assert [finish(first, run).code, other.code] == [0, 0], (
        other.err
    )  # the first one trains with the rank that it waited for


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.fault(33)
def test_versions_that_differ_are_refused_with_both_values(recipe: Recipe, tmp_path: Path) -> None:
    other = tmp_path / "other/torch-9.9.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.9\n")
    run = recipe.words()[1]
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    first = shell(recipe, run, RANK="0", **variables)
    path = f"{other.parent}:{recipe.ddpexp.environ['PYTHONPATH']}"  # which no fork has
    second = shell(recipe, run, RANK="1", PYTHONPATH=path, **variables)
    done = [finish(process, run) for process in (first, second)]
    assert [one.code for one in done] == [2, 2]
    command_refused(done[0], f"torch: 9.9 on rank 1 ({os.uname().nodename})")
    assert not run.exists()


# ------------------------------------------------------------------------------------------------- a host is cut off


@pytest.mark.fault(28)
@pytest.mark.slurm
@pytest.mark.parametrize("heals", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_partition_ends_both_sides_which_name_each_other_and_the_run_resumes_later(
    recipe: Recipe, hosts: Hosts, heals: bool
) -> None:
    recipe.ddpexp.environ["PACE"] = "0.05"
    both = Both(recipe, [*MACHINES, *STEPS])
    wait_for(lambda: trained(both.run, 20))
    hosts.cut(1)
    first, second = both.finish()
    assert (first.code, second.code) == (1, 1)
    assert "the command of rank 1 on node1 is gone: it was killed" in first.err
    assert "the command of rank zero on node0 is gone: it was killed" in second.err
    assert all("or its host is cut off" in one.err for one in (first, second))
    error = json.loads((both.run / "error.json").read_text())
    assert (error["rank"], error["host"], error["kind"]) == (1, "node1", "CommandLost")
    assert first.result()["status"] == "failed"
    newest = complete_checkpoints(both.run / "checkpoints")[0]
    hosts.heal(1)
    recipe.ddpexp.environ["PACE"] = "0"
    if not heals:
        return
    again = Both(recipe, [*MACHINES, *STEPS], run=both.run).finish()
    assert [one.code for one in again] == [0, 0], again[0].err
    assert f"resumed after step {int(newest.name[5:])} of 120" in (both.run / "run.log").read_text()
    assert again[0].result()["weights_sha256"] == undisturbed(recipe, *STEPS).result()["weights_sha256"]


@pytest.mark.fault(28)
@pytest.mark.slow
@pytest.mark.slurm
def test_a_short_cut_is_sat_out(recipe: Recipe, hosts: Hosts) -> None:
    recipe.ddpexp.environ["PACE"] = "0.02"
    both = Both(recipe, [*MACHINES, *STEPS])
    wait_for(lambda: trained(both.run, 20))
    hosts.cut(1)
    time.sleep(2.5)
    assert not trained(both.run, 120)  # it was in time
    hosts.heal(1)
    done = both.finish()
    assert [(one.code, one.err) for one in done] == [(0, ""), (0, "")]
    assert done[0].result()["weights_sha256"] == undisturbed(recipe, *STEPS).result()["weights_sha256"]


ELASTIC = (
    "launcher=elastic", "trainer.nodes=1:2", "trainer.gpus=1", "launcher.rdzv_endpoint=node0:29820",
    "launcher.rdzv_conf='last_call_timeout=2'",
)  # fmt: skip


@pytest.mark.fault(31)
@pytest.mark.slow
@pytest.mark.slurm
def test_a_host_that_vanishes_leaves_the_other_training_from_its_last_checkpoint(recipe: Recipe, hosts: Hosts) -> None:
    recipe.ddpexp.environ["PACE"] = "0.05"
    both = Both(recipe, [*ELASTIC, *STEPS, "launcher.rdzv_id=vanishes"])
    wait_for(lambda: trained(both.run, 20))
    hosts.vanish(1)
    wait_for(lambda: both.processes[0].poll() is not None or "resumed after" in (both.run / "run.log").read_text())
    first, second = both.finish()
    assert (first.code, second.code) == (0, -9), first.err
    assert "the command of rank " in first.err
    result = first.result()
    assert (result["status"], result["world_size"], result["step"]) == ("done", 1, 120)
    assert [one["step"] for one in first.metrics() if "train/loss" in one] == list(range(1, 121))


@pytest.mark.fault(32)
@pytest.mark.slow
@pytest.mark.slurm
def test_a_vanished_host_that_keeps_the_list_of_hosts_ends_the_other_saying_so(recipe: Recipe, hosts: Hosts) -> None:
    both = Both(recipe, [*ELASTIC, *STEPS[:1], "trainer.max_steps=10000", *STEPS[2:], "launcher.rdzv_id=store"])
    wait_for(lambda: trained(both.run, 20))
    hosts.vanish(0)
    first, second = both.finish()
    assert (first.code, second.code) == (-9, 1)
    assert "node0:29820, which keeps the list of the machines, does not answer any more" in second.err
    assert " on node0 is gone: it was killed" in second.err


# ------------------------------------------------------------------------------------------------ strangers, and clocks


JUNK = """\
import os, socket, sys, time
held = []
for place in sys.argv[1:]:
    host, port = place.rsplit(":", 1)
    endless = b"x" * (1 << 22)
    for data in (os.urandom(1024), b"GET / HTTP/1.1\\r\\nHost: a\\r\\n\\r\\n", endless, bytes(1024), b""):
        try:
            channel = socket.create_connection((host, int(port)), timeout=5)
            channel.settimeout(0.5)
            held.append(channel)
            channel.sendall(data)
        except OSError:
            continue
print(len(held), flush=True)
sys.stdin.read()  # half-open: nobody closes
"""


@pytest.mark.fault(34, "S6", "S7")
@pytest.mark.slurm
def test_junk_in_every_port_of_a_run_harms_nothing(recipe: Recipe, hosts: Hosts) -> None:
    before = [frozenset(port for _, port in hosts.listening(number)) for number in (0, 1)]
    both = Both(recipe, [*MACHINES, *STEPS])
    wait_for(lambda: trained(both.run, 10))
    places = [place for number in (0, 1) for place in hosts.listening(number, before[number])]
    assert {address for address, _ in places} <= {socket.gethostbyname(name) for name in ("node0", "node1")}
    addresses = [f"{address}:{port}" for address, port in places]
    assert addresses
    with subprocess.Popen(
        [*host(1), sys.executable, "-c", JUNK, *addresses], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as stranger:
        assert stranger.stdout is not None
        assert int(stranger.stdout.readline()) > len(addresses)
        done = both.finish()
        stranger.communicate("")
    assert [one.code for one in done] == [0, 0], done[0].err
    assert done[0].err.count("\n") < 2
    assert done[0].result()["weights_sha256"] == undisturbed(recipe, *STEPS).result()["weights_sha256"]


CLOCK = """\
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>

int clock_gettime(clockid_t clock, struct timespec *now)
{
    int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
    int done = real(clock, now);
    if (done == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += 3600;
    return done;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone)
{
    struct timespec found;
    clock_gettime(CLOCK_REALTIME, &found);
    now->tv_sec = found.tv_sec;
    now->tv_usec = found.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *at)
{
    struct timespec found;
    clock_gettime(CLOCK_REALTIME, &found);
    if (at)
        *at = found.tv_sec;
    return found.tv_sec;
}
"""
"""A clock that is an hour ahead, for all programs of a host.

Libfaketime breaks sleep and waits of Python 3.11 and later.
"""


@pytest.fixture(scope="module")
def clock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library with that clock."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler to make a clock with")
    folder = tmp_path_factory.mktemp("clock")
    (folder / "clock.c").write_text(CLOCK)
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", folder / "clock.so", folder / "clock.c", "-ldl"],
        check=True,
        timeout=PATIENCE,
    )
    return folder / "clock.so"


@pytest.mark.slow
@pytest.mark.fault(35)
@pytest.mark.slurm
@pytest.mark.parametrize("fails", [False, True], ids=["ends", "fails"])
def test_clocks_an_hour_apart_change_nothing(recipe: Recipe, hosts: Hosts, clock: Path, fails: bool) -> None:
    ahead = {"LD_PRELOAD": str(clock)}
    said = subprocess.run(
        [sys.executable, "-c", "import time; print(time.time())"], env=ahead, capture_output=True, text=True
    )
    assert 3590 < float(said.stdout) - time.time() < 3610
    fault = {"DDPEXP_FAULT": "forward:raise:1:20"} if fails else {}
    both = Both(recipe, [*MACHINES, *STEPS], own=(fault, {**ahead, **fault}))
    done = both.finish()
    starts = [json.loads(line)["time"] for line in (both.run / "metrics.jsonl").read_text().splitlines()]
    assert all(abs(at - time.time()) < 600 for at in starts)  # of rank zero, whose clock is right
    if not fails:
        assert [one.code for one in done] == [0, 0], done[0].err
        assert done[0].result()["weights_sha256"] == undisturbed(recipe, *STEPS).result()["weights_sha256"]
        return
    # By the clocks rank zero's broken connection was an hour before its cause.
    assert [one.code for one in done] == [1, 1]
    error = json.loads((both.run / "error.json").read_text())
    assert (error["rank"], error["host"], error["kind"]) == (1, "node1", "RuntimeError")
    assert "injected at forward" in done[0].err


# ---------------------------------------------------------------------------------------------------- who may come in


KNOCK = """\
import socket, sys
for port in sys.argv[2:]:
    channel = socket.socket()
    channel.settimeout(3)
    try:
        channel.connect((sys.argv[1], int(port)))
        print("open", port)
    except ConnectionRefusedError:
        print("refused", port)
    except OSError as error:
        print(error, port)
"""


@pytest.mark.fault("S6")
@pytest.mark.slurm
def test_another_host_reaches_no_port_of_a_run_on_one_host(recipe: Recipe, hosts: Hosts) -> None:
    process, run = recipe.start("trainer.gpus=2", *ITEMS, "trainer.epochs=50000", "trainer.log_every=1")
    wait_for(lambda: trained(run, 3))
    family = set(session(process.pid))
    lines = subprocess.run(["ss", "-Hltunp"], capture_output=True, text=True, check=True).stdout.splitlines()
    ours = [line.split()[4] for line in lines if any(f"pid={pid}," in line for pid in family)]
    assert {address.rpartition(":")[0] for address in ours} == {"127.0.0.1"}
    ports = [address.rpartition(":")[2] for address in ours]
    # The bridge's address is that of this machine, as the hosts reach it; one port that is open there shows that they
    # do.
    head = socket.gethostbyname("ddp-head")
    with socket.create_server((head, 0)) as control:
        shown = str(control.getsockname()[1])
        overrides = [*host(0), sys.executable, "-c", KNOCK, head, *ports, shown]
        said = subprocess.run(
            overrides, capture_output=True, text=True, check=True, timeout=PATIENCE
        ).stdout.splitlines()
    process.terminate()
    assert finish(process, run).code == 143
    assert said == [*(f"refused {port}" for port in ports), f"open {shown}"]

"""Several commands, one job: who gets which ranks, what must be equal, and what each does when another fails."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import pytest

from ddpexp.launch import Layout, WorkerRequest
from ddpexp.launch.launchers.local import Spawn
from ddpexp.launch.supervise.assignment import RankAssignment, assign_ranks, first_difference
from ddpexp.launch.supervise.coordinator import worker_environment
from ddpexp.system.gpus import Device
from tests.conftest import OWN_SERVER, PATIENCE, Ddpexp, Done, calling, finish
from tests.points import Recipe, session, wait_for
from tests.refusals import command_refused, refused

LAYOUT = Layout(nodes=1, world_size=1, device="cpu", backend="gloo", threads=1)


def handshake(index: int, host: str = "a", workers: int = 1, **more: Any) -> dict[str, Any]:
    """What a command says of itself."""
    return {
        "index": index, "host": host, "boot": f"boot of {host}", "versions": {"ddpexp": "1.0", "torch": "2.13.0",
            "Python": "3.11"},
        "identity": {}, "layout": asdict(LAYOUT), "workers": workers, "externally_launched": False, "local_rank": None,
        "local_world_size": None,
        "cores": list(range(8)), "quota": None, "gpus": [], "owner": None, **more,
    }  # fmt: skip


def rank(index: int, host: str = "a", local_rank: int | None = None, **more: Any) -> dict[str, Any]:
    return handshake(index, host, externally_launched=True, local_rank=local_rank, **more)


def places(assignments: Sequence[RankAssignment]) -> list[tuple[int, int, int, int, int]]:
    return [
        (
            assignment.first_rank,
            assignment.workers,
            assignment.local_rank,
            assignment.local_world_size,
            assignment.node_rank,
        )
        for assignment in assignments
    ]


# ------------------------------------------------------------------------------------------------------------ the ranks


def test_nodes_of_unequal_sizes_get_consecutive_ranks() -> None:
    layout, assignments = assign_ranks(
        [handshake(0, "a", 3), handshake(1, "b", 1), handshake(2, "c", 2)], "auto", "node"
    )
    assert (layout.nodes, layout.world_size) == (3, 6)
    assert places(assignments) == [(0, 3, 0, 3, 0), (3, 1, 0, 1, 1), (4, 2, 0, 2, 2)]
    assert [assignment.first_on_host for assignment in assignments] == [True, True, True]


def test_several_commands_on_one_host_are_one_node() -> None:
    layout, assignments = assign_ranks(
        [handshake(0, "a", 2), handshake(1, "b", 2), handshake(2, "a", 1)], "auto", "node"
    )
    assert (layout.nodes, layout.world_size) == (2, 5)
    assert places(assignments) == [(0, 2, 0, 3, 0), (2, 2, 0, 2, 1), (4, 1, 2, 3, 0)]
    assert [assignment.first_on_host for assignment in assignments] == [True, True, False]


def test_two_containers_of_one_host_are_two_nodes_and_so_are_two_hosts_of_one_name() -> None:
    containers = [handshake(0, "a"), handshake(1, "b", boot="boot of a")]
    namesakes = [handshake(0, "a"), handshake(1, "a", boot="another")]
    for handshakes in (containers, namesakes):
        layout, assignments = assign_ranks(handshakes, "auto", "node")
        assert (layout.nodes, places(assignments)) == (2, [(0, 1, 0, 1, 0), (1, 1, 0, 1, 1)])


def test_three_ranks_on_two_hosts_keep_the_local_ranks_that_they_were_given() -> None:
    given = [rank(0, "a", 1), rank(1, "b", 0), rank(2, "a", 0)]
    layout, assignments = assign_ranks(given, "auto", "rank")
    assert (layout.nodes, layout.world_size) == (2, 3)
    assert places(assignments) == [(0, 1, 1, 2, 0), (1, 1, 0, 1, 1), (2, 1, 0, 2, 0)]


@pytest.mark.parametrize("given", [(None, None, None), (0, 0, 0), (0, 0, 5), (0, None, 1)])
def test_local_ranks_that_are_missing_or_contradict_are_counted(given: tuple[int | None, ...]) -> None:
    _, assignments = assign_ranks(
        [rank(0, "a", given[0]), rank(1, "b", given[1]), rank(2, "a", given[2])], "auto", "rank"
    )
    assert places(assignments) == [(0, 1, 0, 2, 0), (1, 1, 0, 1, 1), (2, 1, 1, 2, 0)]


# ---------------------------------------------------------------------------------------------------------- the threads


@pytest.mark.parametrize(
    ("handshakes", "threads"),
    [
        ([handshake(0, "a", 2), handshake(1, "b", 2)], 4),
        ([handshake(0, "a", 2), handshake(1, "a", 2)], 2),  # the same eight cores
        ([rank(0, cores=[0, 1]), rank(1, cores=[2, 3])], 2),  # each its own
        ([rank(0, cores=[0, 1, 2]), rank(1, cores=[2, 3, 4])], 2),  # five together
        ([rank(0, cores=[0]), rank(1, cores=list(range(8)))], 1),  # the first would crowd its core
        ([handshake(0, "a", 2), handshake(1, "b", 4)], 2),  # the same for all: of the host that has least
        ([handshake(0, "a", 2, cores=[0, 1]), handshake(1, "b", 2)], 1),
        ([handshake(0, "a", 16), handshake(1, "b", 1)], 1),
        ([rank(0, quota=4), rank(1, quota=4)], 2),
        ([rank(0, quota=1), rank(1, quota=1)], 1),
        ([handshake(0, "a", quota=6), handshake(1, "b")], 6),
    ],
)  # fmt: skip
def test_a_hosts_cores_are_divided_among_its_workers(handshakes: list[dict[str, Any]], threads: int) -> None:
    assert assign_ranks(handshakes, "auto", "node")[0].threads == threads
    assert assign_ranks(handshakes, 3, "node")[0].threads == 3


# ------------------------------------------------------------------------------------------------------------- the GPUs


def with_gpus(*shown: str, workers: int = 1, given: bool = True) -> list[dict[str, Any]]:
    layout = asdict(Layout(1, 1, "cuda", "nccl", 1))
    return [
        handshake(i, workers=workers, externally_launched=given, gpus=gpus.split(), layout=layout)
        for i, gpus in enumerate(shown)
    ]


@pytest.mark.parametrize(
    ("handshakes", "own"),
    [
        (with_gpus("A B", "A B"), False),  # per node: each takes the one with its local rank
        (with_gpus("A B C", "A B C"), False),
        (with_gpus("A", "B"), True),  # per task
        (with_gpus("A B", "C D"), True),
        (
            with_gpus("A B", "C D", workers=2, given=False),
            True,
        ),  # two commands with CUDA_VISIBLE_DEVICES of their own
        (with_gpus("A B C D", "A B C D", workers=2, given=False), False),
        (with_gpus("A B", workers=2, given=False), True),
    ],
)
def test_commands_that_see_their_own_gpus_count_them_from_the_first(
    handshakes: list[dict[str, Any]], own: bool
) -> None:
    layout, assignments = assign_ranks(handshakes, "auto", "rank")
    assert [assignment.own_gpus for assignment in assignments] == [own] * len(handshakes)
    for assignment in assignments:
        found = [
            worker_environment(layout, assignment, number, ("127.0.0.1", 1), "127.0.0.1")
            for number in range(assignment.workers)
        ]
        first = 0 if own else assignment.local_rank
        assert [one["DDPEXP_GPU"] for one in found] == [str(first + number) for number in range(assignment.workers)]


@pytest.mark.parametrize(
    ("handshakes", "seen"),
    [
        (with_gpus("MIG-1 MIG-2", workers=2, given=False), ["MIG-1 MIG-2"]),  # one command
        (with_gpus("MIG-1 MIG-2", "MIG-1 MIG-2"), ["MIG-1 MIG-2"] * 2),  # torchrun, or srun: every task sees all
        (with_gpus("MIG-1", "MIG-2"), ["MIG-1", "MIG-2"]),  # srun --gpus-per-task=1
    ],
)
def test_each_worker_sees_its_own_mig_instance_as_device_0(handshakes: list[dict[str, Any]], seen: list[str]) -> None:
    layout, assignments = assign_ranks(handshakes, "auto", "rank")
    found = []
    for assignment, names in zip(assignments, seen, strict=True):
        devices = [Device(name, "GPU-0", name, alone=True) for name in names.split()]
        for number in range(assignment.workers):
            variables = worker_environment(layout, assignment, number, ("127.0.0.1", 1), "127.0.0.1", devices)
            found.append((variables["CUDA_VISIBLE_DEVICES"], variables["DDPEXP_GPU"]))
    assert found == [("MIG-1", "0"), ("MIG-2", "0")]


@pytest.mark.parametrize(
    ("handshakes", "expected"),
    [
        (with_gpus("A", "A"), "a runs 2 workers: 1 GPU"),
        (with_gpus("A B", "A B", "A B"), "a runs 3 workers: 2 GPUs"),
        (with_gpus("A B", "B"), "a runs 2 workers: 2 GPUs"),
        (with_gpus("A B", "A B", workers=2, given=False), "a runs 4 workers: 2 GPUs"),
    ],
)
def test_fewer_gpus_than_workers_are_refused(handshakes: list[dict[str, Any]], expected: str) -> None:
    with refused(expected):
        assign_ranks(handshakes, "auto", "rank")


# -------------------------------------------------------------------------------------------------- what must be equal


@pytest.mark.fault(33)
def test_configurations_that_differ_are_refused_with_the_key_and_both_values() -> None:
    one = {"trainer": {"seed": 0, "gpus": 2}, "run": {"trust": ["a"]}}
    others = [handshake(1, identity=one), handshake(2, "b", identity={**one, "run": {"trust": []}})]
    with refused("run.trust: ['a'] on node 0 (a) and [] on node 2 (b)"):
        assign_ranks([handshake(0, identity=one), *others], 1, "node")


@pytest.mark.fault(33)
@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"torch": "2.12.0"}, "torch is 2.13.0 on rank 0 (a): 2.12.0 on rank 1 (b)"),
        ({"Python": "3.12"}, "Python is 3.11 on rank 0 (a): 3.12 on rank 1 (b)"),
        ({"ddpexp": "1.1", "torch": "1"}, "ddpexp is 1.0 on rank 0 (a): 1.1 on rank 1 (b)"),
        ({"ddpexp": None}, "ddpexp is 1.0 on rank 0 (a): unknown version on rank 1 (b)"),
    ],
)
def test_versions_that_differ_are_refused_before_configurations(changed: dict[str, Any], expected: str) -> None:
    other = handshake(1, "b", identity={"a": 1})
    other["versions"] = {**other["versions"], **changed}
    with refused(expected):
        assign_ranks([handshake(0), other], "auto", "rank")


def test_a_command_of_a_time_before_versions_were_compared_is_refused() -> None:
    other = handshake(1, "b")
    del other["versions"]
    with refused("ddpexp is 1.0 on rank 0 (a): unknown version on rank 1 (b)"):
        assign_ranks([handshake(0), other], "auto", "rank")


@pytest.mark.parametrize(("name", "value"), [("device", "cuda"), ("backend", "mpi")])
def test_devices_that_differ_are_refused(name: str, value: str) -> None:
    other = handshake(1, "b", layout={**asdict(LAYOUT), name: value})
    with refused(f"{name} {asdict(LAYOUT)[name]} and rank 1 (b) on {value}: trainer.{name}="):
        assign_ranks([handshake(0), other], "auto", "rank")


@pytest.mark.parametrize(
    ("one", "other", "difference"),
    [
        ({}, {}, None),
        ({"a": {"b": [1, {"c": 2}]}}, {"a": {"b": [1, {"c": 2}]}}, None),
        ({"a": 1, "b": {"c": 1}}, {"a": 1, "b": {"c": 2}}, ("b.c", 1, 2)),
        ({"a": 1}, {"a": 1, "b": 0}, ("b", None, 0)),
        ({"a": {"b": 1}}, {"a": 3}, ("a", {"b": 1}, 3)),
        ({"a": [1, 2]}, {"a": [2, 1]}, ("a", [1, 2], [2, 1])),
        ({"x": 1, "a": 1}, {"a": 2, "x": 2}, ("x", 1, 2)),
        (1, 2, ("", 1, 2)),
    ],
)
def test_the_first_difference_of_two_trees_is_found(
    one: Any, other: Any, difference: tuple[str, Any, Any] | None
) -> None:
    assert first_difference(one, other) == difference


# ----------------------------------------------------------------------------------------------- what a worker gets as arguments


def test_a_worker_gets_its_rank_and_world_size() -> None:
    layout = Layout(nodes=2, world_size=5, device="cpu", backend="gloo", threads=1)
    assert worker_environment(layout, RankAssignment(2, 3, 1, 4, 1, False, True), 2, ("127.0.0.1", 4711), "127.0.0.1") == {
        "RANK": "4", "LOCAL_RANK": "3", "WORLD_SIZE": "5", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "4711",
    }  # fmt: skip


def test_on_a_network_the_gradients_take_the_interface_of_the_meeting_unless_another_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assignment, names = RankAssignment(0, 1, 0, 1, 0, False, True), ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    # 127.0.0.1 is an address of an interface on every host; the store's is of another host.
    found = worker_environment(LAYOUT, assignment, 0, ("203.0.113.1", 1), "127.0.0.1")
    assert [found[name] for name in names] == ["lo", "lo"]
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    found = worker_environment(LAYOUT, assignment, 0, ("203.0.113.1", 1), "127.0.0.1")
    assert {name: found[name] for name in names if name in found} == {"GLOO_SOCKET_IFNAME": "lo"}  # inherits the other
    assert set(names).isdisjoint(worker_environment(LAYOUT, assignment, 0, ("203.0.113.1", 1), "203.0.113.2"))


# ------------------------------------------------------------------------------------- several machines by hand, on one


CODE = """\
class Places(Sides):
    # Writes which worker this is.
    def __init__(self):
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR")
        print("place", *(os.environ[name] for name in names), torch.get_num_threads(), flush=True)


class Waits(Sides):
    # Trains slowly for ever, so that a test may end it.
    def step(self, model, batch):
        time.sleep(0.05)
        return super().step(model, batch)


class Breaks(Waits):
    def __init__(self, rank):
        self.rank, self.left = rank, 5

    def step(self, model, batch):
        self.left -= 1
        if self.left == 0 and self.rank == RANK:
            raise ValueError("a wrong turn")
        return super().step(model, batch)


class Exits(Waits):
    def step(self, model, batch):
        if RANK == 1:
            sys.exit(7)
        return super().step(model, batch)
"""
ADDRESS = {"master_addr": "127.0.0.1", "master_port": 29500}
LONG = ("trainer.epochs=10000", "trainer.grace_seconds=600", "trainer.eval_every=0", "trainer.checkpoint_every=0")


@pytest.fixture(scope="session")
def environ(warm_environ: dict[str, str]) -> dict[str, str]:
    """How commands agree is tested here; where processes are killed, they have servers of their own."""
    return warm_environ


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, environ: dict[str, str]) -> Recipe:
    return Recipe(Ddpexp(tmp_path_factory.mktemp("team"), environ), CODE)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Nodes:
    """The same command on several machines, all of which are this one; each may have words of its own."""

    def __init__(
        self,
        recipe: Recipe,
        *overrides: str,
        nodes: int = 2,
        own: dict[int, Sequence[str]] | None = None,
        environ: dict[str, str] | None = None,
    ) -> None:
        typed, self.run = recipe.words(*overrides)
        self.recipe, self.own, self.environ = recipe, own or {}, environ
        self.typed = [
            *typed,
            f"trainer.nodes={nodes}",
            "launcher.master_addr=127.0.0.1",
            f"launcher.master_port={free_port()}",
        ]
        self.processes: dict[int, subprocess.Popen[str]] = {}

    def start(self, *ranks: int) -> Nodes:
        for number in ranks:
            overrides = [*self.typed, f"launcher.node_rank={number}", *self.own.get(number, ())]
            self.processes[number], _ = self.recipe.ddpexp.start(*overrides, environ=self.environ)
        return self

    def finish(self, timeout: float = PATIENCE) -> list[Done]:
        return [finish(process, self.run, timeout) for _, process in sorted(self.processes.items())]

    def trains(self) -> None:
        wait_for(lambda: (self.run / "metrics.jsonl").exists() and (self.run / "metrics.jsonl").read_text() != "")

    def has_met(self) -> bool:
        """Return whether a machine is connected to the first one."""
        port = f":{int(self.typed[-1].partition('=')[2]):04X}"
        lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        return any(line[1].endswith(port) and line[3] == "01" for line in lines)  # Source: proc(5), TCP_ESTABLISHED

    def worker(self, number: int) -> int:
        """Return the process id of the first worker of a machine: the youngest of its command's descendants."""
        family = session(self.processes[number].pid)
        [server] = [pid for pid, parent in family.items() if parent == self.processes[number].pid]
        return min(pid for pid, parent in family.items() if parent == server)


def rank_places(run: Path) -> list[list[str]]:
    logs = sorted((run / "ranks").iterdir(), key=lambda path: int(path.stem))
    return [re.findall(r"^place (.*)$", log.read_text(), re.MULTILINE)[0].split() for log in logs]


def test_two_commands_train_as_one(recipe: Recipe) -> None:
    alone = recipe("trainer.gpus=2", "trainer.threads=1", "task._target_=points.Places")
    both = Nodes(recipe, "trainer.threads=1", "task._target_=points.Places")
    one, other = both.start(1, 0).finish()
    assert (one.code, other.code, other.out, one.err, other.err) == (0, 0, "", "", "")
    result, expected = one.result(), alone.result()
    assert result["weights_sha256"] == expected["weights_sha256"]
    assert (result["status"], result["world_size"], result["metrics"]) == ("done", 2, expected["metrics"])
    assert {path.name for path in one.run.iterdir()} == {path.name for path in alone.run.iterdir()}
    assert [line["train/loss"] for line in one.metrics() if "train/loss" in line] == [
        line["train/loss"] for line in alone.metrics() if "train/loss" in line
    ]
    # They share a host, so they are one node.
    manifest = one.manifest()
    assert (manifest["world"], manifest["hosts"]) == (alone.manifest()["world"], [socket.gethostname()])
    assert rank_places(one.run) == rank_places(alone.run)
    assert rank_places(one.run) == [
        ["0", "0", "2", "2", "0", "127.0.0.1", "1"],
        ["1", "1", "2", "2", "0", "127.0.0.1", "1"],
    ]


def test_machines_may_have_different_numbers_of_workers_when_each_says_so_itself(recipe: Recipe) -> None:
    # A fake of machines with two GPUs and one: configured numbers are compared, what a machine shows is not.
    done = Nodes(recipe, "task._target_=points.Places", "trainer.gpus=2").start(0, 1).finish()
    assert [one.code for one in done] == [0, 0]
    cores = len(os.sched_getaffinity(0))
    assert [(place[0], place[1], place[3]) for place in rank_places(done[0].run)] == [
        (str(i), str(i), "4") for i in range(4)
    ]
    assert done[0].manifest()["world"]["threads"] == max(1, cores // 4)


@pytest.mark.variants(1)
@pytest.mark.fault(33)
@pytest.mark.parametrize(
    ("override", "values"),
    [("trainer.seed=1", ("0", "1")), ("trainer.gpus=2", ("auto", "2")), ("model.hidden=9", ("8", "9"))],
)
def test_configurations_that_differ_are_refused_by_both(recipe: Recipe, override: str, values: tuple[str, str]) -> None:
    both = Nodes(recipe, own={1: [override]})
    one, other = both.start(0, 1).finish()
    host = socket.gethostname()
    command_refused(
        one, f"{override.partition('=')[0]}: {values[0]} on node 0 ({host}) and {values[1]} on node 1 ({host})"
    )
    assert (other.code, other.err) in ((2, ""), (2, one.err))  # beside the first one's terminal it is not said again
    assert not both.run.exists()


@pytest.mark.fault(27)
def test_differing_numbers_of_machines_are_refused_by_both(recipe: Recipe) -> None:
    both = Nodes(recipe, own={1: ["trainer.nodes=3"]})
    one, other = both.start(0, 1).finish()
    assert (one.code, other.code) == (2, 2)
    assert re.match(rf"ddpexp: node 1 on {socket.gethostname()} .*\b3\b.* node 0 .*\b2\b", one.err), one.err
    assert not both.run.exists()


@pytest.mark.fault(27)
def test_two_commands_with_one_number_are_refused(recipe: Recipe) -> None:
    three = Nodes(recipe, nodes=3, own={2: ["launcher.node_rank=1"]})
    codes = [done.code for done in three.start(0, 1, 2).finish()]
    assert codes == [2, 2, 2]
    assert not three.run.exists()


@pytest.mark.variants(1)
@pytest.mark.fault(25)
@pytest.mark.parametrize(
    ("present", "pattern"),
    [
        (0, r"ddpexp: node 1 of 2 .* within 1 s\b"),
        (1, r"ddpexp: node 1 .* node 0 within 1 s: .* 127\.0\.0\.1:PORT \(Connection refused\)"),
    ],
)
def test_a_machine_that_does_not_come_is_missed_in_time(recipe: Recipe, present: int, pattern: str) -> None:
    both = Nodes(recipe, "trainer.timeout.init_seconds=1")
    [done] = both.start(present).finish()
    port = both.typed[-1].partition("=")[2]
    assert done.code == 2
    assert re.match(pattern.replace("PORT", port), done.err), done.err
    assert not both.run.exists()


@pytest.mark.slow
def test_a_machine_that_was_stopped_while_it_waited_may_be_started_again(recipe: Recipe) -> None:
    three = Nodes(recipe, nodes=3).start(0, 1)
    wait_for(three.has_met)
    three.processes[1].terminate()
    stopped = finish(three.processes[1], three.run)
    assert (stopped.code, stopped.err) == (143, "ddpexp: interrupted by SIGTERM; nothing was started\n")
    assert [done.code for done in three.start(1, 2).finish()] == [0, 0, 0]


@pytest.mark.fault(26, 27)
@pytest.mark.parametrize(
    ("nodes", "fields", "expected"),
    [
        (2, {"node_rank": 2, **ADDRESS}, "launcher.node_rank=2: 0 to 1"),
        (2, {"node_rank": -1, **ADDRESS}, "launcher.node_rank=-1: 0 to 1"),
        (2, {"node_rank": 0, "master_port": 29500}, "trainer.nodes=2: needs launcher.master_addr too"),
        (2, {}, "trainer.nodes=2: launcher.node_rank and launcher.master_addr and launcher.master_port"),
        ("auto", {"node_rank": 1}, "launcher.node_rank=1: trainer.nodes="),
        (1, {"master_port": 1}, "launcher.master_port=1: trainer.nodes="),
    ],
)
def test_a_place_among_machines_that_is_none_is_refused(
    nodes: int | Literal["auto"], fields: dict[str, Any], expected: str
) -> None:
    with refused(expected):
        Spawn(**fields).launch(calling("none", [], asked=WorkerRequest(nodes=nodes)))


@pytest.mark.fault(26)
def test_an_address_that_is_not_of_this_host_is_refused(recipe: Recipe) -> None:
    address = ("launcher.master_addr=203.0.113.1", "launcher.master_port=29500")
    done = recipe("trainer.nodes=2", "launcher.node_rank=0", *address)
    command_refused(done, f"launcher.master_addr=203.0.113.1: {socket.gethostname()}")
    assert not done.run.exists()


# ---------------------------------------------------------------------------------------------------- when one of them
# fails


def failed(done: Done) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((done.run / "error.json").read_text())
    assert done.result()["status"] == "failed"
    return found


def test_a_killed_command_ends_the_other_which_says_who_is_gone(recipe: Recipe) -> None:
    both = Nodes(recipe, "task._target_=points.Waits", *LONG, environ=OWN_SERVER).start(0, 1)
    both.trains()
    both.processes[1].kill()
    one, other = both.finish()
    host = socket.gethostname()
    assert (one.code, other.code) == (1, -signal.SIGKILL)
    error = failed(one)
    assert (error["rank"], error["host"], error["kind"]) == (1, host, "CommandLost")
    assert f"ddpexp: rank 1 on {host} failed: CommandLost: " in one.err


@pytest.mark.slow
def test_a_killed_command_of_rank_zero_ends_the_other(recipe: Recipe) -> None:
    both = Nodes(recipe, "task._target_=points.Waits", *LONG, environ=OWN_SERVER).start(0, 1)
    both.trains()
    both.processes[0].kill()
    _, other = both.finish()
    assert other.code == 1
    assert f"the command of rank zero on {socket.gethostname()} is gone" in other.err


@pytest.mark.slow
def test_a_killed_worker_of_another_machine_is_the_first_cause_for_both(recipe: Recipe) -> None:
    both = Nodes(recipe, "task._target_=points.Waits", *LONG, environ=OWN_SERVER).start(0, 1)
    both.trains()
    os.kill(both.worker(1), signal.SIGKILL)
    one, other = both.finish()
    assert (one.code, other.code) == (1, 1)
    error = failed(one)
    assert (error["rank"], error["host"], error["kind"], error["signal"]) == (1, socket.gethostname(), "SIGKILL", 9)
    assert f"ddpexp: rank 1 on {socket.gethostname()} failed (train" in one.err
    assert one.err.count("ddpexp: ") == 1


@pytest.mark.variants(1)
@pytest.mark.parametrize("rank", [0, 1])
def test_an_exception_on_any_machine_is_shown_once_with_its_traceback(recipe: Recipe, rank: int) -> None:
    both = Nodes(recipe, "task._target_=points.Breaks", f"+task.rank={rank}", *LONG).start(0, 1)
    one, other = both.finish()
    assert (one.code, other.code) == (1, 1)
    error = failed(one)
    assert (error["rank"], error["kind"], error["message"]) == (rank, "ValueError", "a wrong turn")
    text = one.out + one.err
    assert text.count("Traceback") == 1
    assert 'raise ValueError("a wrong turn")' in text
    assert re.search(rf"^ddpexp: rank {rank} on \S+ failed \(train.*: ValueError: a wrong turn", one.err, re.MULTILINE)
    assert "ValueError: a wrong turn" in (one.run / f"ranks/{rank}.log").read_text()


def test_the_users_own_exit_code_is_everybodys(recipe: Recipe) -> None:
    done = Nodes(recipe, "task._target_=points.Exits", *LONG).start(0, 1).finish()
    assert [one.code for one in done] == [7, 7]


@pytest.mark.variants(1)
@pytest.mark.parametrize(("number", "name"), [(0, "SIGTERM"), (1, "SIGINT")])
def test_a_signal_to_one_command_stops_both(recipe: Recipe, number: int, name: str) -> None:
    both = Nodes(recipe, "task._target_=points.Waits", *LONG).start(0, 1)
    both.trains()
    both.processes[number].send_signal(signal.Signals[name])
    done = both.finish()
    code = 128 + signal.Signals[name]
    assert [one.code for one in done] == [code, code]
    assert f"interrupted by {name}; saved at step {done[0].result()['step']} in " in done[0].err
    said, command = done[0].err.splitlines()[-2:]
    assert said.endswith("; resume it on every machine (each with its own launcher.node_rank) with:")
    assert re.fullmatch(rf"python -m ddpexp resume {done[0].run.name} .* launcher\.node_rank=0", command)
    assert done[0].result()["status"] == "interrupted"


def test_what_only_workers_see_is_refused_by_both_in_one_sentence(recipe: Recipe) -> None:
    one, other = Nodes(recipe, "trainer.global_batch_size=128").start(0, 1).finish()
    command_refused(one, "trainer.global_batch_size=128: 96")
    assert (other.code, one.err.count("\n")) == (2, 1)


@pytest.mark.fault(24)
def test_a_port_that_another_job_has_is_refused(recipe: Recipe) -> None:
    both = Nodes(recipe)
    port = int(both.typed[-1].partition("=")[2])
    with socket.create_server(("127.0.0.1", port)):
        [done] = both.start(0).finish()
    holder = f"{Path('/proc/self/comm').read_text().strip()} (process {os.getpid()})"
    command_refused(done, f"launcher.master_port={port}: {holder}")


# ------------------------------------------------------------------------------------------------------ two real hosts


def inside(host: str) -> list[str]:
    """Return the words that run a command in a host of the cluster that SLURM_CONF belongs to."""
    conf = os.environ.get("SLURM_CONF")
    if not conf or shutil.which("nsenter") is None:
        pytest.skip("needs the hosts of a Slurm cluster: set SLURM_CONF")
    network, name = Path(f"/run/netns/ddp-{host}"), Path(conf).parent / "uts" / host
    if not network.exists() or not name.exists():
        pytest.skip(f"the cluster of {conf} has no {host} on this machine")
    return ["nsenter", f"--net={network}", f"--uts={name}", "--"]


def listening(host: str) -> set[tuple[str, int]]:
    """Return the addresses that are listened on in a host."""
    lines = subprocess.run(
        [*inside(host), "cat", "/proc/net/tcp", "/proc/net/tcp6"], capture_output=True, text=True
    ).stdout
    found = [line.split()[1].split(":") for line in lines.splitlines() if line.split()[3] == "0A"]
    return {
        (socket.inet_ntoa(bytes.fromhex(one)[::-1]) if len(one) == 8 else "IPv6", int(port, 16)) for one, port in found
    }


@pytest.mark.fault("S6")
@pytest.mark.slurm
def test_two_hosts_train_as_one_and_listen_on_the_interface_between_them_alone(recipe: Recipe) -> None:
    words_of = {host: inside(host) for host in ("node0", "node1")}
    typed = (
        "trainer.threads=1",
        "trainer.epochs=50",
        "trainer.log_every=100",
        "trainer.eval_every=0",
        "task._target_=points.Places",
    )
    alone = recipe("trainer.gpus=4", *typed)
    place = ("launcher.master_addr=node0", f"launcher.master_port={free_port()}")
    overrides, run = recipe.words("trainer.gpus=2", "trainer.nodes=2", *place, *typed)
    addresses = {host: socket.gethostbyname(host) for host in words_of}
    before = {host: listening(host) for host in addresses}
    processes = [
        subprocess.Popen(
            [*words_of[host], sys.executable, "-m", "ddpexp", *overrides, f"launcher.node_rank={number}"],
            cwd=recipe.ddpexp.folder, env=recipe.ddpexp.environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, start_new_session=True,
        )
        for number, host in enumerate(addresses)
    ]  # fmt: skip
    seen: dict[str, set[str]] = {host: set() for host in addresses}
    while any(process.poll() is None for process in processes):
        for host in addresses:
            seen[host] |= {address for address, _ in listening(host) - before[host]}
        time.sleep(0.05)
    done = [finish(process, run) for process in processes]
    assert [one.code for one in done] == [0, 0], done[0].err + done[1].err
    assert seen == {host: {address} for host, address in addresses.items()}
    assert done[0].result()["weights_sha256"] == alone.result()["weights_sha256"]
    assert done[0].manifest()["hosts"] == ["node0", "node1"]
    assert done[0].manifest()["world"] == {**alone.manifest()["world"], "nodes": 2}
    assert [(place[1], place[3], place[4]) for place in rank_places(run)] == [
        ("0", "2", "0"), ("1", "2", "0"), ("0", "2", "1"), ("1", "2", "1"),
    ]  # fmt: skip

"""Which rank the others wait for in a collective, from what torch's flight recorder holds on every rank."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from ddpexp.launch.supervise.collectives import find_blocked
from ddpexp.launch.supervise.hangs import Account, How, verdict
from ddpexp.launch.workers.collectives import Record, pack, summarize, unpack

WORLD = ("0", "default_pg")
PAIR = ("5", "undefined")
BUCKET, SMALL = [[250, 4]], [[10]]


def entry(
    number: int,
    operation: str = "all_reduce",
    sizes: Sequence[Sequence[int]] = BUCKET,
    state: str = "completed",
    group: tuple[str, str] = WORLD,
    is_p2p: bool = False,
) -> dict[str, Any]:
    """Return an entry as torch 2.13 writes it (FlightRecorderDetail.hpp, dump_json)."""
    return {
        "collective_seq_id": number, "input_dtypes": ["Float"] * len(sizes), "input_sizes": list(sizes),
        "is_p2p": is_p2p, "op_id": number, "output_dtypes": ["Float"] * len(sizes), "output_sizes": list(sizes),
        "p2p_seq_id": 0, "pg_id": int(group[0]), "process_group": list(group),
        "profiling_name": f"nccl:{operation}", "retired": state == "completed", "state": state,
        "thread_id": "139917974342528", "thread_name": "pt_main_thread", "time_created_ns": 1795435658132963561,
        "time_discovered_completed_ns": 0, "time_discovered_started_ns": 0, "timeout_ms": 3600000,
    }  # fmt: skip


def dump(*entries: Mapping[str, Any], world: int = 3, first: int = 0) -> dict[str, Any]:
    """Return the whole JSON of one rank; `first` calls are forgotten already."""
    members = {"0": list(range(world)), "5": [0, 1]}
    return {
        "comm_lib_version": "2.27.5",
        "entries": [{**one, "record_id": first + number} for number, one in enumerate(entries)],
        "nccl_comm_state": {},
        "pg_config": {
            name: {"desc": desc, "name": name, "ranks": str(members[name])} for name, desc in (WORLD, PAIR)
        },
        "pg_status": {"0": {"last_completed_collective": "0", "last_enqueued_collective": "0"}},
        "version": "2.10",
    }  # fmt: skip


def records(*dumps: Mapping[str, Any] | None) -> dict[int, Record | None]:
    return {rank: None if made is None else summarize(made) for rank, made in enumerate(dumps)}


DONE = [entry(1, "all_reduce_barrier", [[1]]), entry(2), entry(3)]
WAITS = [*DONE, entry(4, state="scheduled"), entry(5, sizes=SMALL, state="scheduled")]


def blocked(*dumps: Mapping[str, Any] | None) -> tuple[str, list[int], str] | None:
    found = find_blocked(records(*dumps))
    return None if found is None else (found.kind, list(found.ranks), found.text)


def test_the_rank_that_has_not_called_what_the_others_wait_for() -> None:
    assert blocked(dump(*WAITS), dump(*WAITS), dump(*DONE)) == (
        "missing",
        [2],
        "rank 2 has not called all_reduce number 4 of the default process group (Float[250, 4]), for which ranks 0 and "
        "1 wait",
    )


def test_several_ranks_that_have_not_called_it() -> None:
    found = blocked(dump(*WAITS), dump(*DONE), dump(*DONE[:2]))
    assert found is not None
    assert found[1] == [1, 2]
    assert found[2].startswith("ranks 1 and 2 have not called all_reduce number 4")


def test_a_rank_that_has_called_nothing_at_all() -> None:
    assert blocked(dump(*WAITS), dump(*WAITS), dump()) is not None
    assert blocked(dump(*WAITS), dump(*WAITS), dump())[:2] == ("missing", [2])  # type: ignore[index]


def test_a_rank_that_has_called_another_operation() -> None:
    other = [*DONE, entry(4, "broadcast", SMALL, "scheduled")]
    found = blocked(dump(*WAITS), dump(*WAITS), dump(*other))
    assert found is not None
    assert found[:2] == ("different", [2])
    assert found[2] == (
        "the ranks called different collective operations as number 4 of the default process group: ranks 0 and 1 "
        "all_reduce (Float[250, 4]); rank 2 broadcast (Float[10])"
    )


def test_other_sizes_are_another_call_but_another_shape_is_not() -> None:
    assert blocked(dump(*WAITS), dump(*WAITS), dump(*DONE, entry(4, sizes=SMALL, state="scheduled")))[0] == "different"  # type: ignore[index]
    flat = [*DONE, entry(4, sizes=[[1000]], state="scheduled"), entry(5, sizes=SMALL, state="scheduled")]
    assert blocked(dump(*WAITS), dump(*WAITS), dump(*flat))[0] == "nobody"  # type: ignore[index]


def test_operations_whose_sizes_differ_from_rank_to_rank_are_the_same_call() -> None:
    dumps = [dump(*DONE, entry(4, "all_to_all", [[rank + 1]], "scheduled")) for rank in range(3)]
    assert blocked(*dumps)[0] == "nobody"  # type: ignore[index]


def test_a_mismatch_that_a_rank_has_completed_is_found() -> None:
    root = [*DONE, entry(4, "broadcast", SMALL), entry(5, state="scheduled")]  # a root sends and does not wait
    other = [*DONE, entry(4, state="scheduled")]
    assert blocked(dump(*root), dump(*other), dump(*other))[:2] == ("different", [0])  # type: ignore[index]


def test_where_all_have_called_it_no_rank_is_behind() -> None:
    assert blocked(dump(*WAITS), dump(*WAITS), dump(*WAITS)) == (
        "nobody",
        [0, 1, 2],
        "ranks 0 to 2 have called all_reduce number 4 of the default process group (Float[250, 4]), and no GPU has "
        "finished it",
    )


def test_a_gpu_that_has_not_finished_what_the_others_have() -> None:
    ahead = [*DONE, entry(4), entry(5, sizes=SMALL, state="scheduled")]
    found = blocked(dump(*ahead), dump(*WAITS), dump(*ahead))
    assert found is not None
    assert found[:2] == ("device", [1])
    assert found[2].endswith("(Float[250, 4]), which ranks 0 and 2 have finished")


def test_a_gpu_that_has_not_begun_what_the_others_have() -> None:
    begun = [*DONE, entry(4, state="started"), entry(5, sizes=SMALL, state="scheduled")]
    found = blocked(dump(*begun), dump(*WAITS), dump(*begun))
    assert found is not None
    assert found[:2] == ("device", [1])
    assert "the GPU of rank 1 has not begun all_reduce number 4" in found[2]


def test_the_wait_in_one_group_is_followed_into_another() -> None:
    pair = entry(1, group=PAIR, state="scheduled")
    # Rank 2 waits for rank 0 in the world, rank 0 for rank 1 in the pair, and rank 1 for nobody.
    found = blocked(dump(*DONE, pair), dump(*DONE), dump(*WAITS))
    assert found is not None
    assert found[:2] == ("missing", [1])
    assert found[2].startswith("rank 1 has not called all_reduce number 4 of the default process group")


def test_ranks_that_wait_for_one_another_in_two_groups() -> None:
    pair = entry(1, group=PAIR, state="scheduled")
    found = blocked(dump(*DONE, pair, world=2), dump(*WAITS, world=2))
    assert found is not None
    assert found[:2] == ("circle", [0, 1])
    assert found[2].startswith(
        "the ranks use process groups in different orders: rank 1 waits for rank 0 in all_reduce"
    )


def test_a_rank_that_did_not_report_is_the_one() -> None:
    found = blocked(dump(*WAITS), dump(*WAITS), None)
    assert found is not None
    assert found[:2] == ("silent", [2])


def test_a_group_that_a_rank_has_forgotten_is_no_evidence() -> None:
    pair = entry(1, group=PAIR, state="scheduled")
    found = blocked(dump(*DONE, pair), dump(*DONE, first=4000), dump(*DONE))
    assert found is not None
    assert found[:2] == ("silent", [1])


def test_without_records_or_without_a_wait_nothing_is_claimed() -> None:
    assert blocked(None, None, None) is None
    assert blocked(dump(), dump(), dump()) is None
    assert blocked(dump(*DONE), dump(*DONE), dump(*DONE[:2])) is None
    assert blocked(dump(entry(0, "send 0->1", state="scheduled", is_p2p=True)), dump(), dump()) is None


def test_a_long_record_keeps_what_matters_and_fits_the_page() -> None:
    calls = [entry(number) for number in range(1, 500)] + [
        entry(number, state="scheduled") for number in range(500, 2000)
    ]
    record = summarize(dump(*calls, first=7))
    [group] = record.groups
    assert (group.enqueued, group.completed, record.is_whole) == (1999, 499, False)
    assert {500, 507, 1976, 1999} <= set(group.calls)
    assert len(group.calls) == 32
    assert unpack(pack(record, 15_000)) == record
    short = pack(record, 500)
    assert len(short) <= 500
    [cut] = unpack(short).groups
    assert (cut.enqueued, cut.completed, max(cut.calls)) == (1999, 499, 1999)
    assert unpack(pack(record, 10)) == Record([], is_whole=False)


def account(rank: int, made: Mapping[str, Any] | None, silent: float = 9.0, how: How = "busy") -> Account:
    text = None if made is None else pack(summarize(made), 15_000).decode()
    where = f"in f{rank} (a.py:{rank})"
    host = "ab"[rank // 2]
    return Account(rank, host, 100 + rank, "train", 3, silent, 1.0, "step_seconds", how, where, record=text)


def test_with_all_hosts_at_the_same_step_and_busy_the_record_names_the_rank() -> None:
    failure = verdict([account(0, dump(*WAITS)), account(1, dump(*WAITS)), account(2, dump(*DONE))], on_gpus=True)
    assert failure is not None
    assert (failure.rank, failure.host) == (2, "b")
    assert failure.message == (
        "no progress for 9 s (trainer.timeout.step_seconds=1): rank 2 has not called all_reduce number 4 of the "
        "default process group (Float[250, 4]), for which ranks 0 and 1 wait; rank 2 is in f2 (a.py:2). All ranks' "
        "stacks are in their logs; raise the key if it only needs longer."
    )


def test_the_named_rank_fails_when_its_own_time_is_up_and_not_before() -> None:
    others = [account(0, dump(*WAITS), silent=0.5), account(1, dump(*WAITS), silent=0.5)]
    failure = verdict([*others, account(2, dump(*DONE))], on_gpus=True)
    assert failure is not None
    assert failure.rank == 2
    waiting = [account(0, dump(*WAITS)), account(1, dump(*WAITS))]
    assert verdict([*waiting, account(2, dump(*DONE), silent=0.5)], on_gpus=True) is None  # it saves, for example


def test_where_no_rank_is_behind_the_message_says_one_of() -> None:
    accounts = [account(rank, dump(*WAITS)) for rank in range(3)]
    failure = verdict(accounts, on_gpus=True)
    assert failure is not None
    assert "no rank is behind, so one of their GPUs hangs, or a link between them" in failure.message
    assert "on one of a, b, or the network between them" in failure.message
    assert verdict([account(0, dump(*WAITS), silent=0.5), *accounts[1:]], on_gpus=True) is None


def test_what_the_processes_show_comes_before_the_records() -> None:
    failure = verdict([account(0, dump(*WAITS)), account(1, dump(*WAITS), how="stopped"), account(2, dump(*DONE))])
    assert failure is not None
    assert failure.rank == 1
    assert "is stopped" in failure.message


@pytest.mark.parametrize("on_gpus", [True, False])
def test_without_a_record_everything_stays_as_it_was(on_gpus: bool) -> None:
    failure = verdict([account(0, None, how="waits"), account(1, None, how="asleep")], on_gpus)
    assert failure is not None
    assert failure.rank == 1
    assert "it waits in f1 (a.py:1), and the others wait for it" in failure.message


def test_the_account_travels_between_commands() -> None:
    made = account(0, dump(*WAITS))
    assert Account(**json.loads(json.dumps(vars(made)))) == made

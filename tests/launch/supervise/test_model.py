"""Whatever happens to a job, and in whatever order: it ends, with one verdict, by the first cause.

The search visits each world that a sequence of incidents can lead to, with messages and processes at every speed: each
message alone and in every order, or, which reaches further, all of them at once or none until the next incident.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from tests.launch.supervise.model import INCIDENTS, World, end_of, incidents, settled, steps

MAIN = ("die", "hang", "command", "save", "kill")  # deaths, hangs, signals, agreements, ends of commands
CAUSES = {
    "die": "SIGKILL", "fail": "ValueError", "hang": "Hang", "kill": "CommandLost", "silence": "CommandLost",
    "scheduler": "SIGTERM",
}  # fmt: skip
STOPS = {"command", "rank", "requeue"}


def problem_of(end: World) -> str | None:
    """Return what is wrong with an end; None if nothing is."""
    if not end.is_over:
        return "a command waits for ever"
    for number, process in enumerate(end.processes):
        if process.lives and end.commands[number] is not None:
            return f"rank {number} is left"
    verdicts = [
        verdict
        for state, verdict in zip(end.commands, end.verdicts(), strict=True)
        if state is not None and verdict is not None and not state.leader_lost  # such a command knows of itself alone
    ]
    stops = {verdict.stop.signum for verdict in verdicts if verdict.stop is not None}
    causes = {(verdict.causes[0].kind, verdict.causes[0].rank) for verdict in verdicts if verdict.causes}
    if len(stops) + len(causes) > 1 and end.commands[0] is not None:  # without it, each knows of itself alone
        return f"the commands differ: {stops} {causes}"
    happened = {(name, int(number)) for name, number in map(str.split, end.happened)}
    genuine = {(CAUSES[name], number) for name, number in happened if name in CAUSES}
    signals = {name for name, _ in happened} & STOPS
    if causes and not causes <= genuine:
        return f"{causes} is not the first cause"
    if stops and not signals:
        return "nobody has stopped it"
    return None


def search(world: World, depth: int, names: Iterable[str], spread: Callable[[World], Iterable[World]]) -> int:
    """Check every world that up to `depth` incidents lead to; return their number."""
    seen: set[World] = set()
    layer = {world}
    for incident in range(depth + 1):
        layer = {further for before in layer for further in spread(before)} - seen
        seen |= layer
        for reached in layer:
            for notices in (True, False):
                problem = problem_of(end_of(reached, notices))
                assert problem is None, (problem, sorted(reached.happened), reached)
        if incident < depth:
            layer = {further for before in layer for further in incidents(before, names)}
    return len(seen)


def extremes(world: World) -> Iterable[World]:
    return world, settled(world)


def interleavings(world: World) -> Iterable[World]:
    """Return all worlds that messages and processes lead to, one after the other."""
    seen, waiting = {world}, [world]
    while waiting:
        further = set(steps(waiting.pop())) - seen
        seen |= further
        waiting += further
    return seen


BEGUN = pytest.mark.parametrize("has_begun", [True, False], ids=["trains", "builds"])


@BEGUN
def test_a_job_ends_with_one_verdict_by_the_first_cause(has_begun: bool) -> None:
    assert search(World.new(2, has_begun), 4, MAIN, extremes) > 4000
    assert search(World.new(2, has_begun), 2, INCIDENTS, extremes) > 700
    assert search(World.new(2, has_begun), 1, INCIDENTS, interleavings) > 300


@pytest.mark.slow
@BEGUN
def test_six_events_in_any_order(has_begun: bool) -> None:
    assert search(World.new(2, has_begun), 6, MAIN, extremes) > 20_000


@pytest.mark.slow
@BEGUN
def test_three_events_of_all_kinds(has_begun: bool) -> None:
    assert search(World.new(2, has_begun), 3, INCIDENTS, extremes) > 10_000


@pytest.mark.slow
@BEGUN
def test_messages_in_any_order(has_begun: bool) -> None:
    assert search(World.new(2, has_begun), 2, INCIDENTS, interleavings) > 40_000


@pytest.mark.slow
@BEGUN
def test_three_commands(has_begun: bool) -> None:
    assert search(World.new(3, has_begun), 3, MAIN, extremes) > 4_000


def test_a_job_of_one_command_ends_too() -> None:
    assert search(World.new(1), 4, INCIDENTS, extremes) > 1000

"""Who keeps the others waiting, and where the time goes: on times that are made, and in runs of which a rank sleeps."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from ddpexp.distributed.phases import BACKWARD, COLLECTIVE, DATA, FORWARD, PHASES, UPDATE
from ddpexp.run.directory import RunDir
from ddpexp.train.step_times import StepTimes, TimesRecorder, slow_rank
from ddpexp.train.verdict import Verdict, read_verdict, times_text, verdict_of
from tests.conftest import Ddpexp, Done
from tests.points import Recipe

USUAL = {DATA: 0.1, FORWARD: 1.0, BACKWARD: 2.0, UPDATE: 0.5}


def steps(draw: random.Random, num_ranks: int, num_steps: int, slow: int | None = None) -> list[StepTimes]:
    """Make steps of equal ranks with noise and hiccups, of which one may be 1.5 times as slow."""
    phases = [[0.0] * len(PHASES) for _ in range(num_ranks)]
    collectives: list[list[float]] = [[] for _ in range(num_ranks)]
    for _ in range(num_steps):
        busy = []
        for rank in range(num_ranks):
            own = {phase: seconds * draw.lognormvariate(0, 0.15) for phase, seconds in USUAL.items()}
            own[FORWARD] += (1.8 if rank == slow else 0.0) + (draw.expovariate(0.5) if draw.random() < 0.02 else 0.0)
            busy.append(sum(own.values()))
            for phase, seconds in own.items():
                phases[rank][phase] += seconds
        end = max(busy) + 0.2
        for rank in range(num_ranks):
            collectives[rank].append(end - busy[rank])
            phases[rank][COLLECTIVE] += end - busy[rank]
    return [StepTimes(0, num_steps, p, c) for p, c in zip(phases, collectives, strict=True)]


def recorded(draw: random.Random, num_ranks: int, total: int, log_every: int, slow: int | None) -> Iterator[Any]:
    recorder = TimesRecorder()
    for step in range(log_every, total + 1, log_every):
        yield {"step": step, **recorder.record(steps(draw, num_ranks, log_every, slow))}


def test_the_parts_of_a_step_are_shown_from_the_largest() -> None:
    record = {"times/forward": 0.002, "times/backward": 0.0075, "times/data": 0.0005, "times/other": 1e-6}
    assert times_text(record) == "10 ms a step: backward 75%, forward 20%, data 5%"
    assert times_text({"times/forward": 75.0}) == "1:15 a step: forward 100%"
    assert times_text({"times/forward": 0.0}) == ""


def test_the_clock_of_a_slow_gpu_is_the_reason_where_it_is_low() -> None:
    records = list(recorded(random.Random(0), 2, 200, 10, slow=1))
    gpu = {"times/slow_clock": 1095.0, "times/slow_most_clock": 1980.0, "times/slow_reasons": 32.0}
    verdict = verdict_of([{**record, **gpu} for record in records])
    assert verdict is not None
    assert verdict.sentence({}, {}) == (
        f"rank 1 is {verdict.factor:.2g} times slower than the others, in forward, since step 1 (GPU clock 1,095 of "
        "1,980 MHz: thermal): they wait for it"
    )
    for values in ({"times/slow_clock": 1950.0}, {"times/slow_clock": 0.0}):
        verdict = verdict_of([{**record, **gpu, **values} for record in records])
        assert verdict is not None
        assert verdict.reason == ""


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
@pytest.mark.parametrize("log_every", [1, 10, 50])
def test_a_slow_rank_is_named_within_100_steps_and_nobody_where_all_are_equal(num_ranks: int, log_every: int) -> None:
    draw = random.Random(num_ranks * 100 + log_every)
    for _ in range(3):
        records = list(recorded(draw, num_ranks, 100, log_every, slow=num_ranks - 1))
        verdict = verdict_of(records)
        assert verdict is not None
        assert (verdict.rank, verdict.phase, verdict.since) == (num_ranks - 1, "forward", 1)
        assert 1.3 < verdict.factor < 1.7
    records = list(recorded(draw, num_ranks, 1000, log_every, slow=None))
    assert [verdict_of(records[: len(records) * part // 10]) for part in range(1, 11)] == [None] * 10


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_a_hundred_series(num_ranks: int) -> None:
    draw = random.Random(num_ranks)
    for log_every in (10, 20, 50, 100):
        for number in range(100):
            slow = number % num_ranks
            verdict = verdict_of(list(recorded(draw, num_ranks, 100, log_every, slow)))
            assert verdict is not None
            assert verdict.rank == slow
        records = list(recorded(draw, num_ranks, 10_000, log_every, None))
        assert all(verdict_of(records[:end]) is None for end in range(1, len(records), 10))


def test_a_rank_that_is_slow_no_longer_is_not_named() -> None:
    draw = random.Random(0)
    recorder = TimesRecorder()
    records: list[Mapping[str, float]] = [
        {"step": step, **recorder.record(steps(draw, 2, 50, slow))}
        for step, slow in ((50, None), (100, 1), (150, 1), (200, 1), (250, None))
    ]
    assert verdict_of(records) is None
    verdict = verdict_of(records[:4])
    assert verdict is not None
    assert (verdict.rank, verdict.since) == (1, 51)


def test_stages_of_a_pipeline_are_compared_among_themselves() -> None:
    first = StepTimes(0, 20, [0, 30, 0, 20, 0, 0, 0, 0, 0], [1.0] * 20)
    last = StepTimes(1, 20, [0, 10, 0, 40, 0, 0, 0, 0, 0], [2.0] * 20)
    assert slow_rank([first, last]) is None
    assert slow_rank([first, first, last, last]) is None
    late = StepTimes(1, 20, [0, 20, 0, 30, 0, 0, 0, 0, 0], [1.5] * 20)
    assert slow_rank([first, first, last, late]) == (3, 2.0)


def test_waiting_and_communication_are_told_apart() -> None:
    fast = StepTimes(0, 2, [0, 1, 0, 6, 0, 0, 0, 0, 0], [2.0, 4.0])
    slow = StepTimes(0, 2, [0, 5, 0, 2, 0, 0, 0, 0, 0], [1.0, 1.0])
    two = TimesRecorder().record([fast, slow])
    assert {name: value for name, value in two.items() if value and "least" not in name} == {
        "times/forward": 1.5, "times/forward_greatest": 2.5, "times/waiting": 1.0, "times/waiting_greatest": 2.0,
        "times/communication": 1.0, "times/communication_greatest": 1.0, "times/slow_rank": -2.0,
        "times/slow_factor": 1.0,
    }  # fmt: skip
    one = TimesRecorder().record([fast])
    assert {name: value for name, value in one.items() if value} == {"times/forward": 0.5}
    assert set(one) == {f"times/{phase}" for phase in PHASES if phase != "collective"}


def test_a_part_of_the_time_is_named_where_it_is_large_and_long() -> None:
    def records(seconds: float, **phases: float) -> list[dict[str, float]]:
        each = {f"times/{phase}": seconds * part for phase, part in phases.items()}
        return [{"step": step, **each} for step in (100, 200, 300)]

    usual = {"forward": 0.25, "backward": 0.5}
    assert verdict_of(records(1.0, **usual, data=0.125)) is None
    assert verdict_of(records(1.0, **usual, data=0.75)) == Verdict("data", 0.5, 1)
    assert verdict_of(records(0.01, **usual, data=0.75)) is None, "the run takes five seconds"
    assert verdict_of(records(1.0, **usual, evaluation=2.25)) == Verdict("evaluation", 0.75, 1)
    assert verdict_of(records(1.0, **usual, checkpoint=0.75)) == Verdict("checkpoint", 0.5, 1)
    assert verdict_of([]) is None


@pytest.mark.parametrize(
    ("verdict", "values", "said"),
    [
        (Verdict("forward", 1.42, 1200, 3), {}, "rank 3 on node7 is 1.4 times slower than the others, in forward, since "
         "step 1,200: they wait for it"),
        (Verdict("data", 0.62, 1), {"data.num_workers": 0}, "62% of a step waits for data: data.num_workers=2"),
        (Verdict("data", 0.62, 1), {"data.num_workers": 2, "data._target_": "image_folder", "data.cache": "jpeg"},
         "62% of a step waits for data: data.num_workers=4, or data.cache=raw"),
        (Verdict("evaluation", 0.7, 1), {}, "70% of the time goes into evaluations: trainer.eval_every makes them rarer"),
        (Verdict("checkpoint", 0.3, 1), {}, "30% of the time goes into saving: trainer.checkpoint_every makes it rarer"),
    ],
)  # fmt: skip
def test_a_verdict_is_one_sentence(verdict: Verdict, values: dict[str, Any], said: str) -> None:
    manifest = {"hosts": ["node6", "node7"], "world": {"nodes": 2, "world_size": 4}}
    assert verdict.sentence(manifest, values) == said


@pytest.mark.parametrize(
    "line",
    [
        {"times/forward": 1.0},
        {"step": "many", "times/forward": 1.0},
        {"step": 0, "times/forward": 1.0},
        {"step": 100, "times/forward": None},
        {"step": 100, "times/forward": [1.0], "times/slow_rank": 1},
        {"step": 100, "times/forward": True},
        {"step": 10**400, "times/forward": 1.0},
        {"step": 100, "times/forward": 1e300, "times/data": 1e308},
    ],
)
def test_records_that_somebody_else_has_written_are_left_out(tmp_path: Path, line: dict[str, Any]) -> None:
    run = RunDir(tmp_path)
    mine = [{"step": step, "times/forward": 1.0, "times/slow_rank": 1, "times/slow_factor": 2.0} for step in (100, 200)]
    run.metrics.write_text("".join(f"{json.dumps(one)}\n" for one in (line, *mine, line)))
    assert read_verdict(run) == Verdict("data", 2.0, 1, 1)


@pytest.mark.parametrize(
    "manifest",
    [
        {"hosts": 5, "world": 5}, {"hosts": ["a", "b"], "world": {"nodes": 2}}, {"hosts": "ab", "world": {"nodes": 2}},
        {"hosts": ["a", "b"], "world": {"nodes": 2, "world_size": 0}},
        {"hosts": ["a", "b"], "world": {"nodes": 2, "world_size": 2}},
    ],
)  # fmt: skip
def test_a_manifest_that_does_not_know_the_host_names_none(manifest: dict[str, Any]) -> None:
    assert Verdict("forward", 1.5, 1, 3).sentence(manifest, {}).startswith("rank 3 is 1.5 times slower")
    values = {"data.num_workers": "many"}
    assert Verdict("data", 0.5, 1).sentence(manifest, values) == "50% of a step waits for data: data.num_workers=2"


SLEEPS = """
import torch

class Sleeps(Sides):
    def __init__(self, seconds, rank):
        self.seconds, self.rank = seconds, rank

    def step(self, model, batch):
        time.sleep(0.003)
        if RANK == self.rank:
            time.sleep(self.seconds)
        return super().step(model, batch)


class Layers(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
"""
STEPS = ("trainer.epochs=null", "trainer.eval_every=0", "trainer.log_every=50")
WAYS = {
    "ddp in shared memory": ("trainer.gpus=2",),
    "ddp over the backend": ("trainer.gpus=2", "strategy.reduce_through=backend"),
    "three workers over the backend": ("trainer.gpus=3", "strategy.reduce_through=backend"),
    "fsdp": ("trainer.gpus=2", "strategy=fsdp"),
    "a pipeline": ("trainer.gpus=4", "strategy=pipeline", "strategy.pp_size=2", "model._target_=points.Layers",
                   "~model.hidden", "~model.dropout", "trainer.micro_batch_size=6"),
}  # fmt: skip


@pytest.fixture(scope="module")
def sleeps(tmp_path_factory: pytest.TempPathFactory, warm_environ: dict[str, str]) -> Recipe:
    return Recipe(Ddpexp(tmp_path_factory.mktemp("sleeps"), warm_environ), SLEEPS)


def train(sleeps: Recipe, way: str, seconds: float, num_steps: int) -> Done:
    task = ("task._target_=points.Sleeps", f"+task.seconds={seconds}", "+task.rank=1")
    done = sleeps(*task, *STEPS, f"trainer.max_steps={num_steps}", *WAYS[way])
    assert done.code == 0, done.err
    return done


def test_a_rank_that_sleeps_is_named_at_the_end_and_by_status(sleeps: Recipe) -> None:
    done = train(sleeps, "ddp in shared memory", 0.02, 150)
    verdict = done.result()["verdict"]
    assert (verdict["rank"], verdict["phase"], verdict["since"]) == (1, "forward", 1)
    assert verdict["factor"] > 2
    said = re.search(
        r"^verdict (rank 1 is \S+ times slower than the others, in forward, since step 1: .*)$", done.out, re.M
    )
    assert said is not None
    status = sleeps.ddpexp("status", str(done.run))
    assert f"verdict {said[1]}" in status.out
    assert re.search(r"^times   \S+ ms a step: (forward|waiting) \d+%, (forward|waiting) \d+%", status.out, re.M)
    assert "times/" not in json.loads(sleeps.ddpexp("status", str(done.run), "--json").out)["metrics"]


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_two_of_five_milliseconds_name_a_rank_and_nobody_is_named_in_plain_runs(sleeps: Recipe, way: str) -> None:
    assert train(sleeps, way, 0.002, 200).result()["verdict"]["rank"] == 1
    plain = [train(sleeps, way, 0.0, 200).result()["verdict"] for _ in range(10)]
    assert plain == [None] * 10

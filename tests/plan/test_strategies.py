"""`ddpexp plan --strategies`, what a sharded model takes, and whether it fits."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddpexp.config.compose import compose
from ddpexp.config.parse import parse
from ddpexp.data.batch_plan import plan_batches
from ddpexp.errors import RefusedError
from ddpexp.launch import Layout
from ddpexp.plan.activations import _Kept
from ddpexp.plan.arguments import PlanArguments
from ddpexp.plan.fits import does_not_fit, remedies, smaller_too, verdict, with_remedy
from ddpexp.plan.layout import Assumed
from ddpexp.plan.memory import AVERAGE
from ddpexp.plan.outcome import Outcome
from ddpexp.plan.strategies import candidates, compare, runs_of
from ddpexp.strategy.estimator import Facts, Parameter
from ddpexp.strategy.fsdp.estimator import FSDPEstimator
from ddpexp.strategy.module_classes import outermost
from tests.conftest import SMALL, Ddpexp
from tests.fitting import TRAINER
from tests.refusals import refused
from tests.strategy.fsdp.ranks import OPTIONS, Net

MB = 1_000_000
FACTS = Facts(
    [Parameter("model", 10 * MB, 40 * MB, "float32", True)], 0, {"model": 40 * MB}, 80 * MB, 44 * MB, 2000, 0, 100,
    temporary_bytes=3 * MB, blocks_bytes=[5 * MB] * 8,
)  # fmt: skip
FOUR = Layout(1, 4, "cpu", "gloo", 1)


@pytest.fixture(scope="session")
def environ(warm_environ: dict[str, str]) -> dict[str, str]:
    """The command is tested, not how its processes start."""
    return warm_environ


def outcome(*words: str, layout: Layout = FOUR, facts: Facts = FACTS) -> Outcome:
    composed = compose([*SMALL, *words])
    batch = plan_batches(128, 16, layout.world_size)
    return Outcome(parse(composed.values), Assumed(layout, 2), batch, facts, 5, 10, None)


def parts(facts: Facts = FACTS, **options: Any) -> dict[str, int | None]:
    estimator = FSDPEstimator(replace(OPTIONS, **options))
    return {part.name: part.num_bytes for part in estimator.memory(facts, TRAINER, FOUR)}


def test_gradients_of_a_sharded_model_take_the_place_of_activations() -> None:
    assert parts() == {"parameters": 10 * MB, "gradients": 0, "optimizer": 20 * MB, "gathered blocks": 20 * MB}
    assert parts(replace(FACTS, activations_bytes=3 * MB))["gradients"] == 7 * MB
    assert parts(replace(FACTS, activations_bytes=None))["gradients"] == 10 * MB
    assert parts(replace(FACTS, activations_bytes=6 * MB, recomputed_bytes=4 * MB))["gradients"] == 8 * MB


def test_accumulated_gradients_and_what_stays_gathered_are_whole() -> None:
    assert parts(replace(FACTS, num_passes=2))["gradients"] == 40 * MB
    assert parts(reshard_after_forward=False)["gathered blocks"] == 50 * MB
    assert parts(dp_replicate_size=2)["parameters"] == 20 * MB
    teacher = Parameter("teacher", MB, 4 * MB, "float32", False)
    found = parts(replace(FACTS, parameters=[*FACTS.parameters, teacher]), whole=("teacher",))
    assert (found["parameters"], found["optimizer"]) == (14 * MB, 20 * MB)


def test_the_whole_model_is_there_at_the_start_and_in_evaluations_unless_chosen_otherwise() -> None:
    found = outcome("strategy=fsdp")
    assert found.moments() == {"start": 45 * MB, "evaluation": 100 * MB}  # with the copy for a checkpoint, 30 MB
    assert outcome("strategy=fsdp", "strategy.init=replay", "strategy.gather_in_evaluation=false").moments() == {}
    assert outcome("strategy=ddp").moments() == {}
    tiny = replace(FACTS, activations_bytes=0, temporary_bytes=0)
    found = outcome("strategy=fsdp", facts=tiny)
    assert (found.rank_bytes(on_host=False), found.most_bytes()) == (90 * MB + 2000, 100 * MB)
    averaged = outcome("strategy=fsdp", "trainer.ema_decay=0.9")
    assert {part.name: part.num_bytes for part in averaged.parts()}[AVERAGE] == 10 * MB
    assert averaged.moments()["evaluation"] == (70 + 40 + 2 * 10) * MB  # and what the weights were


def test_blocks_are_counted_without_those_inside() -> None:
    with torch.device("meta"):
        model = Net()
    sizes = FSDPEstimator(replace(OPTIONS, blocks=("Block",))).blocks_bytes({"model": model}, TRAINER)
    total = sum(parameter.numel() * 4 for parameter in model.parameters())
    assert len(sizes) == 3
    assert sum(sizes) == total
    assert sizes[0] == sum(parameter.numel() * 4 for parameter in model.blocks[1].parameters())
    assert FSDPEstimator(replace(OPTIONS, whole=("model",))).blocks_bytes({"model": model}, TRAINER) == []


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(8, 64), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.narrow(self.wide(x).relu())
        return result


def test_layers_that_are_computed_again_keep_their_inputs_and_one_of_them_the_rest() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(Layer() for _ in range(3)))
        rows = torch.empty(10, 8)
    weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    found = []
    for again in ([], list(outermost(model, ["Layer"]))):
        kept = _Kept(weights)
        with kept.watching(again):
            model(rows).sum()
        found.append(kept.result())
    inputs, inside = 10 * 8 * 4, 10 * 64 * 4
    assert [one.of_stages for one in found] == [[3 * (inputs + inside)], [3 * inputs + inside]]
    assert [one.again_bytes for one in found] == [0, inside]
    assert [one.temporary_bytes for one in found] == [2 * inside, 2 * inside]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["recipe=mnist", "trainer.gpus=4"],
            ["strategy=ddp", "strategy=ddp strategy.shard_optimizer=true", "strategy=fsdp",
             "strategy=fsdp strategy.init=replay strategy.gather_in_evaluation=false",
             "strategy=fsdp strategy.tp_size=2", "strategy=pipeline",
             "strategy=pipeline strategy.init=replay strategy.gather_in_evaluation=false"],
        ),
        (
            ["strategy=pipeline", "strategy.pp_size=4", "strategy.tp_size=4"],
            ["strategy=ddp", "strategy=ddp strategy.shard_optimizer=true", "strategy=fsdp strategy.tp_size=4",
             "strategy=fsdp strategy.init=replay strategy.gather_in_evaluation=false strategy.tp_size=4",
             "strategy=pipeline strategy.pp_size=4 strategy.tp_size=4",
             "strategy=pipeline strategy.init=replay strategy.gather_in_evaluation=false strategy.pp_size=4 "
             "strategy.tp_size=4"],
        ),
        (
            ["strategy=fsdp", "strategy.blocks=[Block]", "strategy.init=replay"],
            ["strategy=ddp", "strategy=ddp strategy.shard_optimizer=true",
             "strategy=fsdp strategy.blocks=[Block] strategy.init=replay",
             "strategy=fsdp strategy.init=replay strategy.gather_in_evaluation=false strategy.blocks=[Block]",
             "strategy=fsdp strategy.tp_size=2 strategy.blocks=[Block] strategy.init=replay",
             "strategy=pipeline strategy.init=replay",
             "strategy=pipeline strategy.init=replay strategy.gather_in_evaluation=false"],
        ),
        (
            ["strategy=ordered", "strategy.descending=true"],
            ["strategy=ordered strategy.descending=true", "strategy=ddp",
             "strategy=ddp strategy.shard_optimizer=true", "strategy=fsdp",
             "strategy=fsdp strategy.init=replay strategy.gather_in_evaluation=false",
             "strategy=fsdp strategy.tp_size=2", "strategy=pipeline",
             "strategy=pipeline strategy.init=replay strategy.gather_in_evaluation=false"],
        ),
    ],
)  # fmt: skip
def test_what_is_compared(words: Sequence[str], expected: Sequence[str]) -> None:
    found = [" ".join(word for word in one if "activation" not in word) for one in candidates(words)]
    assert list(dict.fromkeys(found)) == expected


def test_known_classes_are_compared_with_their_activations_computed_again() -> None:
    again = "trainer.activation_checkpointing=[Block]"
    for words in (["strategy=fsdp", "strategy.blocks=[Block]"], [again]):
        found = [one[-1] for one in candidates(words)]
        assert found == [f"{again.partition('=')[0]}=null", again] * 7


def test_what_fits_leaves_room_for_what_is_not_counted() -> None:
    found = outcome("strategy=ddp")
    most = found.most_bytes() / 1e9
    assert [verdict(found, most * factor) for factor in (0.99, 1.05)] == ["too large", "tight"]
    assert verdict(found, 1.1 * most + 0.31) == "fits"


LARGE = replace(FACTS, activations_bytes=800 * MB, temporary_bytes=80 * MB)


@pytest.mark.parametrize(
    ("words", "facts", "memory_gb", "first"),
    [
        ([], LARGE, 0.8, "trainer.micro_batch_size=4"),
        (["strategy=fsdp"], LARGE, 0.8, "trainer.micro_batch_size=4"),
        (["strategy=fsdp", "strategy.blocks=[Block]"], LARGE, 0.31, "trainer.micro_batch_size=1"),
        ([], FACTS, 0.15, "strategy=ddp strategy.shard_optimizer=true"),
        (["strategy=fsdp"], replace(FACTS, activations_bytes=0), 0.05, "strategy.init=replay"),
    ],
)
def test_what_takes_most_is_changed_first(words: Sequence[str], facts: Facts, memory_gb: float, first: str) -> None:
    found = [" ".join(one) for group in remedies(outcome(*words, facts=facts), memory_gb) for one in group]
    assert found[0].startswith(first)
    assert ("trainer.activation_checkpointing=[Block]" in found) == ("strategy.blocks=[Block]" in words)


def test_sizes_of_micro_batches_split_the_batch_and_grow_with_the_memory() -> None:
    planned, sizes = outcome(facts=LARGE), []
    for memory_gb in (0.5, 0.7, 0.8, 1.0, 10):
        size = remedies(planned, memory_gb)[0][0][0]
        sizes.append(int(size.rpartition("=")[2]))
    assert sizes == sorted(sizes)
    assert (all(32 % size == 0 for size in sizes), sizes[0], sizes[-1]) == (True, 1, 8)
    assert smaller_too(["strategy=fsdp"], planned, 10)[0] == ("strategy=fsdp", "trainer.micro_batch_size=8")
    assert smaller_too(["trainer.micro_batch_size=4"], planned, 10) == []
    assert remedies(outcome(facts=LARGE, layout=Layout(1, 1, "cpu", "gloo", 1)), 0.8)[1] == []


def test_a_remedy_takes_the_place_of_what_was_typed() -> None:
    run = ["recipe=mnist", "strategy=fsdp", "strategy.blocks=[A]", "trainer.micro_batch_size=16"]
    assert with_remedy(run, ["strategy=ddp", "strategy.shard_optimizer=true"]) == [
        "recipe=mnist", "trainer.micro_batch_size=16", "strategy=ddp", "strategy.shard_optimizer=true"
    ]  # fmt: skip
    assert with_remedy(run, ["trainer.micro_batch_size=4"]) == [*run[:3], "trainer.micro_batch_size=4"]


def test_only_what_fits_by_its_own_plan_is_named() -> None:
    planned = outcome(facts=LARGE)
    small = outcome(facts=FACTS)
    micro = [(f"trainer.micro_batch_size={size}",) for size in (8, 4)]
    error = does_not_fit(planned, 0.8, [(micro[0], planned), (micro[1], small), (("strategy=fsdp",), planned)])
    assert error.suggestion.startswith("What fits: trainer.micro_batch_size=4 (")
    assert "strategy=fsdp" not in error.suggestion
    assert "trainer.activation_checkpointing=[CLASS]" in error.suggestion
    both = does_not_fit(planned, 0.8, [(micro[0], small), (micro[1], small), (("strategy=fsdp",), small)])
    assert "trainer.micro_batch_size=4" not in both.suggestion
    assert "or strategy=fsdp (" in both.suggestion
    tight = does_not_fit(planned, 1.05 * small.most_bytes() / 1e9, [(micro[1], small)])
    assert tight.suggestion.startswith("What is tight: trainer.micro_batch_size=4")
    none = does_not_fit(planned, 0.1, [(micro[0], planned), (micro[1], small)])
    assert "trainer.micro_batch_size=4 takes least" in none.suggestion


@pytest.mark.slow
def test_what_is_named_is_what_the_plan_of_a_smaller_batch_says(ddpexp: Ddpexp) -> None:
    large = ("model=lenet", "model.width=[256,256]", "trainer.global_batch_size=640", "trainer.device=cpu")
    done = ddpexp("plan", *SMALL, *large, "trainer.gpus=2", "--memory_gb", "0.35")
    assert done.code == 2, done.out
    assert re.search(r" What fits: trainer\.micro_batch_size=\d+ \([\d.]+ MB\)\. ", done.err), done.err


def test_a_strategy_that_is_refused_stays_in_the_comparison_with_its_reason() -> None:
    planned = outcome("strategy=ddp")

    def rows(arguments: PlanArguments) -> list[dict[str, Any]]:
        choices = candidates(arguments.run)
        runs = runs_of(arguments, choices)
        found = [planned if "strategy=ddp" in run else RefusedError("not so") for run in runs]
        return list(compare(arguments, choices, found).as_dict()["strategies"])

    arguments = PlanArguments(("recipe=mnist",), strategies=True, memory_gb=0.1)
    verdicts = [row.get("verdict") or row["refused"] for row in rows(arguments)]
    assert verdicts == ["too large", "too large", "not so", "not so"]
    typed = rows(replace(arguments, run=(*arguments.run, "strategy=pipeline")))
    assert typed[-2] == {"overrides": "strategy=pipeline", "refused": "not so"}
    with refused("not so"):
        compare(arguments, [("strategy=ddp",)], [RefusedError("not so")])
    with refused("calibrate"):
        runs_of(replace(arguments, calibrate=True), [])


def test_the_command_compares_them(ddpexp: Ddpexp) -> None:
    words = ("plan", "--strategies", *SMALL, "model=lenet", "optimizer=adamw", "trainer.gpus=2")
    costs = ("--compute_ms", "9", "--alpha_us", "20", "--bandwidth_gbps", "10")
    found = json.loads(ddpexp(*words, *costs, "--memory_gb", "8", "--json").out)
    assert [row["verdict"] for row in found["strategies"]] == ["fits"] * 4
    assert any(note.startswith("strategy=pipeline is left out: strategy.pp_size=2 keeps") for note in found["notes"])
    assert any(
        "strategy.tp_size=2 is left out: strategy.tp_size=2 divides the layers" in note for note in found["notes"]
    )
    most = [row["most_bytes"] for row in found["strategies"]]
    assert most[1] < most[0]
    assert all(row["step_ms"] > 9 for row in found["strategies"])

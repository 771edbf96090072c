"""Every strategy against one process, or against replicas of as many workers: the cases, and what each rank runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, cycle, product
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ddpexp.distributed.world import World
from ddpexp.strategy.ddp import DDP
from ddpexp.strategy.exact.strategy import Exact
from ddpexp.strategy.fsdp.exact import ExactFSDP
from ddpexp.strategy.fsdp.strategy import FSDP
from ddpexp.strategy.replica import Replicas, clip_values
from ddpexp.train.precision import Precision
from tests.fitting import ALONE, STRATEGY
from tests.strategy.fsdp.ranks import OPTIONS, Net, seeded, whole
from tests.strategy.sharded import CUT

STEPS = 3
AXES: Mapping[str, Sequence[Any]] = {
    "strategy": ("shard_optimizer", "fsdp", "hybrid"),
    "blocks": ("by size", "by class", "one, replayed"),
    "reduction": ("fast", "exact"),
    "optimizer": tuple(CUT),
    "micro_batches": (1, 2, 3),  # of each rank
    "precision": ("fp32", "bf16", "fp16"),
    "clipping": ("no", "norm", "value"),
    "through": ("shared_memory", "backend"),
}

Pair: TypeAlias = "tuple[tuple[str, Any], tuple[str, Any]]"


@dataclass(frozen=True)
class Case:
    """A way to train."""

    workers: int
    strategy: str
    blocks: str  # of a sharded model, and how it is built
    reduction: str
    optimizer: str
    micro_batches: int
    precision: str
    clipping: str
    through: str


def every_case(workers: int) -> list[Case]:
    """Return all cases with this number of workers; cuts and transports take turns."""
    in_turn = {axis: cycle(AXES[axis]) for axis in ("blocks", "through")}
    axes = {axis: values for axis, values in AXES.items() if axis not in in_turn}
    combined = (dict(zip(axes, values, strict=True)) for values in product(*axes.values()))
    return [
        Case(workers, **values, **{axis: next(turn) for axis, turn in in_turn.items()})
        for values in combined
        if is_possible(values, workers)
    ]


def is_possible(values: Mapping[str, Any], workers: int) -> bool:
    """Return whether two replicas of several ranks divide the workers and fsdp takes the optimizer, as far as chosen."""
    strategy = values.get("strategy")
    if strategy in ("fsdp", "hybrid") and values.get("optimizer") == "rprop":
        return False
    return strategy != "hybrid" or workers in (4, 8)


def pairs_of(values: Mapping[str, Any]) -> set[Pair]:
    """Return each pair of values of two axes."""
    return set(combinations(((axis, values[axis]) for axis in AXES if axis in values), 2))


def possible_pairs(workers: int) -> set[Pair]:
    """Return every pair of values of two axes that a case can have."""
    choices = combinations(AXES, 2)
    pairs = {((one, a), (other, b)) for one, other in choices for a, b in product(AXES[one], AXES[other])}
    return {pair for pair in pairs if is_possible(dict(pair), workers)}


def pairwise(workers: int) -> list[Case]:
    """Return few cases in which every possible pair of values occurs."""
    missing = possible_pairs(workers)
    cases = []
    for pair in sorted(missing, key=str):
        if pair not in missing:
            continue
        values = dict(pair)
        for axis in [name for name in AXES if name not in values]:
            choices = [choice for value in AXES[axis] if is_possible(choice := values | {axis: value}, workers)]
            values = max(choices, key=lambda choice: len(pairs_of(choice) & missing))
        cases.append(Case(workers, **values))
        missing -= pairs_of(values)
    return cases


def build(case: Case, world: World) -> Replicas:
    """Return the strategy of a case."""
    exact: dict[str, Any] = {"gradient_accumulation_steps": case.micro_batches * case.workers // world.world_size}
    through: Any = case.through
    if case.strategy in ("ddp", "shard_optimizer"):
        options = replace(STRATEGY, reduce_through=through, shard_optimizer=case.strategy == "shard_optimizer")
        if case.reduction == "exact":
            return Exact(options, world, seeded(Net), **exact)
        return DDP(options, world, seeded(Net))
    blocks: dict[str, dict[str, Any]] = {
        "by size": {},
        "by class": {"blocks": ("Block",), "reshard_after_forward": False},
        "one, replayed": {"min_block_mb": 25, "init": "replay"},
    }
    replicas = 2 if case.strategy == "hybrid" else 1
    sharded = replace(OPTIONS, reduce_through=through, dp_replicate_size=replicas, **blocks[case.blocks])
    if case.reduction == "exact":
        return ExactFSDP(sharded, world, seeded(Net), **exact)
    return FSDP(sharded, world, seeded(Net))


def train(case: Case, world: World) -> tuple[Replicas, list[float]]:
    """Train as a case says, on this world; return the norms of the gradients, too."""
    strategy = build(case, world)
    optimizer = strategy.build_optimizers(lambda _: {"all": CUT[case.optimizer](strategy.parameters())})["all"]
    precision: Any = Precision(case.precision, world.device, False, strategy.gradient_weight, strategy)  # type: ignore[arg-type]
    total = case.micro_batches * case.workers
    own = total // world.world_size
    weight = torch.tensor(strategy.gradient_weight / (5 * total))
    norms = []
    for step in range(STEPS):
        for number in range(own):
            leaf = world.rank * own + number
            rows = torch.randn(5, 9, generator=torch.Generator().manual_seed(100 * step + leaf))
            with strategy.micro_batch(last=number == own - 1):
                with precision.autocast():
                    loss = strategy.train_model(rows).float().square().sum()
                precision.backward(loss, weight)
        precision.unscale(optimizer)
        parameters = list(strategy.parameters())
        limited = case.clipping == "norm"
        norms.append(float(strategy.clip(parameters, 0.5) if limited else strategy.gradient_norm(parameters)))
        if case.clipping == "value":
            clip_values(parameters, 0.01)
        precision.step(optimizer)
        precision.update()
        strategy.clear_gradient()
    return strategy, norms


def check(cases: Sequence[Case], world: World) -> None:
    """Compare each case with replicas of as many workers, and exact ones with one process. Ranks: all."""
    expected: dict[Case, tuple[dict[str, Tensor], list[float]]] = {}
    for case in cases:
        plain = replace(case, strategy="ddp", through="shared_memory", blocks="")
        if plain not in expected and (case.reduction == "fast" or world.is_rank_zero):
            strategy, norms = train(plain, ALONE if case.reduction == "exact" else world)
            expected[plain] = strategy.modules["model"].state_dict(), norms
        strategy, norms = train(case, world)
        state = {name: whole(value) for name, value in strategy.modules["model"].state_dict().items()}
        if plain in expected:
            weights, expected_norms = expected[plain]
            assert str(norms) == str(expected_norms), (case, norms, expected_norms)
            for name, value in weights.items():
                assert torch.equal(state[name], value), f"{case}: {name} differs"
        if case.strategy == "fsdp":
            held = sum(p.to_local().numel() for p in strategy.parameters() if isinstance(p, DTensor))
            assert held < sum(p.numel() for p in strategy.parameters()) / world.world_size + 60  # a row of each tensor


def few(world: World) -> None:
    """Compare a case for each pair of values."""
    check(pairwise(world.world_size), world)


def every(world: World, optimizer: str) -> None:
    """Compare all cases with an optimizer."""
    check([case for case in every_case(world.world_size) if case.optimizer == optimizer], world)

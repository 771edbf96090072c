"""Every strategy against one process, or against replicas of as many workers: the cases, and what each rank runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any, TypeAlias

import torch
from torch import Tensor

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
    "workers": (2, 3, 4),
    "strategy": ("ddp", "shard_optimizer", "fsdp", "fsdp, one block", "fsdp, replayed", "hybrid"),
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
    reduction: str
    optimizer: str
    micro_batches: int
    precision: str
    clipping: str
    through: str


def every_case(workers: Sequence[int]) -> list[Case]:
    """Return all cases with these numbers of workers."""
    axes = {**AXES, "workers": workers}
    combined = (dict(zip(axes, values, strict=True)) for values in product(*axes.values()))
    return [Case(**values) for values in combined if is_possible(values)]


def is_possible(values: Mapping[str, Any]) -> bool:
    """Return whether two replicas of two or four ranks each divide the workers, as far as they are chosen."""
    return values.get("strategy") != "hybrid" or values.get("workers", 4) in (4, 8)


def pairs_of(values: Mapping[str, Any]) -> set[Pair]:
    """Return each pair of values of two axes."""
    return set(combinations(((axis, values[axis]) for axis in AXES if axis in values), 2))


def possible_pairs() -> set[Pair]:
    """Return every pair of values of two axes that a case can have."""
    choices = combinations(AXES, 2)
    pairs = {((one, a), (other, b)) for one, other in choices for a, b in product(AXES[one], AXES[other])}
    return {pair for pair in pairs if is_possible(dict(pair))}


def pairwise() -> list[Case]:
    """Return few cases in which every possible pair of values occurs."""
    missing = possible_pairs()
    cases = []
    for pair in sorted(missing, key=str):
        if pair not in missing:
            continue
        values = dict(pair)
        for axis in [name for name in AXES if name not in values]:
            choices = [values | {axis: value} for value in AXES[axis]]
            values = max(filter(is_possible, choices), key=lambda choice: len(pairs_of(choice) & missing))
        cases.append(Case(**values))
        missing -= pairs_of(values)
    return cases


def build(case: Case, world: World) -> Replicas:
    """Return the strategy of a case."""
    exact = {"gradient_accumulation_steps": case.micro_batches * case.workers // world.world_size}
    through: Any = case.through
    if case.strategy in ("ddp", "shard_optimizer"):
        options = replace(STRATEGY, reduce_through=through, shard_optimizer=case.strategy == "shard_optimizer")
        if case.reduction == "exact":
            return Exact(options, world, seeded(Net), **exact)
        return DDP(options, world, seeded(Net))
    ways: dict[str, dict[str, Any]] = {
        "fsdp, one block": {"min_block_mb": 25, "reshard_after_forward": False},
        "fsdp, replayed": {"init": "replay"},
        "hybrid": {"dp_replicate_size": 2},
    }
    sharded = replace(OPTIONS, reduce_through=through, **ways.get(case.strategy, {}))
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
        plain = replace(case, strategy="ddp", through="shared_memory")
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


def few(world: World) -> None:
    """Compare a case for each pair of values."""
    check([case for case in pairwise() if case.workers == world.world_size], world)


def every(world: World) -> None:
    """Compare all cases of so many workers."""
    check(every_case([world.world_size]), world)

"""State that ranks share in buffers: a count, a queue and running statistics, and episodes of uneven length.

The reference is a plain loop of one process, which knows neither ranks nor checkpoints.
"""

from __future__ import annotations

import random
import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import cross_entropy

from ddpexp.data.order import Permutation
from tests.conftest import OWN_SERVER, ROOT, Ddpexp, Done, finish
from tests.fitting import near
from tests.points import Recipe, weights
from tests.test_interruptions import KILLS, ranks_of

CODE = """\
class Remembers(nn.Module):
    # A count of samples, a queue of the mean scores of the last steps, and running statistics of the inputs.
    def __init__(self, **options):
        super().__init__()
        self.net = Net(**options)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("queue", torch.zeros(5, 2, dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(4, dtype=torch.float64), persistent=False)
        self.register_buffer("spread", torch.ones(4, dtype=torch.float64))

    def forward(self, rows):
        return self.net(((rows - self.mean) / self.spread).float())


class Fills:
    # Fills the queue from all ranks alike; the loss is drawn to what is in it.
    def train_step(self, update, batches):
        time.sleep(float(os.environ.get("PACE", "0")))
        sums, total, count = torch.zeros(11, dtype=torch.float64), torch.zeros((), dtype=torch.float64), 0
        for number, (_, rows, labels) in enumerate(batches, start=1):
            with update.micro_batch(last=number == len(batches)) as micro_batch:
                scores = update.models(rows)
                loss = nn.functional.cross_entropy(scores, labels, reduction="sum")
                loss = loss + 0.1 * (scores.double() - update.models.queue.mean(0)).square().sum()
                micro_batch.backward(loss, len(labels))
            wide = torch.cat([torch.ones(len(rows), 1), scores.detach(), rows, rows.abs()], dim=1)
            sums += wide.double().sum(0)
            total, count = total + loss.detach(), count + len(labels)
        if update.apply():
            update.world.sum(sums)
            self.remember(update.models, sums)
        return total, count, {}

    def remember(self, model, sums):
        seen = sums[1:] / sums[0]
        model.count += int(sums[0])
        model.queue.copy_(torch.cat([model.queue[1:], seen[None, :2]]))
        model.mean.lerp_(seen[2:6], 0.1)
        model.spread.lerp_(seen[6:], 0.1)

    def step(self, model, batch):
        _, rows, labels = batch
        return nn.functional.cross_entropy(model(rows), labels, reduction="sum"), len(labels), {}
"""
REMEMBERS = ("model._target_=points.Remembers", "task._target_=points.Fills")
ACTOR_CRITIC = (
    "model._target_=actor_critic.Policy", "model.width=16", "task._target_=actor_critic.ActorCritic", "task.limit=40",
    "task.discount=0.97", "data._target_=actor_critic.load", "data.train=96", "data.test=8", "optimizer=adam",
    "optimizer.lr=0.01", "trainer.micro_batch_size=4",
)  # fmt: skip
PLAIN = ("optimizer=sgd", "optimizer.lr=0.05", "scheduler=constant", "trainer.epochs=null")
STEPS = 12


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, warm_environ: dict[str, str]) -> Recipe:
    made = Recipe(Ddpexp(tmp_path_factory.mktemp("shared"), warm_environ), CODE)
    shutil.copy(ROOT / "examples/actor_critic/actor_critic.py", made.folder)
    return made


def reference(start: dict[str, Tensor], seed: int = 0) -> dict[str, Tensor]:
    """Train in one process, with whole batches."""
    rows = torch.randn(96, 4, generator=torch.Generator().manual_seed(0))
    labels = (rows.sum(1) > 0).long()
    trained = {name: tensor.clone().requires_grad_() for name, tensor in start.items() if name.startswith("net.")}
    one, first, two, second = trained.values()
    optimizer = torch.optim.SGD(trained.values(), lr=0.05, momentum=0.9, nesterov=True)
    count, queue, mean, spread = 0, torch.zeros(5, 2).double(), torch.zeros(4).double(), torch.ones(4).double()
    for step in range(STEPS):
        epoch, place = divmod(24 * step, 96)
        chosen = torch.from_numpy(Permutation(96, seed, epoch)(np.arange(place, place + 24)))
        inputs = ((rows[chosen] - mean) / spread).float()
        scores = torch.tanh(inputs @ one.T + first) @ two.T + second
        loss = cross_entropy(scores, labels[chosen], reduction="sum")
        loss = (loss + 0.1 * (scores.double() - queue.mean(0)).square().sum()) / 24
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        count += 24
        queue = torch.cat([queue[1:], scores.detach().double().mean(0)[None]])
        mean = mean.lerp(rows[chosen].double().mean(0), 0.1)
        spread = spread.lerp(rows[chosen].double().abs().mean(0), 0.1)
    found = {name: tensor.detach() for name, tensor in trained.items()}
    return {**found, "count": torch.tensor(count), "queue": queue, "spread": spread, "mean": mean}


def started(recipe: Recipe) -> tuple[tuple[str, ...], dict[str, Tensor]]:
    """Return the overrides of a run that starts as the reference does, and what it must end with."""
    torch.manual_seed(7)
    start = recipe.module().Remembers().state_dict()
    path = recipe.folder / "start.safetensors"
    save_file(start, path)
    expected = {f"model.{name}": tensor for name, tensor in reference(start).items()}
    return (*REMEMBERS, *PLAIN, f"run.init_from={path}"), expected


def agrees(done: Done, expected: dict[str, Tensor]) -> None:
    assert done.code == 0, done.err
    found = weights(done)
    assert near(found, {name: expected[name] for name in found}, 1e-5)
    assert int(found["model.count"]) == 24 * STEPS


@pytest.mark.parametrize("workers", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_buffers_that_all_ranks_fill_alike_are_those_of_one_process(recipe: Recipe, workers: int) -> None:
    overrides, expected = started(recipe)
    agrees(recipe(*overrides, f"trainer.max_steps={STEPS}", f"trainer.gpus={workers}"), expected)


@pytest.mark.slow
def test_a_resume_at_every_step_loses_none_of_them(recipe: Recipe) -> None:
    overrides, expected = started(recipe)
    run: Path | None = None
    for steps in range(1, STEPS + 1):
        done = recipe(*overrides, f"trainer.max_steps={steps}", "trainer.gpus=2", run=run)
        assert done.code == 0, done.err
        run = done.run
    agrees(done, expected)


@pytest.mark.parametrize(
    ("workers", "through"),
    [
        (2, "auto"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((2, "backend"), (3, "auto"), (3, "backend"))),
    ],
)
def test_episodes_of_uneven_length_train_the_same_at_any_number_of_workers(
    recipe: Recipe, workers: int, through: str
) -> None:
    few = (*ACTOR_CRITIC, "trainer.epochs=null", "trainer.max_steps=5")
    alone = recipe(*few, "trainer.gpus=1")
    done = recipe(*few, f"trainer.gpus={workers}", f"strategy.reduce_through={through}")
    assert (alone.code, done.code) == (0, 0), done.err
    assert near(weights(done), weights(alone), 1e-4)
    assert float(weights(done)["model.seen"][0, 0]) > 500  # states that were played


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("overrides", [REMEMBERS, ACTOR_CRITIC], ids=["queue", "actor-critic"])
def test_killed_again_and_again_the_state_is_that_of_an_undisturbed_run(
    recipe: Recipe, overrides: tuple[str, ...]
) -> None:
    chance = random.Random(1)
    whole = (*overrides, "trainer.epochs=null", "trainer.max_steps=60", "trainer.gpus=2", "trainer.checkpoint_every=5")
    expected = recipe(*whole)
    kinds: Counter[str] = Counter()
    while kinds.total() < 30:
        run: Any = None
        while True:
            process, run = recipe.start(*whole, run=run, environ={"PACE": "0.02", **OWN_SERVER})
            while process.poll() is None and not ranks_of(process):
                time.sleep(0.01)
            time.sleep(chance.uniform(0.0, 4.0))
            kind = chance.choice(sorted(KILLS.keys() - {"loader"}))
            if process.poll() is None and kinds.total() < 30:
                KILLS[kind](process, run)
            done = finish(process, run)
            if done.code == 0:
                break
            kinds[kind] += 1
        assert done.result()["weights_sha256"] == expected.result()["weights_sha256"]
    print(f"{dict(kinds)}, all equal")

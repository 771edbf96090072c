"""recipe=gpt in real runs: the same weights by every strategy and after every kill."""

from __future__ import annotations

import signal
import time
from itertools import product
from pathlib import Path

import pytest

from tests.conftest import PATIENCE, Ddpexp, Done, finish

SMALL = (
    "recipe=gpt", "model.width=16", "model.num_layers=2", "data.block_size=16", "trainer.max_steps=6",
    "trainer.threads=1", "trainer.global_batch_size=8", "trainer.micro_batch_size=2", "trainer.eval_every=3",
    "task.sample_tokens=4", "logger=none",
)  # fmt: skip
LLAMA = ("model.norm=rmsnorm", "model.mlp=swiglu", "model.positions=rotary", "model.num_kv_heads=2", "model.tied=false")
EXACT = "trainer.reduction=exact"


@pytest.fixture
def text(ddpexp: Ddpexp) -> str:
    path = ddpexp.folder / "text.txt"
    lines = (f"{a} and {b} is {a + b}, so {b} and {a} is {b + a}\n" for a in range(12) for b in range(12))
    path.write_text("".join(lines))
    return f"data.path={path}"


def trained(done: Done) -> str:
    assert done.code == 0, done.err
    result = done.result()
    assert result["step"] == 6
    assert result["metrics"]["eval/perplexity"] > 1
    return str(result["weights_sha256"])


@pytest.mark.slow
def test_exact_weights_do_not_depend_on_strategy_and_workers(ddpexp: Ddpexp, text: str) -> None:
    one = ddpexp(*SMALL, text, *LLAMA, EXACT, "launcher=inline")
    two = ddpexp(*SMALL, text, *LLAMA, EXACT, "strategy=fsdp", "trainer.gpus=2")
    assert trained(one) == trained(two)
    assert any("train/tokens_per_second" in record for record in one.metrics())


@pytest.mark.slow
@pytest.mark.parametrize("kind", [(), LLAMA, ("data.documents=line",)])
def test_every_strategy_gives_the_same_weights(ddpexp: Ddpexp, text: str, kind: tuple[str, ...]) -> None:
    ways = [(), ("strategy.shard_optimizer=true",), ("strategy=fsdp",)]
    fast = {trained(ddpexp(*SMALL, text, *kind, *way, "trainer.gpus=2")) for way in ways}
    assert len(fast) == 1
    exact = {
        trained(ddpexp(*SMALL, text, *kind, *way, EXACT, f"trainer.gpus={workers}"))
        for way, workers in product(ways, (1, 2, 4))
    }
    assert len(exact) == 1


def killed(ddpexp: Ddpexp, run: Path, words: tuple[str, ...], seconds: float) -> None:
    """Kill a command so long after its first step, if it is still there."""
    process, _ = ddpexp.start(*words, f"run.dir={run}")
    deadline = time.monotonic() + PATIENCE
    while not (run / "metrics.jsonl").exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(seconds)
    if process.poll() is None:
        process.send_signal(signal.SIGKILL)
    process.communicate(timeout=PATIENCE)


OFTEN = ("trainer.checkpoint_every=1", "trainer.log_every=1")


@pytest.mark.slow
def test_a_killed_run_ends_with_the_weights_of_one_that_was_not(ddpexp: Ddpexp, text: str) -> None:
    words, run = (*SMALL, *OFTEN, text, "trainer.gpus=2"), ddpexp.folder / "killed"
    expected = trained(ddpexp(*words))
    killed(ddpexp, run, words, 0.0)
    process, _ = ddpexp.start(*words, f"run.dir={run}")
    assert trained(finish(process, run)) == expected


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("kind", [(), ("data.documents=line",)])
def test_after_twenty_kills_the_weights_are_the_same(
    ddpexp: Ddpexp, text: str, workers: int, kind: tuple[str, ...]
) -> None:
    words = (*SMALL, *OFTEN, text, *kind, f"trainer.gpus={workers}", "trainer.max_steps=400")
    whole = ddpexp(*words)
    run = ddpexp.folder / "killed"
    for number in range(20):
        killed(ddpexp, run, words, 0.05 * (number % 7))
    process, _ = ddpexp.start(*words, f"run.dir={run}")
    done = finish(process, run)
    assert done.code == 0 or "finished" in done.err
    assert done.result()["weights_sha256"] == whole.result()["weights_sha256"]
    assert done.result()["step"] == 400

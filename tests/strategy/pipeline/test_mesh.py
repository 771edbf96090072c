"""Pipelines whose stages are divided, and whose copies share the optimizer's state: the same run as on one worker."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from ddpexp.checkpoint.format import complete_checkpoints
from recipes.gpt import GPT
from tests.conftest import Ddpexp, Done

MODEL = (
    "model.vocab_size=12", "model.tied=false", "model.mlp=swiglu", "model.num_kv_heads=2", "model.width=16",
    "model.num_layers=2", "data.block_size=8",
)  # fmt: skip
TRAINER = (
    "trainer.threads=1", "trainer.global_batch_size=16", "trainer.micro_batch_size=2", "trainer.clip_grad_norm=0.3",
    "trainer.ema_decay=0.9", "trainer.log_every=1", "scheduler=constant", "task.sample_tokens=4",
)  # fmt: skip
PIPELINE = ("strategy=pipeline", "strategy.pp_size=2")
TENSOR = (*PIPELINE, "strategy.tp_size=2", "trainer.gpus=4")
SHARDS = (*PIPELINE, "strategy.dp_shard_size=2", "trainer.gpus=4")
INTERLEAVED = ("strategy.schedule=interleaved", "strategy.stages_per_worker=2")
THROUGH_STAGES = ("strategy.gather_in_evaluation=false",)
EVERYTHING = (
    *PIPELINE,
    *INTERLEAVED,
    *THROUGH_STAGES,
    "strategy.tp_size=2",
    "strategy.dp_shard_size=2",
    "trainer.gpus=8",
)


class Train:
    """Train a small GPT on a text."""

    def __init__(self, ddpexp: Ddpexp) -> None:
        self.ddpexp, self.text = ddpexp, ddpexp.folder / "text.txt"
        self.text.write_text("".join("abcdefgh \n"[number * number % 97 % 10] for number in range(3000)))

    def __call__(self, name: str, *overrides: str, environ: dict[str, str] | None = None) -> Done:
        run = self.ddpexp.folder / name
        words = ("recipe=gpt", *MODEL, *TRAINER, f"data.path={self.text}", f"run.dir={run}", *overrides)
        return replace(self.ddpexp(*words, environ=environ), run=run)


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory, warm_environ: dict[str, str]) -> Train:
    folder = tmp_path_factory.mktemp("mesh")
    return Train(Ddpexp(folder, {**warm_environ, "XDG_CACHE_HOME": str(folder / "cache")}))


@pytest.fixture(scope="module")
def one(train: Train) -> Done:
    """One worker, six steps."""
    done = train("one", "trainer.gpus=1", "trainer.max_steps=6")
    assert done.code == 0, done.err
    return done


def state(done: Done) -> dict[str, Tensor]:
    """Return weights, average and state of the optimizer at the end of a run."""
    folder = complete_checkpoints(done.run / "checkpoints")[0]
    files = ("model.safetensors", "model.ema.safetensors", "state.optimizers.safetensors")
    return {f"{file}/{name}": tensor for file in files for name, tensor in load_file(folder / file).items()}


def close(done: Done, expected: Done) -> None:
    """Check that two runs end alike, but for the last digits, with the same losses."""
    assert (done.code, expected.code) == (0, 0), done.err + expected.err
    found, there = state(done), state(expected)
    assert found.keys() == there.keys()
    for name, tensor in there.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5, msg=name)
    assert done.result()["metrics"] == pytest.approx(expected.result()["metrics"], rel=1e-5)


@pytest.mark.slow
def test_strategies_resume_from_one_another_in_every_dimension(train: Train, one: Done) -> None:
    done = train("in turn", "trainer.max_steps=2", *TENSOR)
    assert "mesh    pp_size 2 x tp_size 2 = 4 workers" in done.out
    assert "strategy.tp_size=2 those inside layers" in done.out
    for steps, strategy in ((4, ("strategy=ddp", "trainer.gpus=2")), (6, (*SHARDS, *INTERLEAVED, *THROUGH_STAGES))):
        assert done.code == 0, done.err
        done = train("in turn", f"trainer.max_steps={steps}", *strategy)
    assert "mesh    pp_size 2 x dp_shard_size 2 = 4 workers\n        pp 0: 0 1\n        pp 1: 2 3\n" in done.out
    close(done, one)


@pytest.mark.slow
def test_all_dimensions_together(train: Train, one: Done) -> None:
    close(train("everything", "trainer.max_steps=6", *EVERYTHING), one)
    train("back", "trainer.max_steps=2", *EVERYTHING)
    train("back", "trainer.max_steps=4", "strategy=fsdp", "strategy.tp_size=2", "trainer.gpus=4")
    close(train("back", "trainer.max_steps=6", *EVERYTHING), one)
    copies = (*PIPELINE, "strategy.dp_shard_size=2", "trainer.gpus=8", "trainer.micro_batch_size=1")
    close(train("copies", "trainer.max_steps=6", *copies), one)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh"), [("tensor", TENSOR), ("shards", (*SHARDS, *INTERLEAVED))])
def test_a_run_that_is_killed_ends_with_the_same_bits(train: Train, name: str, mesh: tuple[str, ...]) -> None:
    options = (*mesh, "trainer.max_steps=6", "trainer.checkpoint_every=1", "model.dropout=0.2")
    whole = train(f"{name} whole", *options)
    killed = train(f"{name} killed", *options, environ={"DDPEXP_FAULT": "backward:kill:3:14"})
    assert (whole.code, killed.code) == (0, 1), whole.err
    assert "rank 3 on" in killed.err
    done = train(f"{name} killed", *options)
    assert "resumed after step" in done.out
    assert done.result()["weights_sha256"] == whole.result()["weights_sha256"]
    assert all(torch.equal(tensor, state(done)[key]) for key, tensor in state(whole).items())


@pytest.mark.slow
def test_shards_of_the_optimizer_change_no_bits(train: Train) -> None:
    options = (*PIPELINE, "trainer.gpus=4", "trainer.max_steps=3")
    whole, shared = train("copies of all", *options), train("shares", *options, "strategy.dp_shard_size=2")
    assert (whole.code, shared.code) == (0, 0), whole.err + shared.err
    assert all(torch.equal(tensor, state(shared)[key]) for key, tensor in state(whole).items())


@pytest.mark.slow
def test_layers_that_do_not_divide_are_named_before_workers_start(train: Train) -> None:
    for name, options, sentence in (
        ("heads", ("strategy.tp_size=4", "trainer.gpus=8"), "which has 2 heads of 4. Use strategy.tp_size=2."),
        ("layers", ("strategy.pp_size=5", "trainer.gpus=5"), "strategy.pp_size=5 is more than the 4 layers of GPT"),
    ):
        done = train(name, *PIPELINE, *options, "trainer.micro_batch_size=1")
        assert done.code == 2
        assert sentence in done.err
        assert not (done.run / "ranks").exists()


@pytest.mark.slow
def test_the_plan_counts_what_a_worker_of_a_mesh_holds(train: Train) -> None:
    options = (*MODEL, *TRAINER, *PIPELINE, "strategy.tp_size=2", "strategy.dp_shard_size=2", "trainer.gpus=8")
    done = train.ddpexp("plan", "recipe=gpt", f"data.path={train.text}", *options, "trainer.max_steps=1", "--json")
    assert done.code == 0, done.err
    parts = {part["name"]: part["num_bytes"] for part in json.loads(done.out)["memory"]["parts"]}
    with torch.device("meta"):
        model = GPT(12, 8, 2, 4, 16, num_kv_heads=2, mlp="swiglu", tied=False)
    whole = ("wpe.weight", "ln_1.weight", "ln_2.weight", "ln_f.weight")
    first = [(name, p) for name, p in model.named_parameters() if name.startswith(("wte", "wpe", "h.0"))]
    held = sum(4 * p.numel() // (1 if name.endswith(whole) else 2) for name, p in first)
    assert parts["parameters"] == parts["gradients"] == held
    assert parts["optimizer"] == pytest.approx(held, rel=0.01)  # two numbers each, by two workers

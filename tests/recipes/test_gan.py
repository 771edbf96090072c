"""recipe=gan: manual optimization with everything that a trainer's keys add to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ddpexp.data.datasets import Arrays
from ddpexp.loggers.base import Logger
from recipes.gan import GAN, WassersteinGAN, frechet, networks
from tests.conftest import Ddpexp, Done
from tests.fitting import Once, fit_alone
from tests.records import timeless

OVERRIDES = (
    "model.width=4", "data.source=embedded", "data.embedded_train=160", "data.embedded_test=32", "logger=none",
    "trainer.global_batch_size=32", "trainer.micro_batch_size=8", "trainer.threads=1", "trainer.log_every=1",
    "trainer.precision=bf16", "trainer.clip_grad_norm=0.5", "trainer.ema_decay=0.9", "trainer.reduction=exact",
)  # fmt: skip


@pytest.fixture(scope="session")
def environ(warm_environ: dict[str, str]) -> dict[str, str]:
    """What the example does is tested, not how fork servers start."""
    return warm_environ


def train(ddpexp: Ddpexp, name: str, *overrides: str) -> Done:
    run = ddpexp.folder / name
    done = ddpexp("recipe=gan", f"run.dir={run}", *OVERRIDES, *overrides)
    assert done.code == 0, done.err
    return replace(done, run=run)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, environ: dict[str, str]) -> Done:
    """Seven steps, of five to an epoch, on two workers: bf16, clipping, accumulation and averaged weights."""
    return train(Ddpexp(tmp_path_factory.mktemp("gan"), environ), "two", "trainer.gpus=2", "trainer.max_steps=7")


def numbers(done: Done) -> list[dict[str, Any]]:
    return [timeless(record) for record in done.metrics()]


def test_both_rates_losses_and_norms_are_recorded(two: Done) -> None:
    record = two.metrics()[0]
    assert (record["train/lr/generator"], record["train/lr/discriminator"]) == (0.0004, 0.0002)
    for name in ("generator_loss", "discriminator_loss", "grad_norm/generator", "grad_norm/discriminator"):
        assert record[f"train/{name}"] > 0
    assert record["train/loss"] == record["train/discriminator_loss"]
    assert two.result()["metrics"].keys() == {
        "eval/loss", "eval/real_score", "eval/fake_score", "eval/frechet"
    }  # fmt: skip


def test_one_worker_has_the_numbers_of_two(two: Done, ddpexp: Ddpexp) -> None:
    one = train(ddpexp, "one", "trainer.gpus=1", "trainer.max_steps=7")
    assert one.result()["weights_sha256"] == two.result()["weights_sha256"]
    assert numbers(one) == numbers(two)


def test_it_resumes_in_the_middle_of_an_epoch_with_the_same_result(two: Done, ddpexp: Ddpexp) -> None:
    train(ddpexp, "run", "trainer.gpus=2", "trainer.max_steps=3")
    done = train(ddpexp, "run", "trainer.gpus=2", "trainer.max_steps=7")
    assert "resumed after step 3 of 7" in done.out
    assert done.result()["weights_sha256"] == two.result()["weights_sha256"]
    assert done.result()["metrics"] == two.result()["metrics"]


def images(count: int, seed: int) -> Arrays:
    generator = torch.Generator().manual_seed(seed)
    return Arrays((torch.randn(count, 1, 28, 28, generator=generator), torch.zeros(count, dtype=torch.int64)))


def small_networks() -> dict[str, torch.nn.Module]:
    return networks((1, 28, 28), width=4)


@pytest.fixture
def fit(tmp_path: Path) -> Callable[..., Once]:
    """Train in this process, alone: `fit(task, num_steps=8, **trainer keys)`."""
    sets: dict[str, Any] = {"data": images(32, 0), "evals": {"eval": images(8, 1)}}
    return partial(fit_alone, None, tmp_path, factory=small_networks, global_batch_size=8, log_every=1, **sets)


def moved(once: Once) -> set[str]:
    """Return the networks that differ from what they were built with."""
    torch.manual_seed(0)
    built = {f"{name}.{key}": p for name, module in small_networks().items() for key, p in module.named_parameters()}
    return {name.partition(".")[0] for name, p in built.items() if not torch.equal(p, once.weights[name])}


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("task", [GAN(0.01), WassersteinGAN(0.01, generator_every=2)], ids=["gan", "wgan"])
def test_both_networks_learn_in_every_precision(fit: Callable[..., Once], task: GAN, precision: str) -> None:
    once = fit(task, num_steps=3, precision=precision, micro_batch_size=4, clip_grad_norm=1.0)
    assert moved(once) == {"generator", "discriminator"}
    rates = once.records[0]
    assert (rates["train/lr/generator"], rates["train/lr/discriminator"]) == (0.05, 0.01)


def test_the_generator_steps_when_it_is_due(fit: Callable[..., Once]) -> None:
    once = fit(WassersteinGAN(0.01, generator_every=3), num_steps=4, eval_every=0)
    norms = ["train/grad_norm/generator" in record for record in once.records]
    losses = [record["train/generator_loss"] is not None for record in once.records]
    assert norms == losses == [False, False, True, False]
    assert moved(fit(WassersteinGAN(0.01, generator_every=3), num_steps=2, eval_every=0)) == {"discriminator"}


@dataclass
class Pictures(Logger):
    """A logger that keeps the images."""

    seen: list[tuple[str, tuple[int, ...], torch.dtype, int]] = field(default_factory=list)

    def image(self, name: str, pixels: torch.Tensor, step: int) -> None:
        self.seen.append((name, tuple(pixels.shape), pixels.dtype, step))


def test_an_evaluation_logs_a_sheet_of_images() -> None:
    logger = Pictures()
    models = {name: module.eval() for name, module in small_networks().items()}
    with torch.no_grad():
        GAN(0.01).on_eval(models, images(8, 1).gather(torch.arange(8), torch.device("cpu")), logger, 5)
    assert logger.seen == [("samples", (224, 224, 3), torch.uint8, 5)]


def test_the_distance_is_that_of_two_normal_distributions() -> None:
    one = torch.tensor([1.0, 0.0]).double(), torch.diag(torch.tensor([4.0, 1.0])).double()
    other = torch.tensor([0.0, 0.0]).double(), torch.diag(torch.tensor([1.0, 9.0])).double()
    assert frechet(one, other) == pytest.approx(1 + (2 - 1) ** 2 + (1 - 3) ** 2)
    assert frechet(one, one) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(("shape", "grid"), [((1, 28, 28), 7), ((3, 32, 32), 4), ((3, 64, 64), 4)])
def test_the_networks_fit_images_of_other_sizes(shape: tuple[int, int, int], grid: int) -> None:
    both = networks(shape, latent=5, width=2)
    images = both["generator"](torch.randn(3, 5))
    assert images.shape == (3, *shape)
    assert both["discriminator"](images).shape == (3, 1)
    assert any(getattr(module, "unflattened_size", ())[1:] == (grid, grid) for module in both["generator"].modules())


@pytest.mark.parametrize("shape", [(3, 33, 33), (1, 6, 6), (3, 36, 72)])
def test_images_that_cannot_be_halved_are_refused(shape: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match=f"images of {shape[1]} x {shape[2]} pixels cannot be halved"):
        networks(shape)

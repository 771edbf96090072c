"""`ddpexp.compose`: an experiment in this process, built as a worker builds it."""

from __future__ import annotations

import random
from pathlib import Path

import hydra
import numpy as np
import pytest
import torch
from hydra.core.global_hydra import GlobalHydra

import ddpexp
from ddpexp.data.datasets import Splits
from ddpexp.distributed.rng import seed_everything
from ddpexp.train.build import build_model
from tests.cli.api.conftest import NOISY
from tests.conftest import SMALL
from tests.refusals import refused

OWN = ["--config-dir", NOISY, "recipe=noisy"]


@pytest.fixture(scope="module")
def composed() -> ddpexp.Composed:
    return ddpexp.compose(OWN)


def test_an_experiment_is_typed_and_has_plain_values() -> None:
    composed = ddpexp.compose(["recipe=mnist", "trainer.seed=5"])
    assert composed.experiment.trainer.seed == 5
    assert composed.config["trainer"]["seed"] == 5
    assert composed.overrides == ("recipe=mnist", "trainer.seed=5")
    composed.config["trainer"]["seed"] = 6
    assert composed.config["trainer"]["seed"] == 5


def test_a_model_is_new_each_time_and_leaves_the_generators_alone(composed: ddpexp.Composed) -> None:
    seed_everything(1)
    expected = torch.rand(3), np.random.rand(), random.random()
    seed_everything(1)
    first, second = composed.model(), composed.model()
    assert first is not second
    assert first.training
    assert torch.equal(first.weight, second.weight)
    assert torch.equal(composed.data().train[3][0], composed.data().train[3][0])
    found = torch.rand(3), np.random.rand(), random.random()
    assert torch.equal(found[0], expected[0])
    assert found[1:] == expected[1:]


def test_initial_weights_depend_on_the_seed_alone_whatever_draws_them(composed: ddpexp.Composed) -> None:
    other = ddpexp.compose([*OWN, "trainer.seed=4"])
    first = composed.model().weight
    seed_everything(1)
    assert torch.equal(build_model(composed.experiment).weight, first)
    assert (other.model().weight != first).all()


def test_the_data_is_what_a_run_reads() -> None:
    splits = ddpexp.compose([*OWN, "data.validation_fraction=0.25"]).data()
    assert isinstance(splits, Splits)
    assert {"train": len(splits.train), **{name: len(part) for name, part in splits.evals.items()}} == {
        "train": 48, "eval": 64, "validation": 16,
    }  # fmt: skip


def test_the_task_computes_a_loss(composed: ddpexp.Composed) -> None:
    loss, count, _ = composed.task().step(composed.model(), composed.data().train[0:4])
    assert (loss > 0, count) == (True, 4)


def test_a_model_starts_from_the_weights_that_are_named(trained: ddpexp.Run) -> None:
    model = ddpexp.compose([*OWN, f"run.init_from={trained.path}"]).model()
    assert torch.equal(model.weight, trained.model(weights="raw").weight)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["recipe=mnsit"], "recipe=mnsit: recipe=mnist?"),
        (["recipe=mnist", "model._target_=os.system"], "model._target_=os.system"),
        (["-m", "recipe=mnist"], "Leave -m out"),
        (["recipe=mnist", "--help"], "ddpexp.compose: --help"),
    ],
)
def test_what_the_command_refuses_is_refused(arguments: list[str], expected: str) -> None:
    with refused(expected):
        ddpexp.compose(arguments)


def test_a_program_that_uses_hydra_itself_keeps_it(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("a: 1\n")
    with hydra.initialize_config_dir(str(tmp_path), version_base="1.2"):
        before = GlobalHydra.instance().hydra
        ddpexp.compose(["recipe=mnist"])
        with pytest.raises(ddpexp.RefusedError):
            ddpexp.compose(["recipe=mnsit"])
        assert GlobalHydra.instance().hydra is before
        assert hydra.compose("config") == {"a": 1}
    assert not GlobalHydra.instance().is_initialized()


def test_nothing_is_started_or_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ddpexp.compose([*SMALL, "run.dir=x"]).model()
    assert list(tmp_path.iterdir()) == []

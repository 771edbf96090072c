"""Families of losses and steps, each as an example and as a plain program for one process: the weights are equal.

A family is an example, a function in a file of this folder that trains the same as a researcher would on one device,
and a line in `table.py`. The ordinary run trains each for a few steps on two workers with two micro-batches; the longer
one (`-m slow`) for 50 steps at one, two and three workers with one and two micro-batches each, kills all ranks and
resumes at another number of workers, and runs `ddpexp check`.
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from ddpexp import Callback, RunView
from tests.conftest import Ddpexp, Done
from tests.examples import EXAMPLES
from tests.families import double, sharpness
from tests.families.family import GLOBAL_BATCH_SIZE, SEED, Family, Setting, errors, last_tensors
from tests.families.table import FAMILIES

families = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)

NUM_STEPS, FEW_STEPS = 50, 12
KILLED_AT = 23  # a step between two checkpoints


@pytest.fixture(scope="session")
def environ(warm_environ: dict[str, str]) -> dict[str, str]:
    """Weights are compared, however the processes start."""
    return warm_environ


class Kill(Callback):
    """Kills every rank after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, run: RunView) -> None:
        if run.step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


Train = Callable[..., Done]


@pytest.fixture
def train(ddpexp: Ddpexp) -> Train:
    """Return a function that trains a family, as the setting says and with further overrides."""

    def train(family: Family, setting: Setting, *overrides: str) -> Done:
        run = ddpexp.folder / "run"
        done = ddpexp(*words(family, setting), f"run.dir={run}", *overrides)
        return Done(done.code, done.out, done.err, run)

    return train


def words(family: Family, setting: Setting) -> tuple[str, ...]:
    """Return the overrides that make the example as small as its plain program, and compute in double precision."""
    conf = EXAMPLES / family.name / "conf"
    recipe = yaml.safe_load((conf / f"recipe/{family.name}.yaml").read_text())
    sections = {f"data.sources.{name}": source for name, source in recipe["data"].get("sources", {}).items()}
    sections = {"model": recipe["model"], **(sections or {"data": recipe["data"]})}
    doubled = [
        word
        for key, section in sections.items()
        for word in (f"{key}._target_={double.__name__}.{key.split('.')[0]}", f"+{key}.of={section['_target_']}")
    ]
    return (
        "--config-dir", str(conf), f"recipe={family.name}", "run.trust=[tests]", *doubled, f"trainer.seed={SEED}",
        *family.sizes, f"trainer.global_batch_size={GLOBAL_BATCH_SIZE}",
        f"trainer.micro_batch_size={setting.micro_batch_size}", "trainer.epochs=null",
        f"trainer.max_steps={setting.num_steps}", "trainer.threads=1", "trainer.eval_every=10",
        "trainer.checkpoint_every=10", "logger=none", *family.overrides,
    )  # fmt: skip


def agrees(family: Family, setting: Setting, run: Path) -> None:
    apart = errors(last_tensors(run), family.plain(setting))
    print(f"{family.name}: {max(apart.values()):.1e}")
    assert {name: error for name, error in apart.items() if not error <= family.tolerance} == {}


def test_the_comparison_sees_a_mistake() -> None:
    right = sharpness.plain(Setting(2, micro_batch_size=12))
    assert set(errors(sharpness.plain(Setting(2, micro_batch_size=12)), right).values()) == {0}
    other_dropout = errors(sharpness.plain(Setting(2, micro_batch_size=24)), right)
    assert min(other_dropout.values()) > 1e-4
    assert errors({}, right) == dict.fromkeys(right, math.inf) == errors(right, {})


@families
def test_the_example_trains_as_the_plain_program_does(train: Train, family: Family) -> None:
    setting = Setting(FEW_STEPS, micro_batch_size=6)
    done = train(family, setting, "trainer.gpus=2")
    assert (done.code, done.err) == (0, "")
    agrees(family, setting, done.run)


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("workers", [1, 2, 3])
@families
def test_any_number_of_workers_and_micro_batches_trains_as_the_plain_program_does(
    train: Train, family: Family, workers: int, micro_batches: int
) -> None:
    setting = Setting(NUM_STEPS, GLOBAL_BATCH_SIZE // (workers * micro_batches))
    done = train(family, setting, f"trainer.gpus={workers}")
    assert (done.code, done.err) == (0, "")
    agrees(family, setting, done.run)


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "then"), [(2, 2), (2, 3), (3, 1)])
@families
def test_a_killed_run_is_resumed_with_the_weights_of_the_plain_program(
    train: Train, ddpexp: Ddpexp, family: Family, workers: int, then: int
) -> None:
    setting = Setting(NUM_STEPS, micro_batch_size=4)
    kill = (f"+callbacks.kill={{_target_: {Kill.__module__}.Kill, step: {KILLED_AT}}}",)
    done = train(family, setting, f"trainer.gpus={workers}", *kill)
    assert done.code != 0
    assert "SIGKILL" in done.err
    trusted = (*words(family, setting)[:2], "run.trust=[tests]")
    resumed = ddpexp("resume", str(done.run), *trusted, f"trainer.gpus={then}", "callbacks=none")
    assert resumed.code == 0, resumed.err
    assert "resumed after step" in resumed.out
    agrees(family, setting, done.run)


@pytest.mark.slow
@families
def test_check_finds_no_problem(ddpexp: Ddpexp, family: Family) -> None:
    done = ddpexp("check", "--config-dir", str(EXAMPLES / family.name / "conf"), f"recipe={family.name}")
    assert (done.code, done.err) == (0, ""), done.out
    assert "no problem found" in done.out

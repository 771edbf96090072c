"""What a worker makes of a run directory: a result that anyone can check, and refusals in one sentence."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import logging
import os
import sys

import pytest
import torch
from safetensors.torch import load_file

from ddpexp.checkpoint.format import complete_checkpoints, open_checkpoint
from ddpexp.config.compose import compose
from ddpexp.config.parse import parse
from ddpexp.train.build import build_schedule
from ddpexp.train.process import _exit_code, _Lines
from tests.conftest import OWN_SERVER, Ddpexp, Done
from tests.points import ITEMS, Recipe, weights
from tests.refusals import command_refused, refused

CODE = """\
import argparse

if "RANK" in os.environ:  # in a worker, of whose own arguments a script that became a recipe sees none
    argparse.ArgumentParser().parse_args()


def load_list(**options):
    return [1, 2, 3]


def load_nothing(**options):
    return Splits(points(96, 0), {"eval": points(0, 1)})


class Random(Sides):
    # Uses every generator that a recipe may use.
    def step(self, model, batch):
        loss, count, metrics = super().step(model, batch)
        return loss * (1 + torch.rand(())), count, metrics


class Noisy(Items):
    def __getitem__(self, index):
        import random

        import numpy as np

        number, row, label = super().__getitem__(index)
        return number, row + torch.rand(4) / 9 + float(np.random.rand()) / 9 + random.random() / 9, label


def load_noisy(train=96, test=33):
    return Splits(Noisy(train, 0), {"eval": Items(test, 1)})


class Listed(nn.Module):
    # Its layers are in a plain list, where torch does not find them.
    def __init__(self):
        super().__init__()
        self.layers = [nn.Linear(4, 2)]

    def forward(self, rows):
        return self.layers[0](rows)


class Stable:
    # Warm-up, plateau, decay: a schedule of one's own.
    def __init__(self, decay):
        self.decay = decay

    def factor(self, step, num_steps):
        return min(1.0, (step + 1) / 2, (num_steps - step) / (self.decay * num_steps))


class Strange:
    def __init__(self, value):
        self.value = value

    def factor(self, step, num_steps):
        return self.value


class Looks(Sides):
    # Starts a debugger in a step.
    def __init__(self, how):
        self.how = how

    def step(self, model, batch):
        import io
        import pdb

        if self.how == "breakpoint":
            breakpoint()
        elif self.how == "set_trace":
            pdb.set_trace()
        elif self.how == "Pdb":
            pdb.Pdb().set_trace()
        elif self.how == "torch":
            torch.distributed.breakpoint(rank=1)
        else:
            said = io.StringIO()
            pdb.Pdb(stdin=io.StringIO("p len(batch)\\nc\\n"), stdout=said).set_trace()
            assert "(Pdb) 3" in said.getvalue(), said.getvalue()
            self.how = "breakpoint"
        return super().step(model, batch)


class Mutual(Sides):
    # A metric beside the accuracy, and none of it needed.
    def step(self, model, batch):
        loss, count, _ = super().step(model, batch)
        return loss, count, {}
"""


NOISY = ("data._target_=points.load_noisy", "data.num_workers=2")


@pytest.fixture(scope="session")
def environ(warm_environ: dict[str, str]) -> dict[str, str]:
    """What a rank does is tested, not how it starts."""
    return warm_environ


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, environ: dict[str, str]) -> Recipe:
    return Recipe(Ddpexp(tmp_path_factory.mktemp("worker"), environ), CODE)


@pytest.fixture(scope="module")
def done(recipe: Recipe) -> Done:
    done = recipe("trainer.gpus=2")
    assert done.code == 0, done.err
    return done


def test_the_result_has_every_field_and_its_hash_is_that_of_the_saved_weights(done: Done) -> None:
    result = done.result()
    assert set(result) >= {
        "status", "stopped", "step", "epoch", "samples", "world_size", "metrics", "weights_sha256", "ended_at", "seconds",
        "samples_per_second",
    }  # fmt: skip
    assert (result["status"], result["step"], result["epoch"], result["samples"]) == ("done", 8, 2.0, 192)
    assert result["stopped"] is None
    last = done.metrics()[-1]
    assert result["metrics"] == {name: last[name] for name in ("eval/loss", "eval/accuracy")}
    digest = hashlib.sha256()
    for name, tensor in sorted(weights(done).items()):
        digest.update(f"{name.removeprefix('model.')} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.numpy().tobytes())
    assert result["weights_sha256"] == digest.hexdigest()
    folder = complete_checkpoints(done.run / "checkpoints")[0]
    manifest = open_checkpoint(folder).manifest
    assert (folder.name, manifest["step"], manifest["weights_sha256"]) == ("step-00000008", 8, result["weights_sha256"])


def test_a_run_repeated_gives_the_same_weights_to_the_bit(recipe: Recipe) -> None:
    overrides = (
        "trainer.gpus=2",
        "trainer.micro_batch_size=6",
        "task._target_=points.Random",
        "model.dropout=0.5",
        *NOISY,
    )
    once, again = recipe(*overrides), recipe(*overrides, environ=OWN_SERVER)
    assert once.code == 0, once.err
    assert again.result()["weights_sha256"] == once.result()["weights_sha256"]
    assert again.result()["metrics"] == once.result()["metrics"]


def test_random_numbers_of_a_data_set_are_the_same_with_and_without_loader_workers(recipe: Recipe) -> None:
    runs = [recipe("trainer.gpus=2", *NOISY[:1], f"data.num_workers={count}") for count in (0, 1)]
    assert runs[0].result()["weights_sha256"] == runs[1].result()["weights_sha256"]


@pytest.mark.slow
def test_the_kind_of_data_set_does_not_matter(recipe: Recipe, done: Done) -> None:
    assert recipe("trainer.gpus=2", *ITEMS).result()["weights_sha256"] == done.result()["weights_sha256"]


def test_a_warm_start_begins_with_the_given_weights(recipe: Recipe, done: Done) -> None:
    folder = complete_checkpoints(done.run / "checkpoints")[0]
    for source in (folder / "model.safetensors", folder):
        warm = recipe("trainer.gpus=2", f"run.init_from={source}", "optimizer.lr=0", "trainer.max_steps=1")
        assert warm.code == 0, warm.err
        assert warm.result()["weights_sha256"] == done.result()["weights_sha256"]
    other = recipe("trainer.gpus=2", f"run.init_from={folder}", "model.hidden=9")
    assert other.code == 2
    assert other.err.startswith(f"ddpexp: run.init_from={folder} holds the weights of another model: ")
    assert other.err.count("\n") == 1


@pytest.mark.slow
def test_a_file_of_torch_save_starts_a_run_and_what_was_taken_is_recorded(recipe: Recipe, done: Done) -> None:
    state = load_file(complete_checkpoints(done.run / "checkpoints")[0] / "model.safetensors")
    torch.save({"state_dict": {f"module.{name}": value for name, value in state.items()}}, recipe.folder / "w.pth")
    source = f"run.init_from={recipe.folder}/w.pth"
    warm = recipe("trainer.gpus=2", source, "optimizer.lr=0", "trainer.max_steps=1")
    assert warm.code == 0, warm.err
    assert warm.result()["weights_sha256"] == done.result()["weights_sha256"]
    assert f"{len(state)} of {len(state)} tensors taken; without the prefix module. of all its names" in warm.out
    facts = json.loads((warm.run / "manifest.json").read_text())["init_from"]
    assert facts["weights"] == f"{recipe.folder}/w.pth"
    assert facts["models"]["model"]["taken"] == len(state)
    assert not list(warm.run.glob("*.safetensors"))


def test_a_task_without_metrics_has_its_loss_alone(recipe: Recipe) -> None:
    done = recipe("task._target_=points.Mutual")
    assert done.code == 0, done.err
    assert set(done.result()["metrics"]) == {"eval/loss"}


@pytest.mark.parametrize(
    ("target", "expected"),
    [("points.load_list", "not list"), ("points.load_nothing", "no samples for `eval`")],
)
def test_data_that_cannot_be_used_is_refused(recipe: Recipe, target: str, expected: str) -> None:
    done = recipe(f"data._target_={target}", "trainer.gpus=2")
    command_refused(done, f"data._target_={target}: {expected}", out=None)
    assert done.err.count("\n") == 1


@pytest.mark.parametrize(
    ("status", "code"),
    [(None, 1), (0, 1), (1, 1), (2, 1), (3, 3), (125, 125), (126, 1), (-9, 1), ("that was all", 1)],
)
def test_a_recipe_that_leaves_in_the_middle_has_failed_with_its_own_code_where_it_is_free(
    status: object, code: int
) -> None:
    assert _exit_code(SystemExit(status)) == code


def test_the_saved_weights_are_trained(done: Done) -> None:
    assert all(bool(torch.isfinite(tensor).all()) for tensor in weights(done).values())
    assert done.result()["metrics"]["eval/accuracy"] > 0.6


def test_a_schedule_of_ones_own_is_followed(recipe: Recipe) -> None:
    overrides = (
        "scheduler._target_=points.Stable",
        "scheduler.decay=0.5",
        "optimizer.lr=0.1",
        "trainer.log_every=1",
        "logger=tensorboard",
    )
    done = recipe(*overrides, "trainer.gpus=2")
    assert done.code == 0, done.err
    rates = [line["train/lr"] for line in done.metrics() if "train/lr" in line]
    assert rates == pytest.approx([0.05, 0.1, 0.1, 0.1, 0.1, 0.075, 0.05, 0.025])
    assert "points.Stable" in done.manifest()["inputs"]["code"]["targets"]
    again = recipe("trainer.max_steps=10", "trainer.epochs=null", *overrides, run=done.run)
    assert again.code == 0, again.err


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ("scheduler._target_=points.Net", "scheduler._target_=points.Net: factor(step, num_steps)"),
        ("scheduler._target_=points.Strange scheduler.value=nan", "scheduler._target_=points.Strange: returned nan"),
        (
            "scheduler._target_=points.Strange scheduler.value=fast",
            "scheduler._target_=points.Strange: returned 'fast'",
        ),
        ("scheduler._target_=points.Strange scheduler.rate=1", "points.Strange: 'value'"),
    ],
)
def test_a_schedule_that_cannot_be_followed_is_refused(
    recipe: Recipe, overrides: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "points", recipe.module())
    arguments = ["--config-dir", str(recipe.folder / "conf"), "recipe=points", *overrides.split()]
    made = compose(arguments)
    assert made is not None
    with refused(expected):
        build_schedule(parse(made.values), 8)


@pytest.mark.parametrize(
    ("how", "gpus"),
    [("breakpoint", 1), ("torch", 2), *(pytest.param(how, 1, marks=pytest.mark.slow) for how in ("set_trace", "Pdb"))],
)
def test_a_debugger_is_refused_with_its_place_and_what_works_instead(recipe: Recipe, how: str, gpus: int) -> None:
    done = recipe("task._target_=points.Looks", f"task.how={how}", f"trainer.gpus={gpus}")
    call = {
        "breakpoint": "breakpoint()",
        "set_trace": "pdb.set_trace()",
        "Pdb": "pdb.Pdb()",
        "torch": "torch.distributed.break",
    }[how]
    lines = (recipe.folder / "points.py").read_text().splitlines()
    line = next(number for number, text in enumerate(lines, start=1) if text.strip().startswith(call))
    assert done.code == 1
    assert (
        f"{recipe.folder}/points.py:{line} starts a debugger, and this worker has no terminal to type into. Use "
        "launcher=inline, where the command itself is the only worker" in done.err
    )
    assert "Traceback" not in done.err
    assert "Pdb" not in done.out


@pytest.mark.slow
def test_a_debugger_may_have_its_own_connection_and_breakpoints_may_be_ignored(recipe: Recipe) -> None:
    done = recipe("task._target_=points.Looks", "task.how=own", environ={"PYTHONBREAKPOINT": "0"})
    assert done.code == 0, done.err


def test_layers_that_torch_does_not_find_are_refused_with_what_finds_them(recipe: Recipe) -> None:
    done = recipe("~model.hidden", "~model.dropout", "model._target_=points.Listed")
    assert done.code == 2, done
    assert "torch.nn.ModuleList" in done.err
    assert not done.run.exists()


class _FullDisk(io.StringIO):
    def flush(self) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_log_on_a_full_disk_prints_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    log = logging.Logger("full")
    log.addHandler(_Lines(_FullDisk()))
    log.info("step %d", 1)
    assert capsys.readouterr().err == ""
    log.info("step %d", "one")
    assert "Logging error" in capsys.readouterr().err

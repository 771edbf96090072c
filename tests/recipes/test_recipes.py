"""Every shipped recipe on made data at two workers: a sweep ends in a table, a run resumes exactly, `check` passes."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
from safetensors.torch import save_file

from ddpexp.system.files import read_json
from examples.photos.draw import main as draw_photos
from examples.table.table import write as write_table
from recipes.mnist import LeNet
from recipes.segment import draw as draw_masks
from tests.conftest import Ddpexp

DRAWN = ("data.source=embedded", "data.embedded_train=160", "data.embedded_test=32")
FLOWERS = ("data.path=flowers.csv", "data.inputs=[length,width]", "data.targets=species", "model.width=8")
PHOTOS = ("data.root=photos", "data.size=32")
RECIPES: Mapping[str, tuple[str, ...]] = {
    "autoencoder": (*DRAWN, "model.width=4"),
    "cifar10": (*DRAWN, "model.widths=[4,8,8]"),
    "distill": (*DRAWN, "run.init_from=teacher.safetensors"),
    "finetune": (*PHOTOS, "model.backbone.width=4"),
    "gan": (*DRAWN, "model.width=4"),
    "imagenet": (*PHOTOS, "model=resnet18", "model.width=4", "data.mixup=0.2"),
    "imagenet_16": (*PHOTOS, "model.width=4", "model.layers=[1,1]", "data.size_from_epoch=[[0,16],[1,24]]"),
    "segment": (
        "data.root=shapes", "model.width=4", "data.transform.size=32", "data.eval_transform.size=32",
    ),
    "tabular": FLOWERS,
}  # fmt: skip
METRICS = {
    "autoencoder": {"eval/loss", "eval/mse", "eval/psnr", "eval/explained_variance"},
    **{name: {"eval/loss", "eval/accuracy"} for name in ("cifar10", "distill")},
    "gan": {"eval/loss", "eval/real_score", "eval/fake_score", "eval/frechet"},
    **{name: {"eval/loss", "eval/accuracy", "eval/top5"} for name in ("finetune", "imagenet", "imagenet_16")},
    "segment": {"eval/loss", "eval/pixel_accuracy", "eval/mean_iou", "eval/iou/0", "eval/iou/1", "eval/iou/2"},
    "tabular": {"validation/loss", "validation/accuracy", "validation/balanced_accuracy", "validation/f1"},
}
SHORT = (
    "trainer.gpus=2", "trainer.threads=1", "trainer.global_batch_size=8", "trainer.log_every=1", "logger=none",
    "scheduler=constant", "trainer.limit_eval_batches=2",
)  # fmt: skip


@pytest.fixture(scope="module")
def environ(warm_environ: dict[str, str]) -> dict[str, str]:
    """What recipes do is tested, not how fork servers start."""
    return warm_environ


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with data for all recipes."""
    folder = tmp_path_factory.mktemp("made")
    write_table(str(folder / "flowers.csv"))
    draw_photos(folder / "photos")
    draw_masks(folder / "shapes", train=40, val=8, side=40)
    save_file(LeNet().state_dict(), folder / "teacher.safetensors")
    return folder


@pytest.fixture
def command(ddpexp: Ddpexp, made: Path) -> Ddpexp:
    shutil.copytree(made, ddpexp.folder, dirs_exist_ok=True)
    return ddpexp


@pytest.mark.variants(1)
@pytest.mark.parametrize("name", RECIPES)
def test_a_sweep_ends_in_a_table_and_a_stopped_job_resumes_exactly(command: Ddpexp, name: str) -> None:
    typed = (f"recipe={name}", *RECIPES[name], *SHORT)
    done = command("-m", *typed, "trainer.max_steps=2,4", "hydra.sweep.dir=sweep", "sweep.slots=2")
    assert done.code == 0, done.err
    assert len((command.folder / "sweep/sweep.csv").read_text().splitlines()) == 3
    stopped, whole = (command.folder / f"sweep/{job}_trainer.max_steps={n}" for job, n in (("0000", 2), ("0001", 4)))
    resumed = command(*typed, "trainer.max_steps=4", f'run.dir="{stopped}"')
    assert resumed.code == 0, resumed.err
    assert "resumed after step 2 of 4" in resumed.out
    ends = [read_json(run / "result.json") for run in (stopped, whole)]
    assert ends[0]["weights_sha256"] == ends[1]["weights_sha256"]
    assert ends[0]["metrics"] == ends[1]["metrics"]
    assert ends[0]["metrics"].keys() == METRICS[name]


@pytest.mark.variants(1)
@pytest.mark.parametrize("name", RECIPES)
def test_a_check_finds_no_problem(command: Ddpexp, name: str) -> None:
    done = command("check", f"recipe={name}", *RECIPES[name], *SHORT)
    assert done.code == 0, done.out + done.err
    assert "no problem found" in done.out

"""Every kind of data, killed in the middle of an epoch: the weights of the undisturbed run, at 1, 2 and 4 workers."""

from __future__ import annotations

import csv
import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

from examples.photos.draw import main as draw
from examples.table.table import write
from tests.conftest import ROOT, Ddpexp

pytestmark = pytest.mark.slow
SHORT = (
    "trainer.reduction=exact", "trainer.global_batch_size=16", "trainer.micro_batch_size=4", "trainer.epochs=3",
    "trainer.checkpoint_every=3", "trainer.eval_every=0", "logger=none",
)  # fmt: skip
TABLE = ("--config-dir", str(ROOT / "examples/table/conf"), "recipe=table", *SHORT)
PHOTOS = ("--config-dir", str(ROOT / "examples/photos/conf"), "recipe=photos", "data.size=24", *SHORT)
CHANGES = ("data.mixup=0.2", "data.cutmix=1", "data.rand_augment=1", "data.color_jitter=[0.4,0.4,0.4,0.1]")
OWN = (
    "--config-dir", str(ROOT / "examples/transforms/conf"), "recipe=transforms", "data.weights=null", "data.folds=null",
    "data.fold=null", *SHORT, "trainer.max_steps=20", "trainer.epochs=null",
)  # fmt: skip
CROP = f"data.transform={{_target_: {__name__}.crop, size: 24}}"
GROUPS = ("data.validation_fraction=0", "data.folds=4", "data.fold=2", "data.group_by=garden")
IMAGES = (
    "data=hf",
    "data.path=photos",
    "data.inputs=image",
    "data.targets=label",
    "data.image_size=28",
    "data.channels=1",
)
COLUMNS = ("data.inputs=[length,width]", "data.targets=species", "data.standardize=true")
KINDS = {
    "folder of images, raw": (*PHOTOS, "data.cache=raw", *CHANGES),
    "folder of images, jpeg": (*PHOTOS, "data.cache=jpeg", *CHANGES),
    "folder of images, none": (*PHOTOS, "data.cache=none", *CHANGES),
    "folder of images, changed on the device": (*PHOTOS, *CHANGES, "data.augment_on=device"),
    "folder of images, transforms": (*PHOTOS, f"run.trust=[{__name__}]", CROP),
    "folder of images, transforms in loader workers": (*PHOTOS, f"run.trust=[{__name__}]", CROP, "data.num_workers=2"),
    "folder of images, a fold": (*PHOTOS, *CHANGES, "data.folds=4", "data.fold=1"),
    "folder of images, weights": (*PHOTOS, *CHANGES, "data.weights=weights.npy", "data.samples_per_epoch=100"),
    "csv": TABLE,
    "csv, a fold of groups": (*TABLE, *GROUPS),
    "csv, balanced": (*TABLE, "data.weights=balanced"),
    "npz": (*TABLE, "data.path=flowers.npz", "data.inputs=[x]", "data.targets=y"),
    "parquet": (*TABLE, "data.path=flowers.parquet"),
    "hf, csv": (*TABLE, "data=hf", "data.path=flowers.csv", *COLUMNS, "data.weights=balanced"),
    "hf, images": ("recipe=mnist", "model=linear", *IMAGES, *SHORT),
    "transforms": OWN,
    "transforms in loader workers": (*OWN, "data.num_workers=2"),
    "transforms, balanced, a fold": (*OWN, "data.weights=balanced", "data.folds=5", "data.fold=3"),
}  # fmt: skip
NEEDS = {"parquet": "pyarrow", "hf, csv": "datasets", "hf, images": "datasets"}


def crop(image: object, size: int) -> object:
    """A user's transform of a stored image: a random crop as torch's tensor."""
    import random

    import torch

    pixels = np.array(image)
    top, left = (random.randint(0, side - size) for side in pixels.shape[:2])
    return torch.from_numpy(pixels[top : top + size, left : left + size]).permute(2, 0, 1).float() / 255


@pytest.fixture
def environ(warm_environ: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """What training does is tested, not how fork servers start."""
    return {**warm_environ, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}


def make(folder: Path) -> None:
    """Write the data of all kinds."""
    draw(folder / "photos")
    np.save(folder / "weights.npy", np.arange(120) % 7)
    write(str(folder / "flowers.csv"))
    with (folder / "flowers.csv").open() as file:
        rows = list(csv.DictReader(file))
    kinds = sorted({row["species"] for row in rows})
    inputs = np.array([[float(row["length"]), float(row["width"])] for row in rows], np.float32)
    np.savez(folder / "flowers.npz", x=inputs, y=np.array([kinds.index(row["species"]) for row in rows]))
    if importlib.util.find_spec("pyarrow") is not None:
        from pyarrow import csv as reader
        from pyarrow import parquet

        parquet.write_table(reader.read_csv(folder / "flowers.csv"), folder / "flowers.parquet")


@pytest.mark.parametrize("kind", KINDS)
def test_killed_in_mid_epoch_at_1_2_and_4_workers_gives_the_weights_of_the_undisturbed_run(
    kind: str, ddpexp: Ddpexp
) -> None:
    if kind in NEEDS and importlib.util.find_spec(NEEDS[kind]) is None:
        pytest.skip(f"needs {NEEDS[kind]}")
    make(ddpexp.folder)
    undisturbed = ddpexp(*KINDS[kind], "trainer.gpus=2", "run.dir=undisturbed")
    assert undisturbed.code == 0, undisturbed.err
    state = json.loads((ddpexp.folder / "undisturbed/result.json").read_text())
    for before, after in ((1, 2), (2, 4), (4, 1)):
        folder = f"killed-{before}"
        step = state["step"] // 2 + before  # in the middle of an epoch
        fault = {"DDPEXP_FAULT": f"step:kill:{before - 1}:{step}"}
        killed = ddpexp(*KINDS[kind], f"trainer.gpus={before}", f"run.dir={folder}", environ=fault)
        assert "SIGKILL" in killed.err
        assert json.loads((ddpexp.folder / folder / "result.json").read_text())["status"] != "done"
        resumed = ddpexp(*KINDS[kind], f"trainer.gpus={after}", f"run.dir={folder}")
        assert resumed.code == 0, resumed.err
        ended = json.loads((ddpexp.folder / folder / "result.json").read_text())
        assert ended["weights_sha256"] == state["weights_sha256"]

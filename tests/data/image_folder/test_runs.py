"""Runs on a folder of photographs: killed in the middle of an epoch, at any number of workers, to the same weights."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from examples.photos.draw import main as draw
from tests.conftest import PATIENCE, ROOT, Ddpexp

SHORT = (
    "trainer.reduction=exact", "trainer.micro_batch_size=4", "trainer.max_steps=10", "trainer.checkpoint_every=3",
    "trainer.eval_every=0", "data.size=24", "data.mixup=0.2", "data.cutmix=1", "data.rand_augment=1",
)  # fmt: skip


@pytest.fixture
def environ(warm_environ: dict[str, str]) -> dict[str, str]:
    """What training does is tested, not how fork servers start."""
    return warm_environ


@pytest.mark.parametrize(
    "workers", [(1, 2), pytest.param((2, 4), marks=pytest.mark.slow), pytest.param((4, 1), marks=pytest.mark.slow)]
)
def test_killed_in_mid_epoch_and_resumed_gives_the_weights_of_the_undisturbed_run(
    workers: tuple[int, int], ddpexp: Ddpexp
) -> None:
    draw(ddpexp.folder / "photos")
    typed = ("--config-dir", str(ROOT / "examples/photos/conf"), "recipe=photos", *SHORT)
    undisturbed = ddpexp(*typed, "trainer.gpus=2", "run.dir=undisturbed")
    assert undisturbed.code == 0, undisturbed.err
    before, after = (f"trainer.gpus={number}" for number in workers)
    killed = ddpexp(*typed, before, "run.dir=killed", environ={"DDPEXP_FAULT": "step:kill:0:9"})
    assert "SIGKILL" in killed.err
    resumed = ddpexp(*typed, after, "run.dir=killed")
    assert resumed.code == 0, resumed.err
    hashes = [(ddpexp.folder / name / "result.json").read_text().split('"weights_sha256": ')[1][:66] for name in
              ("undisturbed", "killed")]  # fmt: skip
    assert hashes[0] == hashes[1]
    assert len(list(Path(ddpexp.folder, "photos/.ddpexp-cache").iterdir())) == 1


@pytest.mark.slow
def test_a_preparation_that_is_killed_is_resumed_and_gives_the_same_cache(tmp_path: Path) -> None:
    """At many moments, of which the first are before anything is read and the last after the end."""
    environ = {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path / "cache"), "PATH": "/usr/bin:/bin"}
    typed = ("--config-dir", str(ROOT / "examples/photos/conf"), "recipe=photos", "data.cache=raw", "--json")
    command = [sys.executable, "-m", "ddpexp", "data", *typed]

    def prepare(folder: Path, seconds: float) -> bool:
        with subprocess.Popen(command, cwd=folder, env=environ, stdout=subprocess.DEVNULL) as run:
            try:
                return run.wait(seconds) == 0
            except subprocess.TimeoutExpired:
                run.send_signal(signal.SIGKILL)
                return False

    for name in ("undisturbed", "killed"):
        draw(tmp_path / name / "photos")
    began = time.monotonic()
    assert prepare(tmp_path / "undisturbed", PATIENCE)
    seconds = time.monotonic() - began
    for number in range(12):
        prepare(tmp_path / "killed", seconds * number / 10)
    assert prepare(tmp_path / "killed", PATIENCE)
    contents = []
    for name in ("undisturbed", "killed"):
        [cache] = (tmp_path / name / "photos/.ddpexp-cache").glob("[!.]*")
        contents.append([(cache / file).read_bytes() for file in ("train.bin", "train-labels.npy", "eval.bin")])
    assert contents[0] == contents[1]

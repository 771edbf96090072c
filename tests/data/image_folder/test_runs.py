"""Runs on a folder of photographs: killed in the middle of an epoch, at any number of workers, to the same weights."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from examples.photos.draw import main as draw
from tests.conftest import PATIENCE, ROOT, Ddpexp, python_path

SHORT = (
    "trainer.reduction=exact", "trainer.micro_batch_size=4", "trainer.max_steps=10", "trainer.checkpoint_every=3",
    "trainer.eval_every=0", "data.size=24", "data.mixup=0.2", "data.cutmix=1", "data.rand_augment=1",
)  # fmt: skip


@pytest.fixture
def environ(warm_environ: dict[str, str]) -> dict[str, str]:
    """What training does is tested, not how fork servers start."""
    return warm_environ


@pytest.mark.slow
def test_killed_in_mid_epoch_and_resumed_gives_the_weights_of_the_undisturbed_run(ddpexp: Ddpexp) -> None:
    """The other kinds of data, caches and numbers of workers are in data/test_kills.py."""
    draw(ddpexp.folder / "photos")
    typed = ("--config-dir", str(ROOT / "examples/photos/conf"), "recipe=photos", *SHORT)
    undisturbed = ddpexp(*typed, "trainer.gpus=2", "run.dir=undisturbed")
    assert undisturbed.code == 0, undisturbed.err
    killed = ddpexp(*typed, "trainer.gpus=1", "run.dir=killed", environ={"DDPEXP_FAULT": "step:kill:0:9"})
    assert "SIGKILL" in killed.err
    resumed = ddpexp(*typed, "trainer.gpus=2", "run.dir=killed")
    assert resumed.code == 0, resumed.err
    hashes = [(ddpexp.folder / name / "result.json").read_text().split('"weights_sha256": ')[1][:66] for name in
              ("undisturbed", "killed")]  # fmt: skip
    assert hashes[0] == hashes[1]
    assert len(list(Path(ddpexp.folder, "photos/.ddpexp-cache").iterdir())) == 1


@pytest.mark.slow
def test_weights_are_the_same_whether_the_images_were_prepared_before_now_or_by_a_killed_command(
    ddpexp: Ddpexp,
) -> None:
    photos, caches = ddpexp.folder / "photos", ddpexp.folder / "photos/.ddpexp-cache"
    draw(photos)
    for number in range(3000):  # takes a second
        shutil.copy2(photos / f"train/circle/{number % 40:03}.jpg", photos / f"train/circle/more-{number:04}.jpg")
    typed = ("--config-dir", str(ROOT / "examples/photos/conf"), "recipe=photos", *SHORT, "data.cache=raw")

    def weights(name: str, workers: int) -> str:
        done = ddpexp(*typed, f"trainer.gpus={workers}", f"run.dir={name}")
        assert done.code == 0, done.err
        return str(json.loads((ddpexp.folder / name / "result.json").read_text())["weights_sha256"])

    prepared_now, prepared_before = weights("now", 2), weights("before", 1)
    assert prepared_now == prepared_before
    for number in range(20):
        shutil.rmtree(caches)
        killed, _ = ddpexp.start(*typed, f"trainer.gpus={1 + number % 2}", f"run.dir=killed-{number}")
        deadline = time.monotonic() + PATIENCE
        while len(list(caches.glob(".partial-*/train-*.done"))) <= 4 * number:
            assert time.monotonic() < deadline
            assert killed.poll() is None
        os.killpg(killed.pid, signal.SIGKILL)
        killed.communicate(timeout=PATIENCE)
        [partial] = caches.glob("*")
        assert partial.name.startswith(".partial-")
        pixels = os.stat(partial / "train.bin").st_ino
        assert weights(f"resumed-{number}", 2 - number % 2) == prepared_now
        [cache] = caches.glob("*")
        assert os.stat(cache / "train.bin").st_ino == pixels, "the file that was begun is the one that was finished"


def data_command(cache: str) -> list[str]:
    typed = ("--config-dir", str(ROOT / "examples/photos/conf"), "recipe=photos", f"data.cache={cache}", "--json")
    return [sys.executable, "-m", "ddpexp", "data", *typed]


def plain_environ(folder: Path) -> dict[str, str]:
    return {"PYTHONPATH": python_path(), "XDG_CACHE_HOME": str(folder / "cache"), "PATH": "/usr/bin:/bin"}


def content_of(folder: Path) -> dict[str, bytes]:
    """Return the files of the only cache of the photographs in a folder."""
    [cache] = (folder / "photos/.ddpexp-cache").iterdir()
    return {path.name: path.read_bytes() for path in cache.iterdir() if path.name != "identity.json"}


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["raw", "jpeg", "none"])
def test_a_preparation_that_is_killed_is_resumed_and_gives_the_same_cache(cache: str, tmp_path: Path) -> None:
    """At many moments, of which the first are before anything is read and the last after the end."""

    def prepare(folder: Path, seconds: float) -> bool:
        environ = plain_environ(tmp_path)
        with subprocess.Popen(data_command(cache), cwd=folder, env=environ, stdout=subprocess.DEVNULL) as run:
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
    assert content_of(tmp_path / "killed") == content_of(tmp_path / "undisturbed")


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["raw", "jpeg", "none"])
def test_of_commands_at_once_one_prepares_and_another_takes_over_when_it_is_killed(cache: str, tmp_path: Path) -> None:
    for name in ("undisturbed", "shared"):
        draw(tmp_path / name / "photos")
        for number in range(2000):  # takes seconds
            folder = tmp_path / name / "photos/train/circle"
            shutil.copy2(folder / f"{number % 40:03}.jpg", folder / f"more-{number:04}.jpg")

    def start(name: str) -> subprocess.Popen[str]:
        environ, pipe = plain_environ(tmp_path), subprocess.PIPE
        command = data_command(cache)
        return subprocess.Popen(
            command, cwd=tmp_path / name, env=environ, stdout=pipe, stderr=pipe, text=True, start_new_session=True
        )

    first, caches = start("shared"), tmp_path / "shared/photos/.ddpexp-cache"
    deadline = time.monotonic() + PATIENCE
    while not list(caches.glob(".partial-*/train-*.done")):
        assert time.monotonic() < deadline
        assert first.poll() is None
        time.sleep(0.002)
    assert not list(caches.glob("images-*"))
    first.send_signal(signal.SIGSTOP)  # holds the lock, and does nothing more
    others = [start("shared"), start("shared")]
    for other in others:
        assert other.stderr is not None
        assert "waiting for another command, which is preparing the same images" in other.stderr.readline()
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate(timeout=PATIENCE)
    found = [other.communicate(timeout=PATIENCE) for other in others]
    assert [other.returncode for other in others] == [0, 0], found
    assert json.loads(found[0][0]) == json.loads(found[1][0])
    alone = start("undisturbed")
    alone.communicate(timeout=PATIENCE)
    assert alone.returncode == 0
    assert content_of(tmp_path / "shared") == content_of(tmp_path / "undisturbed")

"""Folders of images are found, checked and decoded once; what is wrong is one sentence."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ddpexp.data.image_folder import pool
from ddpexp.data.image_folder import prepare as preparing
from ddpexp.data.image_folder.options import StoredSize
from ddpexp.data.image_folder.prepare import choose, prepare
from ddpexp.data.image_folder.scan import scan
from ddpexp.errors import RefusedError
from tests.data.image_folder.conftest import photo
from tests.refusals import refused


def refusal(root: Path | None, **options: Any) -> str:
    with pytest.raises(RefusedError) as caught:
        prepare(str(root) if root else None, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_description_has_facts_and_is_json(photos: Path) -> None:
    prepared = prepare(str(photos), size=16)
    assert prepared == json.loads(json.dumps(prepared))
    assert prepared["facts"] == {
        "classes": ["cat", "dog"], "num_classes": 2, "num_outputs": 2, "shape": [3, 16, 16],
        "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225],
    }  # fmt: skip
    assert (prepared["num_train"], prepared["num_test"], prepared["parts"]) == (12, 4, ["train", "eval"])
    assert "12 + 4 images of 2 classes" in prepared["note"]
    assert Path(prepared["folder"]).parent == photos / ".ddpexp-cache"


def test_images_beside_the_folders_of_classes_are_left_out_and_counted(photos: Path) -> None:
    before = prepare(str(photos))
    shutil.copy(next((photos / "val" / "cat").iterdir()), photos / "val" / "loose.jpg")
    after = prepare(str(photos))
    assert (after["hash"], after["num_test"]) == (before["hash"], before["num_test"])
    assert f"2 classes, from {photos} (1 beside the folders of classes left out), " in after["note"]


def test_second_start_decodes_nothing(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = prepare(str(photos))
    monkeypatch.setattr(pool, "handle", pytest.fail)
    assert prepare(str(photos)) == prepared


@pytest.mark.parametrize("change", ["content", "time", "new file", "removed file"])
def test_cache_of_other_files_is_not_used(change: str, photos: Path) -> None:
    before = prepare(str(photos))
    path = photos / "train" / "cat" / "0.jpg"
    if change == "content":
        photo(40, 30, 99).save(path)
    elif change == "time":
        os.utime(path, ns=(0, 0))
    elif change == "new file":
        shutil.copy(path, path.with_name("new.jpg"))
    else:
        path.unlink()
    after = prepare(str(photos))
    assert after["folder"] != before["folder"]
    assert (after["hash"] == before["hash"]) == (change == "time")


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ([], "is empty"),
        (["a.jpg"], "holds no folders, only a.jpg"),
        (["cat/a.jpg"], "holds one class, cat, but"),
        (["cat/a.jpg", "a.jpg", "b.png"], "holds one class, cat (and 2 images beside it, in no class), but"),
        (["cat/a.txt", "dog/a.jpg"], "no images of cat"),
        (["cat/.hidden.jpg", "dog/.hidden.jpg"], "holds no images (names ending in .jpg"),
        (["val/cat/a.jpg"], "holds val/ but no train/"),
        (["train/cat/a.jpg", "train/dog/a.jpg", "val/cow/a.jpg"], "classes that"),
        (["train/cat/a.jpg", "train/dog/a.jpg", "val/cat/a.jpg", "valid/cat/a.jpg"], "val/ and valid/"),
    ],
)
def test_folder_of_another_layout_is_one_sentence(layout: list[str], message: str, tmp_path: Path) -> None:
    for name in layout:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    assert message in refusal(tmp_path)


def test_folder_that_is_not_there_or_not_named_is_one_sentence(tmp_path: Path) -> None:
    assert "data.root is not set" in refusal(None)
    assert refusal(tmp_path / "nowhere").startswith(f"data.root={tmp_path}/nowhere ")


def test_image_that_is_a_broken_link_is_named(photos: Path) -> None:
    (photos / "train/cat/gone.jpg").symlink_to("nowhere.jpg")
    assert refusal(photos).startswith(f"data.root={photos}: {photos}/train/cat/gone.jpg ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eval_size": 20, "size": 32}, "data.eval_size=20 is smaller than data.size=32"),
        ({"scale": (0.5, 0.1)}, "data.scale=[0.5, 0.1]"),
        ({"color_jitter": (0.4,)}, "data.color_jitter=[0.4]"),
        ({"mean": (0.5, 0.5)}, "data.mean=[0.5, 0.5]"),
        ({"std": (0.0,)}, "data.std=[0.0]"),
        ({"cache_size": 0}, "data.cache_size=0"),
        ({"rand_augment_magnitude": 31}, "data.rand_augment_magnitude=31"),
        ({"augment_on": "gpu"}, "data.augment_on=gpu: use host or device"),
    ],
)
def test_invalid_option_is_named(options: dict[str, Any], message: str, photos: Path) -> None:
    assert message in refusal(photos, **options)


@pytest.mark.parametrize("cache", ["raw", "jpeg", "none"])
def test_broken_images_stop_by_name_or_are_skipped_and_listed(
    cache: str, photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = (photos / "train/cat/1.jpg").read_bytes()
    (photos / "train/cat/1.jpg").write_bytes(whole[: len(whole) - 200])
    (photos / "train/dog/2.jpg").write_bytes(b"<html>")
    text = refusal(photos, cache=cache)
    assert "2 broken images (train/cat/1.jpg: " in text
    assert "train/dog/2.jpg: it is no JPEG, PNG, WebP, BMP, GIF, TIFF or PNM image" in text
    prepared = prepare(str(photos), cache=cache, broken="skip")  # type: ignore[arg-type]
    assert "2 broken images" in capsys.readouterr().err
    assert prepared["num_train"] == 10
    labels = np.load(Path(prepared["folder"]) / "train-labels.npy")
    assert labels.tolist() == [0] * 5 + [1] * 5


def test_images_that_cannot_be_read_are_named_with_the_reason_and_all_are_listed(
    photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (photos / "train/cat/x.jpg").symlink_to("/proc/self/mem")  # nobody can read its beginning
    assert "1 broken image (train/cat/x.jpg: Input/output error)" in refusal(photos)
    for number in range(4):
        (photos / f"train/dog/{number}.jpg").write_bytes(b"no image")
    prepared = prepare(str(photos), broken="skip")
    listed = Path(prepared["folder"], "identity.json")
    assert f"and 2 more) left out of training and evaluation; all are in {listed}" in capsys.readouterr().err
    assert len(json.loads(listed.read_text())["broken"]) == 5


def flip_pixels(partial: Path) -> None:
    with open(partial / "train.bin", "r+b") as file:
        file.write(b"damage")


def flip_markers(partial: Path) -> None:
    for marker in partial.glob("*.done"):
        marker.write_text(marker.read_text().replace('"end": ', '"end": 1'))


def empty_markers(partial: Path) -> None:
    for marker, content in zip(sorted(partial.glob("*.done")), ("", "[1, 2]"), strict=True):
        marker.write_text(content)


@pytest.mark.parametrize(
    ("damage", "missing"), [(None, 2), (flip_pixels, 3), (flip_markers, 4), (empty_markers, 4)]
)  # fmt: skip
def test_killed_preparation_resumes_with_what_is_missing_or_damaged(
    damage: Callable[[Path], None] | None, missing: int, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparing, "_CHUNK", 4)
    handle = pool.handle
    decoded: list[str] = []
    most = 2

    def killed(chunk: dict[str, Any], *form: Any) -> dict[str, Any]:
        if chunk["work"] == "pixels":
            if len(decoded) == most:
                raise KeyboardInterrupt
            decoded.append(chunk["images"][0][0])
        return handle(chunk, *form)

    monkeypatch.setattr(pool, "handle", killed)
    with pytest.raises(KeyboardInterrupt):
        prepare(str(photos), cache="raw")
    first, decoded[:], most = list(decoded), [], 9
    if damage is not None:
        damage(next((photos / ".ddpexp-cache").glob(".partial-*")))
    prepared = prepare(str(photos), cache="raw")
    assert len(decoded) == missing
    assert len(set(first) & set(decoded)) == missing - 2
    monkeypatch.setattr(pool, "handle", handle)
    fresh = photos.with_name("fresh")
    shutil.copytree(photos, fresh, ignore=shutil.ignore_patterns(".ddpexp-cache"))
    again = prepare(str(fresh), cache="raw")
    for name in ("train.bin", "train-index.npy", "eval.bin", "train-labels.npy", "train-names.bin"):
        assert Path(prepared["folder"], name).read_bytes() == Path(again["folder"], name).read_bytes()


def test_full_disk_is_one_sentence_and_leaves_nothing(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert "No space left on device" in refusal(photos, cache="raw")
    assert not os.listdir(photos / ".ddpexp-cache")


@pytest.mark.parametrize("in_threads", [True, False])
def test_threads_and_processes_prepare_what_one_thread_would(in_threads: bool, photos: Path) -> None:
    alone = prepare(str(photos), cache="raw")
    before = Path(alone["folder"], "train.bin").read_bytes()
    shutil.rmtree(alone["folder"])
    folder = scan(str(photos))
    several = pool.Pool(2, StoredSize(*alone["stored"]), 3, in_threads)
    try:
        sizes = preparing._measure(folder, several, 3)
        place = photos.parent
        preparing._fill(place, folder, sizes, "raw", 3, several)
    finally:
        several.close()
    assert (place / "train.bin").read_bytes() == before


def test_process_that_dies_is_one_sentence(photos: Path) -> None:
    several = pool.Pool(2, StoredSize(32, 32), 3, in_threads=False)
    for process in several._processes:
        process.kill()
    with refused("data.root"):
        preparing._measure(scan(str(photos)), several, 3)


@pytest.mark.parametrize(
    ("raw", "files", "free", "memory", "mode"),
    [(70, 10, 100, 100, "raw"), (90, 10, 100, 1000, "jpeg"), (90, 10, 1000, 100, "jpeg"), (900, 90, 100, 1000, "none")],
)
def test_cache_is_chosen_by_disk_and_memory(raw: int, files: int, free: int, memory: int, mode: str) -> None:
    assert choose(raw, files, free, memory)[0] == mode


def test_smaller_images_that_would_fit_into_memory_are_suggested(
    photos: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparing, "_memory", lambda: 60_000)
    assert prepare(str(photos), size=21)["cache"] == "jpeg"
    assert "; with data.cache_size=24 the pixels would take 36.9 kB, and fit" in capsys.readouterr().out
    assert prepare(str(photos), size=21, cache_size=24)["cache"] == "raw"


def test_one_folder_of_classes_has_no_evaluation_set(photos: Path) -> None:
    prepared = prepare(str(photos / "train"))
    assert (prepared["num_train"], prepared["num_test"], prepared["parts"]) == (12, 0, ["train"])

"""A cache that is complete or not there: damaged, raced for, in the way of a link, on a full or read-only disk."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ddpexp.data import cache, npy
from ddpexp.data.published_files import PublishedFile
from ddpexp.data.user_cache import user_cache
from tests.conftest import PATIENCE, ROOT
from tests.data.conftest import TRAIN_LABELS, Server, Small, prepare, refusal, tree

pytestmark = pytest.mark.usefixtures("home")


def test_relative_cache_home_is_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "somewhere")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_cache() == tmp_path / ".cache" / "ddpexp"


@pytest.mark.parametrize("damage", ["truncated array", "no array", "no identity", "torn identity", "other format"])
def test_damaged_cache_is_built_again(damage: str, root: Path, small: Small) -> None:
    folder = Path(prepare(root, "files")["folder"])
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    array, identity = folder / "train-images.npy", folder / "identity.json"
    if damage == "truncated array":
        os.truncate(array, 100)
    elif damage == "no array":
        array.unlink()
    elif damage == "no identity":
        identity.unlink()
    elif damage == "torn identity":
        identity.write_bytes(whole["identity.json"][:50])
    else:
        identity.write_text(json.dumps(json.loads(identity.read_text()) | {"format": 0}))
    assert prepare(root, "files")["folder"] == str(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == whole
    assert os.listdir(folder.parent) == [folder.name]


def test_racing_processes_leave_one_complete_cache(real: Path) -> None:
    code = (
        "import json, sys, time; from ddpexp.data.mnist.prepare import prepare; "
        "time.sleep(max(0, float(sys.argv[2]) - time.time())); "
        "print(json.dumps(prepare(sys.argv[1], 'files')))"
    )
    command = [sys.executable, "-c", code, str(real), str(time.time() + 0.5)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) for _ in range(3)]
    identities = [json.loads(process.communicate(timeout=PATIENCE)[0]) for process in running]
    assert identities[0] == identities[1] == identities[2]
    folder = Path(identities[0]["folder"])
    assert os.listdir(folder.parent) == [folder.name]
    assert np.load(folder / "train-images.npy", mmap_mode="r").shape == (60_000, 28, 28)


def test_cache_of_a_faster_process_is_kept(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    move_in = cache._move_in
    first: list[int] = []

    def late(whole: Path, folder: Path, temp: Path) -> None:
        shutil.copytree(whole, folder)
        first.append(folder.stat().st_ino)
        move_in(whole, folder, temp)

    monkeypatch.setattr(cache, "_move_in", late)
    folder = Path(prepare(root, "files")["folder"])
    assert [folder.stat().st_ino] == first
    assert os.listdir(folder.parent) == [folder.name]


def test_old_leftovers_of_killed_processes_are_cleared_and_young_ones_kept(root: Path) -> None:
    caches = root / ".ddpexp-cache"
    for name in (".tmp-old", ".tmp-young", "mine"):
        (caches / name).mkdir(parents=True)
        (caches / name / "part.npy").write_bytes(b"part")
    for name in (".tmp-old", "mine"):
        os.utime(caches / name, (time.time() - 4000,) * 2)
    folder = Path(prepare(root, "files")["folder"])
    assert set(os.listdir(caches)) == {folder.name, ".tmp-young", "mine"}


def test_link_in_place_of_the_cache_is_replaced_and_its_target_left_alone(root: Path, tmp_path: Path) -> None:
    folder = Path(prepare(root, "files")["folder"])
    elsewhere = tmp_path / "elsewhere"
    folder.rename(elsewhere)
    before = tree(elsewhere)
    (elsewhere / "precious").touch()
    folder.symlink_to(elsewhere)
    assert prepare(root, "files")["folder"] == str(folder)
    assert not folder.is_symlink()
    assert tree(elsewhere) == before | {"precious"}


def test_link_in_place_of_the_folder_of_caches_is_refused(root: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (root / ".ddpexp-cache").symlink_to(tmp_path / "elsewhere")
    assert f"{root / '.ddpexp-cache'} is a link or a file" in refusal(root, "files")
    assert not tree(tmp_path / "elsewhere")


def test_link_in_place_of_a_download_is_replaced_not_followed(small: Small, server: Server, tmp_path: Path) -> None:
    server.answers |= small.packed
    root = tmp_path / "new"
    root.mkdir()
    (root / f"{TRAIN_LABELS}.gz").symlink_to(tmp_path / "target")
    prepare(root, "download", server)
    assert not (tmp_path / "target").exists()
    assert not (root / f"{TRAIN_LABELS}.gz").is_symlink()


def fail_below(folder: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every creation below a folder fail, as on a full or read-only disk (root may write anywhere)."""
    for owner, name in ((os, "mkdir"), (cache, "write_file"), (npy, "write_file")):
        real = getattr(owner, name)

        def failing(path: Any, *rest: Any, real: Callable[..., Any] = real, **more: Any) -> Any:
            if Path(path).is_relative_to(folder):
                raise OSError(number, os.strerror(number), str(path))
            return real(path, *rest, **more)

        monkeypatch.setattr(owner, name, failing)


@pytest.mark.parametrize("number", [13, 28, 30])  # permission denied, disk full, read-only
def test_cache_goes_to_the_user_where_the_data_folder_cannot_be_written(
    number: int, root: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_below(root, number, monkeypatch)
    identity = prepare(root, "files")
    assert Path(identity["folder"]).parent.parent == home
    assert home.stat().st_mode & 0o777 == 0o700
    assert Path(identity["folder"]).stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(PublishedFile, "read", pytest.fail)
    assert prepare(root, "files") == identity


def test_cache_of_one_folder_does_not_answer_for_another(
    root: Path, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_below(root, 30, monkeypatch)
    prepare(root, "files")
    (tmp_path / "other").mkdir()
    assert "holds 0 of 4 files" in refusal(tmp_path / "other", "files")
    assert prepare(tmp_path / "other", "auto")["note"] == f"MNIST, 20 + 10 images, from files in {root}"


def test_download_goes_to_the_user_where_the_data_folder_cannot_be_written(
    small: Small, server: Server, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.answers |= small.packed
    (tmp_path / "data").mkdir()
    fail_below(tmp_path / "data", 30, monkeypatch)
    identity = prepare(tmp_path / "data", "download", server)
    assert identity["note"].endswith(f"downloaded to {home}")
    shutil.rmtree(identity["folder"])
    assert prepare(tmp_path / "data", "auto", server)["name"] == "mnist"
    assert len(server.requests) == 4


def test_drawn_digits_without_a_writable_cache_are_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_below(home.parent, 13, monkeypatch)
    assert f"{home}: Permission denied" in refusal(None, "embedded")


def test_disk_that_is_full_everywhere_is_refused(root: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_below(root.parent, 28, monkeypatch)
    text = refusal(root, "files")
    assert re.search(
        rf"{root}: No space left on device \(\S+ .B of .+ free .+\); {home}: No space left on device \(", text
    )
    assert "set XDG_CACHE_HOME" in text


def test_full_disk_half_way_leaves_nothing(root: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = npy.write_file

    def failing(path: Path, *parts: bytes | memoryview) -> None:
        if path.name == "test-images.npy":
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device")
        write(path, *parts)

    monkeypatch.setattr(npy, "write_file", failing)
    assert "No space left on device" in refusal(root, "files")
    assert not tree(root / ".ddpexp-cache") | tree(home / ".ddpexp-cache")


def test_the_record_of_a_cache_holds_no_secret_when_it_is_made_and_when_it_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", "q5zk-planted")

    def fill(folder: Path) -> dict[str, Any]:
        npy.write_file(folder / "data", b"q5zk-planted")
        return {"classes": ["cat", "q5zk-planted"], "num": 2}

    made = cache.make_cache([tmp_path], "mine-1", fill)
    found = cache.make_cache([tmp_path], "mine-1", fill)
    assert made.record == found.record
    assert made.record["classes"] == ["cat", "${MY_TOKEN}"]
    cache.update_cache(found, {"root": "/data/q5zk-planted"})
    assert "q5zk-planted" not in (made.folder / "identity.json").read_text()
    assert (made.folder / "data").read_bytes() == b"q5zk-planted", "the user's data stay as they are"

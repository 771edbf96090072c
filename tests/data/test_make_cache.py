"""Preparations that take minutes: resumed when killed, done once at a time, and never used half made."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddpexp.data import cache
from ddpexp.data.npy import write_file
from tests.conftest import PATIENCE
from tests.refusals import refused

pytestmark = pytest.mark.usefixtures("home")


class Filling:
    """A preparation of three parts that counts what it writes, and can be disturbed before a part."""

    def __init__(self, disturb: Callable[[int], None] = lambda part: None) -> None:
        self.disturb = disturb
        self.written: list[int] = []

    def __call__(self, folder: Path) -> dict[str, Any]:
        for part in range(3):
            if not (folder / f"{part}.bin").exists():
                self.disturb(part)
                write_file(folder / f"{part}.bin", bytes([part]) * 10)
                self.written.append(part)
        return {"num_train": 3}


def killed(part: int) -> None:
    if part == 2:
        raise KeyboardInterrupt


def test_killed_preparation_is_resumed_and_only_complete_ones_are_used(tmp_path: Path) -> None:
    base = tmp_path / "data"
    with pytest.raises(KeyboardInterrupt):
        cache.make_cache([base], "photos", Filling(killed))
    assert cache.read_cache(base / cache.CACHES / "photos") is None
    filling = Filling()
    finished = cache.make_cache([base], "photos", filling)
    assert filling.written == [2]
    assert finished.record["num_train"] == 3
    assert finished.record["sizes"] == {"0.bin": 10, "1.bin": 10, "2.bin": 10}
    assert os.listdir(finished.folder.parent) == ["photos"]
    assert set(os.listdir(finished.folder)) == {"0.bin", "1.bin", "2.bin", "identity.json"}
    again = Filling()
    assert cache.make_cache([base], "photos", again) == finished
    assert again.written == []


def test_a_cache_that_comes_before_the_lock_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another command renames its folder after this one has looked for the cache, and before it makes a folder."""
    read, other, mine = cache.read_cache, Filling(), Filling()
    looks = iter([None, None])

    def late(folder: Path) -> cache.Cache | None:
        if next(looks, "done") is None:
            return None
        return read(folder)

    made = cache.make_cache([tmp_path], "photos", other)
    monkeypatch.setattr(cache, "read_cache", late)
    assert cache.make_cache([tmp_path], "photos", mine) == made
    assert (other.written, mine.written) == ([0, 1, 2], [])
    assert os.listdir(made.folder.parent) == ["photos"]


def test_two_preparations_at_once_do_the_work_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    fillings, entered = [Filling(), Filling()], threading.Event()

    def disturb(part: int) -> None:
        entered.set()
        time.sleep(0.1)

    fillings[0].disturb = fillings[1].disturb = disturb
    found: list[cache.Cache] = []
    threads = [
        threading.Thread(target=lambda filling=filling: found.append(cache.make_cache([tmp_path], "photos", filling)))
        for filling in fillings
    ]
    threads[0].start()
    assert entered.wait(PATIENCE)
    threads[1].start()
    for thread in threads:
        thread.join(PATIENCE)
    assert found[0] == found[1]
    assert (fillings[0].written, fillings[1].written) == ([0, 1, 2], [])
    assert "waiting for another command, which is preparing the same data" in capfd.readouterr().err


def test_a_preparation_that_begins_a_moment_before_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mkdir, begun, may_end = os.mkdir, threading.Event(), threading.Event()

    def wait(part: int) -> None:
        if part == 1:
            begun.set()
            may_end.wait(PATIENCE)

    first, second = Filling(wait), Filling()
    other = threading.Thread(target=cache.make_cache, args=([tmp_path], "photos", first))

    def late(path: str | Path, mode: int = 0o777) -> None:
        if Path(path).name == ".partial-photos" and threading.current_thread() is not other and not other.ident:
            other.start()
            assert begun.wait(PATIENCE)
            threading.Timer(0.1, may_end.set).start()
        mkdir(path, mode)

    monkeypatch.setattr(os, "mkdir", late)
    finished = cache.make_cache([tmp_path], "photos", second)
    other.join(PATIENCE)
    assert (first.written, second.written) == ([0, 1, 2], [])
    assert finished.record["sizes"] == {"0.bin": 10, "1.bin": 10, "2.bin": 10}


def test_full_disk_in_the_middle_is_one_sentence_and_leaves_nothing(tmp_path: Path, home: Path) -> None:
    def full(part: int) -> None:
        if part == 1:
            raise OSError(28, os.strerror(28))

    with refused("space") as caught:
        cache.make_cache([tmp_path / "data", home], "photos", Filling(full), space="40 GB")
    assert "\n" not in str(caught.value)
    assert not os.listdir(tmp_path / "data" / cache.CACHES) + os.listdir(home / cache.CACHES)


def test_data_folder_that_cannot_be_written_leaves_the_user_cache(tmp_path: Path, home: Path) -> None:
    (tmp_path / "data").write_bytes(b"")  # a file where a folder should be
    assert cache.make_cache([tmp_path / "data", home], "photos", Filling()).folder.is_relative_to(home)


def test_damaged_cache_and_what_is_in_the_way_are_replaced(tmp_path: Path) -> None:
    finished = cache.make_cache([tmp_path], "photos", Filling())
    os.truncate(finished.folder / "1.bin", 3)
    (finished.folder.parent / ".partial-photos").write_bytes(b"")
    filling = Filling()
    assert cache.make_cache([tmp_path], "photos", filling).folder == finished.folder
    assert filling.written == [0, 1, 2]
    assert os.listdir(finished.folder.parent) == ["photos"]


def test_abandoned_partial_folder_is_removed_by_a_later_preparation(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        cache.make_cache([tmp_path], "old", Filling(killed))
    lock = tmp_path / cache.CACHES / ".partial-old" / ".lock"
    os.utime(lock, (time.time() - 8 * 24 * 3600,) * 2)
    finished = cache.make_cache([tmp_path], "new", Filling())
    assert os.listdir(finished.folder.parent) == ["new"]


def test_name_of_a_cache_depends_on_all_of_its_identity() -> None:
    identity = {"files": [["a.jpg", 10, 123]], "size": 256}
    name = cache.cache_name("photos", identity)
    assert name == cache.cache_name("photos", dict(reversed(identity.items())))
    assert name != cache.cache_name("photos", {**identity, "size": 257})


def modes(folder: Path) -> set[int]:
    return {path.stat().st_mode & 0o777 for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("file", "folder", "below", "base", "expected"),
    [
        (0o644, 0o755, 0o755, 0o755, 0o644),
        (0o666, 0o777, 0o777, 0o777, 0o644),
        (0o640, 0o755, 0o755, 0o755, 0o640),
        (0o600, 0o755, 0o755, 0o755, 0o600),
        (0o400, 0o755, 0o755, 0o755, 0o600),
        (0o604, 0o755, 0o755, 0o755, 0o604),
        (0o644, 0o700, 0o755, 0o755, 0o600),
        (0o644, 0o755, 0o750, 0o755, 0o640),
        (0o644, 0o755, 0o755, 0o700, 0o600),
        (0o644, 0o744, 0o755, 0o755, 0o600),  # nobody else may enter it
    ],
)
def test_who_may_not_read_the_data_may_not_read_its_cache(
    file: int, folder: int, below: int, base: int, expected: int, tmp_path: Path
) -> None:
    place = tmp_path / "data" / "below" / "folder"
    place.mkdir(parents=True)
    sources = [place / "a.txt", tmp_path / "data" / "b.txt"]
    for source in sources:
        source.write_text("text")
    sources[0].chmod(file)
    for path, mode in ((place, folder), (place.parent, below), (tmp_path / "data", base)):
        path.chmod(mode)
    made = cache.make_cache([tmp_path / "data"], "photos", Filling(), sources=list(map(str, sources)))
    assert modes(made.folder) == {expected}
    assert made.folder.stat().st_mode & 0o777 == expected | 0o100 | (expected & 0o044) >> 2
    place.chmod(0o755)


def test_cache_of_another_group_is_not_for_the_group_of_the_data(tmp_path: Path) -> None:
    source = tmp_path / "a.txt"
    source.write_text("text")
    source.chmod(0o640)
    try:
        os.chown(source, -1, os.getgid() + 1)
    except PermissionError:
        pytest.skip("only root can give a file to a group that it is not in")
    assert modes(cache.make_cache([tmp_path], "photos", Filling(), sources=[source]).folder) == {0o600}


def test_cache_that_is_being_written_is_private(tmp_path: Path) -> None:
    seen = []

    def fill(folder: Path) -> dict[str, Any]:
        seen.append(folder.stat().st_mode & 0o777)
        return {}

    cache.make_cache([tmp_path], "photos", fill)
    assert seen == [0o700]

"""Damaged caches of every kind are named, are never trained on, and are made again."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ddpexp.data import cache, hashes
from ddpexp.data.arrays.prepare import prepare as prepare_arrays
from ddpexp.data.arrays.statistics import with_statistics
from ddpexp.data.cifar10.prepare import prepare as prepare_cifar10
from ddpexp.data.image_folder.prepare import prepare as prepare_images
from ddpexp.data.mnist.prepare import prepare as prepare_mnist
from ddpexp.data.tar_shards import remote
from ddpexp.data.tar_shards.prepare import prepare as prepare_shards
from ddpexp.data.text.prepare import prepare as prepare_text
from ddpexp.data.user_cache import user_cache
from tests.data.tar_shards.test_tar_shards import write as write_shards

pytestmark = pytest.mark.usefixtures("home")
DIVISION = {"validation_fraction": 0.2, "fold": None, "folds": None, "stratify": None, "group_by": None}


def text(folder: Path) -> dict[str, Any]:
    path = folder / "a.txt"
    if not path.exists():
        path.write_text("".join(f"line {number} of a text\n" for number in range(500)))
    return prepare_text(str(path), 16, documents="line")


def table(folder: Path) -> dict[str, Any]:
    path = folder / "a.csv"
    if not path.exists():
        rows = "".join(f"{number},{number % 7},{'ab'[number % 2]}\n" for number in range(200))
        path.write_text(f"one,two,kind\n{rows}")
    return prepare_arrays(str(path), None, "kind")


def statistics(folder: Path) -> dict[str, Any]:
    return with_statistics(table(folder), DIVISION)


def arrays(folder: Path) -> dict[str, Any]:
    path = folder / "a.npz"
    if not path.exists():
        np.savez(path, x=np.arange(600.0).reshape(200, 3), y=np.arange(200) % 4)
    return prepare_arrays(str(path), "x", "y")


def photos(folder: Path, mode: str) -> dict[str, Any]:
    for part in ("train", "val"):
        for name in ("cat", "dog"):
            place = folder / part / name
            if not place.exists():
                place.mkdir(parents=True)
                for number in range(3):
                    Image.effect_noise((40, 30), 50 + number).convert("RGB").save(place / f"{number}.jpg")
    return prepare_images(str(folder), cache=mode)  # type: ignore[arg-type]


def shards(folder: Path) -> dict[str, Any]:
    if not list(folder.glob("*.tar")):
        write_shards(folder)
    return prepare_shards(str(folder / "train-*.tar"), None, ["cls", "txt"])


Prepare = Callable[[Path], dict[str, Any]]
KINDS: dict[str, Prepare] = {
    "text": text,
    "table": table,
    "statistics": statistics,
    "arrays": arrays,
    "raw images": lambda folder: photos(folder / "photos", "raw"),
    "jpeg images": lambda folder: photos(folder / "photos", "jpeg"),
    "names of images": lambda folder: photos(folder / "photos", "none"),
    "tar shards": shards,
    "drawn digits": lambda folder: prepare_mnist(None, "embedded", embedded_train=50, embedded_test=20),
    "drawn pictures": lambda folder: prepare_cifar10(None, "embedded", embedded_train=20, embedded_test=10),
}


def caches() -> list[Path]:
    """Return the folders of the caches that the data of this test has."""
    top = user_cache().parent.parent
    return sorted(path.parent for path in top.rglob("identity.json") if path.parent.parent.name == cache.CACHES)


def contents() -> dict[str, bytes]:
    return {str(path): path.read_bytes() for folder in caches() for path in folder.iterdir()}


def flip(path: Path, random: random.Random) -> None:
    """Change one bit, and nothing that a listing of the folder shows."""
    content, status = bytearray(path.read_bytes()), path.stat()
    content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    with open(path, "r+b") as file:
        file.write(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def cut(path: Path, random: random.Random) -> None:
    os.truncate(path, random.randrange(path.stat().st_size))


def zeros(path: Path, random: random.Random) -> None:
    """Leave what a disk leaves that lost a block."""
    path.write_bytes(bytes(path.stat().st_size))


def swap(path: Path, random: random.Random) -> None:
    """Put another file of the same size in its place."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.with_name("other").write_bytes(content)
    os.replace(path.with_name("other"), path)


def link(path: Path, random: random.Random) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def pipe(path: Path, random: random.Random) -> None:
    path.unlink()
    os.mkfifo(path)


def folder(path: Path, random: random.Random) -> None:
    path.unlink()
    path.mkdir()


DAMAGES = (flip, cut, zeros, swap, link, pipe, folder)


def is_damaged(before: dict[str, bytes]) -> bool:
    """Return whether a damage has changed something: a file of zeros stays what it is."""
    return any(not Path(path).is_file() or Path(path).read_bytes() != content for path, content in before.items())


def damage_and_prepare(kind: str, number: int, place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    prepare, draw = KINDS[kind], random.Random(f"{kind} {number}")
    described, before = prepare(place), contents()
    files = sorted(path for path in before if Path(path).stat().st_size)
    damage, path = DAMAGES[number % len(DAMAGES)], Path(draw.choice(files))
    damage(path, draw)
    if not is_damaged(before):
        return
    capfd.readouterr()
    cache._warn.cache_clear()  # as in a new process
    assert prepare(place) == described, (damage.__name__, path)
    assert contents() == before, (damage.__name__, path)
    shown = capfd.readouterr().err
    assert str(path) in shown, (damage.__name__, path, shown)
    assert prepare(place) == described
    assert not capfd.readouterr().err


@pytest.mark.fault(73)
@pytest.mark.parametrize("kind", KINDS)
def test_damaged_cache_is_named_and_made_again(
    kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hashes, "CHUNK", 64)
    for number in range(len(DAMAGES)):
        damage_and_prepare(kind, number, tmp_path, capfd)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_fifty_damages_of_each_kind(kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for number in range(len(DAMAGES), len(DAMAGES) + 50):
        damage_and_prepare(kind, number, tmp_path, capfd)


def test_caches_that_were_exchanged_are_made_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    places = tmp_path / "one", tmp_path / "two"
    for place in places:
        place.mkdir()
    described = [text(place) for place in places]
    folders = [Path(one["folder"]) for one in described]
    shutil.move(folders[0], tmp_path / "third")
    shutil.move(folders[1], folders[0])
    shutil.move(tmp_path / "third", folders[1])
    assert [text(place) for place in places] == described
    shown = capfd.readouterr().err
    assert all(f"{folder}/identity.json is damaged" in shown for folder in folders)


def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Collect the folders whose files are read to verify them, as a new process would."""
    found: list[Path] = []
    real = hashes._hashed

    def counted(folder: Path, ends: Any) -> Any:
        found.append(folder)
        return real(folder, ends)

    monkeypatch.setattr(hashes, "_hashed", counted)
    hashes._damage.cache_clear()
    return found


def test_files_are_read_once_for_each_start_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(text(tmp_path)["folder"])
    read = reads(monkeypatch)
    text(tmp_path)
    assert read == [], "what has just been written is not read again"
    monkeypatch.setattr(hashes, "boot_id", lambda: "after a reboot")
    for expected in ([folder], []):
        read = reads(monkeypatch)
        text(tmp_path)
        assert read == expected
    os.utime(folder / "tokens.bin")
    read = reads(monkeypatch)
    text(tmp_path)
    assert read == [folder], "a file that was touched is read again"


def test_files_are_read_at_every_start_where_nothing_can_be_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(text(tmp_path)["folder"])
    shutil.rmtree(user_cache())
    user_cache().parent.mkdir(exist_ok=True)
    user_cache().write_text("in the way")
    for _ in range(2):
        read = reads(monkeypatch)
        text(tmp_path)
        text(tmp_path)
        assert read == [folder]


def test_notes_of_long_ago_are_removed_once_a_day(tmp_path: Path) -> None:
    text(tmp_path)
    notes = user_cache() / "verified"
    old = notes / "old"
    old.touch()
    os.utime(old, (1e9, 1e9))
    table(tmp_path)
    assert old.exists(), "thousands of notes are not looked at for each new one"
    os.utime(notes / hashes._SWEPT, (1e9, 1e9))
    (tmp_path / "other").mkdir()
    table(tmp_path / "other")
    assert not old.exists()
    assert len(list(notes.iterdir())) == 4


def test_damaged_cache_that_cannot_be_replaced_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = Path(text(tmp_path)["folder"])
    flip(folder / "tokens.bin", random.Random(0))
    rename = os.rename

    def refusing(source: Any, target: Any) -> None:
        if Path(target).is_relative_to(tmp_path / ".ddpexp-cache"):
            raise OSError(30, "Read-only file system", str(target))
        rename(source, target)

    monkeypatch.setattr(os, "rename", refusing)
    assert Path(text(tmp_path)["folder"]).is_relative_to(user_cache())
    assert f"{folder}/tokens.bin is damaged" in capfd.readouterr().err


def test_large_files_are_hashed_by_several_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = np.random.default_rng(0).bytes(1000)
    (tmp_path / "a.bin").write_bytes(content)
    (tmp_path / "empty").touch()
    monkeypatch.setattr(hashes, "CHUNK", 64)
    monkeypatch.setattr(hashes, "_BLOCK", 10)
    sizes = {"a.bin": 1000, "empty": 0}
    ends = [*range(64, 1000, 64), 1000]
    chunks = [(end, hashes.hash_of(content[max(0, end - 1) // 64 * 64 : end])) for end in ends]
    expected = {"a.bin": chunks, "empty": []}
    for limit in (0, 1 << 30):
        monkeypatch.setattr(hashes, "_IN_THREADS", limit)
        assert hashes.chunks_of(tmp_path, sizes) == expected


@pytest.mark.parametrize("damage", [flip, zeros, swap])
def test_damaged_part_of_a_remote_shard_is_fetched_again(
    damage: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("fsspec")
    monkeypatch.setattr(remote, "PART", 4096)
    data = (write_shards(tmp_path, shards=1) / "train-000.tar").read_bytes()
    [shard] = remote.find("data.path", [(tmp_path / "train-000.tar").as_uri()], 1 << 20)
    assert shard.read(0, 10) == data[:10]
    part = remote.folder() / f"{shard.version}-0"
    for path in (part, remote._sum(part.name)):
        damage(path, random.Random(1))
        assert shard.read(0, 4096) == data[:4096]
        assert part.read_bytes() == data[:4096]
    assert f"{part} is damaged" in capfd.readouterr().err
    damage(part, random.Random(1))
    with hashes.reading_again() as verified:
        shard.verify()
    assert verified == [(remote.folder(), 0)]
    assert not part.exists()

"""Tar shards: an index that finds every file, its order in blocks, and one sentence for what is wrong."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from ddpexp.data.batch_plan import plan_batches
from ddpexp.data.batches import TrainBatches
from ddpexp.data.tar_shards.dataset import BlockOrder, load
from ddpexp.data.tar_shards.prepare import prepare
from ddpexp.errors import DdpexpError
from tests.orders import hold_out
from tests.refusals import refused


def encoded(number: int) -> dict[str, bytes]:
    image, array = io.BytesIO(), io.BytesIO()
    Image.new("RGB", (6, 4), (number, 7, 9)).save(image, "PNG")
    np.save(array, np.full(3, number))
    return {
        "png": image.getvalue(), "cls": str(number).encode(), "npy": array.getvalue(),
        "txt": f"text {number}".encode(), "json": b'{"number": %d}' % number,
    }  # fmt: skip


def write(folder: Path, shards: int = 3, samples: int = 10, only: Any = None) -> Path:
    for shard in range(shards):
        with tarfile.open(folder / f"train-{shard:03}.tar", "w") as archive:
            for number in range(shard * samples, (shard + 1) * samples):
                for extension, data in encoded(number).items():
                    if only is None or extension in only:
                        member = tarfile.TarInfo(f"part/{number:04}.{extension}")
                        member.size = len(data)
                        archive.addfile(member, io.BytesIO(data))
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def test_every_file_of_every_sample_is_found_and_decoded(tmp_path: Path) -> None:
    files = ["jpg;png", "cls", "npy", "txt", "json"]
    prepared = prepare(str(write(tmp_path) / "train-*.tar"), str(tmp_path / "train-001.tar"), files)
    assert prepared["note"].endswith(f"; 1 file of data.eval_path, such as {tmp_path}/train-001.tar, trained on too")
    assert (prepared["num_train"], prepared["num_test"]) == (30, 10)
    splits = load(prepared)
    for number in (29, 0, 17):
        image, label, array, text, values = splits.train[number]
        assert (image.shape, image.dtype, round(float(image[0, 0, 0]) * 255)) == ((3, 4, 6), torch.float32, number)
        assert (label, text, values) == (number, f"text {number}", {"number": number})
        assert image.is_contiguous()
        assert array.tolist() == [number] * 3
    assert splits.evals["eval"][0][1] == 10
    small = load(prepare(str(tmp_path / "train-*.tar"), None, files, image_size=2)).train
    assert small[5][0].shape == (3, 2, 2)


def test_an_index_is_made_once_and_anew_for_other_shards(tmp_path: Path) -> None:
    pattern = str(write(tmp_path) / "train-*.tar")
    first = prepare(pattern, None, ["cls"])
    made = os.stat(first["sets"]["train"]["index"]).st_mtime_ns
    assert os.stat(prepare(pattern, None, ["cls"])["sets"]["train"]["index"]).st_mtime_ns == made
    write(tmp_path, shards=1, samples=12)
    second = prepare(pattern, None, ["cls"])
    assert (second["num_train"], second["hash"] == first["hash"]) == (32, False)
    with refused("train-000.tar"):
        load(first)


@pytest.mark.parametrize(
    ("cut", "message"),
    [(700, "train-000.tar: unexpected"), (-1, "train-000.tar: off"), (3, "train-000.tar: cannot")],
)
def test_a_shard_that_is_cut_off_is_named(tmp_path: Path, cut: int, message: str) -> None:
    path = write(tmp_path, shards=1) / "train-000.tar"
    data = path.read_bytes()
    path.write_bytes(data[: -(-len(data.rstrip(b"\0")) // 512) * 512] if cut == -1 else data[:cut])
    with refused(message) as caught:
        prepare(str(path), None, ["cls"])
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"files": ["jpg", "cls"]}, "part"),
        ({"files": ["tiff"]}, "data.files"),
        ({"files": []}, "data.files=[]"),
        ({"path": "nowhere-*.tar"}, "data.path=nowhere-*.tar"),
    ],
)
def test_bad_keys_are_refused(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    pattern = str(write(tmp_path, shards=1) / "train-*.tar")
    with refused(message):
        prepare(**{"path": pattern, "files": ["cls"], **keys})


@pytest.mark.parametrize(
    ("length", "block", "window"), [(1000, 32, 4), (64, 32, 4), (31, 32, 4), (5000, 1, 100), (97, 10, 1)]
)
def test_an_order_in_blocks_visits_each_sample_once_and_reads_few_blocks_at_a_time(
    length: int, block: int, window: int
) -> None:
    order = BlockOrder(length, block, window)
    indices = order.order(3, 1)(np.arange(length))
    assert sorted(indices.tolist()) == list(range(length))
    assert order.order(3, 1)(np.arange(length // 2, length)).tolist() == indices[length // 2 :].tolist()
    assert order.order(3, 2)(np.arange(length)).tolist() != indices.tolist()
    first = indices[: block * window]
    assert len(np.unique(first // block)) <= window + 1
    assert first.tolist() != sorted(first.tolist())


def test_a_position_in_a_billion_samples_is_found_without_a_walk() -> None:
    order, places = BlockOrder(10**9, 1024, 16), np.arange(8 * 10**8, 8 * 10**8 + 64)
    seconds = []
    for epoch in range(3):
        begin = time.perf_counter()
        assert len(set(order.order(0, epoch)(places).tolist())) == 64
        seconds.append(time.perf_counter() - begin)
    assert min(seconds) < 0.1  # the figure, below 5 ms, is measured apart


def test_a_part_is_held_out_of_blocks_and_the_rest_stays_in_blocks(tmp_path: Path) -> None:
    train = load(prepare(str(write(tmp_path) / "*.tar"), None, ["cls"], None, "blocks", 4, 2)).train
    kept, held = hold_out(train, 0.2)
    indices = kept.order(0, 0)(np.arange(kept.samples_per_epoch))
    labels = [kept[index][0] for index in indices]
    assert sorted([*labels, *(held[number][0] for number in range(len(held)))]) == list(range(30))
    assert len(labels) == 24
    assert max(labels[:8]) - min(labels[:8]) < 24  # two blocks, wherever they lie


def test_every_number_of_workers_has_the_same_batches_in_blocks(tmp_path: Path) -> None:
    splits = load(prepare(str(write(tmp_path) / "*.tar"), None, ["cls"], None, "blocks", 4, 2))

    def labels(size: int, rank: int, workers: int = 0) -> list[list[int]]:
        batches = TrainBatches(splits.train, plan_batches(8, 2, size), rank, 0, torch.device("cpu"), workers)
        return [[label for [part] in step for label in part.tolist()] for step in batches.steps(2, 9)]

    whole = labels(1, 0)
    assert [first + second for first, second in zip(labels(2, 0), labels(2, 1, workers=1), strict=True)] == whole


def pack(folder: Path, *options: str) -> str:
    """Pack what lies in `folder/in` with the tar of this machine; return the path of the shard."""
    names = sorted(os.listdir(folder / "in"))
    command = ["tar", *options, "-cf", str(folder / "a.tar"), "-C", str(folder / "in"), *names]
    subprocess.run(command, check=True)
    return str(folder / "a.tar")


@pytest.fixture
def files(tmp_path: Path) -> Path:
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(4):
        (folder / f"{number}.txt").write_text(f"text {number}")
        (folder / f"{number}.cls").write_text(str(number))
    return folder


def samples(path: str, names: Sequence[str] = ("txt", "cls")) -> list[Any]:
    train = load(prepare(path, None, list(names))).train
    return [train[number] for number in range(len(train))]


EXPECTED = [(f"text {number}", number) for number in range(4)]


@pytest.mark.parametrize("form", ["gnu", "oldgnu", "pax", "posix", "ustar", "v7"])
def test_every_format_of_tar_is_read(form: str, files: Path) -> None:
    assert samples(pack(files.parent, f"--format={form}")) == EXPECTED


@pytest.mark.parametrize(
    "options",
    [
        ("--format=gnu",), ("--format=oldgnu",),
        *(("--format=posix", f"--sparse-version={version}") for version in ("0.0", "0.1", "1.0")),
    ],
)  # fmt: skip
def test_files_with_holes_are_read_right_or_refused_by_name(options: Sequence[str], files: Path) -> None:
    with open(files / "2.txt", "wb") as file:
        file.truncate(1 << 20)
        file.seek(1 << 19)
        file.write(b"in the middle")
    whole = (files / "2.txt").read_text()
    assert samples(pack(files.parent, options[0]))[2] == (whole, 2)
    with refused("a.tar"):
        samples(pack(files.parent, *options, "--sparse"))
    assert samples(pack(files.parent, *options, "--sparse"), ["cls"]) == [(number,) for number in range(4)]


def test_links_to_other_members_are_followed(files: Path) -> None:
    (files / "4.txt").hardlink_to(files / "1.txt")
    (files / "4.cls").symlink_to("2.cls")
    (files / "5.cls").symlink_to("4.cls")
    (files / "5.txt").symlink_to("../in/4.txt")
    with refused("a.tar: shard"):
        samples(pack(files.parent))
    (files / "5.txt").unlink()
    (files / "5.txt").symlink_to("4.txt")
    assert samples(pack(files.parent)) == [*EXPECTED, ("text 1", 2), ("text 1", 2)]
    (files / "5.txt").unlink()
    (files / "5.txt").symlink_to("5.txt")
    with refused("a.tar: itself"):
        samples(pack(files.parent))


SUPPORTED = sorted(set(tarfile.SUPPORTED_TYPES) - set(tarfile.GNU_TYPES))


@pytest.mark.parametrize("kind", [*SUPPORTED, b"M", b"V", b"D", b"Z"])
def test_every_type_of_member_is_read_right_or_refused_by_name(kind: bytes, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.GNU_FORMAT) as archive:
        for number in range(3):
            for extension in ("txt", "cls"):
                data = str(number).encode()
                member = tarfile.TarInfo(f"{number}.{extension}")
                member.size = len(data)
                if (number, extension) == (1, "txt"):
                    member.type, member.linkname = kind, "0.txt"
                    member.size = len(data) if kind in (*tarfile.REGULAR_TYPES, b"M", b"Z") else 0
                archive.addfile(member, io.BytesIO(data) if member.size else None)
    if kind in tarfile.REGULAR_TYPES:
        assert samples(str(tmp_path / "a.tar")) == [("0", 0), ("1", 1), ("2", 2)]
    elif kind in (tarfile.LNKTYPE, tarfile.SYMTYPE):
        assert samples(str(tmp_path / "a.tar")) == [("0", 0), ("0", 1), ("2", 2)]
    elif kind in (tarfile.DIRTYPE, b"V", b"D"):
        with refused("file"):
            samples(str(tmp_path / "a.tar"))
    else:
        with refused("a.tar"):
            samples(str(tmp_path / "a.tar"))


def test_folders_between_the_files_are_no_samples(files: Path) -> None:
    for number in range(4):
        (files / f"{number}").mkdir()
        for extension in ("txt", "cls"):
            (files / f"{number}.{extension}").rename(files / f"{number}" / f"a.{extension}")
    assert samples(pack(files.parent)) == EXPECTED


@pytest.mark.parametrize("option", ["--label=data", "--listed-incremental={}/list", "--xattrs"])
def test_labels_lists_of_folders_and_attributes_are_no_samples(option: str, files: Path) -> None:
    (files / "a").mkdir()
    for number in range(4):
        for extension in ("txt", "cls"):
            (files / f"{number}.{extension}").rename(files / "a" / f"{number}.{extension}")
    assert samples(pack(files.parent, "--sort=name", option.format(files.parent))) == EXPECTED


def test_names_that_webdataset_leaves_out_are_left_out(files: Path) -> None:
    for name in ("README", "._0.txt", ".hidden", "zz"):
        (files / name).write_text("no sample")
    assert samples(pack(files.parent)) == EXPECTED


def test_archives_joined_by_cat_are_refused(files: Path) -> None:
    path = Path(pack(files.parent))
    path.write_bytes(path.read_bytes() * 2)
    with refused("a.tar"):
        samples(str(path))
    path.write_bytes(Path(pack(files.parent)).read_bytes() + bytes(1 << 16))  # more zeros are padding
    assert samples(str(path)) == EXPECTED


def test_alternatives_are_decoded_by_the_name_that_was_found(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for number, (extension, data) in enumerate([("json", b"[1, 2]"), ("txt", b"[1, 2]"), ("cls", b"7")]):
            member = tarfile.TarInfo(f"{number}.{extension}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    assert samples(str(tmp_path / "a.tar"), ["json;txt;cls"]) == [([1, 2],), ("[1, 2]",), (7,)]
    assert samples(str(tmp_path / "a.tar"), ["cls;txt;json"]) == [([1, 2],), ("[1, 2]",), (7,)]


@pytest.mark.parametrize(("extension", "data"), [
    ("json", b"{"), ("npy", b"no array"), ("cls", b"cat"), ("txt", b"\xff"),
    ("png", b"\x89PNG\r\n\x1a\n"), ("jpg", b""),
])  # fmt: skip
def test_a_file_that_cannot_be_decoded_is_named(extension: str, data: bytes, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        member = tarfile.TarInfo(f"0.{extension}")
        member.size = len(data)
        archive.addfile(member, io.BytesIO(data))
    with refused("a.tar", DdpexpError):
        samples(str(tmp_path / "a.tar"), [extension])


def test_a_run_reads_files_of_the_kinds_that_it_was_trained_on(tmp_path: Path) -> None:
    pattern = str(write(tmp_path) / "train-*.tar")
    schema = prepare(pattern, files=["png", "cls"], image_size=4)["schema"]
    assert [[one["kind"] for one in schema[part]] for part in ("inputs", "targets")] == [["image"], ["category"]]
    assert prepare(pattern, files=["jpg;png", "cls"], image_size=4, schema=schema)["num_train"] == 30
    with refused("data.files=[npy,cls]"):
        prepare(pattern, files=["npy", "cls"], image_size=4, schema=schema)
    with refused("data.image_size: data.image_size=4"):
        prepare(pattern, files=["png", "cls"], image_size=6, schema=schema)

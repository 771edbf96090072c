"""Raw inputs: a picture, a text or a row that is given by itself is the sample that an evaluation makes of its data."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import ddpexp as package
from ddpexp.config.instantiate import Trust, instantiate
from ddpexp.data.arrays.dataset import load as load_arrays
from ddpexp.data.base import SampleNames
from ddpexp.data.image_folder.dataset import load as load_folder
from ddpexp.data.image_folder.prepare import prepare as prepare_folder
from ddpexp.data.images.dataset import load as load_images
from ddpexp.data.images.files import prepare as prepare_images
from ddpexp.data.inputs import Inputs
from ddpexp.data.tar_shards.dataset import load as load_shards
from ddpexp.data.tar_shards.prepare import prepare as prepare_shards
from ddpexp.data.text.dataset import load as load_text
from ddpexp.data.text.prepare import prepare as prepare_text
from ddpexp.run.prepare import prepare as prepare_section
from ddpexp.settings.node import Node
from tests.refusals import refused

CPU = torch.device("cpu")
TABLE = "id,city,size,price\na1,Rome,1.5,10.5\nb2,Bern,,30\nc3,Rome,4,20\nd4,Bern,2.25,25\n"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def read(kind: str, given: Any, known: Any, **options: Any) -> Inputs:
    """Read as a run does, from the record of its data."""
    inputs: Inputs = instantiate(Node(kind, options), Trust(), "data.read", given, json.loads(json.dumps(known)))
    return inputs


def first(data: Any) -> Any:
    """Return what a batch of all samples has for the model."""
    if data.is_loaded:
        return data.collate([data[index] for index in range(len(data))])[0]
    return data.gather(torch.arange(len(data)), CPU)[0]


def equal(inputs: Inputs, expected: Tensor) -> bool:
    return torch.equal(first(inputs.samples), expected)


def draw(width: int, height: int, seed: int, mode: str = "RGB") -> Image.Image:
    patches = np.random.default_rng(seed).integers(0, 256, (5, 6, 3), dtype=np.uint8)
    return Image.fromarray(patches).resize((width, height), Image.Resampling.BICUBIC).convert(mode)


@pytest.mark.parametrize("channels", [1, 3])
def test_pictures_of_a_folder_are_cut_and_normalized_as_in_evaluation(channels: int) -> None:
    turned = Image.Exif()
    turned[0x0112] = 6
    for number, name in enumerate(("cat", "dog")):
        for part in ("train", "val"):
            Path(f"photos/{part}/{name}").mkdir(parents=True)
            draw(90, 70, number).save(f"photos/{part}/{name}/0.jpg", quality=90)
        draw(300, 120, number).save(f"photos/val/{name}/1.jpg", exif=turned, quality=90)  # reduced, and turned
        draw(20, 33, number).save(f"photos/val/{name}/2.png")
    options = {"size": 24, "channels": channels, "mean": (0.5,), "std": (0.2,)}
    known = prepare_folder("photos", **options)  # type: ignore[arg-type]
    expected = first(load_folder(known).evals["eval"])
    whole = read("image_folder", Path("photos/val"), known, **options)
    files = ["cat/0.jpg", "cat/1.jpg", "cat/2.png", "dog/0.jpg", "dog/1.jpg", "dog/2.png"]
    assert (equal(whole, expected), whole.names, whole.is_one) == (True, SampleNames("file", files), False)
    one = read("image_folder", "photos/val/dog/1.jpg", known, **options)
    assert (equal(one, expected[4:5]), one.is_one) == (True, True)
    assert one.names == SampleNames("file", ["photos/val/dog/1.jpg"])
    with Image.open("photos/val/cat/2.png") as opened:  # of a large JPEG the decoder would reduce the pixels itself
        picture = opened.convert("RGB")
    in_memory: list[Any] = [picture, np.asarray(picture), torch.from_numpy(np.array(picture)).permute(2, 0, 1) / 255]
    several = read("image_folder", in_memory, known, **options)
    assert (equal(several, expected[2:3].expand(3, -1, -1, -1)), several.names) == (True, None)


@pytest.mark.parametrize("shape", [(28, 20), (1, 28, 20), (3, 28, 20)])
def test_pictures_of_one_size_are_normalized_as_in_evaluation(shape: tuple[int, ...]) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (4, *shape), dtype=np.uint8)
    for part in ("train", "test"):
        np.save(f"{part}-images.npy", pixels)
        np.save(f"{part}-labels.npy", np.arange(4))
    known = prepare_images(".", mean=(0.4,), std=(0.3,))
    expected = first(load_images(known).evals["eval"])
    assert equal(read("images", pixels, known), expected)
    for number, one in enumerate(pixels):
        picture = one.transpose(1, 2, 0).squeeze() if len(shape) == 3 else one
        Image.fromarray(picture).save(f"{number}.png")
    assert equal(read("images", [f"{number}.png" for number in range(4)], known), expected)
    single = read("images", torch.from_numpy(pixels[2]), known)
    assert (equal(single, expected[2:3]), single.is_one) == (True, True)
    draw(40, 30, 0).save("large.png")
    with refused("large.png: 20 x 28"):
        read("images", "large.png", known)


def test_images_of_other_channels_are_arrays_of_their_shape() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (4, 7, 5, 6), dtype=np.uint8)
    for part in ("train", "test"):
        np.save(f"{part}-images.npy", pixels)
        np.save(f"{part}-labels.npy", np.arange(4))
    known = prepare_images(".", mean=(0.4,), std=(0.3,))
    assert equal(read("images", list(pixels), known), first(load_images(known).evals["eval"]))
    with refused("the input: (7, 5, 6)"):
        read("images", pixels[0][:3], known)


def trained_table(*more: str) -> tuple[Any, Any]:
    """Return the options and the record of a table with names, a missing number and statistics."""
    Path("t.csv").write_text(TABLE)
    words = [
        "data=arrays", "data.path=t.csv", "data.eval_path=t.csv", "data.inputs=[city,size]",
        "data.columns={city: category}", "data.missing={size: median}", "data.standardize=true", *more,
    ]  # fmt: skip
    data = package.compose(["recipe=tabular", *words]).experiment.data
    return data.options, prepare_section(data, Trust())


def test_rows_are_encoded_as_in_evaluation() -> None:
    options, known = trained_table("data.targets=price")
    expected = first(load_arrays(known).evals["eval"])
    file = read("arrays", Path("t.csv"), known, **options)
    assert (equal(file, expected), file.names) == (True, SampleNames("id", ["a1", "b2", "c3", "d4"]))
    rows = [{"city": "Rome", "size": 1.5}, {"city": "Bern", "size": None}, {"size": 4, "city": "Rome"}]
    given = read("arrays", rows, known, **options)
    assert (equal(given, expected[:3]), given.is_one, given.names) == (True, False, None)
    one = read("arrays", rows[1], known, **options)
    assert (equal(one, expected[1:2]), one.is_one) == (True, True)
    targets = given.samples.gather(torch.arange(3), CPU)[1]
    assert targets.isnan().all()
    Path("strange.csv").write_text("town,size\nRome,1\n")
    for given_rows, expected_word in (
        ({"size": 1.0}, "city"),
        (Path("strange.csv"), "city"),
        ([{"city": "Paris", "size": 1}], "Paris"),
        ({"city": "Rome", "size": "big"}, "big"),
        ("nothing.csv", "nothing.csv"),
        ([], "a row as a mapping"),
        ([1.0, 2.0], "a row as a mapping"),
    ):
        with refused(expected_word) if expected_word == "nothing.csv" else refused(f": {expected_word}"):
            read("arrays", given_rows, known, **options)


def test_frames_of_pandas_are_rows_with_their_index() -> None:
    pandas = pytest.importorskip("pandas")
    options, known = trained_table("data.targets=price")
    expected = first(load_arrays(known).evals["eval"])
    frame = pandas.read_csv("t.csv")
    assert read("arrays", frame, known, **options).names == SampleNames("id", ["a1", "b2", "c3", "d4"])
    by_id = read("arrays", frame.set_index("id"), known, **options)
    assert (equal(by_id, expected), by_id.names) == (True, SampleNames("id", ["a1", "b2", "c3", "d4"]))
    part = read("arrays", frame.drop(columns="id")[2:], known, **options)
    assert (equal(part, expected[2:]), part.names) == (True, SampleNames("index", [2, 3]))
    one = read("arrays", frame.iloc[0], known, **options)
    assert (equal(one, expected[:1]), one.is_one) == (True, True)


def test_arrays_are_converted_as_in_evaluation() -> None:
    inputs = np.random.default_rng(0).normal(size=(6, 3))
    np.savez("t.npz", x=inputs, y=np.arange(6) % 2)
    data = package.compose(
        ["recipe=tabular", "data.path=t.npz", "data.inputs=x", "data.targets=y", "data.standardize=true"]
    ).experiment.data
    known = prepare_section(data, Trust())
    assert known is not None
    expected = first(load_arrays(known).train)
    np.save("x.npy", inputs)
    for given in (inputs, torch.from_numpy(inputs), list(inputs), inputs.tolist(), Path("t.npz"), "x.npy"):
        assert equal(read("arrays", given, known, **data.options), expected)
    one = read("arrays", inputs[1], known, **data.options)
    assert (equal(one, expected[1:2]), one.is_one) == (True, True)
    for wrong in (inputs[:, :2], [["a", "b", "c"]], {"a": 1}, np.zeros((0, 3))):
        with refused("the input"):
            read("arrays", wrong, known, **data.options)


def test_a_text_is_read_in_windows_as_in_evaluation() -> None:
    Path("train.txt").write_text("abcdefghij" * 20)
    Path("eval.txt").write_text("jihgfedcba" * 3)
    options = {"path": "train.txt", "eval_path": "eval.txt", "block_size": 8}
    known = prepare_text(**options)  # type: ignore[arg-type]
    expected = first(load_text(known).evals["eval"])
    assert equal(read("text", Path("eval.txt"), known, **options), expected)
    assert equal(read("text", "jihgfedcba" * 3, known, **options), expected)
    for given, word in (("abc", "3 tokens"), ("abc\n" * 5, "not among"), (["a" * 20, "b" * 20], "several")):
        with refused(f": {word}"):
            read("text", given, known, **options)


def test_pictures_of_tar_shards_are_decoded_as_in_evaluation() -> None:
    with tarfile.open("x.tar", "w") as archive:
        for number in range(3):
            data = io.BytesIO()
            draw(30, 20, number).save(data, "PNG")
            Path(f"{number}.png").write_bytes(data.getvalue())
            for suffix, content in (("png", data.getvalue()), ("cls", b"1")):
                entry = tarfile.TarInfo(f"{number}.{suffix}")
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))
    options: dict[str, Any] = {"path": "x.tar", "files": ["png", "cls"], "image_size": 16}
    known = prepare_shards(**options)
    expected = first(load_shards(known).train)
    inputs = read("tar_shards", [f"{number}.png" for number in range(3)], known, **options)
    assert equal(inputs, expected)
    assert inputs.samples[0][1] == -1
    assert equal(read("tar_shards", [draw(30, 20, number) for number in range(3)], known, **options), expected)


def test_a_picture_that_is_none_is_named() -> None:
    Path("bad.png").write_text("no")
    Path("empty").mkdir()
    known = {"schema": {"shape": [3, 8, 8], "inputs": [], "dtype": "float32"}}
    for given, word in (("bad.png", "bad.png"), ("gone.png", "gone.png"), ("empty", "empty"), ("bad.txt", "bad.txt"),
                        ([], ": nothing"), (3, "of type int"), (np.zeros((3, 7, 5, 2)), ": 7, 5, 2")):  # fmt: skip
        with refused(word):
            read("image_folder", given, known, size=8)

"""Images in memory: normalised, cut and mirrored, whoever computes the batch."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from ddpexp.data.batch_plan import plan_batches
from ddpexp.data.batches import EvalBatches, TrainBatches
from ddpexp.data.datasets import Arrays, Splits, belongs_on_device, on_device
from ddpexp.data.images import dataset
from ddpexp.data.images.dataset import Images, load
from ddpexp.data.images.files import prepare
from ddpexp.system.hardware import count_gpus
from tests.conftest import Ddpexp, finish
from tests.orders import hold_out

CPU = torch.device("cpu")
COUNT, HEIGHT, WIDTH = 60, 6, 5


def images(flip: bool = False, crop: int = 0) -> Images:
    """Return images whose pixels are all different within one, and never black; a label is its image's number."""
    places = torch.arange(1, 2 * HEIGHT * WIDTH + 1, dtype=torch.uint8).view(1, 2, HEIGHT, WIDTH)
    return Images(
        places + torch.arange(COUNT, dtype=torch.uint8).view(-1, 1, 1, 1),
        torch.arange(COUNT),
        (0.0,),
        (1.0,),
        flip,
        crop,
    )


def batches(data: Any, size: int = 1, rank: int = 0, micro: Any = "auto", seed: int = 0) -> TrainBatches:
    return TrainBatches(data, plan_batches(12, micro, size), rank, seed, CPU)


def by_sample(steps: Iterator[list[Any]]) -> list[dict[int, list[float]]]:
    """Return of each step what every sample looked like."""
    return [
        {int(label): image.flatten().tolist() for pair in step for image, label in zip(*pair, strict=True)}
        for step in steps
    ]


def pixels(image: Tensor) -> Tensor:
    return (image * 255).round().to(torch.uint8)


def test_a_batch_is_normalised_by_channel() -> None:
    data = Images(
        torch.tensor([[[[0]], [[51]]], [[[255]], [[102]]]], dtype=torch.uint8),
        torch.tensor([3, 4]),
        (0.5, 0.2),
        (0.5, 0.1),
    )
    found, labels = data.gather(torch.tensor([1, 0]), CPU)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.flatten(1), torch.tensor([[1.0, 2.0], [-1.0, 0.0]]))
    assert (labels.tolist(), labels.dtype) == ([4, 3], torch.int64)


@pytest.mark.parametrize("crop", [0, 1, 3])
@pytest.mark.parametrize("flip", [False, True])
def test_each_image_is_a_window_of_its_framed_self_mirrored_or_not(flip: bool, crop: int) -> None:
    plain = images()
    seen = set()
    for epoch in range(40):
        found, labels = images(flip, crop).of_epoch(0, epoch).gather(torch.arange(COUNT), CPU)
        assert labels.tolist() == list(range(COUNT))
        for number, image in enumerate(pixels(found)):
            framed = torch.nn.functional.pad(plain.pixels[number], (crop,) * 4)
            mirrored = torch.nn.functional.pad(plain.pixels[number].flip(-1), (crop,) * 4)
            ways = [
                (turned, top, left)
                for turned, whole in enumerate((framed, mirrored))
                for top in range(2 * crop + 1)
                for left in range(2 * crop + 1)
                if torch.equal(whole[:, top : top + HEIGHT, left : left + WIDTH], image)
            ]
            assert len(ways) == 1
            seen.add(ways[0])
    assert len(seen) == (1 + flip) * (2 * crop + 1) ** 2  # every way occurs


def test_ways_are_equally_likely_and_independent() -> None:
    data = Images(torch.ones(90_000, 1, 3, 3, dtype=torch.uint8), torch.zeros(90_000).long(), (0.0,), (1.0,), False, 1)
    found, _ = data.of_epoch(0, 0).gather(torch.arange(90_000), CPU)
    black = (pixels(found)[:, 0] == 0).long()
    top = black[:, 0].amin(1) - black[:, 2].amin(1)  # where a whole row is black, the window lies over the frame
    left = black[:, :, 0].amin(1) - black[:, :, 2].amin(1)
    counts = torch.bincount((top + 1) * 3 + left + 1, minlength=9).double()
    assert float(((counts - 10_000) ** 2 / 10_000).sum()) < 26  # chi-square with 8 degrees of freedom: 1 in 1,000


@pytest.mark.parametrize(("size", "micro"), [(1, "auto"), (2, "auto"), (4, "auto"), (2, 3), (1, 1)])
def test_a_sample_looks_the_same_at_every_number_of_workers_and_cut_of_the_batch(size: int, micro: Any) -> None:
    data = images(flip=True, crop=2)
    expected = by_sample(batches(data).steps(0, 8))
    parts = [by_sample(batches(data, size, rank, micro).steps(0, 8)) for rank in range(size)]
    assert [{key: value for part in parts for key, value in part[step].items()} for step in range(8)] == expected


@pytest.mark.parametrize("begin", [1, 4, 5, 7])
def test_a_sample_looks_the_same_after_an_interruption(begin: int) -> None:
    held = batches(images(flip=True, crop=2))
    assert by_sample(held.steps(begin, 11)) == by_sample(held.steps(0, 11))[begin:]


def test_another_epoch_or_seed_is_another_cut() -> None:
    held = images(crop=2)
    looks = [held.of_epoch(seed, epoch).gather(torch.arange(COUNT), CPU)[0] for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    same = [
        float((one == other).flatten(1).all(1).float().mean())
        for one, other in zip(looks, looks[1:] + looks[:1], strict=True)
    ]
    assert max(same) < 0.2  # one in 25 by chance


def test_what_is_evaluated_is_as_it_is_also_where_it_is_held_out() -> None:
    kept, held = hold_out(images(flip=True, crop=2), 0.5)
    found = {int(label): image for pair in EvalBatches(held, 7, 0, 1, CPU) for image, label in zip(*pair, strict=True)}
    assert len(found) == COUNT // 2
    assert all(torch.equal(pixels(image), images().pixels[number]) for number, image in found.items())
    step = by_sample(batches(kept).steps(0, 1))[0]
    whole = images(flip=True, crop=2).of_epoch(0, 0).gather(torch.tensor(list(step)), CPU)[0]
    assert list(step.values()) == whole.flatten(1).tolist()


DEVICES = [
    CPU,
    pytest.param(
        torch.device("cuda", 0),
        marks=[pytest.mark.gpu, pytest.mark.skipif(count_gpus() == 0, reason="there is no GPU here")],
    ),
]


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize(("flip", "crop"), [(False, 0), (True, 0), (False, 2), (True, 2)])
def test_batches_made_on_the_device_are_those_made_on_the_host(flip: bool, crop: int, device: torch.device) -> None:
    kept, held = hold_out(images(flip, crop), 0.2)
    there = on_device(Splits(kept, {"eval": images(), "validation": held}), device)
    plan = plan_batches(12, 4, 1)
    trained = TrainBatches(there.train, plan, 0, 0, device, on_device=True)
    assert by_sample(trained.steps(1, 11)) == by_sample(TrainBatches(kept, plan, 0, 0, CPU).steps(1, 11))
    for name, part in {"eval": images(), "validation": held}.items():
        pairs = zip(
            EvalBatches(there.evals[name], 7, 0, 1, device, on_device=True),
            EvalBatches(part, 7, 0, 1, CPU),
            strict=True,
        )
        for found, expected in pairs:
            assert all(torch.equal(one.cpu(), other) for one, other in zip(found, expected, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(count_gpus() == 0, reason="there is no GPU here")
@pytest.mark.parametrize("there", [False, True])
def test_batches_for_a_gpu_wait_for_nothing(there: bool) -> None:
    device = torch.device("cuda", 0)
    data = on_device(Splits(images(True, 2), {}), device).train if there else images(True, 2)
    steps = TrainBatches(data, plan_batches(12, 4, 1), 0, 0, device, on_device=there).steps(0, 11)
    next(steps)
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert len(list(steps)) == 10
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_parts_of_a_set_lie_on_the_device_once() -> None:
    kept, held = hold_out(images(), 0.2)
    there = on_device(Splits(kept, {"validation": held, "eval": images()}), CPU)
    assert there.train.data is there.evals["validation"].data
    assert there.train.data is not there.evals["eval"]


def test_files_become_splits_of_which_only_the_training_set_is_augmented(tmp_path: Path) -> None:
    for part, count in (("train", 24), ("test", 5)):
        np.save(tmp_path / f"{part}-images.npy", np.full((count, 4, 4), 255, np.uint8))
        np.save(tmp_path / f"{part}-labels.npy", np.arange(count))
    splits = load(prepare(str(tmp_path), (0.0,), (1.0,), crop=1))
    [(tested, labels)] = list(EvalBatches(splits.evals["eval"], 5, 0, 1, CPU))
    assert (tested.shape, labels.tolist()) == ((5, 1, 4, 4), [0, 1, 2, 3, 4])
    assert tested.min() == 1
    [[(trained, _)]] = list(batches(splits.train).steps(0, 1))
    assert trained.shape == (12, 1, 4, 4)
    assert trained.min() == 0  # the frame


@pytest.mark.slow
def test_a_run_on_augmented_images_ends_with_the_same_weights_at_other_world_sizes_and_in_two_parts(
    ddpexp: Ddpexp, tmp_path: Path
) -> None:
    draw = np.random.default_rng(0)
    for part, count in (("train", 70), ("test", 16)):
        np.save(tmp_path / f"{part}-images.npy", draw.integers(0, 256, (count, 28, 28), dtype=np.uint8))
        np.save(tmp_path / f"{part}-labels.npy", draw.integers(0, 10, count))
    overrides = ("recipe=mnist", "model=linear", "scheduler=constant", "logger=none", "data=images",
        f"data.root={tmp_path}",
             "data.flip=true", "trainer.reduction=exact", "trainer.global_batch_size=16", "trainer.micro_batch_size=4",
             "trainer.epochs=null", "trainer.eval_every=0")  # fmt: skip
    whole = ddpexp(*overrides, "data.crop=3", "trainer.gpus=1", "trainer.max_steps=9")
    assert whole.code == 0, whole.err
    assert "70 + 16 images of 28 x 28, from files in" in whole.out
    run = tmp_path / "parts"
    for size, steps, there in ((2, 5, "true"), (1, 9, "false")):  # the first part ends in the second epoch
        others = (f"run.dir={run}", f"trainer.gpus={size}", f"trainer.max_steps={steps}", f"data.on_device={there}")
        process, _ = ddpexp.start(*overrides, "data.crop=3", *others)
        done = finish(process, run)
        assert done.code == 0, done.err
    assert done.result()["weights_sha256"] == whole.result()["weights_sha256"]
    plain = ddpexp(*overrides, "trainer.gpus=2", "trainer.max_steps=9")
    assert plain.result()["weights_sha256"] != whole.result()["weights_sha256"]


def test_alternate_flips_show_every_image_both_ways_in_two_epochs() -> None:
    data = dataclasses.replace(images(flip=True), alternate=True)
    stored: Any = data.to(CPU)
    indices = torch.arange(len(data))
    plain = data.gather(indices, CPU)[0]
    epochs = [data.of_epoch(3, epoch).gather(indices, CPU)[0] for epoch in range(4)]
    on_device = [stored.of_epoch(3, epoch).gather(indices, CPU)[0] for epoch in range(4)]
    assert all(torch.equal(one, other) for one, other in zip(epochs, on_device, strict=True))
    assert torch.equal(epochs[1], epochs[0].flip(-1))
    assert torch.equal(epochs[2], epochs[0])
    assert not torch.equal(epochs[0], plain)
    assert not torch.equal(epochs[1], plain)
    assert not torch.equal(data.of_epoch(4, 0).gather(indices, CPU)[0], epochs[0])


def test_reflected_frames_have_no_black() -> None:
    data = dataclasses.replace(images(crop=2), reflect=True)
    indices = torch.arange(len(data))
    padded = functional.pad(data.gather(indices, CPU)[0], [2] * 4, "reflect")
    height, width = data.pixels.shape[-2:]
    stored: Any = data.to(CPU)
    for part in (data, stored):
        cut = part.of_epoch(3, 0).gather(indices, CPU)[0]
        windows = padded.unfold(2, height, 1).unfold(3, width, 1).permute(0, 2, 3, 1, 4, 5).flatten(1, 2)
        assert all((windows[number] == cut[number]).flatten(1).all(1).any() for number in range(len(cut)))
        assert not torch.equal(cut, data.gather(indices, CPU)[0])


def test_batches_for_a_gpu_are_made_beside_the_main_thread_and_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    data = images(flip=True, crop=2)
    expected = by_sample(batches(data).steps(0, 11))
    threads = []

    def windows(*arguments: Any) -> Any:
        threads.append(threading.current_thread())
        return cut(*arguments)

    cut = dataset._windows
    monkeypatch.setattr(dataset, "_windows", windows)
    monkeypatch.setattr("ddpexp.data.batches.num_ahead", lambda device: 2)  # as on a GPU
    assert by_sample(batches(data).steps(0, 11)) == expected
    assert len(threads) == 11
    assert threading.main_thread() not in threads
    tested = [labels.tolist() for _, labels in EvalBatches(data, 20, 0, 1, CPU)]
    assert tested == torch.arange(COUNT).view(3, 20).tolist()


@pytest.mark.parametrize(
    ("device", "free", "moves"), [("cuda:0", 10.0, True), ("cuda:0", 9.9, False), ("cpu", 10, False)]
)
def test_images_go_to_a_gpu_by_themselves_if_they_take_a_tenth_of_what_is_free(
    monkeypatch: pytest.MonkeyPatch, device: str, free: float, moves: bool
) -> None:
    kept, held = hold_out(images(), 0.2)
    splits = Splits(kept, {"validation": held})
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free * images().num_bytes, 0))
    assert belongs_on_device(splits, torch.device(device)) is moves
    others = Splits(kept, {"eval": Arrays([torch.arange(3)])})
    assert not belongs_on_device(others, torch.device(device))

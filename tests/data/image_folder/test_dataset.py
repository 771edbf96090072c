"""Batches of images: the same with every cache and number of threads, and however the global batch is split."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ddpexp.data.batch_plan import BatchPlan
from ddpexp.data.batches import EvalBatches, TrainBatches
from ddpexp.data.image_folder import draws
from ddpexp.data.image_folder.dataset import load
from ddpexp.data.image_folder.prepare import prepare
from ddpexp.data.prefetch import ahead
from ddpexp.errors import CodeError, LoaderError
from tests.orders import hold_out
from tests.refusals import refused

CPU = torch.device("cpu")
CHANGED: dict[str, Any] = {"color_jitter": (0.4, 0.4, 0.4, 0.1), "rand_augment": 2}


def of(photos: Path, **options: Any) -> Any:
    return load(prepare(str(photos), size=16, **options))


def steps(data: Any, data_size: int, micro: int, first: int = 0, last: int = 3) -> list[tuple[Tensor, Tensor]]:
    """Return the global batches of steps, put together from all ranks."""
    plan = BatchPlan(4, micro, 4 // (micro * data_size), data_size)
    ranks = [list(TrainBatches(data, plan, rank, 3, CPU).steps(first, last)) for rank in range(data_size)]
    batches = [[batch for rank in ranks for batch in rank[step]] for step in range(last - first)]
    return [(torch.cat([x for x, _ in batch]), torch.cat([y for _, y in batch])) for batch in batches]


def equal(one: list[tuple[Tensor, Tensor]], other: list[tuple[Tensor, Tensor]]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True)
    )


@pytest.mark.parametrize("on", ["host", "device"])
@pytest.mark.parametrize("options", [{}, CHANGED, {"mixup": 0.4, "cutmix": 1.0}, {"channels": 1, **CHANGED}])
def test_batches_are_the_same_however_they_are_split(options: dict[str, Any], on: str, photos: Path) -> None:
    train = of(photos, augment_on=on, **options).train
    whole = steps(train, 1, 4)
    for data_size, micro in ((1, 2), (2, 2), (4, 1), (1, 1)):
        assert equal(steps(train, data_size, micro), whole)
    assert equal(steps(train, 2, 1, first=2), whole[2:])
    assert not torch.equal(whole[0][0], steps(train, 1, 4, 3, 6)[0][0])


def test_batches_are_the_same_with_every_cache(photos: Path) -> None:
    batches = [steps(of(photos, cache=cache).train, 1, 4) for cache in ("raw", "jpeg", "none")]
    assert equal(batches[0], batches[1])
    assert equal(batches[0], batches[2])


@pytest.mark.parametrize("on", ["host", "device"])
def test_threads_change_nothing(on: str, photos: Path) -> None:
    before, found = torch.get_num_threads(), []
    try:
        for number in (1, 3):
            torch.set_num_threads(number)
            found.append(steps(of(photos, augment_on=on, **CHANGED).train, 1, 4))
    finally:
        torch.set_num_threads(before)
    assert equal(*found)


def test_evaluation_is_a_center_crop_and_normalized(photos: Path) -> None:
    data = of(photos, mean=(0.5,), std=(0.5,)).evals["eval"]
    images, labels = data.gather(torch.tensor([0, 3]), CPU)
    assert (images.shape, images.dtype, labels.tolist()) == ((2, 3, 16, 16), torch.float32, [0, 1])
    assert images.min() >= -1
    assert images.max() <= 1
    pixels = torch.from_numpy(np.array(data.store.image(0))).float()
    assert pixels.shape == (19, 25, 3)
    middle = pixels[2:17, 4:20].mean((0, 1)) / 127.5 - 1
    assert (images[0].mean((1, 2)) - middle).abs().max() < 0.1
    assert [len(x) for x, _ in EvalBatches(data, 3, 0, 1, CPU)] == [3, 1]


def test_part_that_is_held_out_is_read_like_the_whole(photos: Path) -> None:
    kept, held = hold_out(of(photos, mixup=0.2).train, 0.25)
    assert (len(kept), len(held)) == (9, 3)
    assert equal(steps(kept, 1, 4, 0, 2), steps(kept, 4, 1, 0, 2))
    assert [y.shape for _, y in EvalBatches(held, 2, 0, 1, CPU)] == [(2,), (1,)]


def test_mixed_labels_are_probabilities_of_a_pair_of_positions(photos: Path) -> None:
    mixed = of(photos, mixup=1.0).train
    plain = steps(of(photos).train, 1, 4, 0, 1)[0]
    images, labels = steps(mixed, 1, 4, 0, 1)[0]
    assert labels.shape == (4, 2)
    assert torch.allclose(labels.sum(1), torch.ones(4))
    key = mixed.of_epoch(3, 0).augmented.key
    order = next(TrainBatches(mixed, BatchPlan(4, 4, 1, 1), 0, 3, CPU).indices(0, 1))
    shares = torch.from_numpy(draws.mixes(key, order, 1.0, 0.0, 16)[0]).float().view(-1, 1, 1, 1)
    assert torch.allclose(images, shares * plain[0] + (1 - shares) * plain[0][[1, 0, 3, 2]], atol=1e-6)


def test_cutmix_takes_a_box_of_the_partner_and_its_share_of_the_label(photos: Path) -> None:
    plain = steps(of(photos).train, 1, 4, 0, 1)[0][0]
    images, labels = steps(of(photos, cutmix=1.0).train, 1, 4, 0, 1)[0]
    for place, partner in enumerate((1, 0, 3, 2)):
        from_own = (images[place] == plain[place]).all(0)
        assert (from_own | (images[place] == plain[partner]).all(0)).all()
        share = labels[place].max() if labels[place].max() < 1 else from_own.float().mean()
        assert min(abs(from_own.float().mean() - share), abs(1 - from_own.float().mean() - share)) < 1e-6


def test_crops_stay_inside_and_in_their_ranges() -> None:
    samples = np.arange(20_000)
    shapes = np.tile([[375, 500]], (len(samples), 1))
    top, left, height, width = draws.crops(1, samples, shapes, (0.08, 1.0), (0.75, 4 / 3)).T
    assert min(top.min(), left.min()) == 0
    assert (top + height).max() == 375
    assert (left + width).max() == 500
    area, ratio = height * width / (375 * 500), width / height
    assert 0.079 < area.min() < 0.09
    assert 0.40 < area.mean() < 0.46  # of large areas fewer fit
    assert 0.74 < ratio.min() < ratio.max() < 1.35
    thin = draws.crops(1, samples[:9], np.tile([[10, 400]], (9, 1)), (1.0, 1.0), (0.75, 4 / 3))
    assert thin.tolist() == [[0, 194, 10, 13]] * 9


def test_flips_and_crops_of_neighboring_samples_are_unrelated() -> None:
    samples = np.arange(50_000)
    flipped = draws.flips(7, samples).astype(float)
    assert abs(flipped.mean() - 0.5) < 0.01
    assert abs(np.corrcoef(flipped[1:], flipped[:-1])[0, 1]) < 0.02
    drawn = draws.uniforms(7, samples, np.uint64(0), 2)
    assert abs(np.corrcoef(drawn[0], drawn[1])[0, 1]) < 0.02
    assert abs(np.corrcoef(drawn[0], flipped)[0, 1]) < 0.02


@pytest.mark.parametrize("change", ["gone", "other size"])
def test_file_that_changes_during_a_run_is_named(change: str, photos: Path) -> None:
    data = of(photos, cache="none").evals["eval"]
    path = photos / "val" / "cat" / "0.jpg"
    if change == "gone":
        path.unlink()
    else:
        path.write_bytes((photos / "val/cat/1.jpg").read_bytes()[:100])
    with pytest.raises((LoaderError, CodeError), match=r"val/cat/0\.jpg"):
        data.gather(torch.tensor([0]), CPU)


def test_batches_made_ahead_come_in_order_and_errors_at_their_place() -> None:
    begun: list[int] = []

    def task(number: int) -> int:
        begun.append(number)
        if number == 3:
            raise ValueError(number)
        return number

    seen: list[int] = []
    results = ahead((partial(task, number) for number in range(9)), 2, CPU)
    while len(seen) < 3:
        seen.append(next(results))
    with pytest.raises(ValueError, match="3"):
        next(results)
    assert seen == [0, 1, 2]
    assert len(begun) <= 7
    assert list(ahead((partial(int, number) for number in range(5)), 0, CPU)) == list(range(5))


@pytest.mark.parametrize("options", [{}, {"mixup": 0.4}])
def test_images_of_training_grow_with_the_epochs_and_evaluations_do_not(options: dict[str, Any], photos: Path) -> None:
    data = of(photos, size_from_epoch=((0, 8), (2, 12)), **options)
    indices = torch.arange(2)
    sizes = [data.train.of_epoch(3, epoch).gather(indices, CPU)[0].shape[2:] for epoch in range(4)]
    assert sizes == [(8, 8), (8, 8), (12, 12), (12, 12)]
    assert next(iter(data.evals.values())).gather(indices, CPU)[0].shape[2:] == (16, 16)
    late = of(photos, size_from_epoch=((1, 8),), **options).train
    assert [late.of_epoch(3, epoch).gather(indices, CPU)[0].shape[2] for epoch in range(2)] == [16, 8]


@pytest.mark.parametrize("pair", [(0, 17), (-1, 8), (0, 0), (1,)])
def test_sizes_that_are_none_are_refused(pair: tuple[int, ...], photos: Path) -> None:
    with refused("data.size_from_epoch"):
        of(photos, size_from_epoch=(pair,))

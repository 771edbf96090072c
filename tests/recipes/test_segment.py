"""recipe=segment: matched files, views of image and mask alike, and what its metrics count."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from ddpexp.loggers.base import Logger
from recipes.segment import Segment, UNet, draw, eval_view, load, prepare, train_view
from tests.refusals import refused


class Fixed(nn.Module):
    """Return scores whatever the images."""

    def __init__(self, classes: Tensor, count: int) -> None:
        super().__init__()
        self.scores = torch.nn.functional.one_hot(classes, count).permute(0, 3, 1, 2).float() * 50

    def forward(self, images: Tensor) -> Tensor:
        return self.scores


@pytest.fixture
def shapes(tmp_path: Path) -> Path:
    draw(tmp_path / "shapes", train=3, val=2, side=40)
    return tmp_path / "shapes"


def test_images_are_matched_with_masks_and_classes_counted(shapes: Path) -> None:
    found = prepare(str(shapes))
    assert (found["num_train"], found["num_test"], found["facts"]) == (3, 2, {"num_classes": 3})
    assert prepare(str(shapes), 5)["facts"] == {"num_classes": 5}
    splits = load(found)
    assert [len(splits.train), len(splits.evals["eval"])] == [3, 2]
    image, mask = eval_view(splits.train[0], 24)
    assert (image.shape, image.dtype, mask.shape, mask.dtype) == ((3, 24, 24), torch.float32, (24, 24), torch.int64)
    assert prepare(str(shapes / "train"))["num_test"] == 0  # one folder, of which a part can be held out


def test_image_and_mask_are_changed_alike(shapes: Path) -> None:
    ramp = np.arange(48 * 64, dtype=np.uint8).reshape(48, 64) // 3
    sample = Image.fromarray(np.stack([ramp] * 3, 2)), Image.fromarray(ramp)
    seen = set()
    for seed in range(8):
        torch.manual_seed(seed)
        image, mask = train_view(sample, 16, (1 / 3, 1 / 3))  # so much smaller that nothing is scaled below the crop
        torch.manual_seed(seed)
        again = train_view(sample, 16, (1 / 3, 1 / 3))
        assert torch.equal(mask, again[1])
        seen.add(tuple(mask[0].tolist()))
        image, mask = train_view((sample[1].convert("RGB"), sample[1]), 16, (3.0, 3.0))
        grey = (image[0] * 0.229 + 0.485) * 255
        assert (grey.round().long() - mask).abs().median() <= 3  # but for the interpolation of the image
    assert len(seen) > 2


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (lambda f: (f / "train/masks/001.png").unlink(), "train/masks: masks/001.png"),
        (lambda f: Image.new("RGB", (40, 40)).save(f / "train/masks/001.png"), "001.png: mode RGB"),
        (lambda f: Image.new("L", (40, 30)).save(f / "val/masks/001.png"), "001.png: pixels"),
        (lambda f: (f / "train/images/001.png").write_bytes(b"no image"), "001.png: cannot be read"),
        (lambda f: (f / "train").rename(f / "training"), "data.root: has no train/images"),
    ],
)
def test_folders_that_are_wrong_are_refused(shapes: Path, spoil: object, expected: str) -> None:
    spoil(shapes)  # type: ignore[operator]
    with refused(expected):
        prepare(str(shapes))


def test_too_few_classes_and_no_folder_are_refused(shapes: Path) -> None:
    with refused("data.num_classes=2: data.num_classes=3"):
        prepare(str(shapes), 2)
    with refused("data.root: not set"):
        prepare(None)
    with refused("data.root: not a folder"):
        prepare(str(shapes / "nothing"))


def test_the_overlap_is_counted_over_all_pixels_that_count() -> None:
    masks = torch.tensor([[[0, 0, 1, 255]], [[1, 1, 1, 255]]])
    found = torch.tensor([[[0, 1, 1, 0]], [[1, 0, 1, 1]]])
    task = Segment(3)
    _, count, metrics = task.step(Fixed(found, 3).eval(), (torch.zeros(2, 3, 1, 4), masks))
    assert count == 2
    assert float(metrics["pixel_accuracy"][0]) == pytest.approx(4 / 3)  # type: ignore[index]
    result = task.finish(metrics)
    assert result == {"iou/0": pytest.approx(1 / 3), "iou/1": pytest.approx(3 / 5), "mean_iou": pytest.approx(7 / 15)}


@pytest.mark.parametrize("dice", [0.0, 0.5, 1.0])
def test_what_is_ignored_has_no_loss_and_what_is_right_little(dice: float) -> None:
    masks = torch.tensor([[[0, 1, 255, 255]]])
    task, images = Segment(2, dice), torch.zeros(1, 3, 1, 4)
    right = [float(task.step(Fixed(torch.tensor([[[0, 1, a, a]]]), 2), (images, masks))[0]) for a in (0, 1)]
    assert right[0] == right[1] == pytest.approx(0, abs=1e-4)
    assert float(task.step(Fixed(torch.tensor([[[1, 0, 0, 0]]]), 2), (images, masks))[0]) > 0.4


def test_the_network_takes_sides_of_any_length() -> None:
    assert UNet(5, width=2, depth=2)(torch.zeros(2, 3, 13, 22)).shape == (2, 5, 13, 22)


def test_a_share_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match=r"task\.dice=2 is the share"):
        Segment(3, dice=2)


def test_pictures_show_images_masks_and_what_is_found() -> None:
    class Pictures(Logger):
        def image(self, name: str, pixels: Tensor, step: int) -> None:
            shown.append((name, tuple(pixels.shape), pixels.dtype))

    shown: list[tuple[str, tuple[int, ...], torch.dtype]] = []
    masks = torch.tensor([[[0, 1, 2, 255]]] * 2)
    model = Fixed(masks.clamp(max=2), 3)
    Segment(3).on_eval(model, (torch.zeros(2, 3, 1, 4), masks), Pictures(), 1)
    assert shown == [("masks", (3, 8, 3), torch.uint8)]

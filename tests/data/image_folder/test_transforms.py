"""A user's own transforms of the images of `data=image_folder`."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from ddpexp.config.compose import compose_command
from ddpexp.config.parse import parse
from ddpexp.config.resolve import ResolvedConfig
from ddpexp.data.batch_plan import plan_batches
from ddpexp.data.batches import TrainBatches
from ddpexp.distributed.world import World
from ddpexp.run.prepare import prepare
from ddpexp.train.choose_samples import arrange
from ddpexp.train.load_data import load_sets
from tests.refusals import refused

CPU = torch.device("cpu")


def crop(image: Image.Image, size: int) -> torch.Tensor:
    """The transform: a random crop as torch's tensor."""
    left, top = random.randint(0, image.width - size), random.randint(0, image.height - size)
    cut = np.array(image.crop((left, top, left + size, top + size)))
    return torch.from_numpy(cut).permute(2, 0, 1).float() / 255


OWN = f"{{_target_: {__name__}.crop, size: 15}}"
ALBUMENTATIONS = """[{_target_: albumentations.RandomResizedCrop, size: [15, 15]},
    {_target_: albumentations.HorizontalFlip}, {_target_: albumentations.ColorJitter},
    {_target_: albumentations.ToTensorV2}]""".replace("\n", "")


def first_batch(photos: Path, micro: int, rank: int, ranks: int, *overrides: str, transform: str = OWN) -> torch.Tensor:
    """Return the images of a rank in the first step."""
    trust = f"run.trust=[{__name__},albumentations]"
    typed = ["recipe=mnist", "data=image_folder", f"data.root={photos}", "data.size=16", trust]
    composed = compose_command([*typed, f"data.transform={transform}", *overrides])
    assert isinstance(composed, ResolvedConfig)
    experiment = parse(composed.values)
    splits = load_sets(experiment, prepare(experiment.data, experiment.trust))
    splits = arrange(splits, experiment, World(0, 0, 0, 1, 1, CPU))
    for part in splits.evals.values():
        assert part.gather(torch.arange(2), CPU)[0].shape == (2, 3, 16, 16)  # without the transform
    plan = plan_batches(8, micro, ranks)
    batches = TrainBatches(splits.train, plan, rank, 0, CPU, experiment.data.num_workers, 30, order=splits.order)
    [step] = batches.steps(0, 1)
    return torch.cat([images for images, _ in step])


@pytest.mark.parametrize("held_out", [(), ("data.validation_fraction=0.2",)])
def test_stored_images_are_transformed_to_the_same_at_every_number_of_workers(
    photos: Path, held_out: tuple[str, ...]
) -> None:
    whole = first_batch(photos, 8, 0, 1, *held_out)
    assert whole.shape == (8, 3, 15, 15)
    parts = [first_batch(photos, 2, rank, 2, *held_out) for rank in range(2)]
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.slow
def test_workers_of_a_loader_transform_to_the_same(photos: Path) -> None:
    whole = first_batch(photos, 8, 0, 1)
    assert torch.equal(first_batch(photos, 8, 0, 1, "data.num_workers=2"), whole)


@pytest.mark.slow
def test_transforms_of_albumentations_are_the_same_wherever_they_run(photos: Path) -> None:
    pytest.importorskip("albumentations")
    whole = first_batch(photos, 8, 0, 1, transform=ALBUMENTATIONS)
    assert (whole.shape, whole.dtype) == ((8, 3, 15, 15), torch.uint8)
    assert len({tuple(image.flatten().tolist()) for image in whole}) == 8
    for more in ([], ["data.num_workers=2"]):
        parts = [first_batch(photos, 2, rank, 2, *more, transform=ALBUMENTATIONS) for rank in range(2)]
        assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("data.mixup=0.2", "data.transform"),
        (f"data.collate={{_target_: {__name__}.crop}}", "data.collate"),
    ],
)
def test_what_would_be_without_effect_is_refused(photos: Path, override: str, sentence: str) -> None:
    with refused(sentence):
        first_batch(photos, 8, 0, 1, override)

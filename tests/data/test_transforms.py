"""Users' transforms and collate: the same sample whatever the batches, the ranks and the DataLoader workers."""

from __future__ import annotations

import random
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from ddpexp.config.compose import compose
from ddpexp.config.parse import parse
from ddpexp.data.adapters import MapStyle, adapted
from ddpexp.data.batch_plan import plan_batches
from ddpexp.data.batches import EvalBatches, TrainBatches
from ddpexp.data.datasets import Arrays, Splits
from ddpexp.data.transforms import Transformed
from ddpexp.distributed.world import World
from ddpexp.errors import CodeError
from ddpexp.train.choose_samples import arrange
from ddpexp.train.transform_samples import own_arguments
from tests.orders import hold_out
from tests.refusals import refused

CPU = torch.device("cpu")
ALONE = World(0, 0, 0, 1, 1, CPU)
TRUST = f"run.trust=[{__name__}]"


class Items(Dataset[tuple[float, int]]):
    """A sample is a number and its index."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> tuple[float, int]:
        return float(index), index


def noisy(value: float, scale: float = 1.0) -> tuple[float, ...]:
    """Draw from every generator."""
    return value, scale * random.random(), scale * float(np.random.rand()), scale * float(torch.rand(()))


def broken(value: float) -> float:
    raise ValueError("broken")


def both(sample: tuple[float, int]) -> int:
    return sample[1] + 1


def listed(samples: list[Any]) -> list[Any]:
    return [*zip(*samples, strict=True)]


def load(transform: Any) -> Splits:
    return Splits(Items(), {"eval": transform})


class Seeded:
    """A transform with a generator of its own, as albumentations has; in loader workers it adds torch's seed."""

    def set_random_seed(self, seed: int) -> None:
        there = torch.utils.data.get_worker_info() is not None
        self.generator = np.random.default_rng(seed + (torch.initial_seed() if there else 0))

    def __call__(self, value: float) -> float:
        return float(self.generator.random())


def epoch(data: Any, size: int, micro: int, num_workers: int, number: int = 1) -> dict[int, tuple[float, ...]]:
    """Return what the samples of an epoch look like, by index."""
    found = {}
    for rank in range(size):
        batches = TrainBatches(data, plan_batches(12, micro, size), rank, 3, CPU, num_workers)
        for step in batches.steps(5 * number, 5 * number + 5):
            for values, indices in step:
                columns = values if isinstance(values, list) else [values]
                for place, index in enumerate(indices.tolist()):
                    found[index] = tuple(float(column[place]) for column in columns)
    return found


@pytest.mark.parametrize("transform", [noisy, Seeded()])
def test_a_sample_is_a_function_of_seed_epoch_and_sample_alone(transform: Any) -> None:
    data = Transformed(MapStyle(Items()), (transform,))
    alone = epoch(data, 1, 12, 0)
    assert len(alone) == len(set(alone.values())) == 60
    assert alone == epoch(data, 2, 3, 0) == epoch(data, 1, 4, 2)
    assert not set(alone.values()) & set(epoch(data, 1, 12, 0, 2).values())


def test_a_sample_is_the_same_in_a_part_of_the_set() -> None:
    whole = epoch(Transformed(MapStyle(Items()), (noisy,)), 1, 12, 0, 0)
    kept, _ = hold_out(MapStyle(Items()), 0.2)
    batches = TrainBatches(Transformed(kept, (noisy,)), plan_batches(12, 12, 1), 0, 3, CPU)
    for [(values, indices)] in batches.steps(0, 4):
        for place, index in enumerate(indices.tolist()):
            assert tuple(float(column[place]) for column in values) == whole[index]


def test_evaluation_draws_the_same_in_every_epoch_and_batch() -> None:
    def evaluated(size: int, num_workers: int) -> list[float]:
        batches = EvalBatches(Transformed(MapStyle(Items()), (noisy,)), size, 0, 1, CPU, num_workers)
        return [float(number) for values, _ in batches for number in values[3]]

    assert evaluated(7, 0) == evaluated(60, 1)


def test_an_error_in_a_transform_names_the_sample() -> None:
    with refused(": of 60 in `train`", CodeError):
        list(TrainBatches(Transformed(MapStyle(Items()), (broken,)), plan_batches(12, 12, 1), 0, 3, CPU).steps(0, 1))


def picky(samples: list[Any]) -> list[Any]:
    raise KeyError("label")


def test_an_error_in_a_collate_is_that_functions_whatever_its_samples_are() -> None:
    rows = [(torch.zeros(1 + index % 2), index) for index in range(60)]  # which torch's own could not collate
    with pytest.raises(CodeError) as caught:
        list(TrainBatches(Transformed(MapStyle(rows), collate=picky), plan_batches(12, 12, 1), 0, 3, CPU).steps(0, 1))
    assert re.fullmatch(
        r"'label' \(data\.collate=picky, samples [\d, and]+ more of 60 in `train`\)", caught.value.message
    )


def arranged(data: Any, *overrides: str) -> Splits:
    made = compose(["data.source=embedded", "trainer.global_batch_size=12", "trainer.gpus=1", TRUST, *overrides])
    assert made is not None
    part = adapted(data)
    return arrange(Splits(part, {"eval": part}), parse(made.values), ALONE)


def first(splits: Splits, name: str = "train") -> Any:
    return next(iter(EvalBatches(splits.train if name == "train" else splits.evals[name], 4, 0, 1, CPU)))


def test_functions_get_the_sample_and_their_keys_and_classes_are_built() -> None:
    splits = arranged(
        Items(),
        f"data.transform={{_target_: {__name__}.noisy, scale: 0}}",
        f"data.collate={{_target_: {__name__}.listed}}",
    )
    assert first(splits)[0] == ((0.0, 0.0, 0.0, 0.0), (1.0, 0.0, 0.0, 0.0), (2.0, 0.0, 0.0, 0.0), (3.0, 0.0, 0.0, 0.0))
    assert first(splits, "eval")[0] == (0.0, 1.0, 2.0, 3.0)
    rows = [(torch.ones(8), index) for index in range(20)]
    dropout = "{_target_: torch.nn.Dropout, p: 0.5}"
    images, _ = first(arranged(rows, f"data.eval_transform=[{dropout},{dropout}]"), "eval")
    assert set(images.unique().tolist()) == {0.0, 4.0}
    images, _ = first(arranged(rows, f"data.transform={dropout}"))
    assert len({tuple(image.tolist()) for image in images}) > 1
    splits = arranged(Items(), f"data.transform={{_target_: {__name__}.both}}", "data.transform_of=sample")
    assert first(splits).tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("data", "overrides", "message"),
    [
        (
            Arrays([torch.arange(60)]),
            [f"data.transform={{_target_: {__name__}.noisy}}"],
            "data.transform",
        ),
        (Items(), ["data.transform=flip"], "data.transform=flip"),
        (
            Items(),
            [f"data.transform={{_target_: {__name__}.Items}}"],
            "data.transform._target_=tests.data.test_transforms.Items",
        ),
        (
            Items(),
            [f"data.collate={{_target_: {__name__}.listed}}", "data.on_device=true"],
            "data.on_device=true",
        ),
        (Items(), ["data.transform={_target_: os.getcwd}"], "data.transform._target_=os.getcwd"),
    ],
)
def test_what_cannot_be_a_transform_is_refused(data: Any, overrides: list[str], message: str) -> None:
    with refused(message):
        arranged(data, *overrides)


def test_a_data_function_with_an_argument_of_that_name_gets_it() -> None:
    node = f"{{_target_: {__name__}.Seeded}}"
    made = compose(
        [
            "~data.root",
            "~data.source",
            "~data.embedded_train",
            "~data.embedded_test",
            "data.prepare=null",
            f"data._target_={__name__}.load",
            f"data.transform={node}",
            TRUST,
        ]
    )
    assert made is not None
    experiment = parse(made.values)
    assert own_arguments(experiment.data, experiment.trust) == {"transform": {"_target_": f"{__name__}.Seeded"}}
    assert not isinstance(arrange(Splits(adapted(Items()), {}), experiment, ALONE).train, Transformed)

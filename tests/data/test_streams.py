"""Streams: shards that keep their positions, the same steps at every number of workers, and what cannot be resumed."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from ddpexp.checkpoint.codec import decode, encode
from ddpexp.data.batch_plan import plan_batches
from ddpexp.data.datasets import Splits
from ddpexp.data.fingerprint import differences
from ddpexp.data.streams import Stream, StreamBatches, as_stream
from ddpexp.errors import CodeError, DdpexpError
from ddpexp.settings.data import Data
from ddpexp.train.load_data import streams_checked
from ddpexp.train.recipe_checks import check_splits
from tests.conftest import Ddpexp, Done
from tests.fitting import asked
from tests.points import Recipe
from tests.refusals import refused
from tests.test_interruptions import has_steps, kill_everything, same, wait_for

CPU = torch.device("cpu")


class Numbers:
    """Every `count`-th number from `index`, with a random one; position as in torchdata's convention."""

    length = 1000

    def __init__(self, index: int, count: int) -> None:
        self.index, self.count, self.position, self.epoch = index, count, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        while self.position < self.length:
            number, self.position = self.position * self.count + self.index, self.position + 1
            yield number + 10_000 * self.epoch, float(torch.rand(()))

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class Few(Numbers):
    length = 5


class Forgetful:
    """The same numbers without a position."""

    def __init__(self, index: int, count: int) -> None:
        self.numbers = Numbers(index, count)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.numbers)


def batches(stream: Stream, size: int = 1, rank: int = 0, micro: Any = 2, total: int = 8) -> StreamBatches:
    return StreamBatches(stream, plan_batches(total, micro, size), rank, 0, CPU, 10)


def together(ranks: list[StreamBatches], from_step: int, to_step: int) -> list[Any]:
    """Return for each step the numbers of all micro-batches, in the order of the ranks."""
    steps = zip(*(rank.steps(from_step, to_step) for rank in ranks), strict=True)
    return [[[part.tolist() for part in batch] for rank in step for batch in rank] for step in steps]


def stored(state: Any) -> Any:
    tensors: dict[str, Any] = {}
    return decode(encode(state, tensors), tensors.__getitem__)


@pytest.mark.parametrize(
    "stream",
    [Stream(Numbers), Stream(Few, repeat=True), Stream(Forgetful, replay=True), Stream(Few, repeat=True, replay=True)],
)
def test_any_number_of_workers_resumes_with_the_same_steps(stream: Stream) -> None:
    whole = together([batches(stream)], 0, 8)
    for at in (0, 1, 5):
        before = [batches(stream, 2, rank) for rank in range(2)]
        assert together(before, 0, at) == whole[:at]
        states = [stored(rank.state()) for rank in before]
        for size in (1, 2, 4):
            after = [batches(stream, size, rank) for rank in range(size)]
            for rank in after:
                rank.restore(states)
            assert [stored(rank.state())["shards"] for rank in after] == [
                {key: shard for state in states for key, shard in state["shards"].items() if int(key) in rank.own}
                for rank in after
            ]
            assert together(after, at, 8) == whole[at:]


def test_each_sample_is_read_once_and_a_shard_that_starts_over_is_in_its_next_epoch() -> None:
    numbers = [number for step in together([batches(Stream(Numbers))], 0, 5) for batch in step for number in batch[0]]
    assert sorted(numbers) == list(range(40))
    [first] = [batch.tolist() for batch, _ in next(iter(batches(Stream(Few), micro=5, total=5).steps(0, 1)))]
    again = batches(Stream(Few, repeat=True), micro=5, total=5)
    assert [batch.tolist() for [[batch, _]] in again.steps(0, 3)] == [
        [number + 10_000 * epoch for number in first] for epoch in range(3)
    ]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Few, "has ended before step 3 of 8: its shard 0 of 4 has 5 samples. Use trainer.max_steps=2, or start"),
        (
            lambda index, count: [],
            "shard 0 of 4 of the stream `train` has no samples: there is a shard",
        ),
        (
            lambda index, count: [1, "one"],
            "0 to 1 of shard 0 of 4 of the stream `train` do not fit into one batch",
        ),
        (lambda index, count: map(int, ["7", "?"]), "literal for int() with base 10: '?' (sample 1 of shard 0 of 4 of"),
    ],
)
def test_a_stream_that_ends_or_fails_is_one_sentence(make: Callable[[int, int], Any], message: str) -> None:
    with pytest.raises((DdpexpError, CodeError)) as caught:
        list(batches(Stream(make)).steps(0, 8))
    assert message in str(caught.value)
    with pytest.raises(DdpexpError):
        list(batches(Stream(lambda index, count: iter(()), repeat=True)).steps(0, 8))


def test_what_cannot_restore_its_position_is_refused_and_says_so_before_the_first_step() -> None:
    forgetful = batches(Stream(Forgetful))
    assert "Forgetful has no state_dict and load_state_dict): this run cannot be resumed" in str(forgetful.warning())
    assert batches(Stream(Numbers)).warning() is None
    assert forgetful.state() == {}
    with refused("cannot be resumed from"):
        forgetful.restore([{}])


def test_positions_of_other_shards_are_refused() -> None:
    state = batches(Stream(Numbers)).state()
    with refused("positions of 4 shards"):
        batches(Stream(Numbers), micro=4).restore([state])
    state["shards"].pop("2")
    with refused("no position of shard 2"):
        batches(Stream(Numbers)).restore([None, state])


def test_data_that_became_a_stream_is_other_data() -> None:
    counted, streamed = {"train": {"samples": 60}}, {"train": {"samples": None}}
    assert differences(counted, streamed) == ["`train` is a stream now"]
    assert differences(streamed, counted) == ["`train` is no stream any more"]
    assert differences(streamed, streamed) == []


@pytest.fixture(scope="session")
def environ(warm_environ: dict[str, str]) -> dict[str, str]:
    return warm_environ


CODE = """\
from ddpexp.data.streams import Stream


class Rows:
    def __init__(self, index, count):
        self.number, self.count = index, count

    def __iter__(self):
        while True:
            time.sleep(float(os.environ.get("PACE", "0")))
            number, self.number = self.number, self.number + self.count
            row = torch.randn(4, generator=torch.Generator().manual_seed(number)) + torch.rand(4) / 9
            yield number, row, int(row.sum() > 0)

    def state_dict(self):
        return {"number": torch.tensor(self.number)}

    def load_state_dict(self, state):
        self.number = int(state["number"])


def load_stream(replay=False, samples=33):
    return Splits(Stream(Rows, replay=replay), {"eval": Stream(Rows, num_samples=samples)})
"""
STREAM = (
    "data._target_=points.load_stream", "~data.train", "~data.test", "trainer.epochs=null", "trainer.max_steps=48",
    "trainer.micro_batch_size=6", "trainer.checkpoint_every=5", "trainer.eval_every=20", "trainer.reduction=exact",
)  # fmt: skip


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, environ: dict[str, str]) -> Recipe:
    return Recipe(Ddpexp(tmp_path_factory.mktemp("streams"), environ), CODE)


@pytest.fixture(scope="module")
def undisturbed(recipe: Recipe) -> Done:
    done = recipe(*STREAM)
    assert done.code == 0, done.err
    return done


def test_a_run_on_a_stream_that_is_killed_is_resumed_by_another_number_of_workers(
    recipe: Recipe, undisturbed: Done
) -> None:
    process, run = recipe.start(*STREAM, "trainer.gpus=2", environ={"PACE": "0.002"})
    wait_for(has_steps(run, 10), process)
    kill_everything(process, run)
    same(recipe(*STREAM, run=run), undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(20))
def test_a_run_on_a_stream_is_killed_at_a_random_moment(recipe: Recipe, undisturbed: Done, number: int) -> None:
    chance = random.Random(number)
    overrides = (*STREAM, "+data.replay=true") if number % 4 == 3 else STREAM
    process, run = recipe.start(*overrides, f"trainer.gpus={(1, 2, 4)[number % 3]}", environ={"PACE": "0.004"})
    time.sleep(chance.uniform(0.6, 3))
    kill_everything(process, run)
    same(recipe(*overrides, f"trainer.gpus={chance.choice((1, 2, 4))}", run=run), undisturbed)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"epochs": 2},
            "trainer.epochs=2",
        ),
        ({"max_steps": None}, "trainer.max_steps=null"),
        ({"limit_train_samples": 8}, "trainer.limit_train_samples=8"),
        ({"validation_fraction": 0.1}, "data.validation_fraction=0.1"),
        ({"on_device": True}, "data.on_device=true"),
        ({}, "evaluation"),
    ],
)
def test_what_a_stream_does_not_have_is_refused(keys: dict[str, Any], message: str) -> None:
    of_data = {key: value for key, value in keys.items() if key in Data.__dataclass_fields__}
    experiment: Any = asked(max_steps=8) if of_data else asked(**{"max_steps": 8, **keys})
    experiment = replace(experiment, data=replace(experiment.data, **of_data))
    with refused(message):
        streams_checked(Splits(Stream(Numbers), {"eval": Stream(Few)}), experiment)


def test_the_first_samples_of_a_stream_are_an_evaluation_set() -> None:
    evals = {"eval": Stream(Numbers, num_samples=7), "short": Stream(Few, num_samples=7)}
    sets = streams_checked(Splits([1], evals), None).evals  # type: ignore[arg-type]
    assert {name: [number for number, _ in part] for name, part in sets.items()} == {
        "eval": list(range(7)),
        "short": list(range(5)),
    }


@pytest.mark.parametrize(("kind", "name"), [("iterator", "list_iterator"), ("rows", "Numbers")])
def test_an_iterable_by_itself_is_refused_with_what_reads_its_parts(kind: str, name: str) -> None:
    with refused(f"data._target_=mine.load: {name}"):
        check_splits(Splits(iter([1]) if kind == "iterator" else Numbers(0, 1), {}), "mine.load")


def test_more_workers_for_a_stream_are_refused_by_a_run(recipe: Recipe) -> None:
    done = recipe(*STREAM, "data.num_workers=2")
    assert (done.code, "data.num_workers=2: `train` is a stream" in done.err) == (2, True), done.err


def test_streaming_data_sets_of_hugging_face_are_split_by_themselves() -> None:
    """Needs the package `datasets`."""
    datasets = pytest.importorskip("datasets")

    def rows(parts: list[int]) -> Iterator[dict[str, int]]:
        for part in parts:
            yield from ({"x": part * 100 + number} for number in range(40))

    for num_parts, shuffles in ((4, False), (3, False), (4, True)):
        data = datasets.IterableDataset.from_generator(rows, gen_kwargs={"parts": list(range(num_parts))})
        stream = as_stream(data.shuffle(seed=1, buffer_size=8) if shuffles else data)
        assert stream.replay is shuffles
        whole = list(batches(stream).steps(0, 6))
        first = batches(stream)
        list(first.steps(0, 3))
        second = batches(stream)
        second.restore([stored(first.state())])
        assert str(list(second.steps(3, 6))) == str(whole[3:])


class Counted(IterableDataset[int]):
    """Every `count`-th number from `index`, with a position."""

    def __init__(self, index: int, count: int) -> None:
        self.number, self.count = index, count

    def __iter__(self) -> Iterator[int]:
        while True:
            number, self.number = self.number, self.number + self.count
            yield number

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = state["number"]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it
@pytest.mark.parametrize("num_workers", [0, 1])
def test_torchdatas_loader_keeps_its_position(num_workers: int) -> None:
    """Needs the package `torchdata`."""
    loaders = pytest.importorskip("torchdata.stateful_dataloader")

    def opened(index: int, count: int) -> Any:
        return loaders.StatefulDataLoader(Counted(index, count), batch_size=None, num_workers=num_workers)

    resumed_in_the_middle(Stream(opened))


def test_torchdatas_nodes_keep_their_position() -> None:
    """Needs the package `torchdata`."""
    nodes = pytest.importorskip("torchdata.nodes")

    def opened(index: int, count: int) -> Any:
        numbers = nodes.SamplerWrapper(range(index, 1000, count))
        return nodes.Loader(nodes.Mapper(numbers, int))

    resumed_in_the_middle(Stream(opened))


def resumed_in_the_middle(stream: Stream) -> None:
    whole = list(batches(stream).steps(0, 6))
    assert sorted(torch.cat([batch for step in whole for batch in step]).tolist()) == list(range(48))
    first = batches(stream)
    list(first.steps(0, 3))
    second = batches(stream)
    second.restore([stored(first.state())])
    assert str(list(second.steps(3, 6))) == str(whole[3:])

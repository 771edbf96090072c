"""Runs on shards, near and far, and on sequences by length: killed again and again, they end as one that was not."""

from __future__ import annotations

import io
import random
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import Ddpexp
from tests.data.tar_shards.test_remote import Handler
from tests.points import Recipe
from tests.test_interruptions import has_steps, kill_everything, same, wait_for

CODE = """\
class Paced(Sides):
    def step(self, model, batch):
        time.sleep(float(os.environ.get("PACE", "0")))
        rows, labels = batch
        loss, count, metrics = super().step(model, (None, rows[:, :4], labels))
        return loss, torch.tensor(count), metrics


class Uneven(Dataset):
    # Sequences of 2 to 40 numbers, and the sign of their sum.
    def __init__(self, count):
        self.lengths = [2 + (37 * index) % 39 for index in range(count)]

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        row = torch.randn(self.lengths[index], generator=torch.Generator().manual_seed(index)) + torch.rand(1) / 9
        return row, int(row.sum() > 0)


def padded(samples):
    rows = nn.utils.rnn.pad_sequence([row for row, _ in samples], batch_first=True)
    means = [rows.mean(1), rows.amax(1), rows.amin(1), rows[:, 0]]
    return torch.stack(means, 1), torch.tensor([label for _, label in samples])


def load_uneven(train=192, test=33):
    return Splits(Uneven(train), {"eval": Uneven(test)})
"""
COMMON = (
    "task._target_=points.Paced", "trainer.epochs=null", "trainer.max_steps=40", "trainer.micro_batch_size=6",
    "trainer.reduction=exact", "trainer.checkpoint_every=5", "trainer.eval_every=20",
)  # fmt: skip
WORKERS = (1, 2, 4)
SHARDS = ("data=tar_shards", "data.files=[npy,cls]", "data.validation_fraction=0.1")
BLOCKS = ("data.shuffle=blocks", "data.block_samples=16", "data.window_blocks=3")
UNEVEN = ("data._target_=points.load_uneven", "data.lengths=lengths", "data.collate={_target_: points.padded}")


def write(folder: Path, shards: int, samples: int, numbers: int) -> None:
    """Write shards of arrays of so many numbers, and a label each."""
    draw = np.random.default_rng(0)
    for shard in range(shards):
        with tarfile.open(folder / f"train-{shard:03}.tar", "w") as archive:
            for number in range(samples):
                row = draw.standard_normal(numbers).astype(np.float32)
                array = io.BytesIO()
                np.save(array, row)
                for extension, data in (("npy", array.getvalue()), ("cls", b"%d" % (row[:4].sum() > 0))):
                    member = tarfile.TarInfo(f"{shard * samples + number:06}.{extension}")
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder over HTTP; yields the address of its shards. Every fortieth answer breaks off."""
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), partial(Breaking, directory=str(folder)))
    server.asked, server.broken, server.ranges, server.daemon_threads = _Turns(), 0, True, True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/train-{{000..003}}.tar"
    server.shutdown()
    thread.join()
    server.server_close()


class _Turns(dict[str, int]):
    def __missing__(self, key: str) -> int:
        return 0


class Breaking(Handler):
    """A server that sometimes breaks off in the middle of an answer."""

    def send_head(self) -> Any:
        server: Any = self.server
        server.broken = int(self.command == "GET" and server.asked["GET"] % 40 == 39)
        return super().send_head()


@pytest.fixture(scope="session")
def environ(warm_environ: dict[str, str]) -> dict[str, str]:
    return warm_environ


Kind = Callable[[Path], Any]


@contextmanager
def near(folder: Path, order: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    write(folder, 3, 80, 4)
    yield (*SHARDS, f"data.path={folder}/train-*.tar", *order)


@contextmanager
def far(folder: Path) -> Iterator[tuple[str, ...]]:
    """Shards of 33 MB, of which the cache holds two parts of 8 MiB."""
    pytest.importorskip("aiohttp")
    write(folder, 4, 80, 26_000)
    with served(folder) as address:
        yield (*SHARDS, f'data.path="{address}"', "data.cache_gb=0.017", *BLOCKS)


@contextmanager
def uneven(_folder: Path, keys: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield (*UNEVEN, *keys)


KINDS: dict[str, Kind] = {
    "tar shards": near,
    "tar shards in blocks": partial(near, order=BLOCKS),
    "remote tar shards": far,
    "by length": uneven,
    "by tokens": partial(uneven, keys=("data.batch_tokens=100", "trainer.global_batch_size=8")),
}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
def test_killed_twenty_times_a_run_ends_with_the_same_result(
    tmp_path: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "shards").mkdir()
    recipe = Recipe(Ddpexp(tmp_path, {**environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}), CODE)
    with KINDS[kind](tmp_path / "shards") as keys:
        words = (*COMMON, *keys)
        undisturbed = recipe(*words)
        assert undisturbed.code == 0, undisturbed.err
        for number in range(20):
            chance = random.Random(number)
            process, run = recipe.start(*words, f"trainer.gpus={WORKERS[number % 3]}", environ={"PACE": "0.02"})
            wait_for(has_steps(run, chance.choice((5, 10, 15, 20, 25))), process)
            time.sleep(chance.uniform(0, 0.15))  # between two checkpoints, or in one
            kill_everything(process, run)
            same(recipe(*words, f"trainer.gpus={chance.choice(WORKERS)}", run=run), undisturbed)

"""Data that cannot be had: workers that die or hang, too little memory, bad samples, damaged files.

Mirrors out of reach.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import pytest
import torch

from ddpexp.system.containers import enlarge_shared_memory, runtime, shared_memory_place
from tests.conftest import Done, finish
from tests.faults.harness import Ended, Running, faulted, loader_workers
from tests.points import ITEMS, Recipe, wait_for, weights
from tests.refusals import command_refused

EVERY = ("trainer.gpus=2", "trainer.threads=1", "trainer.log_every=1")
CODE = """
from ddpexp.data.base import IndexData

class Trouble(Items):
    # One sample is not like the others, and some kinds of trouble are rank one's alone.
    def __init__(self, count, seed, trouble, index=77):
        super().__init__(count, seed)
        self.trouble, self.index = trouble, index

    def __len__(self):
        return super().__len__() + (24 if self.trouble == "lies" else 24 * (RANK == 1) if self.trouble == "differs" else 0)

    def __getitem__(self, index):
        if self.trouble == "lies" and index >= len(self.rows):
            raise IndexError("list index out of range")
        number, row, label = super().__getitem__(index)
        if index == self.index:
            if self.trouble == "raises":
                raise ValueError("no luck")
            if self.trouble == "odd":
                class Odd(Exception):
                    def __init__(self, one, other):
                        super().__init__(f"{one} and {other}")
                raise Odd("this", "that")
            if self.trouble == "shape":
                row = torch.cat([row, row])
            if self.trouble == "poison":
                row = row * float("nan")
            if self.trouble == "sleeps":
                while True:
                    time.sleep(1)
            if self.trouble == "leaves":
                os._exit(3)
            if self.trouble == "crashes":
                import ctypes
                ctypes.string_at(0)
        return number, row, label


class Careless(Paced):
    # Catches every Exception that comes by, as libraries do here and there.
    def step(self, model, batch):
        for _ in range(100):
            try:
                time.sleep(0.01)
            except Exception:
                pass
        return super().step(model, batch)


class Large(Trouble):
    # Samples of 400 kB, or many small ones, in the forms that torch makes batches of.
    def __getitem__(self, index):
        forms = {"tensor": torch.zeros(100_000), "array": torch.zeros(100_000).numpy(), "numbers": [0.5] * 400}
        return *super().__getitem__(index), forms.get(self.trouble, 0)


class LargeTask(Paced):
    def step(self, model, batch):
        return super().step(model, batch[:3])


class Batched(Trouble):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


class Gathered(IndexData):
    def __init__(self, trouble):
        self.rows = points(96, 0)
        self.trouble = trouble

    def __len__(self):
        return 96

    def fetch(self, indices, pinned=False):
        if self.trouble == "raises" and 77 in indices:
            raise ValueError("no luck")
        number, rows, labels = self.rows.fetch(indices)
        if self.trouble == "poison":
            rows[number == 77] = float("nan")
        return number, rows, labels


def load_trouble(train="", test="", kind="Trouble", count=96):
    if kind == "Gathered":
        return Splits(Gathered(train), {"eval": points(33, 1)})
    if kind == "NoEval":
        return Splits(points(96, 0), {"eval": points(0, 1)})
    if kind == "NoLen":
        return Splits((row for row in range(96)), {})
    return Splits(globals()[kind](count, 0, train), {"eval": Trouble(33, 1, test, 32)})
"""


@pytest.fixture(scope="session")
def environ(warm_environ: dict[str, str]) -> dict[str, str]:
    """What is wrong here meets the command or the ranks, not their fork server."""
    return warm_environ


@pytest.fixture(autouse=True)
def _code(recipe: Recipe) -> None:
    path = recipe.folder / "points.py"
    path.write_text(path.read_text() + CODE)
    (recipe.folder / "conf/data/trouble.yaml").write_text(
        "_target_: points.load_trouble\ntrain: ''\ntest: ''\nkind: Trouble\ncount: 96\nnum_workers: "
        "0\nvalidation_fraction: 0.0\n"
    )


def troubled(recipe: Recipe, *overrides: str, environ: dict[str, str] | None = None) -> Ended:
    return faulted(recipe, "", "data=trouble", *EVERY, *overrides, environ={"PACE": "0", **(environ or {})})


# --- DataLoader workers ---


@pytest.mark.variants(1)
@pytest.mark.fault(54)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_dataloader_worker_that_is_killed_ends_the_run_with_its_rank_and_signal(recipe: Recipe, number: int) -> None:
    running = Running(recipe, *EVERY, *ITEMS, "trainer.epochs=10000")
    wait_for(lambda: len(loader_workers(1)) == 2)
    victim = loader_workers(1)[0]
    os.kill(victim, number)
    error = running.ended().failed(
        rank=1, says=rf"LoaderError: DataLoader worker [01] was killed by {signal.Signals(number).name}"
    )
    assert error["phase"] in ("data", "train", "evaluate", "save")


@pytest.mark.slow
@pytest.mark.fault(54)
def test_what_a_task_catches_does_not_hide_the_death_of_a_dataloader_worker(recipe: Recipe) -> None:
    overrides = ("trainer.epochs=10000", "task._target_=points.Careless", "trainer.timeout.data_seconds=600")
    running = Running(recipe, *EVERY, *ITEMS, *overrides)
    wait_for(lambda: len(loader_workers(1)) == 2)
    victim = loader_workers(1)[0]
    os.kill(victim, signal.SIGKILL)
    running.ended().failed(rank=1, says=r"LoaderError: DataLoader worker [01] was killed by SIGKILL")


@pytest.mark.variants(1)
@pytest.mark.fault(54)
@pytest.mark.parametrize(
    ("trouble", "end"), [("leaves", "ended with exit code 3"), ("crashes", "was killed by SIGSEGV")]
)
def test_a_dataloader_worker_that_its_data_ends_is_named(recipe: Recipe, trouble: str, end: str) -> None:
    ended = troubled(recipe, f"data.train={trouble}", "data.num_workers=2")
    assert ended.done.code == 1
    assert (
        f"LoaderError: DataLoader worker 1 {end}" in ended.done.err
        or f"LoaderError: DataLoader worker 0 {end}" in ended.done.err
    )
    if trouble == "crashes":
        assert "in __getitem__" in "".join(path.read_text() for path in (ended.done.run / "ranks").glob("*.log"))


@pytest.mark.fault(55)
@pytest.mark.parametrize("part", ["train", pytest.param("eval", marks=pytest.mark.slow)])
def test_a_dataloader_worker_that_hangs_is_named_with_its_sample_and_the_key(recipe: Recipe, part: str) -> None:
    where = ("data.train=sleeps",) if part == "train" else ("data.test=sleeps", "trainer.eval_every=1")
    ended = troubled(recipe, *where, "data.num_workers=2", "trainer.timeout.data_seconds=4")
    error = ended.failed(
        rank=int(ended.error["rank"]), says=r"DataLoader worker \d produced no batch for 4 s", step=False
    )
    assert "(trainer.timeout.data_seconds=4)" in error["message"]
    sample = "sample 77 of 96 in `train`" if part == "train" else "sample 32 of 33 in `eval`"
    assert f"it is at {sample}, and its stack is in the log of this rank. " in error["message"]
    assert error["phase"] == ("data" if part == "train" else "evaluate")
    assert "in __getitem__" in (ended.done.run / f"ranks/{error['rank']}.log").read_text()


# --- Samples ---

RAISES = [
    ("data.num_workers=0", r"ValueError: no luck \(sample 77 of 96 in `train`\)"),
    ("data.num_workers=2", r"ValueError: no luck \(sample 77 of 96 in `train`, in DataLoader worker [01]\)"),
    (
        "data.kind=Batched",
        r"ValueError: no luck \(samples (\d+, ){5}\d+ and 7 more of 96 in `train`\)".replace("{5}", "{4}"),
    ),
    ("data.kind=Gathered", r"ValueError: no luck \(samples (\d+, ){4}\d+ and 7 more of 96 in `train`\)"),
    (
        "data.validation_fraction=0.25 data.num_workers=2",
        r"ValueError: no luck \(sample \d+ of \d\d in `\w+`, which is 77 of the 96 in the whole set, in DataLoader "
        r"worker [01]\)",
    ),
]


@pytest.mark.fault(61)
@pytest.mark.parametrize(("overrides", "says"), RAISES, ids=[overrides for overrides, _ in RAISES])
def test_a_sample_that_raises_is_named_and_the_error_stays_the_users(recipe: Recipe, overrides: str, says: str) -> None:
    ended = troubled(recipe, "data.train=raises", *overrides.split())
    error = ended.failed(rank=int(ended.error["rank"]), says=says, step=False)
    assert error["kind"] == "ValueError"
    assert 'raise ValueError("no luck")' in error["traceback"]
    assert "Caught ValueError" not in ended.done.err


@pytest.mark.fault(61)
def test_an_error_that_torch_could_not_pass_on_is_passed_on(recipe: Recipe) -> None:
    ended = troubled(recipe, "data.train=odd", "data.num_workers=2")
    says = r"Odd: this and that \(sample 77 of 96 in `train`, in DataLoader worker [01]\)"
    assert ended.failed(rank=int(ended.error["rank"]), says=says, step=False)["kind"] == "Odd"


@pytest.mark.variants(1)
@pytest.mark.fault(60, 61)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_samples_that_do_not_fit_together_are_named_with_their_forms(recipe: Recipe, num_workers: int) -> None:
    ended = troubled(recipe, "data.train=shape", f"data.num_workers={num_workers}")
    forms = r"\(int64\[\], float32\[4\], int64\[\]\) and \(int64\[\], float32\[8\], int64\[\]\)"
    says = rf"samples \d+, \d+ of 96 in `train`.* do not fit into one batch: {forms}"
    error = ended.failed(rank=int(ended.error["rank"]), says=says, step=False)
    assert " 77 of 96" in error["message"]


@pytest.mark.fault(60)
def test_a_len_that_lies_shows_in_the_samples_number(recipe: Recipe) -> None:
    ended = troubled(recipe, "data.train=lies")
    says = r"IndexError: list index out of range \(sample (9[6-9]|1[01]\d) of 120 in `train`\)"
    ended.failed(rank=int(ended.error["rank"]), says=says, step=False)


REFUSED = [
    ("data.count=0", "data._target_=points.load_trouble: `train`"),
    ("data.kind=NoEval", "data._target_=points.load_trouble: `eval`"),
    ("data.kind=NoLen", "data._target_=points.load_trouble: `train` is a generator"),
    ("data.count=23", "trainer.global_batch_size=24: at most 23"),
    ("data.train=differs", "data._target_=points.load_trouble: rank 1"),
]


@pytest.mark.fault(60)
@pytest.mark.parametrize(("overrides", "expected"), REFUSED, ids=[overrides for overrides, _ in REFUSED])
def test_data_that_cannot_be_divided_is_refused_by_all_ranks_at_once(
    recipe: Recipe, overrides: str, expected: str
) -> None:
    done = recipe("data=trouble", "trainer.gpus=3", "trainer.threads=1", *overrides.split())
    command_refused(done, expected, out=None)


@pytest.mark.fault(62)
@pytest.mark.parametrize(
    "overrides",
    [
        "data.num_workers=1",
        *(pytest.param(word, marks=pytest.mark.slow) for word in ("data.num_workers=0", "data.kind=Gathered")),
    ],
)
def test_a_nan_on_one_rank_stops_all_or_is_skipped_by_all(recipe: Recipe, overrides: str) -> None:
    three = ("trainer.gpus=3", "data.train=poison", *overrides.split())
    stopped = troubled(recipe, *three, "trainer.nonfinite=stop", "trainer.log_every=4")
    error = stopped.error
    assert (stopped.done.code, error["kind"]) == (1, "NonFiniteError")
    assert "train/loss is nan at step" in error["message"]
    skipped = troubled(recipe, *three, "trainer.nonfinite=skip")
    assert skipped.done.code == 0, skipped.done.err
    bad = [line["step"] for line in skipped.done.metrics() if line.get("train/skipped_steps")]
    assert len(bad) == 2, "one step of each epoch has the bad sample"
    assert f"at step {bad[0]}:" in error["message"]
    found = weights(skipped.done)
    assert all(tensor.isfinite().all() for tensor in found.values())
    alone = troubled(recipe, *three, "trainer.nonfinite=skip", "trainer.gpus=1", "data.kind=Trouble")
    assert [line["step"] for line in alone.done.metrics() if line.get("train/skipped_steps")] == bad
    assert all(torch.allclose(found[name], tensor, atol=1e-6) for name, tensor in weights(alone.done).items())


# --- Shared memory ---


def in_little_shared_memory(recipe: Recipe, *overrides: str, mounted_with: str = "size=1m") -> Done:
    """Run where /dev/shm has one mebibyte, or is otherwise restricted, in a mount namespace of its own."""
    try:
        subprocess.run(["unshare", "--mount", "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("a small /dev/shm needs a mount namespace, which only root may make")
    arguments, run = recipe.words(
        "data=trouble", "data.kind=Large", "task._target_=points.LargeTask", *EVERY, *overrides
    )
    full = "head -c 1048576 /dev/zero > /dev/shm/full &&" if "data.train=full" in overrides else ""
    mounted = f'mount -t tmpfs -o {mounted_with} tmpfs /dev/shm && {full} exec "$@"'
    process = subprocess.Popen(
        ["unshare", "--mount", "sh", "-c", mounted, "sh", sys.executable, "-m", "ddpexp", *arguments],
        cwd=recipe.ddpexp.folder, env=recipe.ddpexp.environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    return finish(process, run)


@pytest.mark.variants(1)
@pytest.mark.fault(56)
@pytest.mark.parametrize("form", ["tensor", "array", "numbers", "full"])
def test_batches_that_do_not_fit_into_shared_memory_say_its_size_and_what_to_do(recipe: Recipe, form: str) -> None:
    done = in_little_shared_memory(recipe, f"data.train={form}", "data.num_workers=2")
    error = Ended(done).error
    assert done.code == 1
    assert error["kind"] == "LoaderError"
    place, remedy = shared_memory_place(runtime()), enlarge_shared_memory(runtime())
    assert re.search(rf"do not fit into shared memory: /dev/shm of this {place} has 1\.0 MB, [01]\.\d MB of it free\. "
                     rf"Enlarge it \({re.escape(remedy)}\), or use data\.num_workers=0", error["message"])  # fmt: skip
    warning = (
        f"/dev/shm of this {place} has 1.0 MB, little for the batches of data.num_workers=2 DataLoader workers a rank"
    )
    assert (done.out + done.err).count(warning) == 1


@pytest.mark.variants(1)
@pytest.mark.fault(56)
@pytest.mark.parametrize(
    ("mounted_with", "sentence"),
    [
        ("ro", "cannot pass their batches on: /dev/shm cannot be written (Read-only file system). Or use fewer"),
        ("size=4k", "do not fit into shared memory: /dev/shm of this "),
    ],
)
def test_shared_memory_that_has_no_room_for_a_loader_gets_one_sentence(
    recipe: Recipe, mounted_with: str, sentence: str
) -> None:
    done = in_little_shared_memory(recipe, "data.train=tensor", "data.num_workers=2", mounted_with=mounted_with)
    assert done.code == 1
    assert sentence in Ended(done).error["message"]
    assert "Traceback" not in done.out + done.err


@pytest.mark.slow
@pytest.mark.fault(56)
def test_without_dataloader_workers_little_shared_memory_is_enough(recipe: Recipe) -> None:
    done = in_little_shared_memory(recipe, "data.train=tensor", "trainer.epochs=1")
    assert done.code == 0, done.err
    assert "/dev/shm" not in done.out + done.err

"""Promise 3: whatever ends a run, whenever, the same command resumes it.

And ends with the weights of the undisturbed run.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event

from ddpexp.checkpoint.format import complete_checkpoints, scan, seal
from ddpexp.settings.metrics import MEASURED
from ddpexp.system.text import counted
from tests.conftest import OWN_SERVER, PATIENCE, Ddpexp, Done, finish, living
from tests.points import Recipe, session
from tests.records import timeless

CODE = """\
import random

import numpy as np
from tests.records import timeless


class Deep(nn.Sequential):
    # Several buckets, statistics of batches, dropout.
    def __init__(self, hidden=24, dropout=0.2):
        layers = [nn.Linear(4, hidden)]
        for _ in range(4):
            layers += [nn.BatchNorm1d(hidden), nn.ReLU(), nn.Dropout(dropout), nn.Linear(hidden, hidden)]
        super().__init__(*layers, nn.Linear(hidden, 2))


class Drawing(Sides):
    # Draws from every generator that a recipe may use.
    def step(self, model, batch):
        time.sleep(float(os.environ.get("PACE", "0")))
        loss, count, metrics = super().step(model, batch)
        return loss * (1 + torch.rand(()) + np.random.rand() + random.gauss(0, 0.1)), count, metrics


class Noisy(Items):
    def __getitem__(self, index):
        number, row, label = super().__getitem__(index)
        return number, row + torch.rand(4) / 9 + float(np.random.rand()) / 9 + random.random() / 9, label


def load_noisy(train=96, test=33):
    return Splits(Noisy(train, 0), {"eval": Items(test, 1)})


class Slow(Sides):
    # Long enough to be interrupted in the middle of whatever it does.
    steps = 0

    def __init__(self, train_seconds=0.0, eval_seconds=0.0, mark=None):
        self.train_seconds, self.eval_seconds, self.mark = train_seconds, eval_seconds, mark

    def step(self, model, batch):
        self.steps += model.training
        evaluates = not model.training and self.steps != 1  # after its first step a task is checked for returning sums
        if evaluates and self.mark:
            open(self.mark, "w").close()
        time.sleep(self.train_seconds if model.training else self.eval_seconds * evaluates)
        return super().step(model, batch)


class Diverges(Sides):
    # A loss, or only the gradient, that is not finite from one step on.
    def __init__(self, step=8, loss=True):
        self.left, self.loss = step, loss

    def step(self, model, batch):
        total, count, metrics = super().step(model, batch)
        if model.training:
            self.left -= 1
            if self.left <= 0:
                total = total * float("nan") if self.loss else total + (next(model.parameters()).sum() * 0).sqrt()
        return total, count, metrics


class Writes(Sides):
    # The samples of every step, by the rank that saw them.
    def __init__(self, folder):
        self.file = open(f"{folder}/{os.getpid()}-{RANK}", "a", buffering=1)

    def step(self, model, batch):
        if model.training:
            self.file.write(f"{batch[0].tolist()}\\n")
        return super().step(model, batch)
"""
DEEP = ("model._target_=points.Deep", "strategy.bucket_cap_mb=0.001", "model.dropout=0.2")
LONG = (
    "trainer.epochs=null",
    "trainer.max_steps=60",
    "trainer.log_every=7",
    "trainer.eval_every=25",
    "trainer.checkpoint_every=5",
)
LOCAL = ("strategy=diloco", "strategy.sync_every=7", "strategy.warmup_steps=20")
SHARDED = ("model._target_=points.Deep", "model.dropout=0.2", "strategy=fsdp", "strategy.min_block_mb=0.001")
COMPILED = (
    "model._target_=points.Deep", "model.dropout=0.2", "trainer.compile_step=true", "trainer.micro_batch_size=6",
)  # fmt: skip
ROWS = (*DEEP, "strategy.shard_optimizer=true")
INTERLEAVED = (
    "model._target_=points.Deep", "model.dropout=0.2", "strategy=pipeline", "strategy.schedule=interleaved",
    "strategy.stages_per_worker=2", "trainer.micro_batch_size=6",
)  # fmt: skip
MESH = (
    "model.dropout=0.2", "strategy=pipeline", "strategy.tp_size=2", "trainer.micro_batch_size=6",
    'strategy.tp_plan=[{match:"0",style:colwise},{match:"3",style:rowwise}]',
)  # fmt: skip
SGD, ADAMW = (("optimizer=sgd", "optimizer.momentum=0.9"), ("optimizer=adamw",))
FROZEN = (
    "trainer.freeze=['4.*']",
    "trainer.freeze_until={step: 20, match: ['0.*', '1.*', '13.*']}",
    "trainer.param_groups=[{match: ['17.*'], lr_scale: 0.5}, {ndim: 1, weight_decay: 0.1}]",
)


@pytest.fixture(scope="session")
def environ(warm_environ: dict[str, str]) -> dict[str, str]:
    """What is left after an end is tested; where the server itself is killed, the command has its own."""
    return warm_environ


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, environ: dict[str, str]) -> Recipe:
    return Recipe(Ddpexp(tmp_path_factory.mktemp("interruptions"), environ), CODE)


@pytest.fixture(scope="module")
def undisturbed(recipe: Recipe) -> Callable[..., Done]:
    """Return the run that nothing interrupts, made once for each set of words, first with other hashes of Python's."""
    known: dict[Sequence[str], Done] = {}

    def run(*overrides: str) -> Done:
        if overrides not in known:
            known[overrides] = recipe(*overrides, environ=None if known else OWN_SERVER)
            assert known[overrides].code == 0, known[overrides].err
        return known[overrides]

    return run


def records(run: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl but for what a clock has made."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [timeless(line) for line in lines]


def points_of_tensorboard(run: Path) -> Counter[tuple[str, int]]:
    """Return every point in the files themselves but for times of steps, with how often it stands there."""
    found: Counter[tuple[str, int]] = Counter()
    for path in sorted((run / "tb").glob("events.*")):
        for data in RawEventFileLoader(str(path)).Load():
            event = Event.FromString(data)
            tags = [value.tag for value in event.summary.value if "/" in value.tag]
            found.update((tag, event.step) for tag in tags if not tag.startswith(MEASURED))
    return found


def same(done: Done, expected: Done) -> None:
    """Compare everything that a run leaves with what the undisturbed one has left."""
    assert done.code == 0, done.err
    assert done.result()["weights_sha256"] == expected.result()["weights_sha256"]
    assert records(done.run) == records(expected.run)
    assert done.result()["metrics"] == expected.result()["metrics"]
    assert [one.name for one in complete_checkpoints(done.run / "checkpoints")] == [
        one.name for one in complete_checkpoints(expected.run / "checkpoints")
    ]
    assert not list((done.run / "checkpoints").glob(".*"))


def kill_everything(process: subprocess.Popen[str], run: Path) -> None:
    """Kill the command and whatever belongs to it, at once."""
    for pid in [process.pid, *living(run)]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.communicate(timeout=PATIENCE)


def wait_for(condition: Callable[[], Any], process: subprocess.Popen[str], seconds: float = PATIENCE) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)


def has_steps(run: Path, count: int) -> Callable[[], bool]:
    def look() -> bool:
        return any(int(path.name[5:]) >= count for path in complete_checkpoints(run / "checkpoints"))

    return look


@pytest.mark.variants(1)
@pytest.mark.parametrize(
    ("world_size", "overrides"),
    [
        (2, (*SGD, *FROZEN, "task._target_=points.Drawing")),
        pytest.param(2, (*ADAMW, "trainer.precision=bf16", "trainer.ema_decay=0.9"), marks=pytest.mark.slow),
        (3, (*ADAMW, "data._target_=points.load_noisy", "data.num_workers=1")),
        pytest.param(3, (*SGD, "strategy.comm_hook=fp16"), marks=pytest.mark.slow),
        pytest.param(3, (*SGD, "trainer.precision=bf16", "trainer.micro_batch_size=4"), marks=pytest.mark.slow),
        pytest.param(4, (*SGD, "strategy.broadcast_buffers=false"), marks=pytest.mark.slow),
        (4, (*ADAMW, "trainer.precision=bf16", "trainer.nonfinite=skip", "strategy.reduce_through=backend")),
    ],
)
def test_killed_twice_and_restarted_the_run_ends_with_the_same_result(
    recipe: Recipe, undisturbed: Callable[..., Done], world_size: int, overrides: tuple[str, ...]
) -> None:
    overrides = (*DEEP, *LONG, f"trainer.gpus={world_size}", *overrides, "logger=tensorboard")
    expected = undisturbed(*overrides)
    process, run = recipe.start(*overrides, environ={"PACE": "0.05"})
    wait_for(has_steps(run, 10), process)
    kill_everything(process, run)
    process, run = recipe.start(*overrides, run=run, environ={"PACE": "0.05"})
    wait_for(has_steps(run, 30), process)
    process.kill()  # the command alone: the ranks go with it
    process.communicate(timeout=PATIENCE)
    done = recipe(*overrides, run=run)
    same(done, expected)
    assert "resumed after step" in done.out
    found = points_of_tensorboard(run)
    assert found == points_of_tensorboard(expected.run)
    assert set(found.values()) == {1}


POINTS = [
    ("begun", 0), ("manifest", 0), ("share", 1), ("written", 0), ("share", 0), ("recorded", 0), ("renamed", 0),
    ("pruning", 0),
    ("begun", 1), ("written", 1),
]  # fmt: skip
"""Where a rank is killed in a save, and which rank."""


@pytest.mark.variants(1)
@pytest.mark.parametrize(("place", "rank"), POINTS)
def test_a_rank_killed_at_any_point_of_a_save_loses_no_checkpoint(
    recipe: Recipe, undisturbed: Callable[..., Done], place: str, rank: int
) -> None:
    overrides = (*DEEP, *LONG, *SGD, "trainer.gpus=2", "model.hidden=150", "trainer.keep_last=1")
    expected = undisturbed(*overrides)
    process, run = recipe.start(*overrides, environ={"DDPEXP_FAULT": f"checkpoint.{place}:kill:{rank}:4"})
    killed = finish(process, run)
    assert killed.code == 1, killed.err
    assert f"rank {rank} on" in killed.err
    assert "SIGKILL" in killed.err
    assert complete_checkpoints(run / "checkpoints")
    done = recipe(*overrides, run=run)
    same(done, expected)
    assert "resumed after step" in done.out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "place", "rank"),
    [
        (SHARDED, "written", 1),
        *(
            pytest.param(strategy, place, rank, marks=pytest.mark.slow)
            for strategy, place, rank in (
                (SHARDED, "begun", 0),
                (SHARDED, "share", 1),
                (SHARDED, "renamed", 0),
                ((*SHARDED, "strategy.reduce_through=backend"), "share", 1),
                (ROWS, "begun", 1),
                (ROWS, "share", 0),
            )
        ),
    ],
)
def test_a_sharded_run_that_is_killed_ends_as_replicas_do_undisturbed(
    recipe: Recipe, undisturbed: Callable[..., Done], strategy: Sequence[str], place: str, rank: int
) -> None:
    overrides = (*LONG, *SGD, "trainer.gpus=2", "model.hidden=150", "trainer.keep_last=1")
    expected = undisturbed(*DEEP, *overrides)
    process, run = recipe.start(*strategy, *overrides, environ={"DDPEXP_FAULT": f"checkpoint.{place}:kill:{rank}:4"})
    killed = finish(process, run)
    assert (killed.code, f"rank {rank} on" in killed.err) == (1, True), killed.err
    done = recipe(*strategy, *overrides, run=run)
    same(done, expected)
    assert "resumed after step" in done.out


@pytest.mark.variants(1)
@pytest.mark.parametrize("place", ["written", "manifest", "renamed"])
@pytest.mark.parametrize("what", ["command", "everything"])
def test_a_save_that_ends_with_the_command_loses_no_checkpoint(
    recipe: Recipe, undisturbed: Callable[..., Done], tmp_path: Path, place: str, what: str
) -> None:
    overrides = (*DEEP, *LONG, *SGD, "trainer.gpus=2", "model.hidden=150", "trainer.keep_last=1")
    mark = tmp_path / "mark"
    process, run = recipe.start(*overrides, environ={"DDPEXP_FAULT": f"checkpoint.{place}:pause={mark}:0:3"})
    wait_for(mark.exists, process)
    if what == "command":
        process.kill()
        process.communicate(timeout=PATIENCE)
    else:
        kill_everything(process, run)
    same(recipe(*overrides, run=run), undisturbed(*overrides))


@pytest.mark.slow
@pytest.mark.parametrize("number", [*range(3), *(pytest.param(one, marks=pytest.mark.slow) for one in range(3, 6))])
def test_killed_at_a_random_moment(recipe: Recipe, undisturbed: Callable[..., Done], number: int) -> None:
    chance = random.Random(number)
    overrides = (
        *DEEP,
        *LONG,
        *(SGD, ADAMW)[number % 2],
        f"trainer.gpus={2 + number % 3}",
        "task._target_=points.Drawing",
    )
    expected = undisturbed(*overrides)
    process, run = recipe.start(*overrides)
    time.sleep(chance.uniform(0.6, 1.6))
    kill_everything(process, run)
    same(recipe(*overrides, run=run), expected)


SOAKED = [
    (2, (*DEEP, *SGD, *FROZEN, "task._target_=points.Drawing"), 70),
    (
        3,
        (
            *DEEP,
            *ADAMW,
            "data._target_=points.load_noisy",
            "data.num_workers=1",
            "trainer.precision=bf16",
            "trainer.ema_decay=0.9",
        ),
        70,
    ),
    (4, (*DEEP, *SGD, "trainer.reduction=exact", "trainer.micro_batch_size=3", "trainer.clip_grad_norm=0.5"), 70),
    *((size, (*SHARDED, *ADAMW, "task._target_=points.Drawing", "trainer.clip_grad_norm=0.5"), 30) for size in (2, 4)),
    *((size, (*ROWS, *ADAMW, "task._target_=points.Drawing", "trainer.ema_decay=0.9"), 30) for size in (2, 4)),
    *((size, (*LOCAL, *ADAMW, "task._target_=points.Drawing", "trainer.clip_grad_norm=0.5"), 30) for size in (2, 4)),
    (2, (*INTERLEAVED, *ADAMW, "task._target_=points.Drawing", "trainer.clip_grad_norm=0.5"), 30),
    (4, (*MESH, *ADAMW, "task._target_=points.Drawing", "trainer.ema_decay=0.9"), 30),
    (2, (*COMPILED, *ADAMW, "trainer.clip_grad_norm=0.5", "trainer.ema_decay=0.9"), 20),
]
"""World size, recipe, and how often it is killed."""


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("world_size", "overrides", "most"),
    SOAKED,
    ids=[
        "2",
        "3",
        "4",
        "fsdp, 2",
        "fsdp, 4",
        "rows, 2",
        "rows, 4",
        "local, 2",
        "local, 4",
        "interleaved, 2",
        "mesh, 4",
        "compiled, 2",
    ],
)
def test_killed_at_random_moments_again_and_again(
    recipe: Recipe, undisturbed: Callable[..., Done], world_size: int, overrides: tuple[str, ...], most: int
) -> None:
    """Kill the command, the fork server, a rank, a loader's worker, everything, or a rank within a write.

    All runs end equal.
    """
    chance = random.Random(world_size)
    latest = 8.0 if "trainer.compile_step=true" in overrides else 1.5  # where it compiles first
    overrides = (*LONG, *overrides, "trainer.max_steps=400", f"trainer.gpus={world_size}")
    expected = undisturbed(*overrides)
    kinds: Counter[str] = Counter()
    rounds = 0
    while kinds.total() < most:
        rounds += 1
        run = None
        while True:
            kind = chance.choice([*KILLS, "within a write"])
            place = chance.choice(["begun", "written", "share", "recorded", "manifest", "renamed", "pruning"])
            rank = chance.randrange(world_size) if place in ("begun", "written", "share") else 0
            fault = (
                {"DDPEXP_FAULT": f"checkpoint.{place}:kill:{rank}:{chance.randrange(1, 6)}"}
                if kind == "within a write"
                else {}
            )
            faulty = fault if kinds.total() < most else {}
            process, run = recipe.start(*overrides, run=run, environ={**faulty, **OWN_SERVER})
            if chance.random() < 0.8:  # else while it starts
                while process.poll() is None and not ranks_of(process):
                    time.sleep(0.01)
            time.sleep(chance.uniform(0.0, latest))
            if process.poll() is None and kinds.total() < most and kind != "within a write":
                KILLS[kind](process, run)
            done = finish(process, run)
            if done.code == 0:
                break
            kinds[kind] += 1
        same(done, expected)
    print(f"world size {world_size}: {dict(kinds)} in {rounds} runs, all equal")


def kill_a_rank(process: subprocess.Popen[str], run: Path) -> None:
    """Kill one rank."""
    _kill_one(ranks_of(process))


def kill_the_server(process: subprocess.Popen[str], run: Path) -> None:
    """Kill the process that the ranks were forked from."""
    _kill_one([pid for pid, parent in session(process.pid).items() if parent == process.pid])


def kill_a_loader_worker(process: subprocess.Popen[str], run: Path) -> None:
    """Kill a child of a rank where there is one, else a rank."""
    ranks = ranks_of(process)
    _kill_one([pid for pid, parent in session(process.pid).items() if parent in ranks] or ranks)


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    """Return the children of the fork server, which is the command's own."""
    family = session(process.pid)
    return [pid for pid, parent in family.items() if family.get(parent) == process.pid]


def _kill_one(found: Sequence[int]) -> None:
    if found:
        with suppress(ProcessLookupError):
            os.kill(random.choice(found), signal.SIGKILL)


KILLS: dict[str, Callable[[subprocess.Popen[str], Path], None]] = {
    "command": lambda process, run: process.kill(),
    "server": kill_the_server,
    "rank": kill_a_rank,
    "loader": kill_a_loader_worker,
    "everything": kill_everything,
}


@pytest.mark.parametrize(("step", "loss"), [(8, True), (10, False)])
def test_weights_that_are_not_finite_are_never_kept(recipe: Recipe, step: int, loss: bool) -> None:
    overrides = (*DEEP, *LONG, *SGD, "trainer.gpus=2", "trainer.log_every=1000", "trainer.eval_every=0")
    done = recipe(*overrides, "task._target_=points.Diverges", f"+task.step={step}", f"+task.loss={loss}")
    assert done.code == 1
    named = f"train/loss is nan at step {step}" if loss else f"train/grad_norm is nan at step {step}"
    assert named in done.err
    [folder] = complete_checkpoints(done.run / "checkpoints")
    assert folder.name == "step-00000005"
    assert all(bool(tensor.isfinite().all()) for tensor in load_file(folder / "model.safetensors").values())


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.variants(1)
@pytest.mark.parametrize(
    ("harm", "word"),
    [
        (lambda folder: damage(folder / "model.safetensors"), "model.safetensors is damaged"),
        (
            lambda folder: (folder / "state.optimizers.safetensors").write_bytes(b""),
            "state.optimizers.safetensors is cut off",
        ),
        (lambda folder: (folder / "state.progress.json").unlink(), "state.progress.json: it is missing"),
        (
            lambda folder: damage(folder / "checkpoint.json"),
            "checkpoint.json is damaged: it does not have its own hash",
        ),
    ],
    ids=["a bit", "empty", "missing", "manifest"],
)
def test_a_damaged_checkpoint_is_not_taken_but_the_one_before(
    recipe: Recipe, undisturbed: Callable[..., Done], harm: Callable[[Path], Any], word: str
) -> None:
    overrides = (*DEEP, *LONG, *SGD, "trainer.gpus=2", "model.hidden=150")
    process, run = recipe.start(*overrides, environ={"DDPEXP_FAULT": "checkpoint.begun:kill:1:5"})
    assert finish(process, run).code == 1
    newest, before = complete_checkpoints(run / "checkpoints")
    harm(newest)
    (run / "checkpoints/notes.txt").write_text("mine")
    required = recipe(*overrides, "run.resume=require", run=run)
    assert required.code == 2
    assert "the newest checkpoint in " in required.err
    assert f"({newest.name}: " in required.err
    assert newest.is_dir()  # what is refused changes nothing
    (run / "checkpoints/step-00009999").mkdir()  # without a manifest
    done = recipe(*overrides, run=run)
    assert done.code == 0, done.err
    assert word in done.out + done.err
    assert "step-00009999.damaged" in done.out
    assert f"it is kept as {newest.name}.damaged" in done.out
    assert [one.problem() for one in scan(run / "checkpoints").complete] == [None, None]
    assert f"resumed after step {int(before.name[5:])} " in done.out
    assert done.result()["weights_sha256"] == undisturbed(*overrides).result()["weights_sha256"]
    assert records(run) == records(undisturbed(*overrides).run)


def test_a_model_of_other_shapes_is_refused_and_the_finished_run_stays_as_it_was(recipe: Recipe) -> None:
    overrides = (*LONG, "trainer.gpus=2", "trainer.max_steps=10")
    first = recipe(*overrides, "model.hidden=8")
    assert first.code == 0, first.err
    watched = ("*.json", "*.yaml", "metrics.jsonl", "checkpoints/*/*")
    before = {path: path.read_bytes() for pattern in watched for path in first.run.glob(pattern)}
    other = recipe(*overrides, "model.hidden=9", "trainer.max_steps=20", run=first.run)
    assert other.code == 2
    text = (
        "the checkpoint of step 10 (model.safetensors) holds the weights of another model: 0.weight is (8, 4) of "
        "torch.float32"
    )
    assert text in other.err
    assert {path: path.read_bytes() for pattern in watched for path in first.run.glob(pattern)} == before


def test_a_checkpoint_of_a_newer_ddpexp_is_refused(recipe: Recipe) -> None:
    overrides = (*LONG, "trainer.gpus=1")
    process, run = recipe.start(*overrides, environ={"DDPEXP_FAULT": "checkpoint.begun:kill:0:5"})
    assert finish(process, run).code == 1
    path = complete_checkpoints(run / "checkpoints")[0] / "checkpoint.json"
    manifest = json.loads(path.read_text())
    del manifest["sha256"]
    path.write_bytes(seal({**manifest, "format": 99, "ddpexp": "9.9"}))
    done = recipe(*overrides, run=run)
    assert done.code == 2
    assert "was written by ddpexp 9.9 (format 99)" in done.err


@pytest.mark.parametrize(
    "way", [(2, 1, 4), *(pytest.param(one, marks=pytest.mark.slow) for one in ((4, 2, 1), (1, 4, 2)))]
)
def test_another_number_of_workers_sees_the_same_samples_in_the_same_order(
    recipe: Recipe, tmp_path: Path, way: tuple[int, int, int]
) -> None:
    overrides = (*LONG, "trainer.micro_batch_size=3", "trainer.checkpoint_every=4", "task._target_=points.Writes")
    seen: list[list[int]] = []
    run, last = None, 0
    for number, size in enumerate(way):
        folder = tmp_path / str(number)
        folder.mkdir()
        environ = {"DDPEXP_FAULT": f"checkpoint.renamed:kill:0:{3 + number}"} if number < 2 else {}
        process, run = recipe.start(
            *overrides, f"+task.folder={folder}", f"trainer.gpus={size}", run=run, environ=environ
        )
        done = finish(process, run)
        assert done.code == (1 if number < 2 else 0), done.err
        if number:
            assert (
                f"{counted(size, 'worker')} instead of {way[number - 1]}\n" in done.out + (run / "run.log").read_text()
            )
        by_rank = {int(path.name.partition("-")[2]): path.read_text().splitlines() for path in folder.iterdir()}
        each = 8 // size  # micro-batches of a rank in a step
        steps = min(len(lines) // each for lines in by_rank.values())
        made = [
            [
                index
                for rank in range(size)
                for line in by_rank[rank][step * each : (step + 1) * each]
                for index in json.loads(line)
            ]
            for step in range(steps)
        ]
        seen = [*seen[:last], *made]
        last = int(complete_checkpoints(run / "checkpoints")[0].name[5:])
    alone = tmp_path / "alone"
    alone.mkdir()
    expected = recipe(*overrides, f"+task.folder={alone}", "trainer.gpus=1")
    [lines] = [path.read_text().splitlines() for path in alone.iterdir()]
    micro = [json.loads(line) for line in lines]
    assert seen == [[index for part in micro[step * 8 : (step + 1) * 8] for index in part] for step in range(60)]
    assert expected.code == 0
    assert len(records(run)) == len(records(expected.run))  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_size_of_a_micro_batch_may_follow_the_number_of_workers(recipe: Recipe) -> None:
    overrides = (*LONG, *SGD, "trainer.micro_batch_size=auto")
    process, run = recipe.start(*overrides, "trainer.gpus=2", environ={"DDPEXP_FAULT": "checkpoint.renamed:kill:0:3"})
    assert finish(process, run).code == 1
    done = recipe(*overrides, "trainer.gpus=3", run=run)
    assert done.code == 0, done.err
    assert done.result()["step"] == 60
    assert [record["step"] for record in records(run) if "train/loss" in record] == [*range(7, 60, 7), 60]


@pytest.mark.slow
@pytest.mark.fault(10)
@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_stop_in_the_middle_of_an_evaluation_saves_and_the_next_start_evaluates(
    recipe: Recipe, undisturbed: Callable[..., Done], tmp_path: Path, world_size: int
) -> None:
    overrides = (*DEEP, *LONG, *ADAMW, f"trainer.gpus={world_size}", "task._target_=points.Slow")
    quick = (*overrides, "+task.eval_seconds=0", "+task.mark=null")
    mark = tmp_path / "mark"
    process, run = recipe.start(*overrides, "+task.eval_seconds=4", f"+task.mark={mark}")
    wait_for(mark.exists, process)
    process.terminate()
    stopped = finish(process, run)
    assert stopped.code == 143, stopped.err
    assert (stopped.result()["status"], stopped.result()["step"]) == ("interrupted", 25)
    assert not [record for record in records(run) if "eval/loss" in record]
    assert stopped.err.splitlines()[-1].startswith("python -m ddpexp resume ")
    same(recipe(*quick, run=run), undisturbed(*quick))


def test_the_last_line_of_an_interrupted_run_is_the_command_that_resumes_it(
    recipe: Recipe, undisturbed: Callable[..., Done]
) -> None:
    overrides = (*DEEP, *LONG, *SGD, "trainer.gpus=2", "task._target_=points.Drawing")
    process, run = recipe.start(*overrides, environ={"PACE": "0.1"})
    wait_for(has_steps(run, 10), process)
    process.send_signal(signal.SIGINT)
    stopped = finish(process, run)
    assert stopped.code == 130
    done = finish(recipe.ddpexp.paste(stopped.err.splitlines()[-1]), run)
    assert done.code == 0, done.err
    assert done.result()["weights_sha256"] == undisturbed(*overrides).result()["weights_sha256"]
    assert records(run) == records(undisturbed(*overrides).run)


def test_usr1_saves_and_continues(recipe: Recipe, undisturbed: Callable[..., Done]) -> None:
    overrides = (
        *DEEP,
        *LONG,
        *SGD,
        "trainer.gpus=2",
        "task._target_=points.Slow",
        "trainer.checkpoint_every=0",
        "trainer.keep_last=null",
    )
    process, run = recipe.start(*overrides, "+task.train_seconds=0.06")
    wait_for(lambda: (run / "metrics.jsonl").exists() and records(run), process)
    process.send_signal(signal.SIGUSR1)
    done = finish(process, run)
    assert done.code == 0, done.err
    last, between = complete_checkpoints(run / "checkpoints")
    assert last.name == "step-00000060"
    assert 7 <= int(between.name[5:]) < 60
    assert done.result()["weights_sha256"] == undisturbed(*overrides).result()["weights_sha256"]


@pytest.mark.slow
def test_time_alone_may_trigger_checkpoints(recipe: Recipe) -> None:
    overrides = (
        *LONG,
        *SGD,
        "trainer.gpus=3",
        "task._target_=points.Slow",
        "+task.train_seconds=0.02",
        "trainer.keep_last=null",
    )
    done = recipe(*overrides, "trainer.checkpoint_every=0", "trainer.checkpoint_every_seconds=0.3")
    assert done.code == 0, done.err
    steps = [int(path.name[5:]) for path in complete_checkpoints(done.run / "checkpoints")]
    assert steps[0] == 60
    assert 2 <= len(steps) <= done.result()["seconds"] / 0.3 + 2


def test_the_best_checkpoint_stays_and_a_metric_that_is_none_is_refused(recipe: Recipe) -> None:
    overrides = (
        *LONG,
        *SGD,
        "trainer.gpus=2",
        "trainer.checkpoint_every=0",
        "trainer.eval_every=5",
        "trainer.keep_last=1",
    )
    done = recipe(*overrides, "trainer.keep_best=min:eval/loss")
    assert done.code == 0, done.err
    losses = {record["step"]: record["eval/loss"] for record in records(done.run) if "eval/loss" in record}
    best = min(losses, key=lambda step: losses[step])
    assert {int(path.name[5:]) for path in complete_checkpoints(done.run / "checkpoints")} == {best, 60}
    wrong = recipe(*overrides, "trainer.keep_best=max:eval/acc")
    assert wrong.code == 2
    assert (
        "trainer.keep_best=max:eval/acc names no metric of the evaluation: it has eval/loss, eval/accuracy."
        in wrong.err
    )
    assert not wrong.run.exists()


@pytest.mark.slow
def test_the_average_of_the_weights_is_what_is_evaluated_and_kept(recipe: Recipe) -> None:
    done = recipe(
        *LONG, *SGD, "trainer.gpus=2", "trainer.ema_decay=0.9", "trainer.checkpoint_every=1", "trainer.keep_last=null"
    )
    assert done.code == 0, done.err
    folders = complete_checkpoints(done.run / "checkpoints")[::-1]
    average = load_file(folders[0] / "model.ema.safetensors")
    for folder in folders[1:]:
        weights, kept = load_file(folder / "model.safetensors"), load_file(folder / "model.ema.safetensors")
        for name, value in average.items():
            value.lerp_(weights[name], 1 - 0.9)
            assert torch.allclose(value, kept[name], atol=1e-6)
    plain = recipe(*LONG, *SGD, "trainer.gpus=2")
    assert plain.result()["weights_sha256"] == done.result()["weights_sha256"]  # EMA apart
    assert plain.result()["metrics"] != done.result()["metrics"]
    process, _ = recipe.ddpexp.start("evaluate", "--config-dir", str(recipe.folder / "conf"), str(done.run))
    evaluated = finish(process, done.run)
    assert f"eval/loss {done.result()['metrics']['eval/loss']:.6g}" in evaluated.out


@pytest.mark.variants(1)
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_write_that_fails_for_a_moment_is_tried_again(
    recipe: Recipe, undisturbed: Callable[..., Done], world_size: int
) -> None:
    overrides = (*DEEP, *LONG, *SGD, f"trainer.gpus={world_size}", "model.hidden=150")
    process, run = recipe.start(*overrides, environ={"DDPEXP_FAULT": "checkpoint.written:eio:1:2"})
    same(finish(process, run), undisturbed(*overrides))


@pytest.mark.slow
def test_a_disk_without_room_ends_the_run_and_keeps_what_was_saved(
    recipe: Recipe, undisturbed: Callable[..., Done], small_disk: Path
) -> None:
    overrides = (
        *DEEP,
        *LONG,
        *SGD,
        "trainer.gpus=2",
        "model.hidden=150",
        "trainer.keep_last=null",
        "logger=tensorboard",
    )
    run = small_disk / "run"
    full = recipe(*overrides, run=run)
    assert full.code == 1
    kept = complete_checkpoints(run / "checkpoints")
    assert kept
    assert re.search(
        r"CheckpointError: the checkpoint of step \d+ could not be written in .*: No space left on device", full.err
    )
    assert json.loads((run / "error.json").read_text())["kind"] == "CheckpointError"
    fewer = recipe(
        *overrides, "trainer.keep_last=1", "trainer.checkpoint_every=25", "trainer.on_save_error=continue", run=run
    )
    assert "Training continues (trainer.on_save_error=continue)." in fewer.out
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    done = recipe(*overrides, run=run)
    assert done.code == 0, done.err
    assert done.result()["weights_sha256"] == undisturbed(*overrides).result()["weights_sha256"]
    assert records(run) == records(undisturbed(*overrides).run)


def test_a_directory_that_cannot_be_written_is_refused(recipe: Recipe, small_disk: Path) -> None:
    overrides = (*LONG, "trainer.gpus=2", "trainer.max_steps=10")
    process, run = recipe.start(
        *overrides, run=small_disk / "run", environ={"DDPEXP_FAULT": "checkpoint.renamed:kill:0:1"}
    )
    assert finish(process, run).code == 1
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    for place in (run, small_disk / "other"):
        done = recipe(*overrides, run=place)
        assert done.code == 2
        assert "Read-only file system" in done.err
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of a megabyte and a half."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1500k", "tmpfs", str(place)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)

"""launcher=spawn: any number of workers on this machine, on loopback, with everything loaded before they start."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from ddpexp.launch import WorkerRequest
from ddpexp.launch.launchers.local import Spawn
from ddpexp.run import directory
from tests.conftest import OWN_SERVER, Ddpexp, Done, calling, finish
from tests.points import Recipe, session, wait_for

CODE = """\
import warnings


class Speaks(Sides):
    def __init__(self):
        print(f"rank {RANK} prints")
        warnings.warn("all ranks warn", stacklevel=1)
        warnings.warn(f"rank {RANK} warns", stacklevel=1)


class Floods(Sides):
    # Three megabytes in lines, then half a megabyte in one line that never ends.
    def __init__(self):
        for number in range(40_000):
            print(f"line {number:06} {'x' * 64}")
        print("y" * 500_000, end="", flush=True)


class Lists(Sides):
    # Writes what was imported since the worker began.
    def __init__(self, folder):
        self.folder = folder

    def step(self, model, batch):
        import begins

        with open(f"{self.folder}/{RANK}", "w") as file:
            file.write("\\n".join(set(sys.modules) - begins.MODULES))
        return super().step(model, batch)
"""

# The same environment for all: a warning that is printed is not an error here.
PLAIN = {"PYTHONWARNINGS": "default"}


@pytest.fixture(scope="module")
def environ(warm_environ: dict[str, str]) -> dict[str, str]:
    """Fork servers are forks, but for the launcher as a library and new interpreters."""
    return warm_environ


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, environ: dict[str, str]) -> Recipe:
    return Recipe(Ddpexp(tmp_path_factory.mktemp("spawn"), environ), CODE)


@pytest.fixture(scope="module")
def runs(recipe: Recipe) -> dict[int, Done]:
    overrides = ("task._target_=points.Speaks", "trainer.threads=1")
    return {size: recipe(*overrides, f"trainer.gpus={size}", environ=PLAIN) for size in (1, 2, 4, 8)}


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_any_number_of_workers_trains_to_a_result(runs: dict[int, Done], size: int) -> None:
    done = runs[size]
    assert done.code == 0, done.err
    result = done.result()
    assert (result["status"], result["world_size"], result["step"], result["samples"]) == ("done", size, 8, 192)
    assert result["metrics"]["eval/accuracy"] == runs[1].result()["metrics"]["eval/accuracy"]
    assert not (done.run / "error.json").exists()


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_each_ranks_output_is_in_its_own_log_and_rank_zeros_on_the_terminal_once(
    runs: dict[int, Done], size: int
) -> None:
    done = runs[size]
    logs = {int(path.stem): path.read_text() for path in (done.run / "ranks").iterdir()}
    assert sorted(logs) == list(range(size))
    for rank, text in logs.items():
        assert re.findall(r"rank \d prints", text) == [f"rank {rank} prints"]
        assert set(re.findall(r"rank \d warns", text)) == {f"rank {rank} warns"}
        assert "all ranks warn" in text
    assert re.findall(r"rank \d prints", done.out) == ["rank 0 prints"]


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_a_warning_is_shown_once_with_its_rank_even_if_all_ranks_give_it(runs: dict[int, Done], size: int) -> None:
    lines = (runs[size].out + runs[size].err).splitlines()
    assert len([line for line in lines if "UserWarning: all ranks warn" in line]) == 1
    for rank in range(size):
        [line] = [line for line in lines if f"UserWarning: rank {rank} warns" in line]
        assert line.startswith(f"[rank {rank}] ") == (rank != 0)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_both_start_methods_give_the_same_weights(recipe: Recipe, runs: dict[int, Done], size: int) -> None:
    done = recipe(
        "task._target_=points.Speaks",
        "trainer.threads=1",
        f"trainer.gpus={size}",
        "launcher.start_method=spawn",
        environ=PLAIN,
    )
    assert done.code == 0, done.err
    assert done.result()["weights_sha256"] == runs[size].result()["weights_sha256"]
    assert re.findall(r"rank \d prints", done.out) == ["rank 0 prints"]


def test_a_flood_of_output_and_a_line_without_an_end_hang_nothing(recipe: Recipe) -> None:
    done = recipe("task._target_=points.Floods", "trainer.gpus=2")
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert [line for line in lines if line.startswith("line ")] == [
        f"line {number:06} {'x' * 64}" for number in range(40_000)
    ]
    assert sum(line.count("y") for line in lines) >= 500_000
    assert lines[-1].startswith("done ")


@pytest.mark.slow
def test_a_terminal_that_reads_nothing_does_not_stop_the_training(recipe: Recipe) -> None:
    process, run = recipe.start("task._target_=points.Floods", "trainer.gpus=2")
    wait_for((run / "checkpoints").exists)  # while nobody reads the pipe, which holds 64 KiB
    assert finish(process, run).code == 0


def test_more_batch_than_samples_is_refused_by_the_workers_in_one_sentence(recipe: Recipe) -> None:
    done = recipe("trainer.global_batch_size=128", "trainer.gpus=2")
    assert done.code == 2
    assert done.err == "ddpexp: trainer.global_batch_size=128 is more than the 96 training samples. Use at most 96.\n"


BEGINS = """\
import sys

MODULES = set(sys.modules)


def main(path, prepared):
    import ddpexp.train.worker

    return ddpexp.train.worker.main(path, prepared)
"""
# What a worker may still import: the recipe, a few quick modules (the stand-in for torch's compiler is one), and what
# only rank zero of a run with TensorBoard wants.
QUICK = {"points", "ddpexp.system.start", "torch._dynamo", "torch.profiler._cupti_monitor"}
TENSORBOARD = {
    "tensorboard", "google", "fsspec", "absl", "xml", "encodings", "configparser",
    "csv", "_csv", "calendar", "backports",  # with Python 3.13 or 3.10, where nothing else has imported them before
}  # fmt: skip
OUR_TENSORBOARD = ("torch.utils.tensorboard", "ddpexp.loggers.tensorboard")


def test_training_imports_nothing_heavy_after_the_fork(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = ("trainer.gpus=2", "trainer.clip_grad_norm=1.0", "logger=tensorboard")
    done = recipe("task._target_=points.Lists", f"+task.folder={tmp_path}", *overrides)
    assert done.code == 1  # there is no module `begins` on its path
    # The launcher as a library: the same work in the same processes, with an entry that looks around first.
    again = directory.RunDir(tmp_path / "again")
    again.path.mkdir()
    for path in (done.run / "config.yaml", done.run / "manifest.json"):
        shutil.copy(path, again.path)
    (tmp_path / "begins.py").write_text(BEGINS)
    monkeypatch.syspath_prepend(tmp_path)
    assert (
        Spawn().launch(calling("begins:main", [str(again.path), '{"data": null}'], again.ranks, WorkerRequest(gpus=2)))
        == 0
    )
    late = {}
    for rank in (0, 1):
        names = set((tmp_path / str(rank)).read_text().split()) - QUICK
        late[rank] = {name for name in names if not name.startswith(("ddpexp.launch.", "ddpexp.system."))}
    assert late[1] == set()
    assert "torch.utils.tensorboard" in late[0]
    assert {
        name for name in late[0] if name.split(".")[0] not in TENSORBOARD and not name.startswith(OUR_TENSORBOARD)
    } == set()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("size", [2, 4])
def test_a_hundred_runs_in_a_row_end_well_and_leave_nothing(recipe: Recipe, size: int) -> None:
    digests = set()
    for _ in range(100):
        process, run = recipe.start(f"trainer.gpus={size}", "trainer.threads=1", environ=OWN_SERVER)
        done = finish(process, run)
        assert (done.code, done.err) == (0, "")
        assert session(process.pid) == {}
        digests.add(done.result()["weights_sha256"])
    assert len(digests) == 1

"""Promise 1: whatever starts the workers, the same experiment gives the same weights, order, files and exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import OWN_SERVER, Ddpexp, Done
from tests.launch.starters import SPAWN, STARTERS, Starter, params, skip_without
from tests.points import Recipe

# New interpreters give the weights of forked ones in the ordinary run too: tests/cli/test_main.py.
# torchrun on one machine and elastic have tests of their own, MPICH is a second MPI, and the launcher of
# torch.distributed is torchrun under its former name.
LONGER = ("spawn, new interpreters", "torchrun", "torch.distributed.launch", "elastic", "MPICH")
USUAL = [str(starter) for starter in STARTERS if starter.name not in LONGER]

CODE = """\
import json


class Deep(nn.Sequential):
    # Several buckets, once strategy.bucket_cap_mb is small, and BatchNorm's running statistics.
    def __init__(self):
        layers = [nn.Linear(4, 48), nn.BatchNorm1d(48), nn.Tanh()]
        for _ in range(3):
            layers += [nn.Linear(48, 48), nn.BatchNorm1d(48), nn.Tanh(), nn.Dropout(0.1)]
        super().__init__(*layers, nn.Linear(48, 2))


class Noted(Sides):
    # Writes down which samples each rank sees in training; may fail in one rank.
    def __init__(self, folder, fails=-1, how="raise"):
        self.folder, self.fails, self.how, self.steps = folder, fails, how, 0

    def step(self, model, batch):
        if model.training:
            self.steps += 1
            with open(f"{self.folder}/{RANK}", "a") as file:
                file.write(json.dumps(batch[0].tolist()) + "\\n")
            if RANK == self.fails and self.steps == 3:
                if self.how == "exit":
                    sys.exit(7)
                raise ValueError("rank %d has had enough" % RANK)
        return super().step(model, batch)
"""

WORDS = ("task._target_=points.Noted", "model=deep", "strategy.bucket_cap_mb=0.005", "trainer.seed=3")


@pytest.fixture(scope="module")
def environ(warm_single_environ: dict[str, str]) -> dict[str, str]:
    """The environment in which fork servers are forks; at two workers, and on the cluster's hosts, they are not."""
    return warm_single_environ


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, environ: dict[str, str]) -> Recipe:
    return project(tmp_path_factory.mktemp("conformance"), environ)


def project(folder: Path, environ: dict[str, str]) -> Recipe:
    recipe = Recipe(Ddpexp(folder, environ), CODE)
    deep = recipe.folder / "conf/model/deep.yaml"
    deep.write_text("_target_: points.Deep\n")
    return recipe


def run(recipe: Recipe, starter: Starter, size: int, folder: Path, *overrides: str) -> Done:
    folder.mkdir()
    return starter(recipe, size, *WORDS, f"+task.folder={folder}", *overrides)


def order(folder: Path, size: int) -> list[list[int]]:
    """Return the samples of each step, over the ranks in order."""
    ranks = [[json.loads(line) for line in (folder / str(rank)).read_text().splitlines()] for rank in range(size)]
    return [[sample for rank in step for sample in rank] for step in zip(*ranks, strict=True)]


def files(done: Done) -> set[str]:
    """Return the names in the run directory, without those that only some launchers write for their own."""
    names = {str(path.relative_to(done.run)) for path in done.run.rglob("*") if path.is_file()}
    return {name for name in names if not name.startswith("slurm-") and name != "job.sbatch"}


@pytest.fixture(scope="module")
def expected(
    recipe: Recipe, environ: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> dict[int, dict[str, Any]]:
    """What launcher=spawn gives at each size, at two with another seed of Python's hashes than the other launchers."""
    own = project(tmp_path_factory.mktemp("own"), {**environ, **OWN_SERVER})
    found = {}
    for size in (2, 3, 4):
        folder = tmp_path_factory.mktemp("order") / "seen"
        done = run(own if size == 2 else recipe, SPAWN, size, folder)
        assert done.code == 0, done.err
        found[size] = {"sha": done.result()["weights_sha256"], "order": order(folder, size), "files": files(done)}
    return found


@pytest.mark.parametrize(("starter", "size"), params(often=USUAL))
def test_every_launcher_gives_the_same_run(
    recipe: Recipe, expected: dict[int, dict[str, Any]], tmp_path: Path, starter: Starter, size: int
) -> None:
    skip_without(starter)
    done = run(recipe, starter, size, tmp_path / "seen")
    assert done.code == 0, done.err
    result = done.result()
    assert (result["status"], result["world_size"], result["step"]) == ("done", size, 8)
    assert order(tmp_path / "seen", size) == expected[size]["order"]
    assert files(done) == expected[size]["files"]
    assert result["weights_sha256"] == expected[size]["sha"]
    assert done.manifest()["world"]["threads"] == 1


SHARDED = ("strategy=fsdp", "strategy.min_block_mb=0.003")
"""Instead of the buckets of WORDS."""


@pytest.mark.slow
@pytest.mark.parametrize(("starter", "size"), params(often=["torchrun"]))
def test_every_launcher_shards_the_model_and_gives_the_weights_of_replicas(
    recipe: Recipe, expected: dict[int, dict[str, Any]], tmp_path: Path, starter: Starter, size: int
) -> None:
    skip_without(starter)
    (tmp_path / "seen").mkdir()
    overrides = [word for word in WORDS if not word.startswith("strategy.")]
    done = starter(recipe, size, *overrides, *SHARDED, f"+task.folder={tmp_path / 'seen'}")
    assert done.code == 0, done.err
    assert order(tmp_path / "seen", size) == expected[size]["order"]
    assert files(done) == expected[size]["files"]
    assert done.result()["weights_sha256"] == expected[size]["sha"]


MESH = (
    "strategy=pipeline", "strategy.tp_size=2", "trainer.micro_batch_size=6", "trainer.seed=3", "model.dropout=0.1",
    'strategy.tp_plan=[{match:"0",style:colwise},{match:"3",style:rowwise}]',
)  # fmt: skip
"""A pipeline of two stages, each of which divides its layer."""


@pytest.mark.slow
@pytest.mark.parametrize(("starter", "size"), [one for one in params(often=["sbatch"]) if one.values[1] == 4])
def test_every_launcher_divides_layers_into_stages_and_among_tensor_groups(
    recipe: Recipe, in_a_mesh: Done, starter: Starter, size: int
) -> None:
    skip_without(starter)
    done = starter(recipe, size, *MESH)
    assert done.code == 0, done.err
    assert files(done) == files(in_a_mesh)
    assert done.result()["weights_sha256"] == in_a_mesh.result()["weights_sha256"]
    assert done.result()["metrics"] == in_a_mesh.result()["metrics"]


@pytest.fixture(scope="module")
def in_a_mesh(recipe: Recipe) -> Done:
    """What launcher=spawn gives."""
    done = SPAWN(recipe, 4, *MESH)
    assert done.code == 0, done.err
    assert "mesh    pp_size 2 x tp_size 2 = 4 workers\n        pp 0: [0 1]\n        pp 1: [2 3]\n" in done.out
    return done


def test_the_order_is_the_same_at_every_size_and_the_weights_distinguish_sizes(
    expected: dict[int, dict[str, Any]],
) -> None:
    assert expected[2]["order"] == expected[3]["order"] == expected[4]["order"]
    assert len({one["sha"] for one in expected.values()}) == 3  # BatchNorm sees other slices: the comparison can fail


@pytest.mark.variants(2)
@pytest.mark.parametrize("starter", params(sizes=False))
@pytest.mark.parametrize(("how", "code"), [pytest.param("raise", 1, marks=pytest.mark.slow), ("exit", 7)])
def test_a_failing_rank_ends_all_with_its_cause(
    recipe: Recipe, tmp_path: Path, starter: Starter, how: str, code: int
) -> None:
    skip_without(starter)
    size = starter.sizes[-1]
    done = run(recipe, starter, size, tmp_path / "seen", "+task.fails=1", f"+task.how={how}")
    assert done.code == (code if starter.own_codes else 1), done.err
    error = json.loads((done.run / "error.json").read_text())
    assert (error["rank"], error["step"], error["phase"], error["exit_code"]) == (1, 2, "train", code)
    assert done.result()["status"] == "failed"
    overrides = "ValueError: rank 1 has had enough" if how == "raise" else "sys.exit(7)"
    assert overrides in (done.out + done.err)
    assert f"ddpexp: rank 1 on {error['host']} failed (train after step 2)" in done.out + done.err
    if how == "raise":
        assert overrides in (done.run / "ranks/1.log").read_text()


@pytest.mark.slow
def test_a_refusal_by_the_workers_is_a_refusal_everywhere(recipe: Recipe, tmp_path: Path) -> None:
    ways = [SPAWN, *(starter for starter in STARTERS if starter.name in ("torchrun", "variables in shells", "elastic"))]
    for number, starter in enumerate(ways):
        done = run(recipe, starter, 2, tmp_path / str(number), "trainer.global_batch_size=1000")
        assert done.code == (2 if starter.own_codes else 1), (starter, done.err)
        assert "trainer.global_batch_size=1000 is more than the 96 training samples. Use at most 96." in done.err, (
            starter
        )

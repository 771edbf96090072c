"""Strategies of other packages: an entry point and a YAML file; one of them shards what the others replicate."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar

import pytest
from safetensors.torch import load_file

from ddpexp.checkpoint.format import complete_checkpoints
from ddpexp.config import strategies
from ddpexp.config.build import build
from ddpexp.config.compose import compose
from ddpexp.config.parse import parse
from ddpexp.config.registry import keys_of
from ddpexp.config.resolve import ResolvedConfig
from ddpexp.config.validate import check
from ddpexp.errors import RefusedError
from ddpexp.launch import Layout
from ddpexp.run.evaluation import Evaluation
from ddpexp.run.stored_run import StoredRun, StoredWeights
from ddpexp.settings.experiment import ExperimentSettings
from ddpexp.settings.key import Key
from ddpexp.strategy.ddp_options import DDPOptions
from ddpexp.strategy.estimator import Estimator, Facts, Parameter
from ddpexp.strategy.mesh import DataRank
from ddpexp.strategy.options import Options
from tests.conftest import Ddpexp, python_path
from tests.examples import install
from tests.fitting import TRAINER
from tests.points import Recipe
from tests.refusals import command_refused, refused

WORDS = ("optimizer=adamw", "trainer.gpus=2", "trainer.threads=1", "trainer.micro_batch_size=6")
SHARDED = {"PYTHONPATH": python_path(Path(__file__).parent / "outside")}


@pytest.fixture(scope="session")
def environ(warm_environ: dict[str, str]) -> dict[str, str]:
    """What a strategy does is tested, not how fork servers start."""
    return warm_environ


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, environ: dict[str, str]) -> Recipe:
    return Recipe(Ddpexp(tmp_path_factory.mktemp("outside"), environ))


@pytest.fixture(scope="module")
def whole(recipe: Recipe) -> dict[str, object]:
    """What an undisturbed run ends with."""
    return recipe(*WORDS).result()


def sharded(recipe: Recipe, *overrides: str, run: Path | None = None) -> dict[str, object]:
    done = recipe(*WORDS, "strategy=sharded", *overrides, environ=SHARDED, run=run)
    assert (done.code, done.err) == (0, ""), done
    return done.result()


@pytest.mark.slow
def test_it_trains_to_the_weights_of_replicas(recipe: Recipe, whole: dict[str, object]) -> None:
    theirs = sharded(recipe, "strategy.children=true")
    assert theirs["weights_sha256"] == whole["weights_sha256"]
    assert theirs["metrics"] == whole["metrics"]


@pytest.mark.slow
def test_it_clips_by_the_norm_of_all_rows(recipe: Recipe) -> None:
    overrides = ("trainer.clip_grad_norm=0.1",)
    ours, theirs = (
        recipe(*WORDS, *overrides, strategy, environ=SHARDED).run for strategy in ("strategy=ddp", "strategy=sharded")
    )
    one, other = (json.loads((run / "metrics.jsonl").read_text().splitlines()[0]) for run in (ours, theirs))
    assert other["train/grad_norm"] == pytest.approx(one["train/grad_norm"], rel=1e-5)
    weights, others = (load_file(_newest(run) / "model.safetensors") for run in (ours, theirs))
    assert all(weights[name].allclose(others[name], rtol=0, atol=1e-5) for name in weights)  # another order of the sum


@pytest.mark.slow
def test_its_checkpoints_and_average_are_those_of_replicas(recipe: Recipe) -> None:
    overrides = ("trainer.ema_decay=0.9",)
    ours, theirs = recipe(*WORDS, *overrides), recipe(*WORDS, *overrides, "strategy=sharded", environ=SHARDED)
    assert (theirs.code, theirs.err) == (0, ""), theirs
    assert theirs.result()["weights_sha256"] == ours.result()["weights_sha256"]
    assert theirs.result()["metrics"] == ours.result()["metrics"]
    folders = [_newest(done.run) for done in (ours, theirs)]
    for name in ("model.safetensors", "model.ema.safetensors", "state.optimizers.safetensors"):
        one, other = (load_file(folder / name) for folder in folders)
        assert one.keys() == other.keys()
        assert all(one[key].equal(other[key]) for key in one), name
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second"),
    [("sharded", "ddp"), ("ddp", "sharded"), pytest.param("sharded", "sharded", marks=pytest.mark.slow)],
)
def test_either_strategy_resumes_what_the_other_began(
    recipe: Recipe, whole: dict[str, object], tmp_path: Path, first: str, second: str
) -> None:
    begun = recipe(*WORDS, f"strategy={first}", "trainer.epochs=1", environ=SHARDED, run=tmp_path / "run")
    assert begun.code == 0, begun
    ended = recipe(*WORDS, f"strategy={second}", "trainer.epochs=2", environ=SHARDED, run=tmp_path / "run")
    assert ended.code == 0, ended
    assert f"resumed after step {4}" in ended.out
    assert ended.result()["weights_sha256"] == whole["weights_sha256"]


@pytest.mark.slow
def test_what_it_cannot_do_is_refused(recipe: Recipe) -> None:
    done = recipe(*WORDS, "strategy=sharded", "trainer.reduction=exact", environ=SHARDED)
    command_refused(done, "trainer.reduction=exact: strategy=sharded")
    for word, sentence in (
        ("strategy.childs=true", "Did you mean strategy.children?"),
        ("strategy.children=3", "strategy.children=3"),
        ("strategy.kind=shardet", "strategy.kind=shardet names no strategy. Did you mean strategy=sharded?"),
    ):
        done = recipe(*WORDS, "strategy=sharded", word, environ=SHARDED)
        assert (done.code, sentence in done.err) == (2, True), done.err


@pytest.mark.slow
def test_a_plan_counts_its_shares(recipe: Recipe) -> None:
    overrides = ("plan", "--json", "--num_samples", "96", "--config-dir", str(recipe.folder / "conf"), "recipe=points")
    plans = [
        json.loads(recipe.ddpexp(*overrides, *WORDS, strategy, environ=SHARDED).out)
        for strategy in ("strategy=ddp", "strategy=sharded")
    ]
    whole, share = ({part["name"]: part["num_bytes"] for part in plan["memory"]["parts"]} for plan in plans)
    assert [share[name] for name in ("parameters", "optimizer")] == [
        whole[name] // 2 for name in ("parameters", "optimizer")
    ]


def _newest(run: Path) -> Path:
    return complete_checkpoints(run / "checkpoints")[0]


def test_the_package_of_the_documentation_trains_to_the_weights_of_ddp(recipe: Recipe, tmp_path: Path) -> None:
    seeing = {"PYTHONPATH": python_path(install("strategy", tmp_path))}
    weights = [
        recipe(*WORDS, *overrides, environ=seeing).result()["weights_sha256"]
        for overrides in ((), ("strategy=ordered",), ("strategy=ordered", "strategy.descending=true"))
    ]
    assert weights[0] == weights[1] == weights[2]  # a sum of two is the same in either order


@dataclass(frozen=True)
class Bare(Options):
    """No function builds the strategy."""


@dataclass(frozen=True)
class Mistyped(Options):
    builder: ClassVar[str] = "tests.strategy.test_outside:biuld"


def test_options_without_a_builder_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    offered = {name: f"{__name__}.{name.capitalize()}" for name in ("bare", "mistyped")}
    monkeypatch.setattr(strategies, "installed", lambda section: offered)
    with refused("test_outside.Bare: builder"):
        strategies.options_of("bare")
    mistyped = strategies.options_of("mistyped")
    assert mistyped is not None
    with refused("test_outside.biuld: cannot be imported"):
        strategies.builder_of(mistyped("mistyped"))


@pytest.mark.parametrize("kind", keys_of("strategy"))
def test_every_kind_names_its_builder_and_its_estimator(kind: str) -> None:
    composed = compose(["recipe=mnist", f"strategy={kind}"])
    assert isinstance(composed, ResolvedConfig)
    options = parse(composed.values).strategy
    assert callable(strategies.builder_of(options))
    assert type(strategies.estimator_of(options)) is not Estimator


def test_a_strategy_without_an_estimator_is_planned_as_whole_replicas() -> None:
    estimator, four = strategies.estimator_of(Bare("bare")), Layout(1, 4, "cpu", "gloo", 1)
    facts = Facts([Parameter("model", 1000, 4000, "fp32", True)], 0, {"model": 4000}, 8000, None, None, None, 100)
    assert [part.num_bytes for part in estimator.memory(facts, TRAINER, four)] == [4000, 4000, 8000]
    assert "strategy=bare" in estimator.traffic(facts, TRAINER, four).unknown


@dataclass(frozen=True)
class Pairs(DDPOptions):
    """Two ranks compute each share of the batch."""

    def data_rank(self, rank: int, world_size: int) -> DataRank:
        return DataRank(rank // 2, world_size // 2, reports=rank % 2 == 0)


@dataclass(frozen=True)
class Picky(DDPOptions):
    """A strategy with rules of its own on other sections."""

    rounds: Annotated[int, Key(at_least=1, on_resume="free")] = 1

    def check(self, experiment: ExperimentSettings) -> None:
        super().check(experiment)
        if experiment.optimizer.target == "torch.optim.SGD" and experiment.trainer.clip_grad_norm is not None:
            raise RefusedError("is not clipped", key="optimizer", value="sgd", suggestion="Use another optimizer.")


def test_a_strategy_of_others_states_rules_on_every_section_like_ours() -> None:
    composed = compose(["recipe=mnist", "optimizer=sgd"])
    assert isinstance(composed, ResolvedConfig)
    ours = parse(composed.values)
    picky = replace(ours, strategy=Picky(**vars(ours.strategy)))
    check(picky)
    with refused("optimizer=sgd: not clipped"):
        check(replace(picky, trainer=replace(picky.trainer, clip_grad_norm=1.0)))
    with refused("strategy.rounds=0: from 1"):
        build(Picky, {**vars(ours.strategy), "rounds": 0}, "strategy")


def test_an_evaluation_takes_the_batches_of_the_ranks_that_share_none(tmp_path: Path) -> None:
    composed = compose(["recipe=mnist", "data.source=embedded", "trainer.global_batch_size=6"])
    assert isinstance(composed, ResolvedConfig)
    whole = parse(composed.values)
    experiment = replace(whole, strategy=Pairs(**vars(whole.strategy)))
    evaluation = Evaluation(StoredWeights(tmp_path, StoredRun(experiment, composed.text, None)))
    layout = Layout(1, 4, "cpu", "gloo", 1)
    evaluation.job.check([layout])
    assert json.loads(evaluation.enter({}, layout).arguments[0])["batch_size"] == 3

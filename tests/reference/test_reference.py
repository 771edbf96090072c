"""The command against an independent reference: a plain loop, written from the documentation, in one process.

What is compared is everything that a run leaves behind: every tensor of the last checkpoint (weights, buffers, their
moving average), and of metrics.jsonl the losses, the metrics, the norm of the gradient and the learning rate of every
record, in training and in evaluation. An error is the largest difference in a tensor, or of a number, in parts of its
largest value; the largest one that rounding explains is `compare.tolerance`, a number for each precision with its
reason.

The reference (`loop.py`) adds up in double precision and knows nothing of workers but where their samples and their
buffers lie, so the two round differently and never agree to the bit; promises of equal bits have tests of their own
(tests/strategy/exact/test_strategy.py).

A case (`case.py`) is a point in the product of all dimensions. A few cases are enough for every allowed pair of values
to occur; the ordinary run has the first of them, and `-m slow` the others, each value by itself at every number of
workers, where a failure names its cause, and some hundred cases of the whole product.

That the comparison can fail is shown without a command: a reference with one wrong detail is much further from the
right one than the tolerance, so a command with that detail, however it rounds, is too.
"""

from __future__ import annotations

import itertools
from typing import get_args

import pytest

from tests.conftest import ROOT, Ddpexp
from tests.reference.case import VALUES, Case, alone, pairwise, spread
from tests.reference.compare import errors, outcome_of, tolerance
from tests.reference.loop import Mistake, train

CONF = ROOT / "tests/reference/recipe/conf"


@pytest.fixture(scope="session")
def environ(warm_environ: dict[str, str]) -> dict[str, str]:
    """The numbers of runs are compared, however their processes start."""
    return warm_environ


def agrees(ddpexp: Ddpexp, case: Case) -> None:
    run = ddpexp.folder / "run1"
    arguments = ("--config-dir", str(CONF), "recipe=reference", f"run.dir={run}", *case.words())
    done = ddpexp(*arguments, environ={"PYTHONWARNINGS": "error::UserWarning,ignore:Sparse invariant checks"})
    assert done.code == 0, f"{done.out}\n{done.err}"
    expected = train(case)
    assert bool(expected.skipped) == case.broken
    apart = errors(outcome_of(run, case), expected, case)
    assert len(apart) > 20
    wrong = {name: error for name, error in apart.items() if not error <= tolerance(case, name)}
    if wrong and case.precision != "fp32":
        shaken = [errors(train(case, shaken=seed), expected, case) for seed in range(8)]
        wrong = {name: error for name, error in wrong.items() if not error <= 2 * max(one[name] for one in shaken)}
    assert wrong == {}


@pytest.mark.variants(3)
@pytest.mark.parametrize("case", pairwise(), ids=str)
def test_the_command_trains_as_the_reference_does(ddpexp: Ddpexp, case: Case) -> None:
    agrees(ddpexp, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", alone(), ids=str)
def test_each_value_by_itself_trains_as_the_reference_does(ddpexp: Ddpexp, case: Case) -> None:
    agrees(ddpexp, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", spread(300), ids=str)
def test_combinations_train_as_the_reference_does(ddpexp: Ddpexp, case: Case) -> None:
    agrees(ddpexp, case)


MISTAKES: list[tuple[Mistake, Case]] = [
    ("mean of means", Case(workers=2, counts="tensor")),
    ("mean of means", Case(workers=2, counts="tensor", numbers="fp64")),
    ("one order", Case()),
    ("no rest", Case(rest=7)),
    ("late schedule", Case(schedule="cosine")),
    ("late schedule", Case(schedule="onecycle", precision="bf16")),
    ("late schedule", Case(schedule="onecycle", precision="fp16")),
    ("each worker clips", Case(workers=2, clip=0.2)),
    ("other buffers", Case(workers=2, middle="batchnorm")),
    ("other buffers", Case(reduction="exact", middle="batchnorm")),
    ("skip moves buffers", Case(middle="batchnorm", nonfinite="broken")),
    ("skip moves momentum", Case(nonfinite="broken")),
    ("skip moves the average", Case(nonfinite="broken", ema=0.8)),
    ("no autocast", Case(precision="bf16")),
    ("no autocast", Case(precision="fp16", task="Game")),
    ("one dropout mask", Case(middle="dropout", accumulation=2)),
    ("average of nothing", Case(ema=0.8)),
    ("average of nothing", Case(ema=0.8, numbers="bf16")),
    ("gradients stay", Case(task="Game")),
    ("first loss alone", Case(task="Twice")),
    ("first loss alone", Case(task="Twice", numbers="bf16")),
    ("rounded weight", Case(numbers="fp64")),
]


@pytest.mark.parametrize(("mistake", "case"), MISTAKES, ids=str)
def test_the_comparison_sees_a_mistake(mistake: Mistake, case: Case) -> None:
    apart = errors(train(case, mistake), train(case), case)
    assert max(error / tolerance(case, name) for name, error in apart.items()) > 10, apart


def test_the_comparison_sees_every_mistake_that_the_reference_knows() -> None:
    assert {mistake for mistake, _ in MISTAKES} == set(get_args(Mistake))


def test_a_reference_agrees_with_itself() -> None:
    case = Case(workers=3, middle="dropout", ema=0.8, clip=0.2)
    assert max(errors(train(case), train(case), case).values()) == 0


def test_the_few_cases_have_every_allowed_pair_of_values() -> None:
    few, whole = pairwise(), spread(3000)
    assert all(case.allowed for case in few)
    for first, second in itertools.combinations(VALUES, 2):
        wanted = {(getattr(case, first), getattr(case, second)) for case in whole}
        assert wanted <= {(getattr(case, first), getattr(case, second)) for case in few}, (first, second)

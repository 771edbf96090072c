"""The picture of a schedule: which steps, the lines of the terminal, the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ddpexp.cli.plan import arguments_of
from ddpexp.config.compose import compose
from ddpexp.config.parse import parse
from ddpexp.plan.rate_curves import curves_of, shown_steps
from ddpexp.plan.schedule_plot import draw, sketch
from tests.refusals import refused
from tests.typed import call


def test_every_step_is_shown_or_a_thousand_with_the_last() -> None:
    assert shown_steps(1) == [0]
    assert shown_steps(5) == [0, 1, 2, 3, 4]
    steps = shown_steps(1_000_000)
    assert (len(steps), steps[0], steps[-1]) == (1000, 0, 999_999)


def test_the_sketch_has_the_rate_upwards_and_the_steps_to_the_right() -> None:
    points = [(step + 1, 0.5 * (1 - step / 8)) for step in range(9)]
    assert sketch({"lr": points}) == [
        "",
        "lr by step",
        "  0.5 |█",
        "      |██",
        "      |███",
        "      |████",
        "      |█████",
        "      |██████",
        "      |███████",
        "    0 |████████",
        "       1       9",
    ]
    assert sketch({f"lr/{name}": points for name in "abcde"})[-1] == "and lr/d, lr/e"
    assert sketch({"lr": [(1, 0.0)]})[2:4] == ["  0 |", "    |"]


@pytest.mark.parametrize("scheduler", ["cosine", "plateau", "torch"])
def test_the_curves_are_the_rates_of_a_run(scheduler: str) -> None:
    made = compose(["recipe=mnist", f"scheduler={scheduler}"])
    groups: list[dict[str, Any]] = [{"params": [torch.nn.Parameter()]}, {"params": [torch.nn.Parameter()], "lr": 0.5}]
    curves = curves_of(parse(made.values), {"optimizer": torch.optim.SGD(groups, lr=0.1)}, 10, 40)
    assert list(curves) == ["lr/0", "lr/1"]
    assert [step for step, _ in curves["lr/0"]] == list(range(1, 41))
    if scheduler == "plateau":
        assert {rate for _, rate in curves["lr/1"]} == {0.5}
    if scheduler == "cosine":
        assert curves["lr/1"][1] == (2, 0.5)
        assert curves["lr/1"][-1] == (40, 0.0)


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    draw({"lr": [(1, 0.0), (2, 0.1)], "lr/head": [(1, 0.1), (2, 0.2)]}, tmp_path / "lr.png")
    assert (tmp_path / "lr.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "plot", "rest"),
    [
        ("a=1", None, ["a=1"]),
        ("--plot-schedule a=1", "", ["a=1"]),
        ("a=1 --plot-schedule", "", ["a=1"]),
        ("--plot-schedule --json a=1", "", ["a=1"]),
        ("--plot-schedule x.png a=1", "x.png", ["a=1"]),
        ("a=1 --plot-schedule=x.png", "x.png", ["a=1"]),
    ],
)
def test_the_file_of_a_picture_may_be_left_out(words: str, plot: str | None, rest: list[str]) -> None:
    typed = call("plan", *words.split())
    arguments = arguments_of(typed)
    assert (arguments.plot_schedule, list(arguments.run)) == (plot, rest)


def test_another_kind_of_file_is_refused() -> None:
    with refused("plan --plot-schedule=lr.svg"):
        arguments_of(call("plan", "--plot-schedule", "lr.svg"))

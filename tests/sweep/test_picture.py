"""The picture of a sweep: it is drawn from any directories, by a process of its own, and nobody else pays for it."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from matplotlib.collections import LineCollection
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from PIL import Image

from ddpexp.sweep import picture
from ddpexp.sweep.comparison import best_of
from ddpexp.sweep.encoding import Encoding
from ddpexp.sweep.record import Goal
from ddpexp.sweep.rows import Row, rows_of
from tests.conftest import PATIENCE, ROOT
from tests.sweep.made import Made
from tests.test_layering import loaded_by, tops


def process(path: Path, out: Path, environ: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    program = "import sys; from ddpexp.sweep.picture import main; sys.exit(main(sys.argv[1:2], *sys.argv[2:]))"
    return subprocess.run(
        [sys.executable, "-c", program, path, "eval/loss", "min", out],
        cwd=ROOT, env={**os.environ, **(environ or {})}, capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip


def size(path: Path) -> tuple[int, int]:
    with Image.open(path) as image:
        image.load()
        assert image.format == "PNG"
        width, height = image.size
        return width, height


def composed(rows: Sequence[Row], mode: Literal["min", "max"] | None = "min") -> Figure:
    figure = Figure(layout="constrained")
    picture._compose(figure, rows, "eval/loss", mode, "eval/loss")
    return figure


def stars(figure: Figure) -> list[Any]:
    """Return the lines that end with the star of the best job."""
    return [line for axes in figure.get_axes() for line in axes.get_lines() if line.get_marker() == "*"]


def legends(figure: Figure) -> dict[str, list[str]]:
    """Return what stands beside the curves: the titles, and what they list."""
    found = [one for one in figure.get_axes()[0].get_children() if isinstance(one, Legend)]
    return {one.get_title().get_text(): [text.get_text() for text in one.get_texts()] for one in found}


def sweep(path: Path, jobs: int) -> Made:
    made = Made(path)
    for number in range(jobs):
        rate, seed = 10 ** (-4 + 4 * (number // 3) / max(1, jobs // 3)), number % 3
        points = [(step, (1 + math.log10(rate) ** 2 / 4) / step + seed / 50) for step in range(1, 12)]
        made.job(f"optimizer.lr={rate:.3g}", f"model={'abc'[number % 2]}", f"trainer.seed={seed}", points=points)
    return made


def test_the_picture_of_a_real_sweep_has_a_panel_for_each_value_and_its_best(trained: Path, tmp_path: Path) -> None:
    """As the sweep itself has it drawn."""
    done = process(trained, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert size(tmp_path / "sweep.png") == (1500, round(150 * (4.0 + 2.7)))
    assert [path.name for path in tmp_path.iterdir()] == ["sweep.png"]


@pytest.mark.parametrize("jobs", [1, 3, 60])
def test_any_number_of_jobs_is_drawn(tmp_path: Path, jobs: int) -> None:
    made = sweep(tmp_path / "sweep", jobs)
    picture.draw(rows_of(made.path), "eval/loss", "min", tmp_path / "sweep.png")
    width, height = size(tmp_path / "sweep.png")
    assert (width, height > 800) == (1500, jobs > 1)


def test_the_only_job_of_a_value_stands_at_its_tick(tmp_path: Path) -> None:
    made = Made(tmp_path / "sweep")
    for rate in ("0.1", "0.2"):
        made.job(f"optimizer.lr={rate}")
    figure = composed(rows_of(made.path), None)
    panel = next(axes for axes in figure.get_axes() if axes.get_xlabel() == "optimizer.lr")
    dots = [float(x) for collection in panel.collections for x, _ in np.asarray(collection.get_offsets())]
    assert sorted(dots) == [0.0, 1.0]


def test_without_a_mode_none_is_the_best(tmp_path: Path) -> None:
    rows = rows_of(sweep(tmp_path / "sweep", 3).path)
    assert stars(composed(rows, "min"))
    assert not stars(composed(rows, None))


@pytest.mark.parametrize("jobs", [2, 6, 24, 100])
def test_every_curve_has_the_colour_of_its_value_and_the_best_one_too(tmp_path: Path, jobs: int) -> None:
    rows = rows_of(sweep(tmp_path / "sweep", jobs).path)
    figure, encoding = composed(rows), Encoding.of(rows)
    best = best_of(rows, Goal("eval/loss", "min"))
    assert best is not None
    [curves] = [one for one in figure.get_axes()[0].collections if isinstance(one, LineCollection)]
    wanted = [to_rgba(encoding.looks[row.path].color)[:3] for row in rows]
    assert [tuple(color)[:3] for color in np.asarray(curves.get_edgecolor())] == wanted
    look = encoding.looks[best.path]
    assert {to_rgba(star.get_color()) for star in stars(figure)} == {to_rgba(look.color)}
    [curve] = [line for line in figure.get_axes()[0].get_lines() if len(line.get_xydata()) > 1]
    assert to_rgba(curve.get_color()) == to_rgba(look.color)
    assert legends(figure)[""] == ["best"]


def test_long_values_keep_their_ends_in_the_legend(tmp_path: Path) -> None:
    made = Made(tmp_path / "sweep")
    for number in range(3):
        made.job(f"data.root=/some/rather/long/path/to/data_{number}")
    assert legends(composed(rows_of(made.path)))["data.root"] == [f"/some/rat…/to/data_{number}" for number in range(3)]


def test_legends_say_what_colours_and_styles_stand_for(tmp_path: Path) -> None:
    made = Made(tmp_path / "few")
    for rate in ("0.3", "0.1", "0.2"):
        for model in ("small", "large"):
            made.job(f"optimizer.lr={rate}", f"model={model}")
    figure = composed(rows_of(made.path))
    assert legends(figure) == {"": ["best"], "optimizer.lr": ["0.1", "0.2", "0.3"], "model": ["small", "large"]}
    rates = [f"{1.2**number:.4g}" for number in range(20)]
    made = Made(tmp_path / "many")
    for rate in rates:
        made.job(f"optimizer.lr={rate}", "model=small")
        made.job(f"optimizer.lr={rate}", "model=large")
    figure = composed(rows_of(made.path))
    assert legends(figure) == {"": ["best"], "model": ["small", "large"]}
    assert "optimizer.lr" in [axes.get_ylabel() for axes in figure.get_axes()[0].child_axes]  # the scale


ODD: dict[str, list[tuple[list[str], dict[str, Any]]]] = {
    "nothing recorded": [(["a=1"], {"points": ()}), (["a=2"], {"points": (), "status": "failed"})],
    "one point": [(["a=1"], {"points": ((5, 0.5),)}), (["a=2"], {"points": ((5, 0.4),)})],
    "not finite": [
        (["a=1"], {"points": ((5, math.nan), (6, math.inf))}),
        (["a=2"], {"points": ((5, 1e300), (6, -1e300))}),
    ],
    "constant": [(["a=0"], {"points": ((5, 0.0), (6, 0.0))}), (["a=0.0"], {"points": ((5, 0.0),)})],
    "odd values": [
        (["a=$x_{^"], {}),
        (["a=\x1b[2J\n"], {}),
        (["a=nan"], {}),
        (["a=" + "long" * 50], {}),
        (["b=1"], {}),
        (["a=∑漢"], {}),
    ],
    "many values": [
        ([f"a={'x' * (number % 7)}{number}", f"b={number}", f"c={1.1**number}"], {}) for number in range(40)
    ],
    "many keys": [([f"k{key}={number}" for key in range(12)], {}) for number in range(2)],
    "negative and huge": [([f"a={value}"], {}) for value in ("-5", "0", "1e300", "1e-300", "5")],
}


@pytest.mark.variants(1)
@pytest.mark.parametrize("jobs", ODD.values(), ids=ODD.keys())
def test_odd_sweeps_are_drawn_without_a_message(tmp_path: Path, jobs: list[tuple[list[str], dict[str, Any]]]) -> None:
    made = Made(tmp_path / "sweep")
    for overrides, facts in jobs:
        made.job(*overrides, **facts)
    picture.draw(rows_of(made.path), "eval/loss", "min", made.path / "sweep.png")
    width, _ = size(made.path / "sweep.png")
    assert width == 1500


@pytest.mark.slow
def test_a_home_that_cannot_be_written_does_not_matter(tmp_path: Path) -> None:
    made = sweep(tmp_path / "sweep", 3)
    (tmp_path / "file").touch()
    nowhere = {
        name: str(tmp_path / "file/none") for name in ("HOME", "MPLCONFIGDIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME")
    }
    (tmp_path / "tmp").mkdir()
    done = process(made.path, made.path, environ={**nowhere, "TMPDIR": str(tmp_path / "tmp")})
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (made.path / "sweep.png").is_file()
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.slow
def test_a_style_that_lies_about_changes_nothing(tmp_path: Path) -> None:
    made = sweep(tmp_path / "sweep", 3)
    picture.draw(rows_of(made.path), "eval/loss", "min", tmp_path / "one.png")
    style = tmp_path / "matplotlibrc"
    style.write_text("font.size: 30\nlines.linewidth: 9\naxes.facecolor: red\nno.such.key: 1\n")
    done = process(made.path, made.path, environ={"MATPLOTLIBRC": str(style)})
    assert (done.returncode, done.stderr) == (0, "")
    assert (made.path / "sweep.png").read_bytes() == (tmp_path / "one.png").read_bytes()


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = sweep(tmp_path / "sweep", 3)
    assert picture.main([str(made.path)], "eval/loss", "min", str(tmp_path / "none")) == 2
    said = capsys.readouterr()
    assert said.err.startswith("sweep.png cannot be drawn: ")
    assert said.err.count("\n") == 1


def test_a_sweep_without_a_metric_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert picture.main([str(tmp_path)], None, "min", str(tmp_path)) == 2
    assert capsys.readouterr().err == "sweep.png cannot be drawn: no metric is recorded yet\n"


def test_only_drawing_imports_what_draws() -> None:
    names = ("rows", "table", "encoding", "picture", "arguments", "folder")
    loaded = tops(loaded_by(*(f"ddpexp.sweep.{name}" for name in names), "ddpexp.cli.main"))
    assert not loaded & {"matplotlib", "numpy", "torch", "hydra", "omegaconf", "rich"}
    assert "yaml" in loaded  # the check can see what is loaded

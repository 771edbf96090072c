"""The preparation of data by a function of the user's, in a process of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ddpexp.config.compose import compose
from ddpexp.config.instantiate import Trust
from ddpexp.config.parse import parse
from ddpexp.run.prepare import prepare


def test_the_options_may_have_any_size(tmp_path: Path) -> None:
    (tmp_path / "of_columns.py").write_text("def prepare(names):\n    return {'name': names[-1], 'num': len(names)}\n")
    composed = compose(["recipe=mnist"])
    assert composed is not None
    options = {"names": [f"column {number}" for number in range(100_000)]}
    data = replace(parse(composed.values).data, prepare="of_columns.prepare", options=options)
    assert prepare(data, Trust(("of_columns",), tmp_path)) == {"name": "column 99999", "num": 100_000}

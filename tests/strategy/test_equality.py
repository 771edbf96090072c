"""Every strategy trains to the same bits: promise 8, for each pair of options, and in a long run for all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.strategy.equality import every_case, pairs_of, pairwise, possible_pairs
from tests.strategy.on_ranks import works
from tests.strategy.sharded import CUT


def test_few_cases_have_every_pair_of_options() -> None:
    for workers in (2, 4):
        cases = pairwise(workers)
        assert possible_pairs(workers) == set().union(*(pairs_of(vars(case)) for case in cases))
        assert len(cases) < 50 < len(every_case(workers))


@pytest.mark.variants(1)
@pytest.mark.parametrize("size", [2, 4, 3, 8])
def test_each_pair_of_options_gives_the_weights_of_replicas_or_of_one_process(
    size: int, tmp_path: Path, forked_servers: None
) -> None:
    works("tests.strategy.equality", "few", size, tmp_path / "logs")


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", CUT)
@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_all_options_give_them(size: int, optimizer: str, tmp_path: Path, forked_servers: None) -> None:
    works("tests.strategy.equality", f"every {optimizer}", size, tmp_path / "logs")

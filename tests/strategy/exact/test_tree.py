"""The tree of a sum: the same for every number of ranks, and of logarithmic depth and memory."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from ddpexp.strategy.exact.tree import Block, Node, Partial, add_up, blocks, order


def leaves(node: Node, parts: list[Block]) -> Iterator[int]:
    if isinstance(node, int):
        block = parts[node]
        yield from range(block.index << block.level, (block.index + 1) << block.level)
    else:
        for child in node:
            yield from leaves(child, parts)


def written(node: Node) -> str:
    return str(node) if isinstance(node, int) else f"({written(node[0])} + {written(node[1])})"


def summed(num_leaves: int, world_size: int, values: list[Tensor]) -> Tensor:
    """Add up as that many ranks do: each its own leaves, then the blocks of all."""
    share = num_leaves // world_size
    everyones: list[Tensor] = []
    kinds: list[Block] = []
    for rank in range(world_size):
        partial = Partial(lambda: torch.empty_like(values[0]))
        for leaf in range(rank * share, (rank + 1) * share):
            partial.room().copy_(values[leaf])
            partial.close(leaf)
        everyones += partial.take()
        kinds += blocks(rank * share, (rank + 1) * share)
    out = torch.empty_like(values[0])
    add_up(order(kinds), everyones, out)
    return out


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (1, "0"),
        (2, "(0 + 1)"),
        (3, "((0 + 1) + 2)"),
        (4, "((0 + 1) + (2 + 3))"),
        (6, "(((0 + 1) + (2 + 3)) + (4 + 5))"),
        (7, "(((0 + 1) + (2 + 3)) + ((4 + 5) + 6))"),
        (8, "(((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)))"),
    ],
)
def test_the_order_of_a_sum(number: int, expected: str) -> None:
    assert written(order([Block(0, leaf) for leaf in range(number)])) == expected


@pytest.mark.parametrize("number", range(1, 65))
def test_every_number_of_ranks_makes_the_same_sum(number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    values = [
        torch.randn(9, generator=generator) * 10.0 ** torch.randint(-3, 4, (9,), generator=generator)
        for _ in range(number)
    ]
    sums = [summed(number, size, values) for size in range(1, number + 1) if number % size == 0]
    assert all(torch.equal(one, sums[0]) for one in sums)
    assert torch.allclose(sums[0].double(), torch.stack(values).double().sum(0), rtol=1e-4, atol=1e-3)
    if number > 8:
        assert not torch.equal(torch.stack(values).cumsum(0)[-1], sums[0])  # the comparison can fail


@pytest.mark.parametrize(("number", "world_size"), [(8, 8), (64, 4), (6, 2), (12, 3), (60, 5), (63, 7), (96, 3)])
def test_each_leaf_is_in_the_sum_once_and_in_order(number: int, world_size: int) -> None:
    share = number // world_size
    parts = [block for rank in range(world_size) for block in blocks(rank * share, (rank + 1) * share)]
    assert list(leaves(order(parts), parts)) == list(range(number))
    assert len(blocks(0, share)) <= share.bit_length()


@pytest.mark.parametrize(("number", "size"), [(8, 1), (64, 8), (4, 4)])
def test_powers_of_two_leave_one_block_a_rank(number: int, size: int) -> None:
    share = number // size
    assert {len(blocks(rank * share, (rank + 1) * share)) for rank in range(size)} == {1}


@pytest.mark.parametrize("number", [1, 2, 3, 8, 100, 1000])
def test_memory_grows_with_the_logarithm(number: int) -> None:
    made = []

    def make() -> Tensor:
        made.append(torch.zeros(1))
        return made[-1]

    partial = Partial(make)
    for _ in range(3):  # the buffers are used again
        for leaf in range(number):
            partial.room().fill_(1.0)
            partial.close(leaf)
        assert sum(float(block) for block in partial.take()) == number
    assert len(made) <= math.floor(math.log2(number)) + 1


def test_the_sum_may_be_written_over_its_first_part() -> None:
    values = [torch.full((2,), float(2**leaf)) for leaf in range(7)]
    add_up(order([Block(0, leaf) for leaf in range(7)]), values, values[0])
    assert values[0].tolist() == [127.0, 127.0]
    alone = [torch.ones(2)]
    add_up(order([Block(0, 0)]), alone, alone[0])
    assert alone[0].tolist() == [1.0, 1.0]

"""A fixed order for the sum over micro-batches, whichever rank computed which: the tree of a binary counter.

Leaf j is the contribution of micro-batch j. Two neighbouring blocks of 2^l leaves merge when the left one begins at a
multiple of 2^(l+1), like carries in a counter; the blocks left at the end are added up from the right. Each rank merges
its own leaves, and the ranks exchange only the remaining blocks: one per rank if both numbers are powers of two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

Node: TypeAlias = "int | tuple[Node, Node]"
"""A sum: the block with this number, or left + right."""


@dataclass(frozen=True)
class Block:
    """The leaves from `index * 2**level` up to `(index + 1) * 2**level`."""

    level: int
    index: int


def push(stack: list[Block], block: Block) -> int:
    """Push the next block onto the stack; return how often the two topmost blocks merged."""
    stack.append(block)
    merges = 0
    while len(stack) > 1 and stack[-2].level == stack[-1].level and stack[-2].index % 2 == 0:
        stack[-2:] = [Block(stack[-1].level + 1, stack[-2].index // 2)]
        merges += 1
    return merges


def blocks(first: int, last: int) -> list[Block]:
    """Return the blocks that remain after merging the leaves from `first` up to, not including, `last`."""
    stack: list[Block] = []
    for leaf in range(first, last):
        push(stack, Block(0, leaf))
    return stack


def order(parts: Sequence[Block]) -> Node:
    """Return the tree of the sum over consecutive blocks from leaf 0 on."""
    stack: list[Block] = []
    nodes: list[Node] = []
    for number, block in enumerate(parts):
        nodes.append(number)
        for _ in range(push(stack, block)):
            nodes[-2:] = [(nodes[-2], nodes[-1])]
    while len(nodes) > 1:
        nodes[-2:] = [(nodes[-2], nodes[-1])]
    return nodes[0]


def add_up(node: Node, parts: Sequence[Tensor], out: Tensor) -> None:
    """Write the sum into `out`, which may be the first part itself. Shapes: equal."""
    if isinstance(node, int):
        if parts[node] is not out:
            out.copy_(parts[node])
        return
    left = _value(node[0], parts, out)
    right = _value(node[1], parts, None)
    torch.add(left, right, out=out)


def _value(node: Node, parts: Sequence[Tensor], out: Tensor | None) -> Tensor:
    if isinstance(node, int):
        return parts[node]
    out = torch.empty_like(parts[0]) if out is None else out
    add_up(node, parts, out)
    return out


class Partial:
    """The partial sums of a rank's leaves, in as many reusable buffers as a binary counter has digits."""

    def __init__(self, make: Callable[[], Tensor]) -> None:
        """`make` allocates a buffer for a leaf."""
        self._make = make
        self._buffers: list[Tensor] = []
        self._stack: list[Block] = []

    def room(self) -> Tensor:
        """Return the buffer to write the next leaf into."""
        if len(self._stack) == len(self._buffers):
            self._buffers.append(self._make())
        return self._buffers[len(self._stack)]

    def close(self, leaf: int) -> None:
        """Take the contents of `room` as the leaf with this number, and merge."""
        top = len(self._stack)
        for _ in range(push(self._stack, Block(0, leaf))):
            self._buffers[top - 1] += self._buffers[top]
            top -= 1

    def take(self) -> list[Tensor]:
        """Return the remaining blocks and start again: the next leaves overwrite them."""
        count = len(self._stack)
        self._stack.clear()
        return self._buffers[:count]

"""Pages of files of which ranks on several hosts have bytes: one rank writes each of them.

Two hosts that write different bytes of one page of a network file system may undo each other's.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ddpexp.checkpoint.layout import Span, TensorFile, copy_span
from ddpexp.distributed.world import World
from ddpexp.strategy.base import Shard


@dataclass(frozen=True)
class Routing:
    """What a rank writes of its spans, and the pages whose bytes the ranks exchange before one of them writes these."""

    kept: Sequence[Span]  # of this rank's bytes, without those pages
    sent: Sequence[tuple[Span, int]] = ()  # this rank's bytes in the pages, with their place in the exchange
    written: Sequence[tuple[Span, int]] = ()  # the pages that this rank writes
    num_bytes: int = 0  # of the exchange

    @classmethod
    def agreed(cls, spans: Sequence[Span], world: World) -> Routing:
        """Return the routing of this rank's spans. Ranks: all; communicates if they are on several hosts."""
        if world.local_world_size == world.world_size:
            return cls(spans)
        facts = world.gather_values(
            [world.node_rank, mmap.PAGESIZE, [[span.file, span.offset, span.num_bytes] for span in spans]]
        )
        all_spans = [[Span(*values) for values in rows] for _, _, rows in facts]
        return route(all_spans, [node for node, _, _ in facts], world.rank, max(size for _, size, _ in facts))

    def exchange(
        self, planned: Sequence[TensorFile], files: Mapping[str, Mapping[str, Shard]], world: World
    ) -> list[tuple[Span, memoryview]]:
        """Return the bytes of the pages that this rank writes. Ranks: all; communicates if there are such pages."""
        if not self.num_bytes:
            return []
        by_name = {file.name: file for file in planned}
        pages = torch.zeros(self.num_bytes, dtype=torch.uint8)
        for span, place in self.sent:
            shards = files[span.file.removesuffix(".safetensors")]
            copy_span(by_name[span.file], shards, span, pages[place : place + span.num_bytes])
        pages = world.sum(pages.to(world.device)).cpu()  # of each byte all summands but one are zero
        return [(span, _memory(pages[place : place + span.num_bytes])) for span, place in self.written]


def route(spans_by_rank: Sequence[Sequence[Span]], nodes: Sequence[int], rank: int, page_bytes: int) -> Routing:
    """Return the routing of a rank, given the spans of all ranks, which cover the files, and the host of each."""
    touching: dict[tuple[str, int], set[int]] = {}
    extents: dict[tuple[str, int], tuple[int, int]] = {}
    for owner, spans in enumerate(spans_by_rank):
        for span in spans:
            for page in _border_pages(span, page_bytes):
                key, (begin, end) = (span.file, page), _within(span, page, page_bytes)
                low, high = extents.get(key, (begin, end))
                extents[key] = min(low, begin), max(high, end)
                touching.setdefault(key, set()).add(owner)
    common = sorted(key for key, ranks in touching.items() if len({nodes[owner] for owner in ranks}) > 1)
    places = {key: number * page_bytes for number, key in enumerate(common)}
    kept, sent = [], []
    for span in spans_by_rank[rank]:
        begin, end = span.offset, span.offset + span.num_bytes
        for page in _border_pages(span, page_bytes):
            if (span.file, page) not in places:
                continue
            low, high = _within(span, page, page_bytes)
            place = places[span.file, page] + low - page * page_bytes
            sent.append((Span(span.file, low, high - low), place))
            begin, end = (high if low == begin else begin), (low if high == end else end)
        if begin < end:
            kept.append(Span(span.file, begin, end - begin))
    written = [
        (Span(key[0], extents[key][0], extents[key][1] - extents[key][0]), places[key] + extents[key][0] % page_bytes)
        for key in common
        if min(touching[key]) == rank
    ]
    return Routing(kept, sent, written, len(common) * page_bytes)


def _border_pages(span: Span, page_bytes: int) -> list[int]:
    """Return the first and the last page of a span; those between are its own."""
    first, last = span.offset // page_bytes, (span.offset + span.num_bytes - 1) // page_bytes
    return sorted({first, last}) if span.num_bytes else []


def _within(span: Span, page: int, page_bytes: int) -> tuple[int, int]:
    """Return begin and end of the bytes of a span that lie in a page."""
    begin, end = page * page_bytes, (page + 1) * page_bytes
    return max(begin, span.offset), min(end, span.offset + span.num_bytes)


def _memory(tensor: Tensor) -> memoryview:
    array: Any = tensor.numpy()
    return memoryview(array)

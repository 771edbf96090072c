"""The layout of safetensors files before anything is written, and which rank writes which bytes.

The files are the same at every number of ranks. Source: the specification of the safetensors format.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ddpexp.checkpoint.codec import DTYPES
from ddpexp.errors import DdpexpError
from ddpexp.strategy.base import Shard

_BLOCK = 1 << 20  # bytes; ranks write multiples of it, so that no two hosts write to the same page of a file
_SPAN_BYTES = 64 << 20  # at most: a span becomes a piece with a hash, and the ranks of a start divide the pieces
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Span:
    """Bytes of a file that one rank writes."""

    file: str
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class TensorFile:
    """A safetensors file before it is written: its header, and the position of each tensor."""

    name: str
    header: bytes
    positions: Sequence[tuple[int, int, str]]  # begin, end, name
    shared: Sequence[tuple[int, int]]  # begin and end of what every rank holds
    owned: Sequence[tuple[int, int]]  # of what only this rank writes

    @property
    def num_bytes(self) -> int:
        """Return the size of the file."""
        return self.positions[-1][1] if self.positions else len(self.header)


def lay_out(name: str, shards: Mapping[str, Shard]) -> TensorFile:
    """Return the layout of a safetensors file.

    The order depends only on names and dtypes, not on how a model was built: the widest dtypes first, which keeps all
    aligned, then by name. Tied weights are written once; the metadata of the file map the other names to the first.

    Raises:
        DdpexpError: the safetensors format does not support the dtype or layout of a tensor.
    """
    for key, shard in shards.items():
        tensor = shard.tensor
        if tensor.dtype not in _NAMES or tensor.layout != torch.strided:
            kind = tensor.dtype if tensor.layout == torch.strided else tensor.layout
            raise DdpexpError(f"is of {kind}, which the safetensors format of checkpoints cannot hold", key=key)
    header: dict[str, Any] = {}
    positions: list[tuple[int, int, str]] = []
    tied = ties({key: shard.tensor for key, shard in shards.items()})
    begin = 0
    for key in sorted(shards.keys() - tied.keys(), key=lambda key: (-shards[key].tensor.element_size(), key)):
        shard = shards[key]
        end = begin + math.prod(shard.shape) * shard.tensor.element_size()
        header[key] = {"dtype": _NAMES[shard.tensor.dtype], "shape": list(shard.shape), "data_offsets": [begin, end]}
        positions.append((begin, end, key))
        begin = end
    text = json.dumps({"__metadata__": {**tied, "format": "pt"}, **header}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    first = 8 + len(text)
    positions = [(first + begin, first + end, key) for begin, end, key in positions]
    shared, owned = [(0, first)], []
    for begin, end, key in positions:
        shard = shards[key]
        if shard.first_row is not None:
            if shard.replica == 0 and shard.tensor.numel():
                owned += [(first, last) for first, last, _ in _held(shard, begin)]
        elif shared[-1][1] == begin:
            shared[-1] = shared[-1][0], end
        else:
            shared.append((begin, end))
    return TensorFile(f"{name}.safetensors", len(text).to_bytes(8, "little") + text, positions, shared, owned)


def _held(shard: Shard, begin: int) -> list[tuple[int, int, int]]:
    """Return which ranges of a file this rank holds of a tensor that begins at `begin`, and where in its memory.

    Units: bytes.
    """
    if shard.first_row is None:
        return [(begin, begin + shard.tensor.numel() * shard.tensor.element_size(), 0)]
    row = math.prod(shard.shape[1:]) * shard.tensor.element_size()
    held, position = [], 0
    for rows in shard.blocks:
        held.append((begin + rows.start * row, begin + rows.stop * row, position))
        position += len(rows) * row
    return held


def ties(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Map each further name of a tied tensor to the first of its names."""
    first: dict[Any, str] = {}
    tied = {}
    for key in sorted(tensors):
        tensor = tensors[key]
        if tensor.numel():
            first_name = first.setdefault((tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype), key)
            if first_name != key:
                tied[key] = first_name
    return tied


def share(files: Iterable[TensorFile], rank: int, world_size: int) -> list[Span]:
    """Return the spans that a rank writes.

    These are what it alone holds, and part `rank` of `world_size` equal parts of what every rank holds.
    """
    files = list(files)
    blocks = [
        Span(file.name, start, min(end, offset + _BLOCK) - start)
        for file in files
        for begin, end in file.shared
        for offset in range(begin - begin % _BLOCK, end, _BLOCK)
        for start in [max(begin, offset)]
    ]
    spans: list[Span] = []
    for span in blocks[rank * len(blocks) // world_size : (rank + 1) * len(blocks) // world_size]:
        last = spans[-1] if spans else None
        if (
            last is not None
            and (last.file, last.offset + last.num_bytes) == (span.file, span.offset)
            and (last.num_bytes < _SPAN_BYTES)
        ):
            spans[-1] = Span(span.file, last.offset, last.num_bytes + span.num_bytes)
        else:
            spans.append(span)
    return spans + [
        Span(file.name, offset, min(_SPAN_BYTES, end - offset))
        for file in files
        for begin, end in file.owned
        for offset in range(begin, end, _SPAN_BYTES)
    ]


def copy_span(file: TensorFile, shards: Mapping[str, Shard], span: Span, out: Tensor) -> None:
    """Copy the bytes of a span, from the header and the tensors. Shapes: `out` is (span.num_bytes,) uint8."""
    first, last = span.offset, span.offset + span.num_bytes
    if first < len(file.header):
        head = file.header[first:last]
        out[: len(head)].copy_(torch.frombuffer(bytearray(head), dtype=torch.uint8))
    for begin, _, key in file.positions[bisect_right(file.positions, first, key=lambda position: position[1]) :]:
        if begin >= last:
            break
        for start, end, position in _held(shards[key], begin):
            low, high = max(start, first), min(end, last)
            if low < high:
                source = _bytes(shards[key].tensor)[position + low - start : position + high - start]
                out[low - first : high - first].copy_(source, non_blocking=True)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)

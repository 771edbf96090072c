"""The layout of safetensors files before anything is written, and which rank writes which bytes.

The files are the same at every number of ranks. Source: the specification of the safetensors format.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ddpexp.checkpoint.codec import DTYPES
from ddpexp.errors import DdpexpError

_BLOCK = 1 << 20  # bytes; ranks write multiples of it, so that no two hosts write to the same page of a file
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

    @property
    def num_bytes(self) -> int:
        """Return the size of the file."""
        return self.positions[-1][1] if self.positions else len(self.header)


def lay_out(name: str, tensors: Mapping[str, Tensor]) -> TensorFile:
    """Return the layout of a safetensors file.

    The order depends only on names and dtypes, not on how a model was built: the widest dtypes first, which keeps all
    aligned, then by name. Tied weights are written once; the metadata of the file map the other names to the first.

    Raises:
        DdpexpError: the safetensors format does not support the dtype or layout of a tensor.
    """
    for key, tensor in tensors.items():
        if tensor.dtype not in _NAMES or tensor.layout != torch.strided:
            kind = tensor.dtype if tensor.layout == torch.strided else tensor.layout
            raise DdpexpError(f"{key} is of {kind}, which the safetensors format, and so a checkpoint, cannot hold.")
    header: dict[str, Any] = {}
    positions: list[tuple[int, int, str]] = []
    tied = ties(tensors)
    begin = 0
    for key in sorted(tensors.keys() - tied.keys(), key=lambda key: (-tensors[key].element_size(), key)):
        tensor = tensors[key]
        end = begin + tensor.numel() * tensor.element_size()
        header[key] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        positions.append((begin, end, key))
        begin = end
    text = json.dumps({"__metadata__": {**tied, "format": "pt"}, **header}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    first = 8 + len(text)
    return TensorFile(
        f"{name}.safetensors",
        len(text).to_bytes(8, "little") + text,
        [(first + begin, first + end, key) for begin, end, key in positions],
    )


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
    """Return the spans that a rank writes: part `rank` of `world_size` equal parts of the bytes of all files."""
    blocks = [(file, offset) for file in files for offset in range(0, file.num_bytes, _BLOCK)]
    own_blocks = blocks[rank * len(blocks) // world_size : (rank + 1) * len(blocks) // world_size]
    spans: list[Span] = []
    for file, offset in own_blocks:
        size = min(_BLOCK, file.num_bytes - offset)
        if spans and spans[-1].file == file.name:
            spans[-1] = Span(file.name, spans[-1].offset, spans[-1].num_bytes + size)
        else:
            spans.append(Span(file.name, offset, size))
    return spans


def copy_span(file: TensorFile, tensors: Mapping[str, Tensor], span: Span, out: Tensor) -> None:
    """Copy the bytes of a span, from the header and the tensors. Shapes: `out` is (span.num_bytes,) uint8."""
    first, last = span.offset, span.offset + span.num_bytes
    if first < len(file.header):
        head = file.header[first:last]
        out[: len(head)].copy_(torch.frombuffer(bytearray(head), dtype=torch.uint8))
    for begin, end, key in file.positions:
        low, high = max(begin, first), min(end, last)
        if low < high:
            source = _bytes(tensors[key])[low - begin : high - begin]
            out[low - first : high - first].copy_(source, non_blocking=True)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)

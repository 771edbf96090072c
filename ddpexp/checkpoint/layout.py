"""Every byte of a safetensors file but the tensors' own, before anything is written, and which rank writes which bytes.

The files are the same at every number of ranks. Source: the description of the safetensors format.
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

_CUT = 1 << 20  # bytes; ranks write whole multiples of it, so that no two hosts ever write into one page of a file
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Span:
    """Bytes of one file, which one rank writes."""

    file: str
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class TensorFile:
    """One safetensors file before it is written: its header, and where each tensor begins."""

    name: str
    header: bytes
    places: Sequence[tuple[int, int, str]]  # begin, end, name

    @property
    def num_bytes(self) -> int:
        """Return the size of the file."""
        return self.places[-1][1] if self.places else len(self.header)


def lay_out(name: str, tensors: Mapping[str, Tensor]) -> TensorFile:
    """Decide every byte of a safetensors file but the tensors' own.

    The order is one for the same names and types, however a model was built: the widest numbers first, which keeps each
    aligned, then by name. A tensor that is another one (a tied weight) is written once; the file's metadata map the
    other names to it.

    Raises:
        DdpexpError: a tensor of a type or layout that the safetensors format does not know.
    """
    for key, tensor in tensors.items():
        if tensor.dtype not in _NAMES or tensor.layout != torch.strided:
            kind = tensor.dtype if tensor.layout == torch.strided else tensor.layout
            raise DdpexpError(f"{key} is of {kind}, which the safetensors format, and so a checkpoint, cannot hold.")
    header: dict[str, Any] = {}
    places: list[tuple[int, int, str]] = []
    tied = ties(tensors)
    begin = 0
    for key in sorted(tensors.keys() - tied.keys(), key=lambda key: (-tensors[key].element_size(), key)):
        tensor = tensors[key]
        end = begin + tensor.numel() * tensor.element_size()
        header[key] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        places.append((begin, end, key))
        begin = end
    text = json.dumps({"__metadata__": {**tied, "format": "pt"}, **header}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    first = 8 + len(text)
    return TensorFile(
        f"{name}.safetensors",
        len(text).to_bytes(8, "little") + text,
        [(first + begin, first + end, key) for begin, end, key in places],
    )


def ties(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return for each name whose tensor is also another one's the first of their names, which stands for all."""
    first: dict[Any, str] = {}
    found = {}
    for key in sorted(tensors):
        tensor = tensors[key]
        if tensor.numel():
            kept = first.setdefault((tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype), key)
            if kept != key:
                found[key] = kept
    return found


def share(files: Iterable[TensorFile], rank: int, world_size: int) -> list[Span]:
    """Return what one rank writes.

    Of all files' bytes, one after the other, the rank-th of `world_size` equal parts.
    """
    cut = [(file, offset) for file in files for offset in range(0, file.num_bytes, _CUT)]
    mine = cut[rank * len(cut) // world_size : (rank + 1) * len(cut) // world_size]
    spans: list[Span] = []
    for file, offset in mine:
        size = min(_CUT, file.num_bytes - offset)
        if spans and spans[-1].file == file.name:
            spans[-1] = Span(file.name, spans[-1].offset, spans[-1].num_bytes + size)
        else:
            spans.append(Span(file.name, offset, size))
    return spans


def copy_span(file: TensorFile, tensors: Mapping[str, Tensor], span: Span, out: Tensor) -> None:
    """Copy a span's bytes of the header and of the tensors in it. Shapes: `out` is (span.num_bytes,) uint8."""
    first, last = span.offset, span.offset + span.num_bytes
    if first < len(file.header):
        head = file.header[first:last]
        out[: len(head)].copy_(torch.frombuffer(bytearray(head), dtype=torch.uint8))
    for begin, end, key in file.places:
        low, high = max(begin, first), min(end, last)
        if low < high:
            source = _bytes(tensors[key])[low - begin : high - begin]
            out[low - first : high - first].copy_(source, non_blocking=True)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)

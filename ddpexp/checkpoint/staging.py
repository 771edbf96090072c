"""Memory that holds this rank's share of a checkpoint while it is written."""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from ddpexp.checkpoint.layout import Span, TensorFile, copy_span
from ddpexp.strategy.base import Shard

Shards = Mapping[str, Shard]


class Stage:
    """Memory for this rank's share while it is written; reused, because new memory is slow to fill."""

    def __init__(self, device: torch.device) -> None:
        """Copy from tensors on this device."""
        self._device = device
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def copy(self, planned: Sequence[TensorFile], files: Mapping[str, Shards], spans: Sequence[Span]) -> Tensor:
        """Copy the bytes of the spans. Shapes: (bytes,) uint8, on the CPU."""
        num_bytes = sum(span.num_bytes for span in spans)
        if self._buffer.numel() < num_bytes:
            self._buffer = _memory(num_bytes, self._device)
        by_name = {file.name: file for file in planned}
        begin = 0
        for span in spans:
            file = by_name[span.file]
            copy_span(
                file, files[file.name.removesuffix(".safetensors")], span, self._buffer[begin : begin + span.num_bytes]
            )
            begin += span.num_bytes
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return self._buffer[:num_bytes]


def _memory(num_bytes: int, device: torch.device) -> Tensor:
    if device.type == "cuda":
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    block = mmap.mmap(-1, max(num_bytes, 1))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):
            block.madvise(mmap.MADV_HUGEPAGE)  # a page fault for every two megabytes, not for every four kilobytes
    return torch.frombuffer(block, dtype=torch.uint8)[:num_bytes]

"""Memory that holds this rank's share of a checkpoint while it is written."""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import Tensor

from ddpexp.checkpoint.layout import Span, TensorFile, copy_span
from ddpexp.strategy.base import Shard

Shards = Mapping[str, Shard]


class Pins(Protocol):
    """Pins memory: a GPU then copies into it by itself, without the host. Returns are CUDA's error codes, 0 if done."""

    def cudaHostRegister(self, pointer: int, num_bytes: int, flags: int) -> Any:
        """Pin memory."""
        ...

    def cudaHostUnregister(self, pointer: int) -> Any:
        """Release it."""
        ...


class Stage:
    """Memory for this rank's share while it is written; reused, because new memory is slow to fill."""

    def __init__(self, device: torch.device, pins: Pins | None = None) -> None:
        """Copy from tensors on this device. `pins` pins the memory; by default CUDA does, for a GPU."""
        self._device = device
        self._pins = torch.cuda.cudart() if pins is None and device.type == "cuda" else pins  # type: ignore[no-untyped-call]
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._pinned: int | None = None  # the address, if the memory is pinned

    def copy(self, planned: Sequence[TensorFile], files: Mapping[str, Shards], spans: Sequence[Span]) -> Tensor:
        """Copy the bytes of the spans. Shapes: (bytes,) uint8, on the CPU."""
        num_bytes = sum(span.num_bytes for span in spans)
        if self._buffer.numel() < num_bytes:
            self._grow(num_bytes)
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

    def _grow(self, num_bytes: int) -> None:
        """Replace the memory. Nobody reads the old one any more: one checkpoint is written at a time."""
        if self._pinned is not None and self._pins is not None:
            self._pins.cudaHostUnregister(self._pinned)  # before it is unmapped
            self._pinned = None
        self._buffer = torch.empty(0, dtype=torch.uint8)
        block = mmap.mmap(-1, max(num_bytes, 1))
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):
                block.madvise(mmap.MADV_HUGEPAGE)  # a page fault for every two megabytes, not for every four kilobytes
        self._buffer = torch.frombuffer(block, dtype=torch.uint8)[:num_bytes]
        if self._pins is not None:
            self._pin(self._pins, len(block))

    def _pin(self, pins: Pins, num_bytes: int) -> None:
        """Pin the memory as it is: torch's own allocator would round its size up to a power of two.

        If that fails, for example because of the limit on locked memory, copies are slower and still correct: CUDA
        returns from a copy into memory that is not pinned when it is done.
        """
        address = self._buffer.data_ptr()
        if int(pins.cudaHostRegister(address, num_bytes, 0)) == 0:
            self._pinned = address
            return
        with suppress(RuntimeError):  # CUDA keeps the error for the next kernel, which would be blamed for it
            torch.zeros((), device=self._device)

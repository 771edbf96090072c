"""What the neighbouring stages of a pipeline send each other: activations, and their gradients."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ddpexp.errors import DdpexpError
from ddpexp.strategy.comm.reduce import as_bytes

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_MAX_DIMS = 12


class Kind(NamedTuple):
    """What a stage has returned for a batch."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    has_gradient: bool


@dataclass
class Links:
    """The neighbours of a stage, of which the first and the last have one each.

    Activations and gradients go through groups of their own: with NCCL the messages of a group have one order, and
    two ranks that send to each other at the same time would wait for ever.
    """

    stage: int
    device: torch.device
    forward: Any  # the process group of activations
    backward: Any  # that of gradients
    previous: int | None  # the rank of the stage before this one
    next: int | None
    channels_last: bool = False  # the memory format of received images
    _received: dict[Hashable, Kind] = field(default_factory=dict)  # by kinds of batches
    _sent: dict[Hashable, Kind] = field(default_factory=dict)
    _pending: list[tuple[Any, Tensor]] = field(default_factory=list)  # messages, with the memory that they need

    def send(self, kind_of_batch: Hashable, output: Tensor) -> None:
        """Send activations to the next stage; does not wait.

        Raises:
            DdpexpError: they are not what this stage has returned for a batch of the same kind.
        """
        kind = Kind(output.dtype, tuple(output.shape), output.requires_grad)
        known = self._sent.setdefault(kind_of_batch, kind)
        if known is kind:
            self._check(kind)
            self._send(self._header(kind), self.next, self.forward)
        elif known != kind:
            raise DdpexpError(
                f"stage {self.stage} of the pipeline returned {_text(kind)}, and {_text(known)} for a batch of the "
                "same shapes before: the next stage cannot know which it is sent. Make the shapes of what a layer "
                "returns depend on those of the batch alone."
            )
        self._send(output.detach(), self.next, self.forward)

    def receive(self, kind_of_batch: Hashable) -> Tensor:
        """Return the activations of the stage before, as a leaf of this rank's graph; waits for them."""
        kind = self._received.get(kind_of_batch)
        if kind is None:
            header = torch.zeros(3 + _MAX_DIMS, dtype=torch.int64, device=self.device)
            self._receive(header, self.previous, self.forward)
            dtype, has_gradient, num_dims, *shape = header.tolist()
            kind = Kind(_DTYPES[dtype], tuple(shape[:num_dims]), bool(has_gradient))
            self._received[kind_of_batch] = kind
        activations = torch.empty(kind.shape, dtype=kind.dtype, device=self.device)
        self._receive(activations, self.previous, self.forward)
        if self.channels_last and activations.dim() == 4:
            activations = activations.contiguous(memory_format=torch.channels_last)
        return activations.requires_grad_(kind.has_gradient)

    def send_gradient(self, gradient: Tensor) -> None:
        """Send the gradient of what was received to the stage before; does not wait."""
        self._send(gradient, self.previous, self.backward)

    def receive_gradient(self, output: Tensor) -> Tensor:
        """Return the gradient of what was sent; waits for it."""
        gradient = torch.empty_like(output, memory_format=torch.contiguous_format)
        self._receive(gradient, self.next, self.backward)
        return gradient

    def finish(self) -> None:
        """Wait until everything that was sent has arrived."""
        for work, _ in self._pending:
            work.wait()
        self._pending.clear()

    def _send(self, tensor: Tensor, to: int | None, group: Any) -> None:
        if tensor.numel():
            message = as_bytes(tensor.contiguous())
            self._pending.append((dist.isend(message, to, group=group), message))

    def _receive(self, tensor: Tensor, source: int | None, group: Any) -> None:
        if tensor.numel():
            work = dist.irecv(as_bytes(tensor), source, group=group)
            assert work is not None
            work.wait()

    def _check(self, kind: Kind) -> None:
        if kind.dtype not in _DTYPES or len(kind.shape) > _MAX_DIMS:
            raise DdpexpError(
                f"stage {self.stage} of the pipeline returned {_text(kind)}, and stages can send each other tensors of "
                f"up to {_MAX_DIMS} dimensions in fp32, bf16, fp16 and fp64: let strategy.split_before name another "
                "layer."
            )

    def _header(self, kind: Kind) -> Tensor:
        padding = [0] * (_MAX_DIMS - len(kind.shape))
        numbers = [_DTYPES.index(kind.dtype), int(kind.has_gradient), len(kind.shape), *kind.shape, *padding]
        return torch.tensor(numbers, device=self.device)


def kind_of_batch(batch: Any) -> Hashable:
    """Return the shapes and dtypes of all tensors of a batch, which are the same for all stages."""
    if isinstance(batch, Tensor):
        return tuple(batch.shape), batch.dtype
    if isinstance(batch, Mapping):
        return tuple((key, kind_of_batch(value)) for key, value in batch.items())
    if isinstance(batch, list | tuple):
        return tuple(map(kind_of_batch, batch))
    return type(batch).__name__


def _text(kind: Kind) -> str:
    return f"a tensor of shape {list(kind.shape)} in {str(kind.dtype).removeprefix('torch.')}"

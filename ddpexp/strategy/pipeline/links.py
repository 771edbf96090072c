"""What the neighbouring stages of a pipeline send each other: activations, and their gradients."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ddpexp.distributed.world import World
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
    """The neighbours of a worker in its pipe. The first stage receives nothing, and the last one sends nothing.

    Activations and gradients go through groups of their own, and so do those between the last worker and the first:
    with NCCL the messages of a group have one order, and two ranks that send to each other at the same time would wait
    for ever.
    """

    groups: Sequence[World]  # the pipe's workers, numbered by their place: for activations and for gradients
    closing: Sequence[World]  # the same, between the last worker and the first
    channels_last: bool = False  # the memory format of received images
    _received: dict[Hashable, Kind] = field(default_factory=dict)  # by stages and kinds of batches
    _sent: dict[Hashable, Kind] = field(default_factory=dict)
    _pending: list[tuple[Any, Tensor]] = field(default_factory=list)  # messages, with the memory that they need

    @property
    def device(self) -> torch.device:
        """Return the device of this worker."""
        return self.groups[0].device

    def send(self, stage: int, kind_of_batch: Hashable, output: Tensor) -> None:
        """Send the activations of a stage to the next one; does not wait.

        Raises:
            DdpexpError: they are not what this stage has returned for a batch of the same kind.
        """
        kind = kind_of_output(stage, output)
        known = self._sent.setdefault((stage, kind_of_batch), kind)
        if known is kind:
            self._send(header_of(kind, self.device), 1)
        elif known != kind:
            raise DdpexpError(
                f"stage {stage} of the pipeline returned {_text(kind)}, and {_text(known)} for a batch of the "
                "same shapes before: the next stage cannot know which it is sent",
                suggestion="Make the shapes of what a layer returns depend on those of the batch alone.",
            )
        self._send(output.detach(), 1)

    def receive(self, stage: int, kind_of_batch: Hashable) -> Tensor:
        """Return the activations for a stage of this worker, as a leaf of this rank's graph; waits for them."""
        kind = self._received.get((stage, kind_of_batch))
        if kind is None:
            kind = self._received[(stage, kind_of_batch)] = self._receive_kind()
        return self._receive_activations(kind).requires_grad_(kind.has_gradient)

    def send_any(self, stage: int, output: Tensor) -> None:
        """Send the activations of a stage in an evaluation, of any shape; does not wait.

        Raises:
            DdpexpError: stages cannot send each other such a tensor.
        """
        kind = kind_of_output(stage, output)
        self._send(header_of(kind, self.device), 1)
        self._send(output, 1)

    def receive_any(self) -> Tensor:
        """Return what `send_any` sends on the worker before; waits for it."""
        return self._receive_activations(self._receive_kind())

    def _receive_kind(self) -> Kind:
        header = empty_header(self.device)
        self._receive(header, -1)
        return kind_in(header)

    def _receive_activations(self, kind: Kind) -> Tensor:
        activations = torch.empty(kind.shape, dtype=kind.dtype, device=self.device)
        self._receive(activations, -1)
        if self.channels_last and activations.dim() == 4:
            activations = activations.contiguous(memory_format=torch.channels_last)
        return activations

    def send_gradient(self, gradient: Tensor) -> None:
        """Send the gradient of what was received to the stage before; does not wait."""
        self._send(gradient, -1)

    def receive_gradient(self, output: Tensor) -> Tensor:
        """Return the gradient of what was sent; waits for it."""
        gradient = torch.empty_like(output, memory_format=torch.contiguous_format)
        self._receive(gradient, 1)
        return gradient

    def finish(self) -> None:
        """Wait until everything that was sent has arrived."""
        with self.groups[0].times.collective:
            for work, _ in self._pending:
                work.wait()
        self._pending.clear()

    def _send(self, tensor: Tensor, step: Literal[1, -1]) -> None:
        """Send to the next worker of the pipe (1), or to the one before (-1)."""
        if tensor.numel():
            to, world = self._neighbour(step, is_gradient=step < 0)
            message = as_bytes(tensor.contiguous())
            self._pending.append((world.send(message, to), message))

    def _receive(self, tensor: Tensor, step: Literal[1, -1]) -> None:
        if tensor.numel():
            source, world = self._neighbour(step, is_gradient=step > 0)
            world.receive(as_bytes(tensor), source)

    def _neighbour(self, step: int, is_gradient: bool) -> tuple[int, World]:
        """Return the place of a neighbour, and the world of what it is sent or sends."""
        own = self.groups[is_gradient]
        place = own.rank + step
        return place % own.world_size, own if 0 <= place < own.world_size else self.closing[is_gradient]


def kind_of_output(stage: int, output: Tensor) -> Kind:
    """Return the kind of a tensor that a stage has returned.

    Raises:
        DdpexpError: workers cannot send each other such a tensor.
    """
    kind = Kind(output.dtype, tuple(output.shape), output.requires_grad)
    if kind.dtype not in _DTYPES or len(kind.shape) > _MAX_DIMS:
        raise DdpexpError(
            f"stage {stage} of the pipeline returned {_text(kind)}, and stages can send each other tensors of "
            f"up to {_MAX_DIMS} dimensions in fp32, bf16, fp16 and fp64",
            suggestion="Let strategy.split_before name another layer.",
        )
    return kind


def empty_header(device: torch.device) -> Tensor:
    """Return memory for a header. Shapes: (num,) int64."""
    return torch.zeros(3 + _MAX_DIMS, dtype=torch.int64, device=device)


def header_of(kind: Kind, device: torch.device) -> Tensor:
    """Return a kind as numbers, which are sent ahead of the tensor. Shapes: as `empty_header`."""
    padding = [0] * (_MAX_DIMS - len(kind.shape))
    numbers = [_DTYPES.index(kind.dtype), int(kind.has_gradient), len(kind.shape), *kind.shape, *padding]
    return torch.tensor(numbers, device=device)


def kind_in(header: Tensor) -> Kind:
    """Return the kind that a header tells."""
    dtype, has_gradient, num_dims, *shape = header.tolist()
    return Kind(_DTYPES[dtype], tuple(shape[:num_dims]), bool(has_gradient))


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

"""Buffers of models in an exact step: every micro-batch starts from the same values, and its changes are averaged.

After the step a buffer is its value before, plus the mean of the changes by all micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ddpexp.errors import DdpexpError

_MAX_INTEGER = 2**24  # float32 represents every integer below


@dataclass(eq=False)
class BufferSlot:
    """The attribute of a module that holds a buffer; the module may assign another tensor to it."""

    name: str
    holder: dict[str, Tensor | None]
    key: str
    start: Tensor  # the tensor before the step
    saved: Tensor  # a copy of its values

    def now(self) -> Tensor:
        """Return the current tensor.

        Raises:
            DdpexpError: its shape or dtype has changed.
        """
        now = self.holder[self.key]
        if now is self.start:
            return now
        if now is None or now.shape != self.start.shape or now.dtype != self.start.dtype:
            found = "nothing" if now is None else f"{tuple(now.shape)} of {now.dtype}"
            raise DdpexpError(
                f"the buffer {self.name} was {tuple(self.start.shape)} of {self.start.dtype} and is {found} after a "
                "micro-batch, so there is no mean over the micro-batches for trainer.reduction=exact. Keep its "
                "shape, or make it a plain attribute of the module if it can be computed again."
            )
        return now


class Buffers:
    """All buffers of all models, with their values before the step."""

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        """Find the buffers."""
        modules = [(model, prefix, module) for model, root in models.items() for prefix, module in root.named_modules()]
        self._holders = [module._buffers for _, _, module in modules]
        self.slots = [
            BufferSlot(
                ".".join(part for part in (model, prefix, key) if part), module._buffers, key, buffer, buffer.clone()
            )
            for model, prefix, module in modules
            for key, buffer in module._buffers.items()
            if buffer is not None
        ]

    def begin(self) -> None:
        """Begin a step from the current values."""
        for slot in self.slots:
            slot.start = slot.now()
        if self.slots:
            torch._foreach_copy_([slot.saved for slot in self.slots], [slot.start for slot in self.slots])

    def check(self) -> None:
        """Check that no buffers were added or removed.

        Raises:
            DdpexpError: there are others than before.
        """
        count = sum(buffer is not None for holder in self._holders for buffer in holder.values())
        if count != len(self.slots):
            raise DdpexpError(
                f"there were {len(self.slots)} buffers, and there are {count} after a forward pass: "
                "trainer.reduction=exact must know all of them before training to keep them the same on all workers. "
                "Register them in the module's __init__."
            )

    def restore(self, slots: Sequence[BufferSlot]) -> None:
        """Restore the tensors from before the step, with their values."""
        for slot in slots:
            slot.holder[slot.key] = slot.start
        if slots:
            torch._foreach_copy_([slot.start for slot in slots], [slot.saved for slot in slots])


class BufferDelta:
    """The changes of some buffers by micro-batches, and the buffers' new values from the sum of the changes."""

    def __init__(self, slots: Sequence[BufferSlot], dtype: torch.dtype) -> None:
        """`dtype` is the dtype of the sum."""
        self.slots = [*filter(_is_float, slots), *(slot for slot in slots if not _is_float(slot))]
        self.sizes = [slot.start.numel() for slot in self.slots]
        self._num_floats = sum(map(_is_float, slots))
        device = self.slots[0].start.device if self.slots else None
        self._base = torch.zeros(sum(self.sizes[: self._num_floats]), dtype=dtype, device=device)
        parts = torch.split(self._base, self.sizes[: self._num_floats])
        self._bases = [part.view(slot.start.shape) for part, slot in zip(parts, self.slots, strict=False)]

    def begin(self) -> None:
        """Begin a step. Non-finite values count as 0, since no difference from them can be computed."""
        if self._bases:
            torch._foreach_copy_(self._bases, [slot.saved for slot in self.slots[: self._num_floats]])
            self._base.nan_to_num_(0.0, 0.0, 0.0)

    def write(self, values: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
        """Write the changes by a micro-batch, given the values it left, into its leaf. Shapes: those of the buffers."""
        num = self._num_floats
        if num:
            torch._foreach_copy_(list(parts[:num]), list(values[:num]))
            torch._foreach_sub_(list(parts[:num]), self._bases)
        for slot, value, part in zip(self.slots[num:], values[num:], parts[num:], strict=True):
            part.copy_(value.long() - slot.saved.long())

    def read(self, totals: Sequence[Tensor], num_leaves: int) -> None:
        """Assign the buffers' new values from the summed changes. Shapes: those of the buffers.

        Raises:
            DdpexpError: a buffer of whole numbers would not be slot of whole numbers any more.
        """
        num = self._num_floats
        for slot, base, total in zip(self.slots[:num], self._bases, totals[:num], strict=True):
            slot.start.copy_(base + total / num_leaves)
        for slot, total in zip(self.slots[num:], totals[num:], strict=True):
            if not bool(((total % num_leaves == 0) & (total.abs() < _MAX_INTEGER)).all()):
                raise DdpexpError(
                    f"the buffer {slot.name} holds whole numbers, and the {num_leaves} micro-batches of a step have "
                    "changed it in different ways, so their mean, which trainer.reduction=exact keeps, is none. Let "
                    "it count the same in each, or make it a buffer of torch.float32."
                )
            slot.start.copy_(slot.saved.long() + (total / num_leaves).long())


def _is_float(slot: BufferSlot) -> bool:
    return slot.start.is_floating_point()

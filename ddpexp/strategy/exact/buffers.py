"""Buffers of models in an exact step: every micro-batch starts from the same values, and its changes are averaged.

After the step a buffer is its value before, plus the mean of the changes by all micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ddpexp.compat import operators
from ddpexp.compat.modules import buffers_of
from ddpexp.distributed.transfers import LateFlag, is_host
from ddpexp.errors import DdpexpError

_MAX_INTEGER = 2**24  # float32 represents every integer below
_UNREAD_BYTES = 64 << 20  # of values that are kept because the host has not yet read whether they have changed
_SHARE_OF_GRADIENTS = 16  # buffers of up to this fraction of the gradients cost little in a sum


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
                f"the buffer {self.name} was {tuple(self.start.shape)} of {self.start.dtype} and is {found} "
                "after a micro-batch, so there is no mean over the micro-batches for trainer.reduction=exact",
                suggestion="Keep its shape, or make it a plain attribute of the module if it can be computed again.",
            )
        return now


class Buffers:
    """All buffers of all models, with their values before the step."""

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        """Find the buffers."""
        modules = [(model, prefix, module) for model, root in models.items() for prefix, module in root.named_modules()]
        self._holders = [buffers_of(module) for _, _, module in modules]
        self.slots = [
            BufferSlot(
                ".".join(part for part in (model, prefix, key) if part), buffers_of(module), key, buffer, buffer.clone()
            )
            for model, prefix, module in modules
            for key, buffer in buffers_of(module).items()
            if buffer is not None
        ]

    def begin(self) -> None:
        """Begin a step from the current values."""
        for slot in self.slots:
            slot.start = slot.now()
        if self.slots:
            operators.foreach_copy_([slot.saved for slot in self.slots], [slot.start for slot in self.slots])

    def check(self) -> None:
        """Check that no buffers were added or removed.

        Raises:
            DdpexpError: there are others than before.
        """
        count = sum(buffer is not None for holder in self._holders for buffer in holder.values())
        if count != len(self.slots):
            raise DdpexpError(
                f"there were {len(self.slots)} buffers, and there are {count} after a forward pass: "
                "trainer.reduction=exact must know all of them before training to keep them the same on all "
                "workers",
                suggestion="Register them in the module's __init__.",
            )

    def restore(self, slots: Sequence[BufferSlot]) -> None:
        """Restore the tensors from before the step, with their values."""
        for slot in slots:
            slot.holder[slot.key] = slot.start
        if slots:
            operators.foreach_copy_([slot.start for slot in slots], [slot.saved for slot in slots])


class BufferDelta:
    """The changes of some buffers by micro-batches, and the buffers' new values from the sum of the changes."""

    def __init__(self, slots: Sequence[BufferSlot], dtype: torch.dtype) -> None:
        """`dtype` is the dtype of the sum."""
        self.slots = [*filter(_is_float, slots), *(slot for slot in slots if not _is_float(slot))]
        self.sizes = [slot.start.numel() for slot in self.slots]
        self._num_floats = sum(map(_is_float, slots))
        device = self.slots[0].start.device if self.slots else torch.device("cpu")
        self._base = torch.zeros(sum(self.sizes[: self._num_floats]), dtype=dtype, device=device)
        parts = torch.split(self._base, self.sizes[: self._num_floats])
        self._bases = [part.view(slot.start.shape) for part, slot in zip(parts, self.slots, strict=False)]
        # Which integers have changed in different ways, in any step since the last check.
        self._differs = torch.zeros(sum(self.sizes[self._num_floats :]), dtype=torch.bool, device=device)
        self._any_differs = LateFlag(device)
        self._num_leaves = 0

    def begin(self) -> None:
        """Begin a step. Non-finite values count as 0, since no difference from them can be computed."""
        if self._bases:
            operators.foreach_copy_(self._bases, [slot.saved for slot in self.slots[: self._num_floats]])
            self._base.nan_to_num_(0.0, 0.0, 0.0)

    def write(self, values: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
        """Write the changes by a micro-batch, given the values it left, into its leaf. Shapes: those of the buffers."""
        num = self._num_floats
        if num:
            operators.foreach_copy_(list(parts[:num]), list(values[:num]))
            operators.foreach_sub_(list(parts[:num]), self._bases)
        if self.slots[num:]:
            changes = operators.foreach_sub([value.long() for value in values[num:]], self._saved_integers())
            operators.foreach_copy_(list(parts[num:]), changes)

    def read(self, totals: Sequence[Tensor], num_leaves: int) -> None:
        """Assign the buffers' new values from the summed changes; does not wait for the device.

        Call `check` later. Shapes: those of the buffers.
        """
        num = self._num_floats
        starts = [slot.start for slot in self.slots]
        if num:
            means = operators.foreach_div(list(totals[:num]), num_leaves)
            operators.foreach_copy_(starts[:num], operators.foreach_add(self._bases, means))
        if starts[num:]:
            total = torch.cat([part.reshape(-1) for part in totals[num:]])
            self._differs |= ~((total % num_leaves == 0) & (total.abs() < _MAX_INTEGER))
            self._any_differs.send(self._differs.any())
            self._num_leaves = num_leaves
            parts = torch.split((total / num_leaves).long(), self.sizes[num:])
            steps = [part.view(start.shape) for part, start in zip(parts, starts[num:], strict=True)]
            operators.foreach_copy_(starts[num:], operators.foreach_add(self._saved_integers(), steps))

    def check(self) -> None:
        """Check the buffers that `read` has assigned; waits for nothing that was queued since.

        Raises:
            DdpexpError: a buffer of whole numbers would not be one of whole numbers any more.
        """
        if not self._any_differs.read():
            return
        parts = torch.split(self._differs, self.sizes[self._num_floats :])
        for slot, part in zip(self.slots[self._num_floats :], parts, strict=True):
            if bool(part.any()):
                raise DdpexpError(
                    f"the buffer {slot.name} holds whole numbers, and the {self._num_leaves} micro-batches of "
                    "a step have changed it in different ways, so their mean, which trainer.reduction=exact "
                    "keeps, is none",
                    suggestion="Let it count the same in each, or make it a buffer of torch.float32.",
                )

    def _saved_integers(self) -> list[Tensor]:
        return [slot.saved.long() for slot in self.slots[self._num_floats :]]


class ConstantBuffers:
    """Buffers that no micro-batch has changed so far, and which therefore have no place in the sum.

    When one changes for the first time, the new values of this round are kept, to be summed on their own.
    """

    def __init__(self, slots: Sequence[BufferSlot], buffers: Buffers, device: torch.device) -> None:
        """Watch the buffers on this device."""
        self.slots = slots
        self._buffers = buffers
        self._is_host = is_host(device)
        self._num_bytes = sum(slot.saved.numel() * slot.saved.element_size() for slot in slots)
        # New values by micro-batch; on a GPU of all buffers, until the host has read which have changed.
        self._changes: list[dict[BufferSlot, Tensor]] = []
        self._unread: list[Tensor] = []  # for the last of them, which have changed. Shapes: (num_slots,) each

    def begin(self) -> None:
        """Begin a round."""
        self._changes.clear()
        self._unread.clear()

    def take(self, flags: Tensor) -> None:
        """Write which buffers a micro-batch has changed into its leaf, and restore them. Shapes: (num_slots,).

        The host waits for the device only if the values that it keeps become too large.
        """
        if not self.slots:
            return
        now = [slot.now() for slot in self.slots]
        pairs = zip(self.slots, now, strict=True)
        if self._is_host:
            changed = {slot: value.clone() for slot, value in pairs if not torch.equal(value, slot.saved)}
            flags.copy_(torch.tensor([float(slot in changed) for slot in self.slots]))
        else:
            changed = {slot: value.clone() for slot, value in pairs}
            self._unread.append(torch.stack([(value != slot.saved).any() for slot, value in changed.items()]))
            flags.copy_(self._unread[-1])
        self._buffers.restore(list(changed))
        self._changes.append(changed)
        if len(self._unread) * self._num_bytes > _UNREAD_BYTES:
            self._read()

    def changes(self, number: int) -> Mapping[BufferSlot, Tensor]:
        """Return the new values of buffers that may have been changed by a micro-batch of this round."""
        return self._changes[number]

    def _read(self) -> None:
        """Drop the values of buffers that have not changed. The host waits for the device."""
        read = torch.stack(self._unread).tolist()
        for number, flags in enumerate(read, start=len(self._changes) - len(read)):
            kept = [slot for slot, changed in zip(self.slots, flags, strict=True) if changed]
            self._changes[number] = {slot: self._changes[number][slot] for slot in kept}
        self._unread.clear()


def always_summed(slots: Sequence[BufferSlot], num_gradients: int, device: torch.device) -> list[BufferSlot]:
    """Return the buffers that are summed from the first step on, whether they change or not.

    On a GPU these are small ones, smallest first: to learn whether a buffer has changed, the host would have to wait in
    every step. Units: `num_gradients` is the number of elements.
    """
    chosen: list[BufferSlot] = []
    left = 0 if is_host(device) else num_gradients // _SHARE_OF_GRADIENTS
    for slot in sorted(slots, key=lambda slot: slot.start.numel()):
        left -= slot.start.numel()
        if left >= 0 and not slot.start.is_complex():
            chosen.append(slot)
    return chosen


def _is_float(slot: BufferSlot) -> bool:
    return slot.start.is_floating_point()

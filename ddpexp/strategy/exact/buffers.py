"""The buffers of models in an exact step: every micro-batch starts from the same values, and moves them by its share.

After the step a buffer is its value before, plus the mean over micro-batches of what each would have added to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ddpexp.errors import DdpexpError

_WHOLE = 2**24  # float32 holds every whole number below


@dataclass(eq=False)
class Place:
    """Where a module holds a buffer: by name, for a module may put another tensor there."""

    name: str
    holder: dict[str, Tensor | None]
    key: str
    start: Tensor  # the tensor that stood there before the step
    kept: Tensor  # its values

    def now(self) -> Tensor:
        """Return what stands there now.

        Raises:
            DdpexpError: it is not of the same shape and type any more.
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
    """All buffers of all models, as they were before the step and as a micro-batch has left them."""

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        """Remember where the buffers are."""
        modules = [(model, prefix, module) for model, root in models.items() for prefix, module in root.named_modules()]
        self._holders = [module._buffers for _, _, module in modules]
        self.places = [
            Place(".".join(part for part in (model, prefix, key) if part), module._buffers, key, buffer, buffer.clone())
            for model, prefix, module in modules
            for key, buffer in module._buffers.items()
            if buffer is not None
        ]

    def begin(self) -> None:
        """Begin a step from what the buffers are now."""
        for place in self.places:
            place.start = place.now()
        if self.places:
            torch._foreach_copy_([place.kept for place in self.places], [place.start for place in self.places])

    def check(self) -> None:
        """Look for buffers that were not there before.

        Raises:
            DdpexpError: there are some.
        """
        found = sum(buffer is not None for holder in self._holders for buffer in holder.values())
        if found != len(self.places):
            raise DdpexpError(
                f"there were {len(self.places)} buffers, and there are {found} after a forward pass: "
                "trainer.reduction=exact must know all of them before training to keep them the same on all workers. "
                "Register them in the module's __init__."
            )

    def restore(self, places: Sequence[Place]) -> None:
        """Give the modules the values from before the step, in the tensors from before the step."""
        for place in places:
            place.holder[place.key] = place.start
        if places:
            torch._foreach_copy_([place.start for place in places], [place.kept for place in places])


class BufferDelta:
    """What micro-batches add to some buffers: parts of a sum over them, and the buffers' new values from that sum."""

    def __init__(self, places: Sequence[Place], dtype: torch.dtype) -> None:
        """`dtype` is that of the sum."""
        self.places = [*(one for one in places if _floats(one)), *(one for one in places if not _floats(one))]
        self.sizes = [one.start.numel() for one in self.places]
        self._num_floats = sum(map(_floats, places))
        device = self.places[0].start.device if self.places else None
        self._base = torch.zeros(sum(self.sizes[: self._num_floats]), dtype=dtype, device=device)
        parts = torch.split(self._base, self.sizes[: self._num_floats])
        self._bases = [part.view(one.start.shape) for part, one in zip(parts, self.places, strict=False)]

    def begin(self) -> None:
        """Begin a step. What is infinite or not a number counts whole, for there is no difference from it."""
        if self._bases:
            torch._foreach_copy_(self._bases, [one.kept for one in self.places[: self._num_floats]])
            self._base.nan_to_num_(0.0, 0.0, 0.0)

    def write(self, values: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
        """Write what a micro-batch adds, of which it left these values, into its part of the sum. Shapes.

        Those of the buffers.
        """
        num = self._num_floats
        if num:
            torch._foreach_copy_(list(parts[:num]), list(values[:num]))
            torch._foreach_sub_(list(parts[:num]), self._bases)
        for place, value, part in zip(self.places[num:], values[num:], parts[num:], strict=True):
            part.copy_(value.long() - place.kept.long())

    def read(self, totals: Sequence[Tensor], num_leaves: int) -> None:
        """Give the buffers their new values. Shapes: those of the buffers.

        Raises:
            DdpexpError: a buffer of whole numbers would not be one of whole numbers any more.
        """
        num = self._num_floats
        for place, base, total in zip(self.places[:num], self._bases, totals[:num], strict=True):
            place.start.copy_(base + total / num_leaves)
        for place, total in zip(self.places[num:], totals[num:], strict=True):
            if not bool(((total % num_leaves == 0) & (total.abs() < _WHOLE)).all()):
                raise DdpexpError(
                    f"the buffer {place.name} holds whole numbers, and the {num_leaves} micro-batches of a step have "
                    "changed it in different ways, so their mean, which trainer.reduction=exact keeps, is none. Let "
                    "it count the same in each, or make it a buffer of torch.float32."
                )
            place.start.copy_(place.kept.long() + (total / num_leaves).long())


def _floats(place: Place) -> bool:
    return place.start.is_floating_point()

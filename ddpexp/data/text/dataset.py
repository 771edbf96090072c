"""Windows of a text: mapped once for all workers of a node, gathered batch by batch.

Which tokens a window holds is a function of seed, epoch and its index alone: the same at every number of workers and
after any interruption.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddpexp.data.base import IndexData
from ddpexp.data.datasets import Splits
from ddpexp.data.text.prepare import BORDERS, TOKENS
from ddpexp.distributed.rng import AUGMENT, seed_of
from ddpexp.distributed.transfers import is_host, moved

IGNORED = -100  # a target that does not count; torch's cross_entropy leaves it out by default
_STORED = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # torch computes little with unsigned numbers; see `_long`
_MASK = {torch.int16: 0xFFFF, torch.int32: 0xFFFFFFFF}


def load(prepared: Mapping[str, Any]) -> Splits:
    """Map the tokens that `ddpexp.data.text.prepare.prepare` has encoded.

    Shapes: a batch is (inputs, targets), both (batch, block_size) int64; targets are the tokens after the inputs. With
        `data.documents` it is a mapping of `inputs`, `targets`, `documents` (batch, block_size), the number of the
        document in the window, and `count`, a scalar: the targets other than -100.
    """
    folder, border = Path(prepared["folder"]), prepared["num_train"]
    kind = np.dtype(f"<u{prepared['token_bytes']}")
    # Mapped copy-on-write, although nothing writes to it, because torch wants a writable array.
    tokens = np.memmap(folder / TOKENS, kind, mode="c")
    ends = np.memmap(folder / BORDERS, "<i8", mode="c") if prepared["documents"] else None
    parts = (tokens[:border], tokens[border:])
    cut = np.searchsorted(ends, border, "right") if ends is not None else 0
    borders = (None, None) if ends is None else (ends[:cut], ends[cut:] - border)
    size = prepared["block_size"]
    sets = [
        Windows(_tensor(part), size, ends=None if of_part is None else torch.from_numpy(of_part))
        for part, of_part in zip(parts, borders, strict=True)
    ]
    return Splits(train=sets[0], evals={"eval": replace(sets[1], whole=True)} if len(parts[1]) > size else {})


@dataclass(frozen=True)
class Windows(IndexData):
    """Windows of a text, one after the other, from `offset`.

    In training each epoch has an offset of its own, so that the borders between windows move. In evaluation (`whole`)
    every token but the first is a target once: the last window reaches back and ignores the targets that it repeats.

    Shapes: tokens (num_tokens,), stored as `_STORED` says; ends (num_documents,) int64, the token after each document.
    """

    tokens: Tensor
    block_size: int
    offset: int = 0
    whole: bool = False
    ends: Tensor | None = None
    host: bool = True  # the tokens are in the memory of the host

    def __len__(self) -> int:
        """Return the number of windows; the same for every offset."""
        targets = len(self.tokens) - 1
        if self.whole:
            return -(-targets // self.block_size)
        # One less than fits: each of block_size offsets leaves room for as many.
        return max(1, (targets + 1 - self.block_size) // self.block_size)

    def of_epoch(self, seed: int, epoch: int) -> Windows:
        """Return the windows of one epoch, which begin at an offset drawn for it."""
        room = len(self.tokens) - 1 - len(self) * self.block_size
        return replace(self, offset=seed_of(seed, AUGMENT, epoch, 0) % (min(room, self.block_size - 1) + 1))

    def fetch(self, indices: Tensor, pinned: bool = False) -> tuple[Tensor, Tensor]:
        """Return tokens as stored, one more than a window has, and the indices. Shapes: (batch, block_size + 1)."""
        if self.host and self._is_plain:  # rows of a view that overlap by a token: one copy
            return torch.from_numpy(self._rows[indices.numpy()]), indices
        places = self._begins(indices)[:, None] + torch.arange(self.block_size + 1, device=indices.device)
        return torch.from_numpy(self.tokens.numpy()[places.numpy()]) if self.host else self.tokens[places], indices

    def stage(self, batch: tuple[Tensor, Tensor], device: torch.device) -> Any:
        """Return a batch. Shapes: as in `load`."""
        tokens = _long(moved(batch[0], device))
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        return (inputs, targets) if self._is_plain else self._marked(inputs, targets, batch[1], device)

    @cached_property
    def _is_plain(self) -> bool:
        return not self.whole and self.ends is None

    def _marked(self, inputs: Tensor, targets: Tensor, indices: Tensor, device: torch.device) -> Any:
        """Return a batch in which some targets do not count."""
        begins = self._begins(indices)
        along = torch.arange(self.block_size, device=begins.device)
        if self.whole:  # targets of the window before
            repeated = along < (indices * self.block_size - begins)[:, None]
            targets = targets.masked_fill(moved(repeated, device), IGNORED)
        if self.ends is None:
            return inputs, targets
        places = begins[:, None] + along
        documents = torch.searchsorted(self.ends, places, right=True)
        last = documents != torch.searchsorted(self.ends, places + 1, right=True)  # the next token is of another one
        targets = targets.masked_fill(moved(last, device), IGNORED)
        documents = moved(documents - documents[:, :1], device)
        return {
            "inputs": inputs,
            "targets": targets,
            "documents": documents,
            "count": (targets != IGNORED).sum(),
        }

    def _begins(self, indices: Tensor) -> Tensor:
        if not self.whole:
            return indices * self.block_size + self.offset
        return (indices * self.block_size).clamp(max=len(self.tokens) - 1 - self.block_size)

    @cached_property
    def _rows(self) -> NDArray[Any]:
        tokens = self.tokens.numpy()[self.offset :]
        step = self.block_size * tokens.itemsize
        shape = len(self), self.block_size + 1
        return np.lib.stride_tricks.as_strided(tokens, shape, (step, tokens.itemsize), writeable=False)

    @property
    def tokens_per_sample(self) -> int:
        """Return the length of a window."""
        return self.block_size

    @property
    def num_bytes(self) -> int:
        """Return the size of the tokens."""
        return sum(part.nbytes for part in (self.tokens, self.ends) if part is not None)

    def to(self, device: torch.device) -> Windows:
        """Return the same windows of tokens in the memory of the device."""
        ends = None if self.ends is None else self.ends.to(device)
        return replace(self, tokens=self.tokens.to(device), ends=ends, host=is_host(device))


def _tensor(tokens: NDArray[Any]) -> Tensor:
    kind = {1: np.uint8, 2: np.int16, 4: np.int32}[tokens.itemsize]
    return torch.from_numpy(tokens.view(kind))


def _long(tokens: Tensor) -> Tensor:
    """Return stored tokens as int64, of which those with the highest bit are negative where they are stored."""
    return tokens.long() & _MASK[tokens.dtype] if tokens.dtype in _MASK else tokens.long()

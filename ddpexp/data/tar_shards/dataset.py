"""Samples of tar shards, read at random places and decoded, and the order in blocks."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from ddpexp.data.base import IndexData
from ddpexp.data.datasets import Splits
from ddpexp.data.open_image import open_image
from ddpexp.data.order import STRIDE, Order, Permutation, piecewise
from ddpexp.data.tar_shards.remote import RemoteShard
from ddpexp.errors import DdpexpError, RefusedError


def load(prepared: Mapping[str, Any]) -> Splits:
    """Open the shards that `ddpexp.data.tar_shards.prepare` has indexed.

    Raises:
        RefusedError: they are not those of the index.
    """
    files, size = prepared["files"], prepared["image_size"]
    sets = {name: TarShards.open(facts, files, size) for name, facts in prepared["sets"].items()}
    train = sets.pop("train")
    if prepared["shuffle"] == "global":
        return Splits(train, sets)
    return Splits(InBlocks(train, BlockOrder(len(train), prepared["block_samples"], prepared["window_blocks"])), sets)


@dataclass(frozen=True)
class TarShards(IndexData):
    """A map-style data set: sample i is a tuple of its decoded files."""

    shards: Sequence[str]
    index: NDArray[np.int64]  # mapped; a row for each sample: shard, then offset, size and alternative of each file
    files: Sequence[str]
    image_size: int | None
    remote: Sequence[RemoteShard] = ()  # one for each shard, where they are remote
    _open: dict[tuple[int, int], int] = field(default_factory=dict)  # descriptors by process and shard

    @classmethod
    def open(cls, facts: Mapping[str, Any], files: Sequence[str], image_size: int | None) -> TarShards:
        """Open what `prepare` has described.

        Raises:
            RefusedError: a shard is not the one of the index.
        """
        remote = [RemoteShard(**shard) for shard in facts["remote"]]
        local = () if remote else zip(facts["shards"], facts["identity"], strict=True)
        for path, (_, size) in local:
            try:
                found = os.stat(path).st_size
            except OSError as error:
                raise RefusedError(
                    f"cannot be read ({error.strerror}), but the index refers to its samples", place=path
                ) from None
            if found != size:
                raise RefusedError(
                    f"has {found:,} bytes, but {size:,} in the index: it is another shard, or it is cut off", place=path
                )
        return cls(facts["shards"], np.load(facts["index"], mmap_mode="r"), files, image_size, remote)

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.index)

    def __getitem__(self, position: int) -> tuple[Any, ...]:
        """Read and decode a sample.

        Raises:
            DdpexpError: a file of it cannot be read or decoded.
        """
        shard, *places = self.index[position].tolist()
        sample = []
        for name, offset, size, which in zip(self.files, places[::3], places[1::3], places[2::3], strict=True):
            extension = name.split(";")[which].rpartition(".")[2]
            try:
                data = self._read(shard, offset, size)
                if len(data) < size:
                    raise EOFError(f"the shard is cut off: {len(data):,} of {size:,} bytes are there")
                sample.append(decode(data, extension, self.image_size))
            except DdpexpError:  # of a remote shard
                raise
            except Exception as error:  # decoders raise errors of many kinds
                raise DdpexpError(
                    f"Sample {position:,} has a .{extension} at byte {offset:,} that cannot be decoded "
                    f"({error or type(error).__name__})",
                    suggestion="Replace the file, or leave the sample out of the shard.",
                    place=self.shards[shard],
                ) from None
        return tuple(sample)

    def _read(self, shard: int, offset: int, size: int) -> bytes:
        if self.remote:
            return self.remote[shard].read(offset, size)
        return os.pread(self._descriptor(shard), size, offset)

    def _descriptor(self, shard: int) -> int:
        key = os.getpid(), shard
        if key not in self._open:
            self._open[key] = os.open(self.shards[shard], os.O_RDONLY | os.O_CLOEXEC)
        return self._open[key]


def decode(data: bytes, extension: str, image_size: int | None = None) -> Any:
    """Return the value of a file: images as float32 of shape (3, height, width), from 0 to 1, `cls` as an int.

    With `image_size` the shorter side is scaled to it and the middle is cropped.
    """
    if extension in ("jpg", "jpeg", "png", "webp"):
        with open_image(io.BytesIO(data)) as image:
            return pixels_as_float(image.convert("RGB"), image_size)
    if extension == "json":
        return json.loads(data)
    if extension == "npy":
        try:
            return torch.from_numpy(np.load(io.BytesIO(data), allow_pickle=False))
        except ValueError:  # numpy's text advises to unpickle it
            raise ValueError("it is no array of numbers") from None
    text = data.decode()
    return int(text) if extension == "cls" else text


def pixels_as_float(image: Image.Image, size: int | None) -> torch.Tensor:
    """Return an image as `decode` does. Shapes: (3, height, width)."""
    if size is not None:
        scale = size / min(image.size)
        width, height = (max(size, round(side * scale)) for side in image.size)
        left, top = (width - size) // 2, (height - size) // 2
        image = image.resize((width, height), Image.Resampling.BILINEAR).crop((left, top, left + size, top + size))
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
    return torch.empty(pixels.shape).copy_(pixels).div_(255)  # contiguous: a batch of them is copied twice as fast


@dataclass(frozen=True)
class InBlocks(IndexData):
    """Shards that are trained on block by block."""

    shards: TarShards
    blocks: BlockOrder

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.shards)

    def __getitem__(self, position: int) -> tuple[Any, ...]:
        """Read and decode a sample."""
        return self.shards[position]

    @property
    def samples_per_epoch(self) -> int:
        """Return the number of positions in an epoch."""
        return self.blocks.samples_per_epoch

    def order(self, seed: int, epoch: int) -> Order:
        """Return the training order of an epoch."""
        return self.blocks.order(seed, epoch)

    def select(self, indices: NDArray[np.int64]) -> InBlocks:
        """Return the shards with these samples alone, as they lie there, so that blocks stay together."""
        shards = replace(self.shards, index=self.shards.index[np.sort(indices)])
        return InBlocks(shards, replace(self.blocks, samples_per_epoch=len(indices)))


@dataclass(frozen=True)
class BlockOrder:
    """A shuffle in two levels, for disks and networks that are slow at random access: pure, and O(1) to seek.

    Blocks of consecutive samples are permuted, and within windows of several blocks their samples.
    """

    samples_per_epoch: int
    block_samples: int
    window_blocks: int

    def order(self, seed: int, epoch: int) -> Order:
        """Return the order of one epoch."""
        num_blocks = self.samples_per_epoch // self.block_samples
        return _EpochBlocks(self, seed, epoch, Permutation(num_blocks, seed, epoch) if num_blocks else None)


@dataclass(frozen=True)
class _EpochBlocks:
    blocks: BlockOrder
    seed: int
    epoch: int
    permutation: Permutation | None  # of the whole blocks; the incomplete one stays the last

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the indices at these positions. Shapes: any; the result has the same."""
        size, length = self.blocks.block_samples, self.blocks.samples_per_epoch
        window = size * self.blocks.window_blocks

        def within(number: int) -> Order:
            first = number * window
            shuffle = Permutation(min(window, length - first), self.seed * int(STRIDE) + number + 1, self.epoch)
            return lambda places: first + shuffle(places)

        places = piecewise(np.ravel(positions), window, within)
        slots, rest = np.divmod(places, size)
        if self.permutation is not None:
            whole = np.flatnonzero(slots < self.permutation.length)
            places[whole] = self.permutation(slots[whole]) * size + rest[whole]
        return places.reshape(np.shape(positions))

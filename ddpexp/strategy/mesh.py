"""How the workers are numbered along the dimensions of parallelism. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass, fields

_MOST_SHOWN = 64  # workers


@dataclass(frozen=True)
class DataRank:
    """The share of the global batch that a rank computes: the `rank`-th of `size` equal ones.

    Batches, seeds and metrics go by it. In most strategies it is the rank itself.
    """

    rank: int
    size: int
    reports: bool = True  # False: another rank computes the same share, and its sums are counted


@dataclass(frozen=True)
class Mesh:
    """The sizes of the dimensions, whose product is the number of workers; neighbours differ in the last ones."""

    pp_size: int = 1  # workers of a pipeline
    dp_replicate_size: int = 1  # copies that are held whole
    dp_shard_size: int = 1  # workers that divide what a copy holds
    tp_size: int = 1  # workers that divide layers

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the sizes in the order of the fields."""
        return tuple(getattr(self, field.name) for field in fields(self))

    @property
    def world_size(self) -> int:
        """Return the number of workers."""
        return self.pp_size * self.data_size * self.tp_size

    @property
    def data_size(self) -> int:
        """Return the number of shares of a global batch."""
        return self.dp_replicate_size * self.dp_shard_size

    def place(self, rank: int) -> tuple[int, int, int, int]:
        """Return the position of a rank in each dimension, in the order of the fields."""
        rest, tensor = divmod(rank, self.tp_size)
        rest, shard = divmod(rest, self.dp_shard_size)
        stage, replica = divmod(rest, self.dp_replicate_size)
        return stage, replica, shard, tensor

    def groups(self, *dimensions: str) -> list[list[int]]:
        """Return the groups of ranks that differ in these dimensions only; they begin with the first in each."""
        fixed = [number for number, field in enumerate(fields(self)) if field.name not in dimensions]
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            place = self.place(rank)
            groups.setdefault(tuple(place[number] for number in fixed), []).append(rank)
        return list(groups.values())

    def drawn(self) -> list[str]:
        """Return lines for people: the sizes, and the ranks of each worker of a pipeline; none for one dimension.

        Ranks that divide layers are in brackets; `|` is between copies.
        """
        named = [(field.name, size) for field, size in zip(fields(self), self.sizes, strict=True)]
        shown = [f"{name} {size}" for name, size in named if size > 1]
        if len(shown) < 2 and self.pp_size == self.tp_size == 1:
            return []
        lines = [f"{' x '.join(shown)} = {self.world_size} workers"]
        if self.world_size > _MOST_SHOWN:
            return lines
        for ranks in self.groups("dp_replicate_size", "dp_shard_size", "tp_size"):
            copies = [ranks[first : first + len(ranks) // self.dp_replicate_size] for first in self._copies(ranks)]
            text = " | ".join(self._tensor_groups(copy) for copy in copies)
            stage = self.place(ranks[0])[0]
            lines.append(f"pp {stage}: {text}" if self.pp_size > 1 else text)
        return lines

    def _copies(self, ranks: list[int]) -> range:
        return range(0, len(ranks), len(ranks) // self.dp_replicate_size)

    def _tensor_groups(self, ranks: list[int]) -> str:
        groups = [ranks[first : first + self.tp_size] for first in range(0, len(ranks), self.tp_size)]
        return " ".join(f"[{' '.join(map(str, group))}]" if self.tp_size > 1 else str(group[0]) for group in groups)


def sizes_that_divide(number: int, least: int = 1, most: int | None = None) -> str:
    """Return the divisors of a number, at most all of them, for a message."""
    return " or ".join(str(size) for size in range(least, (most or number) + 1) if number % size == 0)

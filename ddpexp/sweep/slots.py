"""The slots of this machine for workers of a sweep, each on a GPU or a share of the cores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from ddpexp.errors import RefusedError
from ddpexp.system.hardware import CORES, restricted_to, usable_cores, visible_gpus
from ddpexp.system.text import counted


class Slots:
    """The slots of a machine, and the jobs that occupy them."""

    def __init__(
        self, count: Literal["auto"] | int = "auto", gpus: Sequence[str] | None = None, cores: int | None = None
    ) -> None:
        """Create `count` slots; `gpus` are GPU names as in CUDA_VISIBLE_DEVICES, `cores` is their number.

        With more slots than GPUs several share one.
        """
        self.gpus = tuple(visible_gpus() if gpus is None else gpus)
        self.cores = usable_cores() if cores is None else cores
        self.count = count if count != "auto" else len(self.gpus) or self.cores
        self._free = list(range(self.count))

    def __str__(self) -> str:
        """Describe the slots."""
        what = counted(len(self.gpus), "GPU") if self.gpus else f"{self.cores} CPU cores"
        return f"{counted(self.count, 'slot')} ({what})"

    def check_arguments(self, workers: int, on_gpus: bool) -> None:
        """Check that a job with this many workers on this machine can ever run.

        Raises:
            RefusedError: it cannot.
        """
        if workers > self.count:
            more = "" if on_gpus else f"sweep.slots={workers}, or "
            raise RefusedError(
                f"takes {workers} slots at once, but the sweep has {self}",
                key="trainer.gpus",
                value=workers,
                suggestion=f"Use {more}fewer workers.",
            )
        if on_gpus and workers > len(self.gpus):
            raise RefusedError(
                f"needs as many GPUs, but this machine shows {len(self.gpus)}",
                key="trainer.gpus",
                value=workers,
                suggestion="Use fewer workers.",
            )

    def take(self, workers: int | None, on_gpus: bool) -> list[int] | None:
        """Take a slot for each worker, on different GPUs; None while there are too few.

        `workers` None takes all slots.
        """
        wanted = self.count if workers is None else workers
        if not on_gpus or workers is None:
            taken = self._free[:wanted]
        else:
            free_by_gpu: dict[int, list[int]] = {}
            for slot in self._free:
                free_by_gpu.setdefault(slot % len(self.gpus), []).append(slot)
            emptiest = sorted(free_by_gpu.values(), key=len, reverse=True)
            taken = sorted(slots[0] for slots in emptiest[:wanted])
        if len(taken) < wanted:
            return None
        self._free = [slot for slot in self._free if slot not in taken]
        return taken

    def give_back(self, slots: Sequence[int]) -> None:
        """Free the slots of a job that has ended."""
        self._free = sorted([*self._free, *slots])

    def environ(self, slots: Sequence[int], on_gpus: bool) -> dict[str, str]:
        """Return the environment variables that restrict a job to its GPUs and its share of the cores."""
        share = {CORES: str(max(1, self.cores * len(slots) // self.count))}
        return {**share, **restricted_to(self.names(slots))} if on_gpus else share

    def names(self, slots: Sequence[int]) -> list[str]:
        """Return the GPUs of slots."""
        return list(dict.fromkeys(self.gpus[slot % len(self.gpus)] for slot in slots)) if self.gpus else []

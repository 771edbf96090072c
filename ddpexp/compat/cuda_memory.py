"""The history of a GPU's memory, which torch's viewer at https://pytorch.org/memory_viz shows.

Private: `torch.cuda.memory._record_memory_history` and `_dump_snapshot`; torch 2.10 to 2.13.
Why: torch's documentation tells users to call them, and has no public name for them.
When it goes: use the names that take their place; without any, refuse `trainer.memory_snapshot`.
"""

from __future__ import annotations

from pathlib import Path

from torch.cuda import memory

_MOST_EVENTS = 100_000  # the newest ones; several kilobytes each


def record() -> None:
    """Record each allocation from now on, with the code that asked for it: about 2 us each."""
    memory._record_memory_history(max_entries=_MOST_EVENTS, stacks="python")


def stop() -> None:
    """Record no longer, and forget what was recorded."""
    memory._record_memory_history(enabled=None)


def dump(path: Path) -> None:
    """Write what was recorded, and what is allocated. Raises OSError."""
    memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]

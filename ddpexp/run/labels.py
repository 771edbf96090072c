"""The tags and the note of a run: run.tags, and what `ddpexp tag` has changed since, in labels.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ddpexp.run.directory import RunDir
from ddpexp.system.files import write_json


@dataclass(frozen=True)
class Labels:
    """The content of labels.json, which anybody may have written."""

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()  # of the tags in run.tags
    note: str = ""

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Labels:
        """Return the labels in a record; other values are left out."""
        note = record.get("note")
        return cls(_texts(record.get("added")), _texts(record.get("removed")), note if isinstance(note, str) else "")

    def tags(self, configured: Any) -> list[str]:
        """Return the tags of a run whose run.tags are `configured`."""
        tags = dict.fromkeys([*_texts(configured), *self.added])
        return [tag for tag in tags if tag not in self.removed]

    def changed(self, added: Sequence[str], removed: Sequence[str], note: str | None) -> Labels:
        """Return them with tags added and removed, and with another note unless it is None."""
        kept = [tag for tag in dict.fromkeys([*self.added, *added]) if tag not in removed]
        gone = [tag for tag in dict.fromkeys([*self.removed, *removed]) if tag not in added]
        return Labels(tuple(kept), tuple(gone), self.note if note is None else note)

    def write(self, run: RunDir) -> None:
        """Replace labels.json. Raises OSError."""
        write_json(run.labels, asdict(self))


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(text for text in value if isinstance(text, str)) if isinstance(value, list | tuple) else ()

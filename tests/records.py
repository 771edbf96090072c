"""Records of metrics.jsonl as tests compare them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddpexp.settings.metrics import MEASURED


def timeless(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record without what clocks have measured."""
    return {
        name: value
        for name, value in record.items()
        if name != "time" and not name.endswith(("_per_second", "/mfu")) and not name.startswith(MEASURED)
    }

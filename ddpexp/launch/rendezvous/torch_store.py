"""Put a text into torchrun's store, or wait for it there: in a process of its own, for the command has no torch."""

from __future__ import annotations

import json
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]


def main(described: str) -> int:
    """Do what the JSON list says: host, port, key, seconds to wait, and the text to put there, if there is one."""
    host, port, key, seconds, *text = json.loads(described)
    store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=seconds))
    if text:
        store.set(key, text[0])
    else:
        print(f"found: {store.get(key).decode()}", flush=True)
    return 0

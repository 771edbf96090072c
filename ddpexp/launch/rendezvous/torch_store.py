"""Set a key in torchrun's store, or wait for it: in a subprocess, since the command itself does not import torch."""

from __future__ import annotations

import json
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]


def main(described: str) -> int:
    """Subprocess entry point; takes a JSON list: host, port, key, timeout in seconds, and the text to set, if any."""
    host, port, key, seconds, *text = json.loads(described)
    store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=seconds))
    if text:
        store.set(key, text[0])
    else:
        print(f"found: {store.get(key).decode()}", flush=True)
    return 0

"""A hand-written loop with nn.DataParallel: one process, whose threads each drive a GPU, as older tutorials have it."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from benchmarks.peers import on_device


def main() -> None:
    """Train on all visible GPUs, and print the speed between the first record and the last."""
    parser = argparse.ArgumentParser()
    for name in ("data", "order", "folder"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--every", type=int, required=True, help="steps from one record to the next")
    words = parser.parse_args()
    words.folder.mkdir(parents=True, exist_ok=True)
    steps = on_device.steps(
        words.data, words.order, words.folder, "resnet18", False, compiles=False, every=words.every, parallel=True
    )
    times = [time.time() for step, _ in enumerate(steps, start=1) if step % words.every == 0]
    print(json.dumps({"steps a second": (len(times) - 1) * words.every / (times[-1] - times[0])}))


if __name__ == "__main__":
    main()

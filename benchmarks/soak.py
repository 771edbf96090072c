"""Two hundred short runs in a row, half with 2 and half with 4 workers: all end well and leave nothing."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

from benchmarks.suite import Bench, Report, Row, mnist_words


def run(bench: Bench) -> Report:
    codes, longest = [], 0.0
    before = _processes()
    for number in range(200):
        begin = time.time()
        few = ["model=linear", f"trainer.gpus={2 + 2 * (number % 2)}", "trainer.max_steps=100", "trainer.eval_every=0"]
        words = mnist_words(bench.data, bench.folder / str(number), *few)
        codes.append(subprocess.run(words, capture_output=True, check=False, timeout=60).returncode)
        longest = max(longest, time.time() - begin)
        if number % 20 == 19:
            bench.say(f"soak {number + 1}/200: {codes.count(0)} exit codes 0, longest {longest:.1f} s")
    left = len(_processes() - before)
    shown = f"{codes.count(0)} exit codes 0, {left} processes left behind, longest {longest:.1f} s"
    return Report([Row("200 runs, 2 and 4 workers in turn", shown, met=codes.count(0) == 200 and not left)])


def _processes() -> set[int]:
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if b"ddpexp" in words and b"benchmarks" not in words and int(entry.name) != os.getpid():
            found.add(int(entry.name))
    return found

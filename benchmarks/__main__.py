"""`python -m benchmarks [NAME ...]`: race ddpexp against what users would pick instead.

`--help` names the benchmarks.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from benchmarks import report
from benchmarks.suite import Bench, trained
from ddpexp.system.hardware import count_gpus

# In the order in which `python -m benchmarks` runs them, which takes hours; those of --quick first.
BENCHMARKS = {
    "start": "From the command to the first step, and from the result to the prompt",
    "cli": "Commands that do not train",
    "fixed_cost": "The fixed cost of a step",
    "steps": "The training step",
    "compiled": "Compiled steps",
    "reduction": "Small models on one host",
    "input": "Data that fits into memory",
    "image_ways": "Ways to read a folder of photographs",
    "images": "Folders of photographs: caches, changes, memory",
    "gpt": "A small GPT on a CPU",
    "reading": "Text and tar shards",
    "order": "The order of samples",
    "layers": "Layers divided among workers",
    "global_loss": "A loss over the global batch",
    "callbacks": "Callbacks in a step",
    "loggers": "Remote loggers",
    "threads": "The same job under every launcher",
    "scale": "Hundreds and thousands of ranks, simulated",
    "mnist": "MNIST to 99 %",
    "cifar10": "A loop of the airbench kind",
    "gpu": "Training on GPUs",
    "launchers": "Start under each launcher",
    "checkpoints": "Checkpoints",
    "sharding": "Sharded models",
    "position": "Resuming within an epoch",
    "exact": "Exact reduction",
    "sweeps": "Sweeps",
    "soak": "Two hundred runs",
}
GPU = ("gpu",)  # left out where there is none
QUICK = ("start", "cli", "fixed_cost", "reduction", "input", "order")


def main() -> None:
    """Run the asked benchmarks and write what they find beside this file; with `--quick` only show it."""
    if sys.argv[1:2] == ["gpu"]:  # has options of its own, and needs no data
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends what it has started, too
        raise SystemExit(import_module("benchmarks.gpu").main(sys.argv[2:]))
    lines = [f"  {name:<12}{title}{' (quick)' if name in QUICK else ''}" for name, title in BENCHMARKS.items()]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="benchmarks:\n" + "\n".join(lines),
    )
    parser.add_argument("which", nargs="*", metavar="NAME", help="benchmarks to run; all without one")
    parser.add_argument(
        "--data", type=Path, help="the folder with MNIST's four gzipped IDX files, for those that read it"
    )
    parser.add_argument(
        "--peers", metavar="PYTHON", help="the Python of the peers' environment (docs/benchmarks.md says how)"
    )
    parser.add_argument("--rounds", type=int, default=15, help="rounds of a race; long ones take fewer (15)")
    parser.add_argument(
        "--quick", action="store_true", help="a few minutes: the ratios that show a regression; writes nothing"
    )
    parser.add_argument("--nanogpt", type=Path, metavar="DIR", help="nanoGPT's repository, for gpt and reading")
    parser.add_argument("--text", type=Path, metavar="FILE", help="a text, for gpt and reading")
    parser.add_argument("--steps", type=int, help="steps of gpt's runs (2000), a multiple of 40")
    parser.add_argument("--airbench", type=Path, metavar="DIR", help="cifar10-airbench's repository, for cifar10")
    words = parser.parse_args()
    unknown = [name for name in words.which if name not in BENCHMARKS]
    if unknown:
        parser.error(f"there is no benchmark {unknown[0]}; there are {', '.join(BENCHMARKS)}")
    if (words.nanogpt is None or words.text is None) and "gpt" in words.which:
        parser.error("the benchmark gpt needs --nanogpt DIR and --text FILE")
    if words.steps is not None and (words.steps < 40 or words.steps % 40):
        parser.error(f"--steps {words.steps}: use a multiple of 40")
    missing = () if words.nanogpt is not None and words.text is not None else ("gpt",)
    here = [name for name in BENCHMARKS if name not in missing and (name not in GPU or count_gpus())]
    elsewhere = [name for name in words.which if name not in here]
    if elsewhere:
        parser.error(f"the benchmark {elsewhere[0]} needs a GPU, and this machine shows none")
    if words.data is None or not list(words.data.glob("*.gz")):
        parser.error("--data must name a folder with MNIST's four gzipped IDX files")
    worse: list[str] = []
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as made:
        folder = Path(made)
        data = folder / "data"  # a cache of our own, made before anything is timed
        data.mkdir()
        for path in words.data.resolve().glob("*.gz"):
            shutil.copy(path, data)
        trained(data, folder / "warm", "trainer.max_steps=1", "trainer.eval_every=0")
        for name in words.which or (QUICK if words.quick else here):
            (folder / name).mkdir()
            began = time.monotonic()
            rounds = min(words.rounds, 3) if words.quick else words.rounds
            bench = Bench(data, folder / name, rounds, words.quick, words.peers)
            bench = replace(bench, nanogpt=words.nanogpt, text=words.text, steps=words.steps, airbench=words.airbench)
            found = import_module(f"benchmarks.{name}").run(bench)
            if not words.quick:
                report.write(name, BENCHMARKS[name], found)
            report.show(BENCHMARKS[name], found, time.monotonic() - began)
            worse += report.regressions(name, found) if words.quick else []
            shutil.rmtree(folder / name, ignore_errors=True)
    if worse:
        raise SystemExit("\nworse than what benchmarks/RESULTS.md has: " + "; ".join(worse))


if __name__ == "__main__":
    main()

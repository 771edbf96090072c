"""`python -m benchmarks gpu`: training on GPUs, in pieces that fit into minutes and are kept one by one.

The same command runs the pieces that are missing. `benchmarks/on_gpu.sh` calls it on a machine with GPUs; there
`gpu.json` is all that has to be brought back, and the same command with that file writes RESULTS.md anywhere.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.gpu_pieces import PIECES
from benchmarks.gpu_place import Place
from benchmarks.suite import Bench, Chart, Report, Row
from ddpexp.system.hardware import count_gpus

TITLE = "Training on GPUs"
OUT = Path(__file__).resolve().parent / "gpu-results"


def main(arguments: Sequence[str]) -> int:
    """Run the missing pieces, keep each at once, and write RESULTS.md; return the exit code."""
    words = _parser().parse_args(arguments)
    unknown = [name for name in words.pieces if name not in PIECES]
    if unknown:
        raise SystemExit(f"there is no piece {unknown[0]}; there are {', '.join(PIECES)}")
    results = Results(words.out / ("quick.json" if words.quick else "gpu.json"))
    wanted = words.pieces or list(PIECES)
    missing = [name for name in wanted if not results.has(name)]
    gpus = count_gpus() if words.device == "cuda" else 2  # workers in place of GPUs
    if missing and not gpus:
        raise SystemExit("this machine shows no GPU; --device cpu --quick tries every piece without one")
    left = run_pieces(missing, results, words.device, words.quick, gpus, words.seconds)
    found = results.report()
    report.show(TITLE, found, 0.0)
    if not words.quick:
        report.write("gpu", TITLE, found, results.machine, results.date)
    failed = [name for name in wanted if results.failed(name)]
    for name in failed:
        print(f"{name} failed: {results.failed(name)}")
    if left:
        print(f"{len(left)} left ({', '.join(left)}): the same command runs them")
    return 1 if failed else 0


def run(bench: Bench) -> Report:
    """Run all pieces, as one of all benchmarks."""
    results = Results(bench.folder / "gpu.json")
    run_pieces(list(PIECES)[2:], results, "cuda", bench.quick, count_gpus(), float("inf"))
    return results.report()


def run_pieces(
    names: Sequence[str], results: Results, device: str, quick: bool, gpus: int, seconds: float
) -> list[str]:
    """Run pieces as long as there is time for the next one; return those that are left."""
    began, left = time.monotonic(), []
    for name in names:
        piece, takes = PIECES[name]
        if not quick and time.monotonic() - began + takes > seconds:
            left.append(name)
            continue
        folder = Path(tempfile.mkdtemp(prefix="gpu-"))
        try:
            start = time.monotonic()
            found = piece(Place(folder, device, quick, gpus))
            results.keep(name, {**asdict(found), "seconds": round(time.monotonic() - start, 1)})
        except Exception as error:  # the others can still be measured
            traceback.print_exc()
            results.keep(name, {"error": f"{type(error).__name__}: {str(error)[-2000:]}"})
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return left


class Results:
    """What is known so far, in one small file."""

    def __init__(self, path: Path) -> None:
        """Read the file, if it is there."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        kept: dict[str, Any] = json.loads(self._path.read_text()) if self._path.exists() else {}
        self._pieces: dict[str, Mapping[str, Any]] = kept.get("pieces", {})
        self.machine: str = kept.get("machine") or report.machine()
        self.date: str = kept.get("date") or time.strftime("%Y-%m-%d")

    def has(self, name: str) -> bool:
        """Return whether a piece is finished."""
        return "rows" in self._pieces.get(name, {})

    def failed(self, name: str) -> str | None:
        """Return why a piece failed; it is tried again by the next call."""
        return self._pieces.get(name, {}).get("error")

    def keep(self, name: str, piece: Mapping[str, Any]) -> None:
        """Write a piece down, so that a call that is cut off loses only the one in progress."""
        self._pieces[name] = piece
        content = {"machine": self.machine, "date": self.date, "pieces": self._pieces}
        beside = self._path.with_suffix(".partial")
        beside.write_text(json.dumps(content, indent=1) + "\n")
        beside.replace(self._path)

    def report(self) -> Report:
        """Return all finished pieces in their order."""
        done = [self._pieces[name] for name in PIECES if self.has(name)]
        rows = [Row(**row) for piece in done for row in piece["rows"]]
        return Report(rows, [Chart(**chart) for piece in done for chart in piece["charts"]])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks gpu", description=__doc__)
    parser.add_argument("pieces", nargs="*", metavar="PIECE", help=f"{', '.join(PIECES)}; all without one")
    parser.add_argument("--out", type=Path, default=OUT, help="the folder for gpu.json (benchmarks/gpu-results)")
    parser.add_argument("--seconds", type=float, default=540.0, help="begin no piece that would take longer (540)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: tries the program, measures nothing")
    return parser

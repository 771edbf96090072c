"""`python -m benchmarks gpu`: ddpexp on GPUs, in pieces whose findings are kept the moment they are there.

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
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.gpu_goals import Finding, write_readme
from benchmarks.gpu_pieces import PIECES
from benchmarks.gpu_place import CutError, Place
from benchmarks.suite import Bench, Chart, Report, Row
from ddpexp.system.hardware import count_gpus

TITLE = "Training on GPUs"
OUT = Path(__file__).resolve().parent / "gpu-results"
MOST_BYTES = 1_000_000
_REPORT_SECONDS = 10.0
_CELL = 300  # characters of a note in RESULTS.md
_CPU_WORKERS = 8  # in place of GPUs


def main(arguments: Sequence[str]) -> int:
    """Run the missing pieces, keep each finding at once, and write RESULTS.md; return the exit code."""
    words = _parser().parse_args(arguments)
    unknown = [name for name in words.pieces if name not in PIECES]
    if unknown:
        raise SystemExit(f"there is no piece {unknown[0]}; there are {', '.join(PIECES)}")
    name = "quick.json" if words.quick else "gpu.json"
    results = Results(words.out if words.out.suffix == ".json" else words.out / name)
    wanted = words.pieces or [name for name, piece in PIECES.items() if piece.correctness or words.only is None]
    missing = results.missing(wanted)
    gpus = count_gpus() if words.device == "cuda" else _CPU_WORKERS
    if missing and not gpus and not results.pieces:
        raise SystemExit("this machine shows no GPU; --device cpu --quick tries every piece without one")
    if gpus:
        results.only_tries |= words.quick or words.device == "cpu"
        run_pieces(missing, results, words.device, words.quick, gpus, words.seconds - _REPORT_SECONDS)
    report.show(TITLE, results.report(), 0.0)
    if not results.only_tries:
        report.write("gpu", TITLE, results.report(), results.machine, results.date)
        write_readme({"date": results.date, "machine": results.machine, **asdict(results.report())})
    for name in wanted:
        print(f"{name:<14}{results.state(name)}")
    left = results.missing(wanted)
    if left:
        print(f"left: {', '.join(left)}; the same command runs them")
    return 1 if any(results.state(name).startswith("failed") for name in wanted) else 0


def run(bench: Bench) -> Report:
    """Run all pieces, as one of all benchmarks."""
    results = Results(bench.folder / "gpu.json")
    run_pieces(list(PIECES), results, "cuda", bench.quick, count_gpus(), float("inf"))
    return results.report()


def run_pieces(names: Sequence[str], results: Results, device: str, quick: bool, gpus: int, seconds: float) -> None:
    """Run pieces until the time is over, and keep what each finds at once."""
    end = time.monotonic() + seconds
    for name in names:
        piece, began = PIECES[name], time.monotonic()
        if gpus < piece.gpus:
            results.end(name, f"skipped: needs {piece.gpus} GPUs, and this machine shows {gpus}", 0.0)
            continue
        if began >= end:
            return
        print(f"{name} ...", flush=True)
        folder = Path(tempfile.mkdtemp(prefix="gpu-"))
        own_end = began + (float("inf") if quick else piece.seconds)
        place = Place(folder, device, quick, gpus, min(end, own_end))
        results.begin(name)
        try:
            for finding in piece.run(place):
                results.keep(name, finding)
            state = "done"
        except CutError:
            state = f"cut after {piece.seconds:.0f} s" if own_end <= end else "cut: the time was over"
        except Exception as error:  # the others can still be measured
            traceback.print_exc()
            state = f"failed: {type(error).__name__}: {str(error)[-2000:]}"
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        results.end(name, state, time.monotonic() - began)


class Results:
    """What is known so far, in one small file."""

    def __init__(self, path: Path) -> None:
        """Read the file, if it is there."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        kept: dict[str, Any] = json.loads(self._path.read_text()) if self._path.exists() else {}
        self.pieces: dict[str, dict[str, Any]] = kept.get("pieces", {})
        self.machine: str = kept.get("machine") or report.machine()
        self.only_tries: bool = kept.get("only_tries", False)  # has figures of no GPU, or of tiny sizes
        self.date: str = kept.get("date") or time.strftime("%Y-%m-%d")

    def state(self, name: str) -> str:
        """Return how a piece ended: done, or why not."""
        return str(self.pieces.get(name, {}).get("state", "not begun"))

    def missing(self, names: Sequence[str]) -> list[str]:
        """Return the pieces that another call runs: those that have not begun first, then those that did not end."""
        states = {name: self.state(name) for name in names}
        fresh = [name for name, state in states.items() if state == "not begun"]
        again = ("begun", "cut: ", "failed")
        return fresh + [name for name, state in states.items() if state.startswith(again)]

    def begin(self, name: str) -> None:
        """Forget what a piece had found before."""
        self.pieces[name] = {"state": "begun", "rows": [], "charts": [], "tests": []}

    def keep(self, name: str, finding: Finding) -> None:
        """Write a finding down, so that a call that is cut off loses only the work in progress."""
        kind = {Row: "rows", Chart: "charts"}.get(type(finding), "tests")
        self.pieces[name][kind].append(asdict(finding))
        if isinstance(finding, Row):
            print(f"  {finding.what}: {finding.figures}  {finding.ratio}  {finding.note[:200]}", flush=True)
        self._write()

    def end(self, name: str, state: str, seconds: float) -> None:
        """Write down how a piece ended."""
        self.pieces.setdefault(name, {"rows": [], "charts": [], "tests": []})
        self.pieces[name] |= {"state": state, "seconds": round(seconds, 1)}
        print(f"  {name}: {state}, {seconds:.1f} s", flush=True)
        self._write()

    def _write(self) -> None:
        text = self._text()
        if len(text) > MOST_BYTES:  # texts of tests are what there is most of
            for test in (test for piece in self.pieces.values() for test in piece["tests"]):
                test["text"] = test["text"][-200:]
            text = self._text()
        beside = self._path.with_suffix(".partial")
        beside.write_text(text)
        beside.replace(self._path)

    def _text(self) -> str:
        facts = {"machine": self.machine, "date": self.date, "only_tries": self.only_tries}
        return json.dumps({**facts, "pieces": self.pieces}, indent=1) + "\n"

    def report(self) -> Report:
        """Return what all pieces have found, in their order, and which have not come to their end."""
        found = [(name, self.pieces[name]) for name in PIECES if name in self.pieces]
        rows = [Row(**row | {"note": _in_a_cell(row["note"])}) for _, piece in found for row in piece["rows"]]
        rows += [Row(f"piece {name}", _in_a_cell(piece["state"])) for name, piece in found if piece["state"] != "done"]
        return Report(rows, [Chart(**chart) for _, piece in found for chart in piece["charts"]])


def _in_a_cell(text: str) -> str:
    """Return the beginning of a text as a cell of a table can have it."""
    return " ".join(text.split())[:_CELL].replace("|", "\\|")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks gpu", description=__doc__)
    parser.add_argument("pieces", nargs="*", metavar="PIECE", help=f"{', '.join(PIECES)}; all without one")
    parser.add_argument("--out", type=Path, default=OUT, help="gpu.json, or the folder for it (benchmarks/gpu-results)")
    parser.add_argument("--seconds", type=float, default=430.0, help="end within this time (430)")
    parser.add_argument("--only", choices=("correctness",), help="leave out the pieces that measure speed")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: tries the program, measures nothing")
    return parser

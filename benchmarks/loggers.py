"""What a remote logger costs training: the call of each record by itself, and whole runs with and without one.

The runs are those of `examples/tracker`, once with a server of this machine and once with none that answers; `none` is
run twice, which shows the noise. Time counts from the first record to the last.
"""

from __future__ import annotations

import json
import logging
import socket
import statistics
import sys
import tempfile
import threading
import time
import timeit
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from benchmarks.race import Arm, last_json, median, race, ratio
from benchmarks.suite import ROOT, Bar, Bench, Report, Row

_CALLS = 10_000
_LIMIT_MICROSECONDS, _LIMIT_RATIO = 20.0, 1.01
_RUN = (
    "recipe=mnist", "data.source=embedded", "trainer.threads=1", "trainer.global_batch_size=64", "trainer.epochs=100",
    "trainer.max_steps=4000", "trainer.log_every=50", "trainer.eval_every=0", "trainer.checkpoint_every=0",
)  # fmt: skip


class _Handler(BaseHTTPRequestHandler):
    """Accept everything."""

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._answer()

    def _answer(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, format: str, *args: object) -> None:
        pass


def run(bench: Bench) -> Report:
    """Measure the call, and race the runs."""
    report = Report()
    words = [sys.executable, "-m", "benchmarks.loggers"]
    call = Arm("call", lambda _: words, lambda _folder, output, _start, _end: last_json(output))
    calls = race([call], bench.at_most(5), bench.folder, bench.say)["call"]
    value = min(figures["microseconds"] for figures in calls)
    bar = Bar("at most", _LIMIT_MICROSECONDS)
    report.rows.append(Row("a record", f"{value:.2f} µs", bar=f"{bar} µs", met=bar.met(value), value=value))

    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with socket.create_server(("127.0.0.1", 0)) as free:
        nobody = free.getsockname()[1]
    tracker = ("--config-dir", str(ROOT / "examples/tracker/conf"), "logger=tracker", "+logger.tracker.end_seconds=30")
    choices = {
        "none": ("logger=none",),
        "none again": ("logger=none",),
        "tracker": (*tracker, f"logger.tracker.url=http://127.0.0.1:{server.server_port}"),
        "tracker that is down": (*tracker, f"logger.tracker.url=http://127.0.0.1:{nobody}"),
    }
    arms = [_arm(name, overrides) for name, overrides in choices.items()]
    results = race(arms, bench.rounds, bench.folder, bench.say)
    server.shutdown()
    again, bar = ratio(results, "none again", "none", "seconds"), Bar("at most", _LIMIT_RATIO)
    for name in ("tracker", "tracker that is down"):
        found = ratio(results, name, "none", "seconds")
        figures = f"{median(results, name, 'seconds'):.2f} s against {median(results, 'none', 'seconds'):.2f} s"
        what, met = f"4,000 steps with a {name}", bar.met(found.median)
        report.rows.append(Row(what, figures, str(found), str(again), str(bar), met, value=found.median))
    return report


def _arm(name: str, overrides: tuple[str, ...]) -> Arm:
    def command(folder: Path) -> list[str]:
        return [sys.executable, "-m", "ddpexp", *_RUN, *overrides, f"run.dir={folder}/run"]

    def figures(folder: Path, _output: str, _start: float, _end: float) -> dict[str, float]:
        times = [json.loads(line)["time"] for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
        return {"seconds": times[-1] - times[0]}

    return Arm(name, command, figures)


def idle(*_arguments: object) -> None:
    """Be a logger's process that has nothing to do."""
    time.sleep(60)


def measured() -> float:
    """Return what a record costs rank zero while the logger's process runs. Units: microseconds."""
    from ddpexp.loggers.remote import follower

    follower.ENTRY = "benchmarks.loggers:idle"
    with tempfile.TemporaryDirectory() as folder:
        followers = follower.Followers(Path(folder), {"tracker": 0.0}, logging.getLogger("benchmark"))
        values = {"train/loss": 1.0}
        followers.scalars(1, 0.1, values)  # starts the process
        seconds = timeit.repeat(lambda: followers.scalars(2, 0.2, values), number=_CALLS, repeat=5)
        followers.close()
    return statistics.median(seconds) / _CALLS * 1e6


if __name__ == "__main__":
    logging.disable()
    print(json.dumps({"microseconds": measured()}))

"""24 jobs of a second, 3 rates and 8 seeds, a worker each on two cores, against a shell's loop.

And Hydra's joblib launcher.
"""

from __future__ import annotations

import importlib.util
import json
import shlex
import subprocess
import sys
from pathlib import Path

from benchmarks.race import Arm, last_json, median, race
from benchmarks.starting import started
from benchmarks.suite import Bar, Bench, Chart, Report, Row, compare, of_rounds

_RATES, _SEEDS = ("0.02", "0.05", "0.1"), range(8)


def run(bench: Bench) -> Report:
    typed = [
        *started("torchrun", 1, ["-m", "benchmarks.peers.bare", "--data", str(bench.data)], ours=False),
        "--tensorboard",
    ]
    done = subprocess.run(
        [*typed, str(bench.folder / "tb"), "--steps", "2000"], check=True, capture_output=True, text=True
    )
    number = round(last_json(done.stdout)["steps_per_second"])
    bench.say(f"{number} steps take a second")

    def shell(place: Path, at_once: int) -> list[str]:
        lines = [shlex.join([*typed, f"{place}/{rate}-{seed}", f"--steps={number}", f"--lr={rate}", f"--seed={seed}"])
                 for rate in _RATES for seed in _SEEDS]  # fmt: skip
        (place / "lines").write_text("\n".join(lines))
        return [
            "xargs",
            "-P",
            str(at_once),
            "-d",
            "\n",
            "-n",
            "1",
            "-a",
            str(place / "lines"),
            "bash",
            "-c",
            'eval "$0"',
        ]

    def joblib(place: Path) -> list[str]:
        program = [
            sys.executable,
            "-m",
            "benchmarks.peers.hydra_joblib",
            "-m",
            "hydra/launcher=joblib",
            "hydra.launcher.n_jobs=2",
        ]
        swept = [f"lr={','.join(_RATES)}", f"seed=range({len(_SEEDS)})", f"hydra.sweep.dir={place / 'sweep'}"]
        return [*program, f"data={bench.data}", f"steps={number}", f"folder={place}", *swept]

    def ours(place: Path) -> list[str]:
        work = ["model=linear", "trainer.gpus=1", "trainer.global_batch_size=64", f"trainer.max_steps={number}",
                "trainer.epochs=null", "trainer.eval_every=0", "trainer.checkpoint_every=0"]  # fmt: skip
        swept = [
            f"optimizer.lr={','.join(_RATES)}",
            f"trainer.seed=range({len(_SEEDS)})",
            f"hydra.sweep.dir={place / 'sweep'}",
        ]
        typed = ["recipe=mnist", f"data.root={bench.data}", "data.source=files", "sweep.slots=2"]
        return [sys.executable, "-m", "ddpexp", "-m", *typed, *work, *swept]

    def figures(place: Path, _output: str, begin: float, end: float) -> dict[str, float]:
        record = place / "sweep" / "sweep.jsonl"
        return {"seconds": end - begin, **({"busy": _busy(record, 2)} if record.is_file() else {})}

    bars = {"torchrun, one by one": Bar("at least", 4), "torchrun, two at once": None}
    arms = [
        Arm("ddpexp", ours, figures),
        Arm("torchrun, one by one", lambda place: shell(place, 1), figures),
        Arm("torchrun, two at once", lambda place: shell(place, 2), figures),
        Arm("ddpexp again", ours, figures),
    ]
    if importlib.util.find_spec("hydra_plugins.hydra_joblib_launcher"):
        arms.append(Arm("Hydra joblib", joblib, figures))
        bars["Hydra joblib"] = Bar("at least", 1.2)
    results = race(arms, bench.at_most(5), bench.folder, bench.say)
    report = Report(charts=[Chart("24 jobs of a second on 2 cores", "seconds", {"": of_rounds(results, "seconds")})])
    for arm, bar in bars.items():
        what = f"24 jobs of a second on 2 cores, times faster than {arm}"
        shown = compare(results, what, "seconds", lambda value: f"{value:.1f} s", arm, bar=bar, faster=True)
        report.rows.append(shown)
    busy = median(results, "ddpexp", "busy")
    report.rows.append(Row("slots taken while jobs of that sweep wait", f"{busy:.2%} of the time"))
    return report


def _busy(record: Path, slots: int) -> float:
    """Return how much of the slots' time was taken from the first start to the last one, by a sweep's own record."""
    events = [json.loads(line) for line in record.read_text().splitlines()]
    begun = {event["job"]: event["time"] for event in events if event["event"] == "started"}
    ended = {event["job"]: event["time"] for event in events if event["event"] == "ended"}
    first, last = min(begun.values()), max(begun.values())
    taken: float = sum(min(ended[job], last) - begun[job] for job in begun)
    return taken / (slots * float(last - first))

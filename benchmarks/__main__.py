"""`python -m benchmarks --data FOLDER [NAME ...]`: the figures of the README, made again; `--help` names the benchmarks."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.race import Arm, last_json, median, race, ratio

Row = tuple[str, str, str]


def main() -> None:
    """Run the asked benchmarks and write RESULTS.md beside this file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    names = "start steps mnist soak launchers checkpoints position exact sweeps"
    parser.add_argument("which", nargs="*", default=["start", "steps", "mnist", "soak"], help=f"of {names}", metavar="NAME")
    parser.add_argument("--data", required=True, help="the folder with MNIST's four gzipped IDX files")
    parser.add_argument("--rounds", type=int, default=15)
    words = parser.parse_args()
    known = {
        "start": start, "steps": steps, "mnist": mnist, "soak": soak, "launchers": launchers, "checkpoints": checkpoints,
        "position": position, "exact": exact, "sweeps": sweeps,
    }  # fmt: skip
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as folder:
        data = Path(folder) / "data"  # a cache of our own, made before anything is timed
        data.mkdir()
        for path in Path(words.data).resolve().glob("*.gz"):
            shutil.copy(path, data)
        _ddpexp(data, Path(folder) / "warm", ["trainer.max_steps=1", "trainer.eval_every=0"])
        for name in words.which:
            place = Path(folder) / name
            place.mkdir()
            rows += known[name](data, words.rounds, place)
    _write(rows)


def start(data: Path, rounds: int, folder: Path) -> list[Row]:
    """Time from the command to the end of the first optimizer step, and to the prompt."""
    rows: list[Row] = []
    for workers in (2, 8):
        few = ["model=linear", "trainer.max_steps=60", "trainer.eval_every=0"]
        results = race(_arms(data, workers, few, steps=60), rounds, folder / str(workers), print)
        for figure in ("first step", "whole command"):
            seconds = median(results, "ddpexp", figure)
            peer = median(results, "peer", figure)
            rows.append(_row(f"{figure}, {workers} workers", f"{seconds:.2f} s against {peer:.2f} s", results, figure))
    return rows


def steps(data: Path, rounds: int, folder: Path) -> list[Row]:
    """Steps a second of the linear model, logging on."""
    many = ["model=linear", "trainer.max_steps=3050", "trainer.epochs=null", "trainer.eval_every=0"]
    results = race(_arms(data, 2, many, steps=3050), rounds, folder, print)
    mine, theirs = (median(results, arm, "steps a second") for arm in ("ddpexp", "peer"))
    return [_row("steps a second, linear, 2 workers", f"{mine:.0f} against {theirs:.0f}", results, "steps a second")]


def launchers(data: Path, rounds: int, folder: Path) -> list[Row]:
    """Time to the first step under each launcher, against the plain script started in the same way; Slurm wants SLURM_CONF."""
    rows: list[Row] = []
    ways = ["torchrun", "mpirun"] + (["srun", "salloc"] if "SLURM_CONF" in os.environ else [])
    for way in ways:
        for workers in (2, 8):
            few = ["model=linear", "trainer.max_steps=60", "trainer.eval_every=0"]
            results = race(_arms(data, workers, few, 60, way), rounds, folder / f"{way}-{workers}", print)
            mine, theirs = (median(results, arm, "first step") for arm in ("ddpexp", "peer"))
            figures = f"{mine:.2f} s against {theirs:.2f} s"
            rows.append(_row(f"first step under {way}, {workers} workers", figures, results, "first step"))
    return rows


def mnist(data: Path, rounds: int, folder: Path) -> list[Row]:
    """The whole command to over 99 %, against pytorch/examples' program, and the accuracy over five seeds."""
    accuracies = []
    for seed in range(5):
        run = _ddpexp(data, folder / f"seed{seed}", [f"trainer.seed={seed}"])
        accuracies.append(json.loads((run / "result.json").read_text())["metrics"]["eval/accuracy"])
        print(f"seed {seed}: {accuracies[-1]:.2%}")

    def figures(_place: Path, _output: str, begin: float, end: float) -> dict[str, float]:
        return {"seconds": end - begin}

    peer = [sys.executable, "-m", "benchmarks.peers.examples_mnist", "--data", str(data)]
    arms = [
        Arm("ddpexp", lambda place: _words(data, place / "run", []), figures),
        Arm("examples", lambda place: peer, figures),
        Arm("ddpexp again", lambda place: _words(data, place / "run", []), figures),
    ]
    results = race(arms, min(rounds, 3), folder, print)  # the peer takes minutes
    mine, theirs = median(results, "ddpexp", "seconds"), median(results, "examples", "seconds")
    faster, again = ratio(results, "examples", "ddpexp", "seconds"), ratio(results, "ddpexp again", "ddpexp", "seconds")
    mean, low, high = statistics.mean(accuracies), min(accuracies), max(accuracies)
    return [
        ("MNIST, seeds 0 to 4", f"{mean:.2%} in the mean, {low:.2%} to {high:.2%}", ""),
        ("MNIST to 99 %", f"{mine:.1f} s against {theirs:.1f} s", f"{faster} times faster; A/A {again}"),
    ]


def checkpoints(data: Path, rounds: int, folder: Path) -> list[Row]:
    """How long a save holds the training up, and what it costs in all, against torch.save and torch's distributed checkpoint."""
    rows: list[Row] = []

    def arm(name: str, way: str, millions: int, every: int, num_steps: int) -> Arm:
        program = ["-m", "benchmarks.peers.checkpoints", "--way", way, "--millions", str(millions), "--every", str(every)]

        def command(place: Path) -> list[str]:
            return _started("torchrun", 2, [*program, "--steps", str(num_steps), "--folder", str(place / "saved")], ours=False)

        def figures(place: Path, output: str, _begin: float, _end: float) -> dict[str, float]:
            shutil.rmtree(place)  # gigabytes
            return last_json(output)

        return Arm(name, command, figures)

    for millions, number in ((25, 40), (100, 20)):
        ways = {"ddpexp": "ddpexp", "torch.save": "torch_save", "async_save": "dcp_async", "ddpexp again": "ddpexp"}
        arms = [arm(name, way, millions, 10, number) for name, way in ways.items()]
        results = race(arms, min(rounds, 3), folder / f"stall-{millions}", print)
        again = ratio(results, "ddpexp again", "ddpexp", "stall")
        mine = median(results, "ddpexp", "stall")
        for peer in ("torch.save", "async_save"):
            figures = f"{mine * 1e3:.0f} ms against {median(results, peer, 'stall') * 1e3:.0f} ms"
            shown = f"{ratio(results, 'ddpexp', peer, 'stall')}; A/A {again}"
            rows.append((f"stall of a checkpoint, {millions} million parameters and momentum, {peer}", figures, shown))
    ways = {"ddpexp": "ddpexp", "none": "none", "none again": "none"}
    results = race([arm(name, way, 25, 50, 100) for name, way in ways.items()], min(rounds, 3), folder / "lost", print)
    figures = f"{median(results, 'ddpexp', 'seconds'):.1f} s against {median(results, 'none', 'seconds'):.1f} s without"
    shown = f"{ratio(results, 'ddpexp', 'none', 'seconds')}; A/A {ratio(results, 'none again', 'none', 'seconds')}"
    rows.append(("100 steps with a checkpoint every 50, 25 million parameters and momentum", figures, shown))
    return rows


def position(data: Path, rounds: int, folder: Path) -> list[Row]:
    """The first batch at four fifths of an epoch, against Accelerate's skip_first_batches where it is installed."""

    def figures(_place: Path, output: str, _begin: float, _end: float) -> dict[str, float]:
        return last_json(output)

    def arm(name: str, way: str, samples: int) -> Arm:
        words = [sys.executable, "-m", "benchmarks.peers.position", "--way", way, "--samples", str(samples)]
        return Arm(name, lambda place: words, figures)

    arms = [arm("a million", "ddpexp", 10**6), arm("a thousand million", "ddpexp", 10**9)]
    if importlib.util.find_spec("accelerate"):
        arms.append(arm("accelerate", "accelerate", 10**6))
    results = race(arms, rounds, folder, print)
    mine, most = (median(results, name, "seconds") * 1e3 for name in ("a million", "a thousand million"))
    rows = [("first batch at 80 % of an epoch of a thousand million samples", f"{most:.2f} ms against {mine:.2f} ms for a million",
             str(ratio(results, "a thousand million", "a million", "seconds")))]  # fmt: skip
    if "accelerate" in results:
        theirs = median(results, "accelerate", "seconds") * 1e3
        shown = str(ratio(results, "a million", "accelerate", "seconds"))
        rows.append(
            ("the same of a million samples, Accelerate's skip_first_batches", f"{mine:.2f} ms against {theirs:.1f} ms", shown)
        )
    return rows


def exact(data: Path, rounds: int, folder: Path) -> list[Row]:
    """What a step of trainer.reduction=exact costs against one of fast, with the same micro-batches."""

    def arm(name: str, reduction: str, words: Sequence[str]) -> Arm:
        def command(place: Path) -> list[str]:
            often = [
                "trainer.epochs=null",
                "trainer.eval_every=0",
                "trainer.checkpoint_every=0",
                "logger=none",
                "trainer.threads=1",
            ]
            return _words(data, place / "run", [*often, *words, f"trainer.reduction={reduction}"])

        def figures(place: Path, _output: str, _begin: float, _end: float) -> dict[str, float]:
            last = json.loads((place / "run" / "metrics.jsonl").read_text().splitlines()[-1])
            return {"ms": 128e3 / last["train/samples_per_second"]}

        return Arm(name, command, figures)

    rows: list[Row] = []
    for model, micro, number in (("lenet", 64, 200), ("lenet", 16, 200), ("linear", 64, 2000)):
        words = [
            f"model={model}",
            f"trainer.micro_batch_size={micro}",
            f"trainer.max_steps={number}",
            f"trainer.log_every={number // 2}",
        ]
        ways = {"exact": "exact", "fast": "fast", "fast again": "fast"}
        arms = [arm(name, way, words) for name, way in ways.items()]
        results = race(arms, min(rounds, 9), folder / f"{model}-{micro}", print)
        figures = f"{median(results, 'exact', 'ms'):.2f} ms against {median(results, 'fast', 'ms'):.2f} ms"
        shown = f"{ratio(results, 'exact', 'fast', 'ms')}; A/A {ratio(results, 'fast again', 'fast', 'ms')}"
        cut = f"{128 // micro} micro-batches of {micro}"
        rows.append((f"a step of exact reduction, {model}, {cut}, 2 workers, against fast", figures, shown))
    return rows


def sweeps(data: Path, rounds: int, folder: Path) -> list[Row]:
    """24 jobs of a second, 3 rates and 8 seeds, a worker each on two cores, against a shell's loop and Hydra's joblib."""
    rates, seeds = ("0.02", "0.05", "0.1"), range(8)
    typed = [*_started("torchrun", 1, ["-m", "benchmarks.peers.bare", "--data", str(data)], ours=False), "--tensorboard"]
    done = subprocess.run([*typed, str(folder / "tb"), "--steps", "2000"], check=True, capture_output=True, text=True)
    number = round(last_json(done.stdout)["steps_per_second"])
    print(f"{number} steps take a second")
    jobs = [(rate, seed) for rate in rates for seed in seeds]

    def shell(place: Path, at_once: int) -> list[str]:
        lines = [shlex.join([*typed, f"{place}/{rate}-{seed}", f"--steps={number}", f"--lr={rate}", f"--seed={seed}"])
                 for rate, seed in jobs]  # fmt: skip
        (place / "lines").write_text("\n".join(lines))
        return ["xargs", "-P", str(at_once), "-d", "\n", "-n", "1", "-a", str(place / "lines"), "bash", "-c", 'eval "$0"']

    def joblib(place: Path) -> list[str]:
        program = [sys.executable, "-m", "benchmarks.peers.hydra_joblib", "-m", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
        swept = [f"lr={','.join(rates)}", f"seed=range({len(seeds)})", f"hydra.sweep.dir={place / 'sweep'}"]
        return [*program, f"data={data}", f"steps={number}", f"folder={place}", *swept]

    def ours(place: Path) -> list[str]:
        work = ["model=linear", "trainer.gpus=1", "trainer.global_batch_size=64", f"trainer.max_steps={number}",
                "trainer.epochs=null", "trainer.eval_every=0", "trainer.checkpoint_every=0"]  # fmt: skip
        swept = [f"optimizer.lr={','.join(rates)}", f"trainer.seed=range({len(seeds)})", f"hydra.sweep.dir={place / 'sweep'}"]
        return [sys.executable, "-m", "ddpexp", "-m", "recipe=mnist", f"data.root={data}", "data.source=files", "sweep.slots=2",
                *work, *swept]  # fmt: skip

    def figures(place: Path, _output: str, begin: float, end: float) -> dict[str, float]:
        record = place / "sweep" / "sweep.jsonl"
        return {"seconds": end - begin, **({"busy": _busy(record, 2)} if record.is_file() else {})}

    arms = [
        Arm("ddpexp", ours, figures),
        Arm("torchrun, one by one", lambda place: shell(place, 1), figures),
        Arm("torchrun, two at once", lambda place: shell(place, 2), figures),
        Arm("Hydra joblib", joblib, figures),
        Arm("ddpexp again", ours, figures),
    ]
    results = race(arms, min(rounds, 5), folder, print)
    again = ratio(results, "ddpexp again", "ddpexp", "seconds")
    mine = median(results, "ddpexp", "seconds")
    rows: list[Row] = []
    for arm in ("torchrun, one by one", "torchrun, two at once", "Hydra joblib"):
        seconds = f"{mine:.1f} s against {median(results, arm, 'seconds'):.1f} s"
        shown = f"{ratio(results, arm, 'ddpexp', 'seconds')} times faster; A/A {again}"
        rows.append((f"a sweep of 24 jobs of a second on 2 cores, against {arm}", seconds, shown))
    busy = median(results, "ddpexp", "busy")
    return [*rows, ("slots taken while jobs of that sweep wait", f"{busy:.2%} of the time", "")]


def _busy(record: Path, slots: int) -> float:
    """Return how much of the slots' time was taken from the first start to the last one, by a sweep's own record."""
    events = [json.loads(line) for line in record.read_text().splitlines()]
    begun = {event["job"]: event["time"] for event in events if event["event"] == "started"}
    ended = {event["job"]: event["time"] for event in events if event["event"] == "ended"}
    first, last = min(begun.values()), max(begun.values())
    taken: float = sum(min(ended[job], last) - begun[job] for job in begun)
    return taken / (slots * float(last - first))


def soak(data: Path, rounds: int, folder: Path) -> list[Row]:
    """Two hundred short runs in a row, half with 2 and half with 4 workers: all end well and leave nothing."""
    codes, longest = [], 0.0
    before = _processes()
    for number in range(200):
        begin = time.time()
        few = ["model=linear", f"trainer.gpus={2 + 2 * (number % 2)}", "trainer.max_steps=100", "trainer.eval_every=0"]
        words = _words(data, folder / str(number), few)
        codes.append(subprocess.run(words, capture_output=True, check=False, timeout=60).returncode)
        longest = max(longest, time.time() - begin)
        if number % 20 == 19:
            print(f"soak {number + 1}/200: {codes.count(0)} exit codes 0, longest {longest:.1f} s")
    left = _processes() - before
    return [("200 runs, 2 and 4 workers in turn", f"{codes.count(0)} exit codes 0", f"{len(left)} processes left behind")]


# How the ranks of a plain script learn their places where torchrun does not tell them.
_PLACES = {
    "srun": "RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID",
    "mpirun": "RANK=$OMPI_COMM_WORLD_RANK WORLD_SIZE=$OMPI_COMM_WORLD_SIZE LOCAL_RANK=$OMPI_COMM_WORLD_LOCAL_RANK",
}
_MPIRUN = ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]


def _started(way: str, workers: int, program: Sequence[str], ours: bool) -> list[str]:
    """Return the words that start a program's ranks in one of the ways; ours has ranks of its own under spawn and salloc."""
    if way == "spawn" and ours:
        return [sys.executable, *program, f"trainer.gpus={workers}"]
    if way in ("spawn", "torchrun"):
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers)]
        return [*torchrun, *program, *(["launcher=torchrun-env"] if ours else [])]
    before = {
        "srun": ["srun", "-N1", f"-n{workers}"],
        "salloc": ["salloc", "-N1", f"-n{workers}", *([] if ours else ["srun"])],
        "mpirun": [*_MPIRUN, "-n", str(workers)],
    }[way]
    if ours:
        mine = ["launcher=mpi"] if way == "mpirun" else ["launcher=slurm"]
        return [*before, sys.executable, *program, *mine, *([f"trainer.gpus={workers}"] if way == "salloc" else [])]
    place = f"export MASTER_ADDR=127.0.0.1 MASTER_PORT=29750 {_PLACES['mpirun' if way == 'mpirun' else 'srun']}"
    return [*before, "bash", "-c", f'{place}; exec "$@"', "-", sys.executable, *program]


def _arms(data: Path, workers: int, words: Sequence[str], steps: int, way: str = "spawn") -> list[Arm]:
    def peer(place: Path) -> list[str]:
        program = ["-m", "benchmarks.peers.bare", "--data", str(data), "--steps", str(steps), "--tensorboard", str(place)]
        return _started(way, workers, program, ours=False)

    def theirs(_place: Path, output: str, begin: float, end: float) -> dict[str, float]:
        found = last_json(output)
        return {
            "first step": found["first_step_at"] - begin,
            "whole command": end - begin,
            "steps a second": found["steps_per_second"],
        }

    def ours(place: Path, _output: str, begin: float, end: float) -> dict[str, float]:
        result = json.loads((place / "run" / "result.json").read_text())
        lines = [json.loads(line) for line in (place / "run" / "metrics.jsonl").read_text().splitlines()]
        rate = (lines[-1]["step"] - lines[0]["step"]) / (lines[-1]["time"] - lines[0]["time"])
        return {"first step": result["first_step_at"] - begin, "whole command": end - begin, "steps a second": rate}

    def command(place: Path) -> list[str]:
        typed = ["recipe=mnist", f"data.root={data}", "data.source=files", f"run.dir={place / 'run'}"]
        batch = [f"trainer.global_batch_size={64 * workers}", "trainer.threads=1"]
        return _started(way, workers, ["-m", "ddpexp", *typed, *batch, *words], ours=True)

    return [Arm("ddpexp", command, ours), Arm("peer", peer, theirs), Arm("ddpexp again", command, ours)]


def _row(name: str, figures: str, results: dict[str, list[dict[str, float]]], figure: str) -> Row:
    against, again = ratio(results, "ddpexp", "peer", figure), ratio(results, "ddpexp again", "ddpexp", figure)
    return name, figures, f"{against}; A/A {again}"


def _words(data: Path, run: Path, words: Sequence[str]) -> list[str]:
    typed = ["recipe=mnist", "trainer.gpus=2", f"data.root={data}", "data.source=files", f"run.dir={run}"]
    return [sys.executable, "-m", "ddpexp", *typed, *words]


def _ddpexp(data: Path, run: Path, words: Sequence[str]) -> Path:
    subprocess.run(_words(data, run, words), check=True, capture_output=True)
    return run


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


def _write(rows: Sequence[Row]) -> None:
    """Write the table; rows of benchmarks that were not run this time stay."""
    path = Path(__file__).with_name("RESULTS.md")
    table = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3 and cells[0] and not cells[0].startswith("---"):
            table[cells[0]] = line
    table |= {name: f"| {name} | {figures} | {shown} |" for name, figures, shown in rows}
    machine = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}"
    lines = [
        "# Results",
        "",
        f"{machine}, {time.strftime('%B %Y')}. Medians; ratios are medians of the rounds with quartiles, ddpexp divided by the",
        "other program; A/A is ddpexp divided by ddpexp in the same rounds, which shows what the machine's noise alone does.",
        "",
        "| | figures | ratio |",
        "|---|---|---|",
        *table.values(),
    ]
    path.write_text("\n".join(lines) + "\n")
    print(path.read_text())


if __name__ == "__main__":
    main()

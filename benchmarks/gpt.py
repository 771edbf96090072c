"""A small GPT on a CPU, in nanoGPT's configuration for one, against nanoGPT itself."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from benchmarks.race import Arm, Figures, last_json, median, race
from benchmarks.suite import Bar, Bench, Chart, Report, Row, compare, of_rounds, records

_SHARE, _LOSS = 0.97, 0.02
_BATCH, _BLOCK = 12, 64
_EVALS = 20  # batches of each part that nanoGPT evaluates: twice as many of one part are as many tokens
_STEPS = 2000
_WARMUP, _EVERY, _RECORD = 20, 8, 40  # shares of the steps: 100, 250 and 50 of 2,000
_THREADS = 2
_ITERATION = re.compile(r"^iter (\d+): loss .*, time ([\d.]+)ms", re.MULTILINE)


def run(bench: Bench) -> Report:
    """Race equal steps with equal threads, and compare the loss of the weights over the whole validation part."""
    steps = bench.steps or _STEPS
    arms = [
        _ours(bench, "ddpexp", steps, 1),
        _nanogpt(bench, steps),
        _ours(bench, "ddpexp, 2 workers", steps, 2),
        _ours(bench, "ddpexp again", steps, 1),
    ]
    results = race(arms, bench.at_most(5), bench.folder, bench.say)
    bar = Bar("at least", _SHARE)

    def show(value: float) -> str:
        return f"{value:,.0f} tokens/s"

    what = f"training with evaluations, {_THREADS} threads"
    report = Report(
        rows=[
            compare(results, f"{what}, nanoGPT", "rate", show, "nanoGPT", bar=bar),
            compare(
                results, f"{what}, 2 workers of 1 thread", "rate", show, "ddpexp", mine="ddpexp, 2 workers", again=None
            ),
            _losses(results, steps),
        ]
    )
    report.charts.append(Chart("a small GPT, 2 threads", "tokens a second", {"": of_rounds(results, "rate")}))
    return report


def _losses(results: Figures, steps: int) -> Row:
    ours, theirs = median(results, "ddpexp", "loss"), median(results, "nanoGPT", "loss")
    bar = Bar("at most", _LOSS)
    what = f"loss over the whole validation part after {steps:,} steps, more than nanoGPT's"
    figures = f"{ours:.4f} against {theirs:.4f}"
    return Row(what, figures, f"{ours - theirs:+.4f}", bar=str(bar), met=bar.met(ours - theirs))


def _loss(bench: Bench, place: Path, weights: Path) -> float:
    words = [*_peer(bench, place), "loss", str(weights)]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    return last_json(done.stdout)["loss"]


def _peer(bench: Bench, place: Path) -> list[str]:
    words = ["--source", str(bench.nanogpt), "--text", str(bench.text), "--out", str(place)]
    return [sys.executable, "-m", "benchmarks.peers.nanogpt", *words]


def _nanogpt(bench: Bench, steps: int) -> Arm:
    def command(place: Path) -> list[str]:
        keys = {
            "device": "cpu", "compile": False, "gradient_accumulation_steps": 1, "batch_size": _BATCH,
            "learning_rate": 1e-3, "min_lr": 1e-4, "beta2": 0.99, "warmup_iters": steps // _WARMUP,
            "lr_decay_iters": steps, "max_iters": steps, "eval_interval": steps // _EVERY, "eval_iters": _EVALS,
            "log_interval": 1,
        }  # fmt: skip
        return [*_peer(bench, place), "train", *(f"--{key}={value}" for key, value in keys.items())]

    def figures(place: Path, output: str, _begin: float, _end: float) -> dict[str, float]:
        # Iteration i, from 0, begins with the evaluation after i steps.
        times = {int(number): float(time) for number, time in _ITERATION.findall(output)}
        timed = [times[number] for number in range(steps // _WARMUP, steps)]
        return {"rate": _rate(len(timed), sum(timed) / 1e3), "loss": _loss(bench, place, place / "ckpt.pt")}

    return Arm("nanoGPT", command, figures, {"OMP_NUM_THREADS": str(_THREADS)})


def _ours(bench: Bench, name: str, steps: int, workers: int) -> Arm:
    def command(place: Path) -> list[str]:
        keys = {
            "recipe": "gpt", "data.path": bench.text, "run.dir": place / "run", "trainer.max_steps": steps,
            "trainer.gpus": workers, "trainer.threads": _THREADS // workers, "trainer.global_batch_size": _BATCH,
            "trainer.eval_every": steps // _EVERY, "trainer.limit_eval_batches": 2 * _EVALS,
            "trainer.eval_at_start": True, "trainer.checkpoint_every": steps // _EVERY, "data.block_size": _BLOCK,
            "task.sample_tokens": 0,
            "scheduler.warmup_steps": steps // _WARMUP, "trainer.log_every": steps // _RECORD, "scheduler.floor": 0.1,
        }  # fmt: skip
        return [sys.executable, "-m", "ddpexp", *(f"{key}={value}" for key, value in keys.items())]

    def figures(place: Path, _output: str, _begin: float, _end: float) -> dict[str, float]:
        lines = [line for line in records(place / "run") if "train/loss" in line]
        first = next(line for line in lines if line["step"] == steps // _WARMUP)
        rate = _rate(int(lines[-1]["step"] - first["step"]), lines[-1]["time"] - first["time"])
        weights = place / "run" / "checkpoints" / f"step-{steps:08}" / "model.safetensors"
        return {"rate": rate, "loss": _loss(bench, place, weights)}

    return Arm(name, command, figures)


def _rate(steps: int, seconds: float) -> float:
    return steps * _BATCH * _BLOCK / seconds

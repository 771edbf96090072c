"""One job for every program of a race: the same batches from the same weights, and so the same weights at the end."""

from __future__ import annotations

import itertools
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from benchmarks.peers.common import model
from benchmarks.peers.job import EVERY, Whole
from benchmarks.race import Arm, Figures, last_json, race, ratio, refuse_other_work
from benchmarks.starting import started
from benchmarks.suite import Bench, records, result
from ddpexp.checkpoint.format import complete_checkpoints
from ddpexp.data.adapters import MapStyle
from ddpexp.data.batch_plan import plan_batches
from ddpexp.data.batches import TrainBatches

TOLERANCE = 0.01
"""How far the loss, and the way that the weights have gone, may be from the middle, relatively."""

RECIPE = str(Path(__file__).resolve().parent / "recipe" / "conf")
FASTEST = "fastest steps a second"
"""In the fastest stretch from one record to the next: where the machine disturbed a program the least."""
_TRAINING_SAMPLES = 60_000
PEERS = {
    "Lightning": ("lightning_trainer", []),
    "Lightning, fast": ("lightning_trainer", ["--fast"]),
    "Lightning, barebones": ("lightning_trainer", ["--fast", "--barebones"]),
    "Fabric": ("lightning_fabric", []),
    "Fabric, fast": ("lightning_fabric", ["--fast"]),
    "Accelerate": ("hf_accelerate", []),
    "Accelerate, fast": ("hf_accelerate", ["--fast"]),
}
"""Programs of the peers' environment, by the names of their arms."""


@dataclass(frozen=True)
class Job:
    """A model, and how many batches of which size each of how many workers gets."""

    bench: Bench
    folder: Path
    model: str
    workers: int
    steps: int
    batch: int = 32

    def run(self, arms: Sequence[Arm], rounds: int, floor: str | None = None) -> Figures:
        """Race the programs, and refuse those that do other work.

        `floor` is an arm that leaves some of it out on purpose.
        """
        self._write_order()
        results = race(arms, rounds, self.folder, self.bench.say)
        for figure in ("loss", "moved"):
            refuse_other_work({arm: rows for arm, rows in results.items() if arm != floor}, figure, TOLERANCE)
        return results

    def run_peers(self, names: Sequence[str], words: Sequence[str]) -> Figures:
        """Race ddpexp with programs of the peers' environment, which start slowly: a few rounds.

        Nothing where there is none.
        """
        if self.bench.peers is None or self.bench.quick:
            return {}
        apart = replace(self, folder=self.folder / "peers")
        return apart.run([apart.ours("ddpexp", *words), *(apart.peer(name) for name in names)], self.bench.at_most(3))

    def ours(self, name: str, *words: str, way: str = "spawn") -> Arm:
        """Return ddpexp's arm, with the peers' model and loss."""

        def command(place: Path) -> list[str]:
            sizes = [f"trainer.global_batch_size={self.batch * self.workers}", f"trainer.max_steps={self.steps}"]
            data = [f"data.root={self.bench.data}", "data.source=files", f"run.dir={place / 'run'}"]
            program = ["-m", "ddpexp", "--config-dir", RECIPE, "recipe=raced", f"model.name={self.model}"]
            return started(
                way, self.workers, [*program, *sizes, *data, f"trainer.log_every={EVERY}", *words], ours=True
            )

        def figures(place: Path, _output: str, begin: float, end: float) -> dict[str, float]:
            lines, saved = records(place / "run"), place / "run" / "result.json"
            rate = (
                (lines[-1]["step"] - lines[0]["step"]) / (lines[-1]["time"] - lines[0]["time"])
                if len(lines) > 1
                else 0.0
            )
            pairs = itertools.pairwise(lines)
            best = max(((b["step"] - a["step"]) / (b["time"] - a["time"]) for a, b in pairs), default=0.0)
            first = result(place / "run")["first_step_at"] - begin
            own = {FASTEST: best, "to the prompt": end - saved.stat().st_mtime}
            return {**self._figures(first, rate, _ours(place / "run")), **own}

        return Arm(name, command, figures)

    def in_turn(self, name: str, *words: str, block: int = 100) -> Arm:
        """Return an arm that trains with ddpexp and with the hand-written loop in one process.

        Blocks of steps in turn.
        """
        ours = self.ours(name, *words)

        def command(place: Path) -> list[str]:
            told = {"data": self.bench.data, "order": self.order, "folder": place, "model": self.model, "block": block}
            return [
                *ours.command(place),
                "task._target_=raced.InTurn",
                *(f"+task.{key}={value}" for key, value in told.items()),
            ]

        def figures(place: Path, output: str, begin: float, end: float) -> dict[str, float]:
            found = ours.figures(place, output, begin, end)
            return {"loss": found["loss"], "moved": found["moved"], **turns(place)}

        return Arm(name, command, figures)

    def by_hand(self, name: str, *words: str) -> Arm:
        """Return the hand-written loop's arm: alone, under torchrun, or with mp.spawn where the words say so."""
        alone = self.workers == 1 or "--spawn" in words
        return self._peer(name, sys.executable, "by_hand", words, alone)

    def peer(self, name: str) -> Arm:
        """Return the arm of one of `PEERS`."""
        assert self.bench.peers is not None
        program, words = PEERS[name]
        return self._peer(name, self.bench.peers, program, words, alone=program != "hf_accelerate" or self.workers == 1)

    def _peer(self, name: str, python: str, program: str, words: Sequence[str], alone: bool) -> Arm:
        def command(place: Path) -> list[str]:
            places = ["--data", str(self.bench.data), "--order", str(self.order), "--folder", str(place)]
            typed = [
                "-m",
                f"benchmarks.peers.{program}",
                *places,
                "--model",
                self.model,
                "--workers",
                str(self.workers),
                *words,
            ]
            return [python, *typed] if alone else [python, *started("torchrun", self.workers, typed, ours=False)[1:]]

        def figures(place: Path, output: str, begin: float, _end: float) -> dict[str, float]:
            found, weights = last_json(output), torch.from_numpy(np.load(place / "weights.npy"))
            own = self._figures(found["first_step_at"] - begin, found["steps_per_second"] or 0.0, weights)
            return {**own, FASTEST: found["fastest_steps_per_second"]}

        threads = {} if "--threads" in words else {"OMP_NUM_THREADS": "1"}
        return Arm(name, command, figures, threads, tries=3)  # with gloo torch aborts now and then as it leaves

    def _figures(self, first: float, rate: float, weights: Tensor) -> dict[str, float]:
        speed = {"steps a second": rate, "microseconds a step": 1e6 / rate} if rate else {}
        network = model(self.model)
        before = nn.utils.parameters_to_vector(network.parameters()).detach()
        nn.utils.vector_to_parameters(weights, network.parameters())
        images, labels = self._fixed
        with torch.no_grad():
            loss = nn.functional.cross_entropy(network(images), labels)
        return {"first step": first, **speed, "loss": float(loss), "moved": float(torch.dist(weights, before))}

    @property
    def order(self) -> Path:
        """Return where it is written which samples each rank gets in each step."""
        return self.folder / "order.npy"

    def _write_order(self) -> None:
        """Write down which samples each rank of ddpexp gets in each step."""
        plan = plan_batches(self.batch * self.workers, "auto", self.workers)
        ranks = [
            TrainBatches(MapStyle(range(_TRAINING_SAMPLES)), plan, rank, 0, torch.device("cpu"))
            for rank in range(self.workers)
        ]
        self.folder.mkdir(parents=True, exist_ok=True)
        np.save(self.order, np.stack([np.stack(list(rank.indices(0, self.steps))) for rank in ranks]))

    @cached_property
    def _fixed(self) -> tuple[Tensor, Tensor]:
        return Whole(str(self.bench.data))[torch.arange(2000)]


def fastest(results: Figures, other: str) -> str:
    """Say what ddpexp's speed divided by another program's is in the fastest stretches of both."""
    return f"of each program's fastest {EVERY} steps: {ratio(results, 'ddpexp', other, FASTEST).median:.2f}"


def turns(place: Path) -> dict[str, float]:
    """Compare the blocks of both loops of a process, but for the first ones. Units: microseconds a step."""
    blocks = [json.loads(line) for line in (place / "blocks.jsonl").read_text().splitlines()][1:]
    mine, theirs = ([1e6 * one[which] for one in blocks] for which in (0, 1))
    more = statistics.median(one - other for one, other in zip(mine, theirs, strict=True))
    share = statistics.median(other / one for one, other in zip(mine, theirs, strict=True))
    again = statistics.median(other / one for one, other in itertools.pairwise(mine))
    return {
        "ours": statistics.median(mine),
        "theirs": statistics.median(theirs),
        "more": more,
        "share": share,
        "again": again,
    }


def _ours(run: Path) -> Tensor:
    """Read the final weights, in the order of the model's layers."""
    found = load_file(complete_checkpoints(run / "checkpoints")[0] / "model.safetensors")
    names = sorted(found, key=lambda name: (int(name.split(".")[0]), name.endswith("bias")))
    return torch.cat([found[name].flatten() for name in names])

"""Draw in CONTRIBUTING.md which function calls which: on the way of a command, of a batch, and of a save and back.

`python -m tests.write_ways` trains for two steps with two workers, resumes for a third, and notes the calls of the
functions below in the command and in rank zero. A function that is not called any more ends it with an error.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.conftest import ROOT

DOCUMENT = ROOT / "CONTRIBUTING.md"
COMMAND = {
    "cli.main.run": "prepares the process, and leaves with the exit code",
    "cli.main._dispatch": "finds the verb, and starts the fork server, which imports torch meanwhile",
    "cli.main._train": "composes, parses and launches",
    "config.compose.compose_command": "argv -> ResolvedConfig",
    "config.arguments.Arguments.of": "argv -> overrides, --config-dir, and whether it is a sweep",
    "config.tree.compose_tree": "overrides -> Tree: Hydra's plain values, references not resolved",
    "config.resolve.resolve": "Tree -> ResolvedConfig: values, and the text of config.yaml",
    "config.parse.parse": "values -> Experiment: typed, frozen, validated across sections",
    "config.build.convert": "one value -> its declared type",
    "settings.key.Key.check": "its range, choice or pattern",
    "run.training.Training.job": "the job: run directory, config.yaml, manifest, its end",
    "run.outcome.launch": "reports and records how the job ends; returns the exit code",
    "launch.launchers.local.Spawn.launch": "where this command runs, how to reach the others",
    "launch.supervise.coordinator.run": "commands agree on a layout; the first begins the job",
    "launch.supervise.supervisor.Supervisor.run": "watches processes, signals and heartbeats",
    "launch.workers.server.call": "in a new process: calls the job's entry point",
    "train.worker.main": "the entry point of the workers",
    "train.process.run_rank": "signals, errors and the exit code of a rank",
    "train.worker.train": "the four stages of a rank",
    "train.worker.join": "joins the other ranks",
    "train.worker.build": "data, model, strategy, loop",
    "train.worker.restore": "the newest checkpoint, if there is one",
    "train.worker.fit": "trains, saves, reports",
    "train.loop.Loop.fit": "steps, records, evaluations, checkpoints",
    "train.optimizer_step.Step.take": "one optimizer step",
    "strategy.replica.Replicas.train_step": "each micro-batch, then the optimizers",
    "train.optimizer_step.MicroBatch.backward": "the loss, divided by the global count",
}
BATCH = {
    "train.loop.Loop.fit": "what is due, and what was asked, after each step",
    "data.batches.TrainBatches.steps": "the micro-batches of this rank, step by step",
    "data.batches.TrainBatches._blocks": "which samples: a function of seed, epoch and position",
    "data.base.IndexData.gather": "the samples, on the device",
    "train.loop.Loop._train_step": "sets the rates, takes a step, counts it",
    "train.learning_rates.LearningRates.set": "the rate of each parameter group",
    "train.optimizer_step.Step.take": "one step: rounds of passes, and their use",
    "strategy.replica.Replicas.train_step": "each micro-batch, then the optimizers",
    "train.optimizer_step.Step.micro_batch": "the next micro-batch",
    "train.optimizer_step.MicroBatch.__enter__": "begins a pass: random numbers, precision",
    "train.optimizer_step.MicroBatch.forward": "the recipe's Task.step",
    "train.optimizer_step.MicroBatch.backward": "adds a gradient",
    "train.precision.Precision.backward": "scaled for fp16",
    "train.optimizer_step.MicroBatch.__exit__": "the last one reduces the gradients",
    "train.optimizer_step.Step.apply": "clips, then steps the optimizers",
    "train.precision.Precision.step": "unless a gradient is not finite",
    "train.metrics.MetricAccumulator.add": "sums for the next record",
    "train.loop.Loop._record": "means over all ranks, to the loggers",
}
SAVE = {
    "train.worker.restore": "at the start of a resumed run",
    "train.checkpointer.Checkpointer.restore": "one loop over the states, by name",
    "train.states.ModelStates.restore": "each rank reads its share",
    "train.optimizers.OptimizerStates.restore": "likewise",
    "train.progress.TrainingProgress.restore": "step, metrics, best",
    "train.states.RandomNumbers.restore": "a state that each rank has for itself",
    "train.loop.Loop.fit": "a checkpoint is due, or asked for",
    "train.loop.Loop._save": "all ranks, in step",
    "train.checkpointer.Checkpointer.save": "one loop over the same states",
    "train.states.ModelStates.state": "shards of tensors",
    "train.optimizers.OptimizerStates.state": "likewise",
    "train.progress.TrainingProgress.state": "plain values",
    "train.states.RandomNumbers.state": "of each rank",
    "checkpoint.writer.Writer.save": "copies the states, so that training can continue",
    "checkpoint.writer.Writer._work": "in a thread: writes this rank's share",
    "checkpoint.writer.Writer._complete": "rank zero: all shares are there, the manifest",
}
WAYS = {
    "From `python -m ddpexp recipe=mnist trainer.gpus=2` to the first backward pass:": COMMAND,
    "A batch, from its indices to the optimizer and the record:": BATCH,
    "A save, and back at the start of a resumed run:": SAVE,
}
BEGIN, END = "<!-- python -m tests.write_ways: begin -->\n", "<!-- end -->\n"
RUN = (
    "recipe=mnist", "model=linear", "data.source=embedded", "launcher=spawn", "trainer.gpus=2", "trainer.device=cpu",
    "trainer.checkpoint_every=1", "trainer.log_every=1",
)  # fmt: skip
WATCH = '''
import atexit, json, os, sys, threading
names = set(json.loads(os.environ["WAYS_NAMES"]))
root = os.environ["WAYS_ROOT"] + "/"
calls = []  # of functions with a name among those: (parent's place in this list, name)
local = threading.local()
seen = set()

def watch(frame, event, _):
    stack = local.__dict__.setdefault("stack", [])
    if event == "call" and frame.f_code.co_filename.startswith(root):
        code = frame.f_code
        name = code.co_filename[len(root):-3].replace("/", ".") + "." + code.co_qualname
        if name in names:
            parent = stack[-1][1] if stack else ""
            stack.append((frame, name))
            if (parent, name) not in seen:
                seen.add((parent, name))
                calls.append((parent, name))
    elif event == "return" and stack and stack[-1][0] is frame:
        stack.pop()

def dump():
    sys.setprofile(None)
    if calls and os.environ.get("RANK", "0") == "0":
        with open(f"{os.environ['WAYS_OUT']}/{os.getpid()}.json", "w") as file:
            json.dump(calls, file)

leave = os._exit
def dump_and_leave(code):
    dump()
    leave(code)

os._exit = dump_and_leave
atexit.register(dump)
threading.setprofile(watch)
sys.setprofile(watch)
'''  # fmt: skip
"""What Python runs at its start in each process of the command."""


def traced(folder: Path) -> list[tuple[str, str]]:
    """Return pairs of caller and function, in the order of the first calls; the command's calls come first."""
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(WATCH)
    names = sorted({name for way in WAYS.values() for name in way})
    environ = {
        **os.environ, "WAYS_NAMES": json.dumps(names), "WAYS_ROOT": str(ROOT / "ddpexp"), "WAYS_OUT": str(folder),
        "PYTHONPATH": f"{folder / 'site'}{os.pathsep}{ROOT}",
    }  # fmt: skip
    for steps in (2, 3):
        words = [*RUN, f"trainer.max_steps={steps}", f"run.dir={folder / 'run'}"]
        subprocess.run([sys.executable, "-m", "ddpexp", *words], env=environ, check=True, capture_output=True)
    files = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
    calls: dict[tuple[str, str], None] = {}
    for path in sorted(files, key=lambda path: '"cli.main.run"' not in path.read_text()):
        calls |= dict.fromkeys(map(tuple, json.loads(path.read_text())))
    return list(calls)


def drawn(way: Mapping[str, str], calls: list[tuple[str, str]]) -> str:
    """Return the functions of a way, each below the one that calls it.

    Raises:
        RuntimeError: one is not called.
    """
    callers: dict[str, list[str]] = {}
    for parent, name in calls:
        callers.setdefault(name, []).append(parent)
    missing = [name for name in way if name not in callers]
    if missing:
        raise RuntimeError(f"not called: {', '.join(missing)}")

    def above(name: str, passed: frozenset[str] = frozenset()) -> str | None:
        """Return the nearest caller that is on this way."""
        for parent in callers.get(name, ()):
            if parent in way:
                return parent
        further = (above(parent, passed | {name}) for parent in callers.get(name, ()) if parent not in passed)
        return next((found for found in further if found is not None), None)

    below: dict[str | None, list[str]] = {}
    for name in way:
        below.setdefault(above(name), []).append(name)

    def lines(parent: str | None, depth: int) -> Iterator[tuple[str, str]]:
        for name in below.get(parent, ()):
            yield f"    {'  ' * depth}{name}", way[name]
            yield from lines(name, depth + 1)

    every = list(lines(None, 0))
    width = max(len(name) for name, _ in every)
    return "\n".join(f"{name:{width}}  {text}" for name, text in every)


def text(calls: Any) -> str:
    """Return the three drawings."""
    return "\n".join(f"{title}\n\n{drawn(way, calls)}\n" for title, way in WAYS.items())


def main() -> None:
    """Write the drawings into CONTRIBUTING.md."""
    with tempfile.TemporaryDirectory() as folder:
        calls = traced(Path(folder))
    before, _, rest = DOCUMENT.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    DOCUMENT.write_text(f"{before}{BEGIN}{text(calls)}{END}{after}")


if __name__ == "__main__":
    main()

"""How well `ddpexp plan --calibrate` predicts a step.

`python -m benchmarks.predict [rounds]`, on a machine that is quiet.

Each round plans four CPU workers from runs with one and two, then trains with four, and compares the lower quartiles of
the step.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ddpexp.plan.calibrate import step_ms

MODELS = {"linear": 3600, "lenet": 384}  # steps of the run
_BATCH = 128


@dataclass(frozen=True)
class Prediction:
    """What was planned, and what it took."""

    predicted_ms: float
    measured_ms: float
    disturbed: str  # by other programs, as far as the plan has noticed

    @property
    def error(self) -> float:
        """Return by how much of what it took the plan was wrong."""
        return self.predicted_ms / self.measured_ms - 1


def main() -> None:
    print(f"{'model':<8}{'predicted':>12}{'measured':>12}{'error':>8}  others")
    for _ in range(int(sys.argv[1]) if len(sys.argv) > 1 else 3):
        for model in MODELS:
            found = predict(model)
            shown = f"{found.predicted_ms:>9.3g} ms{found.measured_ms:>9.3g} ms{found.error:>+8.1%}"
            print(f"{model:<8}{shown}  {found.disturbed or 'quiet'}")


def predict(model: str) -> Prediction:
    """Plan four workers from runs with one and two, and run them."""
    typed = ["recipe=mnist", f"model={model}", "data.source=embedded", "trainer.gpus=4"]
    plan = json.loads(_ddpexp("plan", *typed, "--calibrate", "--json"))
    busy = [note.split(" of ")[0] for note in plan["notes"] if note.startswith("other programs")]
    return Prediction(plan["step"]["total_ms"], _measure(typed, MODELS[model]), "".join(busy))


def _measure(typed: list[str], steps: int) -> float:
    """Return the time of a step of the run that was planned. Units: milliseconds."""
    with tempfile.TemporaryDirectory() as folder:
        length = ["trainer.epochs=null", f"trainer.max_steps={steps}", f"trainer.log_every={steps // 12}"]
        rest = ["trainer.eval_every=0", "trainer.checkpoint_every=0", "logger=none", f"run.dir={folder}/run"]
        _ddpexp(*typed, *length, *rest)
        lines = Path(folder, "run/metrics.jsonl").read_text().splitlines()
    return step_ms([json.loads(line) for line in lines], _BATCH)


def _ddpexp(*words: str) -> str:
    done = subprocess.run([sys.executable, "-m", "ddpexp", *words], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return done.stdout


if __name__ == "__main__":
    main()

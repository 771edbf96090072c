"""Write the sample runs anew: `python -m tests.write_samples`, when the format of runs or checkpoints changes.

Tests that need some run, whichever it is, copy one of these; nothing else is promised of them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT, PLACE = Path(__file__).parents[1], Path("/tmp/ddpexp-samples")
SAMPLES = ROOT / "tests/samples"
KEYS = (
    "trainer.threads=1 trainer.log_every=4 trainer.ema_decay=0.9 trainer.checkpoint_every=3 scheduler=cosine "
    "optimizer.lr=0.02 trainer.gpus=2"
)
MNIST = (
    "model=linear data.source=embedded data.embedded_train=640 data.embedded_test=100 trainer.max_steps=60 "
    "trainer.epochs=null trainer.log_every=5 trainer.checkpoint_every=10 trainer.keep_last=1 trainer.gpus=2 "
    "trainer.threads=1 logger=none"
)
SWEEP = (
    "trainer.epochs=1 optimizer.lr=0.01,0.1 trainer.gpus=1 trainer.threads=1 sweep.objective=eval/accuracy "
    "sweep.mode=max sweep.picture=false logger=none"
)
COMMANDS = {  # by folder: the words of the command, and the fault that ends it
    "finished": (f"--config-dir conf recipe=mine {KEYS} run.dir=finished", None),
    "stopped": (f"--config-dir conf recipe=mine {KEYS} run.dir=stopped", "step:kill:1:8"),
    "mnist": (f"recipe=mnist {MNIST} run.dir=mnist", "step:kill:0:58"),
    "sweep": (f"--config-dir conf -m recipe=mine {SWEEP} hydra.sweep.dir=sweep", None),
}


def main() -> None:
    """Run the commands in a folder that holds the project, and put what they have written in the place of the old."""
    PLACE.mkdir()  # a folder that says nothing of the machine
    try:
        place, source = PLACE / "project", PLACE / "source"
        for folder in ("ddpexp", "conf", "recipes"):  # without the repository: whoever writes them has changed it
            shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copytree(SAMPLES / "project", place)
        for name, (words, fault) in COMMANDS.items():
            environ = {**os.environ, "PYTHONPATH": str(source), **({"DDPEXP_FAULT": fault} if fault else {})}
            made = place / name
            while not made.exists() or list(made.glob("checkpoints/.*.partial")):  # killed while it saved: once more
                shutil.rmtree(made, ignore_errors=True)
                done = subprocess.run([sys.executable, "-m", "ddpexp", *words.split()], cwd=place, env=environ)
                if done.returncode != (1 if fault else 0):
                    raise SystemExit(f"{name}: exit code {done.returncode}")
            shutil.rmtree(SAMPLES / name, ignore_errors=True)
            shutil.copytree(made, SAMPLES / name)
    finally:
        shutil.rmtree(PLACE)


if __name__ == "__main__":
    main()

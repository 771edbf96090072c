"""What the tests and `ddpexp doctor` find on a machine with GPUs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

from benchmarks.gpu_place import Place
from benchmarks.suite import ROOT, Report, Row
from ddpexp.system.hardware import usable_cores

_DOCTOR_SECONDS, _TESTS_SECONDS = 60.0, 420.0


def tests(place: Place) -> Report:
    """The tests that need a GPU."""
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", "-n", str(min(4, usable_cores())),
        "--dist", "load", "tests/test_gpu.py", "tests/test_two_gpus.py",
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | place.environ, capture_output=True, text=True, timeout=_TESTS_SECONDS
    )
    place.say(done.stdout[-4000:])
    lines = [line for line in done.stdout.splitlines() if re.search(r"\b(passed|failed|skipped|error)", line)]
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    summary = lines[-1].strip("= ") if lines else f"exit code {done.returncode}"
    return Report([Row("pytest -m gpu", summary, met=done.returncode == 0, note="; ".join(failed)[:2000])])


def doctor(place: Place) -> Report:
    """What `ddpexp doctor` reports of this machine."""
    command = [sys.executable, "-m", "ddpexp", "doctor", "--json", f"trainer.device={place.device}"]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | place.environ, capture_output=True, text=True, timeout=_DOCTOR_SECONDS
    )
    place.say(done.stdout)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise RuntimeError(f"ddpexp doctor ended with {done.returncode}: {(done.stderr or done.stdout)[-500:]}")
    levels = [line["level"] for line in lines]
    shown = ", ".join(f"{levels.count(level)} {level}" for level in ("good", "doubtful", "bad"))
    wrong = "; ".join(f"{line['check']}: {line['text']}" for line in lines if line["level"] != "good")
    report = Report([Row("ddpexp doctor", shown, note=wrong)])
    for line in lines:
        if line["check"] in ("gpu", "links", "all_reduce", "driver", "torch_gpu"):
            report.rows.append(Row(f"ddpexp doctor, {line['check']}", line["text"]))
    return report

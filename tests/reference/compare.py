"""How far two outcomes are apart, in parts of what is compared, and how far they may be."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from ddpexp.checkpoint.format import complete_checkpoints
from tests.reference.case import Case
from tests.reference.loop import Outcome


def tolerance(case: Case, name: str = "") -> float:
    """Return the largest error that rounding explains; see the comment beside each."""
    if case.numbers == "fp64":
        # 2**-53 a rounding, some thousand of them; the norm is recorded in float32.
        return 1e-6 if name.startswith("train/grad_norm") else 1e-12
    if case.numbers == "bf16":
        return 0.05  # 2**-9 a rounding of the weights themselves, each step
    if case.precision != "fp32":
        # 2**-9 (bf16) or 2**-12 (fp16) a rounding in the passes, which fall otherwise where a loss is divided in
        # another order.
        return 0.03 if case.precision == "bf16" else 0.01
    return 1e-5  # 2**-24 a rounding, some hundred of them


def outcome_of(run: Path, case: Case) -> Outcome:
    """Read what a command has left behind."""
    folder = complete_checkpoints(run / "checkpoints")[0]
    names = ["left", "right"] if case.two else ["model"]
    names += [f"{name}.ema" for name in names] if case.ema is not None else []
    outcome = Outcome({name: load_file(folder / f"{name}.safetensors") for name in names})
    for line in (run / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        records = outcome.train if "train/loss" in record else outcome.evals
        records[record["step"]] = record
    return outcome


def errors(found: Outcome, expected: Outcome, case: Case) -> dict[str, float]:
    """Return the error of everything that is compared, by its name; infinite for what is missing."""
    result = {}
    for file, tensors in expected.tensors.items():
        for name, tensor in tensors.items():
            if name == "second.weight" and case.weights == "tied" and name not in found.tensors[file]:
                continue  # the same tensor as first.weight, which is there
            result[f"{file}: {name}"] = _error(found.tensors[file].get(name), tensor)
        result |= {f"{file}: {name} is unknown": math.inf for name in found.tensors[file].keys() - tensors.keys()}
    for kind, there, wanted in (("train", found.train, expected.train), ("eval", found.evals, expected.evals)):
        for step, record in wanted.items():
            window = range((step - 1) // case.log_every * case.log_every, step) if kind == "train" else range(0)
            skipped = any(other in expected.skipped for other in window)
            for key in record:
                if _compared(key, case, skipped):
                    result[f"{key} at {step}"] = _error(_number(there.get(step, {}), key), _number(record, key))
        result |= {f"{kind} at {step} is unknown": math.inf for step in there.keys() - wanted.keys()}
    return result


def _compared(key: str, case: Case, skipped: bool) -> bool:
    if key == "train/grad_norm":
        return not case.by_hand and not skipped  # of a step that is left out, or of which of two, is not documented
    return True


def _number(record: dict[str, float | None], key: str) -> Tensor | None:
    if key not in record:
        return None
    value = record[key]  # JSON has no word for what is not a number but null
    return torch.tensor(math.nan if value is None else value, dtype=torch.float64)


def _error(found: Tensor | None, expected: Tensor | None) -> float:
    """Return the largest difference in parts of the largest value."""
    if found is None or expected is None or found.shape != expected.shape:
        return math.inf
    wide = torch.complex128 if expected.is_complex() else torch.float64
    difference = (found.to(wide) - expected.to(wide)).abs()
    if not expected.isfinite().all():
        return 0.0 if torch.equal(found.isfinite(), expected.isfinite()) else math.inf
    scale = max(float(expected.abs().max()), 1e-6) if expected.numel() else 1.0
    return float(difference.max() / scale) if not difference.isnan().any() else math.inf

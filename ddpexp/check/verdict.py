"""What the parts of `ddpexp check` show of a recipe: pure functions of their answers and records."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias

from ddpexp.check.job import Answer, Finding, Part
from ddpexp.config.schema import Experiment

_TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 2e-2}  # relative, of sums in another order
Records: TypeAlias = Mapping[Part, Mapping[int, Mapping[str, float]]]
"""Of the training steps of each part, by step."""


def judge(
    parts: Mapping[Part, Answer],
    records: Records,
    experiment: Experiment,
) -> list[Finding]:
    """Return what the parts show. `records` hold the training steps of each part, by step."""
    one = parts["one"]
    assert isinstance(one, Mapping)
    findings = [Finding(**finding) for finding in one["findings"]]
    problems = {finding.check for finding in findings if finding.ok is False}
    if one["weights"] is None:
        findings = [finding for finding in findings if finding.ok is not None]
        if problems - {"steps", "sums", "forward"}:  # it ends for the same reason
            findings = [finding for finding in findings if finding.check != "steps"]
        return _unique(findings)
    evaluation = ", an evaluation" if experiment.trainer.eval_every else ""
    findings.append(Finding("steps", True, f"two steps{evaluation}, a checkpoint"))
    unrepeatable = problems & {"data", "forward"}
    if unrepeatable:
        return _unique(
            [
                *findings,
                Finding("resume", None, f"not checked: see {min(unrepeatable)}"),
                Finding("workers", None, f"not checked: see {min(unrepeatable)}"),
            ]
        )
    resume = _judge_resume("one", parts, records, experiment)
    if "calls" in problems:
        return _unique([*findings, resume, Finding("workers", None, "not checked: see calls")])
    workers = _judge_ranks(one, parts["two"], experiment) or _judge_steps(one, parts["two"], records, experiment)
    if not resume.ok and workers.check == "workers":
        workers = Finding("workers", None, "not checked: see resume")
    elif resume.ok and workers.ok and not experiment.strategy.missing_in_checkpoints():
        resume = _both(resume, _judge_resume("two", parts, records, experiment))
    return _unique([*findings, resume, workers])


def _both(one: Finding, two: Finding) -> Finding:
    """Return what is known of a resume at one and at two workers."""
    if not two.ok:
        return replace(two, text=f"at two workers {two.text}")
    return replace(one, text=f"at one and at two workers {one.text}")


def _judge_resume(
    name: Literal["one", "two"],
    parts: Mapping[Part, Answer],
    records: Records,
    experiment: Experiment,
) -> Finding:
    """Compare the step after a resume with the same step of the run that was not interrupted.

    Both have this number of workers.
    """
    again: Part = "one_resumed" if name == "one" else "two_resumed"
    one, resumed = parts[name], parts[again]
    assert isinstance(one, Mapping)
    if not isinstance(resumed, Mapping) or resumed["weights"] is None:
        found = [finding["text"] for finding in resumed["findings"]] if isinstance(resumed, Mapping) else [resumed]
        return Finding("resume", False, f"the run cannot be resumed from its first checkpoint: {found[0]}")
    changed: Mapping[str, str] = one["changed"]
    places = ", ".join(f"{name} ({place})" for name, place in list(changed.items())[:4])
    if resumed["weights"] == one["weights"]:
        note = f"; not in checkpoints, and without effect on this step: {places}" if changed else ""
        return Finding("resume", True, f"the step after a resume gives the same weights, to the bit{note}")
    if one["device"] == "cuda" and not experiment.trainer.deterministic:
        losses = [records[part].get(2, {}).get("train/loss", math.nan) for part in (name, again)]
        if _agree(losses, _TOLERANCE[experiment.trainer.computes_in]):
            text = "the step after a resume is the same within rounding; trainer.deterministic=true compares every bit"
            return Finding("resume", True, text)
    where = (
        f"this changed during the steps, and is not in checkpoints: {places}. Keep it in a buffer "
        "of the model (register_buffer), or in get_extra_state of a module"
        if changed
        else "no attribute of model, task or data has changed, so look at global variables of libraries and at the "
        "state of the optimizer"
    )
    return Finding("resume", False, f"the second step gives other weights after a resume than without one: {where}.")


def _judge_ranks(one: Mapping[str, Any], two: Answer, experiment: Experiment) -> Finding | None:
    """Return the problem of two workers that fail, or that compute different losses for the same batch."""
    if not isinstance(two, Mapping):
        return Finding("two", False if two.startswith("rank ") else None, f"at two workers: {two}")
    for where, what, losses in (
        ("", one["step"], two["losses"]),
        (" in evaluation", one["eval_step"], two["eval_losses"]),
    ):
        if not _agree(losses, _TOLERANCE[experiment.trainer.computes_in]):
            return Finding(
                "rank",
                False,
                f"{what} depends on the rank{where}, or its model or data do: for the same batch, weights and random "
                f"seed the loss is {losses[0]:.6g} on rank 0 and {losses[1]:.6g} on rank 1.",
            )
    return None


def _judge_steps(
    one: Mapping[str, Any], two: Answer,
    records: Records, experiment: Experiment,
) -> Finding:  # fmt: skip
    """Compare the steps of one and of two workers."""
    assert isinstance(two, Mapping)
    trainer = experiment.trainer
    if trainer.reduction == "exact":
        if two["weights"] == one["weights"]:
            return Finding("workers", True, "one and two workers give the same weights, to the bit")
        return Finding("workers", False, "one and two workers give different weights with trainer.reduction=exact")
    # The sums of a train_step may be those of its last micro-batch.
    norms = [name for name in records["one"].get(1, {}) if name.startswith("train/grad_norm")]
    for name in norms if one["is_manual"] else ("train/loss", *norms):
        values = [records[part].get(1, {}).get(name, math.nan) for part in ("one", "two")]
        if not _agree(values, _TOLERANCE[trainer.precision]):
            cause = (
                "draws random numbers from Python or numpy, which differ from worker to worker. Draw them from torch, "
                "whose generators are seeded for each micro-batch."
                if one["draws_on_host"]
                else "depends on how the batch is divided."
            )
            return Finding(
                "workers",
                False,
                f"the same step has {name} {values[0]:.6g} at one worker and {values[1]:.6g} at two: {one['step']} "
                f"{cause}",
            )
    return Finding("workers", True, "the same step at one and at two workers, within rounding")


def _agree(values: Sequence[float], tolerance: float) -> bool:
    one, other = values
    return math.isclose(one, other, rel_tol=tolerance, abs_tol=1e-7) or (math.isnan(one) and math.isnan(other))


def _unique(findings: Sequence[Finding]) -> list[Finding]:
    return list(dict.fromkeys(findings))

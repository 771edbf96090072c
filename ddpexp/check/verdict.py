"""What the parts of `ddpexp check` show of a recipe: pure functions of their answers and records."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from ddpexp.check.job import Answer, Finding, Part
from ddpexp.config.schema import Experiment

_TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 2e-2}  # relative
Records: TypeAlias = Mapping[Part, Mapping[int, Mapping[str, float]]]
"""Of the training steps of each part, by step."""


def judge(answers: Mapping[Part, Answer], records: Records, experiment: Experiment) -> list[Finding]:
    """Return what the parts show."""
    one = answers["one"]
    assert isinstance(one, Mapping)
    findings = [Finding(**finding) for finding in one["findings"]]
    problems = {finding.check for finding in findings if finding.ok is False}
    if one["weights"] is None:
        findings = [finding for finding in findings if finding.ok is not None]
        if problems - {"steps", "sums", "forward"}:  # it ends for the same reason
            findings = [finding for finding in findings if finding.check != "steps"]
    else:
        evaluation = ", an evaluation" if experiment.trainer.eval_every else ""
        findings.append(Finding("steps", True, f"two steps{evaluation}, a checkpoint"))
        findings += _Evidence(one, answers, records, experiment).findings(problems)
    return list(dict.fromkeys(findings))


@dataclass(frozen=True)
class _Evidence:
    """The parts of an experiment whose two steps have succeeded at one worker."""

    one: Mapping[str, Any]  # its answer
    answers: Mapping[Part, Answer]
    records: Records
    experiment: Experiment

    def findings(self, problems: Collection[str]) -> list[Finding]:
        """Return what is found beside the problems of the trials, some of which explain all else."""
        unrepeatable = next((check for check in ("data", "forward") if check in problems), None)
        if unrepeatable is not None:
            return [Finding(check, None, f"not checked: see {unrepeatable}") for check in ("resume", "workers")]
        resume = self._resume("one")
        if "calls" in problems:
            return [resume, Finding("workers", None, "not checked: see calls")]
        two = self.answers["two"]
        if isinstance(two, Mapping):
            dependent = Finding("workers", False, two["dependent"]) if two["dependent"] else None
            workers = dependent or self._ranks(two) or self._steps(two)
        else:
            workers = Finding("two", False if two.startswith("rank ") else None, f"at two workers: {two}")
        if not resume.ok and workers.check == "workers":
            workers = Finding("workers", None, "not checked: see resume")
        elif resume.ok and workers.ok and not self.experiment.strategy.missing_in_checkpoints():
            at_two = self._resume("two")
            resume = (
                replace(resume, text=f"at one and at two workers {resume.text}")
                if at_two.ok
                else replace(at_two, text=f"at two workers {at_two.text}")
            )
        return [resume, workers]

    def _resume(self, name: Literal["one", "two"]) -> Finding:
        """Compare the step after a resume with the same step of the run that was not interrupted.

        Both have this number of workers.
        """
        again: Part = "one_resumed" if name == "one" else "two_resumed"
        one, resumed = self.answers[name], self.answers[again]
        assert isinstance(one, Mapping)
        if not isinstance(resumed, Mapping) or resumed["weights"] is None:
            reason = resumed["findings"][0]["text"] if isinstance(resumed, Mapping) else resumed
            return Finding("resume", False, f"the run cannot be resumed from its first checkpoint: {reason}")
        changed: Mapping[str, str] = one["changed"]
        places = ", ".join(f"{attribute} ({place})" for attribute, place in list(changed.items())[:4])
        if resumed["weights"] == one["weights"]:
            note = f"; not in checkpoints, and without effect on this step: {places}" if changed else ""
            return Finding("resume", True, f"the step after a resume gives the same weights, to the bit{note}")
        if one["device"] == "cuda" and not self.experiment.trainer.deterministic:
            losses = [self._record(part, 2, "train/loss") for part in (name, again)]
            if self._agree(losses):
                text = (
                    "the step after a resume is the same within rounding; trainer.deterministic=true compares every bit"
                )
                return Finding("resume", True, text)
        where = (
            f"this changed during the steps, and is not in checkpoints: {places}. Keep it in a buffer "
            "of the model (register_buffer), or in get_extra_state of a module"
            if changed
            else "no attribute of model, task or data has changed, so look at global variables of libraries and at the "
            "state of the optimizer"
        )
        return Finding(
            "resume", False, f"the second step gives other weights after a resume than without one: {where}."
        )

    def _ranks(self, two: Mapping[str, Any]) -> Finding | None:
        """Return the problem of two workers that compute different losses for the same batch."""
        for where, what, losses in (
            ("", self.one["step"], two["losses"]),
            (" in evaluation", self.one["eval_step"], two["eval_losses"]),
        ):
            if not self._agree(losses):
                return Finding(
                    "rank",
                    False,
                    f"{what} depends on the rank{where}, or its model or data do: for the same batch, weights and "
                    f"random seed the loss is {losses[0]:.6g} on rank 0 and {losses[1]:.6g} on rank 1.",
                )
        return None

    def _steps(self, two: Mapping[str, Any]) -> Finding:
        """Compare the steps of one and of two workers."""
        one = self.one
        if self.experiment.trainer.reduction == "exact":
            if two["weights"] == one["weights"]:
                return Finding("workers", True, "one and two workers give the same weights, to the bit")
            return Finding("workers", False, "one and two workers give different weights with trainer.reduction=exact")
        # A train_step may return the sums of its last micro-batch alone.
        norms = [name for name in self.records["one"].get(1, {}) if name.startswith("train/grad_norm")]
        for name in norms if one["is_manual"] else ("train/loss", *norms):
            values = [self._record(part, 1, name) for part in ("one", "two")]
            if not self._agree(values):
                cause = (
                    "draws random numbers from Python or numpy, which differ from worker to worker. Draw them from "
                    "torch, whose generators are seeded for each micro-batch."
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

    def _record(self, part: Part, step: int, name: str) -> float:
        return self.records[part].get(step, {}).get(name, math.nan)

    def _agree(self, values: Sequence[float]) -> bool:
        """Return whether two values are equal within the rounding of sums in another order."""
        tolerance = _TOLERANCE[self.experiment.trainer.computes_in]
        one, other = values
        return math.isclose(one, other, rel_tol=tolerance, abs_tol=1e-7) or (math.isnan(one) and math.isnan(other))

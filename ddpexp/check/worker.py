"""The worker of `ddpexp check`: a few steps of an experiment, and trials of its recipe."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

import torch

from ddpexp.check import trials
from ddpexp.check.attributes import Attributes
from ddpexp.check.context import short_context
from ddpexp.check.global_loss_trials import wrong_global_loss
from ddpexp.check.job import Finding
from ddpexp.check.subject import Subject
from ddpexp.check.train_step_trials import means_in_train_step, never_trained, uneven_calls
from ddpexp.data.adapters import sized
from ddpexp.data.batches import EvalBatches
from ddpexp.data.streams import Stream
from ddpexp.distributed.world import World
from ddpexp.errors import CodeError, DdpexpError
from ddpexp.launch.workers.control import Control
from ddpexp.system import files
from ddpexp.system.oom import bound_memory
from ddpexp.system.text import first_few
from ddpexp.system.user_code import place_in_code
from ddpexp.task import HasCounts
from ddpexp.train import collectives, gpu_memory, worker
from ddpexp.train.build import RunContext
from ddpexp.train.process import run_rank
from ddpexp.train.task_checks import named
from ddpexp.train.task_step import function_of, global_loss_of

_NO_MEMORY = re.compile(r"DefaultCPUAllocator: (can't allocate memory|not enough memory): you tried to allocate (\d+)")


def main(request: str) -> int:
    """Check one part; `request` is JSON made by `ddpexp.check.job.Check`. Never returns in a worker."""
    return run_rank(lambda control: _check(json.loads(request), control))


def _check(request: Mapping[str, Any], control: Control) -> None:
    """Build a run and do what this part is about; rank zero writes the answer. Ranks: all; communicates."""
    context = short_context(request, control)
    if context.layout.device == "cpu" and request["part"] == "one":
        bound_memory()
    built = worker.build(context)
    worker.restore(context, built)
    examined = _Examined(context, built)
    try:
        parts = {"one": examined.try_recipe, "two": examined.compare_ranks}
        answer = parts.get(request["part"], examined.train)()
    finally:
        built.loop.logger.close()
    if context.world.is_rank_zero:
        files.answer(context.run.path / "answer.json", answer)
    context.world.barrier()


class _Examined:
    """A run that is ready to be trained, and what is asked of it."""

    def __init__(self, context: RunContext, built: worker.Built) -> None:
        self._context, self._built = context, built
        loop = built.loop
        self._subject = Subject(
            loop.run.task,
            loop.run.strategy.eval_model,
            loop.run.strategy.modules,
            loop.run.precision,
            context.world.device,
            World.alone(context.world.device),  # a trial is this rank's alone
        )
        self._findings: list[Finding] = []

    def try_recipe(self) -> dict[str, Any]:
        """Try the recipe, then train. Ranks: the only one."""
        loop, subject = self._built.loop, self._subject
        evals = loop.evals if loop.run.options.eval_every else {}
        before = self._attributes()
        self._try("data", lambda: trials.different_samples(loop.run.train, evals), "the same samples at the same index")
        steps = _or_empty(lambda: list(replace(loop.run.train, num_workers=0).steps(0, 2)))
        first_batches = [batches[0] for batches in steps]
        eval_batches = _or_empty(lambda: [batches.first() for batches in list(evals.values())[:1]])
        if first_batches:
            self._try_batches(steps, [*eval_batches, *first_batches][0], evals)
        draws = _or_empty(lambda: [trials.draws_on_host(subject, first_batches[0])])
        answer = self.train()
        return {
            **answer,
            "changed": before.changed(self._attributes()),
            "step": named(subject.function),
            "eval_step": named(function_of(subject.task)) if subject.has_step else "",
            "is_manual": subject.is_manual,
            "draws_on_host": draws == [True],
        }

    def _try_batches(self, steps: list[list[Any]], eval_batch: Any, evals: Mapping[str, EvalBatches]) -> None:
        """Try the recipe with the micro-batches of two steps, and with a batch of an evaluation."""
        subject, first_batches = self._subject, [batches[0] for batches in steps]
        first = first_batches[0]
        self._try("forward", lambda: trials.different_losses(subject, first), "the same loss for the same batch")
        is_repeatable = "forward" not in self._problems
        if subject.is_manual:
            batches = [batch for step in steps for batch in step]
            self._try("calls", lambda: uneven_calls(subject, batches), "workers meet in the same calls for every batch")
        if is_repeatable:
            self._try_sums(first, eval_batch)
        if isinstance(subject.task, HasCounts) and subject.has_step:
            self._try("counts", lambda: trials.wrong_counts(subject, first_batches), "those of the losses of step")
        self._try("metrics", lambda: self._names(first_batches, evals), "the same metrics for every batch")
        self._try("parameters", lambda: self._unused(first_batches), "every parameter gets a gradient")
        if is_repeatable and not self._problems & {"sums", "metrics"}:
            self._try("last", lambda: self._last(first, evals), "the last batches are as the first ones")

    @property
    def _problems(self) -> set[str]:
        return {finding.check for finding in self._findings if finding.ok is False}

    def compare_ranks(self) -> dict[str, Any]:
        """Compare what the ranks compute for the same batch, then train. Ranks: all; communicates."""
        loop = self._built.loop
        world = self._context.world
        before = self._attributes()
        losses = torch.zeros(2, world.world_size, dtype=torch.float64, device=world.device)
        size, there = loop.run.train.plan.micro_batch_size, loop.run.train.on_device
        for row, trains in enumerate((True, False) if self._subject.has_step else (True,)):
            try:
                batch = EvalBatches(sized(loop.run.train.data, size), size, 0, 1, world.device, on_device=there).first()
                losses[row, world.rank] = trials.loss_of(self._subject, batch, trains)
            except Exception:  # training reports it
                losses[row, world.rank] = torch.nan
        world.sum(losses)
        trained, evaluated = losses.tolist()
        answer = self.train()
        changed = before.changed(self._attributes())
        return {**answer, "losses": trained, "eval_losses": evaluated, "changed": changed}

    def train(self) -> dict[str, Any]:
        """Train to the last step; return the hash of the weights and what was found. Ranks: all; communicates."""
        loop, context = self._built.loop, self._context
        digest = None
        try:
            with (
                collectives.explained(),
                gpu_memory.explained(lambda: worker.situation(context.experiment, context.world, context.control)),
            ):
                outcome = loop.fit()
            self._built.checkpointer.finish()
            digest = outcome.digest
        except Exception as error:
            if context.world.world_size > 1:
                raise
            self._findings.append(Finding("steps", False, self._explained(error)))
        return {
            "device": context.world.device.type,
            "weights": digest,
            "dependent": loop.dependent,
            "findings": [asdict(finding) for finding in self._findings],
        }

    def _try(self, check: str, trial: Callable[[], str | list[str] | None], fine: str) -> None:
        try:
            with torch.random.fork_rng([self._subject.device.index] if self._subject.device.type == "cuda" else []):
                problems = trial()
        except Exception as error:
            if self._is_memory(error):
                self._findings.append(Finding("memory", False, self._explained(error)))
            else:
                self._findings.append(Finding(check, None, f"not checked: {self._explained(error)}"))
            return
        found = [problems] if isinstance(problems, str) else problems or []
        self._findings += [Finding(check, False, text) for text in found] or [Finding(check, True, fine)]

    def _try_sums(self, first: Any, eval_batch: Any) -> None:
        """Try losses and metrics of a batch and of its parts."""
        subject = self._subject
        problems, fine = self._sums_of_train_step(first)
        if (task := global_loss_of(subject.task)) is None or subject.is_manual:
            self._try("sums", lambda: [*problems, *trials.wrong_sums(subject, eval_batch)], fine)
            return
        fine = "embed treats each sample alone, and the loss is a sum"
        self._try("sums", lambda: wrong_global_loss(subject, task, eval_batch), fine)

    def _sums_of_train_step(self, batch: Any) -> tuple[list[str], str]:
        """Return the problems of the losses that a train_step passes to backward, and a sentence on the result."""
        if not self._subject.is_manual:
            return [], "loss and metrics are sums over samples"
        found = _or_empty(lambda: [means_in_train_step(self._subject, batch)])
        problem, are_sums = found[0] if found else (None, False)
        losses = "losses of train_step are sums over samples" if are_sums else "losses of train_step are not checked"
        evals = ", and so are loss and metrics of an evaluation" if are_sums else "; those of an evaluation are sums"
        return [] if problem is None else [problem], losses + (evals if self._subject.has_step else "")

    def _names(self, steps: list[Any], evals: Mapping[str, EvalBatches]) -> str | None:
        if not self._subject.has_step:
            raise DdpexpError("the task has no step")
        if not self._subject.is_manual and (problem := trials.changing_names(self._subject, steps, "train")):
            return problem
        for name, batches in evals.items():
            if problem := trials.changing_names(self._subject, list(replace(batches, num_workers=0)), name):
                return problem
        return None

    def _unused(self, batches: list[Any]) -> str | None:
        strategy = self._context.experiment.strategy
        if self._subject.is_manual:
            names, place = never_trained(self._subject, batches, self._trained_by_optimizers())
            cause = "in any of the first steps"
        else:
            names, place = trials.unused_parameters(self._subject, batches[0])
            cause = "because the loss does not depend on " + ("it" if len(names) == 1 else "them")
        if not names or strategy.accepts_unused_parameters:
            return None
        return (
            f"{first_few(names)} {'gets' if len(names) == 1 else 'get'} no gradient, {cause}: {place}. Leave it out or "
            "set requires_grad_(False); if it is used in some steps only, type strategy.find_unused_parameters=true."
        )

    def _trained_by_optimizers(self) -> list[str]:
        """Return the names of the parameters that the optimizers have, with their models where there are several."""
        loop, modules = self._built.loop, self._subject.modules
        chosen = {id(p) for optimizer in loop.run.optimizers.values() for group in optimizer.param_groups
                  for p in group["params"]}  # fmt: skip
        return [
            f"{model}.{name}" if len(modules) > 1 else name
            for model, root in modules.items()
            for name, parameter in root.named_parameters()
            if id(parameter) in chosen
        ]

    def _last(self, first: Any, evals: Mapping[str, EvalBatches]) -> str | None:
        """Return the problem of the last batches; None too where the task fails for any, which training reports."""
        trials.loss_of(self._subject, first)
        try:
            return trials.last_batches(self._subject, self._built.loop.run.train, evals)
        except Exception as error:
            return f"the last batch of an epoch, or of an evaluation, fails: {self._explained(error)}"

    def _attributes(self) -> Attributes:
        loop, subject = self._built.loop, self._subject
        sets = [loop.run.train.data, *(batches.data for batches in loop.evals.values())]
        wholes = (data if isinstance(data, Stream) else data.origin([0])[0].returned for data in sets)
        return Attributes([*subject.modules.values(), subject.task, *wholes])

    def _is_memory(self, error: Exception) -> bool:
        return isinstance(error, MemoryError | torch.OutOfMemoryError) or bool(_NO_MEMORY.search(str(error)))

    def _explained(self, error: Exception) -> str:
        """Return an error as a sentence, with the line of the recipe."""
        if isinstance(error, CodeError):
            return f"{error.kind}: {error.message}{f' ({error.place})' if error.place else ''}"
        if isinstance(error, torch.OutOfMemoryError | DdpexpError):
            return f"{error}"
        line = place_in_code(error)
        place = f" ({line})" if line else ""
        if self._is_memory(error):
            now = worker.situation(self._context.experiment, self._context.world, self._context.control)
            wanted = _NO_MEMORY.search(str(error))
            size = f" of {int(wanted[2]) / 2**30:,.1f} GiB" if wanted else ""
            cure = "; ".join(gpu_memory.smaller_batch(replace(now, phase="train"))) or "use a smaller model"
            return (
                f"a micro-batch of {now.plan.micro_batch_size} samples does not fit into the memory of this machine: a "
                f"tensor{size} could not be allocated{place}. What helps: {cure}."
            )
        return f"{type(error).__name__}: {error}{place}"


def _or_empty(function: Callable[[], list[Any]]) -> list[Any]:
    try:
        return function()
    except Exception:  # training reports it
        return []

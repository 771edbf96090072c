"""The worker of `ddpexp check`: a few steps of an experiment, and trials of its recipe."""

from __future__ import annotations

import json
import re
import resource
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from ddpexp.config.parse import load
from ddpexp.data.batches import EvalBatches
from ddpexp.data.samples import origin
from ddpexp.data.streams import sized
from ddpexp.errors import CodeError, DdpexpError
from ddpexp.launch import Layout
from ddpexp.launch.workers.control import Control
from ddpexp.run.check import Finding
from ddpexp.run.directory import RunDir
from ddpexp.strategy.ddp_options import DDPOptions
from ddpexp.system import files
from ddpexp.system.oom import available_bytes
from ddpexp.system.text import first_few
from ddpexp.train import gpu_memory, trials, worker
from ddpexp.train.attributes import Attributes
from ddpexp.train.build import RunContext
from ddpexp.train.join import join_world
from ddpexp.train.process import open_log, run_rank
from ddpexp.train.task_checks import named
from ddpexp.train.trials import Subject, place_in_code

_NO_MEMORY = re.compile(r"DefaultCPUAllocator: (can't allocate memory|not enough memory): you tried to allocate (\d+)")


def main(request: str) -> int:
    """Check one part; `request` is JSON made by `ddpexp.run.check.Check`. Never returns in a worker."""
    return run_rank(lambda control: _check(json.loads(request), control))


def _check(request: Mapping[str, Any], control: Control) -> None:
    """Build a run and do what this part is about; rank zero writes the answer. Ranks: all; communicates."""
    experiment, layout = load(request["config"]), Layout(**request["layout"])
    control.set_phase("join")
    world = join_world(experiment, layout, control)
    log = open_log(world, control, None)
    run = RunDir(Path(request["run"]))
    if layout.device == "cpu" and request["part"] == "one":
        _limit_memory()
    context = RunContext(run, experiment, layout, request["data"], None, world, control, log)
    built = worker.build(context)
    worker.restore(context, built)
    examined = _Examined(context, built)
    try:
        answer = {"one": examined.alone, "resumed": examined.trained, "two": examined.together}[request["part"]]()
    finally:
        built.loop.logger.close()
    if world.is_rank_zero:
        files.answer(run.path / "answer.json", answer)
    world.barrier()


class _Examined:
    """A run that is ready to be trained, and what is asked of it."""

    def __init__(self, context: RunContext, built: worker.Built) -> None:
        self._context, self._built = context, built
        loop = built.loop
        self._subject = Subject(
            loop.task,
            loop.strategy.eval_model,
            loop.strategy.modules,
            loop.precision,
            context.world.device,
            context.world,
        )
        self._findings: list[Finding] = []
        self._failed: set[str] = set()

    def alone(self) -> dict[str, Any]:
        """Try the recipe, then train. Ranks: the only one."""
        loop, subject = self._built.loop, self._subject
        evals = loop.evals
        before = self._attributes()
        self._try("data", lambda: trials.different_samples(loop.train, evals), "the same samples at the same index")
        steps = [batches[0] for batches in _read(lambda: list(replace(loop.train, num_workers=0).steps(0, 2)))]
        looked = next(iter(_read(lambda: [next(iter(evals.values())).first()] if evals else [])), None)
        batch = looked if looked is not None else steps[0] if steps else None
        if steps and batch is not None:
            self._try("forward", lambda: trials.different_losses(subject, steps[0]), "the same loss for the same batch")
            problems, fine = self._sums_of_train_step(steps[0])
            self._try("sums", lambda: [*problems, *trials.wrong_sums(subject, batch)], fine)
            self._try("metrics", lambda: self._names(steps, evals), "the same metrics for every batch")
            self._try("parameters", lambda: self._unused(steps[0]), "every parameter gets a gradient")
        draws = _read(lambda: [trials.draws_on_host(subject, steps[0])])
        answer = self.trained()
        return {
            **answer,
            "changed": before.changed(self._attributes()),
            "step": named(subject.function),
            "eval_step": named(subject.task.step),
            "is_manual": subject.is_manual,
            "draws_on_host": draws == [True],
        }

    def together(self) -> dict[str, Any]:
        """Compare what the ranks compute for the same batch, then train. Ranks: all; communicates."""
        loop, world = self._built.loop, self._context.world
        losses = torch.zeros(2, world.world_size, dtype=torch.float64, device=world.device)
        size, there = loop.train.plan.micro_batch_size, loop.train.on_device
        for row, trains in enumerate((True, False)):
            try:
                batch = EvalBatches(sized(loop.train.data, size), size, 0, 1, world.device, on_device=there).first()
                losses[row, world.rank] = trials.loss_of(self._subject, batch, trains)
            except Exception:  # training reports it
                losses[row, world.rank] = torch.nan
        world.sum(losses)
        trained, evaluated = losses.tolist()
        return {**self.trained(), "losses": trained, "eval_losses": evaluated}

    def trained(self) -> dict[str, Any]:
        """Train to the last step; return the hash of the weights and what was found. Ranks: all; communicates."""
        loop, context = self._built.loop, self._context
        digest = None
        try:
            with gpu_memory.explained(lambda: worker.situation(context.experiment, context.world, context.control)):
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

    def _sums_of_train_step(self, batch: Any) -> tuple[list[str], str]:
        """Return the problem of what a train_step gives update.backward, and what is known if there is none."""
        if not self._subject.is_manual:
            return [], "loss and metrics are sums over samples"
        found = _read(lambda: [trials.means_in_train_step(self._subject, batch)])
        problem, are_sums = found[0] if found else (None, False)
        known = "loss and metrics of an evaluation are sums over samples"
        train = ", and so are the losses of train_step" if are_sums else "; not checked: the losses of train_step"
        return [] if problem is None else [problem], known + train

    def _names(self, steps: list[Any], evals: Mapping[str, EvalBatches]) -> str | None:
        if not self._subject.is_manual and (problem := trials.changing_names(self._subject, steps, "train")):
            return problem
        for name, batches in evals.items():
            if problem := trials.changing_names(self._subject, list(replace(batches, num_workers=0)), name):
                return problem
        return None

    def _unused(self, batch: Any) -> str | None:
        names, place = trials.unused_parameters(self._subject, batch)
        strategy = self._context.experiment.strategy
        if not names or (isinstance(strategy, DDPOptions) and strategy.find_unused_parameters):
            return None
        return (
            f"{first_few(names)} {'gets' if len(names) == 1 else 'get'} no gradient, because the loss does not depend "
            f"on {'it' if len(names) == 1 else 'them'}: {place}. Leave it out or set requires_grad_(False); if it is "
            "used in some steps only, type strategy.find_unused_parameters=true."
        )

    def _attributes(self) -> Attributes:
        loop, subject = self._built.loop, self._subject
        sets = [loop.train.data, *(batches.data for batches in loop.evals.values())]
        return Attributes([*subject.modules.values(), subject.task, *(origin(data, [0])[0] for data in sets)])

    def _is_memory(self, error: Exception) -> bool:
        return isinstance(error, MemoryError | torch.OutOfMemoryError) or bool(_NO_MEMORY.search(str(error)))

    def _explained(self, error: Exception) -> str:
        """Return an error as a sentence, with the line of the recipe."""
        if isinstance(error, CodeError):
            return f"{error.kind}: {error.message}"
        if isinstance(error, torch.OutOfMemoryError | DdpexpError):
            return f"{error}"
        place = place_in_code(error)
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


def _read(function: Callable[[], list[Any]]) -> list[Any]:
    try:
        return function()
    except Exception:  # training reports it
        return []


def _limit_memory() -> None:
    """Let an allocation that this machine has no memory for fail, instead of waking the kernel's OOM killer."""
    with open("/proc/self/status") as file:
        used = next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmData"))
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    limit = used + available_bytes()
    if hard == resource.RLIM_INFINITY or limit < hard:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))

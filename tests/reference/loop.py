"""The reference: a plain loop over one process's memory, written from the documentation alone.

It shares with the package the order of samples (`ddpexp.data.order`) and the seed of a micro-batch
(`ddpexp.distributed.rng`), which are documented as pure functions, and the user's code in `recipe/parts.py`. Everything
else is written a second time, in the plainest way: a worker is a number here, gradients are added up in double
precision, and no line is shared with the loop of the package.

Three things the documentation leaves open, and the command was asked: steps that remain at the end are recorded
although `trainer.log_every` does not divide them; a second pass over a step's micro-batches has random numbers of its
own; the moving average starts from the weights, and the buffers beside it are those of the model.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ddpexp.data.datasets import Arrays
from ddpexp.data.order import Permutation
from ddpexp.distributed import rng
from tests.reference.case import GLOBAL_BATCH_SIZE, SEED, STEPS, Case
from tests.reference.recipe import parts

CPU = torch.device("cpu")

Mistake = Literal[
    "mean of means", "one order", "no rest", "late schedule", "each worker clips", "other buffers",
    "skip moves buffers",
    "skip moves momentum", "skip moves the average", "no autocast", "one dropout mask", "average of nothing",
    "gradients stay",
    "first loss alone", "rounded weight",
]  # fmt: skip
"""What a loop gets wrong easily: the proof that the comparison would see it."""


@dataclass
class Outcome:
    """What a training leaves behind: tensors by file and name, and what was recorded."""

    tensors: dict[str, dict[str, Tensor]]
    train: dict[int, dict[str, float | None]] = field(default_factory=dict)
    evals: dict[int, dict[str, float | None]] = field(default_factory=dict)
    skipped: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Loss:
    """One forward pass's loss: its sum, its count, and the sums of the metrics beside it."""

    total: Tensor
    count: int | Tensor
    size: Tensor
    half: int
    samples: int


Forward = Callable[[parts.Batch], list[Loss]]
"""All losses of a micro-batch."""


def train(case: Case, mistake: Mistake | None = None, shaken: int | None = None) -> Outcome:
    """Train as the documentation says.

    `shaken` is the seed of noise on the first weights, of a sixteenth of what bf16 and fp16 round by: how far that
    leads is how much of a difference rounding explains, where an optimizer makes a large step of a small gradient's
    sign.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads that wait for one another take a hundred times as long on a busy machine
    try:
        with torch.sparse.check_sparse_tensor_invariants(False):  # type: ignore[no-untyped-call]  # said, or torch warns
            training = _Training(case, mistake)
            if shaken is not None:
                training.shake(torch.Generator().manual_seed(shaken))
            return training.run()
    finally:
        torch.set_num_threads(threads)


class _Training:
    def __init__(self, case: Case, mistake: Mistake | None) -> None:
        self.case, self.mistake = case, mistake
        splits = parts.load(case.num_train, case.num_eval, case.broken)
        self.data: Arrays = splits.train
        self.held_out: Arrays = splits.evals["eval"]
        built = parts.build(case.middle, case.weights, case.embedding, case.numbers, case.two)
        self.nets: dict[str, parts.Net] = built if case.two else {"model": built}
        self.optimizers = self.made_optimizers()
        self.rates = {
            name: [group["lr"] for group in optimizer.param_groups] for name, optimizer in self.optimizers.items()
        }
        # The average starts from the weights, in float32 at least.
        self.averages = {
            name: {key: _wide(value.detach()) for key, value in net.named_parameters()}
            for name, net in self.nets.items()
        }
        self.scale = 65536.0 if case.precision == "fp16" else 1.0
        self.losses: list[Loss] = []  # of this step: those that are recorded
        self.norms: list[float] = []
        self.left: dict[
            Tensor, Tensor
        ] = {}  # gradients that no optimizer has stepped with: of no use but for a mistake

    @torch.no_grad()
    def shake(self, generator: torch.Generator) -> None:
        """Move every weight by a share of what the run's format rounds by."""
        size = {"bf16": 2.0**-9, "fp16": 2.0**-12}[self.case.precision] / 16
        for net in self.nets.values():
            for parameter in net.parameters():
                parameter.mul_(1 + size * torch.randn(parameter.shape, generator=generator))

    def made_optimizers(self) -> dict[str, torch.optim.Optimizer]:
        kinds: dict[str, Callable[[Any], torch.optim.Optimizer]] = {  # as in recipe/conf/optimizer
            "plain_sgd": lambda p: torch.optim.SGD(p, lr=0.2),
            "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.8, nesterov=True, weight_decay=0.01),
            "adam": lambda p: torch.optim.Adam(p, lr=0.02, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.01),
            "adam_decoupled": lambda p: torch.optim.AdamW(p, lr=0.02, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.1),
            "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, alpha=0.9, eps=1e-3, momentum=0.5),
            "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, eps=1e-3),
        }
        make = kinds[self.case.optimizer]
        if self.case.task == "Groups":
            return parts.groups(self.nets["model"], make)
        return {name: make(net.parameters()) for name, net in self.nets.items()}

    def run(self) -> Outcome:
        outcome = Outcome({})
        window: list[Loss] = []
        for step in range(STEPS):
            before = _buffers(self.nets)
            self.losses, self.norms = [], []
            self.set_rates(step)
            finite = self.step(step)
            if not finite:
                outcome.skipped.append(step)
                if self.mistake != "skip moves buffers":
                    _put(self.nets, before)
            if finite or self.mistake == "skip moves the average":
                self.move_averages()
            # A step that is left out is left out of the means, too; where nothing is left, they are not a number.
            window += self.losses if finite else []
            if (step + 1) % self.case.log_every == 0 or step + 1 == STEPS:
                record = _means("train", window)
                for name, optimizer in self.optimizers.items():
                    several = len(set(self.rates[name])) > 1  # rates of its groups, each recorded by its number
                    own = f"/{name}" if len(self.optimizers) > 1 else ""
                    for number, group in enumerate(optimizer.param_groups if several else optimizer.param_groups[:1]):
                        record[f"train/lr{own}" + (f"/{number}" if several else "")] = group["lr"]
                record["train/grad_norm"] = self.norms[-1]
                outcome.train[step + 1] = record
                window = []
            if (step + 1) % (self.case.num_train // GLOBAL_BATCH_SIZE) == 0 or step + 1 == STEPS:
                outcome.evals[step + 1] = self.evaluate()
        for name, net in self.nets.items():
            outcome.tensors[name] = {key: value.detach().clone() for key, value in net.state_dict().items()}
            if self.case.ema is not None:
                outcome.tensors[f"{name}.ema"] = self.averaged(name)
        return outcome

    # The samples
    # ---------------------------------------------------------------------------------------------------------

    def micro_batches(self, step: int) -> list[parts.Batch]:
        """Return the step's samples, cut as the workers will have them: worker w's are next to one another."""
        per_epoch = self.case.num_train // GLOBAL_BATCH_SIZE  # the rest of each epoch is left out
        epoch, within = divmod(step, per_epoch)
        order = Permutation(self.case.num_train, SEED, 0 if self.mistake == "one order" else epoch)
        positions = np.arange(within * GLOBAL_BATCH_SIZE, (within + 1) * GLOBAL_BATCH_SIZE)
        if self.mistake == "no rest":
            positions = (positions + epoch * (self.case.num_train % GLOBAL_BATCH_SIZE)) % self.case.num_train
        indices = torch.from_numpy(order(positions))
        return [self.data.gather(part, CPU) for part in torch.split(indices, self.case.micro_batch_size)]

    # One step
    # ------------------------------------------------------------------------------------------------------------

    def step(self, step: int) -> bool:
        """Take one step; return whether everything was finite."""
        batches = self.micro_batches(step)
        if self.case.task in ("Plain", "Groups"):
            return self.update(
                step, batches, lambda batch: [self.loss(self.nets["model"], batch)], list(self.optimizers)
            )
        if self.case.task == "Twice":
            return self.update(step, batches, self.two_losses, ["model"])
        if self.case.task == "Pair":
            return self.update(step, batches, lambda batch: [self.loss(net, batch) for net in self.nets.values()], [])
        left, right = self.nets["left"], self.nets["right"]
        first = self.update(step, batches, lambda batch: [self.loss(left, batch)], ["left"])
        recorded = self.losses

        def against(batch: parts.Batch) -> list[Loss]:
            scores = right(batch[1], batch[2]) - left(batch[1], batch[2])
            total, count = parts.entropy(scores, batch, self.case.counts)
            return [Loss(total, count, total.detach(), 0, 1)]

        second = self.update(step, batches, against, ["right"], begin=len(batches))
        self.losses = recorded
        return first and second

    def loss(self, net: parts.Net, batch: parts.Batch) -> Loss:
        scores = net(batch[1], batch[2])
        total, count = parts.entropy(scores, batch, self.case.counts)
        size, _ = parts.size(scores.detach(), batch, self.case.counts)
        in_half = len(batch[0]) if scores.dtype in (torch.float16, torch.bfloat16) else 0
        return Loss(total, count, size, in_half, len(batch[0]))

    def two_losses(self, batch: parts.Batch) -> list[Loss]:
        net = self.nets["model"]
        first = self.loss(net, batch)
        total, count = parts.size(net(batch[1], batch[2]), batch, self.case.counts)
        return [first, Loss(total, count, total.detach(), 0, 1)]

    def update(self, step: int, batches: list[parts.Batch], forward: Forward, names: list[str], begin: int = 0) -> bool:
        """Go through all micro-batches of all workers, and step these optimizers (none.

        Each by itself, one after another).

        The random numbers of a second pass are not those of the first: its micro-batches are counted from `begin`.
        """
        counts = [
            parts.kept(batch[0]).sum().item() if self.case.counts == "tensor" else len(batch[0]) for batch in batches
        ]
        start = _buffers(self.nets)
        moved: list[dict[str, Tensor]] = []
        sums: dict[Tensor, Tensor] = dict(self.left) if self.mistake == "gradients stay" else {}
        workers: list[dict[Tensor, Tensor]] = [{} for _ in range(self.case.workers)]
        passes = len(batches) // self.case.workers
        recorded = []
        for number, batch in enumerate(batches):
            worker = number // passes
            if self.case.reduction == "exact" or number % passes == 0:
                _put(self.nets, start)
            place = 0 if self.mistake == "one dropout mask" else begin + number
            torch.manual_seed(rng.seed_of(SEED, rng.MODEL, step, place))
            with self.autocast():
                losses = forward(batch)
            over = sum(counts) if self.mistake != "mean of means" else counts[number] * len(batches)
            of_all = losses[:1] if self.mistake == "first loss alone" else losses
            for loss in of_all:
                mean = loss.total * torch.tensor(1 / over) if self.mistake == "rounded weight" else loss.total / over
                torch.autograd.backward(mean * self.scale)
            self.collect(sums, workers[worker])
            recorded.append(losses[0])
            moved.append(_buffers(self.nets))
        self.move_buffers(start, moved, passes)
        self.losses = [replace(loss, total=loss.total.detach()) for loss in recorded]
        if self.mistake == "each worker clips":
            self.clip_each(workers, sums)
        finite = all(bool(torch.isfinite(_values(gradient)).all()) for gradient in sums.values())
        if self.case.precision == "fp16" and not finite:
            self.scale /= 2
        stepped = set()
        for some in [names] if names else [[name] for name in self.optimizers]:
            stepped |= self.apply(some, sums, finite)
        self.left = {parameter: gradient for parameter, gradient in sums.items() if parameter not in stepped}
        return finite

    def collect(self, *into: dict[Tensor, Tensor]) -> None:
        """Add a micro-batch's gradients to these sums, in double precision."""
        for net in self.nets.values():
            for parameter in net.parameters():
                if parameter.grad is None:
                    continue
                gradient = parameter.grad.to(torch.complex128 if parameter.is_complex() else torch.float64) / self.scale
                for sums in into:
                    sums[parameter] = sums[parameter] + gradient if parameter in sums else gradient
                parameter.grad = None

    def move_buffers(self, start: dict[str, Tensor], moved: list[dict[str, Tensor]], passes: int) -> None:
        """Give the buffers what they have after the pass.

        fast: worker zero's, who has gone through its own micro-batches. exact: each has moved by the mean of what every
        micro-batch would have added.
        """
        if self.case.reduction == "fast" or self.mistake == "other buffers":
            _put(self.nets, moved[-1] if self.mistake == "other buffers" else moved[passes - 1])
            return
        means = {
            name: value.double() + torch.stack([other[name].double() - value.double() for other in moved]).mean(0)
            for name, value in start.items()
        }
        _put(self.nets, {name: value.to(start[name].dtype) for name, value in means.items()})

    def apply(self, names: list[str], sums: dict[Tensor, Tensor], finite: bool) -> set[Tensor]:
        """Clip what these optimizers have to the norm of all of it, and step them; not with what is not finite.

        Return their parameters.
        """
        optimizers = [self.optimizers[name] for name in names]
        parameters = [
            parameter for optimizer in optimizers for group in optimizer.param_groups for parameter in group["params"]
        ]
        gradients = {parameter: sums[parameter] for parameter in parameters if parameter in sums}
        norm = math.sqrt(sum(float(_values(gradient).abs().square().sum()) for gradient in gradients.values()))
        self.norms.append(norm)
        if not finite and self.mistake != "skip moves momentum":
            return set(parameters)
        clipped = self.case.clip is not None and self.mistake != "each worker clips"
        factor = min(1.0, self.case.clip / (norm + 1e-6)) if clipped and self.case.clip is not None else 1.0
        for parameter, gradient in gradients.items():
            gradient = torch.zeros_like(gradient) if not finite else gradient * factor
            if gradient.is_sparse:
                gradient = gradient.coalesce()
            parameter.grad = gradient.to(parameter.dtype)
        for optimizer in optimizers:
            optimizer.step()
        for parameter in parameters:
            parameter.grad = None
        return set(parameters)

    def clip_each(self, workers: list[dict[Tensor, Tensor]], sums: dict[Tensor, Tensor]) -> None:
        """Make a mistake: each worker clips what it has, before the sum."""
        assert self.case.clip is not None
        for parameter in sums:
            sums[parameter] = torch.zeros_like(sums[parameter])
        for gradients in workers:
            norm = math.sqrt(sum(float(_values(gradient).abs().square().sum()) for gradient in gradients.values()))
            factor = min(1.0, self.case.clip / (norm * len(workers) + 1e-6))
            for parameter, gradient in gradients.items():
                sums[parameter] = sums[parameter] + gradient * factor

    # What goes around it
    # -------------------------------------------------------------------------------------------------

    def set_rates(self, step: int) -> None:
        factor = factor_of(self.case.schedule, min(step + 1, STEPS - 1) if self.mistake == "late schedule" else step)
        for name, optimizer in self.optimizers.items():
            for group, rate in zip(optimizer.param_groups, self.rates[name], strict=True):
                group["lr"] = rate * factor

    def autocast(self) -> contextlib.AbstractContextManager[None]:
        kinds = {"bf16": torch.bfloat16, "fp16": torch.float16}
        if self.case.precision == "fp32" or self.mistake == "no autocast":
            return contextlib.nullcontext()
        return torch.autocast("cpu", dtype=kinds[self.case.precision])

    def move_averages(self) -> None:
        if self.case.ema is None or self.mistake == "average of nothing":
            return
        for name, net in self.nets.items():
            for key, value in net.named_parameters():
                average = self.averages[name][key]
                average.add_((_wide(value.detach()) - average) * (1 - self.case.ema))

    def averaged(self, name: str) -> dict[str, Tensor]:
        """Return the averaged weights, and the buffers as they are."""
        net = self.nets[name]
        found = dict(net.state_dict()) | self.averages[name]
        if self.case.weights == "tied":
            found["second.weight"] = found["first.weight"]
        return {key: value.detach().clone() for key, value in found.items()}

    def evaluate(self) -> dict[str, float | None]:
        """Evaluate the average of the weights where there is one, else the weights."""
        net = self.nets["left" if self.case.two else "model"]
        before = _copy(self.nets)
        if self.case.ema is not None:
            net.load_state_dict(self.averaged("left" if self.case.two else "model"))
        net.eval()
        batch = self.held_out.gather(torch.arange(self.case.num_eval), CPU)
        with torch.no_grad(), self.autocast():
            loss = self.loss(net, batch)
        net.train()
        _restore(self.nets, before)
        return _means("eval", [loss])


def factor_of(schedule: str, step: int) -> float:
    """Return what multiplies the learning rate at a step of `STEPS`.

    The comments in conf/scheduler with their values.
    """
    if schedule == "constant":
        return 1.0
    share = step / (STEPS - 1)
    if schedule == "cosine":  # 5 % of ten steps is no step to rise in
        return (1 + math.cos(math.pi * share)) / 2
    if share <= 0.3:
        return 0.04 + 0.96 * (1 - math.cos(math.pi * share / 0.3)) / 2
    return (1 + math.cos(math.pi * (share - 0.3) / 0.7)) / 2


def _means(prefix: str, losses: list[Loss]) -> dict[str, float | None]:
    if not losses:
        return {f"{prefix}/{name}": math.nan for name in ("loss", "size", "half")}
    count = sum(float(loss.count) for loss in losses)
    return {
        f"{prefix}/loss": sum(float(loss.total) for loss in losses) / count,
        f"{prefix}/size": sum(float(loss.size) for loss in losses) / count,
        f"{prefix}/half": sum(loss.half for loss in losses) / sum(loss.samples for loss in losses),
    }


def _values(gradient: Tensor) -> Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _wide(value: Tensor) -> Tensor:
    return value.to(torch.promote_types(value.dtype, torch.float32), copy=True)


def _copy(nets: Mapping[str, parts.Net]) -> dict[str, dict[str, Tensor]]:
    return {name: {key: value.clone() for key, value in net.state_dict().items()} for name, net in nets.items()}


def _restore(nets: Mapping[str, parts.Net], states: dict[str, dict[str, Tensor]]) -> None:
    for name, net in nets.items():
        net.load_state_dict(states[name])


def _named_buffers(nets: Mapping[str, parts.Net]) -> Iterator[tuple[str, Tensor]]:
    for name, net in nets.items():
        for key, value in net.named_buffers():
            yield f"{name}.{key}", value


def _buffers(nets: Mapping[str, parts.Net]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in _named_buffers(nets)}


def _put(nets: Mapping[str, parts.Net], buffers: dict[str, Tensor]) -> None:
    for name, value in _named_buffers(nets):
        value.copy_(buffers[name])

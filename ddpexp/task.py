"""The contract between a recipe and the run loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from types import TracebackType

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from ddpexp.distributed.world import World
    from ddpexp.loggers.base import Logger


@dataclass(frozen=True)
class MetricUpdate:
    """The arguments with which a batch updates a metric of torchmetrics; made by `metric_update`."""

    metric: Any  # a torchmetrics.Metric or MetricCollection
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]


def metric_update(metric: Any, /, *arguments: Any, **keywords: Any) -> MetricUpdate:
    """Return an entry of the metrics of an evaluation that stands for `metric.update(*arguments, **keywords)`.

    The metric itself is not changed: a copy of it gets the batches of all ranks, and the value that the copy computes
    at the end of the evaluation is recorded.

        metrics["auroc"] = ddpexp.metric_update(self.auroc, probabilities, labels)
    """
    return MetricUpdate(metric, arguments, keywords)


Pair = tuple["Tensor", "int | Tensor"]
Loss = tuple["Tensor", "int | Tensor"] | tuple["Tensor", "int | Tensor", "float | Tensor"]
"""The sum of a loss, its count, and its weight, by default 1."""
Sums = tuple["Tensor", "int | Tensor", Mapping[str, "Pair"]]
NamedSums = tuple[Mapping[str, Loss], Mapping[str, "Pair"]]
"""The same with several losses, by name."""
EvalSums = tuple["Tensor", "int | Tensor", Mapping[str, "Pair | Tensor | MetricUpdate"]]
NamedEvalSums = tuple[Mapping[str, Loss], Mapping[str, "Pair | Tensor | MetricUpdate"]]
"""What a step may return in evaluation: as `Sums` or `NamedSums`, with further metrics."""


@dataclass(frozen=True)
class Progress:
    """How far a run is, the same after a resume; in an evaluation, in the last step before it.

    With `trainer.compile` or `trainer.compile_step` every value is a tensor, a scalar on the device: a number that
    changes would be compiled into the model again and again.
    """

    step: int | Tensor  # the number of this step, from 0
    num_steps: int | Tensor  # of the whole run
    epoch: float | Tensor  # epochs done before this step
    fraction: float | Tensor  # of the run that is done before this step: 0 in the first step, below 1 in the last


class Task(Protocol):
    """What is trained: one forward pass returns the loss and the metrics, in training and in evaluation."""

    def step(self, model: Any, batch: Any) -> EvalSums | NamedEvalSums:
        """Return `(loss_sum, count, {name: (sum, count)})` over the batch, or `(losses, {name: (sum, count)})`.

        Sums, not means: the loop divides by the count over the global batch, so that uneven slices, padding and
        gradient accumulation give correct means. In training a `count` that is a number must be the same for every
        micro-batch of a step, on all ranks, and not 0. A count that depends on the data (tokens that are not padding)
        is a tensor, and costs one small reduction per step. If the tensors of a whole global batch count nothing, there
        is no gradient. The names of the metrics must be the same in every step.

        `losses` is for a loss that is a sum of several means, each with a count of its own: `{name: (sum, count)}`, or
        `{name: (sum, count, weight)}`. The loss is the sum of `weight * sum / count`, with sums and counts over the
        global batch, in evaluation over the whole set; each mean is recorded as `loss/NAME`, without its weight. Counts
        that are tensors must be known before the first backward pass: see `HasCounts`.

        In evaluation (`not model.training`) torch's random numbers are a function of the place of the batch in its set,
        the same in every evaluation, and the metrics may also hold other entries, for `finish` or torchmetrics:

        - a tensor of integers, of any shape: added up exactly, such as a confusion matrix;
        - `(sum, count)` with tensors of any shape: added up in the order of the batches;
        - `ddpexp.metric_update(metric, predictions, labels)`: a metric of torchmetrics; its computed value is recorded.

        Collectives make the loss depend on the number of workers: one other than a sum without gradients is refused
        where a rank has several micro-batches, and in evaluations. See `HasEmbed`.

        Called under autocast if `trainer.precision` requires it. A step that depends on how far the run is has a third
        argument, `progress`:

            def step(self, model, batch, progress):
                weight = min(1.0, 2 * progress.fraction)

        Shapes: every other tensor is a scalar. `model` is what the model section builds: a module, or a mapping of
        modules.
        """
        ...


@runtime_checkable
class HasFlops(Protocol):
    """A task that knows what a sample takes, for `train/mfu`; of others it is counted: see docs/times.md.

    flops_per_sample = 6 * 124e6 * 1024  # parameters times tokens
    """

    flops_per_sample: float
    """The operations of forward and backward. Units: FLOPs, of which a multiplication and an addition are two."""


@runtime_checkable
class HasFinish(Protocol):
    """A task with metrics of an evaluation that are not means: perplexity, F1, figures from a confusion matrix."""

    def finish(self, sums: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return `{name: number}`, to be recorded beside the means of an evaluation set.

        `sums` holds an entry for each name that `step` returned in evaluation, and `loss`, over the whole set and on
        the host: `(total, count)` for the loss and for every pair, an int64 tensor for integers, and for a metric of
        torchmetrics its computed value. Of several losses each is there as `loss/NAME`, and `loss` is their sum over a
        count of 1. A returned `loss` takes the place of the mean. Called for each set, before `on_eval`, and not for
        the records of training.

            def finish(self, sums):
                total, count = sums["loss"]
                return {"perplexity": math.exp(total / count)}

        Ranks: rank zero; the others get its result. Must not communicate.
        """
        ...


@runtime_checkable
class HasCounts(Protocol):
    """A task with several losses whose counts depend on the data, and follow from a batch without the model."""

    def counts(self, batch: Any) -> Mapping[str, Any]:
        """Return the counts that are tensors, by the names of their losses, as `step` returns them for the batch.

            def counts(self, batch):
                return {"boxes": batch["has_box"].sum()}

        They are added up over the global batch before the first forward pass of a step, in one small reduction. Without
        this method they are added up after the forward pass where a rank has one micro-batch; where it has several,
        the others pass through the model once more, without gradients.
        Ranks: all; must not communicate.
        """
        ...


@runtime_checkable
class HasEmbed(Protocol):
    """A task whose loss needs all samples of the global batch at once, as a contrastive loss: in place of `step`."""

    def embed(self, model: Any, batch: Any) -> Any:
        """Return what the loss needs of a batch: a tensor, or a tuple or a mapping of tensors.

        Called twice where a rank has several micro-batches, with the same random numbers; buffers change once.
        Shapes: a row for each sample. It may have a third argument, `progress`.
        """
        ...

    def loss(self, model: Any, embeddings: Any) -> Any:
        """Return what `step` returns, of the embeddings of the whole global batch.

            def embed(self, model, batch):
                first, second = batch
                return model(first), model(second)

            def loss(self, model, embeddings):
                first, second = embeddings
                scores = first @ second.T * model.scale.exp()
                labels = torch.arange(len(scores), device=scores.device)
                return cross_entropy(scores, labels, reduction="sum"), len(scores), {}

        `embeddings` has the form that `embed` returns, with the rows of all micro-batches in the order of the global
        batch. Parameters that it reads, such as a temperature, get their gradient once. It must not call the model. In
        an evaluation, the loss is that of batches of `trainer.global_batch_size` samples.
        Ranks: all, with the same result; must not communicate. It may have a third argument, `progress`.
        """
        ...


@runtime_checkable
class HasPredict(Protocol):
    """A task whose weights `ddpexp predict` can use."""

    def predict(self, model: Any, batch: Any) -> Any:
        """Return the predictions for a batch: a tensor or an array of numbers, or a mapping of names to such.

            def predict(self, model, batch):
                probabilities = model(batch[0]).softmax(1)
                return {"label": probabilities.argmax(1), "probability": probabilities}

        Called in evaluation mode, without gradients, under autocast if `trainer.precision` requires it.

        Shapes: a row for each sample of the batch, in their order; rows of the same shape in every batch.
        Ranks: any; must not communicate.
        """
        ...


@runtime_checkable
class HasReadInput(Protocol):
    """A task that says what sample an input of `ddpexp predict --input` and `Run.predict` is.

    Data of one's own needs it; for the kinds of data that ddpexp has, it takes the place of their own reading.
    """

    def read_input(self, value: Any) -> Any:
        """Return the sample of an input as the evaluation set has it, before `data.eval_transform` and `data.collate`.

        `value` is the path (a str) of a file behind `--input`, or what `Run.predict` and `Run.transform` get.

            def read_input(self, value):
                return torch.from_numpy(np.load(value)), -1

        Ranks: any; must not communicate.
        """
        ...


@runtime_checkable
class HasOptimizers(Protocol):
    """A task that assigns its parameters to optimizers itself: parameter groups, or several optimizers."""

    def optimizers(self, model: Any, make: Any) -> Mapping[str, Optimizer]:
        """Return named optimizers; `make(parameters)` builds one from the optimizer section.

        `make` takes what torch's optimizers take: parameters, or groups with settings of their own, such as
        `[{"params": model["head"].parameters(), "lr": 0.1}]`. The schedule multiplies the learning rate of each group.
        `model` is as built, not wrapped. Called once, before a checkpoint is restored.
        Ranks: all, with the same result.
        """
        ...


class OptimizerStep(Protocol):
    """An optimizer step in progress: what a strategy, or a task's own `train_step`, works with.

    A step consists of rounds. A round is one or several passes over the micro-batches, whose gradients add up and are
    summed over the workers in the last one, and one or several calls of `apply`, which use them.
    """

    @property
    def models(self) -> Any:
        """Return the module to train, or the mapping of modules, in training mode, as passed to `Task.step`.

        They may be wrapped: an attribute or method that the wrapper lacks is the module's own.
        """
        ...

    @property
    def step(self) -> int:
        """Return the number of this step, for what depends on it; a resumed run continues it. Units: steps, from 0."""
        ...

    @property
    def num_steps(self) -> int:
        """Return the number of steps of the whole run."""
        ...

    @property
    def world(self) -> World:
        """Return rank, device and collectives, for a decision that depends on the data of all workers.

        `update.world.sum(tensor)` sums in place over the workers; all must call it, equally often.
        """
        ...

    def micro_batch(self, last: bool) -> MicroBatch:
        """Return the next micro-batch, whose `with` block encloses its forward and backward passes.

        Inside, operations run in the precision of the run (autocast), and torch's random numbers are a function of
        seed, step, round and micro-batch. The workers sum their gradients at the end of the one with `last=True`, which
        is the last of a pass over the batches. Entered again, a micro-batch is a further pass with the random numbers
        of the first.

        Ranks: all, equally often; communicates at the end where `last` is true, and buffers in forward passes.
        """
        ...

    def backward(self, batches: Sequence[Any]) -> Sums:
        """Pass these micro-batches forward through `Task.step` and backward; return their sums, added up.

        What a step is without a `train_step`, up to `apply`: for a task that only does something before or after it.
        Several losses, and a loss over the global batch (`HasEmbed`), are those of such a step.

            def train_step(self, update, batches):
                sums = update.backward(batches)
                if update.apply():
                    follow(update.models["teacher"], update.models["student"])
                return sums

        Ranks: all; communicates.
        """
        ...

    def apply(self, *names: str) -> bool:
        """Step these optimizers, or all, with the gradients of the round; return whether they stepped.

        They do not if a gradient is not finite under `trainer.nonfinite=skip` or `trainer.precision=fp16`: then
        buffers and random numbers are put back, too. `trainer.clip_grad_norm` limits the norm of the gradients of each
        call by itself. Several calls may use the same gradients, for different optimizers. All gradients are cleared
        when the next micro-batch begins or the step ends, so that gradients which one loss leaves in another network
        never reach that network's own step.

        Ranks: all, with the same names; communicates if counts are tensors.

        Raises:
            DdpexpError: called inside of a micro-batch, or before the one with `last=True`; there is no such optimizer,
            or it has already used these gradients; the gradients are not of `MicroBatch.backward`.
        """
        ...


class MicroBatch(Protocol):
    """A micro-batch in progress: the value of `with update.micro_batch(last) as micro_batch`."""

    def __enter__(self) -> MicroBatch:
        """Begin a pass."""
        ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> bool | None:
        """End it; the workers sum their gradients after the last one. Ranks: all; communicates in the last one."""
        ...

    def repeat(self, last: bool) -> MicroBatch:
        """Return a further pass over this micro-batch, with the random numbers of this one.

        For a loss that is known only after a first pass over all micro-batches. As with `OptimizerStep.micro_batch`,
        the workers sum their gradients at the end of the one with `last=True`.
        """
        ...

    def forward(self, batch: Any) -> Sums:
        """Return what `Task.step` returns for the batch; only inside of the block.

        Of several losses it returns one, for `backward`, and each of them among the metrics, as `loss/NAME`.
        """
        ...

    def backward(self, loss_sum: Tensor, count: int | Tensor, name: str = "loss") -> None:
        """Add the gradient of `loss_sum / (count over the global batch)`; only inside of the block.

        Frees the graph of the loss, as `loss.backward()` does. May be called several times, each time with a count of
        its own. The calls of several micro-batches are matched by `name`; without names by their order.

        - A count that is a number stands for every micro-batch of the round: it must be the same in all of them, above
          0, and the round must go through all batches.
        - A count that is a tensor may differ. Its total is known only after all gradients are added up, so the totals
          of all calls of a round must be equal, and every worker must make the same number of calls.

        Shapes: `loss_sum` is a scalar that requires a gradient, `count` a scalar.
        Ranks: all, with the same number of calls.

        Raises:
            DdpexpError: called outside of the block; the loss or the count is of another kind; numbers are mixed with
            tensors.
        """
        ...

    def forward_pass(self) -> AbstractContextManager[None]:
        """Return a context for a further forward pass, with the random numbers of the first.

        For pipelines, in which a worker may have several parts of the model.
        """
        ...

    def backward_pass(self) -> AbstractContextManager[None]:
        """Return a context for the call of `backward` after the end of the block: for pipelines.

        Their strategies begin further micro-batches before they go back through one.
        """
        ...


@runtime_checkable
class HasTrainStep(Protocol):
    """A task with several losses or rounds in one step: GANs, penalties on gradients, target networks."""

    def train_step(self, update: OptimizerStep, batches: list[Any]) -> Sums:
        """Do one optimizer step manually; return what `step` returns, summed over all micro-batches of this worker.

            def train_step(self, update, batches):
                total, count = torch.zeros(()), 0
                for number, batch in enumerate(batches, start=1):
                    with update.micro_batch(last=number == len(batches)) as micro_batch:
                        loss, samples = self.loss(update.models["net"], batch)
                        micro_batch.backward(loss, samples)
                    total, count = total + loss.detach(), count + samples
                update.apply("net")
                return total, count, {}

        `batches` are this worker's micro-batches of the step, on its device: as many on every worker,
        `trainer.global_batch_size / (trainer.micro_batch_size x workers)`. The returned sums are only recorded and need
        no gradient; they have the same names in every step, with a count of 0 where there is nothing to record.

        Attributes set on the task are neither checkpointed nor synchronized: use `update.step` for values that depend
        on the step, and buffers of a module for others. Evaluations call `step`.

        Units: before each step the learning rates are set to `optimizer.lr`, or the rates of `optimizers`, times the
        schedule.
        Ranks: all, with the same calls in the same order.
        """
        ...


@runtime_checkable
class HasOnEval(Protocol):
    """A task that logs something about an evaluation, such as images with predictions."""

    def on_eval(self, model: nn.Module, batch: Any, logger: Logger, step: int) -> None:
        """Log something about an evaluation, given the first batch of its first set; without gradients and autocast.

        Called when all sets are evaluated and `finish` has been called for each, after their metrics are recorded.
        `model` is as in `step`, in evaluation mode, not wrapped, with the average of the weights where there is one.
        `logger` goes to all loggers of the run: see `ddpexp.loggers.base.Logger`. torch's random numbers are the same
        in every evaluation, so that pictures of different steps can be compared.
        Shapes: an image is (height, width, 3) or (3, height, width), of bytes or of floats from 0 to 1, as a tensor, an
        array or a picture of PIL. Units: steps, the number done.
        Ranks: rank zero; must not communicate. Where a forward pass communicates (`strategy=fsdp` or
        `pipeline` with `strategy.gather_in_evaluation=false`), all, with a logger that records nothing on the others.
        """
        ...


@runtime_checkable
class Schedule(Protocol):
    """A learning-rate schedule: a pure function of the step, so that a resumed run needs no scheduler state."""

    def factor(self, step: int, num_steps: int) -> float:
        """Return the factor of `optimizer.lr` at step `step` of 0 .. num_steps - 1."""
        ...


@runtime_checkable
class StatefulSchedule(Schedule, Protocol):
    """A schedule that follows the metrics of evaluations; its state is in the checkpoints."""

    def observe(self, metrics: Mapping[str, float], step: int, num_steps: int) -> None:
        """Take in the metrics of an evaluation, such as `eval/loss`. Units: steps done.

        Ranks: all, with the same metrics; must not communicate.
        """
        ...

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state: numbers, texts, lists and mappings."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        ...

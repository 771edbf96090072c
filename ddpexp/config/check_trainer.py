"""Check the keys of the trainer against each other."""

from __future__ import annotations

import re

from ddpexp.errors import RefusedError
from ddpexp.settings.metrics import check_is_evaluated, check_not_test
from ddpexp.settings.profile import check_profiled
from ddpexp.settings.trainer import Trainer


def check_trainer(trainer: Trainer) -> None:
    """Check keys of the trainer against each other.

    Raises:
        RefusedError: two of them contradict each other.
    """
    if trainer.epochs is None and trainer.max_steps is None:
        raise RefusedError(
            "and trainer.max_steps=null make a run that never ends",
            key="trainer.epochs",
            value=None,
            suggestion="Set one of them.",
        )
    samples, size = trainer.limit_train_samples, trainer.global_batch_size
    if samples is not None and samples < size:
        raise RefusedError(
            f"is fewer than trainer.global_batch_size={size}, the samples of a step",
            key="trainer.limit_train_samples",
            value=samples,
            suggestion=f"Use trainer.limit_train_samples={size}, or trainer.global_batch_size={samples}.",
        )
    check_profiled(trainer, trainer.max_steps)
    _check_keep_best(trainer)
    _check_average(trainer)
    check_param_dtype(trainer)
    _check_speed(trainer)
    _check_compiled_step(trainer)
    _check_reduction(trainer)
    if trainer.lora is not None and trainer.freeze:
        raise RefusedError(
            "is incompatible with trainer.lora, which freezes everything but its adapters and what "
            "trainer.lora.train names",
            key="trainer.freeze",
            suggestion="Leave out trainer.freeze.",
        )
    if trainer.lora is not None and not trainer.lora.patterns:
        raise RefusedError(
            "names no layers", key="trainer.lora.match", value=[], suggestion="Give it patterns such as blocks.*."
        )


def _check_average(trainer: Trainer) -> None:
    """Check the keys of averaged weights against each other."""
    if trainer.swa_start is not None and trainer.ema_decay is not None:
        raise RefusedError(
            f"is incompatible with trainer.ema_decay={trainer.ema_decay}: a run has one average of its weights",
            key="trainer.swa_start",
            value=trainer.swa_start,
            suggestion="Set one of them to null.",
        )
    if trainer.swa_every != "epoch" and trainer.swa_start is None:
        raise RefusedError(
            "is for the mean of the weights (SWA), and there is none",
            key="trainer.swa_every",
            value=trainer.swa_every,
            suggestion="Set trainer.swa_start, too.",
        )


def _check_keep_best(trainer: Trainer) -> None:
    if trainer.keep_best is None:
        if trainer.keep_best_k > 1:
            raise RefusedError(
                "needs a metric",
                key="trainer.keep_best_k",
                value=trainer.keep_best_k,
                suggestion="Type it as well, for example trainer.keep_best=max:eval/accuracy.",
            )
        if trainer.test_weights == "best":
            raise RefusedError(
                "needs a metric to keep the best weights by",
                key="trainer.test_weights",
                value="best",
                suggestion="Type it as well, for example trainer.keep_best=max:eval/accuracy.",
            )
        return
    first, *others = re.split(",(?=max:|min:)", trainer.keep_best)
    if others:
        raise RefusedError(
            "names several metrics, and a run keeps the best weights by one",
            key="trainer.keep_best",
            value=trainer.keep_best,
            suggestion=f"Did you mean trainer.keep_best={first}?",
        )
    check_not_test("trainer.keep_best", trainer.keep_best, trainer.keep_best.partition(":")[2])
    check_is_evaluated("trainer.keep_best", trainer.keep_best, trainer.eval_every)


def check_param_dtype(trainer: Trainer) -> None:
    """Check that models in bf16 are not combined with what gives a forward pass other numbers.

    Raises:
        RefusedError: they are.
    """
    if trainer.param_dtype == "fp32":
        if not trainer.master_weights:
            raise RefusedError(
                "stores weights in the numbers of trainer.param_dtype, which are fp32 already",
                key="trainer.master_weights",
                value=False,
                suggestion="Type trainer.param_dtype=bf16, too, or leave it true.",
            )
        return
    for clashes, key, instead in (
        (trainer.precision != "fp32", f"trainer.precision={trainer.precision}", "trainer.precision=fp32"),
        (trainer.reduction == "exact", "trainer.reduction=exact", "trainer.reduction=fast"),
        (
            trainer.compile is not False and trainer.compile_blocks is None,
            f"trainer.compile={str(trainer.compile).lower()} of the whole model",
            "trainer.compile_blocks=CLASS with the class of its layers, or trainer.compile=false",
        ),
    ):
        if clashes:
            raise RefusedError(
                f"computes everything in bf16, which is incompatible with {key}",
                key="trainer.param_dtype",
                value="bf16",
                suggestion=f"Use {instead}, or trainer.param_dtype=fp32.",
            )


def _check_speed(trainer: Trainer) -> None:
    """Check what makes steps faster, alone and against the promise of equal bits.

    Raises:
        RefusedError: a value means nothing, or breaks the promise.
    """
    if trainer.compile_blocks is not None and not trainer.compile:
        raise RefusedError(
            "names what is compiled, and trainer.compile=false compiles nothing",
            key="trainer.compile_blocks",
            value=trainer.compile_blocks,
            suggestion="Type trainer.compile=true, or trainer.compile_blocks=null.",
        )
    if trainer.activation_checkpointing and trainer.compile and trainer.compile_blocks is None:
        classes = trainer.activation_checkpointing
        raise RefusedError(
            f"is incompatible with trainer.compile={str(trainer.compile).lower()} of the whole model: what is computed "
            "again cannot be inside a compiled graph, but around one",
            key="trainer.activation_checkpointing",
            value=f"[{','.join(classes)}]",
            suggestion=f"Compile these modules one by one with trainer.compile_blocks={classes[0]}, or leave one of "
            "them out.",
        )
    exact = trainer.reduction == "exact"
    promise = "trainer.reduction=exact" if exact else "trainer.deterministic=true"
    if not (exact or trainer.deterministic):
        return
    if trainer.cudnn_benchmark:
        raise RefusedError(
            f"is incompatible with {promise}: cuDNN chooses algorithms by the time that they take, so another "
            "start may choose others, with other bits",
            key="trainer.cudnn_benchmark",
            value=True,
            suggestion="Use trainer.cudnn_benchmark=false.",
        )
    if str(trainer.compile).startswith("max-autotune"):
        raise RefusedError(
            f"is incompatible with {promise}: kernels are chosen by the time that they take, so another start "
            "may choose others, with other bits",
            key="trainer.compile",
            value=trainer.compile,
            suggestion="Use trainer.compile=true.",
        )


def _check_compiled_step(trainer: Trainer) -> None:
    """Check what cannot be in the graph of a micro-batch.

    Raises:
        RefusedError: it is asked for.
    """
    if not trainer.compile_step:
        return
    for clashes, reason, suggestion in (
        (
            trainer.compile is not False,
            f"compiles the model too, so trainer.compile={str(trainer.compile).lower()} would add nothing",
            "Use trainer.compile=false or trainer.compile_step=false.",
        ),
        (
            trainer.reduction == "exact",
            "is incompatible with trainer.reduction=exact, which keeps the gradients of each micro-batch apart",
            "Use trainer.reduction=fast, or trainer.compile=true trainer.compile_step=false.",
        ),
        (
            trainer.precision == "fp16",
            "is incompatible with trainer.precision=fp16, whose scale changes from step to step",
            "Use trainer.precision=bf16, or trainer.compile=true trainer.compile_step=false.",
        ),
        (
            trainer.param_dtype != "fp32",
            f"is incompatible with trainer.param_dtype={trainer.param_dtype}, whose copies of the weights are made "
            "between two micro-batches",
            "Use trainer.precision=bf16 and trainer.param_dtype=fp32.",
        ),
        (
            bool(trainer.activation_checkpointing),
            "is incompatible with trainer.activation_checkpointing: torch does not compile blocks that are computed "
            "again",
            "Use trainer.activation_checkpointing=null or trainer.compile_step=false.",
        ),
    ):
        if clashes:
            raise RefusedError(reason, key="trainer.compile_step", value=True, suggestion=suggestion)


def _check_reduction(trainer: Trainer) -> None:
    if trainer.reduction == "exact" and trainer.micro_batch_size == "fit":
        raise RefusedError(
            "depends on the memory of the machine, and trainer.reduction=exact sums over micro-batches that are the "
            "same everywhere",
            key="trainer.micro_batch_size",
            value="fit",
            suggestion="Type a number: ddpexp find batch_size finds the largest one that fits.",
        )
    if trainer.reduction == "exact" and trainer.micro_batch_size == "auto":
        raise RefusedError(
            "sums over micro-batches that are the same at every number of workers, so their size must be given",
            key="trainer.reduction",
            value="exact",
            suggestion=f"Type it, for example trainer.micro_batch_size={max(1, trainer.global_batch_size // 8)}.",
        )

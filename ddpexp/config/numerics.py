"""Checks of the numbers in which models compute, and of what computes them faster."""

from __future__ import annotations

from ddpexp.errors import RefusedError
from ddpexp.settings.trainer import Trainer


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
        (trainer.compile is not False, f"trainer.compile={str(trainer.compile).lower()}", "trainer.compile=false"),
    ):
        if clashes:
            raise RefusedError(
                f"computes everything in bf16, which is incompatible with {key}",
                key="trainer.param_dtype",
                value="bf16",
                suggestion=f"Use {instead}, or trainer.param_dtype=fp32.",
            )


def check_speed(trainer: Trainer) -> None:
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
    if trainer.activation_checkpointing and trainer.compile:
        raise RefusedError(
            f"is incompatible with trainer.compile={str(trainer.compile).lower()}: torch does not compile "
            "blocks that are computed again",
            key="trainer.activation_checkpointing",
            value=f"[{','.join(trainer.activation_checkpointing)}]",
            suggestion="Leave one of them out.",
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

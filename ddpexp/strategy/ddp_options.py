"""The options of data parallelism, free of torch, so that the command can check them before it starts workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from ddpexp.errors import RefusedError
from ddpexp.launch import Layout
from ddpexp.settings.experiment import ExperimentSettings
from ddpexp.settings.key import Key
from ddpexp.strategy.optimizers import ALL_PARAMETERS, check_optimizer
from ddpexp.strategy.options import Options, check_reduce_through


@dataclass(frozen=True)
class DDPOptions(Options):
    """Options of data parallelism; conf/strategy/ddp.yaml explains every field."""

    builder: ClassVar[str] = "ddpexp.strategy.ddp:build"
    estimator: ClassVar[str] = "ddpexp.strategy.ddp_estimator:DDPEstimator"
    supports_exact: ClassVar[bool] = True
    supports_compiled_step: ClassVar[bool] = True

    kind: Literal["ddp"]
    find_unused_parameters: Annotated[bool, Key(on_resume="free")]
    static_graph: bool
    gradient_as_bucket_view: Annotated[bool, Key(on_resume="free")]
    bucket_cap_mb: Annotated[int | float, Key(above=0, on_resume="free")]
    broadcast_buffers: bool
    reduce_through: Annotated[Literal["auto", "shared_memory", "backend"], Key(on_resume="free")]
    comm_hook: Literal["none", "fp16", "bf16", "powersgd"]
    powersgd_rank: Annotated[int, Key(at_least=1)]
    sync_batchnorm: bool
    shard_optimizer: Annotated[bool, Key(on_resume="free")] = False

    @property
    def accepts_unused_parameters(self) -> bool:
        """Return whether DDP looks for parameters without a gradient."""
        return self.find_unused_parameters

    @property
    def divides_optimizer(self) -> str | None:
        """Return what gives each rank a part of the parameters to update, as typed; None: a rank updates all."""
        return "strategy.shard_optimizer=true" if self.shard_optimizer else None

    def check(self, experiment: ExperimentSettings) -> None:
        """Check the options by themselves and with the trainer section; see `Options.check`."""
        trainer = experiment.trainer
        if self.shard_optimizer:
            some = ", and with strategy.shard_optimizer=true each worker updates some parameters"
            check_optimizer(experiment.optimizer.target, ALL_PARAMETERS, some, "strategy.shard_optimizer=false")
        if self.reduce_through == "shared_memory" and self.comm_hook != "none":
            raise RefusedError(
                f"leaves nothing to compress, so it is incompatible with strategy.comm_hook={self.comm_hook}",
                key="strategy.reduce_through",
                value="shared_memory",
                suggestion="Use strategy.reduce_through=auto or strategy.comm_hook=none.",
            )
        if self.static_graph and self.find_unused_parameters:
            raise RefusedError(
                "finds unused parameters by itself in the first step",
                key="strategy.static_graph",
                value=True,
                suggestion="Leave strategy.find_unused_parameters=false.",
            )
        if trainer.reduction == "exact":
            self._check_exact()
        if trainer.compile_step:
            self._check_compiled_step()
        scaled = trainer.precision == "fp16" or trainer.nonfinite == "skip"
        if self.comm_hook == "powersgd" and scaled:
            raise RefusedError(
                "remembers every gradient, also one that is left out because it is not finite",
                key="strategy.comm_hook",
                value="powersgd",
                suggestion="Use trainer.precision=fp32 or bf16 and trainer.nonfinite=stop, not "
                f"{trainer.precision} and {trainer.nonfinite}.",
            )

    def _check_compiled_step(self) -> None:
        """Refuse what works in torch's DDP between forward and backward pass, which `trainer.compile_step` replaces."""
        for clashes, name, why in (
            (self.find_unused_parameters, "find_unused_parameters", "by which DDP walks through the graph of a loss"),
            (self.static_graph, "static_graph", "by which DDP reduces gradients during backward"),
            (self.sync_batchnorm, "sync_batchnorm", "by which workers communicate in the forward pass"),
        ):
            if clashes:
                raise RefusedError(
                    f"is incompatible with strategy.{name}=true, {why}: it makes one graph of both passes",
                    key="trainer.compile_step",
                    value=True,
                    suggestion=f"Use strategy.{name}=false or trainer.compile_step=false.",
                )

    def _check_exact(self) -> None:
        """Refuse what would make the numbers depend on the number of workers although `trainer.reduction=exact`."""
        if self.comm_hook != "none":
            raise RefusedError(
                f"is incompatible with strategy.comm_hook={self.comm_hook}, which rounds each worker's sum",
                key="trainer.reduction",
                value="exact",
                suggestion="Use strategy.comm_hook=none.",
            )
        if self.sync_batchnorm:
            raise RefusedError(
                "is incompatible with strategy.sync_batchnorm=true: its statistics are those of all "
                "workers' micro-batches of a pass, which another number of workers divides in another way",
                key="trainer.reduction",
                value="exact",
                suggestion="Use strategy.sync_batchnorm=false.",
            )
        if self.static_graph:
            raise RefusedError(
                "does not use DDP, whose option strategy.static_graph=true is",
                key="trainer.reduction",
                value="exact",
                suggestion="Use strategy.static_graph=false.",
            )
        if not self.broadcast_buffers:
            raise RefusedError(
                "combines the buffers of all micro-batches",
                key="trainer.reduction",
                value="exact",
                suggestion="Use strategy.broadcast_buffers=true.",
            )

    def check_layout(self, experiment: ExperimentSettings, layout: Layout, gradient_accumulation_steps: int) -> None:
        """Check what depends on the workers; see `Options.check_layout`."""
        super().check_layout(experiment, layout, gradient_accumulation_steps)
        trainer = experiment.trainer
        if self.static_graph and gradient_accumulation_steps > 1:
            raise RefusedError(
                f"is incompatible with {gradient_accumulation_steps} accumulated passes a step: torch would "
                "reduce other passes than it planned",
                key="strategy.static_graph",
                value=True,
                suggestion="Use strategy.static_graph=false or a larger trainer.micro_batch_size.",
            )
        is_cut = trainer.compile and trainer.compile_blocks is None
        if is_cut and trainer.reduction == "fast" and layout.world_size > 1 and self.bucket_cap_mb < 1:
            raise RefusedError(
                f"is incompatible with trainer.compile={str(trainer.compile).lower()}, which cuts the graph "
                "where buckets end, to reduce them during backward, and the first of them at 1 MiB",
                key="strategy.bucket_cap_mb",
                value=self.bucket_cap_mb,
                suggestion="Use strategy.bucket_cap_mb=1 or more, or name a class with trainer.compile_blocks=Block.",
            )
        if self.comm_hook == "bf16" and layout.backend == "gloo":
            raise RefusedError(
                "needs trainer.backend=nccl: gloo cannot add bf16 numbers",
                key="strategy.comm_hook",
                value="bf16",
                suggestion="Use fp16 or none.",
            )
        if self.sync_batchnorm and layout.device == "cpu":
            raise RefusedError(
                "needs GPUs: torch has no synchronised batch normalisation on CPU",
                key="strategy.sync_batchnorm",
                value=True,
                suggestion="Use strategy.sync_batchnorm=false.",
            )
        check_reduce_through(self.reduce_through, layout)

    @property
    def late_modules(self) -> Sequence[str]:
        """Return those of DDP's hooks."""
        return () if self.comm_hook == "none" else ("torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook",)

    def missing_in_checkpoints(self) -> str:
        """Return that PowerSGD's state is missing."""
        if self.comm_hook != "powersgd":
            return ""
        return (
            "PowerSGD's memory of earlier gradients is not saved and starts empty: the last bits will differ from "
            "those of an uninterrupted run"
        )

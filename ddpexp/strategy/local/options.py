"""The options of local SGD and DiLoCo; free of torch, because the command checks them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from ddpexp.errors import RefusedError
from ddpexp.settings.experiment import ExperimentSettings
from ddpexp.settings.key import Key
from ddpexp.settings.trainer import Trainer
from ddpexp.strategy.optimizers import ALL_PARAMETERS, check_optimizer
from ddpexp.strategy.options import Options


@dataclass(frozen=True)
class LocalOptions(Options):
    """Options of local SGD; conf/strategy/local_sgd.yaml explains every field."""

    builder: ClassVar[str] = "ddpexp.strategy.local.strategy:build"
    estimator: ClassVar[str] = "ddpexp.strategy.local.estimator:LocalEstimator"
    supports_train_step: ClassVar[bool] = False

    kind: Literal["local_sgd", "diloco"]
    sync_every: Annotated[int, Key(at_least=1)]
    warmup_steps: Annotated[int, Key(at_least=0)]

    def check(self, experiment: ExperimentSettings) -> None:
        """Check the options by themselves and with the trainer section; see `Options.check`."""
        super().check(experiment)
        trainer = experiment.trainer
        own = ", and its history differs between workers that train by themselves"
        check_optimizer(experiment.optimizer.target, ALL_PARAMETERS, own, "strategy=ddp")
        for clashes, other, why, instead in (
            (
                trainer.precision == "fp16",
                "trainer.precision=fp16",
                "which skips a step of all workers if one gradient overflows",
                "trainer.precision=bf16 or fp32",
            ),
            (
                trainer.nonfinite == "skip",
                "trainer.nonfinite=skip",
                "which skips a step of all workers if one gradient is not finite",
                "trainer.nonfinite=stop",
            ),
            (
                trainer.averages,
                "trainer.ema_decay and trainer.swa_start",
                "which average weights that all workers have",
                "neither of them",
            ),
            (
                trainer.param_dtype != "fp32",
                f"trainer.param_dtype={trainer.param_dtype}",
                "in which the mean of the workers would be rounded",
                "trainer.param_dtype=fp32",
            ),
        ):
            if clashes:
                raise RefusedError(
                    f"is incompatible with {other}, {why}: its workers have weights of their own between two averages",
                    key="strategy",
                    value=self.kind,
                    suggestion=f"Use {instead}, or strategy=ddp.",
                )

    def other_bits(self, trainer: Trainer, gradient_accumulation_steps: int) -> str:
        """Return that the numbers depend on the number of workers."""
        return (
            f"strategy={self.kind}: each worker trains on its own share of the data for {self.sync_every} steps at a "
            "time, so the numbers are others than those of strategy=ddp and depend on the number of workers"
        )


@dataclass(frozen=True)
class DiLoCoOptions(LocalOptions):
    """Options of DiLoCo; conf/strategy/diloco.yaml explains every field."""

    estimator: ClassVar[str] = "ddpexp.strategy.local.estimator:DiLoCoEstimator"

    kind: Literal["diloco"]
    outer_lr: Annotated[float, Key(above=0)]
    outer_momentum: Annotated[float, Key(at_least=0, below=1)]

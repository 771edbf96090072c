"""Finds the first number of a run that is not finite."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ddpexp.errors import RefusedError
from ddpexp.settings.experiment import ExperimentSettings
from ddpexp.train.callbacks.base import Callback, RunView

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass
class FindNonFinite(Callback):
    """Ends the run at the first output of a module, or gradient, that is not finite. Ranks: each looks at its own.

    Looked at are, in their order, the outputs of every module in the forward pass, and in the backward pass the
    gradients with respect to them and to the parameters: those of a micro-batch on its rank, before any reduction, so
    that one bad sample is found where it is. In fp16 gradients overflow as a rule, and are not looked at. What is
    found ends the rank within the step, before the weights take it over.
    """

    infinite: bool = True
    _run: RunView | None = field(init=False, default=None, repr=False, compare=False)
    _key: str = field(init=False, default="", repr=False, compare=False)

    def check(self, experiment: ExperimentSettings, where: str) -> None:
        """Check that modules are called one by one."""
        trainer = experiment.trainer
        if trainer.compiles:
            raise RefusedError(
                "inspects the output of each module, but compiled modules are not called one by one",
                key=where,
                suggestion=f"Use {'trainer.compile' if trainer.compile else 'trainer.compile_step'}=false.",
            )

    def on_start(self, run: RunView) -> None:
        """Watch every module and parameter."""
        self._run, self._key = run, run.caller
        for model, root in run.models.items():
            for name, module in root.named_modules():
                full_name = f"{model}.{name}" if name else model
                module.register_forward_hook(self._after_forward(full_name))
        if run.options.precision == "fp16":
            return
        for name, parameter in run.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._after_accumulation(name))  # type: ignore[no-untyped-call]

    def _after_forward(self, name: str) -> Any:
        def look(module: nn.Module, inputs: Any, output: Any) -> None:
            if self._run is None or self._run.micro_batch is None:
                return  # an evaluation
            kind = f"{name} ({type(module).__name__})"
            for tensor in _tensors(output):
                self._look(tensor, f"the output of {kind}")
                if tensor.requires_grad and self._run.options.precision != "fp16":
                    what = f"the gradient at the output of {kind}"
                    tensor.register_hook(lambda gradient, what=what: self._look(gradient, what))  # type: ignore

        return look

    def _after_accumulation(self, name: str) -> Any:
        def look(parameter: Tensor) -> None:
            if parameter.grad is not None and self._run is not None and self._run.micro_batch is not None:
                self._look(parameter.grad, f"the gradient of {name}", has_rows=False)

        return look

    def _look(self, tensor: Tensor, what: str, has_rows: bool = True) -> None:
        """Look at a tensor.

        Raises:
            NonFiniteError: it is not finite.
        """
        values = tensor.detach()
        if values.is_sparse:
            values = values.coalesce().values()
        if not (values.is_floating_point() or values.is_complex()):
            return
        bad = ~values.isfinite() if self.infinite else values.isnan()
        if bool(bad.any()):
            self._report(values, bad, what, has_rows and not tensor.is_sparse)

    def _report(self, values: Tensor, bad: Tensor, what: str, has_rows: bool) -> None:
        from ddpexp.train.metrics import NonFiniteError  # imports torch

        run = self._run
        assert run is not None
        where = f"in step {run.step + 1}"
        rows = bad.reshape(len(bad), -1).any(1).nonzero().flatten().tolist() if bad.dim() else []
        if has_rows and len(values) == run.micro_batch_size:
            where += f", for {run.samples(rows[:1])}"
            where += f" and {len(rows) - 1} more of the {len(values)} in the micro-batch" if len(rows) > 1 else ""
        else:
            where += f", in micro-batch {run.micro_batch} of the step on this rank" if run.micro_batch else ""
        first = values[bad].flatten()[0].item()
        raise NonFiniteError(f"is not finite ({first:.6g}) {where}", key=f"callbacks.{self._key}", place=what)


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in the output of a module."""
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _tensors(inner)
    elif isinstance(value, tuple | list):
        for inner in value:
            yield from _tensors(inner)

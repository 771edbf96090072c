"""Optimizers that a strategy cannot give what they need."""

from __future__ import annotations

from collections.abc import Mapping

from ddpexp.errors import RefusedError

WHOLE_MATRICES = {  # optimizers that need whole matrices
    "muon": "makes the update of a whole matrix orthogonal",
    "torch.optim.Muon": "makes the update of a whole matrix orthogonal",
    "lbfgs": "multiplies the gradients of all parameters",
}
ALL_PARAMETERS = {"lbfgs": WHOLE_MATRICES["lbfgs"]}
"""Optimizers that need all parameters at once."""
WHOLE_ROWS = {  # optimizers that parameters without rows break
    "torch.optim.Adafactor": "looks at the rows of a whole gradient",
    "torch.optim.SparseAdam": "is for a sparse gradient",
    "sparse_adam": "is for a sparse gradient",
}
_SOME_ROWS = "and strategy=fsdp gives each worker some rows of it"
NOT_SHARDED = {  # optimizers that fsdp cannot give what they need
    "lbfgs": "multiplies the gradients of all parameters, and strategy=fsdp gives each worker some rows of them",
    "torch.optim.Adafactor": f"looks at the columns of a whole gradient, {_SOME_ROWS}",
    "torch.optim.Rprop": "sets single elements of gradients, which torch cannot do with those of strategy=fsdp",
    "torch.optim.SparseAdam": f"is for a sparse gradient, {_SOME_ROWS}",
    "sparse_adam": f"is for a sparse gradient, {_SOME_ROWS}",
}


def check_optimizer(target: str, refused: Mapping[str, str], addition: str, instead: str) -> None:
    """Refuse an optimizer that is among those `refused`, each with its reason; the `addition` completes the reason.

    Raises:
        RefusedError: it is among them.
    """
    if target in refused:
        raise RefusedError(
            f"is incompatible with this strategy: it {refused[target]}{addition}",
            key="optimizer._target_",
            value=target,
            suggestion=f"Use another optimizer, or {instead}.",
        )

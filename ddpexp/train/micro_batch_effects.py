"""What the size of a micro-batch changes in the numbers of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from ddpexp.compat.modules import BatchNorm
from ddpexp.system.text import first_few

_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_NAMED = 3  # modules in a sentence


def effects(modules: Mapping[str, nn.Module]) -> str:
    """Return what another micro-batch changes, with the names of the modules that depend on it."""
    parts = []
    if norms := list(_named(modules, BatchNorm)):
        parts.append(f"BatchNorm normalises by the statistics of a micro-batch ({first_few(norms, _NAMED)})")
    if dropouts := list(_named(modules, _DROPOUT)):
        parts.append(f"dropout draws anew for each micro-batch ({first_few(dropouts, _NAMED)})")
    return "; ".join(parts) or "the last bits of the weights, because sums are made in another order"


def _named(modules: Mapping[str, nn.Module], kinds: type[nn.Module] | tuple[type[nn.Module], ...]) -> Iterator[str]:
    for model, root in modules.items():
        for name, module in root.named_modules():
            if isinstance(module, kinds) and getattr(module, "p", 1.0) > 0:
                yield f"{model}.{name}" if len(modules) > 1 else name

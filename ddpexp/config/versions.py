"""What Hydra 1.4 with OmegaConf 2.4 does by other names than Hydra 1.3 with OmegaConf 2.3."""

from __future__ import annotations

from typing import Any

import hydra
import omegaconf


def _version(text: str) -> tuple[int, ...]:
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


OMEGACONF_2_4 = _version(omegaconf.__version__) >= (2, 4)
VERSION_BASE: dict[str, Any] = {} if _version(hydra.__version__) >= (1, 4) else {"version_base": "1.3"}
"""What Hydra's entry points are called with: 1.3 warns without `version_base`, 1.4 with it."""

if OMEGACONF_2_4:
    from omegaconf._yaml import get_yaml_loader  # type: ignore[import-not-found, unused-ignore]
else:
    from omegaconf._utils import get_yaml_loader  # type: ignore[attr-defined, unused-ignore]

register_resolver: Any = getattr(omegaconf.OmegaConf, "register_resolver" if OMEGACONF_2_4 else "register_new_resolver")

__all__ = ["OMEGACONF_2_4", "VERSION_BASE", "get_yaml_loader", "register_resolver"]

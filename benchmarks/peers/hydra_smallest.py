"""The smallest application that Hydra can be: what composing a configuration costs at least."""

from __future__ import annotations

import hydra
from omegaconf import DictConfig


@hydra.main(version_base="1.3", config_path=".", config_name="hydra_smallest")
def main(cfg: DictConfig) -> None:
    """Show one value."""
    print(cfg.lr)


if __name__ == "__main__":
    main()

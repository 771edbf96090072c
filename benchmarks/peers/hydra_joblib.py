"""The hand-written loop as a Hydra application, for Hydra's own sweeps.

`-m hydra/launcher=joblib lr=0.1,0.2 seed=range(8)`.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass

import hydra
from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig


@dataclass
class Config:
    """What can be swept."""

    data: str = MISSING
    steps: int = MISSING
    folder: str = MISSING
    lr: float = 0.05
    seed: int = 0


ConfigStore.instance().store("config", Config)


@hydra.main(version_base="1.3", config_name="config", config_path=None)
def main(cfg: DictConfig) -> None:
    """Train alone, in a process group of one; the launcher keeps its processes for the next job."""
    import torch.distributed as dist

    from benchmarks.peers.bare import Words, train

    with tempfile.TemporaryDirectory() as place:
        dist.init_process_group("gloo", init_method=f"file://{place}/store", rank=0, world_size=1)
        train(Words(cfg.data, cfg.steps, os.path.join(cfg.folder, f"{cfg.lr}-{cfg.seed}"), lr=cfg.lr, seed=cfg.seed))
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Lightning with Hydra, laid out as in lightning-hydra-template: python train.py trainer.devices=2."""

import hydra
import lightning
from hydra.utils import instantiate
from omegaconf import DictConfig


@hydra.main(version_base="1.3", config_path="configs", config_name="train")
def main(config: DictConfig) -> float:
    lightning.seed_everything(config.seed)
    datamodule = instantiate(config.data)
    model = instantiate(config.model)
    trainer = instantiate(config.trainer)
    trainer.fit(model, datamodule)
    if trainer.is_global_zero:
        print(" ".join(f"{name} {trainer.callback_metrics[name]:.6f}" for name in ("eval/loss", "eval/accuracy")))
    return float(trainer.callback_metrics[config.optimized_metric])


if __name__ == "__main__":
    main()

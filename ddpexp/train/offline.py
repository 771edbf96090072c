"""Models that are built before the workers start, and pretrained weights in these: never downloaded again."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from ddpexp.config.instantiate import instantiate
from ddpexp.config.parse import load
from ddpexp.config.schema import Experiment
from ddpexp.config.strategies import estimator_of
from ddpexp.data.hf.prepare import HUGGING_FACE
from ddpexp.errors import RefusedError, subject
from ddpexp.run.pretrained import pretrained_key
from ddpexp.strategy.replica import modules_of
from ddpexp.system.text import message_of
from ddpexp.train.lora import add_adapters


def build_once(configuration: str) -> str:
    """Build the model of a configuration, which downloads its weights; return "built", or what went wrong."""
    try:
        experiment = load(configuration)
        experiment.trust.make_importable()
        instantiate(experiment.model, experiment.trust, "model")
    except Exception as error:
        return message_of(error)
    return "built"


def divide_once(configuration: str) -> str:
    """Build the model without memory and divide its layers; return what `build_once` does."""
    try:
        experiment = load(configuration)
        experiment.trust.make_importable()
        with torch.device("meta"):
            built = instantiate(experiment.model, experiment.trust, "model")
        add_adapters(built, experiment.trainer)
        estimator_of(experiment.strategy).divide_models(modules_of(built))
    except RefusedError as error:
        return message_of(error)
    except Exception:  # the code of the model does not work so: the workers will see
        return "built"
    return "built"


def forbid_downloads(experiment: Experiment) -> None:
    """Have this process refuse what its model would download, if the configuration asks for pretrained weights.

    Ranks: all, before anything is imported that the configuration names.
    """
    key = pretrained_key(experiment.model)
    if key is None:
        return

    def refuse(url: str, *_args: Any, **_kwargs: Any) -> NoReturn:
        name, _, value = key.partition("=")
        without = f" A checkpoint holds all weights: type {name}=false to do without." if value == "true" else ""
        raise RefusedError(
            "is not in the cache of this host (TORCH_HOME), and each worker would download it. It is fetched once, "
            "when a run starts for the first time",
            suggestion=f"Restore the cache.{without}",
            **subject(key, url),
        )

    torch.hub.download_url_to_file = refuse
    os.environ.update(dict.fromkeys(HUGGING_FACE, "1"))
    constants: Any = sys.modules.get("huggingface_hub.constants")
    if constants is not None:  # imported before, when it read the variable
        constants.HF_HUB_OFFLINE = True


@contextmanager
def without_downloads(experiment: Experiment) -> Iterator[None]:
    """Forbid them in the block, in a process that is not a worker."""
    function, environ = torch.hub.download_url_to_file, {name: os.environ.get(name) for name in HUGGING_FACE}
    constants: Any = sys.modules.get("huggingface_hub.constants")
    is_offline = constants.HF_HUB_OFFLINE if constants is not None else None
    forbid_downloads(experiment)
    try:
        yield
    finally:
        torch.hub.download_url_to_file = function
        for name, value in environ.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        if constants is not None:
            constants.HF_HUB_OFFLINE = is_offline

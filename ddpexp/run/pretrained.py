"""What the command does with a model before the workers start, in a process of its own. Free of torch.

Weights that it downloads while it is built, such as those of torchvision, timm and transformers, are fetched once, so
that the workers find them in the cache of this host; and layers that workers divide are checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ddpexp.config.restated import HUB
from ddpexp.config.schema import Experiment
from ddpexp.errors import RefusedError, shown
from ddpexp.settings.node import Node
from ddpexp.strategy.options import Options
from ddpexp.system import separate_process

_KEYS = ("pretrained", "weights", "weights_backbone", "pretrained_backbone", "pretrained_model_name_or_path")


def pretrained_key(model: Node) -> str | None:
    """Return the key with its value by which the model section asks for pretrained weights; None: it does not."""
    if model.target.endswith(".from_pretrained"):
        return f"model._target_={model.target}"
    return next(_requests(model.kwargs, "model"), None)


def _requests(values: Any, where: str) -> Iterator[str]:
    if isinstance(values, Mapping):
        for key, value in values.items():
            here = f"{where}.{key}"
            is_on_hub = isinstance(value, str) and value.startswith(HUB)
            if is_on_hub or (
                key in _KEYS and (value is True or (isinstance(value, str) and value.lower() not in ("", "none")))
            ):
                yield f"{here}={shown(value)}"
            elif key == "_target_" and str(value).endswith(".from_pretrained"):
                yield f"{here}={value}"
            else:
                yield from _requests(value, here)
    elif isinstance(values, list | tuple):
        for number, value in enumerate(values):
            yield from _requests(value, f"{where}[{number}]")


def before_workers(experiment: Experiment, text: str, resumes: bool) -> bool:
    """Check the model, and fetch its weights for a new run; return whether it has any.

    Raises:
        RefusedError: a layer does not divide, or the weights cannot be fetched.
    """
    check_layers(experiment.strategy, text)
    return not resumes and fetch(experiment.model, text)


def fetch(model: Node, text: str) -> bool:
    """Build the model of a configuration once if it asks for pretrained weights; return whether it does.

    Raises:
        RefusedError: it cannot be built.
    """
    key = pretrained_key(model)
    if key is None:
        return False
    problem = _problem("ddpexp.train.offline:build_once", text)
    if problem != "built":
        reason = (problem or "see its output above").rstrip(".")
        raise RefusedError(
            f"The model cannot be built to fetch its weights before the workers start: {reason}", key=key
        )
    return True


def check_layers(strategy: Options, text: str) -> None:
    """Check that the layers of a configuration's model divide, if its strategy looks at them.

    Raises:
        RefusedError: one does not.
    """
    if strategy.looks_at_layers and (problem := _problem("ddpexp.train.offline:divide_once", text)) not in (
        "",
        "built",
    ):
        raise RefusedError(problem)


def _problem(function: str, text: str) -> str:
    """Return what a function that builds the model of a configuration in a process of its own answers; empty: nothing.

    It uses no GPU.
    """
    try:
        return str(separate_process.call(function, text, {"CUDA_VISIBLE_DEVICES": ""}))
    except separate_process.NoAnswerError:
        return ""

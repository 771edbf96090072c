"""Build the transforms and the `collate` of a configuration, and put them around its data sets."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch.utils.data import default_collate

from ddpexp.config.instantiate import Trust, instantiate, locate
from ddpexp.config.schema import Experiment
from ddpexp.data.base import IndexData
from ddpexp.data.datasets import Splits, kind_of
from ddpexp.data.streams import Stream
from ddpexp.data.transforms import Transformed
from ddpexp.errors import RefusedError
from ddpexp.settings.data import Data
from ddpexp.settings.node import Node

_SAMPLE_KEYS = (
    "transform", "eval_transform", "collate", "weights", "group_by", "stratify", "samples_per_epoch", "lengths",
    "batch_tokens",
)  # fmt: skip


def sample_nodes(data: Data) -> Mapping[str, Node]:
    """Return what the keys of single samples name, by key."""
    nodes = {"data.weights": data.weights, "data.collate": data.collate}
    nodes |= {f"{key}": node for key, node in _places("data.transform", data.transforms)}
    nodes |= {f"{key}": node for key, node in _places("data.eval_transform", data.eval_transforms)}
    return {key: node for key, node in nodes.items() if isinstance(node, Node)}


def own_arguments(data: Data, trust: Trust) -> Mapping[str, Any]:
    """Return the values of general keys that the data function of a recipe takes itself, which then mean what it says.

    Recipes had arguments of these names before the keys were general.
    """
    if data.prepare is not None or not any(getattr(data, name) for name in _SAMPLE_KEYS):
        return {}
    try:
        taken = inspect.signature(locate(data.target, trust, "data")).parameters
    except ValueError:  # a builtin
        return {}
    values = {name: getattr(data, name) for name in _SAMPLE_KEYS if name in taken}
    return {name: _plain(value) for name, value in values.items() if value not in (None, ())}


def without_own_arguments(experiment: Experiment) -> Experiment:
    """Return the experiment without the general keys that its data function takes itself."""
    own: dict[str, Any] = dict.fromkeys(own_arguments(experiment.data, experiment.trust))
    return replace(experiment, data=replace(experiment.data, **own)) if own else experiment


def _plain(value: Any) -> Any:
    """Return what was typed for a node."""
    if isinstance(value, Node):
        return {"_target_": value.target, **value.kwargs}
    if isinstance(value, tuple):
        return _plain(value[0]) if len(value) == 1 else [_plain(node) for node in value]
    return value


def transformed(splits: Splits, experiment: Experiment) -> Splits:
    """Return the data sets with the transforms and the `collate` of the configuration.

    Raises:
        RefusedError: a set does not give single samples.
    """
    data = experiment.data
    if not data.transform and not data.eval_transform and data.collate is None:
        return splits
    train = splits.train
    return replace(
        splits,
        train=_wrapped(train, "train", "data.transform", data.transforms, experiment),
        evals={name: to_evaluate(part, name, experiment) for name, part in splits.evals.items()},
        order=train if splits.order is None and not isinstance(train, Stream) and train.brings_order else splits.order,
    )


def to_evaluate(part: Any, name: str, experiment: Experiment) -> Any:
    """Return an evaluation set with the transforms and the `collate` of the configuration. Raises: RefusedError."""
    return _wrapped(part, name, "data.eval_transform", experiment.data.eval_transforms, experiment)


def _wrapped(part: Any, name: str, key: str, nodes: Sequence[Node], experiment: Experiment) -> Any:
    data, trust = experiment.data, experiment.trust
    if not nodes and data.collate is None:
        return part
    _check_items(part, name, key if nodes else "data.collate")
    _check_images(part, name, key, nodes)
    transforms = tuple(_function(node, trust, place) for place, node in _places(key, nodes))
    collate = _function(data.collate, trust, "data.collate") if data.collate is not None else default_collate
    return Transformed(part, transforms, data.transform_of == "input", collate)


def _check_items(part: IndexData | Stream, name: str, key: str) -> None:
    if isinstance(part, Stream) or not part.has_samples:
        kind = "Stream" if isinstance(part, Stream) else kind_of(part.origin([0])[0])
        raise RefusedError(
            f"`{name}` is a {kind}, which does not load single samples: it needs __getitem__",
            key=key,
            suggestion=f"Use {key}=null, and change the batches where they are made, in the data set or in the task.",
        )


def _check_images(part: IndexData, name: str, key: str, nodes: Sequence[Node]) -> None:
    """Raise RefusedError if images would reach `collate` as they are stored, or our own changes would be left out."""
    from ddpexp.data.image_folder.images import ImageFolder  # late: it imports Pillow

    images = part.origin([0])[0]
    if not isinstance(images, ImageFolder):
        return
    if not nodes:
        raise RefusedError(
            f"gets the images of `{name}` as they are stored, of many sizes",
            key="data.collate",
            suggestion=f"Name a transform of your own for these images too, {key}, which makes tensors of one size.",
        )
    options = images.options
    own = {
        "data.mixup": options.mixup, "data.cutmix": options.cutmix, "data.rand_augment": options.rand_augment,
        "data.color_jitter": any(options.color_jitter), "data.augment_on": options.augment_on != "host",
    }  # fmt: skip
    used = next((option for option, value in own.items() if value), None)
    if key == "data.transform" and used is not None:
        raise RefusedError(
            "replaces all augmentations of training images", key="data.transform", suggestion=f"Leave out {used}."
        )


def _places(key: str, nodes: Sequence[Node]) -> Iterator[tuple[str, Node]]:
    for place, node in enumerate(nodes):
        yield f"{key}[{place}]" if len(nodes) > 1 else key, node


def _function(node: Node, trust: Trust, where: str) -> Callable[[Any], Any]:
    """Return a function of one argument: an instance of a class, or a function with its keys."""
    found = locate(node.target, trust, where)
    if not isinstance(found, type):
        return partial(found, **node.kwargs)
    instance = instantiate(node, trust, where)
    if not callable(instance):
        raise RefusedError(
            f"An object of {type(instance).__name__} cannot be called", key=f"{where}._target_", value=node.target
        )
    called: Callable[[Any], Any] = instance
    return called

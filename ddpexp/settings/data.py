"""The section `data`: who prepares and loads the samples, and which of them are held out, drawn and transformed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from ddpexp.settings.key import Key
from ddpexp.settings.node import Node
from ddpexp.settings.trainer import Auto

MOST_LOADERS = 1024  # processes for each worker


@dataclass(frozen=True)
class CommonData:
    """The keys of every kind of data; conf/config.yaml has the default of every key and explains it."""

    prepare: str | None
    validation_fraction: Annotated[
        float,
        Key(
            at_least=0,
            below=1,
            use="a share from 0 to below 1, such as 0.1",
            also="val_split validation_split val_size",
            advice={"null|none|false": "0 holds nothing out."},
        ),
    ]
    test_set: str | None
    num_workers: Annotated[
        int,
        Key(
            at_least=0,
            at_most=MOST_LOADERS,
            on_resume="free",
            short_run=0,
            also="dataloader_num_workers n_workers",
        ),
    ]
    on_device: Annotated[Auto | bool, Key(on_resume="free")]
    stratify: bool | None
    group_by: str | None
    fold: int | None
    folds: Annotated[int | None, Key(at_least=2)]
    weights: str | Node | None
    samples_per_epoch: Annotated[int | None, Key(at_least=1)]
    lengths: str | None
    batch_tokens: Annotated[int | None, Key(at_least=1)]
    transform: Node | tuple[Node, ...] | None
    eval_transform: Node | tuple[Node, ...] | None
    transform_of: Literal["input", "sample"]
    collate: Node | None


DATA_KEYS = tuple(one.name for one in dataclasses.fields(CommonData))


@dataclass(frozen=True)
class Data(CommonData):
    """The data of an experiment, or a source of a mixture."""

    target: str
    options: Mapping[str, Any]  # the keys of this kind of data
    sources: Mapping[str, Data] = field(default_factory=dict)  # of a mixture, by name

    @property
    def transforms(self) -> tuple[Node, ...]:
        """Return the transforms of training samples."""
        return _as_tuple(self.transform)

    @property
    def eval_transforms(self) -> tuple[Node, ...]:
        """Return the transforms of the samples of evaluation sets."""
        return _as_tuple(self.eval_transform)


def _as_tuple(nodes: Node | tuple[Node, ...] | None) -> tuple[Node, ...]:
    if nodes is None:
        return ()
    return nodes if isinstance(nodes, tuple) else (nodes,)

from dataclasses import dataclass
from typing import ClassVar, Literal

from ddpexp.strategy.options import Options


@dataclass(frozen=True)
class OrderedOptions(Options):
    builder: ClassVar[str] = "ddpexp_ordered.strategy:build"

    kind: Literal["ordered"]
    descending: bool

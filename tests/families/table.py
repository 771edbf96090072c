"""The families: an example, its plain program, and the sizes that this program has and the recipe's file has not."""

from __future__ import annotations

from tests.families import simclr
from tests.families.family import Family

FAMILIES = (
    Family("simclr", simclr.plain, ("model.width=8", "model.features=4")),
)  # fmt: skip

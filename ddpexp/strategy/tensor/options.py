"""The keys of tensor parallelism, free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from ddpexp.errors import RefusedError

COLWISE: Final = "colwise"
ROWWISE: Final = "rowwise"
GATHERED: Final = "colwise_gather_output"
EMBEDDING: Final = "embedding_rowwise"
SEQUENCE: Final = "sequence"
SEQUENCE_BEGIN: Final = "sequence_begin"
SEQUENCE_END: Final = "sequence_end"
_STYLES = (COLWISE, ROWWISE, GATHERED, EMBEDDING, SEQUENCE, SEQUENCE_BEGIN, SEQUENCE_END)


@dataclass(frozen=True)
class DividedLayers:
    """An entry of a plan, such as `strategy.tp_plan`: the layers that match, and how they are divided.

    `style` is `colwise` (each rank computes some outputs), `rowwise` (each has some inputs, and the results are added),
    `colwise_gather_output` (for a head: every rank gets all outputs) or `embedding_rowwise` (each has some rows of an
    embedding). With `strategy.sequence_parallel`, each rank computes some of the tokens in modules between these
    layers: `sequence_begin` takes them, `sequence` has them, and behind `sequence_end` every rank has all again.
    """

    match: str | tuple[str, ...]  # globs on names of modules
    style: Literal[
        "colwise", "rowwise", "colwise_gather_output", "embedding_rowwise", "sequence", "sequence_begin", "sequence_end"
    ]
    parts: tuple[int, ...] | None = None  # lengths of what a layer computes at once, such as queries, keys and values
    multiple_of: int | None = None  # what a share must be a multiple of, such as the width of a head

    @property
    def is_between(self) -> bool:
        """Return whether the modules lie between divided layers."""
        return self.style.startswith(SEQUENCE)

    @property
    def patterns(self) -> tuple[str, ...]:
        """Return the globs."""
        return (self.match,) if isinstance(self.match, str) else tuple(self.match)

    def check(self, where: str) -> None:
        """Check the entry by itself; `where` is what it is called in errors.

        Raises:
            RefusedError: a value means nothing.
        """
        if not self.patterns:
            raise RefusedError("is empty", key=f"{where}.match", suggestion="Name at least one module.")
        if self.style not in _STYLES:
            raise RefusedError(
                key=f"{where}.style", value=self.style, suggestion=f"Use {', '.join(_STYLES[:-1])} or {_STYLES[-1]}."
            )
        lengths = [*(self.parts or ()), *([self.multiple_of] if self.multiple_of is not None else [])]
        if any(length < 1 for length in lengths):
            raise RefusedError("has parts or multiple_of that are not above 0", key=where)

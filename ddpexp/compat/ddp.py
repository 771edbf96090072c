"""The buckets of torch's DistributedDataParallel.

Private: `Reducer._rebuild_buckets`, `Reducer._push_all_rebuilt_params` and
`DistributedDataParallel._build_params_for_reducer`; torch 2.10 to 2.13.
Why: DDP cuts buckets during its first backward pass, in the order in which gradients are ready, and offers no choice.
When it goes: `find_unused_parameters=True` cuts them before, and fixes them, but walks the graph in every step.
"""

from __future__ import annotations

from typing import Any

from torch.nn.parallel import DistributedDataParallel


def rebuild_buckets(module: DistributedDataParallel) -> None:
    """Cut the buckets by the order of the gradients seen so far, as DDP's forward does: once, then it does nothing."""
    module.reducer._rebuild_buckets()


class FixedBuckets(DistributedDataParallel):
    """DDP with the same buckets in every step of every start: cut once, in the reverse order of the parameters.

    DDP itself reduces the first step of a start in one bucket, and then cuts buckets in the order in which gradients
    were ready. If the backend chooses the order of a sum by the layout of the buckets, the first step after a resume
    would differ from that of an uninterrupted run. Searching for unused parameters prevents this, too, but it walks the
    graph in every step, hides unused parameters, and does not support reentrant checkpointing.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        """Wrap a module and cut the buckets. Ranks: all; communicates."""
        super().__init__(*arguments, **named)
        self.reducer._push_all_rebuilt_params()  # as a rank does that has joined the others without any data
        self.reducer._rebuild_buckets()

    def _build_params_for_reducer(self) -> Any:
        parameters, expect_sparse = super()._build_params_for_reducer()  # type: ignore[no-untyped-call]
        return parameters[::-1], expect_sparse[::-1]

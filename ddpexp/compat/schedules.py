"""The state of torch's schedules of the learning rate."""

from __future__ import annotations

COMBINED = "_schedulers"
"""The key, in the `state_dict` of a schedule that combines others, of a list of their states.

Private: `SequentialLR._schedulers` and `ChainedScheduler._schedulers`, which `state_dict` writes; torch 2.10 to 2.13.
Why: torch's manual does not say what is in a `state_dict`.
When it goes: translate the old key when a checkpoint is restored, in which it is written.
"""

from __future__ import annotations

import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import ChainedScheduler, ConstantLR, ExponentialLR, SequentialLR

from ddpexp.compat.schedules import COMBINED


def test_the_states_of_combined_schedules() -> None:
    optimizer = SGD([torch.ones(1)], lr=0.1)
    inner = [ConstantLR(optimizer), ExponentialLR(optimizer, 0.9)]
    for schedule in (SequentialLR(optimizer, [*inner], [2]), ChainedScheduler([*inner], optimizer)):
        assert [set(state) >= {"last_epoch", "base_lrs"} for state in schedule.state_dict()[COMBINED]] == [True, True]

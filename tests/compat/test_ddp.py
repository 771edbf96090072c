from __future__ import annotations

import subprocess
import sys

from tests.conftest import PATIENCE, ROOT

# The process group of a process of its own: two ranks, of which the other one does not exist.
_PROGRAM = """
import torch, torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.nn.parallel import DistributedDataParallel
from ddpexp.compat.ddp import FixedBuckets, rebuild_buckets

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)

def buckets(ddp):
    sizes = []
    def hook(state, bucket):
        sizes.append([tuple(gradient.shape) for gradient in bucket.gradients()])
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future
    ddp.register_comm_hook(None, hook)
    for _ in range(2):
        ddp(torch.ones(1, 3)).sum().backward()
        sizes.append("step")
    return sizes

def model():
    return nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 5, bias=False))

print(buckets(FixedBuckets(model(), bucket_cap_mb=1e-6)))
print(buckets(DistributedDataParallel(model(), bucket_cap_mb=1e-6)))
ddp = DistributedDataParallel(model())
rebuild_buckets(ddp)
"""


def test_fixed_buckets_are_the_same_in_the_first_step() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == 0, done.stderr
    fixed, plain = done.stdout.splitlines()
    assert fixed == "[[(5, 4)], [(4, 3)], 'step', [(5, 4)], [(4, 3)], 'step']"
    assert plain != fixed

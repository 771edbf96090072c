"""The compiler stays out of runs that do not compile, and is whole for everyone who wants it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.conftest import PATIENCE

_TRAIN = """
import os, sys
import torch, torch.distributed as dist
from ddpexp.deferred_dynamo import defer
defer()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
def step(kind):
    optimizer = kind(model.parameters(), lr=0.1)
    model(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
step(torch.optim.SGD)
step(torch.optim.AdamW)
loaded = "torch._dynamo.eval_frame" in sys.modules
"""

_WANT = {
    "torch.compile": "print(torch.compile(torch.nn.Linear(3, 3), backend='eager')(torch.randn(2, 3)).shape)",
    "a submodule": "import torch._dynamo.eval_frame as e; assert e is sys.modules[e.__name__] is torch._dynamo.eval_frame",
    "a name": "from torch._dynamo import config; assert config is sys.modules['torch._dynamo.config']",
    "an attribute": "assert torch._dynamo.utils.counters is not None",
}


def _run(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_training_imports_no_compiler() -> None:
    assert _run(_TRAIN + "print(loaded)").strip() == "False"


@pytest.mark.variants(1)
@pytest.mark.parametrize("want", _WANT)
def test_the_real_compiler_comes_when_it_is_wanted(want: str) -> None:
    after = (
        "assert not loaded\n"
        + _WANT[want]
        + """
assert type(sys.modules["torch._dynamo"]).__name__ == type(torch._dynamo).__name__ == "module"
assert sys.modules["torch._dynamo"].eval_frame is sys.modules["torch._dynamo.eval_frame"]
assert not any("ddpexp" in type(finder).__module__ for finder in sys.meta_path)
step(torch.optim.SGD)
# torch asked the real compiler again about the functions that the stand-in had answered for
kept = torch.optim.Optimizer.add_param_group.__wrapped__
assert kept.__dict__["__dynamo_disable"] is not kept
print("real")
"""
    )
    assert _run(_TRAIN + after).splitlines()[-1] == "real"


def test_a_compiler_that_is_there_already_stays() -> None:
    program = "import torch._dynamo as real, sys\nfrom ddpexp.deferred_dynamo import defer\ndefer()\n"
    assert _run(program + "print(sys.modules['torch._dynamo'] is real)").strip() == "True"

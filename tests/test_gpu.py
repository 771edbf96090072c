"""What only a GPU shows: the host waits for it at records alone."""

from __future__ import annotations

import pytest

from ddpexp.system.hardware import count_gpus
from tests.conftest import PATIENCE, Ddpexp
from tests.points import Recipe

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(count_gpus() == 0, reason="there is no GPU here")]

CODE = """\
class Unwaiting(Sides):
    # Lets nobody wait for the GPU between two records.
    def __init__(self, reads=False):
        self.calls, self.reads = 0, reads

    def step(self, model, batch):
        self.calls += 1
        torch.cuda.set_sync_debug_mode("error" if self.calls > 8 and self.calls % 4 else "default")
        loss, count, metrics = super().step(model, batch)
        if self.reads:
            loss.item()
        return loss, count, metrics
"""
WORDS = (
    "task._target_=points.Unwaiting",
    "trainer.gpus=1",
    "trainer.epochs=20",
    "trainer.eval_every=0",
    "trainer.checkpoint_every=0",
)


@pytest.mark.parametrize("there", ["true", "false"])
def test_the_host_waits_for_the_gpu_at_records_alone(ddpexp: Ddpexp, there: str) -> None:
    done = Recipe(ddpexp, CODE)(*WORDS, f"data.on_device={there}", timeout=PATIENCE)
    assert done.code == 0, done.err


def test_a_task_that_waits_is_found_out(ddpexp: Ddpexp) -> None:
    done = Recipe(ddpexp, CODE)(*WORDS, "+task.reads=true", timeout=PATIENCE)
    assert done.code == 1
    assert "synchronizing CUDA operation" in done.err

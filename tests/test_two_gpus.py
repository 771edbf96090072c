"""What only two GPUs show: who computes on which, what NCCL is given, and what a killed run leaves behind."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from ddpexp.system.hardware import visible_devices
from tests.conftest import PATIENCE, Ddpexp
from tests.fitting import near
from tests.points import Recipe, weights
from tests.test_gpu import DEVICES, devices_of

WHOLE = [device for device in visible_devices() if not device.is_mig]
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(len(WHOLE) < 2, reason="fewer than two GPUs")]
SHOWS = ("task._target_=points.Shows", "trainer.gpus=2")


def test_each_worker_has_a_gpu_of_its_own(ddpexp: Ddpexp) -> None:
    done = Recipe(ddpexp, DEVICES)(*SHOWS, timeout=PATIENCE)
    assert done.code == 0, done.err
    assert [device for device, *_ in devices_of(done.run, 2)] == ["cuda:0", "cuda:1"]
    assert len({uuid for _, uuid, _ in devices_of(done.run, 2)}) == 2


def test_gpus_are_chosen_by_abbreviated_uuids_in_their_order(ddpexp: Ddpexp) -> None:
    chosen = [device.uuid for device in (WHOLE[1], WHOLE[0])]
    environ = {"CUDA_VISIBLE_DEVICES": ",".join(uuid[:16] for uuid in chosen)}
    done = Recipe(ddpexp, DEVICES)(*SHOWS, timeout=PATIENCE, environ=environ)
    assert done.code == 0, done.err
    assert [uuid for _, uuid, _ in devices_of(done.run, 2)] == [uuid.removeprefix("GPU-") for uuid in chosen]


def test_nccl_uses_the_interface_that_the_user_has_exported(ddpexp: Ddpexp) -> None:
    recipe = Recipe(ddpexp, DEVICES)
    for exported, used in (({}, "lo"), ({"NCCL_SOCKET_IFNAME": "^docker0"}, "^docker0")):
        done = recipe(*SHOWS, timeout=PATIENCE, environ=exported)
        assert done.code == 0, done.err
        assert [interface for *_, interface in devices_of(done.run, 2)] == [used, used]


def test_killed_ranks_leave_neither_shared_memory_nor_dumps(ddpexp: Ddpexp) -> None:
    def files() -> set[str]:
        folder, kinds = Path("/dev/shm"), ("nccl-*", "cuda.shm.*", "torch_*")
        return {path.name for kind in kinds for path in folder.glob(kind)}

    before, cache = files(), ddpexp.folder / "cache"
    environ = {"DDPEXP_FAULT": "forward:kill:1:2", "NCCL_P2P_DISABLE": "1",  # then NCCL uses shared memory
               "XDG_CACHE_HOME": str(cache)}  # fmt: skip
    done = Recipe(ddpexp, DEVICES)(*SHOWS, timeout=PATIENCE, environ=environ)
    assert (done.code, json.loads((done.run / "error.json").read_text())["signal"]) == (1, signal.SIGKILL)
    assert files() <= before
    assert not list(cache.rglob("comm_lib_trace_rank_*"))


SEVERAL = """\
class Encodes(Net):
    def encode(self, rows):
        return self(rows)


class Several(Sides):
    # Two forward passes, then two backward passes of them, or one of their sum.
    def __init__(self, together):
        self.together = together

    def train_step(self, update, batches):
        for number, (_, rows, labels) in enumerate(batches, start=1):
            with update.micro_batch(last=number == len(batches)) as micro_batch:
                loss = nn.functional.cross_entropy(update.models(rows), labels, reduction="sum")
                other = update.models.encode(2 * rows).square().sum()
                if self.together:
                    micro_batch.backward(loss + other, len(labels))
                else:
                    micro_batch.backward(loss, len(labels))
                    micro_batch.backward(other, len(labels))
        update.apply()
        return loss.detach(), len(labels), {}
"""


def test_ddp_reduces_the_gradients_of_several_backward_passes(ddpexp: Ddpexp) -> None:
    recipe = Recipe(ddpexp, SEVERAL)
    overrides = ("task._target_=points.Several", "model._target_=points.Encodes", "trainer.micro_batch_size=6")
    each, whole, alone = (
        weights(recipe(*overrides, f"+task.together={together}", f"trainer.gpus={size}", timeout=PATIENCE))
        for together, size in (("false", 2), ("true", 2), ("false", 1))
    )
    assert near(each, whole, 1e-5)
    assert near(each, alone, 1e-5)

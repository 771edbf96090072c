"""What only a GPU shows: which ones a process gets, who waits for them, hangs in NCCL, and memory that runs out."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ddpexp.checkpoint.layout import lay_out, share
from ddpexp.checkpoint.staging import Stage
from ddpexp.distributed.transfers import LateFlag, _copy_stream, moved, rows
from ddpexp.launch.workers.cuda_guard import sentence
from ddpexp.strategy.base import Shard
from ddpexp.system import nvml
from ddpexp.system.hardware import count_gpus, visible_devices
from tests.checkpoint.test_writer import Pinning
from tests.conftest import PATIENCE, ROOT, SMALL, Ddpexp
from tests.launch.workers.test_cuda_guard import output_of_worker
from tests.points import Recipe
from tests.terminals import Session

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


LOOKS = """\
class Looks(Sides):
    # Starts a debugger in the third step of rank 1.
    def __init__(self):
        self.steps = 0

    def step(self, model, batch):
        self.steps += 1
        if RANK == 1 and self.steps == 3:
            breakpoint()
        return super().step(model, batch)
"""
CUDA = torch.device("cuda", 0)

STEPS = """\
class Masked(Unwaiting):
    # Its counts are tensors.
    def step(self, model, batch):
        loss, count, metrics = super().step(model, batch)
        return loss, torch.ones_like(batch[2]).sum(), metrics


class Normed(nn.Sequential):
    # Float and integer buffers that change, and one that does not.
    def __init__(self, **options):
        norms = nn.BatchNorm1d(64), nn.BatchNorm1d(64)
        super().__init__(nn.Linear(4, 64), norms[0], nn.ReLU(), nn.Linear(64, 64), norms[1], nn.Linear(64, 2))
        self.register_buffer("mask", torch.ones(4, 4, dtype=torch.bool).tril())
"""


@pytest.mark.parametrize("reduction", ["fast", "exact"])
def test_counts_that_are_tensors_and_exact_sums_stay_on_the_gpu(ddpexp: Ddpexp, reduction: str) -> None:
    keys = ("trainer.micro_batch_size=8", f"trainer.reduction={reduction}", "trainer.deterministic=true")
    words = [word for word in WORDS if not word.startswith("task.")]
    recipe = Recipe(ddpexp, CODE + STEPS)
    done = recipe(*words, *keys, "task._target_=points.Masked", "model._target_=points.Normed", timeout=PATIENCE)
    assert done.code == 0, done.err


def test_rows_are_gathered_into_pinned_memory() -> None:
    tensor, indices = torch.randn(100, 3), torch.tensor([7, 99, 0, 7])
    assert rows(tensor, indices, pinned=True).is_pinned()
    assert torch.equal(moved(rows(tensor, indices, pinned=True), CUDA).cpu(), tensor[indices])


def test_a_large_copy_is_done_while_the_gpu_computes_and_later_work_waits_for_it() -> None:
    sleep: Any = torch.cuda._sleep
    source = torch.arange(1 << 22).pin_memory()
    computes: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    for _ in range(3):  # in memory that is used again
        sleep(1_000_000_000)  # cycles: about half a second
        computes.record()
        there = moved(source, CUDA)
        result = there.sum()
        deadline = time.monotonic() + 5.0
        while not _copy_stream(CUDA).query() and time.monotonic() < deadline:
            time.sleep(0.001)
        assert _copy_stream(CUDA).query()
        assert not computes.query()
        del there
        assert moved(source.roll(1), CUDA).sum() == result == source.sum()


def test_a_late_flag_arrives_without_waiting_for_later_work() -> None:
    flag = LateFlag(CUDA)
    assert not flag.read()
    flag.send(torch.ones((), dtype=torch.bool, device=CUDA))
    sleep: Any = torch.cuda._sleep
    sleep(2_000_000_000)  # cycles: about a second of work queued behind it
    before = time.perf_counter()
    assert flag.read()
    assert time.perf_counter() - before < 0.5
    torch.cuda.synchronize()


@pytest.mark.parametrize("pins", [None, Pinning(answer=2)])
def test_a_checkpoint_is_staged_in_pinned_memory_or_without_it(pins: Pinning | None) -> None:
    tensor = torch.randn(300_000, device=CUDA)
    shards = {"weight": Shard.whole(tensor)}
    plan = lay_out("model", shards)
    stage = Stage(CUDA, pins)
    copied = stage.copy([plan], {"model": shards}, share([plan], 0, 1))
    assert copied.numpy().tobytes() == plan.header + tensor.cpu().numpy().tobytes()
    assert copied.is_pinned() == (pins is None)
    stage.copy([plan], {"model": shards}, share([plan], 0, 1))
    larger = {"weight": Shard.whole(torch.randn(900_000, device=CUDA))}
    plan = lay_out("model", larger)
    assert stage.copy([plan], {"model": larger}, share([plan], 0, 1)).is_pinned() == (pins is None)
    assert float(torch.ones(1, device=CUDA)) == 1.0  # no error of CUDA is left behind


@pytest.mark.skipif(count_gpus() < 3, reason="fewer than three GPUs")
def test_a_deterministic_run_on_three_gpus_does_not_hide_an_unused_parameter(ddpexp: Ddpexp) -> None:
    code = (
        "class Unused(Net):\n"
        "    def __init__(self, **options):\n"
        "        super().__init__(**options)\n"
        "        self.extra = nn.Linear(4, 4)\n\n"
        "    def forward(self, rows):\n"
        '        for name in "0123":\n'
        "            rows = self.get_submodule(name)(rows)\n"
        "        return rows\n"
    )
    words = ("model._target_=points.Unused", "trainer.gpus=3", "trainer.deterministic=true")
    done = Recipe(ddpexp, code)(*words, timeout=PATIENCE)
    assert done.code == 1
    assert "got no gradient in a micro-batch" in done.err


FAILS = """\
import torch.distributed as dist


class Greedy(Sides):
    # Wants more memory than there is, while it trains or while it evaluates.
    def __init__(self, trains=True):
        self.trains = trains

    def step(self, model, batch):
        if model.training == self.trains:
            torch.empty(1 << 42, dtype=torch.uint8, device="cuda")
        return super().step(model, batch)


class Late(Sides):
    # On rank 1 it stops in the seventh step: the other's host waits for its GPU.
    def __init__(self):
        self.calls = 0

    def step(self, model, batch):
        self.calls += 1
        if self.calls == 7 and RANK == 1:
            self.stays()
        return super().step(model, batch)

    def stays(self):
        time.sleep(3600)


class Extra(Late):
    # On rank 1 there is a broadcast that no other rank calls.
    def stays(self):
        dist.broadcast(torch.ones(10_000_000, device="cuda"), 0)
"""
HANG = ("trainer.gpus=2", "trainer.epochs=20", "trainer.timeout.step_seconds=5", "trainer.timeout.init_seconds=60")
two_gpus = pytest.mark.skipif(count_gpus() < 2, reason="fewer than two GPUs")


@pytest.mark.fault(72)
def test_out_of_memory_is_answered_with_what_to_change(ddpexp: Ddpexp) -> None:
    done = Recipe(ddpexp, FAILS)("task._target_=points.Greedy", "trainer.gpus=1", timeout=PATIENCE)
    assert done.code == 1
    assert "OutOfMemoryError: GPU 0 of " in done.err
    assert " has no memory for 4096 GiB more: this process holds " in done.err
    assert "use trainer.micro_batch_size=" in done.err
    assert "use trainer.precision=bf16" in done.err


def test_out_of_memory_in_an_evaluation_names_the_key_of_its_batch(ddpexp: Ddpexp) -> None:
    words = ("task._target_=points.Greedy", "+task.trains=false", "trainer.gpus=1")
    done = Recipe(ddpexp, FAILS)(*words, timeout=PATIENCE)
    assert done.code == 1
    assert "evaluate in batches of " in done.err


@two_gpus
@pytest.mark.parametrize(
    ("task", "says"),
    [
        ("Late", r"rank 1 has not called all_reduce number \d+ of the default process group"),
        ("Extra", r"the ranks called different collective operations as number \d+ of the default process group"),
    ],
)
def test_a_hang_with_nccl_names_the_rank_and_the_collective(ddpexp: Ddpexp, task: str, says: str) -> None:
    done = Recipe(ddpexp, FAILS)(*HANG, f"task._target_=points.{task}", timeout=PATIENCE)
    assert done.code == 1
    assert re.search(says, done.err), done.err
    if task == "Late":
        assert "rank 1 on" in done.err
        assert "in stays" in done.err


@two_gpus
def test_a_recorder_that_the_user_has_turned_off_stays_off(ddpexp: Ddpexp) -> None:
    words = (*HANG, "task._target_=points.Late")
    done = Recipe(ddpexp, FAILS)(*words, timeout=PATIENCE, environ={"TORCH_FR_BUFFER_SIZE": "0"})
    assert done.code == 1
    assert "Hang: no progress for" in done.err
    assert "has not called" not in done.err


def test_the_benchmark_on_gpus_runs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "gpu", "--quick", "--out", str(tmp_path), "perceptron", "exact"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=2 * PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr


def test_doctor_examines_the_gpus_and_their_links(ddpexp: Ddpexp) -> None:
    began = time.monotonic()
    done = ddpexp("doctor", "--json")
    assert time.monotonic() - began < 60, "the aim is 20 s"
    findings = [json.loads(line) for line in done.out.splitlines()]
    by_check = {found["check"]: found for found in findings}
    assert done.code == any(found["level"] == "bad" for found in findings), done.err
    assert by_check["workers"]["text"].startswith(f"{count_gpus()} cuda worker"), by_check["workers"]
    assert by_check["torch_gpu"]["level"] == "good"
    assert "torch_build" in by_check
    if by_check["gpu"]["facts"].get("driver") is not None:
        assert by_check["driver"]["level"] == "good"
        assert {gpu["memory_mib"] > 0 for gpu in by_check["gpu"]["facts"]["gpus"]} == {True}
    if count_gpus() > 1:
        assert by_check["all_reduce"]["facts"]["correct"]
        assert by_check["all_reduce"]["facts"]["backend"] == "nccl"
        assert {"nccl", "peer_access"} <= by_check.keys()


# ---------------------------------------------------------------------------------------------------------- the devices


def printed(program: str, **environ: str) -> str:
    """Return what a Python program prints."""
    argv = [sys.executable, "-c", program]
    done = subprocess.run(
        argv, env={**os.environ, **environ}, capture_output=True, text=True, check=True, timeout=PATIENCE
    )
    return done.stdout


def test_the_gpus_and_instances_are_those_of_nvidia_smi() -> None:
    done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True, timeout=PATIENCE)
    usable = [gpu for gpu in nvml.driver().gpus if not gpu.obstacle]
    uuids = [uuid for gpu in usable for uuid in (gpu.uuid, *(instance.uuid for instance in gpu.mig or ()))]
    assert uuids == re.findall(r"UUID: ([^)]+)\)", done.stdout)


@pytest.mark.skipif(any(gpu.mig is not None for gpu in nvml.driver().gpus), reason="CUDA shows one MIG instance")
@pytest.mark.parametrize(
    "variable",
    [
        "", "-1", "0", " 0", "+0", "0gpu", "0,-1", "0,99", "99,0", "0,0", "none", "{uuid}", "{prefix}", "{uuid},0",
        "0,{uuid}", "{uuid},{uuid}", "{uuid},{prefix}", "{uuid},GPU-ffffffff", "GPU-ffffffff,{uuid}", "MIG-{uuid}",
    ],
)  # fmt: skip
def test_the_variable_is_read_as_cuda_itself_reads_it(variable: str) -> None:
    program = """
import ctypes
cuda, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(0)
print(0 if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)) else count.value)
"""
    uuid = next(gpu.uuid for gpu in nvml.driver().gpus if not gpu.obstacle)
    value = variable.format(uuid=uuid, prefix=uuid[:16])
    assert count_gpus({"CUDA_VISIBLE_DEVICES": value}) == int(printed(program, CUDA_VISIBLE_DEVICES=value))


def test_nvml_does_not_initialise_cuda_and_cuda_itself_is_noticed() -> None:
    program = """
from ddpexp.launch.workers.cuda_guard import CudaGuard
from ddpexp.system.hardware import count_gpus
import torch
guard = CudaGuard()
count_gpus()
torch.cuda.is_available()
assert guard.warning(0) is None, guard.warning(0)
torch._C._cuda_getDeviceCount()
guard.imported("initialises")
print(guard.warning(0))
"""
    assert printed(program, PYTORCH_NVML_BASED_CUDA_CHECK="1").strip() == sentence(0, "initialises")


@pytest.mark.parametrize(("call", "forked"), [("is_available", True), ("init", False)])
def test_a_worker_has_its_gpu_whatever_the_server_has_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, forked: bool
) -> None:
    (tmp_path / "asks_cuda.py").write_text(f"import torch\n\ntorch.cuda.{call}()\n")
    (tmp_path / "works.py").write_text(
        "import sys\nimport torch\n\n\n"
        "def main():\n"
        "    print('forked', 'asks_cuda' in sys.modules, torch.ones(2, device='cuda').sum().item(), flush=True)\n"
        "    return 0\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK", raising=False)
    warning = [] if forked else [f"ddpexp: warning: {sentence(0, 'asks_cuda')}"]
    assert output_of_worker("works:main", "asks_cuda", True) == [*warning, f"forked {forked} 2.0"]


DEVICES = """class Shows(Sides):
    # Prints which GPU, or instance, this worker computes on.
    def step(self, model, batch):
        if not hasattr(self, "shown"):
            self.shown = torch.cuda.get_device_properties(batch[1].device).uuid
            print("device", batch[1].device, self.shown, os.environ.get("NCCL_SOCKET_IFNAME"), flush=True)
        return super().step(model, batch)
"""


def devices_of(run: Path, workers: int) -> list[list[str]]:
    """Return what each worker has printed: its device, the UUID of its GPU, the interface that NCCL uses."""
    logs = [(run / "ranks" / f"{rank}.log").read_text() for rank in range(workers)]
    return [re.findall(r"^device (\S+) (\S+) (\S+)$", log, re.MULTILINE)[0] for log in logs]


@pytest.mark.skipif(sum(device.is_mig for device in visible_devices()) < 2, reason="fewer than two MIG instances")
def test_each_worker_has_a_mig_instance_of_its_own(ddpexp: Ddpexp) -> None:
    done = Recipe(ddpexp, DEVICES)("task._target_=points.Shows", "trainer.gpus=2", timeout=PATIENCE)
    assert done.code == 0, done.err
    shown = devices_of(done.run, 2)
    assert [device for device, *_ in shown] == ["cuda:0", "cuda:0"]
    assert len({uuid for _, uuid, _ in shown}) == 2


COMPILED = """\
class Blocks(nn.Sequential):
    def __init__(self, **options):
        super().__init__(nn.Linear(4, 16), Block(), Block(), Block(), nn.Linear(16, 2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, rows):
        return rows + torch.relu(self.layer(rows))


class Losing(Blocks):
    # Returns its loss, as many language models do.
    def forward(self, rows, labels):
        scores = super().forward(rows)
        return nn.functional.cross_entropy(scores, labels, reduction="sum"), (scores.argmax(1) == labels).sum()


class Given:
    def step(self, model, batch):
        _, rows, labels = batch
        loss, right = model(rows, labels)
        return loss, len(labels), {"accuracy": (right, len(labels))}


class Numbers(Sides):
    # Prints in which numbers matrices are multiplied.
    def step(self, model, batch):
        cudnn = torch.backends.cudnn
        print("numbers", torch.get_float32_matmul_precision(), cudnn.benchmark, cudnn.allow_tf32)
        return super().step(model, batch)
"""


@pytest.mark.parametrize(
    ("mode", "blocks"),
    [("true", "null"), ("reduce-overhead", "null"), ("reduce-overhead", "Block"), ("max-autotune", "null"),
     ("max-autotune-no-cudagraphs", "Block")],
)  # fmt: skip
def test_compiled_models_learn_on_a_gpu_what_they_learn_without(ddpexp: Ddpexp, mode: str, blocks: str) -> None:
    """In three micro-batches, and with an output of the model as the loss: CUDA graphs would overwrite both."""
    recipe, losses = Recipe(ddpexp, COMPILED), []
    model = ("model._target_=points.Losing", "task._target_=points.Given")
    same = (*model, "trainer.gpus=1", "trainer.micro_batch_size=8", "trainer.epochs=4")
    for keys in (("trainer.compile=false",), (f"trainer.compile={mode}", f"trainer.compile_blocks={blocks}")):
        done = recipe(*same, *keys, timeout=PATIENCE)
        assert done.code == 0, done.err
        losses.append([record["train/loss"] for record in done.metrics() if "train/loss" in record])
    assert "\ntorch.compile: " in done.out
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_precision_and_benchmark_reach_torch(ddpexp: Ddpexp) -> None:
    words = ("task._target_=points.Numbers", "trainer.gpus=1", "trainer.max_steps=1")
    keys = ("trainer.matmul_precision=high", "trainer.cudnn_benchmark=true", "trainer.conv_precision=fp32")
    done = Recipe(ddpexp, COMPILED)(*words, *keys, timeout=PATIENCE)
    assert done.code == 0, done.err
    assert "numbers high True False\n" in done.out


@pytest.mark.skipif(count_gpus() < 2, reason="fewer than two GPUs")
def test_a_compiled_model_trains_on_two_gpus_as_on_one(ddpexp: Ddpexp) -> None:
    recipe, found = Recipe(ddpexp, COMPILED), []
    for size in (1, 2):
        words = ("model._target_=points.Blocks", "trainer.compile=true", f"trainer.gpus={size}", "trainer.log_every=1")
        done = recipe(*words, timeout=PATIENCE)
        assert done.code == 0, done.err
        found.append([record["train/loss"] for record in done.metrics() if "train/loss" in record])
    assert found[0] == pytest.approx(found[1], rel=1e-3)


def test_check_finds_nothing_in_a_sound_recipe_and_a_batch_that_does_not_fit(ddpexp: Ddpexp) -> None:
    words = ("check", "--config-dir", str(ROOT / "tests/cli/broken/conf"), "recipe=broken", "trainer.gpus=1")
    sound = ddpexp(*words, timeout=PATIENCE)
    assert sound.code == 0, sound.out + sound.err
    exact = ("trainer.reduction=exact", "trainer.micro_batch_size=6", "trainer.deterministic=true")
    assert ddpexp(*words, *exact, timeout=PATIENCE).code == 0
    large = ddpexp(*words, "task._target_=broken.TooLarge", timeout=PATIENCE)
    assert large.code == 1
    assert re.search(r"^problem memory .*use trainer\.micro_batch_size=6", large.out, re.MULTILINE)


def test_values_are_clipped_on_a_gpu_and_time_ends_the_run(ddpexp: Ddpexp) -> None:
    words = ("trainer.gpus=1", "trainer.clip_grad_norm=1", "trainer.clip_grad_value=0.01", "trainer.precision=fp16")
    done = Recipe(ddpexp, CODE)(*words, "trainer.epochs=2000", "trainer.max_seconds=1", timeout=PATIENCE)
    assert done.code == 0, done.err
    assert done.result()["stopped"].startswith("trainer.max_seconds=1 reached after step ")


def test_a_notebook_that_uses_the_gpu_can_train_and_keeps_its_random_numbers(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    program = f"""
import ddpexp, torch
from ddpexp.checkpoint.reader import weights_sha256

words = {[*SMALL, "trainer.gpus=1", "optimizer.lr=0", "run.dir=run"]}
torch.cuda.manual_seed(1)
expected = torch.rand(3, device="cuda")
torch.cuda.manual_seed(1)
model = ddpexp.compose(words).model()
assert torch.equal(torch.rand(3, device="cuda"), expected)
run = ddpexp.run(words)
assert run.result["weights_sha256"] == weights_sha256({{"model": model}})
assert [parameter.device.type for parameter in run.model().parameters()] == ["cpu", "cpu"]
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=PATIENCE
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert " GPU" in done.stdout


def test_inline_gives_the_weights_of_spawn_on_a_gpu(ddpexp: Ddpexp) -> None:
    recipe, words = Recipe(ddpexp), ("trainer.gpus=1", "trainer.deterministic=true")
    inline, spawn = recipe(*words, "launcher=inline"), recipe(*words)
    assert (inline.code, spawn.code) == (0, 0), inline.err + spawn.err
    assert inline.manifest()["world"]["device"] == "cuda"
    assert inline.result()["weights_sha256"] == spawn.result()["weights_sha256"]


def test_a_profile_has_the_kernels_and_a_snapshot_the_memory(ddpexp: Ddpexp) -> None:
    recipe = Recipe(ddpexp)
    words = "trainer.gpus=1", "trainer.deterministic=true"
    plain, done = recipe(*words), recipe(*words, "trainer.profile=1:3", "trainer.memory_snapshot=2")
    assert (plain.code, done.code) == (0, 0), plain.err + done.err
    assert done.result()["weights_sha256"] == plain.result()["weights_sha256"]
    with gzip.open(done.run / "profiles/step1/rank0.trace.json.gz") as file:
        kinds = {event.get("cat") for event in json.load(file)["traceEvents"]}
    assert {"kernel", "user_annotation"} <= kinds
    assert "on the GPU" in (done.run / "profiles/step1/rank0.operators.txt").read_text()
    assert (done.run / "profiles/step2/rank0.memory.pickle").stat().st_size > 0


def test_memory_that_runs_out_leaves_a_snapshot(ddpexp: Ddpexp) -> None:
    code = """\
class Greedy(Sides):
    def step(self, model, batch):
        torch.empty(1 << 50, device="cuda")
"""
    done = Recipe(ddpexp, code)("task._target_=points.Greedy", "trainer.gpus=1", "trainer.memory_snapshot=oom")
    assert done.code == 1, done
    assert (done.run / "profiles/oom/rank0.memory.pickle").stat().st_size > 0


@two_gpus
def test_nccl_and_the_watchdog_wait_for_a_rank_at_a_breakpoint(ddpexp: Ddpexp) -> None:
    recipe = Recipe(ddpexp, LOOKS)
    overrides = ("task._target_=points.Looks", "trainer.gpus=2", "trainer.timeout.step_seconds=2")
    words, run = recipe.words(*overrides)
    with Session([sys.executable, "-m", "ddpexp", *words], recipe.folder, ddpexp.environ) as shell:
        shell.expect("(Pdb rank 1) ")
        time.sleep(10.0)
        shell.type("c\n")
        assert shell.end() == 0, shell.shown
    assert json.loads((run / "result.json").read_text())["status"] == "done"


@pytest.mark.skipif(count_gpus() < 2, reason="one GPU has nothing to gather")
def test_offloaded_shards_train_as_those_on_the_gpus(ddpexp: Ddpexp) -> None:
    recipe, losses = Recipe(ddpexp, ""), []
    for offload in ("false", "true"):
        done = recipe(
            "trainer.gpus=2", "strategy=fsdp", f"strategy.offload={offload}", "trainer.clip_grad_norm=0.1",
            "trainer.ema_decay=0.9", timeout=PATIENCE,
        )  # fmt: skip
        assert done.code == 0, done.err
        losses.append([record["train/loss"] for record in done.metrics() if "train/loss" in record])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_gan_trains_on_a_gpu_in_half_precision(ddpexp: Ddpexp, precision: str) -> None:
    few = ("data.source=embedded", "data.embedded_train=640", "data.embedded_test=100", "trainer.log_every=1")
    keys = (f"trainer.precision={precision}", "trainer.clip_grad_norm=1", "trainer.micro_batch_size=32")
    run = ddpexp.folder / "gan"
    recipe = ("recipe=gan", "trainer.gpus=1")
    for task in ((), ("task._target_=gan.WassersteinGAN", "task.discriminator_lr=0.0002")):
        done = ddpexp(*recipe, *few, *keys, *task, f"run.dir={run}{len(task)}", timeout=PATIENCE)
        assert done.code == 0, done.err
        records = [json.loads(line) for line in Path(f"{run}{len(task)}", "metrics.jsonl").read_text().splitlines()]
        losses = [record["train/discriminator_loss"] for record in records if "train/loss" in record]
        assert len(losses) == 25
        assert None not in losses  # what is not finite

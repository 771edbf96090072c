"""What a run out of GPU memory answers, from messages as torch writes them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ddpexp.data.batch_plan import BatchPlan
from ddpexp.train.gpu_memory import Situation, explain, explained, parse_usage

# torch 2.10 on a GPU that another process uses too.
SHARED = (
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 3 has a total capacity of 79.15 GiB of which 2.05 GiB is "
    "free. Process 12345 has 30.00 GiB memory in use. Including non-PyTorch memory, this process has 47.10 GiB memory "
    "in use. Of the allocated memory 46.00 GiB is allocated by PyTorch, and 500.00 MiB is reserved by PyTorch but "
    "unallocated. If reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True "
    "to avoid fragmentation.  See documentation for Memory Management  "
    "(https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
)
# torch 2.15, fragmented, with a limit for the process and private pools.
FRAGMENTED = (
    "CUDA out of memory. Tried to allocate 512.00 MiB. GPU 0 has a total capacity of 79.15 GiB of which 17.06 MiB is "
    "free. Including non-PyTorch memory, this process has 79.10 GiB memory in use. 79.00 GiB allowed; Of the allocated "
    "memory 60.00 GiB is allocated by PyTorch, with 12.00 MiB allocated in private pools (e.g., CUDA Graphs), and 18.00 "
    "GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory Management"
)
CONTAINED = (  # in a container, where process ids are those of the host
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 15.77 GiB of which 1.00 MiB is free."
    " Process 4711 has 15.76 GiB memory in use. Of the allocated memory 15.00 GiB is allocated by PyTorch, and 1.00 MiB"
    " is reserved by PyTorch but unallocated."
)
TRAINS = Situation(BatchPlan(128, 16, 4, 2), "fp32", "train", on_device=False)


def test_the_numbers_of_the_message() -> None:
    usage = parse_usage(SHARED)
    gib = 1 << 30
    assert (usage.gpu, usage.wanted, usage.others) == ("3", 20 * gib, {"12345": 30 * gib})
    assert (usage.total, usage.free, usage.ours) == (round(79.15 * gib), round(2.05 * gib), round(47.1 * gib))
    assert (usage.allocated, usage.unallocated) == (46 * gib, 500 << 20)
    assert parse_usage(FRAGMENTED).unallocated == 18 * gib
    assert parse_usage(CONTAINED).others == {}  # that may be this process itself


def test_who_holds_the_memory_and_what_to_change() -> None:
    assert explain(SHARED, {}, TRAINS, {}) == (
        "GPU 3 of 79.15 GiB has no memory for 20 GiB more: this process holds 47.1 GiB (46 GiB in tensors, 500 MiB "
        "reserved by torch and not in use), other processes hold 30 GiB (process 12345), 2.05 GiB are free. "
        "What helps: end the other processes, or choose another GPU with CUDA_VISIBLE_DEVICES; use "
        "trainer.micro_batch_size=8 (it is 16): trainer.global_batch_size=128 stays, with 8 accumulation steps; use "
        "trainer.precision=bf16; recompute activations in the model (torch.utils.checkpoint)."
    )


def test_memory_in_pieces_is_answered_with_the_setting_that_this_torch_names() -> None:
    text = explain(FRAGMENTED, {}, TRAINS, {})
    assert "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, since" in text
    assert "end the other processes" not in text
    kept = explain(FRAGMENTED, {}, TRAINS, {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128"})
    assert "set PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:128,expandable_segments:True" in kept
    assert "expandable" not in explain(FRAGMENTED, {}, TRAINS, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"})
    assert "expandable" not in explain(SHARED, {}, TRAINS, {})


@pytest.mark.parametrize(("micro", "smaller"), [(16, 8), (6, 3), (15, 5), (7, 1), (2, 1)])
def test_the_smaller_batch_splits_as_the_larger_one_did(micro: int, smaller: int) -> None:
    text = explain(SHARED, {}, replace(TRAINS, plan=BatchPlan(micro * 8, micro, 4, 2)), {})
    assert f"trainer.micro_batch_size={smaller} (it is {micro})" in text
    assert (micro * 8) % (smaller * 2) == 0


def test_a_batch_of_one_gets_no_smaller() -> None:
    assert "micro_batch_size" not in explain(SHARED, {}, replace(TRAINS, plan=BatchPlan(8, 1, 4, 2)), {})


def test_an_evaluation_is_answered_with_the_key_of_its_batch() -> None:
    text = explain(SHARED, {}, replace(TRAINS, phase="evaluate"), {})
    assert "evaluate in batches of 8 with trainer.micro_batch_size=8 (it is 16)" in text
    assert "torch.utils.checkpoint" not in text


def test_a_model_that_does_not_fit_is_not_answered_with_a_batch() -> None:
    text = explain(CONTAINED, {}, replace(TRAINS, phase="build", precision="bf16"), {})
    assert text.endswith("1 MiB are free. Use a smaller model, or a GPU with more memory.")
    assert "data.on_device=false" in explain(CONTAINED, {}, replace(TRAINS, on_device=True), {})


def test_what_a_library_leaves_out_comes_from_the_statistics() -> None:
    stats = {"allocated_bytes.all.current": 3 << 30, "reserved_bytes.all.current": 4 << 30}
    text = explain("CUDA error: out of memory", stats, TRAINS, {})
    assert text.startswith(
        "the GPU has no memory: this process holds 4 GiB (3 GiB in tensors, 1 GiB reserved by torch and not in use). "
    )


def test_the_error_stays_the_error_and_others_stay_as_they_are() -> None:
    with (
        pytest.raises(torch.OutOfMemoryError, match=r"GPU 3 of 79\.15 GiB has no memory") as info,
        explained(lambda: TRAINS),
    ):
        raise torch.OutOfMemoryError(SHARED)
    assert "trainer.micro_batch_size=8" in str(info.value)
    with pytest.raises(RuntimeError, match=r"^shape"), explained(lambda: TRAINS):
        raise RuntimeError("shape")
    with pytest.raises(RuntimeError, match="the GPU has no memory"), explained(lambda: TRAINS):
        raise RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate")

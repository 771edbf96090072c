"""What records say of the memory of host and GPU."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import torch

from ddpexp.system.process import anonymous_bytes
from ddpexp.train.usage import UsageMeter, names_on, slow_gpu, usage_columns

NAN = math.nan


def test_the_memory_of_a_process_includes_its_children() -> None:
    meter = UsageMeter(torch.device("cpu"))
    before = dict(zip(meter.names, meter.row(), strict=True))
    assert 0 < before["memory/host"] < 100
    assert before["memory/available"] > 0
    code = "x = bytearray(96 << 20); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline()
        assert meter.row() == [before[name] for name in meter.names]  # within a second
        with_child = UsageMeter(torch.device("cpu")).row()[0]
        child.communicate(b"\n")
    assert with_child - anonymous_bytes() / (1 << 30) > 0.09


def test_a_process_that_is_gone_has_no_memory() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait()
    assert anonymous_bytes(child.pid) == 0 < anonymous_bytes(os.getpid())


def test_several_ranks_are_median_least_and_greatest() -> None:
    names = names_on("cpu")
    assert usage_columns(names, [[1.0, 8.0]]) == {"memory/host": 1.0, "memory/available": 8.0}
    columns = usage_columns(names, [[1.0, 8.0], [2.0, 8.0], [6.0, 8.0]])
    assert (columns["memory/host"], columns["memory/host_least"], columns["memory/host_greatest"]) == (2.0, 1.0, 6.0)


def test_of_a_gpu_only_the_known_is_recorded() -> None:
    names = names_on("cuda")
    known, unknown = [1.0, 8.0, 2.0, 3.0, 4.0, 0.9, 1095.0, 1980.0, 32.0], [1.0, 8.0, 2.0, 3.0, 4.0, NAN, NAN, NAN, 0.0]
    columns = usage_columns(names, [unknown, unknown])
    assert "gpu/utilization" not in columns
    assert columns["memory/gpu_peak"] == 4.0
    assert usage_columns(names, [known, unknown])["gpu/utilization"] == 0.9
    assert slow_gpu(names, unknown) == {} == slow_gpu(names_on("cpu"), [1.0, 8.0])
    assert list(slow_gpu(names, known).values()) == [1095.0, 1980.0, 32.0]

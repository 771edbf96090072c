"""Which lines of a rank's output are frames, of faulthandler and of errors of torch's C++, and what stacks tell."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

import ddpexp
from ddpexp.errors import Failure
from ddpexp.launch.supervise import mismatch
from ddpexp.launch.supervise.stacks import Frame, is_native_frame


def test_frames_of_torchs_errors_are_recognised_and_the_error_itself_is_not() -> None:
    with pytest.raises(RuntimeError) as caught:
        TCPStore("127.0.0.1", 1, is_master=False, timeout=timedelta(seconds=0.1))
    lines = [
        *str(caught.value).splitlines(),
        "frame #0: c10::Error::Error(c10::SourceLocation) + 0x9d (0x7fe5dc5a8b8d in /lib/python3.11/libc10.so)",
        "frame #29: _start + 0x21 (0x5591d274e081 in /tmp/envs/3.11/bin/python)",
        "<omitting python frames>",
        "Exception raised from run at /pytorch/torch/csrc/distributed/c10d/socket.cpp:820 (most recent call first):",
    ]
    assert [is_native_frame(line) for line in lines[-4:]] == [True] * 4
    assert not is_native_frame(lines[0])
    assert not any(map(is_native_frame, ["frame #1: of the animation", "an Exception raised from run", "[W1126] x"]))


def test_a_mismatch_names_the_rank_in_the_recipes_own_code_and_where_eight_of_them_are() -> None:
    ours = Frame(str(Path(ddpexp.__file__).parent / "train/loop.py"), "7", "fit")
    stacks = {rank: [ours] for rank in range(1, 10)} | {3: [Frame("recipe.py", "5", "step")]}
    failure = Failure(1, "a", mismatch.KIND, mismatch.MESSAGE, traceback="Fatal Python error: Aborted")
    found = mismatch.located(failure, stacks)
    assert (found.rank, found.traceback) == (3, None)
    assert "rank 3 in step (recipe.py:5); " in found.message
    assert "rank 8 in fit" in found.message
    assert "rank 9" not in found.message
    assert mismatch.located(failure, {1: [ours]}) == failure  # one stack compares with nothing
    assert mismatch.located(failure, {2: [ours], 3: [ours]}) == failure

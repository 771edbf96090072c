"""The same faults under every way to start a job: one cause, said by one command, in time."""

from __future__ import annotations

import json
import os
import re
import signal
from typing import Any

import pytest

from tests.conftest import PATIENCE
from tests.faults.conftest import SOON
from tests.faults.harness import parent_of, pid_of, trained
from tests.launch.starters import STARTERS, Starter, skip_without
from tests.points import Recipe, wait_for

EVERY = ("trainer.log_every=1", "trainer.epochs=20", "trainer.global_batch_size=24", *SOON)
FAULTS = {
    # What a rank does in step 5, what is said of it, and the exit code.
    "stops": ("forward:stop:1:5", r"Hang: no progress for .* is stopped", 1),
    "spins": ("forward:spin:1:5", r"Hang: no progress for .*: it is busy in ", 1),
    "dies": ("forward:kill:1:5", r"SIGKILL: killed by SIGKILL", 1),
    "leaves": ("forward:leave=0:1:5", r"SystemExit: the process ended with exit code 0 before its work was done", 1),
}
FEW = ("torchrun", "sbatch")


def ways() -> list[Any]:
    """Return each way with each fault; of most of them one in the ordinary run, all with -m slow."""
    found = []
    for starter in STARTERS:
        for name in FAULTS:
            often = name == "stops" and starter.name in FEW
            marks = [pytest.mark.slurm] if starter.cluster else []
            marks += [] if often else [pytest.mark.slow]
            found.append(pytest.param(starter, name, marks=marks, id=f"{starter.name}, {name}"))
    return found


@pytest.mark.slow
@pytest.mark.fault(3, 5, 6, 19)
@pytest.mark.parametrize(("starter", "fault"), ways())
def test_a_rank_is_the_cause_for_all(recipe: Recipe, starter: Starter, fault: str) -> None:
    skip_without(starter)
    asked, says, code = FAULTS[fault]
    size = starter.sizes[-1] if 2 not in starter.sizes else 2
    recipe.ddpexp.environ["DDPEXP_FAULT"] = asked
    done = starter(recipe, size, *EVERY)
    error = json.loads((done.run / "error.json").read_text())
    assert (error["rank"], error["step"], error["phase"]) == (1, 4, "train")
    assert re.search(says, f"{error['kind']}: {error['message']}")
    if starter.own_codes:
        assert done.code == code
    shown = done.out + done.err
    if starter.name != "sbatch":
        assert (
            len(
                re.findall(rf"^ddpexp: rank 1 on \S+ failed \(train after step 4\): {says}[^(\n]*", shown, re.MULTILINE)
            )
            >= 1
        ), shown


@pytest.mark.slow
@pytest.mark.fault(5)
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_command_that_is_stopped_with_its_rank_is_named_by_the_other(recipe: Recipe, rank: int) -> None:
    starter = next(one for one in STARTERS if one.name == "variables in shells")
    started, run = starter.start(recipe, 2, *EVERY, "trainer.epochs=10000")
    wait_for(lambda: trained(run, 3))
    worker = pid_of(rank)
    stopped = [worker, parent_of(worker), started[rank].pid]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    _, err = started[1 - rank].communicate(timeout=PATIENCE)
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    assert started[1 - rank].returncode == 1, err
    who = "zero" if rank == 0 else "1"
    assert re.search(
        rf"the command of rank {who} on \S+ (does not answer: it is stopped|is gone: it was killed or stopped)", err
    ), err
    started[rank].communicate(timeout=PATIENCE)

"""Each launcher where a shell still has the variables of the others: right, or refused in a sentence."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from ddpexp.errors import RefusedError
from ddpexp.launch import WorkerRequest
from ddpexp.launch.rendezvous.environment import (
    LaunchEnvironment,
    externally_started,
    of_mpi,
    of_slurm_task,
    of_torchrun,
)
from tests.conftest import ANY, Ddpexp
from tests.launch.rendezvous.test_environment import (
    BY_HAND,
    MPICH,
    OPEN_MPI,
    PMI2,
    STANDALONE,
    TASK,
    TORCHRUN,
    mpi,
)
from tests.launch.starters import SPAWN, STARTERS, Starter, skip_without
from tests.points import Recipe

STARTS = 100  # of each launcher

# What each program leaves, with more of it than the tests of its own variables need.
LEFT: Mapping[str, Mapping[str, str]] = {
    "torchrun": TORCHRUN,
    "torchrun --standalone": STANDALONE,
    "shell": BY_HAND,
    "srun": {**TASK, "SLURM_STEP_NODELIST": "node0", "SLURM_GPUS_ON_NODE": "2", "SLURM_CPU_BIND": "quiet,mask_cpu:0x1"},
    "salloc": {
        "SLURM_JOB_ID": "99999", "SLURM_JOBID": "99999", "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS": "3",
        "SLURM_TASKS_PER_NODE": "2,1", "SLURM_NODELIST": "node[0-1]", "SLURM_MEM_PER_CPU": "10", "SLURM_TIMELIMIT": "1",
    },
    "array": {"SLURM_ARRAY_JOB_ID": "99990", "SLURM_ARRAY_TASK_ID": "4", "SLURM_RESTART_COUNT": "2"},
    "Open MPI": OPEN_MPI,
    "MPICH": MPICH,
    "pmi2": PMI2,
    "pmix": {"PMIX_RANK": "1", "PMIX_NAMESPACE": "slurm.pmix.7.0", "PMIX_SERVER_URI2": "pmix-server;tcp4://127.0.0.1:9"},
}  # fmt: skip
SAME = {"shell": ("shell", "torchrun", "torchrun --standalone"), "torchrun": ("torchrun", "torchrun --standalone")}
"""By program, whose variables it sets or a user means to set."""


def of_mpich(request: WorkerRequest, environ: Mapping[str, str]) -> LaunchEnvironment:
    return of_mpi(request, environ, lambda: "node0:40000")[0]


READERS: Mapping[str, Callable[[WorkerRequest, Mapping[str, str]], LaunchEnvironment]] = {
    "torchrun": of_torchrun, "shell": of_torchrun, "srun": of_slurm_task, "Open MPI": mpi, "MPICH": of_mpich,
}  # fmt: skip


def hostile(seed: int, own: str) -> dict[str, str]:
    """Return what some of the other programs have left in a shell: all of it or a part, some values damaged."""
    chance = random.Random(f"{own} {seed}")
    others = [name for name in LEFT if name not in SAME.get(own, (own,))]
    found: dict[str, str] = {}
    for name in chance.sample(others, chance.randint(1, 4)):
        left = dict(LEFT[name])
        if chance.random() < 0.3:
            left = {key: left[key] for key in chance.sample(sorted(left), chance.randint(1, len(left)))}
        for key in left:
            if chance.random() < 0.1:
                left[key] = chance.choice(["", "0", "-1", "7", "x", "1e3", "99999999999", "nöde"])
        found |= left
    return found


@pytest.mark.parametrize("own", READERS)
def test_a_rank_reads_what_its_own_starter_says(own: str) -> None:
    read = READERS[own]
    undisturbed = replace(read(ANY, LEFT[own]), restarted=None)
    refused = 0
    for seed in range(STARTS):
        environ = {**hostile(seed, own), **LEFT[own]}
        try:
            assert replace(read(ANY, environ), restarted=None) == undisturbed, environ
        except RefusedError:
            refused += 1
        assert own == "shell" or externally_started(environ, 100, lambda _: False) is not None, environ
    assert refused < STARTS / 2


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, warm_single_environ: dict[str, str]) -> Recipe:
    return Recipe(Ddpexp(tmp_path_factory.mktemp("hostile"), warm_single_environ))


@pytest.fixture(scope="module")
def undisturbed(recipe: Recipe) -> Mapping[str, Any]:
    done = SPAWN(recipe, 2)
    assert done.code == 0, done.err
    return done.result()


@pytest.mark.slow
@pytest.mark.fault(75)
@pytest.mark.parametrize("first", range(0, STARTS, 10))
@pytest.mark.parametrize("starter", [SPAWN, *STARTERS], ids=str)
def test_each_start_is_right_or_refused_in_a_sentence(
    starter: Starter, first: int, recipe: Recipe, undisturbed: Mapping[str, Any]
) -> None:
    skip_without(starter)
    size = 2 if 2 in starter.sizes else starter.sizes[0]
    right, refused = 0, set()
    for seed in range(first, first + 10):
        environ = hostile(seed, _OWN.get(starter.name, starter.name))
        in_it = Recipe(
            Ddpexp(
                recipe.ddpexp.folder / f"{starter.name.replace(',', '')} {seed}", {**recipe.ddpexp.environ, **environ}
            )
        )
        done = starter(in_it, size, "trainer.timeout.init_seconds=30")
        said = f"{environ}\n{done.out}\n{done.err}"
        if done.code == 0:
            right += 1
            assert done.result()["world_size"] == size, said
            assert size != 2 or done.result()["weights_sha256"] == undisturbed["weights_sha256"], said
        else:
            found = re.search(_REFUSALS, said, re.MULTILINE)
            assert found, said
            refused.add(found[0])
            assert not re.search(r"File .*/ddpexp/", said), said
    print(f"{starter}: {right} of 10 right, the others refused:", *sorted(refused), sep="\n  ")


_REFUSALS = (  # that name the variable or the program
    r"^(\[rank \d\] )?ddpexp: .*(\b(srun|salloc|sbatch|mpirun|torchrun)\b|[A-Z]{3,}_[A-Z]{2,}|\bRANK\b).*"
    r"|^(srun|sbatch|salloc): (error|fatal).*|^An ORTE daemon has unexpectedly failed"
    r"|unable to find the following environment variable:\s+SLURM_[A-Z_]+"
)
_OWN = {"variables in shells": "shell", "torchrun on two machines": "torchrun", "torch.distributed.launch": "torchrun"}

"""A start that is refused leaves nothing behind, whoever refuses it: neither a folder nor those above it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import SMALL, Ddpexp
from tests.refusals import command_refused

NO_MATCH = "trainer.freeze=[nothing]"  # which only the workers can find out, who know the model
STARTS = {
    "the configuration": (("trainer.gpus=3", "run.dir=a/b"), "trainer.global_batch_size=128"),
    "the data": (("data.root=nowhere", "run.dir=a/b"), "data.root"),
    "the data of a sweep": (("-m", "data.root=nowhere", "trainer.seed=1,2", "hydra.sweep.dir=a/b"), "data.root"),
    "the workers": (("trainer.gpus=2", NO_MATCH, "run.dir=a/b"), NO_MATCH),
    "the evaluation": (("trainer.gpus=1", "trainer.keep_best=max:eval/nothing"), "trainer.keep_best=max:eval/nothing"),
    "sbatch": (("launcher=slurm", "run.dir=a/b"), "sbatch"),
    "sbatch in a sweep": (("-m", "launcher=slurm", "trainer.seed=1,2", "hydra.sweep.dir=a/b"), "sbatch"),
}


@pytest.fixture(scope="session")
def environ(warm_environ: dict[str, str]) -> dict[str, str]:
    """What is left is tested, not how fork servers start."""
    return warm_environ


@pytest.mark.parametrize("who", STARTS)
def test_a_refused_start_leaves_nothing(
    ddpexp: Ddpexp, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, who: str
) -> None:
    words, about = STARTS[who]
    programs = tmp_path_factory.mktemp("programs")
    for name in ("sbatch", "srun"):
        (programs / name).symlink_to("/bin/false")  # what a Slurm that refuses everything would do
    done = ddpexp(*words, *SMALL, "trainer.device=cpu", environ={"PATH": f"{programs}:/usr/bin:/bin"})
    assert done.code == 2, (done.out, done.err)
    if about == "sbatch":
        assert done.err.endswith("ddpexp: sbatch rejected the job: 1. launcher.dry_run=true prints its script.\n")
    else:
        command_refused(done, about, out=None)
    assert list(tmp_path.iterdir()) == []

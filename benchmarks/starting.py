"""Ways to start a program's ranks, ours and the plain script's, and what both say of the first step and the last."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.race import Arm, last_json
from benchmarks.suite import records, result

# How the ranks of a plain script learn their places where torchrun does not tell them.
_PLACES = {
    "srun": "RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID",
    "mpirun": "RANK=$OMPI_COMM_WORLD_RANK WORLD_SIZE=$OMPI_COMM_WORLD_SIZE LOCAL_RANK=$OMPI_COMM_WORLD_LOCAL_RANK",
}
_MPIRUN = ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]


def started(way: str, workers: int, program: Sequence[str], ours: bool) -> list[str]:
    """Return the words that start a program's ranks in one of the ways.

    Ours has its own under spawn, elastic and salloc.
    """
    if way in ("spawn", "elastic") and ours:
        return [sys.executable, *program, f"launcher={way}", f"trainer.gpus={workers}"]
    if way in ("spawn", "torchrun"):
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers)]
        return [*torchrun, *program, *(["launcher=torchrun-env"] if ours else [])]
    before = {
        "srun": ["srun", "-N1", f"-n{workers}"],
        "salloc": ["salloc", "-N1", f"-n{workers}", *([] if ours else ["srun"])],
        "mpirun": [*_MPIRUN, "-n", str(workers)],
    }[way]
    if ours:
        mine = ["launcher=mpi"] if way == "mpirun" else ["launcher=slurm"]
        return [*before, sys.executable, *program, *mine, *([f"trainer.gpus={workers}"] if way == "salloc" else [])]
    place = f"export MASTER_ADDR=127.0.0.1 MASTER_PORT=29750 {_PLACES['mpirun' if way == 'mpirun' else 'srun']}"
    return [*before, "bash", "-c", f'{place}; exec "$@"', "-", sys.executable, *program]


def arms(data: Path, workers: int, words: Sequence[str], steps: int, way: str = "spawn") -> list[Arm]:
    """Return ddpexp, the plain script and ddpexp again, all started in one way and with one thread a rank."""

    def plain(place: Path) -> list[str]:
        program = [
            "-m",
            "benchmarks.peers.bare",
            "--data",
            str(data),
            "--steps",
            str(steps),
            "--tensorboard",
            str(place),
        ]
        return started(way, workers, program, ours=False)

    def theirs(_place: Path, output: str, begin: float, end: float) -> dict[str, float]:
        found = last_json(output)
        return {
            "first step": found["first_step_at"] - begin,
            "whole command": end - begin,
            "steps a second": found["steps_per_second"],
        }

    def ours(place: Path, _output: str, begin: float, end: float) -> dict[str, float]:
        lines = records(place / "run")
        rate = (lines[-1]["step"] - lines[0]["step"]) / (lines[-1]["time"] - lines[0]["time"])
        return {
            "first step": result(place / "run")["first_step_at"] - begin,
            "whole command": end - begin,
            "steps a second": rate,
        }

    def command(place: Path) -> list[str]:
        typed = ["recipe=mnist", f"data.root={data}", "data.source=files", f"run.dir={place / 'run'}"]
        batch = [f"trainer.global_batch_size={64 * workers}", "trainer.threads=1"]
        return started(way, workers, ["-m", "ddpexp", *typed, *batch, *words], ours=True)

    return [Arm("ddpexp", command, ours), Arm("plain script", plain, theirs), Arm("ddpexp again", command, ours)]

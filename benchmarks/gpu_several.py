"""The pieces of the benchmark on GPUs that need more than one."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

from benchmarks.gpu_correct import offloaded, resumed, same_weights
from benchmarks.gpu_goals import Finding
from benchmarks.gpu_place import CutError, Place
from benchmarks.gpu_speed import rate
from benchmarks.suite import Row, result

_GONE_SECONDS = 30.0
_PIPELINE = ("recipe=layers", "trainer.precision=fp32", "trainer.micro_batch_size=2", "strategy=pipeline")


def two_gpus(place: Place) -> Iterator[Finding]:
    """Yield equal weights, sharded models, a pipeline, compiled blocks, and a rank that is killed inside NCCL."""
    two = "trainer.gpus=2"
    yield from resumed(place, "two GPUs: kill -9 and resume", two, "trainer.deterministic=true")
    same = [
        "trainer.reduction=exact",
        "trainer.deterministic=true",
        f"trainer.micro_batch_size={2 if place.quick else 32}",
    ]
    yield same_weights(place, "trainer.reduction=exact on one GPU and on two", [same, [*same, two]])
    yield from offloaded(place, two)
    yield pipeline(place, 2, "1f1b")
    blocks = () if place.quick else ("trainer.compile=true", "trainer.compile_blocks=Block")
    yield Row(
        "two GPUs, ResNet-18 with compiled blocks", f"{rate(place, 'blocks', blocks, gpus=2):,.1f} steps a second"
    )
    yield _killed(place)


def _killed(place: Place) -> Row:
    """Return how a run ends of which a rank is killed while the other waits for it in a collective."""
    words = ("trainer.gpus=2", "data=images", f"data.root={place.images((60_000, 1, 28, 28))}", "model.name=shallow")
    command = place.command(place.folder / "killed-rank", *words, "trainer.max_steps=1000", "trainer.log_every=1")
    with place.started(command, DDPEXP_FAULT="backward:kill:1:5") as program:
        began = time.monotonic()
        code = program.wait(place.left())
        took = time.monotonic() - began
        gone = program.gone(_GONE_SECONDS)
        if code is None:
            raise CutError
    shown = f"exit code {code} {took:.1f} s after the start, {'something' if gone is None else 'nothing'} is left"
    return Row(f"two GPUs: rank 1 gets {signal.SIGKILL.name} in a step", shown, met=code == 1 and gone is not None)


def pipeline(place: Place, gpus: int, schedule: str) -> Row:
    """Return when the first step of a pipeline over all of these GPUs is done."""
    stages = 2 if schedule == "interleaved" else 1
    words = [*_PIPELINE, f"strategy.schedule={schedule}", f"strategy.stages_per_worker={stages}"]
    words += [
        f"strategy.pp_size={gpus // stages}",
        f"trainer.gpus={gpus}",
        "trainer.max_steps=20",
        "trainer.log_every=5",
    ]
    run, began = place.folder / f"pipeline-{gpus}-{schedule}", time.time()
    place.train(run, *words)
    shown = f"{result(run)['first_step_at'] - began:.1f} s from the command to the first step"
    return Row(f"a pipeline on {gpus} GPUs, {schedule}", shown, met=True)


def scaling(place: Place) -> Iterator[Finding]:
    """Yield how the speed grows with the GPUs of this machine, at the same batch on each."""
    one = rate(place, "gpus-1", ())
    for gpus in sorted({2, place.gpus}):
        many = rate(place, f"gpus-{gpus}", (), gpus)
        shown = f"{many:,.1f} against {one:,.1f} of one"
        yield Row(f"steps a second, ResNet-18, {gpus} GPUs, as many images on each", shown, f"{many / one:.3f}")


def eight_gpus(place: Place) -> Iterator[Finding]:
    """Yield equal weights with and without sums in the switch, and the start of pipelines."""
    for switch in ("0", "1"):
        what = f"eight GPUs, NCCL_NVLS_ENABLE={switch}: kill -9 and resume"
        yield from resumed(place, what, "trainer.gpus=8", "trainer.deterministic=true", NCCL_NVLS_ENABLE=switch)
    for schedule in ("1f1b", "interleaved"):
        yield pipeline(place, 8, schedule)

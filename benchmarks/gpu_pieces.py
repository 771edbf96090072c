"""The pieces of the benchmark on GPUs in their order: what shows whether ddpexp is correct first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from benchmarks import gpu_correct, gpu_several, gpu_speed
from benchmarks.gpu_goals import Finding
from benchmarks.gpu_place import Place


@dataclass(frozen=True)
class Piece:
    """A part of the benchmark, which yields what it finds as soon as it is found."""

    run: Callable[[Place], Iterator[Finding]]
    seconds: float  # after which it is ended, on one H100 twice of what it takes
    gpus: int = 1
    correctness: bool = False


PIECES: Mapping[str, Piece] = {
    "machine": Piece(gpu_correct.machine, 30, correctness=True),
    "nccl": Piece(gpu_correct.nccl, 40, correctness=True),
    "recipes": Piece(gpu_correct.recipes, 60, correctness=True),
    "resume": Piece(gpu_correct.resume, 60, correctness=True),
    "exact": Piece(gpu_correct.exact, 60, correctness=True),
    "sigterm": Piece(gpu_correct.sigterm, 40, correctness=True),
    "tests": Piece(gpu_correct.tests, 150, correctness=True),
    "doctor": Piece(gpu_correct.doctor, 30, correctness=True),
    "fsdp": Piece(gpu_correct.fsdp, 50, correctness=True),
    "two_gpus": Piece(gpu_several.two_gpus, 240, gpus=2, correctness=True),
    "eight_gpus": Piece(gpu_several.eight_gpus, 240, gpus=8, correctness=True),
    "perceptron": Piece(gpu_speed.perceptron, 60),
    "cifar10": Piece(gpu_speed.cifar10, 75),
    "gpt": Piece(gpu_speed.gpt, 120),
    "resnet50": Piece(gpu_speed.resnet50, 100),
    "resnet18": Piece(gpu_speed.resnet18, 110),
    "deterministic": Piece(gpu_speed.deterministic, 60),
    "checkpoint": Piece(gpu_speed.checkpoint, 50),
    "host": Piece(gpu_speed.host, 130),
    "scaling": Piece(gpu_several.scaling, 90, gpus=2),
    "compiled": Piece(gpu_correct.compiled, 120),
}

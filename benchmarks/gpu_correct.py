"""The pieces of the benchmark on GPUs that show whether ddpexp is correct there."""

from __future__ import annotations

import importlib.util
import json
import math
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.gpu_goals import EQUAL, Finding, Outcome, equal
from benchmarks.gpu_place import CutError, Place, Program
from benchmarks.suite import ROOT, Row, records
from ddpexp.checkpoint.format import complete_checkpoints
from ddpexp.system.hardware import count_gpus, usable_cores
from recipes.segment import draw as draw_masks

_TEST_SECONDS, _COMPILE_SECONDS = 60, 110
_GONE_SECONDS = 10.0
_STEPS = 20  # of a short run
_CIFAR, _DIGITS = (50_000, 3, 32, 32), (60_000, 1, 28, 28)
_FACTS = """
import json, torch
cuda = torch.cuda.is_available()
print(json.dumps({
    "torch": torch.__version__, "CUDA": torch.version.cuda, "devices": torch.cuda.device_count(),
    "cuDNN": torch.backends.cudnn.version() if cuda else None,
    "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
    "GPU": torch.cuda.get_device_name() if cuda else None,
    "memory": torch.cuda.mem_get_info() if cuda else None,
}))
"""


def machine(place: Place) -> Iterator[Finding]:
    """Yield what this machine has, and that a run that is not given a device trains on its GPUs."""
    facts = json.loads(place.run([sys.executable, "-c", _FACTS]))
    yield Row("machine", ", ".join(f"{name} {value}" for name, value in facts.items() if value is not None))
    if place.device == "cuda":
        met = count_gpus() == facts["devices"]
        yield Row("GPUs, counted without CUDA, against torch", f"{count_gpus()} against {facts['devices']}", met=met)
    images, run = place.images(_DIGITS), place.folder / "run"
    found = place.train(
        run, "data=images", f"data.root={images}", "model.name=shallow", "trainer.device=auto", "trainer.max_steps=4"
    )
    yield Row("manifest.json of a run with trainer.device=auto", found["device"], met=True)


def nccl(place: Place) -> Iterator[Finding]:
    """Yield each test of NCCL on one rank; without a GPU those of the same code over gloo."""
    where = "gpu" if place.device == "cuda" else "not gpu"
    yield from _tests(place, "one rank alone over NCCL", ["tests/test_nccl_alone.py"], "-m", where)


def tests(place: Place) -> Iterator[Finding]:
    """Yield each test that needs a GPU, but for those that compile and this benchmark's own."""
    yield from _tests(place, "pytest -m gpu", _files(), "-m", "gpu", "-k", "not compile and not test_the_benchmark")


def compiled(place: Place) -> Iterator[Finding]:
    """Yield each test that needs a GPU and compiles."""
    yield from _tests(
        place, "pytest -m gpu -k compile", _files(), "-m", "gpu", "-k", "compile", seconds=_COMPILE_SECONDS
    )


def _files() -> list[str]:
    paths = (path for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text())
    return [str(path.relative_to(ROOT)) for path in paths if path.name != "test_nccl_alone.py"]


def _tests(
    place: Place, what: str, files: Sequence[str], *words: str, seconds: int = _TEST_SECONDS
) -> Iterator[Finding]:
    """Yield each test when it has ended, then a row. The project's own settings of pytest need its plugins."""
    settings, results = place.folder / "pytest.ini", place.folder / "tests.jsonl"
    settings.write_text("[pytest]\naddopts = -q --continue-on-collection-errors -p no:cacheprovider -p no:timeout\n")
    several = len(files) > 1 and importlib.util.find_spec("xdist") is not None
    shared = ["-n", str(min(4, usable_cores())), "--dist", "load"] if several else []
    command = [sys.executable, "-m", "pytest", "-c", str(settings), "--rootdir", str(ROOT), *shared]
    command += ["-p", "benchmarks.gpu_tests", *words, *files]
    results.touch()
    found: list[Outcome] = []
    with place.started(command, GPU_TESTS=str(results), GPU_TEST_SECONDS=str(seconds)) as program:
        code, cut = None, False
        while code is None and not cut:
            code, cut = program.wait(1.0), place.left() <= 0
            lines = results.read_text().splitlines(keepends=True)
            new = [Outcome(**json.loads(line)) for line in lines[len(found) :] if line.endswith("\n")]
            found += new
            yield from new
        problem = program.problem() if code not in (0, 1, 5) and not cut else ""  # 5: all were deselected
    outcomes = [test.outcome for test in found]
    counted = {name: outcomes.count(name) for name in ("passed", "failed", "skipped") if name in outcomes}
    shown = ", ".join(f"{count} {name}" for name, count in counted.items())
    failed = "; ".join(test.test for test in found if test.outcome == "failed")
    yield Row(what, shown or "none", met=not failed and not problem, note=failed or problem)
    if cut:
        raise CutError


def recipes(place: Place) -> Iterator[Finding]:
    """Yield one short run of each recipe that has operations of its own."""
    (place.folder / "text.txt").write_text("The quick brown fox jumps over the lazy dog.\n" * 500)
    draw_masks(place.folder / "shapes", train=40, val=8)
    drawn = ("data.source=embedded", "data.embedded_train=2560", "data.embedded_test=128")
    runs = {
        "mnist": drawn,
        "gpt": (f"data.path={place.folder / 'text.txt'}", "task.sample_tokens=8"),
        "segment": (f"data.root={place.folder / 'shapes'}",),
        "gan": drawn,
    }
    for name, words in runs.items():
        began, run = time.monotonic(), place.folder / name
        few = (f"trainer.max_steps={_STEPS}", "trainer.log_every=5", "trainer.limit_eval_batches=1")
        try:
            place.train(run, f"recipe={name}", "trainer.epochs=null", *few, *words)
        except RuntimeError as error:
            yield Row(f"recipe={name}, {_STEPS} steps", "failed", met=False, note=str(error))
            continue
        losses = [line["train/loss"] for line in records(run) if "train/loss" in line]
        sound = len(losses) == _STEPS // 5 and all(loss is not None and math.isfinite(loss) for loss in losses)
        shown = f"{time.monotonic() - began:.1f} s, loss {losses[0]:.3g} to {losses[-1]:.3g}"
        yield Row(f"recipe={name}, {_STEPS} steps", shown, met=sound)


# Runs that are killed, and runs that must end with the same weights.


def resume(place: Place) -> Iterator[Finding]:
    """Yield whether a run that was killed ends with the weights of one that was not."""
    yield from resumed(place, EQUAL, "trainer.deterministic=true")


def resumed(place: Place, what: str, *overrides: str, **own: str) -> Iterator[Finding]:
    """Yield whether a killed run ends with the weights of one that was not, and when nothing of it was left."""
    steps, every = (24, 4) if place.quick else (300, 40)
    words = [*_photos(place, steps, every), "data.flip=true", "data.crop=4", *overrides]
    number = len(list(place.folder.glob("whole-*")))
    whole = place.train(place.folder / f"whole-{number}", *words, **own)
    run = place.folder / f"killed-{number}"
    with place.started(place.command(run, *words), **own) as program:
        reached = _wait_for(place, program, run, step=2 * every + every // 2)
        program.send(signal.SIGKILL)
        gone = program.gone(_GONE_SECONDS)
    shown = "never" if gone is None else f"{gone:.2f} s"
    yield Row(f"{what}: nothing is left of the killed run after", shown, met=gone is not None)
    last = complete_checkpoints(run / "checkpoints")[0]
    ended = place.train(run, *words, **own)
    note = f"killed at step {reached} of {steps}, resumed from {last.name if last else 'the start'}"
    yield equal(what, whole, ended, note)


def exact(place: Place) -> Iterator[Finding]:
    """Yield whether exact sums are the same in two runs, at two numbers of micro-batches."""
    for parts in (2, 4):
        words = ["trainer.reduction=exact", "trainer.deterministic=true"]
        words.append(f"trainer.micro_batch_size={_batch(place) // parts}")
        yield same_weights(place, f"trainer.reduction=exact, {parts} micro-batches, twice", [words, words])


def same_weights(place: Place, what: str, runs: Sequence[Sequence[str]]) -> Row:
    """Return whether two runs end with the same weights."""
    number = len(list(place.folder.glob("same-*")))
    first, second = (
        place.train(place.folder / f"same-{number + turn}", *_photos(place, 8 if place.quick else 40, 1_000), *words)
        for turn, words in enumerate(runs)
    )
    return equal(what, first, second)


def sigterm(place: Place) -> Iterator[Finding]:
    """Yield what SIGTERM in the middle of a run leaves: a checkpoint, the exit code 143, and no process."""
    run = place.folder / "run"
    with place.started(place.command(run, *_photos(place, 1_000_000, 1_000_000))) as program:
        reached = _wait_for(place, program, run, step=10)
        program.send(signal.SIGTERM)
        began = time.monotonic()
        code = program.wait(min(place.left(), 60.0))
        took = time.monotonic() - began
        gone = program.gone(_GONE_SECONDS)
    saved = complete_checkpoints(run / "checkpoints")[0]
    yield Row("SIGTERM in a run: exit code", str(code), bar="143", met=code == 143, note=f"{took:.2f} s later")
    met = saved is not None and int(saved.name.rpartition("-")[2]) >= reached
    yield Row(f"SIGTERM after step {reached}: checkpoint", saved.name if saved else "none", met=met)
    yield Row(
        "SIGTERM: nothing is left", "something is" if gone is None else f"{gone:.2f} s later", met=gone is not None
    )


def fsdp(place: Place) -> Iterator[Finding]:
    """Yield whether sharded models train, save and end on the GPU and with their parameters on the host."""
    yield from offloaded(place)


def offloaded(place: Place, *overrides: str) -> Iterator[Finding]:
    """Yield the losses with parameters on the device and on the host, which are near each other."""
    losses: list[float] = []
    for offload in ("false", "true") if place.device == "cuda" else ("false", "false"):  # refused on a CPU
        run = place.folder / f"offload-{len(losses)}-{len(overrides)}"
        words = (*_photos(place, 24, 8), "strategy=fsdp", f"strategy.offload={offload}", *overrides)
        place.train(run, *words, "trainer.clip_grad_norm=1")
        losses.append(records(run)[-1]["train/loss"])
        yield Row(" ".join(("strategy=fsdp", f"strategy.offload={offload}", *overrides)), f"loss {losses[-1]:.4f}")
    met = math.isclose(*losses, rel_tol=0.05)
    yield Row(" ".join(("strategy=fsdp with and without offload", *overrides)), "losses near each other", met=met)


def _batch(place: Place) -> int:
    return 8 if place.quick else 128


def _photos(place: Place, steps: int, every: int) -> list[str]:
    """Return a run of ResNet-18 on images, which saves every so many steps."""
    return [
        "data=images", f"data.root={place.images(_CIFAR)}", "data.on_device=true", "trainer.log_every=1",
        "model.name=resnet18", f"trainer.global_batch_size={_batch(place)}",
        f"trainer.max_steps={steps}", f"trainer.checkpoint_every={every}",
    ]  # fmt: skip


def _wait_for(place: Place, program: Program, run: Path, step: int) -> int:
    """Wait until a run has recorded a step; return the newest one."""
    while place.left() > 0:
        code = program.wait(0.01)
        if (run / "metrics.jsonl").exists():
            lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
            done = [json.loads(line)["step"] for line in lines[-2:] if line.endswith("\n")]
            if done and max(done) >= step:
                return int(max(done))
        if code is not None:
            raise RuntimeError(f"the run ended before step {step}; {program.problem()}")
    raise CutError


def doctor(place: Place) -> Iterator[Finding]:
    """Yield what `ddpexp doctor` reports of this machine."""
    command = [sys.executable, "-m", "ddpexp", "doctor", "--json", f"trainer.device={place.device}"]
    with place.started(command) as program:
        if program.wait(place.left()) is None:
            raise CutError
        lines = [json.loads(line) for line in program.output()[0].splitlines() if line.startswith("{")]
        if not lines:
            raise RuntimeError(program.problem())
    levels = [line["level"] for line in lines]
    shown = ", ".join(f"{levels.count(level)} {level}" for level in ("good", "doubtful", "bad"))
    yield Row(
        "ddpexp doctor",
        shown,
        note="; ".join(f"{line['check']}: {line['text']}" for line in lines if line["level"] != "good"),
    )
    for line in lines:
        if line["check"] in ("gpu", "links", "all_reduce", "driver", "torch_gpu"):
            yield Row(f"ddpexp doctor, {line['check']}", line["text"])

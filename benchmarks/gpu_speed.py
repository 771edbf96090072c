"""The pieces of the benchmark on GPUs that show what ddpexp costs there.

Every figure of a step is taken between synchronisations with the GPU. A program that is ended because the time is over
has left its blocks of steps until then.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_goals import CHECKPOINT, CIFAR10, GPT, PERCEPTRON, RESNET18, RESNET50, Finding, bar
from benchmarks.gpu_place import CutError, Place
from benchmarks.race import last_json, quartiles
from benchmarks.suite import Chart, Row, records
from ddpexp.data.cifar10.prepare import prepare

_TOLERANCE = 0.05  # of the loss at the end: half precision and atomic sums make no run the same as another
_CIFAR, _DIGITS, _PHOTOS = (50_000, 3, 32, 32), (60_000, 1, 28, 28), (2048, 3, 224, 224)
_CIFAR_EPOCHS = 10


def perceptron(place: Place) -> Iterator[Finding]:
    """Yield a small network, whose step is all overhead, against the loop by hand, and the host's time in both."""
    yield from _images_in_turn(place, PERCEPTRON, "shallow", _DIGITS, 128, 8000, 100, compiles=True)
    ours, theirs = (
        statistics.median(block[which] for block in _blocks(place.folder / "in-turn-0")) for which in (2, 3)
    )
    yield Row("host time of a step, 784-128-10", f"{ours:.1f} against {theirs:.1f} us by hand")


def resnet18(place: Place) -> Iterator[Finding]:
    """Yield ResNet-18 on small images, compiled, against the loop by hand."""
    yield from _images_in_turn(place, RESNET18, "resnet18", _CIFAR, 512, 240, 12, compiles=True)


def resnet50(place: Place) -> Iterator[Finding]:
    """Yield ResNet-50, in both formats of 16 bits, with and without cuDNN's trials in both loops."""
    for tries, precision in itertools.product(("true", "false"), ("bf16", "fp16")):
        variant = f"{precision}, trainer.cudnn_benchmark={tries}"
        words = (f"trainer.precision={precision}", f"trainer.cudnn_benchmark={tries}", f"+task.precision={precision}")
        yield from _images_in_turn(place, f"{RESNET50}, {variant}", "resnet50", _PHOTOS, 256, 40, 4, False, words)


def _images_in_turn(
    place: Place,
    what: str,
    model: str,
    shape: tuple[int, ...],
    batch: int,
    steps: int,
    block: int,
    compiles: bool,
    more: Sequence[str] = (),
) -> Iterator[Finding]:
    """Yield a network on images, channels-last if it has convolutions, samples in the GPU's memory."""
    batch, steps, block, every, compiles = (
        (4, 8, 2, 4, False) if place.quick else (batch, steps, block, steps // 2, compiles)
    )
    data, folder, channels_last = place.images(shape), _next(place), model != "shallow"
    task: dict[str, Any] = {
        "data": data,
        "order": place.order(256 if place.quick else shape[0], batch, steps),
        "folder": folder,
    }
    task |= {"model": model, "block": block, "every": every, "channels_last": channels_last, "compiles": compiles}
    yield from _in_turn(place, what, folder, steps, every, [
        "data=images", f"data.root={data}", f"model.name={model}", f"trainer.global_batch_size={batch}",
        f"trainer.compile={compiles}", f"trainer.channels_last={channels_last}", "data.on_device=true",
        "task._target_=raced.InTurnOnDevice", *(f"+task.{key}={value}" for key, value in task.items()), *more,
    ])  # fmt: skip


def gpt(place: Place) -> Iterator[Finding]:
    """Yield GPT-2 124M, with clipped gradients over 4 micro-batches of 12, and without clipping in one."""
    size, batch, samples, context = ("tiny", 4, 64, 16) if place.quick else ("124M", 12, 2048, 1024)
    for micro_batches, clip in ((4, "1.0"), (1, "null")):
        steps, block = (8, 2) if place.quick else (80 // micro_batches, 8 // micro_batches)
        folder, compiles, every = _next(place), not place.quick, steps // 2
        task = {"order": place.order(samples, micro_batches * batch, steps), "folder": folder, "block": block}
        task |= {"size": size, "samples": samples, "every": every, "micro_batches": micro_batches, "clip": clip}
        what = (
            f"{GPT}, {micro_batches} x {batch} x {context:,} tokens, {'clipped' if clip != 'null' else 'not clipped'}"
        )
        yield from _in_turn(place, what, folder, steps, every, [
            "model=gpt", f"model.size={size}", "data=tokens", f"data.size={size}", f"data.samples={samples}",
            "data.on_device=true", "optimizer=adamw", "optimizer.lr=0.0003", "optimizer.betas=[0.9,0.95]",
            "optimizer.weight_decay=0.1", "trainer.param_groups=[{ndim:[0,1],weight_decay:0.0}]",
            f"trainer.global_batch_size={micro_batches * batch}", f"trainer.micro_batch_size={batch}",
            f"trainer.compile={compiles}", f"trainer.compile_blocks={'Layer' if compiles else 'null'}",
            f"trainer.clip_grad_norm={clip}", "task._target_=raced.NextTokenInTurn", f"+task.compiles={compiles}",
            *(f"+task.{key}={value}" for key, value in task.items()),
        ])  # fmt: skip


def _next(place: Place) -> Path:
    folder = place.folder / f"in-turn-{len(list(place.folder.glob('in-turn-*')))}"
    folder.mkdir()
    return folder


def _in_turn(
    place: Place, what: str, folder: Path, steps: int, every: int, overrides: Sequence[str]
) -> Iterator[Finding]:
    """Train with ddpexp and by hand in one process, blocks of steps in turn; yield the comparison of the blocks."""
    cut, note = None, ""
    try:
        place.run(place.command(folder / "run", f"trainer.max_steps={steps}", f"trainer.log_every={every}", *overrides))
        ours, theirs = (
            records(folder / "run")[-1]["train/loss"],
            json.loads((folder / "by_hand.json").read_text())["loss"],
        )
        if abs(ours - theirs) > _TOLERANCE * abs(theirs):
            note = f"other work: the losses are {ours:.4f} and {theirs:.4f}"
    except CutError as error:
        cut = error
    blocks = _blocks(folder)
    if blocks:
        yield from _compared(what, blocks, note or (f"ended after {len(blocks)} blocks" if cut else ""))
    if cut is not None:
        raise cut


def _compared(what: str, blocks: Sequence[Sequence[float]], note: str) -> Iterator[Finding]:
    share = quartiles([theirs / ours for ours, theirs, *_ in blocks])
    again = quartiles([after[0] / before[0] for before, after in itertools.pairwise(blocks)] or [1.0])
    ours, theirs = (statistics.median(block[which] for block in blocks) for which in (0, 1))
    more = statistics.median(block[0] - block[1] for block in blocks)
    shown = f"{1e6 / ours:,.1f} against {1e6 / theirs:,.1f}; {more:+.1f} us a step"
    goal = bar(next(goal for goal in (PERCEPTRON, RESNET18, RESNET50, GPT) if what.startswith(goal)))
    met = goal.met(share.median) and not note.startswith("other work")
    yield Row(what, shown, str(share), str(again), str(goal), met, note, share.median)
    arms = {"ddpexp": [block[0] for block in blocks], "by hand": [block[1] for block in blocks]}
    yield Chart(f"a step, {what.partition(', ')[2]}", "microseconds", {"": arms})


def _blocks(folder: Path) -> list[list[float]]:
    """Return the times of a step by block: ours, theirs, and the host's part in both. Units: microseconds.

    The first two blocks compile, and are left out where there are others.
    """
    if not (folder / "blocks.jsonl").exists():
        return []
    lines = [json.loads(line) for line in (folder / "blocks.jsonl").read_text().splitlines()]
    return [[1e6 * seconds for seconds in line] for line in lines[min(2, max(len(lines) - 1, 0)) :]]


# Programs of their own.


def cifar10(place: Place) -> Iterator[Finding]:
    """Yield the time of the recipe's epochs, with the images on the device and on the host, against airbench94's."""
    samples, batch, width = (512, 64, (4, 8, 8)) if place.quick else (50_000, 1024, (64, 256, 256))
    found = prepare(None, "embedded", embedded_train=samples, embedded_test=samples // 5)
    per_epoch = samples // batch
    peer = [
        sys.executable, "-m", "benchmarks.peers.cifar10_gpu", "--folder", found["folder"], "--width", *map(str, width),
        "--batch", str(batch), "--epochs", str(_CIFAR_EPOCHS),
    ]  # fmt: skip
    theirs = last_json(place.run(peer))
    yield Row("accuracy of airbench94's loop, drawn pictures", f"{theirs['accuracy']:.2%}")
    for on_device in ("true", "false"):
        run = place.folder / f"on-device-{on_device}"
        place.train(
            run, "recipe=cifar10", "data.source=embedded", f"data.embedded_train={samples}",
            f"data.embedded_test={samples // 5}", f"data.on_device={on_device}",
            f"model.widths=[{','.join(map(str, width))}]", f"trainer.global_batch_size={batch}",
            f"trainer.epochs={_CIFAR_EPOCHS}", f"trainer.log_every={per_epoch}",
            f"trainer.eval_every={_CIFAR_EPOCHS * per_epoch}",
        )  # fmt: skip
        lines = [line for line in records(run) if "train/loss" in line]
        seconds = lines[-1]["time"] - lines[0]["time"]
        accuracy = next(line["eval/accuracy"] for line in records(run) if "eval/accuracy" in line)
        ratio = seconds / theirs["seconds"]
        goal = bar(CIFAR10) if on_device == "true" else None
        yield Row(
            f"{CIFAR10}, data.on_device={on_device}",
            f"{seconds:.2f} s against {theirs['seconds']:.2f} s for epochs 2 to {_CIFAR_EPOCHS}", f"{ratio:.3f}",
            bar=str(goal or ""), met=goal.met(ratio) if goal else None, value=ratio,
            note=f"accuracy {accuracy:.2%} of drawn pictures, not of CIFAR-10",
        )  # fmt: skip


def deterministic(place: Place) -> Iterator[Finding]:
    """Yield what deterministic algorithms cost, and the exact reduction with them."""
    micro = f"trainer.micro_batch_size={1 if place.quick else 128}"
    ways = {"fast": (), "deterministic": ("trainer.deterministic=true",)}
    ways["exact"] = (*ways["deterministic"], "trainer.reduction=exact")
    rates = {}
    for name, words in ways.items():
        rates[name] = rate(place, name, (micro, *words))
        if name != "fast":
            shown = f"{rates[name]:,.1f} against {rates['fast']:,.1f}"
            yield Row(
                f"steps a second, ResNet-18, 4 micro-batches, {name} against fast",
                shown,
                f"{rates[name] / rates['fast']:.3f}",
            )


def rate(place: Place, name: str, overrides: Sequence[str], gpus: int = 1, steps: int = 200) -> float:
    """Return the steps a second of ResNet-18 between the first record and the last; each waits for the GPU."""
    batch, steps, every = (4, 6, 2) if place.quick else (512, steps, 20)
    given = [
        "data=images", f"data.root={place.images(_CIFAR)}", "model.name=resnet18", "data.on_device=true",
        f"trainer.global_batch_size={gpus * batch}", f"trainer.max_steps={steps}", f"trainer.log_every={every}",
        f"trainer.gpus={gpus}",
    ]  # fmt: skip
    run = place.folder / f"rate-{name}"
    place.train(run, *given, *overrides)
    lines = records(run)
    return (lines[-1]["step"] - lines[0]["step"]) / (lines[-1]["time"] - lines[0]["time"])


def checkpoint(place: Place) -> Iterator[Finding]:
    """Yield how long training stands still for a checkpoint, with saves further apart than a write takes."""
    millions, batch, every, steps = (1, 8, 3, 10) if place.quick else (100, 4096, 600, 1900)
    run = place.folder / "run"
    place.train(
        run, "data=images", f"data.root={place.images(_DIGITS)}", "data.on_device=true", "model=wide",
        f"model.millions={millions}", f"trainer.global_batch_size={batch}", f"trainer.max_steps={steps}",
        "trainer.log_every=1", "trainer.keep_last=1", f"trainer.checkpoint_every={every}", "optimizer.lr=0.000001",
    )  # fmt: skip
    found = stalls([(int(line["step"]), line["time"]) for line in records(run)], every)
    shown = (
        f"{1e3 * found['later']:.0f} ms; {1e3 * found['first']:.0f} ms the first time; a step {1e3 * found['step']:.1f}"
    )
    goal = bar(CHECKPOINT)
    yield Row(
        f"{CHECKPOINT} and their momentum", shown, bar=f"{goal} s", met=goal.met(found["later"]), value=found["later"]
    )


def stalls(lines: Sequence[tuple[int, float]], every: int) -> dict[str, float]:
    """Return how much longer the steps behind a save took than the others, from the times of all records."""
    seconds = {step: now - before for (_, before), (step, now) in itertools.pairwise(lines)}
    usual = statistics.median(took for step, took in seconds.items() if (step - 1) % every)
    saves = [took - usual for step, took in seconds.items() if step > every and (step - 1) % every == 0]
    return {"step": usual, "first": saves[0], "later": statistics.median(saves[1:] or saves)}


HOST: Mapping[str, Sequence[str]] = {
    "bf16, SGD": (),
    "trainer.clip_grad_norm=1": ("trainer.clip_grad_norm=1",),
    "trainer.precision=fp16": ("trainer.precision=fp16",),
    "trainer.nonfinite=skip": ("trainer.nonfinite=skip",),
    "trainer.deterministic=true": ("trainer.deterministic=true",),
    "trainer.precision=fp16 optimizer.fused=null": ("trainer.precision=fp16", "optimizer.fused=null"),
    "optimizer=adamw": ("optimizer=adamw",),
    "optimizer=adamw optimizer.fused=null": ("optimizer=adamw", "optimizer.fused=null"),
    "trainer.numa_binding=false": ("trainer.numa_binding=false",),
    "data.on_device=auto": ("data.on_device=auto",),
    "data.on_device=false": ("data.on_device=false",),
    "data.flip=true data.crop=4": ("data.flip=true", "data.crop=4"),
    "data.on_device=false data.flip=true data.crop=4": ("data.on_device=false", "data.flip=true", "data.crop=4"),
}
"""Runs whose launches, copies and waits of a step are counted: a line for each way that has a cost of its own."""


def host(place: Place) -> Iterator[Finding]:
    """Yield what the host asks of the device in a step, by what is turned on."""
    for number, (name, words) in enumerate(HOST.items()):
        file, begin, steps = place.folder / f"launches-{number}.json", *((2, 2) if place.quick else (8, 5))
        task = ("task._target_=raced.Launches", f"+task.file={file}", f"+task.begin={begin}", f"+task.steps={steps}")
        each = rate(place, f"host-{number}", (*task, *words), steps=60)
        counts = ", ".join(f"{count:,.0f} {kind}" for kind, count in json.loads(file.read_text()).items())
        yield Row(f"a step of ResNet-18 on the host, {name}", f"{counts}; {1e3 / each:.2f} ms")

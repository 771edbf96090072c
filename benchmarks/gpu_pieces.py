"""The pieces of the benchmark on GPUs: each trains for at most a minute or two, and gives its rows at once.

Every figure of a step is taken between synchronisations with the GPU, in rounds in which the programs take turns.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.gpu_machine import doctor, tests
from benchmarks.gpu_place import Place
from benchmarks.race import Arm, Figures, last_json, median, quartiles, race, ratio, refuse_other_work
from benchmarks.suite import Bar, Chart, Report, Row, compare, of_rounds, records, result

_TOLERANCE = 0.05  # of the loss at the end: bf16 and atomic sums make no run the same as another
_BAR = Bar("at least", 0.98)
_CIFAR, _DIGITS = (50_000, 3, 32, 32), (60_000, 1, 28, 28)


def resnet18(place: Place) -> Report:
    """ResNet-18 on images of 32 x 32, compiled, against the loop by hand."""
    return _images_in_turn(
        place, "ResNet-18, 3 x 32 x 32, batch 512, channels-last", "resnet18", _CIFAR, 512, 600, 20, rounds=2
    )


def perceptron(place: Place) -> Report:
    """A small network, whose step is all overhead, against the loop by hand."""
    return _images_in_turn(place, "784-128-10, batch 128", "shallow", _DIGITS, 128, 8000, 100, rounds=3)


def _images_in_turn(
    place: Place, what: str, model: str, shape: tuple[int, ...], batch: int, steps: int, block: int, rounds: int
) -> Report:
    batch, steps, block, every, compiles = (4, 8, 2, 4, False) if place.quick else (batch, steps, block, 50, True)
    data, channels_last = place.images(shape), model == "resnet18"
    order = place.order(256 if place.quick else shape[0], batch, steps)

    def overrides(run: Path) -> list[str]:
        task = {"data": data, "order": order, "folder": run, "model": model, "block": block, "every": every}
        task |= {"channels_last": channels_last, "compiles": compiles}
        return [
            "data=images", f"data.root={data}", f"model.name={model}", f"trainer.global_batch_size={batch}",
            f"trainer.compile={compiles}", f"trainer.channels_last={channels_last}", "data.on_device=true",
            "task._target_=raced.InTurnOnDevice", *(f"+task.{key}={value}" for key, value in task.items()),
        ]  # fmt: skip

    return _in_turn(place, what, overrides, steps, every, 1 if place.quick else rounds)


def gpt(place: Place) -> Report:
    """A GPT of 124 million parameters, not compiled, against the same loop by hand."""
    size, batch, steps, block, samples, every = (
        ("tiny", 4, 8, 2, 64, 4) if place.quick else ("124M", 8, 200, 10, 2048, 50)
    )
    order = place.order(samples, batch, steps)

    def overrides(run: Path) -> list[str]:
        task = {"order": order, "folder": run, "block": block, "size": size, "samples": samples, "every": every}
        return [
            "model=gpt", f"model.size={size}", "data=tokens", f"data.size={size}", f"data.samples={samples}",
            "optimizer=adamw", "optimizer.lr=0.0003", f"trainer.global_batch_size={batch}", "data.on_device=true",
            "task._target_=raced.NextTokenInTurn", *(f"+task.{key}={value}" for key, value in task.items()),
        ]  # fmt: skip

    what = f"GPT of 124 million parameters, batch {batch} x 1,024 tokens"
    return _in_turn(place, what, overrides, steps, every, 1 if place.quick else 2)


def _in_turn(
    place: Place, what: str, overrides: Callable[[Path], list[str]], steps: int, every: int, rounds: int
) -> Report:
    """Train with ddpexp and by hand in one process, blocks of steps in turn; compare the blocks of all rounds."""
    pairs: list[list[tuple[float, float]]] = []  # microseconds a step, of ddpexp and by hand, by round

    def command(folder: Path) -> list[str]:
        given = [f"trainer.max_steps={steps}", f"trainer.log_every={every}"]
        return place.command(folder / "run", *given, *overrides(folder))

    def figures(folder: Path, _output: str, _begin: float, _end: float) -> dict[str, float]:
        loss = records(folder / "run")[-1]["train/loss"]
        theirs = json.loads((folder / "by_hand.json").read_text())["loss"]
        refuse_other_work({"ddpexp": [{"loss": loss}], "by hand": [{"loss": theirs}]}, "loss", _TOLERANCE)
        pairs.append(_blocks(folder))
        return {"loss": loss, "by hand": theirs}

    race([Arm("in turn", command, figures, place.environ)], rounds, place.folder / f"in-turn-{steps}", place.say)
    blocks = [pair for one in pairs for pair in one]
    share = quartiles([theirs / ours for ours, theirs in blocks])
    again = quartiles([after[0] / before[0] for one in pairs for before, after in itertools.pairwise(one)])
    ours, theirs = (statistics.median(pair[which] for pair in blocks) for which in (0, 1))
    more = statistics.median(pair[0] - pair[1] for pair in blocks)
    shown = f"{1e6 / ours:,.1f} against {1e6 / theirs:,.1f}; {more:+.1f} us a step"
    met = _BAR.met(share.median)
    row = Row(f"steps a second, {what}, by hand", shown, str(share), str(again), str(_BAR), met, "", share.median)
    arms = {"ddpexp": [pair[0] for pair in blocks], "by hand": [pair[1] for pair in blocks]}
    return Report([row], [Chart(f"a step, {what}", "microseconds", {"": arms})])


def _blocks(folder: Path) -> list[tuple[float, float]]:
    """Return both loops' times of a step by block, without the first ones, which compile. Units: microseconds."""
    lines = [json.loads(line) for line in (folder / "blocks.jsonl").read_text().splitlines()]
    return [(1e6 * ours, 1e6 * theirs) for ours, theirs in lines[min(2, len(lines) - 2) :]]


# Programs of their own, in turn.


def _rate(folder: Path, _output: str, begin: float, _end: float) -> dict[str, float]:
    """Return the speed between the first record and the last; each waits for the GPU."""
    lines = records(folder / "run")
    seconds = lines[-1]["time"] - lines[0]["time"]
    return {
        "steps a second": (lines[-1]["step"] - lines[0]["step"]) / seconds,
        "first step": result(folder / "run")["first_step_at"] - begin,
    }


def _trainings(place: Place, name: str, arms: Mapping[str, Sequence[str]], rounds: int) -> Figures:
    """Race runs of ddpexp that differ in their overrides: ResNet-18."""
    batch, steps, every = (4, 6, 2) if place.quick else (512, 200, 25)
    common = [
        "data=images", f"data.root={place.images(_CIFAR)}", "model.name=resnet18",
        f"trainer.global_batch_size={batch}", f"trainer.max_steps={steps}", f"trainer.log_every={every}",
    ]  # fmt: skip

    def arm(name: str, overrides: Sequence[str]) -> Arm:
        given = {override.partition("=")[0] for override in overrides}
        kept = [override for override in common if override.partition("=")[0] not in given]
        return Arm(name, lambda folder: place.command(folder / "run", *kept, *overrides), _rate, place.environ)

    rounds = 1 if place.quick else rounds
    return race([arm(*each) for each in arms.items()], rounds, place.folder / name, place.say)


def _speed(value: float) -> str:
    return f"{value:,.1f}"


def exact(place: Place) -> Report:
    """What deterministic algorithms cost, and the exact reduction with them."""
    micro = f"trainer.micro_batch_size={1 if place.quick else 128}"
    same = ["data.on_device=true", micro]
    deterministic = [*same, "trainer.deterministic=true"]
    results = _trainings(
        place,
        "exact",
        {
            "fast": same,
            "deterministic": deterministic,
            "exact": [*deterministic, "trainer.reduction=exact"],
            "fast again": same,
        },
        rounds=2,
    )
    what = "steps a second, ResNet-18, 4 micro-batches of 128, not compiled"
    rows = [
        compare(results, f"{what}, {name}, against fast", "steps a second", _speed, "fast", mine=name, again=None)
        for name in ("deterministic", "exact")
    ]
    noise = str(ratio(results, "fast again", "fast", "steps a second"))
    rows = [Row(**{**vars(row), "again": noise}) for row in rows]
    return Report(rows, [Chart(what, "steps a second", {"": of_rounds(results, "steps a second")})])


def on_device(place: Place) -> Report:
    """What it brings to keep the samples in the GPU's memory."""
    results = _trainings(
        place,
        "on-device",
        {
            "ddpexp": ["data.on_device=true"],
            "from the host": ["data.on_device=false"],
            "ddpexp again": ["data.on_device=true"],
        },
        rounds=3,
    )
    what = "steps a second, ResNet-18, batch 512, not compiled, data.on_device=true against false"
    return Report([compare(results, what, "steps a second", _speed, "from the host")])


def scaling(place: Place) -> Report:
    """How the speed grows with the GPUs of this machine, at the same batch on each."""
    if place.gpus < 2:
        return Report([Row("samples a second on several GPUs", "", note="this machine shows one GPU")])
    batch = 4 if place.quick else 512
    arms = {
        str(gpus): [f"trainer.gpus={gpus}", f"trainer.global_batch_size={gpus * batch}", "data.on_device=true"]
        for gpus in sorted({1, 2, place.gpus})
    }
    results = _trainings(place, "scaling", arms, rounds=3)
    rows = []
    for gpus in list(arms)[1:]:
        share = ratio(results, gpus, "1", "steps a second")
        one, many = (median(results, arm, "steps a second") * batch * int(arm) for arm in ("1", gpus))
        shown = f"{many:,.0f} against {one:,.0f} of one"
        rows.append(Row(f"samples a second, ResNet-18, {gpus} GPUs; ratio: of {gpus} times one GPU", shown, str(share)))
    return Report(rows)


def data_parallel(place: Place) -> Report:
    """The comparison that tutorials make: ddpexp on all GPUs against nn.DataParallel, at the same global batch."""
    if place.gpus < 2:
        return Report([Row("steps a second, ddpexp against nn.DataParallel", "", note="this machine shows one GPU")])
    batch, steps, every = (4 * place.gpus, 6, 2) if place.quick else (512 * place.gpus, 200, 25)
    data, run = place.images(_CIFAR), [f"trainer.gpus={place.gpus}", "data.on_device=true"]
    order = place.order(256 if place.quick else _CIFAR[0], batch, steps)
    common = [
        "data=images", f"data.root={data}", "model.name=resnet18", f"trainer.global_batch_size={batch}",
        f"trainer.max_steps={steps}", f"trainer.log_every={every}",
    ]  # fmt: skip

    def peer(folder: Path) -> list[str]:
        module = "benchmarks.peers.data_parallel"
        return [sys.executable, "-m", module, str(data), str(order), str(folder), "--every", str(every)]

    def printed(_folder: Path, output: str, _begin: float, _end: float) -> dict[str, float]:
        return dict(json.loads(output.splitlines()[-1]))

    def ddpexp(folder: Path) -> list[str]:
        return place.command(folder / "run", *common, *run)

    arms = [
        Arm("ddpexp", ddpexp, _rate, place.environ),
        Arm("nn.DataParallel", peer, printed, place.environ),
        Arm("ddpexp again", ddpexp, _rate, place.environ),
    ]
    results = race(arms, 1 if place.quick else 3, place.folder / "data-parallel", place.say)
    what = f"steps a second, ResNet-18, {place.gpus} GPUs, not compiled, ddpexp against nn.DataParallel"
    return Report([compare(results, what, "steps a second", _speed, "nn.DataParallel")])


def start(place: Place) -> Report:
    """From the command to the end of the first step, beside what importing torch and opening the GPU take."""
    program = (
        f"import json, time, torch; x = torch.ones(8, device={place.device!r}); y = (x * 2).sum().item(); "
        "print(json.dumps({'first_step_at': time.time()}))"
    )

    def bare(_folder: Path, output: str, begin: float, _end: float) -> dict[str, float]:
        return {"first step": last_json(output)["first_step_at"] - begin}

    overrides = [
        "data=images", f"data.root={place.images(_DIGITS)}", "model.name=shallow", "trainer.global_batch_size=128",
        "trainer.max_steps=4", "trainer.log_every=2",
    ]  # fmt: skip

    def ours(gpus: int) -> Callable[[Path], list[str]]:
        return lambda folder: place.command(folder / "run", f"trainer.gpus={gpus}", *overrides)

    arms = [
        Arm("ddpexp", ours(1), _rate, place.environ),
        Arm("torch alone", lambda _folder: [sys.executable, "-c", program], bare, place.environ),
        Arm("ddpexp again", ours(1), _rate, place.environ),
    ]
    if place.gpus > 1:
        arms.append(Arm(f"ddpexp, {place.gpus} GPUs", ours(place.gpus), _rate, place.environ))
    results = race(arms, 1 if place.quick else 3, place.folder / "start", place.say)
    names = [arm.name for arm in arms if arm.name.startswith("ddpexp") and "again" not in arm.name]
    rows = [
        compare(
            results, f"command to first step, {name}, torch alone", "first step", lambda value: f"{value:.2f} s",
            "torch alone", mine=name,
        )
        for name in names
    ]  # fmt: skip
    return Report(rows, [Chart("command to first step", "seconds", {"": of_rounds(results, "first step")})])


def checkpoint(place: Place) -> Report:
    """How long a checkpoint of a billion parameters and their momentum holds the training up."""
    millions, every, steps = (1, 3, 10) if place.quick else (1000, 6, 25)
    overrides = [
        "data=images", f"data.root={place.images(_DIGITS)}", "model=wide", f"model.millions={millions}",
        "trainer.global_batch_size=8", f"trainer.max_steps={steps}", "trainer.log_every=1", "trainer.keep_last=1",
        f"trainer.checkpoint_every={every}", "optimizer.lr=0.000001",
    ]  # fmt: skip

    def figures(folder: Path, _output: str, _begin: float, _end: float) -> dict[str, float]:
        return stalls([(int(line["step"]), line["time"]) for line in records(folder / "run")], every)

    arm = Arm("ddpexp", lambda folder: place.command(folder / "run", *overrides), figures, place.environ)
    [found] = race([arm], 1, place.folder / "checkpoint", place.say)["ddpexp"]
    shown = f"{found['first']:.2f} s the first time, {found['later']:.2f} s later; a step {found['step']:.3f} s"
    return Report([Row("stall of a checkpoint, 1,000 million parameters and momentum, on a GPU", shown)])


def stalls(lines: Sequence[tuple[int, float]], every: int) -> dict[str, float]:
    """Return how much longer the steps behind a save took than the others, from the times of all records."""
    seconds = {step: now - before for (_, before), (step, now) in itertools.pairwise(lines)}
    usual = statistics.median(took for step, took in seconds.items() if (step - 1) % every)
    saves = [took - usual for step, took in seconds.items() if step > every and (step - 1) % every == 0]
    return {"step": usual, "first": saves[0], "later": statistics.median(saves[1:] or saves)}


# The rest of what a machine with GPUs is asked.


PIECES: Mapping[str, tuple[Callable[[Place], Report], float]] = {
    "tests": (tests, 300.0),
    "doctor": (doctor, 30.0),
    "resnet18": (resnet18, 180.0),
    "perceptron": (perceptron, 120.0),
    "gpt": (gpt, 150.0),
    "exact": (exact, 180.0),
    "on_device": (on_device, 150.0),
    "start": (start, 90.0),
    "checkpoint": (checkpoint, 150.0),
    "scaling": (scaling, 150.0),
    "data_parallel": (data_parallel, 150.0),
}
"""By name, with the seconds that each may take on one H100."""

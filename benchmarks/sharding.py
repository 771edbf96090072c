"""What sharding costs: steps against torch's own loop and against replicas, checkpoints, and memory."""

from __future__ import annotations

import json
from dataclasses import replace

from benchmarks.race import Arm, Figures, quartiles, race, ratio
from benchmarks.starting import started
from benchmarks.suite import Bar, Bench, Chart, Report, Row, compare, of_rounds

_EQUAL = 1e-3  # by how much mean losses of programs that do the same may differ


def run(bench: Bench) -> Report:
    report = Report()
    groups = {}
    for workers in (2, 4):
        found = _measured(bench, workers, ["steps", "--rounds", str(bench.at_most(10))])
        _check_same_work(found)
        report.rows += [*_step_rows(found, workers), _held_row(found, workers)]
        groups[f"{workers} workers"] = of_rounds(found, "ms")
    report.charts.append(Chart("a step of a GPT of 10 million parameters", "milliseconds", groups))
    for workers in (2, 4):
        folder = bench.folder / f"saved-{workers}"
        words = ["--rounds", str(bench.at_most(4)), "--folder", str(folder)]
        report.rows += _checkpoint_rows(_measured(bench, workers, ["checkpoints", *words]), workers)
    return report


def _measured(bench: Bench, workers: int, words: list[str]) -> Figures:
    """Return what one program has measured, which takes its ways in turn."""
    found: list[Figures] = []

    def figures(_place: object, output: str, _begin: float, _end: float) -> dict[str, float]:
        found.append(json.loads(next(line for line in output.splitlines() if line.startswith("{"))))
        return {}

    command = started("torchrun", workers, ["-m", "benchmarks.peers.sharding", *words], ours=False)
    race([Arm(words[0], lambda _: command, figures)], 1, bench.folder / f"{words[0]}-{workers}", bench.say)
    return found[0]


def _check_same_work(found: Figures) -> None:
    """Raise RuntimeError if the ways have not trained alike."""
    losses = {name: rounds[-1]["loss"] for name, rounds in found.items()}
    if max(losses.values()) - min(losses.values()) > _EQUAL * max(losses.values()):
        raise RuntimeError(f"the ways differ in their last losses: {losses}")


def _step_rows(found: Figures, workers: int) -> list[Row]:
    def show(value: float) -> str:
        return f"{value:.0f} ms"

    what, rows = f"10 million parameters, {workers} workers", []
    for mine, bar in (("fsdp over gloo", Bar("at least", 0.95)), ("fsdp", None)):
        row = compare(
            found, f"speed of {mine}, {what}, torch's fully_shard over gloo", "ms", show, "fully_shard", mine=mine,
            again=None, bar=bar, faster=True,
        )  # fmt: skip
        rows.append(replace(row, again=str(ratio(found, "fully_shard again", "fully_shard", "ms"))))
    for mine, bar in (("shard_optimizer", Bar("at most", 1.1)), ("fsdp", None)):
        row = compare(found, f"a step of {mine}, {what}, ddp", "ms", show, "ddp", mine=mine, again=None, bar=bar)
        rows.append(replace(row, again=str(ratio(found, "ddp again", "ddp", "ms"))))
    for other, blocks in (("fsdp", "as they are written"), ("ddp, compiled", "of ddp")):
        row = compare(
            found, f"a step of fsdp with compiled blocks, {what}, blocks {blocks}", "ms", show, other,
            mine="fsdp, compiled", again="fsdp, compiled, again", note="no gain is promised on CPUs", within=0.05,
        )  # fmt: skip
        rows.append(row)
    return rows


def _held_row(found: Figures, workers: int) -> Row:
    share, whole = (max(row["held"] for row in found[name]) for name in ("fsdp", "ddp"))
    bar, value = Bar("at most", 1.15), workers * share / whole
    return Row(
        f"weights, gradients and optimizer of a rank of {workers}, fsdp, times {workers}, ddp",
        f"{share / 1e6:.1f} MB against {whole / 1e6:.1f} MB", f"{value:.3f}", "", str(bar), bar.met(value), "", value,
    )  # fmt: skip


def _checkpoint_rows(found: Figures, workers: int) -> list[Row]:
    what = f"100 million parameters and momentum, {workers} workers"
    stall = compare(
        found, f"stall of a checkpoint, {what}, fsdp against ddp", "stall", lambda value: f"{value * 1e3:.0f} ms",
        "ddp", mine="fsdp", again=None, bar=Bar("at most", 1.5),
    )  # fmt: skip
    rows = [replace(stall, again=str(ratio(found, "ddp again", "ddp", "stall")))]
    for mine, cache, bar in (
        ("load", "cold", Bar("at most", 1.2)), ("load", "warm", Bar("at most", 1.2)), ("load and check", "cold", None),
    ):  # fmt: skip
        row = compare(
            found, f"{mine} each rank's rows, {what}, {cache} cache, against reading as many bytes", cache,
            lambda value: f"{value * 1e3:.0f} ms", "read", mine=mine, again=None, bar=bar,
        )  # fmt: skip
        rows.append(replace(row, again=str(ratio(found, "read again", "read", cache))))
    extra = quartiles([row["extra"] for row in found["load"]]).high
    bar = Bar("at most", 64)
    rows.append(
        Row(
            f"memory of a rank beyond its share while it loads, {what}",
            f"{extra / 2**20:.1f} MiB",
            "",
            "",
            f"{bar} MiB",
            bar.met(extra / 2**20),
            "",
            extra / 2**20,
        )
    )
    return rows

"""From the command to the end of the first step, and from the result to the prompt: a linear model, a thread a rank."""

from __future__ import annotations

from benchmarks.equal import PEERS, Job
from benchmarks.race import median
from benchmarks.suite import Bar, Bench, Chart, Report, Row, compare, of_rounds

_FIRST_STEP = {2: 0.5, 8: 0.14}  # of torchrun's
_PROMPT_SECONDS = 0.1
_STEPS = 60


def run(bench: Bench) -> Report:
    report = Report()
    firsts, prompts = {}, {}
    for workers in (2,) if bench.quick else (2, 8):
        job = Job(bench, bench.folder / str(workers), "linear", workers, _STEPS)
        arms = [job.ours("ddpexp", "trainer.threads=1"), job.by_hand("torchrun")]
        if not bench.quick:
            arms.append(job.by_hand("mp.spawn", "--spawn"))
        results = job.run([*arms, job.ours("ddpexp again", "trainer.threads=1")], bench.rounds)
        for arm in arms[1:]:
            bar = Bar("at most", _FIRST_STEP[workers]) if arm.name == "torchrun" else None
            what = f"command to first step, {workers} workers, {arm.name}"
            report.rows.append(compare(results, what, "first step", lambda value: f"{value:.2f} s", arm.name, bar=bar))
        peers = job.run_peers([name for name in PEERS if "," not in name], ["trainer.threads=1"])
        for name in peers:
            if name != "ddpexp":
                what = f"command to first step, {workers} workers, {name}"
                report.rows.append(compare(peers, what, "first step", lambda value: f"{value:.2f} s", name))
        seconds, bar = median(results, "ddpexp", "to the prompt"), Bar("at most", _PROMPT_SECONDS)
        shown = f"{seconds * 1e3:.0f} ms"
        what = f"from the result to the prompt, {workers} workers"
        report.rows.append(Row(what, shown, bar=f"≤ {_PROMPT_SECONDS * 1e3:.0f} ms", met=bar.met(seconds)))
        firsts[f"{workers} workers"] = of_rounds(peers, "first step") | of_rounds(results, "first step")
        prompts[f"{workers} workers"] = of_rounds(results, "to the prompt")
    report.charts += [Chart("command to first step", "seconds", firsts), Chart("result to prompt", "seconds", prompts)]
    return report

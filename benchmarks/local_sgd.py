"""What local SGD and DiLoCo cost in loss, and what they gain over a slow link: `python -m benchmarks.local_sgd`.

`losses --text FILE` trains a small GPT with each strategy and several seeds on four workers of this machine. `link
--text FILE --mbit 100` trains on two hosts that are network namespaces of this machine, whose link the kernel's token
bucket filter limits; it needs root. Both print a table.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

STRATEGIES: dict[str, Sequence[str]] = {
    "ddp": ("strategy=ddp",),
    "local_sgd, 10 steps, after 100 of ddp": (
        "strategy=local_sgd", "strategy.sync_every=10", "strategy.warmup_steps=100",
    ),
    "local_sgd, 10 steps": ("strategy=local_sgd", "strategy.sync_every=10"),
    "local_sgd, 50 steps": ("strategy=local_sgd", "strategy.sync_every=50"),
    "diloco, 10 steps": ("strategy=diloco", "strategy.sync_every=10"),
    "diloco, 50 steps": ("strategy=diloco", "strategy.sync_every=50"),
}  # fmt: skip
_ON_A_LINK = ("ddp", "local_sgd, 10 steps", "diloco, 50 steps")
_STEPS, _LINK_STEPS = 400, 100
_PORT, _DEVICE = 29_761, "slow"
_FAST = 10_000  # Mbit/s: no limit that would be felt


@dataclass(frozen=True)
class Found:
    """How a run ended."""

    loss: float
    step_seconds: float
    sent_bytes: int = 0  # by the first host, over the link


def words(text: Path, run: Path, steps: int, name: str, seed: int) -> list[str]:
    """Return the overrides of a run."""
    return [
        "recipe=gpt", f"data.path={text}", f"run.dir={run}", f"trainer.max_steps={steps}",
        f"trainer.eval_every={steps}",
        "trainer.checkpoint_every=0", "trainer.log_every=100", "trainer.threads=1", f"trainer.seed={seed}",
        "task.sample_tokens=0", *STRATEGIES[name],
    ]  # fmt: skip


def losses(text: Path, seeds: int, folder: Path) -> None:
    """Print the loss over the whole evaluation part, by strategy."""
    for name in STRATEGIES:
        found = []
        for seed in range(seeds):
            run = folder / f"{len(list(folder.iterdir()))}"
            typed = [*words(text, run, _STEPS, name, seed), "trainer.gpus=4"]
            subprocess.run([sys.executable, "-m", "ddpexp", *typed], check=True, capture_output=True)
            found.append(_found(run, _STEPS).loss)
        shown = " ".join(f"{loss:.3f}" for loss in found)
        print(f"{name:<40}{statistics.mean(found):.3f}  ({shown})", flush=True)


def link(text: Path, mbits: Sequence[int], rounds: int, folder: Path) -> None:
    """Print seconds a step and what the first host has sent, by the speed of the link."""
    table: dict[tuple[int, str], list[Found]] = {}
    with hosts() as names:
        for _ in range(rounds):
            for mbit in mbits:
                _limit(names, mbit)
                for name in _ON_A_LINK:
                    run = folder / f"{len(list(folder.iterdir()))}"
                    table.setdefault((mbit, name), []).append(_on_two_hosts(names, text, run, name))
    for (mbit, name), found in table.items():
        seconds = " ".join(f"{one.step_seconds * 1e3:.0f}" for one in found)
        sent = statistics.median(one.sent_bytes for one in found) / 1e6
        print(
            f"{mbit:>6} Mbit/s  {name:<24}ms a step {seconds}  MB sent {sent:.1f}  loss {found[0].loss:.3f}", flush=True
        )


@contextmanager
def hosts() -> Iterator[Sequence[str]]:
    """Make two network namespaces with a link between them."""
    names = ("slow-link-0", "slow-link-1")
    try:
        for name in names:
            _do("ip", "netns", "add", name)
        peer = ("type", "veth", "peer", "name", _DEVICE, "netns", names[1])
        _do("ip", "-n", names[0], "link", "add", _DEVICE, *peer)
        for number, name in enumerate(names):
            _do("ip", "-n", name, "addr", "add", f"10.77.0.{number + 1}/24", "dev", _DEVICE)
            for device in ("lo", _DEVICE):
                _do("ip", "-n", name, "link", "set", device, "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _limit(names: Sequence[str], mbit: int) -> None:
    """Limit what each host sends."""
    for name in names:
        limits = ("rate", f"{mbit}mbit", "burst", "256kb", "latency", "200ms")
        _do("tc", "-n", name, "qdisc", "replace", "dev", _DEVICE, "root", "tbf", *limits)


def _on_two_hosts(names: Sequence[str], text: Path, run: Path, name: str) -> Found:
    before = _sent(names[0])
    started = []
    for number, host in enumerate(names):
        typed = [
            *words(text, run, _LINK_STEPS, name, 0), "trainer.limit_eval_batches=20", "trainer.nodes=2",
            "trainer.gpus=1", "launcher.master_addr=10.77.0.1", f"launcher.master_port={_PORT}",
            f"launcher.node_rank={number}",
        ]  # fmt: skip
        inside = ["sh", "-c", f'hostname {host}; exec "$@"', "sh", sys.executable, "-m", "ddpexp", *typed]
        command = ["ip", "netns", "exec", host, "unshare", "--uts", *inside]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    for process in started:
        output, _ = process.communicate(timeout=600)
        if process.returncode:
            raise RuntimeError(output)
    found = _found(run, _LINK_STEPS)
    return Found(found.loss, found.step_seconds, _sent(names[0]) - before)


def _sent(name: str) -> int:
    command = ["ip", "netns", "exec", name, "cat", f"/sys/class/net/{_DEVICE}/statistics/tx_bytes"]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def _found(run: Path, steps: int) -> Found:
    result = json.loads((run / "result.json").read_text())
    return Found(result["metrics"]["eval/loss"], result["seconds"] / steps)


def _do(*command: str) -> None:
    subprocess.run(command, check=True)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["losses", "link"])
    parser.add_argument("--text", type=Path, required=True, help="a text to train on")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--mbit", type=int, nargs="+", default=[100, _FAST], help="speeds of the link, megabits a second"
    )
    parser.add_argument("--rounds", type=int, default=2)
    typed = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="local-sgd-") as made:
        if typed.what == "losses":
            losses(typed.text.resolve(), typed.seeds, Path(made))
        else:
            link(typed.text.resolve(), typed.mbit, typed.rounds, Path(made))


if __name__ == "__main__":
    main()

"""Sweeps of the recipe of a second."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hydra.core.plugins import Plugins

from ddpexp.config.compose import compose_command
from ddpexp.config.sweeps import Swept
from ddpexp.sweep.folder import EventLog, SweepDir, job_name
from ddpexp.sweep.local_jobs import LocalJobs
from ddpexp.sweep.run import run_sweep
from tests.conftest import OWN_SERVER, PATIENCE, Ddpexp, Done, finish
from tests.points import Recipe

CODE = """\
class Wide(Net):
    # Refuses a width that the configuration has no way to know to be wrong.
    def __init__(self, hidden=8, dropout=0.0):
        if hidden == 13:
            raise ValueError("13 units bring bad luck")
        super().__init__(hidden, dropout)


class Paced(Sides):
    # A step takes a moment, so that something can happen meanwhile, until the test has seen that.
    def step(self, model, batch):
        if not os.path.exists(os.path.join(os.path.dirname(__file__), "hurry")):
            time.sleep(0.05)
        return super().step(model, batch)


class Once(Sides):
    # Fails at the sixth step of a job's first attempt.
    count = 0

    def step(self, model, batch):
        if model.training:
            Once.count += 1
            mark = f"{os.environ['MARKS']}/failed"
            if Once.count == 6 and not os.path.exists(mark):
                open(mark, "w").close()
                raise RuntimeError("the first attempt")
        return super().step(model, batch)


class Held(Sides):
    # Writes down the kinds of the descriptors that a rank has.
    def step(self, model, batch):
        kinds = []
        for number in os.listdir("/proc/self/fd"):
            try:
                kinds.append(os.readlink(f"/proc/self/fd/{number}").split(":")[0])
            except FileNotFoundError:  # that of the list, and what another thread has closed
                pass
        with open(os.path.join(os.path.dirname(os.readlink("/proc/self/fd/1")), "held"), "w") as file:
            file.write("\\n".join(kind for kind in sorted(kinds) if kind.isalpha()))
        return super().step(model, batch)
"""


@pytest.fixture(scope="session")
def environ(warm_environ: dict[str, str]) -> dict[str, str]:
    """What a sweep does with its jobs is tested, not how its fork server starts."""
    return warm_environ


@dataclass(frozen=True)
class SweepDone:
    """How a sweep ended."""

    done: Done
    path: Path

    @property
    def code(self) -> int:
        return self.done.code

    @property
    def out(self) -> str:
        return self.done.out

    @property
    def err(self) -> str:
        return self.done.err

    def events(self, kind: str = "") -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in (self.path / "sweep.jsonl").read_text().splitlines()]
        return [line for line in lines if kind in ("", line["event"])]

    def jobs(self) -> list[Path]:
        return sorted(path for path in self.path.glob("[0-9]*_*"))

    def results(self) -> dict[str, dict[str, Any]]:
        return {path.name: json.loads((path / "result.json").read_text()) for path in self.jobs()}

    def statuses(self) -> list[str]:
        return [result["status"] for result in self.results().values()]


class Sweeps:
    """Runs sweeps of a recipe, each in a directory of its own."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self._count = self._solos = 0

    def words(self, *overrides: str, path: Path | None = None) -> tuple[list[str], Path]:
        if path is None:
            self._count += 1
            path = self.recipe.ddpexp.folder / f"sweep{self._count}"
        folder = [] if any(word.startswith("hydra.sweep.dir") for word in overrides) else [f"hydra.sweep.dir={path}"]
        conf = ["--config-dir", str(self.recipe.folder / "conf")]
        return ["-m", *conf, "recipe=points", *folder, "sweep.slots=2", "sweep.picture=false", *overrides], path

    def start(
        self, *overrides: str, path: Path | None = None, environ: dict[str, str] | None = None
    ) -> tuple[subprocess.Popen[str], Path]:
        arguments, path = self.words(*overrides, path=path)
        return self.recipe.ddpexp.start(*arguments, environ=environ)[0], path

    def __call__(
        self,
        *overrides: str,
        path: Path | None = None,
        timeout: float = PATIENCE,
        environ: dict[str, str] | None = None,
    ) -> SweepDone:
        process, path = self.start(*overrides, path=path, environ=environ)
        return SweepDone(finish(process, path, timeout), path)

    def hurry(self) -> None:
        """Have paced tasks wait no more."""
        (self.recipe.folder / "hurry").touch()

    def again(self, path: Path, *overrides: str, trusted: bool = True) -> SweepDone:
        """Go on with `ddpexp resume`."""
        options = ["--config-dir", str(self.recipe.folder / "conf")] if trusted else []
        process, _ = self.recipe.ddpexp.start("resume", str(path), *options, *overrides)
        return SweepDone(finish(process, path), path)

    def solo(self, *overrides: str) -> str:
        """Train one run alone, with the threads that a slot's worker has, and return the hash of its weights.

        The first has another seed of Python's hashes than the sweeps.
        """
        self._solos += 1
        environ = OWN_SERVER if self._solos == 1 else None
        done = self.recipe("trainer.threads=1", *overrides, environ=environ)
        assert done.code == 0, done.err
        return str(done.result()["weights_sha256"])


@pytest.fixture(autouse=True)
def _cluster(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("slurm") and "SLURM_CONF" not in os.environ:
        pytest.skip("SLURM_CONF is not set: there is no Slurm cluster to run on")


@pytest.fixture
def sweeps(ddpexp: Ddpexp) -> Sweeps:
    return Sweeps(Recipe(ddpexp, CODE))


@pytest.fixture
def refused_sweep(sweeps: Sweeps, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Run a sweep in this process that is refused before its first job; it leaves no directory."""

    def run(*overrides: str) -> None:
        arguments, path = sweeps.words(*overrides)
        try:
            swept = compose_command(arguments)
            assert isinstance(swept, Swept)
            run_sweep(swept, None)
        finally:
            assert not path.exists()

    def started(*_: object) -> None:
        pytest.fail("the sweep was not refused")

    monkeypatch.chdir(sweeps.recipe.ddpexp.folder)
    monkeypatch.setattr(LocalJobs, "run", started)
    monkeypatch.setattr(Plugins.instance(), "instantiate_launcher", None)  # which a sweep replaces
    return run


def most_at_once(events: Sequence[dict[str, Any]]) -> int:
    """Return how many slots were taken at most at any time, by what the sweep has recorded."""
    held: dict[int, int] = {}
    most = 0
    for event in events:
        if event["event"] == "started":
            held[event["job"]] = len(event["slots"])
        elif event["event"] == "ended":
            held.pop(event["job"], None)
        most = max(most, sum(held.values()))
    return most


END = (signal.SIGINT, signal.SIGTERM)


JOBS = (
    ["optimizer.lr=0.1", "model.hidden=4"],
    ["optimizer.lr=0.5", "model.hidden=8"],
    ["optimizer.lr=0.1", "task._target_=points.Bad"],
)


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, environ: dict[str, str]) -> Path:
    """The directory of a sweep of three real runs, the last of which fails; the record has lost its last event."""
    ddpexp = Ddpexp(tmp_path_factory.mktemp("trained"), environ)
    bad = "class Bad(Sides):\n    def step(self, model, batch):\n        raise ValueError('no\\x1b[31m luck')\n"
    recipe = Recipe(ddpexp, bad)
    sweep = SweepDir(ddpexp.folder / "sweep")
    sweep.path.mkdir()
    record = EventLog(sweep)
    record.add("sweep", words=["-m"], slots=1, kind="cpu", objective="eval/loss", mode="min")
    names = [job_name(number, overrides) for number, overrides in enumerate(JOBS)]
    for number, overrides in enumerate(JOBS):
        record.add("planned", job=number, name=names[number], overrides=overrides)
    for number, overrides in enumerate(JOBS):
        record.add("started", job=number, attempt=1, slots=[0], gpus=[])
        done = recipe(*overrides, "logger=tensorboard", "trainer.gpus=1", run=sweep.path / "run")
        assert done.code == (1 if number == 2 else 0), done.err
        done.run.rename(sweep.path / names[number])
        if number < 2:
            record.add("ended", job=number, status="done", exit_code=0, seconds=1.0, objective=None, message=None)
    record.close()
    return sweep.path

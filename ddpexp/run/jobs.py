"""What a command asks a launcher to run: a training, or the evaluation of weights."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from ddpexp.checkpoint import weights
from ddpexp.config.compare import list_changes
from ddpexp.config.plugins import launcher_name
from ddpexp.config.schema import Experiment
from ddpexp.config.validate import check_layout
from ddpexp.data.batch_plan import plan_batches
from ddpexp.errors import Failure, RefusedError
from ddpexp.launch import Job, Layout, Participants, WorkerRequest
from ddpexp.launch.rendezvous import started_by
from ddpexp.run import directory, lock, manifest, repository, resume
from ddpexp.run.directory import RunDir
from ddpexp.run.prepare import prepare
from ddpexp.system import files
from ddpexp.system.limits import said_with_limit
from ddpexp.system.terminal import say

_PROBE_SECONDS = 10.0  # a network file system may show another host's file late


class Training(Job):
    """Train an experiment in a run directory, which the leading command makes, or goes on with."""

    entry = "ddpexp.train.worker:main"

    def __init__(
        self,
        experiment: Experiment,
        text: str,
        overrides: Sequence[str],
        argv: Sequence[str],
        run: RunDir | None = None,
        *,
        typed: Sequence[str] | None = None,
        goes_on: RunDir | None = None,
        keeps_refused: bool = False,
    ) -> None:
        """Take the experiment, its YAML, the words that it was asked with, and the whole command line.

        `run` is the directory that a command before this one has made for it; `goes_on` one that was typed to be gone
        on with. `typed` are the words of this command alone, where a run has older ones. A run that is refused when its
        directory is made already leaves it behind only where `keeps_refused` says so.
        """
        self.experiment, self.request = experiment, worker_request(experiment)
        self.name = experiment.recipe.name
        self.identity = _identity(text)
        self.needs = experiment.data.prepare, experiment.data.options, experiment.trust
        self.run = run
        home = run or goes_on
        self.folder = run.path if run else goes_on.path.absolute().parent if goes_on else self._parent()
        self._text, self._overrides, self._argv = text, overrides, argv
        self._typed = overrides if typed is None else typed
        self._home, self._is_member, self._goes_on = home, run is not None, goes_on is not None
        self._lock: lock.Lock | None = None
        self._began = False
        self._worker_args: dict[str, Any] = {}  # beside the run directory, what every worker learns
        self._notes: list[str] = []
        self._before: dict[Path, str] = {}  # the files of a run that is gone on with, before this start changed them
        self._keeps_refused = keeps_refused
        self._made: tuple[RunDir, list[Path]] | None = None  # by this start, with the folders above it
        self._layout: Layout | None = None  # of this start
        self._kept: list[Path] = []  # the copies of them that it has made, and the files that are new

    def _parent(self) -> Path:
        return directory.parent(self.experiment.run.dir, self.experiment.recipe.name)

    def check(self, layout: Layout) -> None:
        """Refuse a batch that does not split, options that the device does not have, weights that are not there."""
        check_layout(self.experiment, layout)
        source = self.experiment.run.init_from
        if source is not None and not resume.has_checkpoint(self._there(())):
            weights.check_usable(Path(source), f"run.init_from={source}")

    def prepare(self) -> None:
        """Make the data ready where this command runs."""
        prepare(self.experiment.data, self.experiment.trust)

    def create(self) -> Path:
        """Make the run directory, or take up the run in it, for a command that comes later."""
        run, earlier = self._claim(())
        self._notes = [*earlier.notes, *list_changes(earlier.changes)] if earlier else []
        with self._refusing(run):
            self._write_down(run, earlier, earlier.manifest if earlier else None)
        self._made = None  # whatever a scheduler refuses: what was to be submitted is there to look at
        self.close()  # it is for the later command, which may run before this one ends
        return run.path

    def foresee(self) -> RunDir | None:
        """Return the run that a start would go on with, None where it would make one; changes nothing.

        Raises:
            RefusedError: as a start would. FinishedError: the run that is there is finished.
        """
        there = self._there(())
        if there is not None:
            directory.check_no_links(there, self._called(there))
            self._look(there, ())
            return there
        self._check_required_checkpoint()
        if self.experiment.run.dir is not None:
            directory.check_free(Path(self.experiment.run.dir))
        return None

    def described(self) -> dict[str, Any]:
        """Return what `ddpexp member FILE` needs: the experiment, what was typed, and the run to go on with."""
        goes_on = str(self._home.path.absolute()) if self._home is not None and self._goes_on else None
        words = {"overrides": list(self._overrides), "command": list(self._argv), "typed": list(self._typed)}
        return {"config": self._text, **words, "goes_on": goes_on}

    def note(self, status: str, **facts: Any) -> None:
        """Write a result that says how far the job is."""
        assert self.run is not None
        notes = {"notes": self._notes} if self._notes else {}
        command = (
            {"command": list(self._argv)} if resume.config_words(self._argv) else {}
        )  # for a job that begins elsewhere
        files.write(self.run.result, files.dumps({"status": status, **facts, **command, **notes}))

    def begin(self, layout: Layout, participants: Participants) -> None:
        """Prepare the data, make the run directory or take up the run in it, write down what will run."""
        if self.vacant is not None:
            self.vacant()
        # No directory is made for data that cannot be had, and nothing is looked for long that is in use.
        first_weights = self._first_weights(participants.earlier)
        first = self._there(participants.earlier) is None
        data = prepare(self.experiment.data, self.experiment.trust) if first else None
        run, earlier = self._claim(participants.earlier)
        if not first:
            data = prepare(self.experiment.data, self.experiment.trust)
        notes: list[str] = []
        if earlier is not None:
            other = resume.check_same_data(earlier.manifest, data, self._called(run), self.experiment.run.allow_changes)
            layout, notes = resume.settle(earlier, layout, self.request.threads)
            notes += other
        self._layout = layout
        before = earlier.manifest if earlier else None
        code = resume.code_of(self.identity)
        inputs = {"config_sha256": files.sha256(self._accepted(run, earlier)), "code": code.fingerprint}
        snapshot = repository.snapshot(Path(home) if (home := self.identity["run"].get("code")) else None, code.files)
        diff, path = manifest.diff_of(run, snapshot, before)
        start = manifest.Start(layout, self._argv, participants, snapshot, inputs, notes)
        with self._refusing(run):
            self._write_down(
                run, earlier, manifest.describe(start, data, before, diff), {path: snapshot.diff} if path else {}
            )
        self._worker_args = {"notes": notes, "config": _digest(run.config), **first_weights}
        self._enter(run, data)

    def _first_weights(self, owners: Sequence[str]) -> dict[str, str]:
        """Return which weights a first start begins with, for all workers alike."""
        source = self.experiment.run.init_from
        if source is None or resume.has_checkpoint(self._there(owners)):
            return {}
        found = weights.find(Path(source), f"run.init_from={source}", lambda text: say(f"ddpexp: warning: {text}"))
        return {"init_from": str(found.resolve())}

    def shared(self) -> dict[str, Any]:
        """Return where the run directory is, and what proves that a host sees the same one."""
        assert self.run is not None
        return {"run": str(self.run.path.resolve()), "manifest": _digest(self.run.manifest), "told": self._worker_args}

    def enter(self, shared: Mapping[str, Any], layout: Layout) -> None:
        """See that this host has the run directory and the data.

        Raises:
            RefusedError: the directory is not the one that the leading command made, or the data cannot be made ready.
        """
        run, self._worker_args = RunDir(Path(shared["run"])), shared["told"]
        deadline = time.monotonic() + _PROBE_SECONDS
        while _digest(run.manifest) != shared["manifest"] or _digest(run.config) != self._worker_args["config"]:
            if time.monotonic() > deadline:
                raise RefusedError(
                    f"run.dir={run.path}, made on the first host, is not seen on {directory.host()}: put it where all "
                    "hosts see it."
                )
            time.sleep(0.1)
        self._enter(run, prepare(self.experiment.data, self.experiment.trust))

    def fail(self, failure: Failure) -> None:
        """Write error.json and the result, unless the run is another's: finished, or without a result because it runs.

        Of what was refused before a step nothing stays in a directory that this start has made.
        """
        refused = failure.kind == RefusedError.__name__
        if refused and self._made is not None and not directory.has_trained(self._made[0]):
            self.close()
            directory.remove(*self._made)
            return
        if self.run is None or (not self._began and self.run.status() in ("done", None)):
            return
        with self._saying(self.run):
            if refused and self._before:
                self._put_back(self.run)  # nothing of what was refused stays
            else:
                self.run.fail(failure)

    def interrupt(self, step: int | None = None, saved: bool = False) -> str:
        """Write the result, and say what is typed to go on."""
        if self.run is None or not (self._began or self.run.status() == "submitted"):
            return "nothing was started"
        with self._saying(self.run):
            self.run.interrupt(step)
        place = files.relative(self.run.path)
        if self.run.status() == "done":
            return f"the run was finished by then, see {place}"
        left = f"saved at step {step} in {place}" if saved and step is not None else f"what was recorded is in {place}"
        if step is not None and not saved:
            left = f"not everything up to step {step} could be saved in time, {left}"
        return f"{left}; resume it{self._how_to_resume(self.run)}"

    def close(self) -> None:
        """Let go of the lock."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    @contextmanager
    def _refusing(self, run: RunDir) -> Iterator[None]:
        """Make one sentence of a disk that takes nothing."""
        try:
            yield
        except OSError as error:
            raise RefusedError(f"{self._called(run)} cannot be written: {said_with_limit(error, run.path)}.") from None

    @contextmanager
    def _saying(self, run: RunDir) -> Iterator[None]:
        """Say that the end could not be written down: what it was is told all the same."""
        try:
            yield
        except OSError as error:
            if run.path.exists():  # else that is the end itself, which is reported
                why = said_with_limit(error, run.path)
                say(
                    f"ddpexp: warning: {self._called(run)} cannot be written ({why}): this end could not be recorded "
                    "there"
                )

    def _there(self, owners: Sequence[str]) -> RunDir | None:
        """Return the run directory that is there already.

        Made for this command, typed, or begun by what starts it again.
        """
        if self._home is not None:
            return self._home
        place = self.experiment.run.dir
        if place is not None and directory.is_ours(Path(place)):
            return RunDir(Path(place))
        return directory.owned(place, self.experiment.recipe.name, owners)

    def _claim(self, owners: Sequence[str]) -> tuple[RunDir, resume.Earlier | None]:
        """Take the lock of the run directory, which is made where there is none.

        Return what there is of a run in it.
        """
        there = self._there(owners)
        if there is not None:
            directory.check_no_links(there, self._called(there))
            self._look(there, owners)  # what is refused is refused without a trace
            self._lock = lock.take(there.path, there.ranks, self._called(there))
            return there, self._look(there, owners)  # it may have gone on until the lock was had
        self._check_required_checkpoint()
        missing = directory.missing_folders(
            Path(self.experiment.run.dir) if self.experiment.run.dir else self._parent()
        )
        run = directory.create(self.experiment.run.dir, self.experiment.recipe.name)
        self._lock = lock.take(run.path, run.ranks, self._called(run))
        if not directory.is_fresh(run):
            raise RefusedError(f"{self._called(run)} was taken by another command just now: start this one again.")
        if not self._keeps_refused:
            self._made = run, missing if self.experiment.run.dir else [run.path, *missing]
        return run, None

    def _check_required_checkpoint(self) -> None:
        """Refuse to start anew where that is asked for."""
        if self.experiment.run.resume == "require":
            what = "there is none" if self.experiment.run.dir else "no run.dir is typed"
            raise RefusedError(f"run.resume=require goes on with the run in run.dir, and {what}.")

    def _look(self, run: RunDir, owners: Sequence[str]) -> resume.Earlier:
        """Hold the run that is there against what is asked."""
        again = self._is_member or directory.owned(str(run.path), "", owners) is not None
        how = "auto" if self._goes_on and self.experiment.run.resume == "never" else self.experiment.run.resume
        return resume.look(run, resume.Start(self._called(run), self._text, self._typed, how, again, verifies=True))

    def _accepted(self, run: RunDir, earlier: resume.Earlier | None) -> str:
        """Return what config.yaml will hold: what is asked now, or what is there where that asks for the same."""
        if earlier is not None and not earlier.replaces and run.config.exists() and run.overrides.exists():
            return run.config.read_text()
        return self._text

    def _write_down(
        self,
        run: RunDir,
        earlier: resume.Earlier | None,
        facts: Mapping[str, Any] | None,
        more: Mapping[Path, bytes] = MappingProxyType({}),
    ) -> None:
        """Leave in the directory what is asked now; from here on it is this command's.

        The manifest, where there is one yet, says what config.yaml is to be before it is replaced: a start that is
        killed between the two must not look like somebody who has edited it. `facts` are for the manifest, `more` are
        files that it names.
        """
        self.run, self._began = run, True
        goes_on = earlier is not None and earlier.manifest is not None
        if earlier is not None:
            self._before = {
                path: path.read_text()
                for path in (run.config, run.overrides, run.manifest, run.result)
                if path.is_file()
            }
            directory.reopen(run)
            if goes_on:
                say(f"ddpexp: going on in {files.relative(run.path)}")
        text, there = self._accepted(run, earlier), self._before.get(run.config)
        described = files.dumps({**facts, "config": manifest.accepted(text, there)}) if facts is not None else None
        for path, content in more.items():
            self._kept.append(path)
            files.write(path, content)
        if described is not None and goes_on:
            files.write(run.manifest, described)
        if text != there or run.overrides not in self._before:
            self._kept += [copy for copy in map(files.keep, (run.config, run.overrides)) if copy]
            files.write(run.config, text)
            files.write(run.overrides, yaml.safe_dump(list(self._overrides), allow_unicode=True, width=math.inf))
        if described is not None and not goes_on:
            files.write(run.manifest, described)

    def _put_back(self, run: RunDir) -> None:
        """Make the directory what it was before this start."""
        run.result.unlink(missing_ok=True)
        for path, text in self._before.items():
            files.write(path, text)
        for copy in self._kept:
            copy.unlink(missing_ok=True)

    def _called(self, run: RunDir) -> str:
        """Return what the run is called in messages, as it is typed."""
        return files.typed(run.path) if self._home is not None else f"run.dir={files.relative(run.path)}"

    def _how_to_resume(self, run: RunDir) -> str:
        """Return where to type what, the command in a line of its own."""
        launcher = self.experiment.launcher
        words = [
            "resume",
            files.shortest(run.path),
            *(resume.config_words(self._argv) or resume.trusted_words(run)[:2]),
        ]
        words += [word for word in self._overrides if word.lstrip("+").startswith("run.trust=")]
        words += launcher.restated_words()
        typed_here = self._is_member and started_by.BY_SALLOC not in os.environ
        if launcher.ranks_started_externally and not typed_here:
            name = launcher_name(type(launcher))
            before, where = launcher.started_by(self._argv)
            return f"{where} with:\n{before} {shlex.join([*words, f'launcher={name}'])}"
        if self._is_member and self._layout is not None:
            words += launcher.words_of_allocation(self, self._layout)
        where = "" if self.request.nodes in ("auto", 1) or self._is_member else " on every machine"
        if where and (own := launcher.words_of_this_machine()):
            where += f" (each with its own {', '.join(word.partition('=')[0] for word in own)})"
            words += own
        return f"{where} with:\npython -m ddpexp {shlex.join(words)}"

    def _enter(self, run: RunDir, data: Mapping[str, Any] | None) -> None:
        self.run, self.logs = run, run.ranks
        self.arguments = [str(run.path.resolve()), json.dumps({"data": data, **self._worker_args})]


class Evaluation(Job):
    """Evaluate weights; writes nothing."""

    entry = "ddpexp.train.worker:evaluate"

    def __init__(self, experiment: Experiment, text: str, weights: Path) -> None:
        """Take the experiment, its YAML and the weights."""
        self.experiment, self.request = experiment, worker_request(experiment)
        self.identity = _identity(text)
        self._text, self._weights = text, weights

    def check(self, layout: Layout) -> None:
        """Refuse a batch that does not split, options that the device does not have."""
        check_layout(self.experiment, layout)

    def begin(self, layout: Layout, participants: Participants) -> None:
        """Prepare the data."""
        self.enter({}, layout)

    def enter(self, shared: Mapping[str, Any], layout: Layout) -> None:
        """Prepare the data.

        Raises:
            RefusedError: the weights are not seen on this host.
        """
        if not self._weights.exists():
            raise RefusedError(f"evaluate {self._weights}: there is no such file on {directory.host()}.")
        trainer = self.experiment.trainer
        described = {
            "config": self._text,
            "layout": asdict(layout),
            "data": prepare(self.experiment.data, self.experiment.trust),
            "weights": str(self._weights.resolve()),
            "batch_size": plan_batches(
                trainer.global_batch_size, trainer.micro_batch_size, layout.world_size
            ).micro_batch_size,
        }
        self.arguments = [json.dumps(described)]


def worker_request(experiment: Experiment) -> WorkerRequest:
    """Return what an experiment says of its workers."""
    trainer = experiment.trainer
    # Sums inside one worker depend on its threads, whose number would follow that of the workers.
    threads = 1 if trainer.threads == "auto" and trainer.reduction == "exact" else trainer.threads
    return WorkerRequest(
        trainer.nodes, trainer.gpus, trainer.device, trainer.backend, threads, trainer.grace_seconds, trainer.timeout
    )  # fmt: skip


def _identity(text: str) -> dict[str, Any]:
    """Return what all commands of a job must agree on: everything but the number of the machine."""
    values: dict[str, Any] = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    launcher = values.get("launcher")
    if isinstance(launcher, dict):
        launcher.pop("node_rank", None)
    return values


def _digest(path: Path) -> str | None:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None

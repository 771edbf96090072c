"""The job that trains an experiment in a run directory."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ddpexp.checkpoint import initial
from ddpexp.config import fitted, fused
from ddpexp.config.compare import list_changes
from ddpexp.config.plugins import launcher_name
from ddpexp.config.schema import Experiment
from ddpexp.config.validate import check_layouts
from ddpexp.errors import Failure, RefusedError, subject
from ddpexp.launch import Done, Failed, Interrupted, Job, Layout, Lifecycle, Outcome, Participants, Work
from ddpexp.launch.rendezvous import started_by
from ddpexp.run import alerts, directory, links, lock, manifest, pretrained, repeated, repository, resume, sync
from ddpexp.run.directory import RunDir
from ddpexp.run.fit import fit, fit_on_this_host
from ddpexp.run.history import values_of
from ddpexp.run.prepare import prepare, prepare_to_resume, used_facts
from ddpexp.run.provenance import provenance
from ddpexp.run.resume_arguments import config_folder, config_options, config_path, restated_arguments
from ddpexp.run.same_inputs import check_same_data, code_folder, code_of
from ddpexp.run.start_files import StartFiles
from ddpexp.run.stored_config import job_identity, parse_config, trained_data
from ddpexp.run.worker_request import worker_request
from ddpexp.system import caller, files
from ddpexp.system.limits import reason_with_limit
from ddpexp.system.terminal import print_message

_PROBE_SECONDS = 10.0  # a network file system may show the files of another host late


@dataclass(eq=False)
class Training(Lifecycle):
    """Train an experiment in a run directory, which the leading command creates or resumes."""

    experiment: Experiment
    text: str  # the experiment as YAML
    overrides: Sequence[str]
    argv: Sequence[str]  # the full command line
    member_of: RunDir | None = None  # the run directory that an earlier command has created for this one
    _: KW_ONLY
    new_overrides: Sequence[str] | None = None  # of this command alone, if a resumed run has older ones
    resume_from: RunDir | None = None  # the run to resume that the user has named
    keeps_refused: bool = False  # the new directory of a refused run is not removed
    is_stored: bool = False  # a sweep's file names the experiment

    def __post_init__(self) -> None:
        """Begin with no run directory, unless an earlier command has created one."""
        self.run = self.member_of
        self._home = self.member_of or self.resume_from
        self._new_overrides = self.overrides if self.new_overrides is None else self.new_overrides
        self._is_stored = self.is_stored or self.resume_from is not None
        self._files = StartFiles(self.text, self.overrides)
        self._lock: lock.Lock | None = None
        self._began = False  # the run belongs to this command
        self._notes: list[str] = []
        self._created: tuple[RunDir, list[Path]] | None = None  # by this start, with the folders above it
        self._handed_over: tuple[RunDir, list[Path]] | None = None  # the same, once the job is submitted
        self._layout: Layout | None = None  # of this start

    @cached_property
    def job(self) -> Job:
        """What its launcher runs."""
        typed = self.experiment.run.dir
        run_dir = Path(typed).absolute() if typed else None
        if self.member_of is not None:
            folder = run_dir = self.member_of.path
        elif self.resume_from is not None:
            run_dir = self.resume_from.path.absolute()
            folder = run_dir.parent
        else:
            folder = directory.parent(typed, self.experiment.recipe.name)
        return Job(
            self,
            worker_request(self.experiment),
            name=self.experiment.recipe.name,
            identity=job_identity(self.text),
            folder=folder,
            run_dir=run_dir,
            check=self._check,
            portable=self,
        )

    @property
    def needs(self) -> object:
        """What `prepare` reads of the configuration."""
        data = self.experiment.data
        return data.prepare, data.options, self.experiment.trust

    def _check(self, layouts: Sequence[Layout]) -> None:
        """Check that the batch splits, that the device supports the options, and that initial weights exist."""
        check_layouts(self.experiment, layouts)
        if not resume.has_checkpoint(self._existing(())):
            initial.check_exists(self.experiment.run)

    def prepare(self) -> None:
        """Prepare the data on this host, for a later command that resolves the references to its facts."""
        data = self.experiment.data
        used_facts(self.text, data, prepare(data, self.experiment.trust, self._is_stored))

    def _prepare(self, manifest: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
        trained_on = trained_data(manifest) if "data" in self.experiment.run.allow_changes else {}
        data = prepare_to_resume(self.experiment.data, self.experiment.trust, trained_on, self._is_stored)
        self._files.resolve_facts(self.experiment.data, data)
        return data

    def create(self) -> Path:
        """Create the run directory, or resume the run in it, for a later command."""
        alerts.check(self.text)
        run, previous = self._claim(())
        self._notes = [*previous.notes, *list_changes(previous.changes)] if previous else []
        with self._refuse_if_unwritable(run):
            self.run, self._began = run, True
            self._files.write(run, previous, previous.manifest if previous else None)
            self._write_submitted()
        self._release()  # the lock is for the later command, which may run before this one ends
        return run.path.resolve()

    def foresee(self) -> RunDir | None:
        """Return the run that a start would resume, or None if it would create one; changes nothing.

        Raises:
            RefusedError: as for a start. FinishedError: the run is finished.
        """
        existing = self._existing(())
        if existing is not None:
            links.check_no_links(existing, self._called(existing))
            self._inspect(existing, ())
            return existing
        self._check_required_checkpoint()
        if self.experiment.run.dir is not None:
            directory.check_free(Path(self.experiment.run.dir))
        return None

    def describe(self) -> dict[str, Any]:
        """Return what `ddpexp member FILE` needs: the experiment, its overrides, and the run to resume."""
        return {
            "config": self.text,
            "overrides": list(self.overrides),
            "command": list(self.argv),
            "new_overrides": list(self._new_overrides),
            "resume_from": None if self.resume_from is None else str(self.resume_from.path.absolute()),
        }

    def submitted(self, **facts: Any) -> None:
        """Add facts to result.json, unless the job has begun; from here on the folder is the job's."""
        self._handed_over, self._created = self._created, None
        if self.run is not None and self.run.status() == "submitted":
            self._write_submitted(**facts)

    def withdraw(self, others: Sequence[Path]) -> None:
        """Remove the folder of a submitted job that was refused, if this command has made it, with `others` in it."""
        if self._handed_over is not None and not directory.has_trained(self._handed_over[0]):
            for path in others:
                path.unlink(missing_ok=True)
            directory.remove(*self._handed_over)

    def _write_submitted(self, **facts: Any) -> None:
        assert self.run is not None
        notes = {"notes": self._notes} if self._notes else {}
        # A job may start in another folder, where the user's config folder must be named again.
        command = {"command": list(self.argv)} if config_options(self.argv) else {}
        files.write_json(self.run.result, {"status": "submitted", **facts, **command, **notes})

    def begin(self, layout: Layout, participants: Participants) -> Work:
        """Prepare the data, create the run directory or resume the run in it, and record what will run."""
        alerts.check(self.text)
        sync.check_usable(self.experiment)
        # A new run directory is created only once the data is prepared; an existing one is locked before that.
        initial_weights = self._initial_weights(participants.earlier)
        is_new = self._existing(participants.earlier) is None
        data = self._prepare() if is_new else None
        run, previous = self._claim(participants.earlier)
        if not is_new:
            data = self._prepare(previous.manifest if previous else None)
        notes: list[str] = []
        if previous is not None:
            layout, notes = resume.resolve_layout(previous, layout, self.job.request.threads)
            notes += check_same_data(previous.manifest, data, self._called(run), self.experiment.run.allow_changes)
        before = previous.manifest if previous else None
        origin = self._origin if before is None else None  # what is resumed has been compared with it
        if origin is not None and self.experiment.run.rerun_exact:
            layout = resume.with_threads_of(layout, origin.read_if_present(origin.manifest), self.job.request.threads)
        is_old = self.resume_from is not None or resume.has_checkpoint(run)  # what a run directory names is not fetched
        fetched = pretrained.before_workers(self.experiment, self._files.text, is_old)
        initial_weights = initial.as_safetensors(self.experiment.run, initial_weights, run.path, notes)
        self._layout = layout
        code = code_of(self.job.identity)
        inputs = {"config_sha256": files.sha256(self._files.config_text(run, previous)), "code": code.fingerprint}
        snapshot = repository.snapshot(code_folder(self.job.identity), code.files)
        diff, path = manifest.diff_of(run, snapshot, before)
        resolved: dict[str, Any] = fused.resolve(self.experiment, layout.device, before)
        fitted_by = self._fitted_by(before)
        resolved |= fit(self.experiment, self._files.text, layout, fitted_by)
        start = manifest.Start(
            layout=layout,
            argv=self.argv,
            participants=participants,
            code=snapshot,
            inputs=inputs,
            changes=notes,
            facts=self._files.facts,
            resolved=resolved,
        )
        contents = manifest.describe(start, data, before, diff)
        if origin is not None:
            notes += self._repeat(origin, contents)
        with self._refuse_if_unwritable(run):
            self.run, self._began = run, True
            self._files.write(run, previous, contents, {path: snapshot.diff} if path else {})
        worker_args: dict[str, Any] = {
            "notes": notes, "config": files.digest(run.config), "pretrained": fetched, **initial_weights
        }  # fmt: skip
        if fitted.KEY in resolved and resolved[fitted.KEY] != fitted.recorded(fitted_by) and layout.nodes > 1:
            worker_args["fit"] = {"host": directory.host(), "size": resolved[fitted.KEY]}  # which others compare
        # The hashes prove that another host sees the same run directory.
        shared = {"run": str(run.path.resolve()), "manifest": files.digest(run.manifest), "worker_args": worker_args}
        return replace(self._work(run, data, worker_args), shared=shared)

    @property
    def _origin(self) -> RunDir | None:
        """The run that this one repeats."""
        path = self.experiment.run.rerun_of
        return RunDir(Path(path)) if path is not None else None

    def _fitted_by(self, before: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        """Return the manifest that keeps the micro-batch of `fit`: of an earlier start, or of an exact repetition."""
        if before is None and self._origin is not None and self.experiment.run.rerun_exact:
            return self._origin.read_if_present(self._origin.manifest)
        return before

    def _repeat(self, origin: RunDir, contents: dict[str, Any]) -> list[str]:
        """Record in the manifest of a new run what it repeats; return lines on what differs from that.

        Raises:
            RefusedError: with run.rerun_exact, because something does that can change numbers.
        """
        tree = parse_config(self._files.text)
        groups = provenance(values_of(tree, contents), contents)
        record, lines = repeated.compared(origin, groups, self.experiment.run.rerun_exact, tree)
        contents["rerun_of"] = record
        return lines

    def _initial_weights(self, owners: Sequence[str]) -> Mapping[str, str]:
        """Return the resolved path of run.init_from for the first start, the same for all workers."""
        if self.experiment.run.init_from is None or resume.has_checkpoint(self._existing(owners)):
            return {}
        return initial.located(self.experiment.run, lambda text: print_message(f"ddpexp: {text}"))

    def enter(self, shared: Mapping[str, Any], layout: Layout) -> Work:
        """Check that this host sees the run directory, and prepare the data.

        Raises:
            RefusedError: it is not the directory of the leading command, or the data cannot be prepared.
        """
        run, worker_args = RunDir(Path(shared["run"])), shared["worker_args"]
        deadline = time.monotonic() + _PROBE_SECONDS
        while files.digest(run.manifest) != shared["manifest"] or files.digest(run.config) != worker_args["config"]:
            if time.monotonic() > deadline:
                raise RefusedError(
                    f"was made on the first host and is not visible on {directory.host()}",
                    key="run.dir",
                    value=run.path,
                    suggestion="Put it where all hosts see it.",
                )
            time.sleep(0.1)
        if worker_args["pretrained"]:  # this host may have a cache of its own
            pretrained.fetch(self.experiment.model, run.config.read_text())
        trained_on = trained_data(run.read_if_present(run.manifest))
        data = prepare_to_resume(self.experiment.data, self.experiment.trust, trained_on, self._is_stored)
        found = worker_args.get("fit")
        if found is not None and found["host"] != directory.host():
            worker_args = {**worker_args, "fit": fit_on_this_host(run, shared["manifest"], layout)}
        return self._work(run, data, worker_args)

    def end(self, outcome: Outcome | None) -> str:
        """Write the result and send the alert, release the lock, and return how to resume the run."""
        left = "nothing was started"
        try:
            match outcome:
                case Done():
                    self._alert_if_done()
                    self._compare_with_repeated()
                case Failed(failure):
                    self._fail(failure)
                case Interrupted(step, saved):
                    left = self._interrupt(step, saved)
        finally:
            if not (isinstance(outcome, Failed) and outcome.workers_live):
                self._release()
        return left

    def _fail(self, failure: Failure) -> None:
        """Write error.json and the result, unless another command owns the run: it is finished, or has no result yet.

        If this start created the directory and is refused before the first step, the directory is removed.
        """
        refused = failure.refused or (failure.limit is not None and not self._began)
        if refused and self._remove_created():
            return
        if self.run is None or (not self._began and self.run.status() in ("done", None)):
            return
        if self._trained_here:
            self._alert(alerts.text_of_failure(failure))
        with self._warn_if_unwritable(self.run):
            undone = refused and self._files.undo(self.run)
            if not undone or self.run.status() == "submitted":  # nobody sees what a submitted job prints
                self.run.fail(failure)

    def _remove_created(self) -> bool:
        """Remove the run directory if this start has created it and nothing was trained; return whether it is gone."""
        if self._created is None or directory.has_trained(self._created[0]):
            return False
        self._release()
        directory.remove(*self._created)
        return True

    def _interrupt(self, step: int | None, saved: bool) -> str:
        if self.run is None or not (self._began or self.run.status() == "submitted"):
            self._remove_created()
            return "nothing was started"
        with self._warn_if_unwritable(self.run):
            self.run.interrupt(step)
        folder = files.relative(self.run.path)
        if self._trained_here and self.run.status() != "done":
            self._alert(f"was interrupted{f' after step {step}' if step is not None else ''}, and can be resumed")
        if self.run.status() == "done":
            return f"the run was finished by then, see {folder}"
        left = (
            f"saved at step {step} in {folder}" if saved and step is not None else f"what was recorded is in {folder}"
        )
        if step is not None and not saved:
            left = f"not everything up to step {step} could be saved in time, {left}"
        return f"{left}; resume it{self._how_to_resume(self.run)}"

    def _alert_if_done(self) -> None:
        if self._trained_here and self.run is not None and self.run.status() == "done":
            self._alert(alerts.text_of(self.run.read(self.run.result)))

    def _compare_with_repeated(self) -> None:
        """Print whether the run has ended as the one that it repeats.

        Raises:
            UnequalError: with run.rerun_exact, because it has not.
        """
        if not self._trained_here or self.run is None or self.run.status() != "done":
            return
        text = repeated.verdict(self.run, self.experiment.run.rerun_exact)
        if text is not None:
            print_message(f"ddpexp: {text}", sys.stdout)

    @property
    def _trained_here(self) -> bool:
        """Return whether this command began the workers, and did not enter, submit or refuse them."""
        return self._layout is not None

    def _alert(self, what: str) -> None:
        assert self.run is not None
        alerts.send(self.text, f"{self.job.name} {what} ({self.run.path.absolute()} on {platform.node()})")

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    @contextmanager
    def _refuse_if_unwritable(self, run: RunDir) -> Iterator[None]:
        """Convert OSError to RefusedError."""
        try:
            yield
        except OSError as error:
            raise RefusedError(
                f"cannot be written: {reason_with_limit(error, run.path)}", **subject(self._called(run))
            ) from None

    @contextmanager
    def _warn_if_unwritable(self, run: RunDir) -> Iterator[None]:
        """Warn if result.json cannot be updated; the command reports the end in any case."""
        try:
            yield
        except OSError as error:
            if run.path.exists():  # otherwise its removal ended the run, which is reported
                why = reason_with_limit(error, run.path)
                print_message(
                    f"ddpexp: warning: {self._called(run)} cannot be written ({why}): result.json is not updated"
                )

    def _existing(self, owners: Sequence[str]) -> RunDir | None:
        """Return the existing run directory: created for this command, named by the user, or of an earlier attempt.

        `owners` identify the earlier attempts of a launcher that starts the command again.
        """
        if self._home is not None:
            return self._home
        folder = self.experiment.run.dir
        if folder is not None and directory.is_ours(Path(folder)):
            return RunDir(Path(folder))
        return directory.owned(folder, self.experiment.recipe.name, owners)

    def _claim(self, owners: Sequence[str]) -> tuple[RunDir, resume.PreviousRun | None]:
        """Create and lock the run directory, or lock the existing one; return it with the run it holds."""
        existing = self._existing(owners)
        if existing is not None:
            _report(existing)
            links.check_no_links(existing, self._called(existing))
            self._inspect(existing, owners)  # before the lock, so that a refusal leaves no trace
            self._lock = lock.take(existing.path, existing.ranks, self._called(existing))
            return existing, self._inspect(existing, owners)  # again: it may have changed before it was locked
        self._check_required_checkpoint()
        named = self.experiment.run.dir
        missing = files.missing_folders(Path(named) if named else self.job.folder)
        run = directory.create(named, self.experiment.recipe.name)
        created = run, missing if named else [run.path, *missing]
        try:
            self._lock = lock.take(run.path, run.ranks, self._called(run))
        except RefusedError:
            if directory.is_fresh(run) and lock.read(run.path / lock.NAME) is None:
                directory.remove(*created)  # no other command has taken it
            raise
        if not directory.is_fresh(run):
            raise RefusedError(
                "was taken by another command just now",
                suggestion="Start this command again.",
                **subject(self._called(run)),
            )
        _report(run)
        if not self.keeps_refused:
            self._created = created
        return run, None

    def _check_required_checkpoint(self) -> None:
        """Check that a new run is allowed: run.resume=require needs a run to resume."""
        if self.experiment.run.resume == "require":
            what = "it holds no run" if self.experiment.run.dir else "run.dir is not set"
            raise RefusedError(f"resumes the run in run.dir, but {what}", key="run.resume", value="require")

    def _inspect(self, run: RunDir, owners: Sequence[str]) -> resume.PreviousRun:
        """Compare the existing run with this command; see `ddpexp.run.resume.inspect`."""
        is_restart = self.member_of is not None or directory.owned(str(run.path), "", owners) is not None
        mode = "auto" if self.resume_from and self.experiment.run.resume == "never" else self.experiment.run.resume
        start = resume.Start(self._called(run), self.text, self._new_overrides, mode, is_restart, verifies=True)
        return resume.inspect(run, start)

    def _called(self, run: RunDir) -> str:
        """Return the name of the run in messages, in the form the user would type."""
        return files.typed(run.path) if self._home is not None else f"run.dir={files.relative(run.path)}"

    def _how_to_resume(self, run: RunDir) -> str:
        """Return where to run which command to resume; the command is on a line of its own."""
        launcher, is_member = self.experiment.launcher, self.member_of is not None
        options, tree = config_options(self.argv) or config_folder(run), parse_config(self.text)
        restated = restated_arguments(options, self.overrides, tree, config_path(options))
        arguments = ["resume", files.shortest(run.path), *restated]
        submitted_here = is_member and started_by.BY_SALLOC not in os.environ
        if launcher.ranks_started_externally and not submitted_here:
            before, where = launcher.started_by(self.argv)
            return f"{where} with:\n{before} {shlex.join([*arguments, f'launcher={launcher_name(type(launcher))}'])}"
        if is_member and self._layout is not None:
            arguments += launcher.arguments_for_allocation(self._layout)
        where = "" if self.job.request.nodes in ("auto", 1) or is_member else " on every machine"
        if where and (local := launcher.arguments_of_this_machine()):
            where += f" (each with its own {', '.join(override.partition('=')[0] for override in local)})"
            arguments += local
        return f"{where} with:\npython -m ddpexp {shlex.join(arguments)}"

    def _work(self, run: RunDir, data: Mapping[str, Any] | None, worker_args: Mapping[str, Any]) -> Work:
        _report(run)
        self.run = run
        arguments = [str(run.path.resolve()), json.dumps({"data": data, **worker_args})]
        return Work("ddpexp.train.worker:main", arguments, run.ranks, requests=run.requests)


def _report(run: RunDir) -> None:
    caller.report(caller.Directory(str(run.path.absolute())))

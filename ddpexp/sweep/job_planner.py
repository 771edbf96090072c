"""Compose the jobs of a sweep: each gets a number, a directory and an experiment that is checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddpexp.checkpoint import initial
from ddpexp.config.keys import override_key
from ddpexp.config.parse import parse
from ddpexp.config.plugins import launcher_name
from ddpexp.config.schema import Experiment
from ddpexp.config.sweeps import JobComposer, Swept
from ddpexp.config.validate import check_layout
from ddpexp.errors import RefusedError
from ddpexp.launch.launchers.base import Submitter
from ddpexp.launch.rendezvous.layout import resolve
from ddpexp.run import resume
from ddpexp.run.directory import RunDir
from ddpexp.run.worker_request import worker_request
from ddpexp.sweep.folder import SweepDir, job_name
from ddpexp.sweep.job import Planned
from ddpexp.sweep.record import JobRecord
from ddpexp.sweep.slots import Slots
from ddpexp.system.secrets import referenced


class JobPlanner:
    """The jobs of a sweep that were composed, and the numbers that earlier starts gave to theirs."""

    def __init__(self, swept: Swept, folder: SweepDir, slots: Slots, earlier: Mapping[int, JobRecord]) -> None:
        """Take the sweep, its directory, the slots of this machine, and the jobs of earlier starts."""
        self._folder = folder
        self._slots = slots
        self._is_stored = swept.is_stored
        self._composer = JobComposer(swept)
        self.keys = frozenset(key.lstrip("+~") for key in swept.keys)
        # The names are computed again instead of read, because they are paths and the log is not trusted.
        recorded = {number: job.overrides for number, job in earlier.items() if job.overrides is not None}
        self._numbers = {_identity(overrides): number for number, overrides in recorded.items()}
        self._jobs: dict[int, Planned] = {}
        # Of the jobs of earlier starts.
        self.names = {number: job_name(number, overrides) for number, overrides in recorded.items()}

    def plan(self, arguments: Sequence[str]) -> Planned:
        """Return the job with these overrides.

        Raises:
            RefusedError: it cannot run in a sweep, or not on this machine.
        """
        arguments, _ = referenced([argument for argument in arguments if not argument.startswith("sweep.")])
        overrides = tuple(argument for argument in arguments if override_key(argument).partition("@")[0] in self.keys)
        number = self._numbers.setdefault(_identity(overrides), max(self._numbers.values(), default=-1) + 1)
        if number not in self._jobs:
            self._jobs[number] = self._compose(number, arguments, overrides)
        return self._jobs[number]

    def _compose(self, number: int, arguments: Sequence[str], overrides: tuple[str, ...]) -> Planned:
        name = self.names.get(number) or job_name(number, overrides)
        run = RunDir(self._folder.path / name)
        try:
            composed = self._composer.compose(arguments, run.path.absolute(), number)
            experiment = parse(composed.values)
            workers, on_gpus = self._slots_needed(experiment)
            _check_weights_exist(experiment, run)
        except RefusedError as error:
            error.suggestion = f"{error.suggestion} (job {name})".lstrip()
            raise
        submits = isinstance(experiment.launcher, Submitter) and experiment.launcher.submits
        return Planned(
            number=number,
            name=name,
            overrides=overrides,
            arguments=tuple(arguments),
            experiment=experiment,
            text=composed.text,
            run=run,
            workers=workers,
            on_gpus=on_gpus,
            submits=submits,
            is_stored=self._is_stored,
        )

    def _slots_needed(self, experiment: Experiment) -> tuple[int | None, bool]:
        """Return how many slots a job takes, None for all, and whether they are GPUs."""
        launcher, trainer = experiment.launcher, experiment.trainer
        kind = launcher_name(type(launcher))
        if launcher.ranks_started_externally:
            raise RefusedError(
                "is incompatible with -m: there every rank is a command of its own, and each would run the whole sweep",
                key="launcher",
                value=kind,
                suggestion="Use launcher=spawn, or launcher=slurm on the login node.",
            )
        if not launcher.takes_slots:
            return None, False
        if trainer.nodes not in ("auto", 1):
            raise RefusedError(
                f"with launcher={kind} needs a command on every machine, but a sweep is one command",
                key="trainer.nodes",
                value=trainer.nodes,
                suggestion="Use launcher=slurm for jobs of several machines.",
            )
        request = launcher.adapt(worker_request(experiment))
        layout = resolve(request.gpus, request.device, request.backend, request.threads)
        self._slots.check_arguments(layout.world_size, layout.device == "cuda")
        check_layout(experiment, layout)
        return layout.world_size, layout.device == "cuda"


def _check_weights_exist(experiment: Experiment, run: RunDir) -> None:
    if not resume.has_checkpoint(run):
        initial.check_exists(experiment.run)


def _identity(overrides: Sequence[str]) -> str:
    return "\0".join(sorted(map(str, overrides)))

"""The job that predicts with weights."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ddpexp import __version__
from ddpexp.config import fitted
from ddpexp.config.build import nearest
from ddpexp.config.schema import Experiment
from ddpexp.errors import RefusedError
from ddpexp.launch import Job, Layout, Lifecycle, Participants, Work, WorkerRequest
from ddpexp.run import directory
from ddpexp.run.prepare import prepare_to_predict
from ddpexp.run.stored_config import data_facts, job_identity, trained_data
from ddpexp.run.stored_run import StoredWeights
from ddpexp.run.worker_request import worker_request

SINGLE_SET = "eval"  # the name of a set that has no training set beside it
FORMATS = (".npz", ".npy", ".parquet", ".csv")


@dataclass(eq=False)
class Prediction(Lifecycle):
    """Predict for each sample of a data set, or for raw inputs; rank zero writes one file, or answers."""

    weights: StoredWeights
    out: Path | None = None  # None: rank zero hands the predictions to this command
    split: str | None = None  # the name of a set; None: the evaluation set, if there is one
    given: Path | None = None  # a raw input, or a folder of such, in place of a data set
    _answer: int | None = field(default=None, init=False)  # a file in memory

    @property
    def job(self) -> Job:
        """What its launcher runs."""
        run = self.weights.run
        return Job(self, request_of(run.experiment, run.manifest), identity=job_identity(run.text))

    def begin(self, layout: Layout, participants: Participants) -> Work:
        """Check that the file can be written, announce the weights, and prepare the data."""
        if self.out is not None:
            check_out(self.out)
        else:
            self._answer = os.memfd_create("ddpexp-predict")
        self.weights.announce()
        return self.enter({}, layout)

    def answer(self) -> dict[str, Any] | None:
        """Return what rank zero has predicted, `weights_sha256` and `predictions`; None in other commands."""
        if self._answer is None:
            return None
        answer: dict[str, Any] = json.loads(os.pread(self._answer, os.fstat(self._answer).st_size, 0))
        return answer

    def enter(self, shared: Mapping[str, Any], layout: Layout) -> Work:
        """Prepare the data, if it is needed.

        Raises:
            RefusedError: this host cannot see the weights.
        """
        path, run = self.weights.path, self.weights.run
        if not path.exists():
            raise RefusedError(f"There is no such file on {directory.host()}", place=f"predict {path}")
        trained_on = trained_data(run.manifest)
        experiment = run.experiment
        data = None
        if self.given is None:
            data = prepare_to_predict(experiment.data, experiment.trust, trained_on, run.home is not None)
        if data and data.get("is_single_set") and self.split not in (None, SINGLE_SET):
            raise RefusedError(f"The data has only the set `{SINGLE_SET}`", place=f"--split {self.split}")
        prediction = {
            "config": run.text,
            "layout": asdict(layout),
            "data": data,
            "weights": str(path.resolve()),
            "split": self.split,
            "given": str(self.given) if self.given is not None else None,
            "trained_on": dict(trained_on) if self.given is not None else {},
            "out": str(self.out.absolute()) if self.out is not None else None,
            "answer": f"/proc/{os.getpid()}/fd/{self._answer}" if self._answer is not None else None,
            "batch_size": batch_size_of(fitted.resolved(experiment, run.manifest)),
            "targets": data_facts(run.manifest).get("target_columns"),
            "provenance": provenance_of(self.weights, data, layout.threads),
        }
        return Work("ddpexp.predict.worker:main", [json.dumps(prediction)])


def check_format(out: Path) -> None:
    """Check that the ending of a file is one of a format, and that what writes it is installed.

    Raises:
        RefusedError: it is none, or is not.
    """
    if out.suffix not in FORMATS:
        near = nearest(out.suffix, FORMATS)
        raise RefusedError(
            f"Predictions are written as {', '.join(FORMATS[:-1])} or {FORMATS[-1]}, by the ending",
            place=f"--out {out}",
            suggestion=f"Did you mean --out {out.with_suffix(near)}?" if near else "",
        )
    if out.suffix == ".parquet" and importlib.util.find_spec("pyarrow") is None:
        raise RefusedError("needs pyarrow", place=f"--out {out}", suggestion="Type pip install pyarrow, or use .npz.")


def check_out(out: Path) -> None:
    """Check that a file can be written.

    Raises:
        RefusedError: it is a directory, or its folder is missing or read-only.
    """
    folder = out.absolute().parent
    if out.is_dir():
        raise RefusedError("is a directory", place=f"--out {out}", suggestion="Name a file in it.")
    if not folder.is_dir():
        raise RefusedError(f"There is no directory {folder}", place=f"--out {out}", suggestion="Make it first.")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise RefusedError(
            f"The directory {folder} cannot be written", place=f"--out {out}", suggestion="Name a file in another one."
        )


def batch_size_of(experiment: Experiment) -> int:
    """Return the number of samples in a forward pass, which does not depend on the number of workers."""
    trainer, size = experiment.trainer, experiment.predict.batch_size
    if size != "auto":
        return size
    return trainer.global_batch_size if isinstance(trainer.micro_batch_size, str) else trainer.micro_batch_size


def request_of(experiment: Experiment, manifest: Mapping[str, Any]) -> WorkerRequest:
    """Return the workers to predict with: their threads are those of the run, however many workers there are."""
    request = worker_request(experiment)
    world = manifest.get("world")
    threads = world.get("threads") if isinstance(world, Mapping) else None
    if request.threads != "auto":
        return request
    return replace(request, threads=threads if isinstance(threads, int) and threads > 0 else 1)


def provenance_of(weights: StoredWeights, data: Mapping[str, Any] | None, threads: int) -> dict[str, Any]:
    """Return what the file of predictions says of how it was made, beside what the workers know."""
    data, home, facts = data or {}, weights.run.home, data_facts(weights.run.manifest)
    return {
        "ddpexp": __version__,
        "run": str(home.path.resolve()) if home is not None else None,
        "weights": weights.path.name,
        "data": {key: data[key] for key in ("name", "sha256", "hash") if key in data},
        "threads": threads,
        **({"classes": facts["classes"]} if isinstance(facts.get("classes"), list) else {}),
    }

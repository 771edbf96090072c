"""The workers that an experiment requests from its launcher."""

from __future__ import annotations

from ddpexp.config.schema import Experiment
from ddpexp.launch import WorkerRequest


def worker_request(experiment: Experiment) -> WorkerRequest:
    """Return which workers an experiment needs."""
    trainer = experiment.trainer
    # Sums inside a worker depend on its number of threads, which `auto` derives from the number of workers.
    threads = 1 if trainer.threads == "auto" and trainer.reduction == "exact" else trainer.threads
    return WorkerRequest(
        trainer.nodes, trainer.gpus, trainer.device, trainer.backend, threads, trainer.grace_seconds, trainer.timeout
    )  # fmt: skip

"""The configuration of the two steps that `ddpexp check` trains."""

from __future__ import annotations

from typing import Any

import yaml

from ddpexp.config.folders import conf_folder
from ddpexp.config.sampling import training_plan
from ddpexp.config.schema import Experiment
from ddpexp.launch.rendezvous.layout import check_workers, resolve
from ddpexp.run.worker_request import worker_request
from ddpexp.system.yaml_text import load_yaml

_STEP_SECONDS = 120  # after which workers that wait for one another are a finding


def shortened(text: str, experiment: Experiment, folder: str) -> str:
    """Return the configuration of a short run, as YAML.

    The micro-batch is that of the run, unless one worker has all of it: then it is split for two.

    Raises:
        RefusedError: numbers of workers or machines that no run can have.
    """
    tree: dict[str, Any] = load_yaml(text)
    trainer = experiment.trainer
    micro = training_plan(experiment, _num_workers(experiment)).micro_batch_size
    if micro == trainer.global_batch_size and micro > 1:
        micro //= 2
    with (conf_folder() / "launcher" / "spawn.yaml").open() as file:
        tree["launcher"] = load_yaml(file.read())
    tree["logger"] = {}
    tree["callbacks"] = {
        name: node
        for name, node in (tree.get("callbacks") or {}).items()
        if name in experiment.callbacks and experiment.callbacks[name].target != "histograms"  # which need a logger
    }
    tree["run"] |= {"dir": folder, "resume": "auto"}
    tree["data"] |= {"num_workers": 0} if "num_workers" in tree["data"] else {}
    tree["trainer"] |= {
        "nodes": 1,
        "gpus": 1,
        "backend": "auto",
        "threads": 1 if trainer.threads == "auto" else trainer.threads,
        "epochs": None,
        "max_steps": 2,
        "max_seconds": None,
        "global_batch_size": 2 * micro,
        "micro_batch_size": micro,
        "swa_start": None if trainer.swa_start is None else 0,
        "swa_every": "epoch" if trainer.swa_start is None else 1,
        "average_batch_norm": None if trainer.average_batch_norm is None else 1,
        "compile": False,
        "compile_blocks": None,
        "log_every": 1,
        "eval_every": 2 if trainer.eval_every or trainer.eval_at_start else 0,
        "eval_at_start": False,
        "limit_eval_batches": 2,
        "checkpoint_every": 1,
        "checkpoint_every_seconds": None,
        "keep_last": None,
        "keep_every": None,
        "on_save_error": "stop",
        "timeout": {
            **tree["trainer"]["timeout"],
            "step_seconds": min(trainer.timeout.step_seconds, _STEP_SECONDS),
        },
    }
    return yaml.safe_dump(tree, sort_keys=False)


def _num_workers(experiment: Experiment) -> int:
    """Return how many workers the run would have, as far as that can be seen on this machine.

    Raises:
        RefusedError: numbers of workers or machines that no run can have.
    """
    trainer = experiment.trainer
    nodes, _ = worker_request(experiment).node_range
    if trainer.gpus == "auto":
        gpus = resolve("auto", trainer.device, trainer.backend, 1).world_size
    else:
        gpus = trainer.gpus
        check_workers(gpus)
    size: int = experiment.strategy.data_rank(0, nodes * gpus).size
    return size

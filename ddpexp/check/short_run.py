"""The configurations of short runs in a temporary folder, such as the two steps that `ddpexp check` trains."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import yaml

from ddpexp.config.declared import declared
from ddpexp.config.folders import conf_folder
from ddpexp.config.sampling import training_plan
from ddpexp.config.schema import Experiment
from ddpexp.launch.rendezvous.layout import check_workers, resolve
from ddpexp.run.worker_request import worker_request
from ddpexp.settings.key import UNCHANGED
from ddpexp.system.yaml_text import load_yaml

_STEP_SECONDS = 120  # after which workers that wait for one another are a finding


def shortened(text: str, experiment: Experiment, folder: str) -> str:
    """Return the configuration of a short run, as YAML.

    The micro-batch is that of the run, unless one worker has all of it: then it is split for two.

    Raises:
        RefusedError: numbers of workers or machines that no run can have.
    """
    tree = short_tree(text, experiment, folder)
    trainer = experiment.trainer
    micro = training_plan(experiment, _num_workers(experiment)).micro_batch_size
    if micro == trainer.global_batch_size and micro > 1:
        micro //= 2
    tree["trainer"] |= {
        "threads": 1 if trainer.threads == "auto" else trainer.threads,
        "max_steps": 2,
        "global_batch_size": 2 * micro,
        "micro_batch_size": micro,
        "swa_every": "epoch" if trainer.swa_start is None else 1,
        "eval_every": 2 if trainer.eval_every or trainer.eval_at_start else 0,
        "limit_eval_batches": 2,
        "timeout": {
            **tree["trainer"]["timeout"],
            "step_seconds": min(trainer.timeout.step_seconds, _STEP_SECONDS),
        },
    }
    return yaml.safe_dump(tree, sort_keys=False)


def short_tree(text: str, experiment: Experiment, folder: str, unchanged: Collection[str] = ()) -> dict[str, Any]:
    """Return the configuration of a run in a folder, without loggers, with the values that its keys have in short runs.

    Those of the keys `unchanged` stay.
    """
    tree: dict[str, Any] = load_yaml(text)
    with (conf_folder() / "launcher" / "spawn.yaml").open() as file:
        tree["launcher"] = load_yaml(file.read())
    tree["logger"] = {}
    tree["callbacks"] = {
        name: node
        for name, node in (tree.get("callbacks") or {}).items()
        if name in experiment.callbacks and experiment.callbacks[name].target != "histograms"  # which need a logger
    }
    tree["run"] |= {"dir": folder, "resume": "auto"}
    for name, (key, _) in declared().items():
        section, _, rest = name.partition(".")
        if key.short_run is not UNCHANGED and name not in unchanged and tree[section].get(rest) is not None:
            tree[section][rest] = key.short_run
    return tree


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

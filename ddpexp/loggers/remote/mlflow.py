"""MLflow. The server's address and the login for it are the business of MLflow's own environment variables."""

from __future__ import annotations

import importlib.util
import io
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ddpexp.loggers.remote.base import END_SECONDS, Medium, NotReadyError, Remote, Row, RunInfo
from ddpexp.system.secrets import masker

_TAG = "ddpexp.id"
_METRICS_PER_REQUEST, _PARAMS_PER_REQUEST, _LONGEST_PARAM = 1000, 100, 6000  # MLflow's limits
_PATIENCE = {  # a server that is down must not block for MLflow's 14 minutes; what the user has set stays
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}


@dataclass
class MLflow(Remote):
    """Record a run with MLflow: the same run at every start, found by a tag."""

    info: RunInfo
    experiment: str | None = None
    checkpoint: Literal["best", "last"] | None = None
    end_seconds: float = END_SECONDS

    @staticmethod
    def problem(key: str, keys: Mapping[str, Any], environ: Mapping[str, str]) -> str | None:
        """Return why the logger at the key `key` cannot work here, in a sentence; None if it can."""
        if importlib.util.find_spec("mlflow") is None:
            return f"{key} needs the package mlflow, or its client alone: pip install 'ddpexp[mlflow]'."
        if not environ.get("MLFLOW_TRACKING_URI"):
            return (
                f"{key} does not know its server: set MLFLOW_TRACKING_URI in the environment, for example "
                "MLFLOW_TRACKING_URI=http://localhost:5000."
            )
        return None

    def destination(self) -> str:
        """Return the server."""
        return os.environ.get("MLFLOW_TRACKING_URI", "")

    def open(self) -> None:
        """Find the run of this run's id, or create it."""
        if (problem := self.problem("logger", {}, os.environ)) is not None:
            raise NotReadyError(problem)
        for name, value in _PATIENCE.items():
            os.environ.setdefault(name, value)
        from mlflow import MlflowClient

        self._metrics: list[Any] = []  # until `flush`: a request takes as long for a hundred rows as for one
        self._client = client = MlflowClient()
        name = self.experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or self.info.recipe
        experiment = client.get_experiment_by_name(name)
        experiment_id = client.create_experiment(name) if experiment is None else experiment.experiment_id
        runs = client.search_runs([experiment_id], f"tags.`{_TAG}` = '{self.info.id}'", max_results=1)
        if runs:
            self._run_id = runs[0].info.run_id
            client.update_run(self._run_id, "RUNNING")
        else:
            run = client.create_run(experiment_id, tags={_TAG: self.info.id}, run_name=masker()(self.info.path.name))
            self._run_id = run.info.run_id
        self._log_params(set(runs[0].data.params) if runs else set())

    def arrived(self, sent: Mapping[str, int], sending: Mapping[str, int]) -> Mapping[str, int]:
        """Ask the server for the metrics that may have been on their way; artifacts are replaced by the same."""
        names = [name for name, step in sending.items() if step > sent.get(name, -1) and not Medium.is_key(name)]
        histories = {name: self._client.get_metric_history(self._run_id, _name(name)) for name in names}
        return {name: max((metric.step for metric in history), default=-1) for name, history in histories.items()}

    def send(self, row: Row) -> None:
        """Keep the metrics for `flush`; an image, a text and a histogram are artifacts."""
        from mlflow.entities import Metric

        self._metrics += [
            Metric(_name(name), value, int(row.time * 1000), row.step) for name, value in row.scalars.items()
        ]
        for medium in row.media:
            path = f"{medium.kind}s/{_name(medium.name)}/step-{row.step:08d}"
            if medium.kind == "text":
                self._client.log_text(self._run_id, medium.text, f"{path}.txt")
            elif medium.kind == "histogram":
                content = {"counts": list(medium.counts), "edges": list(medium.edges)}
                self._client.log_dict(self._run_id, content, f"{path}.json")
            else:
                from PIL.PngImagePlugin import PngImageFile

                self._client.log_image(self._run_id, PngImageFile(io.BytesIO(medium.png)), artifact_file=f"{path}.png")

    def flush(self) -> None:
        """Log the metrics of several rows in one request, in the order of their steps."""
        while self._metrics:
            batch = self._metrics[:_METRICS_PER_REQUEST]
            self._client.log_batch(self._run_id, metrics=batch, synchronous=True)
            del self._metrics[: len(batch)]

    def send_checkpoint(self, folder: Path, step: int) -> None:
        """Log the folder as artifacts."""
        self._client.log_artifacts(self._run_id, str(folder), f"checkpoints/{folder.name}")

    def best(self, step: int, metric: str, value: float) -> None:
        """Log the value and the step as metrics at the best step, by which runs can be sorted."""
        self._client.log_metric(self._run_id, _name(f"best/{metric}"), value, step=step, synchronous=True)
        self._client.log_metric(self._run_id, "best/step", step, step=step, synchronous=True)

    def close(self, done: bool) -> None:
        """End the run."""
        self._client.set_terminated(self._run_id, "FINISHED" if done else "KILLED")

    def _log_params(self, logged: set[str]) -> None:
        """Log the configuration as parameters, which cannot be changed afterwards."""
        from mlflow.entities import Param

        params = [
            Param(name, text[:_LONGEST_PARAM]) for name, text in flat(self.info.config) if name not in logged and text
        ]
        for begin in range(0, len(params), _PARAMS_PER_REQUEST):
            self._client.log_batch(self._run_id, params=params[begin : begin + _PARAMS_PER_REQUEST], synchronous=True)


def flat(tree: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the values of a tree as texts, by keys such as `trainer.seed`."""
    if isinstance(tree, Mapping) and tree:
        for key, value in tree.items():
            yield from flat(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield _name(prefix), str(tree)


def _name(name: str) -> str:
    """Return a name that MLflow accepts."""
    return "".join(character if character.isalnum() or character in "_-./ :" else "_" for character in name)

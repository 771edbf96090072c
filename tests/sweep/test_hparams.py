"""TensorBoard's HParams tab over a sweep's directory, queried as the browser does, after real runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format
from tensorboard import context
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.hparams import api_pb2, get_experiment, list_session_groups
from tensorboard.plugins.hparams.backend_context import Context

from ddpexp.sweep.rows import rows_of
from tests.conftest import Ddpexp
from tests.points import Recipe


def hparams_session(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return what the tab gets of a folder: the columns, and its sessions."""
    multiplexer = EventMultiplexer()
    multiplexer.AddRunsFromDirectory(str(folder))
    multiplexer.Reload()
    plugin = Context(TBContext(data_provider=MultiplexerDataProvider(multiplexer, str(folder))))
    request = context.RequestContext()
    experiment = get_experiment.Handler(request, plugin, "", api_pb2.GetExperimentRequest()).run()
    columns = [api_pb2.ColParams(metric=info.name) for info in experiment.metric_infos]
    wanted = api_pb2.ListSessionGroupsRequest(
        start_index=0, slice_size=100, col_params=columns,
        allowed_statuses=[api_pb2.STATUS_UNKNOWN, api_pb2.STATUS_SUCCESS, api_pb2.STATUS_FAILURE,
            api_pb2.STATUS_RUNNING],
    )  # fmt: skip
    groups = list_session_groups.Handler(request, plugin, "", wanted).run()
    return json_format.MessageToDict(experiment), json_format.MessageToDict(groups).get("sessionGroups", [])


@pytest.fixture(scope="module")
def tab(trained: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    return hparams_session(trained)


def test_the_tab_has_one_session_a_run_with_its_values_and_metrics(
    trained: Path, tab: tuple[dict[str, Any], list[dict[str, Any]]]
) -> None:
    sessions = {group["sessions"][0]["name"]: group for group in tab[1]}
    rows = rows_of(trained)
    assert set(sessions) == {f"{row.name}/tb" for row in rows}
    assert all(len(group["sessions"]) == 1 for group in tab[1])
    for row in rows[:2]:
        found = sessions[f"{row.name}/tb"]
        assert found["hparams"]["optimizer.lr"] == float(row.overrides["optimizer.lr"])
        assert found["hparams"]["model.hidden"] == float(row.overrides["model.hidden"])
        values = {metric["name"]["tag"]: metric.get("value", 0.0) for metric in found["sessions"][0]["metricValues"]}
        assert values["eval/loss"] == pytest.approx(row.objective, rel=1e-6)
        assert values["eval/accuracy"] == pytest.approx(row.metrics["eval/accuracy"], rel=1e-6)
        assert found["sessions"][0]["status"] == "STATUS_SUCCESS"


def test_a_run_that_failed_is_a_session_that_has_not_succeeded(
    trained: Path, tab: tuple[dict[str, Any], list[dict[str, Any]]]
) -> None:
    [bad] = [group for group in tab[1] if group["sessions"][0]["name"].startswith("0002")]
    assert bad["hparams"]["task._target_"] == "points.Bad"
    assert bad["sessions"][0].get("status", "STATUS_UNKNOWN") == "STATUS_UNKNOWN"


def test_the_columns_are_of_all_runs_and_know_which_differ(tab: tuple[dict[str, Any], list[dict[str, Any]]]) -> None:
    columns = {info["name"]: info for info in tab[0]["hparamInfos"]}
    assert {name for name, info in columns.items() if info.get("differs")} == {"optimizer.lr", "model.hidden"}
    assert columns["optimizer.lr"]["type"] == "DATA_TYPE_FLOAT64"
    assert columns["optimizer.lr"]["domainInterval"] == {"minValue": 0.1, "maxValue": 0.5}
    assert columns["trainer.seed"]["type"] == "DATA_TYPE_FLOAT64"
    assert columns["optimizer"]["domainDiscrete"] == ["SGD"]
    assert not any(name.startswith(("run.", "hydra.")) for name in columns)
    metrics = {info["name"]["tag"] for info in tab[0]["metricInfos"]}
    assert {"eval/loss", "eval/accuracy", "train/loss"} <= metrics


def test_a_run_that_is_made_longer_is_still_one_session(tmp_path: Path, environ: dict[str, str]) -> None:
    recipe = Recipe(Ddpexp(tmp_path, environ))
    kept = ("logger=tensorboard", "trainer.keep_best=max:eval/loss")
    done = recipe("trainer.epochs=1", *kept)
    assert done.code == 0, done.err
    again = recipe("trainer.epochs=2", *kept, run=done.run)
    assert again.code == 0, again.err
    tags = [
        value.tag.rpartition("/")[2]
        for path in sorted((done.run / "tb").iterdir())
        for event in EventFileLoader(str(path)).Load()
        for value in event.summary.value
        if value.metadata.plugin_data.plugin_name == "hparams"
    ]
    assert tags == ["session_start_info", "session_end_info"]
    [group] = hparams_session(done.run)[1]
    values = {metric["name"]["tag"]: metric.get("value", 0.0) for metric in group["sessions"][0]["metricValues"]}
    result = json.loads((done.run / "result.json").read_text())
    assert values["best/eval/loss"] == pytest.approx(result["best"]["value"], rel=1e-6)
    assert values["best/step"] == result["best"]["step"] < result["step"]
    assert values["eval/loss"] == pytest.approx(result["metrics"]["eval/loss"], rel=1e-6)

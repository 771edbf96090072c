"""TensorBoard's files, read back with TensorBoard's own reader after a real run."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.plugins.hparams import api_pb2, plugin_data_pb2
from tensorboard.util import tensor_util

from ddpexp.report.pictures import read_pictures
from ddpexp.report.records import SPREADS, read_records
from ddpexp.settings.metrics import MEASURED, TIMES
from tests.conftest import SMALL, Ddpexp, Done


@pytest.fixture(scope="module")
def environ(warm_environ: dict[str, str]) -> dict[str, str]:
    """What a run writes is tested: its processes are forks."""
    return warm_environ


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, environ: dict[str, str]) -> Done:
    ddpexp = Ddpexp(tmp_path_factory.mktemp("board"), environ)
    done = ddpexp(*SMALL, "trainer.gpus=2", "logger=tensorboard", "trainer.log_every=3")
    assert done.code == 0, done.err
    return done


@pytest.fixture(scope="module")
def board(done: Done) -> EventAccumulator:
    assert len(list((done.run / "tb").rglob("*"))) == 1  # one file, so one run in TensorBoard's list
    board = EventAccumulator(str(done.run / "tb"), size_guidance={"tensors": 0, "scalars": 0})
    board.Reload()
    return board


def test_the_scalars_are_those_of_metrics_jsonl_with_the_step_as_x_axis(done: Done, board: EventAccumulator) -> None:
    expected: dict[str, list[tuple[int, float]]] = {}
    for record in done.metrics():
        for name, value in record.items():
            if "/" in name:
                expected.setdefault(name, []).append((record["step"], value))
    assert [step for step, _ in expected["train/loss"]] == [3, 6, 9, 10]
    assert [step for step, _ in expected["eval/loss"]] == [5, 10]
    assert {name for name in expected if not name.startswith(MEASURED)} == {
        "train/loss", "train/accuracy", "train/lr", "train/grad_norm", "train/samples_per_second", "eval/loss",
        "eval/accuracy",
    }  # fmt: skip
    for name, points in expected.items():
        found = [(event.step, event.value) for event in board.Scalars(name)]
        assert [step for step, _ in found] == [step for step, _ in points]
        assert [value for _, value in found] == pytest.approx([value for _, value in points], rel=1e-6)


def test_a_record_is_one_event(done: Done) -> None:
    [path] = (done.run / "tb").iterdir()
    events = EventFileLoader(str(path)).Load()
    tags = [{value.tag for value in event.summary.value if not value.tag.startswith(MEASURED)} for event in events]
    assert [names for names in tags if "train/loss" in names] == [
        {"train/loss", "train/accuracy", "train/lr", "train/grad_norm", "train/samples_per_second"}
    ] * 4
    assert [names for names in tags if "eval/loss" in names] == [{"eval/loss", "eval/accuracy"}] * 2


def test_the_configuration_is_there_as_text(done: Done, board: EventAccumulator) -> None:
    [event] = board.Tensors("config/text_summary")
    [text] = tensor_util.make_ndarray(event.tensor_proto)
    assert text.decode() == f"```yaml\n{(done.run / 'config.yaml').read_text()}\n```"


def test_the_hyperparameters_are_there_once_and_so_is_the_end(done: Done, board: EventAccumulator) -> None:
    parts = {}
    for tag, content in board.summary_metadata.items():
        if content.plugin_data.plugin_name == "hparams":
            parts[tag.rpartition("/")[2]] = plugin_data_pb2.HParamsPluginData.FromString(content.plugin_data.content)
    assert set(parts) == {
        "session_start_info",
        "session_end_info",
    }  # one that describes the experiment would hide other runs' own
    session = parts["session_start_info"].session_start_info
    assert session.hparams["model"].string_value == "Linear"
    assert session.hparams["optimizer.lr"].number_value == 0.1
    assert session.hparams["trainer.global_batch_size"].number_value == 128
    assert session.hparams["data.embedded_train"].number_value == 640  # no usual one, but an override
    assert "trainer.epochs" not in session.hparams or session.hparams["trainer.epochs"].HasField("number_value")
    assert parts["session_end_info"].session_end_info.status == api_pb2.STATUS_SUCCESS
    assert session.start_time_secs < parts["session_end_info"].session_end_info.end_time_secs


def test_the_pictures_of_predictions_decode(done: Done, board: EventAccumulator) -> None:
    events = board.Images("predictions")
    assert [event.step for event in events] == [5, 10]
    for event in events:
        with Image.open(io.BytesIO(event.encoded_image_string)) as picture:
            picture.load()
            assert (picture.format, picture.size, picture.mode) == ("PNG", (8 * 56, 4 * (56 + 14)), "RGB")
            assert len(picture.getcolors(1 << 20) or []) > 10


def test_a_report_reads_what_a_run_wrote(done: Done, board: EventAccumulator) -> None:
    [(name, pictures)] = read_pictures(done.run / "tb").items()
    assert [(one.step, one.png) for one in pictures] == [
        (event.step, event.encoded_image_string) for event in board.Images(name)
    ]
    found = read_records(done.run / "metrics.jsonl", 1000)
    scalars = {
        name for name in board.Tags()["scalars"] if not name.startswith((TIMES, "best/")) and not name.endswith(SPREADS)
    }
    assert set(found.curves) == scalars
    assert [steps.last for steps in found.measured] == [3, 6, 9, 10]


def test_without_a_logger_there_is_no_board(ddpexp: Ddpexp) -> None:
    done = ddpexp(*SMALL, "trainer.max_steps=1", "trainer.eval_every=0")
    assert done.code == 0, done.err
    assert not (done.run / "tb").exists()
    assert [record["step"] for record in done.metrics()] == [1]
    assert Path(done.run / "run.log").is_file()

"""Runs with a logger on another machine: the example of docs/loggers.md, and a server that is not always there."""

from __future__ import annotations

import json
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ddpexp.cli.sync import sync
from ddpexp.config.compose import compose
from ddpexp.config.parse import parse
from ddpexp.config.schema import Experiment
from ddpexp.errors import RefusedError
from ddpexp.loggers.remote.base import Keys, Remote, RunInfo
from ddpexp.run.sync import check_usable, remote_keys
from ddpexp.settings.experiment import ExperimentSettings
from tests.conftest import ROOT, Ddpexp, finish, python_path
from tests.loggers.remote.receiver import receiver
from tests.points import wait_for
from tests.refusals import refused
from tests.typed import call

CONF = str(ROOT / "examples/tracker/conf")
RUN = (
    "--config-dir", CONF, "recipe=mnist", "data.source=embedded", "data.embedded_train=640", "data.embedded_test=100",
    "trainer.global_batch_size=64", "trainer.log_every=2", "trainer.max_steps=8", "logger=tracker",
)  # fmt: skip
PATIENT = "logger.tracker.end_seconds=60"  # no file lists this key


@pytest.fixture
def environ(warm_environ: dict[str, str]) -> dict[str, str]:
    return warm_environ


def test_a_run_sends_each_step_and_keeps_the_address_of_the_hook_to_itself(ddpexp: Ddpexp, tmp_path: Path) -> None:
    with receiver() as server:
        hook = ("logger.alert_url=${oc.env:SLACK_WEBHOOK}", f"logger.tracker.url={server.url.rpartition('/')[0]}")
        run = tmp_path / "run"
        done = ddpexp(*RUN, *hook, PATIENT, f"run.dir={run}", environ={"SLACK_WEBHOOK": server.url})
        assert done.code == 0, done.err
        assert server.steps("train/loss") == [2, 4, 6, 8]
        assert server.steps("eval/loss") == [8]
        (config,) = (post["config"] for post in server.posts if "config" in post)
        assert config["logger"]["alert_url"] == "${oc.env:SLACK_WEBHOOK}"
        assert [post["done"] for post in server.posts if "done" in post] == [True]
        (text,) = server.texts()
        assert text.startswith("mnist is done after step 8 in ")
    assert not [path for path in run.rglob("*") if path.is_file() and b"secret-of-the-hook" in path.read_bytes()]
    assert "secret-of-the-hook" not in done.out + done.err


def test_a_server_that_is_down_costs_a_warning_and_sync_sends_the_rest_once(
    ddpexp: Ddpexp, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address = f"logger.tracker.url=http://127.0.0.1:{port}"
    done = ddpexp(*RUN, address, "+logger.tracker.end_seconds=1", f"run.dir={run}")
    assert done.code == 0, done.err
    assert "To send the rest: python -m ddpexp sync run" in done.out + done.err
    with receiver() as server:
        words = [str(run), "--config-dir", CONF, f"logger.tracker.url={server.url}", "--json"]
        for sent in (4, 0):
            capsys.readouterr()
            assert sync(call("sync", *words)) == 0
            answer = json.loads(capsys.readouterr().out)
            assert answer["loggers"] == {"tracker": {"sent": sent, "left": 0, "problem": None}}
        assert server.steps("train/loss") == [2, 4, 6, 8]
    assert sync(call("sync", *words)) == 0, "nothing is left to send"


def test_nothing_survives_a_killed_command_and_a_resumed_run_sends_no_step_twice(
    ddpexp: Ddpexp, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with receiver() as server:
        started = [word for word in RUN if not word.startswith("trainer.max_steps")]
        options = (f"logger.tracker.url={server.url}", "trainer.epochs=9999", "trainer.checkpoint_every=10")
        process, _ = ddpexp.start(*started, *options, PATIENT, f"run.dir={run}")
        wait_for(lambda: len(server.steps("train/loss")) > 2 and any((run / "checkpoints").glob("step-*")))
        process.send_signal(signal.SIGKILL)  # what is left of it is found by the fixture of every test
        finish(process, run)
        steps = max(json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines())
        ended = steps // 10 * 10 + 20
        words = ("resume", str(run), "--config-dir", CONF, f"trainer.epochs={ended // 10}")
        done = ddpexp(*words)
        assert (done.code, f" logger.tracker.url={server.url}\n" in done.err) == (2, True), done.err
        done = ddpexp(*words, f"logger.tracker.url={server.url}")
        assert done.code == 0, done.err
        assert server.steps("train/loss") == list(range(2, ended + 1, 2))
        assert len({post["run"] for post in server.posts}) == 1


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [([], "sync"), (["nowhere"], "sync nowhere: directory"), (["."], "sync .: run directory")],
)
def test_sync_names_what_it_cannot_send(
    argv: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with refused(sentence):
        sync(call("sync", *argv))


@pytest.mark.parametrize(
    ("name", "keys", "sentence"),
    [
        ("tb/other", {}, "logger.tb/other"),
        ("wandb", {"end_seconds": -1.0}, "logger.wandb.end_seconds=-1.0"),
    ],
)
def test_what_the_configuration_of_a_remote_logger_cannot_be(name: str, keys: Mapping[str, Any], sentence: str) -> None:
    section = {"_target_": "wandb", **keys}
    composed = compose(["recipe=mnist", "logger=none"])
    assert composed is not None
    with refused(sentence):
        check_usable(parse({**composed.values, "logger": {name: section}}))


class Posts(Remote):
    """A remote logger of another package with a rule of its own."""

    def __init__(self, info: RunInfo) -> None:
        self.info = info

    @classmethod
    def check(cls, experiment: ExperimentSettings, where: str) -> None:
        if experiment.trainer.log_every < 10:
            raise RefusedError("posts too often", key=where, suggestion="Use trainer.log_every=10.")


@pytest.mark.parametrize("log_every", [9, 10])
def test_a_logger_of_others_is_checked_by_its_own_rule(log_every: int) -> None:
    own = (f"trainer.log_every={log_every}", "logger=none", "run.trust=[tests]")
    experiment = parsed("recipe=mnist", *own, f"+logger.posts._target_={__name__}.Posts")
    if log_every == 10:
        assert remote_keys(experiment, "posts") == Keys()
        return
    with refused("logger.posts: trainer.log_every=10"):
        remote_keys(experiment, "posts")


def parsed(*argv: str) -> Experiment:
    composed = compose(list(argv))
    assert composed is not None
    return parse(composed.values)


def keys_of_tracker(*overrides: str) -> Keys:
    experiment = parsed(*RUN, *overrides)
    experiment.trust.make_importable()
    return remote_keys(experiment, "tracker")


def test_every_remote_logger_has_the_common_keys_that_no_file_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [*sys.path])
    assert keys_of_tracker() == Keys(10.0, None)
    typed = ("logger.tracker.end_seconds=3", "logger.tracker.checkpoint=best", "trainer.keep_best=min:eval/loss")
    assert keys_of_tracker(*typed) == Keys(3.0, "best")
    assert keys_of_tracker("+logger.tracker.end_seconds=3") == Keys(3.0, None)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("logger.tracker.end_seconds=-1", "logger.tracker.end_seconds=-1"),
        ("logger.tracker.end_seconds=soon", "logger.tracker.end_seconds=soon"),
        ("logger.tracker.checkpoint=lats", "logger.tracker.checkpoint=lats"),
        ("logger.tracker.checkpoint=best", "logger.tracker.checkpoint=best"),
        ("+logger.tracker.uri=x", "logger.tracker"),
    ],
)
def test_the_keys_of_others_remote_loggers_are_checked_like_ours(
    override: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.path", [*sys.path])
    with refused(sentence):
        keys_of_tracker(override)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["logger.acme.end_seconds=3"], "logger.acme"),
        (["logger.acne.end_seconds=3"], "logger.acne"),
        (["logger.tensorboard.end_seconds=3"], "logger.tensorboard.end_seconds"),
    ],
)
def test_the_common_keys_of_a_logger_that_is_not_chosen_or_not_remote_are_refused(
    overrides: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddpexp.config.parse.installed", lambda section: {"acme": "acme.Tracker"})
    with refused(sentence):
        parsed("recipe=mnist", *overrides)


PACKAGE = {
    "acme-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n",
    "acme-1.0.dist-info/entry_points.txt": "[ddpexp.loggers]\nacme = acme:Tracker\nplain = acme:Plain\n",
    "acme/conf/logger/acme.yaml": "acme: {_target_: acme}\n",
    "acme/conf/logger/plain.yaml": "plain: {_target_: plain, file: rows}\n",
    "acme/__init__.py": """\
from ddpexp.loggers.base import Logger
from ddpexp.loggers.remote.base import Remote

class Tracker(Remote):
    def __init__(self, info):
        self.file = info.path / "sent"

    def send_checkpoint(self, folder, step):
        self.file.write_text(f"{step}")

class Plain(Logger):
    def __init__(self, run_dir, file):
        pass
""",
}


def test_a_package_brings_a_remote_logger_with_the_common_keys_and_another_without(
    ddpexp: Ddpexp, tmp_path: Path
) -> None:
    for name, text in PACKAGE.items():
        path = tmp_path / "package" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    environ = {"PYTHONPATH": python_path(tmp_path / "package")}
    words = RUN[2:-1]
    common = ("end_seconds=60", "checkpoint=last")
    done = ddpexp(*words, "logger=acme", *(f"logger.acme.{key}" for key in common), environ=environ)
    assert done.code == 0, done.err
    assert (done.run / "sent").read_text() == "8"
    done = ddpexp(*words, "logger=plain", f"logger.plain.{common[0]}", environ=environ)
    assert (done.code, "argument 'end_seconds'. It takes file. If" in done.err) == (2, True), done.err

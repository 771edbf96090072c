"""What a webhook is sent, and that its address is nowhere else."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

from ddpexp.config.parse import parse
from ddpexp.config.stored import override_file
from ddpexp.errors import Failure
from ddpexp.run import alerts
from ddpexp.system.yaml_text import load_yaml
from tests.conftest import ROOT
from tests.loggers.remote.receiver import receiver
from tests.refusals import refused

CONFIG = "logger:\n  alert_url: ${oc.env:SLACK_WEBHOOK}\n"


def test_a_message_is_posted_once_as_slack_reads_it() -> None:
    with receiver() as hook:
        alerts.send(CONFIG, "mnist is done", {"SLACK_WEBHOOK": hook.url})
        assert hook.posts == [{"text": "mnist is done"}]
        alerts.send("logger:\n  alert_url: null\n", "no", {"SLACK_WEBHOOK": hook.url})
        alerts.send("logger: {}\n", "no", {"SLACK_WEBHOOK": hook.url})
        alerts.send(CONFIG, "no", {})
        assert len(hook.posts) == 1


def test_a_hook_that_refuses_is_a_warning_without_its_address(capsys: pytest.CaptureFixture[str]) -> None:
    with receiver() as hook:
        hook.status = 404
        alerts.send(CONFIG, "mnist is done", {"SLACK_WEBHOOK": hook.url})
    alerts.send(CONFIG, "mnist is done", {"SLACK_WEBHOOK": hook.url})
    shown = capsys.readouterr().err
    assert "it answered 404" in shown
    assert "Connection refused" in shown
    assert "127.0.0.1" not in shown
    assert "secret" not in shown


def test_a_hook_that_never_answers_costs_a_bounded_time(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alerts, "_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        begin = time.monotonic()
        alerts.send(CONFIG, "x", {"SLACK_WEBHOOK": f"http://127.0.0.1:{silent.getsockname()[1]}"})
        assert time.monotonic() - begin < 10
    assert "did not get the message" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("value", "environ", "sentence"),
    [
        ("https://hooks.example.com/T0/B0/key", {}, "logger.alert_url: stand"),
        ("https://evil.example/${oc.env:AWS_SECRET_ACCESS_KEY}", {}, "logger.alert_url: stand"),
        ("${oc.env:PLACE}", {"PLACE": "https://hooks.example.com/x"}, "logger.alert_url: secret"),
    ],
)
def test_an_address_that_would_be_printed_is_refused(value: str, environ: dict[str, str], sentence: str) -> None:
    with refused(sentence):
        alerts.check(f"logger:\n  alert_url: {value}\n", environ)


def test_variables_that_are_masked_may_hold_the_address() -> None:
    url = "https://hooks.example.com/services/abc"
    alerts.check(CONFIG, {"SLACK_WEBHOOK": url})
    alerts.check(CONFIG.replace("SLACK_WEBHOOK", "PLACE"), {"PLACE": url, "DDPEXP_SECRETS": "PLACE"})
    slack = "https://hooks.slack.com/services/T000/B000/abcdefgh"
    alerts.check(CONFIG.replace("SLACK_WEBHOOK", "PLACE"), {"PLACE": slack})


def test_a_resumed_run_keeps_the_reference_whatever_loggers_it_chooses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLACK_WEBHOOK", "https://hooks.example.com/services/abc")
    text = (ROOT / "tests/samples/mnist/config.yaml").read_text()
    config = tmp_path / "config.yaml"
    config.write_text(text)
    kept = ("launcher", "logger")
    _, typed = override_file(config, ["logger.alert_url=${oc.env:SLACK_WEBHOOK}"], kept)
    assert load_yaml(typed)["logger"]["alert_url"] == "${oc.env:SLACK_WEBHOOK}"
    config.write_text(typed)
    with refused(": reference"):
        override_file(config, ["logger=csv"], kept)
    values, chosen = override_file(config, ["logger=csv", "run.trust=[oc.env:SLACK_WEBHOOK]"], kept)
    assert load_yaml(chosen)["logger"] == {"csv": {"_target_": "csv"}, "alert_url": "${oc.env:SLACK_WEBHOOK}"}
    assert list(parse(values).logger) == ["csv"]


def test_the_text_of_a_message() -> None:
    result = {"step": 60, "seconds": 12.3, "metrics": {"eval/loss": 0.25, "eval/accuracy": 0.5}}
    assert alerts.text_of(result) == "is done after step 60 in 12 s: eval/loss 0.25  eval/accuracy 50.00%"
    diverged = {**result, "metrics": {"eval/loss": None}}  # as result.json has what is not finite
    assert alerts.text_of(diverged) == "is done after step 60 in 12 s: eval/loss not finite"
    failure = Failure(rank=1, host="a", kind="ValueError", message="no", step=7, exit_code=1)
    assert alerts.text_of_failure(failure) == "failed after step 7: rank 1 on a: ValueError: no"

"""Alerts: a message to a webhook when a run ends."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Mapping
from typing import Any

from ddpexp.errors import Failure, RefusedError
from ddpexp.system.secrets import masked, secret_variables
from ddpexp.system.terminal import print_message
from ddpexp.system.text import metric_text
from ddpexp.system.yaml_text import load_yaml

_KEY = "logger.alert_url"
_REFERENCE = re.compile(r"\$\{oc\.env:([A-Za-z_]\w*)\}")
_SECONDS = 3.0  # for the address to answer
_BYTES = 3000  # of a message: webhooks cut or refuse long ones


def check(config: str, environ: Mapping[str, str] = os.environ) -> None:
    """Check that the text of a config.yaml names the variable that holds the webhook's address, and not the address.

    Everything that ddpexp prints and writes has the values of secret variables masked.

    Raises:
        RefusedError: it does not, or ddpexp does not take the variable for a secret.
    """
    value = _configured(config)
    if value is None:
        return
    reference = _REFERENCE.fullmatch(value)
    if reference is None:
        raise RefusedError(
            "is a secret, which would stand in config.yaml",
            key=_KEY,
            suggestion=f"Put it into a variable of the environment, and write {_KEY}='${{oc.env:SLACK_WEBHOOK}}'.",
        )
    if not any(name == reference[1] for _, name in secret_variables(environ)):
        raise RefusedError(
            f"reads {reference[1]}, which ddpexp does not recognise as a secret and would not mask",
            key=_KEY,
            suggestion=f"Call it SLACK_WEBHOOK, or set DDPEXP_SECRETS={reference[1]}.",
        )


def send(config: str, text: str, environ: Mapping[str, str] = os.environ) -> None:
    """Send a message once, if `config` names a webhook; wait a few seconds at most, and warn if it was not accepted."""
    reference = _REFERENCE.fullmatch(_configured(config) or "")
    url = environ.get(reference[1]) if reference is not None else None
    if not url:
        return
    problems = ["it did not answer"]
    thread = threading.Thread(target=_post, args=(url, masked(text)[:_BYTES], problems), daemon=True)
    thread.start()
    thread.join(_SECONDS)
    if problems:
        print_message(f"ddpexp: warning: {_KEY} did not get the message on the end of the run: {problems[0]}")


def text_of(result: Mapping[str, Any]) -> str:
    """Return what a message says of a run that is done; `result` is its result.json."""
    shown = "  ".join(f"{name} {metric_text(name, value)}" for name, value in result["metrics"].items())
    return f"is done after step {result['step']} in {result['seconds']:.0f} s: {shown or 'no evaluation'}"


def text_of_failure(failure: Failure) -> str:
    """Return what a message says of a run that failed."""
    step = f" after step {failure.step}" if failure.step is not None else ""
    return f"failed{step}: rank {failure.rank} on {failure.host}: {failure.kind}: {failure.message}"


def _post(url: str, text: str, problems: list[str]) -> None:
    """Post a message, as Slack, Mattermost and others read it; empty `problems` if it is accepted."""
    import urllib.error
    import urllib.request

    body = json.dumps({"text": text}).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json", "User-Agent": "ddpexp"})
    try:
        with urllib.request.urlopen(request, timeout=_SECONDS):
            problems.clear()
    except urllib.error.HTTPError as error:
        problems[:] = [f"it answered {error.code}"]
    except Exception as error:  # its text may contain the address
        reason: Any = getattr(error, "reason", None)
        problems[:] = [getattr(reason, "strerror", None) or type(error).__name__]


def _configured(config: str) -> str | None:
    """Return the value of the key as it is written, with its reference."""
    if "alert_url" not in config:
        return None
    section = load_yaml(config).get("logger")
    value = section.get("alert_url") if isinstance(section, Mapping) else None
    return None if value is None else str(value)

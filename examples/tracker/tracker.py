"""A logger on another machine: it posts what a run records, as JSON, to an address."""

import json
import urllib.request
from collections.abc import Mapping
from typing import Any

from ddpexp.loggers.remote.base import Remote, Row, RunInfo


class Tracker(Remote):
    def __init__(self, info: RunInfo, url: str) -> None:
        self.info, self.url = info, url

    def open(self) -> None:  # at every start, and again after an outage
        self.post({"config": self.info.config})

    def arrived(self, sent: Mapping[str, int], sending: Mapping[str, int]) -> Mapping[str, int]:
        with urllib.request.urlopen(f"{self.url}?run={self.info.id}", timeout=10) as answer:
            steps = json.load(answer)  # the last step of each name
        return {name: steps.get(name, -1) for name in sending}

    def send(self, row: Row) -> None:  # an exception is an outage: the row is sent again later
        self.post({"step": row.step, **row.scalars, **{medium.key: medium.text for medium in row.media}})

    def close(self, done: bool) -> None:
        self.post({"done": done})

    def post(self, values: Mapping[str, Any]) -> None:
        body = json.dumps({"run": self.info.id, **values}).encode()
        with urllib.request.urlopen(self.url, body, timeout=10):
            pass

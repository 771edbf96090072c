"""Weights & Biases. Whose server it is and the key for it are the business of wandb's own environment and netrc."""

from __future__ import annotations

import html
import importlib.util
import io
import netrc
import os
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal
from urllib.parse import urlsplit

from ddpexp.loggers.remote.base import END_SECONDS, Medium, NotReadyError, Remote, Row, RunInfo
from ddpexp.loggers.remote.wandb_file import last_steps
from ddpexp.system.process import away_from_current_folder
from ddpexp.system.secrets import held_in, masker

_NO_LOGIN = (
    "wandb has no API key: run `wandb login`, set WANDB_API_KEY, or use {key}.mode=offline, which needs none "
    "(python -m ddpexp sync RUN_DIR with WANDB_MODE=online sends such a run later)."
)


@dataclass
class WandB(Remote):
    """Record a run with wandb: the same run id at every start, a row of its history for each step."""

    restate_on_resume: ClassVar[tuple[str, ...]] = ("entity",)

    info: RunInfo
    project: str | None = None
    entity: str | None = None
    group: str | None = None
    tags: tuple[str, ...] = ()
    mode: Literal["online", "offline"] | None = None
    checkpoint: Literal["best", "last"] | None = None
    end_seconds: float = END_SECONDS

    @staticmethod
    def problem(key: str, keys: Mapping[str, Any], environ: Mapping[str, str]) -> str | None:
        """Return why the logger at the key `key` cannot work here, in a sentence; None if it can."""
        if importlib.util.find_spec("wandb") is None:
            return f"{key} needs the package wandb: pip install 'ddpexp[wandb]'."
        mode = keys.get("mode") or environ.get("WANDB_MODE", "online")
        return None if mode != "online" or _has_login(environ) else f"{key}: {_NO_LOGIN.format(key=key)}"

    def destination(self) -> str:
        """Return the server, or that this is an offline run."""
        return os.environ.get("WANDB_BASE_URL", "online") if self._mode == "online" else self._mode

    @property
    def _mode(self) -> str:
        return self.mode or os.environ.get("WANDB_MODE", "online")

    def open(self) -> None:
        """Start or resume the run."""
        with away_from_current_folder():  # whose wandb/settings it would read, which names a server to send the key to
            import wandb

            wandb.teardown()  # of an attempt that failed
            wandb.setup()
        if (problem := self.problem("logger", {"mode": self._mode}, os.environ)) is not None:
            raise NotReadyError(problem)
        secret = held_in(" ".join([str(self.info.path), *sys.argv])) is not None
        self._run = wandb.init(
            dir=self.info.path, id=self.info.id, name=masker()(self.info.path.name), resume="allow", mode=self.mode,
            project=self.project or os.environ.get("WANDB_PROJECT") or self.info.recipe, entity=self.entity,
            group=self.group, tags=self.tags or None, config={}, settings=wandb.Settings(
                console="off", silent=True, disable_code=True, x_sync_dir_suffix=f"{time.time_ns():x}",
                x_disable_meta=secret,  # which has the command line and paths as they are
            ),
        )  # fmt: skip
        self._run.config.update(dict(self.info.config), allow_val_change=True)

    def arrived(self, sent: Mapping[str, int], sending: Mapping[str, int]) -> Mapping[str, int]:
        """Return the steps in the files of an offline run; an online run knows the last step of its server.

        The process that writes and sends loses the rows in its memory when it is killed.
        """
        names = {**sent, **sending}
        if self._run.offline:
            steps = last_steps((self.info.path / "wandb").glob(f"offline-run-*/run-{self.info.id}.wandb"))
            return {name: steps.get(Medium.name_of(name), -1) for name in names}
        last = self._run.starting_step - 1
        return {name: min(step, last) for name, step in names.items()}

    def send(self, row: Row) -> None:
        """Log the step; records that arrive after an interruption within a step join the next number."""
        values: dict[str, Any] = {"_timestamp": row.time, **row.scalars}
        if row.scalars:
            values["epoch"] = row.epoch
        values |= {medium.name: _medium(medium) for medium in row.media}
        self._run.log(values, step=max(row.step, self._run.step), commit=True)

    def send_checkpoint(self, folder: Path, step: int) -> None:
        """Log the folder as an artifact of the type `model`."""
        import wandb

        artifact = wandb.Artifact(f"{self.info.recipe}-{self.info.id}", type="model", metadata={"step": step})
        artifact.add_dir(str(folder))
        self._run.log_artifact(artifact)

    def best(self, step: int, metric: str, value: float) -> None:
        """Write the value and the step into the summary, by which runs can be sorted."""
        self._run.summary.update({f"best/{metric}": value, "best/step": step})

    def close(self, done: bool) -> None:
        """Wait until everything is on the server or, offline, in the file."""
        self._run.finish(exit_code=0 if done else 1)


def _medium(medium: Medium) -> Any:
    import wandb

    if medium.kind == "histogram":
        return wandb.Histogram(np_histogram=(list(medium.counts), list(medium.edges)))
    if medium.kind == "image":
        from PIL.PngImagePlugin import PngImageFile

        return wandb.Image(PngImageFile(io.BytesIO(medium.png)))
    return wandb.Html(f"<pre>{html.escape(medium.text)}</pre>")


def _has_login(environ: Mapping[str, str]) -> bool:
    """Return whether wandb will find a key: in the environment, or for its server in a netrc file."""
    if environ.get("WANDB_API_KEY") or environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(environ.get("WANDB_BASE_URL", "")).hostname or "api.wandb.ai"
    return any(_has_entry(path, host) for path in _netrc_files(environ))


def _netrc_files(environ: Mapping[str, str]) -> Iterable[Path]:
    if named := environ.get("NETRC"):
        return [Path(named).expanduser()]
    home = Path(environ.get("HOME") or Path.home())
    return [home / ".netrc", home / "_netrc"]


def _has_entry(path: Path, host: str) -> bool:
    with suppress(OSError, netrc.NetrcParseError):
        return host in netrc.netrc(str(path)).hosts
    return False

"""The job of `ddpexp check`: a few steps of an experiment in a temporary folder, and what they show."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from ddpexp.checkpoint import initial
from ddpexp.checkpoint.format import folder_name
from ddpexp.config.schema import Experiment
from ddpexp.config.validate import check_layouts
from ddpexp.errors import RefusedError
from ddpexp.launch import Job, Layout, Lifecycle, Outcome, Participants, Work
from ddpexp.run import pretrained
from ddpexp.run.directory import FORMAT, RunDir
from ddpexp.run.lock import Owner
from ddpexp.run.prepare import prepare, with_facts
from ddpexp.run.stored_config import checked_text, job_identity
from ddpexp.run.worker_request import worker_request
from ddpexp.system import files

_PREFIX, _OWNER = "ddpexp-check-", "owner.json"

Part = Literal["one", "one_resumed", "two", "two_resumed"]
"""With one or two workers; `resumed` begins at the first checkpoint of the part before it."""
Answer: TypeAlias = Mapping[str, Any] | str
"""What rank zero found in a part, or why nothing was found."""


@dataclass(frozen=True)
class Finding:
    """What one check found."""

    check: str
    ok: bool | None  # None: not checked
    text: str  # a sentence


class Check(Lifecycle):
    """Train two steps; writes only into its folder."""

    def __init__(self, experiment: Experiment, text: str, folder: Path, part: Part) -> None:
        """Take the shortened experiment, its YAML, and the temporary folder of all parts."""
        self.experiment, self.part = experiment, part
        request = replace(worker_request(experiment), gpus=2 if part.startswith("two") else 1)
        self.job = Job(self, request, identity=job_identity(text), check=self._check)
        self.run = RunDir(folder / part)
        self._text, self._folder = text, folder

    def _check(self, layouts: Sequence[Layout]) -> None:
        """Check that the device supports the options."""
        strategy = self.experiment.strategy
        if strategy.least_world_size > min(layout.world_size for layout in layouts):
            raise RefusedError(
                f"needs {strategy.least_world_size} workers or more, but check trains with one worker, then with two",
                key="strategy",
                value=strategy.kind,
                suggestion="Check the other overrides with strategy=ddp.",
            )
        check_layouts(self.experiment, layouts)

    def begin(self, layout: Layout, participants: Participants) -> Work:
        """Prepare the data and a run directory."""
        text, data = make_run(self.run, self.experiment, self._text)
        resumes, parts = self.part.endswith("resumed"), get_args(Part)
        if self.part == "one":
            pretrained.fetch(self.experiment.model, text)
        else:
            earlier = self._folder / parts[parts.index(self.part) - 1] / "checkpoints"
            if resumes:
                (earlier / folder_name(1)).rename(self.run.checkpoints / folder_name(1))
            shutil.rmtree(earlier, ignore_errors=True)  # there is room for those of one part
        found = {} if resumes else initial.located(self.experiment.run, lambda warning: None)
        request = {
            "config": text,
            "run": str(self.run.path),
            "part": self.part,
            "layout": asdict(layout),
            "data": data,
            "init_from": initial.as_safetensors(self.experiment.run, found, self.run.path, []).get("init_from"),
        }
        return Work("ddpexp.check.worker:main", [json.dumps(request)])

    def end(self, outcome: Outcome | None) -> str:
        """Return what is left: nothing."""
        return "the check is not finished, and its folder is removed"

    def answer(self) -> Answer:
        """Return what was found."""
        path = self.run.path / "answer.json"
        return json.loads(path.read_text()) if path.exists() else "there is no answer"


def make_run(run: RunDir, experiment: Experiment, text: str) -> tuple[str, dict[str, Any] | None]:
    """Make the directory of a short run; return its configuration and what is known of its data, which is prepared."""
    run.checkpoints.mkdir(parents=True)
    data = prepare(experiment.data, experiment.trust)
    text = with_facts(text, experiment.data, data)
    files.write(run.config, checked_text(text))
    files.write_json(run.manifest, {"format": FORMAT})
    return text, data


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Make a folder that is removed at the end, and remove those of commands that were killed."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_OWNER}"):
        if _is_left(path):
            shutil.rmtree(path.parent, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        files.write_json(folder / _OWNER, Owner.here().as_record())
        yield folder


def _is_left(path: Path) -> bool:
    """Return whether a folder is this user's and its check has ended; False where that cannot be known."""
    try:
        if path.parent.lstat().st_uid != os.getuid():
            return False
        return Owner.of_record(json.loads(path.read_text())).is_alive() is False
    except (OSError, ValueError, KeyError, TypeError):
        return False

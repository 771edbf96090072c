"""A kind of data is added by what CONTRIBUTING says, and nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.conftest import ROOT, Ddpexp

BLOCK = re.compile(r"^  ```\w+\n  # examples/waves/(\S+)\n(.*?)^  ```$", re.MULTILINE | re.DOTALL)


def test_a_small_kind_is_added_by_the_text_alone(ddpexp: Ddpexp, tmp_path: Path) -> None:
    files = BLOCK.findall((ROOT / "CONTRIBUTING.md").read_text())
    assert len(files) == 3
    for name, content in files:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(re.sub("^  ", "", content, flags=re.MULTILINE))
    command = (
        "--config-dir",
        str(tmp_path / "conf"),
        "recipe=waves",
        "trainer.reduction=exact",
        "trainer.micro_batch_size=16",
    )
    runs = {}
    for workers in (1, 2):
        done = ddpexp(*command, f"trainer.gpus={workers}", f"run.dir={tmp_path}/{workers}")
        assert done.code == 0, done.err
        runs[workers] = json.loads((tmp_path / str(workers) / "result.json").read_text())
    assert runs[1]["weights_sha256"] == runs[2]["weights_sha256"]
    assert runs[1]["metrics"]["eval/r2"] > 0.9

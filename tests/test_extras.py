"""The tests that need packages of the extras, in an environment that has them: here they skip themselves."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from tests import extras
from tests.conftest import PATIENCE, ROOT

PROGRAMS = "tests/test_migrate.py::test_a_program_that_the_recipe_replaces_ends_with_the_same_loss"
TESTS = (
    "tests/data/hf", "tests/data/tar_shards/test_remote.py",
    "tests/data/arrays/test_arrays.py::test_columns_of_parquet_files_are_read_with_pyarrow",
    "tests/data/test_streams.py::test_streaming_data_sets_of_hugging_face_are_split_by_themselves",
    "tests/data/text/test_prepare.py::test_a_tokenizer_of_the_library",
    *(f"{PROGRAMS}[{name}]" for name in ("with_accelerate.py", "with_lightning.py", "train.py")),
    "tests/test_migrate.py::test_every_argument_of_theirs_has_ours_or_why_not",
)  # fmt: skip


def test_nothing_is_skipped_where_the_extras_are_installed(tmp_path: Path) -> None:
    python = extras.make(tmp_path / "venv", "hf", "parquet", "text", "remote", "frameworks")
    command = [python, "-m", "pytest", "-q", "-n", "0", "-m", "slow or not slow", "-p", "no:cacheprovider", *TESTS]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=4 * PATIENCE)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert re.search(r"^\d\d+ passed in ", done.stdout, re.MULTILINE), done.stdout[-2000:]

"""The tests that need packages of the extras, in environments that have them: here they skip themselves."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests import extras
from tests.conftest import PATIENCE, ROOT

PROGRAMS = "tests/test_migrate.py::test_a_program_that_the_recipe_replaces_ends_with_the_same_loss"
HF = "tests/data/hf/test_hf.py"
FEW = (  # of its tests, each with a process of its own: a file, a folder, texts and the hub
    f"{HF}::test_columns_of_files_are_inputs_and_targets[parquet]", f"{HF}::test_a_folder_of_images_and_its_splits",
    f"{HF}::test_texts_are_tokens_cut_off_and_filled", f"{HF}::test_a_name_of_the_hub_without_network_is_refused",
)  # fmt: skip
DATA = (
    "tests/compat/test_datasets.py",
    "tests/data/tar_shards/test_remote.py",
    "tests/data/arrays/test_arrays.py::test_columns_of_parquet_files_are_read_with_pyarrow",
    "tests/data/test_streams.py::test_streaming_data_sets_of_hugging_face_are_split_by_themselves",
    "tests/data/text/test_prepare.py::test_a_tokenizer_of_the_library",
)  # fmt: skip
MIGRATE = (
    *(f"{PROGRAMS}[{name}]" for name in ("with_accelerate.py", "with_lightning.py", "train.py")),
    "tests/test_migrate.py::test_every_argument_of_theirs_has_ours_or_why_not",
)
ONNX = ("tests/cli/test_export.py::test_an_onnx_model_takes_batches_of_any_size_and_gives_the_same",)
GROUPS: Mapping[str, tuple[tuple[str, ...], Sequence[str]]] = {  # packages of tests/extras.py, and what needs them
    "data": (("hf", "parquet", "text", "remote"), (*FEW, *DATA)),
    "hf": (("hf", "parquet", "text"), ("tests/data/hf",)),
    "migrate": (("frameworks",), MIGRATE),
    "onnx": (("onnx",), ONNX),
}


@pytest.mark.slow
@pytest.mark.parametrize("group", ["data", "hf", "migrate", "onnx"])
def test_nothing_is_skipped_where_the_extras_are_installed(group: str, tmp_path: Path) -> None:
    packages, tests = GROUPS[group]
    python = extras.make(tmp_path / "venv", *packages)
    command = [python, "-m", "pytest", "-q", "-n", "0", "-m", "slow or not slow", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=4 * PATIENCE)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert re.search(r"^\d+ passed(, \d+ warnings?)? in ", done.stdout, re.MULTILINE), done.stdout[-2000:]

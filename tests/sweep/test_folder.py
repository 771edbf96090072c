"""The sweep on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpexp.errors import RefusedError
from ddpexp.sweep.folder import SweepDir, read_command
from tests.refusals import is_about


def test_a_sweep_whose_overrides_are_lost_is_refused_with_what_to_type(tmp_path: Path) -> None:
    with pytest.raises(RefusedError) as error:
        read_command(SweepDir(tmp_path))
    assert is_about(error.value, "sweep.yaml: No such file")

"""The sweep on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpexp.errors import RefusedError
from ddpexp.sweep.folder import SweepDir, read_command


def test_a_sweep_whose_overrides_are_lost_is_refused_with_what_to_type(tmp_path: Path) -> None:
    with pytest.raises(RefusedError) as error:
        read_command(SweepDir(tmp_path))
    why = "No such file or directory"
    assert str(error.value) == (
        f"{tmp_path}/sweep.yaml cannot be read ({why}): restate the sweep's own overrides, with "
        f"hydra.sweep.dir={tmp_path}."
    )

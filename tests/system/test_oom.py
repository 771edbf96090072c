"""How much memory a process can still get."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpexp.system.oom import available_bytes


@pytest.mark.parametrize(("limit", "used", "available"), [("max", 10, 4096), (3000, 1000, 2000), (10**9, 0, 4096)])
def test_the_tightest_limit_counts(tmp_path: Path, limit: object, used: int, available: int) -> None:
    files = {
        "proc/meminfo": "MemTotal: 16 kB\nMemAvailable: 4 kB\n",
        "proc/self/cgroup": "0::/job\n",
        "sys/fs/cgroup/job/memory.max": f"{limit}\n",
        "sys/fs/cgroup/job/memory.current": f"{used}\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert available_bytes(tmp_path) == available

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.conftest import PATIENCE, ROOT

_PROGRAM = """
import sys, torch
from ddpexp.compat import compiler

compiler.end_processes()  # does not import it
assert "torch._inductor" not in sys.modules
compiled = []
compiler.on_compiled(compiled.append)
compiler.leave_graphs_whole()
assert torch._dynamo.config.optimize_ddp is False
double = torch.compile(lambda x: x * 2, backend="eager", dynamic=False)
double(torch.ones(2)), double(torch.ones(3))
assert [(c.callback_trigger.name, str(c.compile_id)) for c in compiled] == [("DYNAMO", "0/0"), ("DYNAMO", "0/1")], compiled
first, again = compiler.metrics()
assert (first.recompile_reason, first.co_name, first.co_firstlineno) == (None, "<lambda>", 11), first
assert "size mismatch" in again.recompile_reason and again.co_filename == "<string>"
print(compiler.cache_folder())
import torch._inductor.async_compile
compiler.end_processes()
"""


def test_what_torchs_compiler_says_of_itself(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=False,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(tmp_path / "cache")

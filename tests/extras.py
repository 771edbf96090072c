"""An environment with packages that only some tests need, which sees what this one has installed."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

from tests.conftest import PATIENCE, ROOT

PACKAGES = {  # of the extras; mlflow with its server, which users of that extra do not need; and what no extra has
    "wandb": "wandb", "mlflow": "mlflow", "hf": "datasets", "parquet": "pyarrow", "text": "tokenizers tiktoken",
    "remote": "fsspec[http]", "onnx": "onnx onnxscript onnxruntime",
    "frameworks": "lightning accelerate",
}  # fmt: skip
SEEN = "torch\n"
"""What they depend on and is not installed again: the environment that makes theirs has it, and it takes gigabytes."""


def make(folder: Path, *names: str) -> str:
    """Install packages of these names, at the versions of constraints.txt, and return the path of the interpreter."""
    uv = [sys.executable, "-m", "uv", "--quiet", "--no-config"]
    python = folder / "bin/python"
    subprocess.run([*uv, "venv", "--python", sys.executable, str(folder)], check=True, timeout=PATIENCE)
    packages = " ".join(PACKAGES[name] for name in names).split()
    (folder / "seen.txt").write_text(SEEN)
    pins = ["-c", str(ROOT / "constraints.txt"), "--excludes", str(folder / "seen.txt")]
    install = [*uv, "pip", "install", "--python", str(python), *pins, *packages]
    subprocess.run(install, check=True, timeout=4 * PATIENCE)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "seen.pth").write_text(f"{ROOT}\nimport site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    return str(python)


def environ(**more: str) -> dict[str, str]:
    """Return an environment without what this machine's user has set for the trackers."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("WANDB_", "MLFLOW_"))} | more

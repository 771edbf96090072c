"""Compile the device, and make it known to torch."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import sysconfig
import tempfile
from contextlib import nullcontext
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

NAME = "apart"
SOURCE = Path(__file__).with_name("device.cpp")


def library() -> Path:
    """Return the compiled device, which takes 15 seconds once for each version of torch and Python."""
    from torch.utils.cpp_extension import include_paths  # takes half a second

    key = sha256(f"{torch.__version__} {sys.version} {SOURCE.read_text()}".encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"ddpexp-tests-{os.getuid()}-{key}"
    folder.mkdir(mode=0o700, exist_ok=True)
    compiled = folder / f"{NAME}.so"
    if not compiled.exists():
        headers = [f"-I{path}" for path in (*include_paths(), sysconfig.get_paths()["include"])]
        torch_folder = Path(torch.__file__).parent / "lib"
        linked = [f"-L{torch_folder}", "-lc10", "-ltorch_cpu", "-ltorch_python"]
        made = folder / f"{os.getpid()}.so"
        command = ["g++", "-std=c++20", "-O0", "-shared", "-fPIC", *headers, str(SOURCE), "-o", str(made), *linked]
        subprocess.run(command, check=True)
        made.rename(compiled)
    return compiled


def install(compiled: Path) -> Any:
    """Give torch the device; return the module of its library."""
    spec = importlib.util.spec_from_file_location(NAME, compiled)
    assert spec is not None
    assert spec.loader is not None
    native = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(native)
    private: Any = torch
    private.utils.rename_privateuse1_backend(NAME)
    private._register_device_module(NAME, _python_module())
    return native


def _python_module() -> ModuleType:
    """Return `torch.apart`, what `torch.cuda` is for CUDA."""
    device = torch.device(NAME, 0)
    module: Any = ModuleType(f"torch.{NAME}")
    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.set_device = module.manual_seed_all = module.synchronize = lambda *_: None
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.current_stream = module.Stream = lambda *_, **__: torch.Stream(device)
    module.Event = lambda *_, **__: torch.Event(device)
    module.stream = lambda _: nullcontext()
    return module  # type: ignore[no-any-return]

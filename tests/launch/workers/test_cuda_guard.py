"""What is forked from a process that has initialised CUDA cannot use it: it is noticed, and named."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpexp.launch.workers import cuda_guard
from ddpexp.launch.workers.client import Server
from ddpexp.launch.workers.cuda_guard import START, CudaGuard, is_initialised, open_files, sentence
from ddpexp.launch.workers.rank_log import Log


def output_of_worker(entry: str, preloaded: str, uses_cuda: bool) -> list[str]:
    """Start a worker from a server that has imported a module; return what it prints."""
    server, log = Server(preload=[preloaded]), Log(None, 0)
    try:
        server.start(0, entry, [], {}, log.fileno(), {}, uses_cuda)
        while (answer := server.receive()) is not None and answer["kind"] != "exit":
            assert not answer.get("failed"), answer
        lines = log.new_lines(last=True)
    finally:
        server.close()
        log.close()
    assert answer is not None
    assert answer["code"] == 0, lines
    return lines


NVML = ["/dev/nvidiactl", "/dev/nvidia0", "/dev/nvidia1", "/dev/nvidia-caps/nvidia-cap1", "socket:[7]", "/dev/null"]


@pytest.mark.parametrize(
    ("torch_reports", "files", "initialised"),
    [
        (False, [], False),
        (False, NVML, False),
        (False, [*NVML, "/dev/nvidia-uvm"], True),
        (False, ["/dev/kfd", "/dev/dri/renderD128"], True),
        (True, [], True),
        (False, ["/home/me/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"], False),
    ],
)
def test_a_process_that_has_initialised_cuda_is_known_by_its_files(
    torch_reports: bool, files: list[str], initialised: bool
) -> None:
    assert is_initialised(torch_reports, files) is initialised


def test_the_open_files_of_this_process_are_read(tmp_path: Path) -> None:
    with (tmp_path / "opened").open("w"):
        assert str(tmp_path / "opened") in open_files()


def test_the_first_import_that_initialises_cuda_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    files: list[str] = list(NVML)
    monkeypatch.setattr(cuda_guard, "open_files", lambda: files)
    guard = CudaGuard()
    guard.imported("numpy")
    assert guard.warning(3) is None
    files.append("/dev/nvidia-uvm")
    for name in ("recipes.mine", "recipes.other"):
        guard.imported(name)
    assert guard.warning(3) == sentence(3, "recipes.mine")
    assert CudaGuard().warning(0) == sentence(0, START)


def test_cuda_that_no_import_has_initialised_is_noticed_at_the_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = CudaGuard()
    monkeypatch.setattr(cuda_guard, "open_files", lambda: ["/dev/nvidia-uvm"])
    warning = guard.warning(0)
    assert warning is not None
    assert "a module initialised CUDA" in warning


@pytest.mark.parametrize(("uses_cuda", "forked"), [(False, True), (True, False)])
def test_a_gpu_worker_is_not_forked_from_a_server_in_which_a_module_has_initialised_cuda(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uses_cuda: bool, forked: bool
) -> None:
    # No GPU is here to use: the module makes it look so.
    (tmp_path / "asks_cuda.py").write_text(
        "from ddpexp.launch.workers import cuda_guard\ncuda_guard.open_files = lambda: ['/dev/nvidia-uvm']\n"
    )
    (tmp_path / "works.py").write_text(
        "import os, sys\n"
        "def main():\n"
        "    print('forked', 'asks_cuda' in sys.modules, os.environ['PYTORCH_NVML_BASED_CUDA_CHECK'])\n"
        "    sys.stdout.flush()\n"
        "    return 0\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK", raising=False)
    if forked:
        monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "kept")
    lines = output_of_worker("works:main", "asks_cuda", uses_cuda)
    warning = [] if forked else [f"ddpexp: warning: {sentence(0, 'asks_cuda')}"]
    assert lines == [*warning, f"forked {forked} {'kept' if forked else '1'}"]

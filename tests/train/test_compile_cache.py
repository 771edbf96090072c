"""Files of torch's compiler that are not complete: they are removed, and a run compiles them again."""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path

import pytest
import torch

from ddpexp.train.compile_cache import RECORD, record_sizes, remove_damaged
from tests.conftest import SMALL, Ddpexp, Done

COMPILED = (*SMALL, "trainer.compile=true", "launcher=inline", "trainer.max_steps=2")
KINDS = ("c*.cpp", "c*.so", "c*.py", "*.main.cpp", "*.main.so", "fxgraph/*/*/*", "aotautograd/*/*")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Files as torch leaves them."""
    place = tmp_path / "cache"
    for name in ("ab/cab.cpp", "ab/cab.py", "fxgraph/x/y/z", "pre/h.gch", "locks/cab.lock", "ab/.1.2.tmp"):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text("" if "lock" in name or "tmp" in name else "content")
    shutil.copy(torch._C.__file__, place / "ab/cab.so")
    return place


def shorten(path: Path, how: str) -> None:
    os.truncate(path, path.stat().st_size // 2 if how == "half" else 0)


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_complete_files_stay_and_so_do_locks_and_what_is_being_written(folder: Path) -> None:
    before = names(folder)
    record_sizes(folder)
    assert remove_damaged(folder) == []
    assert names(folder) == {*before, RECORD}


@pytest.mark.parametrize("name", ["ab/cab.cpp", "ab/cab.py", "ab/cab.so", "fxgraph/x/y/z", "pre/h.gch"])
@pytest.mark.parametrize("how", ["half", "empty"])
def test_a_file_of_another_size_than_recorded_is_removed_and_named(folder: Path, name: str, how: str) -> None:
    record_sizes(folder)
    before = names(folder)
    shorten(folder / name, how)
    assert remove_damaged(folder) == [name]
    assert names(folder) == before - {name}
    assert remove_damaged(folder) == []


def test_without_a_record_what_a_killed_compiler_leaves_is_found(folder: Path) -> None:
    before = names(folder)
    shorten(folder / "ab/cab.so", "half")
    shorten(folder / "ab/cab.py", "empty")
    assert sorted(remove_damaged(folder)) == ["ab/cab.py", "ab/cab.so"]
    # Nothing says whether a precompiled header is complete, so it is made again, without a warning.
    assert names(folder) == before - {"ab/cab.py", "ab/cab.so", "pre/h.gch"}


@pytest.mark.parametrize("size", [0, 3, 64, 200])
def test_a_library_that_ends_early_is_not_complete(folder: Path, size: int) -> None:
    os.truncate(folder / "ab/cab.so", size)
    assert remove_damaged(folder) == ["ab/cab.so"]


def test_a_file_that_another_run_is_compiling_is_left_alone(folder: Path) -> None:
    shorten(folder / "ab/cab.so", "half")
    with (folder / "locks/cab.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert remove_damaged(folder) == []
    assert remove_damaged(folder) == ["ab/cab.so"]


def test_incomplete_files_are_not_recorded_and_a_damaged_record_counts_as_none(folder: Path) -> None:
    shorten(folder / "ab/cab.so", "half")
    record_sizes(folder)
    assert "cab.so" not in (folder / RECORD).read_text()
    shorten(folder / RECORD, "half")
    assert remove_damaged(folder) == ["ab/cab.so"]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory, environ: dict[str, str]) -> tuple[Done, Path]:
    """A run that has compiled, and the folder of what its compiler keeps."""
    place = tmp_path_factory.mktemp("compiled")
    ddpexp = Ddpexp(place, environ)
    done = ddpexp(*COMPILED, environ={"TORCHINDUCTOR_CACHE_DIR": str(place / "cache")})
    assert done.code == 0, done.err
    return done, place / "cache"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["half", "empty"])
@pytest.mark.parametrize("kind", ["all", *KINDS])
def test_a_run_heals_what_its_compiler_keeps(
    compiled: tuple[Done, Path], ddpexp: Ddpexp, tmp_path: Path, kind: str, how: str
) -> None:
    before, kept = compiled
    cache = shutil.copytree(kept, tmp_path / "cache")
    found = [path for pattern in (KINDS if kind == "all" else [kind]) for path in cache.rglob(pattern)]
    files = {path for path in found if path.is_file() and path.name != RECORD and path.parent.name != "locks"}
    assert files
    for path in files:
        shorten(path, how)
    done = ddpexp(*COMPILED, environ={"TORCHINDUCTOR_CACHE_DIR": str(cache)})
    assert done.code == 0, done.err
    assert done.result()["weights_sha256"] == before.result()["weights_sha256"]
    assert f", {len(files)} were not complete, as after a compiler was killed" in done.out
    again = ddpexp(*COMPILED, environ={"TORCHINDUCTOR_CACHE_DIR": str(cache)})
    assert (again.code, "not complete" in again.out + again.err) == (0, False)

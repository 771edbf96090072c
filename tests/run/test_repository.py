"""What no commit holds of the code that a run starts with, as a patch that git applies."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from ddpexp.run.repository import DIFF_BYTES, snapshot

IDENTITY = ("-c", "user.name=a", "-c", "user.email=a@example.org")


def git(folder: Path, *overrides: str, text: bytes | None = None) -> str:
    done = subprocess.run(["git", *IDENTITY, *overrides], cwd=folder, check=True, capture_output=True, input=text)
    return done.stdout.decode()


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A repository with a recipe, and beside it what no commit should hold."""
    folder = tmp_path / "project"
    folder.mkdir()
    git(folder, "init", "-q")
    (folder / "mine.py").write_text("WIDTH = 8\nDEPTH = 2\n")
    (folder / "conf").mkdir()
    (folder / "conf/mine.yaml").write_text("width: 8\n")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "x")
    (folder / "outputs").mkdir()
    (folder / "outputs/large.txt").write_text("data\n")
    return folder


def head(folder: Path) -> str:
    return git(folder, "rev-parse", "HEAD").strip()


def restored(folder: Path, diff: bytes, tmp_path: Path) -> Path:
    """Return a fresh copy of the commit with the patch applied."""
    copy = tmp_path / "restored"
    git(tmp_path, "clone", "-q", str(folder), str(copy))
    git(copy, "apply", "-", text=diff)
    return copy


def test_a_clean_repository_has_a_commit_and_no_patch(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = snapshot(project, [str(project / "mine.py")])
    assert (found.git, found.diff, found.is_cut) == ({"commit": head(project), "dirty": False}, b"", False)
    monkeypatch.chdir(project / "conf")
    assert snapshot(None, []) == found


def test_the_patch_on_top_of_the_commit_gives_the_code_that_ran(project: Path, tmp_path: Path) -> None:
    (project / "mine.py").write_text("WIDTH = 16\nDEPTH = 2\n")
    (project / "conf/mine.yaml").unlink()
    (project / "staged.py").write_text("x = 1\n")
    git(project, "add", "staged.py")
    (project / "parts").mkdir()
    texts = {"parts/new.py": "a = 1\nb = 2", "parts/empty.py": "", "é.py": "x = 'é'\r\n", "with space.py": "x = 1\n"}
    for name, text in texts.items():
        (project / name).write_bytes(text.encode())
    found = snapshot(project / "conf", [str(project / name) for name in ("mine.py", *texts)])
    assert found.git == {"commit": head(project), "dirty": True}
    copy = restored(project, found.diff, tmp_path)
    for name in ("mine.py", "staged.py", *texts):
        assert (copy / name).read_bytes() == (project / name).read_bytes(), name
    assert not (copy / "conf/mine.yaml").exists()
    assert b"large.txt" not in found.diff  # what git does not know, and is no module of the recipe


def test_a_module_that_git_ignores_is_in_the_patch(project: Path) -> None:
    (project / ".gitignore").write_text("local.py\n")
    git(project, "add", ".gitignore")
    git(project, "commit", "-q", "-m", "y")
    (project / "local.py").write_text("secret_sauce = 1\n")
    assert b"+secret_sauce = 1\n" in snapshot(project, [str(project / "local.py")]).diff


@pytest.mark.parametrize("commits", [False, True])
def test_modules_outside_of_any_commit_are_in_the_patch_as_a_whole(tmp_path: Path, commits: bool) -> None:
    (tmp_path / "mine.py").write_text("x = 1\n")
    if commits:  # a repository without one
        git(tmp_path, "init", "-q")
        git(tmp_path, "add", "mine.py")
    found = snapshot(tmp_path, [str(tmp_path / "mine.py"), str(tmp_path / "gone.py")])
    assert found.git == ({"commit": None, "dirty": True} if commits else None)
    assert found.diff.decode().splitlines() == [
        "diff --git a/mine.py b/mine.py", "new file mode 100644", "--- /dev/null", "+++ b/mine.py", "@@ -0,0 +1,1 @@",
        "+x = 1",
    ]  # fmt: skip


def test_secrets_are_masked(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORP_TOKEN", "a-secret-of-the-company")
    (project / "mine.py").write_text('KEY = "a-secret-of-the-company"\n')
    (project / "new.py").write_text('KEY = "a-secret-of-the-company"\n')
    found = snapshot(project, [str(project / "mine.py"), str(project / "new.py")])
    assert b"a-secret" not in found.diff
    assert found.diff.count(b'+KEY = "${CORP_TOKEN}"') == 2


@pytest.mark.parametrize("known", [False, True])
def test_a_patch_is_cut_at_its_bound_and_says_so(project: Path, known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "a-secret-of-the-company"
    monkeypatch.setenv("CORP_TOKEN", secret)
    names = [f"part{number}.py" for number in range(12)]  # each below what git takes for data
    for name in names:
        (project / name).write_text("")
    if known:
        git(project, "add", ".")
        git(project, "commit", "-q", "-m", "y")
    for name in names:
        (project / name).write_text(f"KEY = '{secret}'\n" * 6000)
    found = snapshot(project, [] if known else [str(project / name) for name in names])
    assert found.is_cut
    assert DIFF_BYTES // 2 < len(found.diff) < DIFF_BYTES + 100
    assert found.diff.decode().splitlines()[-1] == "# cut here: there are more than 1,048,576 bytes"
    assert b"a-secret" not in found.diff


def test_a_file_of_data_that_git_knows_is_named_but_not_compared(project: Path) -> None:
    (project / "data.csv").write_text("1,2,3\n" * 100_000)
    git(project, "add", ".")
    git(project, "commit", "-q", "-m", "y")
    (project / "data.csv").write_text("1,2,4\n" * 100_000)
    found = snapshot(project, [])
    assert b"Binary files a/data.csv and b/data.csv differ" in found.diff
    assert len(found.diff) < 1000


def test_names_with_odd_characters_are_compared(project: Path, tmp_path: Path) -> None:
    odd = [":(exclude)mine.py", "-p", "a\nb", "*.py", '"quoted"', "ü"]
    for name in odd:
        (project / name).write_text("x = 1\n")
    git(project, "add", ".")
    git(project, "commit", "-q", "-m", "y")
    for name in odd:
        (project / name).write_text("x = 2\n")
    found = snapshot(project, [])
    copy = restored(project, found.diff, tmp_path)
    assert {name: (copy / name).read_text() for name in odd} == dict.fromkeys(odd, "x = 2\n")


def test_without_git_there_is_no_commit(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(project))
    found = snapshot(project, [str(project / "mine.py")])
    assert found.git is None
    assert b"+WIDTH = 8\n" in found.diff


def test_a_file_that_a_filter_translates_is_named_and_not_compared(project: Path) -> None:
    (project / ".gitattributes").write_text("*.bin filter=large\n")
    (project / "weights.bin").write_text("one\n")
    git(project, "add", ".")
    git(project, "commit", "-q", "-m", "y")
    git(project, "config", "filter.large.clean", "false")
    (project / "weights.bin").write_text("another\n")
    (project / "mine.py").write_text("WIDTH = 9\n")
    os.utime(project / "weights.bin", (1, 1))
    found = snapshot(project, [])
    assert b"+WIDTH = 9" in found.diff
    assert b"another" not in found.diff
    assert b"# not compared, for a program of the repository translates it: weights.bin\n" in found.diff

"""Completion as users see it: in a real bash, zsh and fish, on a terminal."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pexpect
import pytest

from tests.conftest import PATIENCE, ROOT

# What a user has in the file that the shell reads at its start, and a key that writes the line as it stands into a
# file.
STARTS = {
    "bash": """
PS1='> '
[ -e "$BASH_COMPLETION" ] && . "$BASH_COMPLETION"
eval "$(ddpexp completion bash)"
line() { printf '%s' "$READLINE_LINE" >"$LINE_FILE.part"; mv "$LINE_FILE.part" "$LINE_FILE"; }
bind -x '"\\C-x\\C-l": line'
""",
    "zsh": """
PS1='> '
autoload -Uz compinit && compinit -u
eval "$(ddpexp completion zsh)"
line() { printf '%s' "$BUFFER" >"$LINE_FILE.part"; mv "$LINE_FILE.part" "$LINE_FILE"; }
zle -N line
bindkey '^X^L' line
""",
    "fish": """
function fish_prompt; echo -n '> '; end
function fish_greeting; end
ddpexp completion fish | source
function line; commandline | string collect | read -z text; printf '%s' $text >$LINE_FILE.part; mv $LINE_FILE.part $LINE_FILE; end
bind \\cx\\cl line
""",
}
FILES = {"bash": ".bashrc", "zsh": ".zshrc", "fish": ".config/fish/config.fish"}
BASH_COMPLETION = "/usr/share/bash-completion/bash_completion"
WRITE_LINE, CLEAR_LINE = "\x18\x0c", "\x15"
NOISE = ("Traceback", "rror", "not found", "Warning", "warning", "usage:", "compinit:")


class Shell:
    """A shell on a terminal, in a folder with runs and configs."""

    def __init__(self, name: str, home: Path, folder: Path, environ: dict[str, str]) -> None:
        self.name = name
        start = home / FILES[name]
        start.parent.mkdir(parents=True, exist_ok=True)
        start.write_text(STARTS[name])
        self._line = home / "line"
        self._said = ""
        variables: Any = {
            **environ, "HOME": str(home), "ZDOTDIR": str(home), "XDG_CONFIG_HOME": str(home / ".config"),
            "TERM": "xterm",
            "XDG_DATA_HOME": str(home / "data"), "LINE_FILE": str(self._line), "SHELL": shutil.which(name),
            "BASH_COMPLETION": BASH_COMPLETION,
            "PATH": f"{os.path.dirname(sys.executable)}:{environ['PATH']}",
        }  # fmt: skip
        options = {"bash": ["--noprofile", "--rcfile", str(start), "-i"], "zsh": ["-d", "-i"], "fish": ["-i"]}[name]
        self.process = pexpect.spawn(
            name, options, env=variables, cwd=str(folder), dimensions=(50, 120), encoding="utf-8", timeout=PATIENCE
        )
        self.process.expect_exact("> ")

    def line(self) -> str:
        """Return what stands on the line, once all input is processed."""
        self._line.unlink(missing_ok=True)
        self.process.send(WRITE_LINE)
        self._wait(self._line.exists)
        return self._line.read_text()

    def completed(self, typed: str, wanted: str) -> str:
        """Return the line after TAB; pressed again where the shell gave up waiting for the answer.

        As on a slow machine.
        """
        self.process.send(CLEAR_LINE + typed)
        deadline = time.monotonic() + PATIENCE
        while True:
            self.process.send("\t")
            found = self.line()
            if found != typed or wanted == typed or time.monotonic() > deadline:
                self.process.send(CLEAR_LINE)
                return found

    def listed(self, typed: str, *wanted: str) -> str:
        """Return what the terminal shows after as many TABs as it takes for all that is wanted."""
        self.process.send(CLEAR_LINE + typed)
        self.line()
        before = len(self._said)
        deadline = time.monotonic() + PATIENCE
        while not all(word in self._said[before:] for word in wanted) and time.monotonic() < deadline:
            self.process.send("\t\t")  # bash lists what there is at the second of two in a row
            self.line()
        self.process.send(CLEAR_LINE)
        return self._said[before:]

    def close(self) -> str:
        """End the shell; return all that the terminal has received."""
        self.process.close(force=True)
        return self._said

    def _wait(self, done: Any) -> None:
        deadline = time.monotonic() + PATIENCE
        while not done():
            assert time.monotonic() < deadline, self._said[-2000:]
            try:
                self._said += self.process.read_nonblocking(100_000, 0.05)
            except pexpect.TIMEOUT:
                pass


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "folder"
    (folder / "outputs/mnist").mkdir(parents=True)
    (folder / "outputs/mnist/first").symlink_to(ROOT / "tests/samples/finished")
    (folder / "my runs/abc").mkdir(parents=True)
    (folder / "conf").symlink_to(ROOT / "tests/samples/project/conf")
    (folder / "script.py").touch()
    (folder / "weights.safetensors").touch()
    return folder


@pytest.fixture
def shell(request: pytest.FixtureRequest, tmp_path: Path, folder: Path, environ: dict[str, str]) -> Iterator[Shell]:
    if shutil.which(request.param) is None:
        pytest.skip(f"{request.param} is not installed: apt-get install {request.param}")
    if not (Path(sys.executable).parent / "ddpexp").exists():
        pytest.skip("ddpexp is not installed beside this Python: pip install -e .")
    (tmp_path / "home").mkdir()
    shell = Shell(request.param, tmp_path / "home", folder, environ)
    yield shell
    shell.close()


EVERY_SHELL = pytest.mark.parametrize("shell", list(STARTS), indirect=True)

COMPLETED = [
    ("ddpexp resu", "ddpexp resume "),
    ("ddpexp resume ou", "ddpexp resume outputs/"),
    ("ddpexp trainer.redu", "ddpexp trainer.reduction="),
    ("python -m ddpexp trainer.reduction=e", "python -m ddpexp trainer.reduction=exact "),
    ("ddpexp --config-dir co", "ddpexp --config-dir conf/"),
    ("python3 -m ddpexp --config-dir conf model=my", "python3 -m ddpexp --config-dir conf model=mynet "),
    ("ddpexp run.dir=my", "ddpexp run.dir=my\\ runs/"),
    ("python scr", "python script.py "),  # other uses of Python keep what they had
]
MORE = [
    ("ddpexp resume outputs/mnist/", "ddpexp resume outputs/mnist/first "),
    ("ddpexp resume my", "ddpexp resume my\\ runs/"),
    ("ddpexp resume nowhere/x", "ddpexp resume nowhere/x"),
    ("ddpexp evaluate w", "ddpexp evaluate weights.safetensors "),
    ("ddpexp launcher=slurm launcher.part", "ddpexp launcher=slurm launcher.partition="),
    ("ddpexp model.width=", "ddpexp model.width=\\[16,32\\] "),
    ("ddpexp -m trainer.precision=fp32,b", "ddpexp -m trainer.precision=fp32,bf16 "),
    ("ddpexp --config-dir=conf recipe=mine model.wi", "ddpexp --config-dir=conf recipe=mine model.width="),
    ("ddpexp help trainer.redu", "ddpexp help trainer.reduction "),
    ("ddpexp --conf", "ddpexp --config-dir "),
    ("CUDA_VISIBLE_DEVICES=0 ddpexp resu", "CUDA_VISIBLE_DEVICES=0 ddpexp resume "),
    ("cd . && ddpexp resu", "cd . && ddpexp resume "),
    ("ddpexp resume $PWD/ou", "ddpexp resume $PWD/outputs/"),
    ("python -W error -m ddpexp resu", "python -W error -m ddpexp resume "),
]
OF_THE_SHELL = ("python -W er", "python -W error ")  # not ours; bash completes it with the package bash-completion


@pytest.mark.variants(1)
@EVERY_SHELL
def test_tab_completes_in_a_real_shell_without_noise(shell: Shell) -> None:
    for typed, wanted in COMPLETED:
        assert shell.completed(typed, wanted) == wanted
    assert not [word for word in NOISE if word in shell.close()]


@EVERY_SHELL
def test_tab_lists_what_there_is(shell: Shell) -> None:
    said = shell.listed("ddpexp ", "resume", "evaluate", "model=", "trainer.")
    for word in ("resume", "evaluate", "completion", "model=", "trainer."):
        assert word in said
    assert not [word for word in NOISE if word in shell.close()]


@pytest.mark.slow
@EVERY_SHELL
def test_tab_completes_the_rarer_places_too(shell: Shell) -> None:
    installed = shell.name != "bash" or os.path.exists(BASH_COMPLETION)
    for typed, wanted in [*MORE, OF_THE_SHELL] if installed else MORE:
        assert shell.completed(typed, wanted) == wanted


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shell", "typed", "wanted"),
    [
        ("bash", "ddpexp 'run.dir=my", "ddpexp 'run.dir=my runs/'"),
        ("bash", 'ddpexp resume "my', 'ddpexp resume "my runs/"'),
        ("bash", "ddpexp resume 'my runs'/a", "ddpexp resume 'my runs'/abc/"),
        ("bash", "ddpexp resume my\\ r", "ddpexp resume my\\ runs/"),
        ("zsh", "ddpexp 'run.dir=my", "ddpexp 'run.dir=my runs/"),
        ("zsh", 'ddpexp resume "my', 'ddpexp resume "my runs/'),
        ("fish", "ddpexp 'run.dir=my", "ddpexp 'run.dir=my runs/"),
        ("fish", "ddpexp resume my\\ r", "ddpexp resume my\\ runs/"),
    ],
    indirect=["shell"],
)
def test_quotes_that_are_open_stay_what_they_are(shell: Shell, typed: str, wanted: str) -> None:
    assert shell.completed(typed, wanted) == wanted

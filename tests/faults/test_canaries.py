"""What strangers have made, against every verb: configurations, run directories, sweeps, folders and repositories.

Each holds what would leave a file if code of theirs ran. None does, every verb answers within ten seconds, and to
Ctrl-C.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

import pytest
import yaml

from ddpexp import __main__
from ddpexp.launch.workers import client
from ddpexp.run.repository import snapshot
from tests.conftest import PATIENCE, ROOT, SMALL, Ddpexp, Done, finish, python_path
from tests.faults.test_hostile_files import POISON, RAW
from tests.points import wait_for
from tests.warm import forks
from tests.warm.state import ignored_signals

SECONDS = 10
TINY = (*SMALL, "trainer.gpus=1", "trainer.threads=1")
LONGER = "trainer.max_steps=12"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, environ: dict[str, str]) -> Path:
    """A run with a checkpoint, which the tests copy."""
    done = Ddpexp(tmp_path_factory.mktemp("trained"), environ)(*TINY)
    assert done.code == 0, done.err
    return done.run


@dataclass
class Place:
    """A folder of a stranger's, in which a user types commands."""

    folder: Path
    run: Path
    canaries: Path
    environ: dict[str, str]
    warm: dict[str, str]
    starts_members_otherwise: bool = False  # of launcher=elastic, whose ranks get a file and an agent's variables

    @property
    def sweep(self) -> Path:
        return self.folder / "sweep"

    def code(self, name: str) -> str:
        """Return Python that leaves a file."""
        return f"open({str(self.canaries / name)!r}, 'w').close()\n"

    def script(self, name: str) -> str:
        """Return a program that leaves a file."""
        return f"#!/bin/sh\ntouch '{self.canaries}/{name}'\ncat\n"

    def write(self, name: str, text: str, mode: int = 0o644) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(mode)
        return path

    def start(self, *overrides: str, environ: dict[str, str] | None = None) -> subprocess.Popen[str]:
        """Start the console script, from which Python does not look in the current folder."""
        script = self.canaries.parent / "bin/ddpexp"
        return subprocess.Popen(
            [sys.executable, str(script), *overrides], cwd=self.folder, env={**self.environ, **(environ or {})},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip

    def answers(self, *overrides: str) -> Done:
        """Run a command to its end, and see that it was an answer, soon, and that nothing of the stranger's ran.

        Soon by its own work: the machine may be busy. It is forked, for there are hundreds of them.
        """
        done, seconds = self._forked(*overrides)
        assert list(self.canaries.iterdir()) == [], overrides
        assert done.code in (0, 2), (overrides, done)
        assert "Traceback" not in done.err, (overrides, done.err)
        assert seconds < SECONDS, (overrides, seconds)
        return done

    def _forked(self, *overrides: str) -> tuple[Done, float]:
        """Be the command in a fork of this process, with a fork for its fork server (`tests.warm`).

        A server imports the same whatever the stranger has configured; from a folder of modules of the stranger's it
        starts anew below. Return how it ended, and the seconds that it and its children computed.
        """
        out, err = (self.canaries.parent / name for name in ("out", "err"))
        with out.open("w") as to, err.open("w") as to_err:
            pid = os.fork()
            if pid == 0:
                self._be(overrides, to.fileno(), to_err.fileno())
        deadline = time.monotonic() + 120
        while True:
            ended, status, used = os.wait4(pid, os.WNOHANG)
            if ended:
                break
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                pytest.fail(f"no end: {overrides}")
            time.sleep(0.01)
        return Done(
            os.waitstatus_to_exitcode(status), out.read_text(), err.read_text(), self.run
        ), used.ru_utime + used.ru_stime

    def _be(self, overrides: Sequence[str], out: int, err: int) -> NoReturn:
        try:
            os.setsid()
            signal.signal(signal.SIGINT, signal.default_int_handler)
            nothing = os.open(os.devnull, os.O_RDONLY)
            for source, target in ((nothing, 0), (out, 1), (err, 2)):
                os.dup2(source, target)
            sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
            os.chdir(self.folder)
            os.environ.clear()
            os.environ.update({**self.environ, **self.warm})
            if self.warm:
                forks.change(client, ignored_signals())
            sys.argv = ["ddpexp", *overrides]
            __main__.run()
        except SystemExit as end:  # not `os._exit` where this process has imported what workers import
            sys.stdout.flush()
            os._exit(int(end.code or 0))
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(99)


@pytest.fixture
def place(tmp_path: Path, trained: Path, environ: dict[str, str], warm_environ: dict[str, str]) -> Place:
    for name in ("canaries", "bin", "theirs"):
        (tmp_path / name).mkdir()
    (tmp_path / "bin/ddpexp").write_text("from ddpexp.__main__ import run\n\nrun()\n")
    folder = tmp_path / "theirs"
    path = f".::{environ.get('PATH', os.defpath)}"
    run = shutil.copytree(trained, folder / "run")
    warm = dict(warm_environ.items() - environ.items())
    return Place(folder, run, tmp_path / "canaries", {**environ, "PATH": path}, warm)


# --- Configurations of runs ---


def bomb(levels: int = 7, times: int = 10) -> str:
    return "\n".join(["x0: lol", *(f"x{n}: {f'${{x{n - 1}}}' * times}" for n in range(1, levels + 1))]) + "\n"


def doubled(levels: int = 40) -> str:
    return (
        "\n".join(["x0: [a, b]", *(f"x{n}: ['${{x{n - 1}}}', '${{x{n - 1}}}']" for n in range(1, levels + 1))]) + "\n"
    )


def tree(change: Callable[[dict[str, Any]], object]) -> Callable[[Place], None]:
    """Return what changes the configuration of a run."""

    def apply(place: Place) -> None:
        config = yaml.safe_load((place.run / "config.yaml").read_text())
        change(config)
        (place.run / "config.yaml").write_text(yaml.safe_dump(config))

    return apply


def added(text: str) -> Callable[[Place], None]:
    def apply(place: Place) -> None:
        with (place.run / "config.yaml").open("a") as file:
            file.write(text)

    return apply


def raw(text: str) -> Callable[[Place], object]:
    return lambda place: place.write("run/config.yaml", text)


def manifest(**facts: Any) -> Callable[[Place], None]:
    def apply(place: Place) -> None:
        found = json.loads((place.run / "manifest.json").read_text())
        (place.run / "manifest.json").write_text(json.dumps({**found, **facts}))

    return apply


def replaced(name: str, made: Callable[[Path], object]) -> Callable[[Place], None]:
    def apply(place: Place) -> None:
        (place.run / name).unlink()
        made(place.run / name)

    return apply


def sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


WORLD = {"nodes": 1, "world_size": 1, "device": "cpu", "backend": "gloo"}
CONFIGS: dict[str, Callable[[Place], object]] = {
    "a terabyte": replaced("config.yaml", sparse),
    **{f"poison: {name}": tree(change) for name, (change, _) in POISON.items()},
    "texts of texts in a key": tree(lambda config: config.update(yaml.safe_load(bomb()), logger="${x7}")),
    "texts of texts": added(bomb()),
    "lists of lists": added(doubled()),
    **{f"raw: {name}": raw(text) for name, text in RAW.items()},
    "a circle": added("x1: ${x2}\nx2: ${x1}\n"),
    "a default of defaults": added("x1: " + "${oc.env:NONE," * 300 + "x" + "}" * 300 + "\n"),
    "lists made of texts": added(f"{bomb(4)}y: ${{oc.create:[${{x4}},${{x4}}]}}\n"),
    "decoded texts": added(f"{bomb(4)}y: ${{oc.decode:'[${{x4}}]'}}\n"),
    "an interpolation of megabytes": added("y: '" + "${x}" * 500_000 + "'\nx: 1\n"),
    "deep interpolations": added("y: " + "${" * 2000 + "x" + "}" * 2000 + "\n"),
    "a number to the base 60": added("y: 1" + ":59" * 400_000 + "\n"),
    "a shorter one": added("y: 1" + ":59" * 20_000 + "\n"),
    "a number of 240,000 bits": added("y: 0x" + "f" * 60_000 + "\n"),
    "a million values": added("y:\n" + "- x\n" * 1_000_000),
    "a module as a tag": added("y: !!python/module:stranger\n"),
    "a name as a tag": added("y: !!python/name:stranger.main\n"),
    "a merged key": added("y: &y {a: 1}\nz:\n  <<: *y\n"),
    "100,000 threads": tree(lambda config: config["trainer"].update(threads=100_000)),
    "a billion threads in the manifest": manifest(world={**WORLD, "threads": 10**9}),
    "a million loaders": tree(lambda config: config["data"].update(num_workers=10**6)),
    "a billion workers": tree(lambda config: config["trainer"].update(gpus=10**9)),
    "weights elsewhere": tree(lambda config: config["run"].update(init_from="/etc/passwd")),
    "another configuration in the manifest": manifest(config={"sha256": [], "text": bomb() + "run: {}\n"}),
    "a pipe": replaced("config.yaml", os.mkfifo),
    "no end": replaced("config.yaml", lambda path: path.symlink_to("/dev/zero")),
    "a terabyte of words": replaced("overrides.yaml", sparse),
    "a pipe for a manifest": replaced("manifest.json", os.mkfifo),
}  # fmt: skip


def of_a_run(place: Place) -> Iterator[tuple[str, ...]]:
    """Yield the command lines that read a run directory."""
    yield "evaluate", str(place.run)
    yield "resume", str(place.run), LONGER
    yield "status", str(place.run)
    yield "table", str(place.run)
    yield (*TINY, LONGER, f"run.dir={place.run}")
    if not place.starts_members_otherwise:
        yield "member", str(place.run)


@pytest.mark.variants(2)
@pytest.mark.fault("S4", "S5", "S17")
@pytest.mark.parametrize("name", CONFIGS)
def test_no_verb_runs_the_code_of_a_run_directory_or_reads_it_for_long(place: Place, name: str) -> None:
    CONFIGS[name](place)
    place.write("stranger.py", place.code("stranger"))
    place.environ |= {"PAYLOAD": "os.system"}
    place.starts_members_otherwise = name == "poison: rendezvous"
    for overrides in of_a_run(place):
        place.answers(*overrides)
    assert not list(place.folder.rglob("canary"))


# --- Sweeps ---


def sweep_with(*overrides: str, options: tuple[str, ...] = ()) -> Callable[[Place], None]:
    """Return what makes a sweep of such words."""

    def apply(place: Place) -> None:
        place.write("sweep/sweep.yaml", yaml.safe_dump({"words": list(overrides), "options": list(options)}))
        place.write("sweep/sweep.jsonl", '{"event": "sweep", "time": 1}\n')

    return apply


def recorded(made: Callable[[Place], object]) -> Callable[[Place], None]:
    def apply(place: Place) -> None:
        sweep_with(*TINY, "trainer.seed=0,1")(place)
        made(place)

    return apply


def plain(text: str) -> Callable[[Place], None]:
    return recorded(lambda place: place.write("sweep/sweep.yaml", text))


def bomb_words(levels: int = 7) -> list[str]:
    """Return overrides that need no restating: keys of values, no sections."""
    return ["+model.x0=lol", *(f"+model.x{n}={f'${{model.x{n - 1}}}' * 10}" for n in range(1, levels + 1))]


SWEEPS: dict[str, Callable[[Place], None]] = {
    "code beside configs": sweep_with("recipe=stranger", "trainer.seed=0,1", options=("--config-dir", "conf")),
    "its name of texts of texts": sweep_with(*TINY, *bomb_words(), "sweep.objective=${model.x7}", "trainer.seed=0,1"),
    "texts of texts": sweep_with(*TINY, *bomb_words(), "trainer.seed=0,1"),
    "trusted code": sweep_with(*TINY, "run.trust=[stranger]", "task._target_=stranger.Task", "trainer.seed=0,1"),
    "slurm": sweep_with(*TINY, "launcher=slurm", "launcher.setup=[touch canary]", "trainer.seed=0,1"),
    "slurm alone": sweep_with(*TINY, "launcher=slurm", "trainer.seed=0,1"),
    "weights elsewhere": sweep_with(*TINY, "run.init_from=/etc/passwd", "trainer.seed=0,1"),
    "another folder of configs": sweep_with(*TINY, "hydra.searchpath=[file:///tmp]", "trainer.seed=0,1"),
    "a sweeper's storage": sweep_with(*TINY, "hydra/sweeper=optuna", "hydra.sweeper.storage=sqlite:///canary",
        "trainer.seed=0,1"),
    "a billion jobs": sweep_with(*TINY, "trainer.seed=range(1000000000)"),
    "a word of 100,000 characters": sweep_with(*TINY, f"trainer.seed={','.join(map(str, range(20_000)))}"),
    "deep brackets": sweep_with(*TINY, f"+x={'[' * 2000}", "trainer.seed=0,1"),
    "100,000 threads": sweep_with(*TINY, "trainer.threads=100000", "trainer.seed=0,1"),
    "a python object": plain("words: !!python/object/apply:os.system ['touch canary']\noptions: []\n"),
    "aliases": plain(RAW["laughs"]),
    "a deep record": recorded(lambda place: place.write("sweep/sweep.jsonl", '{"event":' * 50_000)),
    "pipes for jobs": recorded(lambda place: os.mkfifo(place.sweep / "0000_trainer.seed=0")),
    "the run of a stranger": recorded(lambda place: shutil.move(place.run, place.sweep / "0000_trainer.seed=0")),
}  # fmt: skip


def of_a_sweep(place: Place) -> Iterator[tuple[str, ...]]:
    """Yield the command lines that read a sweep's directory."""
    yield "status", str(place.sweep)
    yield "table", str(place.sweep)
    yield "resume", str(place.sweep)
    yield "evaluate", str(place.sweep)
    yield "plan", str(place.sweep)


@pytest.mark.variants(2)
@pytest.mark.fault("S4", "S17")
@pytest.mark.parametrize("name", SWEEPS)
def test_no_verb_runs_the_code_of_a_sweep_or_reads_it_for_long(place: Place, name: str) -> None:
    SWEEPS[name](place)
    place.write("stranger.py", place.code("stranger"))
    place.write("conf/recipe/stranger.yaml", "task:\n  _target_: stranger.Task\n")
    for overrides in of_a_sweep(place):
        # A sweep whose words are ordinary is resumed: it may train, which is no reading.
        ordinary = name in ("a deep record", "the run of a stranger") and overrides[0] == "resume"
        finish(place.start(*overrides), place.sweep, 90) if ordinary else place.answers(*overrides)
    assert list(place.canaries.iterdir()) == []
    assert not list(place.folder.rglob("canary"))


@pytest.mark.slow
@pytest.mark.fault("S17")
@pytest.mark.parametrize(
    "overrides", [[], ["-m", "trainer.seed=0,1"], ["plan"], ["--cfg=job", "--resolve"]], ids=" ".join
)
def test_overrides_that_stand_for_more_than_there_is_are_refused(place: Place, overrides: list[str]) -> None:
    done = place.answers(*overrides[:1], *TINY, *bomb_words(), *overrides[1:])
    assert done.code == 2
    assert "refers to itself with ${...} so often" in done.err
    assert sorted(path.name for path in place.folder.iterdir()) == ["run"]  # nothing was begun


# --- Folders ---


def modules() -> set[str]:
    """Return every name that an import here may look for."""
    installed = {name for name in metadata.packages_distributions() if name.isidentifier()}
    others = {
        "sitecustomize",
        "usercustomize",
        "colorama",
        "ipdb",
        "IPython",
        "apex",
        "wandb",
        "mlflow",
        "triton",
        "pkg_resources",
    }
    return {*sys.stdlib_module_names, *installed, *others} - {"__main__", "ddpexp", "this", "antigravity", "tests"}


def full_of_modules(place: Place) -> None:
    for name in modules():
        place.write(f"{name}.py", place.code(name))


def another_ddpexp(place: Place) -> None:
    for name in (
        "__init__",
        "__main__",
        "worker",
        "sweep/__init__",
        "sweep/picture",
        "launch/__init__",
        "launch/elastic_agent",
    ):
        place.write(f"ddpexp/{name}.py", place.code("ddpexp"))


def plugins(place: Place) -> None:
    place.write("hydra_plugins/stranger/__init__.py", place.code("hydra"))
    place.write("stranger.py", place.code("plugin"))
    place.write("stranger/conf/launcher/stranger.yaml", "_target_: stranger.Launcher\n")
    place.write("stranger-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: stranger\nVersion: 1\n")
    place.write("stranger-1.dist-info/entry_points.txt", "[ddpexp.launchers]\nstranger = stranger:Launcher\n")


def programs(place: Place) -> None:
    for name in (
        "git",
        "scontrol",
        "squeue",
        "sbatch",
        "srun",
        "python",
        "python3",
        "sh",
        "latex",
        "dvipng",
        "nvidia-smi",
        "ldconfig",
        "uname",
    ):
        place.write(name, place.script(name), 0o755)


def settings_of_libraries(place: Place) -> None:
    place.write("matplotlibrc", "backend: module://stranger\ntext.usetex: True\n")
    place.write("stranger.py", place.code("matplotlib"))
    place.write("pyvenv.cfg", f"home = {place.folder}\n")
    place.write(".pdbrc", f"!{place.code('pdb')}")
    place.write("conf/config.yaml", "task:\n  _target_: os.system\n")
    place.write("recipes/mnist.py", place.code("recipes"))


FOLDERS = {
    "modules": full_of_modules, "ddpexp": another_ddpexp, "plugins": plugins, "programs": programs,
    "settings": settings_of_libraries,
}  # fmt: skip


def trainings(place: Place) -> Iterator[tuple[str, ...]]:
    """Yield a run and a sweep, and what reads that."""
    yield (*TINY, "run.dir=one", "logger=tensorboard", "trainer.gpus=2")
    yield "-m", *TINY, "hydra.sweep.dir=several", "trainer.seed=0,1", "sweep.slots=2"
    yield "table", "several"


def other_verbs(place: Place) -> Iterator[tuple[str, ...]]:
    """Yield every other verb."""
    yield "status", "run"
    yield "resume", "run", LONGER
    yield "evaluate", "run"
    yield "plan", *TINY
    yield ("--help",)
    yield "help", "trainer", "launcher=slurm", "evaluate"
    yield "completion", "bash"
    yield "--cfg", "job"
    yield "member", "run"


def other_starts(place: Place) -> Iterator[tuple[str, ...]]:
    """Yield further ways to start the ranks."""
    yield *TINY, "run.dir=two", "launcher.start_method=spawn"
    yield *TINY, "run.dir=three", "launcher=elastic"
    yield *TINY, "run.dir=four", "launcher=slurm", "launcher.dry_run=true"


@pytest.mark.variants(1)
@pytest.mark.fault("S4")
@pytest.mark.parametrize("words", [trainings, other_verbs, other_starts], ids=lambda words: words.__name__)
@pytest.mark.parametrize("name", FOLDERS)
def test_no_verb_runs_the_code_of_the_current_folder(
    place: Place, name: str, words: Callable[[Place], Iterator[tuple[str, ...]]]
) -> None:
    FOLDERS[name](place)
    for overrides in words(place):
        done = finish(place.start(*overrides), place.run, 120)
        assert sorted(path.name for path in place.canaries.iterdir()) == [], (overrides, done)
        assert done.code in (0, 2), (overrides, done)
        assert "Traceback" not in done.err, (overrides, done.err)
    if words is trainings:
        assert (place.folder / "several/sweep.png").exists()  # what draws has found its own modules


@pytest.mark.fault("S4")
@pytest.mark.smoke
def test_the_module_leaves_the_current_folder_before_it_imports_anything(place: Place) -> None:
    """`python -m` looks there itself for what it imports before it runs the module; that is Python's own."""
    probe = place.canaries.parent / "probe/__main__.py"
    probe.parent.mkdir()
    probe.write_text("import os\nimport sys\n\nprint(*sys.modules)\n")
    environ = {**place.environ, "PYTHONPATH": python_path(ROOT, probe.parent.parent)}
    own = subprocess.run(
        [sys.executable, "-m", "probe"], env=environ, capture_output=True, text=True, check=True
    ).stdout.split()
    for name in modules() - set(own):
        place.write(f"{name}.py", place.code(name))
    for overrides in (("--help",), TINY):
        command = [sys.executable, "-m", "ddpexp", *overrides, *(["run.dir=one"] if overrides == TINY else [])]
        done = subprocess.run(command, cwd=place.folder, env=environ, capture_output=True, text=True, timeout=PATIENCE)
        assert sorted(path.name for path in place.canaries.iterdir()) == [], done
        assert done.returncode == 0, done


@pytest.mark.fault("S4")
def test_a_module_of_the_current_folder_counts_where_it_is_trusted_by_name(place: Place) -> None:
    target = yaml.safe_load((place.run / "config.yaml").read_text())["task"]["_target_"]
    module, _, name = target.rpartition(".")
    place.write("mine.py", f"import beside\nfrom {module} import {name}\n\n\nclass Task({name}):\n    pass\n")
    place.write("beside.py", "")
    place.write("json.py", place.code("json"))
    place.warm.clear()
    overrides = (*TINY, "run.dir=one", "task._target_=mine.Task", "run.trust=[mine]")
    assert place.answers(*overrides).code == 0
    manifest = json.loads((place.folder / "one/manifest.json").read_text())
    assert {"mine", "beside"} <= set(manifest["inputs"]["code"]["modules"])
    assert place.answers("resume", "one", LONGER).code == 2  # its place must be restated
    assert place.answers("resume", "one", LONGER, "run.trust=[mine]").code == 0


# --- Repositories ---

IDENTITY = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "protocol.file.allow=always")


def git(folder: Path, *overrides: str) -> str:
    return subprocess.run(["git", *IDENTITY, *overrides], cwd=folder, check=True, capture_output=True, text=True).stdout


def repository(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    git(folder, "init", "-q")
    (folder / "file").write_text("x")
    (folder / ".gitattributes").write_text("file filter=evil diff=evil merge=evil\n")
    git(folder, "add", "file", ".gitattributes")
    git(folder, "commit", "-q", "-m", "x")
    os.utime(folder / "file", (1, 1))  # so that git reads it again


def configured(**settings: str) -> Callable[[Place], None]:
    def apply(place: Place) -> None:
        repository(place.folder)
        program = place.write("evil", place.script("git"), 0o755)
        for key, value in settings.items():
            git(place.folder, "config", key.replace("__", "."), value.replace("EVIL", str(program)))

    return apply


def submodule(place: Place) -> None:
    repository(place.folder / "inner")
    repository(place.folder)
    git(place.folder, "submodule", "add", "-q", "./inner", "inner")
    git(place.folder, "commit", "-q", "-m", "y")
    program = place.write("evil", place.script("git"), 0o755)
    for key in ("filter.evil.clean", "core.fsmonitor"):
        git(place.folder / "inner", "config", key, str(program))
    os.utime(place.folder / "inner/file", (1, 1))


def hooks(place: Place) -> None:
    repository(place.folder)
    for path in (place.folder / ".git/hooks").glob("*.sample"):
        place.write(f".git/hooks/{path.stem}", place.script("git"), 0o755)
    place.write(".git/hooks/post-index-change", place.script("git"), 0o755)
    git(place.folder, "config", "core.hooksPath", ".git/hooks")


def included(place: Place) -> None:
    configured(include__path="../more")(place)
    place.write("more", f'[filter "evil"]\n\tclean = {place.folder}/evil\n\trequired = true\n')


def promised(place: Place) -> None:
    configured(
        **{
            "remote.o.promisor": "true",
            "remote.o.url": "ext::EVIL",
            "extensions.partialClone": "o",
            "protocol.ext.allow": "always",
        }
    )(place)
    tree = git(place.folder, "rev-parse", "HEAD^{tree}").strip()
    (place.folder / ".git/objects" / tree[:2] / tree[2:]).unlink()


def promised_content(place: Place) -> None:
    """The former content of a file is on a server, from which git would fetch it to compare."""
    configured(
        **{
            "remote.o.promisor": "true",
            "remote.o.url": "ext::EVIL",
            "extensions.partialClone": "o",
            "protocol.ext.allow": "always",
        }
    )(place)
    blob = git(place.folder, "rev-parse", "HEAD:file").strip()
    (place.folder / ".git/objects" / blob[:2] / blob[2:]).unlink()


def ordered(place: Place) -> None:
    configured()(place)
    os.mkfifo(place.folder / "order")
    git(place.folder, "config", "diff.orderFile", str(place.folder / "order"))


def stuck(place: Place) -> None:
    repository(place.folder)
    (place.folder / ".git/index").unlink()
    os.mkfifo(place.folder / ".git/index")


REPOSITORIES: dict[str, tuple[Callable[[Place], None], bool]] = {  # and whether the commit is known
    "a filter": (configured(filter__evil__clean="EVIL", filter__evil__smudge="EVIL"), True),
    "a filter that is required": (configured(filter__evil__clean="EVIL", filter__evil__required="true"), True),
    "a filter as a process": (configured(filter__evil__process="EVIL"), True),
    "a filter that no option can name": (configured(**{"filter.a=b.clean": "EVIL", "filter.evil.clean": "EVIL"}),
        False),
    "a filter of an included file": (included, True),
    "fsmonitor": (configured(core__fsmonitor="EVIL"), True),
    "hooks": (hooks, True),
    "diffs": (
        configured(diff__evil__textconv="EVIL", diff__evil__command="EVIL", diff__evil__cachetextconv="true",
            diff__external="EVIL",
                   merge__evil__driver="EVIL", color__ui="always", diff__submodule="diff"),
        True,
    ),
    "pagers and aliases": (
        configured(core__pager="EVIL", pager__status="EVIL", alias__status="!EVIL", core__editor="EVIL"), True,
    ),
    "a submodule": (submodule, True),
    "an object that is promised": (promised, False),
    "a content that is promised": (promised_content, True),
    "a pipe for an order": (ordered, True),
    "a pipe for an index": (stuck, False),
}  # fmt: skip


@pytest.mark.variants(1)
@pytest.mark.fault("S4")
@pytest.mark.parametrize("name", REPOSITORIES)
def test_a_snapshot_of_a_repository_runs_no_program_of_it(place: Place, name: str) -> None:
    """Nor does one when files are changed, and it ends soon: what cannot be had then is left out."""
    make, known = REPOSITORIES[name]
    make(place)
    for path in place.canaries.iterdir():  # of git commands of this test
        path.unlink()
    module = place.write("mine.py", "x = 1\n")
    for content in ("x", "x = 2\n"):
        (place.folder / "file").write_text(content)
        begin = time.monotonic()
        found = snapshot(place.folder, [str(module)])
        assert time.monotonic() - begin < SECONDS
        assert list(place.canaries.iterdir()) == []
        assert b"+x = 1\n" in found.diff  # whatever git says
        if known and content == "x":
            assert found.git == {"commit": git(place.folder, "rev-parse", "HEAD").strip(), "dirty": False}
        if known and found.git is not None and found.git["dirty"]:
            assert b"+x = 2\n" in found.diff or b" could not be compared" in found.diff


@pytest.mark.fault("S4")
def test_the_programs_of_a_repository_would_have_run(place: Place) -> None:
    configured(filter__evil__clean="EVIL")(place)
    git(place.folder, "status")
    [canary] = place.canaries.iterdir()
    canary.unlink()
    git(place.folder, "config", "--remove-section", "filter.evil")
    git(place.folder, "config", "diff.evil.textconv", str(place.folder / "evil"))
    (place.folder / "file").write_text("other\n")
    git(place.folder, "diff", "HEAD")
    assert list(place.canaries.iterdir()) != []


@pytest.mark.fault("S4")
def test_whether_a_file_is_changed_that_a_filter_translates_is_not_known(place: Place) -> None:
    configured(filter__evil__clean="EVIL")(place)
    git(place.folder, "update-index", "--refresh")
    (place.folder / "inner").mkdir()
    (place.folder / "file").write_text("other")
    for folder in (place.folder, place.folder / "inner"):
        found = snapshot(folder, [])
        assert found.git is not None
        assert found.git["dirty"] is None
        assert found.diff == b"# not compared, for a program of the repository translates it: file\n"
    (place.folder / ".gitattributes").write_text("")
    found = snapshot(place.folder, [])
    assert found.git is not None
    assert found.git["dirty"] is True


# --- Ctrl-C ---


@pytest.mark.variants(1)
@pytest.mark.fault(11)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    "verb", ["evaluate", "resume", "train", "resume a sweep", "sweep", "plan", "weights", "member"]
)
def test_a_verb_ends_on_a_signal_while_it_resolves_what_has_no_end(
    place: Place, verb: str, number: signal.Signals
) -> None:
    """The bounds are taken away, for they would end it first."""
    added(bomb(12))(place)
    sweep_with(*TINY, *bomb_words(12), "trainer.seed=0,1")(place)
    early, mark = place.canaries.parent / "early", place.canaries.parent / "resolves"
    early.mkdir()
    (early / "sitecustomize.py").write_text(
        "import sys\n"
        "if sys.orig_argv[1:2] and sys.orig_argv[1].endswith('bin/ddpexp'):\n"
        "    import ddpexp.config.interpolations as bounds\n"
        "    bounds._RESOLVED = bounds._CHARACTERS = bounds._LONGEST = bounds._NODES = 10**18\n"
        "    bounds._SECONDS = 10**9\n"
        "    from omegaconf import Container\n"
        "    plain, count = Container.resolve_parse_tree, [0]\n"
        "    def counted(*arguments, **options):\n"
        "        count[0] += 1\n"
        f"        if count[0] == 300: open({str(mark)!r}, 'w').close()\n"
        "        return plain(*arguments, **options)\n"
        "    Container.resolve_parse_tree = counted\n"
    )
    weights = shutil.copy(next(place.run.rglob("model*.safetensors")), place.folder / "weights.safetensors")
    overrides = [*TINY, *bomb_words(12)]
    arguments = {
        "evaluate": ["evaluate", "run"], "resume": ["resume", "run", LONGER], "train": [*overrides, "run.dir=one"],
        "resume a sweep": ["resume", "sweep"], "sweep": ["-m", *overrides, "trainer.seed=0,1", "hydra.sweep.dir=several"],
        "plan": ["plan", *overrides],
        "weights": ["evaluate", str(weights), *overrides], "member": ["member", "run"],
    }  # fmt: skip
    process = place.start(*arguments[verb], environ={"PYTHONPATH": python_path(early)})
    wait_for(lambda: mark.exists() or process.poll() is not None)
    process.send_signal(number)
    done = finish(process, place.run)
    assert done.code == 128 + number, done  # 2 where the bounds end it: the signal had no effect
    assert "Traceback" not in done.err
    assert not any((place.folder / name).exists() for name in ("one", "several"))

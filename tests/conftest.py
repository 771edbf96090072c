"""Real commands in real processes: what they print, leave behind and return."""

from __future__ import annotations

import collections
import faulthandler
import fcntl
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ddpexp.cli import verbs
from ddpexp.config import plugins
from ddpexp.errors import DdpexpError
from ddpexp.launch import Job, Layout, Lifecycle, Participants, Work, WorkerRequest
from ddpexp.launch.workers import client
from tests.suggestions import refusals
from tests.warm.forks import constructor
from tests.warm.popen import start_command
from tests.warm.state import COMMANDS, SOCKET, VARIABLES, ignored_signals, state

ROOT = Path(__file__).resolve().parent.parent
PATIENCE = 150.0
"""Seconds that only a hang takes, on the slowest machine: the bound of every wait, and no promise of speed.

Less than the limits that a run has unless a test sets others (trainer.timeout), so that what waits for one of those is
found.
"""
LEFT_SECONDS = 60.0
"""For what a test has started to go, when the test has ended."""
EXIT_SECONDS = 120
"""For the tests' own process to end, when the summary is shown."""
MNIST_FILES = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)

# Threads of torch that wait for one another give up their core at once: more processes than cores share the machine,
# and spinning until the other thread gets one takes several times the time. Read when torch is loaded, in commands too.
os.environ.setdefault("GOMP_SPINCOUNT", "0")
os.environ["DDPEXP_HINTS"] = "off"  # tests share the cores with one another

for _number in (signal.SIGINT, signal.SIGQUIT):
    if (
        signal.getsignal(_number) == signal.SIG_IGN
    ):  # as in the background of a shell: what is started here would ignore it too
        signal.signal(_number, signal.SIG_DFL)


def python_path(*folders: str | Path) -> str:
    """Return PYTHONPATH with these folders first, this checkout, and the folders that the tests' own has."""
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join(dict.fromkeys(filter(None, [*map(str, folders), str(ROOT), *inherited])))


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str
    run: Path

    def result(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.run / "result.json").read_text())
        return found

    def manifest(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.run / "manifest.json").read_text())
        return found

    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run / "metrics.jsonl").read_text().splitlines()]


def starts_of(run: Path) -> list[dict[str, Any]]:
    """Return every start of a run as a whole.

    Of earlier ones the manifest says what was other than in the one after.
    """
    found = json.loads((run / "manifest.json").read_text())
    starts = [{key: value for key, value in found.items() if key not in ("data", "resolved", "config", "earlier")}]
    for one in reversed(found["earlier"]):
        starts.insert(0, {**starts[0], **one})
    return starts


ANY = WorkerRequest()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Give the cluster to one of the processes that share the tests at a time."""
    if item.get_closest_marker("slurm") is None or "SLURM_CONF" not in os.environ:
        return (yield)
    with open(f"{os.environ['SLURM_CONF']}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return (yield)


LONGEST = (
    "launch/launchers/test_slurm.py", "test_interruptions.py", "strategy/pipeline/test_strategy.py",
    "test_extras.py", "config/test_compose.py", "sweep/test_run.py", "run/test_resume.py", "faults/test_canaries.py",
    "launch/test_conformance.py", "test_install.py", "faults/test_limits.py", "run/test_pretrained.py",
    "faults/test_network.py", "test_examples.py", "test_docs.py", "launch/supervise/test_coordinator.py",
    "faults/test_data.py", "launch/launchers/test_slurm_array.py", "launch/supervise/test_supervisor.py",
    "test_user_recipes.py", "train/test_worker.py", "launch/test_plugins.py", "sweep/test_launchers.py",
    "test_layering.py", "strategy/test_equality.py", "cli/test_new.py", "launch/test_preemption.py",
    "strategy/exact/test_strategy.py", "launch/launchers/test_elastic.py", "launch/launchers/test_torchrun.py",
)  # fmt: skip
"""The files that take longest, by the seconds of a whole run, those that need the cluster apart from one another.

A process of the run takes a whole file: with one of these at the end the other processes would have nothing to do.
"""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first, and leave further variants of a test to the longer run (-m slow).

    Those past its own number, and of runs with a fault those past two.
    """
    turns = {f"tests/{name}": number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: turns.get(item.nodeid.partition("::")[0], len(turns)))
    seen: collections.Counter[str] = collections.Counter()
    for item in items:
        name = item.nodeid.partition("[")[0]
        few = item.get_closest_marker("variants")
        runs = {"recipe", "ddpexp", "commands", "run"} & set(getattr(item, "fixturenames", ()))
        most = few.args[0] if few is not None else 2 if name.startswith("tests/faults/") and runs else None
        if most is not None and not item.get_closest_marker("slow"):
            seen[name] += 1
            if seen[name] > most:
                item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """Leave what the tests have imported out of later collections of garbage: millions of objects that stay."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """End this process in time when something holds it up after the summary: it says where every thread is.

    The alarm is for what outlives the interpreter, such as the destructors of libraries. Processes that share the tests
    wait for one another, and are ended by the one that started them.
    """
    if hasattr(config, "workerinput"):  # Source: pytest-xdist, "How to identify workers"
        return
    faulthandler.dump_traceback_later(EXIT_SECONDS, exit=True)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(EXIT_SECONDS + 30)


@dataclass(frozen=True)
class Ready(Lifecycle):
    """Work that needs no preparation and leaves nothing."""

    work: Work

    def begin(self, layout: Layout, participants: Participants) -> Work:
        return self.work

    def enter(self, shared: Mapping[str, Any], layout: Layout) -> Work:
        return self.work


def calling(
    entry: str, arguments: Sequence[str], logs: Path | None = None, asked: WorkerRequest = ANY, **identity: Any
) -> Job:
    """The launchers as a library: return a job that calls `entry` in every process."""
    return Job(Ready(Work(entry, arguments, logs)), asked, identity=identity)


class Ddpexp:
    """Run `python -m ddpexp` in a folder of its own."""

    def __init__(self, folder: Path, environ: dict[str, str]) -> None:
        self.folder = folder
        self.environ = environ
        self._count = 0

    def __call__(self, *words: str, timeout: float = PATIENCE, environ: dict[str, str] | None = None) -> Done:
        process, run = self.start(*words, environ=environ)
        return finish(process, run, timeout)

    def paste(
        self, line: str, folder: Path | None = None, environ: dict[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """Start a line as it stands, in a shell that finds this Python as `python`."""
        path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
        return subprocess.Popen(
            ["bash", "-c", line],
            cwd=folder or self.folder,
            env={**self.environ, "PATH": path, **(environ or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def start(self, *words: str, environ: dict[str, str] | None = None) -> tuple[subprocess.Popen[str], Path]:
        self._count += 1
        run = self.folder / f"run{self._count}"
        typed = list(words)
        if not any(word in verbs.NAMES or word.startswith(("run.dir=", "-")) for word in words):
            typed.append(f"run.dir={run}")
        process = start_command(typed, self.folder, warm_too({**self.environ, **(environ or {})}))
        return process, run


def warm_too(environ: dict[str, str]) -> dict[str, str]:
    """Add what makes fork servers forks (`tests.warm`) to another `PYTHONPATH` that a test sets in `warm_environ`."""
    path, folder = environ.get("PYTHONPATH", ""), str(ROOT / "tests/warm")
    if SOCKET not in environ or folder in path.split(":"):
        return environ
    return {**environ, "PYTHONPATH": f"{path}:{folder}"}  # behind a sitecustomize of the test's


def finish(process: subprocess.Popen[str], run: Path, timeout: float = PATIENCE) -> Done:
    """Wait for a command; kill its whole session when it takes too long."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        for pid in living(run, process.pid):
            os.kill(pid, signal.SIGKILL)
        process.kill()
        out, err = process.communicate()
        pytest.fail(f"no end after {timeout} s\n{out}\n{err}")
    return Done(process.returncode, out, err, run)


def living(run: Path, *pids: int) -> list[int]:
    """Return the living processes of a run: those that hold a file in it open, and their children."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            links = [os.readlink(link) for link in (entry / "fd").iterdir()]
            state = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            continue
        if state != "Z" and (any(link.startswith(f"{run}/") for link in links) or int(entry.name) in pids):
            found.append(int(entry.name))
    return found


TAG = f"DDPEXP_TESTS={uuid.uuid4().hex}"
"""In the environment of everything that these tests start: whose processes are whose, beside other runs."""


ZYGOTES: set[int] = set()
"""The processes that fork commands and their servers (`tests.warm`), which stay: none of a command's own."""
MODULES = {SOCKET: "tests.warm.zygote", COMMANDS: "tests.warm.commands"}


def all_processes() -> set[int]:
    """Return every process of the machine."""
    return {int(name) for name in os.listdir("/proc") if name.isdigit()}


def ddpexp_processes(but: Set[int] = frozenset()) -> set[int]:
    """Return every living process that these tests have started, directly or not, but some.

    That need not be looked at.
    """
    found = set()
    for pid in all_processes() - but:
        try:
            ours = TAG.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            continue
        if ours and state != "Z":
            found.add(pid)
    return found


def children() -> set[int]:
    """Return the living children of this process.

    A fork of it, such as a DataLoader worker, does not have the tests' mark.
    """
    found = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            words = (task / "children").read_text().split()
        except OSError:  # a thread that has ended since: its children are listed with another one
            continue
        for word in words:
            try:
                state = Path(f"/proc/{word}/stat").read_text().rsplit(")", 1)[1].split()[0]
            except OSError:
                continue
            if state != "Z":
                found.add(int(word))
    return found


def lasting_threads() -> set[threading.Thread]:
    """Return the threads for which this process waits before it ends."""
    return {thread for thread in threading.enumerate() if not thread.daemon}


def shown(pid: int) -> str:
    """Return the number of a process with what it runs."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        words = "ended now"
    return f"process {pid} ({words.strip()[:200]})"


def inheritable() -> list[Any]:
    """Return what commands inherit from this process; of variables they get those of their fixture."""
    return [entry for number, entry in enumerate(state(ignored_signals())) if number != VARIABLES]


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    """Fail a test that leaves one of our processes alive, or changes this process for the tests after it.

    A child, a thread, a limit, a variable, an ignored signal.
    """
    processes, threads, inherited = all_processes(), lasting_threads(), inheritable()
    yield
    assert inheritable() == inherited, "commands of later tests would inherit what this test has changed"
    deadline = time.monotonic() + LEFT_SECONDS
    while (left := ddpexp_processes(but=processes) | children() - processes) or lasting_threads() - threads:
        if time.monotonic() > deadline:
            said = [shown(pid) for pid in left] + [repr(thread) for thread in lasting_threads() - threads]
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            pytest.fail(f"left behind: {', '.join(said)}")
        time.sleep(0.05)


@pytest.fixture(autouse=True)
def refused_suggestions(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Fail a test in which an error suggests to type what ddpexp would refuse: why, for each of them."""
    initialize, refused = DdpexpError.__init__, list[str]()

    def checked(error: DdpexpError, *arguments: Any, **fields: Any) -> None:
        initialize(error, *arguments, **fields)
        refused.extend(refusals(error.suggestion))

    monkeypatch.setattr(DdpexpError, "__init__", checked)
    yield refused
    assert not refused


@pytest.fixture(scope="session")
def mnist_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data.root with links to the real MNIST, so that the cache beside it is a test's own."""
    source = Path(os.environ.get("DDPEXP_TEST_MNIST", ROOT / "../shared/data/mnist")).resolve()
    if not all((source / name).is_file() for name in MNIST_FILES):
        pytest.skip(f"the MNIST files are not in {source}: set DDPEXP_TEST_MNIST")
    root = tmp_path_factory.mktemp("mnist")
    for name in MNIST_FILES:
        (root / name).symlink_to(source / name)
    return root


@pytest.fixture(scope="session")
def digits_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's cache directory that holds the few synthetic digits of the tests."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def plain_environ(digits_cache: Path) -> dict[str, str]:
    """The environment of a user who has none of our settings."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("DDPEXP_", "HYDRA_", "OMP_"))}
    kept["DDPEXP_HINTS"] = "off"
    name, _, value = TAG.partition("=")
    return {
        **kept,
        name: value,
        "PYTHONPATH": python_path(),
        "XDG_CACHE_HOME": str(digits_cache),
        "PYTHONWARNINGS": "error::UserWarning",
    }


@pytest.fixture(scope="session")
def environ(plain_environ: dict[str, str]) -> dict[str, str]:
    """The environment of commands; a folder or file of tests that is not about their processes takes the warm one."""
    return plain_environ


@contextmanager
def zygotes(plain: dict[str, str], folder: Path) -> Iterator[dict[str, str]]:
    """Start two processes (`tests.warm`); yield the environment in which commands and fork servers are their forks."""
    sockets = {SOCKET: folder / "servers", COMMANDS: folder / "commands"}
    path = {"PYTHONPATH": python_path(ROOT / "tests/warm")}
    environ = {**plain, **path, **{name: str(path) for name, path in sockets.items()}}
    quiet = {name: value for name, value in environ.items() if name != "PYTHONWARNINGS"}  # the forks have them
    with ExitStack() as leaving:
        for name, address in sockets.items():
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:  # then the zygote alone listens
                listener.bind(str(address))
                listener.listen(64)
                zygote = leaving.enter_context(
                    subprocess.Popen(
                        [sys.executable, "-m", MODULES[name], str(listener.fileno()), str(os.getpid())],
                        cwd=folder,
                        env=quiet,
                        pass_fds=[listener.fileno()],
                        stdout=subprocess.DEVNULL,
                    )
                )
            leaving.callback(zygote.kill)
            ZYGOTES.add(zygote.pid)
        yield environ


@pytest.fixture(scope="session")
def warm_environ(plain_environ: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of commands that are forks, and whose fork servers are."""
    with zygotes(plain_environ, tmp_path_factory.mktemp("zygotes")) as environ:
        yield environ


@pytest.fixture(scope="session")
def warm_single_environ(
    plain_environ: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, str]]:
    """The same with OMP_NUM_THREADS=1, which torchrun sets for its ranks: their commands get forks too."""
    with zygotes({**plain_environ, "OMP_NUM_THREADS": "1"}, tmp_path_factory.mktemp("zygotes")) as environ:
        yield environ


OWN_SERVER = {"PYTHONHASHSEED": "random"}
"""The variables of one command that starts its own fork server although others of its file do not: a difference.

One of two runs that must be equal has them, so that the two have other seeds of Python's hashes, as users' runs do.
"""


@pytest.fixture
def forked_servers(warm_environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork servers that this process starts are forks too."""
    for name in (SOCKET, "PYTHONPATH"):
        monkeypatch.setenv(name, warm_environ[name])
    monkeypatch.setattr(client.Server, "__init__", constructor(client, ignored_signals()))


@pytest.fixture
def see_packages(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], None]]:
    """Have this process find the packages that are installed in a folder, until the test ends."""
    folders = list[str]()

    def see(folder: Path) -> None:
        folders.append(str(folder))
        monkeypatch.syspath_prepend(str(folder))
        forget()

    def forget() -> None:
        plugins._entry_points.cache_clear()
        plugins.offered_targets.cache_clear()

    yield see
    forget()
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(tuple(folders)):
            del sys.modules[name]


@pytest.fixture
def ddpexp(tmp_path: Path, environ: dict[str, str]) -> Ddpexp:
    return Ddpexp(tmp_path, environ)


SMALL = ("recipe=mnist", "model=linear", "data.source=embedded", "data.embedded_train=640", "data.embedded_test=100",
         "trainer.max_steps=10", "trainer.log_every=5", "logger=none")  # fmt: skip
"""A run of a second: few synthetic digits, a linear model, ten steps."""

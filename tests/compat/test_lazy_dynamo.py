"""The compiler stays out of runs that do not compile, and is whole for everyone who wants it.

Any module can be imported.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.conftest import PATIENCE

_FORK = """
import json, os, sys, tempfile, traceback
import torch, torch.distributed as dist, torch.nn.parallel, torch.utils.data
import ddpexp.train.worker
from ddpexp.compat.lazy_dynamo import defer

def step(kind, model):
    optimizer = kind(model.parameters(), lr=0.1)
    model(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()

def train():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
    for kind in (torch.optim.SGD, torch.optim.AdamW):
        step(kind, model)

for line in sys.stdin:
    with tempfile.TemporaryFile("w+") as said:
        pid = os.fork()
        if not pid:
            os.dup2(said.fileno(), 1), os.dup2(said.fileno(), 2)
            code = 1
            try:
                exec(json.loads(line), globals())
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush(), sys.stderr.flush()
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        said.seek(0)
        print(json.dumps([code, said.read()]), flush=True)
"""


class Warm:
    """A process with everything imported, as the workers' server is, that forks one for each program."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", _FORK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __call__(self, program: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(program) + "\n")
        self.process.stdin.flush()
        code, said = json.loads(self.process.stdout.readline())
        assert code == 0, said
        return str(said)

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(PATIENCE)
        self.process.stdout.close()


@pytest.fixture(scope="module")
def warm() -> Iterator[Warm]:
    process = Warm()
    yield process
    process.close()


_LOADED = "type(torch._dynamo).__name__ == 'module' and 'torch._dynamo.eval_frame' in sys.modules"


def test_training_imports_no_compiler(warm: Warm) -> None:
    known = "known = set(sys.modules)\n"
    late = "print([name for name in sys.modules if name.startswith('torch') and name not in known])"
    said = warm(f"defer()\n{known}train()\nassert not ({_LOADED})\n{late}")
    assert said.splitlines()[-1] == "[]"  # the import of any would have given way to the compiler


_WANT = {
    "a module of torch": (
        "import torch.distributed.tensor as t; assert t is sys.modules[t.__name__] is torch.distributed.tensor"
    ),
    "torch.compile": "print(torch.compile(torch.nn.Linear(3, 3), backend='eager')(torch.randn(2, 3)).shape)",
    "a submodule": (
        "import torch._dynamo.eval_frame as e; assert e is sys.modules[e.__name__] is torch._dynamo.eval_frame"
    ),
    "a module of configuration": (
        "import torch._dynamo.config as c; assert c is sys.modules['torch._dynamo.config'] is torch._dynamo.config"
    ),
    "a name": "from torch._dynamo import config; assert config is sys.modules['torch._dynamo.config']",
    "an attribute": "assert torch._dynamo.utils.counters is not None",
    "every name": "from torch._dynamo import *; assert reset.__module__ == 'torch._dynamo'",
    "a list of its names": "assert 'reset' in dir(torch._dynamo)",
    "another value": "torch._dynamo.mine = 1; assert sys.modules['torch._dynamo'].mine == 1",
    "an attribute of torch": "assert torch.onnx.export",
}


@pytest.mark.variants(1)
@pytest.mark.parametrize("want", _WANT)
def test_the_real_compiler_comes_when_it_is_wanted(warm: Warm, want: str) -> None:
    before = "defer()\ntrain()\nimport torch._dynamo as kept\nkept_break = kept.graph_break\n"
    after = f"""
import torch._dynamo
assert {_LOADED}
assert kept is not torch._dynamo and kept.config is torch._dynamo.config and kept.disable is torch._dynamo.disable
kept_break()
assert not any("deferred" in type(finder).__module__ for finder in sys.meta_path)
assert all("deferred" not in type(module.__spec__.loader).__module__ for name, module in sys.modules.items()
           if name.startswith("torch") and getattr(module, "__spec__", None))
step(torch.optim.SGD, torch.nn.Linear(3, 3))
# torch queried the real compiler again about the functions that the stand-in had handled
kept_out = torch.optim.Optimizer.add_param_group.__wrapped__
assert kept_out.__dict__["__dynamo_disable"] is not kept_out
"""
    warm(f"{before}{_WANT[want]}{after}")


def test_the_import_of_the_compiler_leaves_no_empty_folder(warm: Warm, tmp_path: Path) -> None:
    said = warm(f"""
defer()
os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
tempfile.tempdir = {str(tmp_path)!r}
import torch._dynamo.config
assert {_LOADED}
from torch._inductor.runtime.cache_dir_utils import cache_dir
print(os.listdir(tempfile.tempdir), cache_dir().startswith(tempfile.tempdir))
""")
    assert said.splitlines()[-1] == "[] True"


def test_who_looks_through_all_modules_meets_a_module_like_others(warm: Warm) -> None:
    warm(f"""
defer()
import copy, inspect, pickle
import torch._dynamo as compiler
for name in ("__file__", "__path__", "__spec__", "__loader__", "__package__"):
    assert getattr(compiler, name)
for name in ("__wrapped__", "__warningregistry__", "__version__", "__bases__", "__torch_function__", "__path_of_mine__"):
    assert not hasattr(compiler, name)
assert inspect.ismodule(compiler) and inspect.getfile(compiler) == compiler.__file__ == compiler.__spec__.origin
inspect.getmodule(train)
inspect.stack()
repr(compiler), hash(compiler), compiler == compiler, vars(compiler), copy.copy(dict(sys.modules))
assert not ({_LOADED})
for make in (pickle.dumps, copy.copy, copy.deepcopy):
    try:
        make(compiler)
    except TypeError as error:
        assert "cannot pickle" in str(error)
    else:
        raise AssertionError(make)
""")


def test_a_compiler_that_is_there_already_stays(warm: Warm) -> None:
    warm("import torch._dynamo as real\ndefer()\nassert sys.modules['torch._dynamo'] is real is torch._dynamo")


def test_threads_that_want_the_compiler_at_once_all_get_it_whole(warm: Warm) -> None:
    warm("""
import threading
defer()
import torch._dynamo as compiler
start, found = threading.Barrier(8), []
def ask(number):
    start.wait()
    found.append([compiler.config.recompile_limit, compiler.optimize, compiler.reset][number % 3])
threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert len(found) == 8
""")


_FORMS = """
def own(x):
    compiled.append(torch.compiler.is_compiling())
    return x + 1

@torch.compiler.disable
def bare(x):
    return own(x)

@torch.compiler.disable()
def called(x):
    return own(x)

@torch.compiler.disable(recursive=False)
def flat(x):
    return x + 1

@torch.compiler.disable(recursive=True, reason="ours")
def told(x):
    return own(x)

wrapped = torch.compiler.disable(torch.nn.Linear(1, 1))
compiled = []
step(torch.optim.SGD, torch.nn.Linear(3, 3))
for function in (bare, called, told):
    assert function(torch.ones(1)) == 2
try:
    with torch.compiler.disable():
        pass
except RuntimeError as error:  # torch's own answer
    assert "as an annotation/decorator" in str(error)
assert flat(torch.ones(1)) == 2 and wrapped(torch.ones(1)).shape == (1,)
assert compiled == [False] * 3
for function in (bare, called, told):
    compiled.clear()
    torch._dynamo.reset()
    torch.compile(lambda x: function(x * 2) * 2, backend="eager")(torch.ones(1))
    assert compiled == [False], function
torch.compile(lambda x: own(x), backend="eager", fullgraph=True)(torch.ones(1))
"""


@pytest.mark.variants(1)
@pytest.mark.parametrize("deferred", [True, False])
def test_a_function_is_kept_out_of_compiled_code_in_every_form(warm: Warm, deferred: bool) -> None:
    warm(("defer()\ntrain()\n" if deferred else "") + _FORMS)


@pytest.mark.slow
def test_the_public_functions_of_torch_compiler_return_the_same_as_without_us(warm: Warm) -> None:
    ask = """
import inspect
C = torch.compiler
said = [C.is_compiling(), C.is_dynamo_compiling(), C.is_exporting(), C.list_backends(), C.cudagraph_mark_step_begin()]
said += [type(C.set_stance("default")).__name__, C.allow_in_graph(train) is train, C.assume_constant_result(train) is train]
said += [C.reset(), inspect.isfunction(C.wrap_numpy(lambda x: x)), sorted(C.__all__)]
print(said)
"""
    assert warm(f"defer()\ntrain()\n{ask}") == warm(ask)


_PUBLIC = """
torch.ao.quantization torch.autograd torch.backends.cudnn torch.compiler torch.compiler.config torch.cpu.amp torch.cuda.amp
torch.distributed.algorithms.ddp_comm_hooks.default_hooks torch.distributed.algorithms.join torch.distributed.checkpoint
torch.distributed.checkpoint.state_dict torch.distributed.device_mesh torch.distributed.elastic.agent.server.local_elastic_agent
torch.distributed.fsdp torch.distributed.fsdp.wrap torch.distributed.nn torch.distributed.optim torch.distributed.pipelining
torch.distributed.rpc torch.distributed.run torch.distributed.tensor torch.distributed.tensor.debug
torch.distributed.tensor.experimental torch.distributed.tensor.parallel torch.distributions torch.export torch.fft torch.func
torch.futures torch.fx torch.fx.experimental.symbolic_shapes torch.hub torch.jit torch.library torch.linalg torch.masked
torch.mps torch.multiprocessing torch.nested torch.nn.attention torch.nn.attention.flex_attention torch.nn.utils.parametrize
torch.nn.utils.rnn torch.onnx torch.optim.lr_scheduler torch.optim.swa_utils torch.overrides torch.package torch.profiler
torch.quasirandom torch.signal torch.sparse torch.special torch.testing torch.utils.benchmark torch.utils.checkpoint
torch.utils.cpp_extension torch.utils.data.datapipes.iter torch.utils.dlpack torch.utils.flop_counter torch.utils.mobile_optimizer
torch.utils.tensorboard
""".split()

_IMPORT = """
import importlib
failed = {{}}
for name in {names}:
    try:
        importlib.import_module(name)
    except Exception as error:
        failed[name] = type(error).__name__ + ": " + str(error)
print(json.dumps(failed))
"""


def _failed(warm: Warm, names: list[str], deferred: bool) -> dict[str, str]:
    said = warm(("defer()\ntrain()\n" if deferred else "") + _IMPORT.format(names=names))
    found: dict[str, str] = json.loads(said.splitlines()[-1])
    return found


@pytest.mark.variants(1)
@pytest.mark.parametrize("seed", range(8))
def test_every_public_module_can_be_imported_in_any_order(warm: Warm, seed: int) -> None:
    names = random.Random(seed).sample(_PUBLIC, len(_PUBLIC))
    assert _failed(warm, names, deferred=True) == {}


@pytest.mark.slow
@pytest.mark.parametrize("first", _PUBLIC)
def test_every_public_module_can_be_the_first(warm: Warm, first: str) -> None:
    assert _failed(warm, [first], deferred=True) == {}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_the_same_modules_of_torch_as_without_us_can_be_imported(warm: Warm, seed: int) -> None:
    names = sorted(_modules(Path(torch.__path__[0]), "torch"))
    assert len(names) > 1000
    order = random.Random(seed).sample(names, len(names))
    assert _failed(warm, order, deferred=True) == _failed(warm, order, deferred=False)


def _modules(folder: Path, name: str) -> Iterator[str]:
    for entry in folder.iterdir():
        if entry.is_dir() and (entry / "__init__.py").is_file():
            yield from _modules(entry, f"{name}.{entry.name}")
        elif entry.suffix == ".py" and entry.stem.isidentifier() and entry.stem != "__main__":
            yield name if entry.stem == "__init__" else f"{name}.{entry.stem}"

"""Every text reaches a file through ddpexp/system/files.py, and the terminal through masked streams."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.conftest import ROOT
from tests.test_layering import FILES, parsed

WRITERS = ("ddpexp/system/files.py", "ddpexp/system/streams.py", "ddpexp/system/secrets.py")
CALLS = {
    "os.write", "os.pwrite", "os.writev", "json.dump", "yaml.dump", "yaml.safe_dump", "torch.save", "np.save",
    "np.savez", "np.savez_compressed", "save_file", "OmegaConf.save", "tempfile.NamedTemporaryFile",
}  # fmt: skip
UNMASKED = {"write_data", "files.write_data", "Masked", "secrets.Masked"}

TENSORS, DATA, PICTURE = "tensors", "the user's data, as they are", "a picture"
NUMBERS, LOCK, NOTHING = "numbers", "a lock: a process, its host and its job", "nothing: /dev/null, or an empty file"
MASKED, PIPE = "masked by its caller", "what processes of ddpexp tell each other: nobody else reads it"
DESCRIPTOR = "what a process writes to it is masked there, or comes from a program that is not ddpexp's"

# What writes otherwise, and what that is. An entry that is no longer needed fails the test: remove it.
EXCEPTIONS: dict[str, str] = {
    "export/weights.py:export_weights": TENSORS,
    "export/weights.py:export_adapters": TENSORS,
    "checkpoint/pickled.py:_write": TENSORS,
    "checkpoint/writer.py:_complete": MASKED,  # by `seal`, which adds a hash over the bytes
    "checkpoint/writer.py:_write_at": "tensors, and the state that a recipe wants back as it was",
    "export/worker.py:_write_format": TENSORS,
    "cli/main.py:_open_standard_streams": NOTHING,
    "cli/new.py:_write": "a project under a name that was checked",
    "cli/preview.py:draw": PICTURE,
    "cli/projects/text/tests/test_recipe.py:test_two_steps_on_two_workers_and_a_resume_on_one": "a project's own test",
    "cli/projects/table/tests/test_recipe.py:write": "a project's own test",
    "config/trusted.py:write": "the user's list, which nobody else may read, with paths that are compared",
    "data/arrays/store.py:_members": DATA,
    "data/cache.py:_locked": NOTHING,
    "data/hf/convert.py:__init__": DATA,
    "data/image_folder/pool.py:serve": PIPE,
    "data/image_folder/pool.py:handle": DATA,
    "data/image_folder/pool.py:_write": DATA,
    "data/image_folder/prepare.py:finish": MASKED,
    "data/image_folder/prepare.py:_reserve": NOTHING,
    "data/npy.py:write_file": "data, and records that their callers mask",
    "data/tar_shards/prepare.py:fill": NUMBERS,
    "data/tar_shards/remote.py:keep": DATA,
    "data/tar_shards/remote.py:_lock": NOTHING,
    "data/tar_shards/remote.py:_write_sum": "a hash",
    "data/text/prepare.py:encode": DATA,
    "doctor/job.py:enter": PIPE,
    "doctor/storage.py:_try_out": NOTHING,
    "doctor/storage.py:_locks": NOTHING,
    "doctor/worker.py:add": PIPE,
    "launch/launchers/agent_status.py:_write": NUMBERS,
    "launch/launchers/agent_status.py:memory": PIPE,
    "launch/launchers/slurm_array.py:_write": "a script: refused if it holds a secret",
    "launch/launchers/slurm_submit.py:submit_job": "a script: refused if it holds a secret",
    "launch/rendezvous/kinds.py:listen": "a token of ddpexp's own, which this user alone can read",
    "launch/supervise/in_process.py:write": MASKED,  # by the stream above it
    "launch/workers/control.py:forward": NUMBERS,
    "launch/workers/rank_log.py:_temporary_file": DESCRIPTOR,
    "launch/workers/rank_log.py:_open": DESCRIPTOR,
    "launch/workers/server.py:_start": "a warning with names of modules",
    "loggers/append_file.py:flush": MASKED,
    "loggers/append_file.py:_append": MASKED,  # by `LoggerCollection`, which all loggers are in
    "loggers/append_file.py:truncate_file": NOTHING,
    "plan/calibrate.py:_started": DESCRIPTOR,
    "run/lock.py:_open": LOCK,
    "run/lock.py:_write": LOCK,
    "run/start_files.py:write": MASKED,  # code.diff, by `repository.snapshot`
    "run/start_files.py:undo": "what stood there before",
    "run/stored_config.py:checked_text": "a configuration: refused if it holds a secret",
    "run/sync.py:notify": PIPE,
    "run/sync.py:_only_sender": NOTHING,
    "strategy/comm/shared_memory.py:_make": PIPE,
    "strategy/comm/shared_memory.py:_map": PIPE,
    "sweep/folder.py:add": MASKED,
    "sweep/job.py:_run_in_fork": DESCRIPTOR,
    "sweep/job.py:_text": DESCRIPTOR,
    "sweep/picture.py:save": PICTURE,
    "system/caller.py:report": MASKED,
    "system/memory_file.py:memory_file": PIPE,
    "system/nvml.py:_open_error": NOTHING,
    "system/start.py:stop": "a fixed sentence",
    "system/terminal.py:line": NOTHING,
    "system/terminal_mode.py:descriptor_of_terminal": NOTHING,
    "system/terminal_mode.py:close": NOTHING,
    "train/debugger.py:_resending_interrupts": NUMBERS,
    "train/profiler.py:_write": "names of operators, and times",
    "predict/worker.py:_write": MASKED,  # by `files.contents`
    "predict/files.py:_npz": MASKED,
    "predict/files.py:_npy": NUMBERS,
}


def writes(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the function and the call of each place that writes other than through the writers."""
    for function, call in calls(tree, ""):
        name = ast.unparse(call.func)
        texts = [*map(ast.unparse, call.args), *(ast.unparse(keyword.value) for keyword in call.keywords)]
        opens = name.rpartition(".")[2] in ("open", "fdopen") and any(is_mode(text) for text in texts)
        to_write = name == "os.open" and any(
            flag in text for text in texts for flag in ("O_WRONLY", "O_RDWR", "_FLAGS")
        )
        writes_file = isinstance(call.func, ast.Attribute) and call.func.attr in ("write_text", "write_bytes")
        is_dump = name in CALLS and not (name.startswith("yaml.") and len(call.args) < 2)
        raw = name.endswith((".buffer.write", ".__stdout__.write", ".__stderr__.write"))
        if opens or to_write or writes_file or is_dump or raw or name in UNMASKED:
            yield function, name


def is_mode(text: str) -> bool:
    return len(text) < 7 and text[:1] in "'\"" and any(letter in text for letter in "wax+")


def calls(node: ast.AST, function: str) -> Iterator[tuple[str, ast.Call]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Call):
            yield function, child
        is_function = isinstance(child, ast.FunctionDef | ast.ClassDef)
        yield from calls(child, child.name if is_function else function)  # type: ignore[attr-defined]


def test_no_text_is_written_past_the_mask() -> None:
    found = {
        f"{name.removeprefix('ddpexp/')}:{function}": call
        for path in FILES
        if (name := str(path.relative_to(ROOT))) not in WRITERS
        for function, call in writes(parsed(path))
    }
    new = {place: call for place, call in found.items() if place not in EXCEPTIONS}
    assert not new, f"use write, write_json, write_yaml, json_line or open_to_append of ddpexp.system.files: {new}"
    assert EXCEPTIONS.keys() <= found.keys(), "these write nothing any more: remove them from EXCEPTIONS"


@pytest.mark.parametrize(
    "text",
    [
        "path.write_text(text)", "path.write_bytes(data)", "open(path, 'w')", "open(path, mode='a')",
        "path.open('xb')", "os.fdopen(number, 'w')", "os.open(path, os.O_WRONLY | os.O_CREAT)", "os.write(1, data)",
        "json.dump(value, file)", "yaml.safe_dump(value, file)", "files.write_data(path, data)", "Masked(text)",
        "sys.stdout.buffer.write(data)", "sys.__stderr__.write(text)", "class A:\n    def b(self): open(self, 'r+')",
    ],
)  # fmt: skip
def test_the_policy_sees_what_writes(text: str) -> None:
    assert list(writes(ast.parse(text)))


@pytest.mark.parametrize(
    "text",
    [
        "open(path)", "open(path, 'rb')", "path.read_text()", "json.dumps(value)", "yaml.safe_dump(value)",
        "os.open(path, os.O_RDONLY)",
    ],
)  # fmt: skip
def test_the_policy_lets_pass_what_reads(text: str) -> None:
    assert not list(writes(ast.parse(text)))

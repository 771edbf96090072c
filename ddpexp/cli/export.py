"""The command `ddpexp export`."""

from __future__ import annotations

from pathlib import Path

from ddpexp.checkpoint.format import is_checkpoint
from ddpexp.cli.verb import Call
from ddpexp.errors import EXIT_DONE, DdpexpError, RefusedError
from ddpexp.export.request import check, request_of
from ddpexp.run.stored_run import find_weights
from ddpexp.system import separate_process
from ddpexp.system.files import relative


def export(call: Call) -> int:
    """Export the model that is named, print the names of the files, and return the exit code.

    Raises:
        RefusedError: no such weights, a folder that is not empty, or a format that is not installed.
    """
    (source, overrides), options = call.source(), call.options
    if "--out" not in options:
        raise RefusedError("needs a folder to write to", place=f"export {source}", suggestion="Add --out FOLDER.")
    out, format_name = Path(options["--out"]).expanduser(), options.get("--format", "safetensors")
    check(out, format_name)
    weights = find_weights(source, overrides, call.name, call.restate, call.checkpoint)
    if not is_checkpoint(weights.path):
        raise RefusedError(
            "is not a checkpoint", place=f"export {weights.path}", suggestion="Name a run, or one of its checkpoints."
        )
    weights.announce()
    try:
        answer = separate_process.call(
            "ddpexp.export.worker:main", request_of(weights, out, format_name), {"CUDA_VISIBLE_DEVICES": ""}
        )
    except separate_process.NoAnswerError as error:
        raise DdpexpError(
            f"the process that exports ended with exit code {error.status}", suggestion="See its output above."
        ) from None
    if "failed" in answer:
        raise DdpexpError(f"Failed with {answer['failed']}", place=f"export {source} --format {format_name}")
    compared = "several models, not compared" if answer["difference"] is None else (
        f"greatest difference from the model on a batch: {answer['difference']:.3g}"
    )  # fmt: skip
    print(f"{relative(out)}: {', '.join(answer['files'])}\n{compared}")
    return EXIT_DONE

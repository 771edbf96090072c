"""The process of `ddpexp export`: writes a trained model, and compares what was written with the model on a batch."""

from __future__ import annotations

import logging
import secrets
import shutil
import traceback
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ddpexp.checkpoint.format import open_checkpoint
from ddpexp.checkpoint.loading import load_weights
from ddpexp.config.parse import load
from ddpexp.config.schema import Experiment
from ddpexp.data.batches import EvalBatches
from ddpexp.data.samples import tensors_of
from ddpexp.distributed.world import World
from ddpexp.errors import RefusedError
from ddpexp.export.trained import export, saved_model
from ddpexp.system import files
from ddpexp.system.limits import reason_with_limit
from ddpexp.train.build import build_model, open_data

_CPU = torch.device("cpu")
_SAMPLES = 4  # that are compared
_INPUTS = ("inputs", "input", "input_ids", "images", "x")  # keys of a batch that is a mapping
_HF_FILE_BYTES = 5_000_000_000
_ONNX_FILE_BYTES = 1 << 30  # of weights; protobuf's limit is 2 GiB
RECORD = "export.json"


def main(request: Mapping[str, Any]) -> dict[str, Any]:
    """Export what is requested, in a process of its own; return what `export_model` does, or why it failed."""
    try:
        return export_model(request)
    except RefusedError:
        raise
    except OSError as error:
        out = request["out"]
        raise RefusedError(f"cannot be written: {reason_with_limit(error, Path(out))}", place=out) from None
    except Exception as error:  # of the user's code, or of what torch cannot export
        traceback.print_exc()
        return {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}


def export_model(request: Mapping[str, Any]) -> dict[str, Any]:
    """Write the folder, complete or not at all; return the names of its files and the greatest difference."""
    experiment = load(request["config"])
    source = Path(request["weights"])
    out = Path(request["out"])
    format_name, averaged = request["format"], open_checkpoint(source).has_average
    model = saved_model(experiment, source, averaged)
    inputs = _inputs(experiment, request["data"])
    temporary = out.with_name(f".{out.name}.{secrets.token_hex(4)}")
    try:
        export(source, temporary, averaged, False, _HF_FILE_BYTES if format_name == "hf" else 1 << 62)
        difference = None
        if isinstance(model, nn.Module):
            expected, exported = _outputs(model, inputs), _model_without_adapters(experiment, temporary)
            difference = _difference(expected, _write_format(format_name, exported, inputs, temporary))
        elif format_name not in ("safetensors", "hf"):
            raise RefusedError(
                f"is for one model, and this recipe has {', '.join(model)}",
                place=f"--format {format_name}",
                suggestion="Use safetensors.",
            )
        record = {**request["provenance"], "format": format_name, "difference": difference}
        files.write_json(temporary / RECORD, record)
        if out.is_dir():
            out.rmdir()  # it is empty
        temporary.rename(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    names = sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file())
    return {"files": names, "difference": difference}


def _write_format(format_name: str, model: nn.Module, inputs: Tensor, folder: Path) -> list[Tensor]:
    """Write a model, whose weights are there as safetensors, in its format; return what it gives for the inputs."""
    if format_name in ("safetensors", "hf"):
        return _outputs(model, inputs)
    for path in list(folder.iterdir()):
        path.unlink()
    path = folder / f"model.{format_name}"
    if format_name == "pt":
        torch.save(model.state_dict(), path)
        return _outputs(model, inputs)
    rows = torch.export.Dim("batch", min=1)
    if format_name == "pt2":
        with torch.no_grad():
            program = torch.export.export(model, (inputs,), dynamic_shapes=({0: rows},))
        torch.export.save(program, path)
        return _outputs(program.module(), inputs)  # no file that may hold code is loaded
    _export_onnx(model, inputs, rows, path)
    import onnxruntime  # type: ignore[import-untyped,import-not-found,unused-ignore]

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    results = session.run(None, {session.get_inputs()[0].name: inputs.numpy()})
    return [torch.from_numpy(result) for result in results]


def _export_onnx(plain: nn.Module, inputs: Tensor, rows: Any, path: Path) -> None:
    """Write one file, or beside it model.onnx.data with weights that are too many for the format."""
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in plain.state_dict().values())
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it warns that torchvision, which is not used, is missing
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch about torch
        torch.onnx.export(
            plain, (inputs,), path, dynamo=True, dynamic_shapes=({0: rows},), verbose=False, input_names=["inputs"],
            external_data=num_bytes > _ONNX_FILE_BYTES,
        )  # fmt: skip


def _model_without_adapters(experiment: Experiment, folder: Path) -> nn.Module:
    """Return the model without adapters, with the exported weights."""
    model = build_model(replace(experiment, trainer=replace(experiment.trainer, lora=None)), trains=False)
    weights = folder if (folder / "model.safetensors.index.json").exists() else folder / "model.safetensors"
    load_weights({"model": model}, weights, f"export {weights}", False)
    plain: nn.Module = model.eval()
    return plain


def _inputs(experiment: Experiment, prepared: Mapping[str, Any] | None) -> Tensor:
    """Return what the model gets of a batch of the data."""
    splits = open_data(experiment, prepared, World.alone())
    data = next(iter(splits.evals.values()), splits.train)
    batch = EvalBatches(data, _SAMPLES, 0, 1, _CPU).first()
    return inputs_of(batch)


def inputs_of(batch: Any) -> Tensor:
    """Return the tensor of a batch that is the model's argument.

    Raises:
        RefusedError: which one it is cannot be known.
    """
    found = batch
    if isinstance(batch, Mapping):
        found = next((batch[key] for key in _INPUTS if key in batch), None)
    elif isinstance(batch, tuple | list) and batch:
        found = batch[0]
    if not isinstance(found, Tensor):
        raise RefusedError(
            "the model cannot be compared: its input is the first item of a batch, or of a mapping one of "
            f"{', '.join(_INPUTS)}, and here that is not a tensor",
            suggestion="From Python, open_run(DIR).export(FOLDER) writes the weights without a comparison.",
        )
    return found


def _outputs(model: Any, inputs: Tensor) -> list[Tensor]:
    with torch.no_grad():
        return list(tensors_of(model(inputs)))


def _difference(expected: list[Tensor], found: list[Tensor]) -> float:
    """Return the greatest difference between outputs.

    Raises:
        RefusedError: they are not of the same shapes.
    """
    if not expected or [tensor.shape for tensor in expected] != [tensor.shape for tensor in found]:
        raise RefusedError("the exported model returns tensors of other shapes than the model, so it is not written")
    pairs = zip(expected, found, strict=True)
    return max(float((one.double() - other.double()).abs().max()) if one.numel() else 0.0 for one, other in pairs)

"""`ddpexp.open_run`: what a run directory holds, without trust in it."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ddpexp.checkpoint.format import Checkpoint, scan
from ddpexp.checkpoint.weights import best_of, choose, parse_which
from ddpexp.errors import RefusedError
from ddpexp.predict.job import FORMATS
from ddpexp.run import directory as directories
from ddpexp.run.directory import RunDir
from ddpexp.run.resume_arguments import config_options, trust_arguments
from ddpexp.run.stored_config import check_config, check_config_exists, read_config
from ddpexp.sweep.folder import SweepDir
from ddpexp.sweep.rows import rows_of
from ddpexp.system.json_lines import json_lines
from ddpexp.system.text import first_few

if TYPE_CHECKING:
    from ddpexp.cli.api.child import Ended
    from ddpexp.config.restated import UnrestatedError
    from ddpexp.config.schema import Experiment
    from ddpexp.run.stored_run import StoredRun

Weights = Literal["raw", "ema"]
CheckpointName = Literal["auto", "best", "last"] | str | int


def open_run(directory: str | Path, *, config_dir: str | Path | None = None, trust: str | Sequence[str] = ()) -> Run:
    """Open the directory of a run; nothing in it is changed, and no code that it names runs.

        run = ddpexp.open_run("outputs/mnist/2026-11-23_10-00-00")
        run.result["metrics"], run.model()(images)

    Args:
        directory: The run's directory.
        config_dir: The folder that was `--config-dir` of the run, for a run with code of your own. A run directory is
            never trusted to say what code runs, so `model` and `evaluate` need it again.
        trust: The names that were `run.trust=[...]` of the run, likewise.

    Raises:
        RefusedError: It is not the directory of a run.
    """
    path = Path(directory).expanduser()
    if not path.exists():
        raise RefusedError("There is no such directory", place=path)
    if SweepDir(path).is_sweep():
        raise RefusedError("is the directory of a sweep", place=path, suggestion="Use ddpexp.open_sweep.")
    check_config_exists(RunDir(path), str(path))
    if not directories.is_ours(path):
        from ddpexp.run.stored_run import runs_below

        raise RefusedError(
            "is not a run directory", place=path, suggestion=runs_below(path).lstrip() if path.is_dir() else ""
        )
    return Run(path.absolute(), *trusted(config_dir, trust))


def trusted(config_dir: str | Path | None, trust: str | Sequence[str]) -> tuple[str | None, tuple[str, ...]]:
    """Return the absolute config folder and the names of two arguments."""
    folder = str(Path(config_dir).expanduser().absolute()) if config_dir is not None else None
    return folder, (trust,) if isinstance(trust, str) else tuple(trust)


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint of a run."""

    step: int
    path: Path
    is_best: bool
    """Whether it is the best one by the metric of `trainer.keep_best`."""
    is_complete: bool
    """Whether its manifest is intact and its files have their sizes; loading compares their hashes, too."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The metrics of the evaluation at this step, if there was one."""


@dataclass(frozen=True, repr=False)
class Run:
    """A run, as its directory has it now: every attribute reads the files again. Made by `open_run` and `ddpexp.run`.

    Attributes:
        path: The run's directory.
        config_dir: The trusted config folder.
        trust: The trusted names.
    """

    path: Path
    config_dir: str | None = None
    trust: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """Return the path, the status and the newest metrics."""
        row = rows_of(self.path)[0]
        metrics = f", metrics={dict(row.metrics)!r}" if row.metrics else ""
        return f"Run({str(self.path)!r}, status={row.status!r}{metrics})"

    @property
    def status(self) -> str:
        """How far the run is, as `ddpexp status` prints it: done, running, interrupted, failed, killed, ..."""
        return rows_of(self.path)[0].status

    @property
    def config(self) -> dict[str, Any]:
        """The configuration, config.yaml."""
        check_config(self._files, str(self.path))
        tree = read_config(self._files)
        if tree is None:
            raise RefusedError("has no config.yaml: it was stopped before it had one", place=self.path)
        return tree

    @property
    def result(self) -> dict[str, Any]:
        """How the run ended, result.json: status, step, metrics, weights_sha256, ...; empty while it has not ended."""
        return self._files.read_if_present(self._files.result) or {}

    @property
    def error(self) -> dict[str, Any] | None:
        """Why the run failed, error.json: rank, kind, message, traceback, ...; None if it did not."""
        return self._files.read_if_present(self._files.error)

    def metrics(self, frame: bool | None = None) -> Any:
        """Return the records of metrics.jsonl in their order, with `step`, `epoch`, `time` and metrics by name.

        Args:
            frame: True for a pandas DataFrame, False for a list of dictionaries. None: a DataFrame if pandas is
                installed, else a list. Values that are not finite are NaN.

        A damaged line is left out with a warning, but for a last one that is still being written.
        """
        damaged: list[int] = []
        found = [_numbers(record) for record in json_lines(self._files.metrics, on_damaged=damaged.append)]
        if damaged:
            lines = f"line{'s' if len(damaged) > 1 else ''} {first_few(list(map(str, damaged)))}"
            warnings.warn(f"{self._files.metrics}, {lines}: damaged, so left out of the metrics.", stacklevel=2)
        if frame is False:
            return found
        try:
            import pandas  # type: ignore[import-untyped,import-not-found,unused-ignore]
        except ModuleNotFoundError:
            if frame:
                raise
            return found
        return pandas.DataFrame(found)

    @property
    def checkpoints(self) -> list[SavedCheckpoint]:
        """The checkpoints, by step."""
        found = scan(self._files.checkpoints)
        best = best_of(found.complete)
        saved = [
            SavedCheckpoint(one.step, one.folder, one is best, one.wrong_size() is None, _numbers(one.metrics))
            for one in found.complete
        ]
        saved += [SavedCheckpoint(one.step, one.folder, False, False) for one in found.damaged]
        return sorted(saved, key=lambda one: one.step)

    def model(self, checkpoint: CheckpointName = "auto", weights: Weights | None = None) -> Any:
        """Return the model with the weights of a checkpoint, on the CPU, in evaluation mode and ready to call.

        Args:
            checkpoint: "best" is the best one by `trainer.keep_best`, "last" the newest intact one, 1200 or "step-1200"
                that of this step, and "auto" the best one where the run keeps one, else the newest.
            weights: "raw" for the weights of the step, "ema" for their average, a moving one or SWA's. None: those that
                the run's evaluations use, the average where there is one.

        Returns:
            The module; of a recipe with several models a mapping of names to modules.

        Raises:
            RefusedError: There is no such checkpoint, it is damaged, or the run has code that is not trusted.
        """
        folder, averaged = self._weights(checkpoint, weights)
        from ddpexp.export.trained import saved_model

        return saved_model(self.experiment(), folder, averaged)

    def load_into(
        self,
        module: Any,
        checkpoint: CheckpointName = "auto",
        weights: Weights | None = None,
    ) -> Any:
        """Load the weights of a checkpoint into a module of your own, or into a mapping of names to modules.

        No code of the run is needed. The arguments are those of `model`. Returns the module.

        Raises:
            RefusedError: There is no such checkpoint, it is damaged, or its weights are those of another model.
        """
        folder, averaged = self._weights(checkpoint, weights)
        from ddpexp.export.trained import load_into

        load_into(module, folder, averaged)
        return module

    def export(
        self,
        folder: str | Path,
        checkpoint: CheckpointName = "auto",
        weights: Weights | None = None,
        *,
        adapters: bool = False,
        max_file_bytes: int = 5_000_000_000,
    ) -> list[Path]:
        """Write the weights of a checkpoint into a new folder, as Hugging Face's libraries do.

        That is `model.safetensors` or, beyond `max_file_bytes`, several files and `model.safetensors.index.json`.
        Adapters of `trainer.lora` are merged into the weights. No code of the run is needed.

        Args:
            folder: A folder that does not exist, or is empty. Each of several models gets a folder in it.
            checkpoint: As for `model`.
            weights: As for `model`.
            adapters: Write the adapters alone, with what `trainer.lora.train` names, as the peft library does.
            max_file_bytes: The size of a file at most, but for a tensor that is larger.

        Returns:
            The files.

        Raises:
            RefusedError: There is no such checkpoint, it is damaged, or the folder is not empty.
        """
        source, averaged = self._weights(checkpoint, weights)
        from ddpexp.export.trained import export

        return export(source, Path(folder).expanduser(), averaged, adapters, max_file_bytes)

    def evaluate(
        self,
        overrides: Sequence[str] = (),
        *,
        checkpoint: CheckpointName = "auto",
        split: str | None = None,
        quiet: bool = True,
    ) -> dict[str, float]:
        """Evaluate a checkpoint, as `ddpexp evaluate` does in a process of its own, and return the metrics by name.

        Args:
            overrides: Overrides of the command, such as `["trainer.gpus=2"]`.
            checkpoint: As for `model`.
            split: Names of evaluation sets, such as `"test"` or `"eval,test"`; None for all but `test`.
            quiet: Show nothing of what the command prints.

        Raises:
            RefusedError, RunFailedError, RunInterruptedError: As for `ddpexp.run`.
        """
        options = ["--json"] if split is None else ["--json", f"--split={split}"]
        ended = self._run_verb("evaluate", checkpoint, [*overrides, *options], quiet, captures=True)
        return _numbers(json.loads(ended.out)["metrics"])

    def predict(
        self,
        given: Any = None,
        overrides: Sequence[str] = (),
        *,
        out: str | Path | None = None,
        checkpoint: CheckpointName = "auto",
        split: str | None = None,
        quiet: bool = True,
    ) -> Any:
        """Return what a checkpoint predicts for inputs, or write what it predicts for a data set.

            run.predict("photo.jpg")["class"], [row["price"] for row in run.predict(frame)]
            run.predict(out="predictions.npz", split="test")

        Inputs are predicted for in this process, on the CPU, and read as an evaluation of the run reads its data. With
        `out` the command `ddpexp predict` runs in a process of its own.

        Args:
            given: A picture (a path, or one of PIL, numpy or torch), a text (a str, or the Path of a file), a row (a
                mapping of columns to values, or a Series), an array, or a list of such; a DataFrame, and the path of
                a table or of a folder, for several.
            overrides: Overrides of the command, such as `["data.root=OTHER"]`.
            out: The file: .npz, .npy, .csv or .parquet.
            checkpoint: As for `model`.
            split: The name of an evaluation set, or `"train"`; None for the evaluation set. Of a mixture, with inputs,
                the source as whose they are read.
            quiet: Show nothing of what the command prints.

        Returns:
            A mapping for one input, with its name, what the task predicts, and the name of the class; a list of such
            for several; the file if there is `out`.

        Raises:
            RefusedError: The inputs are of another kind, or as for `model`.
            RunFailedError, RunInterruptedError: As for `ddpexp.run`.
        """
        is_path = isinstance(given, str | Path)
        if given is None and out is None:
            reason = "run.predict needs inputs, or a file to write the predictions for a data set"
            raise RefusedError(reason, suggestion="For example, run.predict('photo.jpg') or run.predict(out='p.csv').")
        if out is None:
            if is_path and Path(given).suffix in FORMATS and not Path(given).exists():
                raise RefusedError(
                    "There is no such file",
                    place=given,
                    suggestion=f"Predictions for a data set are written there by run.predict(out={str(given)!r}).",
                )
            from ddpexp.export.trained import unchanged_random_state
            from ddpexp.predict.local import predictions_for

            run, model = self._stored(overrides), self.model(checkpoint)
            with unchanged_random_state():
                return predictions_for(run.experiment, run.manifest, model, given, split)
        if given is not None and not is_path:
            reason = f"is {type(given).__name__}, and only what a path names is predicted for by the command"
            raise RefusedError(reason, place="given", suggestion="Leave out= out.")
        options = [f"--out={out}", *([f"--input={given}"] if is_path else []), *([f"--split={split}"] if split else [])]
        self._run_verb("predict", checkpoint, [*overrides, *options], quiet)
        return Path(out)

    def transform(self, given: Any, overrides: Sequence[str] = (), *, split: str | None = None) -> Any:
        """Return the model's input for pictures, texts or rows, as an evaluation of the run makes it of its data.

            scores = run.model()(run.transform("photo.jpg"))

        The arguments are those of `predict`.

        Returns:
            The first tensor of a batch of them, on the CPU; the whole batch, where that is a mapping.
            Shapes: (inputs, ...), also for a single one.

        Raises:
            RefusedError: As for `predict`.
        """
        from ddpexp.export.trained import unchanged_random_state
        from ddpexp.predict.local import model_input

        run = self._stored(overrides)
        with unchanged_random_state():
            return model_input(run.experiment, run.manifest, given, split)

    def rerun(
        self,
        overrides: Sequence[str] = (),
        *,
        exact: bool = False,
        cwd: str | Path | None = None,
        quiet: bool = False,
    ) -> Run:
        """Train the experiment of this run again in a new directory, as `ddpexp rerun` does, and return the new run.

            other = run.rerun(["optimizer.lr=0.01", "run.dir=other"])

        Args:
            overrides: What is to change, such as `["optimizer=adamw"]`, and where the new run lies.
            exact: Refuse what can change the numbers, and fail if the weights or metrics are not equal at the end.
            cwd: The current folder of the command, as for `ddpexp.run`.
            quiet: As for `ddpexp.run`.

        Raises:
            RefusedError, RunFailedError, RunInterruptedError: As for `ddpexp.run`.
        """
        from ddpexp.cli.api.start import run

        options = ["--exact"] if exact else []
        return run(["rerun", str(self.path), *self._trusted(), *overrides, *options], cwd=cwd, quiet=quiet)

    def _run_verb(
        self,
        verb: str,
        checkpoint: CheckpointName,
        arguments: Sequence[str],
        quiet: bool,
        captures: bool = False,
    ) -> Ended:
        """Run a verb about a checkpoint in a process of its own, with what this object trusts."""
        from ddpexp.cli.api.child import run_command
        from ddpexp.cli.api.start import check_success

        source = self._checkpoint(checkpoint).folder
        ended = run_command([verb, str(source), *self._trusted(), *arguments], None, quiet, captures)
        check_success(ended, run=self)
        return ended

    def experiment(self) -> Experiment:
        """Return the typed configuration.

        Raises:
            RefusedError: It cannot be read, or names code that `config_dir` and `trust` do not cover.
        """
        return self._stored().experiment

    def _stored(self, overrides: Sequence[str] = ()) -> StoredRun:
        from ddpexp.run.stored_run import read_run

        words = [*self._trusted(), *overrides]
        return read_run(self._files, words, str(self.path), self._restate, is_own=False)

    def _restate(self, run: RunDir, error: UnrestatedError | None = None) -> str | None:
        """Return what to call to trust the run's code and the settings of an error; None if no name can trust them."""
        if error is not None and not error.trusts:
            return None
        return f"ddpexp.open_run({str(self.path)!r}, {self._recorded_trust(error.trusts if error else ())})"

    def _recorded_trust(self, more: Sequence[str] = ()) -> str:
        """Return the arguments of `open_run` that trust what the run's command trusted, and more; for display only."""
        arguments = trust_arguments(self._files)
        folder = config_options(arguments)
        names = next((word.partition("=")[2] for word in arguments if word.startswith("run.trust=")), "")
        trusted = [*(name for name in names.strip("[]").split(",") if name), *more]
        return ", ".join(
            [*([f"config_dir={folder[1]!r}"] if folder else []), *([f"trust={trusted!r}"] if trusted else [])]
        )

    def _trusted(self) -> list[str]:
        """Return the arguments of a command that trust what this object does."""
        words = ["--config-dir", self.config_dir] if self.config_dir is not None else []
        return [*words, f"run.trust=[{','.join(self.trust)}]"] if self.trust else words

    def _weights(self, which: CheckpointName, weights: Weights | None) -> tuple[Path, bool]:
        """Return the folder of a checkpoint, and whether to take the average of the weights."""
        if weights not in (None, "raw", "ema"):
            raise RefusedError("is not one of 'raw', 'ema'", key="weights", value=weights)
        checkpoint = self._checkpoint(which)
        if weights == "ema" and not checkpoint.has_average:
            raise RefusedError(
                f"The checkpoint of step {checkpoint.step} in {self.path} holds no average of the weights",
                key="weights",
                value=weights,
                suggestion="Use weights='raw'.",
            )
        return checkpoint.folder, checkpoint.has_average and weights != "raw"

    def _checkpoint(self, which: CheckpointName) -> Checkpoint:
        """Return the checkpoint that is meant.

        Raises:
            RefusedError: there is none.
        """
        return choose(
            self._files.checkpoints,
            parse_which(which, f"checkpoint={which!r}"),
            str(self.path),
            f"checkpoint={which!r}",
            lambda text: warnings.warn(text, stacklevel=6),
        )

    @property
    def _files(self) -> RunDir:
        return RunDir(self.path)


def _numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics with NaN in place of None, which stands for it in JSON."""
    return {name: math.nan if value is None else value for name, value in values.items()}

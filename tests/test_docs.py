"""The command lines in the documents are accepted by the real command's code as they stand.

What is quickly done is run.
"""

from __future__ import annotations

import pkgutil
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from ddpexp.cli import verbs
from ddpexp.cli.completion import SHELLS
from ddpexp.cli.evaluate import evaluation_of
from ddpexp.cli.find import arguments_of as find_arguments_of
from ddpexp.cli.generate import GenerateArguments
from ddpexp.cli.help import explain
from ddpexp.cli.listing import ListArguments
from ddpexp.cli.new import DEFAULT, kinds
from ddpexp.cli.plan import arguments_of
from ddpexp.cli.predict import prediction_of
from ddpexp.cli.prune import PruneArguments
from ddpexp.cli.rerun import run_of
from ddpexp.cli.resume import resumed_run
from ddpexp.cli.running import request_of
from ddpexp.cli.schema import schema_of
from ddpexp.cli.summary import SummaryArguments
from ddpexp.cli.verb import Call
from ddpexp.config.build import build
from ddpexp.config.compose import compose_command
from ddpexp.config.folders import conf_folder, groups
from ddpexp.config.parse import parse
from ddpexp.config.resolve import ResolvedConfig
from ddpexp.config.restated import is_setting
from ddpexp.config.sweeps import JobComposer, Swept
from ddpexp.export.request import check as check_export
from ddpexp.plan.layout import assume
from ddpexp.run.stored_run import find_run, read_run, read_to_rerun
from ddpexp.run.training import Training
from ddpexp.settings.run import SweepSettings
from ddpexp.sweep.arguments import TableArguments
from ddpexp.sweep.folder import SweepDir
from ddpexp.sweep.resume import resumed
from tests.conftest import ROOT, Ddpexp, finish
from tests.examples import DOCUMENTS, EXAMPLES
from tests.write_ways import BEGIN, END, WAYS, traced
from tests.write_ways import text as text_of_ways

SAMPLES = ROOT / "tests/samples"

# What stands for something else, and what it stands for here.
PLACEHOLDERS = {
    "HOST0": "127.0.0.1",
    "ETCD": "127.0.0.1",
    "RUN_DIR...": "mnist",
    "RUN_DIR": "mnist",
    "outputs/second": "mnist",
    "outputs/first": "mnist",
    "/runs/first": "mnist",
    "FOLDER...": "sweep",
    "FOLDER": "sweep",
    "gpt2/model.safetensors": "weights.safetensors",
    "ckpt.pt": "weights.safetensors",
    "recipe=...": "recipe=mnist",
    "sweep.slots=N": "sweep.slots=2",
}
# Words that stand in a text as something to be completed, or as no words of ddpexp's.
NOT_TYPED = {
    "python -m ddpexp recipe=mine trainer.gpus=2": "run by cli/test_new.py",
    "ddpexp new mine --like ...": "any project",
    **dict.fromkeys(
        (
            "trainer=ddp",
            "trainer=gpu",
            "trainer=cpu",
            "callbacks=model_checkpoint",
            "callbacks=rich_progress_bar",
            "logger=many_loggers",
            "trainer.devices=2 trainer.max_epochs=3",
        ),
        "of lightning-hydra-template: test_migrate.py",
    ),
    "launcher=": "a part of a word",
    "launcher=...": "any launcher",
    "strategy=": "a part of a word",
    "strategy=ordered": "run by strategy/test_outside.py",
    "launcher.key=...": "any key",
    "run.trust=[...]": "any prefix",
    "launcher.rdzv_endpoint=..., which keeps the list of the machines, does not answer any more": "a message",
    "key=$TOKEN": "any key",
    "data.path=FILE": "a key of examples/nextbyte",
    "data.token=$TOKEN": "a user's own key",
    "scheduler._target_=mine.Stable": "a user's own class",
    "model.pretrained=true": "a key of others' models",
    "model.pretrained=false": "a key of others' models",
    "model.weights=DEFAULT": "a key of others' models",
    "+callbacks.mine._target_=mine.Mine": "a user's own class",
    "model=deep": "a user's own model",
    "ddpexp resume RUN_DIR [key=value ...]": "a heading",
    "ddpexp rerun RUN_DIR [key=value ...]": "a heading",
    "ddpexp diff RUN_DIR RUN_DIR...": "a heading",
    "python -m ddpexp -m ...": "any sweep",
    "ddpexp member ...": "for launchers",
    "ddpexp member": "for launchers",
    "exec python -m ddpexp ...": "any command",
    "ssh HOST 'python -m ddpexp ... &'": "any command",
    "unshare -rn sh -c 'ip link set lo up && exec python -m ddpexp ...'": "any command",
    "python -m ddpexp": "any command",
    "python -P -m ddpexp": "any command",
    "ddpexp": "any command",
    "python -m ddpexp recipe=mnist trainer.gpus=2 launcher=polite launcher.niceness=5": "run by launch/test_plugins.py",
    "python -m ddpexp recipe=sides 'logger=[tensorboard,rows]' launcher=shy scheduler=stable trainer.gpus=2": (
        "run by test_packages.py"
    ),
}
# Values that are refused without others, which the text names beside them.
ONLY_WITH = {
    "trainer.reduction=exact": ["trainer.micro_batch_size=16"],
    "trainer.reduction=exact trainer.deterministic=true trainer.log_every=1": ["trainer.micro_batch_size=16"],
    "trainer.backend=mpi": ["launcher=mpi"],
    "callbacks.early_stopping.patience=5": ["callbacks=early_stopping"],
    "logger.wandb.project=digits": ["logger=wandb"],
    "logger.wandb.mode=offline": ["logger=wandb"],
    "logger.wandb.checkpoint=best": ["logger=wandb", "trainer.keep_best=min:eval/loss"],
    "logger.mlflow.checkpoint=best": ["logger=mlflow", "trainer.keep_best=min:eval/loss"],
    "data.shuffle=blocks": ["data=tar_shards", "data.path=shards/*.tar"],
    "strategy.reshard_after_forward=false": ["strategy=fsdp"],
    "model.positions=rotary": ["recipe=gpt"],
    "model.positions=learned": ["recipe=gpt"],
    "model.norm=rmsnorm": ["recipe=gpt"],
    "model.mlp=swiglu": ["recipe=gpt"],
    "model.tied=false": ["recipe=gpt"],
    "model.bias=true": ["recipe=gpt"],
    "model.dropout=0.1": ["recipe=gpt"],
    "recipe=distill": ["run.init_from=mnist"],
    "data.size_from_epoch=[[0,128],[6,160]]": ["data=image_folder"],
    "model=torchvision": ["run.trust=[torchvision]"],
    "model=timm": ["run.trust=[timm]"],
    "model.head=NAME": ["recipe=finetune"],
    "task.noise=0.5": ["recipe=autoencoder"],
    "model.variational=true": ["recipe=autoencoder"],
    "model.frequencies=16": ["recipe=tabular"],
    "model.latent=16": ["recipe=autoencoder"],
    "model.whiten=null": ["recipe=cifar10"],
    "task.views=shift": ["recipe=cifar10"],
    "data.tokenizer=char": ["data=text"],
    "data.documents=file": ["data=text"],
    "data.channels=1": ["data=image_folder"],
    "data.augment_on=device": ["data=image_folder"],
    "data.broken=skip": ["data=image_folder"],
    "data.nested=true": ["data=image_folder"],
    "data.mixup=0.2": ["data=image_folder"],
    "data.cutmix=1": ["data=image_folder"],
    "data.documents=line": ["data=text"],
    "data.classes=[3,5]": ["data=arrays"],
    "data.dtype=float64": ["data=arrays"],
    "data.dtype=int64": ["data=arrays"],
    "data.standardize=true": ["data=arrays"],
    "data.eval_path=FILE": ["data=arrays"],
    "data.target_type=class": ["data=arrays"],
    "data.inputs=x_train data.targets=y_train data.eval_inputs=x_test data.eval_targets=y_test": ["data=arrays"],
    "trainer.average_batch_norm=100": ["trainer.ema_decay=0.999"],
    "trainer.nodes=1:4": ["launcher=elastic"],
    "run.init_weights=ema": ["run.init_from=mnist"],
    "sweep.early_stop=median": ["sweep.objective=eval/loss"],
    "sweep.early_stop=halving sweep.early_stop_after=500 sweep.early_stop_factor=3": ["sweep.objective=eval/loss"],
}
# Other programs' lines in blocks.
OTHERS = re.compile(
    r"pip install |python -m ddpexp\.recipes\.segment "
    r"|python -m (venv|benchmarks|tests\.(mutate|matrix|requirements))\b|ruff format |tensorboard --logdir "
    r"|pytest -|wandb login|export |python examples/(photos/draw|table/table)\.py "
)


@dataclass(frozen=True)
class Typed:
    """A line of a code block, or a piece of inline code."""

    document: str
    text: str
    is_line: bool  # of a block

    def __str__(self) -> str:
        return f"{self.document}: {self.text}"


def written(document: Path) -> Iterator[Typed]:
    """Yield every line of the indented blocks, continued lines joined, and every piece of inline code."""
    text = re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL)
    name = str(document.relative_to(ROOT))
    for block in re.findall(r"(?:^    .*\n)+", text, flags=re.MULTILINE):
        for line in re.sub(r"\\\n\s*", "", block).splitlines():
            yield Typed(name, line.strip(), True)
    prose = re.sub(r"^    .*\n", "", text, flags=re.MULTILINE)
    for piece in re.findall(r"(?<!`)`([^`]+)`(?!`)", prose):
        yield Typed(name, " ".join(piece.split()), False)


def command_of(text: str) -> list[str] | None:
    """Return the words for ddpexp in a line that has its command; None where there is none."""
    try:
        words = shlex.split(text, comments=True)
    except ValueError:
        return None  # prose
    place = max((number for number, word in enumerate(words) if word == "ddpexp"), default=None)
    return None if place is None or "->" in words else words[place + 1 :]


SECTIONS = {*groups([conf_folder()]), "run", "sweep", "task", "hydra"}


def is_overrides(text: str) -> bool:
    """Return whether a piece of inline code is nothing but overrides."""
    if "=" not in text:
        return False
    try:
        words = shlex.split(text)
    except ValueError:
        return False
    known = [re.match(r"-m$|\+{0,2}([a-z]+)([./]\w+)*=", word) for word in words]
    return any("=" in word for word in words) and all(
        one is not None and (one[0] == "-m" or one[1] in SECTIONS) for one in known
    )


ALL = list({typed.text: typed for document in reversed(DOCUMENTS) for typed in written(document)}.values())
COMMAND_LINES = [typed for typed in ALL if command_of(typed.text) is not None and typed.text not in NOT_TYPED]
OVERRIDES = [
    typed
    for typed in ALL
    if command_of(typed.text) is None and is_overrides(typed.text) and typed.text not in NOT_TYPED
]


@pytest.fixture(scope="module")
def environ(warm_environ: dict[str, str]) -> dict[str, str]:
    """What is written is tested, not how processes start: fork servers are forks."""
    return warm_environ


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run, a sweep and weights."""
    folder = tmp_path_factory.mktemp("kept")
    for name in ("mnist", "sweep"):
        shutil.copytree(SAMPLES / name, folder / name)
    (folder / "sweep/sweep.yaml").write_text("words: [recipe=mnist, 'trainer.seed=1,2']\noptions: []\n")
    (folder / "examples").symlink_to(EXAMPLES)
    (folder / "photo.jpg").touch()
    shutil.copy(next((folder / "mnist/checkpoints").glob("step-*/model.safetensors")), folder / "weights.safetensors")
    return folder


def filled(text: str) -> str:
    for name, value in PLACEHOLDERS.items():
        text = text.replace(name, value)
    return text


def accept(words: Sequence[str]) -> None:
    """Go through what a command does with its words before it looks at the machine, its environment and the data."""
    verb = verbs.BY_NAME.get(words[0]) if words else None
    if verb is None:
        accept_run(words)
        return
    call = verb.parse(words[1:], ["ddpexp", *words])
    if verb.operands == "overrides":
        accept_run(find_arguments_of(call).run if verb.name == "find" else call.operands)
        if verb.name == "plan":
            arguments_of(call)
        if verb.name == "summary":
            call.typed(SummaryArguments(call.operands))
        return
    if verb.name == "resume" and SweepDir(Path(words[1])).is_sweep():
        accept_sweep(resumed(words[1:], ["ddpexp", *words]))
        return
    accepts: dict[str, Callable[[Call], object]] = {
        "resume": resumed_run,
        "rerun": rerun_of,
        "diff": lambda call: [
            find_run(operand, "diff") for operand in call.operands if not SweepDir(Path(operand)).is_sweep()
        ],
        "evaluate": evaluation_of,
        "generate": lambda call: call.typed(GenerateArguments()),
        "predict": prediction_of,
        "export": lambda call: check_export(Path(call.options["--out"]), call.options["--format"]),
        "table": lambda call: call.typed(TableArguments.of(call.operands)),
        "list": lambda call: ListArguments.of(call),
        "tag": lambda call: find_run(call.operands[0], "tag"),
        "prune": PruneArguments.of,
        "report": lambda call: TableArguments.of(call.operands),
        **dict.fromkeys(("profile", "stacks", "save", "stop"), request_of),
        "status": lambda call: TableArguments.of(call.operands),
        "sync": lambda call: read_run(find_run(call.source()[0], "sync"), call.source()[1], "sync", call.restate),
        "help": lambda call: explain(call.operands, by_name=True),
        "schema": lambda call: schema_of(call.operands),
        "completion": lambda call: SHELLS.index(call.operands[0]),
        "new": lambda call: kinds().index(call.options.get("--like", DEFAULT)),
    }
    if verb.name == "trust":
        assert all(re.fullmatch(r"[\w.]+", word) or is_setting(word) for word in call.operands)
    else:
        accepts[verb.name](call)


def rerun_of(call: Call) -> None:
    """Compose what is trained again: a run that is not finished is no example of --exact."""
    source, arguments = call.source()
    run = find_run(run_of(source, "--best" in call.options), "rerun")
    if "--best" not in call.options:  # the sweep has code of its own
        read_to_rerun(run, arguments, "rerun", call.restate, is_exact=False)


def accept_run(words: Sequence[str]) -> None:
    made = compose_command(list(words))
    if isinstance(made, Swept):
        accept_sweep(made)
    elif made is not None:
        accept_composed(made)
    else:
        assert {"--help", "--version"} & set(words)


def accept_sweep(swept: Swept) -> None:
    """Compose a sweep's first job."""
    build(SweepSettings, swept.settings, "sweep")
    first = [
        re.sub(r"=(?:range|interval|choice)\(([^,)]+).*|=([^,\[]+),.*", r"=\1\2", word) for word in swept.overrides
    ]
    words = [word for word in first if not word.startswith(("sweep.", "hydra"))]
    accept_composed(JobComposer(swept).compose(words, Path("job")))


def accept_composed(made: ResolvedConfig) -> None:
    experiment = parse(made.values)
    assume(Training(experiment, made.text, made.overrides, ["ddpexp"]).job, experiment.launcher)


@pytest.mark.parametrize("typed", COMMAND_LINES, ids=str)
def test_every_command_is_accepted_as_it_stands(typed: Typed, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(kept)
    monkeypatch.setenv("SLACK_WEBHOOK", "https://hooks.slack.com/services/a/b/c")
    words = command_of(filled(typed.text))
    assert words is not None
    if len(words) == 1 and words[0] in verbs.NAMES:
        return  # its name
    accept(words)


@pytest.mark.parametrize("typed", OVERRIDES, ids=str)
def test_every_override_is_accepted_as_it_stands(typed: Typed, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(kept)
    monkeypatch.setenv("SLACK_WEBHOOK", "https://hooks.slack.com/services/a/b/c")
    words = [*shlex.split(filled(typed.text)), *ONLY_WITH.get(typed.text, [])]
    if any(re.match(r"sweep\.|hydra|[^=]+=([^\[]*,|range\()", word) for word in words):
        words.append("-m")
    if not any(word.startswith("launcher=") for word in words):
        words += launcher_with(words)
    made = compose_command(words)
    if not isinstance(made, Swept):
        assert made is not None
        parse(made.values)


def launcher_with(words: Sequence[str]) -> list[str]:
    """Return the override that chooses the launcher whose keys are set."""
    keys = {word.partition("=")[0].removeprefix("launcher.") for word in words if word.startswith("launcher.")}
    for path in sorted((conf_folder() / "launcher").glob("*.yaml")):
        if keys and keys <= yaml.safe_load(path.read_text()).keys():
            return [f"launcher={path.stem}"]
    return []


def test_no_override_is_overlooked() -> None:
    assert len(COMMAND_LINES) > 40
    assert len(OVERRIDES) > 50
    texts = {typed.text for typed in ALL}
    assert {*NOT_TYPED, *ONLY_WITH} - texts == set()
    assert not {name for name in PLACEHOLDERS if not any(name in text for text in texts)}


def test_every_line_of_a_block_that_is_a_command_is_known() -> None:
    """A line that begins like a program's name is ddpexp's or one of the others that are listed."""
    programs = re.compile(r"(python|ddpexp|torchrun|srun|salloc|sbatch|mpirun|pip|ruff|pytest|tensorboard)\s")
    lines = [typed for typed in ALL if typed.is_line and programs.match(typed.text) and command_of(typed.text) is None]
    assert [str(typed) for typed in lines if not OTHERS.match(typed.text) and typed.text not in NOT_TYPED] == []


def test_torchruns_own_options_are_recognized() -> None:
    from torch.distributed.run import get_args_parser

    lines = [filled(typed.text) for typed in COMMAND_LINES if re.match(r"torchrun (?!\.\.\.)", typed.text)]
    assert len(lines) >= 4
    for line in lines:
        found = get_args_parser().parse_args(shlex.split(line)[1:])
        assert (found.module, found.training_script) == (True, "ddpexp")


@pytest.mark.parametrize(
    "line",
    [
        "python -m ddpexp --help",
        "python -m ddpexp status FOLDER",
        "python -m ddpexp evaluate RUN_DIR",
        "ddpexp evaluate weights.safetensors recipe=mnist",
        "python -m ddpexp resume RUN_DIR",
    ],
)
def test_what_is_quickly_done_is_really_run(ddpexp: Ddpexp, kept: Path, line: str) -> None:
    assert line in {typed.text for typed in ALL}
    words = " model=linear data.source=embedded data.embedded_test=100" if "weights" in line else ""
    done = finish(ddpexp.paste(re.sub("^ddpexp ", "python -m ddpexp ", filled(line)) + words, kept), kept / "mnist")
    assert done.code == 0, done.err


def _functions_of_the_ways() -> list[str]:
    """Return the functions in the drawings of CONTRIBUTING.md."""
    text = (ROOT / "CONTRIBUTING.md").read_text().partition(BEGIN)[2].partition(END)[0]
    return re.findall(r"^ {4,}([\w.]+)  ", text, re.M)


def _names_in_the_sentences() -> list[str]:
    """Return the modules and functions that CONTRIBUTING.md names in the sentences on the same ways."""
    text = (ROOT / "CONTRIBUTING.md").read_text().partition(END)[2].partition("## Code tour")[0]
    return [name for name in re.findall(r"`(\w+\.[\w.]+)`", text) if (ROOT / "ddpexp" / name.split(".")[0]).is_dir()]


@pytest.mark.parametrize("name", sorted({*_functions_of_the_ways(), *_names_in_the_sentences()}))
def test_every_name_on_the_ways_exists(name: str) -> None:
    assert pkgutil.resolve_name(f"ddpexp.{name}")


def test_the_drawings_have_every_function_that_is_traced() -> None:
    assert sorted(_functions_of_the_ways()) == sorted(name for way in WAYS.values() for name in way)


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info < (3, 11), reason="code objects have no qualified names before Python 3.11")
def test_the_drawings_are_current(tmp_path: Path) -> None:
    assert text_of_ways(traced(tmp_path)) in (ROOT / "CONTRIBUTING.md").read_text()


@pytest.mark.parametrize("name", re.findall(r"`((?:ddpexp|conf|tests|docs)/[\w./]+)`", DOCUMENTS[1].read_text()))
def test_every_file_that_contributing_names_exists(name: str) -> None:
    assert (ROOT / name).exists()

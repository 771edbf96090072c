"""The declarations of keys: the ranges, and that they agree with the defaults and comments in conf."""

from __future__ import annotations

import dataclasses
import importlib
import math
import typing
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import pytest

from ddpexp.config.build import build, convert
from ddpexp.config.comments import comments_of
from ddpexp.config.declared import default_of
from ddpexp.config.folders import conf_folder
from ddpexp.config.keys import MISSING
from ddpexp.config.registry import keys_of, path_of
from ddpexp.config.strategies import options_of
from ddpexp.launch.launchers.elastic import Elastic
from ddpexp.launch.launchers.slurm import Slurm
from ddpexp.settings.data import CommonData
from ddpexp.settings.key import UNCHANGED, Key, annotations_of, declaration, declarations
from ddpexp.settings.parameters import FreezeUntil, LayerDecay, LoRA, ParamGroup
from ddpexp.settings.run import Predict, Recipe, RunSettings, SweepSettings
from ddpexp.settings.trainer import Timeout, Trainer
from ddpexp.system.yaml_text import load_yaml
from ddpexp.train import plateau, schedule
from ddpexp.train.callbacks import early_stopping, histograms, lr_monitor
from tests import write_keys
from tests.refusals import refused


def called(group: str, kind: str) -> Any:
    """The class or function of a part of ours."""
    module, _, name = path_of(group, kind).rpartition(".")
    return getattr(importlib.import_module(module), name)


IN_CONF = {"trainer": Trainer, "run": RunSettings, "data": CommonData, "predict": Predict, "sweep": SweepSettings}
STRATEGIES = {f"strategy/{kind}": options_of(kind) for kind in keys_of("strategy")}
SECTIONS: dict[str, Any] = {
    **IN_CONF,
    **STRATEGIES,
    "recipe": Recipe,
    "trainer.lora": LoRA,
    "trainer.layer_decay": LayerDecay,
    "trainer.freeze_until": FreezeUntil,
    "trainer.param_groups[0]": ParamGroup,
    "launcher/slurm": Slurm,
    "launcher/elastic": Elastic,
    "callbacks.early_stopping": early_stopping.EarlyStopping,
    "callbacks.histograms": histograms.Histograms,
    "callbacks.lr_monitor": lr_monitor.LRMonitor,
    "scheduler/plateau": plateau.Plateau,
    **{
        f"scheduler/{kind.__name__}": kind
        for kind in (schedule.Cosine, schedule.Exponential, schedule.MultiStep, schedule.OneCycle, schedule.Polynomial,
            schedule.WSD)
    },
}  # fmt: skip
PREPARED = {  # the keys of kinds of data are the arguments of functions
    f"data/{kind}.{name}": declaration(hint)
    for kind in keys_of("data.prepare")
    for name, hint in annotations_of(called("data.prepare", kind)).items()
}
RANGED = [
    *(
        pytest.param(key, hint, id=name)
        for where, section in SECTIONS.items()
        for name, key, hint in declarations(section, where)
        if key.is_range
    ),
    *(pytest.param(key, hint, id=name) for name, (key, hint) in PREPARED.items() if key.is_range),
]


def limits(key: Key, whole: bool) -> Iterator[tuple[float, bool]]:
    """Yield numbers at the limits of a range, each with whether it is inside."""
    step = 1 if whole else 1e-9
    if key.above is not None:
        yield from ((key.above, False), (key.above + step, True))
    if key.at_least is not None:
        yield from ((key.at_least, True), (key.at_least - step, False))
    if key.below is not None:
        yield from ((key.below, False), (key.below - step if key.below < math.inf else 1e300, True))
    if key.at_most is not None:
        yield from ((key.at_most, True), (key.at_most + step, False))
    if not whole:
        yield math.nan, False


@pytest.mark.parametrize(("key", "hint"), RANGED)
def test_a_number_outside_its_range_is_refused_with_the_key_and_one_at_its_edge_is_not(key: Key, hint: Any) -> None:
    whole = float not in (hint, *typing.get_args(hint))
    annotated = Annotated[hint, key]
    for number, inside in limits(key, whole):
        if inside:
            assert convert(number, annotated, "a.b") == number
        else:
            with refused("a.b"):
                convert(number, annotated, "a.b")
    for other in typing.get_args(hint):  # auto, epoch, null
        for word in typing.get_args(other) if typing.get_origin(other) is Literal else ():
            assert convert(word, annotated, "a.b") == word
        if other is type(None):
            assert convert(None, annotated, "a.b") is None


@pytest.mark.parametrize(
    ("hint", "key", "usage"),
    [
        (int, Key(at_least=1), "a whole number from 1"),
        (float | None, Key(above=0), "a number above 0 or null"),
        (float, Key(above=0, below=1), "a number between 0 and 1"),
        (float, Key(above=0, below=math.inf), "a number above 0"),
        (float, Key(at_least=0, below=1), "a number from 0 to below 1"),
        (int, Key(at_least=0, at_most=9), "a whole number from 0 to 9"),
        (int | float, Key(above=0), "a number above 0"),
        (Literal["epoch"] | int, Key(at_least=0), "epoch or a whole number from 0"),
        (int, Key(at_least=2, use="2 or more stages"), "2 or more stages"),
    ],
)
def test_the_usage_of_a_key_is_what_may_be_typed(hint: Any, key: Key, usage: str) -> None:
    assert key.usage(hint) == usage


@pytest.mark.parametrize("section", IN_CONF)
def test_conf_has_a_default_and_a_comment_for_every_key_that_is_declared_and_for_no_other(section: str) -> None:
    file = "trainer/default.yaml" if section == "trainer" else "config.yaml"
    said = comments_of((conf_folder() / file).read_text()).keys
    prefix = "" if section == "trainer" else f"{section}."
    names = {name: hint for name, _, hint in declarations(IN_CONF[section], section)}
    for name, hint in names.items():
        default = default_of(name)
        assert default is not MISSING, name
        assert said.get(prefix + name.partition(".")[2]), f"{name} has no comment"
        convert(default, hint, name)
    inner = default_of(section)
    written = {f"{section}.{key}" for key in inner} | {
        f"trainer.timeout.{key}" for key in default_of("trainer.timeout")
    }
    assert written - {name for name in written if name.startswith("trainer.timeout.") and section != "trainer"} == set(
        names
    )


@pytest.mark.parametrize("section", IN_CONF)
def test_a_key_that_a_configuration_lacks_has_the_default_of_conf(section: str) -> None:
    built: Any = build(IN_CONF[section], {}, section)
    for one in dataclasses.fields(IN_CONF[section]):
        assert getattr(built, one.name) == convert(
            default_of(f"{section}.{one.name}"), typing.get_type_hints(IN_CONF[section])[one.name], "key"
        )


def test_the_defaults_of_timeouts_are_those_of_conf() -> None:
    assert dataclasses.asdict(Timeout()) == default_of("trainer.timeout")


def test_the_page_of_keys_is_current() -> None:
    assert write_keys.FILE.read_text() == write_keys.text(), "run python -m tests.write_keys"


@pytest.mark.parametrize("group", ["strategy", "launcher"])
def test_defaults_that_python_code_has_too_are_those_of_conf(group: str) -> None:
    """Python code builds these parts without a configuration, so their fields have defaults."""
    for kind in keys_of(group):
        part = called(group, kind)
        values = load_yaml((conf_folder() / group / f"{kind}.yaml").read_text())
        for one in dataclasses.fields(part):
            if one.default is not dataclasses.MISSING:
                assert (kind, one.name, one.default) == (kind, one.name, _frozen(values[one.name]))


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def test_every_word_of_another_framework_belongs_to_one_key() -> None:
    words: dict[str, str] = {}
    sections: dict[str, Any] = {**IN_CONF, **STRATEGIES}
    for where, section in sections.items():
        for name, key, _ in declarations(section, where.partition("/")[0]):
            for word in key.also.split():
                assert words.setdefault(word, name) == name
    assert len(words) > 60


def test_a_key_with_a_remark_has_words_of_other_frameworks() -> None:
    for where, section in SECTIONS.items():
        for name, key, _ in declarations(section, where):
            assert key.also or not key.remark, name


def test_the_value_of_a_key_in_a_short_run_is_one_that_it_takes() -> None:
    for where, section in SECTIONS.items():
        for name, key, hint in declarations(section, where):
            if key.short_run is not UNCHANGED:
                convert(key.short_run, Annotated[hint, key], name)

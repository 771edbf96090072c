"""What a run directory cannot settle by itself: every key of every option is tried with what would reach outside."""

from __future__ import annotations

import copy
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from ddpexp.compat.omegaconf import register_resolver
from ddpexp.config import trusted
from ddpexp.config.folders import LISTED, conf_folder, groups, options
from ddpexp.config.parse import parse
from ddpexp.config.restated import Grants, UnrestatedError, _is_foreign, is_setting, records_setting, to_restate
from ddpexp.config.stored import override_file
from ddpexp.errors import RefusedError
from ddpexp.system.yaml_text import load_yaml
from tests.refusals import refused

NAME, SECRET = "CANARY_TOKEN", "canary-4711-of-the-reader"
RESUME, EVALUATE = ("launcher", "logger"), ()
# Each of them in every key: what would connect, what reads the environment, and both.
PLANTS = [
    f"http://127.0.0.1:9/${{oc.env:{NAME}}}/x.tar",
    f"${{oc.env:{NAME}}}",
    "s3://bucket/x",
    "simplecache::https://127.0.0.1:9/x",
    "evil.example.org:8080",
    "127.0.0.1",
    f"${{oc.env:{NAME},x}}",
    f"${{oc.decode:'${{oc.env:{NAME}}}'}}",
    f"${{stolen:{NAME}}}",
]


class Events:
    """What this process does to the outside, while it is watched: Python's audit events."""

    watched = False
    seen: list[str] = []  # noqa: RUF012

    @classmethod
    def hook(cls, event: str, arguments: tuple[Any, ...]) -> None:
        if not cls.watched:
            return
        flags = arguments[2] if event == "open" and isinstance(arguments[2], int) else 0
        writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        starts = event in ("os.mkdir", "os.rename", "os.remove", "os.symlink", "os.link", "os.system", "os.fork")
        if writes or starts or event.startswith(("socket.", "subprocess.", "os.exec", "os.spawn", "os.posix_spawn")):
            cls.seen.append(f"{event} {arguments}")


sys.addaudithook(Events.hook)


class Environ(dict[str, str]):
    """The environment, which notes who asks for the secret."""

    asked = 0

    def get(self, key: str, default: Any = None) -> Any:
        self.asked += key == NAME
        return super().get(key, default)

    def __getitem__(self, key: str) -> str:
        self.asked += key == NAME
        return super().__getitem__(key)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))


def trees(base: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a configuration with each option of each group: a recipe's sections, or the option in the base."""
    folder = conf_folder()
    for group in groups([folder]):
        for name in options(group, [folder]):
            option = load_yaml((folder / group / f"{name}.yaml").read_text()) or {}
            option.pop("defaults", None)
            tree = copy.deepcopy(dict(base))
            if group == "recipe":
                tree = {key: {**tree.get(key, {}), **value} for key, value in option.items() if isinstance(value, dict)}
                tree = {**copy.deepcopy(dict(base)), **tree}
            elif group in LISTED:
                tree[group] = {**tree[group], **option} if group == "logger" else option
            elif group == "data":
                tree["data"] = {**{key: base["data"][key] for key in base["data"] if key not in MNIST}, **option}
            else:
                tree[group] = option
            yield f"{group}={name}", load_yaml(dumped(tree).replace("???", "x"))


MNIST = ("_target_", "prepare", "root", "source", "embedded_train", "embedded_test")


def dumped(tree: dict[str, Any]) -> str:
    text: str = yaml.dump(tree, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper), sort_keys=False)
    return text


def leaves(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from leaves(inner, (*place, key))
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for index, inner in enumerate(value):
            yield from leaves(inner, (*place, index))
    else:
        yield place


def planted(tree: dict[str, Any], place: tuple[Any, ...], value: Any) -> dict[str, Any]:
    tree = copy.deepcopy(tree)
    node = tree
    for key in place[:-1]:
        node = node[key]
    node[place[-1]] = value
    return tree


def attempt(config: Path, tree: dict[str, Any], keeps: tuple[str, ...], *argv: str) -> tuple[RefusedError | None, str]:
    """Read a stored configuration as a command does; return the refusal, and all that was learned."""
    config.write_text(dumped(tree))
    Events.seen.clear()
    Events.watched = True
    try:
        values, text = override_file(config, list(argv), keeps)
        return None, f"{values} {text}"
    except RefusedError as error:
        return error, str(error)
    finally:
        Events.watched = False


def keys_of(base: Mapping[str, Any]) -> list[tuple[str, dict[str, Any], tuple[Any, ...]]]:
    """Return each key once, with an option that has it; the parts of an option by its kind."""
    found: dict[tuple[Any, ...], tuple[str, dict[str, Any], tuple[Any, ...]]] = {}
    for name, tree in trees(base):
        for place in leaves(tree):
            section = tree.get(place[0])
            kind = section.get("_target_", section.get("kind")) if isinstance(section, dict) else None
            found.setdefault((kind, *place), (name, tree, place))
    return list(found.values())


def check_nothing_leaves(
    base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plants: list[str], every: int
) -> int:
    """Plant in a key of so many, and check that both ways to read a run directory refuse it, or do not use that key.

    All plants if every key is tried, else one of them.
    """
    register_resolver("stolen", lambda name: os.environ[name], replace=True)  # as programs and notebooks have them
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # of what is imported for the first time
    environ = Environ(os.environ) | {NAME: SECRET}
    monkeypatch.setattr(os, "environ", environ := Environ(environ))
    attempts = 0
    for number, (name, tree, place) in enumerate(keys_of(base)[::every]):
        for plant in plants if every == 1 else [plants[number % len(plants)]]:
            theirs = planted(tree, place, plant)
            for keeps in (RESUME, EVALUATE) if every == 1 or place[0] in RESUME else (RESUME,):
                error, learned = attempt(tmp_path / "config.yaml", theirs, keeps)
                where = f"{name}: {place} = {plant} for {keeps}: {error}"
                attempts += 1
                assert Events.seen == [], where
                assert SECRET not in learned, where
                assert environ.asked == 0, where
                unused = place[0] in RESUME and keeps == EVALUATE
                if plant in PLANTS[4:6]:  # ddpexp's and torch's own parts connect to no value that is written so
                    unused = unused or not _is_foreign(theirs, place)
                unused = unused or place[:2] in [("run", "trust"), ("run", "code"), ("run", "allow_changes")]
                unused = unused or (place == ("run", "dir") and "${" in plant)  # the run is where its file is
                assert unused or error is not None, where
    OmegaConf.clear_resolver("stolen")
    return attempts


def test_what_is_planted_in_a_key_of_an_option_counts_only_when_it_is_restated(
    base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused_suggestions: list[str]
) -> None:
    assert check_nothing_leaves(base, tmp_path, monkeypatch, PLANTS, every=5) > 100
    refused_suggestions.clear()  # keys of other types hold an address too, and are suggested as they are


@pytest.mark.slow
def test_everything_that_reaches_outside_is_refused_in_every_key(
    base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused_suggestions: list[str]
) -> None:
    assert check_nothing_leaves(base, tmp_path, monkeypatch, PLANTS, every=1) > 5000
    refused_suggestions.clear()


TRUSTED = f"run.trust=[oc.env:{NAME},https://data.example.org,hub:stanford/imdb,tracker:8080]"


def read(base: dict[str, Any], tmp_path: Path, place: tuple[Any, ...], value: Any, *argv: str) -> Mapping[str, Any]:
    """Return the values of a stored configuration with one value planted, as a resume reads it."""
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(planted(base, place, value)))
    return override_file(config, list(argv), RESUME)[0]


def test_a_range_is_a_text_as_where_hydra_reads_it(base: dict[str, Any], tmp_path: Path) -> None:
    trainer = read(base, tmp_path, ("trainer", "seed"), 1, "trainer.nodes=1:4", "trainer.profile=5:15")["trainer"]
    assert (trainer["nodes"], trainer["profile"]) == ("1:4", "5:15")


@pytest.fixture
def tar(base: dict[str, Any]) -> dict[str, Any]:
    option = load_yaml((conf_folder() / "data/tar_shards.yaml").read_text())
    return {**base, "data": {**base["data"], **option, "path": "x.tar"}}


@pytest.mark.parametrize(
    ("value", "restated"),
    [
        ("https://data.example.org/a/x.tar", "data.path=https://data.example.org/a/x.tar"),
        ("zip://x::https://data.example.org/a.zip", "data.path=zip://x::https://data.example.org/a.zip"),
        (f"https://data.example.org/${{oc.env:{NAME}}}", f"data.path=https://data.example.org/${{oc.env:{NAME}}}"),
        (["x.tar", "https://data.example.org/x.tar"], 'data.path=["x.tar", "https://data.example.org/x.tar"]'),
    ],
)
def test_a_restated_setting_counts(
    tar: dict[str, Any], tmp_path: Path, value: Any, restated: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NAME, SECRET)
    with pytest.raises(UnrestatedError) as caught:
        read(tar, tmp_path, ("data", "path"), value)
    assert caught.value.overrides == [restated]
    with pytest.raises(UnrestatedError):
        read(tar, tmp_path, ("data", "path"), value, "data.eval_path=x")
    assert read(tar, tmp_path, ("data", "path"), value, restated)["data"]["path"] is not None
    assert [setting.override for setting in to_restate(planted(tar, ("data", "path"), value))] == [restated]


@pytest.mark.parametrize(
    ("value", "counts"),
    [
        ("https://data.example.org/a/x.tar", True),
        ("https://data.example.org", True),
        (f"https://data.example.org/${{oc.env:{NAME}}}", True),
        ("https://data.example.org.evil.example/x.tar", False),
        ("https://data.example.org@evil.example/x.tar", False),
        ("http://data.example.org/x.tar", False),
        ("zip://x::https://data.example.org/x.zip", False),  # two addresses, of which one is trusted
        (f"https://evil.example/${{oc.env:{NAME}}}", False),
        ("${oc.env:HOME}", False),
        (f"${{oc.env:{NAME},https://evil.example}}", False),
        ("https://data.example.org/../evil/x.tar", False),
        ('https://data.example.org"@evil.example/x.tar', False),
        ("https://data.example.org @evil.example/x.tar", False),
        ("https://data.example.org\\@evil.example/x.tar", False),
        ("https://data.example.org%2f@evil.example/x.tar", False),
        ("s{3..3}://evil-bucket/x.tar", False),
    ],
)
def test_a_trusted_setting_counts_and_what_is_beside_it_does_not(
    tar: dict[str, Any],
    tmp_path: Path,
    value: str,
    counts: bool,
    monkeypatch: pytest.MonkeyPatch,
    refused_suggestions: list[str],
) -> None:
    monkeypatch.setenv(NAME, SECRET)
    for argv in ([TRUSTED], []):
        if not argv:
            names = TRUSTED.removeprefix("run.trust=[").removesuffix("]").split(",")
            trusted.write(trusted.Trusted(name, "", "", "") for name in names)
        if counts:
            assert read(tar, tmp_path, ("data", "path"), value, *argv)
        else:
            with pytest.raises(UnrestatedError):
                read(tar, tmp_path, ("data", "path"), value, *argv)
            refused_suggestions.clear()  # of a stored run: overrides are YAML there, not read by Hydra's grammar


def test_a_name_that_would_trust_every_address_trusts_none(tar: dict[str, Any], tmp_path: Path) -> None:
    for names in ("https:", "https:/", "https://", "https:///", "hub:", "a, https://"):
        with refused("run.trust: an address"):
            read(tar, tmp_path, ("data", "path"), "https://data.example.org/x.tar", f"run.trust=[{names}]")
    with pytest.raises(UnrestatedError):
        read(tar, tmp_path, ("data", "path"), "https://data.example.org/x", "run.trust=[https://data.example.org/..]")


def test_the_address_in_a_trusted_variable_counts(
    tar: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NAME, "https://anywhere.example/x.tar")
    assert read(tar, tmp_path, ("data", "path"), f"${{oc.env:{NAME}}}", TRUSTED)["data"]["path"].endswith("x.tar")


def test_a_typed_key_does_not_cover_one_that_only_looks_below_it(
    tar: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NAME, SECRET)
    with pytest.raises(UnrestatedError):
        read(tar, tmp_path, ("data", "path.x"), f"${{oc.env:{NAME}}}", "data.path=x.tar")
    with pytest.raises(UnrestatedError):
        read(tar, tmp_path, ("data", "eval_path"), "http://127.0.0.1/${data.path}", "data.path=x.tar")


def test_the_name_of_a_resolver_may_be_made_of_others_and_is_refused(
    tar: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NAME, SECRET)
    theirs = planted(tar, ("model", "first"), "oc.env")
    with pytest.raises(UnrestatedError):
        read(theirs, tmp_path, ("model", "second"), f"${{${{model.first}}:{NAME}}}")


def test_names_on_a_hub_count_only_when_they_are_restated(base: dict[str, Any], tmp_path: Path) -> None:
    hf = load_yaml((conf_folder() / "data/hf.yaml").read_text())
    text = load_yaml((conf_folder() / "data/text.yaml").read_text())
    (tmp_path / "tokenizer.json").write_text("{}")
    for section, key, value, hub in (
        (hf, "path", "stanford/imdb", True), (hf, "path", "imdb", True), (hf, "eval_path", "imdb", True),
        (hf, "tokenizer", "openai-community/gpt2", True), (text, "tokenizer", "openai-community/gpt2", True),
        (hf, "path", str(tmp_path), False), (hf, "path", "./imdb", False), (hf, "path", "x.csv", False),
        (text, "tokenizer", "bytes", False), (text, "tokenizer", str(tmp_path / "tokenizer.json"), False),
    ):  # fmt: skip
        for place in (("data",), ("data", "sources", "one")):
            mixture = {"_target_": "mixture", "sources": {"one": dict(section)}}
            data = {**base["data"], **(section if place == ("data",) else mixture)}
            tree = {**base, "data": data}
            if not hub:
                assert read(tree, tmp_path, (*place, key), value)
                continue
            with pytest.raises(UnrestatedError) as caught:
                read(tree, tmp_path, (*place, key), value)
            assert caught.value.trusts == [f"hub:{value}"]
            assert read(tree, tmp_path, (*place, key), value, f"run.trust=[hub:{value}]")


def test_a_host_with_a_port_is_an_address_for_a_part_of_others(base: dict[str, Any], tmp_path: Path) -> None:
    model = {"_target_": "mine.Net", "server": "tracker:8080"}
    for place, value in ((("model",), model), (("model", "inner"), [model])):
        with pytest.raises(UnrestatedError) as caught:
            read(base, tmp_path, place, value)
        assert caught.value.trusts == ["tracker:8080"]
        with pytest.raises(UnrestatedError):
            read(base, tmp_path, place, value, "run.trust=[tracker:80801,tracker]")
    assert read(base, tmp_path, ("data", "targets"), "label:10")


FORMS = [
    "\uff4cocalhost:8080", "\uff11\uff12\uff17.0.0.1:8080", "localhost:8080 ", "127.1:8080", "localhost.:8080",
    "me@tracker:8080", "2130706433:8080", "[::1]:8080", "127.0.0.1", "ftp\uff1a\uff0f\uff0f127.0.0.1/x",
]  # fmt: skip


@pytest.mark.parametrize("value", FORMS)
def test_a_host_may_be_written_in_many_ways(
    base: dict[str, Any], tmp_path: Path, value: str, refused_suggestions: list[str]
) -> None:
    with pytest.raises(UnrestatedError):
        read(base, tmp_path, ("callbacks", "theirs"), {"_target_": "others_7f.Callback", "address": value})
    refused_suggestions.clear()  # likewise


def test_binary_values_and_tags_are_refused(base: dict[str, Any], tmp_path: Path) -> None:
    with refused("config.yaml: model.x"):
        read(base, tmp_path, ("model", "x"), b"127.0.0.1:9")
    (tmp_path / "config.yaml").write_text(dumped(base) + "x: !!python/object/apply:pathlib.PosixPath [a]\n")
    with refused("config.yaml: cannot be read"):
        override_file(tmp_path / "config.yaml", [])


def test_a_fact_of_the_data_for_a_part_of_others_is_restated(base: dict[str, Any], tmp_path: Path) -> None:
    """The data may be a stranger's, and its facts addresses."""
    theirs = {"_target_": "others_7f.Callback", "address": "${facts:classes.0}"}
    with refused(": callbacks.theirs.address=${facts:classes.0}", UnrestatedError):
        read(base, tmp_path, ("callbacks", "theirs"), theirs)
    assert read(base, tmp_path, ("model", "num_classes"), "${facts:num_classes}")


def test_what_a_recipe_reads_and_writes_with_is_named_in_its_place_alone(base: dict[str, Any], tmp_path: Path) -> None:
    for name in ("prepare", "load", "draw"):
        for place in (("model", "extra"), ("task", "extra"), ("callbacks", "x"), ("data", "transform")):
            with refused(": not allowed"):
                parse(read(base, tmp_path, place, {"_target_": f"ddpexp.recipes.segment.{name}", "root": "/"}))
    segment = load_yaml((conf_folder() / "recipe/segment.yaml").read_text())["data"]
    assert read({**base, "data": {**base["data"], **segment}}, tmp_path, ("data", "root"), "masks")


def test_an_address_may_be_the_name_of_a_value(
    base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NAME, SECRET)
    reference = f"${{oc.env:{NAME}}}"
    for value in ({"http://127.0.0.1:9/x": 1}, [{"a": {"ftp://127.0.0.1": None}}], {"ftp://127.0.0.1": reference}):
        with refused(": model.servers=", UnrestatedError):
            read(base, tmp_path, ("model", "servers"), value, f"run.trust=[oc.env:{NAME}]")


@pytest.mark.parametrize("value", ["cuda:11", "1.2.3", "30:00", "1-12:30", "2:16", "a:b", "C:1"])
def test_what_is_written_like_an_address_and_is_none(base: dict[str, Any], tmp_path: Path, value: str) -> None:
    others = {"_target_": "others_7f.Callback", "device": value}
    assert read(base, tmp_path, ("callbacks", "others"), others, "run.trust=[others_7f]")
    slurm = load_yaml((conf_folder() / "launcher/slurm.yaml").read_text())
    assert read({**base, "launcher": slurm}, tmp_path, ("launcher", "gres"), "shard:20")


def test_what_the_readers_own_files_set_need_not_be_restated(
    tar: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the folder of a typed --config-dir: an option by its group, and a recipe for the whole run."""
    monkeypatch.setenv(NAME, SECRET)
    conf = tmp_path / "mine/conf"
    (conf / "data").mkdir(parents=True)
    (conf / "recipe").mkdir()
    (conf / "data/far.yaml").write_text("path: https://mine.example/x.tar\n")
    (conf / "recipe/mine.yaml").write_text(f"# @package _global_\nmodel:\n  token: ${{oc.env:{NAME}}}\n")
    theirs = planted(tar, ("model", "token"), f"${{oc.env:{NAME}}}")
    place, address = ("data", "path"), "https://mine.example/x.tar"
    assert read(theirs, tmp_path, place, address, "--config-dir", str(conf))["model"]["token"] == SECRET
    assert to_restate(planted(theirs, place, address), conf) == []
    for place, value in (
        (("data", "path"), f"{address}x"),
        (("data", "eval_path"), address),
        (("model", "x"), address),
    ):
        with pytest.raises(UnrestatedError):
            read(theirs, tmp_path, place, value, "--config-dir", str(conf))
    with pytest.raises(UnrestatedError):
        read(theirs, tmp_path, ("model", "other"), f"${{oc.env:{NAME}}}", "--config-dir", str(conf))
    with pytest.raises(UnrestatedError):
        read(theirs, tmp_path, ("data", "path"), address)


def test_a_logger_of_others_is_restated_with_all_its_texts(base: dict[str, Any], tmp_path: Path) -> None:
    logger = {"_target_": "mine.Tracker", "server": "evil", "port": 80, "tags": ["a"]}
    with pytest.raises(UnrestatedError) as caught:
        read(base, tmp_path, ("logger", "mine"), logger)
    assert caught.value.overrides == ["logger.mine.server=evil", 'logger.mine.tags=["a"]']
    assert caught.value.trusts == []


def test_the_owner_of_a_wandb_project_is_restated(base: dict[str, Any], tmp_path: Path) -> None:
    wandb = {"_target_": "wandb", "project": "mine", "entity": None}
    assert read(base, tmp_path, ("logger", "wandb"), wandb)
    with refused(": logger.wandb.entity=theirs", UnrestatedError):
        read(base, tmp_path, ("logger", "wandb"), {**wandb, "entity": "theirs"})


@pytest.mark.parametrize(
    "override",
    [
        "data.path=http://127.0.0.1/x.tar", "data.path='http://127.0.0.1/x'", "data.path=a.tar,s3://x/b.tar",
        "data.path=choice(a,http://x)", "+model.x={a:http://x/y}", "model.x=[1,http://x]", "logger.mine.server=evil",
        "logger.alert_url=${oc.env:TOKEN}", "data.path=${model.a}/evil", "data.path=${${a}:b}",
        "data.path=stanford/imdb", "hydra.sweeper.params.data.path=stanford/imdb",
        "data.tokenizer=openai-community/gpt2", "model.x=evil:8080", "hydra.sweeper.params.data.path=http://x",
        "data.path=http\\://x", "+logger.checkpoint={_target_:wandb,entity:evil}", "+logger.checkpoint={a:b}",
        "data.tokenizer=${data.end_token}", "data.path=${model.a}", "callbacks.theirs.x=${facts:classes.0}",
        "model.backbone.pretrained_model_name_or_path=evil/x", "model.backbone.model_name=hf-hub:evil/x",
        "+data.sources.a={tokenizer: evil/tok}", "data.path=s{3..3}://x/y", "logger.end_seconds=evil",
        "logger.wandb.entity=theirs", "~data.path=http://x",
    ],
)  # fmt: skip
def test_overrides_in_the_file_of_a_sweep_are_restated(override: str) -> None:
    assert records_setting(override, Grants.of())


@pytest.mark.parametrize(
    "override",
    [
        "optimizer.lr=0.1,0.01", "trainer.seed=range(1,4)", "model.hidden=choice(8,16)", "data.root=/data/mnist",
        "model.x=${model.hidden}", "logger.wandb.end_seconds=3", "trainer.epochs=2",
        "data.path=/data/x.tar", "data.tokenizer=bytes", "data.files=[jpg,cls]",
    ],
)  # fmt: skip
def test_the_other_overrides_of_a_sweep_are_not(override: str) -> None:
    assert not records_setting(override, Grants.of())


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("https://data.example.org", True), ("s3://bucket/folder", True), ("hub:imdb", True), ("hub:a/b", True),
        ("oc.env:TOKEN", True), ("tracker:8080", True), ("https://", False), ("hub:", False), ("oc.env:", False),
        ("oc.env:A B", False), ("oc.env:*", False), ("package.Class", False), ("x:y", False),
    ],
)  # fmt: skip
def test_which_names_are_those_of_settings(name: str, known: bool) -> None:
    assert is_setting(name) is known


@pytest.mark.parametrize("section", ["run", "logger", "model", "launcher"])
def test_a_section_that_is_a_reference_is_refused_before_it_stands_for_anything(
    base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, section: str
) -> None:
    monkeypatch.setenv(NAME, SECRET)
    for reference in (f"${{oc.dict.keys:${{oc.env:{NAME}}}}}", f"${{oc.env:{NAME}}}", "${model}"):
        for argv in ([], ["logger=csv"], ["model.hidden=5"]):
            with pytest.raises(RefusedError) as caught:
                read(base, tmp_path, (section,), reference, *argv)
            assert SECRET not in str(caught.value)
            assert re.search(rf"{section} is not a section|not the configuration of a run", str(caught.value))


def test_a_reference_inside_a_section_is_not_resolved_by_an_override(
    base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NAME, SECRET)
    stolen = f"${{oc.dict.keys:${{oc.env:{NAME}}}}}"
    for argv in (["model.inner.x=5"], ["model.inner._target_=mine.Net", "model.inner.x=5"], ["data.inner=1"]):
        for key in ("model", "data"):
            try:
                learned = str(read(base, tmp_path, (key, "inner"), stolen, *argv))
            except RefusedError as error:
                learned = str(error)
            assert SECRET not in learned


@pytest.mark.parametrize("typed", [True, False])
def test_a_template_with_anothers_value_is_not_the_readers(
    tar: dict[str, Any], tmp_path: Path, typed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither typed nor in a file of the reader: the host that it leads to is the stranger's."""
    monkeypatch.setenv(NAME, SECRET)
    template = f"ftp://${{recipe.name}}/${{oc.env:{NAME}}}.tar"
    theirs = planted(tar, ("recipe", "name"), "127.0.0.1:9")
    conf = tmp_path / "conf"
    (conf / "data").mkdir(parents=True)
    (conf / "data/far.yaml").write_text(f"path: {template}\n")
    argv = [f"data.path={template}"] if typed else ["--config-dir", str(conf)]
    with pytest.raises(UnrestatedError) as caught:
        read(theirs, tmp_path, ("data", "path"), template, *argv)
    closed = f"data.path=ftp://127.0.0.1:9/${{oc.env:{NAME}}}.tar"
    assert caught.value.overrides == [closed]  # with the host to see
    assert read(theirs, tmp_path, ("data", "path"), template, closed)["data"]["path"].endswith(f"{SECRET}.tar")

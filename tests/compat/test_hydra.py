"""The private names of Hydra that ddpexp uses are there, and do what they are used for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hydra
import pytest
from hydra._internal import defaults_list
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import ConfigCompositionException
from omegaconf import DictConfig, OmegaConf

from ddpexp.compat.hydra import VERSION_BASE, apply_overrides, own_globals, quick_defaults, sweeper_context
from ddpexp.config.folders import conf_folder


def test_the_references_of_a_defaults_list_are_prepared_only_where_there_are_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in {
        "config": "defaults: [a: x, b: '${a}', _self_]\nc: 1\n", "plain": "defaults: [a: x, _self_]\nc: 1\n",
        "a/x": "d: 2\n", "b/x": "e: 3\n",
    }.items():  # fmt: skip
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.yaml").write_text(text)
    if hydra.__version__ >= "1.4":
        assert not hasattr(defaults_list, "_create_interpolation_map")
        return
    plain, prepared = defaults_list._create_interpolation_map, []

    def counted(*arguments: Any) -> DictConfig:
        prepared.append(arguments)
        return plain(*arguments)

    monkeypatch.setattr(defaults_list, "_create_interpolation_map", counted)
    with hydra.initialize_config_dir(str(tmp_path), **VERSION_BASE):
        slow = hydra.compose("plain")
        assert len(prepared) > 1
        prepared.clear()
        with quick_defaults():
            assert hydra.compose("plain") == slow
            assert not prepared
            assert hydra.compose("config") == {"a": {"d": 2}, "b": {"e": 3}, "c": 1}
        assert len(prepared) == 1


def test_overrides_are_applied_to_a_tree() -> None:
    cfg = OmegaConf.create({"a": {"b": 1, "c": 2}})
    OmegaConf.set_struct(cfg, True)
    apply_overrides(OverridesParser.create().parse_overrides(["a.b=3", "++a.d=4", "~a.c"]), cfg)
    assert cfg == {"a": {"b": 3, "d": 4}}
    with pytest.raises(ConfigCompositionException):
        apply_overrides(OverridesParser.create().parse_overrides(["a.x=3"]), cfg)


@pytest.mark.filterwarnings("error")
def test_a_sweeper_is_set_up_without_callbacks() -> None:
    with hydra.initialize_config_dir(str(conf_folder()), **VERSION_BASE):
        loader = GlobalHydra.instance().config_loader()
        context = sweeper_context(loader)
    assert context.config_loader is loader
    assert not context.callbacks.callbacks


def test_what_a_program_has_initialized_is_set_aside_and_comes_back(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("a: 1\n")
    with hydra.initialize_config_dir(str(tmp_path), **VERSION_BASE):
        before = GlobalHydra.instance().hydra
        with own_globals(), hydra.initialize_config_dir(str(conf_folder()), **VERSION_BASE):
            assert GlobalHydra.instance().hydra is not before
        assert GlobalHydra.instance().hydra is before
        assert hydra.compose("config") == {"a": 1}
    assert not GlobalHydra.instance().is_initialized()

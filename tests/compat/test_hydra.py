"""The private names of Hydra that ddpexp uses are there, and do what they are used for."""

from __future__ import annotations

import hydra
import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf

from ddpexp.compat.hydra import VERSION_BASE, apply_overrides, sweeper_context
from ddpexp.config.folders import conf_folder


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

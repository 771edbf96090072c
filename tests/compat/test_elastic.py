from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
from torch.distributed.launcher import api

from ddpexp.compat.elastic import ExtensibleAgent, forget_store, install


def test_the_agent_calls_what_is_overridden() -> None:
    run = inspect.getsource(SimpleElasticAgent)
    for name in ("_invoke_run", "_rendezvous", "_start_workers", "_monitor_workers", "_stop_workers"):
        assert callable(getattr(LocalElasticAgent, name)), name
        assert name in vars(ExtensibleAgent)
        assert f"self.{name}(" in run, name
    assert list(inspect.signature(LocalElasticAgent._shutdown).parameters) == ["self", "death_sig", "timeout"]


def test_a_round_gets_a_store_of_its_own() -> None:
    handler = DynamicRendezvousHandler.from_backend("id", HashStore(), C10dRendezvousBackend(HashStore(), "id"), 1, 1)
    try:
        assert vars(handler)["_bootstrap_store_info"] is None
        handler._bootstrap_store_info = object()
        group: Any = SimpleNamespace(spec=SimpleNamespace(rdzv_handler=handler))
        forget_store(group)
        assert handler._bootstrap_store_info is None
    finally:
        handler.shutdown()


def test_torchrun_uses_the_agent_that_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "LocalElasticAgent", api.LocalElasticAgent)  # type: ignore[attr-defined]
    install(ExtensibleAgent)
    assert api.LocalElasticAgent is ExtensibleAgent  # type: ignore[attr-defined]
    assert "LocalElasticAgent" in inspect.unwrap(api.launch_agent).__code__.co_names

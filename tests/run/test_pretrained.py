"""Weights that a model downloads while it is built are downloaded once, before the workers start."""

from __future__ import annotations

import functools
import os
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddpexp.config.compose import compose
from ddpexp.config.parse import parse
from ddpexp.run.pretrained import check_layers, pretrained_key
from ddpexp.settings.node import Node
from ddpexp.train.offline import forbid_downloads, without_downloads
from tests.conftest import Ddpexp
from tests.points import Recipe
from tests.refusals import command_refused, refused

CODE = """
def zoo(pretrained=False, **options):
    model = nn.Linear(4, 2)
    if pretrained:
        state = torch.hub.load_state_dict_from_url(os.environ["ZOO"] + "/w.pth", progress=False, weights_only=True)
        model.load_state_dict(state)
    return model
"""


@pytest.mark.parametrize(
    ("target", "arguments", "key"),
    [
        ("torchvision.models.resnet18", {"weights": "DEFAULT"}, "model.weights=DEFAULT"),
        ("timm.create_model", {"model_name": "vit", "pretrained": True}, "model.pretrained=true"),
        ("mine.Net", {"parts": [{"_target_": "x.y", "pretrained": True}]}, "model.parts[0].pretrained=true"),
        ("mine.Net", {"body": {"_target_": "a.B.from_pretrained"}}, "model.body._target_=a.B.from_pretrained"),
        ("transformers.AutoModel.from_pretrained", {}, "model._target_=transformers.AutoModel.from_pretrained"),
        ("timm.create_model", {"model_name": "hf-hub:a/b"}, "model.model_name=hf-hub:a/b"),
        ("torchvision.models.resnet18", {"weights": None}, None),
        ("timm.create_model", {"pretrained": False}, None),
        ("mine.Net", {"weights": (0.1, 0.9)}, None),  # of classes, for example
    ],
)
def test_a_model_that_downloads_is_known_by_its_arguments(target: str, arguments: Any, key: str | None) -> None:
    assert pretrained_key(Node(target, arguments)) == key


def test_the_layers_of_a_configuration_of_any_size_are_checked() -> None:
    strategy: Any = SimpleNamespace(looks_at_layers=True)
    with refused("recipes: recipe?"):
        check_layers(strategy, f"recipes: {700_000 * 'x'}\n")


def test_a_worker_downloads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.hub, "download_url_to_file", original := torch.hub.download_url_to_file)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    composed = compose(["recipe=mnist"])
    assert composed is not None
    experiment = parse(composed.values)
    forbid_downloads(experiment)
    assert torch.hub.download_url_to_file is original
    forbid_downloads(replace(experiment, model=Node("mine.net", {"pretrained": True})))
    with refused("model.pretrained=true"):
        torch.hub.download_url_to_file("http://x/w.pth", "/nowhere")
    assert os.environ["HF_HUB_OFFLINE"] == "1"


def test_a_process_that_is_no_worker_may_download_again_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    original, composed = torch.hub.download_url_to_file, compose(["recipe=mnist"])
    assert composed is not None
    experiment = replace(parse(composed.values), model=Node("mine.net", {"pretrained": True}))
    with without_downloads(experiment):
        with refused("model.pretrained=true"):
            torch.hub.download_url_to_file("http://x/w.pth", "/nowhere")
        assert os.environ["HF_HUB_OFFLINE"] == "1"
    assert torch.hub.download_url_to_file is original
    assert "HF_HUB_OFFLINE" not in os.environ


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[str, list[str]]]:
    """Serve weights on this machine; yield the address and the requests so far."""
    (tmp_path / "served").mkdir()
    torch.save({"weight": torch.ones(2, 4), "bias": torch.zeros(2)}, tmp_path / "served/w.pth")
    requests: list[str] = []

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *arguments: Any) -> None:
            requests.append(format % arguments)

    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(tmp_path / "served")))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", requests
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_two_workers_download_once_and_a_resumed_run_never(
    tmp_path: Path, warm_environ: dict[str, str], served: tuple[str, list[str]]
) -> None:
    address, requests = served
    environ = {**warm_environ, "ZOO": address, "TORCH_HOME": str(tmp_path / "cache")}
    recipe = Recipe(Ddpexp(tmp_path, environ), CODE)
    zoo = ("model._target_=points.zoo", "+model.pretrained=true", "trainer.gpus=2", "optimizer.lr=0")
    done = recipe(*zoo, "trainer.max_steps=2")
    assert done.code == 0, done.err
    assert len(requests) == 1
    assert re.search(r'"GET /w\.pth', requests[0])
    (tmp_path / "cache").rename(tmp_path / "elsewhere")
    resumed = recipe(*zoo, "trainer.max_steps=3", run=done.run)
    command_refused(resumed, "model.pretrained=true: w.pth is not in the cache", out=None)
    assert len(requests) == 1

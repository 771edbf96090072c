"""recipe=gpt begins with the weights of other programs, and computes what they compute. Needs transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ddpexp as library
from tests.conftest import Ddpexp

SIZES = {"vocab_size": 65, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4}
SHAPE = (
    "model=gpt_124m", "model.conv1d=true", "model.vocab_size=65", "model.block_size=32", "model.width=32",
    "model.num_layers=2", "model.num_heads=4", "data.block_size=32", "model.dropout=0",
)  # fmt: skip
KEPT = ("optimizer.lr=0", "trainer.max_steps=1", "trainer.eval_every=0", "logger=none", "launcher=inline")


@pytest.mark.parametrize("kind", ["GPT2Model", "GPT2LMHeadModel"])
def test_gpt_2s_weights_give_the_logits_of_transformers(ddpexp: Ddpexp, kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    theirs: Any = transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES)).eval()
    for parameter in theirs.parameters():  # biases too, which are 0 at first
        torch.nn.init.normal_(parameter, std=0.3)
    saved = theirs if kind == "GPT2LMHeadModel" else theirs.transformer
    saved.save_pretrained(ddpexp.folder / "gpt2")
    text = ddpexp.folder / "text.txt"
    text.write_text("".join(map(chr, range(60, 120))) * 20)
    rename = "run.init_rename={transformer.*: '*'}" if kind == "GPT2LMHeadModel" else "run.init_rename={}"
    weights = f"run.init_from={Path('gpt2/model.safetensors')}"
    done = ddpexp("recipe=gpt", f"data.path={text}", *SHAPE, weights, rename, *KEPT)
    assert done.code == 0, done.err
    ours: Any = library.open_run(done.run).model()
    tokens = torch.randint(65, (3, 32), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, atol=1e-4, rtol=1e-4)
        assert theirs(tokens).logits.std() > 0.1

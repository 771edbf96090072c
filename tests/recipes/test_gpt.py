"""The GPT of recipe=gpt: published sizes, GPT-2's weights, documents, samples, and its loss."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import yaml

from ddpexp.checkpoint.matching import Selection, match
from ddpexp.config.folders import conf_folder
from ddpexp.data.text.tokenizer import Chars
from ddpexp.loggers.base import Logger
from ddpexp.strategy.fsdp.blocks import blocks_of
from recipes.gpt import GPT, Cache, Conv1D, NextToken
from tests.refusals import refused


def configured(name: str, **changes: Any) -> GPT:
    values = yaml.safe_load((conf_folder() / f"model/{name}.yaml").read_text())
    assert values.pop("_target_") == "ddpexp.recipes.gpt.GPT"
    return GPT(**{**values, **changes})


LLAMA = {"norm": "rmsnorm", "mlp": "swiglu", "positions": "rotary", "tied": False, "num_kv_heads": 2}
KINDS: list[dict[str, Any]] = [{}, LLAMA, {"bias": True, "conv1d": True, "mlp": "gelu_tanh"}]


def small(**options: Any) -> GPT:
    torch.manual_seed(0)
    return GPT(**{"vocab_size": 11, "block_size": 8, "num_layers": 2, "num_heads": 4, "width": 16, **options}).eval()


@pytest.mark.parametrize(
    ("name", "changes", "count"),
    [
        ("gpt_tiny", {"vocab_size": 65, "block_size": 64}, 804_096),
        ("gpt_124m", {}, 124_439_808),
        ("gpt_1b", {}, 1_100_048_384),
        ("llama_7b", {}, 6_738_415_616),
    ],
)
def test_the_models_have_the_published_numbers_of_parameters(name: str, changes: dict[str, int], count: int) -> None:
    with torch.device("meta"):
        assert sum(parameter.numel() for parameter in configured(name, **changes).parameters()) == count


def test_the_names_and_shapes_are_those_of_gpt_2s_file() -> None:
    layer = {
        "ln_1.weight": (768,), "ln_1.bias": (768,), "ln_2.weight": (768,), "ln_2.bias": (768,),
        "attn.c_attn.weight": (768, 2304), "attn.c_attn.bias": (2304,), "attn.bias": (1, 1, 1024, 1024),
        "attn.c_proj.weight": (768, 768), "attn.c_proj.bias": (768,),
        "mlp.c_fc.weight": (768, 3072), "mlp.c_fc.bias": (3072,),
        "mlp.c_proj.weight": (3072, 768), "mlp.c_proj.bias": (768,),
    }  # fmt: skip
    published: dict[str, tuple[int, ...] | None] = {
        f"h.{n}.{name}": shape for n in range(12) for name, shape in layer.items()
    }
    published |= {"wte.weight": (50257, 768), "wpe.weight": (1024, 768), "ln_f.weight": (768,), "ln_f.bias": (768,)}
    with torch.device("meta"):
        ours = {name: tuple(tensor.shape) for name, tensor in configured("gpt_124m", conv1d=True).state_dict().items()}
    found = match(published, ours, Selection({}, ("h.*.attn.bias",)))
    assert (found.missing, found.extra, found.other_shape) == ([], [], [])
    nano = {f"transformer.{name}": None for name in ours} | {"lm_head.weight": None}
    found = match(nano, ours, Selection({"transformer.*": "*"}, ("lm_head.weight",)))
    assert (found.missing, found.extra) == ([], [])


def test_transposed_weights_compute_the_same() -> None:
    plain, turned = small(), small(conv1d=True)
    state = plain.state_dict()
    for name, module in turned.named_modules():
        if isinstance(module, Conv1D):
            state[f"{name}.weight"] = state[f"{name}.weight"].t()
    turned.load_state_dict(state)
    tokens = torch.randint(11, (2, 8))
    torch.testing.assert_close(turned(tokens), plain(tokens))


@pytest.mark.parametrize("options", KINDS)
def test_a_score_depends_on_what_came_before_alone(options: dict[str, Any]) -> None:
    model, tokens = small(**options), torch.randint(11, (1, 8), generator=torch.Generator().manual_seed(1))
    other = tokens.clone()
    other[0, 5] = (other[0, 5] + 1) % 11
    torch.testing.assert_close(model(tokens)[:, :5], model(other)[:, :5])
    assert not torch.allclose(model(tokens)[:, 5], model(other)[:, 5])


@pytest.mark.parametrize("options", KINDS)
def test_packed_documents_are_scored_as_each_by_itself(options: dict[str, Any]) -> None:
    model, tokens = small(**options), torch.randint(11, (1, 8), generator=torch.Generator().manual_seed(1))
    packed = model(tokens, torch.tensor([[0, 0, 0, 1, 2, 2, 2, 2]]))
    for begin, end in ((0, 3), (3, 4), (4, 8)):
        torch.testing.assert_close(packed[:, begin:end], model(tokens[:, begin:end]))


@pytest.mark.parametrize("options", KINDS)
def test_a_cache_changes_no_score(options: dict[str, Any]) -> None:
    model, tokens = small(**options), torch.randint(11, (1, 8), generator=torch.Generator().manual_seed(1))
    cache, parts = Cache(), []
    for part in (tokens[:, :3], tokens[:, 3:4], tokens[:, 4:5]):
        parts.append(model(part, cache=cache))
        cache.num_tokens += part.shape[1]
    torch.testing.assert_close(torch.cat(parts, 1), model(tokens[:, :5]))


def test_what_is_written_follows_from_the_seed_and_goes_beyond_the_block() -> None:
    model, prompt = small(), torch.tensor([[1, 2, 3]])
    first = model.generate(prompt, 20, seed=5)
    assert first.shape == (1, 23)
    assert torch.equal(first[:, :3], prompt)
    assert torch.equal(first, model.generate(prompt, 20, seed=5))
    assert not torch.equal(first, model.generate(prompt, 20, seed=6))
    likely = model.generate(prompt, 20, temperature=0)
    assert torch.equal(likely, model.generate(prompt, 20, top_k=1))
    for end in range(3, 23):  # as without a cache
        assert int(likely[0, end]) == int(model(likely[:, max(0, end - 8) : end])[0, -1].argmax())


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"num_heads": 3}, "model.width=16: model.num_heads=3"),
        ({"num_kv_heads": 3}, "model.num_heads=4: model.num_kv_heads=3"),
        ({"width": 12, "positions": "rotary"}, "model.width=12: even"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(options: dict[str, Any], expected: str) -> None:
    with refused(expected):
        small(**options)


def test_the_loss_counts_the_targets_that_count() -> None:
    model, inputs, targets = small(), torch.tensor([[1, 2, 3]]), torch.tensor([[2, -100, 4]])
    scores = model(inputs)[0].log_softmax(1)
    expected = -(scores[0, 2] + scores[2, 4])
    batch = {"inputs": inputs, "targets": targets, "documents": torch.zeros_like(inputs), "count": torch.tensor(2)}
    for one in ((inputs, targets), batch):
        loss, count, _ = NextToken().step(model, one)
        torch.testing.assert_close(loss, expected)
        assert int(count) == 2
    assert NextToken().step(model.train(), (inputs, inputs))[1] == 3  # a number
    assert NextToken().finish({"loss": (6.0, 2)}) == {"perplexity": pytest.approx(math.exp(3))}


def test_a_sample_is_logged_at_an_evaluation() -> None:
    class Texts(Logger):
        def text(self, name: str, text: str) -> None:
            texts[name] = text

    texts: dict[str, str] = {}
    task = NextToken(tokenizer=Chars("abcdefghijk").record, sample_tokens=5, sample_prompt="abc")
    task.on_eval(small(), None, Texts(), 7)
    assert texts["sample/7"].startswith("```\nabc")
    assert len(texts["sample/7"]) == len("```\nabc" + 5 * "x" + "\n```")
    NextToken(tokenizer=Chars("abcdefghijk").record, sample_tokens=1).on_eval(small(), None, Texts(), 8)
    assert texts["sample/8"].startswith("```\na")  # a text without lines begins with its first token


def test_its_layers_are_the_blocks_of_fsdp() -> None:
    model = small()
    assert blocks_of({"model": model}, None, 1e9) == [*reversed(model.h), model]
    assert blocks_of({"model": model}, ["MLP"], 1e9) == [*(block.mlp for block in reversed(model.h)), model]

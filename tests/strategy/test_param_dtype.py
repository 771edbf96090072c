"""trainer.param_dtype=bf16: models that compute in bf16 as a whole."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddpexp.config.check_trainer import check_param_dtype
from ddpexp.errors import RefusedError
from ddpexp.strategy.param_dtype import lower
from tests.fitting import TRAINER


class Tied(nn.Module):
    """A normalized layer whose weight is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.last.weight = self.first.weight

    def forward(self, rows: Tensor) -> dict[str, Tensor]:
        assert rows.dtype == self.first.weight.dtype == torch.bfloat16
        return {"rows": self.last(self.norm(self.first(rows)))}


def gradients(model: nn.Module, rows: Tensor) -> dict[str, Tensor | None]:
    outputs = model(rows)["rows"]
    assert outputs.dtype == torch.float32
    outputs.square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters()}


def test_weights_in_fp32_get_the_gradients_of_their_copies_in_bf16() -> None:
    torch.manual_seed(0)
    kept = Tied()
    lowered = deepcopy(kept)
    rows = torch.randn(6, 4)
    found = gradients(lower(kept, copies=True, stays_fp32=True), rows)
    expected = gradients(lower(lowered, copies=True, stays_fp32=False), rows)
    assert {p.dtype for p in kept.parameters()} == {torch.float32}
    assert {p.dtype for p in lowered.parameters()} == {torch.bfloat16}
    for name, gradient in expected.items():
        one, other = found[name], gradient
        assert one is not None
        assert other is not None
        assert (one.dtype, other.dtype) == (torch.float32, torch.bfloat16)
        assert torch.equal(one, other.float()), name
    assert torch.equal(kept.norm.running_mean, lowered.norm.running_mean)  # type: ignore[arg-type]
    copy = deepcopy(kept).eval()
    copy.first.weight.data.zero_()
    assert torch.equal(copy(rows)["rows"][0], copy.last.bias.bfloat16().float())
    assert kept.first.weight.any()


def test_whole_numbers_stay_as_they_are() -> None:
    table = lower(nn.Embedding(5, 3), copies=True, stays_fp32=True)
    assert table(torch.tensor([1, 2])).dtype == torch.float32
    models = {"one": nn.Linear(2, 2), "other": nn.Linear(2, 2)}
    assert lower(models, copies=True, stays_fp32=False) is models
    assert all(p.dtype == torch.bfloat16 for module in models.values() for p in module.parameters())


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"precision": "bf16"}, "incompatible with trainer.precision=bf16. Use trainer.precision=fp32"),
        ({"reduction": "exact"}, "incompatible with trainer.reduction=exact. Use trainer.reduction=fast"),
        ({"compile": True}, "incompatible with trainer.compile=true of the whole model. Use trainer.compile_blocks="),
        ({"param_dtype": "fp32", "master_weights": False}, "trainer.master_weights=false stores weights"),
    ],
)
def test_what_would_compute_in_other_numbers_is_refused(keys: dict[str, Any], sentence: str) -> None:
    kept = replace(TRAINER, param_dtype="bf16", master_weights=False)
    for trainer in (kept, replace(kept, compile=True, compile_blocks="Block")):
        check_param_dtype(trainer)
    with pytest.raises(RefusedError) as caught:
        check_param_dtype(replace(TRAINER, **{"param_dtype": "bf16"} | keys))
    assert sentence in str(caught.value)

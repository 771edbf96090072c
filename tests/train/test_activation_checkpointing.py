"""trainer.activation_checkpointing: the same numbers with less memory."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ddpexp.errors import RefusedError
from ddpexp.train.activation_checkpointing import checkpoint_activations
from tests.conftest import Ddpexp
from tests.points import Recipe
from tests.refusals import is_about


class Block(nn.Module):
    """A block with random numbers and with buffers that a forward pass changes."""

    passes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Dropout(0.3), nn.Linear(64, 6))
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, rows: Tensor, scale: float = 1.0) -> Tensor:
        """Shapes: (samples, 6), both."""
        self.passes += 1
        result: Tensor = rows + scale * self.layers(rows)
        return result


class Net(nn.Sequential):
    """Two blocks, one of them inside another module."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 6), Block(), nn.ModuleList([Block()])[0], nn.Linear(6, 2))


def after_steps(classes: tuple[str, ...]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Net()
    checkpoint_activations({"model": model}, classes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(4):
        torch.manual_seed(step)
        model(torch.randn(5, 6)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_weights_buffers_and_random_numbers_are_the_same() -> None:
    plain = after_steps(())
    for classes in (("Block",), ("Tanh", "Linear"), ("Net", "Block")):
        found = after_steps(classes)
        assert found.keys() == plain.keys()
        assert all(torch.equal(found[name], plain[name]) for name in plain), classes


def test_only_the_inputs_of_blocks_are_kept() -> None:
    def kept(classes: tuple[str, ...]) -> int:
        model = Net()
        checkpoint_activations({"model": model}, classes)
        seen: dict[int, Tensor] = {}
        known = {parameter.data_ptr() for parameter in model.parameters()}

        def pack(tensor: Tensor) -> Tensor:
            if tensor.data_ptr() not in known:
                seen[tensor.data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(torch.randn(50, 6)).sum()
        gc.collect()
        total = sum(tensor.numel() for tensor in seen.values())
        loss.backward()
        return total

    assert kept(("Block",)) < kept(()) / 5


def test_nothing_is_computed_twice_without_gradients() -> None:
    model = Net().eval()
    checkpoint_activations({"model": model}, ("Block",))
    with torch.no_grad():
        model(torch.randn(3, 6))
    assert model[1].passes == 1


def test_a_class_that_the_model_lacks_is_refused() -> None:
    with pytest.raises(RefusedError) as caught:
        checkpoint_activations({"model": Net()}, ("Blok",))
    assert is_about(caught.value, "trainer.activation_checkpointing=[Blok]")


SHARDED = ("trainer.activation_checkpointing=[Net]", "strategy=fsdp")


@pytest.mark.parametrize(
    "more", [("trainer.activation_checkpointing=[Linear,Tanh]",), pytest.param(SHARDED, marks=pytest.mark.slow)]
)
def test_a_run_ends_with_the_same_weights(tmp_path: Path, warm_environ: dict[str, str], more: tuple[str, ...]) -> None:
    recipe = Recipe(Ddpexp(tmp_path, warm_environ))
    overrides = "trainer.gpus=2", "model.dropout=0.2"
    hashes = {recipe(*overrides, *words).result()["weights_sha256"] for words in ((), more)}
    assert len(hashes) == 1
    done = recipe("trainer.activation_checkpointing=[Net]", "trainer.compile=true")
    assert done.code == 2
    assert "trainer.activation_checkpointing=[Net] is incompatible with trainer.compile=true of the whole" in done.err
    assert "trainer.compile_blocks=Net" in done.err

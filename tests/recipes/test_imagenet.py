"""recipe=imagenet and recipe=finetune: networks with the published names and sizes, new heads, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

from ddpexp.config.folders import conf_folder
from recipes.finetune import Finetuned
from recipes.imagenet import Classify, ResNet


def configured(name: str, **changes: Any) -> ResNet:
    values = yaml.safe_load((conf_folder() / f"model/{name}.yaml").read_text())
    assert values.pop("_target_") == "ddpexp.recipes.imagenet.ResNet"
    return ResNet(**{**values, **changes})


@pytest.mark.parametrize(("name", "count"), [("resnet18", 11_689_512), ("resnet50", 25_557_032)])
def test_the_networks_have_the_published_numbers_of_parameters_and_names(name: str, count: int) -> None:
    with torch.device("meta"):
        model = configured(name, num_classes=1000)
    shapes = {key: tuple(one.shape) for key, one in model.state_dict().items()}
    assert sum(parameter.numel() for parameter in model.parameters()) == count
    assert shapes["conv1.weight"] == (64, 3, 7, 7)
    assert shapes["layer2.0.downsample.1.running_mean"] == ((128,) if name == "resnet18" else (512,))
    assert shapes["fc.weight"] == (1000, 512 if name == "resnet18" else 2048)
    if name == "resnet50":
        assert shapes["layer1.0.conv3.weight"] == (256, 64, 1, 1)
        assert shapes["layer4.2.conv2.weight"] == (512, 512, 3, 3)
        assert model.layer4[0].conv2.stride == (2, 2)  # type: ignore[union-attr, index]


def test_small_images_keep_their_size_at_first() -> None:
    images = torch.zeros(2, 1, 32, 32)
    model = ResNet(5, layers=(1, 1), width=4, channels=1, stem="small")
    assert model.maxpool(model.conv1(images)).shape == (2, 4, 32, 32)
    assert model(images).shape == (2, 5)
    assert ResNet(5, layers=(1, 1), width=4, channels=1)(images).shape == (2, 5)


class Fixed(nn.Module):
    def __init__(self, scores: Tensor) -> None:
        super().__init__()
        self.scores = scores

    def forward(self, images: Tensor) -> Tensor:
        return self.scores


def test_the_first_and_the_first_five_guesses_count() -> None:
    scores = -torch.arange(8.0).repeat(3, 1)
    labels = torch.tensor([0, 4, 5])
    _, count, metrics = Classify().step(Fixed(scores).eval(), (torch.zeros(3), labels))
    assert (count, int(metrics["accuracy"][0]), int(metrics["top5"][0])) == (3, 1, 2)
    mixed = nn.functional.one_hot(labels, 8) * 0.75
    mixed[:, 7] += 0.25
    loss, _, metrics = Classify(0.0).step(Fixed(scores).train(), (torch.zeros(3), mixed))
    assert int(metrics["top5"][0]) == 2
    torch.testing.assert_close(loss, -(mixed * scores.log_softmax(1)).sum())
    few = Classify().step(Fixed(scores[:, :3]).eval(), (torch.zeros(3), torch.tensor([0, 1, 2])))
    assert int(few[2]["top5"][0]) == 3  # of three classes
    with pytest.raises(ValueError, match=r"task\.label_smoothing=1: use 0 for none"):
        Classify(1)


def test_the_last_linear_layer_becomes_a_new_head() -> None:
    backbone = ResNet(1000, layers=(1, 1), width=4)
    model = Finetuned(backbone, 3)
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 3)
    assert isinstance(backbone.fc, nn.Identity)
    assert {name.partition(".")[0] for name, _ in model.named_parameters()} == {"backbone", "head"}


class Text(nn.Module):
    """A model that takes and returns what those of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.inner, self.classifier = nn.Embedding(9, 6), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, tokens: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        weights = attention_mask[..., None].float()
        x = (self.embed(tokens) * weights).sum(1) / weights.sum(1)
        return {"logits": self.classifier(self.inner(x))}


def test_texts_are_masked_where_they_are_filled() -> None:
    model = Finetuned(Text(), 4, pad_token=0).eval()
    short, long = torch.tensor([[3, 5]]), torch.tensor([[3, 5, 0, 0]])
    torch.testing.assert_close(model(short), model(long))
    assert model(short).shape == (1, 4)


def test_a_layer_may_be_named_and_wrong_ones_are_refused() -> None:
    backbone = Text()
    assert isinstance(Finetuned(backbone, 4, head="classifier", pad_token=0).backbone.classifier, nn.Identity)
    with pytest.raises(
        ValueError, match=r"model\.head=fc names no linear layer of Text: its last ones are inner, class"
    ):
        Finetuned(Text(), 4, head="fc")
    with pytest.raises(ValueError, match="ReLU has no linear layer"):
        Finetuned(nn.ReLU(), 4)
    with pytest.raises(ValueError, match=r"the model returns \(2, 5, 3\) where \(batch, features\) is needed"):
        Finetuned(nn.Sequential(nn.Linear(3, 6)), 4)(torch.zeros(2, 5, 3))

from torch import Tensor, nn
from torch.nn import functional

from ddpexp.task import Sums


class Net(nn.Module):  # patches of a convolution, attention between them
    def __init__(self, channels: int, classes: int, width: int = 32) -> None:
        super().__init__()
        self.patches = nn.Sequential(nn.Conv2d(channels, width, 7, stride=7), nn.GELU(), nn.Flatten(2))
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.norm(self.patches(images).transpose(1, 2))
        tokens = tokens + self.attention(tokens, tokens, tokens, need_weights=False)[0]
        scores: Tensor = self.head(tokens.mean(1))
        return scores


class Classify:
    def step(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Sums:
        images, labels = batch
        scores = model(images)
        correct = (scores.argmax(1) == labels).sum()
        loss = functional.cross_entropy(scores, labels, reduction="sum")
        return loss, len(labels), {"accuracy": (correct, len(labels))}

    def predict(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        probability = model(batch[0]).softmax(1)
        return {"label": probability.argmax(1), "probability": probability}

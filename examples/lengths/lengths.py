import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from ddpexp.data.datasets import Splits
from ddpexp.task import Sums

IGNORED = -100


class Counting(Dataset[Tensor]):  # sequences of 2 to 100 tokens, each token one more than the one before, modulo 10
    def __init__(self, count: int) -> None:
        self.lengths = [2 + (37 * index) % 99 for index in range(count)]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Tensor:
        return (index + torch.arange(self.lengths[index])) % 10


def collate(samples: list[Tensor]) -> tuple[Tensor, Tensor]:
    inputs = pad_sequence([sample[:-1] for sample in samples], batch_first=True)
    targets = pad_sequence([sample[1:] for sample in samples], batch_first=True, padding_value=IGNORED)
    return inputs, targets


def load() -> Splits:
    return Splits(train=Counting(640), evals={"eval": Counting(80)})


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Embedding(10, 16), nn.Linear(16, 10))


class NextToken:
    def step(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Sums:
        inputs, targets = batch
        loss = cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
        return loss, (targets != IGNORED).sum(), {}

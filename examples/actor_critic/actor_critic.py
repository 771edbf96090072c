"""A policy that balances a pole, trained by advantage actor-critic on episodes of uneven length.

Source: Mnih et al., "Asynchronous methods for deep reinforcement learning", 2016; the pole is that of Barto, Sutton and
Anderson, "Neuronlike adaptive elements that can solve difficult learning control problems", 1983.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from ddpexp.data.datasets import Arrays, Splits
from ddpexp.task import OptimizerStep, Sums

Starts = tuple[Tensor]  # where episodes begin. Shapes: (num_episodes, 4)


def load(train: int, test: int) -> Splits:
    return Splits(Arrays((starts(train, 0),)), {"eval": Arrays((starts(test, 1),))})


def starts(count: int, seed: int) -> Tensor:
    return torch.rand(count, 4, generator=torch.Generator().manual_seed(seed)) * 0.1 - 0.05


def moved(state: Tensor, right: Tensor) -> Tensor:
    """Push the cart for 0.02 s. Shapes: (num_episodes, 4), of position, speed, angle and turning speed."""
    position, speed, angle, turning = state.unbind(1)
    force = right * 20.0 - 10.0
    sine, cosine = angle.sin(), angle.cos()
    push = (force + 0.05 * turning.square() * sine) / 1.1
    twist = (9.8 * sine - cosine * push) / (0.5 * (4 / 3 - 0.1 * cosine.square() / 1.1))
    pull = push - 0.05 * twist * cosine / 1.1
    return torch.stack(
        [position + 0.02 * speed, speed + 0.02 * pull, angle + 0.02 * turning, turning + 0.02 * twist], dim=1
    )


class Policy(nn.Module):
    """Scores of both pushes and the value of a state, which is standardized by all states that were seen."""

    seen: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, width), nn.Tanh())
        self.scores, self.value = nn.Linear(width, 2), nn.Linear(width, 1)
        self.register_buffer("seen", torch.tensor([[1.0] * 4, [0.0] * 4, [1.0] * 4], dtype=torch.float64))

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        count, total, squares = self.seen
        mean = total / count
        hidden = self.body(((state - mean) / (squares / count - mean.square()).sqrt()).float())
        return self.scores(hidden), self.value(hidden).squeeze(1)


@dataclass(frozen=True)
class ActorCritic:
    limit: int  # steps of an episode
    discount: float

    def train_step(self, update: OptimizerStep, batches: list[Starts]) -> Sums:
        total, length = torch.zeros((), dtype=torch.float64), 0
        seen = torch.zeros(3, 4, dtype=torch.float64, device=update.world.device)
        for number, (state,) in enumerate(batches, start=1):
            with update.micro_batch(last=number == len(batches)) as micro_batch:
                loss, states = self.play(update.models, state)
                micro_batch.backward(loss, torch.tensor(len(states)))
            total, length = total + loss.detach(), length + len(states)
            seen += torch.stack([torch.ones_like(states), states, states.square()]).sum(1)
        if update.apply():
            update.models.seen.add_(update.world.sum(seen))  # the same on every worker
        episodes = sum(len(state) for (state,) in batches)
        return total, length, {"length": (torch.tensor(float(length)), episodes)}

    def play(self, policy: nn.Module, state: Tensor) -> tuple[Tensor, Tensor]:
        """Play episodes until the last pole falls; return the loss, summed over their states, and these states."""
        states, chosen, values = [], [], []
        plays: list[Tensor] = []  # which episodes are still on
        on = torch.ones(len(state), dtype=torch.bool, device=state.device)
        while on.any() and len(plays) < self.limit:
            scores, value = policy(state)
            right = torch.multinomial(scores.detach().float().softmax(1), 1)
            states.append(state)
            chosen.append(scores.float().log_softmax(1).gather(1, right).squeeze(1))
            values.append(value.float())
            plays.append(on)
            state = moved(state, right.squeeze(1))
            on = on & (state[:, 0].abs() < 2.4) & (state[:, 2].abs() < 0.21)
        played, value = torch.stack(plays), torch.stack(values)
        later = torch.zeros_like(value[0])
        returns = []
        for step in reversed(range(len(plays))):
            later = (1 + self.discount * later) * played[step]
            returns.append(later)
        gain = torch.stack(returns[::-1]) * (1 - self.discount) - value
        loss = functional.smooth_l1_loss(gain, torch.zeros_like(gain), reduction="none")
        loss = loss - torch.stack(chosen) * gain.detach()
        return (loss * played).sum(), torch.stack(states)[played].double()

    def step(self, model: nn.Module, batch: Starts) -> Sums:
        """Play with the better push each time; the loss is the share of steps at which the pole has fallen."""
        [state] = batch
        on, length = torch.ones(len(state), dtype=torch.bool, device=state.device), torch.zeros((), device=state.device)
        for _ in range(self.limit):
            length = length + on.sum()
            state = moved(state, model(state)[0].argmax(1))
            on = on & (state[:, 0].abs() < 2.4) & (state[:, 2].abs() < 0.21)
        return len(state) - length / self.limit, len(state), {"length": (length, len(state))}

import torch
from torch import Tensor, nn


class VisionTransformer(nn.Module):
    """Images as 16 patches. Shapes: (batch, 1, 28, 28) -> (batch, 10)."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(16, width) * 0.02)
        self.embed = nn.Conv2d(1, width, 7, stride=7)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.embed(images).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            tokens = block(tokens)
        scores: Tensor = self.head(self.norm(tokens).mean(1))
        return scores

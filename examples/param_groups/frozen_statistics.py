from torch import Tensor, nn


class Classifier(nn.Module):
    def __init__(self, backbone: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.head(self.backbone(images))
        return scores

    def train(self, mode: bool = True) -> "Classifier":
        super().train(mode)
        self.backbone.eval()  # BatchNorm there keeps its statistics, and normalizes with them
        return self

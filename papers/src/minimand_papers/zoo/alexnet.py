"""AlexNet as adapted to small images."""

from torch import Tensor, nn

__all__ = ["AlexNet"]


class AlexNet(nn.Module):
    """AlexNet for 32 × 32 images: first convolution 11 × 11 with padding 5, pools of 2, one fully connected layer.

    The paper replaces the first convolution, ``features.0``, by a deterministic solver.

    Args:
        classes: Outputs.
        channels: Input channels.
        width: A factor on all hidden widths.
        stride: Stride of the first convolution.

    Source: [Bibi2019], §4, footnote 1 and Table 3; Krizhevsky et al., 2012.

    >>> import torch
    >>> AlexNet(width=0.25)(torch.randn(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """

    def __init__(self, classes: int = 10, channels: int = 3, *, width: float = 1.0, stride: int = 4) -> None:
        super().__init__()
        a, b, c, d = (max(1, round(width * n)) for n in (64, 192, 384, 256))
        self.features = nn.Sequential(
            nn.Conv2d(channels, a, 11, stride=stride, padding=5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(a, b, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(b, c, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(c, d, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(d, d, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )
        self.classifier = nn.Linear(d, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits."""
        logits: Tensor = self.classifier(self.features(images))
        return logits

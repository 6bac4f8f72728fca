"""LeNet with dropout in front of its hidden fully connected layers."""

from torch import Tensor, nn

from minimand.errors import OptionError

__all__ = ["LeNet"]


class LeNet(nn.Module):
    """LeNet-5 with ReLU, and dropout before either of its two hidden fully connected layers.

    The paper replaces the blocks ``classifier.1`` and ``classifier.4`` by solvers; a plain linear classifier
    follows them. ``dropout=(0.5, 0.5)`` is the paper's D-D, ``(0.5, 0)`` D-ND and ``(0, 0.5)`` ND-D.

    Args:
        classes: Outputs.
        channels: Input channels.
        size: Height and width of the images; 28 is padded to 32 as LeCun did.
        dropout: The two rates.

    Source: [Bibi2019], §4 and Table 2; LeCun et al., 1998.

    >>> import torch
    >>> LeNet()(torch.randn(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """

    def __init__(
        self,
        classes: int = 10,
        channels: int = 3,
        size: int = 32,
        *,
        dropout: tuple[float, float] = (0.5, 0.5),
    ) -> None:
        super().__init__()
        padding = 2 if size == 28 else 0
        side = ((size + 2 * padding - 4) // 2 - 4) // 2
        if side < 1:
            raise OptionError(f"LeNet needs images of 16 × 16 or more, got {size} × {size}")
        self.features = nn.Sequential(
            nn.Conv2d(channels, 6, 5, padding=padding),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
        )
        first, second = dropout
        self.classifier = nn.Sequential(
            nn.Dropout(first),
            nn.Linear(16 * side * side, 120),
            nn.ReLU(),
            nn.Dropout(second),
            nn.Linear(120, 84),
            nn.ReLU(),
            nn.Linear(84, classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Logits."""
        logits: Tensor = self.classifier(self.features(images))
        return logits

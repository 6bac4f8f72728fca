"""VGG16 for small images."""

from torch import Tensor, nn

__all__ = ["VGG16"]

# Output channels of the convolutions, None where the map is halved.
_LAYOUT = (64, 64, None, 128, 128, None, 256, 256, 256, None, 512, 512, 512, None, 512, 512, 512, None)


class VGG16(nn.Module):
    """VGG16 for 32 × 32 images, with dropout before its two hidden fully connected layers.

    The paper replaces the blocks ``classifier.1`` and ``classifier.4`` by solvers.

    Args:
        classes: Outputs.
        channels: Input channels.
        width: A factor on all hidden widths.
        dropout: The rates before the two hidden fully connected layers.
        batch_norm: Whether batch normalisation follows every convolution.

    Source: [Bibi2019], §4, Tables 4 and 5; Simonyan & Zisserman, 2014.

    >>> import torch
    >>> VGG16(width=0.125)(torch.randn(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """

    def __init__(
        self,
        classes: int = 10,
        channels: int = 3,
        *,
        width: float = 1.0,
        dropout: tuple[float, float] = (0.5, 0.5),
        batch_norm: bool = False,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for wide in _LAYOUT:
            if wide is None:
                layers.append(nn.MaxPool2d(2))
                continue
            out = max(1, round(width * wide))
            layers.append(nn.Conv2d(channels, out, 3, padding=1))
            if batch_norm:
                layers.append(nn.BatchNorm2d(out))
            layers.append(nn.ReLU())
            channels = out
        self.features = nn.Sequential(*layers, nn.Flatten())
        first, second = dropout
        hidden = max(1, round(width * 512))
        self.classifier = nn.Sequential(
            nn.Dropout(first),
            nn.Linear(channels, hidden),
            nn.ReLU(),
            nn.Dropout(second),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, classes),
        )
        # Torch's own start shrinks the signal to nothing over thirteen convolutions without batch normalisation.
        for layer in self.features:
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
                nn.init.zeros_(layer.bias)  # type: ignore[arg-type]

    def forward(self, images: Tensor) -> Tensor:
        """Logits."""
        logits: Tensor = self.classifier(self.features(images))
        return logits

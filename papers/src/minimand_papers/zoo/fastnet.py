"""A convolutional network that reaches 90 % on CIFAR-10 in a quarter of an hour of one core."""

import torch
from torch import Tensor, nn

from minimand.errors import ShapeError

__all__ = ["FastNet"]


class FastNet(nn.Module):
    """A whitening convolution, three groups of two convolutions, and a head with two hidden layers.

    The design follows the speed runs on CIFAR-10 (Jordan, *94% on CIFAR-10 in 3.29 Seconds on a Single GPU*, 2024): the
    first convolution is fixed and whitens patches of 2 × 2 pixels (call :meth:`whiten` with training images), the first
    filters of the others copy their inputs, and batch norms have no scale. The head is that of the networks of
    [Bibi2019]: its blocks dropout → linear → ReLU are ``classifier.0–2`` and ``classifier.3–5``. Batch norm
    without parameters stands before it, because dropout on pooled features of unequal scale stalls training.

    Args:
        classes: Outputs.
        channels: Input channels.
        width: A factor on the channels 64, 128 and 256 of the groups.
        hidden: Units of the two hidden layers.
        dropout: The rates before the two hidden layers.

    >>> FastNet(width=0.25, hidden=32)(torch.randn(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """

    def __init__(
        self,
        classes: int = 10,
        channels: int = 3,
        *,
        width: float = 0.75,
        hidden: int = 512,
        dropout: tuple[float, float] = (0.5, 0.5),
    ) -> None:
        super().__init__()
        inputs = 8 * channels
        self.whitening = nn.Conv2d(channels, inputs, 2, bias=False)
        self.whitening.weight.requires_grad_(False)
        layers: list[nn.Module] = [self.whitening, nn.ReLU()]
        for size in (64, 128, 256):
            outputs = max(8, round(width * size))
            layers += [_convolution(inputs, outputs), nn.MaxPool2d(2), _norm(outputs), nn.ReLU()]
            layers += [_convolution(outputs, outputs), _norm(outputs), nn.ReLU()]
            inputs = outputs
        pool = (nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.BatchNorm1d(inputs, affine=False))
        self.features = nn.Sequential(*layers, *pool)
        self.classifier = head(inputs, classes, hidden=hidden, dropout=dropout)
        self.width = inputs

    @torch.no_grad()
    def whiten(self, images: Tensor, floor: float = 5e-4) -> None:
        """Set the first convolution from normalised training images: ± the eigenvectors of the second moment of their
        patches, over the root of the eigenvalues plus ``floor``."""
        patches = nn.functional.unfold(images.float(), 2).transpose(1, 2).flatten(0, 1).double()
        if patches.shape[1] != self.whitening.weight[0].numel():
            raise ShapeError(f"the network takes {self.whitening.in_channels} channels, got {images.shape[1]}")
        values, vectors = torch.linalg.eigh(patches.mT @ patches / len(patches))
        filters = (vectors / (values.clamp_min(0) + floor).sqrt()).mT.reshape(-1, *self.whitening.weight.shape[1:])
        self.whitening.weight.copy_(torch.cat([filters, -filters]))

    def forward(self, images: Tensor) -> Tensor:
        """Logits."""
        logits: Tensor = self.classifier(self.features(images))
        return logits


def head(inputs: int, classes: int, *, hidden: int, dropout: tuple[float, float]) -> nn.Sequential:
    """Two hidden layers with dropout before each, and a linear classifier with small weights."""
    first, second = dropout
    made = nn.Sequential(
        *(nn.Dropout(first), nn.Linear(inputs, hidden), nn.ReLU()),
        *(nn.Dropout(second), nn.Linear(hidden, hidden), nn.ReLU()),
        nn.Linear(hidden, classes),
    )
    linear = [layer for layer in made if isinstance(layer, nn.Linear)]
    for layer in linear:
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        nn.init.zeros_(layer.bias)
    with torch.no_grad():
        linear[-1].weight.mul_(0.3)
    return made


def _convolution(inputs: int, outputs: int) -> nn.Conv2d:
    made = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    with torch.no_grad():
        nn.init.dirac_(made.weight[: min(inputs, outputs)])
    return made


def _norm(channels: int) -> nn.BatchNorm2d:
    made = nn.BatchNorm2d(channels, momentum=0.4)
    made.weight.requires_grad_(False)
    return made

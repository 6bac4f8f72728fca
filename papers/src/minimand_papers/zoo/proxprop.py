"""The two networks of the proximal backpropagation paper, for 32 × 32 images."""

import itertools

from torch import Tensor, nn

__all__ = ["ProxPropConvNet", "ProxPropMLP"]


class ProxPropMLP(nn.Sequential):
    """The fully connected network 3072-4000-1000-4000-10 with ReLU, torch's default initialisation.

    Args:
        classes: Outputs.
        inputs: Entries of one sample, which is flattened.
        width: A factor on the hidden widths.

    Source: [Frerix2018], §5.1.

    >>> import torch
    >>> ProxPropMLP(width=0.01)(torch.randn(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """

    def __init__(self, classes: int = 10, inputs: int = 3072, *, width: float = 1.0) -> None:
        sizes = (inputs, *(max(1, round(width * n)) for n in (4000, 1000, 4000)))
        layers: list[nn.Module] = [nn.Flatten()]
        for before, after in itertools.pairwise(sizes):
            layers += [nn.Linear(before, after), nn.ReLU()]
        super().__init__(*layers, nn.Linear(sizes[-1], classes))


class ProxPropConvNet(nn.Module):
    """Three 5 × 5 convolutions with 16, 20 and 20 channels, each with ReLU and a pool of two, then one linear layer.

    Args:
        classes: Outputs.
        channels: Input channels.
        size: Height and width of the images.
        last_pool: Whether the third convolution is pooled, as the paper prints it. The authors' code leaves that
            pool out, and its linear layer has four times the inputs.

    Source: [Frerix2018], §5.3.

    >>> import torch
    >>> ProxPropConvNet()(torch.randn(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """

    def __init__(self, classes: int = 10, channels: int = 3, size: int = 32, *, last_pool: bool = True) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after in ((channels, 16), (16, 20), (20, 20)):
            layers += [nn.Conv2d(before, after, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]
        self.features = nn.Sequential(*(layers if last_pool else layers[:-1]), nn.Flatten())
        side = size // (8 if last_pool else 4)
        self.classifier = nn.Linear(20 * side * side, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits."""
        logits: Tensor = self.classifier(self.features(images))
        return logits

"""DenseNet and AGD-Net, the network of Nesterov's method."""

from collections.abc import Sequence

from torch import Tensor, nn

from minimand.errors import OptionError
from minimand.nn.blocks import DenseUpdate, Learning, OptimizationNet, Transition
from minimand.solvers.base import require_count

__all__ = ["AGDNet", "AGDNet121", "DenseNet", "DenseNet121"]


def _plain(inputs: int, growth: int, dropout: float) -> nn.Module:
    """normalisation, ReLU, 3 × 3 convolution, dropout if there is any."""
    layers = [nn.BatchNorm2d(inputs), nn.ReLU(), nn.Conv2d(inputs, growth, 3, padding=1, bias=False)]
    return nn.Sequential(*layers, *([nn.Dropout(dropout)] if dropout else []))


def _bottleneck(inputs: int, growth: int, dropout: float) -> nn.Module:
    """A 1 × 1 convolution to four times the growth before the 3 × 3 one."""
    first = [nn.BatchNorm2d(inputs), nn.ReLU(), nn.Conv2d(inputs, 4 * growth, 1, bias=False)]
    return nn.Sequential(*first, *_plain(4 * growth, growth, dropout).children())


def _transition(inputs: int, outputs: int, dropout: float) -> nn.Module:
    """normalisation, ReLU, 1 × 1 convolution, mean over 2 × 2."""
    layers = [nn.BatchNorm2d(inputs), nn.ReLU(), nn.Conv2d(inputs, outputs, 1, bias=False)]
    return nn.Sequential(*layers, *([nn.Dropout(dropout)] if dropout else []), nn.AvgPool2d(2))


class _Dense(nn.Module):
    """A stem, dense stages with transitions between them, and a classifier on the mean over the image."""

    def __init__(
        self,
        stem: nn.Module,
        channels: int,
        growth: int,
        stages: Sequence[int],
        classes: int,
        *,
        bottleneck: bool,
        dropout: float,
        past: float,
        learnable: bool | str | Learning,
    ) -> None:
        super().__init__()
        make, compression = (_bottleneck, 0.5) if bottleneck else (_plain, 1.0)
        blocks: list[nn.Module] = []
        for stage, layers in enumerate(stages):
            for _ in range(layers):
                blocks.append(make(channels, growth, dropout))
                channels += growth
            if stage + 1 < len(stages):
                fewer = int(channels * compression)
                blocks.append(Transition(_transition(channels, fewer, dropout)))
                channels = fewer
        self.stem = stem
        self.trunk = OptimizationNet(blocks, DenseUpdate(past), learnable=learnable, channels=growth)
        pool = (nn.BatchNorm2d(channels), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Sequential(*pool, nn.Linear(channels, classes))
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)
            elif isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def forward(self, images: Tensor) -> Tensor:
        """Logits."""
        logits: Tensor = self.head(self.trunk(self.stem(images)))
        return logits


class DenseNet(_Dense):
    r"""The CIFAR DenseNet of L layers and growth k: three dense stages, by default without bottlenecks.

    Its trunk is an :class:`~minimand.nn.OptimizationNet`: all past terms of Nesterov's method with α = 1, β = 0 and a
    separate block for every pair of iterates. A convolution on their concatenation is the sum of these blocks.

    Args:
        growth: k, the channels of every iterate.
        depth: L = 3m + 4 (with bottlenecks 6m + 4).
        classes: Outputs.
        channels: Input channels.
        dropout: Dropout rate after every convolution; the original has 0.2 without augmentation.
        bottleneck: 1 × 1 convolutions before the 3 × 3 ones, and transitions that halve the channels (DenseNet-BC).
        past: β; 0 is DenseNet.
        learnable: Whether β is learned, starting there; :class:`AGDNet` sets it.

    Source: [Lin2019], eq. (18) and the CIFAR table; Huang et al., 2017.

    >>> import torch
    >>> DenseNet(4, 10)(torch.randn(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """

    def __init__(
        self,
        growth: int = 12,
        depth: int = 40,
        classes: int = 10,
        channels: int = 3,
        *,
        dropout: float = 0.0,
        bottleneck: bool = False,
        past: float = 0.0,
        learnable: bool | str | Learning = False,
    ) -> None:
        require_count("growth", growth)
        per, rest = divmod(depth - 4, 6 if bottleneck else 3)
        if rest or per < 1:
            raise OptionError(f"the depth of a DenseNet is {'6m' if bottleneck else '3m'} + 4, got {depth}")
        start = 2 * growth if bottleneck else 16
        super().__init__(
            nn.Conv2d(channels, start, 3, padding=1, bias=False),
            start,
            growth,
            (per, per, per),
            classes,
            bottleneck=bottleneck,
            dropout=dropout,
            past=past,
            learnable=learnable,
        )


def AGDNet(
    growth: int = 12,
    depth: int = 40,
    classes: int = 10,
    channels: int = 3,
    *,
    dropout: float = 0.0,
    bottleneck: bool = False,
    start: float = 0.0,
    learnable: bool | str | Learning = True,
) -> DenseNet:
    r"""The accelerated network of the same blocks as :class:`DenseNet`,
    :math:`x_{k+1} = \sum_j T_{k,j}(x_j) + \sum_{j \ge 1} \beta_{k+1}^j x_j`.

    It has DenseNet's parameters and one coefficient for every pair of iterates of a stage, which start at DenseNet's
    value, ``start=0`` (the constraint "positive" needs another: 0 has no sign to keep). The input of a stage, which has
    other channels, is left out of the second sum; α would only scale the convolutions.

    Source: [Lin2019], eq. (18) and the CIFAR table.

    >>> size = lambda net: sum(p.numel() for p in net.parameters())
    >>> size(AGDNet(4, 16)) - size(DenseNet(4, 16))  # 0 + 1 + 2 + 3 in each of three stages
    18
    """
    return DenseNet(
        growth,
        depth,
        classes,
        channels,
        dropout=dropout,
        bottleneck=bottleneck,
        past=start,
        learnable=learnable,
    )


class DenseNet121(_Dense):
    """The ImageNet DenseNet-BC of 121 layers: growth 32, stages of 6, 12, 24 and 16 layers.

    Args:
        classes: Outputs.
        channels: Input channels.
        growth: Channels of every iterate.
        learnable: Whether β is learned, starting at 0; :class:`AGDNet121` sets it.

    Source: [Lin2019], the ImageNet table; Huang et al., 2017, Table 1.

    >>> sum(p.numel() for p in DenseNet121().parameters())
    7978856
    """

    def __init__(
        self,
        classes: int = 1000,
        channels: int = 3,
        *,
        growth: int = 32,
        learnable: bool | str | Learning = False,
    ) -> None:
        require_count("growth", growth)
        stem = nn.Sequential(
            nn.Conv2d(channels, 2 * growth, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(2 * growth),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        stages = (6, 12, 24, 16)
        super().__init__(
            stem, 2 * growth, growth, stages, classes, bottleneck=True, dropout=0.0, past=0.0, learnable=learnable
        )


def AGDNet121(
    classes: int = 1000, channels: int = 3, *, growth: int = 32, learnable: bool | str | Learning = True
) -> DenseNet121:
    """The accelerated network of the blocks of :class:`DenseNet121`.

    Source: [Lin2019], the ImageNet table.

    >>> sum(p.numel() for p in AGDNet121().parameters()) - 7978856  # pairs of iterates of each stage
    477
    """
    return DenseNet121(classes, channels, growth=growth, learnable=learnable)

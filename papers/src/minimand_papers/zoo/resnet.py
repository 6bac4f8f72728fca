"""ResNet and the networks that other algorithms make of it: HB-Net and DMRNet."""

from collections.abc import Callable, Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from minimand.errors import OptionError, require_positive
from minimand.nn.blocks import (
    HeavyBallUpdate,
    Learning,
    MergeUpdate,
    OptimizationNet,
    Transition,
    TwoStreamBlock,
    Update,
)

__all__ = ["DMRNet", "HBNet", "HBNet34", "ResNet", "ResNet34"]

Layer = Callable[[int, int, int], nn.Module]


class PaddedShortcut(nn.Module):
    """Every second pixel, and zeros for the new channels: a shortcut without parameters (He et al., option A)."""

    def __init__(self, extra: int, stride: int) -> None:
        super().__init__()
        self.extra = extra
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        """The smaller, deeper map."""
        front = self.extra // 2
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, front, self.extra - front))


def _convolution(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)


def _basic(inputs: int, outputs: int, stride: int) -> nn.Module:
    """convolution, normalisation, ReLU, convolution, normalisation; the ReLU after the addition is the network's."""
    return nn.Sequential(
        _convolution(inputs, outputs, stride),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
        _convolution(outputs, outputs),
        nn.BatchNorm2d(outputs),
    )


def _preactivated(inputs: int, outputs: int, stride: int) -> nn.Module:
    """normalisation, ReLU, convolution, twice (He et al., 2016)."""
    return nn.Sequential(
        nn.BatchNorm2d(inputs),
        nn.ReLU(),
        _convolution(inputs, outputs, stride),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
        _convolution(outputs, outputs),
    )


def _initialise(net: nn.Module) -> None:
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out")


class Residual(nn.Module):
    """A whole residual block, ``activation(block(x) + shortcut(x))``, for algorithms that add no iterates."""

    def __init__(self, block: nn.Module, shortcut: nn.Module | None, activation: nn.Module | None) -> None:
        super().__init__()
        self.block = block
        self.shortcut = nn.Identity() if shortcut is None else shortcut
        self.activation = nn.Identity() if activation is None else activation

    def forward(self, x: Tensor) -> Tensor:
        """The next iterate."""
        new: Tensor = self.activation(self.block(x) + self.shortcut(x))
        return new


class ResNet(nn.Module):
    r"""The CIFAR ResNet of 6n + 2 layers: three stages of n basic blocks with 16, 32 and 64 channels.

    Its trunk is an :class:`~minimand.nn.OptimizationNet`, the heavy ball at :math:`\beta_1 = 1,\ \beta_2 = 0`, proximal
    because of the ReLU after the addition. Shortcuts where the map is halved have no parameters.

    Args:
        n: Blocks per stage; 002 has 9 and 18.
        classes: Outputs.
        channels: Input channels.
        width: A factor on all hidden widths.
        preactivation: Normalise and rectify before the convolutions, and not after the addition (He et al., 2016).
        update: Another algorithm; :class:`HBNet` and :class:`DMRNet` set it. For one that adds no iterates, such as
            :class:`~minimand.nn.NesterovUpdate`, the blocks keep their own skip connections.
        learnable: Whether its coefficients are learned.

    Source: 002, the CIFAR experiment; He et al., 2015, §4.2.

    >>> import torch
    >>> net = ResNet(1, width=0.25)
    >>> net(torch.randn(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """

    def __init__(
        self,
        n: int = 3,
        classes: int = 10,
        channels: int = 3,
        *,
        width: float = 1.0,
        preactivation: bool = False,
        update: Update | None = None,
        learnable: bool | str | Learning = False,
    ) -> None:
        super().__init__()
        if n < 1:
            raise OptionError(f"a ResNet has one block per stage or more, got n={n}")
        update = HeavyBallUpdate(1.0, 0.0) if update is None else update
        widths = _widths(width, 16, 32, 64)
        make = _preactivated if preactivation else _basic
        self.stem = nn.Sequential(_convolution(channels, widths[0]))
        relu = None if preactivation else nn.ReLU()
        blocks, sizes = _stages((n, n, n), widths, make, _padded, update, relu)
        after = relu if update.skips else None
        self.trunk = OptimizationNet(blocks, update, learnable=learnable, channels=sizes, activation=after)
        last: list[nn.Module] = [nn.BatchNorm2d(widths[-1]), nn.ReLU()] if preactivation else []
        if not preactivation:
            self.stem.extend([nn.BatchNorm2d(widths[0]), nn.ReLU()])
        self.head = nn.Sequential(*last, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], classes))
        _initialise(self)

    def forward(self, images: Tensor) -> Tensor:
        """Logits."""
        logits: Tensor = self.head(self.trunk(self.stem(images)))
        return logits


def _widths(factor: float, *channels: int) -> list[int]:
    require_positive("width", factor)
    return [max(1, round(factor * wide)) for wide in channels]


def _stages(
    counts: Sequence[int],
    widths: list[int],
    make: Layer,
    shortcut: Callable[[int, int], nn.Module],
    update: Update,
    activation: nn.Module | None,
) -> tuple[list[nn.Module], list[int]]:
    """The blocks of all stages, with the channels of the iterates that each update adds up."""
    blocks: list[nn.Module] = []
    sizes: list[int] = []
    inputs = widths[0]
    for stage, (outputs, count) in enumerate(zip(widths, counts, strict=True)):
        for k in range(count):
            halves = stage > 0 and k == 0
            skip = shortcut(inputs, outputs) if halves else None
            block = make(inputs, outputs, 2 if halves else 1)
            if update.streams == 2:
                block = TwoStreamBlock(block, make(inputs, outputs, 2 if halves else 1))
            if not update.skips:
                block, skip = Residual(block, skip, activation), None
            blocks.append(Transition(block, skip) if halves else block)
            sizes.append(outputs if update.skips else inputs)
            inputs = outputs
    return blocks, sizes


def _padded(inputs: int, outputs: int) -> nn.Module:
    return PaddedShortcut(outputs - inputs, 2)


def _projected(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride=2, bias=False), nn.BatchNorm2d(outputs))


def HBNet(
    n: int = 3,
    classes: int = 10,
    channels: int = 3,
    *,
    width: float = 1.0,
    preactivation: bool = False,
    start: tuple[float, float] = (1.0, 0.0),
    learnable: bool | str | Learning = True,
) -> ResNet:
    r"""The heavy-ball network of the same blocks as :class:`ResNet`, :math:`x^+ = T(x) + \beta_1 x + \beta_2 x_-`.

    It has ResNet's parameters and two coefficients per block, which start at ResNet's values, ``start=(1, 0)``.
    Momentum starts anew where the map is halved, so with n = 1 there is none: only :math:`\beta_1 + \beta_2` enters.
    Under the constraint "positive" a :math:`\beta_2` that starts at 0 stays there.

    Source: 002, eq. (16) and the CIFAR table.

    >>> size = lambda net: sum(p.numel() for p in net.parameters())
    >>> size(HBNet(1)) - size(ResNet(1))
    6
    """
    update = HeavyBallUpdate(*start)
    return ResNet(n, classes, channels, width=width, preactivation=preactivation, update=update, learnable=learnable)


def DMRNet(
    n: int = 3,
    classes: int = 10,
    channels: int = 3,
    *,
    width: float = 1.0,
    preactivation: bool = False,
    memory: float = 0.0,
    learnable: bool | str | Learning = False,
) -> ResNet:
    r"""The merge-and-run network, :math:`x'^+ = T'(x') + \tfrac12(x' + x),\ x^+ = T(x) + \tfrac12(x' + x)`.

    Two streams with blocks of their own: n pairs per stage, so that ``DMRNet(n)`` has as many blocks as ``ResNet(2n)``
    at half its depth. ``learnable=True`` is ADMM-Net, eq. (20), started at DMRNet; ``memory=1`` starts its sums over
    all past iterates.

    Source: 002, eq. (20); Zhao et al., 2016.

    >>> size = lambda net: sum(p.numel() for p in net.parameters())
    >>> size(DMRNet(2, width=0.25)) < size(ResNet(4, width=0.25))
    True
    """
    update = MergeUpdate(0.5, 0.5, memory)
    return ResNet(n, classes, channels, width=width, preactivation=preactivation, update=update, learnable=learnable)


class ResNet34(nn.Module):
    """The ImageNet ResNet of 34 layers: stages of 3, 4, 6 and 3 basic blocks, projections where the map is halved.

    Args:
        classes: Outputs.
        channels: Input channels.
        width: A factor on all hidden widths.
        update: The algorithm of the trunk, as in :class:`ResNet`; None: ResNet's.
        learnable: Whether its coefficients are learned.

    Source: 002, the ImageNet table; He et al., 2015, Table 1.

    >>> sum(p.numel() for p in ResNet34().parameters())
    21797672
    """

    def __init__(
        self,
        classes: int = 1000,
        channels: int = 3,
        *,
        width: float = 1.0,
        update: Update | None = None,
        learnable: bool | str | Learning = False,
    ) -> None:
        super().__init__()
        widths = _widths(width, 64, 128, 256, 512)
        self.stem = nn.Sequential(
            nn.Conv2d(channels, widths[0], 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(widths[0]),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        update = HeavyBallUpdate(1.0, 0.0) if update is None else update
        relu = nn.ReLU()
        blocks, sizes = _stages((3, 4, 6, 3), widths, _basic, _projected, update, relu)
        after = relu if update.skips else None
        self.trunk = OptimizationNet(blocks, update, learnable=learnable, channels=sizes, activation=after)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], classes))
        _initialise(self)

    def forward(self, images: Tensor) -> Tensor:
        """Logits."""
        logits: Tensor = self.head(self.trunk(self.stem(images)))
        return logits


def HBNet34(
    classes: int = 1000, channels: int = 3, *, width: float = 1.0, learnable: bool | str | Learning = True
) -> ResNet34:
    """The heavy-ball network of the blocks of :class:`ResNet34`, with two coefficients per block more.

    Source: 002, the ImageNet table.

    >>> sum(p.numel() for p in HBNet34().parameters()) - 21797672
    32
    """
    return ResNet34(classes, channels, width=width, update=HeavyBallUpdate(1.0, 0.0), learnable=learnable)

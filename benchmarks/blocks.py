"""Networks that are algorithms against their plain special cases: a training step of each, and the bytes it holds.

Both networks of a pair have the same blocks.
"""

import torch
from torch import Tensor, nn

from benchmarks import Row, at_most, ratios, training_step
from minimand.nn import HeavyBallUpdate, NesterovUpdate, OptimizationNet, as_algorithm
from minimand.nn.blocks import AcceleratedUpdate, ADMMUpdate, Update
from minimand.nn.explain import held_bytes
from minimand_papers.zoo import AGDNet, DenseNet, DMRNet, HBNet, ResNet

__all__ = ["run"]


def _compare(
    plain: nn.Module, others: dict[str, tuple[nn.Module, float]], batch: int, rounds: int, *, memory: float = 1.2
) -> list[Row]:
    """Time and memory of each network over the plain one's."""
    images, labels = torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,))
    nets = [plain, *(net for net, _ in others.values())]
    base, *steps = [training_step(net, torch.optim.SGD(net.parameters(), 0.0, 0.9), images, labels) for net in nets]
    held = [held_bytes(net, images) for net in nets]
    rows = []
    for (name, (_, target)), ratio, size in zip(others.items(), ratios(base, steps, rounds), held[1:], strict=True):
        rows.append(at_most(f"{name}, step time", ratio, target))
        rows.append(at_most(f"{name}, bytes held", size / held[0], memory))
    return rows


class _Block(nn.Module):
    """A user's residual block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + x)


def _user() -> list[Row]:
    """A user's own network, before and after."""
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)]
    blocks = nn.Sequential(*(_Block(16) for _ in range(6)))
    plain = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), blocks, *head)
    forms = {name: as_algorithm(plain, name) for name in ("heavy_ball", "nesterov")}
    return _compare(plain, {f"as_algorithm(…, {name!r})": (net, 1.15) for name, net in forms.items()}, 32, 25)


def _history() -> list[Row]:
    """How memory grows with depth: the bytes of 16 blocks over those of 8, above the plain network's growth."""
    rows = []
    x = torch.randn(256, 64, requires_grad=True)

    def grown(update: object, learnable: bool) -> float:
        sizes = []
        for depth in (8, 16):
            blocks = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(depth)]
            sizes.append(held_bytes(OptimizationNet(blocks, update, learnable=learnable), x))  # type: ignore[arg-type]
        return sizes[1] - sizes[0]

    plain = grown(HeavyBallUpdate(1.0, 0.0), False)
    for name, update, learnable, target in (
        ("heavy ball, learned", HeavyBallUpdate(), True, 1.2),
        ("Nesterov, two terms, learned", NesterovUpdate(), True, 1.6),
        ("Nesterov, all past terms, fixed: running sums", AcceleratedUpdate(), False, 1.2),
        ("sum of all values, fixed: a running sum", AcceleratedUpdate("dense"), False, 1.2),
        ("Nesterov, all past terms, learned: linear by need", AcceleratedUpdate(), True, 2.0),
    ):
        rows.append(at_most(f"{name}, bytes per block", grown(update, learnable) / plain, target))
    return rows


def _trunk(update: Update, learnable: bool = False) -> nn.Module:
    """Blocks of one shape under an algorithm, between a stem and a head."""
    blocks = [_Block(16) for _ in range(6)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)]
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), OptimizationNet(blocks, update, learnable=learnable), *head)


def _others() -> list[Row]:
    """All past terms on six blocks, and two streams, which have the blocks of a network twice as deep."""
    past: dict[str, tuple[nn.Module, float]] = {
        "Nesterov, all past terms, fixed": (_trunk(AcceleratedUpdate()), 1.15),
        "Nesterov, all past terms, learned": (_trunk(AcceleratedUpdate(), True), 1.5),
    }
    rows = _compare(_trunk(NesterovUpdate(0.0)), past, 32, 25, memory=1.6)
    streams: dict[str, tuple[nn.Module, float]] = {
        "DMRNet over ResNet of its blocks": (DMRNet(2), 1.15),
        "ADMM-Net over ResNet of its blocks": (DMRNet(2, learnable=True), 1.15),
        "ADMM, fixed, over ResNet of its blocks": (ResNet(2, update=ADMMUpdate()), 1.15),
    }
    return rows + _compare(ResNet(4), streams, 32, 15)


def run() -> list[Row]:
    """Ratios of step time and memory, with the targets they were set."""
    torch.manual_seed(0)
    resnets = {
        "HB-Net, learned": (HBNet(2), 1.15),
        "HB-Net, learned per channel": (HBNet(2, learnable="channel"), 1.15),
        "heavy ball, fixed ½": (ResNet(2, update=HeavyBallUpdate()), 1.15),
        "Nesterov, two terms, fixed": (ResNet(2, update=NesterovUpdate()), 1.15),
        "Nesterov, two terms, learned": (ResNet(2, update=NesterovUpdate(), learnable=True), 1.15),
    }
    rows = _compare(ResNet(2), resnets, 32, 25)
    rows += _compare(DenseNet(12, 22), {"AGD-Net, learned": (AGDNet(12, 22), 1.15)}, 32, 15)
    return [*rows, *_others(), *_user(), *_history()]

"""What conversion costs: reading, the first call, and a training step within the budget that ``suggest`` was given."""

import copy
import itertools
import time
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from benchmarks import Ratio, Row, at_most, ratios, reported
from minimand.nn import convert, suggest
from minimand.solvers import ProxGD

BUDGET, LATE = 3.0, 5.0

T = TypeVar("T")


class Residual(nn.Module):
    """Two 3×3 convolutions with batch norm and a skip, as in ResNet-18."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.skip = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        out = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(out)) + self.skip(x))


def resnet18(classes: int = 10) -> nn.Sequential:
    """ResNet-18 for images of 224 × 224."""
    widths, layers = (64, 64, 128, 256, 512), list[nn.Module]()
    for number, (inputs, outputs) in enumerate(itertools.pairwise(widths)):
        layers += [Residual(inputs, outputs, 1 if number == 0 else 2), Residual(outputs, outputs, 1)]
    stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    return nn.Sequential(*stem, *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes))


def lenet() -> nn.Sequential:
    """LeNet with dropout before its two hidden linear layers."""
    return nn.Sequential(
        *(nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Dropout(), nn.Linear(400, 120), nn.ReLU()),
        *(nn.Dropout(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )


def perceptron() -> nn.Sequential:
    """Three hidden layers with dropout."""
    hidden = [part for n in (3072, 512, 512) for part in (nn.Linear(n, 512), nn.ReLU(), nn.Dropout())]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(512, 10))


def vgg() -> nn.Sequential:
    """Six convolutions with batch norm, pools, and a linear layer with dropout."""
    layers, inputs = list[nn.Module](), 3
    for outputs in (32, 64, 128):
        for n in (inputs, outputs):
            layers += [nn.Conv2d(n, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
        layers, inputs = [*layers, nn.MaxPool2d(2)], outputs
    head = (nn.Flatten(), nn.Dropout(), nn.Linear(2048, 256), nn.ReLU(), nn.Linear(256, 10))
    return nn.Sequential(*layers, *head)


class Patches(nn.Module):
    """A transformer with ReLU over patches of 4 × 4 pixels."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, width, 4, 4)
        one = nn.TransformerEncoderLayer(width, 4, 2 * width, batch_first=True)
        self.layers = nn.ModuleList(copy.deepcopy(one) for _ in range(3))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        tokens = self.embed(x).flatten(2).transpose(1, 2)
        for layer in self.layers:
            tokens = layer(tokens)
        return self.head(tokens.mean(1))


NETS: dict[str, Callable[[], nn.Module]] = {
    "LeNet": lenet,
    "MLP": perceptron,
    "VGG with batch norm": vgg,
    "ResNet-18": resnet18,
    "transformer": Patches,
}


def run() -> list[Row]:
    """The first call of a converted ResNet-18, then a training step of five kinds of networks."""
    return [*first_call(), *training_steps()]


def first_call() -> list[Row]:
    """How many plain forwards the first call takes longer than the second, and what ``convert`` takes."""
    rows = []
    for images in (8, 32):
        torch.manual_seed(0)
        model, x = resnet18().eval(), torch.randn(images, 3, 64, 64)
        late, planning = list[float](), list[float]()
        with torch.no_grad():
            model(x)
            plain = min(_seconds(lambda: model(x))[0] for _ in range(5))  # noqa: B023
            for _ in range(5):
                seconds, net = _seconds(lambda: convert(model, ProxGD(10), example=x))  # noqa: B023
                planning.append(seconds / plain)
                first, second = (_seconds(lambda: net(x))[0] for _ in range(2))  # noqa: B023
                late.append((first - second) / plain)
        name = f"ResNet-18, {images} images of 64×64, all layers ProxGD(10)"
        rows += [
            at_most(f"{name}: first call − second, in plain forwards", _middle(late), LATE),
            reported(f"{name}: convert, in plain forwards", _middle(planning)),
        ]
    return rows


def training_steps() -> list[Row]:
    """A training step of the network that ``suggest`` makes, relative to the plain one."""
    rows = []
    for name, make in NETS.items():
        torch.manual_seed(0)
        model, batch = make(), 16 if name == "ResNet-18" else 128
        x, y = torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,))
        plan = suggest(model, x, budget=BUDGET)
        steps = [_step(net, x, y) for net in (model, convert(model, plan))]
        (found,) = ratios(steps[0], steps[1:], 5)
        note = f"{len(plan.converted)} of {len(plan.converted) + len(plan.left) + len(plan.refused)} layers converted"
        rows.append(at_most(f"{name}, suggest(budget={BUDGET:g}): a training step", found, 1.1 * BUDGET, note))
    return rows


def _step(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    def call() -> None:
        model.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()

    return call


def _seconds(call: Callable[[], T]) -> tuple[float, T]:
    begin = time.process_time()
    result = call()
    return time.process_time() - begin, result


def _middle(values: list[float]) -> Ratio:
    return Ratio(sorted(values)[len(values) // 2], min(values), max(values))

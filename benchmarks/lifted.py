"""LPOM against SGD: time of an epoch and of a step with LPOM's gradient, and memory, on one thread."""

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from benchmarks import Ratio, Row, at_most, ratios, reported, training_step
from minimand.train.lifted import LPOM, Recipe
from minimand.train.lifted.runs import MiniBatchRun

__all__ = ["run"]

BATCHES, ROUNDS = 4, 60


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(784, 300), nn.ReLU(), nn.Linear(300, 100), nn.ReLU(), nn.Linear(100, 10))


def _ratio(data: list[tuple[Tensor, Tensor]], loss: str) -> Ratio:
    net = _net()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)
    fast = MiniBatchRun(LPOM(_net(), loss=loss))

    def sgd() -> None:
        for x, y in data:
            training_step(net, optimizer, x, y)()

    def lpom() -> None:
        for x, y in data:
            fast.batch(x, y, 0.5)

    return ratios(sgd, [lpom], ROUNDS)[0]


def _images() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 16, 5, stride=2, padding=2), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(2048, 10),
    )  # fmt: skip


def _normalized() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(2048, 10),
    )  # fmt: skip


def _gradient_ratio(make: Callable[[], nn.Module], x: Tensor, y: Tensor, rounds: int) -> Ratio:
    """A step of SGD with the gradient of ``LPOM.backward`` over one with backpropagation's."""
    plain, net = make(), make()
    ours, theirs = (torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9) for model in (net, plain))
    lpom = LPOM(net, loss="cross_entropy", example=x)

    def step() -> None:
        ours.zero_grad()
        lpom.backward(x, y)
        ours.step()

    return ratios(training_step(plain, theirs, x, y), [step], rounds)[0]


def _gradient_memory(make: Callable[[], nn.Module], x: Tensor, y: Tensor) -> float:
    """Bytes that a backward sweep of LPOM reads over those that backpropagation saves, weights left out."""
    net = make()
    weights = {parameter.untyped_storage().data_ptr() for parameter in (*net.parameters(), *net.buffers())}
    saved: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = net(x)
    saved[output.untyped_storage().data_ptr()] = output.untyped_storage().nbytes()
    lpom = LPOM(net, loss="cross_entropy", example=x)
    with torch.no_grad():
        tape = lpom.graph.forward(x, y).tape
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in (x, *tape.values.values())}
    ours = sum(size for place, size in held.items() if place not in weights)
    return ours / sum(size for place, size in saved.items() if place not in weights)


def _to_accuracy() -> list[Row]:
    """Seconds of training until 95 % accuracy on held-out digits, each method at the best of three step sizes."""
    x, y = (torch.tensor(part) for part in load_digits(return_X_y=True))
    x = (x.float() - 8) / 8
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, held = order[:1400], order[1400:]
    data = (x[train], y[train], x[held], y[held])
    spent = {
        name: min(_until(data, make) for make in makes)
        for name, makes in (
            ("SGD", [partial(_trainer, torch.optim.SGD, lr=lr, momentum=0.9) for lr in (0.01, 0.03, 0.1)]),
            ("Adam", [partial(_trainer, torch.optim.Adam, lr=lr) for lr in (1e-3, 3e-3, 1e-2)]),
            ("LPOM", [partial(_lifted, rate) for rate in (0.1, 0.3, 1.0)]),
        )
    }
    return [
        reported(
            f"LPOM / {name}: time to 95 % of held-out digits, 64-100-50-10", spent["LPOM"] / spent[name], "one seed"
        )
        for name in ("SGD", "Adam")
    ]


def _trainer(kind: Callable[..., Any], net: nn.Module, **options: float) -> Callable[[Tensor, Tensor], None]:
    optimizer = kind(net.parameters(), **options)
    return lambda x, y: training_step(net, optimizer, x, y)()


def _lifted(rate: float, net: nn.Module) -> Callable[[Tensor, Tensor], None]:
    fast = MiniBatchRun(LPOM(net, loss="cross_entropy", recipe=Recipe(rate=rate)))
    # No decay: the rate is constant, like those of the other methods.
    return lambda x, y: fast.batch(x, y, 0.0)


def _until(data: tuple[Tensor, ...], make: Callable[[nn.Module], Callable[[Tensor, Tensor], None]]) -> float:
    x, y, x_held, y_held = data
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 50), nn.ReLU(), nn.Linear(50, 10))
    step, spent = make(net), 0.0
    for _ in range(100):
        begin = time.process_time()
        for batch in torch.randperm(len(x)).split(64):
            step(x[batch], y[batch])
        spent += time.process_time() - begin
        if float((net(x_held).argmax(1) == y_held).float().mean()) >= 0.95:
            return spent
    return math.inf


def _memory(x: Tensor, y: Tensor) -> float:
    """Bytes that LPOM keeps for a batch over those of SGD's activations plus one Gram matrix."""
    net = _net()
    held: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = net(x)
    for parameter in net.parameters():
        held.pop(parameter.untyped_storage().data_ptr(), None)
    outputs = output.numel() * output.element_size()
    gram = x.shape[0] ** 2 * x.element_size()
    lpom = LPOM(net)
    with torch.no_grad():
        v = lpom._forward_variables(x, y)
        lpom.dual.run(v, lpom._minibatch_mu(), "gauss_seidel", None)
    inverses = [kept.inverse for kept in lpom.dual._inverse.values()]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in (*v.xs, *v.zs, *inverses)}
    # SGD keeps no z for ReLU; LPOM does, to start every sweep from it, and the inverses of its preconditioners.
    return (sum(storages.values()) + gram) / (sum(held.values()) + outputs + gram)


def run() -> list[Row]:
    """Ratios of time and memory, with their targets."""
    torch.manual_seed(0)
    data = [(torch.randn(128, 784), torch.randint(10, (128,))) for _ in range(BATCHES)]
    images = torch.randn(128, 3, 32, 32), torch.randint(10, (128,))
    return [
        at_most("SGD with LPOM.backward / SGD, a step of 300-100", _gradient_ratio(_net, *data[0], 200), 1.5),
        at_most("… two convolutions with stride", _gradient_ratio(_images, *images, 30), 2.0),
        at_most("… two convolutions, normalisation, max pooling", _gradient_ratio(_normalized, *images, 15), 2.0),
        at_most("bytes for LPOM.backward / SGD's activations, 300-100", _gradient_memory(_net, *data[0]), 1.2),
        at_most("… two convolutions with stride", _gradient_memory(_images, *images), 1.2),
        at_most("LPOM epoch / SGD epoch, 300-100, batch 128, squared", _ratio(data, "squared"), 1.5),
        at_most("… cross-entropy", _ratio(data, "cross_entropy"), 1.5),
        *_to_accuracy(),
        at_most(
            "bytes held for a batch / (SGD's activations + one Gram)", _memory(*data[0]), 1.0, "z and inverses, too"
        ),
    ]

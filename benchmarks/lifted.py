"""LPOM against SGD: time of an epoch at batch 128 on 784-300-100-10, and memory, on one thread."""

import torch
from torch import Tensor, nn

from benchmarks import Ratio, Row, at_most, ratios
from minimand.train.lifted import LPOM
from minimand.train.lifted.base import _Fast

__all__ = ["run"]

BATCHES, ROUNDS = 30, 9


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(784, 300), nn.ReLU(), nn.Linear(300, 100), nn.ReLU(), nn.Linear(100, 10))


def _ratio(data: list[tuple[Tensor, Tensor]], loss: str) -> Ratio:
    net = _net()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)
    fast = _Fast(LPOM(_net(), loss=loss))

    def sgd() -> None:
        for x, y in data:
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()

    def lpom() -> None:
        for x, y in data:
            fast.batch(x, y, 0.5)

    return ratios(sgd, [lpom], ROUNDS)[0]


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
        v = lpom._fresh(x, y)
        lpom.dual.run(v, lpom._mini_mu(), "gauss_seidel", None)
    inverses = [kept.inverse for kept in lpom.dual._inverse.values()]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in (*v.xs, *v.zs, *inverses)}
    # SGD keeps no z for ReLU; LPOM does, to start every sweep from it, and the inverses of its preconditioners.
    return (sum(storages.values()) + gram) / (sum(held.values()) + outputs + gram)


def run() -> list[Row]:
    """Ratios of time and memory, with the targets they were set."""
    torch.manual_seed(0)
    data = [(torch.randn(128, 784), torch.randint(10, (128,))) for _ in range(BATCHES)]
    return [
        at_most("LPOM epoch / SGD epoch, 300-100, batch 128, squared", _ratio(data, "squared"), 1.5),
        at_most("… cross-entropy", _ratio(data, "cross_entropy"), 1.5),
        at_most(
            "bytes held for a batch / (SGD's activations + one Gram)", _memory(*data[0]), 1.0, "z and inverses, too"
        ),
    ]

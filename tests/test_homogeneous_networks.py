"""Parallel subnetworks: degrees of homogeneity, regularisers under rescaling, monotone growth."""

import itertools

import numpy as np
import pytest
import torch
from torch import nn

from minimand.errors import CapabilityError, OptionError, ShapeError
from minimand.factor import ParallelNetwork, ParallelReLU, Status
from minimand.homogeneous import (
    factor_norms,
    homogeneity_degree,
    path_norm,
    product_of_norms,
    smooth_surrogate,
    weight_decay,
)


def _chain(*sizes: int, bias: bool = False, act: type[nn.Module] | None = nn.ReLU) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i, (a, b) in enumerate(itertools.pairwise(sizes)):
        layers.append(nn.Linear(a, b, bias=bias and i == 0))
        if act is not None and i < len(sizes) - 2:
            layers.append(act())
    return nn.Sequential(*layers).double()


@pytest.mark.parametrize(("sizes", "degree"), [((2, 1), 1), ((2, 3, 1), 2), ((2, 3, 3, 1), 3), ((2, 3, 3, 3, 1), 4)])
@pytest.mark.parametrize("bias", [False, True])
def test_the_degree_is_the_number_of_layers(sizes: tuple[int, ...], degree: int, bias: bool) -> None:
    net = _chain(*sizes, bias=bias)
    assert homogeneity_degree(net, torch.randn(4, 2)) == degree == len(factor_norms(net))


@pytest.mark.parametrize(
    ("layer", "reason"),
    [(nn.Sigmoid(), r"1 \(Sigmoid\) does not double"), (nn.Tanh(), r"1 \(Tanh\)"), (nn.GELU(), r"1 \(GELU\)")],
)
def test_what_is_not_homogeneous_is_refused_with_the_reason(layer: nn.Module, reason: str) -> None:
    with pytest.raises(CapabilityError, match=reason):
        ParallelNetwork(lambda: nn.Sequential(nn.Linear(2, 3), layer, nn.Linear(3, 1, bias=False)), 0.1)


def test_late_biases_and_wrong_degrees_are_refused() -> None:
    with pytest.raises(CapabilityError, match="bias after the first layer"):
        ParallelNetwork(lambda: nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)), 0.1)

    class Square(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x).square()

    with pytest.raises(CapabilityError, match="degree 2 in 1 layers"):
        ParallelNetwork(Square, 0.1)
    with pytest.raises(OptionError, match="regularizer"):
        ParallelNetwork(lambda: _chain(2, 1), 0.1, regularizer="l1")
    with pytest.raises(ShapeError, match="outputs of shape"):
        ParallelNetwork(lambda: _chain(2, 3, 1), 0.1).fit(torch.ones(4, 2).double(), torch.ones(4).double())


def test_pooling_and_leaky_relu_are_homogeneous() -> None:
    net = nn.Sequential(nn.Conv1d(1, 4, 3), nn.LeakyReLU(), nn.MaxPool1d(2), nn.Flatten(), nn.Linear(12, 1, bias=False))
    assert homogeneity_degree(net, torch.randn(2, 1, 8)) == 2


@pytest.mark.parametrize("depth", [2, 3, 4])
def test_the_regularizers_degrees_and_their_order(depth: int) -> None:
    net = _chain(*[3] * depth, 1)
    product, surrogate, decay = (f(net).item() for f in (product_of_norms, smooth_surrogate, weight_decay))
    assert surrogate >= product
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(2)
    assert product_of_norms(net).item() == pytest.approx(2**depth * product)
    assert smooth_surrogate(net).item() == pytest.approx(2**depth * surrogate)
    assert weight_decay(net).item() == pytest.approx(4 * decay)
    with torch.no_grad():
        for p in net.parameters():
            p.div_(p.norm())
    assert smooth_surrogate(net).item() == pytest.approx(product_of_norms(net).item())


def test_the_path_norm_sums_over_paths() -> None:
    net = _chain(3, 4, 2, 1)
    A, B, C = (layer.weight.detach().square() for layer in net if isinstance(layer, nn.Linear))
    want = sum(C[0, k] * B[k, j] * A[j, i] for i in range(3) for j in range(4) for k in range(2))
    assert path_norm(net, torch.randn(5, 3).double()).item() == pytest.approx(float(want) ** 0.5)
    ones = sum(float(v) for v in (C.sqrt() @ B.sqrt() @ A.sqrt()).flatten())
    assert path_norm(net, torch.randn(5, 3).double(), 1.0).item() == pytest.approx(ones)
    # Paths only add up, so their norm is at most the product of the layers' norms.
    assert path_norm(net, torch.randn(5, 3).double()) <= product_of_norms(net)


def test_growth_reaches_the_certified_optimum_of_one_hidden_layer() -> None:
    torch.manual_seed(0)
    x = torch.linspace(-2, 2, 15, dtype=torch.float64)[:, None]
    y = torch.sin(2 * x)
    grown = ParallelNetwork(lambda: _chain(1, 1, 1, bias=True), 0.5, restarts=4).fit(x, y)
    best = ParallelReLU(0.5).fit(x.numpy(), y.numpy()[:, 0])
    assert best.certificate_.status is Status.CERTIFIED
    assert grown.history_[-1] >= best.objective_ * (1 - 1e-4)
    assert grown.history_[-1] == pytest.approx(best.objective_, rel=5e-3)
    assert grown.certificate_.status is Status.UNDECIDED
    assert all(b < a for a, b in zip(grown.history_, grown.history_[1:], strict=False))
    assert grown.objective(x, y).item() == pytest.approx(grown.history_[-1])


def test_linear_subnetworks_are_certified_by_the_spectral_norm() -> None:
    """Deep linear networks in parallel are the nuclear norm: the optimum is singular value thresholding."""
    torch.manual_seed(0)
    Y = torch.randn(6, 4, dtype=torch.float64)
    net = ParallelNetwork(lambda: _chain(6, 1, 4, act=None), 0.8, regularizer="surrogate", tol=1e-4)
    net.fit(torch.eye(6, dtype=torch.float64), Y)
    values = torch.linalg.svdvals(Y)
    shrunk = (values - 0.8).clamp_min(0)
    optimum = 0.5 * (values - shrunk).square().sum() + 0.8 * shrunk.sum()
    assert net.certificate_.status is Status.CERTIFIED
    assert net.history_[-1] == pytest.approx(optimum.item(), rel=1e-4)
    assert net.certificate_.gap >= net.history_[-1] - optimum.item() - 1e-10
    assert len(net.subnetworks) == int((shrunk > 0).sum())


def test_weight_decay_is_trapped_at_zero_where_degrees_differ() -> None:
    """Near zero a chain of three layers is of third order and weight decay of second: zero is a local minimum."""
    torch.manual_seed(0)
    x = torch.randn(20, 3, dtype=torch.float64)
    y = x[:, :1]
    ends = {}
    for regularizer in ("weight_decay", "surrogate"):
        torch.manual_seed(1)
        net = ParallelNetwork(lambda: _chain(3, 2, 2, 1, act=None), 1.0, regularizer=regularizer)
        net.subnetworks.append(net.make_subnetwork())
        with torch.no_grad():
            for p in net.parameters():
                p.mul_(0.1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.03)
        for _ in range(800):
            optimizer.zero_grad()
            net.objective(x, y).backward()
            optimizer.step()
        ends[regularizer] = float(net.predict(x).norm())
    assert ends["weight_decay"] < 1e-6
    assert ends["surrogate"] > 0.5 * float(y.norm())


def test_weight_decay_of_three_layers_certifies_nothing() -> None:
    torch.manual_seed(0)
    x = torch.randn(10, 3, dtype=torch.float64)
    net = ParallelNetwork(lambda: _chain(3, 2, 2, 1, act=None), 1.0, regularizer="weight_decay", initial=1)
    net.fit(x, x[:, :1])
    assert net.certificate_.status is not Status.CERTIFIED
    assert net.certificate_.polar_upper == float("inf")
    assert net.certificate_.method == "degrees differ"


def test_the_module_trains_in_any_loop() -> None:
    torch.manual_seed(0)
    net = ParallelNetwork(lambda: _chain(2, 2, 1), 1e-3)
    x, y = torch.randn(16, 2).double(), torch.ones(16, 1).double()
    assert net(x).shape == y.shape
    assert net.penalty().item() == 0
    net.subnetworks.extend(net.make_subnetwork() for _ in range(3))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    before = net.objective(x, y).item()
    for _ in range(20):
        optimizer.zero_grad()
        net.objective(x, y).backward()
        optimizer.step()
    assert net.objective(x, y).item() < before
    assert len(list(net.parameters())) == 6
    assert np.isfinite(before)

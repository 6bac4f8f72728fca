"""Upper bounds exceed every slope that an ascent finds, certified gaps contain the true optimum, fits keep dtypes."""

import copy
import itertools
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from scipy.optimize import brentq
from torch import Tensor, nn

from minimand.errors import CapabilityError, OptionError, ShapeError
from minimand.factor import ParallelNetwork, ParallelReLU, Status
from minimand.homogeneous import path_norm, product_of_norms
from minimand.homogeneous.bound import polar_bound
from minimand.homogeneous.degree import require_homogeneous


def _linear(*sizes: int, bias: bool = False) -> list[nn.Module]:
    return [nn.Linear(a, b, bias=bias and i == 0) for i, (a, b) in enumerate(itertools.pairwise(sizes))]


def _chain(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(*layers)


def _conv(*sizes: int, bias: bool = False, **options: int) -> nn.Module:
    return nn.Conv2d(*sizes, bias=bias, **options)  # type: ignore[arg-type]


class _Doubled(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class _Tripled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 3 * super().forward(x)


def _hooked() -> nn.Module:
    net = nn.Linear(3, 2, bias=False)
    net.register_forward_hook(lambda module, inputs, output: 2 * output)
    return net


def _tied() -> nn.Module:
    first, second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    second.weight = first.weight
    return nn.Sequential(first, second)


# A subnetwork, the shapes of its inputs and outputs, and its bound: attained, true but loose, or none.
PATTERNS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], tuple[int, ...], str]] = {
    "one layer": (lambda: nn.Linear(3, 2, bias=False), (9, 3), (9, 2), "attained"),
    "one layer with a bias": (lambda: nn.Linear(3, 2), (9, 3), (9, 2), "attained"),
    "one layer, one output": (lambda: nn.Linear(3, 1), (9, 3), (9, 1), "attained"),
    "two layers": (lambda: _chain(*_linear(3, 2, 2)), (9, 3), (9, 2), "attained"),
    "two layers with a bias": (lambda: _chain(*_linear(3, 1, 2, bias=True)), (9, 3), (9, 2), "attained"),
    "three layers": (lambda: _chain(*_linear(3, 2, 2, 2)), (9, 3), (9, 2), "attained"),
    "nested": (lambda: _chain(nn.Identity(), _chain(*_linear(3, 2)), *_linear(2, 2)), (9, 3), (9, 2), "attained"),
    "positions": (lambda: nn.Linear(3, 2), (5, 2, 3), (5, 2, 2), "attained"),
    "positions, two layers": (lambda: _chain(*_linear(3, 1, 2)), (5, 2, 3), (5, 2, 2), "attained"),
    "flattened": (lambda: _chain(nn.Flatten(), *_linear(6, 2)), (5, 2, 3), (5, 2), "attained"),
    "ReLU": (lambda: _chain(nn.Linear(3, 2), nn.ReLU(), *_linear(2, 2)), (9, 3), (9, 2), "loose"),
    "ReLU at the end": (lambda: _chain(*_linear(3, 2), nn.ReLU()), (9, 3), (9, 2), "loose"),
    "leaky ReLU": (lambda: _chain(*_linear(3, 2), nn.LeakyReLU(-1.0), *_linear(2, 2)), (9, 3), (9, 2), "loose"),
    "ReLU, positions": (lambda: _chain(*_linear(3, 2), nn.ReLU(), *_linear(2, 2)), (5, 2, 3), (5, 2, 2), "loose"),
    "ReLU first": (lambda: _chain(nn.ReLU(), *_linear(3, 2)), (9, 3), (9, 2), "attained"),
    "steep leaky ReLU": (lambda: _chain(*_linear(3, 2), nn.LeakyReLU(4.0), *_linear(2, 2)), (9, 3), (9, 2), "loose"),
    "flattened between": (lambda: _chain(*_linear(3, 2), nn.Flatten(), *_linear(4, 2)), (5, 2, 3), (5, 2), "loose"),
    "maxout": (lambda: _chain(nn.Linear(3, 6), nn.MaxPool1d(3), *_linear(2, 2)), (9, 3), (9, 2), "loose"),
    "convolution": (lambda: nn.Conv1d(2, 2, 3, bias=False), (5, 2, 7), (5, 2, 5), "loose"),
    "two convolutions": (
        lambda: _chain(_conv(1, 2, 3), nn.ReLU(), _conv(2, 2, 2)),
        (4, 1, 5, 5),
        (4, 2, 2, 2),
        "loose",
    ),
    "convolution, circular": (
        lambda: _chain(nn.Conv1d(1, 2, 3, padding=1, padding_mode="circular"), nn.ReLU(), nn.Flatten(), *_linear(8, 2)),
        (5, 1, 4),
        (5, 2),
        "loose",
    ),
    "convolution, stride and dilation": (
        lambda: _chain(_conv(1, 2, 3, padding=2, stride=2, dilation=2), nn.ReLU(), nn.Flatten(), *_linear(18, 2)),
        (4, 1, 5, 5),
        (4, 2),
        "loose",
    ),
    "convolution, groups": (lambda: _conv(2, 4, 2, groups=2, bias=True), (4, 2, 3, 3), (4, 4, 2, 2), "loose"),
    "three dimensions": (
        lambda: _chain(nn.Conv3d(1, 2, 2), nn.ReLU(), nn.AdaptiveAvgPool3d(1), nn.Flatten(), *_linear(2, 2)),
        (4, 1, 3, 3, 3),
        (4, 2),
        "loose",
    ),
    "overlapping maxima": (
        lambda: _chain(_conv(1, 2, 2, bias=True), nn.MaxPool2d(3, 1), nn.ReLU(), nn.Flatten(), *_linear(8, 2)),
        (4, 1, 5, 5),
        (4, 2),
        "loose",
    ),
    "means": (
        lambda: _chain(_conv(1, 2, 2), nn.AvgPool2d(3, 2, 1, True, False), nn.ReLU(), nn.Flatten(), *_linear(18, 2)),
        (4, 1, 6, 6),
        (4, 2),
        "loose",
    ),
    "reflected": (
        lambda: _chain(nn.Conv1d(1, 2, 3, padding=1, padding_mode="reflect"), nn.Flatten(), *_linear(8, 2)),
        (5, 1, 4),
        (5, 2),
        "none",
    ),
    "a divisor": (
        lambda: _chain(_conv(1, 2, 2), nn.AvgPool2d(2, divisor_override=1), nn.Flatten(), *_linear(8, 2)),
        (4, 1, 5, 5),
        (4, 2),
        "none",
    ),
    "own forward": (lambda: _Doubled(*_linear(3, 2)), (9, 3), (9, 2), "none"),
    "own layer": (lambda: _Tripled(3, 2, bias=False), (9, 3), (9, 2), "none"),
    "hook": (_hooked, (9, 3), (9, 2), "none"),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 2, bias=False)), (9, 3), (9, 2), "none"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", PATTERNS)
def test_what_the_ascent_finds_is_below_the_bound(name: str, dtype: torch.dtype) -> None:
    make, inputs, outputs, kind = PATTERNS[name]
    x, y = torch.randn(inputs, dtype=dtype), torch.randn(outputs, dtype=dtype)
    # With so large a λ nothing grows: the residual is y.
    net = ParallelNetwork(make, 1e6, restarts=4).fit(x, y)
    found, upper = net.certificate_.polar_lower, polar_bound(make(), x, y)[0]
    assert 0 < found <= upper == net.certificate_.polar_upper
    assert (net.certificate_.status is Status.CERTIFIED) == (kind != "none")
    assert math.isinf(upper) == (kind == "none")
    if kind == "attained":
        assert found == pytest.approx(upper, rel=1e-5)


def _one_layer_optimum(X: Tensor, Y: Tensor, lam: float) -> float:
    """min ½‖Y − XM‖² + λ‖M‖: M = (XᵀX + μ)⁻¹XᵀY with μ‖M‖ = λ."""

    def solution(mu: float) -> Tensor:
        return torch.linalg.solve(X.mT @ X + mu * torch.eye(X.shape[1], dtype=X.dtype), X.mT @ Y)

    M = solution(brentq(lambda mu: mu * float(solution(mu).norm()) - lam, 1e-9, 1e9, xtol=1e-13))
    return float(0.5 * (Y - X @ M).square().sum() + lam * M.norm())


def _two_layer_optimum(X: Tensor, Y: Tensor, lam: float) -> float:
    """min ½‖Y − XM‖² + λ‖M‖* for orthonormal columns: singular value thresholding of XᵀY."""
    values = torch.linalg.svdvals(X.mT @ Y)
    outside = (Y - X @ (X.mT @ Y)).square().sum()
    shrunk = (values - lam).clamp_min(0)
    return float(0.5 * outside + 0.5 * (values - shrunk).square().sum() + lam * shrunk.sum())


@pytest.mark.parametrize("lam", [0.1, 0.7])
@pytest.mark.parametrize("positions", [False, True])
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_certified_is_the_known_optimum(layers: int, positions: bool, lam: float) -> None:
    X = torch.linalg.qr(torch.randn(12, 3, dtype=torch.float64)).Q
    Y = torch.randn(12, 4, dtype=torch.float64)
    x, y = (X.reshape(4, 3, 3), Y.reshape(4, 3, 4)) if positions else (X, Y)
    bias = layers == 1
    net = ParallelNetwork(lambda: _chain(*_linear(3, *[2] * (layers - 1), 4, bias=bias)), lam, tol=1e-4, restarts=4)
    net.fit(x, y)
    if bias:
        optimum = _one_layer_optimum(torch.cat([X, torch.ones_like(X[:, :1])], 1), Y, lam)
    else:
        optimum = _two_layer_optimum(X, Y, lam)
    assert net.certificate_.status is Status.CERTIFIED
    assert optimum * (1 - 1e-9) <= net.history_[-1] <= optimum * (1 + 1e-4)
    assert net.certificate_.gap >= net.history_[-1] - optimum - 1e-9


def test_a_layer_of_several_outputs_is_not_judged_by_the_spectral_norm() -> None:
    """With λ between the spectral and the Frobenius norm of RᵀX zero is not optimal, and is not certified."""
    x, y = torch.eye(2, dtype=torch.float64), torch.eye(2, dtype=torch.float64)
    net = ParallelNetwork(lambda: nn.Linear(2, 2, bias=False), 1.2, tol=1e-4).fit(x, y)
    # ‖Y‖ = √2: block soft thresholding leaves ½λ² + λ(√2 − λ), below the 1 of zero.
    assert net.history_[-1] == pytest.approx(0.5 * 1.2**2 + 1.2 * (2**0.5 - 1.2), rel=1e-6)
    assert net.certificate_.status is Status.CERTIFIED


@pytest.mark.filterwarnings("ignore:.*stopped before its certificate")
@pytest.mark.parametrize("regularizer", ["product", "surrogate", "path"])
def test_the_direction_attains_the_lower_bound(regularizer: Any) -> None:
    x, y = torch.randn(12, 2, dtype=torch.float64), torch.randn(12, 2, dtype=torch.float64)
    make = lambda: _chain(nn.Linear(2, 2), nn.ReLU(), *_linear(2, 2))  # noqa: E731
    net = ParallelNetwork(make, 0.5, regularizer=regularizer, max_networks=2, restarts=2, descent=60)
    assert net.direction_ is None
    net.fit(x, y)
    found = net.direction_
    size = path_norm(found, x) if regularizer == "path" else product_of_norms(found)
    assert size.item() == pytest.approx(1.0)
    slope = ((y - net.predict(x)) * found(x)).sum().item()
    assert slope == pytest.approx(net.certificate_.polar_lower, rel=1e-9)
    assert not any(p is q for p in net.parameters() for q in found.parameters())


@pytest.mark.filterwarnings("ignore:.*stopped before its certificate")
@pytest.mark.parametrize("features", [1, 5])
def test_the_direction_of_a_hidden_layer_attains_the_lower_bound(features: int) -> None:
    x, y = torch.randn(20, features, dtype=torch.float64), torch.randn(20, 2, dtype=torch.float64)
    model = ParallelReLU(0.5, random_state=0, max_rounds=2, descent=50).fit(x.numpy(), y.numpy())
    w = torch.tensor(model.direction_)
    hidden = torch.relu(torch.cat([x, torch.ones(20, 1)], 1) @ w)
    slope = ((y - torch.tensor(model.predict(x.numpy()))).mT @ hidden).norm().item()
    assert w.norm().item() == pytest.approx(1.0)
    assert slope == pytest.approx(model.certificate_.polar_lower, rel=1e-9)


def test_convolutions_of_full_length_are_neurons() -> None:
    """A kernel as long as its input is a ReLU neuron with a bias, for which ParallelReLU certifies the optimum."""
    x = torch.linspace(-2, 2, 15, dtype=torch.float64)[:, None]
    y = torch.sin(2 * x)
    make = lambda: _chain(nn.Conv1d(1, 1, 1), nn.ReLU(), nn.Flatten(), nn.Linear(1, 1, bias=False))  # noqa: E731
    net = ParallelNetwork(make, 0.5, restarts=12).fit(x[:, None], y)  # six starts miss it in one seed of four
    best = ParallelReLU(0.5).fit(x.numpy(), y.numpy()[:, 0])
    assert best.objective_ * (1 - 1e-4) <= net.history_[-1] <= best.objective_ * (1 + 5e-3)
    assert net.certificate_.status is Status.UNDECIDED
    assert net.certificate_.gap >= net.history_[-1] - best.objective_
    assert net.certificate_.polar_lower <= net.certificate_.polar_upper < math.inf


def test_convolutions_that_are_not_homogeneous_are_refused_at_the_fit() -> None:
    x, y = torch.randn(4, 1, 6), torch.randn(4, 1)
    net = ParallelNetwork(
        lambda: _chain(nn.Conv1d(1, 2, 3), nn.Sigmoid(), nn.Flatten(), nn.Linear(8, 1, bias=False)), 0.5
    )
    with pytest.raises(CapabilityError, match=r"1 \(Sigmoid\) does not double"):
        net.fit(x, y)


@pytest.mark.parametrize(
    "layer", [nn.BatchNorm1d(2), nn.Dropout(0.2), nn.AlphaDropout(0.2), nn.RReLU()], ids=lambda m: type(m).__name__
)
def test_what_changes_in_training_is_refused_by_name_however_deep(layer: nn.Module) -> None:
    name = type(layer).__name__
    net = _chain(nn.Linear(3, 2), _chain(nn.Identity(), _chain(layer)), *_linear(2, 1))
    with pytest.raises(CapabilityError, match=rf"1\.1\.0 \({name}\)"):
        ParallelNetwork(lambda: net, 0.5)
    with pytest.raises(CapabilityError, match=rf"1 \({name}\)"):
        ParallelNetwork(lambda: _chain(nn.Conv1d(1, 2, 3), layer), 0.5)


def test_each_layer_enters_the_output_once() -> None:
    """Degree two in two layers does not suffice: the product of norms is zero if one norm is."""

    class Unequal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 2, bias=False), nn.Linear(3, 2, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) * self.a(x) + self.b(x) * self.b(x)

    for make in (Unequal, _tied):
        with pytest.raises(CapabilityError, match="must enter the output once"):
            require_homogeneous(make(), torch.randn(4, 3))


@pytest.mark.parametrize("lam", [1e-3, 1e-1])
def test_mismatched_degrees_are_undecided_however_steep(lam: float) -> None:
    x, y = torch.randn(10, 3), torch.randn(10, 2)
    net = ParallelNetwork(lambda: _chain(*_linear(3, 2, 2, 2)), lam, regularizer="weight_decay", initial=1, descent=20)
    net.fit(x, y)
    assert net.certificate_.status is Status.UNDECIDED
    net = ParallelNetwork(lambda: nn.Linear(3, 2), lam, regularizer="weight_decay").fit(x, y)
    assert net.certificate_.polar_lower > lam
    assert net.certificate_.status is Status.UNDECIDED


def test_the_path_norm_of_one_unit_is_the_product_of_norms() -> None:
    """In parallel it is the nuclear norm, but without an upper bound nothing is certified."""
    X = torch.linalg.qr(torch.randn(8, 3, dtype=torch.float64)).Q
    Y = torch.randn(8, 2, dtype=torch.float64)
    net = ParallelNetwork(lambda: _chain(*_linear(3, 1, 2)), 0.4, regularizer="path", restarts=4).fit(X, Y)
    assert net.history_[-1] == pytest.approx(_two_layer_optimum(X, Y, 0.4), rel=1e-4)
    assert net.certificate_.status is Status.UNDECIDED
    assert net.penalty().item() == pytest.approx(0.4 * sum(product_of_norms(n).item() for n in net.subnetworks))
    assert net.penalty(X).item() == pytest.approx(net.penalty().item())


@pytest.mark.parametrize("order", [1.0, 2.0, 3.0])
def test_the_path_norm_has_a_gradient_at_zero(order: float) -> None:
    net = _chain(*_linear(3, 2, 2))
    for cut in (net[1:], net):
        with torch.no_grad():
            for parameter in cut.parameters():
                parameter.zero_()
        value = path_norm(net, torch.ones(1, 3), order)
        gradients = torch.autograd.grad(value, list(net.parameters()))
        assert value.item() == 0
        assert all(bool(torch.isfinite(g).all()) for g in gradients)


@pytest.mark.filterwarnings("ignore:.*stopped before its certificate")
def test_the_path_norm_of_convolutions_needs_inputs() -> None:
    make = lambda: _chain(nn.Conv1d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 1, bias=False))  # noqa: E731
    net = ParallelNetwork(make, 0.5, regularizer="path", max_networks=1, restarts=1, descent=10)
    net.fit(torch.randn(6, 1, 6), torch.randn(6, 1))
    assert len(net.subnetworks) == 1
    assert net.penalty(torch.randn(1, 1, 6)).item() > 0
    with pytest.raises(OptionError, match=r"penalty\(x\)"):
        net.penalty()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_precision_follows_the_inputs(dtype: torch.dtype) -> None:
    x, y = torch.randn(8, 3, dtype=dtype), torch.randn(8, 2)
    net = ParallelNetwork(lambda: _chain(*_linear(3, 1, 2)), 0.3, initial=1, restarts=2, descent=30)
    assert net(x).dtype == dtype
    net.fit(x, y)
    assert {p.dtype for p in net.parameters()} == {dtype} == {p.dtype for p in net.direction_.parameters()}
    assert net.predict(x).dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("exponents", [(36, 0), (-36, 0), (24, -24)])
@pytest.mark.parametrize("regularizer", ["product", "weight_decay"])
@pytest.mark.parametrize("layers", [2, 3])
def test_the_scale_of_the_data_does_not_matter(layers: int, regularizer: Any, exponents: Any, dtype: Any) -> None:
    """(2^e X, 2^t Y, 2^(e+t) λ) has the solution of (X, Y, λ), with scaled outputs, to the last digit."""
    x, y = torch.tensor([[1.0, 0.5], [-1.0, 2.0], [0.5, -1.5], [2.0, 1.0]], dtype=dtype), torch.eye(4, 1, dtype=dtype)

    def fitted(e: int, t: int) -> ParallelNetwork:
        torch.manual_seed(0)
        net = ParallelNetwork(
            lambda: _chain(*[part for layer in _linear(*[2] * layers, 1) for part in (layer, nn.ReLU())][:-1]),
            lam=0.1 * 2.0 ** (e + t if regularizer == "product" else 2 * t - 2 * (t - e) / layers),
            regularizer=regularizer,
            initial=1,
            restarts=2,
            descent=30,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return net.fit(2.0**e * x, 2.0**t * y)

    (e, t), plain = exponents, fitted(0, 0)
    scaled = fitted(e, t)
    assert [2.0 ** (-2 * t) * value for value in scaled.history_] == plain.history_
    assert scaled.certificate_.relative_gap == plain.certificate_.relative_gap
    assert torch.equal(scaled.predict(2.0**e * x) * 2.0**-t, plain.predict(x))


def test_a_grown_state_is_loaded_into_a_fresh_network() -> None:
    x, y = torch.randn(8, 3, dtype=torch.float64), torch.randn(8, 2, dtype=torch.float64)

    def fresh() -> ParallelNetwork:
        return ParallelNetwork(lambda: _chain(*_linear(3, 1, 2)), 0.2, restarts=2, descent=30)

    grown = fresh().fit(x, y)
    assert len(grown.subnetworks) > 1
    other = fresh()
    for _ in range(2):
        other.load_state_dict(grown.state_dict())
        assert torch.equal(other.predict(x), grown.predict(x))
    copied = copy.deepcopy(fresh())
    copied.load_state_dict(grown.state_dict())
    assert torch.equal(copied.predict(x), grown.predict(x))
    wrapped = nn.ModuleDict({"net": fresh()})
    wrapped.load_state_dict({f"net.{key}": value for key, value in grown.state_dict().items()})
    assert torch.equal(wrapped["net"](x), grown(x))
    smaller = fresh()
    smaller.subnetworks.append(smaller.make_subnetwork().double())
    grown.load_state_dict(smaller.state_dict())
    assert torch.equal(grown.predict(x), smaller.predict(x))


def test_bad_input_is_one_sentence() -> None:
    make = lambda: _chain(*_linear(3, 1, 2))  # noqa: E731
    for initial in (-1, 1.5, True, "two", 21):
        with pytest.raises(OptionError, match="initial must be a whole number from 0"):
            ParallelNetwork(make, 0.1, initial=initial)
    net = ParallelNetwork(make, 0.1)
    with pytest.raises(ShapeError, match=r"do not take inputs of shape \(4, 5\)"):
        net.fit(torch.randn(4, 5), torch.randn(4, 2))
    net.fit(torch.randn(4, 3), torch.randn(4, 2))
    with pytest.raises(ShapeError, match=r"do not take inputs of shape \(4, 5\)"):
        net.predict(torch.randn(4, 5))
    with pytest.raises(CapabilityError, match="x must be a tensor"):
        net.fit(torch.ones(4, 3, dtype=torch.int64), torch.randn(4, 2))

    def zeros() -> nn.Module:
        net = nn.Linear(3, 2, bias=False)
        nn.init.zeros_(net.weight)
        return net

    with pytest.raises(OptionError, match="layer of zeros"):
        ParallelNetwork(zeros, 0.1).fit(torch.randn(4, 3), torch.randn(4, 2))


def test_a_warning_names_the_callers_line():
    torch.manual_seed(0)
    net = ParallelNetwork(lambda: _chain(nn.Linear(2, 1, bias=False), nn.ReLU(), *_linear(1, 1)), 0.01, max_networks=1)
    x = torch.randn(20, 2)
    with pytest.warns(UserWarning, match="stopped before its certificate") as caught:
        net.fit(x, x.relu() @ torch.tensor([[1.0], [-1.0]]))
    assert caught[0].filename == __file__

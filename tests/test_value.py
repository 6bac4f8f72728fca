"""Values and integrals: the Fenchel–Young pair of an activation, the dilogarithm, and +inf outside the domain."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.integrate import quad
from scipy.special import spence
from torch import Tensor, nn

from minimand import functions as mf
from minimand.functions.curves import dilogarithm

from .cases.functions import SEPARABLE, FunctionCase, cases

ENERGY = tuple(case for case in SEPARABLE if isinstance(case.function, mf.Monotone)) + tuple(
    FunctionCase(name, mf.from_activation(name))
    for name in ("relu", "leaky_relu", "hardtanh", "relu6", "softshrink", "identity")
)
Z = torch.tensor([-30.0, -4.0, -1.1, -0.2, 0.0, 0.3, 0.7, 2.5, 6.5, 40.0], dtype=torch.float64)


@cases(ENERGY)
def test_fenchel_young_pair(case: FunctionCase) -> None:
    assert isinstance(case.function, mf.Separable)
    x = case.function.prox(Z)
    lifted = case.function.values(x) + 0.5 * x * x
    assert torch.allclose(lifted + case.function.primitive(Z), Z * x, rtol=1e-9, atol=1e-8)
    # Any other pair leaves a gap.
    shifted = case.function.primitive(Z.flip(0))
    assert bool((lifted + shifted - Z.flip(0) * x >= -1e-7).all())


@cases(SEPARABLE)
def test_the_primitive_integrates_the_prox(case: FunctionCase) -> None:
    assert isinstance(case.function, mf.Separable)

    def prox(s: float) -> float:
        return float(case.function.prox(torch.tensor(s, dtype=torch.float64)))

    for z in (-6.0, -0.8, 0.0, 0.4, 3.0):
        expected, _ = quad(prox, 0.0, z, points=sorted({0.0, 0.25 * z, 0.5 * z}), epsabs=1e-11)
        got = float(case.function.primitive(torch.tensor(z, dtype=torch.float64)))
        assert got == pytest.approx(expected, abs=2e-8)


@cases(SEPARABLE)
def test_the_primitive_has_the_prox_as_its_derivative(case: FunctionCase) -> None:
    assert isinstance(case.function, mf.Separable)
    z = Z[1:-1].clone().requires_grad_()
    (grad,) = torch.autograd.grad(case.function.primitive(z).sum(), z)
    assert torch.allclose(grad, case.function.prox(z), atol=1e-8)


@pytest.mark.parametrize("act", ["tanh", "sigmoid", "softplus", "elu", "softsign", "logsigmoid", "tanhshrink"])
def test_closed_forms_agree_with_quadrature(act: str) -> None:
    closed = mf.from_activation(act)
    assert isinstance(closed, mf.Monotone)
    generic = mf.Monotone(closed.phi)
    x = closed.prox(Z[1:-2])
    assert torch.allclose(generic.values(x), closed.values(x), atol=1e-8)
    assert torch.allclose(generic.primitive(Z), closed.primitive(Z), rtol=1e-8, atol=1e-8)


@cases(tuple(case for case in ENERGY if isinstance(case.function, mf.Monotone | mf.LeakyHinge | mf.L1)))
def test_the_gradient_of_the_value_is_the_residual_of_the_prox(case: FunctionCase) -> None:
    z = torch.tensor([-1.3, -0.6, -0.1, 0.6, 0.7, 1.2], dtype=torch.float64)
    x = case.function.prox(z).detach().requires_grad_()
    (grad,) = torch.autograd.grad(case.function.value(x), x)
    # Where the activation is flat or kinked, the subgradient is not unique.
    slope = torch.func.grad(lambda z: case.function.prox(z).sum())(z)
    assert torch.allclose(grad[slope > 0], (z - x)[slope > 0].detach(), atol=1e-9)


def test_values_of_the_table() -> None:
    """[Lin2019], Table 1, up to the constants that the Fenchel–Young equality fixes."""
    x = torch.tensor([0.2, 0.5, 0.9], dtype=torch.float64)
    half = 0.5 * x * x
    entropy = x * x.log() + (1 - x) * (1 - x).log()
    assert torch.allclose(mf.from_activation("sigmoid").values(x), entropy + math.log(2) - half)
    both = 0.5 * ((1 - x) * (1 - x).log() + (1 + x) * (1 + x).log())
    assert torch.allclose(mf.from_activation("tanh").values(x), both - half)
    alpha = 0.5
    elu = (alpha - x * alpha) * ((1 - x).log() - 1) + alpha
    assert torch.allclose(mf.from_activation(nn.ELU(alpha)).values(-alpha * x), elu - 0.5 * (alpha * x) ** 2)
    leaky = (1 - 0.01) / (2 * 0.01) * x * x
    assert torch.allclose(mf.from_activation("leaky_relu").values(-x), leaky)
    softplus = torch.from_numpy(spence(1 - np.exp(-x.numpy()))) - math.pi**2 / 12
    assert torch.allclose(mf.from_activation("softplus").values(x), softplus)


def test_dilogarithm() -> None:
    y = torch.cat([torch.linspace(-1, 1, 401, dtype=torch.float64), torch.tensor([1e-9, -1e-9, 1 - 1e-9])])
    np.testing.assert_allclose(dilogarithm(y).numpy(), spence(1 - y.numpy()), rtol=1e-14, atol=1e-15)
    inner = torch.linspace(-0.95, 0.95, 20, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(dilogarithm, (inner,))


@pytest.mark.parametrize(
    ("function", "point"),
    [
        (mf.NonNegative(), [-1e-3]),
        (mf.separable.NonPositive(), [1e-3]),
        (mf.separable.Origin(), [1e-3]),
        (mf.separable.NonPositiveRidge(1.0), [1e-3]),
        (mf.Box(-1.0, 1.0), [1.001]),
        (mf.intervals.Support(0.0, math.inf), [0.1]),
        (mf.LogBarrier(1.0), [0.0]),
        (mf.LogBox(1.0), [-1.0]),
        (mf.LogUnit(1.0), [1.0]),
        (mf.Simplex(), [0.5, 0.4]),
        (mf.Simplex(), [1.1, -0.1]),
        (mf.SimplexEntropy(), [0.5, 0.4]),
        (mf.SimplexEntropy(), [1.1, -0.1]),
        (mf.Ball(1.0), [1.0, 0.1]),
        (mf.Ball(torch.tensor([2.0, 1.0]), [0, 1, 1]), [0.0, 1.0, 0.1]),
        (mf.SpectralBall(1.0), [[1.001, 0.0], [0.0, 1.0]]),
        (mf.PositiveSemidefinite(), [[1.0, 0.0], [0.0, -1e-3]]),
        (mf.PositiveSemidefinite(), [[1.0, 0.1], [0.0, 1.0]]),
        (mf.spectral.NegativeSemidefinite(), [[1e-3, 0.0], [0.0, -1.0]]),
        (mf.from_activation("tanh"), [1.001]),
        (mf.from_activation("sigmoid"), [-1e-3]),
        (mf.from_activation("softplus"), [-1e-3]),
        (mf.from_activation("elu"), [-1.001]),
        (mf.from_activation("softsign"), [1.001]),
        (mf.from_activation("hardsigmoid"), [1.001]),
        (mf.from_activation("logsigmoid"), [1e-3]),
        (mf.Monotone(torch.tanh), [1.001]),
    ],
    ids=repr,
)
def test_infinite_outside_the_domain(function: mf.Function, point: list[float]) -> None:
    x = torch.tensor(point, dtype=torch.float64)
    assert float(function.value(x)) == math.inf
    assert math.isfinite(float(function.value(function.prox(x))))


def test_values_sum_over_the_batch() -> None:
    x = torch.rand(3, 4, 4, dtype=torch.float64)
    for function in (mf.L1(0.3), mf.GroupL2(0.3), mf.NuclearNorm(0.3), mf.Maximum(), mf.LogBox(0.3)):
        each = torch.stack([function.value(row) for row in x])
        assert torch.allclose(function.value(x), each.sum())


def test_a_user_activation_without_a_derivative() -> None:
    def phi(z: Tensor) -> Tensor:
        return F.softplus(z) - math.log(2)

    function = mf.Monotone(phi)
    closed = mf.from_activation("softplus")
    z = torch.linspace(-5, 5, 11, dtype=torch.float64)
    assert torch.allclose(function.primitive(z), closed.primitive(z) - z * math.log(2), atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "function", [mf.Box(0.0, 0.3), mf.LogBarrier(1e-4), mf.LogUnit(0.1), mf.NonNegative()], ids=repr
)
def test_the_value_at_a_prox_is_finite_in_half_precision(function: mf.Function, dtype: torch.dtype) -> None:
    x = torch.tensor([-60000.0, -1.0, 0.0, 0.299, 1.0, 60000.0]).to(dtype)
    assert torch.isfinite(function.value(function.prox(x)))


@pytest.mark.parametrize("act", ["softplus", "elu"])
def test_values_at_large_points_do_not_cancel(act: str) -> None:
    function = mf.from_activation(act)
    x = torch.tensor([1e3, 1e4])
    torch.testing.assert_close(function.value(x).double(), function.value(x.double()), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("function", [mf.Zero(), mf.NonNegative(), mf.Box(-1e12, 1e12)], ids=repr)
@pytest.mark.parametrize("size", [1.0, 1e6, 1e9])
def test_the_gap_of_large_numbers_is_that_of_their_difference(function: mf.Separable, size: float) -> None:
    z = size * (1 + torch.rand(9, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    x = z + torch.linspace(-0.5, 0.5, 9, dtype=torch.float64)
    assert torch.allclose(function.gap(x, z), 0.5 * (x - z).square(), rtol=1e-6, atol=0)

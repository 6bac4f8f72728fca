"""Gradients of spectral proxes are finite and correct where singular values or eigenvalues repeat or vanish."""

import pytest
import torch
from torch import Tensor

from minimand import functions as mf
from minimand.errors import CapabilityError

SINGULAR = [mf.NuclearNorm(0.7), mf.SpectralBall(0.7)]
#: One weight for each singular value: three different ones, a Ky Fan norm, and the spectral norm.
WEIGHTED = [
    mf.NuclearNorm(torch.tensor(each).double()) for each in ([1.0, 0.6, 0.25], [0.7, 0.7, 0.0], [0.7, 0.0, 0.0])
]
SYMMETRIC = [mf.PositiveSemidefinite(), mf.spectral.NegativeSemidefinite()]
SPECTRA = {
    "repeated": [2.0, 2.0, 0.3],
    "all equal": [1.5, 1.5, 1.5],
    "nearly repeated": [2.0, 2.0 - 1e-11, 0.3],
    "zero": [2.0, 0.0, 0.0],
    "repeated below and above": [1.1, 1.1, 0.2],
    "identity": [1.0, 1.0, 1.0],
    "distinct": [2.0, 1.2, 0.3],
}


def orthogonal(rows: int, columns: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(rows, columns, generator=generator, dtype=torch.float64))[0]


def rectangle(shape: tuple[int, int], spectrum: list[float]) -> Tensor:
    return (
        orthogonal(shape[0], 3, 1)
        @ torch.diag(torch.tensor(spectrum, dtype=torch.float64))
        @ orthogonal(shape[1], 3, 2).mT
    )


def directional(function: mf.Function, x: Tensor, direction: Tensor, step: float) -> Tensor:
    h = 1e-6
    return (function.prox(x + h * direction, step) - function.prox(x - h * direction, step)) / (2 * h)


def check(function: mf.Function, x: Tensor, step: float) -> None:
    generator = torch.Generator().manual_seed(3)
    weights = torch.randn(x.shape, generator=generator, dtype=torch.float64)
    point = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad((function.prox(point, step) * weights).sum(), point)
    assert bool(grad.isfinite().all())
    for _ in range(4):
        direction = torch.randn(x.shape, generator=generator, dtype=torch.float64)
        expected = (directional(function, x, direction, step) * weights).sum()
        assert torch.allclose((grad * direction).sum(), expected, atol=2e-6, rtol=1e-6)


@pytest.mark.parametrize("function", SINGULAR, ids=repr)
@pytest.mark.parametrize("shape", [(3, 3), (6, 3), (3, 5)])
@pytest.mark.parametrize("spectrum", SPECTRA.values(), ids=SPECTRA.keys())
def test_singular_values(function: mf.Function, shape: tuple[int, int], spectrum: list[float]) -> None:
    check(function, rectangle(shape, spectrum), 1.0)
    check(function, rectangle(shape, spectrum), 0.5)


@pytest.mark.parametrize("function", WEIGHTED, ids=["distinct", "ky_fan", "spectral"])
@pytest.mark.parametrize("shape", [(3, 3), (6, 3), (3, 5)])
@pytest.mark.parametrize("spectrum", SPECTRA.values(), ids=SPECTRA.keys())
def test_weights_for_each_singular_value(
    function: mf.NuclearNorm, shape: tuple[int, int], spectrum: list[float]
) -> None:
    x = rectangle(shape, spectrum)
    check(function, x, 1.0)
    check(function, x, 0.5)
    check(function, torch.diag(torch.tensor(spectrum)).double(), 0.5)  # with exact zeros
    assert isinstance(function.weight, Tensor)
    weight = function.weight + torch.tensor([0.3, 0.2, 0.1]).double()
    assert torch.autograd.gradcheck(lambda w: mf.NuclearNorm(w).prox(x, 0.5), (weight.requires_grad_(),), atol=2e-6)


@pytest.mark.parametrize("function", SYMMETRIC, ids=repr)
@pytest.mark.parametrize(
    "spectrum",
    [[2.0, 2.0, -1.0, -1.0], [1.0, 1.0, 1.0, 1.0], [-1.0, -1.0, -1.0, 2.0], [2.0, 2.0 - 1e-11, -1.0, -1.0 - 1e-11]],
)
def test_eigenvalues(function: mf.Function, spectrum: list[float]) -> None:
    q = orthogonal(4, 4, 5)
    x = q @ torch.diag(torch.tensor(spectrum, dtype=torch.float64)) @ q.mT
    check(function, x, 1.0)
    skew = torch.randn(4, 4, dtype=torch.float64)
    check(function, x + skew - skew.mT, 1.0)


@pytest.mark.parametrize("function", [*SINGULAR, *WEIGHTED, *SYMMETRIC], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_finite_at_the_zero_matrix_and_in_batches(function: mf.Function, dtype: torch.dtype) -> None:
    x = torch.stack([torch.zeros(3, 3), torch.eye(3), 1e4 * torch.eye(3), torch.ones(3, 3)]).to(dtype).requires_grad_()
    (grad,) = torch.autograd.grad(function.prox(x, 0.5).square().sum(), x)
    assert bool(grad.isfinite().all())


@pytest.mark.parametrize("function", [*SINGULAR, *WEIGHTED, *SYMMETRIC], ids=repr)
def test_autocast_changes_nothing(function: mf.Function) -> None:
    a = torch.randn(2, 3, 3, requires_grad=True)
    b = a.detach().clone().requires_grad_()
    expected = function.prox(a, 0.5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = function.prox(b, 0.5)
    assert torch.equal(got, expected)
    expected.square().sum().backward()
    got.square().sum().backward()
    assert torch.equal(a.grad, b.grad)


def test_the_batch_is_a_stack_of_matrices() -> None:
    x = torch.randn(2, 3, 5, 4, dtype=torch.float64)
    for function in SINGULAR:
        stacked = torch.stack([torch.stack([function.prox(m, 0.4) for m in row]) for row in x])
        assert torch.allclose(function.prox(x, 0.4), stacked, atol=1e-12)


def test_one_step_per_matrix_has_its_gradient() -> None:
    x = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    step = torch.tensor([[[0.3]], [[1.1]]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(mf.NuclearNorm(0.5).prox, (x, step))


def test_plain_autograd_fails_where_the_loewner_form_does_not() -> None:
    x = torch.eye(3, dtype=torch.float64, requires_grad=True)
    eigenvalues, q = torch.linalg.eigh(x)
    plain = ((q * torch.relu(eigenvalues)) @ q.mT).sum()
    assert not bool(torch.autograd.grad(plain, x)[0].isfinite().all())
    (ours,) = torch.autograd.grad(mf.PositiveSemidefinite().prox(x).sum(), x)
    assert torch.allclose(ours, torch.ones_like(ours))


@pytest.mark.parametrize("function", [mf.NuclearNorm(0.1), mf.SpectralBall(0.5), mf.PositiveSemidefinite()], ids=str)
def test_a_second_derivative_is_refused_rather_than_wrong(function) -> None:
    """Also where the first gradient has a constant cotangent: torch's once_differentiable would return zeros there."""
    x = torch.randn(3, 3, dtype=torch.float64)
    for loss in (lambda x: function.prox(x).sum(), lambda x: function.prox(x).square().sum()):
        with pytest.raises(CapabilityError, match="no second derivative"):
            torch.autograd.functional.hvp(loss, x, torch.ones_like(x))

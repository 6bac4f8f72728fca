"""The Charbonnier potentials: derivatives, bounds on the curvature, limits, and extreme arguments."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minimand.errors import NotProximal, OptionError
from minimand.functions import Charbonnier

scales, exponents = st.floats(1e-4, 1e3), st.floats(0.0, 3.0)


@settings(max_examples=60)
@given(scale=scales, exponent=exponents, seed=st.integers(0, 2**31 - 1))
def test_gradient_and_curvature_are_derivatives(scale: float, exponent: float, seed: int) -> None:
    psi = Charbonnier(scale, exponent)
    t = 3 * scale * torch.randn(9, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    t.requires_grad_()
    (slope,) = torch.autograd.grad(psi.values(t).sum(), t)
    (second,) = torch.autograd.grad(psi.gradient(t).sum(), t)
    torch.testing.assert_close(psi.gradient(t), slope, rtol=1e-9, atol=1e-12 * scale)
    torch.testing.assert_close(psi.curvature(t), second, rtol=1e-9, atol=1e-12)


@settings(max_examples=60)
@given(scale=scales, exponent=exponents)
def test_the_curvature_lies_between_its_bounds_and_reaches_them(scale: float, exponent: float) -> None:
    psi = Charbonnier(scale, exponent)
    found = psi.curvature(scale * torch.linspace(-30, 30, 2001, dtype=torch.float64))
    least = -2 * ((2 * exponent - 1) / (2 * exponent + 2)) ** (exponent + 1) if exponent > 0.5 else 0.0
    assert float(found.max()) == pytest.approx(1.0)
    assert float(found.min()) >= least - 1e-12
    assert psi.convex == (exponent <= 0.5)
    assert psi.coercive == (exponent < 1)
    if exponent > 0.5:
        at = torch.tensor(scale * math.sqrt(3 / (2 * exponent - 1)), dtype=torch.float64)
        assert float(psi.curvature(at)) == pytest.approx(least, rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_family_is_continuous_at_the_logarithm(dtype: torch.dtype) -> None:
    t = torch.logspace(-3, 3, 20, dtype=dtype)
    logarithm = 0.5 * torch.log1p(t.square())
    for apart in (0.0, 1e-12, 1e-7, -1e-7, 1e-4):
        near = Charbonnier(1.0, 1 - apart).values(t)
        torch.testing.assert_close(near, logarithm, rtol=2e-3 if apart == 1e-4 else 1e-5, atol=0.0)
    assert torch.equal(Charbonnier(0.3, 0.0).values(t), 0.5 * t.square()) or torch.allclose(
        Charbonnier(0.3, 0.0).values(t), 0.5 * t.square(), rtol=1e-5
    )


@pytest.mark.parametrize("exponent", [0.0, 0.3, 0.5, 0.9, 1.0, 1.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_far_from_the_scale_nothing_overflows(exponent: float, dtype: torch.dtype) -> None:
    t = torch.tensor([-1e15, -1.0, -1e-30, 0.0, 1e-20, 1.0, 1e15], dtype=dtype)
    for scale in (1e-12, 1.0, 1e6):
        psi = Charbonnier(scale, exponent)
        parts = (psi.gradient(t), psi.curvature(t), psi.values(t.double()))
        assert all(bool(part.isfinite().all()) for part in parts)
        assert bool((psi.gradient(t).abs() <= t.abs()).all())
        assert torch.equal(psi.gradient(-t), -psi.gradient(t))


def test_scales_per_channel_are_those_of_single_channels() -> None:
    torch.manual_seed(0)
    scale, exponent = torch.rand(3, dtype=torch.float64) + 0.1, torch.rand(3, dtype=torch.float64) / 2
    x = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    whole = Charbonnier(scale[:, None, None], exponent[:, None, None])
    assert not whole.separable
    for method in ("values", "gradient", "curvature", "prox"):
        each = [
            getattr(Charbonnier(float(s), float(p)), method)(x[:, c])
            for c, (s, p) in enumerate(zip(scale, exponent, strict=True))
        ]
        torch.testing.assert_close(getattr(whole, method)(x), torch.stack(each, 1))


def test_a_nonconvex_potential_has_no_prox() -> None:
    with pytest.raises(NotProximal, match=r"not convex.*at most ½"):
        Charbonnier(1.0, 0.8).prox(torch.ones(2))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Charbonnier(0.0, 0.5),
        lambda: Charbonnier(1.0, -0.1),
        lambda: Charbonnier(torch.tensor([1.0, math.inf]), 0.5),
        lambda: Charbonnier(1.0, torch.tensor([0.2, math.nan])),
        lambda: Charbonnier("wide", 0.5),
    ],
)
def test_bad_parameters_are_named(make) -> None:
    with pytest.raises(OptionError, match=r"the (scale|exponent) of a Charbonnier potential must be"):
        make()

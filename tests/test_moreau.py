"""Moreau's decomposition: a function's prox and its conjugate's, computed separately, add up to the point."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minimand import functions as mf
from minimand.errors import CapabilityError

from .cases.functions import CONJUGATE, FunctionCase, cases, draw


@cases(CONJUGATE)
@settings(max_examples=20)
@given(seed=st.integers(0, 2**31 - 1), step=st.floats(0.05, 20.0), scale=st.sampled_from([0.1, 1.0, 30.0]))
def test_decomposition(case: FunctionCase, seed: int, step: float, scale: float) -> None:
    x = draw(case, seed, scale)
    dual = case.function.conjugate()
    total = case.function.prox(x, step) + step * dual.prox(x / step, 1 / step)
    assert torch.allclose(total, x, atol=1e-9 * (1 + scale + step))


@cases(CONJUGATE)
@settings(max_examples=20)
@given(seed=st.integers(0, 2**31 - 1))
def test_fenchel_young(case: FunctionCase, seed: int) -> None:
    x, other = draw(case, seed), draw(case, seed + 1)
    dual = case.function.conjugate()
    p = case.function.prox(x)
    s = dual.prox(x)  # by Moreau a subgradient of g at p; the prox lies in its domain despite rounding
    assert torch.allclose(case.function.value(p) + dual.value(s), (p * s).sum(), atol=1e-8)
    q = dual.prox(other)
    assert case.function.value(p) + dual.value(q) >= (p * q).sum() - 1e-8


@cases(CONJUGATE)
def test_the_conjugate_of_the_conjugate_is_the_function(case: FunctionCase) -> None:
    twice = case.function.conjugate().conjugate()
    x = draw(case, 1)
    assert torch.allclose(twice.prox(x, 0.7), case.function.prox(x, 0.7), atol=1e-12)
    p = case.function.prox(x)
    assert torch.allclose(twice.value(p), case.function.value(p), atol=1e-10)


def test_a_missing_conjugate_says_so() -> None:
    with pytest.raises(CapabilityError, match=r"LogUnit\(gamma=1.0\) has no conjugate in closed form"):
        mf.LogUnit(1.0).conjugate()

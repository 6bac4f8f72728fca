"""Law: bounds on norms hold at every scale of the weight, also where the square leaves the range of float64.

The truth is a rational number: the squared singular value at scale one, times a power of two.
"""

import math
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from minimand.norms import LipschitzTracker, certified_norm_sq, lipschitz, randomized_norm_sq
from minimand.norms.spectral import certified_lambda_max, quick_norm_sq, strips_norm_sq
from minimand.operators import Composed, Conv1d, Conv2d, Dense, Inpainting, LinearOperator, SubsampledFourier

from .cases.operators import dense_matrix

GENERATOR = torch.Generator().manual_seed(0)
# Smallest and largest numbers, and powers near the square roots of both ends of the range.
EXPONENTS = [-1074, -1022, -1000, -700, -540, -520, -500, -100, 0, 100, 500, 511, 512, 700, 1000, 1020]
INFO = torch.finfo(torch.float64)


def _weight(*shape: int) -> Tensor:
    return torch.randn(shape, generator=GENERATOR, dtype=torch.float64)


def _scaled(weight: Tensor, exponent: int) -> Tensor:
    """2^exponent · weight, in two steps, because the power may be infinite."""
    return weight * 2.0 ** (exponent // 2) * 2.0 ** (exponent - exponent // 2)


def _tracked(weight: Tensor, make: Callable[[Tensor], LinearOperator] = Dense) -> Tensor:
    return LipschitzTracker(make(weight)).bound()


def _moved(weight: Tensor) -> Tensor:
    held = (weight * 0.9).clone()
    tracker = LipschitzTracker(Dense(held)).train()
    tracker.bound()
    held.copy_(weight)
    return tracker.bound()


def _randomized(weight: Tensor) -> Tensor:
    rows, columns = weight.shape
    return randomized_norm_sq(lambda y: y @ weight.T, lambda x: x @ weight, (columns,), (rows,))


def _composed(weight: Tensor) -> Tensor:
    half = Conv2d(weight.new_full((1, 1, 1, 1), 2.0), (1, weight.shape[1]))
    return Composed(Inpainting(weight[:1, None]), half).norm_sq()


DENSE, SMALL, LINE, IMAGE = _weight(40, 30), _weight(3, 4), _weight(4, 3, 3), _weight(3, 2, 3, 3)
LARGE = _weight(700, 650)
ONE, TWO = (lambda w: Conv1d(w, 9, padding=1)), (lambda w: Conv2d(w, (5, 6), padding=1))
MAKE: dict[str, tuple[Callable[[Tensor], LinearOperator], Tensor]] = {
    "dense": (Dense, DENSE),
    "small": (Dense, SMALL),
    "line": (ONE, LINE),
    "image": (TWO, IMAGE),
}
# A bound, a weight, and the operator of the weight whose norm is bounded.
BOUNDS: dict[str, tuple[Callable[[Tensor], Tensor], Tensor, Callable[[Tensor], LinearOperator]]] = {
    "certified": (certified_norm_sq, DENSE, Dense),
    "certified, small": (certified_norm_sq, SMALL, Dense),
    "quick": (quick_norm_sq, DENSE, Dense),
    "strips": (strips_norm_sq, DENSE, Dense),
    "spectrum": (lambda w: certified_norm_sq(w, rtol=0.0), DENSE, Dense),
    "randomized, formed": (_randomized, DENSE, Dense),
    "tracked": (_tracked, DENSE, Dense),
    "tracked after a move": (_moved, DENSE, Dense),
    "tracked convolution": (lambda w: _tracked(w, TWO), IMAGE, TWO),
    "mask": (lambda w: Inpainting(w[:1, None]).norm_sq(), SMALL, lambda w: Inpainting(w[:1, None])),
    "frequencies": (lambda w: SubsampledFourier(w).norm_sq(), SMALL.abs(), lambda w: SubsampledFourier(w)),
    "composed": (_composed, SMALL, lambda w: Inpainting(2 * w[:1, None])),
    **{
        f"{name}, {method}": (lambda w, m=method, f=make: lipschitz(f(w), method=m), weight, make)
        for name, (make, weight) in MAKE.items()
        for method in ("auto", "exact", "grid")
    },
}


def _assert_bound(bound: float, root: float, exponent: int, loose: float = 2.0) -> None:
    """The bound is at least (2^exponent · root)², and at most ``loose`` times that where float64 has such numbers."""
    truth = Fraction(root) ** 2 * Fraction(2) ** (2 * exponent)
    if root == 0:
        assert bound == 0
    elif math.isinf(bound):
        assert truth * Fraction(loose) > Fraction(INFO.max)
    else:
        assert Fraction(bound) >= truth * (1 - Fraction(1, 10**11)), f"{bound} is below the truth"
        assert Fraction(bound) <= max(truth * Fraction(loose), Fraction(INFO.tiny) * 200), f"{bound} is too large"


def _root(make: Callable[[Tensor], LinearOperator], weight: Tensor) -> float:
    return float(torch.linalg.matrix_norm(dense_matrix(make(weight)), 2))


@pytest.mark.parametrize("exponent", EXPONENTS)
@pytest.mark.parametrize("name", BOUNDS)
def test_a_bound_holds_at_every_scale(name: str, exponent: int) -> None:
    bound, weight, make = BOUNDS[name]
    given = _scaled(weight, exponent)
    exact = given * 2.0**1000 * 2.0**74 if exponent == -1074 else weight  # subnormal numbers are rounded
    _assert_bound(float(bound(given)), _root(make, exact), exponent)


@pytest.mark.parametrize("exponent", [-1000, -300, 0, 300, 500])
def test_the_randomized_bound_holds_or_refuses(exponent: int) -> None:
    _assert_bound(float(_randomized(_scaled(LARGE, exponent))), _root(Dense, LARGE), exponent)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("exponent", [-60, -9, 5, 50])
def test_the_randomized_bound_of_products_in_another_type(dtype: torch.dtype, exponent: int) -> None:
    weight = _scaled(LARGE, max(exponent, -18) if dtype == torch.float16 else exponent)
    if dtype == torch.float16:
        weight = weight.clamp(-60, 60)
    weight = weight.to(dtype)
    bound = randomized_norm_sq(lambda y: y @ weight.T, lambda x: x @ weight, (650,), (700,), dtype=dtype)
    root = _root(Dense, weight.double())
    assert root**2 <= float(bound) <= 1.3 * root**2 * (4 if dtype == torch.float16 else 1)


@pytest.mark.parametrize("exponent", EXPONENTS[2:])
@pytest.mark.parametrize("apart", [0, -300, -560, -900])
@pytest.mark.parametrize("part", ["inputs", "outputs"])
@pytest.mark.parametrize("name", ["dense", "line", "image"])
def test_the_bound_of_a_part_holds_beside_a_larger_one(name: str, part: str, apart: int, exponent: int) -> None:
    make, weight = MAKE[name]
    where = (slice(None), 1) if part == "inputs" else 1
    alone = torch.zeros_like(weight)
    alone[where] = weight[where]
    both = _scaled(weight, exponent)
    both[where] = _scaled(both[where], apart)
    if exponent + apart < -960:
        return  # the part's entries are rounded, or zero
    operator = make(both)
    tracker = LipschitzTracker(operator, inputs=True, outputs=True)
    found = [getattr(operator, f"{part[:-1]}_norms_sq")()[1], getattr(tracker.bounds(), part)[1]]
    for bound in found:
        _assert_bound(float(bound), _root(make, alone), exponent + apart)


@pytest.mark.parametrize("exponent", [-1060, -1000, -300, 300, 1000])
def test_the_largest_eigenvalue_at_every_scale(exponent: int) -> None:
    gram = _scaled(DENSE @ DENSE.T, exponent)
    top = Fraction(float(torch.linalg.eigvalsh(DENSE @ DENSE.T)[-1])) * Fraction(2) ** exponent
    bound = Fraction(float(certified_lambda_max(gram)))
    assert top * (1 - Fraction(1, 10**11 if exponent > -1000 else 10**3)) <= bound
    assert bound <= max(top * Fraction(1.01), 2 * Fraction(INFO.tiny))


@pytest.mark.parametrize("make", [make for make, _ in MAKE.values()], ids=MAKE)
def test_the_bounds_of_zero_are_zero(make: Callable[[Tensor], LinearOperator]) -> None:
    weight = {Dense: DENSE, ONE: LINE, TWO: IMAGE}[make]
    operator = make(torch.zeros_like(weight))
    assert float(operator.norm_sq()) == float(operator.input_norms_sq().max()) == 0
    assert float(operator.output_norms_sq().max()) == float(lipschitz(operator)) == 0

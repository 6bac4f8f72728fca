"""Laws: the bound of randomised Lanczos is not below the truth, within 10 % of it, and fails as rarely as stated."""

import math

import pytest
import torch
from torch import Tensor

from minimand.errors import NonFiniteError, OptionError, ShapeError
from minimand.norms import randomized_norm_sq
from minimand.norms.randomized import STARTS, lanczos_factor, lanczos_steps
from minimand.norms.spectral import lanczos
from tests.cases.operators import norm_sq

SPECTRA = {
    "isolated top": lambda n: torch.cat([torch.ones(1), torch.full((n - 1,), 0.5)]),
    "barely isolated top": lambda n: torch.cat([torch.ones(1), torch.full((n - 1,), 0.97)]),
    "clustered top": lambda n: 1 - 1e-3 * torch.arange(n) / n,
    "two clusters": lambda n: torch.cat([torch.linspace(0.999, 1.0, n // 10), torch.linspace(0, 0.1, n - n // 10)]),
    "linear": lambda n: torch.linspace(0, 1, n),
    "square root edge": lambda n: torch.linspace(0, 1, n).sqrt(),
    "rank one": lambda n: torch.cat([torch.ones(1), torch.zeros(n - 1)]),
    "repeated": lambda n: torch.ones(n),
    # The worst case of the proof has eigenvalues where a Chebyshev polynomial on [0, 1 − ε] is largest.
    "Chebyshev": lambda n: torch.cat(
        [torch.ones(1), 0.9 * (1 + torch.cos(torch.arange(n - 1) / (n - 1) * math.pi)) / 2]
    ),
}


def _matrix(kind: str, n: int, seed: int, wide: int = 0) -> Tensor:
    """A matrix whose squared singular values have that shape, and the scale 7."""
    g = torch.Generator().manual_seed(seed)
    left, right = (torch.linalg.qr(torch.randn(m, n, generator=g, dtype=torch.float64)).Q for m in (n, n + wide))
    return left * (7 * SPECTRA[kind](n).double()).sqrt() @ right.mT


def _bound(matrix: Tensor, **options: object) -> Tensor:
    rows, columns = matrix.shape
    return randomized_norm_sq(lambda y: y @ matrix.mT, lambda x: x @ matrix, (columns,), (rows,), **options)


@pytest.mark.parametrize("wide", [0, 60], ids=["square", "wide"])
@pytest.mark.parametrize("kind", SPECTRA)
def test_never_below_the_truth_and_within_ten_per_cent(kind: str, wide: int) -> None:
    for seed in range(25):
        matrix = _matrix(kind, 150, seed, wide)
        truth = norm_sq(matrix)
        for bound in (_bound(matrix), _bound(matrix.mT), _bound(matrix, generator=torch.Generator().manual_seed(seed))):
            assert truth <= bound <= 1.101 * truth


@pytest.mark.parametrize("kind", SPECTRA)
def test_callables_that_take_only_their_own_type(kind: str) -> None:
    """Captured float32, bfloat16 and float16 tensors refuse float64; the bound then has room for rounding."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for seed in range(5):
            matrix = _matrix(kind, 150, seed).to(dtype)
            truth = norm_sq(matrix.double())
            assert truth <= _bound(matrix, dtype=dtype) <= (1.11 if dtype == torch.float32 else 1.35) * truth


def test_a_cast_inside_of_the_callables_is_noticed() -> None:
    matrix = _matrix("linear", 150, 0).float()
    bound = randomized_norm_sq(lambda y: y.float() @ matrix.mT, lambda x: x.float() @ matrix, (150,), (150,))
    assert norm_sq(matrix.double()) <= bound <= 1.11 * norm_sq(matrix.double())


@pytest.mark.parametrize("n", [1, 2, 10, 60])
def test_small_maps_are_certified_without_randomness(n: int) -> None:
    assert n <= STARTS * lanczos_steps(n)
    for seed in range(10):
        matrix = torch.randn(n, 90, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        assert norm_sq(matrix) <= _bound(matrix) <= 1.0011 * norm_sq(matrix)


@pytest.mark.parametrize("steps", [4, 8])
@pytest.mark.parametrize("kind", SPECTRA)
def test_the_theorem_bounds_the_frequency_of_failures(kind: str, steps: int) -> None:
    """Few steps, one start, a failure probability of a tenth: of 2,000 starts fewer than a tenth may fail."""
    n, failure, trials = 60, 0.1, 2000
    values = SPECTRA[kind](n).double()
    start = torch.randn(trials, n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    estimates = lanczos(lambda v: v * values, start, steps)[0]
    factor = lanczos_factor(n, steps, failure, starts=1)
    assert factor > 1
    assert float((estimates * factor < values.max() * (1 - 1e-12)).double().mean()) < failure
    # Not vacuous: without the factor nearly all of them fail for some spectra.
    if kind in ("linear", "Chebyshev"):
        assert float((estimates < values.max() * (1 - 1e-12)).double().mean()) > 0.5


def test_starts_multiply_and_steps_invert_the_factor() -> None:
    """δ for s starts is δ^{1/s} for each; ``lanczos_steps`` is the smallest number of steps for its factor."""
    for n in (10, 1000, 10**6):
        for starts in (1, 2, 4):
            assert lanczos_factor(n, 30, 1e-8, starts) == pytest.approx(lanczos_factor(n, 30, 1e-8 ** (1 / starts), 1))
            steps = lanczos_steps(n, 1.1, 1e-10, starts)
            assert lanczos_factor(n, steps, 1e-10, starts) <= 1.1 < lanczos_factor(n, steps - 1, 1e-10, starts)
    assert lanczos_factor(100, 1) == math.inf


def test_the_bound_is_reproducible_and_a_constant() -> None:
    matrix = _matrix("linear", 200, 0).requires_grad_()
    assert torch.equal(_bound(matrix), _bound(matrix))
    assert not _bound(matrix).requires_grad
    before = torch.get_rng_state()
    _bound(matrix)
    assert torch.equal(before, torch.get_rng_state())


def test_large_maps_are_done_one_start_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = _matrix("linear", 200, 0)
    together = _bound(matrix)
    monkeypatch.setattr("minimand.norms.randomized.BASIS", 1)
    torch.testing.assert_close(_bound(matrix), together, rtol=1e-12, atol=0)


@pytest.mark.parametrize("shapes", [((0,), (4,)), ((3,), (0,)), ((2, 0), (5,))])
def test_an_empty_map_has_norm_zero(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    assert randomized_norm_sq(lambda y: y, lambda x: x, *shapes) == 0


def test_bad_maps_are_named() -> None:
    with pytest.raises(OptionError, match="failure"):
        _bound(torch.eye(3, dtype=torch.float64), failure=0.0)
    with pytest.raises(ShapeError, match=r"\(150,\).*\(151,\).*\(1, 150\)"):
        randomized_norm_sq(lambda y: y, lambda x: x, (150,), (151,))
    with pytest.raises(NonFiniteError, match="operator"):
        _bound(torch.full((200, 200), math.nan, dtype=torch.float64))
    with pytest.raises(NonFiniteError, match="operator"):
        _bound(torch.full((3, 3), math.nan, dtype=torch.float64))

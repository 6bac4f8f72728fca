"""A problem whose objective falls forever is said to be unbounded; one that is only hard to solve is not."""

import dataclasses

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from minimand.errors import OptionError
from minimand.functions import L1, Ball, Box, GroupL2, NonNegative, Simplex, SquaredHinge, TotalVariation, Zero
from minimand.operators import Dense, operator
from minimand.solvers import FISTA, Huber, Logistic, Problem, ProxGD, Spectral, SquaredHingeLoss, solve
from minimand.solvers.gap import GapBound
from minimand.solvers.recession import require_minimum


def _normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


WIDE, SQUARE = _normal(6, 4), _normal(6, 6)
Y, BIAS = _normal(3, 6, seed=1), 5 * _normal(6, seed=2)
NARROW = Y[:, :4]
EMPTY_ROW = torch.cat([WIDE[:5], torch.zeros(1, 4, dtype=torch.float64)])
CALLED = operator(lambda y: y @ WIDE.mT, lambda x: x @ WIDE, (4,), (6,))

UNBOUNDED = {
    "zero": Problem(Dense(WIDE), Zero(), NARROW, BIAS),
    "a matrix for each sample": Problem(Dense(_normal(3, 6, 4)), Zero(), NARROW, BIAS),
    "callables": Problem(CALLED, Zero(), NARROW, BIAS),
    "a weak norm": Problem(Dense(WIDE), L1(0.01), NARROW, BIAS),
    "a weak group": Problem(Dense(WIDE), GroupL2(0.1), NARROW, BIAS),
    "variation": Problem(Dense(WIDE), TotalVariation(0.1), NARROW, BIAS),
    "an empty row": Problem(Dense(EMPTY_ROW), NonNegative(), NARROW, BIAS.abs()),
    "logistic": Problem(Dense(SQUARE), L1(0.1), Y.sign(), BIAS, datafit=Logistic()),
    "hinge": Problem(Dense(WIDE), L1(0.1), NARROW.sign(), BIAS, datafit=SquaredHingeLoss()),
    "huber": Problem(Dense(WIDE), NonNegative(), NARROW, BIAS, datafit=Huber(0.1)),
    "steps that reach 1e199": Problem(
        *(Dense(torch.tensor([[-1.042], [1.2454]]).double()), SquaredHinge(0.5, 0.2), torch.ones(1, 1).double()),
        *(torch.tensor([1.6912, -0.3061]).double(),),
        datafit=Logistic(),
    ),
}


@pytest.mark.parametrize("name", UNBOUNDED)
@pytest.mark.parametrize("solver", [None, FISTA(300)], ids=str)
def test_an_unbounded_problem_is_said_to_be_one(name: str, solver: FISTA | None) -> None:
    with pytest.raises(OptionError, match="the problem is unbounded"):
        solve(UNBOUNDED[name], solver, tol=1e-6)


def test_a_bias_outside_of_the_range_is_named() -> None:
    A = Dense(torch.tensor([[1.0], [0.0]], dtype=torch.float64))
    y = torch.ones(1, 1, dtype=torch.float64)
    with pytest.raises(OptionError, match=r"unbounded.*norm 1 outside of the range"):
        solve(Problem(A, Zero(), y, torch.tensor([0.0, 1.0], dtype=torch.float64)), FISTA(5))
    assert solve(Problem(A, Zero(), y, torch.tensor([1.0, 0.0], dtype=torch.float64)), FISTA(50)).x[
        0, 0
    ] == pytest.approx(2)
    assert solve(Problem(A, Zero(), y, torch.tensor([0.0, 1.0], dtype=torch.float64), 0.1), FISTA(5)).x.isfinite().all()


@pytest.mark.parametrize("function", [Zero(), NonNegative(), L1(0.01)], ids=str)
@pytest.mark.parametrize("smallest", [-3, -5])
def test_a_bounded_problem_that_has_not_converged_is_not(function, smallest: int) -> None:
    left, _, right = torch.linalg.svd(_normal(30, 30))
    A = left @ torch.diag(torch.logspace(0, smallest, 30, dtype=torch.float64)) @ right
    problem = Problem(Dense(A), function, _normal(2, 30, seed=1), 0.1 * _normal(30, seed=2))
    assert solve(problem, Spectral(30), tol=1e-13).converged is False
    labels = Problem(Dense(A), function, problem.y.sign(), datafit=Logistic())
    assert solve(labels, Spectral(30), tol=1e-13).converged is False


@pytest.mark.parametrize("function", [Simplex(), L1(torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64))], ids=str)
def test_a_point_worse_than_others_is_no_direction(function) -> None:
    """The square or g leaves no direction in which the objective could fall forever, from wherever it is started."""
    problem = Problem(Dense(_normal(3, 6)), function, _normal(2, 6, seed=1), 0.1 * _normal(3, seed=2))
    assert solve(problem, ProxGD(2, step=1e-7), x0=-problem.linear(), tol=1e-9).converged is False


@pytest.mark.parametrize("function", [Box(-10.0, 10.0), Ball(10.0), Simplex(10.0)], ids=str)
def test_a_problem_on_a_bounded_domain_is_not(function) -> None:
    """The domain may be large next to the steps, which are short where A is large."""
    problem = Problem(Dense(1e15 * WIDE), function, NARROW, 1e15 * BIAS)
    assert solve(problem, FISTA(5), tol=1e-9).converged is False
    assert solve(dataclasses.replace(problem, y=NARROW.sign(), datafit=Logistic()), tol=1e-6).x.isfinite().all()


class _Sizes(TorchDispatchMode):
    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, tuple | list) else (out,):
            self.largest = max(self.largest, each.numel() if isinstance(each, torch.Tensor) else 0)
        return out


@pytest.mark.parametrize("bias", [None, torch.full((300,), 1e-3, dtype=torch.float64)], ids=["no bias", "bias"])
def test_the_question_takes_no_matrix_larger_than_that_of_the_problem(bias: torch.Tensor | None) -> None:
    """With an entry without a penalty, whose gap is not known."""
    weight = torch.ones(300, dtype=torch.float64).index_fill(0, torch.tensor([0]), 0.0)
    if bias is not None:
        bias = bias.index_fill(0, torch.tensor([0]), 0.0)
    problem = Problem(Dense(_normal(300, 20)), L1(weight), _normal(1, 20, seed=1), bias)
    x = solve(problem, tol=1e-6).x
    with _Sizes() as sizes:
        require_minimum(GapBound(problem), x)
    assert sizes.largest <= 300 * 20

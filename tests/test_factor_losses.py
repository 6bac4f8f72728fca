"""Law: any smooth loss is factorised to its convex minimum, by proximal gradient steps, with a certificate."""

from dataclasses import dataclass
from functools import partial

import cvxpy as cp
import numpy as np
import pytest
import torch

from minimand.errors import CapabilityError
from minimand.factor import HuberLoss, Squared, Status, certify, factorize
from minimand.factor.descent import Components, ProximalDescent, SquaredDescent
from minimand.factor.entrywise import loss_from
from minimand.factor.losses import Loss
from minimand.factor.regularizers import L2, NonNegativeL2, SparseL2
from minimand.solvers import Datafit, Logistic, Poisson

from .test_certificate import SOLVER, adversaries

RNG = np.random.default_rng(0)
LOW = RNG.normal(size=(8, 2)) @ RNG.normal(size=(2, 6))
Y = LOW + np.where(RNG.random(LOW.shape) < 0.1, 6.0, 0.0) + 0.1 * RNG.normal(size=LOW.shape)
SIGNS = np.sign(LOW)
COUNTS = np.round(np.abs(LOW))


@dataclass(frozen=True)
class Quartered(Datafit):
    """(y − x)²/8, written as a user would."""

    def values(self, t, y):
        return (y - t).square() / 8

    def gradient(self, t, y):
        return (t - y) / 4

    def curvature(self, y):
        return 0.25

    def conjugate(self, u, y):
        return 2 * u.square() + y * u


LOSSES = {
    "huber": (partial(HuberLoss, gamma=2.0), Y, lambda X: cp.sum(cp.huber(Y - X, 0.5)), 1.0),
    "logistic": (Logistic(), SIGNS, lambda X: cp.sum(cp.logistic(-cp.multiply(SIGNS, X))), 0.5),
    "own": (Quartered(), Y, lambda X: cp.sum_squares(Y - X) / 8, 0.3),
}


@pytest.fixture(params=LOSSES)
def problem(request):
    """A loss, its data, λ, and the minimum and minimiser that cvxpy finds."""
    loss, data, convex, lam = LOSSES[request.param]
    X = cp.Variable(data.shape)
    best = cp.Problem(cp.Minimize(convex(X) + lam * cp.normNuc(X))).solve(**SOLVER)
    return loss, data, lam, best, X.value


def test_factorize_reaches_the_convex_minimum(problem):
    loss, data, lam, best, X = problem
    found = factorize(data, lam=lam, loss=loss, tol=1e-5, random_state=0)
    assert found.certificate.status is Status.CERTIFIED
    assert -1e-7 <= found.objective - best <= found.certificate.gap + 1e-7
    assert found.certificate.gap <= 1e-5 * found.objective
    np.testing.assert_allclose(found.U @ found.V.T, X, atol=0.02)
    assert np.diff(found.history).max() <= 1e-9 * best


def test_the_gap_is_never_understated_and_improvable_means_it(problem, generator):
    loss, data, lam, best, X = problem
    tensor = torch.from_numpy(data)
    left, s, right = np.linalg.svd(X, full_matrices=False)
    U, V = (torch.from_numpy(x * np.sqrt(s)) for x in (left, right.T))
    made = loss_from(loss, tensor)
    for u, v in adversaries(tensor, U, V, generator):
        found = certify(data, u, v, lam=lam, loss=loss)
        objective = made.value(u, v) + lam * float((u.norm(dim=0) * v.norm(dim=0)).sum())
        assert found.gap >= objective - best - 1e-7
        if found.status is Status.IMPROVABLE:
            assert objective > best


@pytest.mark.parametrize("theta", [L2(), NonNegativeL2(), SparseL2(0.3)], ids=str)
def test_on_squares_a_proximal_gradient_step_is_the_exact_update(theta, generator):
    data = torch.rand(9, 7, generator=generator, dtype=torch.float64)
    pair = Components(*(torch.rand(3, n, generator=generator, dtype=torch.float64) for n in (9, 7)))
    exact = SquaredDescent(Squared(data), theta, 0.1)
    steps = ProximalDescent(Squared(data), theta, 0.1)
    torch.testing.assert_close(steps.left(pair), exact.left(pair))
    (V, objective), (W, same) = steps.right(pair), exact.right(pair)
    torch.testing.assert_close(V, W)
    assert objective == pytest.approx(same)


def test_nonnegative_and_sparse_factors_take_other_losses():
    loss = partial(HuberLoss, gamma=2.0)
    for options in ({"regularizer": "nonnegative"}, {"regularizer": "sparse", "gamma": 0.1}):
        found = factorize(np.abs(Y), lam=1.0, loss=loss, random_state=0, max_iter=60, **options)
        assert np.diff(found.history).max(initial=0) <= 1e-9 * found.objective
        assert found.certificate.gap >= 0
        again = certify(np.abs(Y), found.U, found.V, lam=1.0, loss=loss, **options)
        assert again.relative_gap == pytest.approx(found.certificate.relative_gap, abs=0.02)


def test_bad_losses():
    with pytest.raises(ValueError, match=r"no gradient here.*RobustPCA"):
        factorize(Y, lam=1.0, loss=partial(HuberLoss, gamma=None))
    with pytest.raises(ValueError, match="loss must be a datafit"):
        factorize(Y, lam=1.0, loss="huber")
    with pytest.raises(ValueError, match="labels 1 and -1"):
        factorize(Y, lam=1.0, loss=Logistic())
    with pytest.raises(ValueError, match=r"never be negative, but Poisson"):
        factorize(COUNTS, lam=1.0, loss=Poisson(0.0))
    with pytest.raises(ValueError, match="gamma"):
        factorize(Y, lam=1.0, loss=partial(HuberLoss, gamma=-1.0))
    with pytest.raises(ValueError, match="mask needs the squared loss"):
        certify(SIGNS, np.ones((8, 1)), np.ones((6, 1)), lam=1.0, loss=Logistic(), mask=SIGNS > 0)


def test_a_loss_with_a_degree_but_no_scaling_is_named():
    """What a loss of one's own that leaves scaled out inherits."""
    with pytest.raises(CapabilityError, match=r"Squared has a degree.*scaled\(exponent\)"):
        Loss.scaled(Squared(torch.ones(2, 2, dtype=torch.float64)), 3)

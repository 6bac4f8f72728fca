"""Law: a batch of problems, each with its own matrix, weights or λ, has the solutions of the problems one by one."""

import dataclasses

import pytest
import torch

from minimand import solve
from minimand.adjoints import Implicit
from minimand.errors import CapabilityError, ShapeError
from minimand.functions import L1, Box, Charbonnier, ElasticNet, GroupL2, NonNegative
from minimand.operators import Conv1d, Dense, check_operator
from minimand.solvers import ADMM, FISTA, Datafit, HeavyBall, Logistic, Problem, ProxGD, ProxSG, Spectral


@pytest.fixture
def batch(generator):
    A = torch.randn(4, 5, 8, generator=generator, dtype=torch.float64)
    return A, torch.randn(4, 8, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize(
    "solver", [None, ProxGD(3000), HeavyBall(3000), FISTA(1000), ADMM(800, cg_iters=20), Spectral(200)]
)
@pytest.mark.parametrize("function", [L1(0.5), NonNegative(), GroupL2(0.5)], ids=repr)
def test_each_problem_has_its_own_matrix(batch, solver, function):
    A, y = batch
    together = solve(Problem(Dense(A), function, y, ridge=0.1), solver, tol=1e-12)
    assert together.converged
    for k in range(4):
        alone = solve(Problem(Dense(A[k]), function, y[k : k + 1], ridge=0.1), FISTA(2000)).x
        torch.testing.assert_close(together.x[k : k + 1], alone, atol=1e-4, rtol=0)


def test_a_batched_operator_is_one(batch, generator):
    A, y = batch
    operator = Dense(A)
    x = torch.randn(4, 5, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(operator.apply(y), torch.einsum("bij,bj->bi", A, y))
    torch.testing.assert_close((operator.apply(y) * x).sum(-1), (y * operator.adjoint(x)).sum(-1))
    assert operator.norm_sq() >= torch.linalg.matrix_norm(A, 2).max() ** 2
    index = torch.tensor([0, 3])
    torch.testing.assert_close(
        operator.restrict(index).apply(y[:, index]), torch.einsum("bij,bj->bi", A[..., index], y[:, index])
    )
    torch.testing.assert_close(operator.restrict_outputs(index).apply(y), operator.apply(y)[:, index])
    check_operator(Dense(A[0]))


def test_gradients_of_a_batch(batch):
    A, y = (each.clone().requires_grad_() for each in batch)
    x = solve(Problem(Dense(A), L1(0.5), y, ridge=0.1), FISTA(1500), adjoint=Implicit()).x
    mine = torch.autograd.grad(x.square().sum(), (A, y))
    for k in range(4):
        alone = solve(Problem(Dense(A[k]), L1(0.5), y[k : k + 1], ridge=0.1), FISTA(1500), adjoint=Implicit()).x
        theirs = torch.autograd.grad(alone.square().sum(), (A, y))
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a[k], b[k], atol=1e-7, rtol=1e-6)


def test_a_path_over_the_weight_is_a_batch(batch):
    A, y = batch[0][0], batch[1][:1]
    weights = torch.tensor([[2.0], [1.0], [0.5], [0.1]], dtype=torch.float64)
    for make in (L1, lambda w: ElasticNet(w, 0.3)):
        for datafit, data in ((None, y), (Logistic(), y.sign())):
            options = {} if datafit is None else {"datafit": datafit}
            path = solve(Problem(Dense(A), make(weights), data.expand(4, -1), **options), tol=1e-10)
            assert path.converged
            for weight, x in zip(weights, path.x, strict=True):
                alone = solve(Problem(Dense(A), make(float(weight)), data, **options), FISTA(3000)).x[0]
                torch.testing.assert_close(x, alone, atol=1e-4, rtol=0)


def test_weights_per_feature(batch):
    """Equal to scaling the columns; gradients in the weights are those of finite differences."""
    A, y = batch[0][0], batch[1]
    weights = torch.tensor([0.1, 0.5, 1.0, 2.0, 0.3], dtype=torch.float64)
    mine = solve(Problem(Dense(A), L1(weights), y), tol=1e-12).x
    scaled = solve(Problem(Dense(A / weights[:, None]), L1(1.0), y), tol=1e-12).x / weights
    torch.testing.assert_close(mine, scaled, atol=1e-5, rtol=0)
    box = solve(Problem(Dense(A), Box(-weights, weights), y), tol=1e-12).x
    assert bool((box.abs() <= weights + 1e-12).all())

    def run(w):
        return solve(Problem(Dense(A), L1(w), y, ridge=0.1), tol=1e-15, adjoint=Implicit()).x

    assert torch.autograd.gradcheck(run, (weights.clone().requires_grad_(),), eps=1e-4, atol=1e-4)


@dataclasses.dataclass(frozen=True)
class _Weighted(Datafit):
    weight: torch.Tensor

    def values(self, t, y):
        return 0.5 * self.weight * (t - y) ** 2

    def gradient(self, t, y):
        return self.weight * (t - y)

    def curvature(self, y):
        return self.weight.amax()


CHANNELS = torch.tensor([[0.05], [1.0], [5.0]], dtype=torch.float64)
OWN = {  # the problem of some samples: the function and the datafit, for each sample its own or for all the same
    "channels": lambda keep: (L1(CHANNELS), {}),
    "box of channels": lambda keep: (Box(-CHANNELS, CHANNELS), {}),
    "potentials of samples": lambda keep: (Charbonnier(CHANNELS[keep, None], 0.3), {}),
    "weights of samples": lambda keep: (L1(CHANNELS[keep, None]), {}),
    "losses of samples": lambda keep: (L1(0.1), {"datafit": _Weighted(CHANNELS[keep, None].expand(-1, 2, 6))}),
    "losses of positions": lambda keep: (L1(0.1), {"datafit": _Weighted(torch.arange(1.0, 7.0, dtype=torch.float64))}),
}


@pytest.mark.parametrize("solver", [FISTA(3000), Spectral(2000)], ids=str)
@pytest.mark.parametrize("name", OWN)
def test_samples_that_stop_early_leave_the_others_their_own_numbers(generator, name, solver):
    """There are as many samples as channels, and they converge at different times."""
    weight, y = (torch.randn(3, 2, n, generator=generator, dtype=torch.float64) for n in (3, 6))
    y = y * torch.tensor([0.1, 1.0, 10.0], dtype=torch.float64)[:, None, None]

    def solved(keep):
        function, options = OWN[name](keep)
        return solve(Problem(Conv1d(weight, 6), function, y[keep], ridge=0.5, **options), solver, tol=1e-12).x

    alone = torch.cat([solved(slice(k, k + 1)) for k in range(3)])
    away = (solved(slice(None)) - alone).norm(dim=(1, 2))
    assert (away <= 1e-2 * alone.norm(dim=(1, 2))).all(), away


def test_groups_by_index(batch):
    """Equal to groups that lie together, and to the plain function for one group."""
    A, y = batch[0][0], batch[1]
    order = [0, 2, 4, 1, 3]
    mixed = solve(Problem(Dense(A), GroupL2(0.8, [0, 1, 0, 1, 0]), y, ridge=0.1), tol=1e-12).x
    sorted_ = solve(Problem(Dense(A[order]), GroupL2(0.8, [0, 0, 0, 1, 1]), y, ridge=0.1), tol=1e-12).x
    torch.testing.assert_close(mixed[:, order], sorted_, atol=1e-5, rtol=0)
    x = torch.randn(3, 5, dtype=torch.float64)
    torch.testing.assert_close(GroupL2(0.8, [0] * 5).prox(x, 0.7), GroupL2(0.8).prox(x, 0.7))


def test_wrong_sizes_name_both(batch):
    A, y = batch
    with pytest.raises(ShapeError, match=r"\(3,\).*\(4, 5\)"):
        solve(Problem(Dense(A[0]), L1(torch.ones(3, dtype=torch.float64)), y), FISTA())
    with pytest.raises(ShapeError, match=r"groups has 3 entries.*\(4, 5\)"):
        solve(Problem(Dense(A[0]), GroupL2(1.0, [0, 1, 1]), y), FISTA())
    with pytest.raises(ShapeError, match=r"\(3, 8\).*\(4, 5, 8\)"):
        solve(Problem(Dense(A), L1(1.0), y[:3]), FISTA())
    with pytest.raises(CapabilityError, match="does not support sampling"):
        solve(Problem(Dense(A), L1(1.0), y), ProxSG())

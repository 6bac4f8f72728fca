"""solve() without options against celer, skglm, scikit-learn, scipy, jaxopt and cvxpylayers, at the same duality gap.

Every method runs with the loosest of its tolerances whose result has a gap, by the library's bound, of at most the
target times the objective at zero. Processor time, one thread, float64; layers in float32.
"""

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from scipy.optimize import nnls
from sklearn.linear_model import Lasso, LogisticRegression
from torch import Tensor, nn

from benchmarks import Row, at_most, in_turn, peer, ratio, ratios, reported, skipped
from benchmarks.layers import _ratios, block
from minimand import solve
from minimand.adjoints import Implicit
from minimand.functions import L1, NonNegative
from minimand.nn import SolverLinear
from minimand.operators import Dense
from minimand.solvers import ADMM, FISTA, Logistic, Problem, ProxGD, Solver, trace
from minimand.solvers.gap import GapBound

__all__ = ["run"]

TARGETS = (1e-4, 1e-6)
_TOLERANCES = [10.0**-k for k in range(1, 14)]


def _normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _tuned(problem: Problem, target: float, call: Callable[[float], np.ndarray]) -> Callable[[], object] | None:
    """The peer's call with the loosest tolerance that reaches the target; None if none does."""
    bound = GapBound(problem)
    room = target * float(bound.objectives(torch.zeros(problem.shape, dtype=torch.float64)).sum())
    for tol in _TOLERANCES:
        x = torch.from_numpy(np.asarray(call(tol), dtype=np.float64)).reshape(problem.shape)
        if float(bound(x)[1].sum()) <= room:
            return lambda: call(tol)
    return None


def _rows(
    name: str, problem: Problem, peers: dict[str, tuple[Callable[[float], np.ndarray], float | None]], rounds: int = 3
) -> list[Row]:
    rows = []
    for target in TARGETS:
        label = f"{name}, gap {target:g}"
        ours = solve(problem, tol=target)
        if not ours.converged:
            rows.append(Row(label, None, "", False, "solve() did not converge"))
            continue
        for other, (call, limit) in peers.items():
            tuned = _tuned(problem, target, call)
            if tuned is None:
                rows.append(Row(f"{label}, over {other}", None, "", True, f"{other} does not reach this gap"))
                continue
            (found,) = ratios(tuned, [lambda target=target: solve(problem, tol=target)], rounds)
            row = f"{label}, over {other}"
            rows.append(reported(row, found) if limit is None else at_most(row, found, limit, str(ours.solver)))
    return rows


def _batch_of_lassos() -> tuple[Problem, Tensor, Tensor]:
    A = _normal(256, 128, seed=0)
    sparse = _normal(256, 256, seed=1) * (torch.rand(256, 256, generator=torch.Generator().manual_seed(2)) < 0.05)
    y = sparse @ A + 0.1 * _normal(256, 128, seed=3)
    weight = 0.1 * float((y @ A.mT).abs().amax(-1).mean())
    return Problem(Dense(A), L1(weight), y), A, y


def _lassos() -> list[Row]:
    problem, A, y = _batch_of_lassos()
    weight, columns, rows = float(problem.function.weight), np.asfortranarray(A.mT.numpy()), y.numpy()  # type: ignore[attr-defined]

    def loop(tol: float) -> np.ndarray:
        model = Lasso(weight / 128, fit_intercept=False, tol=tol, max_iter=10000)
        return np.stack([model.fit(columns, row).coef_ for row in rows])

    peers: dict[str, Any] = {"a scikit-learn loop": (loop, 0.4)}
    if (jaxopt := peer("jaxopt")) is not None:
        peers["jaxopt"] = (_jaxopt(jaxopt, columns, rows, weight), 1.0)
    found = _rows("256 Lassos, shared 128×256", problem, peers)
    return found if "jaxopt" in peers else [*found, skipped("256 Lassos over jaxopt", "jaxopt")]


def _jaxopt(jaxopt: Any, columns: np.ndarray, rows: np.ndarray, weight: float) -> Callable[[float], np.ndarray]:
    """A batch of accelerated proximal gradient runs, compiled; the time of compilation is not measured."""
    jax = peer("jax")
    assert jax is not None
    jax.config.update("jax_enable_x64", True)
    made: dict[float, Any] = {}

    def call(tol: float) -> np.ndarray:
        if tol not in made:
            loss = lambda x, y: 0.5 * ((columns @ x - y) ** 2).sum()  # noqa: E731
            prox = lambda x, w, scaling=1.0: jaxopt.prox.prox_lasso(x, w, scaling)  # noqa: E731
            step = 1 / np.linalg.norm(columns, 2) ** 2
            solver = jaxopt.ProximalGradient(loss, prox, stepsize=step, maxiter=5000, tol=tol)
            start = np.zeros(columns.shape[1])
            made[tol] = jax.jit(jax.vmap(lambda y: solver.run(start, weight, y=y).params))
        return np.asarray(made[tol](rows))

    return call


def _nonnegative() -> list[Row]:
    A, y = _normal(128, 256, seed=4), _normal(256, 256, seed=5)
    columns = A.mT.numpy()
    loop = lambda tol: np.stack([nnls(columns, row)[0] for row in y.numpy()])  # noqa: E731
    return _rows("256 NNLS 256×128", Problem(Dense(A), NonNegative(), y), {"a scipy loop": (loop, 0.1)})


def _single(correlation: float, share: float) -> list[Row]:
    noise = _normal(500, 2000, seed=6)
    if correlation:
        for k in range(1, 2000):
            noise[:, k] = correlation * noise[:, k - 1] + (1 - correlation**2) ** 0.5 * noise[:, k]
    truth = torch.zeros(2000, dtype=torch.float64)
    truth[::40] = 1.0
    y = noise @ truth + 2 * _normal(500, seed=7)
    weight = share * float((y @ noise).abs().max())
    problem = Problem(Dense(noise.mT.contiguous()), L1(weight), y[None])
    columns, target = np.asfortranarray(noise.numpy()), y.numpy()
    name = f"Lasso 500×2000, λ = {share} λmax" + (f", correlated {correlation}" if correlation else "")

    def sklearn(tol: float) -> np.ndarray:
        return Lasso(weight / 500, fit_intercept=False, tol=tol, max_iter=100000).fit(columns, target).coef_

    celer = peer("celer")
    if celer is None:
        return [*_rows(name, problem, {"scikit-learn": (sklearn, None)}), skipped(f"{name}, over celer", "celer")]

    def working(tol: float) -> np.ndarray:
        return celer.Lasso(weight / 500, fit_intercept=False, tol=tol).fit(columns, target).coef_

    return _rows(name, problem, {"celer": (working, 3.0), "scikit-learn": (sklearn, None)})


def _logistic() -> list[Row]:
    X, truth = _normal(10000, 500, seed=8), torch.zeros(500, dtype=torch.float64)
    truth[::20] = 1.0
    y = torch.where(X @ truth + 2 * _normal(10000, seed=9) > 0, 1.0, -1.0).double()
    weight = 0.05 * float((0.5 * y @ X).abs().max())
    problem = Problem(Dense(X.mT.contiguous()), L1(weight), y[None], datafit=Logistic())
    columns, labels = np.asfortranarray(X.numpy()), y.numpy()

    def saga(tol: float) -> np.ndarray:
        options: dict[str, Any] = {"solver": "saga", "fit_intercept": False, "max_iter": 2000, "tol": tol}
        return LogisticRegression(l1_ratio=1.0, C=1 / weight, **options).fit(columns, labels).coef_[0]

    peers: dict[str, Any] = {"scikit-learn's saga": (saga, 2.0)}
    skglm = peer("skglm")
    if skglm is not None:

        def newton(tol: float) -> np.ndarray:
            model = skglm.SparseLogisticRegression(weight / 10000, fit_intercept=False, tol=tol)
            return model.fit(columns, labels).coef_[0]

        peers["skglm"] = (newton, 2.0)
    rows = _rows("sparse logistic regression 10000×500", problem, peers, rounds=2)
    return rows if skglm is not None else [*rows, skipped("sparse logistic regression over skglm", "skglm")]


def _backward() -> list[Row]:
    problem, A, y = _batch_of_lassos()
    weight, data = A.clone().requires_grad_(), y.clone().requires_grad_()
    built = Problem(Dense(weight), problem.function, data)
    held: list[Tensor] = []

    def forward() -> None:
        held[:] = [solve(built, tol=1e-6, adjoint=Implicit()).x]

    def backward() -> None:
        torch.autograd.grad(held[0].sum(), (weight, data), retain_graph=True)

    base, times = in_turn([forward, backward], 10)
    return [at_most("implicit backward of the 256 Lassos (dy and dA), over its forward", ratio(times, base), 0.3)]


def _layer() -> list[Row]:
    """The fewest iterations of any solver that unrolls at the objective of ProxGD(10) and of ProxGD(30)."""
    rows, y = [], torch.randn(128, 512, generator=torch.Generator().manual_seed(10))
    for iters, limit in ((10, 5.5), (30, 8.5)):
        problem = SolverLinear(512, 512, solver=ProxGD(iters)).problem(y)
        goal = trace(problem, ProxGD(iters)).objective[-1]
        solvers: list[Solver] = []
        for solver in (FISTA(iters), ADMM(iters, rho=0.3, relaxation=1.6), ADMM(iters, rho=0.2, relaxation=1.8)):
            above = (trace(problem, solver).objective > goal).nonzero()
            solvers.append(dataclasses.replace(solver, iters=int(above.max()) + 2 if len(above) else 1))
        found = _ratios(block(nn.Linear(512, 512)), [SolverLinear(512, 512, solver=s) for s in solvers], (128, 512), 15)
        best, value = min(zip(solvers, found, strict=True), key=lambda pair: pair[1].value)
        name = f"fc 512→512 at ProxGD({iters})'s objective, forward and backward, over the plain block"
        rows.append(at_most(name, value, limit, f"the fastest of {len(solvers)}: {best}"))
    return rows


def _cone_program() -> list[Row]:
    """A batch of NNLS in a network, forward and backward, against a layer of cvxpy."""
    name = "64 NNLS 40×20 with gradients (dy and dA), over cvxpylayers"
    layers, cvxpy = peer("cvxpylayers.torch"), peer("cvxpy")
    if layers is None or cvxpy is None:
        return [skipped(name, "cvxpylayers")]
    A, y = _normal(20, 40, seed=11).requires_grad_(), _normal(64, 40, seed=12).requires_grad_()
    x, columns, target = cvxpy.Variable(20), cvxpy.Parameter((40, 20)), cvxpy.Parameter(40)
    program = cvxpy.Problem(cvxpy.Minimize(cvxpy.sum_squares(columns @ x - target)), [x >= 0])
    layer = layers.CvxpyLayer(program, parameters=[columns, target], variables=[x])

    def theirs() -> Tensor:
        (value,) = layer(A.mT.expand(64, 40, 20), y, solver_args={"eps": 1e-6})
        torch.autograd.grad(value.sum(), (A, y))
        return value  # type: ignore[no-any-return]

    def ours() -> Tensor:
        value = solve(Problem(Dense(A), NonNegative(), y), tol=1e-6, adjoint=Implicit()).x
        torch.autograd.grad(value.sum(), (A, y))
        return value

    apart = float((theirs() - ours()).detach().abs().max())
    return [reported(name, ratios(theirs, [ours], 3)[0], f"solutions differ by at most {apart:.0e}")]


def run() -> list[Row]:
    """The rows of all problems."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = [*_lassos(), *_backward(), *_nonnegative()]
        for correlation, share in ((0.0, 0.1), (0.0, 0.02), (0.95, 0.1)):
            rows += _single(correlation, share)
        return [*rows, *_logistic(), *_layer(), *_cone_program()]

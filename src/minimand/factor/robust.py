"""The estimator RobustPCA: low rank plus sparse."""

import math
import os
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import OptionError
from ..solvers.iterate import iterate
from ..solvers.linear import ridge_factor
from .base import Factorization
from .certificate import certify_factors
from .inputs import require_number, same_kind
from .losses import HuberLoss
from .lowrank import Triples, shrunk
from .matrices import RowSharding
from .nmf import ROUGH
from .problem import INTERRUPTED, Certificate, Factors, Report, Status, Stop, noted_if_zero, stop_reason
from .sparse import SparseData

__all__ = ["RobustPCA"]

CODE_ITERATIONS = 2000
RELAXATION = 1.6
PEAK = 80  # bytes for each entry, at least: ten arrays of float64
CERTIFICATES = 5  # each after ADMM with a tenth of the tolerance before


class _AdmmState(NamedTuple):
    residual: Tensor  # D ≈ Y − X
    dual: Tensor  # the multiplier divided by the penalty
    triples: Triples
    penalty: float
    quiet: bool


@dataclass(eq=False, repr=False)
class RobustPCA(Factorization):
    r"""Low rank plus sparse,

    .. math:: \min_{X, E} \lambda\|X\|_* + \|E\|_1 + \tfrac\gamma2\|Y - X - E\|_F^2 ,

    or, with ``gamma=None``, without smoothing: :math:`\min_X \lambda\|X\|_* + \|Y - X\|_1`, which is principal
    component pursuit. Eliminating E leaves the Huber loss of :math:`Y - X`. The problem is convex in X; ADMM on
    :math:`D + X = Y` alternates the prox of the nuclear norm with that of the loss, and its multiplier is the dual
    point of the certificate.

    A CSR or CSC matrix or a sparse tensor is data with zeros and is made dense, because X, the residual and the
    multiplier are dense. The peak of a fit is 80 to 130 bytes for each entry, stored or not, as for dense data, and a
    sparse matrix that needs more than the machine's memory is refused. ``low_rank_`` and ``sparse_`` are arrays.

    Args:
        lam: :math:`\lambda > 0`. The usual value for principal component pursuit is the square root of the longer side.
        gamma: :math:`\gamma > 0`, or None. Residuals up to :math:`1/\gamma` count as noise, larger ones as sparse.
        tol: The relative gap to certify.
        max_iter: The number of iterations.
        random_state: Seed of the randomised SVD.
        verbose: Show a progress bar.

    Attributes:
        low_rank_: X, fitted to the training data.
        sparse_: E.

    Source: [Vidal2018], robust PCA, in both formulations.

    >>> import numpy as np
    >>> Y = np.ones((8, 8))
    >>> Y[1, 2] = 30.0
    >>> model = RobustPCA(lam=8**0.5, gamma=None).fit(Y)
    >>> model.n_components_, np.argwhere(np.abs(model.sparse_) > 0.1).tolist(), round(float(model.sparse_[1, 2]))
    (1, [[1, 2]], 29)
    """

    gamma: float | None = None
    _: KW_ONLY
    max_iter: int = 1000
    _takes_sparse = True

    def _check_options(self) -> None:
        super()._check_options()
        if self.gamma is not None:
            require_number("gamma", self.gamma)

    def _checked(self, Y: Any, *, reset: bool) -> tuple[Any, Any]:
        like, data = super()._checked(Y, reset=reset)
        if not isinstance(data, SparseData):
            return like, data
        need, memory = PEAK * data.numel(), physical_memory()
        if need > memory:
            raise OptionError(
                f"RobustPCA makes a sparse Y of shape {data.shape} dense and needs at least {need / 2**30:.3g} GiB, "
                f"but this machine has {memory / 2**30:.3g} GiB: use fewer rows, or LowRank, which keeps Y sparse"
            )
        return like, data[:]

    def _loss(self, Y: Tensor, rows: RowSharding) -> HuberLoss:
        return HuberLoss(Y, None if self.gamma is None else float(self.gamma), rows)

    def _store(self, found: Factors, data: Tensor, like: Any) -> None:
        super()._store(found, data, like)
        low_rank = found.U @ found.V.mT
        self.low_rank_ = same_kind(low_rank, like)
        self.sparse_ = same_kind(self._loss(data, RowSharding()).sparse(data - low_rank), like)

    def _solve(self, problem: Any, start: Any, report: Report) -> Factors:
        loss, lam, rows, generator, history = problem.loss, problem.lam, problem.rows, self._generator(), []
        Y, done, tol = loss.Y, 0, self.tol * 0.1
        latest, halted = [self._first(problem, start)], None

        def step(state: _AdmmState, k: int) -> _AdmmState:
            state = self._advance(problem, state, k, tol, generator)
            value = loss.of(Y - _product(state.triples)).to(torch.float64)
            history.append(float(rows.sum(value)) + lam * float(state.triples.kept.sum()))
            report(k, len(state.triples.kept), history[-1])
            latest[0] = state
            return state

        try:
            for _ in range(CERTIFICATES):
                left = int(self.max_iter) - done
                state, done = iterate(step, latest[0], left, start=done, until=lambda s, k: s.quiet)
                certificate = self._certified(problem, state, generator)
                if certificate.status is Status.CERTIFIED or done >= self.max_iter or tol < 1e-4 * self.tol:
                    break
                tol *= 0.1
        except KeyboardInterrupt:
            state, done, certificate, halted = latest[0], len(history), INTERRUPTED, Stop.INTERRUPTED
        U, V = state.triples.factors()
        norms = rows.sum(U.to(torch.float64).square().sum(0)).sqrt() * V.to(torch.float64).norm(dim=0)
        objective = loss.value(U, V) + lam * float(norms.sum())
        certificate = noted_if_zero(certificate, U.shape[1], lam)
        iterations = max(done, 1)
        stop = stop_reason(certificate, lam=lam, tol=self.tol, out_of_iterations=iterations >= self.max_iter)
        return Factors(U, V, objective, certificate, (*history[:-1], objective), iterations, halted or stop)

    def _first(self, problem: Any, start: Any) -> _AdmmState:
        Y, rows = problem.loss.Y, problem.rows
        totals = rows.sum(torch.stack([Y.abs().sum(), torch.tensor(float(Y.numel()))]).to(torch.float64))
        mean = float(totals[0] / totals[1])
        penalty = 0.25 * problem.lam / max(mean, 1e-30) / math.sqrt(max(rows.count(len(Y)), Y.shape[1]))
        empty = Triples(Y[:, :0], Y.new_zeros(0), Y.new_zeros(Y.shape[1], 0))
        residual = torch.zeros_like(Y) if start is None else Y - start[0].to(Y) @ start[1].to(Y).mT
        return _AdmmState(residual, torch.zeros_like(Y), empty, penalty, False)

    def _advance(self, problem: Any, state: _AdmmState, k: int, tol: float, generator: torch.Generator) -> _AdmmState:
        """One iteration of ADMM. The penalty is adapted until the primal and dual residuals balance."""
        residual, dual, triples, penalty, _ = state
        loss, Y = problem.loss, problem.loss.Y
        warm = triples.factors() if len(triples.kept) else None
        triples = shrunk(
            Y - residual + dual, problem.lam / penalty, rows=loss.rows, generator=generator, start=warm, sweeps=8
        )
        left_over = Y - _product(triples)
        new = loss.prox_residual(left_over + dual, 1 / penalty)
        misfit = left_over - new
        dual = dual + misfit
        squares = torch.stack([x.to(torch.float64).square().sum() for x in (misfit, new - residual, Y, dual)])
        primal, change, size, length = loss.rows.sum(squares).sqrt().tolist()
        quiet = primal <= tol * max(size, 1e-300) and change <= tol * max(length, 1e-2 * size, 1e-300)
        factor = 1.0
        if k % 10 == 9 and k < 300:
            factor = 2.0 if primal > 4 * change else 0.5 if change > 4 * primal else 1.0
        return _AdmmState(new, dual / factor, triples, penalty * factor, quiet)

    def _certified(self, problem: Any, state: _AdmmState, generator: torch.Generator) -> Certificate:
        """The better certificate of two dual points: the multiplier, and the gradient at X."""
        U, V = state.triples.factors()
        problems = [replace(problem, loss=replace(problem.loss, found=state.penalty * state.dual))]
        problems += [] if self.gamma is None else [problem]
        found = [certify_factors(problem, U, V, tol=self.tol, generator=generator).certificate for problem in problems]
        return min(found, key=lambda certificate: certificate.gap)

    def _code(self, problem: Any, V: Tensor) -> tuple[Tensor, bool]:
        """Each row solves min h(y − uVᵀ) + (λ/2)‖u‖² with the loss h, by ADMM with one small factorisation."""
        loss, Y = problem.loss, problem.loss.Y
        scale = float((Y - Y.mean()).abs().mean()) or 1.0
        penalty = 4 / scale
        factor = ridge_factor(V.mT.contiguous(), problem.lam / penalty)

        size, small = max(float(Y.norm()), 1e-300), torch.finfo(Y.dtype).eps ** 0.5 * 0.05

        def step(state: tuple[Tensor, Tensor, Tensor, float], k: int) -> tuple[Tensor, Tensor, Tensor, float]:
            residual, dual, _, _ = state
            U = factor.solve((Y - residual + dual) @ V)
            over = RELAXATION * (Y - U @ V.mT) + (1 - RELAXATION) * residual
            new = loss.prox_residual(over + dual, 1 / penalty)
            change = max(float((new - residual).norm()), float((over - new).norm())) / size
            return new, dual + over - new, U, change

        start = (torch.zeros_like(Y), torch.zeros_like(Y), Y @ V, math.inf)
        (_, _, U, change), _ = iterate(step, start, CODE_ITERATIONS, until=lambda s, k: s[3] <= small)
        return U, change <= ROUGH


def physical_memory() -> float:
    """The bytes of memory of this machine; infinite where the system does not tell."""
    try:
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, OSError, ValueError):
        return math.inf


def _product(triples: Triples) -> Tensor:
    return (triples.left * triples.kept) @ triples.right.mT

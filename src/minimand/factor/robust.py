"""Robust principal components: low rank plus sparse."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..solvers.iterate import iterate
from ..solvers.linear import ridge_factor
from .base import Factorization
from .bounds import largest_singular
from .certificate import Status
from .engine import said
from .gap import certificate_of
from .inputs import require_number, same_kind
from .losses import Huber
from .regularisers import L2
from .rows import Rows
from .shrinkage import Triples, shrunk

__all__ = ["RobustPCA"]

CODE_ITERATIONS = 2000
RELAXATION = 1.6


class _Split(NamedTuple):
    residual: Tensor  # D ≈ Y − X
    dual: Tensor  # the multiplier over the penalty
    triples: Triples
    penalty: float
    quiet: bool


class RobustPCA(Factorization):
    r"""Low rank plus sparse,

    .. math:: \min_{X, E} \lambda\|X\|_* + \|E\|_1 + \tfrac\gamma2\|Y - X - E\|_F^2 ,

    or, with ``gamma=None``, without smoothing: :math:`\min_X \lambda\|X\|_* + \|Y - X\|_1`, which is principal
    component pursuit. Eliminating E leaves the Huber loss of :math:`Y - X`. The problem is convex in X; ADMM on
    :math:`D + X = Y` alternates the prox of the nuclear norm with that of the loss, and its multiplier is the dual
    point of the certificate.

    Args:
        lam: :math:`\lambda > 0`; principal component pursuit takes the root of the longer side.
        gamma: :math:`\gamma > 0`, or None. Residuals up to :math:`1/\gamma` count as noise, larger ones as sparse.
        tol: The relative gap to certify.
        max_iter: Iterations.
        random_state: Seed of the randomised SVD.
        verbose: Show a progress bar.

    Attributes:
        low_rank_: X, fitted to the training data.
        sparse_: E.

    Source: 003, robust PCA, in both formulations.

    >>> import numpy as np
    >>> Y = np.ones((8, 8))
    >>> Y[1, 2] = 30.0
    >>> model = RobustPCA(lam=8**0.5, gamma=None).fit(Y)
    >>> model.n_components_, np.argwhere(np.abs(model.sparse_) > 0.1).tolist(), round(float(model.sparse_[1, 2]))
    (1, [[1, 2]], 29)
    """

    low_rank_: Any
    sparse_: Any

    def __init__(
        self,
        lam: float,
        gamma: float | None = None,
        *,
        tol: float = 1e-3,
        max_iter: int = 1000,
        random_state: Any = None,
        verbose: bool = False,
    ) -> None:
        self.lam = lam
        self.gamma = gamma
        self.tol = tol
        self.max_iter = max_iter
        self.random_state = random_state
        self.verbose = verbose

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags

    def _check_options(self) -> None:
        super()._check_options()
        if self.gamma is not None:
            require_number("gamma", self.gamma)

    def _loss(self, Y: Tensor, rows: Rows, found: Tensor | None = None) -> Huber:
        return Huber(Y, None if self.gamma is None else float(self.gamma), rows, found)

    def _fit(self, Y: Any, start: Any, group: Any) -> Any:
        like, _ = self._checked(Y, reset=True)
        out = super()._fit(Y, start, group)
        self.low_rank_, self.sparse_ = (same_kind(part, like) for part in (self.low_rank_, self.sparse_))
        return out

    def _solve(self, Y: Tensor, start: tuple[Tensor, Tensor] | None, rows: Rows) -> tuple[Tensor, Tensor]:
        loss, generator, history = self._loss(Y, rows), self._generator(), []
        state = self._first(Y, start, loss)
        done, tol = 0, self.tol * 0.1
        with self._progress() as report:
            while True:

                def step(state: _Split, k: int, tol: float = tol) -> _Split:
                    state = self._advance(Y, loss, state, k, tol, generator)
                    value = loss.of(Y - _product(state.triples)).to(torch.float64)
                    history.append(float(rows.sum(value)) + self.lam * float(state.triples.kept.sum()))
                    report(k, len(state.triples.kept), history[-1])
                    return state

                state, done = iterate(step, state, int(self.max_iter) - done, start=done, until=lambda s, k: s.quiet)
                certificate, loss_here = self._certified(Y, state, rows, generator)
                if certificate.status is Status.CERTIFIED or done >= self.max_iter or tol < 1e-4 * self.tol:
                    break
                tol *= 0.1
        U, V = state.triples.factors()
        self.certificate_ = said(certificate, U.shape[1], self.lam)
        norms = rows.sum(U.to(torch.float64).square().sum(0)).sqrt() * V.to(torch.float64).norm(dim=0)
        self.objective_ = loss_here.value(U, V) + self.lam * float(norms.sum())
        self.history_ = [*history[:-1], self.objective_]
        self.n_iter_ = max(done, 1)
        self.low_rank_ = U @ V.mT
        self.sparse_ = loss.sparse(Y - self.low_rank_)
        return U, V

    def _first(self, Y: Tensor, start: tuple[Tensor, Tensor] | None, loss: Huber) -> _Split:
        rows = loss.rows
        totals = rows.sum(torch.stack([Y.abs().sum(), torch.tensor(float(Y.numel()))]).to(torch.float64))
        mean = float(totals[0] / totals[1])
        penalty = 0.25 * float(self.lam) / max(mean, 1e-30) / math.sqrt(max(rows.count(len(Y)), Y.shape[1]))
        empty = Triples(Y[:, :0], Y.new_zeros(0), Y.new_zeros(Y.shape[1], 0))
        residual = torch.zeros_like(Y) if start is None else Y - start[0].to(Y) @ start[1].to(Y).mT
        return _Split(residual, torch.zeros_like(Y), empty, penalty, False)

    def _advance(self, Y: Tensor, loss: Huber, state: _Split, k: int, tol: float, generator: torch.Generator) -> _Split:
        """One iteration; the penalty follows the two residuals until they balance."""
        residual, dual, triples, penalty, _ = state
        warm = triples.factors() if len(triples.kept) else None
        triples = shrunk(
            Y - residual + dual, float(self.lam) / penalty, rows=loss.rows, generator=generator, start=warm, sweeps=8
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
        return _Split(new, dual / factor, triples, penalty * factor, quiet)

    def _certified(self, Y: Tensor, state: _Split, rows: Rows, generator: torch.Generator) -> Any:
        """The better certificate of two dual points: the multiplier, and the gradient at X."""
        U, V = state.triples.factors()
        found = None
        for point in (state.penalty * state.dual, None):
            if point is None and self.gamma is None:
                continue
            loss = self._loss(Y, rows, point)
            new = certificate_of(loss, L2(), U, V, float(self.lam), tol=self.tol, generator=generator).certificate
            if found is None or new.gap < found[0].gap:
                found = (new, loss)
        assert found is not None
        return found

    def _code(self, Y: Tensor, V: Tensor) -> Tensor:
        """Each row solves min h(y − uVᵀ) + (λ/2)‖u‖², h the loss, by ADMM with one small factorisation."""
        if V.shape[1] == 0:
            return Y.new_zeros(len(Y), 0)
        loss = self._loss(Y, Rows())
        scale = float((Y - Y.mean()).abs().mean()) or 1.0
        penalty = 4 / scale
        factor = ridge_factor(V.mT.contiguous(), float(self.lam) / penalty)

        def step(state: tuple[Tensor, Tensor, Tensor, bool], k: int) -> tuple[Tensor, Tensor, Tensor, bool]:
            residual, dual, _, _ = state
            U = factor.solve((Y - residual + dual) @ V)
            over = RELAXATION * (Y - U @ V.mT) + (1 - RELAXATION) * residual
            new = loss.prox_residual(over + dual, 1 / penalty)
            dual = dual + over - new
            small = torch.finfo(Y.dtype).eps ** 0.5 * 0.05
            still = bool((new - residual).norm() <= small * Y.norm()) and bool((over - new).norm() <= small * Y.norm())
            return new, dual, U, still

        start = (torch.zeros_like(Y), torch.zeros_like(Y), Y @ V, False)
        return iterate(step, start, CODE_ITERATIONS, until=lambda s, k: s[3])[0][2]

    def lambda_max(self, Y: Any) -> float:
        """The norm of the loss's gradient at zero: at and above it zero is the answer."""
        _, data = self._checked(Y, reset=not hasattr(self, "n_features_in_"))
        return largest_singular(self._loss(data, Rows()).zero(), self._generator())


def _product(triples: Triples) -> Tensor:
    return (triples.left * triples.kept) @ triples.right.mT

"""From an estimator's options to the meta-algorithm."""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..errors import OptionError, ShapeError, require_finite
from .certificate import Certificate
from .descent import Descent, LocalDescent, Pair, balanced
from .gap import loss_of, regulariser_named
from .growth import Growth, Report, run
from .inputs import real, refuse_masked, require_lam, require_number, same_kind, seeded_generator, working
from .losses import Loss, Squared
from .proximal import ProximalDescent
from .regularisers import Regulariser
from .rows import Rows

__all__ = ["Factors", "factorise", "factorize", "grown", "growth_options", "said"]

LARGEST = 100


class Factors(NamedTuple):
    """What :func:`factorize` returns: factors with vectors as columns, of the kind of the input."""

    U: Any
    V: Any
    objective: float
    certificate: Certificate
    history: list[float]


def factorize(
    Y: Any,
    *,
    lam: float,
    regulariser: Regulariser | str = "l2",
    gamma: float | None = None,
    loss: Callable[[Tensor], Loss] = Squared,
    n_components: int | None = None,
    r_max: int | None = None,
    tol: float = 1e-3,
    max_iter: int = 500,
    random_state: Any = None,
) -> Factors:
    r"""Minimise :math:`\ell(UV^\top) + \lambda\sum_i\theta(U_i, V_i)`, for any regulariser and any smooth loss.

    The estimators are this with a name and a ``transform``; a :math:`\theta` or :math:`\ell` of one's own has its way
    in here.

    Args:
        Y: n_samples × n_features; array, frame or tensor.
        lam: :math:`\lambda > 0`.
        regulariser: As for :func:`certify`.
        gamma: :math:`\gamma` of ``"sparse"``.
        loss: What makes a loss of the data: :class:`Squared`, :class:`Logistic`, ``functools.partial(Huber, gamma=…)``,
            or an :class:`Entrywise` of one's own. Squares descend by exact column updates, the others by proximal
            gradient steps.
        n_components: None to grow until the polar allows no more; an int fixes the size.
        r_max: No more components than this; None is 100.
        tol: The relative gap to certify.
        max_iter: Sweeps of local descent in all.
        random_state: Seed of the starts.

    >>> import numpy as np
    >>> found = factorize(np.diag([3.0, 0.5]), lam=1.0, random_state=0)
    >>> found.U.shape, round(found.objective, 6), found.certificate.status
    ((2, 1), 2.625, <Status.CERTIFIED: 'CERTIFIED'>)
    """
    theta = regulariser_named(regulariser, gamma)
    model = _Plain(lam, n_components, r_max, tol, max_iter, random_state)
    model.check()
    refuse_masked("Y", Y, "complete it with MatrixCompletion, or fill it")
    data = working(real("Y", Y))
    if data.dim() != 2 or 0 in data.shape:
        raise ShapeError(f"Y must be a real matrix with entries, got shape {tuple(data.shape)}")
    require_finite("Y", data)
    U, V = (same_kind(x, Y) for x in factorise(model, data, theta, None, Rows(), loss_of(loss, data)))
    return Factors(U, V, model.objective_, model.certificate_, model.history_)


@dataclass
class _Plain:
    """Options without an estimator."""

    lam: float
    n_components: int | None
    r_max: int | None
    tol: float
    max_iter: int
    random_state: Any
    objective_: float = 0.0
    certificate_: Any = None
    history_: list[float] = field(default_factory=list)

    def check(self) -> None:
        """Refuse options outside their ranges."""
        require_lam(self.lam)
        require_number("tol", self.tol)
        require_number("max_iter", self.max_iter)

    def _generator(self) -> torch.Generator:
        return seeded_generator(self.random_state)

    @contextlib.contextmanager
    def _progress(self) -> Iterator[Report]:
        yield lambda sweeps, rank, objective: None


def factorise(
    model: Any,
    Y: Tensor,
    theta: Regulariser,
    start: tuple[Tensor, Tensor] | None,
    rows: Rows,
    loss: Loss | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the meta-algorithm for an estimator's options, and set what it found out on the estimator."""
    options = growth_options(model, rows.count(len(Y)) * Y.shape[1])
    loss = Squared(Y, rows) if loss is None else loss
    descent: LocalDescent
    if isinstance(loss, Squared):
        descent = Descent(Y, 0.5 * loss.size() ** 2, theta, float(model.lam), rows)
    elif math.isfinite(loss.curvature):
        descent = ProximalDescent(loss, theta, float(model.lam), rows)
    else:
        raise OptionError(
            f"{type(loss).__name__} has no gradient here, which factorize needs: smooth it (Huber with a gamma), "
            "or take RobustPCA"
        )
    return grown(model, descent, loss, options, start, Y)


def grown(
    model: Any,
    descent: LocalDescent,
    loss: Loss,
    options: Growth,
    start: tuple[Tensor, Tensor] | None,
    like: Tensor,
) -> tuple[Tensor, Tensor]:
    """The meta-algorithm on any loss with its descent; ``like`` has the factors' type and device."""
    pair = None if start is None else _start(start, like, options, loss.rows)
    with model._progress() as report:
        outcome = run(descent, loss, options, start=pair, dtype=like.dtype, generator=model._generator(), report=report)
    model.history_ = outcome.history
    model.objective_ = outcome.objective
    model.n_iter_ = max(outcome.sweeps, 1)
    alive = int(outcome.pair.V.ne(0).any(1).sum())
    model.certificate_ = said(outcome.certificate, alive, model.lam)
    return outcome.pair.U.mT, outcome.pair.V.mT


def growth_options(model: Any, bound: int) -> Growth:
    """The options of growth, checked; ``bound`` is the theory's on the size of a minimiser."""
    for name in ("n_components", "r_max"):
        value = getattr(model, name, None)
        if value is not None and (not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 1):
            raise OptionError(f"{name} must be None or a whole number ≥ 1, got {value!r}")
    size = getattr(model, "n_components", None)
    effort = getattr(model, "effort", 1.0)
    if effort is None and size is None:
        raise OptionError("effort=None seeks no certificate, which is what a size is grown to: pass n_components=…")
    if effort is not None:
        require_number("effort", effort, zero=True)
    largest = min(bound, LARGEST) if model.r_max is None else int(model.r_max)
    return Growth(
        size,
        largest if size is None else int(size),
        int(model.max_iter),
        float(model.tol),
        effort if effort is None else float(effort),
    )


def _start(start: tuple[Tensor, Tensor], Y: Tensor, options: Growth, rows: Rows) -> Pair:
    pair = balanced(Pair(*(x.to(Y.dtype).to(Y.device).mT.contiguous() for x in start)), rows)
    if options.size is not None and pair.rank != options.size:
        raise OptionError(f"start has {pair.rank} components, but n_components={options.size}")
    return pair


def said(certificate: Certificate, rank: int, lam: float) -> Certificate:
    """The certificate, with a word where the answer is zero because λ is too large; ``rank`` counts what is not."""
    if rank or not certificate.finds_nothing_above(lam):
        return certificate
    known = "lam ≥ lambda_max, so the answer is zero"
    if certificate.polar_upper > lam * (1 + 1e-6):
        known = "the answer is zero as far as is known: no direction found attains more than lam"
    return replace(certificate, method=f"{certificate.method}; {known}")

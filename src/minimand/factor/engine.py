"""From an estimator's options to the meta-algorithm."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..errors import OptionError, ShapeError, require_finite, require_positive
from .certificate import Certificate
from .descent import Descent, LocalDescent, Pair, balanced
from .gap import regulariser_named
from .growth import Growth, Report, run
from .losses import Loss, Squared
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
    n_components: int | None = None,
    r_max: int | None = None,
    tol: float = 1e-3,
    max_iter: int = 500,
    random_state: Any = None,
) -> Factors:
    r"""Minimise :math:`\tfrac12\|Y - UV^\top\|^2 + \lambda\sum_i\theta(U_i, V_i)`, for any regulariser.

    The estimators are this with a name and a ``transform``; a :math:`\theta` of one's own has its way in here.

    >>> import numpy as np
    >>> found = factorize(np.diag([3.0, 0.5]), lam=1.0, random_state=0)
    >>> found.U.shape, round(found.objective, 6), found.certificate.status
    ((2, 1), 2.625, <Status.CERTIFIED: 'CERTIFIED'>)
    """
    theta = regulariser_named(regulariser, gamma)
    model = _Plain(lam, n_components, r_max, tol, max_iter, random_state)
    model.check()
    tensor = Y.detach() if isinstance(Y, Tensor) else torch.as_tensor(np.asarray(Y))
    if tensor.dim() != 2 or tensor.is_complex() or 0 in tensor.shape:
        raise ShapeError(f"Y must be a real matrix with entries, got {tensor.dtype} of shape {tuple(tensor.shape)}")
    data = tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.to(torch.float64)
    require_finite("Y", data)
    U, V = factorise(model, data, theta, None, Rows())
    if not isinstance(Y, Tensor):
        return Factors(U.numpy(), V.numpy(), model.objective_, model.certificate_, model.history_)
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
        require_positive("lam", self.lam)
        require_positive("tol", self.tol)
        require_positive("max_iter", self.max_iter)

    def _generator(self) -> torch.Generator:
        generator = torch.Generator()
        if self.random_state is None:
            generator.seed()
        else:
            generator.manual_seed(int(self.random_state))
        return generator

    @contextlib.contextmanager
    def _progress(self) -> Iterator[Report]:
        yield lambda sweeps, rank, objective: None


def factorise(
    model: Any, Y: Tensor, theta: Regulariser, start: tuple[Tensor, Tensor] | None, rows: Rows
) -> tuple[Tensor, Tensor]:
    """Run the meta-algorithm for an estimator's options, and set what it found out on the estimator."""
    options = growth_options(model, rows.count(len(Y)) * Y.shape[1])
    loss = Squared(Y, rows)
    descent = Descent(Y, 0.5 * loss.size() ** 2, theta, float(model.lam), rows)
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
    model.certificate_ = said(outcome.certificate, outcome.pair.rank, model.lam)
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
    """The certificate, with a word where the answer is zero because λ is too large."""
    if rank or certificate.polar_upper > lam * (1 + 1e-6):
        return certificate
    return replace(certificate, method=f"{certificate.method}; lam ≥ lambda_max, so the answer is zero")

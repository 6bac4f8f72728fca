"""Factorisation with any regularizer and any smooth loss, without an estimator."""

from typing import Any, NamedTuple

from ..arguments import checked
from ..errors import ShapeError, require_finite
from ..linalg import without_autocast
from .entrywise import LossMaker, loss_from
from .growth import grow
from .inputs import real, refuse_masked, require_lam, require_number, same_kind, seeded_generator, working
from .losses import Squared
from .problem import Certificate, FactorProblem, GrowthOptions
from .regularizers import Regularizer, named_regularizer

__all__ = ["FactorizeResult", "factorize"]


class FactorizeResult(NamedTuple):
    """The result of :func:`factorize`: factors with vectors as columns, of the same kind as the input."""

    U: Any
    V: Any
    objective: float
    certificate: Certificate
    history: list[float]


@checked
@without_autocast()
def factorize(
    Y: Any,
    *,
    lam: float,
    regularizer: Regularizer | str = "l2",
    gamma: float | None = None,
    loss: LossMaker = Squared,
    n_components: int | None = None,
    r_max: int | None = None,
    tol: float = 1e-3,
    max_iter: int = 500,
    random_state: Any = None,
) -> FactorizeResult:
    r"""Minimise :math:`\ell(UV^\top) + \lambda\sum_i\theta(U_i, V_i)` for any regularizer and any smooth loss.

    The estimators solve special cases and add a ``transform``. Use this function for a :math:`\theta` or a
    :math:`\ell` of your own.

    Args:
        Y: n_samples × n_features; array, frame or tensor.
        lam: :math:`\lambda > 0`.
        regularizer: As for :func:`certify`.
        gamma: :math:`\gamma` of ``"sparse"``.
        loss: A datafit of :mod:`minimand.solvers` such as ``Logistic()``, also one of your own; or a function from the
            data to a loss: :class:`Squared`, ``functools.partial(HuberLoss, gamma=…)``. Squares descend by exact column
            updates, other losses by proximal gradient steps.
        n_components: None to grow until the polar allows no more; an int fixes the size.
        r_max: The largest number of components; None: 100.
        tol: The relative gap to certify.
        max_iter: The total number of sweeps of local descent.
        random_state: Seed of the starts.

    >>> import numpy as np
    >>> found = factorize(np.diag([3.0, 0.5]), lam=1.0, random_state=0)
    >>> found.U.shape, round(found.objective, 6), found.certificate.status
    ((2, 1), 2.625, <Status.CERTIFIED: 'CERTIFIED'>)
    """
    theta = named_regularizer(regularizer, gamma)
    require_lam(lam)
    require_number("tol", tol)
    require_number("max_iter", max_iter)
    refuse_masked("Y", Y, "complete it with MatrixCompletion, or fill it")
    data = working(real("Y", Y))
    if data.dim() != 2 or 0 in data.shape:
        raise ShapeError(f"Y must be a real matrix with entries, got shape {tuple(data.shape)}")
    require_finite("Y", data)
    problem, units = FactorProblem(loss_from(loss, data), theta, float(lam)).normalized()
    options = GrowthOptions(n_components, r_max, max(int(max_iter), 1), float(tol), bound=data.numel())
    found = grow(problem, options, like=data, generator=seeded_generator(random_state)).in_units(units)
    return FactorizeResult(
        same_kind(found.U, Y), same_kind(found.V, Y), found.objective, found.certificate, list(found.history)
    )

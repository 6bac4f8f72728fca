"""A certificate for anyone's factors."""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..errors import OptionError, ShapeError, require_finite, require_positive
from .bounds import Bound
from .certificate import Certificate, judge
from .duals import DualMatrix, summation
from .inputs import real
from .losses import Loss, Observed, Squared, rounding
from .regularisers import L2, Asked, Directions, NonNegativeL2, Regulariser, SparseL2

__all__ = ["Finding", "certificate_of", "certify", "concluded", "loss_of", "regulariser_named"]

DIRECTIONS = 4
SWEEPS = 30


def certify(
    Y: Any,
    U: Any,
    V: Any,
    *,
    lam: float,
    regulariser: Literal["l2", "nonnegative", "sparse"] | Regulariser = "l2",
    gamma: float | None = None,
    loss: Callable[[Tensor], Loss] = Squared,
    mask: Any = None,
    tol: float = 1e-3,
    effort: float = 1.0,
) -> Certificate:
    r"""How far given factors are from the global minimum of

    .. math:: f(U, V) = \tfrac12\|P_\Omega(Y - UV^\top)\|^2 + \lambda\sum_i \theta(U_i, V_i) ,

    at most. It holds whatever produced the factors: scikit-learn, tensorly, an SVD, a guess. With the residual R, an
    upper bound :math:`\hat p` on its polar and
    :math:`c = \operatorname{clip}(\langle Y,R\rangle/\|R\|^2, 0, \lambda/\hat p)`,

    .. math:: f - F^* \le f - \bigl(c\langle Y, R\rangle - \tfrac12 c^2\|R\|^2\bigr) .

    Other losses have the negative gradient for R, and their conjugates for the bracket.

    Args:
        Y: The data, n_samples × n_features; array, frame or tensor. Where ``mask`` is False it is not looked at.
        U: n_samples × r.
        V: n_features × r.
        lam: :math:`\lambda > 0`.
        regulariser: ``"l2"`` (:math:`\|u\|\|v\|`, the nuclear norm), ``"nonnegative"`` (the same on
            :math:`u, v \ge 0`), ``"sparse"`` (:math:`\|v\|_2(\|u\|_2 + \gamma\|u\|_1)`), or a
            :class:`~minimand.factor.Regulariser`.
        gamma: :math:`\gamma` of ``"sparse"``.
        loss: What makes a loss of the data, as for :func:`factorize`.
        mask: True where Y was observed; None is everywhere. What a masked array masks was not observed either.
        tol: The relative gap up to which a point counts as certified.
        effort: How long to look for a bound on the polar (non-negative factors); 1 is about five seconds.

    Everything is computed in float64, with rounding on the safe side.

    >>> import numpy as np
    >>> Y = np.diag([3.0, 1.0])
    >>> best = np.array([[np.sqrt(2.0)], [0.0]])              # singular values 3 − 1 and 1 − 1
    >>> certify(Y, best, best, lam=1.0).status
    <Status.CERTIFIED: 'CERTIFIED'>
    >>> certify(Y, 0 * best, 0 * best, lam=1.0).status
    <Status.IMPROVABLE: 'IMPROVABLE'>
    """
    theta = regulariser_named(regulariser, gamma)
    require_positive("lam", lam)
    require_positive("tol", tol)
    require_positive("effort", effort, zero=True)
    Y, mask = _unmasked(Y, mask)
    data, left, right = _matrix("Y", Y, finite=mask is None), _matrix("U", U), _matrix("V", V)
    if (data.shape[0], left.shape[1]) != (left.shape[0], right.shape[1]) or data.shape[1] != right.shape[0]:
        raise ShapeError(
            f"Y is {tuple(data.shape)}, U {tuple(left.shape)} and V {tuple(right.shape)}; "
            "U needs a row per row of Y, V a row per column of Y, and both the same number of columns"
        )
    if mask is not None and loss is not Squared:
        raise OptionError("mask goes with squares only: leave loss out, or fill what was not observed")
    made = loss_of(loss, data) if mask is None else _observed(data, mask)
    return certificate_of(made, theta, left, right, lam, tol=tol, effort=effort).certificate


def loss_of(make: Callable[[Tensor], Loss], data: Tensor) -> Loss:
    """The loss of data."""
    loss = make(data) if callable(make) else None
    if not isinstance(loss, Loss):
        raise OptionError(f"loss is what makes a Loss of the data, such as Squared or Logistic, got {make!r}")
    return loss


def regulariser_named(name: str | Regulariser, gamma: float | None) -> Regulariser:
    """The regulariser of a name."""
    if isinstance(name, Regulariser):
        return name
    if name == "sparse":
        if gamma is None:
            raise OptionError('regulariser="sparse" needs gamma, the weight of the l1 norm: pass gamma=…')
        return SparseL2(gamma)
    if gamma is not None and name in ("l2", "nonnegative"):
        raise OptionError(f'gamma belongs to regulariser="sparse", not to {name!r}; leave it out')
    if name == "l2":
        return L2()
    if name == "nonnegative":
        return NonNegativeL2()
    raise OptionError(f'regulariser is "l2", "nonnegative", "sparse" or a Regulariser, got {name!r}')


class Finding(NamedTuple):
    """A certificate, the objective that it speaks of, and the directions that it looked at, best first."""

    certificate: Certificate
    objective: float
    directions: Directions | None


def certificate_of(
    loss: Loss,
    theta: Regulariser,
    U: Tensor,
    V: Tensor,
    lam: float,
    *,
    tol: float = 1e-3,
    effort: float = 1.0,
    generator: torch.Generator | None = None,
) -> Finding:
    """The certificate of factors under any loss and regulariser; rows may be spread over ranks."""
    U, V = U.detach().to(torch.float64), V.detach().to(torch.float64)
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    charged = float(theta.values(U.mT, V.mT, loss.rows).sum())
    if not charged < float("inf"):
        raise OptionError(
            f"the factors lie outside the domain of {type(theta).__name__}: they hold negative entries; "
            "clip them at zero, or certify with another regulariser"
        )
    Z = loss.dual(U, V)
    asked = Asked(min(1e-4, tol / 4), effort, (U.mT, V.mT), generator)
    upper = theta.upper(Z, lam, asked)
    slope, found = loss.slope(U, V, Z), None
    if slope is not None:
        found = theta.directions(slope, DIRECTIONS, generator, sweeps=SWEEPS if effort > 0 else 5)
    attained = 0.0 if found is None else found.best
    certificate, objective = concluded(loss, Z, U, V, charged, (attained, upper), lam, tol, theta.floor)
    return Finding(certificate, objective, found)


def concluded(
    loss: Loss,
    Z: DualMatrix,
    U: Tensor,
    V: Tensor,
    charged: float,
    polar: tuple[float, Bound],
    lam: float,
    tol: float,
    floor: float = 1.0,
) -> tuple[Certificate, float]:
    r"""The certificate from a dual point, the penalty Σ θ and the two bounds on the polar, and the objective.

    All that rounding may hide counts against the point: of the residual, in the polar and the loss, and of the sums.
    What a direction attains counts less :math:`\sqrt{2\kappa h}/c`, h being what rounding may hide of the objective:
    beyond that the direction lowers the objective by more than h.
    """
    value = loss.value(U, V)
    objective = value + lam * charged
    attained, upper = polar
    unseen = rounding(U, V, loss.size(), loss.rows)
    smooth = math.isfinite(loss.curvature)
    blur = loss.curvature * unseen if smooth else 0.0  # of the gradient
    top = upper.value + blur / floor
    dual = loss.lower(Z, lam / top if top > 0 else math.inf)
    hidden = dual.margin + unseen * (loss.steepness(value) + blur) + summation(loss.entries()) * objective
    margin = (math.sqrt(2 * loss.curvature * hidden) + blur) / floor if smooth else 0.0
    certificate = judge(
        gap=objective - dual.value + hidden if objective > 0 else 0.0,
        objective=objective,
        polar_lower=min(max(attained - margin, 0.0), top),
        polar_upper=top,
        lam=lam,
        tol=tol,
        method=upper.method,
    )
    return certificate, objective


def _matrix(name: str, value: Any, *, finite: bool = True) -> Tensor:
    tensor = real(name, value).to(torch.float64)
    if tensor.dim() != 2:
        raise ShapeError(f"{name} must be a real matrix, got shape {tuple(tensor.shape)}")
    if finite:
        require_finite(name, tensor)
    return tensor


def _unmasked(Y: Any, mask: Any) -> tuple[Any, Any]:
    """The data of a masked array, with its mask among what was not observed."""
    if not np.ma.is_masked(Y):
        return Y, mask
    seen = ~np.ma.getmaskarray(Y)
    return np.ma.getdata(Y), seen if mask is None else seen & np.asarray(mask, dtype=bool)


def _observed(Y: Tensor, mask: Any) -> Observed:
    seen = torch.as_tensor(mask).to(torch.bool)
    if seen.shape != Y.shape:
        raise ShapeError(f"mask has shape {tuple(seen.shape)}, but Y has {tuple(Y.shape)}")
    index = torch.nonzero(seen, as_tuple=True)
    values = Y[index]
    require_finite("Y, where mask is True,", values)
    return Observed(values, (index[0], index[1]), (Y.shape[0], Y.shape[1]), compact=False)

"""A certificate for anyone's factors."""

from typing import Any, Literal

import torch
from torch import Tensor

from ..errors import OptionError, ShapeError, require_finite, require_positive
from .bounds import Bound
from .certificate import Certificate, judge
from .losses import Loss, Observed, Squared, rounding
from .regularisers import L2, Asked, NonNegativeL2, Regulariser, SparseL2

__all__ = ["certificate_of", "certify", "regulariser_named"]

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

    Args:
        Y: The data, n_samples × n_features; array or tensor. Where ``mask`` is False it is not looked at.
        U: n_samples × r.
        V: n_features × r.
        lam: :math:`\lambda > 0`.
        regulariser: ``"l2"`` (:math:`\|u\|\|v\|`, the nuclear norm), ``"nonnegative"`` (the same on
            :math:`u, v \ge 0`), ``"sparse"`` (:math:`\|v\|_2(\|u\|_2 + \gamma\|u\|_1)`), or a
            :class:`~minimand.factor.Regulariser`.
        gamma: :math:`\gamma` of ``"sparse"``.
        mask: True where Y was observed; None is everywhere.
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
    data, left, right = _matrix("Y", Y, finite=mask is None), _matrix("U", U), _matrix("V", V)
    if (data.shape[0], left.shape[1]) != (left.shape[0], right.shape[1]) or data.shape[1] != right.shape[0]:
        raise ShapeError(
            f"Y is {tuple(data.shape)}, U {tuple(left.shape)} and V {tuple(right.shape)}; "
            "U needs a row per row of Y, V a row per column of Y, and both the same number of columns"
        )
    loss: Loss = Squared(data) if mask is None else _observed(data, mask)
    return certificate_of(loss, theta, left, right, lam, tol=tol, effort=effort)


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
) -> Certificate:
    """The certificate of factors under any loss and regulariser; rows may be spread over ranks."""
    U, V = U.detach().to(torch.float64), V.detach().to(torch.float64)
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    charged = float(theta.values(U.mT, V.mT, loss.rows).sum())
    if not charged < float("inf"):
        raise OptionError(
            f"the factors lie outside the domain of {type(theta).__name__}: they hold negative entries; "
            "clip them at zero, or certify with another regulariser"
        )
    value = loss.value(U, V)
    objective = value + lam * charged
    Z = loss.dual(U, V)
    upper = theta.upper(Z, lam, Asked(accuracy=min(1e-4, tol / 4), effort=effort, pairs=(U.mT, V.mT)))
    # The polar of the true residual, not only of the one that was rounded to.
    unseen = rounding(U, V, loss.size(), loss.rows)
    upper = Bound(upper.value + unseen, upper.method)
    dual = loss.lower(Z, lam / upper.value if upper.value > 0 else float("inf"))
    hidden = dual.margin + unseen * (2 * value) ** 0.5
    gap = objective - dual.value + hidden if objective > 0 else 0.0
    sweeps = SWEEPS if effort > 0 else 5
    lower = min(theta.directions(Z, DIRECTIONS, generator, sweeps=sweeps).best, upper.value)
    return judge(
        gap=gap,
        objective=objective,
        polar_lower=max(lower, 0.0),
        polar_upper=upper.value,
        lam=lam,
        tol=tol,
        method=upper.method,
    )


def _matrix(name: str, value: Any, *, finite: bool = True) -> Tensor:
    tensor = value.detach() if isinstance(value, Tensor) else torch.as_tensor(value)
    if tensor.is_complex() or tensor.dim() != 2:
        raise ShapeError(f"{name} must be a real matrix, got {tensor.dtype} of shape {tuple(tensor.shape)}")
    tensor = tensor.to(torch.float64)
    if finite:
        require_finite(name, tensor)
    return tensor


def _observed(Y: Tensor, mask: Any) -> Observed:
    seen = torch.as_tensor(mask).to(torch.bool)
    if seen.shape != Y.shape:
        raise ShapeError(f"mask has shape {tuple(seen.shape)}, but Y has {tuple(Y.shape)}")
    index = torch.nonzero(seen, as_tuple=True)
    values = Y[index]
    require_finite("Y, where mask is True,", values)
    return Observed(values, (index[0], index[1]), (Y.shape[0], Y.shape[1]), compact=False)

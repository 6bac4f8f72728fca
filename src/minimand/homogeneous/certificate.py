"""Certificates of networks with one hidden ReLU layer: a bound on the distance to the minimum over all widths."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..arguments import checked
from ..errors import OptionError, ShapeError, require_finite, require_positive
from ..factor.inputs import Units, leveled, middle, real, shifted
from ..factor.problem import Certificate, judge
from .losses import LOSSES, OutputLoss
from .polar import Polar, ascend, exact_polar, upper_bound

__all__ = ["certify_relu", "judge_relu", "judge_residual", "objective", "polar_of", "with_ones"]

_POLARS = ("auto", "exact", "ascent")
SQUARED = LOSSES["squared"]
_Bounds = tuple[float, float, str]  # the lower and the upper bound on a polar, and their method
# Above this many rows the sweep for three columns, quadratic in the rows, takes longer than the fit.
_SPATIAL_ROWS = 600
# Binary exponents of targets that are left as they are: the tolerances of L-BFGS are not relative.
NEAR_ONE = 8


def with_ones(X: Tensor) -> Tensor:
    """The inputs with a column of ones appended, for the bias."""
    return torch.cat([X, torch.ones_like(X[:, :1])], 1)


class ReluData(NamedTuple):
    """Inputs with a column of ones, targets and λ, in the middle of the floating-point range."""

    X: Tensor
    Y: Tensor
    lam: float

    @classmethod
    def of(cls, X: Tensor, Y: Tensor, lam: float, *neurons: Tensor) -> tuple["ReluData", Units]:
        r"""The problem of inputs without ones, and the units of its solutions; ``neurons`` are W and V.

        Dividing X with its ones by t and Y by s divides λ by st and the weights by :math:`(s/t)^{1/2}`.
        """
        X, largest = with_ones(X), float(Y.abs().max())
        t = middle(float(X.abs().max()), limit=NEAR_ONE)
        s = middle(largest, *(shifted(x.mT, t // 2) for x in neurons), limit=NEAR_ONE)
        units = Units(s + t, 2 * s)
        return cls(shifted(X, -t), shifted(Y, -s), units.weight(lam, largest)), units


def objective(X: Tensor, Y: Tensor, W: Tensor, V: Tensor, lam: float, loss: OutputLoss = SQUARED) -> float:
    r""":math:`\ell(\max(XW^\top, 0)V) + \lambda\sum_i\|w_i\|\|v_i\|`; X includes the column of ones."""
    return float(loss.value(torch.relu(X @ W.mT) @ V, Y) + lam * (W.norm(dim=1) * V.norm(dim=1)).sum())


def polar_of(X: Tensor, R: Tensor, method: str, starts: Tensor) -> Polar:
    """The polar of the residual: exact by a sweep, or bounded by an ascent from below and norms from above."""
    if method not in _POLARS:
        raise OptionError(f"polar must be one of {', '.join(_POLARS)}, got {method!r}")
    columns = X.shape[1]
    sweep = columns == 2 or (columns == 3 and len(X) <= _SPATIAL_ROWS)
    if method == "exact" or (method == "auto" and sweep):
        return exact_polar(X, R)
    directions, values = ascend(X, R, starts)
    best = float(values[0]) if len(values) else 0.0
    return Polar(best, max(upper_bound(X, R), best), directions, values, "ascent from below, norms from above")


def judge_residual(
    Y: Tensor,
    R: Tensor,
    value: float,
    *,
    lam: float,
    polar: _Bounds,
    image: float,
    tol: float,
    error: float,
    loss: OutputLoss = SQUARED,
) -> Certificate:
    r"""The certificate of a network from its residual R, its objective, and the bounds on the polar with their method.

    A slope p above λ gives ``IMPROVABLE`` only if adding its direction lowers the objective by more than the tolerance.
    The decrease is :math:`(p - \lambda)^2/(2\kappa\|\phi\|^2)`, where κ is the curvature of the loss and ``image`` the
    norm :math:`\|\phi\|` of the direction's output. Zero requires no decrease, and infinity excludes ``IMPROVABLE``.
    ``error`` bounds the norm of the rounding error of R.
    """
    lower, upper, method = polar
    return judge(
        gap=loss.gap(Y, R, value, lam / upper if upper > 0 else math.inf, error),
        objective=value,
        polar_lower=lower,
        polar_upper=upper,
        lam=lam + image * (2 * loss.curvature * tol * value) ** 0.5,
        tol=tol,
        method=method,
    )


def judge_relu(
    X: Tensor, Y: Tensor, W: Tensor, V: Tensor, lam: float, polar: Polar, tol: float, loss: OutputLoss = SQUARED
) -> Certificate:
    """The certificate from bounds on the polar; an exact polar requires no decrease for ``IMPROVABLE``."""
    R = loss.residual(torch.relu(X @ W.mT) @ V, Y)
    bounds = (polar.lower, polar.upper, polar.method)
    known = not polar.exact and len(polar.directions) > 0
    image = float(torch.relu(X @ polar.directions[0]).norm()) if known else 0.0
    size = float(Y.norm() + X.norm() * (W.norm(dim=1) * V.norm(dim=1)).sum())
    error = 2 * (len(W) + X.shape[1] + 4) * torch.finfo(torch.float64).eps * size
    value = objective(X, Y, W, V, lam, loss)
    return judge_residual(Y, R, value, lam=lam, polar=bounds, image=image, tol=tol, error=error, loss=loss)


@checked
def certify_relu(
    X: Any, y: Any, weights: Any, outputs: Any, *, lam: float, tol: float = 1e-3, polar: str = "auto", seed: int = 0
) -> Certificate:
    r"""Certify a network with one hidden ReLU layer, trained by any method.

    The network is :math:`f(x) = \sum_i \max(w_i^\top [x; 1], 0)\, v_i` with the objective
    :math:`\tfrac12\|y - f\|^2 + \lambda\sum_i\|w_i\|\|v_i\|`. The certificate compares it with the minimum over
    networks of all widths ([Vidal2018], Theorem 1).

    Args:
        X: Inputs, n_samples × n_features, without a column of ones.
        y: Targets, n_samples or n_samples × n_outputs.
        weights: n_neurons × (n_features + 1), the bias last.
        outputs: n_neurons × n_outputs.
        lam: The weight of the regulariser.
        tol: The relative gap up to which the status is ``CERTIFIED``.
        polar: ``"exact"``, for one or two input columns; ``"ascent"``; or ``"auto"``: exact if it is affordable. An
            ascent gives a lower bound only; the certificate then uses an upper bound by norms, which is loose.
        seed: The seed of the ascent's starts.

    >>> certify_relu([[0.0], [1.0]], [0.0, 0.0], [[1.0, 0.0]], [[0.0]], lam=1.0).status
    <Status.CERTIFIED: 'CERTIFIED'>
    """
    require_positive("lam", lam)
    require_positive("tol", tol)
    named = {"X": X, "y": y, "weights": weights, "outputs": outputs}
    inputs, target, W, V = (real(name, value).to(torch.float64) for name, value in named.items())
    target = target.unsqueeze(1) if target.dim() == 1 else target
    V = V.unsqueeze(1) if V.dim() == 1 else V
    for name, tensor in (("X", inputs), ("y", target), ("weights", W), ("outputs", V)):
        require_finite(name, tensor)
    if inputs.dim() != 2 or target.dim() != 2 or len(inputs) != len(target) or not target.numel():
        raise ShapeError(
            f"X {tuple(inputs.shape)} and y {tuple(target.shape)} must have equally many rows, and at least one"
        )
    if W.shape != (len(V), inputs.shape[1] + 1) or V.shape[1] != target.shape[1]:
        raise ShapeError(
            f"weights {tuple(W.shape)} must be n_neurons × {inputs.shape[1] + 1}, the bias last, and outputs "
            f"{tuple(V.shape)} n_neurons × {target.shape[1]}"
        )
    W, V = (x.mT for x in leveled(W.mT, V.mT))
    (extended, target, lam), units = ReluData.of(inputs, target, lam, W, V)
    W, V = units.lowered(W), units.lowered(V)
    starts = torch.randn(128, extended.shape[1], generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    found = polar_of(extended, target - torch.relu(extended @ W.mT) @ V, polar, torch.cat([starts, W]))
    return judge_relu(extended, target, W, V, lam, found, tol).in_units(units)

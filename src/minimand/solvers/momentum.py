r"""The update rules of heavy ball and Nesterov, used by solvers and by networks.

Solvers use gradient steps and the momentum of a theorem. :class:`~minimand.nn.OptimizationNet` uses its blocks in place
of gradient steps, and coefficients that can be learned.
"""

import functools

import torch
from torch import Tensor

from ..linalg import Weight, accumulate, is_zero

__all__ = ["extrapolate", "fista_weight", "heavy_ball", "nesterov_schedule"]


def heavy_ball(target: Tensor | None, x: Tensor, previous: Tensor, momentum: Weight, keep: Weight = 0.0) -> Tensor:
    r"""Polyak's update, given :math:`T(x)`, or None where that is zero,

    .. math:: x^+ = T(x) + \kappa\,x + \mu\,(x - x_-) = T(x) + \beta_1 x + \beta_2 x_-,
        \qquad \beta_1 = \kappa + \mu,\quad \beta_2 = -\mu .

    With :math:`T(x) = x - \eta\nabla f(x)` and :math:`\kappa = 0` it is the heavy-ball method, whose fixed points are
    exactly those of T. With :math:`\kappa = 1,\ \mu = 0` it is a residual connection.

    Source: [Lin2019], eq. (16).

    >>> one = torch.ones(1)
    >>> heavy_ball(3 * one, 2 * one, one, 0.5)
    tensor([3.5000])
    """
    if previous is x:
        # x equals x₋: the momentum term is zero.
        return accumulate(target, keep, x)
    if isinstance(keep, Tensor):
        # Learned: the backward pass has x and x₋ anyway; their difference would have to be stored.
        return accumulate(accumulate(target, keep + momentum, x), -momentum, previous)
    kept = accumulate(target, keep, x)
    return kept if is_zero(momentum) else accumulate(kept, momentum, x - previous)


def extrapolate(x: Tensor, previous: Tensor, momentum: Weight, keep: Weight = 1.0) -> Tensor:
    r"""The point :math:`\kappa\,x + \mu\,(x - x_-)` at which Nesterov's method takes its gradient step;
    :math:`\kappa = 1` in the algorithm, and :math:`\beta_1 = \kappa + \mu,\ \beta_2 = -\mu` where both are learned.

    Source: [Lin2019], the relaxation of Nesterov's update.

    >>> one = torch.ones(1)
    >>> extrapolate(2 * one, one, 0.5)
    tensor([2.5000])
    """
    return heavy_ball(None, x, previous, momentum, keep)


def fista_weight(t: Tensor) -> Tensor:
    r"""The next of Nesterov's weights, :math:`t_{k+1} = \tfrac12(1 + \sqrt{1 + 4t_k^2})`."""
    return (1 + torch.sqrt(1 + 4 * t * t)) / 2


@functools.cache
def nesterov_schedule(steps: int) -> tuple[float, ...]:
    r"""The momentum :math:`(t_k - 1)/t_{k+1}`, :math:`t_1 = 1`, before steps 0, 1, …; the first two have none.

    >>> [round(beta, 4) for beta in nesterov_schedule(4)]
    [0.0, 0.0, 0.2818, 0.434]
    """
    weight, momenta = torch.ones((), dtype=torch.float64), [0.0]
    while len(momenta) < steps:
        following = fista_weight(weight)
        momenta.append(float((weight - 1) / following))
        weight = following
    return tuple(momenta[:steps])

"""The base of the methods with separate pre-activations: variables, energy terms and block updates."""

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from .base import Lifted, Variables
from .losses import Loss
from .maps import AffineMap
from .nonlinear import pre_activation, ridge_activation

__all__ = ["SplitLifted", "SplitVariables"]


@dataclasses.dataclass
class SplitVariables(Variables):
    """Activations, pre-activations, and the scaled multiplier of the output constraint (zero without one).

    The output is the last pre-activation, because the last activation is the identity.
    """

    us: list[Tensor]
    multiplier: Tensor


class SplitLifted(Lifted[SplitVariables]):
    """Block-coordinate descent on the augmented Lagrangian; with a zero multiplier, on the penalty objective."""

    # On digits these reach the accuracy of MAC with one to three hidden layers; μ = 1 and LPOM's damping do not.
    # Weights that minimise their block exactly follow variables that are far from those of the network.
    default_sweeps = 3
    default_damping = (0.3, 0.3)
    step_ratio, step_sweeps, step_ridge = 20.0, 10, 0.1

    def _start(self, xs: list[Tensor], zs: list[Tensor], maps: list[AffineMap], loss: Loss) -> SplitVariables:
        return SplitVariables(xs, maps, loss, list(zs), torch.zeros_like(xs[-1]))

    def _terms(self, v: SplitVariables) -> Iterator[Tensor]:
        yield v.loss.value(v.us[-1])
        for k, affine in enumerate(v.maps):
            error = v.us[k] - affine.apply(v.xs[k])
            if k == len(v.maps) - 1:
                yield 0.5 * self.mu[k] * ((error + v.multiplier).square().sum() - v.multiplier.square().sum())
            else:
                missed = v.xs[k + 1] - affine.layer.unit.phi(v.us[k])
                yield 0.5 * self.mu[k] * (error.square().sum() + missed.square().sum())

    def _sweep(self, v: SplitVariables) -> None:
        """Minimise every block once, from the output to the input."""
        top, mu = len(v.maps) - 1, self.mu
        v.us[top] = v.loss.prox(v.maps[top].apply(v.xs[top]) - v.multiplier, 1.0 / mu[top])
        v.xs[-1] = v.us[top]
        for k in range(top, 0, -1):
            below = v.maps[k - 1]
            unit = below.layer.unit
            target = v.us[k] + v.multiplier if k == top else v.us[k]
            v.xs[k] = ridge_activation(v.maps[k], v.xs[k], unit.phi(v.us[k - 1]), target, mu[k - 1] / mu[k])
            v.us[k - 1] = pre_activation(unit, v.us[k - 1], below.apply(v.xs[k - 1]), v.xs[k])

    def _residuals(self, v: SplitVariables) -> Iterator[tuple[Tensor, Tensor]]:
        """For each layer its input and the change of z towards its pre-activation."""
        for k, affine in enumerate(v.maps):
            target = v.us[k] + v.multiplier if k == len(v.maps) - 1 else v.us[k]
            yield v.xs[k], target - affine.apply(v.xs[k])

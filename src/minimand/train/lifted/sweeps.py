"""The mini-batch sweep of LPOM: updates of the hidden activations in the space of the layers' outputs.

A sweep is block-coordinate: it visits the layers in turn, or all at once from the old values. It is not a solve in the
grammar of :mod:`minimand.solvers`; each block takes one fixed-point iteration.
"""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...errors import MinimandError, NonFiniteError
from ...solvers.linear import conjugate_gradient, ridge_factor
from .base import Variables
from .maps import AffineMap, LiftedLayer

if TYPE_CHECKING:
    from .parallel import LayerParallel

__all__ = ["RENEW", "DualSweep", "LPOMVariables"]


#: The number of batches after which an inverse is recomputed.
RENEW = 8


@dataclasses.dataclass
class LPOMVariables(Variables):
    """The activations, each layer's z at them, and the weights before the last step, for the extrapolation."""

    zs: list[Tensor]
    before: list[Tensor] | None = None
    count: int = 0


@dataclasses.dataclass
class _Preconditioner:
    """The inverse of P for one layer; it is recomputed every few batches, because the weight changes."""

    inverse: Tensor
    weight: float
    age: int = 0


class DualSweep:
    r"""Mini-batch updates of the activations by a preconditioned fixed point.

    The stationary point of :math:`X_k` is :math:`X_k = \varphi_{k-1}(z_{k-1} + r A_k^\top q)`, with
    :math:`q = X_{k+1} - \varphi_k(z_k(X_k))` the residual above. In the space of q it is found from zero by

    .. math::

        q \leftarrow q + P^{-1}(X_{k+1} - \varphi_k(z_k) - q), \quad
        X_k \leftarrow \varphi_{k-1}(z_{k-1} + rA_k^\top q),
        \qquad P = I + r \beta_k\beta_{k-1} A_kA_k^\top,

    once per layer, from the output to the input; on mini-batches one iteration is as good as two. This P majorises.
    With half of its second term the iteration is as good on some networks and diverges on others, mostly with
    cross-entropy and in Jacobi sweeps. Only values of :math:`\varphi` are used. For convolutions three conjugate
    gradient iterations replace :math:`P^{-1}`.

    In a Jacobi sweep every layer's q moves once, from the values of the previous sweep. Because the neighbours move at
    the same time, P is :math:`2(I + 2r\beta_k\beta_{k-1}A_kA_k^\top)`, in the proportion of the monotone Jacobi
    step. Information about the targets moves one layer per sweep, so the default is one sweep more than there are
    layers.

    Args:
        layers: All layers of the chain.
        offset: The index of the first layer that this process holds.
    """

    def __init__(self, layers: Sequence[LiftedLayer], *, offset: int = 0) -> None:
        self.layers = layers
        self.offset = offset
        self._inverse: dict[int, _Preconditioner] = {}

    def reset(self) -> None:
        """Discard the inverses, which belong to earlier weights."""
        self._inverse.clear()

    def run(
        self, v: LPOMVariables, mu: Sequence[float], sweep: str, sweeps: int | None, link: "LayerParallel | None" = None
    ) -> None:
        """Sweep over the activations of a batch that are at the forward pass; ``link`` exchanges those at the ends."""
        if sweep == "jacobi":
            self._jacobi(v, mu, sweeps or len(self.layers) + 1, link)
        else:
            for _ in range(sweeps or 1):
                v.xs[-1] = v.loss.approximate_prox(v.zs[-1], 1.0 / mu[-1])
                self.downwards(v, mu)

    def downwards(self, v: LPOMVariables, mu: Sequence[float]) -> None:
        """A Gauss–Seidel sweep over all activations below the topmost one."""
        for k in range(len(v.maps) - 1, 0, -1):
            # One fixed-point iteration from q = 0.
            q = self.estimate(v, mu, k, None)
            v.xs[k] = v.maps[k - 1].layer.unit.phi_(v.maps[k].add_adjoint(v.zs[k - 1], q, self._ratio(mu, k)))
            v.zs[k] = v.maps[k].apply(v.xs[k])

    def _jacobi(self, v: LPOMVariables, mu: Sequence[float], sweeps: int, link: "LayerParallel | None") -> None:
        """Sweeps in which all blocks move at once, from the values of the previous sweep."""
        first, count = (0 if self.offset else 1), len(v.maps)
        qs: list[Tensor | None] = [None] * count
        for _ in range(sweeps):
            at_output = self.offset + count == len(self.layers)
            output = v.loss.approximate_prox(v.zs[-1], 1.0 / mu[-1]) if at_output else None
            for k in range(first, count):
                qs[k] = self.estimate(v, mu, k, qs[k], coupled=True)
            residuals = [None if q is None else v.maps[k].adjoint(q) for k, q in enumerate(qs)]
            residuals.append(None if link is None else link.exchange_residuals(residuals[0], v.xs[-1]))
            # Every activation moves from the z of the previous sweep.
            v.xs[1:] = [
                v.xs[k] if residual is None else self.moved_activation(v, mu, k, residual)
                for k, residual in enumerate(residuals[1:], 1)
            ]
            if output is not None:
                v.xs[-1] = output
            if link is not None and (lowest := link.exchange_activations(v.xs[-1], v.xs[0])) is not None:
                v.xs[0] = lowest
            v.zs[first:] = [v.maps[k].apply(v.xs[k]) for k in range(first, count)]

    def estimate(
        self, v: LPOMVariables, mu: Sequence[float], k: int, q: Tensor | None, *, coupled: bool = False
    ) -> Tensor:
        """The next estimate of the residual above the k-th activation; ``coupled`` if its neighbours move as well."""
        found = v.maps[k].layer.unit.residual(v.xs[k + 1], v.zs[k])
        return self._moved(v, mu, k, q, found if q is None else found - q, coupled)

    def moved_activation(self, v: LPOMVariables, mu: Sequence[float], k: int, residual: Tensor) -> Tensor:
        """The k-th activation after adding the back-projected residual from above."""
        return v.maps[k - 1].layer.unit.phi_(torch.add(v.zs[k - 1], residual, alpha=self._ratio(mu, k)))

    def _ratio(self, mu: Sequence[float], k: int) -> float:
        return mu[self.offset + k] / mu[self.offset + k - 1]

    def _moved(
        self, v: LPOMVariables, mu: Sequence[float], k: int, q: Tensor | None, e: Tensor, coupled: bool
    ) -> Tensor:
        r""":math:`q + P^{-1}e`; ``None`` stands for q = 0."""
        affine, length = v.maps[k], 0.5 if coupled else 1.0
        below = self.layers[self.offset + k - 1].unit.slope
        weight = self._ratio(mu, k) * affine.layer.unit.slope * below / length
        matrix = affine.matrix
        if matrix is None:
            change = length * _by_conjugate_gradient(affine, weight, e)
            return change if q is None else q + change
        kept = self._inverse.get(k)
        if kept is None or kept.weight != weight or kept.age >= RENEW:
            try:
                inverse = ridge_factor(matrix, 1.0 / weight).inverse().mul_(length / weight)
            except MinimandError as error:
                raise NonFiniteError(f"the activation update below {affine.layer.path}: {error}") from None
            kept = self._inverse[k] = _Preconditioner(inverse, weight)
        kept.age += 1
        return e @ kept.inverse if q is None else torch.addmm(q, e, kept.inverse)


def _by_conjugate_gradient(affine: AffineMap, weight: float, e: Tensor) -> Tensor:
    def apply(u: Tensor) -> Tensor:
        return u + weight * affine.linear(affine.adjoint(u))

    return conjugate_gradient(apply, e, 3, sample_dims=e.dim() - 1)

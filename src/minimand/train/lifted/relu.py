"""The lifted objective for ReLU networks: ReLU as a projection onto the non-negative orthant."""

from collections.abc import Iterator

from torch import Tensor, nn

from ...errors import CapabilityError
from ...functions import NonNegative
from ...operators import Dense
from ...solvers import Problem, ProxGD, solve
from .base import Lifted, Variables
from .losses import Loss
from .maps import AffineMap

__all__ = ["LiftedReLU"]


class LiftedReLU(Lifted[Variables]):
    r"""ReLU as a projection (Zhang & Brand, NIPS 2017; Askari et al. 2018; [Lin2019], *lifted objective*).

    .. math::

        \min_{W, X}\; \ell(X_n, Y) + \sum_k \frac{\mu_k}{2}\|X_{k+1} - A_kX_k - b_k\|^2
        \quad\text{s.t.}\quad X_k \ge 0 \text{ for } k < n

    **Blocks.** All blocks are convex: :math:`X_n` is updated by the prox of the loss, :math:`X_k` by ten projected
    gradient steps on a non-negative least-squares problem, the weights by ridge regressions. :meth:`step` never raises
    the objective.

    **Optimality conditions** ([Lin2019]): :math:`\mu_{k-1}(\varphi^{-1}(X_k) - z_{k-1}) + \mu_kA_k^\top(z_k - X_{k+1})
    \ni 0`. LPOM has :math:`\varphi(z_k)` in place of the last :math:`z_k`. A forward pass does not satisfy these
    conditions: wherever :math:`z_k < 0` the penalty is positive. So **at a forward pass the energy exceeds the loss**,
    and training favours networks that are linear on the data.

    **Variables carried**: the activations.

    Args:
        model: A chain of Linear and ReLU; trained in place.
        mu: As in :class:`LPOM`.
        loss: ``"squared"`` or ``"cross_entropy"``.
        recipe: Options of the mini-batch mode.

    >>> import torch
    >>> net = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1))
    >>> x, y = torch.randn(8, 2), torch.randn(8, 1)
    >>> method = LiftedReLU(net)
    >>> energies = [method.step(x, y) for _ in range(10)]
    >>> energies == sorted(energies, reverse=True)
    True
    """

    def _check_layers(self) -> None:
        for layer in self.chain.layers[:-1]:
            if not isinstance(layer.unit.function, NonNegative):
                raise CapabilityError(
                    f"LiftedReLU takes ReLU only, but {layer.path} is followed by another activation; use LPOM"
                )
        for layer in self.chain.layers:
            if not isinstance(layer.module, nn.Linear) or layer.norm is not None or len(layer.before) > 1:
                raise CapabilityError(
                    f"LiftedReLU takes plain Linear layers only, but {layer.path} is a convolution, or has pooling or "
                    f"batch normalisation; use LPOM"
                )

    def _start(self, xs: list[Tensor], zs: list[Tensor], maps: list[AffineMap], loss: Loss) -> Variables:
        return Variables(xs, maps, loss)

    def _terms(self, v: Variables) -> Iterator[Tensor]:
        yield v.loss.value(v.output)
        for k, affine in enumerate(v.maps):
            yield 0.5 * self.mu[k] * (v.xs[k + 1] - affine.apply(v.xs[k])).square().sum()

    def _sweep(self, v: Variables) -> None:
        v.xs[-1] = v.loss.prox(v.maps[-1].apply(v.xs[-2]), 1.0 / self.mu[-1])
        for k in range(len(v.maps) - 1, 0, -1):
            layer, s = v.maps[k].layer, self.mu[k - 1] / self.mu[k]
            above = v.xs[k + 1] if layer.bias is None else v.xs[k + 1] - layer.bias
            anchor = v.maps[k - 1].apply(v.xs[k - 1])
            problem = Problem(Dense(layer.weight.mT), NonNegative(), above, bias=s * anchor, ridge=s)
            v.xs[k] = solve(problem, ProxGD(iters=10), x0=v.xs[k]).x

    def _residuals(self, v: Variables) -> Iterator[tuple[Tensor, Tensor]]:
        for k, affine in enumerate(v.maps):
            yield v.xs[k], v.xs[k + 1] - affine.apply(v.xs[k])

"""The method of auxiliary coordinates: a quadratic penalty ties activations to their layers."""

from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from ...errors import OptionError
from .base import Lifted, Variables
from .losses import Loss
from .maps import AffineMap
from .nonlinear import fit_activation, fit_weight
from .options import Recipe
from .weights import Direction

__all__ = ["MAC"]

X_STEPS = ("gauss_newton", "gradient")


class MAC(Lifted[Variables]):
    r"""Method of auxiliary coordinates (Carreira-Perpiñán & Wang, AISTATS 2014; [Lin2019], *penalty method*).

    .. math:: \min_{W, X}\; \ell(X_n, Y) + \sum_k \frac{\mu_k}{2} \|X_{k+1} - \varphi_k(A_kX_k + b_k)\|^2

    **Blocks.** :math:`X_n` is updated by the prox of the loss, each :math:`X_k` by one Gauss–Newton or gradient step,
    each weight by one Gauss–Newton step. All steps are halved until the objective falls, so :meth:`step` never raises
    it. The blocks are not convex.

    **Optimality conditions** ([Lin2019]): :math:`[(\varphi(z_k) - X_{k+1}) \circ \varphi'(z_k)]X_k^\top = 0`. The
    derivative, which is absent from LPOM's conditions, vanishes wherever a unit saturates. So there are more stationary
    points.

    **Variables carried**: the activations.

    Args:
        model: A chain of Linear or Conv2d and monotone activations; trained in place.
        mu: As in :class:`LPOM`.
        loss: ``"squared"`` or ``"cross_entropy"``.
        x_step: ``"gauss_newton"`` or ``"gradient"``.
        growth: The factor by which :math:`\mu` is multiplied after each epoch of :meth:`fit`; every call of
            :meth:`fit` starts from ``mu``.
        recipe: Options of the mini-batch mode.

    >>> import torch
    >>> net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
    >>> x, y = torch.randn(8, 2), torch.randn(8, 1)
    >>> method = MAC(net)
    >>> energies = [method.step(x, y) for _ in range(10)]
    >>> energies == sorted(energies, reverse=True)
    True
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        mu: float | Sequence[float] | None = None,
        loss: str = "squared",
        x_step: str = "gauss_newton",
        growth: float = 1.0,
        recipe: Recipe | None = None,
    ) -> None:
        super().__init__(model, mu=mu, loss=loss, recipe=recipe)
        if x_step not in X_STEPS:
            raise OptionError(f"x_step must be one of {', '.join(X_STEPS)}, got {x_step!r}")
        if not 1 <= growth < float("inf"):
            raise OptionError(f"growth must be a finite number ≥ 1, got {growth}")
        self.x_step = x_step
        self.growth = growth
        self._scale = 1.0

    def _start(self, xs: list[Tensor], zs: list[Tensor], maps: list[AffineMap], loss: Loss) -> Variables:
        return Variables(xs, maps, loss)

    def _terms(self, v: Variables) -> Iterator[Tensor]:
        yield v.loss.value(v.output)
        for k, affine in enumerate(v.maps):
            error = v.xs[k + 1] - affine.layer.unit.phi(affine.apply(v.xs[k]))
            yield 0.5 * self.mu[k] * error.square().sum()

    def _sweep(self, v: Variables) -> None:
        v.xs[-1] = v.loss.prox(v.maps[-1].apply(v.xs[-2]), 1.0 / self.mu[-1])
        for k in range(len(v.maps) - 1, 0, -1):
            below = v.maps[k - 1]
            anchor = below.layer.unit.phi(below.apply(v.xs[k - 1]))
            s, newton = self.mu[k - 1] / self.mu[k], self.x_step == "gauss_newton"
            v.xs[k] = fit_activation(v.maps[k], v.xs[k], anchor, v.xs[k + 1], s, newton=newton)

    def _residuals(self, v: Variables) -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(v.xs, v.xs[1:], strict=False)

    def _slopes(self, v: Variables) -> Iterator[tuple[Tensor, Tensor]]:
        for k, affine in enumerate(v.maps):
            z, unit = affine.apply(v.xs[k]), affine.layer.unit
            yield v.xs[k], self.mu[k] * unit.derivative(z) * (unit.phi(z) - v.xs[k + 1])

    def _weight_steps(
        self, layers: Sequence[tuple[AffineMap, Tensor, Tensor]], damping: Sequence[float], block: int | None
    ) -> list[Direction]:
        return [fit_weight(*layer, ridge) for layer, ridge in zip(layers, damping, strict=True)]

    def _before_fit(self) -> None:
        self._scale = 1.0
        super()._before_fit()

    def _after_epoch(self) -> None:
        self._scale_to(self.growth * self._scale)

    def _scale_to(self, scale: float) -> None:
        self._mu = tuple(m / self._scale * scale for m in self.mu)
        self._scale = scale

    def _minibatch_mu(self) -> tuple[float, ...]:
        return tuple(self._scale * m for m in super()._minibatch_mu())

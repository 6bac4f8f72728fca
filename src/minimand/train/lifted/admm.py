"""Training by the alternating direction method of multipliers, in two splittings."""

import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from ...errors import OptionError
from .losses import Loss
from .maps import AffineMap
from .nonlinear import fit_activation, fit_weight
from .options import Recipe
from .split import SplitLifted, SplitVariables
from .weights import Direction

__all__ = ["SplitADMM"]

SPLITTINGS = ("output", "all")


@dataclasses.dataclass
class _Duals(SplitVariables):
    """Variables of the splitting of all constraints: ``us`` holds the copies U; every layer has two multipliers."""

    copies: list[Tensor]
    layers: list[Tensor]


class SplitADMM(SplitLifted):
    r"""ADMM for networks, in the two splittings of [Lin2019].

    ``splitting="output"`` (Taylor et al., ICML 2016): a multiplier M on the output constraint only,

    .. math::

        \ell(U_n, Y) + \frac{\mu_n}{2}\|U_n - A_{n-1}X_{n-1} - b_{n-1} + M\|^2 + \sum_{k < n - 1} \frac{\mu_k}{2} \bigl(
        \|U_{k+1} - A_kX_k - b_k\|^2 + \|X_{k+1} - \varphi_k(U_{k+1})\|^2 \bigr) .

    **Variables carried**: activations, pre-activations and M. **Optimality conditions**: those of
    :class:`BlockPenalty`, and :math:`U_n = A_{n-1}X_{n-1} + b_{n-1}`.

    ``splitting="all"`` (Zhang, Chen, Saligrama, CVPR 2016): copies :math:`U_k = X_k` and multipliers A, B on
    every constraint,

    .. math::

        \ell(X_n, Y) + \sum_{k \ge 1} \frac{\mu_{k-1}}{2}\|U_k - X_k + A_k\|^2 + \sum_{k \ge 0}
        \frac{\mu_k}{2} \|X_{k+1} - \varphi_k(W_kU_k + b_k) + B_k\|^2,
        \qquad U_0 = X_0 \text{ the input}.

    [Lin2019] has one :math:`\mu` for all terms. With one :math:`\mu` per layer, a copy has the :math:`\mu` of the layer
    whose output it copies.

    **Variables carried**: X, U, A and B, four times the activations that SGD keeps. **Optimality conditions**: the
    network's constraints hold, and the multipliers are the gradients that backpropagation computes.

    The energy is the augmented Lagrangian, :math:`\frac\mu2\|r + M\|^2 - \frac\mu2\|M\|^2` for each constraint. It
    need not fall, because the multipliers ascend. The problems in U are not convex, and no convergence is claimed.

    Args:
        model: A chain of Linear or Conv2d and monotone activations; trained in place.
        mu: As in :class:`LPOM`, but if it is None, :meth:`step` has :math:`\mu = 1` at the output and in every other
            layer a twentieth of the next layer's; with ``splitting="all"`` all are ten times as large. A step makes ten
            sweeps; its weight steps are those of :class:`BlockPenalty`.
        loss: ``"squared"`` or ``"cross_entropy"``.
        splitting: ``"output"`` or ``"all"``.
        warm: The number of first steps on a batch during which the multipliers stay zero (Taylor et al. recommend a
            few).
        recipe: Options of the mini-batch mode.

    >>> net = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1))
    >>> x, y = torch.randn(8, 2), torch.randn(8, 1)
    >>> method = SplitADMM(net, splitting="all")
    >>> bool(method.step(x, y) < float("inf"))
    True
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        mu: float | Sequence[float] | None = None,
        loss: str = "squared",
        splitting: str = "output",
        warm: int = 0,
        recipe: Recipe | None = None,
    ) -> None:
        if splitting not in SPLITTINGS:
            raise OptionError(f"splitting must be one of {', '.join(SPLITTINGS)}, got {splitting!r}")
        if splitting == "all":
            # With a multiplier on every constraint, μ = 1 at the output moves the weights too far in a step.
            self.step_output = 10.0
        super().__init__(model, mu=mu, loss=loss, recipe=recipe)
        if not isinstance(warm, int) or warm < 0:
            raise OptionError(f"warm must be a whole number ≥ 0, got {warm!r}")
        self.splitting = splitting
        self.warm = warm
        self._steps = 0

    def _start(self, xs: list[Tensor], zs: list[Tensor], maps: list[AffineMap], loss: Loss) -> SplitVariables:
        self._steps = 0
        if self.splitting == "output":
            return super()._start(xs, zs, maps, loss)
        zeros = torch.zeros_like
        return _Duals(
            xs, maps, loss, list(xs[:-1]), zeros(xs[-1]), [zeros(x) for x in xs[:-1]], [zeros(x) for x in xs[1:]]
        )

    def _terms(self, v: SplitVariables) -> Iterator[Tensor]:
        if not isinstance(v, _Duals):
            yield from super()._terms(v)
            return
        yield v.loss.value(v.output)
        for k in range(len(v.maps)):
            error = v.xs[k + 1] - self._image(v, k) + v.layers[k]
            term = 0.5 * self.mu[k] * (error.square().sum() - v.layers[k].square().sum())
            if k > 0:
                error = v.us[k] - v.xs[k] + v.copies[k]
                term = term + 0.5 * self.mu[k - 1] * (error.square().sum() - v.copies[k].square().sum())
            yield term

    def _sweep(self, v: SplitVariables) -> None:
        if not isinstance(v, _Duals):
            super()._sweep(v)
            return
        v.xs[-1] = v.loss.prox(self._image(v, -1) - v.layers[-1], 1.0 / self.mu[-1])
        for k in range(len(v.maps) - 1, 0, -1):
            goal, s = v.xs[k + 1] + v.layers[k], self.mu[k - 1] / self.mu[k]
            v.us[k] = fit_activation(v.maps[k], v.us[k], v.xs[k] - v.copies[k], goal, s, newton=True)
            v.xs[k] = 0.5 * (v.us[k] + v.copies[k] + self._image(v, k - 1) - v.layers[k - 1])

    def _multipliers(self, v: SplitVariables) -> None:
        self._steps += 1
        if self._steps <= self.warm:
            return
        if not isinstance(v, _Duals):
            v.multiplier = v.multiplier + v.us[-1] - v.maps[-1].apply(v.xs[len(v.maps) - 1])
            return
        for k in range(len(v.maps)):
            v.layers[k] = v.layers[k] + v.xs[k + 1] - self._image(v, k)
            if k > 0:
                v.copies[k] = v.copies[k] + v.us[k] - v.xs[k]

    def _image(self, v: _Duals, k: int) -> Tensor:
        return v.maps[k].layer.unit.phi(v.maps[k].apply(v.us[k]))

    def _residuals(self, v: SplitVariables) -> Iterator[tuple[Tensor, Tensor]]:
        if not isinstance(v, _Duals):
            yield from super()._residuals(v)
            return
        for k in range(len(v.maps)):
            yield v.us[k], v.xs[k + 1] + v.layers[k]

    def _slopes(self, v: SplitVariables) -> Iterator[tuple[Tensor, Tensor]]:
        if not isinstance(v, _Duals):
            yield from super()._slopes(v)
            return
        for k, affine in enumerate(v.maps):
            z, unit = affine.apply(v.us[k]), affine.layer.unit
            yield v.us[k], self.mu[k] * unit.derivative(z) * (unit.phi(z) - v.xs[k + 1] - v.layers[k])

    def _weight_steps(
        self, layers: Sequence[tuple[AffineMap, Tensor, Tensor]], damping: Sequence[float], block: int | None
    ) -> list[Direction]:
        if self.splitting == "output":
            return super()._weight_steps(layers, damping, block)
        return [fit_weight(*layer, ridge) for layer, ridge in zip(layers, damping, strict=True)]

"""ISTA-Net and ISTA-Net+: proximal gradient descent with learned steps, thresholds and transforms."""

import torch
from torch import Tensor, nn

from ...operators import LinearOperator
from ...solvers.gradient import GradientState, ProxGD
from ...solvers.problem import GradientMap, Problem
from .base import PhaseSetting, UnrolledNet
from .parameters import THRESHOLD, Interval, Positive, constrain
from .transform import Architecture, Transform

__all__ = ["ISTANet", "gradient_map"]


class ISTANet(UnrolledNet):
    r"""Proximal gradient descent with learned parameters and transforms. Phase k is

    .. math:: r = x - \rho_k \Phi^\top(\Phi x - y), \qquad
              x \leftarrow \tilde{\mathcal{F}}_k(S_{\theta_k}(\mathcal{F}_k(r))),

    which is :class:`~minimand.solvers.ProxGD` with a learned prox. ``plus`` is the residual form, ISTA-Net+.

    Args:
        phi: The measurement matrix m × b² of square blocks, or an operator on images.
        phases: The number of iterations.
        plus: Whether the transform learns a residual of the image (ISTA-Net+).
        architecture: The size of the transforms; the default is the papers'.
        constrained: Whether the steps are kept in :math:`(0, 2/\|\Phi\|^2)` and the thresholds positive, so that every
            phase has the parameters of a convergent solver. Unconstrained parameters, as in the papers, may leave these
            ranges.
        shared: Whether all phases share one transform.
        initial: The matrix Q of the initial image :math:`Qy`; see :func:`least_squares_start`. Default:
            :math:`\Phi^\top y`.

    Source: Zhang & Ghanem, *ISTA-Net*, CVPR 2018; [Lin2019], image reconstruction.

    >>> from minimand.operators import orthonormal_gaussian
    >>> phi = orthonormal_gaussian(4, 16, generator=torch.Generator().manual_seed(0))
    >>> net = ISTANet(phi, phases=3)
    >>> net(torch.rand(2, 16) @ phi.mT).shape, net(torch.rand(1, 4, 2, 3)).shape
    (torch.Size([2, 16]), torch.Size([1, 1, 8, 12]))
    """

    step: Tensor
    threshold: Tensor

    def __init__(
        self,
        phi: Tensor | LinearOperator,
        phases: int = 9,
        plus: bool = False,
        *,
        architecture: Architecture = Architecture(),  # noqa: B008 -- frozen
        constrained: bool = False,
        shared: bool = False,
        initial: Tensor | None = None,
    ) -> None:
        super().__init__(phi, phases, architecture, residual=plus, shared=shared, initial=initial)
        self.plus = plus
        self.step = nn.Parameter(torch.full((phases,), 1 / self.lipschitz))
        self.threshold = nn.Parameter(torch.full((phases,), THRESHOLD))
        if constrained:
            constrain(self, "step", Interval(0.0, 2 / self.lipschitz))
            constrain(self, "threshold", Positive(THRESHOLD))
        self._follow_phi()

    def _vectors(self) -> tuple[str, ...]:
        return ("step", "threshold")

    def settings(self) -> list[PhaseSetting]:
        """Step and threshold of every phase."""
        return [PhaseSetting(*pair) for pair in zip(self.step.unbind(), self.threshold.unbind(), strict=True)]

    def init(self, problem: Problem, x0: Tensor) -> GradientState:
        """The start, and the gradient map at unit step."""
        return GradientState(x0, gradient_map(problem, 1.0))

    def advance(self, problem: Problem, state: GradientState, setting: PhaseSetting, k: int) -> GradientState:
        """One iteration of proximal gradient descent."""
        # At unit step the offset of the map is Φᵀy, computed once for all phases.
        move = state.move._replace(offset=setting.step * state.move.offset, step=setting.step)
        new = ProxGD(self.phases).advance(problem, GradientState(state.x, move), k, None)
        return GradientState(new.x, state.move)

    def faults(self, setting: PhaseSetting) -> list[str]:
        r"""Proximal gradient descent converges for steps in :math:`(0, 2/L)` and thresholds that are not negative."""
        step, threshold = float(setting.step.detach()), float(setting.threshold.detach())
        found = [] if 0 < step < 2 / self.lipschitz else [f"step {step:.3g} outside (0, {2 / self.lipschitz:.3g})"]
        return found if threshold >= 0 else [*found, f"negative threshold {threshold:.3g}"]

    @property
    @torch.no_grad()
    def guarantee(self) -> str | None:
        r"""Proximal gradient descent converges to a minimiser, if there is one, for a prox of a convex function and
        steps in :math:`(0, 2/L)`. Proved if all phases are equal and :meth:`Transform.is_prox` holds."""
        settings = {(float(setting.step), float(setting.threshold)) for setting in self.settings()}
        states = [transform.state_dict() for transform in self.transforms]
        same = all(torch.equal(value, states[0][key]) for state in states for key, value in state.items())
        first = self.transforms[0]
        assert isinstance(first, Transform)
        if len(settings) > 1 or not same or self.faults(self.settings()[0]) or not first.is_prox():
            return None
        return "all phases are the same step of proximal gradient descent on one convex problem"


def gradient_map(problem: Problem, step: float | Tensor) -> GradientMap:
    r"""The map :math:`x \mapsto x - \eta\nabla f(x)`, by products with the operator and its adjoint."""
    return GradientMap(step * problem.linear(), None, problem.operator, step, problem.ridge)

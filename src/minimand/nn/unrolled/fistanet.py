"""FISTA-Net: accelerated proximal gradient descent with learned schedules and transforms."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from ...errors import OptionError
from ...operators import LinearOperator
from ...solvers.gradient import FISTA, NesterovState
from ...solvers.momentum import extrapolate
from ...solvers.problem import Problem
from ...solvers.steps import inertial_limit
from .base import PhaseSetting, UnrolledNet
from .istanet import gradient_map
from .parameters import Softplus
from .transform import Architecture

__all__ = ["FISTANet"]


class FISTANet(UnrolledNet):
    r"""Accelerated proximal gradient descent with a learned residual transform and schedules over the phases:

    .. math::

        x^+ = \operatorname{shrink}_{\theta_k}\bigl(z - \mu_k\Phi^\top(\Phi z - y)\bigr), \qquad
        z^+ = x^+ + \beta_k\,(x^+ - x),

    which is :class:`~minimand.solvers.FISTA` with a learned prox. Steps and thresholds follow
    :math:`\mu_k = \operatorname{sp}(w_1k + c_1)/\|\Phi\|^2` and :math:`\theta_k = \operatorname{sp}(w_2k + c_2)`,
    with the softplus sp.

    Args:
        phi: The measurement matrix m × b² of square blocks, or an operator on images.
        phases: The number of iterations.
        architecture: The size of the transform; FISTA-Net's has four convolutions in each direction.
        constrained: Whether the schedules are kept monotone (:math:`w_1, w_2 < 0 < w_3`) and the steps below a limit:
            :math:`\mu_k = (1 - e^{-\operatorname{sp}(w_1k + c_1)})\,l_k/\|\Phi\|^2`, where :math:`l_k` is 1 for
            Nesterov's momentum, and :func:`~minimand.solvers.steps.inertial_limit` for a learned one, which is up to 2
            if the momentum is small.
        shared: Whether all phases share one transform, as in the paper.
        momentum: "nesterov" is the solver's rule; "learned" is FISTA-Net's
            :math:`\beta_k = (\operatorname{sp}(w_3k + c_3) - \operatorname{sp}(c_3))/\operatorname{sp}(w_3k + c_3)`.
        initial: The matrix Q of the initial image :math:`Qy`; default: :math:`\Phi^\top y`.

    Source: Xiang, Dong, Yang, *FISTA-Net*, IEEE TMI 2021; [Lin2019], image reconstruction.

    >>> from minimand.operators import orthonormal_gaussian
    >>> phi = orthonormal_gaussian(4, 16, generator=torch.Generator().manual_seed(0))
    >>> FISTANet(phi, phases=3)(torch.rand(2, 16) @ phi.mT).shape
    torch.Size([2, 16])
    """

    def __init__(
        self,
        phi: Tensor | LinearOperator,
        phases: int = 7,
        *,
        architecture: Architecture = Architecture(depth=4),  # noqa: B008 -- frozen
        constrained: bool = False,
        shared: bool = True,
        momentum: Literal["nesterov", "learned"] = "nesterov",
        initial: Tensor | None = None,
    ) -> None:
        if momentum not in ("nesterov", "learned"):
            raise OptionError(f'momentum must be "nesterov" or "learned", got {momentum!r}')
        super().__init__(phi, phases, architecture, residual=True, shared=shared, initial=initial)
        self.constrained, self.momentum = constrained, momentum
        falling, rising = (-1.0, 1.0) if constrained else (None, None)
        # Constrained steps start at 0.9 of their limit, unconstrained ones as in the paper.
        self.step_schedule = Softplus(-0.2, 2.2 if constrained else 0.1, monotone=falling)
        self.threshold_schedule = Softplus(-0.1, -4.6, monotone=falling)
        # A constrained momentum starts small, where long steps are allowed.
        slope = 0.02 if constrained else 0.5
        self.momentum_schedule = Softplus(slope, 0.0, monotone=rising) if momentum == "learned" else None
        self._follow_phi()

    def settings(self) -> list[PhaseSetting]:
        """Step, threshold and momentum of every phase."""
        steps, thresholds = self.step_schedule(self.phases), self.threshold_schedule(self.phases)
        momenta: Sequence[Tensor | None] = [None] * self.phases
        if self.constrained:
            steps = -torch.expm1(-steps)
        if self.momentum_schedule is not None:
            rising = self.momentum_schedule(self.phases)
            # The momentum must stay below one after rounding.
            learned = (rising - rising[0]) / rising * (1 - 1e-6 * self.constrained)
            steps, momenta = steps * inertial_limit(learned) if self.constrained else steps, learned.unbind()
        steps = steps / self.lipschitz
        return [PhaseSetting(*each) for each in zip(steps.unbind(), thresholds.unbind(), momenta, strict=True)]

    def init(self, problem: Problem, x0: Tensor) -> NesterovState:
        """The start, Nesterov's weight one, and the gradient map at unit step."""
        weight = torch.ones(len(x0), 1, 1, 1, device=x0.device)
        return NesterovState(x0, x0, weight, gradient_map(problem, 1.0))

    def advance(self, problem: Problem, state: NesterovState, setting: PhaseSetting, k: int) -> NesterovState:
        """One iteration of FISTA, with Nesterov's or the learned momentum."""
        move = state.move._replace(offset=setting.step * state.move.offset, step=setting.step)
        new = FISTA(self.phases, restart=False).advance(problem, state._replace(move=move), k, None)
        if setting.momentum is not None:
            assert new.x is not None
            assert state.x is not None
            new = new._replace(ahead=extrapolate(new.x, state.x, setting.momentum))
        return new._replace(move=state.move)

    def faults(self, setting: PhaseSetting) -> list[str]:
        r"""FISTA converges for steps in :math:`(0, 1/L]`, longer ones where a learned momentum is small, thresholds
        that are not negative and momentum in [0, 1)."""
        step, threshold = float(setting.step.detach()), float(setting.threshold.detach())
        longest = 1.0 if setting.momentum is None else float(inertial_limit(setting.momentum.detach()))
        # Tolerates rounding in float32.
        limit = longest * (1 + 1e-6) / self.lipschitz
        found = [] if 0 < step <= limit else [f"step {step:.3g} outside (0, {limit:.3g}]"]
        if not threshold >= 0:
            found.append(f"negative threshold {threshold:.3g}")
        if setting.momentum is not None and not 0 <= float(setting.momentum.detach()) < 1:
            found.append(f"momentum {float(setting.momentum.detach()):.3g} outside [0, 1)")
        return found

"""ADMM-Net: the alternating direction method of multipliers with learned penalties, thresholds and transforms."""

import math

import torch
from torch import Tensor, nn

from ...norms.spectral import to_float64
from ...operators import LinearOperator, Transposed
from ...solvers.linear import conjugate_gradient
from ...solvers.problem import Problem
from ...solvers.splitting import ADMM, SplitState
from .base import Measured, PhaseSetting, UnrolledNet
from .parameters import THRESHOLD, Interval, Positive, constrain
from .transform import Architecture

__all__ = ["ADMMNet"]

# ADMM converges for dual steps below this limit (Glowinski, 1984).
_GOLDEN = (1 + 5**0.5) / 2
# Conjugate gradient iterations if no small number of them is exact.
_INEXACT_ITERATIONS = 10


class ADMMNet(UnrolledNet):
    r"""The alternating direction method of multipliers with learned parameters and transforms. Phase k is

    .. math::

        z \leftarrow (\Phi^\top\Phi + \rho_k I)^{-1}(\Phi^\top y + \rho_k(x - u)), \qquad
        x \leftarrow \tilde{\mathcal{F}}_k(S_{\theta_k}(\mathcal{F}_k(z + u))), \qquad u \leftarrow u + \eta_k(z - x),

    which is :class:`~minimand.solvers.ADMM` with a learned prox and a learned step of the multiplier. The linear system
    is solved by conjugate gradients from :math:`x - u`. The initial residual :math:`\Phi^\top(y - \Phi(x - u))` lies in
    the range of :math:`\Phi^\top`, so the solution is exact after as many iterations as :math:`\Phi^\top\Phi` has
    distinct nonzero eigenvalues: one for orthonormal rows, missing pixels and symmetric Fourier masks, two for other
    Fourier masks.

    Args:
        phi: The measurement matrix m × b² of square blocks, or an operator on images.
        phases: The number of iterations.
        plus: Whether the transform learns a residual of the image.
        architecture: The size of the transforms.
        constrained: Whether penalties and thresholds are kept positive, and the multiplier's steps in (0, (1+√5)/2).
        shared: Whether all phases share one transform.
        cg_iters: Conjugate gradient iterations per phase; default: the number that is exact, or ten if that is more
            than three.
        initial: The matrix Q of the initial image :math:`Qy`; default: :math:`\Phi^\top y`.

    Source: Yang, Sun, Li, Xu, *Deep ADMM-Net for Compressive Sensing MRI*, NIPS 2016; [Lin2019], image
        reconstruction.

    >>> from minimand.operators import SubsampledFourier, radial_mask
    >>> mri = SubsampledFourier(radial_mask((8, 8), 0.5))
    >>> ADMMNet(mri, phases=2)(mri.apply(torch.rand(3, 1, 8, 8))).shape
    torch.Size([3, 1, 8, 8])
    """

    penalty: Tensor
    threshold: Tensor
    rate: Tensor

    def __init__(
        self,
        phi: Tensor | LinearOperator,
        phases: int = 9,
        plus: bool = True,
        *,
        architecture: Architecture = Architecture(),  # noqa: B008 -- frozen
        constrained: bool = False,
        shared: bool = False,
        cg_iters: int | None = None,
        initial: Tensor | None = None,
    ) -> None:
        super().__init__(phi, phases, architecture, residual=plus, shared=shared, initial=initial)
        self.plus, self._cg_iters = plus, cg_iters
        # At ρ = ‖Φ‖² the data term and the penalty have equal weight.
        self.penalty = nn.Parameter(torch.full((phases,), self.lipschitz))
        self.threshold = nn.Parameter(torch.full((phases,), THRESHOLD))
        self.rate = nn.Parameter(torch.full((phases,), 1.0))
        ADMM(phases, 1.0, cg_iters=self.cg_iters)
        if constrained:
            constrain(self, "penalty", Positive(self.lipschitz))
            constrain(self, "threshold", Positive(THRESHOLD))
            constrain(self, "rate", Interval(0.0, _GOLDEN))
        self._follow_phi()

    def _measure(self) -> tuple[float, int | None]:
        return super()._measure()[0], _exact_rounds(self._of_one_block())

    @property
    def cg_iters(self) -> int:
        """Conjugate gradient iterations per phase."""
        return self._solve(self._measured())[0]

    @property
    def exact(self) -> bool:
        """Whether these iterations solve the linear system up to rounding."""
        return self._solve(self._measured())[1]

    def _solve(self, known: Measured) -> tuple[int, bool]:
        """The conjugate gradient iterations, and whether they are exact."""
        iters = (known.rounds or _INEXACT_ITERATIONS) if self._cg_iters is None else self._cg_iters
        return iters, known.rounds is not None and iters >= known.rounds

    def _vectors(self) -> tuple[str, ...]:
        return ("penalty", "threshold", "rate")

    def settings(self) -> list[PhaseSetting]:
        """The prox parameter 1/ρ, threshold and multiplier's step of every phase."""
        columns = zip((1 / self.penalty).unbind(), self.threshold.unbind(), self.rate.unbind(), strict=True)
        return [PhaseSetting(step, threshold, None, rate) for step, threshold, rate in columns]

    def init(self, problem: Problem, x0: Tensor) -> SplitState:
        r"""Both iterates at the start, no multiplier, and :math:`\Phi^\top y`."""
        self._measured()
        return SplitState(x0, x0, None, problem.linear(), None)

    def advance(self, problem: Problem, state: SplitState, setting: PhaseSetting, k: int) -> SplitState:
        """One iteration of ADMM, then the multiplier's own step."""
        iters, exact = self._solve(self._known)
        if exact and state.x is not None:
            # With inexact solves the last solution is the better start, since its error vanishes at convergence.
            state = state._replace(smooth=state.x if state.multiplier is None else state.x - state.multiplier)
        new = ADMM(self.phases, 1 / setting.step, cg_iters=iters).advance(problem, state, k, None)
        assert new.multiplier is not None
        assert setting.rate is not None
        before = torch.zeros_like(new.multiplier) if state.multiplier is None else state.multiplier
        return new._replace(multiplier=before + setting.rate * (new.multiplier - before))

    def faults(self, setting: PhaseSetting) -> list[str]:
        """ADMM converges for positive penalties, thresholds that are not negative, dual steps below (1+√5)/2."""
        step, threshold = float(setting.step.detach()), float(setting.threshold.detach())
        assert setting.rate is not None
        rate = float(setting.rate.detach())
        penalty = 1 / step if step else math.inf
        found = [] if 0 < step < math.inf else [f"penalty {penalty:.3g} is not positive and finite"]
        if not threshold >= 0:
            found.append(f"negative threshold {threshold:.3g}")
        return found if 0 < rate < _GOLDEN else [*found, f"multiplier's step {rate:.3g} outside (0, {_GOLDEN:.3g})"]

    def notes(self) -> list[str]:
        """A note if the linear systems are not solved exactly."""
        if self.exact:
            return []
        return [
            f"{self.cg_iters} conjugate gradient iterations do not solve the linear systems exactly; raise cg_iters"
        ]


def _exact_rounds(operator: LinearOperator, most: int = 3) -> int | None:
    r"""The conjugate gradient iterations that solve :math:`(\Phi^\top\Phi + \rho I)z = \Phi^\top w` for any w; None if
    more than ``most``."""
    wide = Transposed(operator.with_weight(to_float64(operator.weight)))
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(1, *wide.input_shape, generator=generator, dtype=wide.weight.dtype).to(wide.weight.device)
    target, shift = wide.apply(w), 0.01 * float(operator.norm_sq())

    def system(v: Tensor) -> Tensor:
        return wide.onto(None, shift, v, 1.0)

    for rounds in range(1, most + 1):
        z = conjugate_gradient(system, target, rounds, sample_dims=-wide.feature_dim)
        if float((system(z) - target).norm()) <= 1e-3 * float(target.norm()):
            return rounds
    return None

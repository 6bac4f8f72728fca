"""The base class of unrolled networks: measurement, start, loop over the phases, and loss."""

import abc
import copy
import math
import warnings
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...arguments import check_methods
from ...errors import OptionError, Sealed, ShapeError, require_constant, require_finite, require_real, require_values
from ...functions.separable import Zero
from ...operators import BlockSensing, Dense, LinearOperator, Transposed
from ...operators.sensing import is_orthonormal
from ...solvers import iterate
from ...solvers.base import require_count
from ...solvers.problem import Problem
from ...tracing import is_traced
from .parameters import assign
from .start import checked_start
from .transform import Architecture, Shrinkage, Transform

__all__ = ["PhaseResult", "PhaseSetting", "UnrolledNet"]

# Images with values in [0, 1] have at most the energy of a white image. This factor allows for noise.
_ENERGY_SLACK = 16.0


class PhaseSetting(NamedTuple):
    """The learned parameters of one phase. ``step`` is the prox parameter: 1/ρ for ADMM."""

    step: Tensor
    threshold: Tensor
    momentum: Tensor | None = None
    rate: Tensor | None = None


class PhaseResult(NamedTuple):
    """The result of one phase: the image after it, its shrinkage, and its parameters."""

    x: Tensor
    shrinkage: Shrinkage
    setting: PhaseSetting


class Measured(NamedTuple):
    """A copy of phi, and what was computed from it."""

    phi: Tensor
    lipschitz: float
    rounds: int | None


class UnrolledNet(Sealed, nn.Module, abc.ABC):
    r"""A solver with a fixed number of iterations for :math:`\min_x \tfrac12\|\Phi x - y\|^2 +
    \lambda\|\mathcal{F}(x)\|_1`, with learned transform, steps and thresholds. Use :class:`ISTANet`, :class:`FISTANet`
    or :class:`ADMMNet`.

    ``phi`` is a measurement matrix m × b² of square blocks, or any operator on images of one channel. With a matrix
    the network takes measurements ``(B, m)`` of single blocks and returns ``(B, b²)``, as in the papers. It also takes
    ``(B, m, h, w)``, the blocks of whole images, and returns ``(B, 1, b·h, b·w)``; the parameters are the same, and the
    convolutions extend across block borders. With an operator it takes measurements and returns images. Pixels are
    expected in [0, 1].
    """

    phi: Tensor
    initial: Tensor | None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        check_methods(cls, "__init__")

    def __init__(
        self,
        phi: Tensor | LinearOperator,
        phases: int,
        architecture: Architecture,
        *,
        residual: bool,
        shared: bool,
        initial: Tensor | None,
    ) -> None:
        super().__init__()
        require_count("phases", phases)
        self.phases, self.shared = phases, shared
        self._operator = None if isinstance(phi, Tensor | Dense | BlockSensing) else _checked(phi)
        weight = phi if isinstance(phi, Tensor) else phi.weight
        require_real("phi", weight)
        require_values("phi", weight)
        require_finite("phi", weight)
        require_constant("phi", weight)
        if self._operator is None and weight.dim() != 2:
            raise ShapeError(
                f"phi must be a matrix m × b² of square blocks, got a tensor of shape {tuple(weight.shape)}"
            )
        self.register_buffer("phi", weight.detach().clone())
        self._known = Measured(self.phi.clone(), *self._measure())
        if self._operator is None and not is_orthonormal(weight):
            warnings.warn(
                f"the rows of phi are not orthonormal (‖Φ‖² ≤ {self.lipschitz:.4g}): the steps are scaled by 1/‖Φ‖²",
                stacklevel=3,
            )
        matrix = self.phi if self._operator is None else None
        self.register_buffer("initial", checked_start(initial, matrix, "with an operator the network starts from Φᵀy"))
        self.transforms = nn.ModuleList(
            Transform(architecture, residual=residual) for _ in range(1 if shared else phases)
        )

    def _follow_phi(self) -> None:
        """Move all parameters to the precision and device of phi."""
        self.to(self.phi.device, self.phi.dtype)

    # The measurement

    @property
    def lipschitz(self) -> float:
        """A bound on the squared norm of phi, on which the steps depend; computed again when phi has changed."""
        return self._measured().lipschitz

    def _measured(self) -> Measured:
        phi = self.phi.detach()
        # Values are compared: a version counter does not notice an edit through ``.data``.
        if not is_traced(phi) and not _equal(self._known.phi, phi):
            self._known = Measured(phi.clone(), *self._measure())
        return self._known

    def _measure(self) -> tuple[float, int | None]:
        """The norm of phi, and the conjugate gradient iterations that ADMM-Net needs."""
        norm = float(self._of_one_block().norm_sq())
        if not 0 < norm < math.inf:
            raise OptionError(f"phi has the squared norm {norm}, but it must be positive and finite")
        return norm, None

    def operator(self, y: Tensor) -> LinearOperator:
        """The measurement operator on images, for measurements of this size."""
        if self._operator is not None:
            return self._operator.with_weight(self.phi)
        side = math.isqrt(self.phi.shape[-1])
        grid = y.shape[-2:] if y.dim() == 4 else (1, 1)
        return BlockSensing(self.phi, (side * grid[0], side * grid[1]))

    def _of_one_block(self) -> LinearOperator:
        return self.operator(self.phi)

    def problem(self, y: Tensor) -> Problem:
        """The data term of these measurements, which are checked first."""
        require_real("y", y)
        operator = self.operator(y)
        shape, whole = operator.output_shape, y.dim() == 4
        if self._operator is None and not whole:
            if y.dim() != 2 or y.shape[1] != shape[0]:
                raise ShapeError(
                    f"phi has {shape[0]} rows, so y needs shape (B, {shape[0]}) for blocks or (B, {shape[0]}, h, w) "
                    f"for whole images; got {tuple(y.shape)}"
                )
            y = y[:, :, None, None]
        elif tuple(y.shape[1:]) != shape:
            raise ShapeError(
                f"this network takes measurements of shape (B, {', '.join(map(str, shape))}), got {tuple(y.shape)}"
            )
        problem = Problem(Transposed(operator), Zero(), y)
        problem.check_dtype("y", y)
        require_finite("y", y)
        energy, most = _energy(y), _ENERGY_SLACK * math.prod(operator.input_shape)
        # The norm is compared with the present phi only if it matters.
        if energy > most * self._known.lipschitz and energy > most * self.lipschitz:
            raise OptionError(
                f"y has energy {energy:.3g}, too large for pixels in [0, 1]; divide the images by their largest "
                f"value, 255 for bytes, before measuring"
            )
        return problem

    def start(self, problem: Problem) -> Tensor:
        r"""The initial image: :math:`Qy` with the least-squares matrix ``initial``, otherwise :math:`\Phi^\top y`."""
        if self.initial is None:
            return problem.linear()
        size = problem.operator.output_shape[-2:]
        return BlockSensing(self.initial.mT, (size[0], size[1])).adjoint(problem.y)

    # The phases

    @abc.abstractmethod
    def settings(self) -> list[PhaseSetting]:
        """The learned parameters of every phase."""

    @abc.abstractmethod
    def init(self, problem: Problem, x0: Tensor) -> Any:
        """The state of the solver before the first phase."""

    @abc.abstractmethod
    def advance(self, problem: Problem, state: Any, setting: PhaseSetting, k: int) -> Any:
        """One iteration of the solver, with the parameters of this phase."""

    @abc.abstractmethod
    def faults(self, setting: PhaseSetting) -> list[str]:
        """The reasons why a solver with these parameters may diverge; empty if it converges."""

    @property
    def guarantee(self) -> str | None:
        """The reason why more phases like these converge, if that is proved for the present parameters; else None.

        :func:`~minimand.nn.diagnose` calls a network a convergent solver only if it has one.
        """
        return None

    def notes(self) -> list[str]:
        """Further differences between the network and its solver."""
        return []

    def trajectory(self, y: Tensor) -> list[PhaseResult]:
        """The results of all phases, with images as ``(B, 1, H, W)``."""
        problem, settings = self.problem(y), self.settings()
        results: list[PhaseResult] = []

        def phase(state: Any, k: int) -> Any:
            setting = settings[k]
            transform = self.transforms[0 if self.shared else k]
            assert isinstance(transform, Transform)
            shrinkage = Shrinkage(transform, setting.threshold, setting.step)
            state = self.advance(Problem(problem.operator, shrinkage, problem.y), state, setting, k)
            results.append(PhaseResult(state.x, shrinkage, setting))
            return state

        iterate(phase, self.init(problem, self.start(problem)), self.phases)
        return results

    def forward(self, y: Tensor) -> Tensor:
        """The reconstruction: ``(B, b²)`` for blocks ``(B, m)``, images otherwise."""
        x = self.trajectory(y)[-1].x
        return x.flatten(1) if y.dim() == 2 and self._operator is None else x

    def loss(self, y: Tensor, target: Tensor, *, symmetry: float = 0.01) -> Tensor:
        r"""The mean squared error, plus ``symmetry`` times the mean of :math:`|\tilde{\mathcal{F}}\mathcal{F}(r) -
        r|^2`, summed over the phases (ISTA-Net)."""
        results = self.trajectory(y)
        x = results[-1].x
        if target.numel() != x.numel() or len(target) != len(x):
            raise ShapeError(f"the target has shape {tuple(target.shape)}, but the reconstruction {tuple(x.shape)}")
        _check_target(target)
        loss = F.mse_loss(x, target.reshape(x.shape))
        if symmetry == 0:
            return loss
        for result in results:
            loss = loss + symmetry * result.shrinkage.symmetry().square().mean()
        return loss

    def grown(self, phases: int) -> Self:
        """A copy with more phases, in which the new phases equal the last one, for further training."""
        require_count("phases", phases)
        if phases < self.phases:
            raise OptionError(f"phases must be at least {self.phases}, the phases that the network has, got {phases}")
        net = copy.deepcopy(self)
        extra = phases - self.phases
        if not self.shared:
            net.transforms.extend(copy.deepcopy(self.transforms[-1]) for _ in range(extra))
        for name in self._vectors():
            value = getattr(self, name).detach()
            assign(net, name, torch.cat([value, value[-1:].expand(extra)]))
        vars(net)["phases"] = phases
        return net

    def _vectors(self) -> tuple[str, ...]:
        """The names of the parameters with one number per phase."""
        return ()

    def extra_repr(self) -> str:
        """The phases and the bound on the norm of phi."""
        return f"phases={self.phases}, lipschitz={self.lipschitz:.4g}"


def _equal(known: Tensor, phi: Tensor) -> bool:
    return (known.device, known.dtype) == (phi.device, phi.dtype) and torch.equal(known, phi)


def _energy(batch: Tensor) -> float:
    """The largest sum of squares of a sample; zero under tracing."""
    if is_traced(batch) or batch.numel() == 0:
        return 0.0
    return float(batch.detach().reshape(len(batch), -1).square().sum(1).max())


def _check_target(target: Tensor) -> None:
    require_real("target", target)
    require_values("target", target)
    if target.dim() == 0:
        raise ShapeError("the target is a single number, but a reconstruction is a batch of images")
    require_finite("target", target)
    if target.numel() and _energy(target) > _ENERGY_SLACK * target[0].numel():
        raise OptionError(
            "the target's pixels lie far outside [0, 1]; divide the images by their largest value, 255 for bytes"
        )


def _checked(operator: LinearOperator) -> LinearOperator:
    if not isinstance(operator, LinearOperator):
        raise OptionError(
            f"phi must be a measurement matrix or an operator, got {type(operator).__name__}; convert a matrix with "
            f"torch.as_tensor"
        )
    if len(operator.input_shape) != 3 or operator.input_shape[0] != 1:
        raise ShapeError(
            f"phi must take images of shape (1, H, W), but this {type(operator).__name__} takes {operator.input_shape}"
        )
    return operator

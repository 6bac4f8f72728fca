"""RidgeNet: a reconstruction network that minimises one learned objective, with a proof of descent."""

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...arguments import check_methods
from ...errors import CapabilityError, OptionError, Sealed, ShapeError, require_positive
from ...functions.base import widened
from ...operators import LinearOperator, check_operator
from ...solvers import FISTA, Choice, Datafit, Poisson, Problem, Quadratic, Solution
from ...solvers.base import require_count
from ...solvers.iterate import iterate
from ...solvers.momentum import fista_weight, nesterov_schedule
from ...tracing import constant
from .base import _check_target
from .descent import Descended, descend
from .fidelity import Fidelity, in_full, tight_constant
from .parameters import Interval, constrain
from .regularizer import RidgeRegularizer, normalized_bank
from .ridgeproblem import problem_of
from .ridgesetup import (
    THEOREMS,
    check_datafit_option,
    check_sizes,
    cosines,
    exponent_range,
    exponential,
    given_start,
    in_full_precision,
    refuse_exact,
    refuse_other_range,
    refuse_traced,
)
from .sensor import Sensor

__all__ = ["RidgeNet"]

# Iterations with gradients at the end of a tail.
_DIFFERENTIATED = 6
_MOST = 500


class RidgeNet(Sealed, nn.Module):
    r"""A learned objective with a certified solver, for measurements :math:`y = \Phi x` of images,

    .. math::

        \min_x\; R(x) \;\text{ subject to }\; \Phi x = y \qquad\text{or}\qquad
        \min_x\; R(x) + \tfrac\mu2\|\Phi x - y\|^2, \qquad R(x) = \sum_c\sum_i \psi_c((Wx)_{c,i}) ,

    with a bank of filters W and potentials ψ (:class:`~minimand.functions.Charbonnier`), one scale and one exponent per
    filter. The same R is minimised in all iterations, so that the output has a meaning: it is a critical point of an
    explicit function with a few thousand parameters.

    In training mode the network makes ``phases`` accelerated proximal gradient steps with learned steps and momenta,
    and with wider potentials at first (homotopy). In evaluation mode these only supply a start. Iterations with
    certified steps follow (:func:`~minimand.nn.unrolled.descent.descend`) until a step is shorter than ``tol`` times
    the image.

    **What is proved**, for every image size, batch and start, in exact arithmetic. R is twice differentiable and
    :math:`\|W\|^2`-smooth, since :math:`\psi'' \le 1`; L is a certified bound. An accelerated step is accepted if it
    lowers the objective F by :math:`\delta\|\Delta x\|^2`; a plain step lowers it by :math:`\tfrac L2\|\Delta x\|^2`.
    So F never rises, :math:`\sum\|\Delta x\|^2 < \infty`, and the gradient mapping tends to zero (``"descent"``). F is
    real analytic, or definable for other losses, so that it has the Kurdyka–Łojasiewicz property. With exponents below
    one and :math:`\ker W \cap \ker\Phi = 0` it is coercive (with Poisson's loss, if every count is positive), the
    iterates are bounded, and they converge to a critical point (``"convergent"``; Attouch, Bolte & Svaiter, 2013; Li &
    Lin, 2015). With exponents at most ½ it is also convex, and a critical point is the global minimum (``"convex"``).
    :attr:`injective` tells whether :math:`\ker W = 0` is proved.

    Args:
        phi: The measurement matrix m × b² of square blocks, an operator on images (C, H, W), an object with ``A`` and
            ``A_adjoint`` such as deepinv's physics, or a sparse matrix or SciPy operator through
            :func:`~minimand.operators.as_operator`.
        phases: Steps with learned parameters.
        filters: Filters of W.
        size: Their odd side.
        guarantee: ``"convex"`` (exponents at most ½), ``"convergent"`` (below 1) or ``"descent"`` (below 2).
        noise: None: exact measurements, for which :math:`\Phi^\top\Phi` must be a multiple of a projection, as for
            orthonormal rows.
            A number: the standard deviation σ of Gaussian noise; then :math:`\mu = T/\sigma^2` with a learned T.
        channels: ``"apart"``: the same filters for every channel, such as real and imaginary parts; ``"together"``:
            filters across channels, such as colours.
        exponents: A range inside of the one of the guarantee.
        datafit: The loss of the measurements, such as ``Huber(0.1)`` or ``Poisson(background)``, where ``noise`` is
            given: the data term is :math:`\mu\sum_i f((\Phi x)_i; y_i)`, and σ the size of typical errors.
        initial: The matrix Q of the start :math:`Qy` for a phi that is a matrix (:func:`least_squares_start`).

    Source: R is the fields-of-experts prior of Roth & Black, 2005; Goujon, Neumayer, Bohra, Ducotterd & Unser, *A
    neural-network-based convex regularizer*, 2023 (convex ridge functions); solver: Li & Lin, 2015.

    >>> from minimand.operators import orthonormal_gaussian
    >>> phi = orthonormal_gaussian(8, 25, generator=torch.Generator().manual_seed(0))
    >>> net = RidgeNet(phi, phases=3, filters=8, size=3, guarantee="convex").eval()
    >>> y = torch.rand(2, 25, generator=torch.Generator().manual_seed(1)) @ phi.mT
    >>> solution = net.solve(y, tol=1e-6)
    >>> solution.x.shape, bool(torch.allclose(solution.x @ phi.mT, y, atol=1e-5)), solution.converged
    (torch.Size([2, 25]), True, True)
    """

    filters: Tensor
    log_scale: Tensor
    exponent: Tensor
    step: Tensor
    momentum: Tensor
    log_homotopy: Tensor

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        check_methods(cls, "__init__")

    def __init__(
        self,
        phi: Any,
        phases: int = 10,
        filters: int = 48,
        size: int = 7,
        guarantee: Literal["convex", "convergent", "descent"] = "convergent",
        *,
        noise: float | None = None,
        channels: Literal["apart", "together"] = "apart",
        exponents: tuple[float, float] | None = None,
        initial: Tensor | None = None,
        datafit: Datafit = Quadratic(),  # noqa: B008 -- frozen
    ) -> None:
        super().__init__()
        check_sizes(phases, filters, size, channels)
        self.phases, self.guarantee, self.noise, self.channels = phases, guarantee, noise, channels
        self.exponents, self.datafit = exponent_range(guarantee, exponents), datafit
        check_datafit_option(datafit, noise)
        self._sensor = Sensor(phi, initial)
        if channels == "together" and self._sensor.channels is None:
            raise OptionError(
                'channels="together" needs to know the number of channels; pass as_operator(phi, input_shape)'
            )
        self._tight: dict[Any, float | None] = {}
        self._check_operator()
        if noise is not None:
            require_positive("noise", noise)
        inputs = (self._sensor.channels or 1) if channels == "together" else 1
        self.filters = nn.Parameter(cosines(filters, inputs, size))
        # White noise of variance σ² has about this size in a feature of a normalised bank.
        scale = 1e-3 if noise is None else max(1e-3, 0.5 * noise / size)
        self.log_scale = nn.Parameter(torch.full((filters,), math.log(scale)))
        low, high = self.exponents
        first = {"convex": 0.45, "convergent": 0.75, "descent": 0.75}[guarantee]
        self.exponent = nn.Parameter(torch.full((filters,), min(max(first, low + 0.1 * (high - low)), high)))
        self.step = nn.Parameter(torch.ones(phases))
        self.momentum = nn.Parameter(torch.tensor(nesterov_schedule(phases)).float().clamp_min(0.05))
        self.log_homotopy = nn.Parameter(torch.linspace(math.log(8.0), 0.0, phases))
        start = None if noise is None else torch.tensor(math.log(0.3) + 2 * math.log(noise))
        self.register_parameter("log_temperature", None if start is None else nn.Parameter(start))
        constrain(self, "exponent", Interval(low, high))
        constrain(self, "step", Interval(0.0, 2.0))
        constrain(self, "momentum", Interval(0.0, 1.0))
        fixed = self._sensor.fixed
        if fixed is not None:
            self.to(fixed.device, fixed.dtype)
        self._bounds: dict[Any, Any] = {}
        self.register_load_state_dict_pre_hook(refuse_other_range)

    @property
    def injective(self) -> bool:
        r"""Whether :math:`\ker W = 0` on images of every size: the filters span all filters of zero mean.

        Then a window on which all features vanish is constant, and the zeros outside of the image make it zero.
        """
        _, inputs, size, _ = self.filters.shape
        matrix = self.regularizer().weight.detach().double().flatten(1)
        spectrum = torch.linalg.svdvals(matrix)
        needed = inputs * (size * size - 1)
        return len(matrix) >= needed and bool(spectrum[needed - 1] > 1e-6 * spectrum[0])

    @property
    def theorem(self) -> str:
        """What is proved of the solver, in one sentence."""
        conditions = [] if self.guarantee == "descent" or self.injective else ["ker W ∩ ker Φ = 0"]
        conditions += ["every count is positive"] if isinstance(self.datafit, Poisson) else []
        text = THEOREMS[self.guarantee]
        return f"{text}, provided that {' and '.join(conditions)}" if conditions else text

    def regularizer(self) -> RidgeRegularizer:
        """R with the present parameters: filters of zero mean, scaled so that the norm of W is about one."""
        scale = exponential("log_scale", self.log_scale)
        return RidgeRegularizer(normalized_bank(widened(self.filters)), scale, widened(self.exponent))

    def data_weight(self) -> Tensor | None:
        r"""The weight :math:`\mu = T/\sigma^2` of the data term; None for exact measurements."""
        if self.noise is None:
            return None
        assert isinstance(self.log_temperature, Tensor)
        return exponential("log_temperature", self.log_temperature, -2 * math.log(self.noise))

    def fidelity(self, y: Tensor) -> Fidelity:
        """The data term of these measurements, which are checked first."""
        y = self._sensor.checked(y)
        if y.device != self.filters.device:
            raise OptionError(f"the measurements are on {y.device} and the network on {self.filters.device}; move one")
        operator = self._sensor.operator(y)
        self.datafit.check(y)
        if isinstance(self.datafit, Quadratic):
            self._sensor.check_energy(operator, y)
        height, width = operator.input_shape[-2:]
        size = self.filters.shape[-1]
        if min(height, width) < size:
            raise ShapeError(f"an image of {height} × {width} is smaller than the filters of {size} × {size}")
        tight, bound = self._tightness(operator), self._sensor.norm_sq(operator)
        return Fidelity(in_full(operator), widened(y), self.data_weight(), tight, bound, self.datafit)

    def problem(self, y: Tensor) -> Problem:
        r"""The objective of these measurements in the grammar: :class:`~minimand.functions.Charbonnier` after the bank
        of filters, and the data term as a function with a prox; for the guarantee ``"convex"``.

        ``minimand.solvers.solve(net.problem(y))`` finds the minimum that :meth:`solve` finds, by any solver. Its
        gradients reach y; the parameters of the network are constants.
        """
        if self.guarantee != "convex":
            text = f"a problem is convex, and this network has the guarantee {self.guarantee!r}; use net.solve(y), or "
            raise CapabilityError(text + 'build it with guarantee="convex"')
        return problem_of(self.regularizer(), self.fidelity(y))

    def _tightness(self, operator: LinearOperator) -> float | None:
        key = self._sensor.changes(), operator.input_shape if self._sensor.fixed is None else None
        if key not in self._tight:
            self._tight[key] = tight_constant(operator)
            if self.noise is None and self._tight[key] is None:
                refuse_exact(operator)
        return self._tight[key]

    def _check_operator(self) -> None:
        if (fixed := self._sensor.fixed) is None:
            return
        if not fixed.has_weight:
            check_operator(fixed, trials=2)
        self._tightness(fixed)
        self._sensor.norm_sq(fixed)  # known before a graph is exported

    @in_full_precision
    def unrolled(self, y: Tensor) -> Tensor:
        """The images (B, C, H, W) after the learned phases, differentiable."""
        return self._phases(self.fidelity(y), self.regularizer())[0]

    def _phases(self, fidelity: Fidelity, regularizer: RidgeRegularizer) -> tuple[Tensor, Tensor]:
        """The last two points."""
        first = self._sensor.start(fidelity.operator, fidelity.y)
        first = first if fidelity.weight is not None else fidelity.step(first, 1.0)
        steps, momenta = self.step.unbind(), self.momentum.unbind()
        widths = exponential("log_homotopy", self.log_homotopy).unbind()

        def phase(state: tuple[Tensor, Tensor], k: int) -> tuple[Tensor, Tensor]:
            x, before = state
            v = x + momenta[k] * (x - before)
            slope = regularizer.scaled(widths[k]).gradient(v)
            return fidelity.step(v - steps[k] * slope, steps[k], v), x

        return iterate(phase, (first, first), self.phases)[0]

    def _tail(self, fidelity: Fidelity, regularizer: RidgeRegularizer, count: int) -> Tensor:
        """Phases and ``count`` further iterations without derivatives, then a few with them."""
        require_count("tail", count)

        def accelerated(state: tuple[Tensor, Tensor, Tensor], k: int) -> tuple[Tensor, Tensor, Tensor]:
            x, before, weight = state
            following = fista_weight(weight)
            v = x + (weight - 1) / following * (x - before)
            return fidelity.step(v - regularizer.gradient(v), 1.0, v), x, following

        with constant():
            x, _ = self._phases(fidelity, regularizer)
            state = iterate(accelerated, (x, x, torch.ones(())), count)[0]
        return iterate(accelerated, state, _DIFFERENTIATED)[0][0]

    @in_full_precision
    def loss(self, y: Tensor, target: Tensor, *, tail: int = 0) -> Tensor:
        """The mean squared error after the phases; with ``tail`` that of later iterations, for which the phases are a
        start without derivatives. Training alternates both in its second half (:class:`RidgeTrainer`)."""
        _check_target(target)
        fidelity, regularizer = self.fidelity(y), self.regularizer()
        x = self._tail(fidelity, regularizer, tail) if tail else self._phases(fidelity, regularizer)[0]
        if target.numel() != x.numel() or len(target) != len(x):
            raise ShapeError(f"the target has shape {tuple(target.shape)}, but the reconstruction {tuple(x.shape)}")
        return F.mse_loss(x, widened(target).reshape(x.shape))

    def forward(self, y: Tensor, *, tol: float = 1e-4) -> Tensor:
        """The reconstruction: after the phases in training mode, to the tolerance in evaluation mode; ``(B, b²)`` for
        blocks ``(B, m)``, images otherwise."""
        if self.training:
            return self._sensor.shaped(self.unrolled(y), y)
        return self._sensor.shaped(self.descended(y, tol=tol).x, y)

    @in_full_precision
    @torch.no_grad()
    def descended(
        self, y: Tensor, *, tol: float = 1e-4, iterations: int = _MOST, x0: Tensor | None = None
    ) -> Descended:
        """The certified iterations, with the objective of each sample in float64 and the history of their sum.

        Args:
            y: The measurements.
            tol: A sample ends when its step is at most this share of its norm.
            iterations: The largest number of iterations.
            x0: The start (B, C, H, W), projected onto the constraint; None: the learned phases.
        """
        return self._minimum(y, tol, iterations, x0)[0]

    def _minimum(
        self, y: Tensor, tol: float, iterations: int, x0: Tensor | None
    ) -> tuple[Descended, Fidelity, RidgeRegularizer]:
        """The certified iterations and their objective: parameters are read once, because threads may replace them."""
        require_positive("tol", tol, zero=True)
        require_count("iterations", iterations)
        fidelity, regularizer = self.fidelity(y), self.regularizer()
        refuse_traced(y)
        bound = self.smoothness(fidelity.operator, regularizer)
        x, before = self._phases(fidelity, regularizer) if x0 is None else (given_start(x0, fidelity), None)
        weight = max(1.0, self.phases / 2)  # Nesterov's after as many iterations: the momentum of the phases continues
        return descend(regularizer, fidelity, x, bound, iterations, tol, before, weight), fidelity, regularizer

    @in_full_precision
    @torch.no_grad()
    def solve(self, y: Tensor, *, tol: float = 1e-4, iterations: int = _MOST, x0: Tensor | None = None) -> Solution:
        """Minimise the objective: the reconstruction with its objective, optimality, iterations and convergence.

        ``objective`` is summed over the batch in float64, ``optimality`` is the largest norm of the gradient mapping,
        ``iterations`` the largest number over the samples. The arguments are those of :meth:`descended`.
        """
        found, fidelity, regularizer = self._minimum(y, tol, iterations, x0)
        smoothness = self.smoothness(fidelity.operator, regularizer)
        moved, half = fidelity.gradient_step(found.x, regularizer.gradient(found.x), smoothness)
        norms = 2 * half * torch.linalg.vector_norm(widened(moved - found.x).flatten(1), dim=1)
        return Solution(
            x=self._sensor.shaped(found.x, y),
            objective=found.objective.sum(),
            optimality=norms.amax() if len(norms) else norms.sum(),
            iterations=int(found.iterations.max()) if len(norms) else 0,
            converged=bool((found.change <= tol).all()),
            gap=torch.tensor(math.inf, dtype=torch.float64),
            solver=Choice(FISTA(iterations), "with the safeguard of Li and Lin, which proves descent"),
        )

    def smoothness(self, operator: LinearOperator, regularizer: RidgeRegularizer | None = None) -> float:
        r"""The certified bound on :math:`\|W\|^2` for the images of an operator; computed again when W changes."""
        height, width = operator.input_shape[-2:]
        regularizer = self.regularizer() if regularizer is None else regularizer
        weight, known = regularizer.weight.detach(), self._bounds.get((height, width))
        if known is None or known[0].device != weight.device or not torch.equal(known[0], weight):
            known = self._bounds[height, width] = (weight, regularizer.smoothness((height, width)))
        return float(known[1])

    def using(self, phi: Any, *, noise: float | None = None, initial: Tensor | None = None) -> "RidgeNet":
        """The same prior with another operator, image size or noise, without training; the parameters are shared."""
        _, _, size, _ = self.filters.shape
        other = RidgeNet(
            phi,
            self.phases,
            len(self.filters),
            size,
            self.guarantee,
            noise=noise,
            channels=self.channels,
            exponents=self.exponents,
            initial=initial,
            datafit=Quadratic() if noise is None else self.datafit,
        )
        if other.filters.shape != self.filters.shape:
            raise ShapeError(
                f"the filters are for images of {self.filters.shape[1]} channels, but phi has {other._sensor.channels}"
            )
        for name in ("filters", "log_scale", "log_homotopy", "parametrizations"):
            setattr(other, name, getattr(self, name))
        if noise is not None and self.noise is not None:
            other.log_temperature = self.log_temperature
        return other.train(self.training)

    def plot(self) -> Any:
        """A matplotlib figure of the learned filters, potentials, scales and exponents."""
        from .ridgeplot import drawn

        return drawn(self)

    def extra_repr(self) -> str:
        """The sizes and the guarantee."""
        filters, _, size, _ = self.filters.shape
        data = "exact" if self.noise is None else f"noise={self.noise:g}"
        return f"phases={self.phases}, filters={filters}, size={size}, guarantee={self.guarantee!r}, {data}"

"""Campaign: derivatives of a solve equal finite differences in float64, for every solver, adjoint and function.

A case takes one derivative along one random direction in everything that the solution depends on: weight, bias, input
and a parameter of the function. ``transform`` is the way by which torch computes it; see ``tests/test_derivatives.py``.
"""

import dataclasses
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from hypothesis import assume
from hypothesis import strategies as st
from torch import Tensor
from torch.func import functional_call

from minimand import functions as mf
from minimand.adjoints import Adjoint, Checkpoint, Implicit, JacobianFree, Unroll
from minimand.errors import OptionError
from minimand.nn import SolverConv1d, SolverConv2d, SolverLinear
from minimand.norms.kernel import Bounds
from minimand.operators import BlockSensing, Conv1d, Conv2d, Dense, Inpainting, LinearOperator, Transposed
from minimand.solvers import Problem, ProxGD, Solver, solve
from tests.cases import functions, solvers
from tests.test_derivatives import FIRST, SECOND

# Functions of a parameter, which is differentiated, too.
FUNCTIONS: dict[str, Callable[[Tensor], mf.Function]] = {
    case.name: (lambda p, f=case.function: f) for case in functions.ALL
}
FUNCTIONS |= {"l1 of a parameter": lambda p: mf.L1(0.1 + p[0] ** 2)}
FUNCTIONS |= {"squared hinge of a parameter": lambda p: mf.SquaredHinge(1 + p[0] ** 2)}
FUNCTIONS |= {"charbonnier of a parameter": lambda p: mf.Charbonnier(0.4 + p[0] ** 2, 0.3)}
FUNCTIONS |= {"ball of a parameter": lambda p: mf.Ball(0.4 + p[0] ** 2)}
_MATRICES = (mf.NuclearNorm, mf.SpectralBall, mf.PositiveSemidefinite, mf.spectral.NegativeSemidefinite)
OF_MATRICES = {case.name for case in functions.ALL if isinstance(case.function, _MATRICES)}
OF_IMAGES = {"total_variation_2d"}


def _groups(shape: torch.Size) -> list[int]:
    return [index % 3 for index in range(shape[-1])]


def _per_group(shape: torch.Size) -> Tensor:
    return torch.tensor([0.8, 0.0, 0.3])[: shape[-1]]


# Options with one number per group, row, channel or singular value follow the shape of the points.
SHAPED: dict[str, Callable[[torch.Size], mf.Function]] = {
    "grouped_l2": lambda shape: mf.GroupL2(0.8, _groups(shape)),
    "grouped_ball": lambda shape: mf.Ball(0.8, _groups(shape)),
    "grouped_weights": lambda shape: mf.GroupL2(_per_group(shape), _groups(shape)),
    "grouped_radii": lambda shape: mf.Ball(_per_group(shape), _groups(shape)),
    "row_weights": lambda shape: mf.GroupL2(torch.linspace(0.2, 1.1, shape[:-1].numel()).reshape(*shape[:-1], 1)),
    "charbonnier_channels": lambda shape: mf.Charbonnier(
        torch.linspace(0.2, 3.0, shape[1]).reshape(-1, *(1,) * (len(shape) - 2)), 0.3
    ),
    "ky_fan": lambda shape: mf.NuclearNorm(torch.tensor([0.6, 0.6, 0.0])[: min(shape[-2:])]),
}
# Probabilities that depend on the point are constants of every derivative.
SOLVERS = {case.id: case for case in solvers.ALL if "gradients" not in case.id}
DETERMINISTIC = [case.id for case in solvers.DETERMINISTIC]
ADJOINTS: dict[str, Adjoint] = {
    "unroll": Unroll(),
    "checkpoint": Checkpoint(),
    "implicit": Implicit(),
    "neumann": Implicit(method="neumann"),
    "jacobian-free": JacobianFree(),
}
SAMPLED = ("dense", "line", "image", "linear layer", "line layer", "image layer")
OPERATORS = (*SAMPLED, "transposed", "blocks", "mask")
# By these the forward pass itself is vectorised, which forbids random samples.
VECTORIZED = {"jacfwd", "vmap", "func.hessian", "jacrev of grad"}
# The longest is for points that are far from their prox, whose differences are rounded to 1e-11.
WIDTHS = (1e-4, 1e-5, 1e-6, 1e-7)
# Iterations after which a problem of condition 5/4 is solved to rounding.
CONVERGED = {"ProxGD": 30, "HeavyBall": 50, "FISTA": 100, "ADMM": 100}


@dataclass(frozen=True)
class GradientCase:
    """A solver, a rule for gradients, and a problem whose sizes follow from the seed."""

    function: str
    operator: str
    solver: str
    adjoint: str
    transform: str
    iterations: int = 3
    exponent: int = 0
    ridge: float = 1.0
    shared: bool = False
    seed: int = 0


class Objective:
    """A number that depends on a solution, as a function of one vector."""

    def __init__(self, case: GradientCase) -> None:
        self.case, sizes = case, random.Random(case.seed)
        self.generator = torch.Generator().manual_seed(case.seed)
        self.kind, self.is_layer = case.operator.split()[0], case.operator.endswith("layer")
        self.adjoint = ADJOINTS[case.adjoint]
        self.implicit = isinstance(self.adjoint, Implicit)
        weight, self.make = self._operator(sizes)
        weight = weight * 2.0**case.exponent / max(1, weight[0].numel()) ** 0.5
        whole = self.make(weight)
        y = self._draw(sizes.randint(1, 2), *whole.input_shape) * 2.0**case.exponent
        self.function = FUNCTIONS[case.function]
        if case.function in SHAPED:
            shaped = SHAPED[case.function](torch.Size((len(y), *whole.output_shape)))
            self.function = lambda p: shaped
        parts = [weight, 0.3 * self._draw(whole.outputs), y, 0.3 * self._draw(1)]
        self.shapes, self.point = [part.shape for part in parts], torch.cat([part.flatten() for part in parts])
        sized = [part.square().mean().sqrt() * self._draw(part.numel()) for part in parts]
        if self.is_layer:
            sized[-1].zero_()  # its function has no parameter
        self.along = torch.cat(sized)
        # Steps are constants of every derivative.
        sampled = case.operator in SAMPLED
        norms = (whole.input_norms_sq(), whole.output_norms_sq()) if sampled else (None, None)
        self.bounds = Bounds(whole.norm_sq(), *norms)
        self.ridge = case.ridge * float(self.bounds.total)
        self.solver = self._solver()
        self.layer = self._layer(weight, whole) if self.is_layer else None
        self.weights, self.size = torch.ones(()), 1.0
        with torch.no_grad():
            self.x = self.solved(self.point)
            self.step = 1 / float(
                self._layer_problem(y).smoothness() if self.layer else self.problem(self.point).smoothness()
            )
            self.moved = self._moved(self.point)
        largest = torch.maximum(self.x.abs().max(), self.moved.abs().max())
        self.weights, self.size = self._draw(*self.x.shape), float(largest) or 1.0

    def _draw(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def _operator(self, sizes: random.Random) -> tuple[Tensor, Callable[[Tensor], LinearOperator]]:
        """A weight and its operator."""
        n, m, k = sizes.randint(1, 4), sizes.randint(1, 4), sizes.randint(1, 3)
        stride, padding = sizes.randint(1, 2), sizes.randint(0, 1)
        self.geometry = {"stride": stride, "padding": padding}
        match self.kind:
            case "dense" | "linear":
                return self._draw(n, m), Dense
            case "transposed":
                return self._draw(n, m), lambda w: Transposed(Dense(w))
            case "blocks":
                return self._draw(n, 4), lambda w: BlockSensing(w, (2, 4))
            case "mask":
                return self._draw(1, 3, 3), Inpainting
            case "line":
                return self._draw(n, min(m, 2), k), lambda w: Conv1d(w, 4, stride, padding)
            case _:
                return self._draw(min(n, 2), min(m, 2), k, k), lambda w: Conv2d(w, (3, 4), stride, padding)

    def _solver(self) -> Solver:
        """The method with a fixed step, which is right or too long for the sampled solvers; they take few steps."""
        solver = SOLVERS[self.case.solver].of(CONVERGED[self.case.solver] if self.implicit else self.case.iterations)
        scale = float(self.bounds.total) + self.ridge
        options = {"step": (1.0 if self.implicit else 0.8) / scale, "momentum": 0.1, "rho": scale, "cg_iters": 40}
        if self.case.shared and solver.stochastic:
            options |= {"shared_sample": True}
        known = {field.name for field in dataclasses.fields(solver)}
        return dataclasses.replace(solver, **{name: value for name, value in options.items() if name in known})

    def _layer(self, weight: Tensor, whole: LinearOperator) -> SolverLinear | SolverConv1d | SolverConv2d:
        options = {
            "activation": self.function(self._parts(self.point)[-1]),
            "solver": self.solver,
            "adjoint": self.adjoint,
        }
        sizes = (weight.shape[1], weight.shape[0])
        kind = {2: SolverLinear, 3: SolverConv1d, 4: SolverConv2d}[weight.dim()]
        if weight.dim() > 2:
            sizes, options = (*sizes, tuple(weight.shape[2:])), options | self.geometry
        layer = kind(*sizes, ridge=self.ridge, dtype=torch.float64, **options)
        with torch.no_grad():
            layer.weight.copy_(weight)
        return layer.train(self.case.seed % 2 == 0)

    def _parts(self, vector: Tensor) -> list[Tensor]:
        parts = zip(vector.split([shape.numel() for shape in self.shapes]), self.shapes, strict=True)
        return [part.reshape(shape) for part, shape in parts]

    def _layer_problem(self, y: Tensor) -> Problem:
        return self.layer.problem(y)

    def problem(self, vector: Tensor) -> Problem:
        weight, bias, y, parameter = self._parts(vector)
        operator = self.make(weight).with_bounds(self.bounds)
        return Problem(operator, self.function(parameter), y, bias, self.ridge)

    def solved(self, vector: Tensor) -> Tensor:
        """The solution, with the adjoint's derivatives."""
        generator = torch.Generator().manual_seed(self.case.seed)
        if self.layer is not None:
            weight, bias, y, _ = self._parts(vector)
            self.layer.generator = generator
            return functional_call(self.layer, {"weight": weight, "bias": bias}, (y,))
        return solve(self.problem(vector), self.solver, adjoint=self.adjoint, generator=generator).x

    def _moved(self, vector: Tensor) -> Tensor:
        """One proximal gradient step from the solution at the point."""
        problem = self.problem(vector)
        return problem.prox(self.x + self.step * problem.descent(self.x, problem.linear()), self.step)

    def loss(self, x: Tensor) -> Tensor:
        return (self.weights * torch.sin(x / self.size + 0.3)).sum()

    def __call__(self, vector: Tensor) -> Tensor:
        return self.loss(self.solved(vector))

    def exact(self, vector: Tensor) -> Tensor:
        """The function whose derivatives the adjoint has."""
        if isinstance(self.adjoint, JacobianFree):
            return self.loss(self.x + self._moved(vector) - self.moved)
        if self.implicit:  # the minimiser, from one nearby
            return self.loss(solve(self.problem(vector), ProxGD(18), x0=self.x).x)
        return self(vector)


def _transforms(function: str, solver: str, adjoint: str) -> list[str]:
    """The transforms that apply; gradients are the most frequent one."""
    if function in OF_MATRICES:
        return ["backward"]  # their proxes have no other derivative
    # Checkpoint draws the samples again in the backward pass.
    without = (
        set() if solver in DETERMINISTIC else VECTORIZED | ({"is_grads_batched"} if adjoint == "checkpoint" else set())
    )
    known = [name for name in (*FIRST, *SECOND) if name not in without]
    return ["backward"] * 2 * len(known) + known


@st.composite
def cases(draw: st.DrawFn) -> GradientCase:
    adjoint = draw(st.sampled_from(sorted(ADJOINTS)))
    implicit = isinstance(ADJOINTS[adjoint], Implicit)
    operator = draw(st.sampled_from(OPERATORS))
    # Without a tolerance only these converge to rounding in few iterations.
    quick = ["ProxGD", "HeavyBall"] if operator.endswith("layer") else DETERMINISTIC
    known = quick if implicit else sorted(SOLVERS) if operator in SAMPLED else DETERMINISTIC
    if operator.endswith("layer"):
        # A layer's probabilities follow its weight, and are constants of every derivative, too.
        known = [name for name in known if "importance" not in name]
    solver = draw(st.sampled_from(known))
    function = draw(st.sampled_from(_functions(operator, solver)))
    return GradientCase(
        function=function,
        operator=operator,
        solver=solver,
        adjoint=adjoint,
        transform=draw(st.sampled_from(_transforms(function, solver, adjoint))),
        iterations=draw(st.integers(1, 6)),
        exponent=draw(st.sampled_from([0, 0, 0, -2, 3, -10, 10])),
        # Implicit needs convergence; the ridge bounds the condition number.
        ridge=4.0 if implicit else draw(st.sampled_from([0.0, 1e-3, 0.5, 1.0])),
        shared=draw(st.booleans()),
        seed=draw(st.integers(0, 2**31)),
    )


def _functions(operator: str, solver: str) -> list[str]:
    """The functions of one entry, of rows where the solver takes them, and of matrices where there are square ones."""
    known = {name for name in FUNCTIONS if operator == "mask" or name not in OF_MATRICES}
    if operator not in ("mask", "image", "image layer"):
        known -= OF_IMAGES
    if SOLVERS[solver].solver.needs_separable:
        known -= {"ball of a parameter", *(case.name for case in functions.ALL if not case.function.separable)}
    if operator.endswith("layer"):
        known -= {name for name in known if name.endswith("of a parameter")}
    return sorted(known)


def check(case: GradientCase) -> None:
    """The derivative along a random direction equals a central difference, away from kinks."""
    try:
        f = Objective(case)
    except OptionError as error:
        # A problem without a function and a ridge may have no minimiser, and says so.
        assume("the problem is unbounded" not in str(error))
        raise
    differences = (_slopes if case.transform in FIRST else _curvatures)(f)
    try:
        found = float(torch.as_tensor((FIRST | SECOND)[case.transform](f, f.point, f.along)).detach())
    except RuntimeError as error:
        # torch has no mixed second derivative of a transposed convolution with output_padding, and says so.
        assume("output_padding is not supported" not in str(error))
        raise
    seen = []
    for width in WIDTHS:
        above, below = differences(width)
        seen.append((above + below) / 2)
        if abs(found - seen[-1]) <= 2e-6 * (abs(above) + abs(below)) + 2e-7:
            return
    # Rounding: a difference over a tenth of the width has ten times the error, by which those before are known.
    if abs(found - seen[1]) <= max(0.2 * abs(seen[2] - seen[1]), 0.02 * abs(seen[3] - seen[2])):
        return
    # One-sided slopes differ at a kink, where there is no derivative to compare with.
    assume(abs(above - below) <= 1e-2 * (abs(above) + abs(below)) + 1e-5)
    raise AssertionError(f"derivative {found!r}, differences {seen!r}")


def _slopes(f: Objective) -> Callable[[float], tuple[float, float]]:
    @torch.no_grad()
    def at(width: float) -> float:
        return float(f.exact(f.point + width * f.along))

    here = at(0.0)
    return lambda width: ((at(width) - here) / width, (here - at(-width)) / width)


def _curvatures(f: Objective) -> Callable[[float], tuple[float, float]]:
    """Differences of gradients, which other cases check."""
    of = f.exact if isinstance(f.adjoint, JacobianFree) else f

    def at(width: float) -> float:
        leaf = (f.point + width * f.along).requires_grad_()
        return float(torch.autograd.grad(of(leaf), leaf, materialize_grads=True)[0] @ f.along)

    here = at(0.0)
    return lambda width: ((at(width) - here) / width, (here - at(-width)) / width)

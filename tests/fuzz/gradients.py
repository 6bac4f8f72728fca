"""Campaign: gradients through a solve equal finite differences in float64, for every solver, adjoint and function."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from hypothesis import assume
from hypothesis import strategies as st
from torch import Tensor

from minimand.adjoints import Adjoint, Checkpoint, Implicit, Unroll
from minimand.operators import Conv1d, Conv2d, Dense, LinearOperator
from minimand.solvers import Problem, Solver, solve
from tests.cases import functions, solvers

# A point per row: functions of matrices and of fixed sizes have laws of their own.
FUNCTIONS = {case.name: case.function for case in functions.ALL if len(case.shape) == 1}
# Probabilities of importance sampling are constants for autograd, but change with the data in a difference.
BRIEF = {case.id: case for case in solvers.ALL if "mportance" not in case.id}
FIXED_POINT = {case.id: case for case in solvers.DETERMINISTIC}
ADJOINTS: dict[str, Adjoint] = {"unroll": Unroll(), "checkpoint": Checkpoint(), "implicit": Implicit()}
CONVERGED = 250  # iterations that solve a problem of condition ten to rounding


@dataclass(frozen=True)
class GradientCase:
    """A random problem, a solver, and a rule for gradients."""

    function: str
    solver: str
    adjoint: str
    iterations: int
    shape: tuple[int, ...]
    size: tuple[int, ...]
    stride: int
    padding: int
    exponent: int
    ridge: float
    bias: bool
    rows: int
    seed: int

    def parts(self) -> tuple[list[Tensor], Callable[..., Tensor]]:
        """The tensors that the solution depends on, and the weighted sum of the solution as a function of them."""
        generator = torch.Generator().manual_seed(self.seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        weight = draw(*self.shape) * 2.0**self.exponent / max(1, draw(*self.shape)[0].numel()) ** 0.5
        y = draw(self.rows, self.shape[1], *self.size)
        tensors = [weight, y, *([0.3 * draw(self.shape[0])] if self.bias else [])]
        with torch.no_grad():
            operator = self._operator(weight)
            sum_weight = draw(*operator.apply(y).shape)
        solver = self._solver(float(operator.norm_sq()))

        def objective(weight: Tensor, y: Tensor, bias: Tensor | None = None) -> Tensor:
            problem = Problem(
                self._operator(weight), FUNCTIONS[self.function], y, bias, self.ridge * 4.0**self.exponent
            )
            sampled = torch.Generator().manual_seed(self.seed)
            return (solve(problem, solver, adjoint=ADJOINTS[self.adjoint], generator=sampled).x * sum_weight).sum()

        return tensors, objective

    def _operator(self, weight: Tensor) -> LinearOperator:
        if not self.size:
            return Dense(weight)
        return (Conv1d if len(self.size) == 1 else Conv2d)(weight, self.size, self.stride, self.padding)

    def _solver(self, norm_sq: float) -> Solver:
        """The method at steps that do not follow the weight, since autograd treats automatic steps as constants."""
        solver = BRIEF[self.solver].of(CONVERGED if self.adjoint == "implicit" else self.iterations)
        scale = norm_sq + self.ridge * 4.0**self.exponent
        options: dict[str, float] = {"step": 0.8 / scale, "momentum": 0.5, "rho": scale / 4, "cg_iters": 40}
        known = {field.name for field in dataclasses.fields(solver)}
        return dataclasses.replace(solver, **{name: value for name, value in options.items() if name in known})


@st.composite
def cases(draw: st.DrawFn) -> GradientCase:
    adjoint = draw(st.sampled_from(["unroll", "unroll", "checkpoint", "implicit"]))
    dims = draw(st.sampled_from([0, 0, 1, 2]))
    kernel = tuple(draw(st.integers(1, 3)) for _ in range(dims))
    return GradientCase(
        function=draw(st.sampled_from(sorted(FUNCTIONS))),
        solver=draw(st.sampled_from(sorted(FIXED_POINT if adjoint == "implicit" else BRIEF))),
        adjoint=adjoint,
        iterations=draw(st.integers(1, 7)),
        shape=(draw(st.integers(1, 5)), draw(st.integers(1, 5)), *kernel),
        size=tuple(draw(st.integers(3, 6)) for _ in range(dims)),
        stride=draw(st.integers(1, 2)),
        padding=draw(st.integers(0, 1)),
        exponent=draw(st.sampled_from([0, 0, 0, -2, 3, -10, 10])),
        # Implicit needs convergence; the ridge bounds the condition number.
        ridge=0.5 if adjoint == "implicit" else draw(st.sampled_from([0.0, 1e-3, 0.5])),
        bias=draw(st.booleans()),
        rows=draw(st.integers(1, 3)),
        seed=draw(st.integers(0, 2**31)),
    )


def check(case: GradientCase) -> None:
    """The directional derivative along a random direction equals a central difference, away from kinks."""
    tensors, objective = case.parts()
    generator = torch.Generator().manual_seed(case.seed + 1)
    directions = [
        torch.randn(t.shape, generator=generator, dtype=t.dtype) * t.square().mean().sqrt().clamp_min(1e-3)
        for t in tensors
    ]
    leaves = [t.clone().requires_grad_() for t in tensors]
    value = objective(*leaves)
    gradients = torch.autograd.grad(value, leaves, materialize_grads=True)
    assert all(bool(torch.isfinite(gradient).all()) for gradient in gradients), "a gradient is not finite"
    for index, (gradient, direction) in enumerate(zip(gradients, directions, strict=True)):
        _compare(tensors, objective, index, direction, float((gradient * direction).sum()))


def _compare(
    tensors: list[Tensor], objective: Callable[..., Tensor], index: int, direction: Tensor, found: float
) -> None:
    def at(width: float) -> float:
        moved = [t + width * direction if i == index else t for i, t in enumerate(tensors)]
        with torch.no_grad():
            return float(objective(*moved))

    here = at(0.0)
    slopes = []
    for width in (1e-5, 3e-6):
        above, below = (at(width) - here) / width, (here - at(-width)) / width
        slopes.append((above + below) / 2)
        # One-sided slopes differ at a kink, where there is no derivative to compare with.
        assume(abs(above - below) <= 1e-3 * (abs(above) + abs(below)) + 1e-6)
    rounding = 1e-9 * (abs(here) + 1) / 3e-6 * 1e-3
    tolerance = 1e-5 * abs(found) + 10 * abs(slopes[0] - slopes[1]) + rounding + 1e-7
    assert abs(found - slopes[1]) <= tolerance, f"tensor {index}: gradient {found!r}, differences {slopes!r}"

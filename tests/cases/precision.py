r"""Solver layers over types, scales and degenerate data, each compared with the same layer in float64.

The oracle of a layer is the float64 layer with the same (rounded) weights, inputs and random samples. An output or
gradient :math:`v` of the layer is right if

.. math:: \|v - v_{64}\| \le 20\,\bigl(s + (u\kappa + u_v)\,\|v_{64}\| + u\kappa f\bigr),

where :math:`u` is the rounding unit of the computation (that of bfloat16 under its autocast, else that of float32 or
float64), :math:`u_v` the one of v's type, :math:`s` the largest change of :math:`v_{64}` in three runs in which the
operands and the preactivations are perturbed by a relative :math:`u`, and :math:`f` the size of the products that are
summed to a gradient, which may cancel. Each product of an inner linear solve has a relative error of u, so
:math:`\kappa` is the condition number of that system, :math:`(L+\lambda)/\lambda` for ``Implicit`` (squared where it
solves normal equations) and :math:`(L+\lambda+\rho)/(\lambda+\rho)` for ADMM; elsewhere :math:`\kappa = 1`. Where
:math:`u\kappa > 1` the type cannot represent the answer, and only finiteness is required. In float64 gradients are
compared with central differences.
"""

import copy
import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from minimand.errors import NonFiniteError, ShapeError
from minimand.functions import Function, from_activation
from minimand.nn import SolverConv1d, SolverConv2d, SolverLinear
from minimand.nn.layers import SolverLayer
from minimand.solvers import RCD, Problem, Solver, solve
from minimand.solvers.adjoints import Adjoint, Checkpoint, Implicit, JacobianFree, Unroll

from . import functions, solvers

__all__ = ["PrecisionCase", "applies", "build", "check_layer", "fits", "pairwise", "random_case"]

LAYERS: dict[str, tuple[Callable[..., SolverLayer], tuple[int, ...]]] = {
    "linear": (lambda **options: SolverLinear(7, 5, **options), (5, 7)),
    "tall": (lambda **options: SolverLinear(3, 8, **options), (8, 3)),
    "conv1d": (lambda **options: SolverConv1d(4, 2, 3, stride=2, padding=1, **options), (3, 4, 9)),
    "conv2d": (lambda **options: SolverConv2d(2, 4, 3, padding=1, **options), (3, 2, 4, 4)),
}
#: The shapes of their outputs.
_OUTPUTS = {name: tuple(make()(torch.zeros(shape)).shape) for name, (make, shape) in LAYERS.items()}
SOLVERS: dict[str, Solver] = {case.id: case.solver for case in solvers.ALL}
ADJOINTS: dict[str, Adjoint] = {
    "unroll": Unroll(),
    "checkpoint": Checkpoint(),
    "implicit": Implicit(),
    "neumann": Implicit(method="neumann", iters=30),
    "free": JacobianFree(),
}
#: Every function and activation of the library, once.
FUNCTIONS: dict[str, Function] = {
    repr(function): function
    for function in (
        *(case.function for case in functions.ALL),
        *(from_activation(a) for a, _ in functions.ACTIVATIONS),
    )
}
#: The type of the layer, or that of autocast around a float32 layer.
PRECISIONS = ("float64", "float32", "bfloat16", "float16", "autocast bfloat16", "autocast float16")
SCALES = (1e-6, 1e-4, 1e-2, 1.0, 1e2, 1e4, 1e6)
DATA = ("usual", "zero input", "zero weight", "no bias", "no ridge", "one row", "no rows", "single")
ENTRIES = ("layer", "solve")

#: The factor 20 of the law: rounding errors of a few iterations.
ROOM = 20.0
RIDGE = 1e-3
#: The relative change of central differences in float64.
DIFFERENCE = 1e-7


@dataclasses.dataclass(frozen=True)
class PrecisionCase:
    """A layer, its types and its data. ``scale`` multiplies torch's default weights."""

    layer: str = "linear"
    solver: str = "ProxGD"
    adjoint: str = "unroll"
    function: str = "NonNegative()"
    precision: str = "float32"
    scale: float = 1.0
    data: str = "usual"
    entry: str = "layer"
    seed: int = 0

    def __str__(self) -> str:
        return "-".join(map(str, dataclasses.astuple(self))).replace(" ", "_")

    @property
    def autocast(self) -> torch.dtype | None:
        """The type of autocast; None outside of it."""
        kind, _, name = self.precision.partition(" ")
        return getattr(torch, name) if kind == "autocast" else None

    @property
    def dtype(self) -> torch.dtype:
        """The type of the layer and of its input."""
        return torch.float32 if self.autocast else getattr(torch, self.precision)

    @property
    def unit(self) -> float:
        """The rounding unit of the computation."""
        mixed = self.autocast == torch.bfloat16 and self.entry == "layer"
        return torch.finfo(torch.bfloat16 if mixed else torch.promote_types(self.dtype, torch.float32)).eps


def applies(case: PrecisionCase) -> bool:
    """Whether the parts of a case fit each other, and its weights fit its type."""
    solver, function = SOLVERS[case.solver], FUNCTIONS[case.function]
    if "Implicit" in repr(ADJOINTS[case.adjoint]) and solver.stochastic:
        return False
    if solver.needs_separable and not function.separable:
        return False
    if not fits(function, _output_shape(case)):
        return False
    if case.function == "Zero()" and case.data == "no ridge" and case.entry == "solve":
        return False  # a bias outside of the range of A has no minimum, which solve refuses
    if case.data == "zero weight" and "gradients" in case.solver:
        return False  # probabilities are proportional to the rounding of zero
    if case.solver == "ADMM" and "tanhshrink" in case.function:
        return False  # at ρ = 1 its prox is torch's own tanhshrink, which loses digits near zero
    # A step of 1/L without a ridge takes preactivations to 1e12, where float32 has no digits below 1e5 left: entries
    # of a simplex are then equal by rounding.
    if case.data == "no ridge" and case.scale < 1e-2 and not function.separable:
        return False
    return not (case.dtype == torch.float16 and case.scale > 1e4)


def fits(function: Function, shape: tuple[int, ...]) -> bool:
    """Whether a function takes points of this shape: matrices, or one scale per channel, or one group per entry."""
    try:
        function.check_shape(shape)
    except ShapeError:
        return False
    return True


def _output_shape(case: PrecisionCase) -> tuple[int, ...]:
    rows, *outputs = _OUTPUTS[case.layer]
    lead = {"single": (), "no rows": (0,), "one row": (1,)}.get(case.data, (rows,))
    return (*lead, *outputs)


def build(case: PrecisionCase) -> tuple[SolverLayer, Tensor]:
    """The layer and its input, rounded to the type of the products."""
    torch.manual_seed(case.seed)
    make, shape = LAYERS[case.layer]
    layer = make(
        activation=copy.deepcopy(FUNCTIONS[case.function]),  # one that learns is changed below
        solver=SOLVERS[case.solver],
        adjoint=ADJOINTS[case.adjoint],
        bias=case.data != "no bias",
        ridge=0.0 if case.data == "no ridge" else RIDGE,
        shared_sample=case.seed % 2 == 1,
    )
    y = torch.randn(shape)
    y = {"zero input": 0 * y, "one row": y[:1], "no rows": y[:0], "single": y[0]}.get(case.data, y)
    rounded = torch.bfloat16 if case.autocast == torch.bfloat16 else case.dtype
    with torch.no_grad():
        layer.weight.mul_(0.0 if case.data == "zero weight" else case.scale)
        for parameter in layer.parameters():
            parameter.copy_(parameter.to(rounded))
    return layer.requires_grad_().to(case.dtype), y.to(rounded).to(case.dtype)


def check_layer(case: PrecisionCase) -> str:
    """Assert the law, and return "right", "finite" (the type cannot represent the answer), or "out of range"."""
    layer, y = build(case)
    if case.dtype == torch.float64:
        return _check_differences(case, layer, y)
    expected = _reference(case, layer, y)
    near = [_reference(case, layer, y, expected[0], draw) for draw in range(3)]
    limit = torch.finfo(case.autocast or case.dtype).max
    if any(bool((part.abs() > limit).any()) for run in (expected, *near) for part in run[:-1]):
        return _check_range(case, layer, y)
    found = _run(case, layer, y)
    condition = _condition(layer, y)
    determined = case.unit * condition <= 1
    if not determined and limit < 1e5:
        return "finite"
    names = ("output", "input", "weight", "bias")
    assert [name for name, part in zip(names, found, strict=False) if not part.isfinite().all()] == [], case
    if not determined:
        return "finite"
    *expected, pushed = expected
    size, weight = expected[0].numel(), _norm(layer.weight)
    summed = (0.0, weight, _norm(y) + weight * _norm(expected[0]), math.sqrt(size))
    for k, (name, part, exact) in enumerate(zip(names, found, expected, strict=False)):
        info = torch.finfo(part.dtype)
        spread = max(_norm(run[k] - exact) for run in near)
        room = spread + info.eps * _norm(exact) + case.unit * condition * (_norm(exact) + _norm(pushed) * summed[k])
        room += info.smallest_normal * info.eps * math.sqrt(max(1, exact.numel()))
        error = _norm(part.double() - exact)
        assert error <= ROOM * room, f"{case}: {name} is {error:.2e} from {_norm(exact):.2e}, allowed {ROOM * room:.2e}"
    return "right"


def _check_range(case: PrecisionCase, layer: SolverLayer, y: Tensor) -> str:
    """A layer's output overflows like torch's; ``solve`` says so."""
    refusal = ""
    try:
        _run(case, layer, y)
    except NonFiniteError as error:
        refusal = str(error)
    assert not refusal or (case.entry == "solve" and refusal.startswith("the solution in torch.float16")), case
    return "out of range"


def _check_differences(case: PrecisionCase, layer: SolverLayer, y: Tensor) -> str:
    """Finite, and for exact adjoints the gradient in a random direction is a central difference, at a fixed step and
    fixed probabilities, which count as constants."""
    assert all(part.isfinite().all() for part in _run(case, layer, y)), case
    solver, exact = layer.options.solver, case.adjoint in ("unroll", "checkpoint")
    step = solver.first_step(solver.prepare(layer.problem(y)))
    # RCD with τ = 1 has one step per output, and importance sampling has probabilities that follow the weight.
    varies = (isinstance(solver, RCD) and torch.as_tensor(step).numel() > 1) or "mportance" in case.solver
    if not exact or varies or _condition(layer, y) > 1e4 or case.data in ("no ridge", "no rows"):
        return "finite"
    if step is not None:
        layer.solver = dataclasses.replace(solver, step=float(step))
    found, *gradients = _run(case, layer, y)
    operands = [y, *(parameter.detach().clone() for parameter in layer.parameters())]
    generator = torch.Generator().manual_seed(case.seed)
    directions = [each * torch.randn(each.shape, generator=generator, dtype=each.dtype) for each in operands]
    ends = []
    for side in (DIFFERENCE, -DIFFERENCE):
        moved = [each + side * direction for each, direction in zip(operands, directions, strict=True)]
        with torch.no_grad():
            for parameter, value in zip(layer.parameters(), moved[1:], strict=True):
                parameter.copy_(value)
        x = _run(case, layer, moved[0])[0]
        ends.append((x * _cotangent(x, case.seed)).sum())
    slope = float(ends[0] - ends[1]) / (2 * DIFFERENCE)
    products = [float((g * d).sum()) for g, d in zip(gradients, directions, strict=True)]
    noise = case.unit / DIFFERENCE * (1 + 100 * _norm(found)) * math.sqrt(found.numel())
    room = 1e-5 * (abs(slope) + sum(map(abs, products))) + noise
    assert abs(slope - sum(products)) <= room, f"{case}: slope {slope:.6e}, gradient {sum(products):.6e}"
    return "right"


def _run(case: PrecisionCase, layer: SolverLayer, y: Tensor, skip: Tensor | None = None) -> list[Tensor]:
    """The output and its gradients in y, the parameters and the skip; backward is outside of autocast."""
    leaf = y.detach().clone().requires_grad_()
    context: Any = (
        torch.autocast("cpu", dtype=case.autocast) if case.autocast and y.dtype != torch.float64 else nullcontext()
    )
    torch.manual_seed(case.seed)
    with context:
        if case.entry == "layer":
            x = layer(leaf, skip)
        else:
            operator, bias = layer.operator(leaf), layer.bias
            if skip is not None:
                bias = skip if bias is None else skip + operator.per_feature(bias)
            problem = Problem(operator, layer.function, leaf, bias, layer.ridge)
            x = solve(problem, layer.options.resolved(True)[0], adjoint=layer.adjoint).x
    sources = [leaf, *layer.parameters(), *([] if skip is None else [skip])]
    gradients = torch.autograd.grad(x, sources, _cotangent(x, case.seed), allow_unused=True)
    unused = (torch.zeros_like(s) if g is None else g for s, g in zip(sources, gradients, strict=True))
    return [x.detach(), *unused]


def _cotangent(x: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(x.shape, generator=generator).bfloat16().to(x.dtype)


def _reference(
    case: PrecisionCase, layer: SolverLayer, y: Tensor, x: Tensor | None = None, draw: int = 0
) -> list[Tensor]:
    """The run in float64, with the gradient in a full bias at the end; given its output x, with perturbed operands."""
    layer, y = copy.deepcopy(layer).double(), y.double()
    layer.ridge = layer.ridge  # a fresh bound, without the reference of the other type
    problem = layer.problem(y)
    skip = torch.zeros(problem.shape, dtype=torch.float64)
    if x is not None and x.numel():
        generator = torch.Generator().manual_seed(100 + draw)

        def noise(like: Tensor) -> Tensor:
            return case.unit * torch.randn(like.shape, generator=generator, dtype=torch.float64)

        # A preactivation η(Ay + b) + x is rounded, too: in units of the bias to Ay + b + (L + λ)x.
        size = float(problem.linear().detach().abs().max() + problem.smoothness() * x.abs().max())
        y, skip = y * (1 + noise(y)), size * noise(skip)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.mul_(1 + noise(parameter))
    return _run(case, layer, y, skip.requires_grad_())


def _condition(layer: SolverLayer, y: Tensor) -> float:
    """The condition number of the layer's inner linear systems."""
    bound = float(layer.operator(y).with_weight(layer.weight.double()).norm_sq())
    shift = layer.ridge + getattr(layer.solver, "rho", 0.0)
    inner = (bound + shift) / shift if hasattr(layer.solver, "rho") else 1.0
    if not isinstance(layer.adjoint, Implicit) or layer.adjoint.method != "cg" or bound == 0:
        return inner
    if layer.ridge == 0:
        return math.inf
    condition = (bound + layer.ridge) / layer.ridge
    return max(inner, condition if layer.function.separable else condition**2)


def _norm(tensor: Tensor) -> float:
    return float(tensor.detach().double().norm())


# Designs

_FACTORS: dict[str, tuple[Any, ...]] = {
    "layer": tuple(LAYERS),
    "solver": tuple(SOLVERS),
    "adjoint": tuple(ADJOINTS),
    "function": tuple(FUNCTIONS),
    "precision": PRECISIONS,
    "scale": SCALES,
    "data": DATA,
    "entry": ENTRIES,
}


def random_case(rng: random.Random, **fixed: Any) -> PrecisionCase:
    """A random case that applies, with some factors fixed."""
    while True:
        values = {name: rng.choice(levels) for name, levels in _FACTORS.items()} | fixed
        case = PrecisionCase(**values, seed=rng.randrange(1000))
        if applies(case):
            return case


def pairwise(seed: int = 0, candidates: int = 8) -> list[PrecisionCase]:
    """Cases that contain every pair of levels of two factors which some case contains (greedy, from a fixed seed)."""
    rng = random.Random(seed)
    wanted = {
        ((a, x), (b, y))
        for (a, xs), (b, ys) in itertools.combinations(_FACTORS.items(), 2)
        for x, y in itertools.product(xs, ys)
    }
    cases: list[PrecisionCase] = []
    for pair in _shuffled(sorted(wanted, key=str), rng):
        if pair not in wanted:
            continue
        wanted.discard(pair)
        if not _possible(dict(pair)):
            continue
        case = max((random_case(rng, **dict(pair)) for _ in range(candidates)), key=lambda c: len(wanted & _pairs(c)))
        wanted -= _pairs(case)
        cases.append(case)
    return cases


def _pairs(case: PrecisionCase) -> set[Any]:
    return set(itertools.combinations([(name, getattr(case, name)) for name in _FACTORS], 2))


def _possible(fixed: dict[str, Any]) -> bool:
    """Whether a pair of levels occurs in a case at all."""
    rng = random.Random(0)
    levels = ({name: rng.choice(levels) for name, levels in _FACTORS.items()} | fixed for _ in range(200))
    return any(applies(PrecisionCase(**values)) for values in levels)


def _shuffled(items: list[Any], rng: random.Random) -> Iterator[Any]:
    return iter(rng.sample(items, len(items)))

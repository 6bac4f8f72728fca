"""Campaign: no bound on a squared norm lies below the largest singular value of the dense matrix."""

import math
import sys
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from minimand.norms import LipschitzTracker, certified_norm_sq, lipschitz
from minimand.norms.convolution import unfolded_norm_sq
from minimand.norms.spectral import strips_norm_sq
from minimand.operators import Conv1d, Conv2d, Dense, LinearOperator
from tests.cases.operators import dense_matrix

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
ENTRIES = ("normal", "sparse", "rank one", "constant", "signs", "spike", "wide range", "zero", "orthogonal", "repeated")
ENTRIES += ("rows far apart", "columns far apart")
LARGEST = 400  # rows or columns of a dense matrix, so that a case takes milliseconds


@dataclass(frozen=True)
class NormCase:
    """A weight by its shape, the kind of its entries and a seed, and the geometry of a convolution."""

    shape: tuple[int, ...]
    entries: str
    seed: int
    exponent: int
    dtype: str
    size: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    padding: tuple[int, ...] | str = ()
    dilation: tuple[int, ...] = ()
    groups: int = 1
    move: float = 0.1

    def weight(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        values = _fill(self.entries, self.shape, generator)
        values = values * 2.0**self.exponent
        limit = torch.finfo(DTYPES[self.dtype]).max
        return values.clamp(-limit, limit).to(DTYPES[self.dtype])

    def operator(self, weight: Tensor, *, sized: bool = True) -> LinearOperator:
        if not self.size:
            return Dense(weight)
        kind = Conv1d if len(self.size) == 1 else Conv2d
        size = self.size if sized else None
        return kind(weight, size, self.stride, self.padding, self.dilation, self.groups)


def _fill(entries: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    normal = torch.randn(shape, generator=generator, dtype=torch.float64)
    flat = normal.reshape(shape[0], -1)
    match entries:
        case "sparse":
            return normal * (torch.rand(shape, generator=generator) < 0.2)
        case "rank one":
            return torch.outer(flat[:, 0], flat[0]).reshape(shape)
        case "constant":
            return torch.ones(shape, dtype=torch.float64)
        case "signs":
            return normal.sign()
        case "spike":
            spike = torch.zeros_like(flat)
            spike[-1, -1] = 1.0
            return spike.reshape(shape)
        case "wide range":
            return normal * 10.0 ** (12 * torch.rand(shape, generator=generator, dtype=torch.float64) - 6)
        case "rows far apart" | "columns far apart":
            dim = 0 if entries.startswith("rows") else 1
            powers = torch.randint(-400, 400, (shape[dim], *(1,) * (len(shape) - dim - 1)), generator=generator)
            return normal * 2.0 ** powers.double()
        case "zero":
            return torch.zeros(shape, dtype=torch.float64)
        case "orthogonal":
            return torch.linalg.qr(flat if flat.shape[0] >= flat.shape[1] else flat.T)[0].reshape(shape)
        case "repeated":
            return flat[:1].expand_as(flat).reshape(shape)
        case _:
            return normal


@st.composite
def cases(draw: st.DrawFn) -> NormCase:
    dims = draw(st.sampled_from([0, 0, 1, 2, 2]))
    common = {
        "entries": draw(st.sampled_from(ENTRIES)),
        "seed": draw(st.integers(0, 2**31)),
        "dtype": draw(st.sampled_from(["float32", "float32", "float64", "bfloat16", "float16"])),
        "exponent": draw(st.sampled_from([0, 0, 0, -3, 5, -20, 20, -60, 60, -300, 300, -500, 500, -1000, 1000])),
        "move": draw(st.sampled_from([0.0, 1e-4, 0.01, 0.1, 1.0, 30.0])),
    }
    if dims == 0:
        return NormCase((draw(st.integers(1, 40)), draw(st.integers(1, 40))), **common)
    kernel = tuple(draw(st.integers(1, 5)) for _ in range(dims))
    dilation = tuple(draw(st.integers(1, 3)) for _ in range(dims))
    groups = draw(st.sampled_from([1, 1, 1, 2, 3]))
    outputs, inputs = groups * draw(st.integers(1, 3)), draw(st.integers(1, 3))
    stride = tuple(draw(st.integers(1, 4)) for _ in range(dims))
    padding: tuple[int, ...] | str = tuple(draw(st.integers(0, 4)) for _ in range(dims))
    if draw(st.integers(0, 5)) == 0:
        padding, stride = "same", (1,) * dims
    span = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    padded = [0 if isinstance(padding, str) else 2 * p for p in (padding if padding != "same" else (0,) * dims)]
    most = max(1, math.isqrt(LARGEST // (inputs * groups)) if dims == 2 else LARGEST // (inputs * groups) // 4)
    least = [max(1, s - p) for s, p in zip(span, padded, strict=True)]
    size = tuple(draw(st.integers(low, max(low, min(12, most)))) for low in least)
    return NormCase(
        (outputs, inputs, *kernel),
        size=size,
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
        **common,
    )


def truth(operator: LinearOperator) -> float:
    """The squared norm by singular values in float64, of the matrix scaled to entries of order one."""
    matrix = dense_matrix(operator)
    largest = float(matrix.abs().max()) if matrix.numel() else 0.0
    if largest == 0:
        return 0.0
    exponent = math.frexp(largest)[1]
    return _square(float(torch.linalg.svdvals(_lowered(matrix, exponent))[0]), exponent)


def _lowered(matrix: Tensor, exponent: int) -> Tensor:
    """The matrix divided by 2^exponent, in two steps, because the power may be infinite."""
    return matrix * 2.0 ** -(exponent // 2) * 2.0 ** -(exponent - exponent // 2)


def _square(root: float, exponent: int) -> float:
    """The square of 2^exponent · root: the largest number above the range, the smallest one below it."""
    try:
        value = math.ldexp(root * root, 2 * exponent)
    except OverflowError:
        return sys.float_info.max
    return value or (5e-324 if root > 0 else 0.0)


def check(case: NormCase) -> None:
    """Every bound of the case, of the weight and of a moved weight, is at least the truth."""
    weight = case.weight()
    operator = case.operator(weight)
    least = truth(operator) * (1 - 1e-12)  # the rounding of the oracle
    size = case.size or None
    found = {"norm_sq": operator.norm_sq(), "auto": lipschitz(operator, size), "tracker": None}
    found["any size"] = lipschitz(case.operator(weight, sized=False)) if case.size else certified_norm_sq(weight)
    if case.size:
        found["grid"] = lipschitz(operator, size, method="grid")
    found["exact"] = lipschitz(operator, size, method="exact")
    tracker = LipschitzTracker(case.operator(weight, sized=False), inputs=True, outputs=True)
    tracker.train(case.seed % 2 == 0)
    bounds = tracker.bounds()
    found["tracker"] = bounds.total
    # What a first call takes where these are large.
    geometry = tracker._geometry
    found["quick"] = strips_norm_sq(weight) if geometry is None else unfolded_norm_sq(weight, geometry)
    for name, bound in found.items():
        assert float(bound) >= least, f"{name}: {float(bound)!r} < {least!r}"
    _check_parts(operator, bounds.inputs, bounds.outputs)
    moved = (weight.double() + case.move * case.weight().double().flip(0)).to(weight.dtype)
    if torch.isfinite(moved).all():
        with torch.no_grad():
            weight.copy_(moved)
        bound, least = float(tracker.bound()), truth(case.operator(weight)) * (1 - 1e-12)
        assert bound >= least, f"tracker after a move: {bound!r} < {least!r}"


def _check_parts(operator: LinearOperator, inputs: Tensor, outputs: Tensor) -> None:
    matrix = dense_matrix(operator)
    blocks = matrix.reshape(outputs.numel(), -1, inputs.numel(), matrix.shape[1] // inputs.numel())
    parts = {"input": (inputs, blocks.permute(2, 0, 1, 3).flatten(1, 2)), "output": (outputs, blocks.flatten(2))}
    for name, (bounds, matrices) in parts.items():
        # Each part has a scale of its own: singular values of tiny matrices are inaccurate.
        largest = [math.frexp(entry)[1] for entry in matrices.abs().amax((1, 2)).tolist()]
        lowered = torch.stack([_lowered(each, exponent) for each, exponent in zip(matrices, largest, strict=True)])
        truths = map(_square, torch.linalg.matrix_norm(lowered, 2).tolist(), largest)
        for i, (bound, truth) in enumerate(zip(bounds.tolist(), truths, strict=True)):
            assert bound >= truth * (1 - 1e-12), f"{name} {i}: {bound!r} < {truth!r}"

"""The prox minimises ``step * g(z) + ½‖z − x‖²``, is firmly non-expansive, and has the right derivatives."""

import functools

import cvxpy as cp
import numpy as np
import pyproximal
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from torch import Tensor

from minimand import functions as mf
from minimand.errors import CapabilityError, OptionError, ShapeError

from .cases.functions import ALL, SEPARABLE, SMOOTH, FunctionCase, cases, draw

#: Tracing is slow, and these trace the code of another case.
SAME_CODE = (
    *("log_box_wide", "softplus_sharp", "elu_half", "celu", "logsigmoid", "sigmoid"),
    *("half_line", "support_half_line"),
)
STEPS = (0.03, 0.5, 1.0, 7.0)
seeds = st.integers(0, 2**31 - 1)


def objective(function: mf.Function, z: Tensor, x: Tensor, step: float) -> Tensor:
    return step * function.value(z) + 0.5 * (z - x).square().sum()


@cases(ALL)
@settings(max_examples=20)
@given(seed=seeds, step=st.floats(0.02, 20.0), scale=st.sampled_from([0.1, 1.0, 10.0]))
def test_no_nearby_point_is_better(case: FunctionCase, seed: int, step: float, scale: float) -> None:
    x = draw(case, seed, scale)
    z = case.function.prox(x, step)
    best = objective(case.function, z, x, step)
    rounding = 1e-11 * (1 + x.square().sum() + best.abs())
    for width in (1e-3, 1e-1, 1.0):
        other = z + width * draw(case, seed + 1)
        # Moving from the minimiser of a 1-strongly convex function costs at least half the squared distance.
        for point in (other, case.function.prox(other, step)):
            growth = 0.5 * (point - z).square().sum()
            assert objective(case.function, point, x, step) >= best + growth * (1 - 1e-6) - rounding


@cases(SEPARABLE)
@pytest.mark.parametrize("step", [0.2, 3.0])
def test_scalar_minimisation_finds_the_same_point(case: FunctionCase, step: float) -> None:
    for a in (-2.5, -0.3, 0.1, 0.6, 4.0):
        x = torch.tensor([a], dtype=torch.float64)

        def cost(z: float, x: Tensor = x) -> float:
            value = float(objective(case.function, torch.tensor([z], dtype=torch.float64), x, step))
            return value if np.isfinite(value) else 1e6 + abs(z)  # keeps the golden section finite

        z = float(case.function.prox(x, step))
        found = minimize_scalar(cost, bounds=(z - 1.3, z + 1.7), method="bounded", options={"xatol": 1e-10})
        assert cost(z) <= found.fun + 1e-12
        assert z == pytest.approx(found.x, abs=2e-5)


@cases(ALL)
@settings(max_examples=20)
@given(seed=seeds, step=st.floats(0.02, 20.0))
def test_firmly_nonexpansive(case: FunctionCase, seed: int, step: float) -> None:
    x, y = draw(case, seed), draw(case, seed + 1)
    p, q = case.function.prox(x, step), case.function.prox(y, step)
    assert ((p - q) ** 2).sum() <= ((p - q) * (x - y)).sum() + 1e-10


@cases(ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_value_at_the_prox_is_finite(case: FunctionCase, dtype: torch.dtype) -> None:
    for scale in (1e-4, 1.0, 100.0, 1e4):
        for step in (1e-3, 1.0, 50.0):
            x = draw(case, 3, min(scale, torch.finfo(dtype).max / 1e3), dtype)
            z = case.function.prox(x, step)
            assert z.dtype == dtype
            assert z.shape == x.shape
            assert bool(z.isfinite().all())
            assert bool(case.function.value(z).isfinite())


@cases(ALL)
def test_half_precision_follows_single(case: FunctionCase) -> None:
    x = draw(case, 4, dtype=torch.bfloat16)
    for step in (0.5, 1.0, torch.tensor(2.0)):
        single = case.function.prox(x.float(), step)
        assert torch.allclose(case.function.prox(x, step).float(), single, atol=0.06, rtol=0.02)


@cases(ALL)
def test_tensor_steps_agree_with_numbers(case: FunctionCase) -> None:
    x = draw(case, 5)
    for step in STEPS:
        number = case.function.prox(x, step)
        for tensor in (torch.tensor(step), torch.full((1,) * x.dim(), step, dtype=torch.float64)):
            assert torch.allclose(case.function.prox(x, tensor), number, atol=1e-6)


def test_steps_broadcast_over_rows() -> None:
    x = torch.randn(3, 4, dtype=torch.float64)
    steps = torch.tensor([[0.1], [1.0], [3.0]], dtype=torch.float64)
    for function in (mf.L1(0.3), mf.GroupL2(0.3), mf.from_activation("tanh"), mf.LogBarrier(0.2)):
        rows = torch.stack([function.prox(row, float(step)) for row, step in zip(x, steps, strict=True)])
        assert torch.allclose(function.prox(x, steps), rows)


@cases(ALL)
def test_gradient_in_point_and_step(case: FunctionCase) -> None:
    # Seeds away from kinks: finite differences straddle none.
    x = draw(case, 11).requires_grad_()
    step = torch.tensor(0.4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: case.function.prox(x, 0.4), (x,))
    assert torch.autograd.gradcheck(lambda x: case.function.prox(x, 2.5), (x,))
    if case.function.prox(x.detach(), step).requires_grad:
        assert torch.autograd.gradcheck(case.function.prox, (x, step))


@cases(SMOOTH)
def test_second_derivatives(case: FunctionCase) -> None:
    x = draw(case, 12).requires_grad_()
    step = torch.tensor(0.4, dtype=torch.float64, requires_grad=True)
    if case.name not in ("zero", "origin"):
        assert torch.autograd.gradgradcheck(case.function.prox, (x, step))


@cases(ALL)
@pytest.mark.parametrize("kind", ["equal", "pairs", "integers"])
def test_derivatives_are_symmetric_at_ties(case: FunctionCase, kind: str) -> None:
    """Implicit derivatives use it. Equal entries are common: pixels that see only the padding, dead units."""
    x = draw(case, 0)
    if kind == "equal":
        x = torch.full_like(x, 0.37)
    elif kind == "pairs":
        x = x[..., torch.arange(x.shape[-1]) // 2]
    else:
        x = x.round()
    for step in (0.3, 1.0):
        slope = torch.autograd.functional.jacobian(functools.partial(case.function.prox, step=step), x)
        slope = slope.reshape(x.numel(), x.numel())
        torch.testing.assert_close(slope, slope.mT, rtol=0, atol=1e-9)
        between = torch.linalg.eigvalsh(slope)
        assert between.min() > -1e-9
        assert between.max() < 1 + 1e-9


@cases(ALL)
def test_gradients_are_finite_at_zero(case: FunctionCase) -> None:
    x = torch.zeros(case.shape, dtype=torch.float64, requires_grad=True)
    for step in (0.5, 1.0, torch.tensor(0.5, dtype=torch.float64)):
        (grad,) = torch.autograd.grad(case.function.prox(x, step).sum(), x)
        assert bool(grad.isfinite().all())


@cases(tuple(case for case in SEPARABLE if case.name not in SAME_CODE))
# torch's own tracer instantiates the class that it warns about.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_no_graph_break(case: FunctionCase) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(case.function.prox, fullgraph=True, backend="eager")
    x = draw(case, 6)
    steps = (0.5,) if case.name not in ("tanh", "l1", "log_box") else (0.5, torch.tensor(0.5, dtype=torch.float64))
    for step in steps:
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        expected, traced = case.function.prox(a, step), compiled(b, step)
        assert torch.allclose(traced, expected, atol=1e-12)
        expected.sum().backward()
        traced.sum().backward()
        assert torch.allclose(a.grad, b.grad, atol=1e-10)


class _Layer(torch.nn.Module):
    def __init__(self, function: mf.Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function.prox(x, 0.5)


@pytest.mark.parametrize("name", ["nonnegative", "leaky_hinge", "l1", "box", "log_box", "tanh"])
def test_exports(name: str) -> None:
    case = next(case for case in ALL if case.name == name)
    x = draw(case, 7, dtype=torch.float32)
    exported = torch.export.export(_Layer(case.function), (x,)).module()
    assert torch.allclose(exported(x), case.function.prox(x, 0.5), atol=1e-6)


@pytest.mark.parametrize("act", ["tanh", "sigmoid", "softplus", "elu", "softsign", "hardsigmoid", "tanhshrink"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("with_derivative", [True, False])
def test_monotone_roots_are_accurate(act: str, dtype: torch.dtype, with_derivative: bool) -> None:
    function = mf.from_activation(act)
    assert isinstance(function, mf.Monotone)
    chosen = function if with_derivative else mf.Monotone(function.phi)
    positive = torch.logspace(-6, 4, 60, dtype=dtype)
    a = torch.cat([-positive, torch.linspace(-3, 3, 61, dtype=dtype), positive])
    for exponent in range(-4, 5):
        step = 1.7 * 10.0**exponent
        expected = bisected(function.phi, a.double(), step)
        error = (chosen.prox(a, step).double() - expected).abs()
        # A step above 1 multiplies the rounding of z − φ(z); float32 is spared by working in float64.
        amplification = max(1.0, step) if dtype == torch.float64 else 1.0
        ulps = 8 if with_derivative else 16
        assert bool((error <= ulps * torch.finfo(dtype).eps * amplification * a.abs().clamp_min(1).double()).all())


def bisected(phi: "functools.partial[Tensor]", a: Tensor, step: float) -> Tensor:
    low, high = torch.full_like(a, -1e10), torch.full_like(a, 1e10)
    for _ in range(130):
        middle = 0.5 * (low + high)
        image = phi(middle)
        above = image + step * (middle - image) > a
        low, high = torch.where(above, low, middle), torch.where(above, middle, high)
    return phi(0.5 * (low + high))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_log_box_is_accurate_and_strictly_inside(dtype: torch.dtype) -> None:
    size = torch.logspace(-6, 6, 200, dtype=dtype)
    a = torch.cat([-size, torch.zeros(1, dtype=dtype), size])
    for gamma in (1e-4, 0.06, 1.0, 100.0):
        x = mf.LogBox(gamma).prox(a)
        low, high = torch.full_like(a, -1, dtype=torch.float64), torch.full_like(a, 1, dtype=torch.float64)
        for _ in range(60):
            middle = 0.5 * (low + high)
            above = middle + 2 * gamma * middle / (1 - middle) / (1 + middle) > a
            low, high = torch.where(above, low, middle), torch.where(above, middle, high)
        assert bool((x.abs() < 1).all())
        assert torch.allclose(x.double(), low, rtol=4 * torch.finfo(dtype).eps, atol=1e-15)
        unit = mf.LogUnit(gamma).prox(a)
        assert bool(((unit > 0) & (unit < 1)).all())


def test_pyproximal_agrees() -> None:
    x = np.random.default_rng(0).normal(size=24)
    pairs = [
        (mf.L1(0.4), pyproximal.L1(0.4), (24,)),
        (mf.Box(-0.5, 0.8), pyproximal.Box(-0.5, 0.8), (24,)),
        (mf.GroupL2(0.4), pyproximal.L21(24, 0.4), (1, 24)),
        (mf.Ball(1.2), pyproximal.EuclideanBall(np.zeros(24), 1.2), (24,)),
        (mf.Simplex(), pyproximal.Simplex(24, 1.0), (24,)),
        (mf.NuclearNorm(0.4), pyproximal.Nuclear((6, 4), 0.4), (6, 4)),
    ]
    for ours, theirs, shape in pairs:
        expected = theirs.prox(x, 0.5)
        got = ours.prox(torch.from_numpy(x).reshape(shape), 0.5).numpy().ravel()
        np.testing.assert_allclose(got, expected, atol=1e-6)


@pytest.mark.parametrize("step", [0.3, 2.0])
def test_cvxpy_agrees(step: float) -> None:
    a = np.random.default_rng(1).normal(size=(4, 3))
    square = np.random.default_rng(2).normal(size=(4, 4))
    z, s = cp.Variable((4, 3)), cp.Variable((4, 4), symmetric=True)
    vector = cp.Variable(6)
    v = np.random.default_rng(3).normal(size=6)
    problems = [
        (mf.NuclearNorm(0.5), z, 0.5 * cp.normNuc(z), [], a),
        (mf.NuclearNorm(torch.tensor([0.5, 0.2, 0.2])), z, 0.2 * cp.normNuc(z) + 0.3 * cp.sigma_max(z), [], a),
        (mf.PositiveSemidefinite(), s, 0, [s >> 0], square),
        (mf.SpectralBall(0.9), z, 0, [cp.sigma_max(z) <= 0.9], a),
        (mf.Maximum(), vector, cp.max(vector), [], v),
        (mf.Simplex(), vector, 0, [vector >= 0, cp.sum(vector) == 1], v),
        (mf.LogBarrier(0.5), vector, -0.5 * cp.sum(cp.log(vector)), [], v),
        (mf.LogBox(0.5), vector, -0.5 * cp.sum(cp.log(1 - vector) + cp.log(1 + vector)), [], v),
        (mf.SquaredHinge(0.8, 0.3), vector, 0.4 * cp.sum_squares(cp.pos(-vector - 0.3)), [], v),
    ]
    for function, variable, value, constraints, point in problems:
        cp.Problem(cp.Minimize(step * value + 0.5 * cp.sum_squares(variable - point)), constraints).solve(
            solver=cp.CLARABEL
        )
        got = function.prox(torch.from_numpy(point), step).numpy()
        np.testing.assert_allclose(got, variable.value, atol=2e-4)


def test_total_variation_of_images() -> None:
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(2, 5, 4, dtype=torch.float64, generator=generator)
    function, z = mf.TotalVariation2d(0.3), cp.Variable((5, 4))
    for step in (0.2, 1.5):
        images = function.prox(a, step)
        for image, got in zip(a.numpy(), images.numpy(), strict=True):
            jumps = cp.sum(cp.abs(cp.diff(z, axis=0))) + cp.sum(cp.abs(cp.diff(z, axis=1)))
            cp.Problem(cp.Minimize(0.3 * step * jumps + 0.5 * cp.sum_squares(z - image))).solve(solver=cp.CLARABEL)
            np.testing.assert_allclose(got, z.value, atol=1e-5)
    line = torch.randn(1, 30, dtype=torch.float64, generator=generator)
    for point in (line, line.mT):
        expected = mf.TotalVariation(0.3).prox(line.flatten(), 2.0)
        assert torch.allclose(function.prox(point, 2.0).flatten(), expected, atol=1e-13)
    # A large image: flat regions to the last digit, the mean for a large step, constants and offsets without end.
    large = torch.zeros(24, 20, dtype=torch.float64)
    large[5:15, 8:] = 3.0
    noisy = large + 0.2 * torch.randn(24, 20, dtype=torch.float64, generator=generator)
    assert len(function.prox(noisy, 3.0).unique()) < 20
    assert torch.allclose(function.prox(noisy + 1e9, 3.0) - 1e9, function.prox(noisy, 3.0), atol=1e-5)
    assert torch.allclose(function.prox(noisy, 1e3), noisy.mean(), atol=1e-13)
    assert torch.allclose(function.prox(large + 0.1, 1e-3), large + 0.1, atol=1e-3)
    assert torch.allclose(function.prox(torch.full((6, 5), 0.1)), torch.tensor(0.1), rtol=1e-6)
    assert bool(function.prox(torch.full((3, 3), torch.nan)).isnan().all())
    with pytest.raises(ShapeError, match=r"images, .* \(3,\)"):
        function.prox(torch.ones(3))


def test_total_variation_of_images_says_how_far_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mf.variation, "PER_SIDE", 1)
    x = torch.randn(30, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with pytest.warns(UserWarning, match="certified to a distance of"):
        early = mf.TotalVariation2d(1.0).prox(x, 5.0)
    assert early.shape == x.shape


def test_softmax_is_a_prox() -> None:
    a = 3 * torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    function = mf.SimplexEntropy()
    assert torch.equal(function.prox(a), torch.softmax(a, -1))
    assert torch.allclose(function.prox(a, torch.tensor(1.0)), torch.softmax(a, -1), atol=1e-14)
    assert torch.allclose(function.prox(a, 1e-9), mf.Simplex().prox(a), atol=1e-7)
    z = cp.Variable(6)
    for step in (0.05, 0.6):
        # For steps below 1 cvxpy accepts the sum of the two squares as convex.
        cost = -step * cp.sum(cp.entr(z)) + 0.5 * (1 - step) * cp.sum_squares(z) - a[0].numpy() @ z
        cp.Problem(cp.Minimize(cost), [cp.sum(z) == 1]).solve(solver=cp.CLARABEL)
        np.testing.assert_allclose(function.prox(a[0], step).numpy(), z.value, atol=2e-6)
    for step in (1e-4, 0.3, 40.0, 1e4):
        p = function.prox(a, step)
        multiplier = a - (1 - step) * p - step * p.clamp_min(1e-300).log()
        spread = torch.where(p > 1e-6, multiplier - multiplier.gather(-1, p.argmax(-1, keepdim=True)), 0.0)
        assert bool((spread.abs() <= 1e-13 * (10 + step)).all())


@pytest.mark.parametrize(
    "make",
    [
        lambda: mf.SquaredHinge(0.0),
        lambda: mf.SquaredHinge(1.0, float("nan")),
        lambda: mf.LeakyHinge(1.0),
        lambda: mf.LogBarrier(-1.0),
        lambda: mf.LogBox(0.0),
        lambda: mf.LogUnit(float("inf")),
        lambda: mf.L1(-0.1),
        lambda: mf.Box(1.0, 0.0),
        lambda: mf.Box(float("nan"), 0.0),
        lambda: mf.GroupL2(-1.0),
        lambda: mf.GroupL2(torch.tensor([1.0, -1.0]), [0, 1]),
        lambda: mf.NuclearNorm(-1.0),
        lambda: mf.NuclearNorm(torch.tensor([0.1, 0.2])),
        lambda: mf.NuclearNorm(torch.ones(2, 2)),
        lambda: mf.L1(1.0).prox(torch.ones(2), torch.tensor([1.0, float("inf")])),
        lambda: mf.NonNegative().prox(torch.ones(2), torch.tensor(float("inf"))),
        lambda: mf.Zero().prox(torch.ones(2), "fast"),
        lambda: mf.Zero().prox(torch.ones(2), True),
        lambda: mf.Monotone("tanh"),
        lambda: mf.L1(1.0).prox(torch.ones(2), 0.0),
        lambda: mf.Zero().prox(torch.ones(2), -1.0),
        lambda: mf.from_activation("tanh").prox(torch.ones(2), float("nan")),
        lambda: mf.L1(1.0).prox(torch.ones(2), torch.tensor([1.0, -1.0])),
    ],
)
def test_bad_options_are_refused(make: object) -> None:
    with pytest.raises(OptionError, match=r"must|needs"):
        make()


@pytest.mark.parametrize("make", [mf.L1, mf.GroupL2, mf.NuclearNorm], ids=lambda m: m.__name__)
@pytest.mark.parametrize("step", [0.5, torch.tensor(0.5, dtype=torch.float64)], ids=["number", "tensor"])
def test_no_weight_is_no_function(make: type[mf.Function], step: float | torch.Tensor) -> None:
    x = torch.tensor([[1.0, -2.0], [0.0, 0.0]], dtype=torch.float64, requires_grad=True)
    nothing = make(0.0)
    out = nothing.prox(x, step)
    assert torch.equal(out, x)
    assert nothing.value(x) == 0
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], torch.ones_like(x))
    assert (nothing.conjugate().prox(x, step) == 0).all()
    assert nothing.conjugate().value(torch.zeros_like(x)) == 0


def test_weights_of_groups_and_rows_are_those_of_each() -> None:
    x = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weight = torch.tensor([[0.2, 1.0], [0.0, 0.4], [3.0, 0.1]], dtype=torch.float64)
    both = mf.GroupL2(weight, [1, 0, 0, 1, 1])
    parts, total = torch.empty_like(x), 0.0
    for row in range(3):
        for group, index in enumerate(([1, 2], [0, 3, 4])):
            alone = mf.GroupL2(float(weight[row, group]))
            parts[row, index] = alone.prox(x[row, index], 0.7)
            total += float(alone.value(x[row, index]))
    assert torch.allclose(both.prox(x, 0.7), parts, atol=1e-14)
    assert float(both.value(x)) == pytest.approx(total)
    kept = torch.tensor([True, False, True])
    assert torch.allclose(both.of_samples(kept, (3, 5)).prox(x[kept], 0.7), parts[kept], atol=1e-14)
    positive = weight + 0.05
    assert torch.autograd.gradcheck(lambda w: mf.GroupL2(w, both.groups).prox(x, 0.7), (positive.requires_grad_(),))
    for wrong in (torch.ones(3), torch.ones(4, 1), torch.ones(2, 2)):
        with pytest.raises(ShapeError, match=r"2 group"):
            mf.GroupL2(wrong, both.groups).prox(x)
    with pytest.raises(ShapeError, match=r"one per row as \(rows, 1\)"):
        mf.Ball(torch.ones(5)).check_shape((3, 5))


@pytest.mark.parametrize("function", [mf.Zero(), mf.L1(1.0), mf.from_activation("tanh"), mf.LogBox(1.0)], ids=repr)
@pytest.mark.parametrize("shape", [(4,), (2, 3, 3), (1, 3, 3), (3, 2)], ids=str)
def test_a_step_never_enlarges_the_point(function: mf.Function, shape: tuple[int, ...]) -> None:
    x = torch.rand(3, 3)
    with pytest.raises(ShapeError, match=r"\(3, 3\)"):
        function.prox(x, torch.ones(shape))
    for fitting in ((), (1,), (3,), (3, 1), (3, 3)):
        assert function.prox(x, torch.full(fitting, 0.5)).shape == x.shape


@pytest.mark.parametrize(
    "x", [[1.0, 2.0], torch.ones(2, 2, dtype=torch.int64), torch.ones(2, 2, dtype=torch.complex64)]
)
@pytest.mark.parametrize(
    "function", [mf.Zero(), mf.NonNegative(), mf.Simplex(), mf.NuclearNorm(1.0), mf.LogBarrier(1.0)], ids=repr
)
def test_points_are_real_tensors(function: mf.Function, x: object) -> None:
    with pytest.raises(CapabilityError, match="real floating-point"):
        function.prox(x)  # type: ignore[arg-type]


def test_bad_shapes_are_refused() -> None:
    for function in (mf.Simplex(), mf.GroupL2(1.0), mf.Simplex().conjugate(), mf.GroupL2(1.0).conjugate()):
        for call in (function.prox, function.value):
            with pytest.raises(ShapeError, match="one dimension or more"):
                call(torch.tensor(1.0))
    with pytest.raises(ShapeError, match=r"\(3,\)"):
        mf.NuclearNorm(1.0).prox(torch.ones(3))
    with pytest.raises(ShapeError, match=r"weight has 3 numbers, .* 2 singular values"):
        mf.NuclearNorm(torch.ones(3)).prox(torch.ones(3, 2))
    with pytest.raises(ShapeError, match=r"\(3, 2\)"):
        mf.PositiveSemidefinite().prox(torch.ones(3, 2))
    with pytest.raises(ShapeError, match=r"\(2, 3\)"):
        mf.GroupL2(1.0).prox(torch.ones(2, 3), torch.ones(2, 3))

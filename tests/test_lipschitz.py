"""The bound is never below the truth: against singular values in float64, without any tolerance."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from minimand.errors import CapabilityError, NonFiniteError, OptionError, ShapeError
from minimand.norms import certified_norm_sq, lipschitz
from minimand.norms.spectral import certified_lambda_max, lanczos, round_up, start_vector, top_singular
from minimand.norms.symbol import BUDGET, Symbol, grid_factor
from minimand.operators import Conv2d, Dense
from tests.cases.operators import ALL, OPERATORS, AnyCase, OperatorCase, dense_matrix, norm_sq
from tests.test_adjoint_identity import convolutions

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same'")
every_layer = pytest.mark.parametrize("case", OPERATORS, ids=lambda case: case.name)
every_operator = pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
CERTIFIED = ("auto", "exact", "grid")


def _adversary(shape: tuple[int, ...], kind: str, seed: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(shape, generator=generator, dtype=torch.float64)
    signs = (-1.0) ** torch.arange(math.prod(shape[2:])).reshape(shape[2:])
    rank_one = noise[:, :1, ...].sum(tuple(range(2, noise.dim())), keepdim=True) * noise[:1]
    weight = {
        "random": noise,
        "ones": torch.ones(shape),
        "alternating": signs.expand(shape),
        "rank one": rank_one,
    }[kind]
    return weight.to(dtype)


@given(
    convolutions(),
    st.sampled_from(["random", "ones", "alternating", "rank one"]),
    st.sampled_from([torch.float32, torch.float64]),
    st.integers(0, 1000),
)
def test_no_method_lies_below_the_truth(operator: Conv2d, kind: str, dtype: torch.dtype, seed: int) -> None:
    operator = operator.with_weight(_adversary(operator.weight.shape, kind, seed, dtype))
    truth = norm_sq(dense_matrix(operator))
    for method in CERTIFIED:
        assert lipschitz(operator, method=method).double() >= truth, method
    assert lipschitz(operator, method="auto") <= 1.002 * lipschitz(operator, method="grid")
    assert lipschitz(operator, method="exact") <= lipschitz(operator, method="auto")
    assert operator.norm_sq() == lipschitz(operator)


@given(convolutions(), st.sampled_from(["random", "ones", "alternating", "rank one"]), st.integers(0, 1000))
def test_bounds_from_symbols_hold_without_the_matrix(operator: Conv2d, kind: str, seed: int) -> None:
    """Tiny maps are bounded by their matrix, which hides the bounds of all larger ones."""
    operator = operator.with_weight(_adversary(operator.weight.shape, kind, seed, torch.float64))
    truth = norm_sq(dense_matrix(operator))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("minimand.norms.convolution.TINY", 0)
        bounds = {method: lipschitz(operator, method=method) for method in CERTIFIED}
    assert min(bounds.values()) >= truth * (1 - 1e-13)  # the oracle rounds, too
    assert bounds["exact"] <= bounds["auto"] <= 1.002 * bounds["grid"]
    assert lipschitz(Conv2d(operator.weight, None, *_options(operator))) >= truth * (1 - 1e-13)


def _options(operator: Conv2d) -> tuple[object, ...]:
    padding = tuple(pair[0] for pair in operator.padding)
    exact = padding if all(a == b for a, b in operator.padding) else "same"
    return operator.stride, exact, operator.dilation, operator.groups, operator.padding_mode


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({"kernel_size": 3, "padding": 1}, (9, 8)),
        ({"kernel_size": (5, 3), "padding": (2, 1), "stride": (2, 3)}, (8, 9)),
        ({"kernel_size": 3, "padding": 2, "dilation": 2, "stride": 2}, (8, 6)),
        ({"kernel_size": (4, 2), "padding": "same", "dilation": (1, 3)}, (7, 6)),
        ({"kernel_size": 3, "padding": 1, "groups": 2}, (4, 5)),
        ({"kernel_size": 7, "padding": 3}, (3, 4)),
    ],
    ids=str,
)
@pytest.mark.parametrize("channels", [(4, 6), (14, 2)])
def test_circular_padding_is_exact_where_lemma_2_is(options, size: tuple[int, int], channels: tuple[int, int]) -> None:
    module = nn.Conv2d(*channels, bias=False, padding_mode="circular", **options).double()
    n = channels[0] * math.prod(size)
    truth = norm_sq(module(torch.eye(n, dtype=torch.float64).reshape(n, channels[0], *size)).flatten(1).detach())
    for method in ("auto", "exact"):
        assert truth * (1 - 1e-13) <= lipschitz(module, size, method=method) <= truth * (1 + 1e-10)
    narrow = lipschitz(module.float(), size).double()
    assert truth * (1 - 1e-5) <= narrow <= truth * (1 + 1e-5)


def test_a_large_circular_convolution_is_exact() -> None:
    """Against the Fourier transform of the kernel, [Bibi2019], Lemma 2."""
    module = nn.Conv2d(32, 24, 3, padding=1, bias=False, padding_mode="circular").double()
    symbol = torch.fft.fft2(module.weight.detach(), s=(32, 28)).permute(2, 3, 0, 1)
    truth = torch.linalg.svdvals(symbol).max() ** 2
    assert truth * (1 - 1e-13) <= lipschitz(module, (32, 28)) <= truth * (1 + 1e-10)


def test_lemma_2_is_no_bound_with_wider_circular_padding() -> None:
    module = nn.Conv2d(1, 1, 3, padding=2, bias=False, padding_mode="circular").double()
    module.weight.data = (
        torch.tensor([1.0, -2.0, 1.0], dtype=torch.float64).outer(torch.tensor([1.0, -2.0, 1.0])).reshape(1, 1, 3, 3)
    )
    matrix = module(torch.eye(64, dtype=torch.float64).reshape(64, 1, 8, 8)).flatten(1).detach()
    lemma = torch.fft.fft2(module.weight.detach(), s=(8, 8)).abs().max() ** 2
    assert lemma < 0.9 * norm_sq(matrix)
    assert all(lipschitz(module, (8, 8), method=method) >= norm_sq(matrix) for method in CERTIFIED)


@every_operator
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("method", CERTIFIED)
def test_bound_of_every_case(case: AnyCase, dtype: torch.dtype, method: str) -> None:
    operator = case.operator(dtype)
    bound = lipschitz(operator, method=method)
    assert bound.dtype == dtype
    assert bound.dim() == 0
    assert not bound.requires_grad
    assert bound.double() >= norm_sq(dense_matrix(operator))


@every_operator
def test_bounds_of_the_parts(case: AnyCase) -> None:
    operator = case.operator(torch.float32)
    matrix = dense_matrix(operator).reshape(*operator.output_shape, *operator.input_shape)
    rows, columns = len(operator.output_shape), len(operator.input_shape)
    for i, bound in enumerate(operator.input_norms_sq()):
        part = matrix.select(rows, i).reshape(math.prod(operator.output_shape), -1)
        assert norm_sq(part) <= bound.double() <= 1.5 * norm_sq(part) + 1e-12 or columns > 1
        assert bound.double() >= norm_sq(part)
    for j, bound in enumerate(operator.output_norms_sq()):
        assert bound.double() >= norm_sq(matrix.select(0, j).reshape(-1, math.prod(operator.input_shape)))


@every_operator
def test_bounds_of_restrictions(case: AnyCase) -> None:
    operator = case.operator()
    for part in (
        operator.restrict(torch.tensor([operator.inputs - 1, 0])),
        operator.restrict_outputs(torch.tensor([operator.outputs - 1])),
    ):
        y = torch.eye(math.prod(part.input_shape), dtype=torch.float64).reshape(-1, *part.input_shape)
        matrix = part.apply(y).flatten(1)
        assert part.norm_sq() >= norm_sq(matrix)
        assert part.input_norms_sq().shape == (part.inputs,)
        assert part.output_norms_sq().shape == (part.outputs,)
        assert part.norm_sq() <= 1.01 * part.input_norms_sq().sum()


@pytest.mark.parametrize("n", [1, 3, 40, 130])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["random", "orthogonal", "rank one", "zero", "tall", "clustered"])
def test_dense_weights(n: int, dtype: torch.dtype, kind: str) -> None:
    noise = torch.randn(n, n, dtype=torch.float64)
    orthogonal = torch.linalg.qr(noise).Q
    weight = {
        "random": noise,
        "orthogonal": orthogonal,
        "rank one": torch.outer(noise[0], noise[:, 0]),
        "zero": torch.zeros(n, n),
        "tall": torch.randn(3 * n, n, dtype=torch.float64),
        "clustered": orthogonal * (1 - 1e-9 * torch.arange(n, dtype=torch.float64)),
    }[kind].to(dtype)
    truth = norm_sq(weight.double())
    for method in CERTIFIED:
        bound = lipschitz(Dense(weight), method=method).double()
        assert truth <= bound <= 1.0011 * truth
    columns = weight.double().square().sum(0)
    assert (Dense(weight).input_norms_sq().double() >= columns).all()
    assert (Dense(weight).output_norms_sq().double() >= weight.double().square().sum(1)).all()


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e-10, 1e10, 1e15])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@every_layer
def test_scales_neither_overflow_nor_vanish(case: OperatorCase, dtype: torch.dtype, scale: float) -> None:
    operator = case.operator(dtype)
    operator = operator.with_weight(operator.weight.detach() * scale)
    truth = norm_sq(dense_matrix(operator))
    for method in CERTIFIED:
        bound = lipschitz(operator, method=method).double()
        assert truth <= bound
        if scale > 1e-15:
            assert bound <= 5 * max(truth, lipschitz(case.operator(dtype), method="grid").double() * scale**2)


def test_the_circular_value_is_no_bound_but_ours_is() -> None:
    """On a map of 4 with a kernel of 7 the circular norm can be a factor 60 too small."""
    t = torch.arange(7.0, dtype=torch.float64)
    weight = (torch.cos(math.pi * (t + 0.5) / 4)[:, None] * torch.cos(math.pi * (t + 0.5) / 4)).reshape(1, 1, 7, 7)
    operator = Conv2d(weight, (4, 4), padding=3)
    folded = torch.zeros(1, 1, 4, 4, dtype=torch.float64)
    for i in range(7):
        for j in range(7):
            folded[0, 0, i % 4, j % 4] += weight[0, 0, i, j]
    circular = torch.fft.fft2(folded).abs().max() ** 2
    truth = norm_sq(dense_matrix(operator))
    assert circular < truth / 10
    assert all(lipschitz(operator, method=m) >= truth for m in CERTIFIED)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 9, 16])
@pytest.mark.parametrize(
    "options", [{}, {"stride": 2}, {"dilation": 2}, {"stride": 2, "dilation": 2, "groups": 2}], ids=str
)
def test_without_a_size_the_bound_holds_for_every_size(size: int, options: dict[str, int]) -> None:
    module = nn.Conv2d(2, 4, 3, padding=2, bias=False, **options)
    bound = lipschitz(module).double()
    operator = Conv2d(module.weight, (size, size), padding=2, **options)
    assert bound >= norm_sq(dense_matrix(operator))


@pytest.mark.parametrize("channels", [4, 12])
@pytest.mark.parametrize("options", [{}, {"stride": 2}, {"groups": 2}], ids=str)
def test_tight_on_ordinary_layers(channels: int, options: dict[str, int]) -> None:
    module = nn.Conv2d(channels, channels, 3, padding=1, bias=False, **options)
    truth = norm_sq(dense_matrix(Conv2d(module.weight, (10, 10), padding=1, **options)))
    assert lipschitz(module, (10, 10), method="exact").double() <= 1.2 * truth
    assert lipschitz(module, (10, 10)).double() <= 1.3 * truth
    assert lipschitz(module).double() <= 1.35 * truth


@every_layer
def test_tight_on_tiny_maps(case: OperatorCase) -> None:
    operator = case.operator()
    assert operator.norm_sq() <= 1.002 * norm_sq(dense_matrix(operator))


def test_patches_that_do_not_overlap_are_exact() -> None:
    module = nn.Conv2d(3, 8, 4, stride=4, bias=False)
    truth = norm_sq(module.weight.detach().double().flatten(1))
    assert truth <= lipschitz(module).double() <= 1.002 * truth
    window = nn.Conv2d(3, 8, 4, bias=False)  # a map of one window: a dense layer in disguise
    truth = norm_sq(window.weight.detach().double().flatten(1))
    assert truth <= lipschitz(window, (4, 4)).double() <= 1.002 * truth


@every_layer
def test_lanczos_estimates_the_truth(case: OperatorCase) -> None:
    operator = case.operator()
    truth = norm_sq(dense_matrix(operator))
    assert truth <= lipschitz(operator, method="lanczos") <= 1.06 * truth


def test_lanczos_restarts_warm() -> None:
    matrix = torch.randn(60, 60, dtype=torch.float64)
    matrix = matrix @ matrix.T
    truth = torch.linalg.eigvalsh(matrix)[-1]
    start = torch.ones(60, dtype=torch.float64)
    cold, vector = lanczos(lambda v: v @ matrix, start, steps=6)
    warm, _ = lanczos(lambda v: v @ matrix, vector, steps=6)
    assert cold <= warm <= truth * (1 + 1e-12)
    assert truth - warm < 0.3 * (truth - cold) + 1e-12 * truth


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
@pytest.mark.parametrize("size", [2, 3, 6])
@pytest.mark.parametrize("dimensions", [1, 2])
def test_other_paddings_are_bounded(mode: str, size: int, dimensions: int) -> None:
    kind = (nn.Conv1d, nn.Conv2d)[dimensions - 1]
    padding = 1 if mode == "reflect" or size < 3 else 2
    module = kind(2, 2, 3, padding=padding, padding_mode=mode, bias=False).double()
    module.weight.data.fill_(1.0)
    n = 2 * size**dimensions
    matrix = module(torch.eye(n, dtype=torch.float64).reshape(n, 2, *(size,) * dimensions)).flatten(1)
    for input_size in (size, None):
        assert lipschitz(module, input_size) >= norm_sq(matrix.detach())


@pytest.mark.parametrize("mode", ["real", "complex"])
@pytest.mark.parametrize("n", [2, 5, 30, 90])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_certified_eigenvalues(mode: str, n: int, dtype: torch.dtype) -> None:
    complex_dtype = {torch.float32: torch.complex64, torch.float64: torch.complex128}[dtype]
    matrices = torch.randn(12, n, n + 3, dtype=dtype if mode == "real" else complex_dtype)
    hermitian = matrices @ matrices.mH
    hermitian[3] *= 5  # one of them dominates
    double = hermitian.to(torch.complex128).tril(-1)
    diagonal = torch.diag_embed(hermitian.diagonal(dim1=-2, dim2=-1).real.double()).to(torch.complex128)
    truth = torch.linalg.eigvalsh(double + double.mH + diagonal).max()
    assert truth <= certified_lambda_max(hermitian) <= 1.002 * truth
    assert truth <= certified_lambda_max(hermitian, rtol=0.0) <= (1 + 1e-9) * truth
    assert certified_lambda_max(hermitian, floor=2 * truth) >= 2 * truth
    negative = -hermitian[3].to(torch.complex128)
    assert certified_lambda_max(negative, floor=-math.inf) >= torch.linalg.eigvalsh(negative).max()
    svd = torch.linalg.svdvals(matrices.to(torch.complex128)).max() ** 2
    assert svd <= certified_norm_sq(matrices) <= 1.002 * svd


def test_a_start_vector_that_misses_the_top_still_certifies() -> None:
    n = 60
    gram = torch.eye(n, dtype=torch.float64)
    starts = [start_vector((n,), gram, seed) for seed in range(4)]  # the ones that are used
    hidden = torch.linalg.qr(torch.stack([*starts, torch.randn(n, dtype=torch.float64)], 1)).Q[:, -1]
    gram += 99 * torch.outer(hidden, hidden)
    assert 100 * (1 - 1e-12) <= certified_lambda_max(gram) <= 100.2


@pytest.mark.parametrize("kind", ["random", "orthogonal", "near tie", "rank one", "zero", "wide", "tall"])
@pytest.mark.parametrize("scale", [1e-30, 1e-18, 1.0, 1e18, 1e30])
def test_no_start_makes_a_certificate_wrong(kind: str, scale: float) -> None:
    """Neither the vector of another matrix, nor a lower singular vector, nor zero or noise."""
    n = 48
    noise = torch.randn(n, n, dtype=torch.float64)
    u, v = torch.linalg.qr(noise).Q, torch.linalg.qr(noise.T).Q
    values = torch.full((n,), 0.5, dtype=torch.float64)
    values[:2] = torch.tensor([1.0, 1.0 - 1e-10])
    weight = (
        scale
        * {
            "random": noise,
            "orthogonal": u,
            "near tie": u @ torch.diag(values) @ v.T,
            "rank one": torch.outer(u[0], v[0]),
            "zero": torch.zeros(n, n, dtype=torch.float64),
            "wide": noise[:20],
            "tall": noise[:, :20],
        }[kind]
    )
    truth = norm_sq(weight / scale) * scale**2
    short = min(weight.shape)
    left = torch.linalg.svd(weight if weight.shape[0] <= weight.shape[1] else weight.T).U
    starts = [left[:, 0], left[:, 1], left[:, -1], torch.zeros(short), torch.ones(short), torch.randn(short)]
    for start in starts:
        bound, vector = top_singular(weight, start=start)
        assert truth <= bound <= 1.0011 * truth
        assert vector.shape == (short,)
        warm = top_singular(1.01 * weight, rtol=1e-2, start=vector).bound
        assert 1.01**2 * truth <= warm <= 1.0111 * 1.01**2 * truth


def test_a_certificate_reads_the_lower_triangle_and_leaves_its_argument_alone() -> None:
    matrix = torch.randn(3, 40, 44, dtype=torch.complex128)
    gram = matrix @ matrix.mH
    spoilt = gram.tril()
    before = spoilt.clone()
    assert (
        certified_lambda_max(spoilt, floor=0.9 * torch.linalg.eigvalsh(gram).max()) >= torch.linalg.eigvalsh(gram).max()
    )
    assert torch.equal(spoilt, before)
    weight = torch.randn(40, 44, dtype=torch.float64)
    kept = weight.clone()
    top_singular(weight, start=top_singular(weight).vector)
    assert torch.equal(weight, kept)


@given(st.floats(1e-45, 1e38), st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
def test_rounding_goes_up(value: float, dtype: torch.dtype) -> None:
    exact = torch.tensor(value, dtype=torch.float64)
    rounded = round_up(exact, dtype)
    assert rounded.dtype == dtype
    assert rounded.double() >= exact
    assert rounded.double() <= exact * (1 + 2 * torch.finfo(dtype).eps) + torch.finfo(dtype).tiny or value > 6e4
    assert round_up(torch.zeros((), dtype=torch.float64), dtype) == 0


@given(st.integers(1, 4), st.integers(0, 1000))
def test_grid_factor_of_nonnegative_polynomials(degree: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    kernel = torch.randn(1, 1, 1, degree + 1, generator=generator, dtype=torch.float64)
    symbol = Symbol(kernel)
    fine = max(float(g.real.max()) for g in symbol.grams((512,)))
    points = 3 * degree
    coarse = max(float(g.real.max()) for g in symbol.grams((points,)))
    assert fine <= grid_factor(degree, points) * coarse * (1 + 1e-12)


def test_large_batches_of_frequencies_stay_within_memory() -> None:
    symbol = Symbol(torch.randn(1, 96, 96, 3, 3))
    sizes = [gram.numel() * 16 for gram in symbol.grams((40, 40))]
    assert len(sizes) > 1
    assert max(sizes) <= BUDGET


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: lipschitz(nn.Linear(2, 2), method="power"), OptionError, "auto, exact"),
        (lambda: lipschitz(nn.ReLU()), CapabilityError, "ReLU"),
        (lambda: lipschitz(nn.Conv2d(1, 1, 3), method="exact"), OptionError, "input_size"),
        (lambda: lipschitz(nn.Conv2d(1, 1, 3), method="lanczos"), OptionError, "input_size"),
        (lambda: lipschitz(nn.Conv2d(1, 1, 3), (2, 2)), ShapeError, "2, 2"),
        (lambda: lipschitz(Dense(torch.tensor([[math.nan]]))), NonFiniteError, "weight"),
        (lambda: Dense(torch.tensor([[math.inf]])).norm_sq(), NonFiniteError, "weight"),
    ],
)
def test_bad_requests_say_what_to_do(call, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()

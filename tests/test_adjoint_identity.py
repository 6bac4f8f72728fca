"""Laws: ⟨Ay, x⟩ = ⟨y, Aᵀx⟩ for every operator; the operator of a torch layer computes what the layer computes."""

import math
import warnings
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

from minimand.errors import OptionError, ShapeError
from minimand.geometry import PADDING_MODES
from minimand.operators import Conv2d, Dense, LinearOperator
from tests.cases.operators import ALL, MEASUREMENTS, OPERATORS, AnyCase, OperatorCase, dense_matrix

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same'")
every_layer = pytest.mark.parametrize("case", OPERATORS, ids=lambda case: case.name)
every_operator = pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)


def _pair(operator: LinearOperator, batch: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = operator.dtype
    y = torch.randn(batch, *operator.input_shape, dtype=dtype)
    return y, torch.randn(batch, *operator.output_shape, dtype=dtype)


def _assert_adjoint(operator: LinearOperator) -> None:
    y, x = _pair(operator)
    z = operator.adjoint(x)
    assert z.shape == y.shape
    torch.testing.assert_close((operator.apply(y) * x).sum(), (y * z).sum(), rtol=1e-12, atol=1e-12)


@every_operator
def test_adjoint_identity(case: AnyCase) -> None:
    _assert_adjoint(case.operator())


@st.composite
def convolutions(draw: st.DrawFn) -> Conv2d:
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    n1, n2 = groups * draw(st.integers(1, 2)), groups * draw(st.integers(1, 3))

    def pair(low: int, high: int) -> Any:
        return draw(st.tuples(st.integers(low, high), st.integers(low, high)))

    kernel, stride, dilation = pair(1, 4), pair(1, 4), pair(1, 3)
    padding = draw(st.sampled_from(["same", "valid", "numbers"]))
    if padding == "same":
        stride = (1, 1)
    size = pair(1, 9)
    seed = draw(st.integers(0, 100))
    weight = torch.randn(n2, n1 // groups, *kernel, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    mode = draw(st.sampled_from(PADDING_MODES))
    try:
        return Conv2d(weight, size, stride, pair(0, 4) if padding == "numbers" else padding, dilation, groups, mode)
    except ShapeError:
        assume(False)
        raise


@given(convolutions())
def test_adjoint_identity_of_any_convolution(operator: Conv2d) -> None:
    _assert_adjoint(operator)
    index = torch.randperm(operator.inputs)[: max(1, operator.inputs // 2)]
    _assert_adjoint(operator.restrict(index))
    _assert_adjoint(operator.restrict_outputs(torch.randperm(operator.outputs)[: max(1, operator.outputs // 2)]))


@every_layer
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_apply_is_the_torch_layer_to_the_bit(case: OperatorCase, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = case.module().to(dtype)
    operator = case.build(module.weight)
    module.bias = nn.Parameter(torch.randn(operator.outputs, dtype=dtype))
    y, _ = _pair(operator)
    assert torch.equal(operator.apply(y, module.bias), module(y))
    assert torch.equal(operator.apply(y, operator.per_feature(module.bias)), module(y))
    assert torch.equal(operator.apply(y[0], module.bias), module(y[0]))


@every_operator
def test_a_bias_may_depend_on_the_sample(case: AnyCase) -> None:
    operator = case.operator()
    y, x = _pair(operator)
    torch.testing.assert_close(operator.affine(y, x), operator.apply(y) + x)


@every_operator
def test_restriction_is_the_operator_on_masked_inputs(case: AnyCase) -> None:
    operator = case.operator()
    y, x = _pair(operator)
    kept = torch.randperm(operator.inputs)[: operator.inputs // 2 + 1]
    masked = torch.zeros_like(y).index_copy(operator.feature_dim, kept, operator.select(y, kept))
    part = operator.restrict(kept)
    assert (part.inputs, part.outputs) == (kept.numel(), operator.outputs)
    torch.testing.assert_close(part.apply(operator.select(y, kept)), operator.apply(masked))
    torch.testing.assert_close(part.adjoint(x), operator.select(operator.adjoint(x), kept))
    again = torch.tensor([0])
    torch.testing.assert_close(part.restrict(again).adjoint(x), operator.select(operator.adjoint(x), kept[again]))


@every_operator
def test_restriction_of_outputs_takes_rows(case: AnyCase) -> None:
    operator = case.operator()
    y, _ = _pair(operator)
    kept = torch.randperm(operator.outputs)[: operator.outputs // 2 + 1]
    part = operator.restrict_outputs(kept)
    torch.testing.assert_close(part.apply(y), operator.select_outputs(operator.apply(y), kept))
    bias = torch.randn(kept.numel(), dtype=y.dtype)
    torch.testing.assert_close(part.affine(y, bias), part.apply(y) + operator.per_feature(bias))


@every_operator
def test_a_channel_may_be_drawn_twice(case: AnyCase) -> None:
    operator = case.operator()
    y, _ = _pair(operator)
    twice = operator.restrict(torch.tensor([0, 0]))
    first = operator.restrict(torch.tensor([0])).apply(operator.select(y, torch.tensor([0])))
    torch.testing.assert_close(twice.apply(operator.select(y, torch.tensor([0, 0]))), 2 * first)


@pytest.mark.parametrize("case", [*OPERATORS, *MEASUREMENTS], ids=lambda case: case.name)
def test_gradients_flow_to_weight_and_input(case: AnyCase) -> None:
    torch.manual_seed(0)
    operator = case.operator()
    weight = operator.weight.detach().requires_grad_()
    y, x = (t[:1].requires_grad_() for t in _pair(operator))
    kept = torch.arange(1)

    def normal_and_part(w: torch.Tensor, y: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        current = operator.with_weight(w)
        part = current.restrict(kept)
        return current.normal(x), part.apply(current.select(y, kept)), part.adjoint(x)

    assert torch.autograd.gradcheck(normal_and_part, (weight, y, x), fast_mode=True)


def test_depthwise_restriction_costs_in_proportion() -> None:
    operator = Conv2d(torch.randn(64, 1, 3, 3), (8, 8), padding=1, groups=64)
    assert operator.restrict(torch.arange(0, 64, 4)).core.weight.numel() == operator.weight.numel() // 4
    uneven = Conv2d(torch.randn(8, 4, 3, 3), (8, 8), padding=1, groups=2).restrict(torch.tensor([0, 1, 5]))
    assert uneven.core.weight.shape == (8, 2, 3, 3)


@pytest.mark.parametrize("groups", [1, 4])
def test_channels_last_stays_channels_last(groups: int) -> None:
    operator = Conv2d(torch.randn(8, 8 // groups, 3, 3), (6, 6), padding=1, groups=groups)
    y = torch.randn(2, 8, 6, 6).to(memory_format=torch.channels_last)
    x = operator.apply(y)
    assert x.is_contiguous(memory_format=torch.channels_last)
    assert operator.adjoint(x).is_contiguous(memory_format=torch.channels_last)


def test_the_gram_is_formed_where_it_pays_and_is_the_same_operator() -> None:
    weight = torch.randn(6, 9, dtype=torch.float64, requires_grad=True)
    x = torch.randn(20, 6, dtype=torch.float64)
    plain = Dense(weight)
    assert plain.gram_if_cheaper(rows=1, applications=1) is None
    # The Gram of a tall matrix is larger than its two factors.
    assert Dense(torch.randn(9, 3)).gram_if_cheaper(rows=1000, applications=1000) is None
    formed = plain.gram_if_cheaper(rows=20, applications=10)
    assert formed is not None
    ways = (plain.normal(x), x @ formed)
    torch.testing.assert_close(*ways)
    torch.testing.assert_close(*(torch.autograd.grad(way.sin().sum(), weight)[0] for way in ways))


@every_operator
def test_wrong_shapes_are_named_before_any_work(case: AnyCase) -> None:
    operator = case.operator()
    y, x = _pair(operator)
    operator.check_input(y)
    operator.check_output(x)
    for check, good in ((operator.check_input, y), (operator.check_output, x)):
        with pytest.raises(ShapeError, match=str(good.shape[-1])):
            check(good[..., :-1])


@pytest.mark.parametrize(
    ("build", "error"),
    [
        (lambda: Dense(torch.randn(3)), ShapeError),
        (lambda: Conv2d(torch.randn(3, 3, 3), (5, 5)), ShapeError),
        (lambda: Conv2d(torch.randn(3, 3, 3, 3), (5, 5), groups=2), ShapeError),
        (lambda: Conv2d(torch.randn(3, 3, 7, 7), (5, 5)), ShapeError),
        (lambda: Conv2d(torch.randn(3, 3, 3, 3), (5, 5), stride=0), OptionError),
        (lambda: Conv2d(torch.randn(3, 3, 3, 3), (5, 5), padding=-1), OptionError),
        (lambda: Conv2d(torch.randn(3, 3, 3, 3), (5, 5), padding="full"), OptionError),
        (lambda: Conv2d(torch.randn(3, 3, 3, 3), (5, 5), stride=2, padding="same"), OptionError),
        (lambda: Conv2d(torch.randn(3, 3, 3, 3), None).adjoint(torch.randn(3, 3, 3)), OptionError),
        (lambda: Conv2d(torch.randn(3, 3, 3, 3), (5, 5)).check_input(torch.randn(1, 1, 3, 5, 5)), ShapeError),
    ],
)
def test_bad_operators_are_refused(build: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        build()


@every_operator
def test_the_matrix_of_the_cases_is_the_operator(case: AnyCase) -> None:
    operator = case.operator()
    matrix = dense_matrix(operator)
    _, x = _pair(operator)
    assert matrix.shape == (math.prod(operator.output_shape), math.prod(operator.input_shape))
    torch.testing.assert_close(operator.adjoint(x).flatten(1), x.flatten(1) @ matrix)


@every_operator
def test_restrict_takes_lists_and_masks_like_indexing(case: AnyCase) -> None:
    operator = case.operator()
    y, _ = _pair(operator)
    places = list(range(0, operator.inputs, 2))
    mask = torch.zeros(operator.inputs, dtype=torch.bool)
    mask[places] = True
    part = y.index_select(operator.feature_dim, torch.tensor(places))
    expected = operator.restrict(torch.tensor(places)).apply(part)
    assert torch.equal(operator.restrict(places).apply(part), expected)
    assert torch.equal(operator.restrict(mask).apply(part), expected)


@pytest.mark.parametrize("kernel", [(2, 2), (4, 3), (3, 2)], ids=str)
@pytest.mark.parametrize("dilation", [1, 3])
def test_even_kernels_are_padded_as_torch_does_without_its_warning(kernel: tuple[int, int], dilation: int) -> None:
    weight, y = torch.randn(3, 2, *kernel), torch.randn(2, 2, 9, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = torch.nn.functional.conv2d(y, weight, padding="same", dilation=dilation)
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            got = Conv2d(weight, (9, 8), padding="same", dilation=dilation).apply(y)
    finally:
        torch.set_warn_always(False)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("padding", [0, 2, (3, 0), "same"], ids=str)
@pytest.mark.parametrize(("kernel", "dilation"), [((3, 5), 1), ((4, 2), 2)], ids=str)
def test_a_convolution_of_one_channel_has_torchs_derivatives(kernel: Any, dilation: int, padding: Any) -> None:
    """Its adjoint and its derivatives take a path of their own; the oracle is the matrix of torch's convolution."""
    torch.manual_seed(0)
    weight = torch.randn(1, 1, *kernel, dtype=torch.float64)
    A = Conv2d(weight, (9, 8), padding=padding, dilation=dilation)
    unit = torch.eye(72, dtype=torch.float64).reshape(72, 1, 9, 8)
    matrix = A.apply(unit).flatten(1)
    x = torch.randn(2, *A.input_shape, dtype=torch.float64, requires_grad=True)
    u = torch.randn(2, *A.output_shape, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(A.adjoint(u).flatten(1), u.flatten(1) @ matrix.mT)
    for f, point in ((A.apply, x), (A.adjoint, u)):
        assert torch.autograd.gradcheck(lambda z, f=f: f(z).square(), point, check_batched_grad=True)
        assert torch.autograd.gradgradcheck(lambda z, f=f: f(z).square(), point)
    learned = weight.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda w: A.with_weight(w).adjoint(u.detach()), learned)

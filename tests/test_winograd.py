"""Transformed kernels are the same operator as the definition's, with the same derivatives, where they are chosen."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from minimand.adjoints import Checkpoint, Implicit, Unroll
from minimand.errors import OptionError
from minimand.functions import NonNegative
from minimand.nn import SolverConv2d
from minimand.nn.explain import held_bytes
from minimand.operators import Conv2d
from minimand.operators.winograd import Winograd, _transforms, winograd
from minimand.solvers import Problem, ProxGD, solve

from .cases import solvers
from .cases.operators import dense_matrix

# What torch says of itself when it is first asked for a forward derivative.
FORWARD = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")


def _weight(outputs: int, inputs: int, dtype: torch.dtype = torch.float64) -> Tensor:
    g = torch.Generator().manual_seed(outputs + inputs)
    return torch.randn(outputs, inputs, 3, 3, generator=g, dtype=dtype) / (3 * inputs**0.5)


def _by_kernels(
    operator: Conv2d, x: Tensor, total: Tensor | None = None, keep: float = 0.0, scale: float = 1.0
) -> Tensor:
    kernels = Winograd.of(operator.weight.detach(), operator.geometry)
    return kernels.onto(
        total, keep, x, scale, operator.weight, lambda x, weight: operator.with_weight(weight).normal(x)
    )


@given(
    channels=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    size=st.tuples(st.integers(3, 10), st.integers(3, 10)),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    rows=st.integers(1, 3),
)
def test_the_product_is_that_of_the_dense_matrix(channels, size, padding, rows):
    operator = Conv2d(_weight(*channels), size, padding=padding)
    matrix = dense_matrix(operator)
    x = torch.randn(rows, *operator.output_shape, dtype=torch.float64)
    expected = x.flatten(1) @ matrix @ matrix.T
    torch.testing.assert_close(_by_kernels(operator, x).flatten(1), expected, rtol=0, atol=1e-12)
    total = torch.randn_like(x)
    step = _by_kernels(operator, x, total, 0.7, -0.3)
    torch.testing.assert_close(step.flatten(1), (total + 0.7 * x).flatten(1) - 0.3 * expected, rtol=0, atol=1e-12)


@FORWARD
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("size", [(8, 8), (5, 9)])
def test_first_and_second_derivatives_are_true(size, layout):
    weight = _weight(2, 3).requires_grad_()
    operator = Conv2d(weight, size, padding=1)
    x = torch.randn(2, *operator.output_shape, dtype=torch.float64).to(memory_format=layout).requires_grad_()

    total = torch.randn_like(x, requires_grad=True)

    def step(x: Tensor, weight: Tensor, total: Tensor | None = None) -> Tensor:
        return _by_kernels(operator.with_weight(weight), x, total, 0.7, -0.3)

    for function, arguments in (
        (step, (x, weight, total)),
        (step, (x, weight)),
        (lambda x: step(x, weight.detach()), (x,)),
        (lambda weight: step(x.detach(), weight), (weight,)),
        (lambda total: step(x.detach(), weight.detach(), total), (total,)),
    ):
        assert torch.autograd.gradcheck(function, arguments, check_forward_ad=True)
        assert torch.autograd.gradgradcheck(function, arguments)


def _gradients(layer: SolverConv2d, y: Tensor, **options: bool) -> tuple[Tensor, ...]:
    return torch.autograd.grad(layer(y).sin().sum(), (y, *layer.parameters()), **options)


def test_gradients_that_are_to_be_differentiated_are_the_same():
    """From the second step on, x depends on the weight, too; that part is another step's."""
    layer = SolverConv2d(64, 64, 3, padding=1, solver=ProxGD(3)).double()
    y = torch.randn(8, 64, 8, 8, dtype=torch.float64, requires_grad=True)
    assert layer.operator(y).repeated(8)._kernels is not None
    for one, two in zip(_gradients(layer, y), _gradients(layer, y, create_graph=True), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-12)


def test_several_gradients_at_once_are_those_of_each():
    layer = SolverConv2d(64, 64, 3, padding=1, solver=ProxGD(3)).double()
    y = torch.randn(8, 64, 8, 8, dtype=torch.float64, requires_grad=True)
    assert layer.operator(y).repeated(8)._kernels is not None
    out = layer(y)
    sources, upstream = (y, *layer.parameters()), torch.randn(3, *out.shape, dtype=torch.float64)
    together = torch.autograd.grad(out, sources, upstream, is_grads_batched=True, retain_graph=True)
    apart = [torch.autograd.grad(out, sources, v, retain_graph=True) for v in upstream]
    for found, expected in zip(together, zip(*apart, strict=True), strict=True):
        torch.testing.assert_close(found, torch.stack(expected), rtol=1e-10, atol=1e-12)


def test_one_graph_may_be_walked_by_several_threads():
    layer = SolverConv2d(64, 64, 3, padding=1, solver=ProxGD(4)).double()
    y = torch.randn(8, 64, 8, 8, dtype=torch.float64, requires_grad=True)
    out = layer(y)
    upstream = [torch.randn_like(out) for _ in range(4)]

    def pulled(v: Tensor) -> Tensor:
        return torch.autograd.grad(out, layer.weight, v, retain_graph=True)[0]

    expected = [pulled(v) for v in upstream]
    with ThreadPoolExecutor(4) as pool:
        for one, two in zip(pool.map(pulled, upstream), expected, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-12)


def test_what_is_no_usual_batch_is_as_by_the_definition():
    """No samples, another type, a sum that is broadcast, no batch at all."""
    weight = _weight(64, 64).requires_grad_()
    operator = Conv2d(weight, (8, 8), padding=1)
    ready, x = operator.repeated(8), torch.randn(8, 64, 8, 8, dtype=torch.float64)
    assert ready._kernels is not None
    total = torch.randn(8, 64, 1, 1, dtype=torch.float64)
    for arguments in ((total, 0.5, x, 0.1), (None, 0.5, x[0], 0.1), (x[:1], 0.5, x, 0.1)):
        torch.testing.assert_close(ready.onto(*arguments), operator.onto(*arguments), rtol=0, atol=1e-12)
    (empty,) = torch.autograd.grad(ready.onto(None, 0.5, x[:0], 0.1).sum(), weight)
    assert not empty.any()
    with pytest.raises((RuntimeError, OptionError)):
        ready.normal(x.float())


def test_images_in_groups_are_images_alone(monkeypatch):
    operator = Conv2d(_weight(3, 4).requires_grad_(), (6, 7), padding=1)
    x = torch.randn(5, *operator.output_shape, dtype=torch.float64, requires_grad=True)
    together = [_by_kernels(operator, x)]
    together += torch.autograd.grad(together[0].sin().sum(), (x, operator.weight))
    monkeypatch.setattr("minimand.operators.winograd._GROUP", 2 * 36 * 4 * 4)
    apart = [_by_kernels(operator, x)]
    apart += torch.autograd.grad(apart[0].sin().sum(), (x, operator.weight))
    for one, two in zip(together, apart, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-12)


def test_single_precision_loses_little(monkeypatch):
    """The points were chosen for it: Lavin and Gray's lose twice as much."""
    operator = Conv2d(_weight(64, 64), (16, 16), padding=1)
    x = torch.randn(4, 64, 16, 16, dtype=torch.float64)
    exact, single = operator.normal(x), operator.with_weight(operator.weight.float())

    def error() -> Tensor:
        _transforms.cache_clear()
        return (_by_kernels(single, x.float()) - exact).norm() / exact.norm()

    chosen = error()
    try:
        monkeypatch.setattr("minimand.operators.winograd._POINTS", (0.0, 1.0, -1.0, 2.0, -2.0))
        theirs = error()
    finally:
        _transforms.cache_clear()
    assert chosen < 10 * torch.finfo(torch.float32).eps
    assert chosen < 0.6 * theirs


@pytest.mark.parametrize("solver", [case.solver for case in solvers.DETERMINISTIC], ids=lambda s: type(s).__name__)
@pytest.mark.parametrize(
    "adjoint", [Unroll(), Checkpoint(), Implicit(3, method="neumann")], ids=lambda a: type(a).__name__
)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_layers_agree_with_iterations_by_the_definition(solver, adjoint, layout, monkeypatch):
    layer = SolverConv2d(32, 64, 3, padding=1, solver=solver, adjoint=adjoint).double()
    y = torch.randn(4, 32, 16, 16, dtype=torch.float64).to(memory_format=layout).requires_grad_()
    assert layer.operator(y).repeated(4)._kernels is not None
    found = layer(y)
    assert found.is_contiguous(memory_format=layout)
    gradients = torch.autograd.grad(found.sin().sum(), (y, *layer.parameters()))
    monkeypatch.setattr("minimand.operators.conv.winograd", lambda *arguments: None)
    expected = layer(y)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    for one, two in zip(gradients, torch.autograd.grad(expected.sin().sum(), (y, *layer.parameters())), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-10)


@FORWARD
def test_graphs_and_maps_over_ensembles_take_the_definition():
    layer = SolverConv2d(48, 64, 3, padding=1, solver=ProxGD(3)).double()
    y = torch.randn(4, 48, 16, 16, dtype=torch.float64)
    assert layer.operator(y).repeated(4)._kernels is not None
    expected = layer(y)
    exported = torch.export.export(layer, (y,)).module()
    mapped = torch.func.vmap(layer)(torch.stack([y, y]))[1]
    pushed = torch.func.jvp(layer, (y,), (y,))[0]
    for found in (exported(y), mapped, pushed, torch.compile(layer, backend="eager", fullgraph=True)(y)):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def test_a_solve_answers_in_the_layout_it_was_given():
    operator = Conv2d(_weight(64, 64), (8, 8), padding=1)
    y = torch.randn(8, 64, 8, 8, dtype=torch.float64)
    assert operator.repeated(8)._kernels is not None
    assert solve(Problem(operator, NonNegative(), y), ProxGD(3)).x.is_contiguous()


@pytest.mark.parametrize("where", ["input", "weight"])
def test_channels_last_go_on_as_in_plain_layers(where):
    layer = SolverConv2d(64, 64, 3, padding=1, solver=ProxGD(3))
    plain, y = nn.Conv2d(64, 64, 3, padding=1), torch.randn(8, 64, 8, 8)
    assert layer.operator(y).repeated(8)._kernels is not None
    assert layer(y).stride() == plain(y).stride()
    if where == "input":
        y = y.to(memory_format=torch.channels_last)
    else:
        layer, plain = (module.to(memory_format=torch.channels_last) for module in (layer, plain))
    assert layer(y).stride() == plain(y).stride()


def test_a_frozen_weight_keeps_no_intermediate_images():
    layer, y = SolverConv2d(64, 64, 3, padding=1, solver=ProxGD(4)), torch.randn(8, 64, 8, 8, requires_grad=True)
    learned = held_bytes(layer, y)
    frozen = held_bytes(layer.requires_grad_(False), y)
    assert learned - frozen >= 3 * y.numel() * y.element_size()


def test_transformed_kernels_are_chosen_where_they_pay():
    def chosen(rows: int, channels: int, side: int, **options: object) -> bool:
        operator = Conv2d(torch.randn(channels, channels, options.pop("kernel", 3), 3), (side, side), **options)
        return winograd(operator.weight, operator.geometry, rows) is not None

    assert chosen(16, 64, 16, padding=1)
    assert chosen(16, 512, 4, padding=1)
    assert not chosen(16, 16, 32, padding=1)  # more to transform than to save
    assert not chosen(1, 512, 4, padding=1)  # more kernels than windows
    assert not chosen(64, 512, 2, padding=1)  # tiles half empty
    assert not chosen(16, 64, 16, padding=1, stride=2)
    assert not chosen(16, 64, 16, padding=1, dilation=2)
    assert not chosen(16, 64, 16, padding=3)
    assert not chosen(16, 64, 16, padding=1, kernel=5)
    half = torch.randn(64, 64, 3, 3, dtype=torch.bfloat16)
    assert winograd(half, Conv2d(half, (16, 16), padding=1).geometry, 16) is None

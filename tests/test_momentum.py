"""The update rules that solvers and networks share."""

import pytest
import torch

from minimand.linalg import accumulate

SHAPE = (2, 3, 4, 5)


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # torch's own, of forward derivatives
@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last], ids=["rows", "channels last"])
@pytest.mark.parametrize("shape", [(), (1,), (3, 1, 1)], ids=str)
@pytest.mark.parametrize("alone", [False, True])
def test_accumulate_has_the_derivatives_of_its_formula(form, shape, alone):
    """First, second and forward ones, whatever the layout and whatever the weight is broadcast along."""
    g = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=g, dtype=torch.float64)  # noqa: E731
    total, x = (draw(*SHAPE).contiguous(memory_format=form).requires_grad_() for _ in range(2))
    weight = draw(*shape).requires_grad_()
    arguments = (weight, x) if alone else (weight, x, total)
    function = lambda weight, x, total=None: accumulate(total, weight, x)  # noqa: E731
    torch.testing.assert_close(function(*arguments), weight * x + (0 if alone else total))
    assert torch.autograd.gradcheck(function, arguments, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(function, arguments)


def test_a_learned_weight_stores_only_the_term():
    """Nothing is kept for its gradient but x, which is there anyway, and itself."""
    x, total, weight = torch.randn(8, 8), torch.randn(8, 8, requires_grad=True), torch.ones((), requires_grad=True)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.data_ptr()) or t, lambda t: t):
        accumulate(total, weight, x)
    assert set(kept) == {x.data_ptr(), weight.data_ptr()}


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_layouts_and_types_may_differ(kind):
    """A map in one layout, its gradient in another; short types are summed in a longer one."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn(SHAPE, generator=g).contiguous(memory_format=torch.channels_last)
    weight = torch.tensor(0.5, requires_grad=True)
    accumulate(torch.zeros(SHAPE), weight, x).backward(torch.ones(SHAPE))
    torch.testing.assert_close(weight.grad, x.sum())
    mixed = accumulate(torch.ones(3), weight.detach(), torch.ones(3, dtype=kind))
    torch.testing.assert_close(mixed, torch.full((3,), 1.5))
    long = torch.full((4096,), 1.0, dtype=kind)
    short = torch.tensor(1.0, dtype=kind, requires_grad=True)
    accumulate(torch.zeros_like(long), short, long).sum().backward()
    assert short.grad is not None
    assert float(short.grad) == 4096


def test_a_term_that_is_broadcast_has_its_gradient():
    """One row of a larger matrix, whose strides are those of the sum."""
    x, weight = torch.arange(12.0).reshape(4, 3)[:1], torch.tensor(1.0, requires_grad=True)
    accumulate(torch.zeros(4, 3), weight, x).backward(torch.ones(4, 3))
    assert float(weight.grad) == 4 * float(x.sum())


def test_transforms_of_functions_take_learned_weights():
    """The weight is wrapped, the term is not; and a batch of gradients at once."""
    x, total = torch.randn(3, 2), torch.randn(3, 2)
    found = torch.func.grad(lambda weight: accumulate(total, weight, x).sum())(torch.tensor(0.5))
    torch.testing.assert_close(found, x.sum())
    weight = torch.tensor(0.5, requires_grad=True)
    out = accumulate(total, weight, x)
    rows = torch.randn(2, 3, 4).mT[..., :3, :].contiguous().mT[:, :2].mT
    (many,) = torch.autograd.grad(out, weight, rows, is_grads_batched=True)
    torch.testing.assert_close(many, (rows * x).sum((1, 2)))

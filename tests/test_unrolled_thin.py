"""Convolutions with one channel on one side, against torch's."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from minimand.nn import Architecture
from minimand.nn.unrolled.thin import ThinConv2d
from minimand.nn.unrolled.transform import Transform

BOTH_WAYS = [(4, 1), (1, 4)]


def _layer(inputs: int, outputs: int, size: int = 3) -> ThinConv2d:
    torch.manual_seed(0)
    return ThinConv2d(inputs, outputs, size).double()


def _image(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@given(
    channels=st.integers(1, 5),
    outwards=st.booleans(),
    size=st.sampled_from([1, 3, 5]),
    batch=st.integers(0, 3),
    height=st.integers(1, 6),
    width=st.integers(1, 6),
)
def test_it_is_the_convolution_with_zero_padding(
    channels: int, outwards: bool, size: int, batch: int, height: int, width: int
) -> None:
    inputs, outputs = (1, channels) if outwards else (channels, 1)
    layer, x = _layer(inputs, outputs, size), _image(batch, inputs, height, width)
    for layout in (torch.contiguous_format, torch.channels_last):
        ours = layer(x.contiguous(memory_format=layout))
        torch.testing.assert_close(ours, F.conv2d(x, layer.weight, padding=size // 2), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("inputs", "outputs"), BOTH_WAYS)
def test_first_and_second_derivatives(inputs: int, outputs: int) -> None:
    layer, x = _layer(inputs, outputs), _image(2, inputs, 3, 4).requires_grad_()

    def call(x: Tensor, weight: Tensor) -> Tensor:
        return torch.func.functional_call(layer, {"weight": weight}, (x,))

    point = (x, layer.weight.detach().requires_grad_())
    assert torch.autograd.gradcheck(call, point)
    assert torch.autograd.gradgradcheck(call, point)


@pytest.mark.parametrize(("inputs", "outputs"), BOTH_WAYS)
def test_it_is_mapped_compiled_and_exported(inputs: int, outputs: int) -> None:
    layer, x = _layer(inputs, outputs), _image(3, 2, inputs, 4, 5)
    torch.testing.assert_close(torch.func.vmap(layer)(x), torch.stack([layer(each) for each in x]))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for call in (compiled, torch.export.export(layer, (x[0],)).module()):
        torch.testing.assert_close(call(x[0]), layer(x[0]))


@pytest.mark.parametrize("size", [2, 4])
def test_an_even_kernel_or_two_wide_sides_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match="odd kernel"):
        ThinConv2d(1, 4, size)
    with pytest.raises(ValueError, match="one channel on one side"):
        ThinConv2d(2, 4)


@pytest.mark.parametrize("residual", [False, True])
def test_a_transform_uses_it_exactly_where_a_side_is_thin(residual: bool) -> None:
    thin = Transform(Architecture(channels=4), residual=residual)
    assert sum(isinstance(module, ThinConv2d) for module in thin.modules()) == 2
    squares = Transform(Architecture(channels=4, shuffle=2), residual=residual)
    assert not any(isinstance(module, ThinConv2d) for module in squares.modules())

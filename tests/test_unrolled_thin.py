"""The convolution to one channel, against torch's."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from minimand.nn import Architecture
from minimand.nn.unrolled.thin import ToImage
from minimand.nn.unrolled.transform import Transform


def _layer(inputs: int = 4, size: int = 3) -> ToImage:
    torch.manual_seed(0)
    return ToImage(inputs, size).double()


def _features(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@given(
    channels=st.integers(1, 5),
    size=st.sampled_from([1, 3, 5]),
    batch=st.integers(0, 3),
    height=st.integers(1, 6),
    width=st.integers(1, 6),
)
def test_it_is_the_convolution_with_zero_padding(channels: int, size: int, batch: int, height: int, width: int) -> None:
    layer, x = _layer(channels, size), _features(batch, channels, height, width)
    for layout in (torch.contiguous_format, torch.channels_last):
        ours = layer(x.contiguous(memory_format=layout))
        torch.testing.assert_close(ours, F.conv2d(x, layer.weight, padding=size // 2), rtol=1e-12, atol=1e-12)


def test_first_and_second_derivatives() -> None:
    layer, x = _layer(), _features(2, 4, 3, 4).requires_grad_()

    def call(x: Tensor, weight: Tensor) -> Tensor:
        return torch.func.functional_call(layer, {"weight": weight}, (x,))

    point = (x, layer.weight.detach().requires_grad_())
    assert torch.autograd.gradcheck(call, point)
    assert torch.autograd.gradgradcheck(call, point)


def test_it_is_mapped_compiled_and_exported() -> None:
    layer, x = _layer(), _features(3, 2, 4, 4, 5)
    torch.testing.assert_close(torch.func.vmap(layer)(x), torch.stack([layer(each) for each in x]))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for call in (compiled, torch.export.export(layer, (x[0],)).module()):
        torch.testing.assert_close(call(x[0]), layer(x[0]))


def test_an_even_kernel_is_refused() -> None:
    with pytest.raises(ValueError, match="no centre"):
        ToImage(4, 2)


@pytest.mark.parametrize("residual", [False, True])
def test_a_transform_writes_its_image_with_it_unless_pixel_squares_are_channels(residual: bool) -> None:
    for shuffle, count in ((1, 1), (2, 0)):
        transform = Transform(Architecture(channels=4, shuffle=shuffle), residual=residual)
        assert sum(isinstance(module, ToImage) for module in transform.modules()) == count

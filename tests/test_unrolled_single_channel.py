"""The convolution to one channel, against torch's."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import forward_ad
from torch.export import Dim

from minimand.errors import OptionError, ShapeError
from minimand.nn import Architecture
from minimand.nn.unrolled.single_channel import SingleChannelConv2d
from minimand.nn.unrolled.transform import Transform


def _layer(inputs: int = 4, size: int = 3) -> SingleChannelConv2d:
    torch.manual_seed(0)
    return SingleChannelConv2d(inputs, size).double()


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


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_forward_derivatives() -> None:
    layer, x, v = _layer(), _features(2, 4, 3, 4), _features(2, 4, 4, 3).mT
    _, change = torch.func.jvp(layer, (x,), (v,))
    torch.testing.assert_close(change, layer(v))
    with forward_ad.dual_level():
        change = forward_ad.unpack_dual(layer(forward_ad.make_dual(x, v))).tangent
    torch.testing.assert_close(change, layer(v))


def test_it_is_mapped_compiled_and_exported() -> None:
    layer, x = _layer(), _features(3, 2, 4, 4, 5)
    torch.testing.assert_close(torch.func.vmap(layer)(x), torch.stack([layer(each) for each in x]))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    named = {"x": {0: Dim("batch"), 2: Dim("height"), 3: Dim("width")}}
    for call in (compiled, torch.export.export(layer, (x[0],), dynamic_shapes=named).module()):
        for images in (x[0], _features(3, 4, 7, 6)):
            torch.testing.assert_close(call(images), layer(images))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_rounds_no_more_than_torchs(dtype: torch.dtype) -> None:
    layer, x = _layer(16), _features(2, 16, 9, 9)
    exact = layer(x)
    low = layer.to(dtype)(x.to(dtype)).double()
    theirs = F.conv2d(x.to(dtype), layer.weight, padding=1).double()
    assert (low - exact).norm() <= 2 * (theirs - exact).norm()


def test_an_even_kernel_and_other_features_are_refused() -> None:
    with pytest.raises(OptionError, match="must be odd"):
        SingleChannelConv2d(4, 2)
    for shape in ((2, 8, 5, 5), (4, 5, 5)):
        with pytest.raises(ShapeError, match="expected features N × 4 × H × W"):
            SingleChannelConv2d(4)(torch.zeros(shape))


@pytest.mark.parametrize("residual", [False, True])
def test_a_transform_writes_its_image_with_it_unless_pixel_squares_are_channels(residual: bool) -> None:
    for shuffle, count in ((1, 1), (2, 0)):
        transform = Transform(Architecture(channels=4, shuffle=shuffle), residual=residual)
        assert sum(isinstance(module, SingleChannelConv2d) for module in transform.modules()) == count

"""Laws of a convolution's geometry: sizes and products are torch's, in one, two and three dimensions."""

import dataclasses

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

from minimand.errors import CapabilityError, OptionError, ShapeError
from minimand.geometry import PADDING_MODES, ConvGeometry

MODULES = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


@st.composite
def modules(draw: st.DrawFn) -> tuple[nn.Module, tuple[int, ...]]:
    d = draw(st.integers(1, 3))

    def several(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(d))

    groups = draw(st.integers(1, 2))
    padding = draw(st.sampled_from(["valid", "same", "numbers"]))
    stride = (1,) * d if padding == "same" else several(1, 3)
    options = {"stride": stride, "dilation": several(1, 2), "groups": groups, "bias": False}
    options["padding_mode"] = draw(st.sampled_from(PADDING_MODES))
    given = several(0, 2) if padding == "numbers" else padding
    return MODULES[d](2 * groups, 3 * groups, several(1, 3), padding=given, **options).double(), several(2, 6)


def _fitting(module: nn.Module, size: tuple[int, ...]) -> ConvGeometry:
    try:
        return ConvGeometry.of(module, size).fitting()
    except ShapeError:
        assume(False)
        raise


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@given(modules())
def test_sizes_and_products_are_those_of_torch(case: tuple[nn.Module, tuple[int, ...]]) -> None:
    module, size = case
    geometry = _fitting(module, size)
    y = torch.randn(2, module.in_channels, *size, dtype=torch.float64)
    x = geometry.convolve(y, module.weight)
    assert x.shape[2:] == geometry.output()
    assert torch.equal(x, module(y))
    e = torch.randn_like(x)
    back = geometry.transpose(e, module.weight)
    assert back.shape == y.shape
    torch.testing.assert_close((x * e).sum(), (y * back).sum())
    padded = geometry.without_padding()
    torch.testing.assert_close(padded.convolve(geometry.pad(y), module.weight), x)
    assert padded.output() == geometry.output()


@given(modules())
def test_overlaps_bound_the_windows_of_an_input_and_the_inputs_of_a_window(
    case: tuple[nn.Module, tuple[int, ...]],
) -> None:
    """By products with a kernel of ones, whose entries count taps."""
    module, size = case
    for geometry in (_fitting(module, size), ConvGeometry.of(module)):
        shared, summed = geometry.overlaps()
        plain = dataclasses.replace(geometry, groups=1, size=size)
        weight = torch.ones(1, 1, *plain.kernel, dtype=torch.float64)
        assert plain.transpose(torch.ones(1, 1, *plain.output(), dtype=torch.float64), weight).max() <= shared
        assert plain.convolve(torch.ones(1, 1, *size, dtype=torch.float64), weight).max() <= summed


def test_bad_geometries_are_refused() -> None:
    with pytest.raises(CapabilityError, match="Linear"):
        ConvGeometry.of(nn.Linear(2, 2))
    with pytest.raises(OptionError, match="input_size"):
        ConvGeometry.of(nn.Conv2d(1, 1, 3)).output()
    with pytest.raises(OptionError, match="stride must be 2 integers"):
        ConvGeometry.build((3, 3), stride=0)
    with pytest.raises(ShapeError, match=r"\(3, 3\).*\(2, 2\)"):
        ConvGeometry.of(nn.Conv2d(1, 1, 3), (2, 2)).fitting()
    with pytest.raises(OptionError, match=r"padding_mode must be one of zeros, .*, got 'mirror'"):
        ConvGeometry.build((3, 3), mode="mirror")
    with pytest.raises(ShapeError, match=r"padding_mode='reflect' with a padding of 2 needs a map of 3 or more, got 2"):
        ConvGeometry.build((3,), 2, padding=2, mode="reflect").fitting()

"""Unrolled networks start as their solver and improve by training."""

import pytest
import torch
from torch import Tensor

from minimand.errors import OptionError
from minimand.nn import Architecture, ISTANet, least_squares_start
from minimand.nn.unrolled.parameters import assign
from minimand.nn.unrolled.transform import Transform
from minimand.operators import BlockSensing, orthonormal_gaussian, to_blocks


def _images(count: int, side: int) -> Tensor:
    """Overlapping rectangles of constant brightness."""
    g = torch.Generator().manual_seed(3)
    images = torch.rand(count, 1, 1, 1, generator=g).expand(count, 1, side, side).clone()
    for image in images:
        for _ in range(5):
            top, left = torch.randint(side, (2,), generator=g).tolist()
            image[:, top : top + side // 2, left : left + side // 2] = torch.rand(1, generator=g).item()
    return images


@pytest.mark.parametrize("plus", [False, True])
@pytest.mark.parametrize(("depth", "shuffle", "channels"), [(1, 1, 3), (2, 1, 2), (2, 2, 9), (4, 1, 5)])
def test_a_network_starts_as_the_data_step(depth: int, shuffle: int, channels: int, plus: bool) -> None:
    phi = orthonormal_gaussian(5, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    shape = Architecture(channels, depth, shuffle, scale=1e-12)
    net = ISTANet(phi, 3, plus, architecture=shape)
    assign(net, "threshold", torch.zeros(3).double())
    assign(net, "step", torch.full((3,), 0.7).double())
    y = torch.rand(2, 5, dtype=torch.float64)
    x = y @ phi
    for _ in range(3):
        x = x - 0.7 * (x @ phi.mT - y) @ phi
    torch.testing.assert_close(net(y), x, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_flat_patches_have_no_coefficients_but_the_carried_ones(depth: int) -> None:
    flat = torch.full((1, 1, 15, 15), 0.6)
    residual = Transform(Architecture(6, depth), residual=True)
    plain = Transform(Architecture(6, depth), residual=False)
    inside = (..., slice(6, 9), slice(6, 9))
    assert residual.analyze(residual.features(flat))[inside].abs().max() < 1e-6
    coefficients = plain.analyze(plain.features(flat))[inside]
    torch.testing.assert_close(coefficients[:, 0], torch.full((1, 3, 3), 0.6))
    assert coefficients[:, 1:].abs().max() < 1e-6
    brightness = Transform(Architecture(6, depth, start="xavier"), residual=False)
    assert brightness.analyze(flat)[inside].abs().max() > 1e-2


def test_too_few_channels_to_carry_the_image_start_at_random() -> None:
    transform = Transform(Architecture(1, 2), residual=False)
    x = torch.rand(1, 1, 5, 5)
    assert not torch.allclose(transform.synthesize(transform.analyze(x)), x, atol=1e-2)


@pytest.mark.parametrize("plus", [False, True])
def test_training_leaves_the_linear_start_behind(plus: bool) -> None:
    torch.manual_seed(0)
    images = _images(24, 18)
    phi = orthonormal_gaussian(24, 81, generator=torch.Generator().manual_seed(0))
    start = least_squares_start(phi, to_blocks(images, 9), ridge=1e-5)
    operator = BlockSensing(phi, (18, 18))
    y = operator.apply(images)
    linear = BlockSensing(start.mT.contiguous(), (18, 18)).adjoint(y)
    net = ISTANet(phi, 3, plus, architecture=Architecture(12), constrained=True, initial=start)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    for _ in range(120):
        loss = net.loss(y, images, symmetry=0.0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    # A transform whose coefficients all fell below their threshold stays at one.
    assert loss.item() < 0.9 * (linear - images).square().mean().item()


def test_an_unknown_start_is_refused() -> None:
    with pytest.raises(OptionError, match='"solver" or "xavier", got \'zeros\''):
        Architecture(start="zeros")  # type: ignore[arg-type]

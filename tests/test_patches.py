"""Laws: a convolution is a product of its patches with its weight; a folded batch norm is the layer."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from minimand.geometry import ConvGeometry
from minimand.operators.batchnorm import fold_batch_norm
from minimand.operators.patches import patches, positions_as_rows

KINDS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


@given(
    dims=st.integers(1, 3),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 3),
    padding=st.integers(0, 2),
    dilation=st.integers(1, 2),
    groups=st.sampled_from([1, 2]),
    batch=st.integers(0, 3),
)
def test_patches_times_the_weight_are_the_convolution(dims, kernel, stride, padding, dilation, groups, batch):
    conv = KINDS[dims](4, 6, kernel, stride, padding, dilation, groups, bias=False).double()
    x = torch.randn(batch, 4, *(7, 6, 5)[:dims], dtype=torch.float64)
    rows = patches(x, ConvGeometry.of(conv))
    product = torch.cat(list(rows @ conv.weight.flatten(1).unflatten(0, (groups, -1)).mT), -1)
    torch.testing.assert_close(product, positions_as_rows(conv(x)))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm1d(3),
        nn.BatchNorm2d(3),
        nn.BatchNorm2d(3, affine=False),
        nn.BatchNorm2d(3, momentum=None),
        nn.BatchNorm2d(3, track_running_stats=False),
    ],
    ids=["1d", "2d", "not affine", "cumulative", "no running statistics"],
)
def test_a_folded_batch_norm_is_the_layer_and_moves_its_statistics(norm, training):
    torch.manual_seed(0)
    norm = norm.double().train(training)
    if norm.affine:
        nn.init.normal_(norm.weight), nn.init.normal_(norm.bias)
    other = type(norm)(3, norm.eps, norm.momentum, norm.affine, norm.track_running_stats).double().train(training)
    other.load_state_dict(norm.state_dict())
    z = 2 * torch.randn(8, 3, *(4, 5) * isinstance(norm, nn.BatchNorm2d), dtype=torch.float64) + 1
    with torch.no_grad():
        scale, shift, statistics = fold_batch_norm(norm, z)
        shape = (-1, *(1,) * (z.dim() - 2))
        torch.testing.assert_close(z * scale.reshape(shape) + shift.reshape(shape), other(z))
    assert (statistics is None) == (not training and norm.track_running_stats)
    if statistics is not None and training:
        statistics.update_running(norm)
    torch.testing.assert_close(norm.state_dict(), other.state_dict())

"""Laws of the weight step of lifted methods: ridge regressions, of all rows together or by blocks."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from minimand.errors import NonFiniteError, OptionError
from minimand.train.lifted import LPOM, Recipe
from minimand.train.lifted.weights import ridge_shift, weight_direction, weight_directions


@pytest.mark.parametrize("block", [None, 4, 5, 64])
@pytest.mark.parametrize("bias", [True, False])
def test_layers_regressed_at_once_have_their_own_directions(block, bias):
    """For any blocks, the mean of the ridge regressions of the blocks' rows (dense oracle)."""
    torch.manual_seed(0)
    samples, damping = 12, 0.3
    net = nn.Sequential(*(nn.Linear(*size, bias=bias) for size in ((9, 20), (20, 2), (2, 7), (7, 1)))).double()
    maps = LPOM(net).chain.forward(torch.randn(samples, 9, dtype=torch.float64))[2]
    layers = []
    for affine in maps:
        outputs, inputs = affine.layer.weight.shape
        x, residual = (torch.randn(samples, width, dtype=torch.float64) for width in (inputs, outputs))
        layers.append((affine, x, residual))
    for (affine, x, residual), direction in zip(
        layers, weight_directions(layers, [damping] * 4, block=block), strict=True
    ):
        wide = torch.cat([x, torch.ones(samples, 1, dtype=torch.float64)], 1) if bias else x
        shift = ridge_shift(x, damping, bias)
        whole = block is None or min(samples, block) >= wide.shape[1]
        parts = 1 if whole or samples % max(1, samples // block) else max(1, samples // block)
        means = [
            torch.linalg.solve(part.mT @ part + shift / parts * torch.eye(part.shape[1]), part.mT @ goal).mT
            for part, goal in zip(wide.chunk(parts), residual.chunk(parts), strict=True)
        ]
        torch.testing.assert_close(direction.dense(), torch.stack(means).mean(0))
        torch.testing.assert_close(
            direction.dense(), weight_direction(affine, x, residual, damping, block=block).dense()
        )


def test_what_one_layer_needs_is_not_added_to_the_others():
    """Rows of size 1e6, two of them equal, with a tiny ridge: only this layer needs additional damping."""
    g = torch.Generator().manual_seed(0)
    net = nn.Sequential(nn.Linear(9, 8), nn.Linear(8, 7))
    maps = LPOM(net).chain.forward(torch.randn(6, 9, generator=g))[2]
    large = 1e6 * torch.randn(6, 8, generator=g)
    large[1] = large[0]
    layers = [(maps[0], torch.randn(6, 9, generator=g), torch.ones(6, 8)), (maps[1], large, torch.ones(6, 7))]
    for layer, direction in zip(layers, weight_directions(layers, [1e-6] * 2, block=6), strict=True):
        torch.testing.assert_close(direction.dense(), weight_direction(*layer, 1e-6, block=6).dense())


def test_a_layer_that_cannot_be_regressed_is_named():
    net = nn.Sequential(nn.Linear(9, 8), nn.Linear(8, 7))
    maps = LPOM(net).chain.forward(torch.randn(6, 9))[2]
    layers = [
        (maps[0], torch.randn(6, 9), torch.randn(6, 8)),
        (maps[1], torch.full((6, 8), math.nan), torch.ones(6, 7)),
    ]
    with pytest.raises(NonFiniteError, match="weight update of 1"):
        weight_directions(layers, [1.0] * 2, block=3)


def test_patches_are_regressed_together_however_short_the_blocks():
    """All patches of the batch are regressed together, although a block has fewer rows than weights (dense oracle)."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(192, 3)).double()
    x = torch.randn(10, 2, 8, 8, dtype=torch.float64)
    affine = LPOM(net).chain.forward(x)[2][0]
    residual = torch.randn(10, 3, 8, 8, dtype=torch.float64)
    rows = F.pad(F.unfold(x, 3, padding=1).mT.flatten(0, 1), (0, 1), value=1.0)
    system = rows.mT @ rows + 0.3 * rows.square().sum() / 19 * torch.eye(19, dtype=torch.float64)
    expected = torch.linalg.solve(system, rows.mT @ residual.flatten(2).mT.flatten(0, 1)).mT
    torch.testing.assert_close(weight_direction(affine, x, residual, 0.3, block=4).dense(), expected)


@pytest.mark.parametrize("block", [None, 4])
def test_damping_is_free_of_scale(block):
    """Inputs that are c times as large change the weights 1/c times as much, and z as much as before."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(9, 5, bias=False)).double()
    x, residual = torch.randn(12, 9, dtype=torch.float64), torch.randn(12, 5, dtype=torch.float64)
    affine = LPOM(net).chain.forward(x)[2][0]
    plain = weight_direction(affine, x, residual, 0.3, block=block).dense()
    for scale in (1e-6, 1e4):
        found = weight_direction(affine, scale * x, residual, 0.3, block=block).dense()
        torch.testing.assert_close(scale * found, plain)


def test_dampings_of_layers_are_their_own():
    """A layer with a huge damping hardly moves, the others move as before; a wrong number of dampings is refused."""
    x, y = torch.randn(16, 4), torch.randint(0, 3, (16,))
    moved = []
    for damping in (0.5, (1e9, 0.5, 0.5)):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
        start = [layer.weight.detach().clone() for layer in net[::2]]
        LPOM(net, recipe=Recipe(damping=damping)).fit([(x, y)], 1)
        moved.append([layer.weight.detach() - old for layer, old in zip(net[::2], start, strict=True)])
    assert float(moved[1][0].abs().max()) < 1e-6 < float(moved[0][0].abs().max())
    torch.testing.assert_close(moved[0][1:], moved[1][1:])
    with pytest.raises(OptionError, match="2 entries, but the network has 3 layers"):
        LPOM(net, recipe=Recipe(damping=(1.0, 2.0))).fit([(x, y)], 1)
    with pytest.raises(OptionError, match=r"Recipe\.damping must be"):
        Recipe(damping=(1.0, -2.0))

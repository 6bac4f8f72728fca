"""Laws of lifted convolutions, poolings and batch normalisation (experimental)."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from minimand.errors import ChainError
from minimand.train.lifted import LPOM, MAC, BlockPenalty, Recipe
from minimand.train.lifted.chain import parse
from minimand.train.lifted.maps import _fixed_map

NETS = {
    "plain": lambda: nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(3, 4, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(36, 3),
    ),
    "average": lambda: nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.Tanh(), nn.AvgPool2d(3, stride=2, padding=1), nn.Flatten(), nn.Linear(27, 3)
    ),
    "maximum": lambda: nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.ReLU(), nn.MaxPool2d(3, stride=2), nn.Flatten(), nn.Linear(12, 3)
    ),
    "normalised": lambda: nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.LeakyReLU(), nn.Flatten(), nn.Linear(108, 3)
    ),
}


def _setup(name):
    torch.manual_seed(0)
    net = NETS[name]().double()
    side = {"plain": 8, "average": 8, "maximum": 7, "normalised": 8}[name]
    return net, torch.randn(10, 2, side, side, dtype=torch.float64), torch.randint(3, (10,))


@pytest.mark.parametrize("name", list(NETS))
def test_maps_are_affine_with_their_adjoint_and_norm(name):
    net, x, _ = _setup(name)
    with torch.no_grad():
        xs, zs, maps = parse(net).forward(x)
        torch.testing.assert_close(xs[-1], net(x))
        for k, affine in enumerate(maps):
            u, e = torch.randn_like(xs[k]), torch.randn_like(zs[k])
            image = affine.linear(u)
            torch.testing.assert_close(affine.apply(u) - affine.apply(torch.zeros_like(u)), image)
            torch.testing.assert_close((image * e).sum(), (u * affine.adjoint(e)).sum())
            assert image.square().sum() <= affine.norm_sq() * u.square().sum()
            dense = torch.stack([affine.linear(row.unsqueeze(0).expand_as(u))[0].flatten() for row in _basis(u[0])])
            assert float(torch.linalg.matrix_norm(dense, 2)) ** 2 <= affine.norm_sq() * (1 + 1e-9)
            layer = affine.layer
            columns = affine.rows(xs[k]) @ layer.weight.flatten(1).mT + (0 if layer.bias is None else layer.bias)
            plain = zs[k] if affine.scale is None else layer.module(affine.inputs(xs[k]))
            torch.testing.assert_close(columns, affine.columns(plain))


POOLINGS = [
    *(
        nn.MaxPool2d(k, s, p, d, ceil_mode=c)
        for k, s, p, d, c in itertools.product((2, 3), (1, 2, 3), (0, 1), (1, 2, 3), (False, True))
    ),
    *(
        nn.AvgPool2d(k, s, p, ceil_mode=c, count_include_pad=i)
        for k, s, p, c, i in itertools.product((2, 3, 5), (1, 2, 3), (0, 1), (False, True), (False, True))
    ),
]


@pytest.mark.parametrize("kind", [nn.MaxPool2d, nn.AvgPool2d])
def test_norms_of_poolings_are_never_below_the_truth(kind):
    """For all kernels, strides, paddings, dilations and ceil modes, against singular values of the dense matrix."""
    torch.manual_seed(0)
    for module in (module for module in POOLINGS if isinstance(module, kind)):
        for x in (torch.randn(1, 1, 7, 7, dtype=torch.float64), -_cone()):
            stage = _fixed_map(module, x)
            torch.testing.assert_close(stage.apply(x), module(x))
            dense = torch.stack([stage.apply(row.unsqueeze(0)).flatten() for row in _basis(x[0])])
            truth = float(torch.linalg.matrix_norm(dense, 2)) ** 2
            assert truth <= stage.norm_sq() * (1 + 1e-12), module
            if kind is nn.MaxPool2d:
                assert stage.norm_sq() <= truth * (1 + 1e-12), module


def _cone():
    """A map with its maximum in the middle, which the largest number of windows then select."""
    axis = torch.arange(7, dtype=torch.float64) - 3
    return (axis[:, None].square() + axis.square()).reshape(1, 1, 7, 7)


def _basis(like):
    return torch.eye(like.numel(), dtype=like.dtype).unflatten(1, like.shape)


@pytest.mark.parametrize("name", list(NETS))
def test_energy_is_the_loss_and_never_rises(name):
    net, x, y = _setup(name)
    loss = float(F.cross_entropy(net(x), y, reduction="sum").detach())
    for method in (LPOM, MAC, BlockPenalty):
        method = method(NETS[name]().double(), loss="cross_entropy")
        method.model.load_state_dict(net.state_dict())
        energies = [method.energy(x, y), *(method.step(x, y) for _ in range(6))]
        assert energies[0] == pytest.approx(loss, abs=1e-10)
        assert all(b <= a + 1e-9 for a, b in itertools.pairwise(energies))
        assert energies[-1] < energies[0]


@pytest.mark.parametrize("name", list(NETS))
def test_fast_fit_lowers_the_loss(name):
    net, x, y = _setup(name)
    history = LPOM(net, loss="cross_entropy", recipe=Recipe(damping=0.3)).fit([(x, y)], 40)
    assert history[-1].energy < 0.8 * history[0].energy


def _normalized(activation, training=True):
    torch.manual_seed(0)
    parts = (nn.Linear(6, 8), nn.BatchNorm1d(8), activation(), nn.Linear(8, 7), nn.BatchNorm1d(7), activation())
    net = nn.Sequential(*parts, nn.Linear(7, 3)).double().train(training)
    return net, torch.randn(40, 6, dtype=torch.float64), torch.randint(0, 3, (40,))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("activation", [nn.ReLU, nn.Sigmoid])
def test_scale_and_shift_of_normalisations_are_trained(activation, training):
    """Their step is the minimiser of the majoriser, so the energy never rises; frozen ones stay."""
    net, x, y = _normalized(activation, training)
    kept = [p.detach().clone() for p in net[1].parameters()]
    lpom = LPOM(net)
    energies = [lpom.energy(x, y), *(lpom.step(x, y) for _ in range(10))]
    assert energies == sorted(energies, reverse=True)
    assert lpom.energy(x, y) == pytest.approx(energies[-1])
    assert all(not torch.equal(p, q) for p, q in zip(net[1].parameters(), kept, strict=True))
    net, x, y = _normalized(activation, training)
    net[4].requires_grad_(False)
    history = LPOM(net, recipe=Recipe(damping=0.3)).fit([(x, y)], 20)
    assert history[-1].loss < history[0].loss
    assert all(not torch.equal(p, q) for p, q in zip(net[1].parameters(), kept, strict=True))
    assert torch.equal(net[4].weight, torch.ones(7).double())


def test_the_step_of_a_normalisation_is_its_regression():
    net, x, _ = _normalized(nn.ReLU)
    affine = parse(net).layers[0].affine_map(x)
    e = torch.randn(40, 8, dtype=torch.float64)
    found = torch.stack(affine.norm_direction(x, e, 1e-12))
    with torch.no_grad():
        u = (net[0](x) - net[0](x).mean(0)) / (net[0](x).var(0, unbiased=False) + net[1].eps).sqrt()
    for k in range(8):
        wide = torch.stack([u[:, k], torch.ones(40, dtype=torch.float64)], 1)
        torch.testing.assert_close(found[:, k], torch.linalg.lstsq(wide, e[:, k]).solution)


def test_refuses_convolutions_it_does_not_know():
    with pytest.raises(ChainError, match=r"0 \(Conv2d\) has groups=2"):
        MAC(nn.Sequential(nn.Conv2d(2, 4, 3, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(4, 2)))
    with pytest.raises(ChainError, match="Flatten"):
        MAC(nn.Sequential(nn.Flatten(2), nn.Linear(4, 2)))

"""Law: every derivative of a reconstruction network, in its measurements and parameters, agrees with differences."""

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from minimand.adjoints import Implicit
from minimand.nn import ADMMNet, Architecture, FISTANet, ISTANet, RidgeNet
from minimand.operators import orthonormal_gaussian
from minimand.solvers import FISTA, Huber, solve

from .test_derivatives import FIRST, SECOND

WIDTH = 1e-5
PHI = orthonormal_gaussian(4, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
RANDOM = torch.randn(4, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64) / 4
SMALL = Architecture(channels=3)
NETS = {
    "ista": lambda: ISTANet(PHI, 2, plus=True, architecture=SMALL),
    "fista": lambda: FISTANet(PHI, 2, architecture=SMALL),
    "admm": lambda: ADMMNet(PHI, 2, architecture=SMALL),
    "ridge, exact": lambda: RidgeNet(PHI, 2, 3, 3),
    "ridge, noisy": lambda: RidgeNet(RANDOM, 2, 3, 3, noise=0.1),
    "ridge, huber": lambda: RidgeNet(RANDOM, 2, 3, 3, noise=0.1, datafit=Huber(0.2)),
}


class _Loss:
    """A number that depends on the measurements and on all parameters, as a function of one vector."""

    def __init__(self, net: nn.Module) -> None:
        self.net = net.double()
        generator = torch.Generator().manual_seed(1)
        self.y = 0.3 * torch.rand(2, 4, generator=generator, dtype=torch.float64)
        for parameter in net.parameters():
            parameter.data += 0.01 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        self.parts = {"y": self.y, **{name: value.detach() for name, value in net.named_parameters()}}
        self.point = torch.cat([part.flatten() for part in self.parts.values()])
        self.along = torch.randn(self.point.shape, generator=generator, dtype=torch.float64)
        # Directions in proportion to the entries: thresholds and scales are of very different sizes.
        self.along *= self.point.abs().clamp_min(0.01)

    def __call__(self, vector: Tensor) -> Tensor:
        sizes = [part.numel() for part in self.parts.values()]
        values = zip(self.parts, vector.split(sizes), strict=True)
        given = {name: value.reshape(self.parts[name].shape) for name, value in values}
        x = functional_call(self.net, {name: value for name, value in given.items() if name != "y"}, (given["y"],))
        return (x * torch.linspace(-1, 1, x.numel(), dtype=x.dtype).reshape(x.shape) + 0.5 * x * x).sum()


@pytest.mark.parametrize("name", NETS)
def test_every_derivative_of_the_phases(name: str) -> None:
    torch.manual_seed(0)
    f = _Loss(NETS[name]())
    ends = [(f.point + sign * WIDTH * f.along).requires_grad_() for sign in (1, -1)]
    values = [f(end) for end in ends]
    slopes = [torch.autograd.grad(value, end)[0] @ f.along for value, end in zip(values, ends, strict=True)]
    few = {name: rule for name, rule in SECOND.items() if name not in ("func.hessian", "jacrev of grad")}
    for table, (high, low) in ((FIRST, values), (few, slopes)):
        for way, transform in table.items():
            found, expected = transform(f, f.point, f.along), (high - low).detach() / (2 * WIDTH)
            torch.testing.assert_close(
                found, expected, rtol=1e-5, atol=1e-6, msg=lambda text, way=way: f"{way}: {text}"
            )


def test_a_tail_has_one_derivative_in_every_mode() -> None:
    """That of its last iterations: what comes before them is a start."""
    net, y = RidgeNet(PHI, 2, 3, 3, noise=0.1).double(), torch.full((1, 4), 0.2, dtype=torch.float64)
    f = lambda v: net.loss(v[None], torch.full((1, 9), 0.5, dtype=v.dtype), tail=3)  # noqa: E731
    along = torch.ones_like(y[0])
    slopes = [FIRST[way](f, y[0], along).detach() for way in ("backward", "dual", "jacfwd")]
    torch.testing.assert_close(slopes[1:], slopes[:1] * 2)


@pytest.mark.parametrize("noise", [None, 0.1], ids=["exact", "noisy"])
def test_the_minimum_has_the_gradient_of_its_measurements(noise: float | None) -> None:
    net, along = RidgeNet(PHI, 2, 3, 3, "convex", noise=noise).double(), torch.linspace(-1, 1, 4).double()
    f = lambda y: solve(net.problem(y), FISTA(600), adjoint=Implicit()).x.square().sum()  # noqa: E731
    y = torch.full((1, 4), 0.2, dtype=torch.float64, requires_grad=True)
    (found,) = torch.autograd.grad(f(y), y)
    with torch.no_grad():
        expected = float(f(y + 1e-4 * along) - f(y - 1e-4 * along)) / 2e-4
    assert float(found[0] @ along) == pytest.approx(expected, rel=1e-4)

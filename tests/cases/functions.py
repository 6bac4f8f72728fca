"""Every function of the library, listed once; the laws run over this list."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minimand import functions as mf

__all__ = ["ACTIVATIONS", "ALL", "CONJUGATE", "SEPARABLE", "SMOOTH", "FunctionCase", "cases", "draw"]


@dataclass(frozen=True)
class FunctionCase:
    """A function, the shape of its points, and the laws that apply to it."""

    name: str
    function: mf.Function
    shape: tuple[int, ...] = (7,)
    #: The prox is twice differentiable everywhere.
    smooth: bool = False
    #: The conjugate is a class of its own with a prox of its own.
    conjugate: bool = True


def _activation(name: str, act: str | nn.Module, *, smooth: bool = True) -> FunctionCase:
    return FunctionCase(name, mf.from_activation(act), smooth=smooth, conjugate=False)


def _soft_clip(z: Tensor) -> Tensor:
    return z / (1 + z * z).sqrt()


ALL: tuple[FunctionCase, ...] = (
    FunctionCase("zero", mf.Zero(), smooth=True),
    FunctionCase("origin", mf.separable.Origin(), smooth=True),
    FunctionCase("nonnegative", mf.NonNegative()),
    FunctionCase("nonpositive", mf.separable.NonPositive()),
    FunctionCase("squared_hinge", mf.SquaredHinge(0.7)),
    FunctionCase("squared_hinge_shifted", mf.SquaredHinge(1.3, 0.4)),
    FunctionCase("leaky_hinge", mf.LeakyHinge(0.2)),
    FunctionCase("nonpositive_ridge", mf.separable.NonPositiveRidge(0.6, -0.3)),
    FunctionCase("l1", mf.L1(0.6)),
    FunctionCase("elastic_net", mf.ElasticNet(0.6, 0.4)),
    FunctionCase("dead_zone", mf.intervals.DeadZone(0.6, 0.4)),
    FunctionCase("box", mf.Box(-0.5, 1.5)),
    FunctionCase("half_line", mf.Box(0.25, float("inf"))),
    FunctionCase("support", mf.intervals.Support(-0.5, 1.5)),
    FunctionCase("support_half_line", mf.intervals.Support(0.25, float("inf"))),
    FunctionCase("log_barrier", mf.LogBarrier(0.38), smooth=True),
    FunctionCase("log_barrier_conjugate", mf.barriers.LogBarrierConjugate(0.38), smooth=True),
    FunctionCase("log_box", mf.LogBox(0.06), smooth=True),
    FunctionCase("log_box_wide", mf.LogBox(2.0), smooth=True),
    FunctionCase("log_box_conjugate", mf.barriers.LogBoxConjugate(0.5), smooth=True),
    FunctionCase("log_unit", mf.LogUnit(0.375), smooth=True, conjugate=False),
    FunctionCase("charbonnier", mf.Charbonnier(0.7, 0.5), smooth=True, conjugate=False),
    FunctionCase("charbonnier_square", mf.Charbonnier(0.3, 0.0), smooth=True, conjugate=False),
    FunctionCase("charbonnier_channels", mf.Charbonnier(torch.tensor([[0.2], [3.0]]), 0.3), (2, 4), True, False),
    FunctionCase("simplex", mf.Simplex(), (3, 5)),
    FunctionCase("simplex_entropy", mf.SimplexEntropy(), (3, 5), smooth=True, conjugate=False),
    FunctionCase("maximum", mf.Maximum(), (3, 5)),
    FunctionCase("simplex_wide", mf.Simplex(2.5), (3, 5)),
    FunctionCase("maximum_weighted", mf.Maximum(0.4), (3, 5)),
    FunctionCase("l1_ball", mf.L1Ball(1.2), (3, 5)),
    FunctionCase("max_norm", mf.MaxNorm(0.7), (3, 5)),
    FunctionCase("total_variation", mf.TotalVariation(0.5), (3, 6), conjugate=False),
    FunctionCase("total_variation_2d", mf.TotalVariation2d(0.5), (2, 4, 3), conjugate=False),
    FunctionCase("isotonic", mf.Isotonic(), (3, 6), conjugate=False),
    FunctionCase("grouped_l2", mf.GroupL2(0.8, [0, 1, 0, 2, 1]), (4, 5)),
    FunctionCase("grouped_ball", mf.Ball(0.8, [0, 1, 0, 2, 1]), (4, 5)),
    FunctionCase("grouped_weights", mf.GroupL2(torch.tensor([0.8, 0.0, 0.3]), [0, 1, 0, 2, 1]), (4, 5)),
    FunctionCase("grouped_radii", mf.Ball(torch.tensor([0.8, 0.0, 0.3]), [0, 1, 0, 2, 1]), (4, 5)),
    FunctionCase("row_weights", mf.GroupL2(torch.tensor([[0.2], [0.0], [1.1], [0.6]])), (4, 3)),
    FunctionCase("group_l2", mf.GroupL2(0.8), (4, 3)),
    FunctionCase("ball", mf.Ball(0.8), (4, 3)),
    FunctionCase("nuclear_tall", mf.NuclearNorm(0.7), (2, 5, 3)),
    FunctionCase("nuclear_wide", mf.NuclearNorm(0.7), (3, 4)),
    FunctionCase("nuclear_weights_tall", mf.NuclearNorm(torch.tensor([1.1, 0.7, 0.0])), (2, 5, 3), conjugate=False),
    FunctionCase("nuclear_weights_wide", mf.NuclearNorm(torch.tensor([1.1, 0.7, 0.0])), (3, 4), conjugate=False),
    FunctionCase("ky_fan", mf.NuclearNorm(torch.tensor([0.6, 0.6, 0.0, 0.0])), (4, 4), conjugate=False),
    FunctionCase("spectral_ball", mf.SpectralBall(0.7), (2, 5, 3)),
    FunctionCase("positive_semidefinite", mf.PositiveSemidefinite(), (2, 4, 4)),
    FunctionCase("negative_semidefinite", mf.spectral.NegativeSemidefinite(), (2, 4, 4)),
    FunctionCase("monotone_user", mf.Monotone(_soft_clip), smooth=True, conjugate=False),
    _activation("prelu", nn.PReLU(init=0.3).requires_grad_(False), smooth=False),
    _activation("prelu_zero", nn.PReLU(init=0.0).requires_grad_(False), smooth=False),
    _activation("tanh", "tanh"),
    _activation("sigmoid", "sigmoid"),
    _activation("softplus", "softplus"),
    _activation("softplus_sharp", nn.Softplus(beta=3.0)),
    _activation("elu", "elu", smooth=False),
    _activation("elu_half", nn.ELU(0.5), smooth=False),
    _activation("celu", nn.CELU(0.5), smooth=False),
    _activation("softsign", "softsign", smooth=False),
    _activation("hardsigmoid", "hardsigmoid", smooth=False),
    _activation("logsigmoid", "logsigmoid"),
    _activation("tanhshrink", "tanhshrink"),
)

SEPARABLE = tuple(case for case in ALL if case.function.separable)
SMOOTH = tuple(case for case in ALL if case.smooth)
CONJUGATE = tuple(case for case in ALL if case.conjugate)

#: An activation in torch and in the library's spelling.
ACTIVATIONS: tuple[tuple[str | nn.Module | Callable[..., Tensor], Callable[[Tensor], Tensor]], ...] = (
    ("relu", torch.relu),
    ("leaky_relu", F.leaky_relu),
    ("tanh", torch.tanh),
    ("sigmoid", torch.sigmoid),
    ("softplus", F.softplus),
    ("elu", F.elu),
    ("celu", F.celu),
    ("softsign", F.softsign),
    ("hardtanh", F.hardtanh),
    ("relu6", F.relu6),
    ("softshrink", F.softshrink),
    ("identity", nn.Identity()),
    ("hardsigmoid", F.hardsigmoid),
    ("logsigmoid", F.logsigmoid),
    ("tanhshrink", F.tanhshrink),
    (nn.LeakyReLU(1 / 3), nn.LeakyReLU(1 / 3)),
    (nn.LeakyReLU(0.7), nn.LeakyReLU(0.7)),
    (nn.PReLU(init=0.4).requires_grad_(False), lambda x: F.prelu(x, torch.tensor([0.4]).to(x))),
    (nn.LeakyReLU(0.0), nn.LeakyReLU(0.0)),
    (nn.LeakyReLU(1.0), nn.LeakyReLU(1.0)),
    (nn.Softplus(2.0), nn.Softplus(2.0)),
    (nn.ELU(0.3), nn.ELU(0.3)),
    (nn.CELU(2.0), nn.CELU(2.0)),
    (nn.Hardtanh(-0.3, 2.0), nn.Hardtanh(-0.3, 2.0)),
    (nn.Softshrink(0.2), nn.Softshrink(0.2)),
    (nn.Threshold(0.5, 0.5), nn.Threshold(0.5, 0.5)),
    (nn.ReLU6(), F.relu6),
    (torch.tanh, torch.tanh),
    (F.relu, torch.relu),
    (torch.Tensor.relu_, torch.relu),
    (F.leaky_relu, F.leaky_relu),
    (partial(F.leaky_relu, negative_slope=0.2, inplace=True), partial(F.leaky_relu, negative_slope=0.2)),
)


def cases(chosen: tuple[FunctionCase, ...]) -> pytest.MarkDecorator:
    """Run a law over the chosen functions."""
    return pytest.mark.parametrize("case", chosen, ids=lambda case: case.name)


def draw(case: FunctionCase, seed: int = 0, scale: float = 2.0, dtype: torch.dtype = torch.float64) -> Tensor:
    """A random point of the case's shape."""
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(case.shape, generator=generator, dtype=torch.float64).to(dtype)

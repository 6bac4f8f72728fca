"""Uncertainty of a reconstruction by Langevin sampling; experimental."""

from typing import NamedTuple

import torch
from torch import Tensor

from ...arguments import checked
from ...errors import CapabilityError, OptionError, require_positive
from ...solvers.base import require_count
from ...solvers.implicit import full_precision
from ...solvers.iterate import iterate
from .ridgenet import RidgeNet

__all__ = ["Posterior", "langevin"]


class Posterior(NamedTuple):
    """Mean and standard deviation of each pixel (B, C, H, W), and the number of samples."""

    mean: Tensor
    std: Tensor
    samples: int


class _Moments(NamedTuple):
    x: Tensor
    mean: Tensor
    squares: Tensor
    taken: int


@checked
@torch.no_grad()
def langevin(
    net: RidgeNet,
    y: Tensor,
    *,
    samples: int = 200,
    burn: int = 200,
    thin: int = 5,
    temperature: float | None = None,
    generator: torch.Generator | None = None,
) -> Posterior:
    r"""Moments of the density that a RidgeNet's objective defines, by unadjusted Langevin steps; experimental.

    .. math:: \pi(x) \propto e^{-U(x)}, \quad U(x) = \frac{\|\Phi x - y\|^2}{2\sigma^2} + \frac{R(x)}T, \qquad
              x \leftarrow x - \eta\nabla U(x) + \sqrt{2\eta}\,\xi, \quad
              \eta = \Bigl(\frac{\|\Phi\|^2}{\sigma^2} + \frac{\|W\|^2}T\Bigr)^{-1} ,

    from the certified minimum. A network with another datafit has its loss over :math:`\sigma^2` in the place of the
    square. With exponents below one and :math:`\ker W \cap \ker\Phi = 0` the density is proper; a
    network of the guarantee ``"descent"`` is refused, because its density has no integral. The step is certified for
    descent. The samples have a bias of the order of the step, since no step is rejected, and nothing is proved about
    how fast they mix. The network was trained for its minimum, not for this density: fit ``temperature`` so that
    intervals cover what they should on validation images.

    Args:
        net: A network with a noise level.
        y: The measurements.
        samples: Samples in the moments, ``thin`` steps apart, after ``burn`` steps.
        burn: Steps before the first sample.
        thin: Steps between samples.
        temperature: T; None: the network's own, for which the minimum of U is its reconstruction.
        generator: The source of randomness; None: torch's.

    Source: Roberts & Tweedie, 1996; Durmus & Moulines, 2017 (the bias).

    >>> from minimand.operators import Inpainting
    >>> net = RidgeNet(Inpainting(torch.ones(8, 8)), 2, 8, 3, noise=0.1).eval()
    >>> found = langevin(net, torch.full((1, 1, 8, 8), 0.5), generator=torch.Generator().manual_seed(0))
    >>> found.std.shape, bool((found.std < 0.2).all())
    (torch.Size([1, 1, 8, 8]), True)
    """
    if not isinstance(net, RidgeNet) or net.noise is None:
        raise CapabilityError(
            "langevin takes a RidgeNet with a noise level; build it with noise=σ, or take net.using(phi, noise=σ)"
        )
    if net.guarantee == "descent":
        raise OptionError(
            'exponents of 1 or more give a density without an integral; train with guarantee="convergent" or "convex"'
        )
    for name, count in (("samples", samples), ("burn", burn), ("thin", thin)):
        require_count(name, count)
    if samples < 2:
        raise OptionError(f"a standard deviation needs at least 2 samples, got {samples}")
    if temperature is not None:
        require_positive("temperature", temperature)
    fidelity, regularizer = net.fidelity(y), net.regularizer()
    assert fidelity.weight is not None
    heat = float(fidelity.weight) * net.noise**2 if temperature is None else float(temperature)
    precision = 1 / net.noise**2
    step = 1 / (fidelity.curvature * precision + net.smoothness(fidelity.operator) / heat)

    def move(state: _Moments, k: int) -> _Moments:
        x = state.x
        slope = precision * fidelity.slope(x) + regularizer.gradient(x) / heat
        noise = torch.randn(x.shape, generator=generator, dtype=x.dtype, device=x.device)
        x = x - step * slope + (2 * step) ** 0.5 * noise
        if k < burn or (k - burn) % thin:
            return state._replace(x=x)
        count = state.taken + 1
        change = x - state.mean
        mean = state.mean + change / count
        return _Moments(x, mean, state.squares + change * (x - mean), count)

    start = net.descended(y).x
    zero = torch.zeros_like(start)
    with full_precision(start):
        found = iterate(move, _Moments(start, zero, zero, 0), burn + thin * (samples - 1) + 1)[0]
    return Posterior(found.mean, (found.squares / (found.taken - 1)).sqrt(), found.taken)

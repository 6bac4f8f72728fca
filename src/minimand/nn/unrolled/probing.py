r"""Tests of whether a map T of images behaves as the prox of a convex function. They can refute it, never prove it.

A map is such a prox if and only if it is nonexpansive and the gradient of a convex function (Moreau, 1965). Then it is
firmly nonexpansive: its reflection :math:`2T - I` does not increase distances. And its Jacobians are symmetric.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Probe", "probe"]

Map = Callable[[Tensor], Tensor]

#: Rows of the batch that are tested, besides one random image.
ROWS = 3
#: Root mean squares to which images are scaled; the last one is the largest that a network accepts.
SCALES = (0.1, 1.0, 4.0)
#: Distances between the images of a pair, relative to the norm of the first.
DISTANCES = (0.01, 0.1, 1.0)
#: The error of a gain of one, computed by power iteration in float32.
ROUNDING = 1e-3
#: Power iterations on the Jacobian and on that of the reflection; a third of it on the antisymmetric part.
ROUNDS = 9


class Probe(NamedTuple):
    r"""The largest values that were found; a prox of a convex function has at most 1, at most 1, and 0.

    ``gain`` is :math:`\|T(u) - T(v)\|/\|u - v\|` over pairs and :math:`\|J\|` over Jacobians, ``reflection`` the same
    of :math:`2T - I`, and ``asymmetry`` is :math:`\|J - J^\top\|`.
    """

    gain: float
    reflection: float
    asymmetry: float
    #: The numbers of pairs and of Jacobians.
    pairs: int
    jacobians: int

    def departures(self) -> list[str]:
        """What shows that the map is not the prox of a convex function."""
        found = []
        if not self.gain <= 1 + ROUNDING:
            found.append(f"increases distances up to {self.gain:.3g}-fold")
        elif not self.reflection <= 1 + ROUNDING:
            found.append(f"is not firmly nonexpansive (its reflection increases distances {self.reflection:.3g}-fold)")
        if not self.asymmetry <= ROUNDING:
            found.append(f"has asymmetric Jacobians (by {self.asymmetry:.3g})")
        return found


def probe(prox: Map, points: Tensor) -> Probe:
    """Test a map around ``points``, images (B, 1, H, W), and around a random image."""
    generator = torch.Generator().manual_seed(0)
    rows = points.detach()[torch.isfinite(points.detach()).flatten(1).all(1)][:ROWS]
    noise = torch.rand(1, *points.shape[1:], generator=generator).to(points)
    bases = torch.cat([rows[_rms(rows).flatten() > 0], noise])
    bases = bases / _rms(bases)
    starts = torch.cat([rows, *(scale * bases for scale in SCALES)])
    ratios: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad():
        for distance in DISTANCES:
            apart = torch.randn(starts.shape, generator=generator).to(starts)
            apart = apart * (distance * _rms(starts) / _rms(apart))
            moved = prox(starts + apart) - prox(starts)
            far = _norms(apart).clamp_min(torch.finfo(apart.dtype).tiny)
            ratios.append((_norms(moved) / far, _norms(2 * moved - apart) / far))
    gains, reflections, asymmetries = _jacobians(prox, torch.cat([rows, bases]), generator)
    # Unlike Python's max, torch's keeps NaN.
    gain, reflection = (float(torch.cat(found).max()) for found in zip(*ratios, (gains, reflections), strict=True))
    return Probe(gain, reflection, float(asymmetries.max()), len(DISTANCES) * len(starts), len(gains))


def _jacobians(prox: Map, points: Tensor, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Lower bounds on the norms of J, 2J − I and J − Jᵀ at the points, by power iteration."""
    with torch.enable_grad():
        points = points.detach().requires_grad_()
        image = prox(points)
        cotangent = torch.zeros_like(image, requires_grad=True)
        (pulled,) = torch.autograd.grad(image, points, cotangent, create_graph=True)

    def push(v: Tensor) -> Tensor:
        # Jᵀc is linear in c: its derivative along v is Jv.
        return torch.autograd.grad(pulled, cotangent, v, retain_graph=True)[0]

    def pull(v: Tensor) -> Tensor:
        return torch.autograd.grad(image, points, v, retain_graph=True)[0]

    def largest(apply: Map, transposed: Map, rounds: int) -> Tensor:
        v = torch.randn(points.shape, generator=generator).to(points)
        for _ in range(rounds):
            pushed = apply(v / _norms(v).clamp_min(torch.finfo(v.dtype).tiny))
            v = transposed(pushed)
        return _norms(pushed)

    return (
        largest(push, pull, ROUNDS),
        largest(lambda v: 2 * push(v) - v, lambda v: 2 * pull(v) - v, ROUNDS),
        largest(lambda v: push(v) - pull(v), lambda v: pull(v) - push(v), ROUNDS // 3),
    )


def _norms(batch: Tensor) -> Tensor:
    """One norm per image, shaped to broadcast."""
    return batch.flatten(1).norm(dim=1)[:, None, None, None]


def _rms(batch: Tensor) -> Tensor:
    return _norms(batch) / max(1, batch[:1].numel()) ** 0.5

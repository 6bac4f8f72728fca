"""A check of a user's function: prox, value, conjugate."""

import torch
from torch import Tensor

from ..arguments import checked
from ..errors import CapabilityError, OptionError
from .base import Function

__all__ = ["check_function"]


@checked
def check_function(
    function: Function, shape: tuple[int, ...], *, trials: int = 10, generator: torch.Generator | None = None
) -> None:
    r"""Raise unless the methods of a function belong to each other, at random points of a shape in float64.

    The prox p of x must minimise: by strong convexity every z has
    :math:`\eta g(z) + \tfrac12\|z - x\|^2 \ge \eta g(p) + \tfrac12\|p - x\|^2 + \tfrac12\|z - p\|^2`. It must be firmly
    nonexpansive, which the prox of every convex function is, and act entry by entry where ``separable`` says so. A
    conjugate must satisfy the Fenchel–Young equality :math:`g(p) + g^*(s) = \langle p, s\rangle` at
    :math:`s = (x - p)/\eta`.

    Args:
        function: Any function.
        shape: The shape of the points.
        trials: Random points.
        generator: The source of randomness; None: a fixed seed.

    Raises:
        OptionError: A law is violated; the message says which, and by how much.
        CapabilityError: A method returns a wrong shape.

    >>> from minimand.functions import L1
    >>> check_function(L1(0.5), (3, 4))
    """
    if not isinstance(function, Function):
        raise CapabilityError(f"check_function takes a Function, got a {type(function).__name__}")
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    draw = lambda size: size * torch.randn(shape, dtype=torch.float64, generator=generator)  # noqa: E731
    with torch.no_grad():
        for trial in range(trials):
            size, step = (0.3, 1.0, 5.0)[trial % 3], (1.0, 0.2, 4.0)[trial % 3]
            _check_at(function, draw(size), draw(size), step)


def _check_at(function: Function, x: Tensor, other: Tensor, step: float) -> None:
    p, q = function.prox(x, step), function.prox(other, step)
    for name, got, wanted in (("prox", p.shape, x.shape), ("value", function.value(x).shape, torch.Size(()))):
        if got != wanted:
            raise CapabilityError(
                f"{name} of {type(function).__name__} returned shape {tuple(got)}; expected {tuple(wanted)}"
            )
    room = 1e-8 * (1 + float(x.square().sum() + other.square().sum()))
    _require(function, "value at the prox is not finite", 0.0 if bool(function.value(p).isfinite()) else torch.inf)
    if function.separable:
        changed = x.clone().flatten()
        changed[0] += 1.0
        apart = (function.prox(changed.reshape(x.shape), step) - p).flatten()[1:].abs()
        _require(
            function, "prox couples entries, but separable is True", float(apart.max()) - room if len(apart) else 0.0
        )
    best = step * function.value(p) + 0.5 * (p - x).square().sum()
    # Far and near points, of which the segment to q lies in the domain.
    near = [p + 0.1 * (q - p), p - 0.1 * (q - p), p + 0.1 * other, function.prox(p + 0.1 * other, step)]
    for z in (q, *near):
        cost = step * function.value(z) + 0.5 * (z - x).square().sum()
        least = best + 0.5 * (z - p).square().sum()
        _require(
            function, f"prox at step {step:g} is not the minimiser of a convex function", float(least - cost) - room
        )
    excess = (p - q).square().sum() - ((p - q) * (x - other)).sum()
    _require(function, "prox is not firmly nonexpansive, so value is not convex", float(excess) - room)
    try:
        dual = function.conjugate()
    except CapabilityError:
        return
    s = dual.prox(x / step, 1 / step)
    _require(function, "prox of the conjugate violates Moreau's identity", float((p + step * s - x).abs().max()) - room)
    miss = (function.value(p) + dual.value(s) - (p * s).sum()).abs()
    _require(function, "conjugate violates g(p) + g*(s) = ⟨p, s⟩", float(miss) - room)


def _require(function: Function, what: str, excess: float) -> None:
    if not excess <= 0:
        raise OptionError(f"{type(function).__name__}: {what}, by {excess:.3g}; correct the method")

r"""The polar of one hidden ReLU layer: the steepest new neuron, and bounds on its slope.

.. math:: p = \max_{\|w\| \le 1} \|Z^\top \max(Xw, 0)\|, \qquad Z = -\nabla\ell .

The hyperplanes :math:`x_n^\top w = 0` divide the sphere into cells. On a cell the function is :math:`\|Gw\|` with
:math:`G = \sum_{n\,\text{active}} z_n x_n^\top`, whose maximum lies at the top singular vector of G or on the boundary
of the cell. With two columns the cells are arcs; with three columns their boundaries are arcs. A sweep visits all arcs.
"""

import dataclasses
import math
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import CapabilityError
from ..norms.spectral import certified_norm_sq
from ..solvers.iterate import iterate

__all__ = ["Polar", "ascend", "exact_polar", "slopes", "upper_bound"]

FLAT = 1e-12  # the sine of the angle to a normal below which a row counts as perpendicular to the plane


@dataclasses.dataclass(frozen=True)
class Polar:
    """Bounds on a polar, and directions that are local maxima.

    Attributes:
        lower: The value at the first direction, a lower bound.
        upper: An upper bound over all directions.
        directions: Unit directions that are local maxima, the steepest first.
        values: The values at the directions.
        method: How the upper bound was computed.
        exact: Whether the bounds differ by rounding only.
    """

    lower: float
    upper: float
    directions: Tensor
    values: Tensor
    method: str
    exact: bool = False


def slopes(X: Tensor, Z: Tensor, W: Tensor) -> Tensor:
    r""":math:`\|Z^\top\max(Xw, 0)\|` for each row w of ``W``.

    >>> slopes(torch.tensor([[1.0], [-1.0]]), torch.tensor([[2.0], [3.0]]), torch.tensor([[1.0], [-1.0]]))
    tensor([2., 3.])
    """
    return torch.linalg.vector_norm(torch.relu(W @ X.mT) @ Z, dim=1)


def exact_polar(X: Tensor, Z: Tensor) -> Polar:
    r"""The polar of inputs with two or three columns, including the ones, to rounding.

    Two columns take :math:`O(N\log N)` operations, three columns :math:`O(N^2\log N)`.

    >>> X, Z = torch.tensor([[1.0, 0.0], [0.0, 1.0]]).double(), torch.tensor([[3.0], [4.0]]).double()
    >>> round(exact_polar(X, Z).lower, 9)
    5.0
    """
    if X.shape[1] not in (2, 3):
        raise CapabilityError(
            f"the exact polar needs two or three columns, got {X.shape[1]}; use the ascent, which gives a lower bound"
        )
    X, Z = X.double(), Z.double()
    terms = Z.unsqueeze(2) * X.unsqueeze(1)
    found = _planar(X, terms) if X.shape[1] == 2 else _spatial(X, Z, terms)
    directions, values = _ranked(found, slopes(X, Z, found))
    best = float(values[0]) if len(values) else 0.0
    # The rounding error of a sum of N terms, updated along a sweep, is at most a few N eps times the sum of norms; rows
    # that are nearly perpendicular to a plane are left out of its sums.
    room = 8 * (len(X) + 8) * torch.finfo(torch.float64).eps + FLAT * (X.shape[1] == 3)
    size = float((Z.norm(dim=1) * X.norm(dim=1)).sum())
    return Polar(best, best + room * size, directions, values, f"exact sweep of {X.shape[1]} columns", True)


def _ranked(directions: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """The directions and their values, the steepest first."""
    order = values.argsort(descending=True)
    return directions[order], values[order]


def _sweep(planes: Tensor, terms: Tensor, flat: Tensor) -> tuple[Tensor, Tensor]:
    """The arcs of each plane: their start angles (B × 2N, ascending) and the sum of the active terms on each.

    ``planes`` holds the rows' coordinates in each of B planes (B × N × 2), ``terms`` is N × C × d; the rows in ``flat``
    are perpendicular to their plane. The sweep starts in the longest arc, where the active rows are determined safely
    despite rounding.
    """
    rows = planes.shape[1]
    norm = planes.norm(dim=2)
    center = torch.atan2(planes[..., 1], planes[..., 0])
    events = torch.cat([center - math.pi / 2, center + math.pi / 2], 1).remainder(2 * math.pi)
    signs = torch.cat([torch.ones_like(norm), -torch.ones_like(norm)], 1).masked_fill(torch.cat([flat, flat], 1), 0.0)
    starts, order = events.sort(dim=1)
    ends = torch.cat([starts[:, 1:], starts[:, :1] + 2 * math.pi], 1)
    longest = (ends - starts).argmax(1, keepdim=True)
    turn = (torch.arange(2 * rows, device=planes.device) + longest) % (2 * rows)
    order, wrapped = order.gather(1, turn), torch.arange(2 * rows, device=planes.device) + longest >= 2 * rows
    starts = starts.gather(1, turn) + 2 * math.pi * wrapped.to(starts.dtype)
    middle = (starts[:, 0] + ends.gather(1, longest)[:, 0]) / 2
    heading = torch.stack([middle.cos(), middle.sin()], 1).unsqueeze(2)
    active = ((planes @ heading).squeeze(2) > 0) & ~flat
    first = torch.einsum("bn,ncd->bcd", active.to(terms.dtype), terms)
    changes = signs.gather(1, order)[..., None, None] * terms[order % rows]
    changes[:, 0] = first
    return starts, changes.cumsum(1)


def _arc_maxima(starts: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """Candidate angles per plane and arc (inside, then at the start), and a mask of local maxima of ‖Gw‖."""
    ends = torch.cat([starts[:, 1:], starts[:, :1] + 2 * math.pi], 1)
    square = sums.mT @ sums
    a, b, c = square[..., 0, 0], square[..., 0, 1], square[..., 1, 1]
    top = 0.5 * torch.atan2(2 * b, a - c)
    inside = []
    for angle in (top, top + math.pi):
        ahead = (angle - starts).remainder(2 * math.pi)
        inside.append((starts + ahead, ahead <= ends - starts + 1e-9))
    cos, sin = starts.cos(), starts.sin()

    def slope(at: int) -> Tensor:
        """The derivative of ½‖Gw‖² in the angle at the arcs' starts, with the sums of the arc ``at`` places later."""
        p, q, r = (v.roll(-at, 1) for v in (a, b, c))
        return (r - p) * sin * cos + q * (cos * cos - sin * sin)

    scale = 1e-12 * (a + c)
    kinks = (slope(-1) >= -scale) & (slope(0) <= scale)
    angles = torch.cat([inside[0][0], inside[1][0], starts], 1)
    return angles, torch.cat([inside[0][1], inside[1][1], kinks], 1)


def _planar(X: Tensor, terms: Tensor) -> Tensor:
    starts, sums = _sweep(X.unsqueeze(0), terms, (X == 0).all(1).unsqueeze(0))
    angles, kept = _arc_maxima(starts, sums)
    chosen = angles[kept]
    return torch.stack([chosen.cos(), chosen.sin()], 1)


def _spatial(X: Tensor, Z: Tensor, terms: Tensor, chunk: int = 64) -> Tensor:
    """Local maxima on the great circles, and the top singular vectors of the cells on both sides of each arc."""
    found = []
    unit = X / X.norm(dim=1, keepdim=True).clamp_min(torch.finfo(X.dtype).tiny)
    best = 0.0
    for rows in torch.arange(len(X)).split(chunk):
        normals = unit[rows]
        bases = torch.linalg.svd(normals.unsqueeze(1)).Vh[:, 1:]
        planes = X @ bases.mT
        # Relative to its own length, because a short row may have a large term.
        flat = planes.norm(dim=2) <= FLAT * X.norm(dim=1)
        starts, sums = _sweep(planes, terms, flat)
        on_plane = sums @ bases.mT.unsqueeze(1)
        angles, kept = _arc_maxima(starts, on_plane)
        owner = torch.arange(len(rows)).unsqueeze(1).expand_as(angles)[kept]
        heading = torch.stack([angles[kept].cos(), angles[kept].sin()], 1)
        circle = (heading.unsqueeze(1) @ bases[owner]).squeeze(1)
        # Rows parallel to the normal are zero on its circle; on each side those that point there are active.
        cosine = normals @ unit.mT
        sides = [torch.einsum("bn,ncd->bcd", (flat & (s * cosine > 0)).to(X.dtype), terms) for s in (1, -1)]
        cells = torch.cat([(sums + side.unsqueeze(1)).flatten(0, 1) for side in sides])
        best = max(best, float(slopes(X, Z, circle).max()) if len(circle) else 0.0)
        # A cell whose matrix has a smaller norm than the best value cannot contain the maximum.
        tops = cells[cells.flatten(1).norm(dim=1) >= best * (1 - 1e-12)]
        inner = torch.linalg.svd(tops, full_matrices=False).Vh[:, 0] if len(tops) else X.new_zeros(0, 3)
        candidates = torch.cat([circle, inner, -inner])
        values = slopes(X, Z, candidates)
        best = max(best, float(values.max()) if len(values) else 0.0)
        found.append(candidates[values >= 0.5 * best])
    return torch.cat(found)


def upper_bound(X: Tensor, Z: Tensor) -> float:
    r"""An upper bound on the polar for inputs of any dimension; often loose.

    Since :math:`\max(a, 0) = \tfrac12(a + |a|)`, it is :math:`\tfrac12\|Z^\top X\| + \tfrac12\|Z\|\|X\|`. For a single
    output only the rows with :math:`z_n` of one sign enter the second term, which is then at most
    :math:`\tfrac12\bigl(\sum z_n^+\;\lambda_{\max}(X^\top\operatorname{diag}(z^+)X)\bigr)^{1/2}`. The larger of the two
    signs' values is used.

    >>> X, Z = torch.eye(2).double(), torch.tensor([[3.0], [4.0]]).double()
    >>> 5 <= upper_bound(X, Z) < 5.01
    True
    """
    X, Z = X.double(), Z.double()

    def norm(matrix: Tensor) -> float:
        return math.sqrt(float(certified_norm_sq(matrix)))

    def positive(z: Tensor) -> float:
        """A bound on zᵀ|Xw|; negative entries of z are left out."""
        z, rows = z[z > 0], X[z > 0]
        if not len(z):
            return 0.0
        return min(float(z.norm()) * norm(rows), math.sqrt(float(z.sum())) * norm(z.sqrt().unsqueeze(1) * rows))

    rest = max(positive(Z[:, 0]), positive(-Z[:, 0])) if Z.shape[1] == 1 else norm(Z) * norm(X)
    return 0.5 * (norm(Z.mT @ X) + rest) * (1 + 1e-12)


class _AscentState(NamedTuple):
    points: Tensor
    values: Tensor
    steps: Tensor


def ascend(X: Tensor, Z: Tensor, starts: Tensor, iterations: int = 200) -> tuple[Tensor, Tensor]:
    r"""Local maxima of the slope on the sphere by projected gradient ascent from many starts, each with its own step.

    Returns unit directions and their values, the steepest first. The values are lower bounds of the polar.

    >>> X, Z = torch.eye(2), torch.tensor([[3.0], [4.0]])
    >>> round(float(ascend(X, Z, torch.tensor([[1.0, 0.1]]))[1][0]), 4)
    5.0
    """
    normalized = partial(torch.nn.functional.normalize, dim=1, eps=torch.finfo(X.dtype).tiny)

    def step(state: _AscentState, k: int) -> _AscentState:
        before = state.points @ X.mT
        image = torch.relu(before) @ Z
        gradient = normalized(((image @ Z.mT) * (before > 0)) @ X)
        trial = normalized(state.points + state.steps.unsqueeze(1) * gradient)
        values = slopes(X, Z, trial)
        better = values > state.values
        return _AscentState(
            torch.where(better.unsqueeze(1), trial, state.points),
            torch.where(better, values, state.values),
            torch.where(better, state.steps * 2, state.steps / 4),
        )

    first = normalized(starts)
    state = _AscentState(first, slopes(X, Z, first), torch.ones(len(first), dtype=X.dtype, device=X.device))
    state, _ = iterate(step, state, iterations, until=lambda s, k: bool((s.steps < 1e-7).all()))
    return _ranked(state.points, state.values)

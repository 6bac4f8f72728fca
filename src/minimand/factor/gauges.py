r"""Gauges: what a regulariser charges for one side of a pair.

A regulariser is a product :math:`\theta(u, v) = g(u)\,h(v)` of two gauges: convex, positively homogeneous of degree
one, and above a multiple of the Euclidean norm. Vectors are the rows of a matrix. A vector may be spread over ranks;
whatever is summed over its entries goes through ``rows.sum``.
"""

import abc
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import require_positive
from ..functions import L1, GroupL2, NonNegative
from ..solvers.iterate import iterate
from .rows import Rows

__all__ = ["Euclidean", "Gauge"]

HERE = Rows()
NEWTON = 12


class Gauge(abc.ABC):
    r"""A gauge :math:`g` of vectors, the rows of a matrix.

    To use a norm of your own, derive from this class and write :meth:`values`, :meth:`prox` and :attr:`floor`;
    :meth:`polar` then follows from the prox, because :math:`g^\circ(a) \le t` exactly where
    :math:`\operatorname{prox}_{tg}(a) = 0`.
    """

    #: A number c > 0 with g(u) ≥ c‖u‖₂ for every u: what bounds the polar where nothing sharper is known.
    floor: float = 1.0

    @abc.abstractmethod
    def values(self, vectors: Tensor, rows: Rows = HERE) -> Tensor:
        """The gauge of each row; +inf outside the domain."""

    @abc.abstractmethod
    def prox(self, vectors: Tensor, step: Tensor, rows: Rows = HERE) -> Tensor:
        """The minimiser of ``step[i] * g(z) + ½‖z − vectors[i]‖²`` for each row i; ``step`` has one number per row."""

    def prox_(self, vector: Tensor, step: float, rows: Rows = HERE) -> Tensor:
        """The prox of one vector, in place: what column updates call thousands of times."""
        return vector.copy_(self.prox(vector.unsqueeze(0), vector.new_full((1,), step), rows).squeeze(0))

    def project(self, vectors: Tensor) -> Tensor:
        """Points of the domain near ``vectors``, entry by entry: a start must be feasible."""
        return vectors

    def polar(self, vectors: Tensor, rows: Rows = HERE) -> tuple[Tensor, Tensor]:
        r"""For each row a: :math:`g^\circ(a) = \max\{a^\top u : g(u) \le 1\}` from below, and a u that attains it."""
        norms = rows.sum(vectors.square().sum(-1)).sqrt()
        low, high = torch.zeros_like(norms), norms / self.floor

        def halve(ends: tuple[Tensor, Tensor], k: int) -> tuple[Tensor, Tensor]:
            low, high = ends
            middle = 0.5 * (low + high)
            moved = self.prox(vectors, middle.clamp_min(torch.finfo(norms.dtype).tiny), rows)
            alive = rows.sum(moved.abs().sum(-1)) > 0
            return torch.where(alive, middle, low), torch.where(alive, high, middle)

        (low, _), _ = iterate(halve, (low, high), 40)
        return self._attained(vectors, self.prox(vectors, low.clamp_min(torch.finfo(norms.dtype).tiny), rows), rows)

    def _attained(self, vectors: Tensor, directions: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        size = self.values(directions, rows).unsqueeze(-1)
        unit = torch.where(size > 0, directions / torch.where(size > 0, size, 1.0), 0.0)
        return rows.sum((vectors * unit).sum(-1)), unit


@dataclass(frozen=True)
class Euclidean(Gauge):
    r"""The gauge :math:`g(u) = \|u\|_2 + \gamma\|u\|_1`, with ``nonnegative`` restricted to :math:`u \ge 0`.

    Its prox soft-thresholds (and clips) entries, then shrinks the whole vector. Its polar is the root p of
    :math:`\|\operatorname{ST}_{p\gamma}(a)\|_2 = p`.

    >>> g = Euclidean(0.5)
    >>> a = torch.tensor([[3.0, -4.0]])
    >>> g.values(a), g.prox(a, torch.tensor([2.0]))
    (tensor([8.5000]), tensor([[ 0.8906, -1.3359]]))
    """

    sparse: float = 0.0
    nonnegative: bool = False

    def __post_init__(self) -> None:
        require_positive("gamma", self.sparse, zero=True)

    def values(self, vectors: Tensor, rows: Rows = HERE) -> Tensor:
        """The gauge of each row; +inf outside the domain."""
        values = self._norms(vectors, rows)
        if self.sparse:
            values = values + self.sparse * rows.sum(vectors.abs().sum(-1))
        if self.nonnegative:
            negative = rows.sum((vectors < 0).sum(-1))
            values = torch.where(negative > 0, torch.inf, values)
        return values

    @staticmethod
    def _norms(vectors: Tensor, rows: Rows) -> Tensor:
        return rows.sum(vectors.square().sum(-1)).sqrt()

    def prox(self, vectors: Tensor, step: Tensor, rows: Rows = HERE) -> Tensor:
        """Soft thresholding and clipping of the entries, then of the length."""
        vectors = self._shrunk(vectors, step)
        norms = self._norms(vectors, rows).unsqueeze(-1)
        # The norm is one number even where the vector is spread over ranks; its prox is the norm's own.
        kept = GroupL2(1.0).prox(norms, step.unsqueeze(-1))
        return vectors * torch.where(norms > 0, kept / torch.where(norms > 0, norms, 1.0), 0.0)

    def prox_(self, vector: Tensor, step: float, rows: Rows = HERE) -> Tensor:
        """As :meth:`prox`, with as few passes over the vector as there can be."""
        if self.sparse:
            torch.sub(vector, vector.clamp(-step * self.sparse, step * self.sparse), out=vector)
        if self.nonnegative:
            vector.clamp_min_(0.0)
        norm = math.sqrt(float(rows.sum(torch.dot(vector, vector))))
        return vector.mul_(1 - step / norm) if norm > step else vector.zero_()

    def _shrunk(self, vectors: Tensor, step: Tensor) -> Tensor:
        if self.sparse:
            vectors = L1(self.sparse).prox(vectors, step.unsqueeze(-1))
        return self.project(vectors)

    def project(self, vectors: Tensor) -> Tensor:
        """``vectors``, clipped at zero where the gauge asks for it."""
        return NonNegative().prox(vectors) if self.nonnegative else vectors

    def polar(self, vectors: Tensor, rows: Rows = HERE) -> tuple[Tensor, Tensor]:
        """The root of ‖ST_{pγ}(a)‖ = p; without γ the length itself.

        The difference is convex and decreasing in p, so Newton's iteration climbs to its root from zero.
        """
        if not self.sparse:
            return self._attained(vectors, self.project(vectors), rows)

        def newton(p: Tensor, k: int) -> Tensor:
            short = self._shrunk(vectors, p.clamp_min(_tiny(p)))
            sums = rows.sum(torch.stack([short.square().sum(-1), short.abs().sum(-1)]))
            norm = sums[0].sqrt()
            slope = self.sparse * sums[1] / norm.clamp_min(_tiny(norm)) + 1
            return torch.maximum(p, p + (norm - p) / slope)

        root, _ = iterate(newton, vectors.new_zeros(len(vectors)), NEWTON)
        return self._attained(vectors, self._shrunk(vectors, root.clamp_min(_tiny(root))), rows)


def _tiny(tensor: Tensor) -> float:
    return float(torch.finfo(tensor.dtype).tiny)

"""The base class of the estimators that grow."""

import math
from dataclasses import KW_ONLY, dataclass, replace
from numbers import Integral
from typing import Any

from torch import Tensor

from ..errors import OptionError
from .base import Factorization
from .growth import grow
from .inputs import as_tensor, raised, same_kind
from .matrices import RowSharding
from .observed import Observed
from .problem import NOT_CERTIFIED, Factors, GrowthOptions, Report

__all__ = ["GrownFactorization"]

_FAR = 2.0**56  # entries of a mini-batch in the units of the first, whose squares are summed in single precision


@dataclass(eq=False, repr=False)
class GrownFactorization(Factorization):
    """Base of the estimators that grow by local descent and the polar; see :mod:`minimand.factor.growth`."""

    _: KW_ONLY
    n_components: int | None = None
    r_max: int | None = None
    effort: float | str | None = "auto"

    def _begin_batch(self, Y: Any, data: Any) -> tuple[Any, Tensor, Tensor, float]:
        """The loss of a mini-batch, its codes, the components and λ, in the units of the first one, which is fitted."""
        rows, options = RowSharding(), (self.lam, self.n_components)
        if not hasattr(self, "sums_"):
            codes = self._fit(Y, None, None)[0]
            U, V = codes if isinstance(codes, Tensor) else as_tensor(codes), self._right(data)
            self._first = self._problem(data, rows).normalized(U, V)[1], options
        elif options != self._first[1]:
            raise OptionError(
                "lam or n_components has changed since the first mini-batch, to which it belongs: set it back, or call "
                "fit, which starts again"
            )
        else:
            V = self._right(data)
            U = self._encoded(data, V)[0]
        units, loss = self._first[0], self._loss(data, rows)
        exponent, largest = units.objective // 2, loss.largest()
        if raised(largest, -exponent) > _FAR:
            raise OptionError(
                f"the entries of this mini-batch, up to {largest:g}, are too far from those of the first: scale it"
            )
        loss = loss.scaled(-exponent) if exponent else loss
        return loss, units.lowered(U), units.lowered(V), units.weight(self.lam_, largest)

    def _end_batch(self, sums: Any, V: Tensor, objective: float, count: int) -> None:
        """Store the sums and the components of a mini-batch of so many rows."""
        units = self._first[0]
        self.sums_, self.n_samples_seen_ = sums, getattr(self, "n_samples_seen_", 0) + count
        self.components_ = same_kind(units.factor(V).mT.contiguous(), self.components_)
        self.n_components_, self.objective_ = int(V.shape[1]), raised(objective, units.objective)
        self.history_.append(self.objective_)
        method = "fitted to mini-batches: certify(Y) computes a certificate"
        self.certificate_ = replace(NOT_CERTIFIED, method=method)

    def _weight(self, loss: Any) -> float:
        here, *sides = (loss if isinstance(loss, Observed) else loss.Y).shape
        n, m = loss.rows.count(here), math.prod(sides)
        if isinstance(self.n_components, Integral) and self.n_components > max(n, m):
            raise OptionError(
                f"n_components={self.n_components} exceeds both sides of Y, n_samples={n} and n_features={m}: use at "
                f"most {max(n, m)}, or None to let the penalty choose"
            )
        return super()._weight(loss)

    def _options(self, bound: int) -> GrowthOptions:
        """Options of the growth; ``bound`` is the theory's bound on the size of a minimiser."""
        return GrowthOptions(
            self.n_components, self.r_max, int(self.max_iter), float(self.tol), self.effort, bound, lazy=True
        )

    def _solve(self, problem: Any, start: Any, report: Report) -> Factors:
        options = self._options(problem.loss.entries())
        loss = problem.loss
        like = loss.values if isinstance(loss, Observed) else loss.Y[:0]
        return grow(problem, options, like=like, generator=self._generator(), start=start, report=report)

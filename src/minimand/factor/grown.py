"""The base class of the estimators that grow."""

import math
from dataclasses import KW_ONLY, dataclass, replace
from numbers import Integral
from typing import Any

from torch import Tensor

from ..errors import OptionError
from .base import Factorization
from .growth import grow
from .inputs import as_tensor, same_kind
from .observed import Observed
from .problem import NOT_CERTIFIED, Factors, GrowthOptions, Report

__all__ = ["GrownFactorization"]


@dataclass(eq=False, repr=False)
class GrownFactorization(Factorization):
    """Base of the estimators that grow by local descent and the polar; see :mod:`minimand.factor.growth`."""

    _: KW_ONLY
    n_components: int | None = None
    r_max: int | None = None
    effort: float | str | None = "auto"

    def _fit_first(self, Y: Any) -> tuple[Any, Tensor]:
        """The fit of the first mini-batch; returns U twice, as the caller's kind and as a tensor."""
        codes = self._fit(Y, None, None)[0]
        return codes, codes if isinstance(codes, Tensor) else as_tensor(codes)

    def _update(self, V: Tensor, objective: float) -> None:
        """Store the components of a mini-batch."""
        self.components_ = same_kind(V.mT.contiguous(), self.components_)
        self.n_components_, self.objective_ = int(V.shape[1]), objective
        self.history_.append(objective)
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

"""The estimator CPTensor: CP decomposition of a tensor of three or more dimensions."""

import math
from dataclasses import dataclass
from typing import Any

from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from ..errors import OptionError, ShapeError
from .checking import in_range
from .cp import (
    Modes,
    ascend,
    balanced_modes,
    certify_tensor,
    grow_tensor,
    is_cp,
    modes_from,
    modes_from_codes,
    require_tensor,
    shares,
)
from .grown import GrownFactorization
from .inputs import Units, same_kind
from .problem import Certificate, Factors, Report

__all__ = ["CPTensor"]


@dataclass(eq=False, repr=False)
class CPTensor(GrownFactorization):
    r"""CP decomposition that finds its own size,

    .. math:: \min_{r,A,B,C} \tfrac12\Bigl\|\mathcal{Y} - \sum_{i=1}^r a_i \otimes b_i \otimes c_i\Bigr\|^2
        + \lambda\sum_i \|a_i\|\|b_i\|\|c_i\| ,

    with one factor more for each dimension of :math:`\mathcal{Y}` beyond three.

    The theory is that of matrices ([Vidal2018], from matrix to tensor factorisation). The polar is the largest singular
    value of a tensor, which is hard to compute: ascent bounds it from below, the smallest norm of an unfolding from
    above. The upper bound is tight for orthogonal components and loose in general, so ``UNDECIDED`` is common.
    ``fit(Y, start=…)`` takes (A, B, C, …), tensorly's (weights, [A, B, C, …]), or the (U, V) of another fit.

    Args:
        lam: :math:`\lambda > 0`.
        n_components: None to grow until no direction is found; an int fixes the size.
        r_max: The largest number of components; None: 100.
        tol: The relative gap to certify.
        max_iter: The total number of sweeps.
        effort: None computes no certificate (for a fixed size only); the bound is cheap, so every number is the same.
        random_state: Seed of the starts.
        verbose: Show a progress bar.

    Attributes:
        factors_: (A, B, C, …), each size × r, with :math:`\|a_i\| = \|b_i\|\|c_i\|\cdots` and
            :math:`\|b_i\| = \|c_i\| = \dots`, so that A and the rows of ``components_``,
            :math:`b_i \otimes c_i \cdots`, are balanced.

    >>> import numpy as np
    >>> Y = np.zeros((3, 3, 3))
    >>> Y[0, 0, 0], Y[1, 1, 1] = 3.0, 2.0
    >>> model = CPTensor(lam=1.0, random_state=0).fit(Y)
    >>> model.n_components_, round(model.objective_, 4), model.certificate_.status
    (2, 4.0, <Status.CERTIFIED: 'CERTIFIED'>)
    """

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array = False
        tags.input_tags.three_d_array = True
        return tags

    def _checked(self, Y: Any, *, reset: bool) -> tuple[Any, Any]:
        data = require_tensor(Y)
        if reset:
            self.mode_shape_ = tuple(data.shape[1:])
            self.n_features_in_ = math.prod(self.mode_shape_)
        elif tuple(data.shape[1:]) != self.mode_shape_:
            raise ShapeError(f"slices have shape {tuple(data.shape[1:])}, but the fitted ones had {self.mode_shape_}")
        return Y, data

    def _checked_start(self, start: Any, data: Any, units: Units) -> Modes:
        if is_cp(start):
            found = in_range(modes_from(start, data), units, shares(data.dim()))
            return balanced_modes(tuple(x.mT.to(data) for x in found))
        U, V = super()._checked_start(start, data.flatten(1), units)  # codes and components of another fit, in a path
        return modes_from_codes((U, V), data)

    def _solve(self, problem: Any, start: Modes | None, report: Report) -> Factors:
        if problem.rows.group is not None:
            raise OptionError("CPTensor runs on one process: leave process_group out")
        Y, generator = problem.loss.Y, self._generator()
        options = self._options(Y.numel())
        return grow_tensor(Y, problem.lam, options, generator=generator, start=start, report=report)

    def _store(self, found: Factors, data: Tensor, like: Any) -> None:
        super()._store(found, data, like)
        assert found.modes is not None
        self.factors_ = tuple(same_kind(x.contiguous(), like) for x in found.modes)

    def certify(self, Y: Any) -> Certificate:
        """The certificate of the fitted components with the codes of the slices of Y; see ``certify_tensor``."""
        check_is_fitted(self)
        data = self._checked(Y, reset=False)[1]
        codes = self._encoded(data, self._right(data))[0]
        return certify_tensor(data, (codes, *self.factors_[1:]), lam=self.lam_, tol=self.tol)

    def inverse_transform(self, U: Any) -> Any:
        """The tensor of codes U."""
        check_is_fitted(self)
        return super().inverse_transform(U).reshape(-1, *self.mode_shape_)

    def _rough_polar(self, loss: Any) -> float:
        return self._largest_polar(loss)

    def _largest_polar(self, loss: Any) -> float:
        return float(ascend(loss.Y, self._generator())[0].max())

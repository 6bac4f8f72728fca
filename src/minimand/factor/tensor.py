"""CP decomposition of a tensor that finds its own size."""

import math
from typing import Any

import torch
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from ..errors import OptionError, ShapeError
from .base import Factorization
from .cp import (
    Factors,
    ascend,
    balanced,
    descend,
    empty,
    factors_of,
    full,
    is_cp,
    khatri_rao,
    split,
    tensor_certificate,
    tensor_of,
)
from .engine import growth_options, said
from .inputs import same_kind
from .lowrank import ridge_codes
from .rows import Rows

__all__ = ["CPTensor"]

FILLS = 3  # rounds in which the places of components that died are filled again


class CPTensor(Factorization):
    r"""CP decomposition with its own size,

    .. math:: \min_{r,A,B,C} \tfrac12\Bigl\|\mathcal{Y} - \sum_{i=1}^r a_i \otimes b_i \otimes c_i\Bigr\|^2
        + \lambda\sum_i \|a_i\|\|b_i\|\|c_i\| .

    The theory is that of matrices (003, from matrix to tensor factorisation), but the polar, a largest singular value
    of a tensor, is hard: ascent bounds it from below, and the norm of the best unfolding from above. That bound is
    tight for orthogonal components and loose in general, so ``UNDECIDED`` is common; its ``method`` says so.
    ``fit(Y, start=…)`` takes (A, B, C), tensorly's (weights, [A, B, C]), or the (U, V) of another fit.

    Args:
        lam: :math:`\lambda > 0`.
        n_components: None to grow until no direction is found; an int fixes the size.
        r_max: No more components than this; None is at most 100.
        tol: The relative gap to certify.
        max_iter: Sweeps in all.
        random_state: Seed of the starts.
        verbose: Show a progress bar.

    Attributes:
        factors_: (A, B, C), each size × r, with :math:`\|a_i\| = \|b_i\|\|c_i\|` and :math:`\|b_i\| = \|c_i\|`, so that
            A and the rows of ``components_``, :math:`b_i \otimes c_i`, are balanced.

    >>> import numpy as np
    >>> Y = np.zeros((3, 3, 3))
    >>> Y[0, 0, 0], Y[1, 1, 1] = 3.0, 2.0
    >>> model = CPTensor(lam=1.0, random_state=0).fit(Y)
    >>> model.n_components_, round(model.objective_, 4), model.certificate_.status
    (2, 4.0, <Status.CERTIFIED: 'CERTIFIED'>)
    """

    def __init__(
        self,
        lam: float,
        *,
        n_components: int | None = None,
        r_max: int | None = None,
        tol: float = 1e-3,
        max_iter: int = 500,
        random_state: Any = None,
        verbose: bool = False,
    ) -> None:
        self.lam = lam
        self.n_components = n_components
        self.r_max = r_max
        self.tol = tol
        self.max_iter = max_iter
        self.random_state = random_state
        self.verbose = verbose

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array = False
        tags.input_tags.three_d_array = True
        return tags

    def _checked(self, Y: Any, *, reset: bool) -> tuple[Any, Any]:
        data = tensor_of(Y)
        if reset:
            self.mode_shape_ = tuple(data.shape[1:])
            self.n_features_in_ = math.prod(self.mode_shape_)
        elif tuple(data.shape[1:]) != self.mode_shape_:
            raise ShapeError(f"slices have shape {tuple(data.shape[1:])}, but the fitted ones had {self.mode_shape_}")
        return Y, data

    def _checked_start(self, start: Any, data: Any) -> Factors:
        if is_cp(start):
            a, b, c = (x.to(data) for x in factors_of(start, data))
            return balanced((a, b, c))
        U, V = super()._checked_start(start, data.flatten(1))  # codes and components of another fit: a path
        return split((U, V), data)

    def _solve(self, Y: Tensor, start: Factors | None, rows: Rows) -> tuple[Tensor, Tensor]:
        if rows.group is not None:
            raise OptionError("CPTensor runs on one process: leave process_group out")
        generator = self._generator()
        options = growth_options(self, Y.numel())
        factors = empty(Y) if start is None else start
        if options.size is not None and len(factors[0]) > options.size:
            raise OptionError(f"start has {len(factors[0])} components, but n_components={options.size}")
        self.history_, used = [], 0
        with self._progress() as report:
            while True:
                factors, objective, made = descend(Y, factors, self.lam, self.tol * 1e-4, self.max_iter - used)
                used += made
                if factors[0].shape[0] or made or not self.history_:
                    self.history_.append(objective)
                report(used, len(factors[0]), objective)
                goal = options.largest if options.size is None else options.size
                room = goal - len(factors[0])
                if room <= 0 or used >= self.max_iter:
                    break
                value, found = ascend(Y - full(factors), generator)
                level = self.lam * (1 + self.tol / 4) if options.size is None else 0.0
                found = tuple(x[value > level][:room] for x in found)  # type: ignore[assignment]
                value = value[value > level][:room]
                if not len(value) or (options.size is not None and len(self.history_) > FILLS):
                    break
                scale = ((value - self.lam).clamp_min(0.05 * value) / len(value)).pow(1 / 3).unsqueeze(-1)
                factors = tuple(  # type: ignore[assignment]
                    torch.cat([old, (scale * new).to(Y.dtype)]) for old, new in zip(factors, found, strict=True)
                )
        factors = balanced(factors)
        self.certificate_, self.objective_ = tensor_certificate(Y, factors, self.lam, self.tol, generator)
        self.certificate_ = said(self.certificate_, len(factors[0]), self.lam)
        self.history_[-1] = self.objective_
        self.n_iter_ = max(used, 1)
        missing = max((options.size or 0) - len(factors[0]), 0)
        a, b, c = (torch.cat([x, x.new_zeros(missing, x.shape[1])]) for x in factors)
        self._found = (a, b, c)
        return a.mT, khatri_rao(b, c).mT

    def _fit(self, Y: Any, start: Any, group: Any) -> Any:
        like, _ = self._checked(Y, reset=True)
        out = super()._fit(Y, start, group)
        self.factors_ = tuple(same_kind(x.mT.contiguous(), like) for x in self._found)
        del self._found
        return out

    def _code(self, Y: Tensor, V: Tensor) -> Tensor:
        """Each slice solves min ½‖y − Σ uᵢ bᵢ ⊗ cᵢ‖² + (λ/2)‖u‖²."""
        return ridge_codes(Y.flatten(1), V, float(self.lam))

    def inverse_transform(self, U: Any) -> Any:
        """The tensor of codes U."""
        check_is_fitted(self)
        return super().inverse_transform(U).reshape(-1, *self.mode_shape_)

    def lambda_max(self, Y: Any) -> float:
        """The largest singular value of the tensor, found by ascent: below it zero is not the answer."""
        _, data = self._checked(Y, reset=not hasattr(self, "n_features_in_"))
        return float(ascend(data, self._generator())[0].max())

"""Folds of cross-validation: blocks of rows and columns, and observed entries."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from sklearn.base import clone
from torch import Tensor

from .base import Factorization
from .observed import Observed
from .problem import no_report
from .sparse import SparseData

__all__ = ["Fold", "block_fold", "entry_fold", "variance"]

#: From shares of λmax, in falling order, to the error and the number of components at each.
Fold = Callable[[np.ndarray], tuple[list[float], list[int]]]


def _rest(size: int, part: np.ndarray) -> np.ndarray:
    return np.setdiff1d(np.arange(size), part)


def _submatrix(data: Any, rows: np.ndarray, columns: np.ndarray) -> Any:
    if isinstance(data, SparseData):
        return SparseData(data.matrix.tocsr()[rows][:, columns])
    device = data.device
    return data[torch.from_numpy(rows).to(device)][:, torch.from_numpy(columns).to(device)].contiguous()


def _plain(data: Any) -> Any:
    return data.matrix if isinstance(data, SparseData) else data


def variance(data: Any) -> float:
    """The variance of all entries, zeros of sparse data included; of constant data their square, to which errors are
    relative then."""
    values = _entries(data).to(torch.float64)
    count = len(values) if isinstance(data, Observed) else data.numel()
    mean = float(values.sum()) / count
    spread = float((values - mean).square().sum()) / count + (1 - values.numel() / count) * mean**2
    return spread if spread > 1e-12 * mean**2 else mean**2


def block_fold(model: Factorization, data: Any, rows: np.ndarray, columns: np.ndarray, unit: float) -> Fold:
    """The fold of one block; its error is relative to its variance, or to ``unit``, the data's, if that is far more."""
    others = _rest(data.shape[0], rows), _rest(data.shape[1], columns)
    seen, below, beside = (_submatrix(data, r, c) for r, c in (others, (rows, others[1]), (others[0], columns)))
    block = _submatrix(data, rows, columns)
    hidden = (block[:] if isinstance(block, SparseData) else block).to(torch.float64)
    whole = _reference(hidden, unit)

    def run(shares: np.ndarray) -> tuple[list[float], list[int]]:
        errors, ranks, start = [], [], None
        top = clone(model).lambda_max(_plain(seen)) if bool(_entries(seen).any()) else 0.0
        for share in shares:
            if not top > 0:
                errors.append(float(hidden.square().sum()) / whole)
                ranks.append(0)
                continue
            fitted = clone(model).set_params(lam=float(share * top))
            U, _ = fitted._fit(_plain(seen), start, None)
            U, V = (torch.as_tensor(x) for x in (U, fitted.components_.T))
            start = (U, V) if fitted.n_components_ else None
            codes = fitted._encoded(below, V)[0]
            other = fitted._encoded(beside.mT if isinstance(beside, SparseData) else beside.mT.contiguous(), U)[0]
            errors.append(float((hidden - (codes @ other.mT).to(torch.float64)).square().sum()) / whole)
            ranks.append(fitted.n_components_)
        return errors, ranks

    return run


def _reference(hidden: Tensor, variance: float) -> float:
    """The error of the mean of hidden entries; of few or equal ones, that of as many with the variance of the data."""
    own, whole = float((hidden - hidden.mean()).square().sum()), variance * hidden.numel()
    return own if own > 0.1 * whole else whole


def _entries(data: Any) -> Tensor:
    return data.values if isinstance(data, SparseData | Observed) else data


def entry_fold(model: Any, data: Observed, part: Tensor, unit: float) -> Fold:
    """The fold of some observed entries; its error is relative to their variance, or to ``unit``, the data's, if that
    is far more."""
    held = torch.zeros(len(data.values), dtype=torch.bool)
    held[part] = True
    held = held.to(data.values.device)
    seen, hidden = (
        replace(data, values=data.values[kept], index=(data.index[0][kept], data.index[1][kept]))
        for kept in (~held, held)
    )
    whole = _reference(hidden.values.to(torch.float64), unit)

    def run(shares: np.ndarray) -> tuple[list[float], list[int]]:
        errors, ranks, start = [], [], None
        loss, units = seen.normalized()
        top = model._largest_polar(loss) * 2.0**units.polar
        for share in shares:
            fitted = clone(model).set_params(lam=float(share * top))
            fitted.lam_ = fitted.lam
            problem, scale = fitted._problem(seen, seen.rows).normalized()
            found = fitted._solve(problem, start, no_report)
            start = (found.U, found.V) if found.V.shape[1] else None
            found = found.in_units(scale)
            errors.append(2 * hidden.value(found.U, found.V) / whole)
            ranks.append(int(found.V.shape[1]))
        return errors, ranks

    return run

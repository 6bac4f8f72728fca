"""CP decomposition of a tensor that finds its own size."""

import math
from typing import Any

import numpy as np
import torch
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from ..errors import OptionError, ShapeError, require_finite
from ..solvers.iterate import iterate
from .base import Factorization, as_tensor, same_kind
from .bounds import unfolding_bound
from .certificate import Certificate, judge
from .duals import Dense
from .engine import growth_options, said
from .gauges import Euclidean
from .losses import Squared
from .lowrank import ridge_codes
from .rows import Rows

__all__ = ["CPTensor"]

GAUGE = Euclidean()
STARTS = 16
ASCENT = 60
FILLS = 3  # rounds in which the places of components that died are filled again

Factors = tuple[Tensor, Tensor, Tensor]  # vectors as rows: r × size of the mode


class CPTensor(Factorization):
    r"""CP decomposition with its own size,

    .. math:: \min_{r,A,B,C} \tfrac12\Bigl\|\mathcal{Y} - \sum_{i=1}^r a_i \otimes b_i \otimes c_i\Bigr\|^2
        + \lambda\sum_i \|a_i\|\|b_i\|\|c_i\| .

    The theory is that of matrices (003, from matrix to tensor factorisation), but the polar, a largest singular value
    of a tensor, is hard: ascent bounds it from below, and the norm of the best unfolding from above. That bound is
    tight for orthogonal components and loose in general, so ``UNDECIDED`` is common; its ``method`` says so.

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
        like = Y if isinstance(Y, Tensor) else np.asarray(Y)
        if isinstance(like, np.ndarray) and (like.dtype.kind not in "biuf"):
            raise OptionError(f"Y must hold real numbers, got {like.dtype}")
        data = like.detach() if isinstance(like, Tensor) else as_tensor(np.ascontiguousarray(like))
        data = data if data.dtype in (torch.float32, torch.float64) else data.to(torch.float64)
        if data.dim() != 3 or 0 in data.shape:
            raise ShapeError(f"CPTensor takes a tensor of three dimensions with entries, got shape {tuple(data.shape)}")
        require_finite("Y", data)
        if reset:
            self.mode_shape_ = tuple(data.shape[1:])
            self.n_features_in_ = math.prod(self.mode_shape_)
        elif tuple(data.shape[1:]) != self.mode_shape_:
            raise ShapeError(f"slices have shape {tuple(data.shape[1:])}, but the fitted ones had {self.mode_shape_}")
        return like, data

    def _checked_start(self, start: Any, data: Any) -> tuple[Tensor, Tensor]:
        if len(start) == 2:  # codes and components of another fit: a path
            U, V = super()._checked_start(start, data.flatten(1))
            return U, V
        raise OptionError("start is a pair (U, V) of codes and components, as another CPTensor has them")

    def _solve(self, Y: Tensor, start: tuple[Tensor, Tensor] | None, rows: Rows) -> tuple[Tensor, Tensor]:
        if rows.group is not None:
            raise OptionError("CPTensor runs on one process: leave process_group out")
        generator = self._generator()
        options = growth_options(self, Y.numel())
        factors = _split(start, Y) if start is not None else _empty(Y)
        self.history_, used = [], 0
        with self._progress() as report:
            while True:
                factors, objective, made = _descend(Y, factors, self.lam, self.tol * 1e-4, self.max_iter - used)
                used += made
                if factors[0].shape[0] or made or not self.history_:
                    self.history_.append(objective)
                report(used, len(factors[0]), objective)
                goal = options.largest if options.size is None else options.size
                room = goal - len(factors[0])
                if room <= 0 or used >= self.max_iter:
                    break
                value, found = _ascend(Y - _full(factors), generator)
                level = self.lam * (1 + self.tol / 4) if options.size is None else 0.0
                found = tuple(x[value > level][:room] for x in found)  # type: ignore[assignment]
                value = value[value > level][:room]
                if not len(value) or (options.size is not None and len(self.history_) > FILLS):
                    break
                scale = ((value - self.lam).clamp_min(0.05 * value) / len(value)).pow(1 / 3).unsqueeze(-1)
                factors = tuple(  # type: ignore[assignment]
                    torch.cat([old, (scale * new).to(Y.dtype)]) for old, new in zip(factors, found, strict=True)
                )
        factors = _balanced(factors)
        self.certificate_, self.objective_ = _certificate(Y, factors, self.lam, self.tol, generator)
        self.certificate_ = said(self.certificate_, len(factors[0]), self.lam)
        self.history_[-1] = self.objective_
        self.n_iter_ = max(used, 1)
        missing = max((options.size or 0) - len(factors[0]), 0)
        a, b, c = (torch.cat([x, x.new_zeros(missing, x.shape[1])]) for x in factors)
        self._found = (a, b, c)
        return a.mT, _khatri_rao(b, c).mT

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
        return float(_ascend(data, self._generator())[0].max())


def _empty(Y: Tensor) -> Factors:
    a, b, c = (Y.new_zeros(0, size) for size in Y.shape)
    return a, b, c


def _split(start: tuple[Tensor, Tensor], Y: Tensor) -> Factors:
    """Factors from codes and components: each component's leading singular pair."""
    U, V = (x.to(Y) for x in start)
    left, values, right = torch.linalg.svd(V.mT.reshape(-1, *Y.shape[1:]), full_matrices=False)
    return _balanced((U.mT * values[:, :1], left[..., 0], right[:, 0]))


def _khatri_rao(b: Tensor, c: Tensor) -> Tensor:
    """The rows bᵢ ⊗ cᵢ."""
    return (b.unsqueeze(2) * c.unsqueeze(1)).flatten(1)


def _full(factors: Factors) -> Tensor:
    a, b, c = factors
    return (a.mT @ _khatri_rao(b, c)).reshape(a.shape[1], b.shape[1], c.shape[1])


def _balanced(factors: Factors) -> Factors:
    """The same sum with ‖a‖ = ‖b‖‖c‖ and ‖b‖ = ‖c‖; a term with a zero factor is dropped."""
    sizes = torch.stack([x.norm(dim=1) for x in factors])
    total = sizes.prod(0)
    alive = total > 16 * torch.finfo(total.dtype).eps * total.max() if len(total) else total > 0
    total, sizes = total[alive], sizes[:, alive]
    goals = total.pow(0.5), total.pow(0.25), total.pow(0.25)
    a, b, c = (x[alive] * (g / s).unsqueeze(1) for x, g, s in zip(factors, goals, sizes, strict=True))
    return a, b, c


def _descend(Y: Tensor, factors: Factors, lam: float, tol: float, sweeps: int) -> tuple[Factors, float, int]:
    """Exact column updates of the three modes in turn."""
    if not len(factors[0]):
        return factors, _objective(Y, factors, lam), 0
    unfolded = [Y.movedim(mode, 0).flatten(1).contiguous() for mode in range(3)]

    def step(state: tuple[Factors, float, int], k: int) -> tuple[Factors, float, int]:
        now, before, quiet = state
        for mode in range(3):
            now = _updated(now, mode, unfolded[mode], lam)
        now = _balanced(now)
        objective = _objective(Y, now, lam)
        return now, objective, quiet + 1 if before - objective <= tol * abs(objective) else 0

    start = (factors, math.inf, 0)
    (factors, objective, _), made = iterate(
        step, start, max(sweeps, 1), until=lambda s, k: s[2] >= 3 or not len(s[0][0])
    )
    return factors, objective, made


def _updated(factors: Factors, mode: int, unfolded: Tensor, lam: float) -> Factors:
    b, c = (factors[m] for m in range(3) if m != mode)
    other = _khatri_rao(b, c)
    product = (b @ b.mT) * (c @ c.mT)
    target = other @ unfolded.mT
    X = factors[mode].clone()
    for i, square in enumerate(product.diagonal().tolist()):
        if square <= 0:
            X[i].zero_()
            continue
        point = torch.addmv(target[i], X.mT, product[i], alpha=-1).div_(square).add_(X[i])
        X[i] = GAUGE.prox_(point, lam / math.sqrt(square))
    return tuple(X if m == mode else factors[m] for m in range(3))  # type: ignore[return-value]


def _objective(Y: Tensor, factors: Factors, lam: float) -> float:
    residual = (Y - _full(factors) if len(factors[0]) else Y).to(torch.float64)
    sizes = torch.stack([x.to(torch.float64).norm(dim=1) for x in factors]).prod(0)
    return 0.5 * float(residual.square().sum()) + lam * float(sizes.sum())


def _ascend(Z: Tensor, generator: torch.Generator) -> tuple[Tensor, Factors]:
    """Distinct unit directions found by alternating ascent, best first, and what each attains."""
    Z = Z.to(torch.float64)
    starts = [torch.randn(STARTS, Z.shape[2], dtype=torch.float64, generator=generator).to(Z.device)]
    _, _, right = torch.linalg.svd(Z.flatten(0, 1), full_matrices=False)
    starts.append(right[:STARTS])
    c = torch.nn.functional.normalize(torch.cat(starts), dim=1)
    _, values, pairs = torch.linalg.svd(torch.einsum("ijk,rk->rij", Z, c), full_matrices=False)
    b = pairs[:, 0]

    def step(state: tuple[Tensor, Factors], k: int) -> tuple[Tensor, Factors]:
        _, (_, b, c) = state
        a = torch.nn.functional.normalize(torch.einsum("ijk,rj,rk->ri", Z, b, c), dim=1)
        b = torch.nn.functional.normalize(torch.einsum("ijk,ri,rk->rj", Z, a, c), dim=1)
        top = torch.einsum("ijk,ri,rj->rk", Z, a, b)
        values, c = GAUGE.polar(top)
        return values, (a, b, c)

    (values, (a, b, c)), _ = iterate(step, (values[:, 0], (b[:, :0], b, c)), ASCENT)
    order = torch.argsort(values, descending=True)
    a, b, c = a[order], b[order], c[order]
    same = ((a @ a.mT) * (b @ b.mT) * (c @ c.mT)) > 0.9
    kept = [i for i in range(len(order)) if not bool(same[i, :i].any())]
    return values[order][kept], (a[kept], b[kept], c[kept])


def _certificate(
    Y: Tensor, factors: Factors, lam: float, tol: float, generator: torch.Generator
) -> tuple[Certificate, float]:
    """The gap of squared losses, with the unfoldings' bound on the polar."""
    a, b, c = (x.to(torch.float64) for x in factors)
    wide = Y.to(torch.float64)
    other = _khatri_rao(b, c)
    loss = Squared(wide.flatten(1), Rows())
    Z = loss.dual(a.mT, other.mT)
    assert isinstance(Z, Dense)
    residual = Z.dense().reshape(wide.shape)
    upper = unfolding_bound(residual, lam)
    objective = loss.value(a.mT, other.mT) + lam * float((a.norm(dim=1) * other.norm(dim=1)).sum())
    dual = loss.lower(Z, lam / upper.value if upper.value > 0 else math.inf)
    hidden = dual.margin + 1e-13 * objective
    lower = min(float(_ascend(residual, generator)[0].max()), upper.value)
    gap = objective - dual.value + hidden if objective > 0 else 0.0
    found = judge(
        gap=gap,
        objective=objective,
        polar_lower=max(lower, 0.0),
        polar_upper=upper.value,
        lam=lam,
        tol=tol,
        method=upper.method,
    )
    return found, objective

r"""The rows that a layer accumulates, and the direction :math:`G(A^\top A + I/\tau_\theta)^{-1}` of its gradient.

:math:`A` has one row per sample and position, with a column of ones for a trained bias; :math:`\delta` holds the
gradients at the layer's outputs. A gradient that nobody edited is :math:`G = \delta^\top A`. With fewer rows than
columns the equal dual form :math:`[(AA^\top + I/\tau_\theta)^{-1}\delta]^\top A` needs only the smaller Gram matrix.
Gradients and directions are lists: the weight's part as outputs × columns, the bias's as outputs × 1, if trained.
Source: [Frerix2018], Proposition 2, eqs. 13–16 and 44.
"""

import functools
import itertools
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import NonFiniteError, OptionError, ShapeError
from ...linalg import gram
from ...operators.patch_grams import row_gram
from ...solvers.linear import RidgeFactor, conjugate_gradient, gram_factor
from .maps import WeightMap
from .options import CachedGram, ProxPropOptions, Relative, Tau, TauSchedule

__all__ = ["Attachment", "CallWatch", "GramCache", "RowAccumulator", "fingerprint", "to_working_precision"]

# A system whose estimated rounding error exceeds this is formed and factored in float64: directions keep three digits.
_ROUNDING = 1e-3
# The damping outside of the span of cached rows is at least this many rounding units of the largest eigenvalue.
_UNKNOWN = 100
# Output units whose conjugate gradients run together; few enough that their vectors stay in the processor's cache.
_UNITS = 256
# Fingerprints that differ by fewer rounding units belong to equal gradients.
_EQUAL = 32


def to_working_precision(tensor: Tensor) -> Tensor:
    """The tensor in float32 or float64."""
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def fingerprint(gradient: list[Tensor]) -> Tensor:
    """The products of some columns each of a gradient with fixed random vectors: a few numbers per output unit.

    One number of a layer with one output could not tell an edit from a scale.
    """
    parts = [some for part in gradient for some in part.chunk(2, 1)]
    random = torch.Generator().manual_seed(0)
    return torch.stack([some @ torch.randn(some.shape[1], generator=random).to(some) for some in parts], 1)


def _factor(matrix: Callable[[bool], Tensor], shift: float) -> RidgeFactor:
    """The factor of ``matrix(False)``, or of ``matrix(True)``, in float64, if float32 is too imprecise."""
    factor = gram_factor(matrix(False), shift)
    single = factor.factor.dtype == torch.float32
    return gram_factor(matrix(True), shift) if single and (factor.damping or factor.rounding() > _ROUNDING) else factor


def _times_inverse(rows: Tensor, factor: RidgeFactor, inverse: Callable[[], Tensor]) -> Tensor:
    """The rows times the inverse; of many rows one product is faster than two triangular solves."""
    if rows.shape[-2] < 1.5 * rows.shape[-1]:
        return factor.solve(rows)
    return (rows.to(factor.factor.dtype) @ inverse()).to(rows.dtype)


def _shift(tau: Tau, diagonal: Callable[[], float]) -> float:
    """The ridge 1/τθ of the linear solves; ``diagonal`` is the mean diagonal of the Gram matrix."""
    # A Gram matrix of zeros has a gradient of zeros, for which any ridge gives the direction.
    return (diagonal() / tau.factor or 1.0) if isinstance(tau, Relative) else 1.0 / tau


def _conjugate(apply: Callable[[Tensor], Tensor], target: Tensor, options: ProxPropOptions, **how: Any) -> Tensor:
    return conjugate_gradient(apply, target, options.cg_iters, tol=options.cg_tol, **how)


@dataclass(frozen=True)
class _Metric:
    """A Gram matrix (groups × n × n) plus a ridge; factored once, on the first use."""

    gram: Tensor
    tau: Tau

    @functools.cached_property
    def shift(self) -> float:
        """The ridge."""
        return _shift(self.tau, lambda: float(self.gram.diagonal(dim1=-2, dim2=-1).double().mean()))

    @functools.cached_property
    def _factor(self) -> RidgeFactor:
        return _factor(lambda double: self.gram.double() if double else self.gram, self.shift)

    @functools.cached_property
    def _inverse(self) -> Tensor:
        return self._factor.inverse()

    def accurate(self) -> bool:
        """Whether the Gram matrix is precise enough for a solve; True if it is not finite."""
        try:
            return self._factor.factor.dtype == self.gram.dtype
        except NonFiniteError:
            return True

    def direction(self, gradient: Tensor, options: ProxPropOptions) -> Tensor:
        """The direction of a gradient, groups × outputs × n."""
        if options.method == "cg":
            return _conjugate(lambda v: v @ self.gram.to(v.dtype) + self.shift * v, gradient, options)
        return _times_inverse(gradient, self._factor, lambda: self._inverse)


@dataclass(frozen=True)
class _LowRank:
    """A Gram matrix by its largest eigenvalues: ``rows`` are eigenvectors times roots; ``rest`` are all others."""

    rows: Tensor
    rest: float
    tau: Tau

    @functools.cached_property
    def sizes(self) -> Tensor:
        """The eigenvalues of the rows."""
        return self.rows.square().sum(1, dtype=torch.float64)

    @functools.cached_property
    def shift(self) -> float:
        """The ridge."""
        others = self.rows.shape[1] - len(self.rows)
        return _shift(self.tau, lambda: float(self.sizes.sum() + others * self.rest) / self.rows.shape[1])

    def direction(self, gradient: list[Tensor], options: ProxPropOptions) -> list[Tensor]:
        """The direction of a gradient, in its memory."""
        # Of a gradient in the span of the rows, rounding leaves a part outside.
        unknown = _UNKNOWN * torch.finfo(self.rows.dtype).eps * float(self.sizes.max()) if len(self.sizes) else 0.0
        low, high = max(self.rest + self.shift, unknown), self.sizes + self.shift
        widths = [part.shape[1] for part in gradient]
        if options.method == "cg":
            scale = ((high - low) / self.sizes).to(self.rows)
            apply = lambda v: low * v + (v @ self.rows.mT * scale) @ self.rows  # noqa: E731
            return list(_conjugate(apply, torch.cat(gradient, 1), options).split(widths, 1))
        parts = self.rows.split(widths, 1)
        along = sum(part @ rows.mT for part, rows in zip(gradient, parts, strict=True))
        along = along * ((1 / high - 1 / low) / self.sizes).to(self.rows)
        return [part.addmm_(along, rows, beta=1 / low) for part, rows in zip(gradient, parts, strict=True)]


def _truncated(rows: Tensor, old: Tensor | None, rest: float, rule: CachedGram) -> tuple[Tensor, float]:
    """The average of two Gram matrices, BᵀB of rows and of a :class:`_LowRank`, as the rows and the rest of one."""
    rows = rows.double()
    if old is not None:
        rows, rest = torch.cat([(1 - rule.decay) ** 0.5 * rows, rule.decay**0.5 * old.double()]), rule.decay * rest
    kernel = gram(rows, half=True)
    if not torch.isfinite(kernel).all():
        raise NonFiniteError("the inputs hold NaN or Inf, or overflow")
    sizes, vectors = torch.linalg.eigh(kernel)
    kept = min(rule.rank, int((sizes > len(sizes) * torch.finfo(sizes.dtype).eps * sizes[-1]).sum()))
    others = sizes[: len(sizes) - kept].clamp(min=0)
    return vectors[:, len(sizes) - kept :].mT @ rows, rest + (float(others.mean()) if len(others) else 0.0)


@dataclass
class Attachment:
    """State that all layers of one ProxProp share; ``distributed``: Gram matrices are summed over processes.

    ``latest`` is the layer that was called last, and ``last`` the one that stays explicit; while that is ``undecided``,
    the first backward pass decides. ``tau`` has the present τθ.
    """

    options: ProxPropOptions
    tau: TauSchedule
    optimizers: tuple[Any, ...] = ()
    distributed: bool = False
    latest: str | None = None
    last: str | None = None
    undecided: bool = False


class CallWatch:
    """A forward pre-hook that notes which layer was called last. In copies of the model it does nothing."""

    def __init__(self, shared: Attachment | None = None, path: str = "") -> None:
        self.shared, self.path = shared, path

    def __call__(self, *_: Any) -> None:
        """Note the call, if a gradient may follow."""
        if self.shared is not None and torch.is_grad_enabled():
            self.shared.latest = self.path

    def __reduce__(self) -> tuple[Any, ...]:
        return CallWatch, ()


@dataclass
class GramCache:
    """A running mean of Gram matrices per row, the last metric computed from it, its rows, and the steps taken.

    The mean is a matrix, groups × n × n, or the rows of a :class:`_LowRank` with its ``rest``.
    """

    steps: int = 0
    mean: Tensor | None = None
    rest: float = 0.0
    metric: _Metric | _LowRank | None = None
    rows: int = 0
    # Whether float32 was once too imprecise for this layer's Gram matrix; products are then in float64.
    wide: bool = False

    def load(self, key: str, state: Mapping[str, Any], device: torch.device, map: WeightMap | None) -> None:
        """Restore a layer's part of a saved state."""
        try:
            # One number for all layers is the form of version 0.1.
            steps = int(state["turn"][key] if isinstance(state["turn"], dict) else state["turn"])
            mean, rows, *rest = state["grams"].get(key, (None, 0))
            mean = None if mean is None else mean.clone().to(device)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise OptionError(f"the saved state of layer '{key}' is damaged; pass another one") from error
        if mean is not None and map is not None and mean.shape[-1] not in (map.columns, map.columns + 1):
            raise ShapeError(f"the saved Gram matrix of layer '{key}' has {mean.shape[-1]} columns, not {map.columns}")
        self.steps, self.mean, self.rows, self.metric = steps, mean, int(rows), None
        self.rest, self.wide = float(*rest), key in state.get("wide", ())


class RowAccumulator:
    """The rows that contributed to ``.grad`` since the last step or ``zero_grad``.

    While there are fewer rows than columns, the rows ``a``, their output gradients ``delta`` (rows × outputs) and the
    fingerprint ``mark`` of δᵀA are stored; otherwise the Gram matrix is summed. ``inputs`` is the sum of all inputs.
    """

    def __init__(self, map: WeightMap, shared: Attachment, cache: GramCache, trained: Container[str]) -> None:
        self.map, self.shared, self.cache, self.options = map, shared, cache, shared.options
        self.trains_weight, self.ones = "weight" in trained, "bias" in trained
        self.sizes = [map.columns] * self.trains_weight + [1] * self.ones
        rule = self.options.gram
        self._cached = rule if isinstance(rule, CachedGram) and self.trains_weight else None
        self.count, self.inputs = 0, cast(Any, 0.0)
        self.a = self.delta = self.mark = self.gram = self.metric = cast(Any, None)
        self.renewed: dict[str, Any] = {}

    def stores(self, count: int) -> bool:
        """Whether with ``count`` more rows there are fewer than columns, so that they are stored with their δ."""
        fused = self.options.fused and self.options.method != "cg"
        return self._few(count) and (self._cached is None or fused)

    def _few(self, count: int) -> bool:
        dual = self.trains_weight and self.gram is None and self.map.dual and not self.shared.distributed
        low = self._cached is None or self.cache.mean is None or self.cache.mean.dim() == 2
        return dual and low and 0 < self.count + count < sum(self.sizes)

    def updates(self) -> bool:
        """Whether the rule needs a new Gram matrix at this step."""
        return self._cached is None or self.cache.steps % self._cached.every == 0 or self.cache.mean is None

    def add(self, x: Tensor, delta: Tensor, mark: Tensor | None, tau: Tau) -> None:
        """Add the rows of one call; ``mark`` is the fingerprint of their gradient."""
        count = self.map.count(delta)
        if count == 0:
            return
        stores, few = self.stores(count), self._few(count)
        self.count, self.inputs = self.count + count, self.inputs + x.sum(dtype=torch.float32)
        self.metric = None
        if stores or (few and self.updates()):
            a = to_working_precision(self.map.rows(x))
            a = torch.cat([a, a.new_ones(count, 1)], 1) if self.ones else a
            self.a = a if self.a is None else torch.cat([self.a, a])
            if stores:
                delta = to_working_precision(self.map.deltas(delta))
                self.delta = delta if self.delta is None else torch.cat([self.delta, delta])
                self.mark = mark if self.mark is None else self.mark + mark
        elif not few and self.updates():
            before, self.a = (self.gram, self.a), None
            self.gram = self._sum(x, count, *before)
            metric = self._step_metric(tau) if self.options.method != "cg" and self.trains_weight else None
            if isinstance(metric, _Metric) and not metric.accurate():
                self.cache.wide = True
                self.gram, self.metric = self._sum(x, count, *before), None

    def _sum(self, x: Tensor, count: int, before: Tensor | None, stored: Tensor | None) -> Tensor:
        """The Gram matrix of all rows so far."""
        x, wide = to_working_precision(x), self.cache.wide
        if self.trains_weight:
            total = self.map.gram(x, self.ones, self.options.gram, self.cache.steps, wide)
        else:
            total = x.new_full((self.map.groups, 1, 1), float(count))
        total = total if stored is None else total + row_gram(stored, False, wide)
        double = wide or x.dtype == torch.float64
        if before is not None:
            total, double = total + before, double or before.dtype == torch.float64
        return total.to(torch.float64 if double else torch.float32)

    def direction(self, gradient: list[Tensor] | None, tau: Tau) -> list[Tensor]:
        """The direction of a gradient; None is the gradient δᵀA of stored rows. It may overwrite the gradient."""
        if self.a is not None and self._cached is None:
            return self._dual(1.0, tau) if gradient is None else self._received(gradient, tau)
        metric, options = self._step_metric(tau), self.options
        if isinstance(metric, _LowRank):
            if gradient is not None:
                return metric.direction(gradient, options)
            # δᵀA times the inverse: that of the rows costs little.
            rows = self.a if self.ones else self.a.clone()
            return [self.delta.mT @ part for part in metric.direction(list(rows.split(self.sizes, 1)), options)]
        assert gradient is not None
        whole = torch.cat(gradient, 1) if len(gradient) > 1 else gradient[0]
        made = metric.direction(whole.unflatten(0, (self.map.groups, -1)), options)
        return list(made.flatten(0, 1).split(self.sizes, 1))

    def _received(self, gradient: list[Tensor], tau: Tau) -> list[Tensor]:
        r"""The direction of the gradient that the optimizer receives, from stored rows.

        The gradient is :math:`c\,\delta^\top A + E` for a scalar c (unscaling, clipping). The first part is solved from
        δ, without cancellation. Equal fingerprints show that E is rounding. Otherwise (a penalty, other edits) the
        Woodbury identity :math:`\tau_\theta(E - EA^\top(AA^\top + I/\tau_\theta)^{-1}A)` gives its direction.
        """
        found, own, a, shift = fingerprint(gradient), self.mark, self.a, self._ridge(tau)
        scale = float(torch.nan_to_num((found.double() * own).sum() / own.double().square().sum()))
        apart, unit, small = (found - scale * own).abs(), _EQUAL * torch.finfo(found.dtype).eps, found.abs()
        # Gradients that nobody touched pass the first test, which needs no norms.
        sizes = (lambda: small, lambda: small + torch.linalg.vector_norm(gradient[0], dim=1, keepdim=True))
        if any(bool((apart <= unit * size()).all()) for size in sizes):
            return self._dual(scale, tau, gradient)
        whole = torch.cat(gradient, 1)
        if self.options.method == "cg":
            made = _conjugate(lambda v: v @ a.mT @ a + shift * v, whole, self.options)
        else:
            rest = whole - scale * self.delta.mT @ a
            solved, moved = self._solve(torch.cat([scale * self.delta.mT, rest @ a.mT]), tau).chunk(2)
            made = solved @ a + (rest - moved @ a) / shift
        return list(made.split(self.sizes, 1))

    def _dual(self, scale: float, tau: Tau, into: list[Tensor] | None = None) -> list[Tensor]:
        """The direction of the gradient δᵀA times a scale, solved from δ; written ``into`` given tensors."""
        c, a = (self.delta if scale == 1 else self.delta * scale).mT, self.a
        if self.options.method == "cg":
            c = self._dual_conjugate(c, tau)
        elif len(c) <= a.shape[1]:
            c = self._solve(c, tau)
        else:  # the side with fewer columns
            a = self._solve(a.mT, tau).mT
        return [torch.mm(c, part, out=into[i] if into else None) for i, part in enumerate(a.split(self.sizes, 1))]

    def _ridge(self, tau: Tau) -> float:
        """1/τθ for the stored rows."""
        size = lambda: float(torch.linalg.vector_norm(self.a, dtype=torch.float64).square()) / self.a.shape[1]  # noqa: E731
        return _shift(tau, size)

    def _solve(self, target: Tensor, tau: Tau) -> Tensor:
        """Multiply by (AAᵀ + I/τθ)⁻¹ from the right."""
        factor = _factor(lambda double: gram(self.a.double() if double else self.a, half=True), self._ridge(tau))
        return _times_inverse(target, factor, factor.inverse)

    def _dual_conjugate(self, target: Tensor, tau: Tau) -> Tensor:
        """Coefficients c of the last conjugate gradient iterate cA, outputs × rows."""
        kernel, shift, calls = gram(self.a), self._ridge(tau), itertools.count(1)

        # A vector cA is stored as (c, cK) with K = AAᵀ. Its inner product with dA is ⟨cK, d⟩.
        def apply(v: Tensor) -> Tensor:
            c, image = v.unbind(-2)
            # The last residual is not used, and the length of the last step does not need its product with K.
            needed = next(calls) % self.options.cg_iters or self.options.cg_tol is not None
            after = torch.addmm(image, image, kernel, beta=shift) if needed else image
            return torch.stack([image + shift * c, after], -2)

        how: Any = {"sample_dims": 2, "inner": lambda u, v: (u[:, 1] * v[:, 0]).sum(-1)[:, None, None]}
        pairs = (torch.stack([units, units @ kernel], -2) for units in target.split(_UNITS))
        return torch.cat([_conjugate(apply, some, self.options, **how)[:, 0] for some in pairs])

    def _step_metric(self, tau: Tau) -> _Metric | _LowRank:
        """The metric of this step: of its rows, or from the cache."""
        rule, cache = self._cached, self.cache
        if self.metric is None or self.metric.tau != tau:
            self.metric = _Metric(self.gram, tau) if rule is None else self._renewed(rule, cache, tau)
        return self.metric

    def _renewed(self, rule: CachedGram, cache: GramCache, tau: Tau) -> _Metric | _LowRank:
        """The metric from the cache and the rows of this step, if it needs them."""
        metric, mean, rest, count = cache.metric, cache.mean, cache.rest, max(self.count, 1)
        if self.a is not None and self.updates():
            metric, (mean, rest) = None, _truncated(self.a / count**0.5, mean, rest, rule)
            mean = mean.to(self.a.dtype)
        elif self.gram is not None:
            old = mean if mean is None or mean.dim() == 3 else (mean.mT @ mean)[None]
            fresh = self.gram / count
            metric, mean = None, fresh if old is None else rule.decay * old + (1 - rule.decay) * fresh
        assert mean is not None
        if metric is None or cache.rows != self.count or metric.tau != tau:
            low = mean.dim() == 2
            metric = _LowRank(mean * count**0.5, rest * count, tau) if low else _Metric(mean * count, tau)
        self.renewed = {"mean": mean, "rest": rest, "metric": metric, "rows": self.count}
        return metric

    def reduce(self, device: torch.device, group: dist.ProcessGroup | None) -> None:
        """Sum the number of rows and the Gram matrix over the processes. All processes call this in the same order."""
        count = torch.tensor(float(self.count), dtype=torch.float64, device=device)
        dist.all_reduce(count, group=group)
        if self.updates():
            # Processes may differ in whether they needed float64.
            zero = torch.zeros(self.map.groups, sum(self.sizes), sum(self.sizes), dtype=torch.float64, device=device)
            self.gram = zero if self.gram is None else self.gram.double()
            dist.all_reduce(self.gram, group=group)
        self.count, self.metric = int(count), None

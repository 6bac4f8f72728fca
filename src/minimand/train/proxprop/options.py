"""Options of ProxProp: the step size in the weights, the linear solver, and the Gram matrix of a convolution."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, Literal

from torch import Tensor
from torch.optim import Optimizer

from ...arguments import checked
from ...errors import OptionError, require_positive

__all__ = ["CachedGram", "ExactGram", "GramRule", "ProxPropOptions", "SubsampledGram", "check_keys", "paper_tau_theta"]


@dataclasses.dataclass(frozen=True)
class ExactGram:
    """The Gram matrix of all patches. At stride 1 patches overlap, which saves most products."""


@checked
@dataclasses.dataclass(frozen=True)
class SubsampledGram:
    """The Gram matrix of a fraction of the batch, scaled up: every k-th image, with an offset that rotates per step."""

    fraction: float = 0.125

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise OptionError(f"the fraction of a SubsampledGram must lie in (0, 1], got {self.fraction}")

    @property
    def every(self) -> int:
        """The distance k between chosen images."""
        return max(1, round(1 / self.fraction))


@checked
@dataclasses.dataclass(frozen=True)
class CachedGram:
    """A Gram matrix that is updated every ``every`` steps by an exponential average, and whose factor is kept.

    The average is per row and is multiplied by the number of rows of the step. ``decay`` is the weight of the old
    average; 0 discards it. ``of`` is the rule for new Gram matrices.
    """

    every: int = 10
    decay: float = 0.5
    of: ExactGram | SubsampledGram = SubsampledGram()

    def __post_init__(self) -> None:
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise OptionError(f"every of a CachedGram must be a whole number ≥ 1, got {self.every!r}")
        if not 0 <= self.decay < 1:
            raise OptionError(f"the decay of a CachedGram must lie in [0, 1), got {self.decay}")


GramRule = ExactGram | SubsampledGram | CachedGram

_NAMED: dict[str, GramRule] = {"exact": ExactGram(), "subsampled": SubsampledGram(), "cached": CachedGram()}


@dataclasses.dataclass(frozen=True)
class ProxPropOptions:
    """The checked arguments of :class:`~minimand.train.ProxProp`."""

    tau_theta: float
    method: Literal["auto", "exact", "cg"]
    cg_iters: int
    cg_tol: float | None
    gram: Any
    skip_last: bool
    include: str | Sequence[str] | None
    exclude: str | Sequence[str] | None
    fused: bool

    def __post_init__(self) -> None:
        require_positive("tau_theta", self.tau_theta)
        require_positive("cg_tol", 1.0 if self.cg_tol is None else self.cg_tol)
        if isinstance(self.gram, str):
            object.__setattr__(self, "gram", _NAMED.get(self.gram, self.gram))
        checks = {
            "include": (_are_patterns(self.include), "None, a pattern or a list of patterns"),
            "exclude": (_are_patterns(self.exclude), "None, a pattern or a list of patterns"),
            "method": (self.method in ("auto", "exact", "cg"), "one of auto, exact, cg"),
            "cg_iters": (type(self.cg_iters) is int and self.cg_iters > 0, "a whole number ≥ 1"),
            "gram": (isinstance(self.gram, GramRule), f"one of {', '.join(_NAMED)} or a rule such as CachedGram()"),
            "skip_last": (isinstance(self.skip_last, bool), "True or False"),
            "fused": (isinstance(self.fused, bool), "True or False"),
        }
        for name, (good, kind) in checks.items():
            if not good:
                raise OptionError(f"{name} must be {kind}, got {getattr(self, name)!r}")

    @property
    def shift(self) -> float:
        """The ridge 1/τθ of the linear solves."""
        return 1.0 / self.tau_theta


def _are_patterns(value: Any) -> bool:
    return value is None or (isinstance(value, str | Sequence | Set) and all(isinstance(p, str) for p in value))


def check_keys(optimizer: Optimizer, layers: Mapping[str, Iterable[Tensor | None]]) -> None:
    """Raise for keys of parameter groups that ProxProp would ignore; ``layers`` has the parameters of each layer."""
    owned = {id(p): path for path, parameters in layers.items() for p in parameters if p is not None}
    options = {field.name for field in dataclasses.fields(ProxPropOptions)} - {"tau_theta", *optimizer.defaults}
    found: dict[str, Any] = {}
    for group in optimizer.param_groups:
        for key in group:
            if key in options or (key.startswith("tau") and key != "tau_theta"):
                raise OptionError(f"ProxProp ignores the key {key!r} of a parameter group; it reads tau_theta only")
        tau: Any = group.get("tau_theta")
        paths = {owned[id(p)] for p in group["params"] if id(p) in owned}
        if "tau_theta" in group:
            require_positive("tau_theta of a parameter group", tau)
            if not paths:
                raise OptionError("tau_theta has no effect in a parameter group without a layer that ProxProp steps")
        for path in paths:
            if found.setdefault(path, tau) != tau:
                raise OptionError(f"layer '{path}' has one tau_theta, but its weight and bias are in groups with two")


def paper_tau_theta(
    tau_theta: float, *, paper_rows: int = 500, rows: int | None = None, reduction: Literal["mean", "sum"] = "mean"
) -> tuple[float, float]:
    r"""Convert the paper's :math:`\tau_\theta` for batches of ``paper_rows`` to batches of ``rows`` and a reduction.

    Returns ``(tau_theta, factor)``: with this ``tau_theta``, ``factor`` times the paper's learning rate is the paper's
    step. The metric :math:`A^\top A + I/\tau_\theta` grows with the number of rows, for every reduction of the loss.
    For convolutions the ratio is that of the numbers of images.

    >>> paper_tau_theta(0.05, rows=1000)
    (0.025, 2.0)
    >>> paper_tau_theta(0.05, reduction="sum")
    (0.05, 0.002)
    """
    rows = paper_rows if rows is None else rows
    for name, value in {"tau_theta": tau_theta, "paper_rows": paper_rows, "rows": rows}.items():
        require_positive(name, value)
    if reduction not in ("mean", "sum"):
        raise OptionError(f"reduction must be mean or sum, got {reduction!r}")
    ratio = paper_rows / rows
    require_positive("paper_rows / rows", ratio)
    return tau_theta * ratio, (1 / ratio) / (rows if reduction == "sum" else 1)

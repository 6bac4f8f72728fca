"""Options of ProxProp: the step size in the weights, the linear solver, and the Gram matrix."""

import dataclasses
import fnmatch
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...arguments import checked
from ...errors import CapabilityError, OptionError, require_positive

__all__ = [
    "IN_BACKWARD",
    "CachedGram",
    "ExactGram",
    "GramRule",
    "ProxPropOptions",
    "Relative",
    "SubsampledGram",
    "Tau",
    "TauSchedule",
    "check_keys",
    "check_optimizers",
    "match",
    "paper_tau_theta",
    "parameters_of",
    "require_tau",
    "unwrapped",
]


@checked
@dataclasses.dataclass(frozen=True)
class Relative:
    r"""A proximal step relative to the Gram matrix: :math:`\tau_\theta = \text{factor}\,/\,\bar d`.

    :math:`\bar d = \operatorname{tr}(A^\top A)/n` is the mean diagonal of the summed Gram matrix of the step, with the
    ones column of a trained bias. The damping :math:`1/\tau_\theta` is then the share 1/factor of :math:`\bar d`.

    - Repeated rows (a larger batch of the same distribution) and the loss's reduction do not change this share. The
      direction's length still scales as G does, and with the inverse of the number of rows.
    - Without a bias, inputs times s change neither the share nor the step in function space: the direction is 1/s times
      the former one. A ones column does not scale with the inputs, so that with a bias this holds only approximately.

    >>> from torch import nn
    >>> from minimand.train import ProxProp
    >>> layer, A = nn.Linear(3, 2, bias=False), torch.randn(8, 3)
    >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    >>> _ = ProxProp(layer, tau_theta=Relative(10.0), skip_last=False).attach(optimizer)
    >>> layer(A).square().sum().backward()
    >>> G, M = layer.weight.grad.clone(), A.T @ A
    >>> optimizer.step()
    >>> torch.allclose(layer.weight.grad @ (M + M.trace() / 3 / 10.0 * torch.eye(3)), G, rtol=1e-3)
    True
    """

    factor: float

    def __post_init__(self) -> None:
        require_tau("the factor of Relative", self.factor)


# An optimizer's checkpoint may hold one in a parameter group; torch.load accepts only classes that it is told of.
torch.serialization.add_safe_globals([Relative])

Tau = float | Relative


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
    """A Gram matrix that is updated every ``every`` steps by an exponential average, and whose inverse is kept.

    The average is per row and is multiplied by the number of rows of the step. ``decay`` is the weight of the old
    average; 0 discards it. ``of`` is the rule for new Gram matrices of convolutions; other layers use all rows.

    Of a layer with fewer rows than columns the ``rank`` largest eigenvalues and their eigenvectors are kept; the mean
    of the rows' other eigenvalues stands for all others. An inverse of all columns would cost more than an exact solve.
    Directions for later rows are as close to the exact ones as with all eigenvalues, which are those of older rows.
    """

    every: int = 10
    decay: float = 0.5
    of: ExactGram | SubsampledGram = SubsampledGram()
    rank: int = 32

    def __post_init__(self) -> None:
        for name, value in (("every", self.every), ("rank", self.rank)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise OptionError(f"{name} of a CachedGram must be a whole number ≥ 1, got {value!r}")
        if not 0 <= self.decay < 1:
            raise OptionError(f"the decay of a CachedGram must lie in [0, 1), got {self.decay}")
        if not isinstance(self.of, ExactGram | SubsampledGram):
            raise OptionError(f"of= of a CachedGram must be ExactGram() or SubsampledGram(…), got {self.of!r:.60}")


GramRule = ExactGram | SubsampledGram | CachedGram

_NAMED: dict[str, GramRule] = {"exact": ExactGram(), "subsampled": SubsampledGram(), "cached": CachedGram()}


def match(patterns: Iterable[str], paths: Iterable[str]) -> set[str]:
    """The paths that match a pattern; a pattern that matches none raises an error, unless there is no path."""
    listed, asked = list(dict.fromkeys(paths)), list(patterns)
    unknown = [pattern for pattern in asked if listed and not fnmatch.filter(listed, pattern)]
    if unknown:
        raise OptionError(f"no layer matches {', '.join(unknown)}; available: {', '.join(map(repr, listed))}")
    return {path for pattern in asked for path in fnmatch.filter(listed, pattern)}


def require_tau(name: str, value: Any) -> None:
    """Raise OptionError unless the value is a positive number or a Relative."""
    if isinstance(value, Tensor):
        raise OptionError(f"{name} must be a number, got a tensor; use float(…)")
    if not isinstance(value, Relative):
        require_positive(name, value)


@dataclasses.dataclass(frozen=True)
class ProxPropOptions:
    """The checked arguments of :class:`~minimand.train.ProxProp`."""

    tau_theta: Tau | Mapping[str, Tau]
    method: Literal["auto", "exact", "cg"]
    cg_iters: int
    cg_tol: float | None
    gram: Any
    skip_last: bool
    include: str | Sequence[str] | None
    exclude: str | Sequence[str] | None
    fused: bool
    maps: Any

    def __post_init__(self) -> None:
        if isinstance(self.tau_theta, Mapping):
            object.__setattr__(self, "tau_theta", dict(self.tau_theta) or 1.0)
        for pattern, tau in self.tau_theta.items() if isinstance(self.tau_theta, dict) else [("", self.tau_theta)]:
            if not isinstance(pattern, str):
                raise OptionError(f"the keys of tau_theta are patterns of paths, such as '0', got {pattern!r}")
            require_tau(f"tau_theta of {pattern!r}" if pattern else "tau_theta", tau)
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
            "maps": (_are_maps(self.maps), "a dictionary of module classes such as {MyLinear: {'weight': 'bias'}}"),
        }
        for name, (good, kind) in checks.items():
            if not good:
                raise OptionError(f"{name} must be {kind}, got {getattr(self, name)!r}")


class TauSchedule(Optimizer):
    """The present τθ: an optimizer without parameters, whose learning rates torch's schedulers may change."""

    scheduled = False

    def __init__(self, value: Tau | Mapping[str, Tau]) -> None:
        taus = value if isinstance(value, Mapping) else {None: value}
        rows = [(key, tau, isinstance(tau, Relative)) for key, tau in taus.items()]
        groups = [
            {"params": [torch.zeros(0)], "pattern": key, "lr": getattr(tau, "factor", tau), "relative": relative}
            for key, tau, relative in rows
        ]
        super().__init__(groups, {})

    @property
    def value(self) -> Tau | dict[str, Tau]:
        """τθ as it was given: one value, or one for each pattern."""
        taus: dict[Any, Tau] = {
            g["pattern"]: Relative(g["lr"]) if g["relative"] else g["lr"] for g in self.param_groups
        }
        return taus.get(None, taus)

    def of(self, path: str) -> Tau:
        """The τθ of a layer: the value of the last pattern that matches its path, 1.0 if none does."""
        value = self.value
        if not isinstance(value, dict):
            return value
        return next((tau for key, tau in reversed(value.items()) if fnmatch.fnmatchcase(path, key)), 1.0)

    def replace(self, value: Tau | Mapping[str, Tau]) -> None:
        """Set τθ; a scheduler continues from the new values."""
        new = TauSchedule(value)
        keys = [[group["pattern"] for group in some.param_groups] for some in (self, new)]
        if keys[0] != keys[1]:
            if self.scheduled:
                raise OptionError("tau_theta follows a scheduler; a new value needs the same patterns as the old one")
            self.param_groups = new.param_groups
        for group, given in zip(self.param_groups, new.param_groups, strict=True):
            group.update(lr=given["lr"], relative=given["relative"])

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Do nothing."""


def _are_maps(value: Any) -> bool:
    pairs = list(value.items()) if isinstance(value, Mapping) else [(None, None)]
    return all(
        isinstance(kind, type)
        and isinstance(names, Mapping)
        and all(isinstance(n, str) and isinstance(b, str | None) for n, b in names.items())
        for kind, names in pairs
    )


def _are_patterns(value: Any) -> bool:
    return value is None or (isinstance(value, str | Sequence | Set) and all(isinstance(p, str) for p in value))


IN_BACKWARD = (
    "an optimizer makes its steps inside of the backward pass, where ProxProp does not have all rows of a layer; call "
    "optimizer.step() after loss.backward()"
)


def parameters_of(*optimizers: Optimizer) -> dict[int, Tensor]:
    """The parameters of optimizers by their ids."""
    return {id(p): p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}


def unwrapped(optimizer: Any) -> Optimizer:
    """The torch optimizer inside those of accelerate and Lightning, which have it as their attribute ``optimizer``."""
    while isinstance(getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = optimizer.optimizer
    if not isinstance(optimizer, Optimizer):
        raise CapabilityError(f"attach takes torch.optim.Optimizers, got {type(optimizer).__name__}")
    return optimizer


def check_optimizers(owners: Sequence[Optimizer], layers: Iterable[Any]) -> None:
    """Raise unless the optimizers own all parameters of the layers, each some of them, and step after backward."""
    if not owners:
        raise OptionError("attach needs the optimizer of the layers; pass one or several")
    if len(set(map(id, owners))) < len(owners):
        raise OptionError("attach got an optimizer twice")
    trained = {name: p for layer in layers for name, p in layer.parameters.items() if p.requires_grad}
    every = parameters_of(*owners)
    for optimizer in owners:
        if any(
            hasattr(getattr(h, "__self__", None), "tau_schedule") for h in optimizer._optimizer_step_pre_hooks.values()
        ):
            raise OptionError("this optimizer has a ProxProp already; detach it, or give one ProxProp all layers")
        owned = parameters_of(optimizer)
        if trained and len(owners) > 1 and not any(id(p) in owned for p in trained.values()):
            raise OptionError(f"the optimizer {type(optimizer).__name__} owns no parameter of a layer; leave it out")
    if any(getattr(p, "_in_backward_optimizers", None) for p in trained.values()):
        raise CapabilityError(IN_BACKWARD)
    missing = [name for name, p in trained.items() if id(p) not in every]
    if missing:
        remedy = "build it from the model's parameters, or pass ProxProp the submodule that it trains"
        who = "the optimizer does" if len(owners) == 1 else "the optimizers do"
        raise OptionError(f"{who} not own {', '.join(missing)}; {remedy}")


def check_keys(optimizers: Iterable[Optimizer], owned: Mapping[int, str]) -> None:
    """Raise for keys of parameter groups that ProxProp would ignore; ``owned`` has the layers' paths by parameter."""
    options = {field.name for field in dataclasses.fields(ProxPropOptions)} - {"tau_theta"}
    found: dict[str, Any] = {}
    for optimizer, group in [(o, group) for o in optimizers for group in o.param_groups]:
        for key in group:
            if key in options - optimizer.defaults.keys() or (key.startswith("tau") and key != "tau_theta"):
                raise OptionError(f"ProxProp ignores the key {key!r} of a parameter group; it reads tau_theta only")
        tau: Any = group.get("tau_theta")
        paths = {owned[id(p)] for p in group["params"] if id(p) in owned}
        if "tau_theta" in group:
            require_tau("tau_theta of a parameter group", tau)
            if not paths:
                raise OptionError("tau_theta has no effect in a parameter group without a layer that ProxProp steps")
        for path in paths:
            if found.setdefault(path, tau) != tau:
                raise OptionError(f"layer '{path}' has one tau_theta, but its weight and bias are in groups with two")


def paper_tau_theta(
    tau_theta: float,
    *,
    paper_rows: int = 500,
    rows: int | None = None,
    reduction: Literal["mean", "sum"] = "mean",
    input_scale: float = 1.0,
) -> tuple[float, float]:
    r"""Convert the paper's :math:`\tau_\theta` for batches of ``paper_rows`` to other batches, reductions and inputs.

    Returns ``(tau_theta, factor)``: with this ``tau_theta``, ``factor`` times the paper's learning rate is the paper's
    step. The metric :math:`A^\top A + I/\tau_\theta` grows with the number of rows, for every reduction of the loss.
    For convolutions the ratio is that of the numbers of images. ``input_scale`` is the scale s of the layer's inputs
    relative to the paper's, pixels/255: inputs times s take the same step in function space at
    :math:`\tau_\theta/s^2` and the same learning rate. This is exact without a bias, whose ones column does not scale.

    >>> paper_tau_theta(0.05, rows=1000)
    (0.025, 2.0)
    >>> paper_tau_theta(0.05, reduction="sum")
    (0.05, 0.002)
    >>> paper_tau_theta(0.05, input_scale=2.0)
    (0.0125, 1.0)
    """
    rows = paper_rows if rows is None else rows
    given = {"tau_theta": tau_theta, "paper_rows": paper_rows, "rows": rows, "input_scale": input_scale}
    for name, value in given.items():
        require_positive(name, value)
    if reduction not in ("mean", "sum"):
        raise OptionError(f"reduction must be mean or sum, got {reduction!r}")
    ratio = paper_rows / rows
    require_positive("paper_rows / rows", ratio)
    made = tau_theta * ratio / input_scale**2
    require_positive("the converted tau_theta", made)
    return made, (1 / ratio) / (rows if reduction == "sum" else 1)

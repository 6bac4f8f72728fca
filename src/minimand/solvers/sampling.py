r"""Samplings: the random weights of the inputs in a stochastic step.

A sampling draws a random weight :math:`w \in \mathbb{R}^{n}` with :math:`\mathbb{E}\,w = 1`, so that the gradient with
:math:`w \odot r` in place of the residual :math:`r` is unbiased. Most weights are zero: a sample is a dropout mask with
its scale.
"""

import abc
import dataclasses
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from ..errors import OptionError
from ..operators.base import LinearOperator

__all__ = [
    "Bernoulli",
    "Full",
    "Importance",
    "Nice",
    "Request",
    "Sample",
    "Sampling",
    "resolve_sampling",
    "sample_size",
]


@dataclasses.dataclass(frozen=True)
class Sample:
    """A draw. Either ``index`` lists the kept features, which all rows share, and ``weight`` their weights; or
    ``index`` is None and ``weight`` holds one weight per row and feature, zero for dropped features. ``weight`` is
    None where all features are kept with weight one."""

    index: Tensor | None
    weight: Tensor | None


class Request(NamedTuple):
    """The arguments of a draw: ``size`` of ``features``, once per row (``rows=None``: once for all rows).

    ``like`` gives dtype and device. Non-uniform probabilities are proportional to ``scores``."""

    size: int
    features: int
    rows: int | None
    like: Tensor
    generator: torch.Generator | None = None
    scores: Tensor | None = None


def sample_size(tau: float | int | None, features: int) -> int:
    """The number of features for ``tau``: a float is a fraction, an int a count.

    >>> sample_size(0.5, 10), sample_size(1.0, 10), sample_size(1, 10), sample_size(None, 10)
    (5, 10, 1, 5)
    """
    if tau is None:
        tau = 0.5
    if isinstance(tau, float):
        if not 0 < tau <= 1:
            raise OptionError(f"tau as a fraction must lie in (0, 1], got {tau}; an int is a count")
        return max(1, round(tau * features))
    if isinstance(tau, bool) or not 1 <= tau <= features:
        raise OptionError(
            f"tau as a count must lie between 1 and {features} features, got {tau}; a float in (0, 1] is a fraction"
        )
    return tau


def check_tau(tau: float | int | None) -> None:
    """Raise for a ``tau`` that fits no operator. :func:`sample_size` checks it against one."""
    fraction = isinstance(tau, float) and 0 < tau <= 1
    count = isinstance(tau, int) and not isinstance(tau, bool) and tau >= 1
    if tau is not None and not fraction and not count:
        raise OptionError(f"tau is a fraction in (0, 1] as a float, or a count ≥ 1 as an int, got {tau!r}")


@dataclasses.dataclass(frozen=True)
class Sampling(abc.ABC):
    """A rule that draws ``size`` of ``features`` features."""

    #: Whether the draw depends on the residual of each row, which must then be computed in full.
    uses_residual: ClassVar[bool] = False

    @abc.abstractmethod
    def draw(self, request: Request) -> Sample:
        """One draw per row, or one for all where ``request.rows`` is None."""

    @abc.abstractmethod
    def smoothness(self, operator: LinearOperator, size: int) -> Tensor:
        r"""The expected smoothness of the estimate, without the ridge: never below :math:`\|A\|^2`."""

    def scores(self, operator: LinearOperator, residual: Tensor | None) -> Tensor | None:
        """Numbers that the probabilities are proportional to; None for uniform probabilities."""
        return None


@dataclasses.dataclass(frozen=True)
class Nice(Sampling):
    r"""τ-nice: all subsets of exactly τ features are equally likely, weights n/τ.

    One Prox-SG step from zero with it is dropout that drops exactly n − τ inputs ([Bibi2019], Proposition 1). Expected
    smoothness (Gower, Richtárik & Bach, 2018, with :math:`L_{\max} = n \max_i \|a_i\|^2`):

    .. math:: \frac{n(\tau-1)}{\tau(n-1)} L + \frac{n-\tau}{\tau(n-1)} L_{\max}
    """

    def draw(self, request: Request) -> Sample:
        """A uniformly random subset of exactly ``size`` features."""
        size, features, rows, like, generator, _ = request
        if rows is None:
            index = torch.randperm(features, generator=generator, device=like.device)[:size]
            return Sample(index, like.new_full((size,), features / size))
        keys = torch.rand(rows, features, generator=generator, device=like.device)
        kept = keys.topk(size, dim=-1, sorted=False).indices
        weight = like.new_zeros(rows, features).scatter(-1, kept, features / size)
        return Sample(None, weight)

    def smoothness(self, operator: LinearOperator, size: int) -> Tensor:
        """Between L (all inputs) and n·max‖aᵢ‖² (one input)."""
        n, total = operator.inputs, operator.norm_sq()
        if size == n:
            return total
        largest = n * operator.input_norms_sq().amax(-1)
        return (n * (size - 1) * total + (n - size) * largest) / (size * (n - 1))


@dataclasses.dataclass(frozen=True)
class Bernoulli(Sampling):
    r"""Each feature is kept independently with probability q = τ/n and weight 1/q: ordinary dropout.

    Expected smoothness :math:`L + \frac{1-q}{q}\max_i\|a_i\|^2`.
    """

    def draw(self, request: Request) -> Sample:
        """Independent coin flips; a shared draw is a mask, too, because its size is random."""
        size, features, rows, like, generator, _ = request
        keep = size / features
        shape = (features,) if rows is None else (rows, features)
        flips = torch.rand(shape, generator=generator, device=like.device) < keep
        return Sample(None, flips.to(like.dtype) / keep)

    def smoothness(self, operator: LinearOperator, size: int) -> Tensor:
        """L plus the variance of the coin flips."""
        keep = size / operator.inputs
        return operator.norm_sq() + (1 - keep) / keep * operator.input_norms_sq().amax(-1)


@dataclasses.dataclass(frozen=True)
class Importance(Sampling):
    r"""τ independent draws with probabilities :math:`p_i`, each of weight :math:`1/(\tau p_i)`.

    Args:
        by: ``"columns"`` draws :math:`p_i \propto \|a_i\|^2`, the smoothness of the i-th term, for which the
            expected smoothness is :math:`(1 - 1/\tau) L + \sum_i \|a_i\|^2/\tau`. ``"gradients"`` draws
            :math:`p_i \propto \|a_i\| |a_i^\top x - y_i|`, the optimal serial sampling, which needs the full residual
            in every step; its variance at the current point is never larger.

    τ = 1 is serial importance sampling ([Bibi2019], §5; Zhao & Zhang, 2015).
    """

    by: Literal["columns", "gradients"] = "columns"

    def __post_init__(self) -> None:
        if self.by not in ("columns", "gradients"):
            raise OptionError(f'Importance(by=…) is "columns" or "gradients", got {self.by!r}')

    @property
    def uses_residual(self) -> bool:  # type: ignore[override]
        """Gradient norms need the residual."""
        return self.by == "gradients"

    def draw(self, request: Request) -> Sample:
        """τ draws with replacement, proportional to ``scores`` (uniform where a row's are all zero or not finite)."""
        size, features, rows, like, generator, scores = request
        assert scores is not None
        largest = scores.amax(-1, keepdim=True)
        scores = torch.where((largest > 0) & largest.isfinite(), scores / largest, 1.0).float()
        chance = scores / scores.sum(-1, keepdim=True)
        if rows is None:
            index = torch.multinomial(chance, size, replacement=True, generator=generator)
            return Sample(index, (1 / (size * chance[index])).to(like.dtype))
        chance = chance.expand(rows, features)
        drawn = torch.multinomial(chance, size, replacement=True, generator=generator)
        share = 1 / (size * chance.gather(-1, drawn))
        weight = chance.new_zeros(rows, features).scatter_add(-1, drawn, share)
        return Sample(None, weight.to(like.dtype))

    def smoothness(self, operator: LinearOperator, size: int) -> Tensor:
        """(1 − 1/τ)L + Σ‖aᵢ‖²/τ."""
        return (1 - 1 / size) * operator.norm_sq() + operator.input_norms_sq().sum() / size

    def scores(self, operator: LinearOperator, residual: Tensor | None) -> Tensor:
        """Squared column norms, or column norms times the size of the residual."""
        columns = operator.input_norms_sq()
        if residual is None:
            return columns
        sizes = residual.detach().abs()
        if operator.feature_dim < -1:
            sizes = torch.linalg.vector_norm(sizes.flatten(operator.feature_dim + 1), dim=-1)
        return columns.sqrt() * sizes.reshape(-1, operator.inputs)


@dataclasses.dataclass(frozen=True)
class Full(Sampling):
    """Full gradients with the step sizes of another sampling: its mean-field limit.

    A layer that was trained with samples takes the same steps along full gradients when it is evaluated without noise.
    """

    of: Sampling

    def draw(self, request: Request) -> Sample:
        """All features with weight one."""
        return Sample(None, None)

    def smoothness(self, operator: LinearOperator, size: int) -> Tensor:
        """That of the other sampling."""
        return self.of.smoothness(operator, size)


_NAMED = {"nice": Nice(), "bernoulli": Bernoulli(), "importance": Importance()}


def resolve_sampling(sampling: str | Sampling) -> Sampling:
    """The sampling itself, or the one with a given name."""
    if isinstance(sampling, Sampling):
        return sampling
    if not isinstance(sampling, str) or sampling not in _NAMED:
        raise OptionError(f"sampling is one of {', '.join(map(repr, _NAMED))} or a Sampling, got {sampling!r}")
    return _NAMED[sampling]

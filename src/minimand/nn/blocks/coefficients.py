"""The coefficients of an update: fixed numbers, or learned parameters, possibly constrained."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ...errors import OptionError, Sealed
from ...functions.curves import softplus_inverse
from ...linalg import Weight
from ...solvers.momentum import extrapolate

__all__ = ["Coefficients", "LearnedMomentum", "Learning", "parse_learnable"]

Kind = Literal["scalar", "channel"]
Constraint = Literal["positive", "sum"]


@dataclasses.dataclass(frozen=True)
class Learning:
    """How the coefficients of an update are learned.

    Args:
        kind: ``"scalar"``: one number per term; ``"channel"``: one per term and channel.
        constraint: ``"positive"``: every coefficient keeps the sign of its initial value; a coefficient that starts at
            0 stays 0. ``"sum"``: the sum of the coefficients of an update is constant (for ADMM the sum of each line),
            so that the fixed points of the algorithms remain those of the blocks. None: unconstrained.

    >>> Learning("channel", "sum").kind
    'channel'
    """

    kind: Kind = "scalar"
    constraint: Constraint | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("scalar", "channel"):
            raise OptionError(f'kind must be "scalar" or "channel", got {self.kind!r}')
        if self.constraint not in (None, "positive", "sum"):
            raise OptionError(f'constraint must be "positive", "sum" or None, got {self.constraint!r}')


def parse_learnable(learnable: bool | str | Learning) -> Learning | None:
    """The :class:`Learning` that ``learnable`` specifies; None for fixed coefficients."""
    if isinstance(learnable, Learning):
        return learnable
    if isinstance(learnable, bool):
        return Learning() if learnable else None
    if learnable in ("scalar", "channel"):
        return Learning("channel" if learnable == "channel" else "scalar")
    raise OptionError(f'learnable must be False, True, "scalar", "channel" or a Learning, got {learnable!r}')


class FixedSign(nn.Module):
    r"""A parametrisation with given signs, :math:`c = \pm\operatorname{softplus}(r)`, or 0 where the sign is 0."""

    sign: Tensor

    def __init__(self, sign: Tensor) -> None:
        super().__init__()
        self.register_buffer("sign", sign, persistent=False)

    def forward(self, raw: Tensor) -> Tensor:
        """The coefficients."""
        return self.sign * F.softplus(raw)

    def right_inverse(self, value: Tensor) -> Tensor:
        """The parameters of given coefficients."""
        size = torch.where(self.sign == 0, 1.0, value * self.sign)
        return softplus_inverse(size)


class FixedSum(nn.Module):
    r"""A parametrisation with a constant sum s in each group of n terms, :math:`c = r - \bar r + s/n`.

    Args:
        value: Coefficients with these sums.
        groups: The number of consecutive terms in each group.
    """

    total: Tensor

    def __init__(self, value: Tensor, groups: tuple[int, ...]) -> None:
        super().__init__()
        self.groups = groups
        # Summed in double precision, where the algorithms' sums are exactly 0 and 1.
        total = torch.stack([part.sum(0) for part in value.split(groups)])
        self.register_buffer("total", total.to(torch.get_default_dtype()), persistent=False)

    def forward(self, raw: Tensor) -> Tensor:
        """The coefficients."""
        parts = zip(raw.split(self.groups), self.total, strict=True)
        return torch.cat([part + (total - part.sum(0)) / part.shape[0] for part, total in parts])

    def right_inverse(self, value: Tensor) -> Tensor:
        """The coefficients themselves, which have the given sums."""
        return value


class Coefficients(Sealed, nn.Module):
    """The coefficients of one update, one per term.

    Args:
        start: The values, or the initial values of learned coefficients.
        how: How they are learned; None: they are fixed numbers.
        channels: The number of channels, for coefficients per channel.
        groups: The number of consecutive terms in each group of constant sum, for ``"sum"``; None: one group.

    >>> Coefficients([1.0, 0.0])(4)
    (1.0, 0.0)
    >>> Coefficients([1.0, -0.5], Learning("channel", "sum"), channels=3)(4)[1].shape
    torch.Size([3, 1, 1])
    """

    weight: Tensor

    def __init__(
        self,
        start: Sequence[float],
        how: Learning | None = None,
        channels: int | None = None,
        groups: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__()
        self.start = tuple(float(value) for value in start)
        self.learned = how is not None and bool(self.start)
        if how is None or not self.start:
            return
        value = torch.tensor(self.start, dtype=torch.float64)
        if how.kind == "channel":
            if channels is None:
                raise OptionError("coefficients per channel need the number of channels; pass channels=")
            value = value[:, None].repeat(1, channels)
        self.weight = nn.Parameter(value.to(torch.get_default_dtype()))
        if how.constraint == "positive":
            parametrize.register_parametrization(self, "weight", FixedSign(torch.sign(self.weight.detach())))
        elif how.constraint == "sum":
            parametrize.register_parametrization(self, "weight", FixedSum(value, groups or (len(value),)))

    def forward(self, dim: int, dtype: torch.dtype | None = None) -> tuple[Weight, ...]:
        """The coefficients, shaped for tensors of ``dim`` dimensions with the channels in the second.

        They are cast to ``dtype``, because under autocast a float32 coefficient would promote the iterates to float32.
        """
        if not self.learned:
            return self.start
        weight = self.weight.to(dtype)
        if weight.dim() == 2:
            weight = weight.reshape(*weight.shape, *(1,) * (dim - 2))
        return weight.unbind(0)

    def extra_repr(self) -> str:
        """The initial values."""
        values = ", ".join(f"{value:.4g}" for value in self.start)
        return f"{values}, learned" if self.learned else values


class LearnedMomentum(nn.Module):
    r"""The combination :math:`\beta_1 x + \beta_2 x_-` of the last two iterates, learned from (1, 0).

    >>> LearnedMomentum()(torch.ones(1, 2), torch.zeros(1, 2)).detach()
    tensor([[1., 1.]])
    """

    def __init__(self, constraint: Literal["sum"] | None = None) -> None:
        super().__init__()
        #: Whether the block continues a stage, so that it is called with the iterate before it.
        self.follows = False
        self.coefficients = Coefficients((1.0, 0.0), Learning("scalar", constraint))

    def forward(self, x: Tensor, previous: Tensor | None = None) -> Tensor:
        """The combination; without ``previous`` it uses :math:`x_- = x`."""
        current, past = self.coefficients(x.dim(), x.dtype)
        return extrapolate(x, x if previous is None else previous, -past, current + past)

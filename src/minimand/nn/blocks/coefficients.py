"""The coefficients of an update: numbers, or parameters that are learned under a constraint."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ...errors import OptionError
from ...linalg import Weight
from ...solvers.momentum import extrapolate

__all__ = ["Coefficients", "Learning", "Momentum", "learning"]

Kind = Literal["scalar", "channel"]
Constraint = Literal["positive", "sum"]


@dataclasses.dataclass(frozen=True)
class Learning:
    """How coefficients are learned.

    Args:
        kind: ``"scalar"``: one number per term; ``"channel"``: one per term and channel.
        constraint: ``"positive"``: every coefficient keeps the sign of its start (a momentum stays one), and one that
            starts at 0 stays out. ``"sum"``: the coefficients of an update keep their sum (ADMM's those of each line),
            so that for the algorithms the fixed points stay those of the blocks. None: free.

    >>> Learning("channel", "sum").kind
    'channel'
    """

    kind: Kind = "scalar"
    constraint: Constraint | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("scalar", "channel"):
            raise OptionError(f'coefficients are learned as "scalar" or per "channel", got {self.kind!r}')
        if self.constraint not in (None, "positive", "sum"):
            raise OptionError(f'a constraint is "positive", "sum" or None, got {self.constraint!r}')


def learning(learnable: bool | str | Learning) -> Learning | None:
    """What ``learnable`` asks for; None where coefficients are fixed."""
    if isinstance(learnable, Learning):
        return learnable
    if isinstance(learnable, bool):
        return Learning() if learnable else None
    if learnable in ("scalar", "channel"):
        return Learning("channel" if learnable == "channel" else "scalar")
    raise OptionError(f'learnable is False, True, "scalar", "channel" or a Learning, got {learnable!r}')


class Signed(nn.Module):
    r"""Numbers of given signs, :math:`c = \pm\operatorname{softplus}(r)`, or 0 where there is none."""

    sign: Tensor

    def __init__(self, sign: Tensor) -> None:
        super().__init__()
        self.register_buffer("sign", sign, persistent=False)

    def forward(self, raw: Tensor) -> Tensor:
        """The coefficients."""
        return self.sign * F.softplus(raw)

    def right_inverse(self, value: Tensor) -> Tensor:
        """What gives these coefficients."""
        size = torch.where(self.sign == 0, 1.0, value * self.sign)
        return size + torch.log(-torch.expm1(-size))


class FixedSum(nn.Module):
    r"""Numbers whose sums over groups of terms are given, :math:`c = r - \bar r + s/n` in each.

    Args:
        value: Numbers that have these sums.
        groups: How many terms, one after the other, each group has.
    """

    total: Tensor

    def __init__(self, value: Tensor, groups: tuple[int, ...]) -> None:
        super().__init__()
        self.groups = groups
        # Summed in double precision: the algorithms' sums are 0 and 1 exactly, those of rounded numbers are not.
        total = torch.stack([part.sum(0) for part in value.split(groups)])
        self.register_buffer("total", total.to(torch.get_default_dtype()), persistent=False)

    def forward(self, raw: Tensor) -> Tensor:
        """The coefficients."""
        parts = zip(raw.split(self.groups), self.total, strict=True)
        return torch.cat([part + (total - part.sum(0)) / part.shape[0] for part, total in parts])

    def right_inverse(self, value: Tensor) -> Tensor:
        """What gives these coefficients, which have the sums already."""
        return value


class Coefficients(nn.Module):
    """The coefficients of one update, one per term.

    Args:
        start: Their values, or the values that learning starts from.
        how: How they are learned; None keeps them fixed, as plain numbers.
        channels: For coefficients per channel.
        groups: How many terms, one after the other, keep their sum under ``"sum"``; None: all together.

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
                raise OptionError("coefficients per channel need to know how many there are; pass channels=")
            value = value[:, None].repeat(1, channels)
        self.weight = nn.Parameter(value.to(torch.get_default_dtype()))
        if how.constraint == "positive":
            parametrize.register_parametrization(self, "weight", Signed(torch.sign(self.weight.detach())))
        elif how.constraint == "sum":
            parametrize.register_parametrization(self, "weight", FixedSum(value, groups or (len(value),)))

    def forward(self, dim: int, dtype: torch.dtype | None = None) -> tuple[Weight, ...]:
        """The coefficients, shaped for tensors of ``dim`` dimensions with the channels in the second, and of ``dtype``:
        under autocast a channel's coefficient would take iterates back to float32."""
        if not self.learned:
            return self.start
        weight = self.weight.to(dtype)
        if weight.dim() == 2:
            weight = weight.reshape(*weight.shape, *(1,) * (dim - 2))
        return weight.unbind(0)

    def extra_repr(self) -> str:
        """Where they start."""
        values = ", ".join(f"{value:.4g}" for value in self.start)
        return f"{values}, learned" if self.learned else values


class Momentum(nn.Module):
    r"""The combination :math:`\beta_1 x + \beta_2 x_-` of the last two iterates, learned from (1, 0) on.

    >>> Momentum()(torch.ones(1, 2), torch.zeros(1, 2)).detach()
    tensor([[1., 1.]])
    """

    def __init__(self, constraint: Literal["sum"] | None = None) -> None:
        super().__init__()
        self.coefficients = Coefficients((1.0, 0.0), Learning("scalar", constraint))

    def forward(self, x: Tensor, previous: Tensor | None = None) -> Tensor:
        """The skip of the heavy ball, or the point of Nesterov's method; at rest :math:`x_- = x`."""
        current, past = self.coefficients(x.dim(), x.dtype)
        return extrapolate(x, x if previous is None else previous, -past, current + past)

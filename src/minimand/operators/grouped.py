"""A part of a grouped convolution: some of its inputs, some of its outputs, in any order."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..errors import ShapeError
from .base import LinearOperator, as_index, pick

if TYPE_CHECKING:
    from .conv import Convolution

__all__ = ["GroupedPart"]


class Placement(NamedTuple):
    """Channel ``outer[i]`` of the part is channel ``core[i]`` of the convolution that computes it."""

    outer: Tensor
    core: Tensor


class GroupedPart(LinearOperator):
    """The channels ``given`` → ``taken`` of a grouped convolution; what its ``restrict`` returns.

    A group without a kept input or output costs nothing; the others are padded with zero channels to the
    fullest of them, because a grouped convolution needs groups of one size. The cost is therefore
    proportional to what is kept when the groups keep about equally many: always, for a depthwise
    convolution. While tracing, where sizes may not depend on data, the whole convolution runs on inputs
    that are zero where nothing was kept.
    """

    def __init__(self, whole: "Convolution", given: Tensor, taken: Tensor) -> None:
        self.whole, self.given, self.taken = whole, given, taken
        self.weight = whole.weight
        self.feature_dim = whole.feature_dim
        if torch.compiler.is_compiling():
            self.core = whole
            self.sources = Placement(torch.arange(given.numel(), device=given.device), given)
            self.targets = Placement(torch.arange(taken.numel(), device=taken.device), taken)
        else:
            self.core, self.sources, self.targets = _pack(whole, given, taken)

    @property
    def inputs(self) -> int:
        """The number of kept input channels."""
        return self.given.numel()

    @property
    def outputs(self) -> int:
        """The number of kept output channels."""
        return self.taken.numel()

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one input sample."""
        return (self.inputs, *self.whole.input_shape[1:])

    @property
    def output_shape(self) -> tuple[int, ...]:
        """The shape of one output sample."""
        return (self.outputs, *self.whole.output_shape[1:])

    def apply(self, y: Tensor, bias: Tensor | None = None) -> Tensor:
        """``A y + bias``."""
        self._check("input", y, self.inputs)
        x = self.core.apply(self._move(y, self.sources.outer, self.sources.core, self.core.inputs))
        x = self._move(x, self.targets.core, self.targets.outer, self.outputs)
        if bias is None:
            return x
        return x + (self.per_feature(bias) if bias.dim() == 1 else bias)

    def adjoint(self, x: Tensor) -> Tensor:
        """``Aᵀ x``."""
        self._check("output", x, self.outputs)
        y = self.core.adjoint(self._move(x, self.targets.outer, self.targets.core, self.core.outputs))
        return self._move(y, self.sources.core, self.sources.outer, self.inputs)

    def restrict(self, index: Tensor | Sequence[int]) -> "GroupedPart":
        """The part of the part on the inputs ``index``."""
        index = as_index(index, self.weight, self.inputs)
        return GroupedPart(self.whole, pick(self.given, 0, index), self.taken)

    def restrict_outputs(self, index: Tensor | Sequence[int]) -> "GroupedPart":
        """The part of the part with the outputs ``index``."""
        index = as_index(index, self.weight, self.outputs)
        return GroupedPart(self.whole, self.given, pick(self.taken, 0, index))

    def with_weight(self, weight: Tensor) -> "GroupedPart":
        """The same part of the convolution with another weight."""
        return GroupedPart(self.whole.with_weight(weight), self.given, self.taken)

    def _check(self, role: str, tensor: Tensor, features: int) -> None:
        # The rest of the shape is the convolution's own business.
        if tensor.dim() < -self.feature_dim or tensor.shape[self.feature_dim] != features:
            raise ShapeError(
                f"this part of a convolution takes an {role} with {features} channels, got shape {tuple(tensor.shape)}"
            )

    def _move(self, tensor: Tensor, source: Tensor, target: Tensor, size: int) -> Tensor:
        shape = list(tensor.shape)
        shape[self.feature_dim] = size
        # Added, not copied: a sample with replacement names a channel twice.
        return tensor.new_zeros(shape).index_add(self.feature_dim, target, self.select(tensor, source))

    def _norm_sq(self) -> Tensor:
        return self.core.norm_sq()

    def _input_norms_sq(self) -> Tensor:
        norms = self.core.input_norms_sq()
        return norms.new_zeros(self.inputs).index_copy(0, self.sources.outer, norms[self.sources.core])

    def _output_norms_sq(self) -> Tensor:
        norms = self.core.output_norms_sq()
        return norms.new_zeros(self.outputs).index_copy(0, self.targets.outer, norms[self.targets.core])


def _pack(whole: "Convolution", given: Tensor, taken: Tensor) -> tuple["Convolution", Placement, Placement]:
    """The smallest grouped convolution that computes the part, and where its channels are."""
    groups = whole.geometry.groups
    per_input, per_output = whole.inputs // groups, whole.outputs // groups
    counts = [torch.bincount(i // per, minlength=groups) for i, per in ((given, per_input), (taken, per_output))]
    live = torch.nonzero((counts[0] > 0) & (counts[1] > 0)).flatten()
    if live.numel() == 0:
        live = live.new_zeros(1)
    columns, has_column, sources = _slots(given, per_input, live, groups)
    rows, has_row, targets = _slots(taken, per_output, live, groups)
    rows = rows + per_output * live.unsqueeze(1)
    weight = whole.weight[rows.unsqueeze(2), columns.unsqueeze(1)]
    mask = has_row.unsqueeze(2) & has_column.unsqueeze(1)
    weight = weight * mask.reshape(*mask.shape, *(1,) * (weight.dim() - 3)).to(weight.dtype)
    return whole.with_weight(weight.flatten(0, 1), live.numel()), sources, targets


def _slots(kept: Tensor, per_group: int, live: Tensor, groups: int) -> tuple[Tensor, Tensor, Placement]:
    """For each live group its channels, padded with channel 0; which are real; where each kept one went."""
    rank_of_group = torch.full((groups,), -1, device=kept.device).index_copy(
        0, live, torch.arange(live.numel(), device=kept.device)
    )
    rank = rank_of_group[kept // per_group]
    outer = torch.nonzero(rank >= 0).flatten()
    outer = outer[torch.argsort(rank[outer], stable=True)]
    rank = rank[outer]
    counts = torch.bincount(rank, minlength=live.numel())
    width = max(1, int(counts.max()))
    first = torch.cumsum(counts, 0) - counts
    core = rank * width + torch.arange(outer.numel(), device=kept.device) - first[rank]
    channels = torch.zeros(live.numel() * width, dtype=torch.long, device=kept.device)
    channels = channels.index_copy(0, core, kept[outer] % per_group)
    real = torch.zeros(live.numel() * width, dtype=torch.bool, device=kept.device)
    real = real.index_fill(0, core, True)
    shape = (live.numel(), width)
    return channels.reshape(shape), real.reshape(shape), Placement(outer, core)

"""A part of a grouped convolution: some of its inputs, some of its outputs, in any order."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..errors import ShapeError
from .base import LinearOperator
from .index import as_index, pick

if TYPE_CHECKING:
    from .conv import Convolution

__all__ = ["GroupedPart"]


class Placement(NamedTuple):
    """Channel ``outer[i]`` of the part is channel ``core[i]`` of the convolution that computes it."""

    outer: Tensor
    core: Tensor


class GroupedPart(LinearOperator):
    """The channels ``given`` → ``taken`` of a grouped convolution; its ``restrict`` returns this.

    A group without a kept input or output costs nothing. The other groups are padded with zero channels to the
    largest of them, because a grouped convolution needs groups of one size. The cost is proportional to the number of
    kept channels where all groups keep about equally many, as in a depthwise convolution.
    """

    sampled = True

    def __init__(self, whole: "Convolution", given: Tensor | None, taken: Tensor | None) -> None:
        self.whole, self.weight = whole, whole.weight
        self.given = torch.arange(whole.inputs, device=self.device) if given is None else given
        self.taken = torch.arange(whole.outputs, device=self.device) if taken is None else taken
        self.core, self.sources, self.targets = _pack(whole, self.given, self.taken)

    def _given_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        shapes = self.whole.input_shape, self.whole.output_shape
        return (self.given.numel(), *shapes[0][1:]), (self.taken.numel(), *shapes[1][1:])

    def apply(self, y: Tensor) -> Tensor:
        """``A y``."""
        self._check("input", y, self.given.numel())
        x = self.core.apply(self._move(y, self.sources.outer, self.sources.core, self.core.inputs))
        return self._move(x, self.targets.core, self.targets.outer, self.taken.numel())

    def adjoint(self, x: Tensor) -> Tensor:
        """``Aᵀ x``."""
        self._check("output", x, self.taken.numel())
        y = self.core.adjoint(self._move(x, self.targets.outer, self.targets.core, self.core.outputs))
        return self._move(y, self.sources.core, self.sources.outer, self.given.numel())

    def restrict(self, index: Tensor | Sequence[int]) -> "GroupedPart":
        """The part of the part on the inputs ``index``."""
        index = as_index(index, self.device, self.inputs)
        return GroupedPart(self.whole, pick(self.given, 0, index), self.taken)

    def restrict_outputs(self, index: Tensor | Sequence[int]) -> "GroupedPart":
        """The part of the part with the outputs ``index``."""
        index = as_index(index, self.device, self.outputs)
        return GroupedPart(self.whole, self.given, pick(self.taken, 0, index))

    def with_weight(self, weight: Tensor) -> "GroupedPart":
        """The same part of the convolution with another weight."""
        return GroupedPart(self.whole.with_weight(weight), self.given, self.taken)

    def _check(self, role: str, tensor: Tensor, features: int) -> None:
        # The convolution checks the rest of the shape.
        dim = self.whole.feature_dim
        if tensor.dim() < -dim or tensor.shape[dim] != features:
            raise ShapeError(
                f"this part of a convolution takes an {role} with {features} channels, got shape {tuple(tensor.shape)}"
            )

    def _move(self, tensor: Tensor, source: Tensor, target: Tensor, size: int) -> Tensor:
        dim, shape = self.whole.feature_dim, list(tensor.shape)
        shape[dim] = size
        # index_add, because a sample with replacement can contain a channel twice.
        return tensor.new_zeros(shape).index_add(dim, target, tensor.index_select(dim, source))

    def bound(self) -> Tensor:
        """That of the convolution that computes the part."""
        return self.core.norm_sq()

    def input_bounds(self) -> Tensor:
        """Those of the kept input channels."""
        norms = self.core.input_norms_sq()
        return norms.new_zeros(self.inputs).index_copy(0, self.sources.outer, norms[self.sources.core])

    def output_bounds(self) -> Tensor:
        """Those of the kept output channels."""
        norms = self.core.output_norms_sq()
        return norms.new_zeros(self.outputs).index_copy(0, self.targets.outer, norms[self.targets.core])


def _pack(whole: "Convolution", given: Tensor, taken: Tensor) -> tuple["Convolution", Placement, Placement]:
    """The smallest grouped convolution that computes the part, and the places of its channels."""
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
    """The channels of each live group, padded with channel 0; a mask of the real ones; the places of the kept ones."""
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

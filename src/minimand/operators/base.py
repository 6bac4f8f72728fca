"""The operator's contract: apply, adjoint, restrict, and a bound on the norm."""

import abc
import copy
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

from ..errors import OptionError, ShapeError, require_finite
from .accumulate import Weight, accumulate

__all__ = ["Bounds", "LinearOperator"]


class Bounds(NamedTuple):
    r"""Upper bounds on :math:`\|A\|^2` and on the norms of its parts, never below the truth.

    ``inputs[i]`` bounds :math:`\|a_i\|^2`, the norm of ``A`` restricted to its i-th input (a column, or the
    block of a channel); ``outputs[j]`` bounds the norm of its j-th row, or output channel. A missing one is
    computed when it is asked for.
    """

    total: Tensor
    inputs: Tensor | None = None
    outputs: Tensor | None = None


class LinearOperator(abc.ABC):
    r"""The linear map :math:`A` of a layer, from inputs ``y`` to outputs ``x``.

    Inputs and outputs are counted in the units that a sampling draws: features of a dense layer, channels of
    a convolution. ``feature_dim`` says which dimension of a tensor holds them, from the end.
    """

    weight: Tensor
    feature_dim: int
    _bounds: Bounds | None = None

    @property
    @abc.abstractmethod
    def inputs(self) -> int:
        """The number of input features or channels (n1)."""

    @property
    @abc.abstractmethod
    def outputs(self) -> int:
        """The number of output features or channels (n2)."""

    @property
    @abc.abstractmethod
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one input sample."""

    @property
    @abc.abstractmethod
    def output_shape(self) -> tuple[int, ...]:
        """The shape of one output sample."""

    @property
    def matrix(self) -> Tensor | None:
        """The n2 × n1 matrix itself, where the operator is one; None where it is only applied."""
        return None

    @abc.abstractmethod
    def apply(self, y: Tensor, bias: Tensor | None = None) -> Tensor:
        """``A y + bias``, to the bit what the plain torch layer computes."""

    @abc.abstractmethod
    def adjoint(self, x: Tensor) -> Tensor:
        """``Aᵀ x``, with exactly the input's size."""

    def normal(self, x: Tensor) -> Tensor:
        """``A Aᵀ x``."""
        return self.apply(self.adjoint(x))

    def onto(self, total: Tensor | None, keep: Weight, x: Tensor, scale: Weight) -> Tensor:
        """``total + keep · x + scale · A Aᵀ x``: a gradient step."""
        return accumulate(accumulate(total, keep, x), scale, self.normal(x))

    @abc.abstractmethod
    def restrict(self, index: Tensor | Sequence[int]) -> "LinearOperator":
        """``A`` on the inputs ``index`` only: cost and memory shrink in proportion."""

    @abc.abstractmethod
    def restrict_outputs(self, index: Tensor | Sequence[int]) -> "LinearOperator":
        """The rows (output channels) ``index`` of ``A``."""

    @abc.abstractmethod
    def with_weight(self, weight: Tensor) -> "LinearOperator":
        """The same operator with another weight; bounds are not carried over."""

    def gram_if_cheaper(self, rows: int, applications: int) -> Tensor | None:
        """``A Aᵀ``, where forming it is the cheapest way to ``applications`` products with ``rows`` samples."""
        return None

    def gathered(self) -> "LinearOperator":
        """An equal operator that is restricted often: each :meth:`restrict` is as fast as it can be."""
        return self

    def repeated(self, rows: int) -> "LinearOperator":
        """An equal operator whose :meth:`normal` or :meth:`onto` takes ``rows`` samples often: as fast as it can be."""
        return self

    def check_input(self, y: Tensor) -> None:
        """Raise :class:`~minimand.errors.ShapeError` unless ``y`` is an input sample or a batch of them."""
        _check("input", y, self.input_shape)

    def check_output(self, x: Tensor) -> None:
        """Raise :class:`~minimand.errors.ShapeError` unless ``x`` is an output sample or a batch of them."""
        _check("output", x, self.output_shape)

    @abc.abstractmethod
    def _norm_sq(self) -> Tensor:
        """The bound on the whole operator, computed afresh, detached."""

    @abc.abstractmethod
    def _input_norms_sq(self) -> Tensor:
        """One bound per input, computed afresh, detached."""

    @abc.abstractmethod
    def _output_norms_sq(self) -> Tensor:
        """One bound per output, computed afresh, detached."""

    def norm_sq(self) -> Tensor:
        r"""A bound on :math:`\|A\|^2` that is never below the truth; a constant for autograd."""
        return self.certified("total")

    def input_norms_sq(self) -> Tensor:
        r"""Bounds on :math:`\|a_i\|^2`, one per input (column, or block of an input channel)."""
        return self.certified("inputs")

    def output_norms_sq(self) -> Tensor:
        """Bounds on the squared norm of each row, or of the block of each output channel."""
        return self.certified("outputs")

    def certified(self, part: str) -> Tensor:
        """The bound on a part (``"total"``, ``"inputs"`` or ``"outputs"``): as it was given, else computed."""
        given: Tensor | None = None if self._bounds is None else getattr(self._bounds, part)
        if given is not None:
            return given
        if torch.compiler.is_compiling():
            # Imported here: it knows the operators, and they know this class.
            from .opaque import traced_bound

            return traced_bound(self, part)
        require_finite("the operator's weight", self.weight)
        compute = {"total": self._norm_sq, "inputs": self._input_norms_sq, "outputs": self._output_norms_sq}
        return compute[part]()

    def with_bounds(self, bounds: Bounds) -> Self:
        """The same operator with bounds that the caller vouches for (a tracker's, say)."""
        other = copy.copy(self)
        other._bounds = bounds
        return other

    def per_feature(self, values: Tensor) -> Tensor:
        """Reshape one value per feature (last dimension of ``values``) to broadcast against a sample."""
        return values.reshape(*values.shape, *(1,) * (-self.feature_dim - 1))

    def select(self, tensor: Tensor, index: Tensor) -> Tensor:
        """The features ``index`` of a sample or a batch of them."""
        return torch.index_select(tensor, self.feature_dim, index)


def as_index(index: Tensor | Sequence[int], like: Tensor, size: int | None = None) -> Tensor:
    """The places that ``index`` picks in ``y[:, index]``: a tensor or list of places, or a mask of that ``size``."""
    if not isinstance(index, Tensor | Iterable):
        raise OptionError(f"an index is a list of whole numbers or a mask, got {index!r}")
    places = index if isinstance(index, Tensor) else torch.as_tensor(list(index), device=like.device)
    if places.dtype == torch.bool and size is not None and places.shape != (size,):
        raise ShapeError(f"a mask of shape {tuple(places.shape)} does not fit the {size} features there are")
    if places.numel() == 0:
        return places.reshape(0).long()
    if places.dim() != 1 or places.is_floating_point() or places.is_complex():
        raise OptionError(
            f"an index is a list of whole numbers or a mask, in one dimension; got shape {tuple(places.shape)} of "
            f"{places.dtype}"
        )
    return places.nonzero().squeeze(-1) if places.dtype == torch.bool else places


def pick(weight: Tensor, dim: int, index: Tensor) -> Tensor:
    """``index_select`` with an error that names the range."""
    if torch.compiler.is_compiling():
        return weight.index_select(dim, index)
    try:
        return weight.index_select(dim, index)
    except (IndexError, RuntimeError) as error:
        raise out_of_range(index, weight.shape[dim]) from error


def out_of_range(index: Tensor, size: int) -> ShapeError:
    """The error of an index that names features which are not there."""
    return ShapeError(
        f"an index from {int(index.min())} to {int(index.max())} does not fit the {size} features there are; "
        f"they are numbered from 0 to {size - 1}"
    )


def _check(role: str, tensor: Tensor, sample: tuple[int, ...]) -> None:
    if tuple(tensor.shape[-len(sample) :]) != sample:
        raise ShapeError(
            f"the operator takes an {role} of shape (..., {', '.join(map(str, sample))}), "
            f"got {tuple(tensor.shape)}; reshape it or build the operator for that size"
        )


def check_bias(bias: Tensor, x: Tensor) -> None:
    """Raise :class:`~minimand.errors.ShapeError` where adding ``bias`` would fail, or enlarge ``x``."""
    pairs = zip(reversed(bias.shape), reversed(x.shape), strict=False)
    if bias.dim() > x.dim() or any(size not in (1, full) for size, full in pairs):
        raise ShapeError(
            f"a bias of shape {tuple(bias.shape)} does not broadcast to an output of shape {tuple(x.shape)}; "
            f"give one number per output, or one per entry"
        )

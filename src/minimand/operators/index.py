"""Checks of indices and biases that operators share."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..errors import OptionError, ShapeError
from ..tracing import is_compiled

__all__ = ["as_index", "check_bias", "check_range", "pick"]


def as_index(index: Tensor | Sequence[int], device: torch.device, size: int | None = None) -> Tensor:
    """The places that ``index`` picks in ``y[:, index]``: a tensor or list of places, or a mask of that ``size``."""
    if not isinstance(index, Tensor | Iterable):
        raise OptionError(f"an index is a list of whole numbers or a mask, got {index!r}")
    places = index if isinstance(index, Tensor) else torch.as_tensor(list(index), device=device)
    if places.dtype == torch.bool and size is not None and places.shape != (size,):
        raise ShapeError(f"a mask of shape {tuple(places.shape)} does not fit {size} features")
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
    if is_compiled(index):
        return weight.index_select(dim, index)
    try:
        return weight.index_select(dim, index)
    except (IndexError, RuntimeError) as error:
        raise _out_of_range(index, weight.shape[dim]) from error


def check_range(index: Tensor, size: int) -> None:
    """Raise :class:`~minimand.errors.ShapeError` for an index outside of ``size`` features."""
    if not is_compiled(index) and index.numel() and not 0 <= int(index.min()) <= int(index.max()) < size:
        raise _out_of_range(index, size)


def _out_of_range(index: Tensor, size: int) -> ShapeError:
    return ShapeError(
        f"an index from {int(index.min())} to {int(index.max())} does not fit {size} features, which are numbered from "
        f"0 to {size - 1}"
    )


def check_bias(bias: Tensor, x: Tensor) -> None:
    """Raise :class:`~minimand.errors.ShapeError` where adding ``bias`` would fail, or enlarge ``x``."""
    pairs = zip(reversed(bias.shape), reversed(x.shape), strict=False)
    if bias.dim() > x.dim() or any(size not in (1, full) for size, full in pairs):
        raise ShapeError(
            f"a bias of shape {tuple(bias.shape)} does not broadcast to an output of shape {tuple(x.shape)}; "
            f"give one number per output, or one per entry"
        )

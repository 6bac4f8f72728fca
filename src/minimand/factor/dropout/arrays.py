"""Arrays in, arrays out; tensors in, tensors out."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import OptionError, ShapeError, require_finite
from ...functions.base import widened

__all__ = ["as_matrix", "like", "require_rank", "require_rate"]


def as_matrix(name: str, value: Any) -> Tensor:
    """A finite matrix in a precision that linear algebra knows: float32 or float64, integers as float64."""
    tensor = value if isinstance(value, Tensor) else torch.tensor(np.asarray(value))
    if tensor.dim() != 2:
        raise ShapeError(f"{name} must be a matrix, got shape {tuple(tensor.shape)}")
    tensor = widened(tensor) if tensor.is_floating_point() else tensor.double()
    require_finite(name, tensor)
    return tensor


def like(result: Tensor, source: Any) -> Any:
    """``result`` as what ``source`` is: a tensor of its floating precision, or an array."""
    if isinstance(source, Tensor):
        return result.to(source.dtype) if source.is_floating_point() else result
    dtype = np.asarray(source).dtype
    array = result.detach().numpy()
    return array.astype(dtype) if np.issubdtype(dtype, np.floating) else array


def require_rate(p: float, name: str = "p") -> None:
    """Refuse a drop rate outside [0, 1)."""
    if isinstance(p, bool) or not isinstance(p, int | float | np.floating | np.integer) or not 0 <= p < 1:
        raise OptionError(f"{name} is a drop rate and must lie in [0, 1), got {p!r}")


def require_rank(rank: int, name: str = "rank") -> None:
    """Refuse a size that is not a positive whole number."""
    if isinstance(rank, bool) or not isinstance(rank, int | np.integer) or rank < 1:
        raise OptionError(f"{name} must be a whole number ≥ 1, got {rank!r}")

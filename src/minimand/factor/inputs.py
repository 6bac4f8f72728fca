"""Conversion and checks of inputs: arrays, tensors, frames, masked arrays, options and seeds."""

import math
import numbers
import warnings
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from ..errors import NonFiniteError, OptionError, ShapeError, require_positive

__all__ = ["as_tensor", "real", "same_kind", "seeded_generator", "working"]


def require_number(name: str, value: Any, *, zero: bool = False) -> None:
    """Raise :class:`OptionError` unless ``value`` is a finite number above zero (with ``zero``: at least zero)."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise OptionError(f"{name} must be a finite number {'≥ 0' if zero else '> 0'}, got {value!r}")
    require_positive(name, float(value), zero=zero)


def require_whole(name: str, value: Any) -> None:
    """Raise :class:`OptionError` unless ``value`` is a whole number ≥ 1."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise OptionError(f"{name} must be a whole number ≥ 1, got {value!r}")


def require_lam(lam: Any) -> None:
    """Raise :class:`OptionError` unless ``lam`` is a finite number above zero; the message suggests a value."""
    try:
        require_number("lam", lam)
    except OptionError as error:
        raise OptionError(
            f"{error}; try 0.1 * lambda_max(Y), where lambda_max, a method of the estimators, is the smallest lam "
            f"whose solution is zero"
        ) from None


def require_entries(name: str, data: np.ndarray | Tensor, who: str, remedy: str) -> None:
    """Raise :class:`NonFiniteError` for data with NaN or infinite entries."""
    of: Any = torch if isinstance(data, Tensor) else np
    size = math.prod(data.shape)
    bad = size - int(of.isfinite(data).sum())
    if bad:
        kinds = " and ".join(k for k, f in (("NaN", of.isnan), ("infinity", of.isinf)) if bool(f(data).any()))
        raise NonFiniteError(
            f"Input {name} contains {kinds}, {bad} of its {size} entries, and {who} needs them all; {remedy}"
        )


def as_tensor(array: np.ndarray) -> Tensor:
    """The array's memory as a tensor, also of a read-only file. Callers do not write to it."""
    if any(stride < 0 for stride in array.strides) or array.dtype.byteorder not in "=|":
        array = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("="))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable", category=UserWarning)
        return torch.from_numpy(array)


def working(tensor: Tensor) -> Tensor:
    """The tensor in the precision of the computation: float32 for half precision, float64 for integers.

    Factors are returned in this precision, because a certificate does not hold for factors that are rounded later.

    >>> working(torch.ones(1, dtype=torch.bfloat16)).dtype, working(torch.ones(1, dtype=torch.int64)).dtype
    (torch.float32, torch.float64)
    """
    if tensor.dtype in (torch.float32, torch.float64):
        return tensor
    return tensor.to(torch.float32 if tensor.is_floating_point() else torch.float64)


def same_kind(tensor: Tensor, like: Any) -> Any:
    """``tensor`` on the device and in the working precision of ``like`` if that is a tensor, else as an array."""
    if isinstance(like, Tensor):
        dtype = working(like[:0]).dtype if like.is_floating_point() else tensor.dtype
        return tensor.to(dtype=dtype, device=like.device)
    return tensor.cpu().numpy()


def refuse_masked(name: str, value: Any, remedy: str) -> None:
    """Raise :class:`OptionError` for a masked array with masked entries, whose hidden values numpy would use."""
    if np.ma.is_masked(value):
        hidden = int(np.ma.getmaskarray(value).sum())
        raise OptionError(f"{name} is a masked array with {hidden} masked entries; {remedy}")


def real(name: str, value: Any) -> Tensor:
    """A tensor of real numbers from a tensor, an array or a frame."""
    if sp.issparse(value) or (isinstance(value, Tensor) and value.layout != torch.strided):
        raise OptionError(
            f"{name} is sparse: pass {name}.toarray() (of a tensor {name}.to_dense()) if its zeros are data, "
            "and mask=… as well if only its stored entries were observed"
        )
    refuse_masked(name, value, "fill it first, for example with .filled(0)")
    if isinstance(value, Tensor):
        tensor = value.detach()
    else:
        array = np.asarray(value)
        if array.dtype.kind not in "biufc":
            raise OptionError(f"{name} must hold real numbers, got {array.dtype}: convert it")
        tensor = as_tensor(array)
    if tensor.is_complex():
        raise ShapeError(f"{name} must hold real numbers, got {tensor.dtype}: pass real and imaginary parts as columns")
    return tensor


def seeded_generator(random_state: Any) -> torch.Generator:
    """The torch generator of a scikit-learn ``random_state``: None, an integer, or numpy's ``RandomState``."""
    source: Any = random_state
    try:
        if random_state is None:
            source = np.random
        elif isinstance(random_state, numbers.Integral):
            source = np.random.RandomState(int(random_state))
        elif random_state is not np.random and not isinstance(random_state, np.random.RandomState):
            raise ValueError
    except ValueError as error:
        raise OptionError(
            f"random_state must be None, a whole number from 0 to 2³² − 1 or a numpy RandomState, got {random_state!r}"
        ) from error
    return torch.Generator().manual_seed(int(source.randint(2**31 - 1)))

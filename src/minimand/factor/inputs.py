"""What comes in and what goes out: arrays, tensors, frames and masked arrays, in the precision that is computed in."""

import math
import warnings
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from ..errors import NonFiniteError, OptionError, ShapeError, require_positive

__all__ = [
    "as_tensor",
    "real",
    "refuse_masked",
    "require_entries",
    "require_lam",
    "require_number",
    "same_kind",
    "seeded_generator",
    "working",
]


def require_number(name: str, value: Any, *, zero: bool = False) -> None:
    """Refuse what is no finite positive number."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise OptionError(f"{name} must be a finite number {'≥ 0' if zero else '> 0'}, got {value!r}")
    require_positive(name, float(value), zero=zero)


def require_lam(lam: Any) -> None:
    """Refuse a weight that is no finite positive number, and say where a good one comes from."""
    try:
        require_number("lam", lam)
    except OptionError as error:
        raise OptionError(
            f"{error}; a start is 0.1 * lambda_max(Y), where lambda_max, a method of the estimators, gives the "
            f"smallest lam whose answer is zero"
        ) from None


def require_entries(name: str, data: np.ndarray | Tensor, who: str, remedy: str) -> None:
    """Refuse data with entries that are NaN or infinite, in scikit-learn's words and one sentence."""
    of: Any = torch if isinstance(data, Tensor) else np
    size = math.prod(data.shape)
    bad = size - int(of.isfinite(data).sum())
    if bad:
        kinds = " and ".join(k for k, f in (("NaN", of.isnan), ("infinity", of.isinf)) if bool(f(data).any()))
        raise NonFiniteError(
            f"Input {name} contains {kinds}, {bad} of its {size} entries, and {who} needs them all; {remedy}"
        )


def as_tensor(array: np.ndarray) -> Tensor:
    """The array's memory as a tensor, read-only files included: nothing here writes to its input."""
    if any(stride < 0 for stride in array.strides) or array.dtype.byteorder not in "=|":
        array = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("="))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable", category=UserWarning)
        return torch.from_numpy(array)


def working(tensor: Tensor) -> Tensor:
    """In the precision that is computed in: float32 for half precision, float64 for whole numbers.

    Factors come back in it, because rounding them afterwards would leave them without a certificate.

    >>> working(torch.ones(1, dtype=torch.bfloat16)).dtype, working(torch.ones(1, dtype=torch.int64)).dtype
    (torch.float32, torch.float64)
    """
    if tensor.dtype in (torch.float32, torch.float64):
        return tensor
    return tensor.to(torch.float32 if tensor.is_floating_point() else torch.float64)


def same_kind(tensor: Tensor, like: Any) -> Any:
    """A tensor where ``like`` is one, on its device and in the type that its data are computed in; else an array."""
    if isinstance(like, Tensor):
        dtype = working(like[:0]).dtype if like.is_floating_point() else tensor.dtype
        return tensor.to(dtype=dtype, device=like.device)
    return tensor.cpu().numpy()


def refuse_masked(name: str, value: Any, remedy: str) -> None:
    """Refuse a masked array with masked entries, which numpy would silently show."""
    if np.ma.is_masked(value):
        hidden = int(np.ma.getmaskarray(value).sum())
        raise OptionError(f"{name} is a masked array with {hidden} masked entries; {remedy}")


def real(name: str, value: Any) -> Tensor:
    """A tensor of real numbers from a tensor, an array or a frame; what cannot be one is refused."""
    if sp.issparse(value) or (isinstance(value, Tensor) and value.layout != torch.strided):
        raise OptionError(
            f"{name} is sparse: pass {name}.toarray() (of a tensor {name}.to_dense()) where its zeros are data, "
            "and mask=… as well where only what it stores was observed"
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
    """The generator of a seed, of numpy's ``RandomState``, or of None."""
    from sklearn.utils import check_random_state

    try:
        seed = check_random_state(random_state).randint(2**31 - 1)
    except ValueError as error:
        raise OptionError(
            f"random_state must be None, a whole number from 0 to 2³² − 1 or a numpy RandomState, got {random_state!r}"
        ) from error
    return torch.Generator().manual_seed(int(seed))

"""Conversion and checks of inputs: arrays, tensors, frames, masked arrays, options, seeds, and the range of numbers."""

import math
import numbers
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from ..errors import NonFiniteError, OptionError, ShapeError, require_finite, require_positive, require_values

__all__ = ["Share", "Units", "as_share", "as_tensor", "real", "same_kind", "seeded_generator", "working"]

# Binary exponents: of data that are left as they are; between the factors of a component that are left as they are; and
# between data and λ, beyond which float64 cannot relate them.
MIDDLE, APART, FARTHEST = 32, 64, 900


def require_number(name: str, value: Any, *, zero: bool = False) -> None:
    """Raise :class:`OptionError` unless ``value`` is a finite number above zero (with ``zero``: at least zero)."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise OptionError(f"{name} must be a finite number {'≥ 0' if zero else '> 0'}, got {value!r}")
    require_positive(name, float(value), zero=zero)


def require_whole(name: str, value: Any) -> None:
    """Raise :class:`OptionError` unless ``value`` is a whole number ≥ 1."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise OptionError(f"{name} must be a whole number ≥ 1, got {value!r}")


@dataclass(frozen=True)
class Share:
    """λ as a share of λmax, the smallest λ whose solution is zero; the estimators also take the string ``"5%"``.

    >>> Share(0.05) == as_share("5%")
    True
    """

    value: float

    def __post_init__(self) -> None:
        require_number("a share of lambda_max", self.value)
        if self.value > 1:
            raise OptionError(
                f"a share of lambda_max must lie in (0, 1], got {self.value:g}: from lambda_max on the solution is zero"
            )


def as_share(lam: Any) -> Share | None:
    """The share that ``lam`` is; None for a number."""
    if isinstance(lam, Share):
        return lam
    if isinstance(lam, str):
        try:
            return Share(float(lam.strip().removesuffix("%")) / 100) if lam.strip().endswith("%") else None
        except ValueError as error:
            if isinstance(error, OptionError):
                raise
            return None
    return None


def require_lam(lam: Any) -> None:
    """Raise :class:`OptionError` unless ``lam`` is a finite number above zero or a share; the message suggests one."""
    if as_share(lam) is not None:
        return
    try:
        require_number("lam", lam)
    except OptionError as error:
        raise OptionError(
            f"{error}; try Share(0.1) or '10%', a share of lambda_max(Y), the smallest lam whose solution is zero"
        ) from None


def lam_grid(lams: Any, largest: Callable[[], float]) -> np.ndarray:
    """The numbers of a grid of λ; ``largest`` computes λmax, of which its elements may be shares."""
    if isinstance(lams, str | Share) or not np.iterable(lams) or not list(lams):
        raise OptionError(f"lams must be None or a sequence of numbers > 0 or shares of lambda_max, got {lams!r}")
    for lam in lams:
        try:
            require_lam(lam)
        except OptionError as error:
            raise OptionError(f"lams must be numbers > 0 or shares of lambda_max: {error}") from None
    shares = [as_share(lam) for lam in lams]
    top = largest() if any(shares) else 0.0
    return np.array([share.value * top if share else float(lam) for share, lam in zip(shares, lams, strict=True)])


def holds(data: Any, kind: Callable[[Any], Any]) -> bool:
    """Whether ``kind`` is true for an entry of an array or tensor."""
    return any(bool(kind(block).any()) for block in _blocks(data))


def _blocks(data: Any) -> Iterator[Any]:
    """Rows of an array or tensor, few at a time: a test of all entries of a file at once takes more memory than it."""
    rows = max(1, 2**18 // max(1, math.prod(data.shape[1:])))
    return (data[begin : begin + rows] for begin in range(0, len(data), rows))


def require_entries(name: str, data: np.ndarray | Tensor, who: str, remedy: str) -> None:
    """Raise :class:`NonFiniteError` for data with NaN or infinite entries."""
    of: Any = torch if isinstance(data, Tensor) else np
    size = math.prod(data.shape)
    bad = size - sum(int(of.isfinite(block).sum()) for block in _blocks(data))
    if bad:
        kinds = " and ".join(k for k, f in (("NaN", of.isnan), ("infinity", of.isinf)) if holds(data, f))
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


def weight_roots(sample_weight: Any, rows: int) -> Tensor | None:
    """The square roots of the weights of rows, float64; None without weights."""
    if sample_weight is None:
        return None
    weights = real("sample_weight", sample_weight).to(torch.float64).cpu()
    if tuple(weights.shape) != (rows,):
        raise ShapeError(f"sample_weight has shape {tuple(weights.shape)}, but Y has {rows} rows: one weight a row")
    require_finite("sample_weight", weights)
    if bool((weights < 0).any()) or not bool(weights.any()):
        raise OptionError("sample_weight must be ≥ 0, and above zero for one row at least")
    return weights.sqrt()


def same_kind(tensor: Tensor, like: Any) -> Any:
    """``tensor`` on the device and in the working precision of ``like`` if that is a tensor, else as an array."""
    if isinstance(like, Tensor):
        dtype = working(like[:0]).dtype if like.is_floating_point() else tensor.dtype
        return tensor.to(dtype=dtype, device=like.device)
    return tensor.cpu().numpy()


def given_matrix(name: str, value: Any, *, finite: bool = True) -> Tensor:
    """A matrix of float64 from a tensor, an array or a frame."""
    tensor = real(name, value).to(torch.float64).contiguous()
    if tensor.dim() != 2:
        raise ShapeError(f"{name} must be a real matrix, got shape {tuple(tensor.shape)}")
    if finite:
        require_finite(name, tensor)
    return tensor


def unmasked(Y: Any, mask: Any) -> tuple[Any, Any]:
    """The data of a masked array, and the mask of the observed entries."""
    if not np.ma.is_masked(Y):
        return Y, mask
    seen = ~np.ma.getmaskarray(Y)
    return np.ma.getdata(Y), seen if mask is None else seen & np.asarray(mask, dtype=bool)


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
        require_values(name, value)
        tensor = value.detach()
    else:
        array = np.asarray(value)
        if array.dtype.kind not in "biufc":
            raise OptionError(f"{name} must hold real numbers, got {array.dtype}: convert it")
        tensor = as_tensor(array.astype(np.float64) if array.dtype == np.longdouble else array)
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


# -- the range of numbers ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Units:
    r"""Binary exponents between a problem and the same problem in the middle of the floating-point range.

    Products with powers of two are exact, so both have the same solution to the last digit, but squares in the second
    neither overflow nor vanish. With the data :math:`Y = 2^e Y'` and a loss of degree d, λ and polars are
    :math:`2^{(d-1)e}` times the others (``polar``), objectives and gaps :math:`2^{de}` times (``objective``), and
    products :math:`UV^\top` as Y.

    >>> Units(polar=4, objective=8).factor(torch.ones(1)), Units(polar=4, objective=8).lowered(torch.ones(1))
    (tensor([4.]), tensor([0.2500]))
    """

    polar: int = 0
    objective: int = 0

    @property
    def product(self) -> int:
        """The exponent of UVᵀ, a multiple of four."""
        return self.objective - self.polar

    def factor(self, x: Tensor, share: int = 2) -> Tensor:
        """A factor in the caller's units; it takes one of ``share`` equal shares of the exponent."""
        return shifted(x, self.product / share)

    def lowered(self, x: Tensor, share: int = 2) -> Tensor:
        """A factor of the caller's in the middle of the range."""
        return shifted(x, -self.product / share)

    def weight(self, lam: float, largest: float) -> float:
        """The caller's λ there; ``largest`` is the largest entry of the caller's data."""
        return comparable(f"lam={lam:g}", raised(float(lam), -self.polar), largest)


def comparable(name: str, value: float, largest: float) -> float:
    """An option for data in the middle of the range; raises if float64 cannot relate it to them."""
    if largest and not 2.0**-FARTHEST < value < 2.0**FARTHEST:
        raise OptionError(
            f"{name} and the data, whose largest entry is {largest:g}, are too far apart for float64: rescale one of "
            "them"
        )
    return value


def shifted(tensor: Tensor, exponent: float) -> Tensor:
    """2^exponent · ``tensor``, in two steps, because the power itself may lie outside the range.

    It is exact for whole exponents."""
    return tensor * 2.0 ** (exponent // 2) * 2.0 ** (exponent - exponent // 2) if exponent else tensor


def raised(value: float, exponent: int) -> float:
    """2^exponent · ``value``: infinite above float64's range, and the smallest number above zero below it."""
    try:
        return math.ldexp(value, exponent) or math.copysign(5e-324, value) * (value != 0)
    except OverflowError:
        return math.copysign(math.inf, value)


def warn_if_out_of_range(who: str, objective: float, level: int) -> None:
    """Warn of an objective that :func:`raised` could not represent; ``level`` is the caller's on the stack."""
    if objective in (5e-324, math.inf):
        warnings.warn(
            f"{who}: the objective lies outside of float64's range, because it scales with the data or their square; "
            "factors, status and relative gap hold; scale the data to see it",
            RuntimeWarning,
            stacklevel=level + 1,
        )


def middle(largest: float, *factors: Tensor, limit: int = MIDDLE) -> int:
    """The exponent, a multiple of four, by which data (and products of given factors, vectors as columns) are divided:
    zero unless the largest entry is far from one."""
    exponents = [math.frexp(largest)[1]] if largest else []
    if factors:
        sizes, powers = _magnitudes(factors)
        exponents += powers.sum(0)[(sizes > 0).all(0)].tolist()
    top = max(exponents, default=0)
    return 0 if abs(top) <= limit else top - top % 4


def leveled(*factors: Tensor) -> tuple[Tensor, ...]:
    """Factors, vectors as columns, of the same components: powers of two move between the factors of a component until
    their sizes differ by at most ``APART`` binary exponents."""
    sizes, powers = _magnitudes(factors)
    moves = np.where(np.ptp(powers, 0) > APART, powers.sum(0) // len(factors) - powers, 0)
    moves[0] -= moves.sum(0)
    # A zero product needs no balance, only squares in the range.
    moves = np.where((sizes > 0).all(0), moves, np.where(np.abs(powers) > APART, -powers, 0))
    return tuple(_moved(x, move) if move.any() else x for x, move in zip(factors, moves, strict=True))


def _magnitudes(factors: tuple[Tensor, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The largest absolute value and its binary exponent, factors × components."""
    sizes = np.array([np.abs(x.detach().cpu().numpy()).max(0, initial=0.0) for x in factors], dtype=np.float64)
    return sizes, np.frexp(sizes)[1]


def _moved(x: Tensor, move: np.ndarray) -> Tensor:
    for part in (move // 2, move - move // 2):
        x = x * torch.from_numpy(np.ldexp(1.0, part)).to(x)
    return x

"""Operators of other libraries: objects with ``A`` and ``A_adjoint``, SciPy's linear operators, sparse matrices."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import scipy.sparse
import scipy.sparse.linalg
import torch
from torch import Tensor

from ..arguments import checked
from ..errors import CapabilityError, ShapeError, require_finite
from ..tracing import is_compiled
from .base import LinearOperator
from .callables import LinearMap, operator, real
from .combined import Reshaped
from .dense import Dense

__all__ = ["as_operator"]

Product = Callable[[Tensor], Tensor]
_NUMPY = {torch.float64: np.float64, torch.float32: np.float32, torch.float16: np.float32, torch.bfloat16: np.float32}


@dataclasses.dataclass(frozen=True)
class _Rows:
    """Products with rows: by NumPy where possible, and by torch where their values are hidden."""

    eager: Product
    traced: Product


@checked
def as_operator(
    source: Any,
    input_shape: Sequence[int] | None = None,
    output_shape: Sequence[int] | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> LinearOperator:
    r"""The operator of an object of another library.

    - An operator of this library and a matrix of torch: with ``input_shape`` on images, whose sizes multiply to the
      number of columns; else as they are.
    - An object with methods ``A`` and ``A_adjoint`` on batches, such as the physics of deepinv, needs ``input_shape``.
      ``output_shape`` is computed where it is not given.
    - A :class:`scipy.sparse.linalg.LinearOperator` and a sparse matrix of SciPy or torch act on flattened samples:
      with ``input_shape`` on images, whose sizes multiply to the number of columns. Products with SciPy's operators are
      computed by NumPy, and derivatives by the adjoint. A compiled graph breaks at such a product; torch.export and
      ``is_grads_batched`` take sparse matrices, and refuse a LinearOperator.

    Args:
        source: The object.
        input_shape: The shape of one input sample, such as ``(1, 64, 64)``; by default flat.
        output_shape: The shape of one output sample; by default flat.
        dtype: The type in which bounds are computed; default: torch's.

    >>> import scipy.sparse
    >>> rows = scipy.sparse.csr_array(([1.0, 1.0], ([0, 0], [0, 3])), shape=(1, 4))  # the sum of two pixels
    >>> A = as_operator(rows, (1, 2, 2))
    >>> A.apply(torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])), A.adjoint(torch.tensor([2.0]))
    (tensor([5.]), tensor([[[2., 0.],
             [0., 2.]]]))
    """
    if isinstance(source, Tensor) and source.layout is torch.strided:
        source = Dense(source)
    if isinstance(source, LinearOperator):
        old = source.input_shape, source.output_shape
        given = zip((input_shape, output_shape), old, ("columns", "rows"), strict=True)
        new = [known if shape is None else _fitting(shape, math.prod(known), name) for shape, known, name in given]
        return source if tuple(new) == old else Reshaped(source, *new)
    if hasattr(source, "A") and hasattr(source, "A_adjoint"):
        return _physics(source, input_shape, output_shape, dtype)
    products = _products(source)
    if products is None:
        raise CapabilityError(
            f"a {type(source).__name__} is no linear operator; pass a matrix of torch, an object with A and A_adjoint, "
            f"a scipy.sparse.linalg.LinearOperator, a sparse matrix, or operator(apply, adjoint, …)"
        )
    forward, backward, (rows, columns) = products
    shapes = _fitting(input_shape, columns, "columns"), _fitting(output_shape, rows, "rows")

    def apply(y: Tensor) -> Tensor:
        return _product(y.flatten(1), forward, backward).reshape(len(y), *shapes[1])

    def adjoint(x: Tensor) -> Tensor:
        return _product(x.flatten(1), backward, forward).reshape(len(x), *shapes[0])

    return operator(apply, adjoint, *shapes, dtype=dtype)


def _physics(source: Any, given: Any, measured: Any, dtype: torch.dtype | None) -> LinearOperator:
    if given is None:
        raise ShapeError(
            f"input_shape is needed for a {type(source).__name__}, which does not tell the size of its images; give "
            f"the shape of one, such as (1, 64, 64)"
        )
    if measured is None:
        with torch.no_grad():
            image = real(f"A of this {type(source).__name__}", source.A(torch.zeros(1, *given, dtype=dtype)))
        measured = image.shape[1:]
    return operator(source.A, source.A_adjoint, given, measured, dtype=dtype)


def _products(source: Any) -> tuple[_Rows, _Rows, tuple[int, int]] | None:
    """Products of a matrix and of its transpose with rows, and the shape of the matrix."""
    if isinstance(source, Tensor):
        source = _scipy(source)
    if scipy.sparse.issparse(source):
        matrix: Any = source
        if np.iscomplexobj(matrix):
            raise CapabilityError("the sparse matrix is complex; stack its real and imaginary parts")
        require_finite("the sparse matrix", torch.as_tensor(matrix.tocoo().data).double())
        return _sparse(matrix.tocsr()), _sparse(matrix.T.tocsr()), matrix.shape
    if isinstance(source, scipy.sparse.linalg.LinearOperator):
        if source.dtype is not None and np.issubdtype(source.dtype, np.complexfloating):
            raise CapabilityError("the LinearOperator is complex; let it return real and imaginary parts")
        return _Rows(_numpy(source.matmat), _refused), _Rows(_numpy(source.rmatmat), _refused), source.shape
    return None


def _scipy(matrix: Tensor) -> Any:
    if matrix.dim() != 2:
        raise ShapeError(f"a sparse tensor must be a matrix, got shape {tuple(matrix.shape)}")
    entries = matrix.detach().to_sparse_coo().coalesce().cpu()
    if entries.dtype in (torch.float16, torch.bfloat16):
        entries = entries.float()  # SciPy has no sparse matrices in half precision
    rows, columns = entries.indices().numpy()
    return scipy.sparse.csr_array((entries.values().numpy(), (rows, columns)), shape=(matrix.shape[0], matrix.shape[1]))


def _sparse(matrix: Any) -> _Rows:
    made: dict[Any, Any] = {}

    def product(rows: Tensor) -> Tensor:
        key = (rows.dtype, rows.device)
        if key not in made:
            made[key] = (
                _numpy(matrix.astype(_NUMPY[rows.dtype]).dot) if rows.device.type == "cpu" else _coo(matrix, rows)
            )
        return made[key](rows)

    return _Rows(product, lambda rows: _gathered(matrix, rows))


def _entries(matrix: Any, like: Tensor) -> tuple[Tensor, Tensor]:
    """The rows and columns of the entries, and their values."""
    entries = matrix.tocoo()
    places = torch.as_tensor(np.stack([entries.row, entries.col]).astype(np.int64))
    return places.to(like.device), torch.as_tensor(entries.data).to(like)


def _coo(matrix: Any, like: Tensor) -> Product:
    held = torch.sparse_coo_tensor(*_entries(matrix, like), matrix.shape)
    return lambda rows: (held @ rows.mT).mT


def _gathered(matrix: Any, rows: Tensor) -> Tensor:
    """The product by indexing, which torch can trace."""
    (row, column), values = _entries(matrix, rows)
    return rows.new_zeros(len(rows), matrix.shape[0]).index_add(1, row, rows[:, column] * values)


def _numpy(multiply: Callable[[Any], Any]) -> Product:
    def product(rows: Tensor) -> Tensor:
        widened = rows.detach().cpu().to(torch.promote_types(rows.dtype, torch.float32))
        try:
            return torch.as_tensor(np.ascontiguousarray(multiply(widened.numpy().T).T)).to(rows)
        except (NotImplementedError, TypeError) as error:  # SciPy's, without rmatvec
            text = f"a product of the LinearOperator failed ({error!r}); those with its transpose need rmatvec"
            raise CapabilityError(text) from error

    return product


def _refused(rows: Tensor) -> Tensor:
    raise CapabilityError(
        "torch.export and is_grads_batched cannot trace the products of a scipy.sparse.linalg.LinearOperator, which "
        "NumPy computes; pass a sparse matrix, or operator(apply, adjoint, …) with torch's functions"
    )


@torch.compiler.disable
def _product(rows: Tensor, forward: _Rows, backward: _Rows) -> Tensor:
    """The product; a compiled graph breaks here."""
    if is_compiled(rows) or torch._C._functorch.is_legacy_batchedtensor(rows):
        return forward.traced(rows)
    again, back = (lambda t: _product(t, forward, backward)), (lambda grad: _product(grad, backward, forward))
    found: Tensor = LinearMap.apply(rows, forward.eager, again, back)
    return found


def _fitting(shape: Sequence[int] | None, count: int, name: str) -> tuple[int, ...]:
    sizes = (count,) if shape is None else tuple(shape)
    if math.prod(sizes) != count:
        raise ShapeError(
            f"a sample of shape {sizes} has {math.prod(sizes)} entries, but the operator has {count} {name}"
        )
    return sizes

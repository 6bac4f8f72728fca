"""Sparse data whose zeros are data: products with tensors, rows on request, and no dense matrix of the data's size."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from ..errors import OptionError, require_finite
from .inputs import as_tensor

__all__ = ["SparseData", "is_sparse", "sparse_from_tensor", "sparse_given", "summed"]

DTYPES = {torch.float32: np.float32, torch.float64: np.float64}


@dataclass(frozen=True, eq=False)
class SparseData:
    """A CSR or CSC matrix, with the part of a tensor's interface that factorisations use. It is never changed.

    >>> Y = SparseData(sp.csr_array([[0.0, 2.0], [1.0, 0.0]]))
    >>> Y @ torch.ones(2, 1, dtype=torch.float64), Y.mT[0:1]
    (tensor([[2.],
            [1.]], dtype=torch.float64), tensor([[0., 1.]], dtype=torch.float64))
    """

    matrix: Any

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return (int(self.matrix.shape[0]), int(self.matrix.shape[1]))

    def __len__(self) -> int:
        return self.shape[0]

    @cached_property
    def values(self) -> Tensor:
        """The stored entries."""
        return as_tensor(self.matrix.data)

    @property
    def dtype(self) -> torch.dtype:
        """float32 or float64."""
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        """The processor: scipy has no other."""
        return torch.device("cpu")

    @property
    def mT(self) -> "SparseData":
        """The transpose, which shares the memory."""
        return SparseData(self.matrix.T)

    def numel(self) -> int:
        """Rows times columns."""
        return self.shape[0] * self.shape[1]

    def to(self, dtype: torch.dtype) -> "SparseData":
        """The same entries in another precision."""
        return self if dtype == self.dtype else SparseData(self.matrix.astype(DTYPES[dtype]))

    def __matmul__(self, other: Tensor) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(self.matrix @ other.numpy()))

    def __mul__(self, factor: float) -> "SparseData":
        return SparseData(self.matrix * np.asarray(factor, dtype=self.matrix.dtype))

    def scaled_rows(self, factors: Tensor) -> "SparseData":
        """The rows times one factor each."""
        scale = sp.diags_array(factors.numpy().astype(self.matrix.dtype))
        return SparseData((scale @ self.matrix).asformat(self.matrix.format))

    @cached_property
    def _rows(self) -> Any:
        return self.matrix.tocsr()

    def __getitem__(self, part: slice | Sequence[slice]) -> Tensor:
        """A dense block of rows, or of rows and columns."""
        rows, columns = (part, slice(None)) if isinstance(part, slice) else part
        return torch.from_numpy(self._rows[rows][:, columns].toarray())


def is_sparse(Y: Any) -> bool:
    """Whether Y is a sparse matrix of scipy or a sparse tensor."""
    return bool(sp.issparse(Y)) or (isinstance(Y, Tensor) and Y.layout != torch.strided)


def summed(matrix: Any) -> Any:
    """A CSR or CSC matrix that stores each entry once: the parts of an entry that is stored in parts are added."""
    if matrix.has_canonical_format:
        return matrix
    matrix = matrix.copy()
    matrix.sum_duplicates()
    return matrix


def sparse_given(Y: Any, *, plain: bool) -> SparseData:
    """A sparse matrix or tensor as data of float64; ``plain``: the loss is squared, and there is no mask."""
    if not plain:
        raise OptionError(
            "the zeros of a sparse Y are data, and its loss is the squared one: for mask=… or another loss pass "
            "Y.toarray() (of a tensor Y.to_dense())"
        )
    matrix = sparse_from_tensor(Y) if isinstance(Y, Tensor) else Y
    matrix = matrix if matrix.format in ("csr", "csc") else matrix.tocsr()
    data = SparseData(summed(matrix.astype(np.float64, copy=False)))
    require_finite("Y", data.values)
    return data


def sparse_from_tensor(Y: Tensor) -> Any:
    """The CSR matrix of a sparse tensor of two dimensions."""
    entries = Y.detach().to_sparse_coo().coalesce().cpu()
    row, column = entries.indices().numpy()
    values = entries.values()
    values = values if values.dtype in DTYPES else values.to(torch.float64)
    return sp.csr_array((values.numpy(), (row, column)), shape=(Y.shape[0], Y.shape[1]))

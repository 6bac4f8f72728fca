"""The operator of a fully-connected layer."""

import copy
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..arguments import checked
from ..errors import ShapeError, require_real
from ..linalg import gram
from ..norms.kernel import Kernel
from ..tracing import always, exporting_to_onnx
from .base import LinearOperator
from .gather import Columns
from .index import as_index, check_bias, pick

__all__ = ["Dense"]


@checked
class Dense(LinearOperator):
    r"""The map :math:`y \mapsto A y` of a weight matrix :math:`A \in \mathbb{R}^{n_2 \times n_1}`.

    Samples lie in the last dimension, so ``y`` has shape ``(..., n1)``. It is the case
    :math:`W = H = 1` of [Bibi2019], Lemma 1. A weight of shape ``(*batch, n2, n1)`` is one matrix for each sample;
    ``y`` has shape ``(*batch, n1)``.

    >>> A = Dense(torch.tensor([[3.0, 0.0], [0.0, 4.0], [0.0, 0.0]]))
    >>> A.apply(torch.tensor([1.0, 1.0])), A.adjoint(torch.tensor([1.0, 1.0, 1.0]))
    (tensor([3., 4., 0.]), tensor([3., 4.]))
    >>> bool(16 <= A.norm_sq() < 16.001)
    True
    """

    def __init__(self, weight: Tensor) -> None:
        require_real("a dense weight", weight)
        if weight.dim() < 2:
            raise ShapeError(
                f"a dense weight has 2 dimensions (n2, n1), or more (*batch, n2, n1), got shape {tuple(weight.shape)}"
            )
        self.weight = weight
        self._shapes = (weight.shape[-1],), (weight.shape[-2],)
        self._batched = weight.dim() > 2
        self._columns: Columns | None = None

    @property
    def sampled(self) -> bool:
        """Whether there is one matrix, whose features can be sampled."""
        return not self._batched

    @property
    def matrix(self) -> Tensor | None:
        """The weight itself, if it is one matrix."""
        return None if self._batched else self.weight

    def check_input(self, y: Tensor) -> None:
        """Also check that there is one sample for each matrix."""
        super().check_input(y)
        if self._batched and y.shape[:-1] != self.weight.shape[:-2]:
            raise ShapeError(
                f"y of shape {tuple(y.shape)} does not hold one sample for each matrix of the weight of shape "
                f"{tuple(self.weight.shape)}; expected {(*self.weight.shape[:-2], self.inputs)}"
            )

    def of_samples(self, keep: Tensor) -> "Dense":
        """The matrices of some samples."""
        return Dense(self.weight[keep]) if self._batched else self

    def bound(self) -> Tensor | float:
        """The certified bound; of a batch the largest, by eigenvalues."""
        if not self._batched:
            return super().bound()
        A = self.weight.detach().double()
        gram = A @ A.mT if A.shape[-2] <= A.shape[-1] else A.mT @ A
        rounding = 8 * max(A.shape[-2:]) * torch.finfo(A.dtype).eps
        return torch.linalg.eigvalsh(gram)[..., -1].amax() * (1 + rounding)

    def apply(self, y: Tensor, bias: Tensor | None = None) -> Tensor:
        """``A y + bias``, to the bit what :func:`torch.nn.functional.linear` computes."""
        if self._batched:
            x = torch.matmul(self.weight, y.unsqueeze(-1)).squeeze(-1)
            return x if bias is None else x + bias
        if y.dim() == 0 or y.shape[-1] != self.weight.shape[1]:
            self.check_input(y)
        if bias is None or bias.shape == (self.outputs,):
            return F.linear(y, self.weight, bias)
        x = F.linear(y, self.weight)
        check_bias(bias, x)
        return x + bias

    affine = apply

    def adjoint(self, x: Tensor) -> Tensor:
        """``Aᵀ x``."""
        if self._batched:
            return torch.matmul(x.unsqueeze(-2), self.weight).squeeze(-2)
        if x.dim() == 0 or x.shape[-1] != self.weight.shape[0]:
            self.check_output(x)
        return torch.matmul(x, self.weight)

    def restrict(self, index: Tensor | Sequence[int]) -> "Dense":
        """The columns ``index`` of ``A``."""
        index = as_index(index, self.device, self.inputs)
        return Dense(pick(self.weight, -1, index) if self._columns is None else self._columns.take(index))

    def restrict_outputs(self, index: Tensor | Sequence[int]) -> "Dense":
        """The rows ``index`` of ``A``."""
        return Dense(pick(self.weight, -2, as_index(index, self.device, self.outputs)))

    def gathered(self) -> "Dense":
        """The same operator, with its columns in the layout that :meth:`restrict` reads fastest."""
        other = copy.copy(self)
        other._columns = Columns(self.weight)
        return other

    def with_weight(self, weight: Tensor) -> "Dense":
        """The operator of another weight."""
        return Dense(weight)

    def gram_if_cheaper(self, rows: int, applications: int) -> Tensor | None:
        r""":math:`AA^\top`, differentiable in the weight, where it makes the products cheaper in total; else None.

        A product with it costs :math:`2 n_2^2` per row instead of :math:`4 n_1 n_2`, which is no gain for more than
        :math:`2 n_1` outputs. Forming it costs :math:`2 n_1 n_2^2`, and its backward pass is cheaper than that of the
        products that it replaces. It is formed if ``3 applications rows (2 n1 - n2) > 2 n1 n2``, which is
        ``rows > 2 n2 / (3 applications)`` for a square. In a program that is exported with any number of rows it is not
        formed, except for ONNX, whose runtimes compute it once when they load the file.
        """
        if self._batched:
            return None
        n1, n2 = self.inputs, self.outputs
        folded = 2 * n1 > n2 and applications > 0 and exporting_to_onnx()
        return gram(self.weight) if folded or always(3 * applications * rows * (2 * n1 - n2) > 2 * n1 * n2) else None

    @property
    def kernel(self) -> Kernel | None:
        """The weight as a matrix."""
        return None if self._batched else Kernel(self.weight)

"""The initial image of an unrolled network: the best linear reconstruction."""

import torch
from torch import Tensor

from ...arguments import checked
from ...errors import OptionError, ShapeError, require_constant, require_finite, require_positive, require_real
from ...solvers.linear import ridge_factor

__all__ = ["checked_start", "least_squares_start"]


@checked
def least_squares_start(phi: Tensor, blocks: Tensor, *, ridge: float = 1e-6) -> Tensor:
    r"""The matrix Q of the best linear reconstruction :math:`x \approx Qy` over training blocks,

    .. math:: Q = \arg\min_Q \sum_i \|x_i - Q\Phi x_i\|^2 + sN\|Q\|_F^2 = X^\top Y\,(Y^\top Y + sNI)^{-1},
              \qquad Y = X\Phi^\top,

    with the N blocks as rows of X and the ``ridge`` s, which makes the solution unique with few blocks. Computed in
    float64.

    Source: Zhang & Ghanem, *ISTA-Net*, CVPR 2018.

    >>> phi = torch.eye(1, 2)
    >>> least_squares_start(phi, torch.tensor([[1.0, 2.0], [2.0, 4.0]]))  # the second pixel is twice the first
    tensor([[1.0000],
            [2.0000]])
    """
    require_positive("ridge", ridge)
    if phi.dim() != 2 or blocks.dim() != 2 or blocks.shape[1] != phi.shape[1] or not len(blocks):
        raise ShapeError(
            f"each row of blocks needs as many pixels as phi has columns, got blocks of shape {tuple(blocks.shape)} "
            f"and phi of shape {tuple(phi.shape)}"
        )
    x = blocks.to(phi.device, torch.float64)
    y = x @ phi.to(torch.float64).mT
    return ridge_factor(y.mT, ridge * len(x)).solve(x.mT @ y).to(phi.dtype)


def checked_start(initial: Tensor | None, matrix: Tensor | None, otherwise: str) -> Tensor | None:
    """A copy of the matrix from measurements to pixels; ``otherwise`` says what starts a network without ``matrix``."""
    if initial is None:
        return None
    require_real("initial", initial)
    require_finite("initial", initial)
    require_constant("initial", initial)
    if matrix is None:
        raise OptionError(f"initial needs a phi that is a matrix; {otherwise}")
    rows, columns = matrix.shape
    if initial.shape != (columns, rows):
        raise ShapeError(
            f"initial must be a matrix of {columns} × {rows}, from measurements to pixels, for a phi of "
            f"{rows} × {columns}; got {tuple(initial.shape)}"
        )
    return initial.detach().clone().to(matrix)

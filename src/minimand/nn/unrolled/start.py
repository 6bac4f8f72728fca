"""Where an unrolled network starts: the best linear reconstruction, and the classical one."""

import torch
from torch import Tensor

from ...errors import OptionError, ShapeError, require_positive
from ...functions import L1
from ...operators import Composed, Frame, LinearOperator, Transposed
from ...solvers import FISTA, Problem, Solver, solve
from ...solvers.linear import ridge_factor

__all__ = ["least_squares_start", "sparse_reconstruction"]


def least_squares_start(phi: Tensor, blocks: Tensor, *, ridge: float = 1e-6) -> Tensor:
    r"""The matrix Q of the best linear reconstruction :math:`x \approx Qy` over training blocks,

    .. math:: Q = \arg\min_Q \sum_i \|x_i - Q\Phi x_i\|^2 + sN\|Q\|_F^2 = X^\top Y\,(Y^\top Y + sNI)^{-1},
              \qquad Y = X\Phi^\top,

    with the N blocks as rows of X and the ``ridge`` s, which keeps the solution defined where blocks are few. In
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
            f"blocks are rows of as many pixels as phi has columns; got blocks of {tuple(blocks.shape)} and phi of "
            f"{tuple(phi.shape)}"
        )
    x = blocks.to(phi.device, torch.float64)
    y = x @ phi.to(torch.float64).mT
    return ridge_factor(y.mT, ridge * len(x)).solve(x.mT @ y).to(phi.dtype)


def sparse_reconstruction(
    y: Tensor,
    phi: LinearOperator,
    frame: Frame,
    weight: float,
    solver: Solver = FISTA(iters=100),  # noqa: B008 -- frozen
    *,
    start: Tensor | None = None,
) -> Tensor:
    r"""The classical control: the image :math:`F^\top c` of the sparse coefficients

    .. math:: \min_c\; \tfrac12\|\Phi F^\top c - y\|^2 + w\|c\|_1 ,

    in a tight frame F, by any solver of the library (ProxGD is ISTA). A frame with many shifts is cycle-spinning.
    ``start`` is a first image, such as the best linear one; small weights take long from nothing.

    >>> from minimand.operators import BlockDCT, Inpainting
    >>> mask = torch.ones(8, 8)
    >>> mask[2, 3] = 0
    >>> image = torch.linspace(0, 1, 8).expand(1, 1, 8, 8)
    >>> phi = Inpainting(mask)
    >>> x = sparse_reconstruction(phi.apply(image), phi, BlockDCT((8, 8)), 1e-3, FISTA(iters=300))
    >>> bool((x - image).abs().max() < 0.02)
    True
    """
    if not isinstance(frame, Frame):
        raise OptionError(f"frame is BlockDCT or Wavelet, got {type(frame).__name__}")
    problem = Problem(Composed(frame, Transposed(phi)), L1(weight), y)
    return frame.adjoint(solve(problem, solver, x0=None if start is None else frame.apply(start)).x)

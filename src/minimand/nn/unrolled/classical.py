"""Classical sparse reconstruction: the problem of an unrolled network with a fixed transform."""

from typing import Literal

import torch
from torch import Tensor

from ...arguments import checked
from ...errors import OptionError, Sealed, ShapeError, require_finite, require_positive, require_real
from ...functions import L1
from ...functions.base import Function, Step
from ...operators import Composed, Frame, LinearOperator, Transposed
from ...solvers import FISTA, Problem, Solver, solve
from .descent import descend
from .fidelity import Fidelity, tight_constant
from .regularizer import RidgeRegularizer

__all__ = ["CycleSpinning", "smooth_tv_reconstruction", "sparse_reconstruction"]


class CycleSpinning(Sealed, Function):
    r"""The proximal average of :math:`f_k(x) = w\|D_kx\|_1`, where :math:`D_k` are the detail coefficients of an
    orthonormal transform in K shifted positions. It is the convex function whose prox is the mean of the proxes,

    .. math:: \operatorname{prox}_{\eta g}(x) = \frac1K\sum_k \operatorname{prox}_{\eta f_k}(x)
              = F^\top S_{\eta w/\sqrt K}(Fx) .

    A single position produces artefacts at the borders of its blocks; the mean over positions does not
    (cycle-spinning). The coefficients of a constant image, averages and the coarsest scale, are not shrunk. ``value``
    is the mean of the :math:`f_k`, an upper bound of the proximal average.

    Source: Coifman & Donoho, *Translation-invariant de-noising*, 1995; Bauschke, Goebel, Lucet & Wang, *The proximal
    average*, SIAM J. Optim. 2008.

    >>> from minimand.operators import BlockDCT
    >>> g = CycleSpinning(BlockDCT((8, 8), block=4, count=4), 0.1)
    >>> flat = torch.full((1, 1, 8, 8), 0.5)
    >>> torch.allclose(g.prox(flat), flat), float(g.value(flat)) < 1e-5
    (True, True)
    """

    def __init__(self, frame: Frame, weight: float) -> None:
        self.frame = frame
        self.shrink = L1(weight / len(frame.moves) ** 0.5)
        flat = frame.analyzed(torch.ones(1, *frame.padded).to(frame.weight))
        # The tolerance covers the rounding errors of the frame.
        self.details = flat.abs() <= 1e-3 * flat.abs().max()

    def value(self, x: Tensor) -> Tensor:
        """The mean of the functions, summed over the batch."""
        return self.shrink.value(self.frame.apply(x) * self.details)

    def prox(self, x: Tensor, step: Step = 1.0) -> Tensor:
        """Analysis, soft thresholds on the details, synthesis."""
        coefficients = self.frame.apply(x)
        shrunk = self.shrink.prox(coefficients, step)
        return self.frame.adjoint(torch.where(self.details, shrunk, coefficients))


@checked
def sparse_reconstruction(
    y: Tensor,
    phi: LinearOperator,
    frame: Frame,
    weight: float,
    solver: Solver = FISTA(iters=100),  # noqa: B008 -- frozen
    *,
    start: Tensor | None = None,
    prior: Literal["spun", "synthesis"] = "spun",
) -> Tensor:
    r"""Reconstruct an image that is sparse in a tight frame F, by any solver of the library (ProxGD is ISTA).

    With ``prior="spun"`` the result solves :math:`\min_x \tfrac12\|\Phi x - y\|^2 + g(x)`, where g is
    :class:`CycleSpinning`. With ``prior="synthesis"`` the result is :math:`F^\top c` for the solution c of

    .. math:: \min_c\; \tfrac12\|\Phi F^\top c - y\|^2 + w\|c\|_1 ,

    which also shrinks the brightness. ``start`` is an initial image, such as the best linear reconstruction. With small
    weights convergence from zero is slow.

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
        raise OptionError(f"frame must be a BlockDCT or a Wavelet, got {type(frame).__name__}")
    if prior not in ("spun", "synthesis"):
        raise OptionError(f'prior must be "spun" or "synthesis", got {prior!r}')
    if prior == "spun":
        return solve(Problem(Transposed(phi), CycleSpinning(frame, weight), y), solver, x0=start).x
    problem = Problem(Composed(frame, Transposed(phi)), L1(weight), y)
    return frame.adjoint(solve(problem, solver, x0=None if start is None else frame.apply(start)).x)


@checked
def smooth_tv_reconstruction(
    y: Tensor,
    phi: LinearOperator,
    weight: float,
    *,
    smoothing: float = 0.01,
    start: Tensor | None = None,
    tol: float = 1e-5,
    iterations: int = 1000,
) -> Tensor:
    r"""Reconstruct by smoothed total variation, the classical control for operators and channels of any kind,

    .. math:: \min_x\; \tfrac12\|\Phi x - y\|^2 + \frac w\varepsilon\sum_i \psi(\nabla_i x), \qquad
              \psi(t) = \varepsilon^2\bigl(\sqrt{1 + t^2/\varepsilon^2} - 1\bigr) ,

    with differences of neighbours, horizontal and vertical, and zeros around the image. It tends to
    :math:`w\|\nabla x\|_1` as the ``smoothing`` ε tends to zero. It is the objective of a convex
    :class:`~minimand.nn.RidgeNet` with two filters, and has the same certified solver.

    >>> from minimand.operators import Inpainting
    >>> mask = torch.ones(8, 8)
    >>> mask[2, 3] = 0
    >>> image = torch.full((1, 1, 8, 8), 0.5)
    >>> x = smooth_tv_reconstruction(Inpainting(mask).apply(image), Inpainting(mask), 1e-3)
    >>> bool((x - image)[..., 1:-1, 1:-1].abs().max() < 0.02)
    True
    """
    for name, value in (("weight", weight), ("smoothing", smoothing), ("tol", tol)):
        require_positive(name, value)
    require_real("y", y)
    require_finite("y", y)
    if len(phi.input_shape) != 3 or tuple(y.shape[1:]) != phi.output_shape:
        raise ShapeError(f"phi takes images of {phi.input_shape} to {phi.output_shape}, got y of {tuple(y.shape)}")
    filters = torch.zeros(2, 1, 3, 3, dtype=y.dtype, device=y.device)
    filters[:, 0, 1, 1], filters[0, 0, 1, 2], filters[1, 0, 2, 1] = -1.0, 1.0, 1.0
    parts = torch.full((2,), smoothing, dtype=y.dtype, device=y.device), torch.full((2,), 0.5).to(y)
    regularizer, bound = RidgeRegularizer(filters, *parts), float(phi.norm_sq())
    data = Fidelity(phi, y, torch.tensor(smoothing / weight).to(y), tight_constant(phi), bound)
    x = phi.adjoint(y) / bound if start is None else start
    height, width = phi.input_shape[-2:]
    return descend(regularizer, data, x, regularizer.smoothness((height, width)), iterations, tol).x

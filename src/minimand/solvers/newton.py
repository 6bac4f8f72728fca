r"""Semismooth Newton steps and implicit derivatives on the active set."""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..tracing import is_traced, pullback
from .implicit import transformed
from .problem import Problem

if TYPE_CHECKING:
    from .spectral import SpectralState

__all__ = ["ActiveSystem", "active_step", "active_system", "prox_slope", "solved_on_active_set"]

# Up to this many entries, the batch of Hessians on the active sets is worth its memory.
_ENTRIES = 1 << 24


class ActiveSystem(NamedTuple):
    r"""The systems :math:`(H_{SS} + \operatorname{diag}(e_S))u_S = v_S` on the active sets S of all samples, factored,
    and whether each of them could be."""

    groups: list["_Group"]
    solved: Tensor

    def solve(self, v: Tensor) -> Tensor:
        """u on the active sets, zero elsewhere."""
        u = torch.zeros_like(v)
        for group in self.groups:
            part = v[group.rows.unsqueeze(-1), group.active]
            part = torch.where(group.valid, part, 0.0)
            part = torch.cholesky_solve(part.unsqueeze(-1), group.factor).squeeze(-1)
            valid = group.valid & self.solved[group.rows].unsqueeze(-1)
            u.index_put_((group.rows.unsqueeze(-1), group.active), torch.where(valid, part, 0.0), accumulate=True)
        return u


class _Group(NamedTuple):
    """Samples with active sets of about the same size: their outputs, padded to one number; ``valid`` is false for
    padding."""

    rows: Tensor
    active: Tensor
    valid: Tensor
    factor: Tensor


def active_system(problem: Problem, active: Tensor, extra: Tensor, bend: Tensor | None) -> ActiveSystem | None:
    """The systems of active sets, or None where they are too large; ``bend`` is f″ for datafits other than squares."""
    matrix = problem.operator.matrix
    if matrix is None or matrix.dim() != 2 or active.dim() != 2:
        return None
    counts = active.sum(-1)
    size = int(counts.amax()) if active.numel() else 0
    rows, inputs = active.shape[0], matrix.shape[1]
    if not 0 < size <= 2 * inputs or rows * size * max(size, 1) > _ENTRIES:
        return None
    if bend is not None and rows * size * inputs > 4 * _ENTRIES:
        return None
    matrix, diagonal = matrix.detach(), extra + problem.ridge
    gram, place = _shared_gram(matrix, active) if rows > 1 and bend is None else (None, None)
    groups, solved = [], torch.ones_like(counts, dtype=torch.bool)
    # Padding to the next power of two takes at most twice the memory of the largest sets, and few groups.
    sizes = torch.where(counts > 0, 2 ** counts.clamp_min(4).double().log2().ceil().long(), 0)
    for width in set(sizes.tolist()) - {0}:
        which = (sizes == width).nonzero().squeeze(-1)
        index, valid = _listed(active[which], counts[which])
        if gram is not None and place is not None:
            spot = torch.where(valid, place[index], len(gram) - 1)
            hessian = gram[spot.unsqueeze(-1), spot.unsqueeze(-2)]
        else:
            part = torch.where(valid.unsqueeze(-1), matrix[index], 0.0)
            hessian = (part if bend is None else part * bend[which].unsqueeze(-2)) @ part.mT
        # Equal columns make the Hessian singular. A share of each entry keeps the small ones: curvatures of g beside
        # them may be thousands of times larger.
        own = hessian.diagonal(dim1=-2, dim2=-1)
        own.add_(torch.where(valid, diagonal[which].gather(-1, index), 1.0))
        own.mul_(1 + 4 * index.shape[-1] * torch.finfo(hessian.dtype).eps)
        factor, info = torch.linalg.cholesky_ex(hessian)
        if bool(info.any()):
            solved[which] = info == 0
            factor = torch.where(info[:, None, None] == 0, factor, torch.eye(len(factor[0])).to(factor))
        groups.append(_Group(which, index, valid, factor))
    return ActiveSystem(groups, solved)


def _listed(active: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """The active outputs of each sample, padded, and which of them are no padding."""
    column = active.nonzero(as_tuple=True)[1]
    valid = torch.arange(int(counts.amax()), device=active.device) < counts.unsqueeze(-1)
    index = torch.zeros_like(valid, dtype=torch.long)
    index[valid] = column
    return index, valid


def _shared_gram(matrix: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
    """The Gram matrix of the outputs that are active anywhere, with a last row and column of zeros for padding, and the
    place of each output in it."""
    anywhere = active.any(0)
    used = matrix[anywhere]
    gram = matrix.new_zeros(len(used) + 1, len(used) + 1)
    torch.mm(used, used.mT, out=gram[:-1, :-1])
    return gram, anywhere.cumsum(0) - 1


def prox_slope(problem: Problem, v: Tensor, step: Tensor | float) -> Tensor:
    """The derivative of a separable prox, entry by entry."""
    (slope,) = pullback(lambda v: problem.function.prox(v, step), v)(torch.ones_like(v))
    return torch.zeros_like(v) if slope is None else slope.detach()


@torch.no_grad()
def active_step(problem: Problem, state: "SpectralState", aim: Tensor, *, cheap: bool = False) -> Tensor:
    r"""A proximal gradient step from the Newton point of the fixed-point equation, or ``aim`` where there is none, or
    where it is not to be taken unless it is ``cheap``.

    With the slopes D of the prox at :math:`x - s\nabla f(x)` and the residual :math:`q = \mathrm{aim} - x`, the Newton
    step solves :math:`(I - D(I - sH))\Delta = q`: it is q where D = 0, and elsewhere

    .. math:: \bigl(H_{SS} + \operatorname{diag}\tfrac{1 - D}{sD}\bigr)\Delta_S = \tfrac{q_S}{sD_S} - (Hq_{\bar S})_S .
    """
    from .spectral import _curved, spread

    x = torch.zeros_like(aim) if state.x is None else state.x
    if not problem.function.separable or problem.operator.matrix is None or x.dim() != 2:
        return aim
    step = spread(problem, state.step)
    slope = prox_slope(problem, x + step * state.descent, step)
    active = slope > 1e-6
    # In a batch, small factorisations cost more than a few iterations.
    if cheap and len(x) > 1 and int(active.sum(-1).amax()) ** 3 > 2 * x.shape[-1] ** 2:
        return aim
    safe = torch.where(active, step * slope, 1.0)
    extra = torch.where(active, (1 - slope) / safe, 0.0)
    image = torch.zeros_like(problem.y) if state.image is None else state.image
    bend = None if problem.is_quadratic else problem.datafit.second(image, problem.y)
    system = active_system(problem, active, extra, bend)
    if system is None:
        return aim
    q = aim - x
    rest = torch.where(active, 0.0, q)
    target = torch.where(active, q / safe, 0.0)
    if bool(rest.any()):
        target = target - _curved(problem, state.image, rest, state.gram)
    move = torch.where(active, system.solve(target), rest)
    point = x + move
    descent = state.descent - _curved(problem, state.image, move, state.gram)
    found = problem.function.prox(point + step * descent, step)
    usable = system.solved & found.isfinite().all(-1)
    return torch.where(usable.unsqueeze(-1), found, aim)


def solved_on_active_set(
    problem: Problem,
    step: float | Tensor,
    x: Tensor,
    b: Tensor,
    transposed: bool,
    maps: tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]],
) -> Tensor | None:
    r"""The solution of :math:`(I - DC)u = b`, or of its transpose, by a factorisation on the outputs with
    :math:`D \ne 0`; None where they are too many. ``maps`` are :math:`C = I - \eta H` and D.

    Where D = 0 the solution is b, and elsewhere

    .. math:: \bigl(H_{SS} + \operatorname{diag}\tfrac{1 - D}{\eta D}\bigr)u_S
        = \tfrac{b_S}{\eta D_S} + \tfrac1\eta(Cb_{\bar S})_S .

    The transpose has :math:`u = b + Cw`, where :math:`w = D(I - CD)^{-1}b` solves :math:`(D^{-1} - C)w = b` on the
    active set.
    """
    contract, derivative = maps
    if is_traced(b) or transformed() or problem.operator.matrix is None or b.dim() != 2:
        return None
    slope = derivative(torch.ones_like(b))
    active = slope > 1e-6
    safe = torch.where(active, step * slope, 1.0)
    bend = None if problem.is_quadratic else problem.datafit.second(problem.operator.adjoint(x), problem.y)
    system = active_system(problem, active, torch.where(active, (1 - slope) / safe, 0.0), bend)
    if system is None or not bool(system.solved.all()):
        return None
    if transposed:
        return b + contract(system.solve(torch.where(active, b / step, 0.0)))
    rest = torch.where(active, 0.0, b)
    target = b / safe + (contract(rest) - rest) / step
    return torch.where(active, system.solve(torch.where(active, target, 0.0)), b)

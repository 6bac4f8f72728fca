r"""The Lasso of a small Gram matrix, solved exactly by a search for the signs of the solution."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .iterate import iterate

__all__ = ["Lasso", "sign_search"]

_STEPS, _BLOCK = 100, 20  # spectral steps before a search, at most, and between two looks at the point
_SETTLED = 0.05  # the share of the entries that are not zero of which fewer may change in a block
_POINTS = 8  # points on the way to an aim, at most

#: Entries with a sign, the minimiser among points with these signs, were they free to change, and their Gram matrix.
Aim = tuple[Tensor, Tensor, Tensor]


class Lasso(NamedTuple):
    r""":math:`\tfrac12\|A^\top x\|^2 + \tfrac\lambda2\|x\|^2 - c^\top x + \sum_i w_i|x_i|`."""

    matrix: Tensor
    ridge: float
    linear: Tensor
    weight: Tensor

    def product(self, x: Tensor) -> Tensor:
        """The Hessian times x."""
        bent = self.matrix @ (x @ self.matrix)
        return bent + self.ridge * x if self.ridge else bent

    def near(self, x: Tensor, close: Callable[[Tensor], bool]) -> tuple[Tensor, Tensor, bool]:
        """A point from which few signs change, its negative gradient, and whether it is ``close``: the steps of
        :class:`~minimand.solvers.Spectral` for one sample, which end once a factorisation on the entries that are not
        zero is cheaper, or these settle."""
        descent, before, done = self.linear - self.product(x), x != 0, False
        curved = float(descent @ self.product(descent))

        def ended(state: tuple[Tensor, Tensor, float], k: int) -> bool:
            nonlocal before, done
            if state[2] == 0 or k % _BLOCK:
                return state[2] == 0
            before, last, done = state[0] != 0, before, close(state[0])
            count = int(before.sum())
            settled = int((before ^ last).sum()) <= _SETTLED * count
            return done or settled or count**3 <= 2 * k * self.matrix.numel()

        begin = x, descent, float(descent @ descent) / curved if curved > 0 else 1.0
        x, descent, _ = iterate(self._stepped, begin, _STEPS, until=ended)[0]
        return x, descent, done

    def _stepped(self, state: tuple[Tensor, Tensor, float], k: int) -> tuple[Tensor, Tensor, float]:
        """The next point, negative gradient and length; the length is 0 where no step lowers the objective."""
        x, descent, step = state
        aim, room = x + step * descent, step * self.weight
        aim = aim - aim.clamp(-room, room)
        move = aim - x
        bent = self.product(move)
        slope, curved = float(descent @ move + self.weight @ (x.abs() - aim.abs())), float(move @ bent)
        if not (slope > 0 and curved > 0):
            return x, descent, 0.0
        share = min(1.8 * slope / curved, 1.0)
        return x + share * move, descent - share * bent, float(move @ move) / curved


@torch.no_grad()
def sign_search(gram: Tensor, linear: Tensor, weight: Tensor, x: Tensor) -> Tensor | None:
    r"""The minimiser of :math:`\tfrac12 x^\top Gx - c^\top x + \sum_i w_i|x_i|` from a start, or None.

    The signs :math:`\theta` of the entries that are not zero make the problem linear, :math:`G_{SS}u = c_S -
    w_S\theta_S`. The point moves to the best of u, of points on the way at which an entry becomes zero, and of these
    with all entries at zero that have changed their sign. Where u is reached, entries at zero whose gradient exceeds
    their weight by at least 3 % of the largest excess receive the sign of their descent; fewer where the system is
    then singular. One whose entry of u has another sign is taken back. The objective decreases in every step, so that
    no signs occur twice. None is returned where a factorisation fails or rounding stops the decrease.

    Source: Lee, Battle, Raina & Ng, *Efficient sparse coding algorithms*, 2006 (feature-sign search, one entry at a
    time).

    >>> sign_search(torch.eye(3), torch.tensor([3.0, 0.5, -2.0]), torch.ones(3), torch.zeros(3))
    tensor([ 2.,  0., -1.])
    """
    tol = 8 * len(x) * torch.finfo(x.dtype).eps * float(linear.abs().max())
    sign, settled = x.sign(), not bool(x.any())
    for _ in range(3 * len(x) + 50):
        tried = [sign]
        if settled:
            descent = linear - gram @ x
            over = torch.where(sign == 0, descent.abs() - weight, 0.0)
            worst = over.max()
            if float(worst) <= tol:
                return x
            # Many at a time, or fewer where many make the system singular.
            tried = [torch.where(over >= share * worst, descent.sign(), sign) for share in (0.03, 0.3, 1.0)]
        aims = (_aim(gram, linear, weight, x, each) for each in tried)
        moved = next((to for aim in aims if aim is not None and (to := _towards(linear, weight, x, aim))), None)
        if moved is None:
            return None
        x, settled = moved
        sign, settled = x.sign(), settled or not bool(x.any())
    return None


def _aim(gram: Tensor, linear: Tensor, weight: Tensor, x: Tensor, sign: Tensor) -> Aim | None:
    """The aim of some signs; None where the system is singular."""
    index = sign.nonzero().squeeze(-1)
    while len(index):
        part, aim = gram.index_select(0, index).index_select(1, index), x[index]
        # The share lets there be more entries than the rank; the second solve takes away its effect otherwise.
        shifted = part.clone()
        shifted.diagonal().mul_(1 + torch.finfo(part.dtype).eps ** (2 / 3))
        factor, info = torch.linalg.cholesky_ex(shifted)
        if int(info):
            return None
        target = linear[index] - weight[index] * sign[index]
        for _ in range(2):
            aim = aim + torch.cholesky_solve((target - part @ aim).unsqueeze(-1), factor).squeeze(-1)
        if not bool(aim.isfinite().all()):
            return None
        wrong = (x[index] == 0) & (aim * sign[index] <= 0)
        if not bool(wrong.any()):
            return index, aim, part
        index = index[~wrong]
    return None


def _towards(linear: Tensor, weight: Tensor, x: Tensor, aim: Aim) -> tuple[Tensor, bool] | None:
    """The best point on the way to an aim, and whether it is the aim; None where the objective does not decrease."""
    index, point, gram = aim
    here = x[index]
    crossing = torch.where(point * here < 0, here / (here - point), 1.0)
    shares = crossing.unique()
    shares = shares[shares < 1]
    # Every crossing would be a product as large as the factorisation. The first one always decreases the objective.
    if len(shares) > _POINTS:
        shares = shares[torch.linspace(0, len(shares) - 1, _POINTS).long()]
    share = torch.cat([shares.new_zeros(1), shares, shares.new_ones(1)]).unsqueeze(-1)
    points = here + share * (point - here)
    if len(shares):
        clipped = torch.where((crossing <= share[1:]) & (crossing < 1), 0.0, points[1:])
        points = torch.cat([torch.where((crossing == share) & (share < 1), 0.0, points), clipped])
    values = 0.5 * ((points @ gram) * points).sum(-1) - points @ linear[index] + points.abs() @ weight[index]
    best = int(values[1:].argmin()) + 1
    room = 1e-12 * values[0].abs() if not len(shares) else 0.0
    if not bool(values[best] <= values[0] + room):
        return None
    return torch.zeros_like(x).index_copy(0, index, points[best]), not len(shares)

r"""The Lasso of a small Gram matrix, solved exactly by a search for the signs of the solution."""

import torch
from torch import Tensor

__all__ = ["sign_search"]


@torch.no_grad()
def sign_search(gram: Tensor, linear: Tensor, weight: Tensor, x: Tensor) -> Tensor | None:
    r"""The minimiser of :math:`\tfrac12 x^\top Gx - c^\top x + \sum_i w_i|x_i|` from a start, or None.

    The signs :math:`\theta` of the entries that are not zero make the problem linear, :math:`G_{SS}u = c_S -
    w_S\theta_S`. The point moves to the best of u and of the points on the way at which an entry becomes zero. Where u
    is reached, entries at zero whose gradient exceeds their weight by at least half of the largest excess receive the
    sign of their descent, or that with the largest alone. One whose entry of u has another sign is taken back. The
    objective decreases in every step, so that no signs occur twice. None is returned where a factorisation fails or
    rounding stops the decrease.

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
            # Many at a time, or one where many make the system singular.
            tried = [torch.where(over >= share * worst, descent.sign(), sign) for share in (0.5, 1.0)]
        found = next((aim for each in tried if (aim := _aim(gram, linear, weight, x, each)) is not None), None)
        if found is None:
            return None
        x, settled = _towards(gram, linear, weight, x, *found)
        sign, settled = x.sign(), settled or not bool(x.any())
    return None


def _aim(gram: Tensor, linear: Tensor, weight: Tensor, x: Tensor, sign: Tensor) -> tuple[Tensor, Tensor] | None:
    """The entries with a sign, and the minimiser among points with these signs, were they free to change."""
    index = sign.nonzero().squeeze(-1)
    while len(index):
        factor, info = torch.linalg.cholesky_ex(gram[index][:, index])
        if int(info):
            return None
        target = linear[index] - weight[index] * sign[index]
        aim = torch.cholesky_solve(target.unsqueeze(-1), factor).squeeze(-1)
        if not bool(aim.isfinite().all()):
            return None
        wrong = (x[index] == 0) & (aim * sign[index] <= 0)
        if not bool(wrong.any()):
            return index, aim
        index = index[~wrong]
    return None


def _towards(
    gram: Tensor, linear: Tensor, weight: Tensor, x: Tensor, index: Tensor, aim: Tensor
) -> tuple[Tensor, bool]:
    """The best point on the way to ``aim``, and whether it is ``aim``."""
    here = x[index]
    crossing = torch.where(aim * here < 0, here / (here - aim), 1.0)
    shares = crossing.unique()
    if len(shares) == 1 and float(shares[0]) == 1:
        return torch.zeros_like(x).index_copy(0, index, aim), True
    shares = torch.cat([shares[shares < 1], shares.new_ones(1)])
    points = here + shares.unsqueeze(-1) * (aim - here)
    curved = 0.5 * ((points @ gram[index][:, index]) * points).sum(-1)
    best = int((curved - points @ linear[index] + points.abs() @ weight[index]).argmin())
    share = shares[best]
    point = torch.where((crossing == share) & (share < 1), 0.0, points[best])
    return torch.zeros_like(x).index_copy(0, index, point), False

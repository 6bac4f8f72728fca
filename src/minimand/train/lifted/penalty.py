"""Block coordinate descent on a penalty with separate pre-activations."""

from .split import SplitLifted

__all__ = ["BlockPenalty"]


class BlockPenalty(SplitLifted):
    r"""Block coordinate descent with split activations (Zeng, Lau, Lin, Yao 2018; [Lin2019], *penalty method*).

    .. math::

        \min_{W, X, U}\; \ell(U_n, Y) + \sum_k \frac{\mu_k}{2} \bigl( \|U_{k+1} - A_kX_k - b_k\|^2 +
        \|X_{k+1} - \varphi_k(U_{k+1})\|^2 \bigr)

    **Blocks.** The blocks of variables are minimised: :math:`U_n` by the prox of the loss, :math:`X_k` by a ridge
    regression, and each entry of :math:`U_k` as a problem in one variable. That problem has a closed form for ReLU and
    leaky ReLU; otherwise a refined grid minimises it to within a thousandth of its value. The
    weights take a proximal step: their change has a ridge of a tenth of the mean diagonal of the Gram matrix. So
    :meth:`step` never raises the objective. The problem in :math:`U` is not convex.

    **Optimality conditions**: :math:`(A_kX_k + b_k - U_{k+1})X_k^\top = 0` and
    :math:`U_{k+1} - A_kX_k - b_k = \varphi'(U_{k+1}) \circ (X_{k+1} - \varphi(U_{k+1}))`.

    **Variables carried**: activations and pre-activations, twice what SGD keeps.

    Args:
        model: A chain of Linear or Conv2d and monotone activations; trained in place.
        mu: As in :class:`LPOM`, but if it is None, :meth:`step` has :math:`\mu = 1` at the output and in every other
            layer a twentieth of the next layer's. A step makes ten sweeps.
        loss: ``"squared"`` or ``"cross_entropy"``.
        recipe: Options of the mini-batch mode.

    >>> import torch
    >>> from torch import nn
    >>> net = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1))
    >>> x, y = torch.randn(8, 2), torch.randn(8, 1)
    >>> method = BlockPenalty(net)
    >>> energies = [method.step(x, y) for _ in range(10)]
    >>> energies == sorted(energies, reverse=True)
    True
    """

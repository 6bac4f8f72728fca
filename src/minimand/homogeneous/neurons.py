"""Sets of ReLU neurons: pruning, balancing, merging, and local descent."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

from .losses import LOSSES, OutputLoss

__all__ = ["Neurons", "descend", "descend_in_cells", "merge_neurons", "prune_and_balance"]


class Neurons(NamedTuple):
    """Incoming weights (r × d, the bias last) and outgoing ones (r × C)."""

    W: Tensor
    V: Tensor


def prune_and_balance(neurons: Neurons, tol: float = 1e-10) -> Neurons:
    """Remove neurons of zero weight and balance the norms of the others; output and regulariser do not change."""
    W, V = neurons
    size = W.norm(dim=1) * V.norm(dim=1)
    kept = size > tol * float(size.max() if len(size) else 0.0)
    W, V, size = W[kept], V[kept], size[kept]
    return Neurons(
        W * (size.sqrt() / W.norm(dim=1)).unsqueeze(1),
        V * (size.sqrt() / V.norm(dim=1)).unsqueeze(1),
    )


def merge_neurons(X: Tensor, neurons: Neurons) -> Neurons:
    r"""Merge neurons that one neuron can replace without changing the output on X; the regulariser does not rise.

    For two neurons with the same direction w the outgoing weights add. For two neurons with the same direction v and
    the same active rows the incoming weights add, because :math:`D X w_1 + D X w_2 = D X (w_1 + w_2)`. By the triangle
    inequality the regulariser does not rise.
    """
    joined = _sum_by_key(neurons, [_key(w) for w in neurons.W], outgoing=True)
    before = joined.W @ X.mT
    active = before > 1e-9 * joined.W.norm(dim=1, keepdim=True) * X.norm(dim=1)
    keys = [_key(v) + row.numpy().tobytes() for v, row in zip(joined.V, active, strict=True)]
    return prune_and_balance(_sum_by_key(joined, keys, outgoing=False))


def _key(vector: Tensor) -> bytes:
    """A key that is equal for equal directions, up to rounding."""
    # Adding zero turns -0.0, whose bytes differ, into 0.0.
    return (np.round((vector / vector.norm()).numpy(), 9) + 0.0).tobytes()


def _sum_by_key(neurons: Neurons, keys: list[bytes], *, outgoing: bool) -> Neurons:
    """One neuron per key: the sum of the members' outgoing (or incoming) weights, and the common unit vector."""
    places: dict[bytes, int] = {}
    index = torch.tensor([places.setdefault(key, len(places)) for key in keys], dtype=torch.int64)
    own, other = (neurons.V, neurons.W) if outgoing else (neurons.W, neurons.V)
    norms = other.norm(dim=1, keepdim=True)
    total = own.new_zeros(len(places), own.shape[1]).index_add_(0, index, own * norms)
    unit = other.new_zeros(len(places), other.shape[1])
    unit[index] = other / norms
    return prune_and_balance(Neurons(unit, total) if outgoing else Neurons(total, unit))


# scipy's stubs have no overload for a function that returns value and gradient.
_minimize: Any = minimize
_Valued = Callable[[np.ndarray, np.ndarray], tuple[float, np.ndarray, np.ndarray]]
_Bounds = list[tuple[float | None, float | None]]


def _lbfgs(
    value: _Valued, first: np.ndarray, second: np.ndarray, bounds: _Bounds | None, iters: int
) -> tuple[np.ndarray, np.ndarray]:
    """A local minimum over two matrices; ``value`` returns the loss and the gradients."""
    if not first.size:
        return first, second

    def matrices(point: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return point[: first.size].reshape(first.shape), point[first.size :].reshape(len(first), -1)

    # scipy's tolerance is absolute below 1. Dividing by the initial value makes it relative.
    scale = max(value(first, second)[0], np.finfo(np.float64).tiny)

    def scaled(point: np.ndarray) -> tuple[float, np.ndarray]:
        loss, *gradients = value(*matrices(point))
        return loss / scale, np.concatenate([gradient.ravel() for gradient in gradients]) / scale

    start = np.concatenate([first.ravel(), second.ravel()])
    options = {"maxiter": iters, "maxcor": 30, "ftol": 1e-15, "gtol": 1e-9, "maxfun": 4 * iters}
    return matrices(_minimize(scaled, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options).x)


def descend(
    X: Tensor, Y: Tensor, neurons: Neurons, lam: float, iterations: int, loss: OutputLoss = LOSSES["squared"]
) -> Neurons:
    r"""A local minimum over all weights, by L-BFGS on :math:`\ell(f) + \tfrac\lambda2(\|W\|^2 + \|V\|^2)`.

    At balanced weights this equals the objective; elsewhere it is larger.
    """
    inputs, target = X.numpy(), Y.numpy()

    def value(W: np.ndarray, V: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
        before = inputs @ W.T
        hidden = np.maximum(before, 0)
        fit, error = loss.array(hidden @ V, target)
        to_W = ((error @ V.T) * (before > 0)).T @ inputs + lam * W
        to_V = hidden.T @ error + lam * V
        point = np.concatenate([W.ravel(), V.ravel()])
        return fit + 0.5 * lam * float(point @ point), to_W, to_V

    W, V = _lbfgs(value, neurons.W.numpy(), neurons.V.numpy(), None, iterations)
    return prune_and_balance(Neurons(torch.from_numpy(W.copy()), torch.from_numpy(V.copy())))


def descend_in_cells(
    X: Tensor, Y: Tensor, neurons: Neurons, lam: float, iterations: int, loss: OutputLoss = LOSSES["squared"]
) -> Neurons:
    r"""A local minimum over weights that stay in their cells, where the objective is smooth.

    Each neuron is :math:`w_i = \sum_k c_{ik} e_{ik}` with :math:`c \ge 0`. With two columns the :math:`e_{ik}` are the
    two ends of its arc (of both arcs, if it lies on their boundary), otherwise the neuron's own direction. Optimal
    neurons often lie exactly on a kink, around which descent over all weights zigzags.
    """
    cones, active, start, outgoing = (_planar_cells if X.shape[1] == 2 else _rays)(X, neurons)
    inputs, target = X.numpy(), Y.numpy()
    features = (cones @ inputs.T) * active[:, None, :]
    squares = cones @ cones.transpose(0, 2, 1)

    def value(c: np.ndarray, V: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
        hidden = (c[:, None, :] @ features)[:, 0].T
        fit, error = loss.array(hidden @ V, target)
        pull = (squares @ c[:, :, None])[:, :, 0]
        back = (features @ (V @ error.T)[:, :, None])[:, :, 0]
        total = fit + 0.5 * lam * float((c * pull).sum() + (V**2).sum())
        return total, back + lam * pull, hidden.T @ error + lam * V

    bounds: _Bounds = [(0.0, None)] * start.size + [(None, None)] * outgoing.size
    c, V = _lbfgs(value, start, outgoing, bounds, iterations)
    W = (c[:, None, :] @ cones)[:, 0]
    return prune_and_balance(Neurons(torch.from_numpy(W.copy()), torch.from_numpy(V.copy())))


def _rays(X: Tensor, neurons: Neurons) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Cells for more than two columns: every neuron on its own ray."""
    norms = neurons.W.norm(dim=1, keepdim=True)
    active = (neurons.W @ X.mT > 0).double()
    return (neurons.W / norms).unsqueeze(1).numpy(), active.numpy(), norms.numpy(), neurons.V.numpy()


def _planar_cells(X: Tensor, neurons: Neurons) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Cells for two columns: every neuron in its arc; on a boundary in both arcs, with half its weight in each."""
    center = torch.atan2(X[:, 1], X[:, 0])
    # The axes are added because the ends of an arc of half a circle are linearly dependent.
    axes = torch.arange(4, dtype=X.dtype) * (math.pi / 2)
    starts = torch.cat([center - math.pi / 2, center + math.pi / 2, axes]).remainder(2 * math.pi).unique()
    ends = torch.cat([starts[1:], starts[:1] + 2 * math.pi])
    angle = torch.atan2(neurons.W[:, 1], neurons.W[:, 0])
    ahead = (angle.unsqueeze(1) - starts).remainder(2 * math.pi)
    room = 1e-9
    inside = ((ahead <= ends - starts + room) | (ahead >= 2 * math.pi - room)) & (ends - starts > room)
    owner, arc = inside.nonzero(as_tuple=True)
    ray = torch.stack([torch.stack([a.cos(), a.sin()], 1) for a in (starts[arc], ends[arc])], 1)
    middle = (starts[arc] + ends[arc]) / 2
    active = torch.stack([middle.cos(), middle.sin()], 1) @ X.mT > 0
    share = inside.sum(1)[owner].double().sqrt().unsqueeze(1)
    c = torch.linalg.lstsq(ray.mT, (neurons.W[owner] / share).unsqueeze(2)).solution.squeeze(2).clamp_min(0.0)
    return ray.numpy(), active.double().numpy(), c.numpy(), (neurons.V[owner] / share).numpy()

"""The losses of lifted training as functions with a prox, and targets that fit them."""

import dataclasses
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import CapabilityError, OptionError, ShapeError, require_finite
from ...functions.base import Function, Step, check_step

__all__ = ["LOSSES", "CrossEntropy", "SquaredError", "encode_targets"]


@dataclasses.dataclass(frozen=True, eq=False)
class SquaredError(Function):
    r"""Half the squared distance :math:`\tfrac12\|x - t\|^2` from a target, summed over the batch.

    .. math:: \operatorname{prox}_{\eta\ell}(x) = (x + \eta t)/(1 + \eta)

    >>> SquaredError(torch.tensor([1.0])).prox(torch.tensor([3.0]), 1.0)
    tensor([2.])
    """

    target: Tensor

    def value(self, x: Tensor) -> Tensor:
        """The loss, summed."""
        return 0.5 * F.mse_loss(x, self.target, reduction="sum")

    def prox(self, x: Tensor, step: Step = 1.0) -> Tensor:
        """A weighted mean of the point and the target."""
        step = check_step(step, x)
        return (x + step * self.target) / (1 + step)

    def approximate_prox(self, x: Tensor, step: float) -> Tensor:
        """The same: it costs nothing."""
        return torch.add(x, self.target, alpha=step).div_(1 + step)


@dataclasses.dataclass(frozen=True, eq=False)
class CrossEntropy(Function):
    r"""The cross-entropy :math:`\log\sum_j e^{x_j}\,\sum_j t_j - \langle t, x\rangle`, summed over the batch.

    For a target that is a distribution this is :math:`-\sum_j t_j \log\operatorname{softmax}(x)_j`. Its prox has no
    closed form: with :math:`p = \operatorname{softmax}(x)` Newton's method per sample has the Hessian
    :math:`I + \eta(\operatorname{diag} p - pp^\top)`, which the Sherman–Morrison formula inverts. Steps are halved
    until the gradient shrinks, until it is at rounding level.

    >>> loss = CrossEntropy(torch.tensor([[1.0, 0.0]]))
    >>> x = loss.prox(torch.zeros(1, 2), 1.0)
    >>> torch.allclose(x + torch.softmax(x, 1), torch.tensor([[1.0, 0.0]]), atol=1e-6)
    True
    """

    target: Tensor

    def value(self, x: Tensor) -> Tensor:
        """The loss, summed."""
        return -(self.target * torch.log_softmax(x, -1)).sum()

    def gradient(self, x: Tensor) -> Tensor:
        """The gradient, softmax minus target for a distribution."""
        return torch.softmax(x, -1) * self.target.sum(-1, keepdim=True) - self.target

    def prox(self, x: Tensor, step: Step = 1.0) -> Tensor:
        """Newton's method per sample, converged."""
        step = check_step(step, x)
        mass = self.target.sum(-1, keepdim=True)
        point, best = x, self._residual(x, x, step)
        for _ in range(100):
            size = best.norm(dim=-1, keepdim=True)
            scale = 1 + x.norm(dim=-1, keepdim=True)
            if bool((size <= 4 * torch.finfo(x.dtype).eps * scale).all()):
                break
            p = torch.softmax(point, -1)
            diagonal = 1 + step * mass * p
            along = best / diagonal
            across = p / diagonal
            weight = step * mass / (1 - step * mass * (p * across).sum(-1, keepdim=True))
            direction = along + weight * across * (p * along).sum(-1, keepdim=True)
            length = torch.ones_like(size)
            trial, residual = point, best
            for _ in range(12):
                trial = point - length * direction
                residual = self._residual(trial, x, step)
                worse = residual.norm(dim=-1, keepdim=True) > size
                if not bool(worse.any()):
                    break
                length = torch.where(worse, 0.5 * length, length)
            better = residual.norm(dim=-1, keepdim=True) < size
            if not bool(better.any()):
                break
            point, best = torch.where(better, trial, point), torch.where(better, residual, best)
        return point

    def _residual(self, point: Tensor, x: Tensor, step: Step) -> Tensor:
        return point - x + step * self.gradient(point)

    def approximate_prox(self, x: Tensor, step: float) -> Tensor:
        """Three proximal steps with the gradient's Lipschitz constant ½ from ``x``, for noisy mini-batches."""
        share = 1.0 / (1.0 / step + 0.5)
        # Samples last: few classes in a row are too short for the vectors of a processor.
        point, target = (rows.mT.contiguous() for rows in (x, self.target))
        mass = target.sum(-2, keepdim=True)
        fixed = torch.add(target, point, alpha=1.0 / step).mul_(share)
        for _ in range(3):
            kept = torch.add(fixed, point, alpha=0.5 * share)
            point = kept.addcmul_(mass, torch.softmax(point, -2), value=-share)
        return point.mT.contiguous()


Loss = SquaredError | CrossEntropy

LOSSES: Mapping[str, Callable[[Tensor], Loss]] = {"squared": SquaredError, "cross_entropy": CrossEntropy}


def encode_targets(y: Tensor, output: Tensor, loss: str) -> Tensor:
    """Targets in the shape of the network's output: labels one-hot, numbers as they are.

    Raises:
        CapabilityError: If they are no tensor.
        ShapeError: If there are more or fewer targets than samples, or their width is another.
        OptionError: If a label is no class, or a target of the cross-entropy is negative.

    >>> encode_targets(torch.tensor([1]), torch.zeros(1, 3), "squared")
    tensor([[0., 1., 0.]])
    """
    samples, classes = output.shape
    if not isinstance(y, Tensor):
        raise CapabilityError(f"the target y must be a tensor, got a {type(y).__name__}; use torch.as_tensor(y)")
    if y.dtype == torch.bool or y.is_complex():
        raise OptionError(f"targets must be integer labels or floats, got {y.dtype}; convert them first")
    if y.is_floating_point():
        if y.shape != output.shape:
            raise ShapeError(
                f"float targets have shape {tuple(y.shape)}, but the network's output has {tuple(output.shape)}; "
                f"give one row of {classes} numbers per sample, or integer labels of shape ({samples},)"
            )
        require_finite("the target y", y)
        if loss == "cross_entropy" and bool((y < 0).any()):
            raise OptionError("targets of the cross-entropy must be ≥ 0, as probabilities are; use loss='squared'")
        return y.to(output)
    if y.shape != (samples,):
        raise ShapeError(
            f"integer labels must have shape ({samples},), one per sample of x, got {tuple(y.shape)}; "
            f"convert them to float if they are {classes} numbers per sample"
        )
    if output.device.type != "cpu":
        _check_labels(y, classes)
    try:
        return torch.zeros_like(output).scatter_(1, y.to(output.device, torch.long).unsqueeze(1), 1.0)
    except RuntimeError:
        # On a CPU the scatter looks for itself; elsewhere it would take the device down.
        _check_labels(y, classes)
        raise


def _check_labels(y: Tensor, classes: int) -> None:
    low, high = (int(end) for end in torch.aminmax(y)) if len(y) else (0, 0)
    if low < 0 or high >= classes:
        raise OptionError(f"labels lie in [{low}, {high}], but the network has the {classes} outputs 0 … {classes - 1}")

"""The losses of lifted training as functions with a prox, and the encoding of targets for them."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import CapabilityError, OptionError, ShapeError, require_finite, require_values
from ...functions.base import Function, Step, check_step
from ...solvers.iterate import iterate

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

    def gradient(self, x: Tensor) -> Tensor:
        """The gradient, x minus target."""
        return x - self.target

    def prox(self, x: Tensor, step: Step = 1.0) -> Tensor:
        """The weighted mean of the point and the target."""
        step = check_step(step, x)
        return (x + step * self.target) / (1 + step)

    def approximate_prox(self, x: Tensor, step: float) -> Tensor:
        """The prox itself, which has a closed form."""
        return torch.add(x, self.target, alpha=step).div_(1 + step)


class _NewtonState(NamedTuple):
    """A point, the gradient of the prox objective there, and whether the iteration has ended."""

    point: Tensor
    residual: Tensor
    done: bool


@dataclasses.dataclass(frozen=True, eq=False)
class CrossEntropy(Function):
    r"""The cross-entropy :math:`\log\sum_j e^{x_j}\,\sum_j t_j - \langle t, x\rangle`, summed over the batch.

    For a target that is a distribution this is :math:`-\sum_j t_j \log\operatorname{softmax}(x)_j`. Its prox has no
    closed form and is computed by Newton's method per sample. With :math:`p = \operatorname{softmax}(x)` the Hessian is
    :math:`I + \eta(\operatorname{diag} p - pp^\top)`, which the Sherman–Morrison formula inverts. A step is halved
    until the gradient shrinks. The iteration stops when the gradient is at rounding level.

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
        """The gradient; softmax minus target if the target is a distribution."""
        return torch.softmax(x, -1) * self.target.sum(-1, keepdim=True) - self.target

    def prox(self, x: Tensor, step: Step = 1.0) -> Tensor:
        """The prox by Newton's method per sample, to rounding."""
        step = check_step(step, x)
        mass = self.target.sum(-1, keepdim=True)
        least = 4 * torch.finfo(x.dtype).eps * (1 + x.norm(dim=-1, keepdim=True))

        def newton(state: _NewtonState, _: int) -> _NewtonState:
            point, best = state.point, state.residual
            size = best.norm(dim=-1, keepdim=True)
            if bool((size <= least).all()):
                return state._replace(done=True)
            p = torch.softmax(point, -1)
            diagonal = 1 + step * mass * p
            along = best / diagonal
            across = p / diagonal
            weight = step * mass / (1 - step * mass * (p * across).sum(-1, keepdim=True))
            direction = along + weight * across * (p * along).sum(-1, keepdim=True)
            trial, residual = self._halved(point, direction, x, step, size)
            better = residual.norm(dim=-1, keepdim=True) < size
            if not bool(better.any()):
                return state._replace(done=True)
            return _NewtonState(torch.where(better, trial, point), torch.where(better, residual, best), False)

        start = _NewtonState(x, self._residual(x, x, step), False)
        return iterate(newton, start, 100, until=lambda state, _: state.done)[0].point

    def _halved(self, point: Tensor, direction: Tensor, x: Tensor, step: Step, size: Tensor) -> tuple[Tensor, Tensor]:
        """A trial point along a direction and its residual; a sample's step is halved while its residual grows."""
        length = torch.ones_like(size)
        trial, residual = point, point
        for _ in range(12):
            trial = point - length * direction
            residual = self._residual(trial, x, step)
            worse = residual.norm(dim=-1, keepdim=True) > size
            if not bool(worse.any()):
                break
            length = torch.where(worse, 0.5 * length, length)
        return trial, residual

    def _residual(self, point: Tensor, x: Tensor, step: Step) -> Tensor:
        return point - x + step * self.gradient(point)

    def approximate_prox(self, x: Tensor, step: float) -> Tensor:
        """Three proximal gradient steps from ``x`` with the gradient's Lipschitz constant ½, for noisy mini-batches."""
        share = 1.0 / (1.0 / step + 0.5)
        # Samples last: rows of few classes are too short for vector instructions.
        point, target = (rows.mT.contiguous() for rows in (x, self.target))
        mass = target.sum(-2, keepdim=True)
        fixed = torch.add(target, point, alpha=1.0 / step).mul_(share)

        def proximal_step(point: Tensor, _: int) -> Tensor:
            kept = torch.add(fixed, point, alpha=0.5 * share)
            return kept.addcmul_(mass, torch.softmax(point, -2), value=-share)

        return iterate(proximal_step, point, 3)[0].mT.contiguous()


Loss = SquaredError | CrossEntropy

LOSSES: Mapping[str, Callable[[Tensor], Loss]] = {"squared": SquaredError, "cross_entropy": CrossEntropy}


def encode_targets(y: Tensor, output: Tensor, loss: str) -> Tensor:
    """Targets in the shape of the network's output: labels one-hot encoded, floats unchanged.

    Raises:
        CapabilityError: If the targets are not a tensor.
        ShapeError: If the number of targets or their width does not match the output.
        OptionError: If a label is out of range, or a target of the cross-entropy is negative.

    >>> encode_targets(torch.tensor([1]), torch.zeros(1, 3), "squared")
    tensor([[0., 1., 0.]])
    """
    samples, classes = output.shape
    if not isinstance(y, Tensor):
        raise CapabilityError(f"the target y must be a tensor, got a {type(y).__name__}; use torch.as_tensor(y)")
    require_values("the target y", y)
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
            raise OptionError(
                "targets of the cross-entropy must be ≥ 0 (probabilities); use loss='squared' for other targets"
            )
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
        # On a CPU the scatter checks its indices; on other devices a bad index is a fatal assertion.
        _check_labels(y, classes)
        raise


def _check_labels(y: Tensor, classes: int) -> None:
    low, high = (int(end) for end in torch.aminmax(y)) if len(y) else (0, 0)
    if low < 0 or high >= classes:
        raise OptionError(f"labels lie in [{low}, {high}], but the network has {classes} outputs, 0 … {classes - 1}")

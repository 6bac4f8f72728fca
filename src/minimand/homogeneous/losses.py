r"""Losses of a network's outputs: values, negative gradients, and the duality gap of a parallel network.

The problem is :math:`\min_f \ell(f) + \lambda\Omega(f)`. For :math:`R = -\nabla\ell(f)` whose polar is at most
:math:`\hat p`, every cR with :math:`0 \le c \le \lambda/\hat p` is dual feasible, and the objective is at least
:math:`-\ell^*(-cR)`.
"""

import abc
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from scipy.special import log_softmax
from torch import Tensor

from ..errors import OptionError, ShapeError
from ..solvers.iterate import iterate

__all__ = ["LOSSES", "EntropyOutputs", "OutputLoss", "SquaredOutputs"]

EPS = torch.finfo(torch.float64).eps
HALVINGS = 60


@dataclass(frozen=True)
class OutputLoss(abc.ABC):
    """A smooth convex loss of outputs, summed over samples."""

    #: The Lipschitz constant of the gradient.
    curvature: ClassVar[float]

    @abc.abstractmethod
    def value(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The loss."""

    @abc.abstractmethod
    def residual(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The negative gradient."""

    @abc.abstractmethod
    def array(self, outputs: np.ndarray, y: np.ndarray) -> tuple[float, np.ndarray]:
        """The value and the gradient for arrays."""

    @abc.abstractmethod
    def gap(self, Y: Tensor, R: Tensor, value: float, ratio: float, error: float) -> float:
        r"""A bound on the distance of the objective ``value`` to its minimum, from the residual R.

        Inputs are float64. ``ratio`` is :math:`\lambda/\hat p`; ``error`` bounds the norm of the rounding error of the
        outputs.
        """

    def targets(self, y: Tensor, outputs: Tensor) -> Tensor:
        """The targets in the shape, dtype and device of ``outputs``."""
        if outputs.shape != y.shape:
            raise ShapeError(
                f"the subnetworks give outputs of shape {tuple(outputs.shape)}, but y has {tuple(y.shape)}"
            )
        return y.to(outputs)


class SquaredOutputs(OutputLoss):
    r""":math:`\tfrac12\|y - f\|^2`, with the dual value :math:`c\langle Y, R\rangle - \tfrac12c^2\|R\|^2`."""

    curvature = 1.0

    def value(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Half the squared distance."""
        return 0.5 * (y - outputs).square().sum()

    def residual(self, outputs: Tensor, y: Tensor) -> Tensor:
        """``y − outputs``."""
        return y - outputs

    def array(self, outputs: np.ndarray, y: np.ndarray) -> tuple[float, np.ndarray]:
        """Half the squared distance and the difference."""
        error = outputs - y
        return 0.5 * float((error**2).sum()), error

    def gap(self, Y: Tensor, R: Tensor, value: float, ratio: float, error: float) -> float:
        """The gap at the best c, with a bound on the rounding error of both values, which are sums over Y."""
        inner, square = float((Y * R).sum()), float(R.square().sum())
        scale = max(min(inner / square if square > 0 else 0.0, ratio), 0.0)
        room = 4 * EPS * (Y.numel() + 8) * (float(Y.square().sum()) + value)
        room += error * (square**0.5 + error)
        return min(value + room, value - (scale * inner - 0.5 * scale**2 * square) + room)


class EntropyOutputs(OutputLoss):
    r"""The cross-entropy :math:`\sum_n \log\sum_c e^{f_{nc}} - \langle y_n, f_n\rangle` of rows y of probabilities.

    The dual value at cR, :math:`0 \le c \le 1`, is the entropy :math:`-\sum q\log q` of :math:`q = y - cR`, a mixture
    of the targets and of the predicted probabilities.
    """

    curvature = 0.5

    def value(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The cross-entropy, summed."""
        return -(y * outputs.log_softmax(-1)).sum()

    def residual(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The targets minus the predicted probabilities."""
        return y - outputs.softmax(-1)

    def array(self, outputs: np.ndarray, y: np.ndarray) -> tuple[float, np.ndarray]:
        """The cross-entropy and its gradient."""
        logs = log_softmax(outputs, axis=-1)
        return -float((y * logs).sum()), np.exp(logs) - y

    def gap(self, Y: Tensor, R: Tensor, value: float, ratio: float, error: float) -> float:
        """The gap at the best c, found by bisection on the slope of the entropy, which is concave in c."""
        top = max(min(ratio, 1.0), 0.0)

        def entropy(c: float) -> float:
            return float(-torch.special.xlogy(q := (Y - c * R).clamp_min(0), q).sum())

        def halve(ends: tuple[float, float], k: int) -> tuple[float, float]:
            low, high = ends
            middle = 0.5 * (low + high)
            slope = float((R * (Y - middle * R).clamp_min(1e-300).log()).sum())
            return (middle, high) if slope > 0 else (low, middle)

        (low, _), _ = iterate(halve, (0.0, top), HALVINGS)
        dual = max(entropy(0.0), entropy(low), entropy(top))
        room = 16 * EPS * (Y.numel() + 8) * (value + Y.numel()) + error * (float(R.norm()) + error)
        return value - dual + room

    def targets(self, y: Tensor, outputs: Tensor) -> Tensor:
        """Rows of probabilities, from labels or as they are."""
        if outputs.dim() != 2:
            raise ShapeError(f"cross-entropy needs outputs n_samples × n_classes, got shape {tuple(outputs.shape)}")
        classes = outputs.shape[1]
        if not y.is_floating_point() and y.shape == outputs.shape[:1]:
            if int(y.min()) < 0 or int(y.max()) >= classes:
                raise OptionError(f"labels must lie in 0 … {classes - 1}, got {int(y.min())} … {int(y.max())}")
            y = F.one_hot(y.long(), classes)
        y = super().targets(y, outputs)
        if bool((y < 0).any()) or not bool(((y.sum(1) - 1).abs() <= 1e-5).all()):
            raise OptionError("y must hold integer labels, or rows of probabilities with the sum one")
        return y / y.sum(1, keepdim=True)


LOSSES: dict[str, OutputLoss] = {"squared": SquaredOutputs(), "cross_entropy": EntropyOutputs()}

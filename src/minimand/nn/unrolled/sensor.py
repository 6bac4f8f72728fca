"""The measurement of a reconstruction network: a matrix of blocks, an operator on images, or another library's
physics."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import (
    CapabilityError,
    OptionError,
    ShapeError,
    require_constant,
    require_finite,
    require_real,
    require_values,
)
from ...functions.base import widened
from ...operators import BlockSensing, Dense, LinearOperator, as_operator, check_operator
from ...solvers.linear import conjugate_gradient
from ...tracing import is_traced
from .base import _ENERGY_SLACK, _energy
from .start import checked_start

__all__ = ["Sensor"]

# The start minimises ½‖Φx − y‖² + (ε/2)‖Φ‖²‖∇x‖² by this many conjugate gradient iterations.
_SMOOTHNESS = 0.01
_ROUNDS = 24


class Sensor(nn.Module):
    """Φ for measurements of any size, with checks, bounds and a linear start."""

    matrix: Tensor | None
    initial: Tensor | None

    def __init__(self, phi: Any, initial: Tensor | None) -> None:
        super().__init__()
        matrix = phi if isinstance(phi, Tensor) else phi.weight if isinstance(phi, Dense | BlockSensing) else None
        if isinstance(phi, Tensor) or (isinstance(phi, LinearOperator) and phi.has_weight):
            require_constant("phi", phi if isinstance(phi, Tensor) else phi.weight)
        self._given: Any = None
        self._known: dict[tuple[Any, ...], tuple[LinearOperator, float]] = {}
        self._seen: Tensor | None = None
        self._held: list[tuple[Tensor, int]] = []
        self._changes = 0
        if matrix is not None:
            require_real("phi", matrix)
            require_values("phi", matrix)
            require_finite("phi", matrix)
            if matrix.dim() != 2:
                raise ShapeError(
                    f"phi must be a matrix m × b² of square blocks, got a tensor of shape {tuple(matrix.shape)}"
                )
            side = math.isqrt(matrix.shape[1])
            BlockSensing(matrix, (side, side))
        elif isinstance(phi, LinearOperator) or not (hasattr(phi, "A") and hasattr(phi, "A_adjoint")):
            self._given = _on_images(phi if isinstance(phi, LinearOperator) else as_operator(phi))
        else:
            for parameter in phi.parameters() if isinstance(phi, nn.Module) else ():
                require_constant("a parameter of phi", parameter)
            # Not a submodule: a user's object is not trained, converted or saved with the network.
            object.__setattr__(self, "_given", phi)
        self.register_buffer("matrix", None if matrix is None else matrix.detach().clone())
        self.register_buffer(
            "initial", checked_start(initial, self.matrix, "other operators have a start of their own")
        )

    @property
    def channels(self) -> int | None:
        """The channels of the images; None if the first measurements decide."""
        if self.matrix is not None:
            return 1
        return self._given.input_shape[0] if isinstance(self._given, LinearOperator) else None

    @property
    def fixed(self) -> LinearOperator | None:
        """The operator if it does not depend on the size of the measurements."""
        if self.matrix is not None:
            side = math.isqrt(self.matrix.shape[1])
            return BlockSensing(self.matrix, (side, side))
        return self._given if isinstance(self._given, LinearOperator) else None

    def operator(self, y: Tensor) -> LinearOperator:
        """Φ for measurements of this size, as a batch."""
        if self.matrix is not None:
            side = math.isqrt(self.matrix.shape[1])
            return BlockSensing(self.matrix, (side * y.shape[-2], side * y.shape[-1]))
        if isinstance(self._given, LinearOperator):
            if self._given.has_weight and self._given.device != y.device:
                self._given = self._given.with_weight(self._given.weight.to(y.device))
            return self._given
        physics, probe = self._given, widened(y[:1])
        tensors = [*physics.parameters(), *physics.buffers()] if isinstance(physics, nn.Module) else []
        held = [(each, each._version) for each in tensors]
        if [(id(each), version) for each, version in held] != [(id(each), version) for each, version in self._held]:
            self._held, self._known, self._changes = held, {}, self._changes + 1
        key = (tuple(y.shape[1:]), probe.dtype)
        if key not in self._known:
            with torch.no_grad():
                back = physics.A_adjoint(probe)
            found = _on_images(as_operator(physics, back.shape[1:], y.shape[1:], dtype=probe.dtype))
            check_operator(found, trials=1)
            self._known[key] = (found, float(found.norm_sq()))
        return self._known[key][0]

    def changes(self) -> int:
        """How often the values of the matrix, or of the operator's weight, have changed. What was computed from
        earlier ones is forgotten."""
        fixed = self.fixed
        weight = None if fixed is None or not fixed.has_weight else fixed.weight.detach()
        if weight is not None and not is_traced(weight):
            seen = self._seen
            if seen is None or seen.dtype != weight.dtype or not torch.equal(seen.to(weight.device), weight):
                self._seen, self._changes = weight.clone(), self._changes + 1
                self._known.pop(("fixed",), None)
        return self._changes

    def norm_sq(self, operator: LinearOperator) -> float:
        """A bound on ‖Φ‖² for the present values; computed once for each size."""
        self.changes()
        fixed = self.fixed
        if fixed is not None:
            if ("fixed",) not in self._known:
                self._known[("fixed",)] = (fixed, float(fixed.norm_sq()))
            return self._known[("fixed",)][1]
        return next(bound for known, bound in self._known.values() if known is operator)

    def checked(self, y: Tensor) -> Tensor:
        """The measurements as a batch of operator outputs; raises if they do not fit."""
        if isinstance(y, Tensor) and y.is_complex():
            raise CapabilityError(
                "y is complex, but the network is real; pass real and imaginary parts as channels, for example "
                "torch.view_as_real(y).movedim(-1, 1)"
            )
        require_real("y", y)
        if self.matrix is not None:
            rows = self.matrix.shape[0]
            if y.dim() not in (2, 4) or y.shape[1] != rows:
                raise ShapeError(
                    f"phi has {rows} rows, so y needs shape (B, {rows}) for blocks or (B, {rows}, h, w) for whole "
                    f"images; got {tuple(y.shape)}"
                )
            y = y if y.dim() == 4 else y[:, :, None, None]
            if y.dtype != self.matrix.dtype:
                raise OptionError(f"y is {y.dtype} and phi {self.matrix.dtype}; convert one of them")
        elif isinstance(self._given, LinearOperator):
            shape = self._given.output_shape
            if y.dim() != len(shape) + 1 or tuple(y.shape[1:]) != shape:
                raise ShapeError(
                    f"this network takes measurements of shape (B, {', '.join(map(str, shape))}), got "
                    f"{tuple(y.shape)}; for images of another size use net.using(operator)"
                )
            if self._given.has_weight and y.dtype != self._given.dtype:
                raise OptionError(f"y is {y.dtype} and the operator {self._given.dtype}; convert one of them")
        require_finite("y", y)
        return y

    def check_energy(self, operator: LinearOperator, y: Tensor) -> None:
        """Raise for measurements of bytes."""
        if is_traced(y):
            return
        energy, most = _energy(widened(y)), _ENERGY_SLACK * math.prod(operator.input_shape) * self.norm_sq(operator)
        if energy > most:
            raise OptionError(
                f"y has energy {energy:.3g}, too large for pixels in [0, 1]; divide the images by their largest "
                f"value, 255 for bytes, before measuring"
            )

    def shaped(self, x: Tensor, y: Tensor) -> Tensor:
        """Images in the type of the measurements; as rows if these are rows of blocks."""
        x = x.to(y.dtype)
        return x.flatten(1) if self.matrix is not None and y.dim() == 2 else x

    def start(self, operator: LinearOperator, y: Tensor) -> Tensor:
        r"""The linear start: :math:`Qy` with a matrix ``initial``, else the solution of
        :math:`\min_x \tfrac12\|\Phi x - y\|^2 + \tfrac\varepsilon2\|\Phi\|^2\|\nabla x\|^2`, by conjugate gradients."""
        if self.initial is not None:
            height, width = operator.input_shape[-2:]
            return BlockSensing(self.initial.mT.to(y.dtype), (height, width)).adjoint(y)
        smooth = _SMOOTHNESS * self.norm_sq(operator)

        def system(x: Tensor) -> Tensor:
            return operator.adjoint(operator.apply(x)) + smooth * _laplacian(x)

        return conjugate_gradient(system, operator.adjoint(y), _ROUNDS, sample_dims=3)


def _on_images(operator: LinearOperator) -> LinearOperator:
    if len(operator.input_shape) != 3:
        raise ShapeError(
            f"phi must take images of shape (C, H, W), but this {type(operator).__name__} takes "
            f"{operator.input_shape}; use as_operator(phi, input_shape=(C, H, W))"
        )
    return operator


def _laplacian(x: Tensor) -> Tensor:
    """DᵀDx for differences D of neighbours, with free borders."""
    total = torch.zeros_like(x)
    for dim in (-2, -1):
        change = x.diff(dim=dim)
        zero = torch.zeros_like(x.narrow(dim, 0, 1))
        total = total - torch.cat([change, zero], dim) + torch.cat([zero, change], dim)
    return total

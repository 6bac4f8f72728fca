"""A linear operator from two callables."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..arguments import checked
from ..errors import CapabilityError, ShapeError, require_positive
from ..norms import randomized_norm_sq
from ..norms.randomized import Map
from ..tracing import is_traced, varies
from .base import LinearOperator

__all__ = ["CallableOperator", "LinearMap", "operator", "real"]

Norm = float | Tensor | Callable[[], float | Tensor]


@checked
def operator(
    apply: Map,
    adjoint: Map,
    input_shape: Sequence[int],
    output_shape: Sequence[int],
    norm_sq: Norm | None = None,
    *,
    input_norms_sq: Norm | None = None,
    output_norms_sq: Norm | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    generator: torch.Generator | None = None,
) -> "CallableOperator":
    r"""The linear operator :math:`A` of a map and its adjoint.

    Gradients reach the tensors that the callables capture. A callable that hides its derivative, such as one that calls
    NumPy, is differentiated by the other one. :func:`~minimand.operators.check_operator` tests whether
    ``adjoint`` is the adjoint of ``apply``.

    Args:
        apply: :math:`y \mapsto Ay`, on batches: ``(batch, *input_shape)`` to ``(batch, *output_shape)``.
        adjoint: :math:`x \mapsto A^\top x`, on batches.
        input_shape: The shape of one input sample.
        output_shape: The shape of one output sample.
        norm_sq: An upper bound on :math:`\|A\|^2`, or a callable that returns one. None: the bound of
            :func:`~minimand.norms.randomized_norm_sq`, which every solve computes anew and which fails with probability
            at most :math:`10^{-10}`.
        input_norms_sq: Bounds on the squared norm of A on each input feature, one number or one per feature (the
            first dimension of a sample). Given these or ``output_norms_sq``, stochastic solvers take the operator.
        output_norms_sq: The same for the output features. None: the bound of the whole operator.
        dtype: The type in which the bound is computed if the callables do not take float64; default: torch's.
        device: The device of the captured tensors; default: torch's.
        generator: The source of randomness of the bound; default: a fixed seed.

    >>> blur = operator(lambda y: (y + y.roll(1, -1)) / 2, lambda x: (x + x.roll(-1, -1)) / 2, (8,), (8,))
    >>> blur.apply(torch.arange(8.0)), bool(1 <= blur.norm_sq() < 1.001)
    (tensor([3.5000, 0.5000, 1.5000, 2.5000, 3.5000, 4.5000, 5.5000, 6.5000]), True)
    """
    norms, types = (norm_sq, input_norms_sq, output_norms_sq), {"dtype": dtype, "device": device}
    return CallableOperator((apply, adjoint), (input_shape, output_shape), norms, generator, **types)


class CallableOperator(LinearOperator):
    """The operator that :func:`operator` returns."""

    def __init__(
        self,
        maps: tuple[Map, Map],
        shapes: Any,
        norms: tuple[Any, ...],
        generator: torch.Generator | None,
        **types: Any,
    ) -> None:
        super().__init__(*shapes, **types)
        apply, adjoint = maps
        if not callable(apply) or not callable(adjoint):
            raise CapabilityError(
                f"operator takes two callables, got {type(apply).__name__} and {type(adjoint).__name__}; "
                f"a matrix is Dense(matrix)"
            )
        if isinstance(norms[0], int | float):
            require_positive("norm_sq", norms[0], zero=True)
        self._apply, self._adjoint = apply, adjoint
        self._norms = norms
        self._generator = generator

    @property
    def sampled(self) -> bool:
        """Whether bounds per input or output feature were given."""
        return self._norms[1] is not None or self._norms[2] is not None

    def apply(self, y: Tensor) -> Tensor:
        """``A y``."""
        self.check_input(y)
        return self._product("apply", y)

    def adjoint(self, x: Tensor) -> Tensor:
        """``Aᵀ x``."""
        self.check_output(x)
        return self._product("adjoint", x)

    def _product(self, name: str, x: Tensor) -> Tensor:
        """The product with leading dimensions flattened to one, in the type of ``x``. Where the callable hides its
        derivative, as one that NumPy computes, this is the other map."""
        maps, shapes = [(self._apply, self.apply), (self._adjoint, self.adjoint)], [self.input_shape, self.output_shape]
        if name == "adjoint":
            maps, shapes = maps[::-1], shapes[::-1]
        (product, again), (_, back) = maps
        lead = x.shape[: x.dim() - len(shapes[0])]
        result = real(f"{name} of this operator", product(x.reshape(-1, *shapes[0])))
        if result.shape != (lead.numel(), *shapes[1]):
            raise ShapeError(
                f"{name} of this operator returned shape {tuple(result.shape)} for a batch of {lead.numel()} samples; "
                f"expected {(lead.numel(), *shapes[1])}"
            )
        result = result.to(x.dtype).reshape(*lead, *shapes[1])
        if is_traced(x) or not varies(x) or varies(result):
            return result
        found: Tensor = LinearMap.apply(x, lambda _: result.clone(), again, back)
        return found

    def bound(self) -> Tensor | float:
        r"""The given bound on :math:`\|A\|^2`, else the randomised one."""
        given = _value(self._norms[0])
        if given is not None:
            return given
        shapes, options = (self.input_shape, self.output_shape), self._type
        return randomized_norm_sq(
            self._apply, self._adjoint, *shapes, dtype=options[0], device=options[1], generator=self._generator
        )

    def input_bounds(self) -> Tensor:
        """The given bounds, else that of the whole operator for each input."""
        return self._parts(self._norms[1], "input_norms_sq", self.inputs)

    def output_bounds(self) -> Tensor:
        """The given bounds, else that of the whole operator for each output."""
        return self._parts(self._norms[2], "output_norms_sq", self.outputs)

    def _parts(self, norm: Norm | None, name: str, features: int) -> Tensor:
        given = _value(norm)
        bounds = self._constant(self.norm_sq() if given is None else given)
        if bounds.shape not in ((), (features,)):
            raise ShapeError(f"{name} holds one number or {features}, one per feature; got {tuple(bounds.shape)}")
        return bounds.expand(features)


def _value(norm: Norm | None) -> float | Tensor | None:
    return norm() if callable(norm) else norm


def real(name: str, result: Any) -> Tensor:
    """The result of a user's map, or an error if it is no real tensor."""
    if isinstance(result, Tensor) and not result.is_complex():
        return result
    kind = "complex numbers" if isinstance(result, Tensor) else f"a {type(result).__name__}"
    raise CapabilityError(
        f"{name} returns {kind}, but samples are real tensors; return real and imaginary parts as channels "
        f"(torch.view_as_real)"
    )


class LinearMap(torch.autograd.Function):
    """The linear map ``eager`` of batches; its derivatives are ``again``, the same map, and ``back``, its adjoint."""

    @staticmethod
    def forward(x: Tensor, eager: Map, again: Map, back: Map) -> Tensor:
        """The product."""
        return eager(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep the maps."""
        ctx.maps = inputs[2:]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """The adjoint."""
        return ctx.maps[1](grad), None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:
        """The map of the tangent."""
        return ctx.maps[0](tangent)

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], x: Tensor, eager: Map, again: Map, back: Map) -> Any:
        """Batches of batches as one."""
        lead = x.movedim(dims[0] or 0, 0)
        return again(lead.flatten(0, 1)).unflatten(0, lead.shape[:2]), 0

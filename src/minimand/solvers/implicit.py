r"""Solutions of equations, differentiated any number of times by the implicit function theorem.

A solution of :math:`F(x, \theta) = 0` has :math:`dx = (-\partial_x F)^{-1}\,\partial_\theta F\,d\theta`. The linear
system of a derivative is an equation again, whose solution is differentiated in the same way.
"""

import abc
import contextlib
import copy
import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple

import torch
import torch.autograd.forward_ad as forward_mode
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from ..errors import CapabilityError
from ..functions.base import Function
from ..operators.base import LinearOperator
from ..tracing import (
    alive,
    constant,
    forward_rule,
    in_transform,
    is_compiled,
    is_constant,
    pullback,
    tangent_of,
    varies,
)

__all__ = ["Equation", "Parts", "attached", "full_precision", "transformed"]


def full_precision(like: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Turns autocast off; where it is off already, an exported graph has no trace of it."""
    kind = like.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else contextlib.nullcontext()


def transformed() -> bool:
    """Whether a transform of torch.func or a level of forward mode is active."""
    return in_transform() or forward_mode._current_level >= 0


class Parts(NamedTuple):
    """An object and the tensors that it holds, which can be replaced; whether it may hold more, because callables and
    objects of the user's own may capture tensors; and whether tensors in half precision can be cast to single."""

    whole: Any
    tensors: tuple[Tensor, ...]
    opaque: bool
    cast: bool

    @classmethod
    def of(cls, whole: Any) -> "Parts":
        """The parts of an operator, a function, a problem, or a tuple of them."""
        found: dict[int, Tensor] = {}
        opaque: list[Any] = []
        _replaced(whole, lambda tensor: found.setdefault(id(tensor), tensor), opaque)
        tensors = tuple(found.values())
        # Callables that capture tensors in half precision take no others, unless autocast converted them.
        return cls(whole, tensors, bool(opaque), not opaque or torch.is_autocast_enabled(tensors[0].device.type))

    def wide(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Tensors in single or double precision, where the object can be evaluated so."""
        half = (torch.bfloat16, torch.float16)
        return tuple(each.float() if self.cast and each.dtype in half else each for each in tensors)

    def build(self, tensors: Sequence[Tensor]) -> Any:
        """The object with other tensors."""
        table = {id(old): new for old, new in zip(self.tensors, tensors, strict=True)}
        return _replaced(self.whole, lambda tensor: table[id(tensor)], [])


def _replaced(node: Any, swap: Callable[[Tensor], Tensor], opaque: list[Any]) -> Any:
    """A copy of ``node`` with every tensor in it swapped; ``opaque`` collects what cannot be looked into."""
    if isinstance(node, Tensor):
        return swap(node)
    if isinstance(node, tuple | list):
        items = [_replaced(item, swap, opaque) for item in node]
        return type(node)(*items) if hasattr(node, "_fields") else type(node)(items)
    if isinstance(node, LinearOperator | Function) or (dataclasses.is_dataclass(node) and not isinstance(node, type)):
        if not type(node).__module__.startswith("minimand."):
            opaque.append(node)
        other = copy.copy(node)
        other.__dict__.update({name: _replaced(value, swap, opaque) for name, value in vars(node).items()})
        return other
    if callable(node) and not _captures_nothing(node):
        opaque.append(node)
    return node


def _captures_nothing(function: Callable[..., Any]) -> bool:
    """Whether a callable is known to use its arguments only: a plain function of the library or of torch."""
    if isinstance(function, partial):
        values = *function.args, *function.keywords.values()
        return _captures_nothing(function.func) and not any(isinstance(value, Tensor) for value in values)
    if isinstance(function, FunctionType):
        return function.__closure__ is None and function.__module__.startswith(("minimand.", "torch"))
    return isinstance(function, type) or (
        isinstance(function, BuiltinFunctionType) and not isinstance(function.__self__, Tensor)
    )


class Equation(abc.ABC):
    r"""An equation :math:`F(x, \theta) = 0` and the linear systems of its derivative :math:`-\partial_x F`."""

    @abc.abstractmethod
    def residual(self, x: Tensor, *params: Tensor) -> Tensor:
        r""":math:`F(x, \theta)`."""

    @abc.abstractmethod
    def product(self, u: Tensor, transposed: bool, x: Tensor, *params: Tensor) -> Tensor:
        r""":math:`-\partial_x F\,u`, or the product with the transpose; differentiable."""

    @abc.abstractmethod
    def inverse(self, b: Tensor, transposed: bool, x: Tensor, *params: Tensor) -> Tensor:
        """The solution of ``product(u) = b``, which is never differentiated."""

    def solve(self, b: Tensor, transposed: bool, x: Tensor, *params: Tensor) -> Tensor:
        """:meth:`inverse`, differentiable in everything."""
        with constant():
            u = self.inverse(b, transposed, x, *params)
        return solution(_Linearized(self, transposed), u, b, x, *params)


@dataclasses.dataclass(frozen=True)
class _Linearized(Equation):
    """The linear system ``b = product(u)``, with the parameters b, x and θ."""

    base: Equation
    transposed: bool

    def residual(self, x: Tensor, *params: Tensor) -> Tensor:
        return params[0] - self.base.product(x, self.transposed, *params[1:])

    def product(self, u: Tensor, transposed: bool, x: Tensor, *params: Tensor) -> Tensor:
        return self.base.product(u, self.transposed != transposed, *params[1:])

    def inverse(self, b: Tensor, transposed: bool, x: Tensor, *params: Tensor) -> Tensor:
        return self.base.inverse(b, self.transposed != transposed, *params[1:])


def attached(equation: Equation, x: Tensor, parts: Parts) -> Tensor:
    """``x``, which was computed as a constant, with its derivatives in the tensors of its equation."""
    if not is_dynamo_compiling() and is_constant():
        # Custom functions under torch.func turn gradients on again for the outer derivatives.
        return x
    with full_precision(x):
        if not is_compiled(x):
            if not parts.opaque or not _captures(equation, x, parts):
                return solution(equation, x, *parts.tensors)
            if transformed():
                raise CapabilityError(f"a derivative by torch.func or in forward mode {_MISSED}")
        # The gradient alone, which reaches every tensor that the residual depends on.
        constants = (each.detach() for each in (x, *parts.tensors))
        return x + _Correction.apply(equation, equation.residual(x, *parts.tensors), *constants)


def solution(equation: Equation, x: Tensor, *params: Tensor) -> Tensor:
    """``x`` with its derivatives in ``params``."""
    return _Solution.apply(equation, x, *params) if any(map(varies, params)) else x


_MISSED = (
    "would miss tensors that a callable of this problem captures; use ProxGD or FISTA with Unroll, or a LinearOperator "
    "or Function that holds its tensors as attributes"
)


def _captures(equation: Equation, x: Tensor, parts: Parts) -> bool:
    """Whether the residual depends on a tensor that is not among the parts."""
    known = torch._C._functorch
    with constant():
        bare = [_bare(each) for each in (x, *parts.tensors)]
    with torch.enable_grad():
        result, batched = equation.residual(*(each.detach() for each in bare)), False
    while known.is_functorch_wrapped_tensor(result):
        batched = batched or known.is_batchedtensor(result)
        if known.is_gradtrackingtensor(result) and _varies_here(result):
            return True
        result = known.get_unwrapped(result)
    levels = {level.key() for level in known.get_interpreter_stack() or ()} - {known.TransformType.Vmap}
    return _varies_here(result) or (batched and bool(levels or any(each.requires_grad for each in bare)))


def _bare(tensor: Tensor) -> Tensor:
    """The numbers of a tensor without the wrappers of torch.func; one sample of a batch that ``vmap`` hides."""
    known = torch._C._functorch
    while known.is_functorch_wrapped_tensor(tensor):
        dim, tensor = known.maybe_get_bdim(tensor), known.get_unwrapped(tensor)
        tensor = tensor if dim < 0 else tensor.select(dim, 0)
    return tensor


def _varies_here(tensor: Tensor) -> bool:
    return (tensor.requires_grad and torch.is_grad_enabled()) or tangent_of(tensor) is not None


class _Correction(torch.autograd.Function):
    """The correction (−∂ₓF)⁻¹F of a solution, which is zero; its gradient takes one linear system."""

    @staticmethod
    def forward(ctx: Any, equation: Equation, residual: Tensor, x: Tensor, *params: Tensor) -> Tensor:
        ctx.equation = equation
        ctx.save_for_backward(x, *params)
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and not is_compiled(grad):
            raise CapabilityError(f"a second derivative {_MISSED}")
        x, *params = alive(ctx.saved_tensors)
        with full_precision(x):
            u = ctx.equation.inverse(grad, True, x, *params)
        return None, u, None, *(None for _ in params)


class _Solution(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(equation: Equation, x: Tensor, *params: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.equation, _, *params = inputs
        ctx.save_for_backward(output, *params)
        ctx.save_for_forward(output, *params)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *params = saved = alive(ctx.saved_tensors)
        wanted = [k for k, needed in enumerate(ctx.needs_input_grad[1:]) if needed]
        with full_precision(x):
            u = ctx.equation.solve(grad, True, x, *params)
            pull = pullback(_of(ctx.equation.residual, saved, wanted), *(saved[k] for k in wanted))
            found = dict(zip(wanted, pull(u), strict=True))
        return None, *(found.get(k) for k in range(len(saved)))

    @forward_rule
    def jvp(ctx: Any, saved: list[Tensor], _: None, __: Tensor | None, *tangents: Tensor | None) -> Tensor:
        x, *params = saved
        with full_precision(x):
            change = pushforward(ctx.equation.residual, (x, *params), (None, *tangents))
            return ctx.equation.solve(change, False, x, *params).to(x.dtype)


def pushforward(f: Callable[..., Tensor], primals: tuple[Tensor, ...], tangents: tuple[Tensor | None, ...]) -> Tensor:
    """The Jacobian–vector product of ``f``; None is a zero tangent."""
    moving = [k for k, tangent in enumerate(tangents) if tangent is not None]
    along = _of(f, primals, moving)
    # A gradient of equal numbers shares memory, to which torch would write a tangent.
    at, change = tuple(primals[k].contiguous() for k in moving), tuple(tangents[k] for k in moving)
    if in_transform() or forward_mode._current_level < 0:
        return torch.func.jvp(along, at, change)[1]
    # torch.func.jvp refuses to begin in a level of forward mode that the user has opened.
    moved = along(*map(forward_mode.make_dual, at, change))
    tangent = forward_mode.unpack_dual(moved).tangent
    return torch.zeros_like(moved) if tangent is None else tangent


def _of(f: Callable[..., Tensor], arguments: Sequence[Tensor], places: list[int]) -> Callable[..., Tensor]:
    """``f`` as a function of some of its arguments."""

    def partially(*some: Tensor) -> Tensor:
        values = dict(zip(places, some, strict=True))
        return f(*(values.get(k, each) for k, each in enumerate(arguments)))

    return partially

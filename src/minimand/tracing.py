"""What torch does with a tensor: compiles, traces, batches or differentiates it."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.autograd.forward_ad as forward_mode
from torch import Tensor
from torch._C import _len_torch_dispatch_stack as _modes
from torch._C._functorch import is_functorch_wrapped_tensor as _is_wrapped
from torch._C._functorch import is_legacy_batchedtensor as _is_batched
from torch._subclasses import FakeTensor
from torch.compiler import is_compiling, is_dynamo_compiling, is_exporting

__all__: list[str] = []

_BLOCKS = threading.local()


def is_compiled(tensor: Tensor) -> bool:
    """Whether the tensor belongs to a graph that is compiled or exported in this thread, or has no values at all."""
    if is_dynamo_compiling():
        return True
    # The flag is one for all threads; the modes by which an exporter traces are the thread's own.
    return tensor.is_meta or type(tensor) is FakeTensor or (_modes() > 0 and is_compiling())


def is_traced(tensor: Tensor) -> bool:
    """Whether Python cannot branch on the tensor's values: :func:`is_compiled`, torch.func or ``is_grads_batched``."""
    return is_compiled(tensor) or _is_wrapped(tensor) or _is_batched(tensor)


def in_transform() -> bool:
    """Whether a transform of torch.func is active. It refuses some custom functions and writes of tensors that it does
    not wrap, too."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def unwrapped(tensor: Tensor, *, batches: bool = False) -> Tensor:
    """The tensor without the wrappers of torch.func's derivatives; with ``batches`` also without those of ``vmap``."""
    known = torch._C._functorch
    wraps = known.is_functorch_wrapped_tensor if batches else known.is_gradtrackingtensor
    while not is_dynamo_compiling() and wraps(tensor):
        tensor = known.get_unwrapped(tensor)
    return tensor


def holds(condition: Tensor) -> bool:
    """Whether a condition holds in every entry, those that ``vmap`` hides included; False where Python cannot know."""
    hidden = is_compiled(condition) or _is_batched(condition)
    return not hidden and bool(unwrapped(condition, batches=True).all())


def always(condition: bool) -> bool:
    """A condition on sizes. While exporting, whether it holds for every size that the program will accept."""
    if not is_exporting():
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


def exporting_to_onnx() -> bool:
    """Whether ``torch.onnx.export`` traces now."""
    return is_exporting() and not is_dynamo_compiling() and torch.onnx.is_in_onnx_export()


def forward_rule(jvp: Callable[..., Tensor]) -> Any:
    """The forward-mode rule ``jvp(ctx, saved, *tangents)`` of a custom function. torch calls it with forward mode off,
    which makes second derivatives zero. Here it is on, and saved tensors have lost the tangents of this level."""

    def rule(ctx: Any, *tangents: Tensor | None) -> Tensor:
        with forward_mode._set_fwd_grad_enabled(True):
            return jvp(ctx, [_primal(each) for each in ctx.saved_tensors], *tangents)

    return staticmethod(rule)


def _primal(tensor: Tensor) -> Tensor:
    known = torch._C._functorch
    if known.is_legacy_batchedtensor(tensor):
        return tensor
    if known.is_batchedtensor(tensor):
        # torch has no rule for a batch of dual numbers.
        dim, level = known.maybe_get_bdim(tensor), known.maybe_get_level(tensor)
        return known._add_batch_dim(_primal(known.get_unwrapped(tensor)), dim, level)
    return forward_mode.unpack_dual(tensor).primal


def alive(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors without the wrappers of transforms that have ended, as where the function that ``torch.func.vjp``
    returns is called: derivatives in the wrappers would be lost."""
    return [each if is_dynamo_compiling() else torch._C._functorch.unwrap_if_dead(each) for each in tensors]


def varies(tensor: Tensor) -> bool:
    """Whether a derivative in the tensor may be asked for, or each sample of a ``vmap`` has its own."""
    if is_dynamo_compiling():
        return tensor.requires_grad
    return _is_wrapped(tensor) or (tensor.requires_grad and torch.is_grad_enabled()) or tangent_of(tensor) is not None


def tangent_of(tensor: Tensor) -> Tensor | None:
    """The tangent of the tensor in forward mode."""
    return None if _is_batched(tensor) else forward_mode.unpack_dual(tensor).tangent  # a batch's was taken before


@contextlib.contextmanager
def constant() -> Iterator[None]:
    """A block whose results are constants for every derivative (``no_grad`` alone leaves those in forward mode)."""
    with torch.no_grad(), forward_mode._set_fwd_grad_enabled(False):
        if is_dynamo_compiling():
            yield
            return
        _BLOCKS.depth = getattr(_BLOCKS, "depth", 0) + 1
        try:
            yield
        finally:
            _BLOCKS.depth -= 1


def is_constant() -> bool:
    """Whether this call is inside of a block of constants, in this thread."""
    return getattr(_BLOCKS, "depth", 0) > 0


def pullback(f: Callable[..., Tensor], *primals: Tensor) -> Callable[[Tensor], tuple[Tensor | None, ...]]:
    """The vector–Jacobian products of ``f``, differentiable themselves."""
    if in_transform():
        return torch.func.vjp(f, *primals)[1]
    further = torch.is_grad_enabled()
    leaves = [_leaf(each) for each in primals]
    with torch.enable_grad():
        value = f(*leaves)
    if not value.requires_grad:
        return lambda u: tuple(None for _ in leaves)
    options = {"retain_graph": True, "create_graph": further, "allow_unused": True}
    return lambda u: torch.autograd.grad(value, leaves, u, **options)


def _leaf(tensor: Tensor) -> Tensor:
    """The tensor, apart from others that it may depend on; with the graph that it has, and with its tangent."""
    if tensor.requires_grad and torch.is_grad_enabled():
        return tensor.view_as(tensor)
    return (tensor.detach() if tangent_of(tensor) is None else tensor.clone()).requires_grad_()

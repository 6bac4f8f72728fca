"""The tensors and modules that a layer's activation is made of, as the layer's own."""

from torch import Tensor, nn

from ..functions import Function
from ..tracing import is_traced

__all__ = ["present", "register"]

_PREFIX = "activation_"


def register(layer: nn.Module, function: Function) -> None:
    """Make what the function is made of the layer's, so that it is trained, saved and moved with the layer.

    Modules and Parameters are trained and saved. Other tensors are constants, which are moved only, as
    non-persistent buffers.
    """
    for name, value in vars(function).items():
        if isinstance(value, nn.Module):
            layer.add_module(_PREFIX + name, value)
        elif isinstance(value, nn.Parameter):
            layer.register_parameter(_PREFIX + name, value)
        elif isinstance(value, Tensor):
            layer.register_buffer(_PREFIX + name, value, persistent=False)


def present(layer: nn.Module, function: Function) -> Function:
    """The function of what the layer has registered, which ``to``, ``load_state_dict`` or ``functional_call`` may have
    replaced, and an optimizer changed: values that the function does not take are refused."""
    own = {name: getattr(layer, _PREFIX + name) for name in vars(function) if hasattr(layer, _PREFIX + name)}
    learned = any(isinstance(value, nn.Parameter) for value in own.values())
    if not learned and all(value is vars(function)[name] for name, value in own.items()):
        return function
    result = object.__new__(type(function))
    vars(result).update(vars(function) | own)
    check = getattr(result, "__post_init__", None)
    if check is not None and not any(isinstance(value, Tensor) and is_traced(value) for value in own.values()):
        check()
    return result

"""The values of tensors while a program is exported."""

from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["traced_values"]


def traced_values(*tensors: Tensor) -> list[Tensor] | None:
    """The values of tensors that are traced now, where they follow from the program's own tensors; None otherwise.

    The calls that lead to a traced tensor are computed once more, outside of the graph.
    """
    if type(tensors[0]) is not FakeTensor:
        return None if tensors[0].is_meta else list(tensors)
    from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

    tracer: Any = getattr(get_proxy_mode(), "tracer", None)
    known: dict[Any, Any] = {}

    def value(node: Any) -> Any:
        if node not in known:
            args, kwargs = fx.map_arg((node.args, node.kwargs), value)
            known[node] = getattr(tracer.root, node.target) if node.op == "get_attr" else node.target(*args, **kwargs)
        return known[node]

    try:
        converter = tensors[0].fake_mode.fake_tensor_converter.meta_converter
        for real, number in list(converter.describer.lookup_tensor.items()):
            fake = converter.tensor_memo.get(number)
            if fake is not None and (slot := get_proxy_slot(fake, tracer, None)) is not None:
                known[slot.proxy.node] = real
        nodes = [get_proxy_slot(tensor, tracer).proxy.node for tensor in tensors]
        with _disable_current_modes(), torch.no_grad():
            return [value(node) for node in nodes]
    except (AttributeError, LookupError, RuntimeError, TypeError):  # nothing is exported, or by an unknown torch
        return None

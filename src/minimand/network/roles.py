"""What a call does, in the words of a network: a linear layer, a normalisation, an activation, a reshaping …"""

import types
from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..functions.activations import is_activation
from .record import Call, Value

__all__ = ["Role", "role"]

Role = Literal[
    "linear", "conv", "dropout", "norm", "activation", "pool", "add", "cat", "reshape", "identity", "other"
]  # fmt: skip

_PLACES = (torch, F, Tensor, torch._C._nn)


def _functions(names: str) -> set[Any]:
    """Everything that torch offers under these names, as functions, methods and properties of tensors, and in place."""
    found = []
    for name in names.split():
        for spelling in (name, f"{name}_"):
            for place in _PLACES:
                member = getattr(place, spelling, None)
                if callable(member):
                    found.append(member)
                elif isinstance(member, types.GetSetDescriptorType | property):
                    found.append(member.__get__)
    return set(found)


_NAMED: Mapping[Role, str] = {
    "linear": "linear",
    "conv": "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution",
    "dropout": "dropout dropout1d dropout2d dropout3d alpha_dropout feature_dropout feature_alpha_dropout",
    "norm": "batch_norm layer_norm group_norm instance_norm rms_norm local_response_norm native_batch_norm "
    "native_layer_norm native_group_norm",
    "pool": "max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d lp_pool1d lp_pool2d lp_pool3d "
    "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d "
    "adaptive_max_pool3d max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices "
    "adaptive_max_pool1d_with_indices adaptive_max_pool2d_with_indices adaptive_max_pool3d_with_indices "
    "fractional_max_pool2d fractional_max_pool3d fractional_max_pool2d_with_indices "
    "fractional_max_pool3d_with_indices",
    "cat": "cat concat concatenate",
    "reshape": "flatten unflatten reshape reshape_as view view_as squeeze unsqueeze permute transpose swapaxes "
    "swapdims movedim moveaxis t T mT H mH adjoint ravel pixel_shuffle pixel_unshuffle channel_shuffle",
    "identity": "contiguous clone alias",
}
_ROLES: Mapping[Any, Role] = {function: kind for kind, names in _NAMED.items() for function in _functions(names)}
_ADDS = _functions("add __add__ __radd__ __iadd__")
_PRODUCTS = _functions("matmul mm addmm __matmul__ __rmatmul__")
_CLAMPS = _functions("clamp clip clamp_min clamp_max relu threshold")
_CASTS = _functions("to type type_as float double half bfloat16 cpu cuda")


def role(call: Call) -> Role:
    """What a call does.

    A product of data with a parameter, or with a matrix computed from parameters alone, is ``"linear"``, whichever
    function computes it. ``"add"`` adds two tensors; ``"identity"`` returns the entries of its input as they are, in
    the same order and type. Activations are the functions of torch that act on each entry, and clamping between
    numbers. Softmax is ``"other"``.

    >>> from minimand.network import read
    >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.GELU(), torch.nn.Flatten())
    >>> [role(call) for call in read(net).calls]
    ['linear', 'activation', 'reshape']
    """
    target = call.target
    known = _ROLES.get(target)
    if known is not None:
        return known
    if target in _ADDS and len(call.inputs) == 2 and not call.kwargs:
        return "add"
    if target in _PRODUCTS and any(map(_is_learned, call.inputs)) and "input" in call.outputs[0].origins:
        return "linear"
    if is_activation(target) or (target in _CLAMPS and len(call.inputs) == 1):
        return "activation"
    if target in _CASTS and call.inputs and call.outputs and call.inputs[0].dtype == call.outputs[0].dtype:
        return "identity"
    return "other"


def _is_learned(value: Value) -> bool:
    return "parameter" in value.origins and "input" not in value.origins

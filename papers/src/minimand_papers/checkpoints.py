"""Reading the checkpoints that the authors of ISTA-Net published."""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from minimand.errors import DataError, require_finite
from minimand.nn import Architecture, ISTANet
from minimand.nn.unrolled.parameters import assign
from minimand.operators import LinearOperator

__all__ = ["PUBLIC_KEYS", "from_public_checkpoint"]

#: Maps names in the public checkpoints (after ``fcs.k.``) to names here (after ``transforms.k.``).
PUBLIC_KEYS: dict[bool, dict[str, str]] = {
    False: {
        "conv1_forward": "analysis.0.weight",
        "conv2_forward": "analysis.1.weight",
        "conv1_backward": "synthesis.0.weight",
        "conv2_backward": "synthesis.1.weight",
    },
    True: {
        "conv_D": "expand.weight",
        "conv1_forward": "analysis.0.weight",
        "conv2_forward": "analysis.1.weight",
        "conv1_backward": "synthesis.0.weight",
        "conv2_backward": "synthesis.1.weight",
        "conv_G": "reduce.weight",
    },
}
_SCALARS = {"lambda_step": "step", "soft_thr": "threshold"}


def from_public_checkpoint(
    state: Mapping[str, Tensor], phi: Tensor | LinearOperator, *, initial: Tensor | None = None
) -> ISTANet:
    """An :class:`ISTANet` with the parameters of a public ISTA-Net or ISTA-Net+ checkpoint.

    ``state`` is the result of ``torch.load(file, weights_only=True)``. Its keys are ``fcs.k.NAME``, with the prefix
    ``module.`` if the network was saved from ``DataParallel``. In each phase ``lambda_step`` is the step, ``soft_thr``
    is the threshold, and :data:`PUBLIC_KEYS` maps the convolutions; ``conv_D`` and ``conv_G`` occur in ISTA-Net+ only.
    Φ and the matrix Q are published as separate files: pass them as ``phi`` and ``initial``. The parameters are
    unconstrained.

    >>> from minimand.operators import orthonormal_gaussian
    >>> weights = {"conv1_forward": (2, 1), "conv2_forward": (2, 2), "conv1_backward": (2, 2), "conv2_backward": (1, 2)}
    >>> state = {f"module.fcs.0.{name}": torch.zeros(*shape, 3, 3) for name, shape in weights.items()}
    >>> state |= {"module.fcs.0.lambda_step": torch.tensor([0.5]), "module.fcs.0.soft_thr": torch.tensor([0.01])}
    >>> net = from_public_checkpoint(state, orthonormal_gaussian(3, 9))
    >>> net.phases, net.plus, net.step.item()
    (1, False, 0.5)
    """
    phases = _by_phase(state)
    plus = "conv_D" in phases[0]
    names = PUBLIC_KEYS[plus]
    expected = {*names, *_SCALARS}
    for k, values in phases.items():
        if set(values) != expected:
            odd = sorted(set(values) ^ expected)
            raise _other_layout(f"phase {k} has missing or unknown keys: {', '.join(odd)}")
        for scalar in _SCALARS:
            if values[scalar].numel() != 1:
                raise _other_layout(f"fcs.{k}.{scalar} has shape {tuple(values[scalar].shape)}, not one number")
    # Before a network is made: its memory is of the order of the square of this number.
    channels = (*phases[0]["conv1_forward"].shape, 0)[0]
    if tuple(phases[0]["conv2_forward"].shape[:2]) != (channels, channels):
        raise _other_layout(f"fcs.0.conv2_forward does not have the {channels} channels of fcs.0.conv1_forward")
    architecture = Architecture(channels=channels)
    net = ISTANet(phi, len(phases), plus, architecture=architecture, initial=initial)
    for scalar, name in _SCALARS.items():
        assign(net, name, torch.stack([values[scalar].reshape(()) for values in phases.values()]).to(net.phi))
    for k, values in phases.items():
        for public, ours in names.items():
            weight = net.transforms[k].get_parameter(ours)
            if weight.shape != values[public].shape:
                raise _other_layout(
                    f"fcs.{k}.{public} has shape {tuple(values[public].shape)}, not {tuple(weight.shape)}"
                )
            with torch.no_grad():
                weight.copy_(values[public])
    return net


def _by_phase(state: Mapping[str, Tensor]) -> dict[int, dict[str, Tensor]]:
    if not isinstance(state, Mapping):
        raise _other_layout(f"it is a {type(state).__name__}, not a state dict")
    phases: dict[int, dict[str, Tensor]] = {}
    for key, value in state.items():
        match = re.fullmatch(r"(?:module\.)?fcs\.(\d{1,6})\.(\w+)", str(key))
        if match is None or not isinstance(value, Tensor):
            raise _other_layout(f"it has the key {key!r:.100}")
        if not (value.layout == torch.strided and value.is_floating_point() and not value.is_meta and _is_whole(value)):
            raise _other_layout(f"{key} is no whole tensor of real numbers")
        require_finite(key, value)
        phases.setdefault(int(match[1]), {})[match[2]] = value
    if sorted(phases) != list(range(len(phases))) or not phases:
        raise _other_layout(f"its phases are {sorted(phases)}")
    return dict(sorted(phases.items()))


def _is_whole(value: Tensor) -> bool:
    """Whether the tensor has an entry in memory for each of its entries; a view of one number can have any shape."""
    return value.untyped_storage().nbytes() >= value.numel() * value.element_size()


def _other_layout(why: str) -> DataError:
    return DataError(
        f"the checkpoint does not have the layout of the public ISTA-Net ({why}), whose keys are fcs.k.lambda_step, "
        f"fcs.k.soft_thr and fcs.k.conv…; load a network of this library with load_state_dict"
    )

"""Running converted networks: their strength, warm starts, and samples of their output."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..arguments import checked
from ..errors import ConversionError, MinimandError, OptionError, located
from ..network.nested import replace, tensors
from ..network.running import Inputs, bound
from ..network.state import preserved
from ..solvers.base import require_count
from .dropout import AdditiveDropout, ImportanceDropout
from .layers import SolverLayer
from .options import check_strength

__all__ = ["sample", "set_strength", "warm_start"]

# Samples in one call of the model.
_BATCH = 512


def _layers(model: nn.Module, caller: str) -> list[SolverLayer]:
    if not isinstance(model, nn.Module):
        raise ConversionError(f"{caller} takes an nn.Module, got {model!r}")
    found = [module for module in model.modules() if isinstance(module, SolverLayer)]
    if not found:
        raise ConversionError(f"{caller}: the model has no solver layer; convert it first with minimand.convert")
    return found


@checked
def set_strength(model: nn.Module, value: float) -> None:
    """Set the strength of every solver layer of a model, except those with ``Implicit`` or ``JacobianFree``.

    At strength 0 a converted network is the plain one; at 1 its layers take the full steps of their solvers. Raise it
    while fine-tuning:

    >>> from minimand.nn import convert
    >>> from minimand.solvers import ProxGD
    >>> net = convert(nn.Sequential(nn.Linear(4, 3), nn.ReLU()), ProxGD(10))
    >>> for epoch in range(3):
    ...     set_strength(net, 0.1 * (epoch + 1) / 3)
    >>> round(net[0].strength, 3)
    0.1
    """
    check_strength(value)
    layers = _layers(model, "set_strength")
    # Gradients of the minimiser do not depend on a strength.
    found = [layer for layer in layers if not layer.adjoint.of_minimizer]
    for layer in found:
        try:
            layer.options.with_strength(value)
        except MinimandError as error:
            raise located(error, layer.path or type(layer).__name__) from None
    for layer in found:
        layer.strength = value


@contextlib.contextmanager
def warm_start(model: nn.Module) -> Iterator[None]:
    """A context in which each solver layer starts from its result of the call before, for streams of similar inputs.

    A layer with a plain start adds to the plain layer's output what its iterations added in the call before. An input
    of another size starts afresh. Together with ``tol``, a frame that resembles the one before takes few iterations.
    One stream at a time: the layers remember their last result until the context ends.

    >>> from minimand.nn import SolverLinear
    >>> from minimand.solvers import ProxGD
    >>> layer, y = SolverLinear(6, 4, solver=ProxGD(10)).eval(), torch.randn(2, 6)
    >>> with torch.no_grad(), warm_start(layer):
    ...     frames = [layer(y) for _ in range(50)]
    >>> torch.allclose(frames[-1], frames[-2], atol=1e-4)
    True
    """
    layers = _layers(model, "warm_start")
    before = [layer._memory for layer in layers]
    for layer in layers:
        layer._memory = []
    try:
        yield
    finally:
        for layer, memory in zip(layers, before, strict=True):
            layer._memory = memory


@checked
def sample(model: nn.Module, x: Any, n: int = 20) -> Tensor:
    """``n`` stochastic forward passes of a network, stacked along a new first dimension.

    The network is in ``eval()``, but its solver layers draw samples and its Dropout modules drop, as in training. The
    mean over the first dimension is a prediction, and the spread tells how certain it is. Afterwards modes, generators
    and buffers are as before, so that equal calls return equal samples; ``torch.manual_seed`` chooses others. Several
    passes are made as one batch, unless a layer draws one sample for the whole batch, the memory is too small, or the
    model does not take such a batch. There are no gradients.

    Args:
        model: A network with a stochastic solver (ProxSG, SVRG, RCD) or a Dropout module.
        x: An input: a tensor, or a tuple of positional or a dictionary of keyword arguments. Tensors have the samples
            along their first dimension.
        n: The number of passes.

    >>> from minimand.nn import convert
    >>> from minimand.solvers import ProxSG
    >>> net = convert(nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 3)), ProxSG(5))
    >>> outputs = sample(net, torch.randn(4, 8), n=10)
    >>> outputs.shape, bool((outputs.std(0) > 0).all())
    (torch.Size([10, 4, 3]), True)
    """
    require_count("n", n)
    inputs = bound(x)
    sizes = [len(tensor) for tensor in tensors(inputs) if tensor.dim()]
    layers = [module for module in model.modules() if isinstance(module, SolverLayer) and module.solver.stochastic]
    kinds = (nn.modules.dropout._DropoutNd, AdditiveDropout, ImportanceDropout)
    dropouts = [module for module in model.modules() if isinstance(module, kinds)]
    if not sizes or not layers + dropouts:
        raise OptionError(
            "sample needs a batch of inputs" if not sizes else "sample needs a stochastic solver layer or a Dropout"
        )
    rows = sizes[0]
    shared = any(layer.shared_sample or getattr(layer.solver, "shared_sample", False) for layer in layers)
    passes = 1 if shared else max(1, _BATCH // max(rows, 1))
    with torch.no_grad(), preserved(model):
        model.eval()
        for layer in layers:
            vars(layer)["options"] = dataclasses.replace(layer.options, eval_mode="stochastic")
        for dropout in dropouts:
            dropout.train()
        try:
            return _outputs(model, inputs, rows, n, passes)
        except Exception:
            # Too much memory, or a forward for one batch size.
            if passes == 1:
                raise
            return _outputs(model, inputs, rows, n, 1)


def _outputs(model: nn.Module, inputs: Inputs, rows: int, n: int, passes: int) -> Tensor:
    return torch.cat([_passes(model, inputs, rows, min(passes, n - done)) for done in range(0, n, passes)])


def _passes(model: nn.Module, inputs: Inputs, rows: int, count: int) -> Tensor:
    """Several passes as one batch."""

    def repeated(tensor: Tensor) -> Tensor:
        return torch.cat([tensor] * count) if tensor.dim() and len(tensor) == rows else tensor

    args, kwargs = replace(inputs, Tensor, repeated)
    output = model(*args, **kwargs)
    if not isinstance(output, Tensor):
        raise OptionError(f"sample takes a model that returns one tensor, but it returned a {type(output).__name__}")
    if count == 1:
        return output.unsqueeze(0)
    if not output.dim() or len(output) != count * rows:
        raise OptionError(f"{count * rows} samples gave {tuple(output.shape)}")
    return output.unflatten(0, (count, rows))

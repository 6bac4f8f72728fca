"""Outputs and local descent of networks, on all samples or on mini-batches."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CapabilityError, OptionError, ShapeError, require_finite, require_real
from ..factor.inputs import Units, middle
from .certificate import NEAR_ONE
from .degree import scales_with_inputs

__all__ = ["data_units", "minimize", "minimize_batches", "outputs", "require_data", "resize_for_checkpoint"]

# Binary exponents of the largest input, beyond which its powers leave the range.
_INPUTS = {torch.float32: 40, torch.float64: 320}


def require_data(x: Tensor, y: Tensor, *, labels: bool) -> None:
    """Raise unless x and y are finite, x has a precision that growth works in, and both have as many samples.

    ``labels`` allows a y of whole numbers."""
    whole = (
        labels and isinstance(y, Tensor) and y.dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    )
    for name, tensor in (("x", x), ("y", y.double() if whole else y)):
        require_real(name, tensor)
        require_finite(name, tensor)
    if x.dtype not in (torch.float32, torch.float64):
        raise CapabilityError(f"x is {x.dtype}, but growth needs float32 or float64; convert it with .float()")
    if not x.dim() or not x.numel() or middle(float(x.abs().max()), limit=_INPUTS[x.dtype]):
        raise OptionError(f"x is empty, or its powers leave the range of {x.dtype}: scale its entries to near one")
    if not y.dim() or len(x) != len(y):
        raise ShapeError(f"x has {len(x)} samples, but y has shape {tuple(y.shape)}")


def data_units(net: nn.Module, x: Tensor, y: Tensor, degree: int, penalty: int, *, squared: bool) -> tuple[Units, int]:
    """The units in which data far from one are fitted, because the tolerances of L-BFGS are not relative, and the
    exponent e of the inputs; e = 0 unless the outputs scale with them.

    With targets of exponent t, the parameters of a network of degree K scale by :math:`2^{(t-e)/K}`, its outputs by
    :math:`2^t`, and θ, of degree ``penalty``, by :math:`2^{(t-e)/K}` to that power.
    """
    scales = (y, squared), (x, scales_with_inputs(net, x[:8]))
    exponents = [middle(float(data.abs().max()), limit=NEAR_ONE) if free else 0 for data, free in scales]
    target, inputs = (exponent - exponent % degree for exponent in exponents)
    product = (target - inputs) // degree * penalty
    return Units(2 * target - product, 2 * target), inputs


@torch.no_grad()
def outputs(net: nn.Module, x: Tensor, batch_size: int | None = None) -> Tensor:
    """The outputs without gradients, batch by batch; a ShapeError if the network rejects the inputs."""
    try:
        return net(x) if batch_size is None else torch.cat([net(part) for part in x.split(batch_size)])
    except RuntimeError as error:
        raise ShapeError(
            f"the subnetworks do not take inputs of shape {tuple(x.shape)} and {x.dtype}: {error}"
        ) from error


def minimize(parameters: list[nn.Parameter], value: Callable[[], Tensor], iterations: int) -> None:
    """Descend to a local minimum by L-BFGS, in place."""
    optimizer = torch.optim.LBFGS(
        parameters, max_iter=iterations, line_search_fn="strong_wolfe", tolerance_grad=1e-9, tolerance_change=1e-14
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = value()
        loss.backward()
        return loss

    optimizer.step(closure)
    optimizer.zero_grad()


def minimize_batches(
    parameters: Iterable[nn.Parameter],
    value: Callable[[Tensor, Tensor], Tensor],
    data: tuple[Tensor, Tensor],
    *,
    batch_size: int,
    passes: int,
    rate: float,
) -> None:
    """Adam on mini-batches with a rate that falls linearly to zero, in place; the order is torch's global generator's.

    ``value`` of a batch is an estimate of the whole objective.
    """
    parameters = list(parameters)
    if not parameters:
        return
    x, y = data
    total = passes * -(-len(x) // batch_size)
    optimizer = torch.optim.Adam(parameters, lr=rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / total)
    for _ in range(passes):
        for rows in torch.randperm(len(x)).to(x.device).split(batch_size):
            optimizer.zero_grad()
            value(x[rows], y[rows]).backward()
            optimizer.step()
            schedule.step()
    optimizer.zero_grad()


def resize_for_checkpoint(module: Any, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before loading: create or remove subnetworks to match the number in the checkpoint."""
    start = f"{prefix}subnetworks."
    held = [key for key in state_dict if key.startswith(start)]
    if not held:
        return
    count = len({key.removeprefix(start).partition(".")[0] for key in held})
    kept = list(module.subnetworks)[:count]
    fresh = [module._make(state_dict[held[0]]) for _ in range(count - len(kept))]
    module.subnetworks = nn.ModuleList([*kept, *fresh])

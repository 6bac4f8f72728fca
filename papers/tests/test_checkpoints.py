"""Published ISTA-Net checkpoints give the network of the paper, and files of another layout are rejected."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minimand.errors import DataError, NonFiniteError
from minimand.nn import least_squares_start
from minimand.operators import orthonormal_gaussian
from minimand_papers.checkpoints import from_public_checkpoint

PHI = orthonormal_gaussian(5, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def _public_state(phases: int, plus: bool, channels: int, prefix: str) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(1)

    def weight(*shape: int) -> Tensor:
        return 0.3 * torch.randn(*shape, generator=g, dtype=torch.float64)

    inner = channels if plus else 1
    state = {}
    for k in range(phases):
        values = {
            "lambda_step": torch.tensor([0.5 + 0.1 * k], dtype=torch.float64),
            "soft_thr": torch.tensor([0.02 - 0.02 * k], dtype=torch.float64),
            "conv1_forward": weight(channels, inner, 3, 3),
            "conv2_forward": weight(channels, channels, 3, 3),
            "conv1_backward": weight(channels, channels, 3, 3),
            "conv2_backward": weight(inner, channels, 3, 3),
        }
        if plus:
            values |= {"conv_D": weight(channels, 1, 3, 3), "conv_G": weight(1, channels, 3, 3)}
        state |= {f"{prefix}fcs.{k}.{name}": value for name, value in values.items()}
    return state


def _paper(
    state: dict[str, Tensor], prefix: str, phases: int, phi: Tensor, q: Tensor, y: Tensor, plus: bool
) -> tuple[Tensor, list[Tensor]]:
    """ISTA-Net and ISTA-Net+ as in the paper's equations."""
    x, side, residuals = y @ q.mT, math.isqrt(phi.shape[1]), []
    for k in range(phases):
        p = {key.rpartition(".")[2]: value for key, value in state.items() if key.startswith(f"{prefix}fcs.{k}.")}
        r = (x - p["lambda_step"] * (x @ phi.mT - y) @ phi).reshape(-1, 1, side, side)
        d = F.conv2d(r, p["conv_D"], padding=1) if plus else r
        forward = F.conv2d(F.conv2d(d, p["conv1_forward"], padding=1).relu(), p["conv2_forward"], padding=1)

        def back(c: Tensor, p: dict[str, Tensor] = p) -> Tensor:
            return F.conv2d(F.conv2d(c, p["conv1_backward"], padding=1).relu(), p["conv2_backward"], padding=1)

        out = back(forward.sign() * F.relu(forward.abs() - p["soft_thr"]))
        x = (r + F.conv2d(out, p["conv_G"], padding=1) if plus else out).flatten(1)
        residuals.append(back(forward) - d)
    return x, residuals


@pytest.mark.parametrize("plus", [False, True])
@pytest.mark.parametrize("prefix", ["", "module."])
def test_public_checkpoints_give_the_papers_network(plus: bool, prefix: str) -> None:
    """Losses, reconstructions and gradients, with a negative threshold as published checkpoints have."""
    phi, phases = PHI, 3
    state = _public_state(phases, plus, 4, prefix)
    x = torch.rand(6, 16, dtype=torch.float64)
    q, y = least_squares_start(phi, x), x @ phi.mT
    net = from_public_checkpoint(state, phi, initial=q).double()
    for value in state.values():
        value.requires_grad_()
    expected, residuals = _paper(state, prefix, phases, phi, q, y, plus)
    torch.testing.assert_close(net(y), expected, rtol=1e-6, atol=1e-8)
    loss = F.mse_loss(expected, x) + 0.01 * sum(r.square().mean() for r in residuals)
    ours = net.loss(y, x)
    torch.testing.assert_close(ours, loss, rtol=1e-6, atol=1e-10)
    grads = torch.autograd.grad(
        loss, [state[f"{prefix}fcs.1.{n}"] for n in ("lambda_step", "soft_thr", "conv2_forward")]
    )
    ours.backward()
    assert net.step.grad is not None
    assert net.threshold.grad is not None
    torch.testing.assert_close(net.step.grad[1:2], grads[0], rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(net.threshold.grad[1:2], grads[1], rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(
        net.transforms[1].get_parameter("analysis.1.weight").grad, grads[2], rtol=1e-5, atol=1e-9
    )


def _state(**values: Tensor) -> dict[str, Tensor]:
    """A public checkpoint of one phase with two channels."""
    shapes = {"conv1_forward": (2, 1), "conv2_forward": (2, 2), "conv1_backward": (2, 2), "conv2_backward": (1, 2)}
    state = {name: torch.zeros(*shape, 3, 3) for name, shape in shapes.items()}
    state |= {"lambda_step": torch.tensor([0.5]), "soft_thr": torch.tensor([0.01])}
    return {f"fcs.0.{name}": value for name, value in {**state, **values}.items()}


BAD: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "a checkpoint of another layout": (
        lambda: from_public_checkpoint({"layer.weight": torch.rand(2)}, PHI),
        DataError,
        "layer.weight",
    ),
    "a checkpoint without a threshold": (
        lambda: from_public_checkpoint({"fcs.0.lambda_step": torch.rand(1)}, PHI),
        DataError,
        "soft_thr",
    ),
    "a checkpoint with a phase missing": (
        lambda: from_public_checkpoint({"fcs.1.lambda_step": torch.rand(1)}, PHI),
        DataError,
        "phases",
    ),
    "a checkpoint that is a module": (
        lambda: from_public_checkpoint(nn.Linear(2, 2), PHI),
        DataError,
        "it is a Linear",
    ),
    "a checkpoint with numbers for keys": (
        lambda: from_public_checkpoint({0: torch.rand(1)}, PHI),
        DataError,
        "the key 0",
    ),
    "a checkpoint with thresholds per channel": (
        lambda: from_public_checkpoint(_state(soft_thr=torch.zeros(3)), PHI),
        DataError,
        "soft_thr has shape",
    ),
    "a checkpoint with NaN": (
        lambda: from_public_checkpoint(_state(soft_thr=torch.full((1,), torch.nan)), PHI),
        NonFiniteError,
        "fcs.0.soft_thr",
    ),
    **{
        f"a checkpoint with {name}": (
            lambda value=value: from_public_checkpoint(_state(conv1_forward=value), PHI),
            DataError,
            says,
        )
        for name, value, says in (
            ("a number for a convolution", torch.tensor(1.0), "channels"),
            ("a view of one number", torch.zeros(1, 1, 1, 1).expand(10**9, 1, 3, 3), "no whole tensor"),
            ("far more channels than it has", torch.zeros(10**6, 1, 3, 3), "1000000 channels"),
            ("whole numbers", torch.zeros(2, 1, 3, 3, dtype=torch.int64), "no whole tensor of real"),
            ("complex numbers", torch.zeros(2, 1, 3, 3, dtype=torch.complex64), "no whole tensor of real"),
            ("no memory", torch.zeros(2, 1, 3, 3, device="meta"), "no whole tensor"),
            ("a sparse tensor", torch.zeros(2, 1, 3, 3).to_sparse(), "no whole tensor"),
        )
    },
    "a checkpoint with an endless number": (
        lambda: from_public_checkpoint({f"fcs.{'9' * 5000}.soft_thr": torch.rand(1)}, PHI),
        DataError,
        "the key 'fcs.999",
    ),
    "an empty checkpoint": (lambda: from_public_checkpoint({}, PHI), DataError, "phases"),
}


@pytest.mark.parametrize(("call", "error", "match"), BAD.values(), ids=BAD)
def test_bad_input_gets_one_sentence(call: Callable[[], object], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match) as caught:
        call()
    assert "\n" not in str(caught.value)

"""Inference of RidgeNet against a free network, and training steps of ISTA-Net against the paper's code.

The baseline follows the paper's equations and its published training script: the matrix ΦᵀΦ is formed in every pass,
soft thresholds are computed by sign and ReLU, convolutions have torch's default layout. Ours is
:class:`~minimand.nn.ISTANet` with the same weights; losses and gradients are compared before anything is timed.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import Row, at_least, at_most, in_turn, ratio
from minimand.nn import Architecture, ISTANet, RidgeNet, RidgeTrainer, least_squares_start
from minimand.operators import BlockSensing, orthonormal_gaussian, to_blocks
from minimand_papers.checkpoints import from_public_checkpoint
from minimand_papers.data import random_crops
from minimand_papers.experiments._reconstruction import photographs

__all__ = ["run"]

BATCH, PIXELS, CHANNELS, SYMMETRY = 64, 1089, 32, 0.01
RIDGE_STEPS = 120
PHASES = 3  # of the paper's nine: the time is proportional to them


class Phase(nn.Module):
    """One phase of ISTA-Net, or of ISTA-Net+, as the paper gives it."""

    def __init__(self, plus: bool) -> None:
        super().__init__()
        outer = CHANNELS if plus else 1

        def weight(outputs: int, inputs: int) -> nn.Parameter:
            return nn.Parameter(nn.init.xavier_normal_(torch.empty(outputs, inputs, 3, 3)))

        self.lambda_step = nn.Parameter(torch.tensor([0.5]))
        self.soft_thr = nn.Parameter(torch.tensor([0.01]))
        self.conv1_forward, self.conv2_forward = weight(CHANNELS, outer), weight(CHANNELS, CHANNELS)
        self.conv1_backward, self.conv2_backward = weight(CHANNELS, CHANNELS), weight(outer, CHANNELS)
        if plus:
            self.conv_D, self.conv_G = weight(CHANNELS, 1), weight(1, CHANNELS)
        self.plus = plus

    def forward(self, x: Tensor, gram: Tensor, back_projected: Tensor) -> tuple[Tensor, Tensor]:
        x = x - self.lambda_step * torch.mm(x, gram)
        x = x + self.lambda_step * back_projected
        image = x.view(-1, 1, 33, 33)
        inner = F.conv2d(image, self.conv_D, padding=1) if self.plus else image
        forward = F.conv2d(F.relu(F.conv2d(inner, self.conv1_forward, padding=1)), self.conv2_forward, padding=1)
        shrunk = torch.mul(torch.sign(forward), F.relu(torch.abs(forward) - self.soft_thr))
        out = self._back(shrunk)
        out = image + F.conv2d(out, self.conv_G, padding=1) if self.plus else out
        return out.view(-1, PIXELS), self._back(forward) - inner

    def _back(self, x: Tensor) -> Tensor:
        return F.conv2d(F.relu(F.conv2d(x, self.conv1_backward, padding=1)), self.conv2_backward, padding=1)


class Plain(nn.Module):
    """ISTA-Net as the paper gives it."""

    def __init__(self, phases: int, plus: bool) -> None:
        super().__init__()
        self.fcs = nn.ModuleList(Phase(plus) for _ in range(phases))

    def loss(self, x: Tensor, phi: Tensor, start: Tensor) -> Tensor:
        y = torch.mm(x, phi.mT)
        gram, back_projected, out = torch.mm(phi.mT, phi), torch.mm(y, phi), torch.mm(y, start.mT)
        constraint = torch.zeros(())
        for phase in self.fcs:
            out, residual = phase(out, gram, back_projected)
            constraint = constraint + torch.mean(torch.pow(residual, 2))
        return torch.mean(torch.pow(out - x, 2)) + SYMMETRY * constraint


def _step(parameters: list[nn.Parameter], loss: Callable[[], Tensor]) -> Callable[[], None]:
    optimizer = torch.optim.Adam(parameters, lr=1e-4)

    def call() -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    return call


def _losses(plus: bool, rows: int, dtype: torch.dtype) -> tuple[Plain, ISTANet, list[Callable[[], Tensor]]]:
    """The network of the paper, ours with the same weights, and the loss of each."""
    generator = torch.Generator().manual_seed(0)
    phi = orthonormal_gaussian(rows, PIXELS, generator=generator)
    # Not Φᵀ itself, at which the gradient of the first step vanishes.
    x, start = torch.rand(BATCH, PIXELS, generator=generator).to(dtype), 0.8 * phi.mT.contiguous()
    plain = Plain(PHASES, plus)
    net = from_public_checkpoint(plain.state_dict(), phi, initial=start).to(dtype)
    plain, phi, start = plain.to(dtype), phi.to(dtype), start.to(dtype)
    return plain, net, [lambda: plain.loss(x, phi, start), lambda: net.loss(x @ phi.mT, x, symmetry=SYMMETRY)]


def _steps(plus: bool, rows: int) -> list[Callable[[], None]]:
    """A training step of each."""
    plain, net, losses = _losses(plus, rows, torch.float32)
    return [_step(list(plain.parameters()), losses[0]), _step(list(net.parameters()), losses[1])]


def _difference(plus: bool, rows: int) -> float:
    """The largest relative difference of their losses and gradients in float64."""
    plain, net, losses = _losses(plus, rows, torch.float64)
    theirs, ours = (loss() for loss in losses)
    theirs.backward()
    ours.backward()
    pairs = [(theirs, ours)]
    for k, phase in enumerate(plain.fcs):
        pairs.append((phase.conv2_forward.grad, net.transforms[k].get_parameter("analysis.1.weight").grad))
        pairs.append((phase.lambda_step.grad, net.step.grad[k : k + 1]))
        pairs.append((phase.soft_thr.grad, net.threshold.grad[k : k + 1]))
    return max(float((a - b).detach().norm() / a.detach().norm()) for a, b in pairs)


def _lighter() -> Callable[[], None]:
    """A step of another architecture: pixel squares of 3 × 3 as channels."""
    phi = orthonormal_gaussian(272, PIXELS)
    net, x = ISTANet(phi, PHASES, plus=True, architecture=Architecture(shuffle=3)), torch.rand(BATCH, PIXELS)
    return _step(list(net.parameters()), lambda: net.loss(x @ phi.mT, x, symmetry=SYMMETRY))


def _reconstructions() -> tuple[list[Callable[[], object]], int]:
    """A photograph from a quarter of its measurements: the free network of eight phases, and RidgeNet to a tolerance of
    1e-4 after a short training, on which the number of its iterations depends; and that number."""
    torch.manual_seed(0)
    images = photographs(("astronaut", "chelsea", "coffee", "coins", "rocket"), 198)
    phi = orthonormal_gaussian(272, PIXELS, generator=torch.Generator().manual_seed(0))
    blocks = torch.cat([to_blocks(image) for image in images])
    start = least_squares_start(phi, blocks, ridge=1e-3)
    net, crop = RidgeNet(phi, initial=start), BlockSensing(phi, (66, 66))
    trainer = RidgeTrainer(net, RIDGE_STEPS)
    for _ in range(RIDGE_STEPS):
        x = random_crops(images, 4, 66)
        trainer.step(crop.apply(x), x)
    net.eval()
    free = ISTANet(phi, 8, plus=True, architecture=Architecture(channels=16), initial=start).eval()
    y = BlockSensing(phi, (264, 264)).apply(photographs(("camera",), 264)[0][None])
    return [torch.no_grad()(lambda: free(y)), lambda: net(y, tol=1e-4)], int(net.descended(y, tol=1e-4).iterations)


def run() -> list[Row]:
    """Throughput ratios, and how far losses and gradients differ."""
    torch.manual_seed(0)
    rows = []
    for name, plus, target in (("ISTA-Net, 25%", False, 1.3), ("ISTA-Net+, 25%", True, 1.3)):
        worst = _difference(plus, 272)
        plain, ours, light = in_turn([*_steps(plus, 272), _lighter()], 9)
        note = f"{PHASES} phases, batch {BATCH}"
        rows.append(at_least(f"{name}: the paper's step / ours", ratio(plain, ours), target, note))
        rows.append(at_most(f"{name}: relative difference of losses and gradients", worst, 1e-8))
    rows.append(
        at_least("ISTA-Net+ as in the paper / the lighter one", ratio(plain, light), 1.0, "another architecture")
    )
    calls, iterations = _reconstructions()
    free, ridge = in_turn(calls, 9)
    note = (
        f"264 × 264 pixels, 10 phases and {iterations} certified iterations to 1e-4, after {RIDGE_STEPS} training steps"
    )
    rows.append(at_most("RidgeNet with its proof / the free ISTA-Net+ of 8 phases", ratio(ridge, free), 6.0, note))
    return rows

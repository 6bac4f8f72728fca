"""Norm bounds of convolutions against full FFT + SVD (Sedghi et al., ICLR 2019), and the tracker's cost."""

import statistics
import subprocess
import sys
import time

import torch
from torch import Tensor, nn

from benchmarks import Row, at_least, at_most, seconds
from minimand.operators import Conv2d, Dense, LipschitzTracker, lanczos, lipschitz

LAYERS = [(64, 64, 32, 5.0), (128, 256, 16, 2.5), (256, 256, 16, 2.5), (512, 512, 32, 10.0)]
MEMORY = """
from torch import nn
from minimand.operators import lipschitz

def peak():  # ru_maxrss would inherit the parent's
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) / 1024

layer = nn.Conv2d(512, 512, 3, padding=1)
lipschitz(nn.Conv2d(8, 8, 3, padding=1), (32, 32))
before = peak()
lipschitz(layer, (32, 32))
print(peak() - before)
"""


def full_svd(weight: Tensor, size: int, share: float = 1.0) -> Tensor:
    """Sedghi et al.: singular values of the transformed kernel at (a share of) all frequencies."""
    symbol = torch.fft.fft2(weight, (size, size)).permute(2, 3, 0, 1).flatten(0, 1)
    return torch.linalg.svdvals(symbol[: max(1, round(share * size * size))]).max() ** 2


def truth(operator: Conv2d, tolerance: float = 1e-6) -> float:
    """Lanczos on the real pair in float64, restarted until it stands still."""
    double = operator.with_weight(operator.weight.detach().double())
    vector = torch.randn(double.output_shape, dtype=torch.float64).flatten()
    value = 0.0
    while True:
        estimate, vector = lanczos(lambda v: double.normal(v.reshape(double.output_shape)).flatten(), vector, 20)
        if float(estimate) <= value * (1 + tolerance):
            return float(estimate)
        value = float(estimate)


def speed() -> list[Row]:
    rows = []
    for n1, n2, size, target in LAYERS:
        layer = nn.Conv2d(n1, n2, 3, padding=1)
        weight = layer.weight.detach()
        share = min(1.0, 64 / size**2) if n1 > 64 else 0.25
        start = time.perf_counter()
        full_svd(weight, size, share)
        peer = (time.perf_counter() - start) / share
        ours = seconds(lambda layer=layer, size=size: lipschitz(layer, (size, size)), 3)
        note = f"peer timed on {share:.0%} of the frequencies and extrapolated"
        rows.append(at_least(f"auto, {n1}→{n2} 3×3 @{size}: peer / ours", peer / ours, target, note))
    return rows


def tightness() -> list[Row]:
    ratios = []
    for n1, n2, size, kernel, stride in [
        (3, 32, 16, 3, 1),
        (16, 16, 16, 3, 1),
        (32, 32, 16, 3, 1),
        (64, 64, 16, 3, 1),
        (32, 64, 16, 3, 2),
        (16, 16, 16, 5, 1),
        (3, 32, 16, 7, 2),
    ]:
        layer = nn.Conv2d(n1, n2, kernel, stride=stride, padding=kernel // 2, bias=False)
        operator = Conv2d(layer.weight, (size, size), stride, kernel // 2)
        ratios.append(float(lipschitz(operator)) / truth(operator))
    note = f"worst of {len(ratios)}: {max(ratios):.3f}, best: {min(ratios):.3f}"
    return [at_most("auto / truth, median", statistics.median(ratios), 1.35, note)]


def memory() -> list[Row]:
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True)
    return [at_most("MB beyond the weight, 512→512 3×3 @32", float(done.stdout), 300.0, "peak resident size")]


def run() -> list[Row]:
    """All rows; the slow peers are timed on a share of their work."""
    torch.manual_seed(0)
    return speed() + tightness() + memory() + tracker()


def tracker() -> list[Row]:
    """The mean cost of ``bounds`` over a training run, as a share of the layer's own forward and backward pass."""
    rows = []
    for kind in ("dense 512→512", "dense 256→256", "conv 64→64 3×3 @8"):
        dense = kind.startswith("dense")
        if dense:
            n = 512 if "512" in kind else 256
            layer: nn.Module = nn.Linear(n, n)
            body = nn.Sequential(nn.Linear(64, n), nn.ReLU(), layer, nn.ReLU(), nn.Linear(n, 10))
            operator: Dense | Conv2d = Dense(layer.weight)
            y = torch.randn(64, n, requires_grad=True)
        else:
            layer = nn.Conv2d(64, 64, 3, padding=1)
            maps = nn.Sequential(
                nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 64, 3, padding=1), nn.ReLU(), layer, nn.ReLU()
            )
            body = nn.Sequential(maps, nn.Flatten(), nn.Linear(64 * 64, 10))
            operator = Conv2d(layer.weight, (8, 8), padding=1)
            y = torch.randn(64, 64, 8, 8, requires_grad=True)
        spent, worst, steps, follower = _train(body, operator)

        def solve_layer(operator: Dense | Conv2d = operator, y: Tensor = y) -> None:
            x = torch.zeros(64, *operator.output_shape)
            for _ in range(10):
                x = torch.relu(x - 0.1 * (operator.normal(x) - operator.apply(y)))
            x.sum().backward()

        plain = seconds(lambda layer=layer, y=y: layer(y).sum().backward())
        solver = seconds(solve_layer)
        note = f"{follower.refreshes} refreshes in {steps} steps; of the plain layer: {spent / plain:.1%}"
        rows.append(at_most(f"tracker / 10-iteration layer, {kind}", spent / solver, 0.05, note))
        rows.append(at_most(f"tracked bound / truth, {kind}", worst, 1.5))
    return rows


def _train(net: nn.Module, operator: Dense | Conv2d, steps: int = 300) -> tuple[float, float, int, LipschitzTracker]:
    """Mean seconds per bound, the worst ratio to the truth, the steps, and the tracker: digits, lr 0.05, batch 64."""
    from sklearn.datasets import load_digits

    pixels, targets = load_digits(return_X_y=True)
    x = torch.tensor((pixels - pixels.mean()) / pixels.std(), dtype=torch.float32)
    labels = torch.tensor(targets)
    follower = LipschitzTracker(operator)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    spent, worst = 0.0, 0.0
    for step in range(steps):
        start = time.perf_counter()
        bound = follower.bound()
        spent += time.perf_counter() - start
        if step % 15 == 0:
            exact = lipschitz(operator, method="exact") if isinstance(operator, Dense) else truth(operator, 1e-4)
            worst = max(worst, float(bound) / float(exact))
        batch = torch.randint(0, len(x), (64,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x[batch]), labels[batch]).backward()
        optimizer.step()
    return spent / steps, worst, steps, follower

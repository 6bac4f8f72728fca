"""Norm bounds of convolutions against full FFT + SVD (Sedghi et al., ICLR 2019), and the tracker's cost."""

import copy
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks import Ratio, Row, at_least, at_most, peer, ratios, reported, skipped
from benchmarks.layers import Naive
from minimand.functions import NonNegative
from minimand.nn import SolverConv2d, SolverLinear
from minimand.norms import LipschitzTracker, lipschitz
from minimand.norms.spectral import lanczos
from minimand.operators import Conv2d, Dense
from minimand.solvers import Problem

LAYERS = [(64, 64, 32, 5.0), (128, 256, 16, 2.5), (256, 256, 16, 2.5), (512, 512, 32, 10.0)]
MEMORY = """
from torch import nn
from minimand.nn import SolverConv2d, SolverLinear
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
    """The norm by Lanczos in float64, restarted until it is stationary."""
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
        ours = partial(lipschitz, layer, (size, size))
        (found,) = ratios(ours, [partial(full_svd, weight, size, share)], 3 if n1 <= 64 else 1)
        whole = Ratio(*(part / share for part in found))
        note = f"peer timed on {share:.0%} of the frequencies and extrapolated"
        rows.append(at_least(f"auto, {n1}→{n2} 3×3 @{size}: peer / ours", whole, target, note))
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


def others() -> list[Row]:
    """Other libraries: time over ours, and value over the true norm, for a plain and a strided layer."""
    rows = []
    for stride in (1, 2):
        layer = nn.Conv2d(64, 64, 3, stride=stride, padding=1)
        operator = Conv2d(layer.weight, (16, 16), stride, 1)
        exact, ours = truth(operator) ** 0.5, partial(lipschitz, layer, (16, 16))
        title = f"conv 64→64 3×3 @16, stride {stride}"
        normed = nn.utils.parametrizations.spectral_norm(copy.deepcopy(layer), n_power_iterations=15)
        scale = float((layer.weight / normed.weight).detach().mean())
        (found,) = ratios(ours, [lambda normed=normed: normed.weight], 9)
        note = f"σ is {scale / exact:.2f} of the truth: that of the reshaped kernel; ours {_share(ours, exact):.2f}"
        rows.append(reported(f"{title}: torch spectral_norm, 15 iterations / ours", found, note))
        name = f"{title}: orthogonium, 3 iterations / ours"
        module = peer("orthogonium.layers.conv.singular_values")
        if module is None:
            rows.append(skipped(name, "orthogonium"))
            continue
        theirs = partial(module.get_conv_sv, layer, 3, return_stab_rank=False)
        (found,) = ratios(ours, [theirs], 5)
        rows.append(reported(name, found, f"σ is at most {float(theirs()) / exact:.2f} of the truth"))
    return rows


def _share(ours: Callable[[], Tensor], exact: float) -> float:
    return float(ours()) ** 0.5 / exact


def memory() -> list[Row]:
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True)
    return [at_most("MB beyond the weight, 512→512 3×3 @32", float(done.stdout), 300.0, "peak resident size")]


def run() -> list[Row]:
    """All rows; slow peers are timed on a part of their work."""
    torch.manual_seed(0)
    return speed() + tightness() + others() + memory() + tracker()


def tracker() -> list[Row]:
    """The mean cost of ``bounds`` over a training run, as a share of the layer's own forward and backward pass."""
    rows = []
    for kind in ("dense 512→512", "dense 256→256", "conv 64→64 3×3 @8"):
        if kind.startswith("dense"):
            n = 512 if "512" in kind else 256
            plain: nn.Linear | nn.Conv2d = nn.Linear(n, n)
            body = nn.Sequential(nn.Linear(64, n), nn.ReLU(), plain, nn.ReLU(), nn.Linear(n, 10))
            operator: Dense | Conv2d = Dense(plain.weight)
            fast: nn.Module = SolverLinear(n, n)
        else:
            plain = nn.Conv2d(64, 64, 3, padding=1)
            maps = nn.Sequential(
                nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 64, 3, padding=1), nn.ReLU(), plain, nn.ReLU()
            )
            body = nn.Sequential(maps, nn.Flatten(), nn.Linear(64 * 64, 10))
            operator = Conv2d(plain.weight, (8, 8), padding=1)
            fast = SolverConv2d(64, 64, 3, padding=1)
        run = _train(
            body,
            operator,
            {
                "plain": plain,
                "solver": Naive(Problem(operator, NonNegative(), torch.zeros(64, *operator.input_shape)), 10),
                "fast": fast,
            },
        )
        shares = {name: run.spent / time for name, time in run.layers.items()}
        note = (
            f"{run.refreshes} refreshes in {run.steps} steps; of minimand.nn's faster layer: {shares['fast']:.1%}, "
            f"of the plain layer: {shares['plain']:.1%}"
        )
        rows.append(at_most(f"tracker / 10-iteration layer, {kind}", shares["solver"], 0.05, note))
        rows.append(at_most(f"tracked bound / truth, {kind}", run.worst, 1.5))
    return rows


@dataclass(frozen=True)
class _Run:
    """Seconds per bound (mean) and per layer (median), and the worst ratio to the truth."""

    spent: float
    layers: dict[str, float]
    worst: float
    steps: int
    refreshes: int


def _train(net: nn.Module, operator: Dense | Conv2d, layers: dict[str, nn.Module], steps: int = 300) -> _Run:
    """Digits, lr 0.05, batch 64. The layers are timed in the same run, so that other load slows both."""
    from sklearn.datasets import load_digits

    pixels, targets = load_digits(return_X_y=True)
    x = torch.tensor((pixels - pixels.mean()) / pixels.std(), dtype=torch.float32)
    labels = torch.tensor(targets)
    y = torch.randn(64, *operator.input_shape, requires_grad=True)
    follower = LipschitzTracker(operator)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    spent, worst = 0.0, 0.0
    times: dict[str, list[float]] = {name: [] for name in layers}
    for step in range(steps):
        start = time.perf_counter()
        bound = follower.bound()
        spent += time.perf_counter() - start
        if step % 15 == 0:
            exact = lipschitz(operator, method="exact") if isinstance(operator, Dense) else truth(operator, 1e-4)
            worst = max(worst, float(bound) / float(exact))
            for name, layer in layers.items():
                start = time.perf_counter()
                layer(y).sum().backward()
                times[name].append(time.perf_counter() - start)
        batch = torch.randint(0, len(x), (64,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x[batch]), labels[batch]).backward()
        optimizer.step()
    medians = {name: statistics.median(samples) for name, samples in times.items()}
    return _Run(spent / steps, medians, worst, steps, follower.refreshes)

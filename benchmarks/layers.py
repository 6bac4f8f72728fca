"""Solver layers against the block they replace: dropout → linear → ReLU, forward and backward, one thread."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from benchmarks import Ratio, Row, at_most, peer, ratios, reported, skipped
from minimand.adjoints import Checkpoint, Implicit
from minimand.linalg import gram
from minimand.nn import SolverConv2d, SolverLayer, SolverLinear
from minimand.nn.explain import held_bytes
from minimand.solvers import FISTA, Problem, ProxGD, ProxSG, trace

__all__ = ["Equilibrium", "Naive", "block", "forward_and_backward", "run"]


def forward_and_backward(block: nn.Module, y: Tensor, upstream: Tensor) -> Callable[[], None]:
    def call() -> None:
        block.zero_grad()
        y.grad = None
        block(y).backward(upstream)

    return call


def _ratios(plain: nn.Module, layers: Sequence[nn.Module], shape: tuple[int, ...], rounds: int) -> list[Ratio]:
    y = torch.randn(shape, requires_grad=True)
    upstream = torch.randn_like(plain(y))
    return ratios(
        forward_and_backward(plain, y, upstream), [forward_and_backward(layer, y, upstream) for layer in layers], rounds
    )


def block(layer: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Dropout(0.5), layer, nn.ReLU())


def _dense() -> list[Row]:
    shared = SolverLinear(512, 512, solver=ProxSG(10, tau=0.5), shared_sample=True)
    layers: list[tuple[str, SolverLayer, float]] = [
        ("fc 512→512 ProxGD(10)", SolverLinear(512, 512, solver=ProxGD(10)), 7.5),
        ("fc 512→512 ProxGD(30)", SolverLinear(512, 512, solver=ProxGD(30)), 21),
        ("fc 512→512 ProxSG(10), τ = n/2, shared", shared, 10),
    ]
    found = _ratios(block(nn.Linear(512, 512)), [layer for _, layer, _ in layers], (128, 512), 25)
    rows = [at_most(name, ratio, target) for (name, _, target), ratio in zip(layers, found, strict=True)]
    y = torch.randn(128, 512, requires_grad=True)
    plain = block(nn.Linear(512, 512))
    again = SolverLinear(512, 512, solver=ProxGD(10), adjoint=Checkpoint())
    saved, recomputed, base = (held_bytes(block, y) for block in (layers[0][1], again, plain))
    rows.append(at_most("fc 512→512 ProxGD(10), bytes held", saved / base, 5))
    return [*rows, at_most("… with Checkpoint()", recomputed / base, 2, "stretch")]


def _products(weight: Tensor, y: Tensor, upstream: Tensor, iterations: int) -> Callable[[], None]:
    """The matrix products of a ProxGD layer and of its gradients, in memory that is there, and nothing else."""
    # Zeros: what the memory held may be numbers so small that products with them are slow.
    x, matrix, total = torch.empty_like(upstream), torch.zeros_like(weight @ weight.mT), torch.empty_like(weight)
    below = torch.empty_like(y)

    def call() -> None:
        torch.mm(y, weight.mT, out=x)
        gram(weight)
        for _ in range(iterations - 1):
            torch.mm(upstream, matrix, out=x)  # a step
            torch.mm(upstream, matrix, out=x)  # its gradient
            matrix.addmm_(upstream.mT, upstream, beta=0.5, alpha=1e-3)  # and the matrix's
        torch.mm(upstream.mT, y, out=total).addmm_(matrix, weight)
        torch.mm(upstream, weight, out=below)

    return call


def _least() -> list[Row]:
    rows, weight, y = [], torch.randn(512, 512), torch.randn(128, 512, requires_grad=True)
    plain, upstream = block(nn.Linear(512, 512)), torch.randn(128, 512)
    bare = [_products(weight, y.detach(), upstream, iterations) for iterations in (10, 30)]
    found = ratios(forward_and_backward(plain, y, upstream), bare, 25)
    for iterations, ratio in zip((10, 30), found, strict=True):
        rows.append(reported(f"fc 512→512, the products of ProxGD({iterations}) alone", ratio))
    return rows


def _wide() -> list[Row]:
    layer = SolverLinear(4096, 4096, solver=ProxSG(10, tau=0.5), shared_sample=True)
    (ratio,) = _ratios(block(nn.Linear(4096, 4096)), [layer], (128, 4096), 3)
    return [at_most("fc 4096→4096 ProxSG(10), shared", ratio, 14)]


def _convolution() -> list[Row]:
    layer = SolverConv2d(64, 64, 3, padding=1, solver=ProxGD(10))
    (ratio,) = _ratios(block(nn.Conv2d(64, 64, 3, padding=1)), [layer], (16, 64, 16, 16), 9)
    return [at_most("conv 64→64 3×3 @16 ProxGD(10)", ratio, 9)]


def _equal_objective() -> list[Row]:
    """What FISTA costs when it stops at the objective that plain descent reaches."""
    rows = []
    for iters, stretch in ((10, 4.0), (30, 7.0)):
        plain = SolverLinear(512, 512, solver=ProxGD(iters))
        y = torch.randn(128, 512)
        problem = plain.problem(y)
        goal = trace(problem, ProxGD(iters)).objective[-1]
        needed = int((trace(problem, FISTA(iters)).objective > goal).sum()) + 1
        fast = SolverLinear(512, 512, solver=FISTA(needed))
        (ratio,) = _ratios(block(nn.Linear(512, 512)), [fast], (128, 512), 15)
        rows.append(at_most(f"fc 512→512 FISTA({needed}) at ProxGD({iters})'s objective", ratio, stretch, "stretch"))
    return rows


class Naive(nn.Module):
    """Iterations of proximal gradient descent as one would write them down, differentiated by autograd."""

    def __init__(self, problem: Problem, iterations: int) -> None:
        super().__init__()
        self.operator, self.bias, self.ridge, self.iterations = (
            problem.operator,
            problem.bias,
            problem.ridge,
            iterations,
        )
        self.step = 1 / float(problem.smoothness())

    def move(self, x: Tensor, y: Tensor) -> Tensor:
        """One step."""
        gradient = self.operator.apply(self.operator.adjoint(x) - y) + self.ridge * x
        return torch.relu(x - self.step * (gradient if self.bias is None else gradient - self.bias))

    def forward(self, y: Tensor) -> Tensor:
        """All steps, from zero."""
        x = y.new_zeros(len(y), *self.operator.output_shape)
        for _ in range(self.iterations):
            x = self.move(x, y)
        return x


class Equilibrium(Naive):
    """The same map as torchdeq's: as many steps forward, and as many for the implicit gradient."""

    def forward(self, y: Tensor) -> Tensor:
        """The fixed point."""
        options = {"f_max_iter": self.iterations, "b_max_iter": self.iterations, "f_tol": 0.0, "b_tol": 0.0}
        solve = peer("torchdeq").get_deq(ift=True, **options)
        found, _ = solve(lambda x: self.move(x, y), y.new_zeros(len(y), *self.operator.output_shape))
        return found[-1]


def _peers() -> list[Row]:
    """Others' ways to the same layer: the same weight, input, step and number of iterations."""
    rows, y = [], torch.randn(128, 512)
    for iters in (10, 30):
        ours = SolverLinear(512, 512, solver=ProxGD(iters))
        (found,) = _ratios(ours, [Naive(ours.problem(y), iters)], tuple(y.shape), 9)
        rows.append(reported(f"fc 512→512, {iters} iterations: plain unrolling / ours", found))
    name = "fc 512→512, 10 iterations, implicit gradient: torchdeq / ours"
    if peer("torchdeq") is None:
        return [*rows, skipped(name, "torchdeq")]
    ours = SolverLinear(512, 512, solver=ProxGD(10), adjoint=Implicit(iters=10, method="neumann"))
    (found,) = _ratios(ours, [Equilibrium(ours.problem(y), 10)], tuple(y.shape), 9)
    return [*rows, reported(name, found, "ten terms of the same series in both backward passes")]


def run() -> list[Row]:
    """Ratios of time and memory, with the targets they were set."""
    torch.manual_seed(0)
    return [*_dense(), *_least(), *_wide(), *_convolution(), *_equal_objective(), *_peers()]

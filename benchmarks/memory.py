"""The growth of the resident memory over 2,000 training steps, after 200 steps of warm-up, in fresh interpreters.

``python -m benchmarks memory`` measures all cases, ``python -m benchmarks.memory NAME [STEPS]`` one of them. The plain
network is the control: what grows there is torch's.
"""

import gc
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from benchmarks import Row, at_most, training_step
from minimand.adjoints import Checkpoint, Implicit, JacobianFree, Unroll
from minimand.nn import SolverOptions, convert
from minimand.solvers import ADMM, FISTA, SVRG, ProxGD, ProxSG
from minimand.train import LPOM, MAC, CachedGram, ProxProp

__all__ = ["CASES", "growth", "run"]

WARM_UP, STEPS, LIMIT = 200, 2000, 10.0

Step = Callable[[], None]


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2), nn.ReLU()),
        *(nn.Flatten(), nn.Dropout(), nn.Linear(288, 32), nn.ReLU(), nn.Linear(32, 10)),
    )


def _fresh(step: Callable[[torch.Tensor, torch.Tensor], object]) -> Step:
    """A step on a batch of its own, whose size changes now and then, as that of a last batch does."""
    sizes = iter(range(10**9))

    def call() -> None:
        rows = 9 if next(sizes) % 10 == 9 else 16
        step(torch.randn(rows, 1, 16, 16), torch.randint(10, (rows,)))

    return call


def _trained(model: nn.Module, prepare: Callable[[torch.optim.Optimizer], object] = lambda o: None) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    kept = prepare(optimizer)
    return _fresh(lambda x, y: (training_step(model, optimizer, x, y)(), kept))


def _converted(options: SolverOptions) -> Callable[[], Step]:
    return lambda: _trained(convert(_net(), {"*": options}))


def _proxprop(**options: object) -> Callable[[], Step]:
    def build() -> Step:
        model = _net()
        return _trained(model, lambda optimizer: ProxProp(model, **options).attach(optimizer))  # type: ignore[arg-type]

    return build


def _lifted(kind: Callable[..., LPOM | MAC], conv: bool, mode: str) -> Callable[[], Step]:
    def build() -> Step:
        torch.manual_seed(0)
        first = [nn.Conv2d(1, 4, 3, stride=2), nn.ReLU(), nn.Flatten()] if conv else [nn.Flatten()]
        model = nn.Sequential(*first, nn.Linear(196 if conv else 256, 24), nn.ReLU(), nn.Linear(24, 10))
        method = kind(model)
        return _fresh(lambda x, y: method.fit([(x, y)], 1, mode=mode))

    return build


CASES: dict[str, Callable[[], Step]] = {
    "plain": lambda: _trained(_net()),
    "converted ProxGD": _converted(SolverOptions(ProxGD(4))),
    "converted ProxSG": _converted(SolverOptions(ProxSG(4, tau=0.5), Checkpoint())),
    "converted SVRG": _converted(SolverOptions(SVRG(1, 3, tau=0.5))),
    "converted ADMM": _converted(SolverOptions(ADMM(2, cg_iters=2), Unroll())),
    "converted FISTA, implicit": _converted(SolverOptions(FISTA(10), Implicit(iters=10))),
    "converted ProxGD, Jacobian-free": _converted(SolverOptions(ProxGD(4), JacobianFree())),
    "ProxProp": _proxprop(),
    "ProxProp, fused": _proxprop(fused=True),
    "ProxProp, cached": _proxprop(gram=CachedGram(every=5)),
    "ProxProp, cg": _proxprop(method="cg"),
    "LPOM": _lifted(LPOM, False, "fast"),
    "LPOM, monotone": _lifted(LPOM, False, "monotone"),
    "LPOM, convolutions": _lifted(LPOM, True, "fast"),
    "MAC": _lifted(MAC, False, "fast"),
}


def resident() -> float:
    """The resident memory of this process in MB."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


def growth(name: str, steps: int = STEPS) -> float:
    """MB by which the resident memory grows in these steps, after the warm-up."""
    torch.set_num_threads(1)
    step = CASES[name]()
    for _ in range(WARM_UP):
        step()
    before = resident()
    for _ in range(steps):
        step()
    return resident() - before


def run() -> list[Row]:
    """One fresh interpreter per case, so that no case uses memory that another one freed."""
    rows = []
    for name in CASES:
        call = [sys.executable, "-m", "benchmarks.memory", name]
        grown = float(subprocess.run(call, check=True, capture_output=True, text=True).stdout)
        rows.append(at_most(f"{name}: MB over {STEPS} steps", grown, LIMIT))
    return rows


if __name__ == "__main__":
    print(f"{growth(sys.argv[1], *map(int, sys.argv[2:])):.2f}")

"""Diagnosis of unrolled networks: whether the learned parameters are those of a convergent solver."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...errors import CapabilityError
from ...functions.base import widened
from ...solvers.problem import Problem
from ..table import table_lines
from .base import PhaseResult, UnrolledNet

__all__ = ["Diagnosis", "PhaseReport", "diagnose"]

# The error of a gain of one, computed by power iteration in float32.
_ROUNDING = 1e-3


@dataclasses.dataclass(frozen=True)
class PhaseReport:
    r"""The report on one phase for one batch.

    Attributes:
        phase: 1, 2, …
        step: The learned step; for ADMM the prox parameter 1/ρ.
        threshold: The learned threshold θ.
        residual: :math:`\|\Phi x - y\|/\|y\|` after the phase.
        objective: :math:`\tfrac12\|\Phi x - y\|^2 + \frac\theta\eta\|\mathcal{F}(x)\|_1` after the phase, with its own
            transform; mean per sample.
        symmetry: :math:`\|\tilde{\mathcal{F}}\mathcal{F}(r) - r\|/\|r\|`, the error of the synthesis as inverse of the
            analysis.
        gain: A lower bound on the Lipschitz constant of the learned prox on this batch, by power iteration on its
            Jacobian. A prox has at most 1.
        momentum: The learned momentum, or None.
        rate: The learned step of the multiplier, or None.
        convergent: Whether a solver with these parameters converges.
        faults: The reasons if it need not converge.
    """

    phase: int
    step: float
    threshold: float
    residual: float
    objective: float
    symmetry: float
    gain: float
    momentum: float | None
    rate: float | None
    convergent: bool
    faults: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """Reports on all phases. It prints as a table; ``as_dict`` returns plain numbers, ``plot`` a figure.

    ``convergent`` concerns the learned parameters: each phase, repeated with a prox in place of the learned map, would
    converge. ``nonexpansive`` tells whether every learned map had a gain of at most 1 on this batch, as a prox has.
    """

    phases: tuple[PhaseReport, ...]
    lipschitz: float
    start: float
    notes: tuple[str, ...] = ()

    @property
    def convergent(self) -> bool:
        """Whether the parameters of all phases are those of a convergent solver."""
        return all(report.convergent for report in self.phases)

    @property
    def nonexpansive(self) -> bool:
        """Whether every learned prox had a gain of at most 1 on this batch."""
        return not self._expansive()

    def _expansive(self) -> list[PhaseReport]:
        return [report for report in self.phases if not report.gain <= 1 + _ROUNDING]

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        return {**dataclasses.asdict(self), "convergent": self.convergent, "nonexpansive": self.nonexpansive}

    def _verdict(self) -> list[str]:
        bad = [f"phase {r.phase}: {', '.join(r.faults)}" for r in self.phases if r.faults]
        if bad:
            return [
                "not a convergent solver; constrained=True keeps the parameters in range",
                *bad,
                *self.notes,
            ]
        wide = self._expansive()
        if not wide:
            return ["every phase is a step of a convergent solver", *self.notes]
        listed, most = ", ".join(str(r.phase) for r in wide), max(r.gain for r in wide)
        return [
            "every phase has the parameters of a convergent solver",
            f"but the learned prox has a gain of up to {most:.3g} (in phase {listed}), and a prox has at most 1: "
            f"repeating it need not converge",
            *self.notes,
        ]

    def __str__(self) -> str:
        columns = {name: cell for name, cell in _COLUMNS.items() if any(cell(report) != "—" for report in self.phases)}
        head = f"‖Φ‖² ≤ {self.lipschitz:.4g}, relative residual at the start {self.start:.3g}"
        return "\n".join([head, *table_lines(columns, self.phases, "right"), *self._verdict()])

    def plot(self) -> Any:
        """A matplotlib figure of steps, thresholds, residual and objective over the phases."""
        import matplotlib.pyplot as plt

        phases = [r.phase for r in self.phases]
        good = ["#0072B2" if r.convergent else "#D55E00" for r in self.phases]
        figure, axes = plt.subplots(1, 4, figsize=(13, 3.2), layout="constrained")
        for axis, title, values in zip(
            axes[:2],
            ("step", "threshold"),
            ([r.step for r in self.phases], [r.threshold for r in self.phases]),
            strict=True,
        ):
            axis.axhline(0, color="black", linewidth=0.8)
            axis.plot(phases, values, color="#999999", zorder=1)
            axis.scatter(phases, values, color=good, zorder=2)
            axis.set_title(title)
        axes[2].plot([0, *phases], [self.start, *(r.residual for r in self.phases)], "o-", color="#009E73")
        axes[2].set(title="relative residual", yscale="log")
        axes[3].plot(phases, [r.objective for r in self.phases], "o-", color="#009E73")
        axes[3].set_title("objective per sample")
        for axis in axes:
            axis.set_xlabel("phase")
            axis.grid(alpha=0.3)
            axis.spines[["top", "right"]].set_visible(False)
        figure.suptitle("; ".join(self._verdict()[:1]) + ("" if self.convergent else " (orange: outside the limits)"))
        return figure


def _optional(value: float | None) -> str:
    return "—" if value is None else f"{value:.3g}"


_COLUMNS: dict[str, Callable[[PhaseReport], str]] = {
    "phase": lambda r: str(r.phase),
    "step": lambda r: f"{r.step:.4g}",
    "threshold": lambda r: f"{r.threshold:.4g}",
    "momentum": lambda r: _optional(r.momentum),
    "rate": lambda r: _optional(r.rate),
    "residual": lambda r: f"{r.residual:.3g}",
    "objective": lambda r: f"{r.objective:.4g}",
    "symmetry": lambda r: f"{r.symmetry:.3g}",
    "gain": lambda r: f"{r.gain:.3g}",
    "convergent": lambda r: "yes" if r.convergent else "NO",
}


def diagnose(net: UnrolledNet, y: Tensor) -> Diagnosis:
    r"""Run an unrolled network on measurements and report, phase by phase, whether it is still a convergent solver.

    Proximal gradient descent needs steps in :math:`(0, 2/\|\Phi\|^2)`. FISTA needs steps in :math:`(0, 1/\|\Phi\|^2]`,
    or up to :func:`~minimand.solvers.steps.inertial_limit` if a learned momentum is small. ADMM needs positive
    penalties. All of them need non-negative thresholds. Unconstrained training leaves these ranges: the public ISTA-Net
    checkpoints have steps of −0.12 and 3.81. The solvers also need a prox, and the learned map only approximates one:
    a ``gain`` above 1 shows that it is not a prox. Mode, parameters and gradients stay unchanged.

    >>> from minimand.nn import ISTANet
    >>> from minimand.operators import orthonormal_gaussian
    >>> phi = orthonormal_gaussian(4, 16, generator=torch.Generator().manual_seed(0))
    >>> net = ISTANet(phi, phases=2)
    >>> diagnose(net, torch.rand(3, 16) @ phi.mT).convergent
    True
    >>> _ = net.step.data.fill_(3.0)
    >>> diagnose(net, torch.rand(3, 16) @ phi.mT).phases[0].faults
    ('step 3 outside (0, 2)',)
    """
    if not isinstance(net, UnrolledNet):
        raise CapabilityError(f"diagnose takes an ISTANet, FISTANet or ADMMNet, got {type(net).__name__}; use explain")
    with torch.no_grad():
        problem = net.problem(y)
        start = _relative_residual(problem, net.start(problem))
        reports = tuple(_report(net, problem, k, result) for k, result in enumerate(net.trajectory(y), 1))
    return Diagnosis(reports, net.lipschitz, start, tuple(net.notes()))


def _relative_residual(problem: Problem, x: Tensor) -> float:
    residual = widened(problem.operator.adjoint(x) - problem.y).norm()
    return float(residual / widened(problem.y).norm().clamp_min(1e-12))


def _report(net: UnrolledNet, problem: Problem, k: int, result: PhaseResult) -> PhaseReport:
    setting, shrinkage = result.setting, result.shrinkage
    objective = Problem(problem.operator, shrinkage, problem.y).objective(result.x) / max(1, len(problem.y))
    symmetry = shrinkage.symmetry().norm() / shrinkage.features().norm().clamp_min(1e-12)
    faults = net.faults(setting)
    if not math.isfinite(float(objective)):
        faults.append("the iterates diverge")
    return PhaseReport(
        phase=k,
        step=float(setting.step),
        threshold=float(setting.threshold),
        residual=_relative_residual(problem, result.x),
        objective=float(objective),
        symmetry=float(symmetry),
        gain=shrinkage.gain(),
        momentum=None if setting.momentum is None else float(setting.momentum),
        rate=None if setting.rate is None else float(setting.rate),
        convergent=not faults,
        faults=tuple(faults),
    )

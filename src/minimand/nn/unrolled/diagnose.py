"""Diagnosis of unrolled networks: what is proved of them, and what was measured."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor

from ...arguments import checked
from ...errors import CapabilityError
from ...functions.base import widened
from ...solvers.problem import Problem
from ..table import table_lines
from .base import PhaseResult, UnrolledNet
from .probing import DISTANCES, ROUNDING, SCALES
from .ridgediagnosis import RidgeDiagnosis, diagnose_ridge
from .ridgenet import RidgeNet

__all__ = ["Diagnosis", "PhaseReport", "diagnose"]


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
        gain, reflection, asymmetry: What was measured of the learned prox T with Jacobians J: the largest factors by
            which T and its reflection :math:`2T - I` increased distances, and the largest :math:`\|J - J^\top\|`. The
            prox of a convex function has at most 1, 1 and 0.
        pairs, jacobians: On how many pairs of images and on how many Jacobians.
        momentum: The learned momentum, or None.
        rate: The learned step of the multiplier, or None.
        faults: Why a solver with these steps, thresholds and momenta need not converge; empty if they are in range.
        departures: What was found to distinguish the learned map from a prox.
        convergent: True: proved. False: refuted by a fault or a departure. None: neither.
    """

    phase: int
    step: float
    threshold: float
    residual: float
    objective: float
    symmetry: float
    gain: float
    reflection: float
    asymmetry: float
    pairs: int
    jacobians: int
    momentum: float | None
    rate: float | None
    faults: tuple[str, ...]
    departures: tuple[str, ...]
    convergent: bool | None


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """Reports on all phases. It prints as a table; ``as_dict`` returns plain numbers, ``plot`` a figure.

    ``guarantee`` is the network's reason why it is a convergent solver, or None: then everything is only measured.
    """

    phases: tuple[PhaseReport, ...]
    lipschitz: float
    start: float
    guarantee: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def convergent(self) -> bool | None:
        """True: the network is proved to be a convergent solver. False: a phase refutes it. None: neither."""
        verdicts = {report.convergent for report in self.phases}
        return False if False in verdicts else None if None in verdicts else True

    @property
    def in_range(self) -> bool:
        """Whether steps, thresholds and momenta are those of a convergent solver; the learned maps need not be."""
        return not any(report.faults for report in self.phases)

    @property
    def nonexpansive(self) -> bool:
        """Whether no learned prox was found to increase distances."""
        return all(report.gain <= 1 + ROUNDING for report in self.phases)

    @property
    def tested(self) -> str:
        """On what the learned maps were tested."""
        report = self.phases[0]
        return (
            f"each learned map was tested on {report.pairs} random pairs of images and {report.jacobians} Jacobians: "
            f"at iterates of this batch as they are, and at these and a random image scaled to root mean squares of "
            f"{', '.join(map(str, SCALES))}; the images of a pair are {', '.join(map(str, DISTANCES))} norms apart"
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        names = ("convergent", "in_range", "nonexpansive", "tested")
        return dataclasses.asdict(self) | {name: getattr(self, name) for name in names}

    def _verdict(self) -> list[str]:
        text = "steps and thresholds are in the range of a convergent solver"
        if self.convergent:
            text = f"a convergent solver, proved in exact arithmetic: {self.guarantee}"
        elif not self.in_range:
            text = "not the parameters of a convergent solver; constrained=True keeps them in range"
        found = [f"phase {r.phase}: {', '.join(r.faults)}" for r in self.phases if r.faults]
        maps = [r for r in self.phases if r.departures]
        if maps:
            worst = max(maps, key=lambda r: r.reflection)
            found.append(
                f"the learned maps of {_listed(maps)} are not proxes of convex functions: repeating them need not "
                f"converge; that of phase {worst.phase} {' and '.join(worst.departures)}"
            )
        elif not self.convergent:
            found.append("no learned map was found to differ from a prox; this is measured, not proved")
        return [text, *found, self.tested, *self.notes]

    def __str__(self) -> str:
        columns = {name: cell for name, cell in _COLUMNS.items() if any(cell(report) != "—" for report in self.phases)}
        head = f"‖Φ‖² ≤ {self.lipschitz:.4g}, relative residual at the start {self.start:.3g}"
        return "\n".join([head, *table_lines(columns, self.phases, "right"), *self._verdict()])

    def plot(self) -> Any:
        """A matplotlib figure of steps, thresholds, residual and objective over the phases."""
        import matplotlib.pyplot as plt

        phases, colors = zip(*((r.phase, "#D55E00" if r.faults else "#0072B2") for r in self.phases), strict=True)
        figure, axes = plt.subplots(1, 4, figsize=(13, 3.2), layout="constrained")
        for axis, name in zip(axes[:2], ("step", "threshold"), strict=True):
            values = [getattr(r, name) for r in self.phases]
            axis.axhline(0, color="black", linewidth=0.8)
            axis.plot(phases, values, color="#999999", zorder=1)
            axis.scatter(phases, values, color=colors, zorder=2)
            axis.set_title(name)
        axes[2].plot([0, *phases], [self.start, *(r.residual for r in self.phases)], "o-", color="#009E73")
        axes[2].set(title="relative residual", yscale="log")
        axes[3].plot(phases, [r.objective for r in self.phases], "o-", color="#009E73")
        axes[3].set_title("objective per sample")
        for axis in axes:
            axis.set_xlabel("phase")
            axis.grid(alpha=0.3)
            axis.spines[["top", "right"]].set_visible(False)
        figure.suptitle(self._verdict()[0] + ("" if self.in_range else " (orange: out of range)"))
        return figure


def _listed(reports: list[PhaseReport]) -> str:
    return f"phase{'s' * (len(reports) > 1)} {', '.join(str(r.phase) for r in reports)}"


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
    "reflection": lambda r: f"{r.reflection:.3g}",
    "asymmetry": lambda r: f"{r.asymmetry:.2g}",
    "convergent": lambda r: {True: "yes", False: "NO", None: "?"}[r.convergent],
}


@overload
def diagnose(net: UnrolledNet, y: Tensor) -> Diagnosis: ...
@overload
def diagnose(net: RidgeNet, y: Tensor) -> RidgeDiagnosis: ...
@checked
def diagnose(net: UnrolledNet | RidgeNet, y: Tensor) -> Diagnosis | RidgeDiagnosis:
    r"""Run an unrolled network on measurements and report, phase by phase, what makes it a convergent solver.

    Proximal gradient descent needs steps in :math:`(0, 2/\|\Phi\|^2)`. FISTA needs steps in :math:`(0, 1/\|\Phi\|^2]`,
    or up to :func:`~minimand.solvers.steps.inertial_limit` if a learned momentum is small. ADMM needs positive
    penalties. All of them need non-negative thresholds. Unconstrained training leaves these ranges: the public ISTA-Net
    checkpoints have steps of −0.12 and 3.81. The solvers also need the prox of a convex function. A learned map is
    tested for three properties of such a prox, on pairs of images and Jacobians at several scales
    (:mod:`minimand.nn.unrolled.probing`). Tests can refute a prox and never prove one, so the report calls a network a
    convergent solver only if its class proves it (:attr:`UnrolledNet.guarantee`). Mode, parameters and gradients stay
    unchanged.

    Of a :class:`RidgeNet` the report separates what its construction proves from what was measured on these
    measurements (:class:`~minimand.nn.unrolled.RidgeDiagnosis`).

    >>> from minimand.nn import ISTANet
    >>> from minimand.operators import orthonormal_gaussian
    >>> phi = orthonormal_gaussian(4, 16, generator=torch.Generator().manual_seed(0))
    >>> net, y = ISTANet(phi, phases=2), torch.rand(3, 16) @ phi.mT
    >>> report = diagnose(net, y)
    >>> report.in_range, report.convergent  # the parameters are a solver's, the maps are not proxes
    (True, False)
    >>> _ = net.step.data.fill_(3.0)
    >>> diagnose(net, y).phases[0].faults
    ('step 3 outside (0, 2)',)
    """
    if not isinstance(net, UnrolledNet | RidgeNet):
        raise CapabilityError(
            f"diagnose takes a RidgeNet, ISTANet, FISTANet or ADMMNet, got {type(net).__name__}; use explain"
        )
    with torch.inference_mode(False), torch.no_grad():
        y = y.clone() if y.is_inference() else y
        if isinstance(net, RidgeNet):
            return diagnose_ridge(net, y)
        problem, guarantee = net.problem(y), net.guarantee
        start = _relative_residual(problem, net.start(problem))
        results = enumerate(net.trajectory(y), 1)
        reports = tuple(_report(net, problem, k, result, guarantee is not None) for k, result in results)
    return Diagnosis(reports, net.lipschitz, start, guarantee, tuple(net.notes()))


def _relative_residual(problem: Problem, x: Tensor) -> float:
    residual = widened(problem.operator.adjoint(x) - problem.y).norm()
    return float(residual / widened(problem.y).norm().clamp_min(1e-12))


def _report(net: UnrolledNet, problem: Problem, k: int, result: PhaseResult, proved: bool) -> PhaseReport:
    setting, shrinkage = result.setting, result.shrinkage
    objective = Problem(problem.operator, shrinkage, problem.y).objective(result.x) / max(1, len(problem.y))
    symmetry = shrinkage.symmetry().norm() / shrinkage.last.features.norm().clamp_min(1e-12)
    probe, faults = shrinkage.probe(), net.faults(setting)
    departures = probe.departures()
    if not math.isfinite(float(objective)):
        faults.append("the iterates diverge")
    return PhaseReport(
        phase=k,
        step=float(setting.step),
        threshold=float(setting.threshold),
        residual=_relative_residual(problem, result.x),
        objective=float(objective),
        symmetry=float(symmetry),
        **probe._asdict(),
        momentum=None if setting.momentum is None else float(setting.momentum),
        rate=None if setting.rate is None else float(setting.rate),
        faults=tuple(faults),
        departures=tuple(departures),
        convergent=False if faults or departures else True if proved else None,
    )

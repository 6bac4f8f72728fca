"""The diagnosis of a RidgeNet: what is proved of it, and what was measured on a batch."""

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from .probing import DISTANCES, SCALES, Probe, probe
from .ridgenet import RidgeNet

__all__ = ["RidgeDiagnosis", "diagnose_ridge"]


@dataclasses.dataclass(frozen=True)
class RidgeDiagnosis:
    r"""What is proved of a :class:`RidgeNet` by its construction, and what was measured on one batch.

    Attributes:
        guarantee: The theorem that holds for its exponents.
        convergent: True if convergence of the iterates is proved, None if only descent is.
        injective: Whether :math:`\ker W = 0` is proved for the present filters.
        smoothness: The certified bound on :math:`\|W\|^2`.
        exponents: The smallest and the largest exponent.
        start, objective: The objective per sample after the phases and at the end.
        residual: :math:`\|\Phi x - y\|/\|y\|` at the end.
        optimality: The norm of the gradient mapping at the end relative to that after the phases.
        iterations: The largest number of certified iterations over the samples.
        converged: Whether every sample reached the tolerance.
        rises: How often the summed objective rose; zero up to rounding by the theorem.
        probe: The measured gain, reflection and asymmetry of one certified step.
        gain_bound: The proved bound on that gain: 1 for convex potentials, otherwise :math:`1 + c_p`.
    """

    guarantee: str
    convergent: bool | None
    injective: bool
    smoothness: float
    exponents: tuple[float, float]
    start: float
    objective: float
    residual: float
    optimality: float
    iterations: int
    converged: bool
    rises: int
    probe: Probe
    gain_bound: float

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        return dataclasses.asdict(self) | {"probe": self.probe._asdict()}

    def __str__(self) -> str:
        low, high = self.exponents
        kernel = "proved for all sizes" if self.injective else "not proved"
        pairs, jacobians = self.probe.pairs, self.probe.jacobians
        return "\n".join([
            f"proved: {self.guarantee}",
            f"proved: ‖W‖² ≤ {self.smoothness:.6g}, exponents in [{low:.3g}, {high:.3g}], ker W = 0: {kernel}",
            f"proved: one certified step increases distances at most {self.gain_bound:.3g}-fold",
            f"measured: objective {self.start:.6g} after the phases, {self.objective:.6g} after {self.iterations} "
            f"certified iterations{'' if self.converged else ' (tolerance not reached)'}, {self.rises} rises",
            f"measured: relative residual {self.residual:.3g}, gradient mapping {self.optimality:.3g} of that at the "
            f"start",
            f"measured: gain of one certified step {self.probe.gain:.4g}, on {pairs} random "
            f"pairs and {jacobians} Jacobians at scales {', '.join(map(str, SCALES))} and distances "
            f"{', '.join(map(str, DISTANCES))}",
        ])  # fmt: skip


def diagnose_ridge(net: RidgeNet, y: Tensor) -> RidgeDiagnosis:
    """Run a network on measurements and report what is proved and what was measured."""
    found = net.descended(y)
    fidelity, regularizer = net.fidelity(y), net.regularizer()
    smoothness, count = net.smoothness(fidelity.operator), max(1, len(found.x))

    def step(x: Tensor) -> Tensor:
        size = x.shape[-2:]
        if len(x) == len(fidelity.y) and size == found.x.shape[-2:]:
            return fidelity.gradient_step(x, regularizer.gradient(x), smoothness)[0]
        part = dataclasses.replace(fidelity, y=fidelity.y[:1].expand(len(x), *fidelity.y.shape[1:]))
        return part.gradient_step(x, regularizer.gradient(x), smoothness)[0]

    first = net.unrolled(y)
    before, after = (float((step(x) - x).norm()) for x in (first, found.x))
    residual = float((fidelity.operator.apply(found.x) - fidelity.y).norm() / fidelity.y.norm().clamp_min(1e-12))
    history = torch.tensor([float(found.start.sum()), *found.history], dtype=torch.float64)
    low, high = float(regularizer.exponent.min()), float(regularizer.exponent.max())
    concave = 2 * ((2 * high - 1) / (2 * high + 2)) ** (high + 1) if high > 0.5 else 0.0
    proved = net.guarantee != "descent" and net.injective
    return RidgeDiagnosis(
        guarantee=net.theorem,
        convergent=True if proved else None,
        injective=net.injective,
        smoothness=smoothness,
        exponents=(low, high),
        start=float(found.start.sum()) / count,
        objective=float(found.objective.sum()) / count,
        residual=residual,
        optimality=after / before if before > 0 else math.nan,
        iterations=int(found.iterations.max()) if len(found.x) else 0,
        converged=bool((found.change <= 1e-4).all()),
        rises=int((history.diff() > 0).sum()),
        probe=probe(step, found.x),
        gain_bound=1 + concave,
    )

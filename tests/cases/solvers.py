"""All solvers, each listed once. A new one joins the laws by a line here."""

import dataclasses

from minimand.solvers import (
    ADMM,
    FISTA,
    RCD,
    SVRG,
    Harmonic,
    HeavyBall,
    Importance,
    ProxGD,
    ProxSG,
    Solver,
)
from minimand.solvers.sampling import resolve_sampling


@dataclasses.dataclass(frozen=True)
class Case:
    """A solver with a few iterations, and with enough to converge on a small, well-conditioned problem."""

    solver: Solver
    long: Solver

    @property
    def brief(self) -> Solver:
        """The method with three iterations: enough for a graph, a type or a message."""
        return self.of(3)

    def of(self, iterations: int) -> Solver:
        """The method with a number of iterations."""
        counts = {"iters": iterations, "outer": 1, "inner": iterations}
        fields = {field.name for field in dataclasses.fields(self.solver)}
        return dataclasses.replace(self.solver, **{name: n for name, n in counts.items() if name in fields})

    @property
    def id(self) -> str:
        sampling = getattr(self.solver, "sampling", "")
        tau = getattr(self.solver, "tau", None) or ""
        return f"{type(self.solver).__name__}-{sampling}-{tau}".rstrip("-").replace(" ", "")


DETERMINISTIC = [
    Case(ProxGD(iters=6), ProxGD(iters=3000)),
    Case(HeavyBall(iters=6), HeavyBall(iters=3000)),
    Case(FISTA(iters=6), FISTA(iters=1000)),
    Case(ADMM(iters=6), ADMM(iters=1500, cg_iters=30)),
]

# Their noise vanishes at the optimum, so that they converge like deterministic solvers.
VARIANCE_REDUCED = [
    Case(SVRG(outer=2, inner=3), SVRG(outer=600, inner=10)),
    Case(SVRG(outer=2, inner=3, tau=1), SVRG(outer=400, inner=20, tau=1)),
    Case(RCD(iters=6), RCD(iters=4000)),
    Case(RCD(iters=6, tau=1), RCD(iters=6000, tau=1)),
]

NOISY = [
    Case(ProxSG(iters=6), ProxSG(iters=4000, decay=Harmonic(20))),
    Case(ProxSG(iters=6, sampling="bernoulli"), ProxSG(iters=4000, decay=Harmonic(20), sampling="bernoulli")),
    Case(ProxSG(iters=6, sampling="importance"), ProxSG(iters=4000, decay=Harmonic(20), sampling="importance")),
    Case(
        ProxSG(iters=6, sampling=Importance(by="gradients")),
        ProxSG(iters=4000, decay=Harmonic(20), sampling=Importance(by="gradients")),
    ),
]

STOCHASTIC = VARIANCE_REDUCED + NOISY
ALL = DETERMINISTIC + STOCHASTIC
SAMPLINGS = [resolve_sampling(case.solver.sampling) for case in NOISY]


def ids(cases: list[Case]) -> list[str]:
    """The names of cases in the output of pytest."""
    return [case.id for case in cases]


def shared(solver: Solver) -> Solver:
    """The same stochastic solver with one sample for the whole batch."""
    return dataclasses.replace(solver, shared_sample=True)  # type: ignore[call-arg]

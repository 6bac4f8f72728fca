"""Every solver, listed once: a new one joins every law by a line here."""

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


@dataclasses.dataclass(frozen=True)
class Case:
    solver: Solver
    long: Solver
    """The same method with enough iterations to converge on a small, well-conditioned problem."""

    @property
    def id(self) -> str:
        sampling = getattr(self.solver, "sampling", "")
        return f"{type(self.solver).__name__}-{sampling}".rstrip("-").replace(" ", "")


DETERMINISTIC = [
    Case(ProxGD(iters=6), ProxGD(iters=3000)),
    Case(HeavyBall(iters=6), HeavyBall(iters=3000)),
    Case(FISTA(iters=6), FISTA(iters=1000)),
    Case(ADMM(iters=6), ADMM(iters=1500, cg_iters=30)),
]

# Those whose noise vanishes at the optimum, so that they converge to it like deterministic ones.
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


def shared(solver: Solver) -> Solver:
    """The same stochastic solver with one sample for the whole batch."""
    return dataclasses.replace(solver, shared_sample=True)  # type: ignore[call-arg]

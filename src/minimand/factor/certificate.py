r"""The answer's proof: how far the objective is from the global minimum, at most.

With the polar :math:`p = \max\{u^\top R v : \theta(u, v) \le 1\}` of the negative loss gradient :math:`R`, a scaled
:math:`R` is a feasible point of the dual problem, and weak duality bounds the distance to the global minimum at *any*
point, whatever produced it. Only an upper bound on the polar proves anything; a lower bound comes with a direction
and tells that the point can be improved.
"""

import enum
import math
from dataclasses import dataclass

from ..errors import require_positive

__all__ = ["UNSOUGHT", "Certificate", "Status", "judge"]


class Status(enum.StrEnum):
    """What is known of a point."""

    CERTIFIED = "CERTIFIED"
    IMPROVABLE = "IMPROVABLE"
    UNDECIDED = "UNDECIDED"


@dataclass(frozen=True)
class Certificate:
    r"""What is proved of a factorisation.

    Attributes:
        status: ``CERTIFIED``: the relative gap is at most the tolerance. ``IMPROVABLE``: it is not, and the polar
            exceeds :math:`\lambda`, with a direction in hand. ``UNDECIDED``: neither is shown.
        gap: An upper bound on :math:`f - F^*`, the distance of the objective to its global minimum.
        relative_gap: The gap over the objective.
        polar_lower: What a direction in hand attains, in the units of :math:`\lambda`.
        polar_upper: No direction attains more; infinite where no bound is known.
        method: How the upper bound was found, and what it assumes.
    """

    status: Status
    gap: float
    relative_gap: float
    polar_lower: float
    polar_upper: float
    method: str

    def finds_nothing_above(self, lam: float) -> bool:
        """Whether a bound was sought, and no direction is known that attains more than ``lam``.

        A bound below ``lam`` that proves nothing belongs to a dual point other than the gradient, of a fit that has
        not converged: it says nothing about directions.
        """
        judged = self.status is Status.CERTIFIED or lam < self.polar_upper < math.inf
        return judged and self.polar_lower <= lam

    def __str__(self) -> str:
        return (
            f"{self.status}: relative gap {self.relative_gap:.2g}, "
            f"polar in [{self.polar_lower:.6g}, {self.polar_upper:.6g}] ({self.method})"
        )


#: Nothing is known of the point, and nothing was asked.
UNSOUGHT = Certificate(Status.UNDECIDED, math.inf, math.inf, 0.0, math.inf, "no certificate was sought")


def judge(
    *,
    gap: float,
    objective: float,
    polar_lower: float,
    polar_upper: float,
    lam: float,
    tol: float = 1e-3,
    method: str,
) -> Certificate:
    r"""The certificate of a point from its gap and the bounds on its polar.

    A gap that rounding made negative is zero. An objective of zero is the global minimum: nothing is below it.

    >>> judge(gap=1e-4, objective=2.0, polar_lower=0.9, polar_upper=1.0, lam=1.0, method="exact").status
    <Status.CERTIFIED: 'CERTIFIED'>
    >>> judge(gap=0.5, objective=2.0, polar_lower=1.1, polar_upper=1.2, lam=1.0, method="exact").status
    <Status.IMPROVABLE: 'IMPROVABLE'>
    >>> judge(gap=0.5, objective=2.0, polar_lower=0.9, polar_upper=1.2, lam=1.0, method="exact").status
    <Status.UNDECIDED: 'UNDECIDED'>
    """
    require_positive("tol", tol)
    gap = 0.0 if gap <= 0 else gap
    relative = gap / objective if objective > 0 else (math.inf if gap > 0 else 0.0)
    otherwise = Status.IMPROVABLE if polar_lower > lam else Status.UNDECIDED
    status = Status.CERTIFIED if relative <= tol else otherwise
    return Certificate(status, gap, relative, polar_lower, polar_upper, method)

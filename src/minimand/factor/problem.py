"""A factorisation problem, options of its growth, its solution, and the verdict of a certificate."""

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ..errors import NonFiniteError, OptionError, require_positive
from .inputs import Units, raised, require_number
from .losses import Loss
from .matrices import RowSharding
from .regularizers import Regularizer

__all__ = [
    "INTERRUPTED",
    "NOT_CERTIFIED",
    "Certificate",
    "FactorProblem",
    "Factors",
    "GrowthOptions",
    "Report",
    "Status",
    "Stop",
    "judge",
    "no_report",
    "noted_if_zero",
    "stop_reason",
]

LARGEST = 100
SHARES = {True: 0.25, False: 1.0}  # the certificate's default share of the work, at a fixed size and grown


@dataclass(frozen=True)
class FactorProblem:
    r"""The problem :math:`\min_{r, U, V} \ell(UV^\top) + \lambda\sum_{i=1}^r\theta(U_i, V_i)`.

    Attributes:
        loss: :math:`\ell`, with its data.
        regularizer: :math:`\theta`.
        lam: :math:`\lambda`.
    """

    loss: Loss
    regularizer: Regularizer
    lam: float

    @property
    def rows(self) -> RowSharding:
        """Where the rows of the data are."""
        return self.loss.rows

    def normalized(self, *factors: Tensor) -> tuple["FactorProblem", Units]:
        """The same problem in the middle of the floating-point range, and its units, for given factors (vectors as
        columns). Every fit and every certificate starts with it."""
        largest = self.loss.largest()
        loss, units = self.loss.normalized(*factors, largest=largest)
        return FactorProblem(loss, self.regularizer, units.weight(self.lam, largest)), units

    def penalty(self, U: Tensor, V: Tensor) -> float:
        """Σ θ of factors with vectors as columns, in float64."""
        left, right = (X.mT.to(torch.float64) for X in (U, V))
        return float(self.regularizer.values(left, right, self.rows).sum())

    def objective(self, U: Tensor, V: Tensor) -> float:
        """The objective of factors with vectors as columns, in float64."""
        return self.loss.value(U, V) + self.lam * self.penalty(U, V)


class Status(enum.StrEnum):
    """The verdict of a certificate."""

    CERTIFIED = "CERTIFIED"
    IMPROVABLE = "IMPROVABLE"
    UNDECIDED = "UNDECIDED"


@dataclass(frozen=True)
class Certificate:
    r"""A bound on the distance of a factorisation to the global minimum over all sizes.

    Attributes:
        status: ``CERTIFIED``: the relative gap is at most the tolerance. ``IMPROVABLE``: it is not, and a known
            direction attains a polar above :math:`\lambda`. ``UNDECIDED``: neither is shown.
        gap: An upper bound on :math:`f - F^*`, the distance of the objective to its global minimum; it may be infinite.
        relative_gap: The gap divided by the objective. Like the status, it is the same for (Y, λ) and (cY, cλ).
        polar_lower: The polar that a known direction attains, in the units of :math:`\lambda`.
        polar_upper: An upper bound on the polar; infinite if no bound is known.
        method: How the upper bound was computed, and its assumptions.
    """

    status: Status
    gap: float
    relative_gap: float
    polar_lower: float
    polar_upper: float
    method: str

    def finds_nothing_above(self, lam: float) -> bool:
        """Whether a bound was computed and no known direction attains more than ``lam``.

        A bound below ``lam`` that does not certify belongs to a dual point other than the gradient, at a point that has
        not converged. It says nothing about directions.
        """
        judged = self.status is Status.CERTIFIED or lam < self.polar_upper < math.inf
        return judged and self.polar_lower <= lam

    def shortfall(self, who: str, tol: float, remedy: str) -> str:
        """The warning of a fit that stopped before its certificate."""
        gap = f"relative gap {self.relative_gap:.2g} > tol={tol:g}"
        return f"{who} stopped before its certificate ({self.status}, {gap}): {remedy}"

    def in_units(self, units: Units) -> "Certificate":
        """The certificate of a problem in its own units, from that of the problem in the middle of the range."""
        lower, upper = (raised(polar, units.polar) for polar in (self.polar_lower, self.polar_upper))
        return replace(self, gap=raised(self.gap, units.objective), polar_lower=lower, polar_upper=upper)

    def __str__(self) -> str:
        return (
            f"{self.status}: relative gap {self.relative_gap:.2g}, "
            f"polar in [{self.polar_lower:.6g}, {self.polar_upper:.6g}] ({self.method})"
        )


#: The certificate of a fit with ``effort=None``: nothing was computed.
NOT_CERTIFIED = Certificate(Status.UNDECIDED, math.inf, math.inf, 0.0, math.inf, "no certificate was requested")
#: The certificate of an interrupted fit.
INTERRUPTED = replace(NOT_CERTIFIED, method="interrupted before the certificate")


class Stop(enum.Enum):
    """Why a fit ended."""

    CERTIFIED = "the relative gap is at most tol"
    FIXED_SIZE = "n_components was given"
    NO_DIRECTION = "no direction was found that attains a polar above lam"
    MAX_ITER = "max_iter iterations are made"
    R_MAX = "the number of components is r_max"
    SEARCH_ENDED = "a direction above lam is known, but its use did not lead to a certificate"
    INTERRUPTED = "the user interrupted it"


@dataclass(frozen=True)
class Factors:
    """The result of a fit.

    Attributes:
        U: n_samples × r (the rows of this process).
        V: n_features × r.
        objective: The objective of these factors.
        certificate: Their certificate; the one that ended the fit.
        history: The objective per round; the last is ``objective``.
        iterations: The number of iterations made, at least 1.
        stop: Why the fit ended.
        modes: (A, B, C, …) of a CP decomposition; None for matrices.
        later: Computes the certificate if the fit has postponed it; else None.
    """

    U: Tensor
    V: Tensor
    objective: float
    certificate: Certificate
    history: tuple[float, ...]
    iterations: int
    stop: Stop
    modes: tuple[Tensor, ...] | None = None
    later: Callable[[], Certificate] | None = None

    def in_units(self, units: Units) -> "Factors":
        """The result for a problem in its own units, from that of the problem in the middle of the range."""
        if units == Units():
            return self
        U, V = units.factor(self.U), units.factor(self.V)
        history = tuple(raised(value, units.objective) for value in self.history)
        certificate, modes = self.certificate.in_units(units), self.modes
        if modes is not None:
            modes = U, *(units.factor(x, 2 * (len(modes) - 1)) for x in modes[1:])
        later = None if self.later is None else partial(_raised, self.later, units)
        moved = replace(self, U=U, V=V, objective=history[-1], certificate=certificate, history=history, modes=modes)
        return replace(moved, later=later)


def _raised(later: Callable[[], Certificate], units: Units) -> Certificate:
    return later().in_units(units)


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

    A gap that is negative by rounding becomes zero. An objective of zero is the global minimum.

    >>> judge(gap=1e-4, objective=2.0, polar_lower=0.9, polar_upper=1.0, lam=1.0, method="exact").status
    <Status.CERTIFIED: 'CERTIFIED'>
    >>> judge(gap=0.5, objective=2.0, polar_lower=1.1, polar_upper=1.2, lam=1.0, method="exact").status
    <Status.IMPROVABLE: 'IMPROVABLE'>
    >>> judge(gap=0.5, objective=2.0, polar_lower=0.9, polar_upper=1.2, lam=1.0, method="exact").status
    <Status.UNDECIDED: 'UNDECIDED'>
    """
    require_positive("tol", tol)
    if math.isnan(gap) or not 0 <= objective < math.inf:
        raise NonFiniteError(
            f"the objective, {objective:g}, or its distance to the minimum, {gap:g}, leaves the range of float64: "
            "scale the factors or weights to the size of the data"
        )
    gap = 0.0 if gap <= 0 else gap
    relative = gap / objective if objective > 0 else (math.inf if gap > 0 else 0.0)
    otherwise = Status.IMPROVABLE if polar_lower > lam else Status.UNDECIDED
    status = Status.CERTIFIED if relative <= tol else otherwise
    return Certificate(status, gap, relative, polar_lower, polar_upper, method)


def stop_reason(
    certificate: Certificate,
    *,
    lam: float,
    tol: float,
    out_of_iterations: bool,
    fixed: bool = False,
    full: bool = False,
) -> Stop:
    """The reason for the end of a fit, from its certificate and what was left of its budget."""
    if certificate.status is Status.CERTIFIED:
        return Stop.CERTIFIED
    if out_of_iterations:
        return Stop.MAX_ITER
    if fixed:
        return Stop.FIXED_SIZE
    if certificate.polar_lower <= lam * (1 + tol / 4):
        return Stop.NO_DIRECTION
    return Stop.R_MAX if full else Stop.SEARCH_ENDED


def noted_if_zero(certificate: Certificate, rank: int, lam: float) -> Certificate:
    """Annotates the certificate's method if every component is zero; ``rank`` counts the components that are not."""
    if rank or not certificate.finds_nothing_above(lam):
        return certificate
    known = certificate.polar_upper <= lam * (1 + 1e-6)
    unknown = "the answer is zero as far as is known: no direction found attains more than lam"
    note = "lam ≥ lambda_max, so the answer is zero" if known else unknown
    return replace(certificate, method=f"{certificate.method}; {note}")


@dataclass(frozen=True)
class GrowthOptions:
    """Options of :func:`grow`, under the names that they have in the estimators.

    Attributes:
        n_components: A fixed number of components, or None to grow until the polar allows no more.
        r_max: The largest number of components; None: ``bound``, at most 100.
        max_iter: The total number of sweeps of local descent.
        tol: The relative gap to certify.
        effort: The certificate's budget as a share of the fit's work; "auto": 1 for a fit that grows, 0.25 at a fixed
            size; None computes no certificate.
        bound: The theory's bound on the size of a minimiser.
        lazy: Whether a certificate that does not influence the fit is postponed.
    """

    n_components: int | None
    r_max: int | None
    max_iter: int
    tol: float
    effort: float | str | None = "auto"
    bound: int = LARGEST
    lazy: bool = False

    def __post_init__(self) -> None:
        for name in ("n_components", "r_max"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 1):
                raise OptionError(f"{name} must be None or a whole number ≥ 1, got {value!r}")
        if self.effort is None and self.n_components is None:
            raise OptionError("effort=None computes no certificate, but growth needs one: pass n_components=…")
        if self.effort == "auto":
            object.__setattr__(self, "effort", SHARES[self.fixed])
        if self.effort is not None:
            require_number("effort", self.effort, zero=True)

    @property
    def fixed(self) -> bool:
        """Whether the size is given."""
        return self.n_components is not None

    @property
    def largest(self) -> int:
        """The largest number of components."""
        if self.n_components is not None:
            return int(self.n_components)
        return min(self.bound, LARGEST) if self.r_max is None else int(self.r_max)

    def stopped(self, certificate: Certificate, lam: float, iterations: int, rank: int) -> Stop:
        """Why a fit with these options ended."""
        return stop_reason(
            certificate,
            lam=lam,
            tol=self.tol,
            fixed=self.fixed,
            out_of_iterations=iterations >= self.max_iter,
            full=rank >= (self.r_max or LARGEST),
        )


#: Called with the sweeps made, the number of components and the objective.
Report = Callable[[int, int, float], None]


def no_report(sweeps: int, rank: int, objective: float) -> None:
    """A report that does nothing."""

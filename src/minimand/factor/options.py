"""Options of growth, and the reports of its progress."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..errors import OptionError
from .inputs import require_number
from .problem import Certificate, Stop, stop_reason

__all__ = ["GrowthOptions", "Report", "no_report"]

LARGEST = 100
SHARES = {True: 0.25, False: 1.0}  # the certificate's default share of the work, at a fixed size and grown


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

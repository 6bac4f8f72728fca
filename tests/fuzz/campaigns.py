"""Campaigns: a strategy that draws cases and a check that raises when a promise is broken."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from tests.cases import certificates
from tests.fuzz import gradients, hostile, norms

__all__ = ["CAMPAIGNS", "Campaign", "Outcome", "run"]


@dataclass(frozen=True)
class Campaign:
    """Cases and their check; ``brief`` cases are part of the tests, ``full`` ones of ``make fuzz``."""

    promise: str
    cases: Callable[[], st.SearchStrategy[Any]]
    check: Callable[[Any], None]
    brief: int
    full: int


@dataclass
class Outcome:
    """The number of cases that were tried, the seconds they took, and a smallest example of each failure."""

    tried: int = 0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)


CAMPAIGNS: dict[str, Campaign] = {
    "norms": Campaign("no bound lies below the largest singular value", norms.cases, norms.check, 150, 100_000),
    "gradients": Campaign("gradients equal finite differences", gradients.cases, gradients.check, 25, 10_000),
    "certificates": Campaign(
        "no certificate claims more than is true", certificates.cases, certificates.check, 40, 10_000
    ),
    "hostile": Campaign("a wrong argument gets a sentence", hostile.cases, hostile.check, 250, 20_000),
}


def run(campaign: Campaign, number: int, start: int) -> Outcome:
    """Try a number of cases; hypothesis reduces a failure to a small example."""
    outcome = Outcome()

    @seed(start)
    @settings(
        max_examples=number, deadline=None, database=None, derandomize=False, suppress_health_check=list(HealthCheck)
    )
    @given(campaign.cases())
    def attempt(case: Any) -> None:
        outcome.tried += 1
        campaign.check(case)

    began = time.perf_counter()
    try:
        attempt()
    except Exception as error:
        notes = getattr(error, "__notes__", [])
        outcome.failures.append(" ".join(f"{type(error).__name__}: {error} {' '.join(notes)}".split()))
    outcome.seconds = time.perf_counter() - began
    return outcome

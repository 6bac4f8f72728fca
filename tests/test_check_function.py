"""Law: check_function passes every function of the library, and names what is wrong with others."""

import dataclasses

import pytest
import torch

from minimand import functions as mf
from minimand.errors import OptionError

from .cases.functions import ALL, FunctionCase, cases


@cases(ALL)
def test_every_function_passes(case: FunctionCase) -> None:
    mf.check_function(case.function, case.shape, trials=3)


@dataclasses.dataclass(frozen=True)
class Broken(mf.Separable):
    """An absolute value with one wrong method."""

    what: str = ""

    def values(self, x):
        return (0.9 if self.what == "value" else 1.0) * x.abs()

    def prox(self, x, step=1.0):
        if self.what == "couples":
            return mf.GroupL2(1.0).prox(x, step)
        if self.what == "hard":
            return torch.where(x.abs() > step, x, 0.0)
        return mf.L1(1.0).prox(x, step)

    def conjugate(self):
        return mf.Box(-2.0, 2.0) if self.what == "conjugate" else mf.Box(-1.0, 1.0)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("value", "prox at step .* is not the minimiser"),
        ("couples", "prox couples entries"),
        ("hard", "prox at step .* is not the minimiser"),
        ("conjugate", "conjugate"),
    ],
)
def test_the_check_names_what_is_wrong(what: str, message: str) -> None:
    mf.check_function(Broken(), (5,))
    with pytest.raises(OptionError, match=message):
        mf.check_function(Broken(what), (5,))

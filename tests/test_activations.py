"""An activation is the prox of its function at step 1, to the bit. Activations that are not proxes are rejected."""

import copy
import pickle
import re
import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minimand import functions as mf
from minimand.errors import NotProximal, OptionError

from .cases.functions import ACTIVATIONS

IDS = [repr(act) if isinstance(act, nn.Module) else getattr(act, "__name__", str(act))[:40] for act, _ in ACTIVATIONS]
POINTS = torch.cat([torch.linspace(-40, 40, 1601), torch.tensor([0.0, -0.0, 1e-30, -1e-30, 1e30, -1e30])])
exactly = pytest.mark.parametrize(("act", "reference"), ACTIVATIONS, ids=IDS)


@exactly
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_equal_to_the_bit_with_equal_gradients(act: object, reference: object, dtype: torch.dtype) -> None:
    function = mf.from_activation(act)
    a, b = POINTS.to(dtype).clone().requires_grad_(), POINTS.to(dtype).clone().requires_grad_()
    ours, theirs = function.prox(a, 1.0), reference(b)
    assert torch.equal(ours, theirs)
    assert torch.equal(function.prox(a), theirs)
    ours.sum().backward()
    theirs.sum().backward()
    assert torch.allclose(a.grad, b.grad, rtol=1e-6)


@exactly
def test_slopes_lie_between_zero_and_one(act: object, reference: object) -> None:
    z = torch.linspace(-30, 30, 6001, dtype=torch.float64)
    slopes = torch.diff(reference(z)) / torch.diff(z)
    assert float(slopes.min()) >= -1e-6
    assert float(slopes.max()) <= 1 + 1e-6
    function = mf.from_activation(act)
    if isinstance(function, mf.Monotone) and function.derivative is not None:
        middle = 0.5 * (z[1:] + z[:-1])
        smooth = (middle.abs() > 0.1) & ((middle.abs() - 3).abs() > 0.1)  # ELU and the hard sigmoid have kinks
        assert torch.allclose(function.derivative(middle)[smooth], slopes[smooth], atol=1e-4)


@exactly
def test_steps_near_one_approach_the_activation(act: object, reference: object) -> None:
    z = torch.linspace(-20, 20, 401, dtype=torch.float64)
    function = mf.from_activation(act)
    for step in (1 - 1e-9, 1 + 1e-9, torch.tensor(1.0, dtype=torch.float64)):
        assert torch.allclose(function.prox(z, step), reference(z), atol=1e-7)


def test_leaky_slopes_are_exact_in_double_precision() -> None:
    x = torch.randn(1000, dtype=torch.float64)
    for slope in [*torch.rand(200, dtype=torch.float64).tolist(), 1e-12, 0.01, 0.5, 1 - 1e-15]:
        assert torch.equal(mf.from_activation(nn.LeakyReLU(slope)).prox(x), F.leaky_relu(x, slope))


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        *(("gelu", "not monotone"), ("silu", "not monotone"), ("swish", "not monotone"), ("Mish", "not monotone")),
        *(("selu", "slope up to"), ("hardswish", "not monotone"), ("glu", "halves"), ("hardshrink", "jumps")),
        *(("rrelu", "random"), ("prelu", "learns"), ("softmax", "mixes"), ("log_softmax", "mixes")),
        *((nn.GELU(), "not monotone"), (nn.GELU("tanh"), "not monotone"), (nn.SiLU(), "not monotone")),
        *((nn.Mish(), "not monotone"), (nn.SELU(), "slope up to"), (nn.Hardswish(), "not monotone")),
        *(
            (nn.PReLU(init=1.5), "slope 1.5 is steeper"),
            (nn.PReLU(init=-0.1), "slope -0.1 decreases"),
            (nn.RReLU(), "random"),
            (nn.Softmax(-1), "mixes"),
            (nn.GLU(), "halves"),
        ),
        *((nn.Hardshrink(), "jumps"), (nn.Softmin(-1), "mixes"), (nn.LogSoftmax(-1), "mixes")),
        *((nn.ELU(1.5), "1.5 > 1"), (nn.ELU(-0.5), "decreases"), (nn.LeakyReLU(1.2), "steeper")),
        *((nn.LeakyReLU(-0.1), "decreases"), (nn.Threshold(0.1, 20.0), "jumps"), (nn.CELU(-1.0), "monotone")),
        *((nn.Softplus(threshold=2.0), "drops by 0.13"), (nn.Softplus(beta=-1.0), "beta > 0")),
        *((F.gelu, "not monotone"), (F.silu, "not monotone"), (F.mish, "not monotone"), (F.selu, "slope")),
        *((torch.softmax, "mixes"), (F.softmax, "mixes"), (F.prelu, "learns"), (torch.selu, "slope")),
        *((partial(F.elu, alpha=2.0), "2 > 1"), (partial(F.gelu, approximate="tanh"), "not monotone")),
        *((torch.exp, "not an activation that"), (nn.Linear(2, 2), "not an activation that"), (3, "not an")),
    ],
    ids=lambda value: re.sub(r" of type object at 0x\w+| at 0x\w+", "", str(value)),
)
def test_refused_in_one_sentence(act: object, reason: str) -> None:
    with pytest.raises(NotProximal, match=reason) as caught:
        mf.from_activation(act)
    message = str(caught.value)
    assert "; " in message  # what and why; then the remedy
    assert ". " not in message
    assert "\n" not in message


def test_elu_by_name_with_alpha_above_one() -> None:
    assert mf.from_activation("elu").prox(torch.tensor(-1.0)) == F.elu(torch.tensor(-1.0))
    with pytest.raises(NotProximal, match=r"use alpha in \[0, 1\]"):
        mf.from_activation(nn.ELU(alpha=1.01))


def test_unknown_names_list_the_known() -> None:
    with pytest.raises(OptionError, match=r"unknown activation 'rleu'; known are celu, elu, .*tanh"):
        mf.from_activation("rleu")
    with pytest.raises(OptionError, match="does not take the options"):
        mf.from_activation(partial(F.leaky_relu, slope=0.1))


class _Halved(nn.ReLU):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * super().forward(x)


class _Renamed(nn.ReLU):
    pass


def test_subclasses_count_by_what_they_compute() -> None:
    assert mf.from_activation(_Renamed()) == mf.NonNegative()
    with pytest.raises(NotProximal, match="_Halved"):
        mf.from_activation(_Halved())
    assert mf.from_activation(mf.L1(0.2)) == mf.L1(0.2)


@pytest.mark.parametrize("phi", [F.gelu, F.selu, torch.exp, torch.neg])
def test_monotone_refuses_other_slopes(phi: object) -> None:
    with pytest.raises(NotProximal, match="slopes between 0 and 1"):
        mf.Monotone(phi)


@exactly
def test_survives_copying_and_pickling(act: object, reference: object) -> None:
    function = mf.from_activation(act)
    for other in (copy.deepcopy(function), pickle.loads(pickle.dumps(function))):
        assert repr(other) == repr(function)
        assert torch.equal(other.prox(POINTS, 0.5), function.prox(POINTS, 0.5))


def test_the_representation_names_the_activation() -> None:
    assert repr(mf.from_activation("tanh")) == "Monotone(tanh)"
    assert repr(mf.from_activation(nn.ELU(0.5))) == "Monotone(elu, alpha=0.5)"
    assert str(mf.from_activation("leaky_relu")) == "LeakyHinge(slope=0.01)"


@pytest.mark.parametrize(
    ("barrier", "act", "shift", "gamma", "error"),
    [
        (mf.LogBarrier, "softplus", 0.0, 0.381, 0.076),
        (mf.LogBox, "tanh", 0.0, 0.0536, 0.0238),
        (mf.LogUnit, "sigmoid", 0.5, 0.236, 0.0441),
    ],
)
def test_the_barriers_approximate_as_well_as_documented(
    barrier: type, act: str, shift: float, gamma: float, error: float
) -> None:
    z = torch.linspace(-12, 12, 4801, dtype=torch.float64)
    exact = mf.from_activation(act).prox(z)

    def worst(gamma: float) -> float:
        return float((barrier(gamma).prox(z + shift) - exact).abs().max())

    assert worst(gamma) == pytest.approx(error, abs=5e-4)
    assert worst(gamma) <= min(worst(0.98 * gamma), worst(1.02 * gamma))


def test_no_warnings_at_construction() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for act, _ in ACTIVATIONS:
            mf.from_activation(act)

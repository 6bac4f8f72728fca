"""Law: bad input is one clear sentence, of a type in ``minimand.errors``, before any work."""

import pytest
import torch

import minimand
from minimand import errors
from minimand.adjoints import Checkpoint, Implicit
from minimand.functions import NonNegative, NuclearNorm, Simplex
from minimand.operators import Conv2d, Dense, LipschitzTracker, lipschitz
from minimand.solvers import (
    ADMM,
    FISTA,
    RCD,
    SVRG,
    Exponential,
    Harmonic,
    HeavyBall,
    Importance,
    Problem,
    ProxGD,
    ProxSG,
    solve,
)

from .cases import solvers

W, Y = torch.randn(3, 4), torch.randn(2, 4)


def problem(**changes):
    given = {"operator": Dense(W), "function": NonNegative(), "y": Y, "bias": None, "ridge": 0.0} | changes
    return Problem(**given)


def nan(tensor):
    tensor = tensor.clone()
    tensor.view(-1)[1] = float("nan")
    return tensor


BAD_PROBLEMS = [
    (problem(y=torch.randn(2, 5)), errors.ShapeError, r"4.*\(2, 5\)"),
    (problem(bias=torch.randn(5)), errors.ShapeError, r"\(5,\).*\(2, 3\)"),
    (
        problem(operator=Conv2d(torch.randn(3, 4, 3, 3), (6, 6)), y=torch.randn(2, 4, 5, 6)),
        errors.ShapeError,
        r"6, 6.*5, 6",
    ),
    (problem(y=nan(Y)), errors.NonFiniteError, "^y holds 1 NaN"),
    (problem(operator=Dense(nan(W))), errors.NonFiniteError, "weight"),
    (problem(bias=torch.tensor([0.0, float("inf"), 0.0])), errors.NonFiniteError, "bias"),
    (problem(ridge=-1.0), errors.OptionError, "ridge.*≥ 0.*-1"),
    (problem(ridge=float("nan")), errors.OptionError, "ridge"),
    (problem(y=Y.double()), errors.OptionError, "float64.*float32"),
]


@pytest.mark.parametrize(("bad", "kind", "message"), BAD_PROBLEMS, ids=range(len(BAD_PROBLEMS)))
def test_bad_problems(bad, kind, message):
    with pytest.raises(kind, match=message) as caught:
        solve(bad, ProxGD())
    assert "\n" not in str(caught.value)


DENSE = Dense(W)
CONV = Conv2d(torch.randn(4, 2, 3, 3), (6, 6), padding=1)
ANY_SIZE = Conv2d(torch.randn(4, 2, 3, 3), None)
GROUPED = Conv2d(torch.randn(4, 1, 3, 3), (6, 6), groups=2)
BAD_SIZES = [
    (lambda: DENSE.apply(torch.ones(2, 5)), r"4.*\(2, 5\)"),
    (lambda: DENSE.apply(torch.tensor(1.0)), r"4.*\(\)"),
    (lambda: DENSE.adjoint(torch.ones(2, 4)), r"3.*\(2, 4\)"),
    (lambda: DENSE.apply(Y, torch.ones(5)), r"\(5,\).*\(2, 3\)"),
    (lambda: DENSE.apply(Y, torch.ones(5, 2, 3)), r"\(5, 2, 3\).*\(2, 3\)"),
    (lambda: DENSE.restrict([4]), "4 features"),
    (lambda: DENSE.restrict(torch.tensor([-1])), "4 features"),
    (lambda: DENSE.restrict(torch.ones(3, dtype=torch.bool)), r"\(3,\).*4 features"),
    (lambda: DENSE.restrict_outputs([3]), "3 features"),
    (lambda: CONV.apply(torch.ones(1, 2, 5, 6)), r"2, 6, 6.*1, 2, 5, 6"),
    (lambda: CONV.apply(torch.ones(1, 3, 6, 6)), r"2, 6, 6.*1, 3, 6, 6"),
    (lambda: CONV.apply(torch.ones(6, 6)), r"\(6, 6\)"),
    (lambda: CONV.apply(torch.ones(2, 6, 6), torch.ones(5)), r"\(5,\).*\(4, 6, 6\)"),
    (lambda: CONV.adjoint(torch.ones(1, 4, 5, 6)), r"4, 6, 6.*1, 4, 5, 6"),
    (lambda: CONV.restrict([2]), "2 features"),
    (lambda: ANY_SIZE.apply(torch.ones(1, 3, 6, 6)), "2 input channels.*3"),
    (lambda: ANY_SIZE.apply(torch.ones(1, 2, 2, 2)), r"\(3, 3\).*\(2, 2\)"),
    (lambda: GROUPED.restrict([2]), "2 features"),
    (lambda: GROUPED.restrict_outputs([-1]), "4 features"),
    (lambda: GROUPED.restrict([0, 1]).apply(torch.ones(1, 3, 6, 6)), "2 channels.*1, 3, 6, 6"),
    (lambda: GROUPED.restrict([0]).adjoint(torch.ones(1, 3, 4, 4)), "4 channels.*1, 3, 4, 4"),
    (lambda: lipschitz(torch.nn.Conv2d(1, 1, 5, padding=4, padding_mode="reflect"), (4, 9)), "of 4 needs.*5.*got 4"),
    (lambda: lipschitz(torch.nn.Conv2d(1, 1, 5, padding=4, padding_mode="circular"), (9, 3)), "of 4 needs.*4.*got 3"),
]


@pytest.mark.parametrize(("call", "message"), BAD_SIZES, ids=range(len(BAD_SIZES)))
def test_operators_name_both_sizes(call, message):
    with pytest.raises(errors.ShapeError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


BAD_KINDS = [
    (lambda: Dense([[1.0]]), "weight.*list"),
    (lambda: Dense(torch.ones(2, 2, dtype=torch.int64)), "weight.*int64"),
    (lambda: Conv2d(torch.ones(1, 1, 2, 2, dtype=torch.complex64), (3, 3)), "weight.*complex64"),
    (lambda: solve(problem(y=[1.0]), ProxGD()), "y must be.*list"),
    (lambda: solve(problem(y=None), ProxGD()), "y must be.*NoneType"),
    (lambda: solve(problem(bias=1.0), ProxGD()), "bias must be.*float"),
    (lambda: solve(problem(), ProxGD(), x0=[0.0]), "x0 must be.*list"),
    (lambda: solve(W, ProxGD()), "Problem.*Tensor"),
    (lambda: solve(problem(), ProxSG(), generator=0), "generator.*0"),
]


@pytest.mark.parametrize(("call", "message"), BAD_KINDS, ids=range(len(BAD_KINDS)))
def test_things_that_are_no_tensors(call, message):
    with pytest.raises(errors.CapabilityError, match=message) as caught:
        call()
    assert isinstance(caught.value, TypeError)


@pytest.mark.parametrize("solver", [case.solver for case in solvers.ALL], ids=repr)
@pytest.mark.parametrize("scale", [1e20, 1e30])
def test_a_norm_that_overflows_is_infinite_and_refused(solver, scale):
    huge = Dense(W * scale)
    assert huge.norm_sq() == float("inf")
    assert lipschitz(Conv2d(torch.full((1, 1, 3, 3), scale), (5, 5))) == float("inf")
    with pytest.raises(errors.NonFiniteError, match=r"overflow|Gram"):
        solve(problem(operator=huge), solver)
    assert solve(problem(operator=Dense(huge.weight.double()), y=Y.double()), FISTA()).x.isfinite().all()


BAD_OPTIONS = [
    (lambda: DENSE.restrict(1), "index"),
    (lambda: DENSE.restrict([0.5]), "index"),
    (lambda: Conv2d(torch.randn(4, 2, 3, 3), 5.5), "input_size"),
    (lambda: Conv2d(torch.randn(4, 2, 3, 3), (5, 5), stride=1.5), "stride"),
    (lambda: Conv2d(torch.randn(4, 2, 3, 3), ("a", "b")), "input_size"),
    (lambda: LipschitzTracker(DENSE, tolerance=-1.0), "tolerance"),
    (lambda: problem(ridge="a").check(), "ridge"),
    (lambda: Exponential("fast"), "decay"),
    (lambda: NuclearNorm(None), "weight"),
    (lambda: ProxSG(tau="half"), "tau is a fraction"),
    (lambda: ProxSG(tau=True), "tau is a fraction"),
    (lambda: ProxGD(step=None), "auto"),
    (lambda: Conv2d(torch.randn(4, 2, 3, 3), (5, 5), groups=0), "groups"),
    (lambda: solve(problem(bias=torch.zeros(3).double()), ProxGD()), "bias is torch.float64"),
    (lambda: solve(problem(), ProxGD(), x0=torch.zeros(2, 3).double()), "x0 is torch.float64"),
    (lambda: ProxGD(iters=0), "iters"),
    (lambda: ProxGD(iters=2.5), "iters"),
    (lambda: ProxGD(step=-1.0), "step.*> 0.*-1"),
    (lambda: ProxGD(step="fast"), "auto"),
    (lambda: HeavyBall(momentum=1.0), "momentum"),
    (lambda: FISTA(iters=True), "iters"),
    (lambda: ADMM(rho=0.0), "rho"),
    (lambda: ProxSG(tau=0.0), "tau"),
    (lambda: ProxSG(tau=1.5), "tau"),
    (lambda: ProxSG(tau=0), "tau"),
    (lambda: ProxSG(tau=-2), "tau"),
    (lambda: ProxSG(decay=0.0), "decay"),
    (lambda: ProxSG(sampling="lucky"), "nice.*lucky"),
    (lambda: SVRG(outer=0), "outer"),
    (lambda: SVRG(tau=2.0), "tau"),
    (lambda: RCD(tau=0.0), "tau"),
    (lambda: Exponential(1.1), "decay"),
    (lambda: Harmonic(0.0), "horizon"),
    (lambda: Importance(by="luck"), "columns"),
    (lambda: Checkpoint(every=0), "every"),
    (lambda: Implicit(method="magic"), "neumann"),
    (lambda: Implicit(tol=-1.0), "tol"),
    (lambda: solve(problem(), ProxGD(), tol=0.0), "tol"),
    (lambda: solve(problem(), ProxSG(tau=5)), "between 1 and 4"),
    (lambda: solve(problem(), SVRG(tau=5)), "between 1 and 4"),
    (lambda: solve(problem(), RCD(tau=4)), "between 1 and 3"),
]


@pytest.mark.parametrize(("make", "message"), BAD_OPTIONS, ids=range(len(BAD_OPTIONS)))
def test_bad_options(make, message):
    with pytest.raises(errors.OptionError, match=message) as caught:
        make()
    assert isinstance(caught.value, ValueError)
    assert "\n" not in str(caught.value)


def test_a_bad_start():
    with pytest.raises(errors.ShapeError, match=r"\(2, 4\).*\(2, 3\)"):
        solve(problem(), ProxGD(), x0=torch.zeros(2, 4))
    with pytest.raises(errors.NonFiniteError, match="x0"):
        solve(problem(), ProxGD(), x0=nan(torch.zeros(2, 3)))


@pytest.mark.parametrize("function", [Simplex(), NuclearNorm(1.0)], ids=lambda f: type(f).__name__)
def test_coordinate_descent_refuses_coupled_functions_by_name(function):
    with pytest.raises(errors.CapabilityError, match=f"RCD.*{type(function).__name__}"):
        solve(problem(function=function), RCD())


def test_every_error_is_a_builtin_too():
    for name in errors.__all__:
        kind = getattr(errors, name)
        if isinstance(kind, type) and kind is not errors.MinimandError:
            assert issubclass(kind, errors.MinimandError)
            assert issubclass(kind, ValueError | TypeError | ImportError | AttributeError)


def test_daily_names_import_from_the_top():
    assert minimand.solve is solve
    assert callable(minimand.lipschitz)


def test_things_of_the_wrong_kind():
    with pytest.raises(errors.CapabilityError, match="a solver such as"):
        solve(problem(), ProxGD)
    with pytest.raises(errors.CapabilityError, match="an adjoint such as"):
        solve(problem(), ProxGD(), adjoint=Implicit)
    with pytest.raises(errors.CapabilityError, match="operator such as"):
        solve(problem(operator=W), ProxGD())
    with pytest.raises(errors.CapabilityError, match="function such as"):
        solve(problem(function="relu"), ProxGD())

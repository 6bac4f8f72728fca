"""Law: no random case breaks a promise of the library. ``make fuzz`` tries many more."""

import inspect

import pytest

import minimand
from tests.fuzz import gradients
from tests.fuzz.campaigns import CAMPAIGNS, run
from tests.fuzz.hostile import CALLS

# Abstract classes and records that the library makes, and functions that take no value to check.
NOT_CALLED = {
    *("Adjoint", "Certificate", "Frame", "Function", "LinearOperator", "Loss", "Network", "Regularizer", "Sample"),
    *("Sampling", "Schedule", "Separable", "Solution", "Solver", "SolverLayer", "Status", "Trace", "UnrolledNet"),
    *("Bernoulli", "ExactGram", "JacobianFree", "L2", "Nice", "NonNegativeL2", "Unroll", "coefficient_parameters"),
    *("iterate", "majorant", "role", "Transition", "Choice", "Datafit", "Progress"),
    # Losses and regularizers are arguments of factorize, which makes or uses them.
    *("Entrywise", "HuberLoss", "SparseL2"),
}


@pytest.mark.parametrize("name", CAMPAIGNS)
def test_campaign(name: str) -> None:
    outcome = run(CAMPAIGNS[name], CAMPAIGNS[name].brief, start=0)
    assert not outcome.failures, outcome.failures[0]


@pytest.mark.filterwarnings("ignore")  # of fits that are cut short
def test_valid_calls_succeed() -> None:
    for name, call in CALLS.items():
        try:
            call.function(**call.arguments())
        except Exception as error:
            raise AssertionError(f"the valid call of {name} fails") from error


def test_every_public_name_is_called() -> None:
    source = inspect.getsource(inspect.getmodule(CALLS["L1"].function))
    packages = (minimand.adjoints, minimand.factor, minimand.functions, minimand.homogeneous, minimand.network)
    packages += (minimand.nn, minimand.norms, minimand.operators, minimand.solvers, minimand.train)
    missing = {name for package in packages for name in package.__all__ if f".{name}" not in source} - NOT_CALLED
    assert not missing, f"no valid call of {sorted(missing)} in tests/fuzz/hostile.py"


@pytest.mark.parametrize("transform", ["func.hessian", "jvp of jvp", "grad of jvp"])
def test_the_solution_is_a_constant_of_jacobian_free_at_every_level(transform: str) -> None:
    """A case that the campaign found: conjugate gradients inside of ADMM were differentiated by nested transforms."""
    problem = ("log_box_conjugate", "blocks", "ADMM", "jacobian-free", transform)
    gradients.check(gradients.GradientCase(*problem, iterations=1, exponent=0, ridge=0.0, shared=False, seed=0))

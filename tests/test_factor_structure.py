"""Law: a fit passes through few files and returns plain values; without scikit-learn only the estimators fail."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import minimand.factor
from minimand.factor import L2, NMF, Squared
from minimand.factor.certificate import certify_factors
from minimand.factor.growth import GrowthOptions, grow
from minimand.factor.problem import FactorProblem, Factors, Stop

HOME = Path(minimand.factor.__file__).parent
Y = np.random.default_rng(0).random((14, 4)) @ np.random.default_rng(1).random((4, 9))


def files_run(call):
    """The files of minimand.factor whose functions are called."""
    seen = set()

    def profile(frame, event, arg):
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(HOME):
            seen.add(path.relative_to(HOME).name)

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return seen


@pytest.mark.parametrize("options", [{}, {"n_components": 3}, {"effort": 0.1}], ids=str)
def test_nmf_fit_passes_through_at_most_eighteen_files(options):
    model = NMF(0.2, random_state=0, **options)
    seen = files_run(lambda: model.fit(Y))
    assert {"nmf.py", "growth.py", "certificate.py"} <= seen
    assert len(seen) <= 18, sorted(seen)


def test_growth_takes_and_returns_values():
    """Equal problems and seeds have equal factors, and nothing that is passed in changes."""
    data = torch.from_numpy(Y)
    problem, options = FactorProblem(Squared(data), L2(), 0.5), GrowthOptions(None, None, 200, 1e-4)
    for value in (problem, options):
        with pytest.raises(dataclasses.FrozenInstanceError):
            value.tol = 1.0
    before = data.clone()
    one, two = (grow(problem, options, like=data, generator=torch.Generator().manual_seed(0)) for _ in range(2))
    assert torch.equal(data, before)
    assert isinstance(one, Factors)
    assert torch.equal(one.U, two.U)
    assert torch.equal(one.V, two.V)
    assert one.certificate == two.certificate
    assert one.stop is Stop.CERTIFIED
    assert one.history[-1] == one.objective == pytest.approx(problem.objective(one.U, one.V), rel=1e-12)
    again = certify_factors(problem, one.U, one.V, tol=1e-4)
    assert again.certificate.status == one.certificate.status
    assert again.objective == pytest.approx(one.objective, rel=1e-12)


def in_a_new_process(code):
    subprocess.run([sys.executable, "-c", code], check=True)


def test_importing_the_library_does_not_import_scikit_learn():
    in_a_new_process("import sys, minimand, minimand.factor; assert 'sklearn' not in sys.modules")


def test_without_scikit_learn_everything_but_the_estimators_works():
    in_a_new_process(
        """
import sys
sys.modules["sklearn"] = None
import numpy as np
import minimand, minimand.factor
from minimand.errors import MissingExtra
from minimand.factor import HuberLoss, certify, certify_tensor, dropout_optimum, equalize, factorize

Y = np.diag([3.0, 0.5])
found = factorize(Y, lam=1.0, random_state=0)
assert certify(Y, found.U, found.V, lam=1.0).status == "CERTIFIED"
assert dropout_optimum(Y, 1, 0.5)[2] == 1
assert equalize(found.U, found.V)[0].shape == (2, 1)
from torch import eye, nn
from minimand.factor import DropoutPenalty, ParallelNetwork
import minimand.homogeneous
two_layers = lambda: nn.Sequential(nn.Linear(2, 1, bias=False), nn.Linear(1, 1, bias=False))
assert float(DropoutPenalty(two_layers(), 0.5)(eye(2))) >= 0
assert ParallelNetwork(two_layers, 0.1, restarts=2).fit(eye(2), eye(2)[:, :1]).certificate_.status == "CERTIFIED"
assert minimand.homogeneous.certify_relu([[0.0]], [0.0], [[1.0, 0.0]], [[0.0]], lam=1.0).status == "CERTIFIED"
estimators = ["CPTensor", "DropoutFactorization", "LowRank", "MatrixCompletion", "NMF", "RobustPCA", "SparseDictionary"]
homes = {name: minimand.factor for name in estimators} | {"ParallelReLU": minimand.homogeneous}
for name, home in [*homes.items(), ("ParallelReLU", minimand.factor)]:
    try:
        getattr(home, name)
    except MissingExtra as error:
        assert "pip install scikit-learn" in str(error) and name in str(error), error
    else:
        raise AssertionError(name)
"""
    )

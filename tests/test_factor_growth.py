"""Law: a fit ends certified, without an improving direction, or out of sweeps or components."""

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning

from minimand.factor import NMF, CPTensor, SparseDictionary, Status, certify
from minimand.factor.certificate import certify_factors
from minimand.factor.growth import GrowthOptions, grow
from minimand.factor.losses import Squared
from minimand.factor.problem import FactorProblem, Stop
from minimand.factor.regularizers import L2, SparseL2
from minimand.factor.residual import DenseDual


def test_no_fit_ends_improvable_with_sweeps_and_room_left():
    Y = np.random.default_rng(1).normal(size=(6, 4))
    model = SparseDictionary(0.4, 0.1, random_state=1).fit(Y)
    assert model.certificate_.status is not Status.IMPROVABLE or model.n_iter_ >= 500 or model.n_components_ == 100
    assert np.diff(model.history_).max(initial=0) <= 1e-3 * model.objective_
    # A second certificate, from other random starts, agrees.
    again = certify(Y, model.transform(Y), model.components_.T, lam=0.4, regularizer="sparse", gamma=0.1)
    assert again.polar_lower <= 0.4 * (1 + 1e-3)


@pytest.mark.parametrize("theta", [L2(), SparseL2(0.3)], ids=str)
def test_a_direction_like_a_pair_in_hand_is_not_discarded(theta, generator):
    """The fit continues from a start that is parallel to every direction."""
    Y = torch.randn(5, 4, generator=generator, dtype=torch.float64)
    found = theta.directions(Squared(Y).zero(), 1, generator)
    problem, options = FactorProblem(Squared(Y), theta, 0.5), GrowthOptions(None, 30, 200, 1e-3)
    fitted = grow(problem, options, like=Y, generator=generator, start=(0.1 * found.left.mT, found.right.mT))
    assert fitted.stop in (Stop.CERTIFIED, Stop.NO_DIRECTION, Stop.MAX_ITER)
    assert fitted.certificate.status is not Status.IMPROVABLE or fitted.iterations >= 200


def test_improvable_means_that_the_direction_lowers_the_objective(generator):
    """Near the minimum: appending the direction at its best size lowers the objective."""
    Y = torch.randn(6, 5, generator=generator, dtype=torch.float64)
    lam = 0.7
    left, s, right = torch.linalg.svd(Y, full_matrices=False)
    root = (s - lam).clamp_min(0).sqrt()
    improvable = 0
    for size in (1e-10, 1e-8, 1e-7, 1e-6, 1e-5, 1e-3, 1e-1):
        U, V = left * root * (1 - size), right.mT * root
        certificate, objective, found = certify_factors(FactorProblem(Squared(Y), L2(), lam), U, V, tol=1e-14)
        if certificate.status is not Status.IMPROVABLE:
            assert size < 1e-5
            continue
        improvable += 1
        step = float(found.values[0]) - lam
        new = 0.5 * (Y - U @ V.mT - step * torch.outer(found.left[0], found.right[0])).square().sum()
        new = float(new + lam * ((U.norm(dim=0) * V.norm(dim=0)).sum() + step))
        assert new < objective
    assert improvable >= 3


MODELS = [NMF(1.0, effort=0), NMF(1.0, effort=0, n_components=2), SparseDictionary(1.0, 0.2, n_components=2)]


@pytest.mark.parametrize("model", [*MODELS, CPTensor(1.0), CPTensor(1.0, n_components=2)], ids=str)
def test_above_lambda_max_the_certificate_says_that_the_answer_is_zero(model):
    Y = np.random.default_rng(0).random((6, 8))
    data = Y.reshape(6, 4, 2) if isinstance(model, CPTensor) else Y
    top = model.lambda_max(data)
    with pytest.warns(UserWarning, match="has no component"):
        far = clone(model).set_params(lam=5 * top, random_state=0).fit(data)
    assert np.abs(far.components_).max(initial=0) == 0
    assert "lam ≥ lambda_max, so the answer is zero" in far.certificate_.method
    with pytest.warns(UserWarning, match="has no component"):
        near = clone(model).set_params(lam=1.001 * top, random_state=0).fit(data)
    assert np.abs(near.components_).max(initial=0) == 0
    assert "the answer is zero" in near.certificate_.method
    below = clone(model).set_params(lam=0.5 * top, random_state=0).fit(data)
    assert "zero" not in below.certificate_.method


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (
            SparseDictionary(0.5, 0.2, max_iter=5),
            r"SparseDictionary stopped .*IMPROVABLE.* max_iter=5 .*raise max_iter",
        ),
        (SparseDictionary(0.5, 0.2, r_max=3), r"it has 3 components, .*raise r_max"),
        (NMF(0.5, max_iter=2, effort=0), "NMF stopped before its certificate .*raise max_iter"),
        (CPTensor(0.5, max_iter=2), "CPTensor stopped before its certificate .*raise max_iter"),
    ],
    ids=str,
)
def test_a_fit_that_stops_before_its_certificate_warns_with_the_remedy(model, says):
    Y = np.abs(np.random.default_rng(1).normal(size=(10, 6)))
    model = clone(model).set_params(random_state=0)
    with pytest.warns(ConvergenceWarning, match=says):
        model.fit(Y.reshape(10, 3, 2) if isinstance(model, CPTensor) else Y)


@pytest.mark.parametrize("verb", ["fit", "fit_transform"])
@pytest.mark.parametrize("lam", [0.5, 100.0])
def test_warnings_point_at_the_caller(verb, lam):
    """The warning's location is not in scikit-learn, whose set_output wraps fit_transform."""
    model = SparseDictionary(lam, 0.2, r_max=3, random_state=0)
    with pytest.warns(UserWarning, match=r"(no component|stopped before)") as caught:
        getattr(model, verb)(np.random.default_rng(1).normal(size=(10, 6)))
    assert [warning.filename for warning in caught] == [__file__]


def test_searches_for_pairs_that_became_zero_cost_no_more_than_the_sweeps(monkeypatch):
    """At a fixed size a search only replaces pairs. A long one cost ten times the sweeps."""
    rng = np.random.default_rng(0)
    Y = rng.exponential(size=(400, 10)) @ rng.exponential(size=(10, 300))
    vectors, product = [], DenseDual._data_times
    monkeypatch.setattr(
        DenseDual, "_data_times", lambda self, x, **kw: (vectors.append(x.shape[1]), product(self, x, **kw))[1]
    )
    model = NMF("10%", n_components=15, random_state=0, effort=None).fit(Y)
    assert len(model.history_) > 1  # pairs became zero and were replaced
    assert sum(vectors) <= 2 * (2 * model.n_components_ * model.n_iter_)


def test_pairs_that_replace_others_are_followed_to_their_size():
    """The gradient of a short pair is small beside that of the others: it must not end the descent at once."""
    rng = np.random.default_rng(0)
    Y = rng.exponential(size=(400, 10)) @ rng.exponential(size=(10, 300))
    model = NMF("10%", n_components=15, random_state=0, effort=None).fit(Y)
    further = NMF(model.lam_, n_components=15, effort=None, tol=1e-6, max_iter=2000)
    further.fit(Y, start=(model.transform(Y), model.components_.T))
    assert model.objective_ <= further.objective_ * (1 + 1e-5)


def test_a_size_that_was_asked_for_is_no_early_stop():
    Y = np.random.default_rng(1).normal(size=(10, 6))
    model = SparseDictionary(0.5, 0.2, n_components=2, random_state=0).fit(Y)  # warnings are errors
    assert model.certificate_.status is Status.IMPROVABLE

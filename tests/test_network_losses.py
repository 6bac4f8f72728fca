"""Law: certificates of the cross-entropy hold at any point and are attained; mini-batches change the descent only."""

import cvxpy as cvx
import numpy as np
import pytest
import torch
from sklearn.model_selection import cross_val_score
from torch import Tensor, nn

from minimand.errors import MinimandError, OptionError, ShapeError
from minimand.factor import ParallelNetwork, ParallelReLU, Status
from minimand.homogeneous.certificate import judge_relu, objective, polar_of, with_ones
from minimand.homogeneous.losses import LOSSES
from minimand.homogeneous.neurons import Neurons, descend

ENTROPY = LOSSES["cross_entropy"]


def _data(n: int = 40, features: int = 4, classes: int = 3) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, features, dtype=torch.float64)
    return x, (x[:, :classes] + 0.3 * torch.randn(n, classes, dtype=torch.float64)).argmax(1)


def _linear_minimum(x: Tensor, labels: Tensor, lam: float) -> float:
    """min of the cross-entropy of XM plus λ‖M‖*."""
    Y = np.eye(int(labels.max()) + 1)[labels.numpy()]
    M = cvx.Variable((x.shape[1], Y.shape[1]))
    outputs = x.numpy() @ M
    loss = cvx.sum(cvx.log_sum_exp(outputs, axis=1)) - cvx.sum(cvx.multiply(Y, outputs))
    return float(cvx.Problem(cvx.Minimize(loss + lam * cvx.normNuc(M))).solve(solver="SCS", eps=1e-8, max_iters=50_000))


@pytest.mark.parametrize("lam", [0.5, 3.0])
def test_two_linear_layers_reach_the_convex_minimum(lam: float) -> None:
    x, labels = _data()
    net = ParallelNetwork(
        lambda: nn.Sequential(nn.Linear(4, 1, bias=False), nn.Linear(1, 3, bias=False)), lam, loss="cross_entropy"
    ).fit(x, labels)
    assert net.certificate_ is not None
    assert net.certificate_.status is Status.CERTIFIED
    best = _linear_minimum(x, labels, lam)
    assert best - 1e-5 <= net.history_[-1] <= best * (1 + 1e-3)
    assert net.history_[-1] - net.certificate_.gap <= best + 1e-5
    assert net.objective(x, labels).item() == pytest.approx(net.history_[-1])


@pytest.mark.parametrize("columns", [1, 2])
def test_a_hidden_layer_of_labels_is_certified_and_below_random_starts(columns: int) -> None:
    x = torch.randn(24, columns, dtype=torch.float64)
    names = np.array(["low", "middle", "high"])[(torch.sin(2 * x[:, 0]) > 0).long() + (x[:, -1] > 0.7).long()]
    model = ParallelReLU(0.4, loss="cross_entropy").fit(x.numpy(), names)
    assert model.certificate_.status is Status.CERTIFIED
    assert set(model.predict(x.numpy())) <= set(names)
    np.testing.assert_allclose(model.predict_proba(x.numpy()).sum(1), 1)
    X, Y = with_ones(x), torch.tensor(np.eye(3)[np.unique(names, return_inverse=True)[1]])
    for _ in range(3):
        start = Neurons(torch.randn(20, columns + 1).double(), torch.randn(20, 3).double())
        found = descend(X, Y, start, 0.4, 500, ENTROPY)
        value = objective(X, Y, *found, 0.4, ENTROPY)
        assert value >= model.objective_ * (1 - 1e-4)
        # At any point the gap covers the distance to the certified minimum.
        R = ENTROPY.residual(torch.relu(X @ found.W.mT) @ found.V, Y)
        proof = judge_relu(X, Y, *found, 0.4, polar_of(X, R, "exact", start.W), 1e-4, ENTROPY)
        assert proof.gap >= value - model.objective_
        assert proof.gap <= value


def test_gaps_of_the_entropy_hold_at_random_points() -> None:
    x, labels = _data()
    best = _linear_minimum(x, labels, 2.0)
    Y = nn.functional.one_hot(labels, 3).double()
    for scale in (0.0, 1e-3, 0.1, 1.0, 30.0):
        M = scale * torch.randn(4, 3, dtype=torch.float64)
        R = ENTROPY.residual(x @ M, Y)
        value = float(ENTROPY.value(x @ M, Y) + 2.0 * torch.linalg.matrix_norm(M, "nuc"))
        polar = float(torch.linalg.matrix_norm(R.mT @ x, 2))
        assert ENTROPY.gap(Y, R, value, 2.0 / polar, 0.0) >= value - best - 1e-5
        outputs, target = (v.numpy() for v in (x @ M, Y))
        array = ENTROPY.array(outputs, target)
        assert array[0] == pytest.approx(float(ENTROPY.value(x @ M, Y)))
        np.testing.assert_allclose(array[1], -R.numpy(), atol=1e-12)


def _images() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(27, 2, bias=False))


@pytest.mark.filterwarnings("ignore:.*stopped before its certificate")
@pytest.mark.parametrize("loss", ["squared", "cross_entropy"])
def test_mini_batches_lower_the_objective_and_are_judged_on_all_samples(loss: str) -> None:
    labels = torch.arange(30) % 2
    x = torch.rand(30, 1, 8, 8) + labels.reshape(-1, 1, 1, 1)
    y = labels if loss == "cross_entropy" else nn.functional.one_hot(labels, 2).float()
    options = {"loss": loss, "descent": 15, "restarts": 2, "max_networks": 2}
    net = ParallelNetwork(_images, 1.0, batch_size=7, **options).fit(x, y)
    assert net.history_[-1] < 0.6 * net.history_[0]
    assert net.objective(x, y).item() == pytest.approx(net.history_[-1], rel=1e-4)
    torch.testing.assert_close(net.predict(x), net(x).detach(), atol=1e-4, rtol=1e-4)
    proof = net.certificate_
    assert proof is not None
    assert proof.polar_lower <= proof.polar_upper < np.inf
    assert 0 <= proof.gap <= net.history_[-1] * (1 + 1e-9)


def test_labels_are_checked() -> None:
    x, labels = _data()
    net = ParallelNetwork(lambda: nn.Linear(4, 3, bias=False), 1.0, loss="cross_entropy")
    rows = nn.functional.one_hot(labels, 3)
    same = [ParallelNetwork(lambda: nn.Linear(4, 3, bias=False), 30.0, loss="cross_entropy") for _ in range(2)]
    assert same[0].fit(x, labels).history_ == same[1].fit(x, rows.double()).history_
    for bad, message in ((labels + 1, "labels must lie in"), (2.0 * rows, "rows of probabilities"), (-rows, "rows")):
        with pytest.raises(OptionError, match=message):
            net.fit(x, bad)
    for bad in (rows[:, :2].double(), labels.double(), labels[:5], torch.tensor(1)):
        with pytest.raises(ShapeError):
            net.fit(x, bad)
    with pytest.raises(OptionError, match="loss must be one of"):
        ParallelNetwork(lambda: nn.Linear(4, 3), 1.0, loss="hinge")  # type: ignore[arg-type]
    with pytest.raises(MinimandError, match="batch_size"):
        ParallelNetwork(lambda: nn.Linear(4, 3), 1.0, batch_size=0)


def test_the_classifier_has_scikit_learns_manners() -> None:
    x, labels = _data(60, 1, 1)
    labels = (x[:, 0] > 0).long()
    model = ParallelReLU(0.5, loss="cross_entropy")
    assert cross_val_score(model, x.numpy(), labels.numpy(), cv=3).min() > 0.8
    assert not hasattr(ParallelReLU(0.5), "predict_proba")
    for bad, message in ((np.linspace(0, 1, 60), "label type"), (np.full((60, 2), 0.7), "rows of probabilities")):
        with pytest.raises(ValueError, match=message):
            model.fit(x.numpy(), bad)
    with pytest.raises(ValueError, match="loss must be one of"):
        ParallelReLU(0.5, loss="hinge").fit(x.numpy(), labels.numpy())

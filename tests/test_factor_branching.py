"""Law: branch and bound over the polar of non-negative factors holds, and is as accurate as it says."""

import numpy as np
import pytest
import torch
from torch import Tensor

from minimand.factor import NMF, Status
from minimand.factor.branching import branched_bound


def _attained(Z: Tensor) -> float:
    """The largest value that ascent from many starts finds."""
    V = torch.rand(500, Z.shape[1], dtype=torch.float64)
    for _ in range(60):
        U = torch.nn.functional.normalize((V @ Z.mT).relu(), dim=1)
        V = torch.nn.functional.normalize((U @ Z).relu(), dim=1)
    return float((V @ Z.mT).relu().norm(dim=1).max())


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("shape", [(6, 1), (1, 6), (2, 9), (7, 3), (4, 20), (15, 5)], ids=str)
def test_the_bound_holds_and_is_tight(shape: tuple[int, int], scale: float) -> None:
    for _ in range(3):
        Z = scale * torch.randn(shape, dtype=torch.float64)
        best = _attained(Z)
        for accuracy in (1e-2, 1e-4):
            bound = branched_bound(Z, best, accuracy, 1e12)
            assert best <= bound <= best * (1 + 1.01 * accuracy) + 1e-12 * scale
        rough = branched_bound(Z, best, 1e-4, 0.0)  # nothing is afforded
        assert rough >= bound
        # Below the polar nothing can be certified: the bound is near the polar, not near the level.
        assert best <= branched_bound(Z, 0.1 * best, 1e-3, 1e12) <= best * (1 + 2e-3) + 1e-12 * scale


def test_zero_and_negative_matrices() -> None:
    assert branched_bound(torch.zeros(4, 3, dtype=torch.float64), 1.0, 1e-3, 1e9) <= 1.001
    assert branched_bound(-torch.ones(4, 3, dtype=torch.float64), 1.0, 1e-3, 1e9) <= 1.001


@pytest.mark.filterwarnings("ignore:.*stopped before its certificate")
def test_small_factorisations_at_a_moderate_weight_are_decided() -> None:
    Y = np.random.default_rng(0).random((20, 4))
    model = NMF("5%", random_state=0).fit(Y)
    assert model.certificate_.method == "branch and bound"
    assert model.certificate_.status is Status.CERTIFIED
    assert NMF("5%", random_state=0).fit(Y.T).certificate_.relative_gap < 5e-3

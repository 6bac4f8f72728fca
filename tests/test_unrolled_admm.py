"""ADMM-Net solves its linear systems: every phase is ADMM with a dense inverse, for every kind of measurement."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from minimand.nn import ADMMNet, Architecture, diagnose
from minimand.nn.unrolled.parameters import assign
from minimand.nn.unrolled.transform import Shrinkage
from minimand.operators import (
    BlockSensing,
    Inpainting,
    LinearOperator,
    SubsampledFourier,
    cartesian_mask,
    gaussian_blur,
    orthonormal_gaussian,
    radial_mask,
)

SIDE = 8


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _double(operator: LinearOperator) -> LinearOperator:
    return operator.with_weight(operator.weight.double())


MEASUREMENTS: dict[str, tuple[Callable[[], LinearOperator], int]] = {
    "orthonormal rows": (
        lambda: BlockSensing(orthonormal_gaussian(5, 16, generator=_generator(), dtype=torch.float64), (SIDE, SIDE)),
        1,
    ),
    "missing pixels": (lambda: Inpainting((torch.rand(SIDE, SIDE, generator=_generator()) < 0.5).float()), 1),
    "radial lines": (lambda: SubsampledFourier(radial_mask((SIDE, SIDE), 0.4)), 1),
    "cartesian lines": (lambda: SubsampledFourier(cartesian_mask((SIDE, SIDE), 0.4, generator=_generator())), 2),
    "blur": (lambda: gaussian_blur((SIDE, SIDE), 0.8), 10),
}
every_measurement = pytest.mark.parametrize(("make", "rounds"), MEASUREMENTS.values(), ids=MEASUREMENTS)


def _dense(operator: LinearOperator) -> Tensor:
    """The operator as a matrix."""
    return operator.apply(torch.eye(SIDE**2, dtype=torch.float64).reshape(-1, 1, SIDE, SIDE)).flatten(1).mT


def _dense_admm(net: ADMMNet, matrix: Tensor, y: Tensor) -> Tensor:
    """Boyd et al., §4.2, with the inverse written out and the learned prox."""
    x, u = matrix.mT @ y, torch.zeros(SIDE**2, dtype=torch.float64)
    for transform, setting in zip(net.transforms, net.settings(), strict=True):
        rho = 1 / setting.step
        system = matrix.mT @ matrix + rho * torch.eye(SIDE**2, dtype=torch.float64)
        z = torch.linalg.solve(system, matrix.mT @ y + rho * (x - u))
        x = Shrinkage(transform, setting.threshold, setting.step).prox((z + u).reshape(1, 1, SIDE, SIDE)).flatten()
        u = u + z - x
    return x


@every_measurement
def test_every_phase_is_admm_with_a_dense_inverse(make: Callable[[], LinearOperator], rounds: int) -> None:
    operator, phases = _double(make()), 4
    torch.manual_seed(0)
    net = ADMMNet(operator, phases, architecture=Architecture(channels=3))
    assign(net, "penalty", torch.full((phases,), 0.3, dtype=torch.float64))
    assert net.cg_iters == rounds
    assert net.exact == (rounds < 10)
    y = operator.apply(torch.rand(1, 1, SIDE, SIDE, generator=_generator(), dtype=torch.float64))
    with torch.no_grad():
        expected = _dense_admm(net, _dense(operator), y.flatten())
        tolerance = 1e-9 if net.exact else 0.05
        torch.testing.assert_close(net(y).flatten(), expected, rtol=0, atol=tolerance)


def test_a_matrix_of_other_rows_is_solved_approximately_with_a_note() -> None:
    phi = torch.randn(5, 16, generator=_generator())
    with pytest.warns(UserWarning, match="not orthonormal"):
        net = ADMMNet(phi, 2, architecture=Architecture(channels=2))
    assert not net.exact
    report = diagnose(net, torch.rand(2, 16) @ phi.mT)
    assert "10 conjugate gradient iterations do not solve" in str(report)
    tight = orthonormal_gaussian(5, 16, generator=_generator())
    assert ADMMNet(tight, 2).exact
    assert ADMMNet(SubsampledFourier(cartesian_mask((8, 8), 0.4, generator=_generator())), 2, cg_iters=2).exact
    assert not ADMMNet(SubsampledFourier(cartesian_mask((8, 8), 0.4, generator=_generator())), 2, cg_iters=1).exact
    assert "conjugate" not in str(diagnose(ADMMNet(tight, 2), _measured(tight)))


def test_a_scaled_tight_matrix_is_solved_by_one() -> None:
    phi = 3 * orthonormal_gaussian(5, 16, generator=_generator())
    with pytest.warns(UserWarning, match="not orthonormal"):
        assert ADMMNet(phi, 2).cg_iters == 1


def _measured(phi: Tensor) -> Tensor:
    return torch.rand(2, 16) @ phi.mT

"""The classical controls solve convex problems, checked against cvxpy and scipy."""

import math

import cvxpy as cp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.fft import dctn, idctn
from torch import Tensor

from minimand.errors import OptionError
from minimand.nn import sparse_reconstruction
from minimand.nn.unrolled import CycleSpinning
from minimand.operators import BlockDCT, BlockSensing, Frame, Wavelet, orthonormal_gaussian
from minimand.operators.frames import dct_matrix
from minimand.solvers import ADMM, FISTA, ProxGD


def _phi() -> Tensor:
    return orthonormal_gaussian(3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def _wide(frame: Frame) -> Frame:
    return frame.with_weight(frame.weight.double())


def test_the_synthesis_control_solves_its_problem() -> None:
    phi = BlockSensing(_phi(), (4, 4))
    frame = BlockDCT((4, 4), block=2, count=4)
    frame = frame.with_weight(frame.weight.double())
    x = torch.rand(1, 1, 4, 4, dtype=torch.float64)
    y, weight = phi.apply(x), 0.1
    n = math.prod(frame.output_shape)
    synthesis = frame.adjoint(torch.eye(n, dtype=torch.float64).reshape(n, *frame.output_shape)).flatten(1).mT.numpy()
    measure = phi.apply(torch.eye(16, dtype=torch.float64).reshape(16, 1, 4, 4)).flatten(1).mT.numpy()
    c = cp.Variable(n)
    best = cp.Problem(
        cp.Minimize(0.5 * cp.sum_squares(measure @ synthesis @ c - y.flatten().numpy()) + weight * cp.norm1(c))
    ).solve(solver=cp.CLARABEL)
    for solver in (ProxGD(500), FISTA(200), ADMM(200, 0.3, cg_iters=2)):
        image = sparse_reconstruction(y, phi, frame, weight, solver, prior="synthesis")
        # Of all coefficients that synthesise this image none may be cheaper than the optimum.
        coefficients = cp.Variable(n)
        cheapest = cp.Problem(
            cp.Minimize(weight * cp.norm1(coefficients)), [synthesis @ coefficients == image.flatten().numpy()]
        ).solve(solver=cp.CLARABEL)
        residual = 0.5 * float((phi.apply(image) - y).square().sum())
        assert residual + cheapest == pytest.approx(best, rel=1e-4)


def test_the_spun_control_in_one_position_solves_its_problem() -> None:
    phi, frame = BlockSensing(_phi(), (4, 4)), _wide(BlockDCT((4, 4), block=2))
    y, weight = phi.apply(torch.rand(1, 1, 4, 4, dtype=torch.float64)), 0.05
    basis = torch.eye(16, dtype=torch.float64).reshape(16, 1, 4, 4)
    measure, analysis = (operator.apply(basis).flatten(1).mT.numpy() for operator in (phi, frame))
    # The mean of each 2 x 2 square is free.
    details = analysis[(np.indices((4, 4)) % 2).any(0).flatten()]
    x = cp.Variable(16)
    objective = 0.5 * cp.sum_squares(measure @ x - y.flatten().numpy()) + weight * cp.norm1(details @ x)
    best = cp.Problem(cp.Minimize(objective)).solve(solver=cp.CLARABEL)
    for solver in (ProxGD(2000), FISTA(400), ADMM(400, 0.3, cg_iters=2)):
        x.value = sparse_reconstruction(y, phi, frame, weight, solver).flatten().numpy()
        assert objective.value == pytest.approx(best, rel=1e-4)


@given(st.integers(0, 2**31), st.floats(0.01, 2.0))
def test_the_prox_is_the_mean_over_the_positions(seed: int, step: float) -> None:
    frame = BlockDCT((8, 8), block=4, count=4).with_weight(dct_matrix(4, dtype=torch.float64))
    x = torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    total = np.zeros((8, 8))
    for move in frame.moves:
        image = np.roll(x.numpy(), move, (0, 1)).reshape(2, 4, 2, 4).swapaxes(1, 2)
        found = dctn(image, axes=(2, 3), norm="ortho")
        shrunk = np.sign(found) * np.maximum(np.abs(found) - 0.3 * step, 0)
        shrunk[..., 0, 0] = found[..., 0, 0]
        back = idctn(shrunk, axes=(2, 3), norm="ortho").swapaxes(1, 2).reshape(8, 8)
        total += np.roll(back, tuple(-k for k in move), (0, 1)) / len(frame.moves)
    np.testing.assert_allclose(CycleSpinning(frame, 0.3).prox(x[None, None], step)[0, 0].numpy(), total, atol=1e-12)


@pytest.mark.parametrize("frame", [BlockDCT((7, 9), block=4, count=4), Wavelet((16, 20), levels=2, count=4)])
def test_the_prox_is_firmly_nonexpansive_and_leaves_flat_images(frame: Frame) -> None:
    g = CycleSpinning(_wide(frame), 0.2)
    a, b = (torch.randn(1, 1, *frame.size, dtype=torch.float64) for _ in range(2))
    difference = g.prox(a) - g.prox(b)
    assert difference.square().sum() <= (difference * (a - b)).sum() + 1e-12
    whole = CycleSpinning(_wide(Wavelet((16, 16), levels=2, count=4)), 5.0)
    flat = torch.full((1, 1, 16, 16), 0.7, dtype=torch.float64)
    torch.testing.assert_close(whole.prox(flat), flat)
    # The filters are the float32 ones.
    assert whole.value(flat) < 1e-4


def test_an_unknown_prior_is_refused() -> None:
    phi = BlockSensing(_phi(), (4, 4))
    with pytest.raises(OptionError, match="spun"):
        sparse_reconstruction(torch.rand(1, 3, 2, 2), phi, BlockDCT((4, 4)), 0.1, prior="tv")  # type: ignore[arg-type]

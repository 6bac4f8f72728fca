"""Laws of the recurrence in the authors' public code: one iteration is conjugate gradients', three are far from it."""

import pytest
import torch

pytest.importorskip("tyro")

from minimand_papers.experiments.frerix2018._proxprop import published_cg


def test_the_published_recurrence_is_no_conjugate_gradient_method():
    torch.manual_seed(0)
    a = torch.randn(30, 8, dtype=torch.float64) * torch.logspace(0, -1, 8, dtype=torch.float64)
    matrix, target = a.T @ a + torch.eye(8, dtype=torch.float64), torch.randn(4, 8, dtype=torch.float64)
    exact = torch.linalg.solve(matrix, target.T).T

    def away(iters):
        # Conjugate gradients: the best point of the Krylov space in the energy norm, by dense linear algebra.
        powers = torch.stack([torch.linalg.matrix_power(matrix, k) @ target.T for k in range(iters)])
        spaces = [torch.linalg.qr(powers[:, :, row].T)[0] for row in range(4)]
        best = torch.stack(
            [q @ torch.linalg.solve(q.T @ matrix @ q, q.T @ b) for q, b in zip(spaces, target, strict=True)]
        )
        found = published_cg(lambda v: v @ matrix, target, iters)
        return float((found - best).norm() / best.norm()), float((best - exact).norm()), float((found - exact).norm())

    assert away(1)[0] < 1e-6
    differs, best, found = away(3)
    assert differs > 0.01
    assert found > best

"""Law: the gap is never understated for any of the objectives, at points near and far from the minimum."""

from functools import partial

import cvxpy as cp
import numpy as np
import pytest
import torch

from minimand.factor import CPTensor, HuberLoss, NonNegativeL2, RobustPCA, SparseL2, Status, certify, certify_tensor
from minimand.factor.certificate import certify_factors
from minimand.factor.descent import Components
from minimand.factor.matrices import RowSharding
from minimand.factor.problem import FactorProblem
from minimand.factor.regularizers import L2
from minimand.factor.residual import DenseDual

from .test_certificate import adversaries, nuclear_minimum, objective

HERE = RowSharding()
# Clarabel's default tolerances, 1e-8: with tighter ones it fails on some of these programs.
SOLVER = {"solver": cp.CLARABEL}


def normal(generator, *shape):
    return torch.randn(shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize(("gamma", "s"), [(0.1, [3.0, 2.0, 1.0, 0.2]), (1.0, [1.0, 1.0, 1.0, 0.0])])
def test_sparse_codes_where_the_minimum_is_known(gamma, s, generator):
    """Y = diag(s)Qᵀ: codes of one entry cost 1 + γ, none cost less, so the minimum is that of the nuclear norm."""
    theta = SparseL2(gamma)
    Q = torch.linalg.qr(normal(generator, 6, 4)).Q
    sizes = torch.tensor(s, dtype=torch.float64)
    Y = sizes.unsqueeze(1) * Q.mT
    lam = 0.4
    best = nuclear_minimum(Y, lam * (1 + gamma))
    root = (sizes - lam * (1 + gamma)).clamp_min(0).sqrt()
    for U, V in adversaries(Y, torch.diag(root), Q * root, generator):
        found = certify(Y, U, V, lam=lam, regularizer="sparse", gamma=gamma)
        assert found.gap >= objective(Y, U, V, lam, theta) - best - 1e-12


def test_sparse_codes_of_one_feature(generator):
    """One column: the induced norm is ‖x‖₂ + γ‖x‖₁, and cvxpy computes the minimum."""
    theta = SparseL2(0.3)
    for _ in range(2):
        Y = normal(generator, 7, 1)
        x = cp.Variable(7)
        charge = 0.2 * (cp.norm(x, 2) + 0.3 * cp.norm(x, 1))
        best = cp.Problem(cp.Minimize(0.5 * cp.sum_squares(Y.numpy()[:, 0] - x) + charge)).solve(**SOLVER)
        point = torch.from_numpy(x.value).unsqueeze(1)
        for U, V in adversaries(Y, point, torch.ones(1, 1, dtype=torch.float64), generator):
            found = certify(Y, U, V, lam=0.2, regularizer="sparse", gamma=0.3)
            assert found.gap >= objective(Y, U, V, 0.2, theta) - best - 1e-6


@pytest.mark.filterwarnings("ignore:.*stopped before its certificate")
@pytest.mark.parametrize("gamma", [None, 0.5, 4.0])
def test_robust_principal_components(gamma, generator):
    """Both formulations of the loss; IMPROVABLE only above the convex minimum."""
    rng = np.random.default_rng(0)
    Y = rng.normal(size=(6, 2)) @ rng.normal(size=(2, 5)) + np.where(rng.random((6, 5)) < 0.1, 5.0, 0.0)
    X = cp.Variable(Y.shape)
    fit = cp.sum(cp.abs(Y - X)) if gamma is None else gamma / 2 * cp.sum(cp.huber(Y - X, 1 / gamma))
    best = cp.Problem(cp.Minimize(fit + 1.5 * cp.normNuc(X))).solve(**SOLVER)
    left, s, right = np.linalg.svd(X.value, full_matrices=False)
    U, V = (torch.from_numpy(x * np.sqrt(s)) for x in (left, right.T))
    data = torch.from_numpy(Y)
    for scale in (1.0, 1e-6):  # another unit of the data: the loss is homogeneous, up to γ
        loss = HuberLoss(scale * data, None if gamma is None else gamma / scale)
        for u, v in adversaries(data, U, V, generator):
            u, v = u * scale**0.5, v * scale**0.5
            found = certify_factors(FactorProblem(loss, L2(), 1.5), u, v).certificate
            value = loss.value(u, v) + 1.5 * float((u.norm(dim=0) * v.norm(dim=0)).sum())
            assert found.gap >= value - scale * best - 1e-6 * scale
            assert found.status is not Status.IMPROVABLE or value > scale * (best - 1e-6)
            assert gamma is not None or found.status is not Status.IMPROVABLE
            if gamma is not None:
                assert found == certify(scale * Y, u, v, lam=1.5, loss=partial(HuberLoss, gamma=gamma / scale))
    for sweeps in (1, 3, 10, 1000):
        model = RobustPCA(1.5, gamma, max_iter=sweeps, random_state=0).fit(Y)
        assert model.certificate_.gap >= model.objective_ - best - 1e-6
        assert model.certificate_.status is not Status.IMPROVABLE or model.objective_ > best - 1e-6
        assert "zero" not in model.certificate_.method  # also if one sweep has no component yet


def test_masked_entries_with_any_regularizer(generator):
    """The best known value is at least the minimum; masked arrays and masks."""
    Y = normal(generator, 5, 4).abs()
    seen = torch.rand(5, 4, generator=generator) < 0.6
    masked = np.ma.MaskedArray(np.where(seen, Y, np.nan), ~seen.numpy())
    U, V = normal(generator, 5, 3).abs(), normal(generator, 4, 3).abs()
    for name, theta, options in (
        ("l2", L2(), {}),
        ("nonnegative", NonNegativeL2(), {"effort": 2e-5}),
        ("sparse", SparseL2(0.2), {"gamma": 0.2}),
    ):
        points = [(u.clamp_min(0), v.clamp_min(0)) for u, v in adversaries(Y, U, V, generator)]
        values = [objective(Y, u, v, 0.3, theta, seen) for u, v in points]
        for (u, v), value in zip(points, values, strict=True):
            found = certify(masked, u, v, lam=0.3, regularizer=name, **options)
            assert found.gap >= value - min(values) - 1e-12


def components(generator, k=3):
    return [torch.linalg.qr(normal(generator, n, k)).Q for n in (6, 5, 4)]


def test_tensors_where_the_minimum_is_known(generator):
    """Orthogonal components: their sizes are the singular values of each unfolding, whose minimum is no larger."""
    for s in ([5.0, 3.0, 0.5], [1.0, 1.0, 1.0]):
        A, B, C = components(generator)
        sizes = torch.tensor(s, dtype=torch.float64)
        Y = torch.einsum("r,ir,jr,kr->ijk", sizes, A, B, C)
        for lam in (0.7, 2.0):
            best = float(torch.where(sizes > lam, lam * sizes - lam**2 / 2, sizes**2 / 2).sum())
            weights = (sizes - lam).clamp_min(0)
            assert certify_tensor(Y, (weights, [A, B, C]), lam=lam).status is Status.CERTIFIED
            for size in (0.0, 1e-8, 1e-2, 1.0):
                for keep in (3, 2):
                    parts = [x[:, :keep] + size * normal(generator, len(x), keep) for x in (A, B, C)]
                    found = certify_tensor(Y, (weights[:keep], parts), lam=lam)
                    scaled = [parts[0] * weights[:keep], *parts[1:]]
                    residual = Y - torch.einsum("ir,jr,kr->ijk", *scaled)
                    charge = torch.stack([x.norm(dim=0) for x in scaled]).prod(0).sum()
                    assert found.gap >= float(0.5 * residual.square().sum() + lam * charge) - best - 1e-12


def test_factors_of_tensorly_start_a_fit_and_are_checked(generator):
    A, B, C = (x.numpy() for x in components(generator, 2))
    Y = np.einsum("r,ir,jr,kr->ijk", [5.0, 3.0], A, B, C)
    for start in ((None, [A, B, C]), (np.array([4.0, 2.0]), [A, B, C]), (4 * A, B, C)):
        model = CPTensor(1.0, random_state=0).fit(Y, start=start)
        assert model.certificate_.status is Status.CERTIFIED
        assert model.n_components_ == 2
        assert model.certificate_.gap == pytest.approx(certify_tensor(Y, model.factors_, lam=1.0).gap, abs=1e-9)
    for bad, message in (
        ((A, B), "start must be|Y needs|pair"),
        ((None, [A, B]), "do not fit"),
        ((A, B, B), "do not fit"),
        ((np.ones(3), [A, B, C]), "weights have shape"),
    ):
        with pytest.raises(ValueError, match=message):
            CPTensor(1.0).fit(Y, start=bad)
    with pytest.raises(ValueError, match="factors must be"):
        certify_tensor(Y, A, lam=1.0)
    with pytest.raises(ValueError, match="three dimensions"):
        certify_tensor(Y[0], (A, B, C), lam=1.0)
    with pytest.raises(ValueError, match="n_components=1"):
        CPTensor(1.0, n_components=1).fit(Y, start=(A, B, C))


def induced(X):
    """Ω of the non-negative regularizer by the doubly non-negative program; exact for rows + columns ≤ 4."""
    n, m = X.shape
    W = cp.Variable((n + m, n + m), PSD=True)
    return cp.Problem(cp.Minimize(0.5 * cp.trace(W)), [W >= 0, W[:n, n:] == X.numpy()]).solve(**SOLVER)


@pytest.mark.parametrize("shape", [(2, 2), (1, 3), (3, 3)])
def test_the_induced_penalty_of_nonnegative_factors_is_convex_and_dual_to_the_polar(shape, generator):
    """[Vidal2018]: convex on segments, at most the penalty of any factors, and ⟨Z, X⟩ ≤ Ω(X) · polar(Z)."""
    theta = NonNegativeL2()
    for _ in range(3):
        pairs = [Components(*(torch.rand(k, n, generator=generator).double() for n in shape)) for k in (2, 3)]
        t = float(torch.rand((), generator=generator))
        joined = Components(*(torch.cat([t**0.5 * a, (1 - t) ** 0.5 * b]) for a, b in zip(*pairs, strict=True)))
        X = [p.U.mT @ p.V for p in (*pairs, joined)]
        first, second, between = (induced(x) for x in X)
        assert between <= t * first + (1 - t) * second + 1e-6
        for pair, omega in zip((*pairs, joined), (first, second, between), strict=True):
            assert float(theta.values(pair.U, pair.V, HERE).sum()) >= omega - 1e-6
            Z = normal(generator, *shape)
            product = float((Z * (pair.U.mT @ pair.V)).sum())
            assert product <= theta.upper(DenseDual(Z), 0.1).value * omega + 1e-6

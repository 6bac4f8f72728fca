"""Factorisations against scikit-learn, SoftImpute, full and randomised SVDs, on one thread.

SoftImpute is restated here (Mazumder, Hastie & Tibshirani, 2010, as fancyimpute runs it: a full SVD of the dense
filled matrix in each iteration); fancyimpute 0.7 itself does not run with scikit-learn 1.9. It starts from zero, and
its time is taken when it first reaches the objective of ours; after ``PATIENCE`` seconds it is stopped, and the ratio
is then a lower bound.
"""

import itertools
import statistics
import subprocess
import sys
import time
import warnings
from typing import NamedTuple

import numpy as np
import scipy.sparse as sp
import torch
from sklearn.decomposition import NMF as SklearnNMF
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.extmath import randomized_svd

from benchmarks import Ratio, Row, at_least, at_most, in_turn, peer, ratios, reported, skipped
from minimand.factor import NMF, LowRank, MatrixCompletion, RobustPCA
from minimand.factor.bounds import cholesky_bound
from minimand.factor.residual import DenseDual

__all__ = ["parts", "race", "run"]

PATIENCE = 120.0


class Race(NamedTuple):
    """Our time over scikit-learn's, without and with the certificate, and a remark."""

    bare: Ratio
    proved: Ratio
    note: str


def parts(n: int, m: int, k: int, seed: int = 0) -> np.ndarray:
    """A matrix of k sparse parts and noise."""
    rng = np.random.default_rng(seed)
    U, V = (rng.random((size, k)) * (rng.random((size, k)) < 0.4) for size in (n, m))
    return U @ V.T + 0.1 * rng.random((n, m))


def race(Y: np.ndarray, k: int, share: float, rounds: int = 5) -> Race:
    """The default call at a fixed size beside scikit-learn's; each side starts and stops by its own rule."""
    n, m = Y.shape
    lam = share * float(randomized_svd(Y, 1, random_state=0)[1][0])
    peer = SklearnNMF(k, random_state=0, alpha_W=lam / m, alpha_H=lam / n, l1_ratio=0.0)
    bare, proved = (NMF(lam, n_components=k, random_state=0, effort=effort) for effort in (None, "auto"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        found = ratios(lambda: peer.fit(Y), [lambda: bare.fit(Y), lambda: proved.fit(Y).certificate_], rounds)
        W, H = peer.transform(Y), peer.components_
    fit = 0.5 * np.square(Y - W @ H, dtype=np.float64).sum()
    theirs = fit + lam * float((np.linalg.norm(W, axis=0) * np.linalg.norm(H, axis=1)).sum())
    note = f"objective {bare.objective_ / theirs - 1:+.1e} of theirs, {bare.n_iter_} sweeps against {peer.n_iter_}"
    return Race(*found, f"{note}; {proved.certificate_.status}")


#: Rows, columns, the largest ratio without and with the certificate. The stopping rule was chosen on other matrices.
SIZES = ((100, 50, 3.0, 3.0), (300, 150, 3.0, 3.0), (500, 250, 0.8, 1.2), (1000, 500, 0.8, 1.2), (2000, 1000, 0.8, 1.2))


def _nmf() -> list[Row]:
    rows = []
    for n, m, bare, proved in (*SIZES, (20000, 2000, 0.8, 1.2)):
        Y = parts(n, m, 15, seed=1234).astype(np.float32 if n > 10000 else np.float64)
        for share in (0.02, 0.002):
            found = race(Y, 15, share, 1 if n > 10000 else 5)
            title = f"NMF {n}×{m}, k = 15, λ = {share:g} σ₁: ours / scikit-learn"
            rows.append(at_most(f"{title}, no certificate", found.bare, bare, found.note))
            rows.append(at_most(f"{title}, certificate included", found.proved, proved, found.note))
    return rows


def _observed(n: int, m: int, share: float, rank: int = 10) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    Y = rng.normal(size=(n, rank)) @ rng.normal(size=(rank, m)) + 0.5 * rng.normal(size=(n, m))
    return Y, rng.random((n, m)) < share


def soft_impute(Y: np.ndarray, seen: np.ndarray, lam: float, goal: float) -> tuple[float, float]:
    """Seconds until the objective is at most ``goal``, and the objective then."""
    begin = time.process_time()
    X = np.zeros_like(Y)
    objective = np.inf
    while time.process_time() - begin < PATIENCE:
        u, s, vt = np.linalg.svd(np.where(seen, Y, X), full_matrices=False)
        s = np.maximum(s - lam, 0)
        keep = s > 0
        X = (u[:, keep] * s[keep]) @ vt[keep]
        objective = 0.5 * np.square((Y - X)[seen]).sum() + lam * s.sum()
        if objective <= goal:
            break
    return time.process_time() - begin, objective


def _completion() -> list[Row]:
    Y, seen = _observed(1000, 800, 0.15)
    hidden, lam = np.where(seen, Y, np.nan), 20.0
    model = MatrixCompletion(lam, random_state=0)
    begin = time.process_time()
    model.fit(hidden)
    ours = time.process_time() - begin
    theirs, reached = soft_impute(Y, seen, lam, model.objective_ * (1 + 1e-5))
    behind = reached / model.objective_ - 1
    note = (
        f"restated SoftImpute, objective {behind:+.1e} of ours when stopped; gap {model.certificate_.relative_gap:.0e}"
    )
    rows = [at_least("completion 1000×800, 15% seen: SoftImpute / ours", theirs / ours, 10, note)]
    return [*rows, *_linear(), _memory()]


def _linear() -> list[Row]:
    """Seconds per sweep and observed entry at three sizes; for linear cost, largest over smallest is one."""
    per_entry = []
    for scale in (1, 2, 4):
        Y, seen = _observed(500 * scale, 400 * scale, 0.1 / scale)
        hidden = np.where(seen, Y, np.nan)
        spent, sweeps = zip(*(_fitted(hidden, count) for count in (10, 110)), strict=True)
        per_entry.append((spent[1] - spent[0]) / (sweeps[1] - sweeps[0]) / int(seen.sum()))
    shown = ", ".join(f"{1e9 * x:.0f}" for x in per_entry)
    return [at_most("time per sweep and entry, 4× the entries / 1×", per_entry[-1] / per_entry[0], 1.6, f"ns: {shown}")]


def _fitted(hidden: np.ndarray, sweeps: int) -> tuple[float, int]:
    """Seconds and sweeps of a fit; two fits give the time of a sweep without start and certificate."""
    model = MatrixCompletion(15.0, n_components=10, max_iter=sweeps, tol=1e-12, random_state=0)
    model.fit(hidden)
    return statistics.median(in_turn([lambda: model.fit(hidden)], 3)[0]), model.n_iter_


def _memory() -> Row:
    """The peak memory of a fit of sparse data over the size of the dense matrix."""
    code = (
        "import numpy as np, scipy.sparse as sp, torch\n"
        "from minimand.factor import MatrixCompletion\n"
        "torch.set_num_threads(1)\n"
        "rng = np.random.default_rng(0); n = 12000; e = 150000\n"
        "Y = sp.coo_array((rng.normal(size=e), (rng.integers(n, size=e), rng.integers(n, size=e))), (n, n)).tocsr()\n"
        "MatrixCompletion(9.0, n_components=2, max_iter=2).fit(Y[:200, :200] + sp.eye_array(200))\n"
        "peak = lambda: next(int(x.split()[1]) for x in open('/proc/self/status') if x.startswith('VmHWM'))\n"
        "before = peak()\n"
        "MatrixCompletion(9.0, n_components=5, max_iter=5).fit(Y)\n"
        "print((peak() - before) * 1024 / (8 * n * n))"
    )
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return at_most("completion 12000×12000: peak memory / dense matrix", float(found.stdout), 0.5)


def _texts() -> Row:
    """The peak memory of a certified fit of sparse data like TF-IDF over the size of the matrix and the factors."""
    code = (
        "import numpy as np, scipy.sparse as sp, torch, warnings\n"
        "from minimand.factor import NMF\n"
        "warnings.simplefilter('ignore'); torch.set_num_threads(1)\n"
        "rng = np.random.default_rng(0); n = 10000; e = 1050000\n"
        "row, column = rng.integers(n, size=e), (n * rng.random(e) ** 3).astype(int)\n"
        "Y = sp.coo_array((rng.random(e), (row, column)), (n, n)).tocsr(); Y.sum_duplicates(); del row, column\n"
        "model = NMF('2%', n_components=20, random_state=0)\n"
        "model.fit(Y[:300, :300]).certificate_\n"
        "open('/proc/self/clear_refs', 'w').write('5')\n"
        "peak = lambda: next(int(x.split()[1]) for x in open('/proc/self/status') if x.startswith('VmHWM'))\n"
        "before = peak()\n"
        "model.fit(Y).certificate_\n"
        "size = Y.data.nbytes + Y.indices.nbytes + Y.indptr.nbytes + 2 * 8 * n * 20\n"
        "print((peak() - before) * 1024 / size, Y.nnz, model.n_iter_, model.certificate_.status)"
    )
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    note = f"{found[1]} entries, 20 components, {found[2]} sweeps, {found[3]}"
    return at_most("NMF of sparse 10000×10000: peak memory / (matrix + factors)", float(found[0]), 3.0, note)


def _robust() -> Row:
    """Principal component pursuit, 600 × 400, rank 10, a twentieth of the entries spoilt, at tensorly's objective."""
    name = "robust PCA 600×400: tensorly / ours, objectives within 1e-4"
    if (tensorly := peer("tensorly.decomposition")) is None:
        return skipped(name, "tensorly")
    rng = np.random.default_rng(0)
    Y = rng.normal(size=(600, 10)) @ rng.normal(size=(10, 400))
    Y = Y + np.where(rng.random(Y.shape) < 0.05, 10 * rng.normal(size=Y.shape), 0.0)
    lam = float(np.sqrt(max(Y.shape)))

    def objective(X: np.ndarray) -> float:
        return float(np.abs(Y - X).sum() + lam * np.linalg.norm(X, "nuc"))

    begin = time.process_time()
    # It sums the norms of both unfoldings, which are one matrix and its transpose.
    low, _ = tensorly.robust_pca(Y, reg_E=1.0, reg_J=lam / 2, n_iter_max=1000, verbose=0)
    theirs, goal = time.process_time() - begin, objective(low)
    sweeps = 5
    while True:
        begin = time.process_time()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # too few sweeps are tried on purpose
            model = RobustPCA(lam, None, max_iter=sweeps, random_state=0).fit(Y)
        ours = time.process_time() - begin
        if model.objective_ <= goal * (1 + 1e-4) or sweeps > 1000:
            break
        sweeps = sweeps * 3 // 2
    note = f"{sweeps} sweeps, objective {model.objective_ / goal - 1:+.1e} of theirs, {model.certificate_.status}"
    return reported(name, theirs / ours, note)


def _certificate() -> Row:
    """The time to certify that a norm is at most a level slightly above it."""
    Y = torch.randn(4000, 2000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    level = float(torch.linalg.svdvals(Y)[0]) * (1 + 1e-6)
    (found,) = ratios(lambda: cholesky_bound(DenseDual(Y), level), [lambda: torch.linalg.svdvals(Y)], 3)
    excess = cholesky_bound(DenseDual(Y), level).value / level - 1
    note = f"bound {excess:+.1e} of the level"
    return at_least("σmax certificate 4000×2000: svdvals / Cholesky", found, 5, note)


def _nuclear() -> Row:
    rng = np.random.default_rng(0)
    Y = rng.normal(size=(2000, 20)) @ rng.normal(size=(20, 1000)) + rng.normal(size=(2000, 1000))
    model = LowRank(300.0, random_state=0)
    model.fit(Y)
    (found,) = ratios(lambda: randomized_svd(Y, model.n_components_, random_state=0), [lambda: model.fit(Y)], 7)
    note = f"rank {model.n_components_} found, certificate included: {model.certificate_.status}"
    return at_most("nuclear norm 2000×1000: ours / randomized_svd, rank known", found, 1.5, note)


def _large_nuclear() -> Row:
    rng = np.random.default_rng(1234)
    Y = rng.normal(size=(20000, 20)) @ rng.normal(size=(20, 2000)) + rng.normal(size=(20000, 2000))
    Y = Y.astype(np.float32)
    model = LowRank(500.0, random_state=0)
    model.fit(Y)
    (found,) = ratios(lambda: randomized_svd(Y, model.n_components_, random_state=0), [lambda: model.fit(Y)], 3)
    note = f"rank {model.n_components_} found, certificate included: {model.certificate_.status}"
    return at_most("nuclear norm 20000×2000 float32: ours / randomized_svd, rank known", found, 3.0, note)


def _als(Y: sp.csr_array, lam: float, k: int, goal: float) -> float:
    """Seconds of plain alternating ridge regressions, a row at a time, until the objective is at most ``goal``."""
    begin, rng = time.process_time(), np.random.default_rng(0)
    U, V = (0.1 * rng.normal(size=(size, k)) for size in Y.shape)
    entries, ridge = Y.tocoo(), lam * np.eye(k)
    sides = [(Y, U, V), (sp.csr_array(Y.T), V, U)]
    while time.process_time() - begin < PATIENCE:
        for data, X, other in sides:
            for i, (a, b) in enumerate(itertools.pairwise(data.indptr)):
                design = other[data.indices[a:b]]
                X[i] = np.linalg.solve(design.T @ design + ridge, design.T @ data.data[a:b])
        residual = entries.data - (U[entries.row] * V[entries.col]).sum(1)
        if 0.5 * residual @ residual + 0.5 * lam * (np.square(U).sum() + np.square(V).sum()) <= goal:
            break
    return time.process_time() - begin


def _ratings() -> list[Row]:
    """6040 × 3900 with about 10⁶ entries, some rows and columns far more popular than others."""
    rng, n, m, k, lam = np.random.default_rng(1234), 6040, 3900, 10, 8.0
    rows, columns = ((rng.pareto(power, size) + 0.2) for power, size in ((1.8, n), (1.6, m)))
    drawn = rng.choice(n, 2_400_000, p=rows / rows.sum()) * m + rng.choice(m, 2_400_000, p=columns / columns.sum())
    row, column = np.divmod(rng.permutation(np.unique(drawn))[:1_000_000], m)
    U, V = rng.normal(size=(n, k)), rng.normal(size=(m, k))
    values = (U[row] * V[column]).sum(1) + 0.5 * rng.normal(size=len(row))
    Y = sp.csr_array((values, (row, column)), (n, m))
    bare, proved = (MatrixCompletion(lam, n_components=k, random_state=0, effort=e) for e in (None, "auto"))
    times = in_turn([lambda: bare.fit(Y), lambda: proved.fit(Y).certificate_], 3)
    ours, certified = (statistics.median(t) for t in times)
    theirs = _als(Y, lam, k, bare.objective_ * (1 + 1e-4))
    note = f"{len(values)} entries, {bare.n_iter_} sweeps, {proved.certificate_.status}"
    title = "completion 6040×3900, k = 10"
    return [
        at_most(f"{title}: ours / plain ALS at our objective + 1e-4", ours / theirs, 1.0, note),
        at_most(f"{title}: with the certificate / without", certified / ours, 1.25, note),
    ]


def run() -> list[Row]:
    """Ratios of time and memory, with their targets."""
    return [*_nmf(), *_completion(), *_ratings(), _texts(), _robust(), _certificate(), _nuclear(), _large_nuclear()]

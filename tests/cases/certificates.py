"""Random certificates of problems whose minimum is known in closed form, at any scale; for laws and for fuzzing.

``random_case(seed)`` draws a case, ``check(case)`` raises AssertionError if its certificate claims more than is true,
or less than it must. The oracles are numpy's singular values and formulas, at a scale where they are exact to rounding.
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from hypothesis import strategies as st

from minimand.errors import OptionError
from minimand.factor import (
    NMF,
    Certificate,
    CPTensor,
    HuberLoss,
    LowRank,
    MatrixCompletion,
    ParallelReLU,
    RobustPCA,
    Status,
    certify,
    certify_tensor,
    factorize,
)
from minimand.homogeneous import certify_relu

__all__ = ["KINDS", "CertificateCase", "cases", "check", "random_case"]

EPS = float(np.finfo(float).eps)
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class CertificateCase:
    """A problem, a point and what is known of both, at scale one; ``scale`` multiplies the data."""

    kind: str
    seed: int
    lam: float
    tol: float
    scale: float
    minimum: float
    value: float  # the objective of the point; of a fit, that of the data
    size: float  # of the numbers whose differences enter the objective
    run: Callable[["CertificateCase"], tuple[Certificate, float]] = field(repr=False)  # the certificate and the value
    point: str = "fit"
    degree: int = 2
    polar: float | None = None  # the truth at the point
    certified: bool = False  # whether the certificate must say so
    tight: bool = False  # whether the upper bound on the polar must be near the truth
    extreme: bool = False  # whether a refusal is an answer

    def polar_in_units(self, polar: float) -> float:
        """A polar of the certificate at scale one."""
        return polar / self.scale if self.degree == 2 else polar


def check(case: CertificateCase) -> None:
    """Raise AssertionError if the certificate of a case overclaims or understates."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found, value = case.run(case)
    except OptionError as error:
        if not case.extreme:
            raise AssertionError(f"{case} was refused: {error}") from error
        return
    lower, upper = (case.polar_in_units(x) for x in (found.polar_lower, found.polar_upper))
    said = f"{case}: {found!r}"
    assert not any(math.isnan(x) for x in (found.gap, found.relative_gap, lower, upper)), said
    assert found.status is _status(found, case), said
    residual = math.sqrt(2 * max(value, 0.0)) if case.degree == 2 else 1.0
    slack = 64 * EPS * case.size * (residual + EPS * case.size) + 1e-13 * abs(value)
    excess = value - case.minimum - slack
    assert excess <= (found.relative_gap + 1e-12) * value, f"overclaims ({excess / value:.3g}): {said}"
    if case.polar is not None:
        noise = 64 * EPS * case.size + 1e-9 * case.polar
        assert lower <= case.polar + noise, f"false lower bound {case.polar:.6g}: {said}"
        assert upper >= case.polar - noise, f"false upper bound {case.polar:.6g}: {said}"
        if found.status is Status.IMPROVABLE:
            assert case.polar > case.lam - noise, f"not improvable: {said}"
        if case.tight:
            assert upper <= 1.06 * case.polar + 1e3 * noise, f"loose bound {case.polar:.6g}: {said}"
    if case.certified:
        assert found.status is Status.CERTIFIED, f"understates: {said}"
        assert value <= case.minimum * (1 + case.tol) + slack, f"{value} > {case.minimum}: {said}"


def _status(found: Certificate, case: CertificateCase) -> Status:
    """The status that the numbers of a certificate mean."""
    if found.relative_gap <= case.tol:
        return Status.CERTIFIED
    above = case.polar_in_units(found.polar_lower) > case.lam
    # A network needs a margin that the certificate does not hold.
    return found.status if case.kind == "relu" else Status.IMPROVABLE if above else Status.UNDECIDED


# -- drawing -----------------------------------------------------------------------------------------------------------


def random_case(seed: int) -> CertificateCase:
    """The case of a seed; the first seeds go through all kinds."""
    return KINDS[sorted(KINDS)[seed % len(KINDS)]](np.random.default_rng(seed), seed)


def cases() -> st.SearchStrategy[CertificateCase]:
    """Hypothesis draws the seed."""
    return st.integers(0, 2**32 - 1).map(random_case)


def _scale(rng: np.random.Generator) -> float:
    """One, an even power of two or a power of ten, up to 1e±300."""
    power = int(rng.integers(-300, 301))
    return float(rng.choice([1.0, 4.0 ** int(rng.integers(-8, 9)), 10.0**power, 4.0 ** (power * 1.65 // 1)]))


def _tol(rng: np.random.Generator) -> float:
    return float(rng.choice([1e-2, 1e-3, 1e-6]))


def _lam(rng: np.random.Generator, top: float) -> tuple[float, bool]:
    """A weight: usually a share of the largest singular value, rarely far from it; and whether it may be refused."""
    if top == 0:
        return 1.0, False
    draw = rng.random()
    if draw < 0.75:
        return top * float(rng.uniform(0.02, 1.2)), False
    if draw < 0.9:
        return top * 10.0 ** float(rng.uniform(-10, 3)), False
    power = float(rng.uniform(-330, 330))
    return top * 10.0**power if abs(power) < 300 else 10.0 ** (math.copysign(300, power)), True


def _matrix(rng: np.random.Generator, most: int = 9) -> Array:
    """Small matrices: random, of low rank, with equal, zero or repeated rows and columns, of one entry."""
    n, m = rng.integers(1, most, 2)
    Y = rng.standard_normal((n, m))
    kind = rng.integers(8)
    if kind == 0:
        Y = np.outer(Y[:, 0], rng.standard_normal(m))
    elif kind == 1:
        Y[rng.integers(n)] = 0
        Y[:, rng.integers(m)] = 0
    elif kind == 2:
        Y = Y[rng.integers(n, size=n)][:, rng.integers(m, size=m)]
    elif kind == 3:
        Y = np.ones((n, m)) * rng.standard_normal()
    elif kind == 4:
        Y = np.linalg.qr(rng.standard_normal((max(n, m), max(n, m))))[0][:n, :m]  # equal singular values
    elif kind == 5:
        Y *= 10.0 ** rng.uniform(-12, 0, (n, 1))
    elif kind == 6:
        Y = np.round(Y * 3)
    return Y


def _shrunk(Y: Array, lam: float) -> tuple[Array, Array]:
    """The balanced factors of the minimiser for the nuclear norm."""
    left, s, right = np.linalg.svd(Y, full_matrices=False)
    root = np.sqrt(np.maximum(s - lam, 0))[s > lam]
    return left[:, s > lam] * root, right.T[:, s > lam] * root


def _nuclear(s: Array, lam: float) -> float:
    """The minimum of ½‖s − x‖² + λ‖x‖₁."""
    return math.fsum(np.where(s > lam, lam * s - lam**2 / 2, s**2 / 2)) if lam < 1e150 else math.fsum(s**2 / 2)


def _point(rng: np.random.Generator, U: Array, V: Array, Y: Array) -> tuple[str, Array, Array]:
    """The minimiser, or a point near or far from it."""
    r, kind = U.shape[1], str(rng.choice(["optimum", "near", "scaled", "part", "empty", "padded", "split", "random"]))
    if kind == "near":
        U = U + 10.0 ** rng.uniform(-14, 0) * rng.standard_normal(U.shape)
    elif kind == "scaled":
        U = U * (1 + 10.0 ** rng.uniform(-14, 0))
    elif kind == "part":
        U, V = U[:, 1:], V[:, 1:]
    elif kind == "empty":
        U, V = U[:, :0], V[:, :0]
    elif kind == "padded":
        U, V = np.c_[U, np.zeros((len(U), 2))], np.c_[V, rng.standard_normal((len(V), 2))]
    elif kind == "split":
        U, V = np.c_[U, U] / 2**0.5, np.c_[V, V] / 2**0.5
    elif kind == "random":
        size = np.sqrt(np.abs(Y).max() or 1.0)
        U, V = (size * rng.standard_normal((n, max(r, 1))) for n in Y.shape)
    return kind, U, V


def _spread(rng: np.random.Generator, scale: float, *factors: Array) -> list[Array]:
    """Factors of the scaled product: with equal sizes, or with powers of two moved between them."""
    root = scale ** (1 / len(factors))
    scaled = [x * root for x in factors]
    if rng.random() < 0.4 and factors[0].shape[1]:
        most = int(rng.choice([20, 800])) - int(abs(math.log2(scale)) / len(factors))
        moves = rng.integers(-max(most, 0), max(most, 0) + 1, factors[0].shape[1])
        moved = np.ldexp(scaled[0], moves), np.ldexp(scaled[1], -moves)
        if all(np.array_equal(np.ldexp(x, m), y) for x, m, y in zip(moved, (-moves, moves), scaled, strict=False)):
            scaled[:2] = moved  # nothing left the range
    return scaled


def _norms(U: Array, V: Array) -> Array:
    return np.asarray(np.linalg.norm(U, axis=0) * np.linalg.norm(V, axis=0))


def _top(R: Array) -> float:
    return float(np.linalg.norm(R, 2)) if R.size else 0.0


def _certify(Y: Array, U: Array, V: Array, case: CertificateCase, **options: Any) -> tuple[Certificate, float]:
    weight = case.lam * case.scale if case.degree == 2 else case.lam
    if not 0 < weight < math.inf:
        raise OptionError("lam leaves the range of float64")
    return certify(Y, U, V, lam=weight, tol=case.tol, **options), case.value


def _given(
    kind: str, rng: np.random.Generator, seed: int, Y: Array, best: tuple[Array, Array], lam: float, minimum: float,
    *, extreme: bool = False, theta: Callable[[Array, Array], Array] = _norms, clip: bool = False,
    mask: Array | None = None, tight: bool = True, dtype: Any = float, **options: Any,
) -> CertificateCase:  # fmt: skip
    """A case of certify: the data of a matrix problem and a point near its minimiser."""
    name, U, V = _point(rng, *best, Y)
    if clip:
        U, V = np.abs(U), np.abs(V)
    R = Y - U @ V.T if mask is None else np.where(mask, Y - U @ V.T, 0.0)
    value = 0.5 * math.fsum((R**2).ravel()) + lam * math.fsum(theta(U, V))
    size = float(np.linalg.norm(Y) + _norms(U, V).sum())
    scale = _scale(rng) if dtype is float else 1.0
    data, (left, right) = Y * scale if dtype is float else Y.astype(dtype), _spread(rng, scale, U, V)
    if mask is not None:
        data, options = np.where(mask, data, np.nan), {**options, "mask": mask}
    tol = _tol(rng)
    converged = name in ("optimum", "split") or (name in ("padded",) and not clip)
    return CertificateCase(
        kind, seed, lam, tol, scale, minimum, value, size,
        lambda case: _certify(data, left, right, case, **options),
        point=name,
        polar=_top(R) if tight and not clip else None,
        certified=converged and tight and not extreme and value > (1e-4 * tol + 1e-7) * size**2,
        tight=tight and not clip,
        extreme=extreme,
    )  # fmt: skip


def _l2(rng: np.random.Generator, seed: int) -> CertificateCase:
    Y = _matrix(rng)
    dtype = rng.choice([float, float, float, np.float32, np.float16, np.int64, bool])
    if dtype is not float:
        Y = (np.round(3 * Y) if dtype in (np.int64, bool) else Y).astype(dtype).astype(float)
    s = np.linalg.svd(Y, compute_uv=False)
    lam, extreme = _lam(rng, s[0])
    return _given("l2", rng, seed, Y, _shrunk(Y, lam), lam, _nuclear(s, lam), extreme=extreme, dtype=dtype)


def _perron(rng: np.random.Generator, seed: int) -> CertificateCase:
    """Non-negative data and λ above the second singular value: the minimiser of the nuclear norm is non-negative."""
    Y = np.abs(_matrix(rng))
    left, s, right = np.linalg.svd(Y, full_matrices=False)
    lam = float(rng.uniform(s[1] if len(s) > 1 else 0.0, 1.1 * s[0])) or 1.0
    root = math.sqrt(max(s[0] - lam, 0))
    best = np.abs(left[:, :1]) * root, np.abs(right.T[:, :1]) * root
    return _given("perron", rng, seed, Y, best, lam, _nuclear(s, lam), clip=True, regularizer="nonnegative", effort=0.2)


def _blocks(rng: np.random.Generator) -> tuple[Array, Array, list[tuple[Array, Array, float]]]:
    """Rank-one blocks on disjoint rows and columns: the matrix, the blocks' places, their non-negative triples."""
    sizes = [tuple(rng.integers(1, 4, 2)) for _ in range(rng.integers(1, 4))]
    n, m = (sum(size[i] for size in sizes) + int(rng.integers(0, 2)) for i in range(2))
    Y, where, triples, i, j = np.zeros((n, m)), np.zeros((n, m), bool), [], 0, 0
    wide = rng.random() < 0.3
    for a, b in sizes:
        u, v = np.zeros(n), np.zeros(m)
        u[i : i + a], v[j : j + b] = np.abs(rng.standard_normal(a)) + 0.1, np.abs(rng.standard_normal(b)) + 0.1
        u, v = u / np.linalg.norm(u), v / np.linalg.norm(v)
        size = 10.0 ** float(rng.uniform(-250, 0)) if wide and i else float(rng.uniform(0.2, 3))
        Y += size * np.outer(u, v)
        where[i : i + a, j : j + b] = True
        triples.append((u, v, size))
        i, j = i + a, j + b
    return Y, where, triples


def _from_blocks(triples: list[tuple[Array, Array, float]], lam: float) -> tuple[tuple[Array, Array], Array]:
    kept = [(math.sqrt(s - lam) * u, math.sqrt(s - lam) * v) for u, v, s in triples if s > lam]
    U, V = (np.array([pair[i] for pair in kept]).T if kept else np.zeros((len(triples[0][i]), 0)) for i in range(2))
    return (U, V), np.array([s for _, _, s in triples])


def _separable(rng: np.random.Generator, seed: int) -> CertificateCase:
    """Non-negative blocks: their singular vectors are the non-negative minimiser."""
    Y, _, triples = _blocks(rng)
    lam, extreme = _lam(rng, max(s for _, _, s in triples))
    best, s = _from_blocks(triples, lam)
    return _given(
        "separable", rng, seed, Y, best, lam, _nuclear(s, lam), extreme=extreme, clip=True, regularizer="nonnegative",
        effort=0.2,
    )  # fmt: skip


def _masked(rng: np.random.Generator, seed: int) -> CertificateCase:
    """Observed blocks on disjoint rows and columns: the nuclear norm of their sum is at most that of any completion."""
    Y, where, triples = _blocks(rng)
    Y = Y * rng.choice([-1.0, 1.0], (len(Y), 1))
    triples = [(u * np.sign(Y.sum(1)), v, s) for u, v, s in triples]
    lam, extreme = _lam(rng, max(s for _, _, s in triples))
    best, s = _from_blocks(triples, lam)
    return _given("masked", rng, seed, Y, best, lam, _nuclear(s, lam), extreme=extreme, mask=where)


def _sparse(rng: np.random.Generator, seed: int) -> CertificateCase:
    """Orthogonal rows: codes of one entry cost 1 + γ, and none cost less."""
    n, m = sorted(rng.integers(1, 8, 2))
    Q = np.linalg.qr(rng.standard_normal((m, n)))[0]
    sizes = rng.uniform(0, 3, n) * (rng.random(n) < 0.8)
    gamma = float(rng.choice([0.0, 0.1, 1.0]))
    lam, extreme = _lam(rng, float(sizes.max()))
    lam /= 1 + gamma
    root = np.sqrt(np.maximum(sizes - lam * (1 + gamma), 0))
    best = np.diag(root)[:, root > 0], (Q * root)[:, root > 0]
    minimum = _nuclear(sizes, lam * (1 + gamma))

    def theta(U: Array, V: Array) -> Array:
        return np.asarray(np.linalg.norm(V, axis=0) * (np.linalg.norm(U, axis=0) + gamma * np.abs(U).sum(0)))

    Y = sizes[:, None] * Q.T
    options = {"regularizer": "sparse", "gamma": gamma}
    return _given("sparse", rng, seed, Y, best, lam, minimum, extreme=extreme, theta=theta, tight=False, **options)


def _diagonal(rng: np.random.Generator, *, smooth: bool = False) -> tuple[Array, float, Any, Array, float]:
    """A diagonal matrix, for which robust components are scalar problems: data, λ, γ, the minimiser, the minimum."""
    n = int(rng.integers(1, 6))
    y, lam = rng.uniform(-3, 3, n), float(rng.uniform(0.05, 1.3))
    gamma = None if rng.random() < 0.3 and not smooth else 10.0 ** float(rng.uniform(-1, 1))
    noise = 0.0 if gamma is None else min(lam, 1.0) / gamma  # residuals up to it are squares in the minimum
    x = np.sign(y) * np.maximum(np.abs(y) - noise, 0) * (lam < 1)
    return np.diag(y), lam, gamma, np.diag(x), _huber(y - x, gamma) + lam * np.abs(x).sum()


def _huber(r: Array, gamma: float | None) -> float:
    a = np.abs(r).ravel()
    return math.fsum(a if gamma is None else np.where(a * gamma <= 1, gamma * a**2 / 2, a - 0.5 / gamma))


def _robust(rng: np.random.Generator, seed: int) -> CertificateCase:
    Y, lam, gamma, X, minimum = _diagonal(rng, smooth=True)
    x = np.diag(X)
    root = np.sqrt(np.abs(x))
    name, U, V = _point(rng, np.diag(root * np.sign(x)), np.diag(root), Y)
    R, scale = Y - U @ V.T, _scale(rng)
    value, size = _huber(R, gamma) + lam * math.fsum(_norms(U, V)), float(np.linalg.norm(Y) + _norms(U, V).sum())
    left, right = _spread(rng, scale, U, V)
    loss = partial(HuberLoss, gamma=gamma / scale)
    return CertificateCase(
        "robust", seed, lam, _tol(rng), scale, minimum, value, size * max(gamma, 1.0),
        lambda case: _certify(Y * scale, left, right, case, loss=loss),
        point=name, degree=1, polar=_top(np.clip(gamma * R, -1, 1)),
    )  # fmt: skip


def _tensor(rng: np.random.Generator, seed: int) -> CertificateCase:
    """Orthogonal components: the minimiser shrinks their sizes."""
    r = int(rng.integers(1, 4))
    bases = [np.linalg.qr(rng.standard_normal((n, n)))[0][:, :r] for n in rng.integers(r, 5, 3)]
    sizes = rng.uniform(0.1, 3, r)
    lam, extreme = _lam(rng, float(sizes.max()))
    kept = np.cbrt(np.maximum(sizes - lam, 0))
    name = str(rng.choice(["optimum", "near", "part"]))
    a, b, c = (Q * kept for Q in bases)
    if name == "near":
        a = a + 10.0 ** rng.uniform(-12, 0) * rng.standard_normal(a.shape)
    elif name == "part":
        a, b, c = a[:, 1:], b[:, 1:], c[:, 1:]
    Y = np.einsum("ir,jr,kr,r->ijk", *bases, sizes)
    R = Y - np.einsum("ir,jr,kr->ijk", a, b, c)
    norms = np.linalg.norm(a, axis=0) * _norms(b, c)
    value, scale = 0.5 * float((R**2).sum()) + lam * float(norms.sum()), _scale(rng)
    factors = _spread(rng, scale, a, b, c)
    size = float(np.linalg.norm(Y) + norms.sum())

    def run(case: CertificateCase) -> tuple[Certificate, float]:
        weight = lam * scale
        if not 0 < weight < math.inf:
            raise OptionError("lam leaves the range of float64")
        return certify_tensor(Y * scale, factors, lam=weight, tol=case.tol), value

    tol = _tol(rng)
    certified = name == "optimum" and not extreme and value > (1e-4 * tol + 1e-7) * size**2
    return CertificateCase(
        "tensor", seed, lam, tol, scale, _nuclear(sizes, lam), value, size, run, point=name,
        polar=float(np.minimum(sizes, lam).max()) if name == "optimum" else None, certified=certified, extreme=extreme,
    )  # fmt: skip


def _relu(rng: np.random.Generator, seed: int) -> CertificateCase:
    """One sample: a neuron along [x; 1] has the least cost, and the minimum is a soft threshold of the target."""
    columns, outputs, scale = int(rng.integers(1, 4)), int(rng.integers(1, 3)), _scale(rng)
    room = max(290 - abs(math.log10(scale)), 0.0) if rng.random() < 0.5 else 3.0
    x, y = rng.standard_normal((1, columns)) * 10.0 ** rng.uniform(-room, room), rng.standard_normal((1, outputs))
    row = np.r_[x[0], 1.0]
    length, target = math.hypot(*row), float(np.linalg.norm(y))
    lam = target * length * float(rng.uniform(0.02, 1.2))
    kept = max(target - lam / length, 0.0)
    name = str(rng.choice(["optimum", "near", "empty"]))
    root = math.sqrt(kept / length)
    W, V = root * row[None] / length, root * y / target
    if name == "near":
        W = W + root * 10.0 ** rng.uniform(-12, 0) * rng.standard_normal(W.shape)
    elif name == "empty":
        W, V = W[:0], V[:0]
    R = y - np.maximum(row @ W.T, 0) @ V
    cost = sum(math.hypot(*w) * math.hypot(*v) for w, v in zip(W, V, strict=True))
    value = 0.5 * float((R**2).sum()) + lam * cost
    left, right = (z.T for z in _spread(rng, scale, W.T, V.T))
    tol = _tol(rng)
    return CertificateCase(
        "relu", seed, lam, tol, scale, float(_nuclear(np.array([target]), lam / length)), value,
        target + length * cost,
        lambda case: (certify_relu(x, y * scale, left, right, lam=lam * scale, tol=tol), value),
        point=name, polar=float(np.linalg.norm(R)) * length, certified=name == "optimum" and columns < 3,
    )  # fmt: skip


def _pair(rng: np.random.Generator, seed: int) -> CertificateCase:
    """Two points of a problem whose minimum is not known: the lower bound at one is at most the value of the other."""
    Y = _matrix(rng)
    kind = str(rng.choice(["nonnegative", "sparse", "masked"]))
    gamma, mask = (0.3 if kind == "sparse" else None), None
    Y = np.abs(Y) if kind == "nonnegative" else Y
    lam = max(_top(Y), 1e-3) * float(rng.uniform(0.02, 0.8))
    name = {"masked": "l2"}.get(kind, kind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if kind == "masked":
            mask = (rng.random(Y.shape) < 0.7) | (np.arange(len(Y))[:, None] % Y.shape[1] == np.arange(Y.shape[1]))
            mask[:, mask.sum(0) == 0] = True
            model: Any = MatrixCompletion(lam, max_iter=60, random_state=0)
            U = model.fit_transform(np.where(mask, Y, np.nan))
            V = model.components_.T
        else:
            U, V, *_ = factorize(Y, lam=lam, regularizer=name, gamma=gamma, max_iter=60, random_state=0)

    def theta(U: Array, V: Array) -> Array:
        return np.asarray(_norms(U, V) + (gamma or 0.0) * np.linalg.norm(V, axis=0) * np.abs(U).sum(0))

    R = Y - U @ V.T if mask is None else np.where(mask, Y - U @ V.T, 0.0)
    best = 0.5 * math.fsum((R**2).ravel()) + lam * math.fsum(theta(U, V))
    options = {"regularizer": name, "gamma": gamma, "effort": 0.2}
    clip = kind == "nonnegative"
    return _given("pair", rng, seed, Y, (U, V), lam, best, theta=theta, clip=clip, mask=mask, tight=False, **options)


def _network(rng: np.random.Generator, seed: int) -> CertificateCase:
    """As a pair: the lower bound of a network is at most the value of one that was grown."""
    n, columns, scale = int(rng.integers(2, 8)), int(rng.integers(1, 4)), _scale(rng)
    spread = float(rng.choice([0.0, 1.0, 20.0]))
    x = rng.standard_normal((n, columns)) * 10.0 ** rng.uniform(-spread, spread, (n, 1))
    y = rng.standard_normal((n, 1)) * 10.0 ** rng.uniform(-spread, 0, (n, 1))
    X = np.c_[x, np.ones(n)]
    lam = float(np.linalg.norm(X.T @ y)) * float(rng.uniform(0.02, 0.5))
    scale = scale if 1e-300 < lam * scale < 1e300 else 1.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = ParallelReLU(lam, max_rounds=3, descent=60, random_state=0).fit(x, y)
    W, V = model.weights_, model.outputs_
    name = str(rng.choice(["fit", "near", "empty", "random"]))
    best = _relu_value(X, y, W, V, lam)
    if name == "near":
        W = W * (1 + 10.0 ** rng.uniform(-9, -1) * rng.standard_normal(W.shape))
    elif name == "empty":
        W, V = W[:0], V[:0]
    elif name == "random":
        W, V = rng.standard_normal((3, columns + 1)) / np.abs(X).max(), rng.standard_normal((3, 1))
    value = _relu_value(X, y, W, V, lam)
    left, right = (z.T for z in _spread(rng, scale, W.T, V.T))
    tol = _tol(rng)
    size = float(np.linalg.norm(y) + np.linalg.norm(X) * _norms(W.T, V.T).sum())
    return CertificateCase(
        "relu", seed, lam, tol, scale, best, value, size,
        lambda case: (certify_relu(x, y * scale, left, right, lam=lam * scale, tol=tol), value), point=f"grown {name}",
    )  # fmt: skip


def _relu_value(X: Array, y: Array, W: Array, V: Array, lam: float) -> float:
    R = y - np.maximum(X @ W.T, 0) @ V
    return 0.5 * math.fsum((R**2).ravel()) + lam * math.fsum(_norms(W.T, V.T))


def _fitted(rng: np.random.Generator, seed: int) -> CertificateCase:
    """An estimator: its objective is near the minimum if its certificate says so, and LowRank's always does."""
    scale, tol, degree = _scale(rng), float(rng.choice([1e-2, 1e-3])), 2
    kind = str(rng.choice(["LowRank", "NMF", "MatrixCompletion", "RobustPCA", "CPTensor"]))
    model: Any
    if kind == "LowRank":
        Y = _matrix(rng, 140 if rng.random() < 0.1 else 30)
        s = np.linalg.svd(Y, compute_uv=False)
        lam = s[0] * float(rng.uniform(0.05, 1.2)) or 1.0
        model, minimum = LowRank(lam * scale, tol=tol, random_state=0), _nuclear(s, lam)
    elif kind == "RobustPCA":
        Y, lam, gamma, _, minimum = _diagonal(rng)
        model = RobustPCA(lam, None if gamma is None else gamma / scale, tol=tol, random_state=0)
        degree = 1
    elif kind == "CPTensor":
        Y, s = np.zeros((4, 3, 3)), rng.uniform(0.1, 3, 3)
        Y[range(3), range(3), range(3)] = s
        lam = float(rng.uniform(0.1, 1.2) * s.max())
        model, minimum = CPTensor(lam * scale, tol=tol, random_state=0), _nuclear(s, lam)
    else:
        Y, where, triples = _blocks(rng)
        lam = max(s for _, _, s in triples) * float(rng.uniform(0.1, 1.2))
        minimum = _nuclear(np.array([s for _, _, s in triples]), lam)
        model = NMF(lam * scale, tol=tol, random_state=0, effort=0.2)
        if kind == "MatrixCompletion":
            Y, where = (x[where.any(1)][:, where.any(0)] for x in (Y, where))
            Y = np.where(where, Y, np.nan)
            model = MatrixCompletion(lam * scale, tol=tol, random_state=0)
    known = np.nan_to_num(Y)

    def run(case: CertificateCase) -> tuple[Certificate, float]:
        U = model.fit_transform(Y * scale) / math.sqrt(scale)
        X = (U @ (model.components_ / math.sqrt(scale))).reshape(Y.shape)
        R = np.where(np.isnan(Y), 0.0, known - X)
        penalty = lam * math.fsum(_norms(U, model.components_.T / math.sqrt(scale)))
        loss = 0.5 * float((R**2).sum()) if degree == 2 else _huber(R, gamma)
        raised = model.objective_ / scale**degree if 1e-140 < scale < 1e140 else loss + penalty
        assert abs(raised - loss - penalty) <= 1e-9 * (loss + penalty) + 1e-12, f"{case}: objective_ {raised}"
        return model.certificate_, loss + penalty

    size = float(np.linalg.norm(known)) + 1
    certified = kind in ("LowRank", "CPTensor", "MatrixCompletion") and minimum > 1e-8 * size**2
    return CertificateCase(
        f"fit {kind}", seed, lam, tol, scale, minimum, minimum, size, run, degree=degree, certified=certified
    )


KINDS: dict[str, Callable[[np.random.Generator, int], CertificateCase]] = {
    "fitted": _fitted,
    "l2": _l2,
    "masked": _masked,
    "network": _network,
    "pair": _pair,
    "perron": _perron,
    "relu": _relu,
    "robust": _robust,
    "separable": _separable,
    "sparse": _sparse,
    "tensor": _tensor,
}

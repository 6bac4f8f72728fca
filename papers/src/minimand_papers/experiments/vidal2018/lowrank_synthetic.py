"""Low-rank approximation, factorised and in closed form: the same matrix, the same singular values."""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from minimand.factor import LowRank, factorize

from ...claims import combine, judge_bound
from ...context import Lab
from ...drawing import curves
from ...experiment import Claim, Comparison, Experiment, Metrics, Part, Plot, Preset, Results
from ._factor import certified, certified_claim, last, lines, statuses, thinned

CLOSED = "closed form"
GROWN = "factorised, size grown"
SMALL = "factorised, half the size"
LARGE = "factorised, twice the size"


@dataclasses.dataclass(frozen=True)
class LowRankSyntheticOptions:
    """A low-rank matrix and Gaussian noise.

    Args:
        rows: Rows of the matrix.
        columns: Columns of the matrix.
        rank: Rank of the matrix without noise, whose singular values fall from 1 to 0.3 times √(rows · columns).
        noise: Standard deviation of the noise, entry by entry.
        margin: λ over √rows + √columns times the noise, which is about the noise's largest singular value.
        sweeps: The largest number of sweeps of local descent.
        tol: The relative gap to certify.
    """

    rows: int = 200
    columns: int = 120
    rank: int = 12
    noise: float = 0.15
    margin: float = 1.1
    sweeps: int = 500
    tol: float = 1e-6

    @property
    def lam(self) -> float:
        """The weight of the nuclear norm."""
        return float(self.margin * self.noise * (self.rows**0.5 + self.columns**0.5))

    def draw(self, seed: int) -> np.ndarray:
        """The data."""
        rng = np.random.default_rng(seed)
        left = np.linalg.qr(rng.normal(size=(self.rows, self.rank)))[0]
        right = np.linalg.qr(rng.normal(size=(self.columns, self.rank)))[0]
        values = np.linspace(1.0, 0.3, self.rank) * (self.rows * self.columns) ** 0.5
        matrix: np.ndarray = (left * values) @ right.T + self.noise * rng.normal(size=(self.rows, self.columns))
        return matrix


def parts(options: LowRankSyntheticOptions) -> list[Part]:
    """The closed form, the growing factorisation, and two of fixed size."""
    return [Part(CLOSED), Part(GROWN), Part(SMALL), Part(LARGE)]


def run(options: LowRankSyntheticOptions, part: str, lab: Lab) -> Iterator[Metrics]:
    """One solution, its singular values and its distance to soft thresholding of a dense decomposition."""
    Y = options.draw(lab.seed)
    left, values, right = np.linalg.svd(Y, full_matrices=False)
    kept = np.maximum(values - options.lam, 0)
    best = (left * kept) @ right
    least = float(0.5 * ((Y - best) ** 2).sum() + options.lam * kept.sum())
    if part == CLOSED:
        model = LowRank(options.lam, tol=options.tol, random_state=lab.seed)
        U = model.fit_transform(Y)
        V, objective, certificate = model.components_.T, model.objective_, model.certificate_
    else:
        size = {SMALL: max(1, options.rank // 2), LARGE: 2 * options.rank}.get(part)
        found = factorize(
            Y,
            lam=options.lam,
            n_components=size,
            tol=options.tol,
            max_iter=options.sweeps,
            random_state=lab.seed,
        )
        U, V, objective, certificate = found.U, found.V, found.objective, found.certificate
        yield from thinned(found.history, least)
    X = U @ V.T
    yield {
        "objective": objective,
        "above": 100 * (objective - least) / objective,
        "distance": 100 * float(np.linalg.norm(X - best)) / max(float(np.linalg.norm(best)), 1e-300),
        "rank": int((np.linalg.svd(X, compute_uv=False) > 1e-6 * values[0]).sum()),
        "wanted": int((kept > 0).sum()),
        "data": [round(float(v), 4) for v in values[: 4 * options.rank]],
        "found": [round(float(v), 4) for v in np.linalg.svd(X, compute_uv=False)[: 2 * options.rank]],
        **certified(certificate),
    }


def compare(results: Results[LowRankSyntheticOptions]) -> list[Comparison]:
    """Distances to the closed form and the rank that was found."""
    rows = []
    for part in (CLOSED, GROWN, SMALL, LARGE):
        above, gap = results.final(part, "above"), results.final(part, "gap")
        rows.append(Comparison(f"{part}: above the minimum", None, above, "%", 5, "relative to its objective"))
        rows.append(Comparison(f"{part}: at most, by its certificate", None, gap, "%", 5, "relative to its objective"))
        rows.append(Comparison(f"{part}: rank", None, results.final(part, "rank"), "", 0))
    return rows


def plots(results: Results[LowRankSyntheticOptions]) -> list[Plot]:
    """The singular values, and the descent."""
    shown: dict[str, tuple[Sequence[float], Sequence[float]]] = {}
    data = last(results, CLOSED, "data") or []
    shown["data"] = (range(1, len(data) + 1), data)
    for part in (CLOSED, GROWN, SMALL):
        values = [v for v in last(results, part, "found") or [] if v > 1e-4]
        shown[part] = (range(1, len(values) + 1), values)
    marks = {"data": ".:", CLOSED: "s-", GROWN: "x", SMALL: "--"}
    spectra = lines(
        shown,
        title=f"Singular values are shrunk by λ = {results.options.lam:.3g}",
        x="index",
        y="singular value",
        marks=marks,
    )
    names = [GROWN, SMALL, LARGE]
    descent = curves(
        results, names, key="excess", over="sweep", title="Descent", y="objective / global minimum − 1", log=True
    )
    return [spectra, descent]


def findings(results: Results[LowRankSyntheticOptions]) -> Sequence[str]:
    """Rank and objective of each factorisation, and its certificate."""
    sentences = []
    for part in (GROWN, LARGE, SMALL):
        above, ranks, wanted = (results.final(part, key) for key in ("above", "rank", "wanted"))
        if above:
            sentences.append(
                f"{part} ends at rank {ranks[0]:.0f} (closed form: {wanted[0]:.0f}), with an objective at most "
                f"{max(max(above), 0):.2g} % above that of the closed form."
            )
    return [*sentences, *statuses(results, (CLOSED, GROWN, LARGE, SMALL))]


def claims(results: Results[LowRankSyntheticOptions]) -> list[Claim]:
    """The factorisation reaches the closed form, and one that is too small is not certified."""
    grown = certified_claim(results, "", (GROWN, LARGE), "random matrices")
    above = [value for part in (GROWN, LARGE) for value in results.final(part, "above")]
    small = [values[-1] for values in results.curve(SMALL, "status").values() if values]
    refused = judge_bound([float(status == "CERTIFIED") for status in small], 0)
    text = "Low-rank factorisation: local descent with growth reaches the closed form"
    measured = f"{max(max(above), 0):.1e} % above it; half the size is not certified" if above else "–"
    verdict = combine([grown.verdict, judge_bound(above, 1e-4), refused])
    return [Claim(text, "0 % above", measured, grown.scale, verdict)]


experiment = Experiment(
    name="lowrank-synthetic",
    title="Factorised low rank against its closed form",
    source="[Vidal2018], Example: Low-Rank Matrix Factorization, Synthetic data",
    about=(
        "min ½‖Y − UVᵀ‖² + λΣ‖Uᵢ‖‖Vᵢ‖ is not convex, but its minimum is that of the nuclear norm: the singular "
        "values of Y minus λ. Local descent with growth by the polar is compared with soft thresholding of a dense "
        "singular value decomposition. With half the columns needed, the certificate must not certify. The slides "
        "show a picture without numbers."
    ),
    presets={
        "smoke": Preset(LowRankSyntheticOptions(rows=30, columns=20, rank=4, sweeps=200), (0,), 0.03),
        "laptop": Preset(LowRankSyntheticOptions(), (0, 1, 2), 0.3),
        "paper": Preset(LowRankSyntheticOptions(rows=1000, columns=800, rank=40, sweeps=1000), (0, 1, 2), 5),
    },
    parts=parts,
    run=run,
    compare=compare,
    plots=plots,
    findings=findings,
    claims=claims,
    columns=("excess", "gap"),
)

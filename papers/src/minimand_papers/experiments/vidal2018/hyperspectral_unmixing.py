"""Hyperspectral unmixing: spectra and abundances of materials against ground truth."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from minimand.errors import OptionError
from minimand.factor import NMF, certify

from ...context import Lab
from ...drawing import COLORS, figure, style
from ...experiment import Claim, Comparison, Experiment, Metrics, Part, Plot, Preset, Results
from ...pictures import encoded, pictures
from ._factor import arrays_of, certified, certified_claim, file_of, last, recorded, statuses

GROWN, FIXED, STARTED = "NMF, size grown", "NMF, size given", "NMF, from successive projections"
SKLEARN, PURE = "scikit-learn's NMF, no penalty", "successive projections"
KNOWN = "the true spectra, least squares"
COMPARED = (GROWN, FIXED, STARTED, SKLEARN, PURE)
SHOWN = (FIXED, STARTED, PURE)
MATERIALS = ("soil", "tree", "water")


@dataclasses.dataclass(frozen=True)
class HyperspectralUnmixingOptions:
    """Pixels as rows, each of norm one so that dark materials count as much as bright ones; bands as columns.

    Args:
        scene: "samson": hyperspectral/samson_dataset.mat of the data directory; "synthetic": three smooth spectra,
            mixed in patches; "auto": Samson if the file exists, else synthetic.
        side: Side of the synthetic scene in pixels.
        bands: Bands of the synthetic scene.
        stride: Use every stride-th pixel in each direction.
        fraction: λ over λmax.
        sweeps: The largest number of sweeps of local descent.
        effort: Effort for the bound on the polar; the bound is tight only below about 500 pixels plus bands.
        tol: The relative gap to certify.
    """

    scene: str = "auto"
    side: int = 40
    bands: int = 60
    stride: int = 1
    fraction: float = 0.03
    sweeps: int = 500
    effort: float = 1.0
    tol: float = 1e-3


@dataclasses.dataclass(frozen=True)
class Scene:
    """Pixels × bands of norm one and their norms before, the materials' spectra, their abundances (pixels × materials),
    and the picture's shape.
    """

    Y: np.ndarray
    norms: np.ndarray
    spectra: np.ndarray
    abundances: np.ndarray
    shape: tuple[int, int]
    name: str


def scene(options: HyperspectralUnmixingOptions, lab: Lab) -> Scene:
    """The data."""
    if options.scene not in ("auto", "samson", "synthetic"):
        raise OptionError(f'scene is "auto", "samson" or "synthetic", got {options.scene!r}')
    path = None
    if options.scene != "synthetic":
        path = file_of(lab, "hyperspectral/samson_dataset.mat", required=options.scene == "samson")
    whole = synthetic(options, lab.seed) if path is None else _samson(path)
    rows, columns = whole.shape
    chosen = np.arange(rows * columns).reshape(whole.shape)[:: options.stride, :: options.stride]
    index = chosen.ravel()
    return dataclasses.replace(
        whole,
        Y=whole.Y[index],
        norms=whole.norms[index],
        abundances=whole.abundances[index],
        shape=(chosen.shape[0], chosen.shape[1]),
    )


def _scene(Y: np.ndarray, spectra: np.ndarray, abundances: np.ndarray, shape: tuple[int, int], name: str) -> Scene:
    norms = np.maximum(np.linalg.norm(Y, axis=1, keepdims=True), 1e-12)
    return Scene(Y / norms, norms, spectra, abundances, shape, name)


def _samson(path: Path) -> Scene:
    Y, spectra, abundances = arrays_of(path, Y=(None, 95 * 95), M=(None, None), A=(None, 95 * 95))
    # The publisher's pixels run down the columns of the 95 × 95 picture.
    order = np.arange(95 * 95).reshape(95, 95).T.ravel()
    return _scene(Y.T[order], spectra.T, abundances.T[order], (95, 95), "samson")


def synthetic(options: HyperspectralUnmixingOptions, seed: int) -> Scene:
    """Three smooth spectra with peaks of their own, and abundances that vary smoothly over the picture."""
    rng = np.random.default_rng(seed)
    band = np.linspace(0, 1, options.bands)
    spectra = np.stack(
        [0.15 + 0.7 * band, 0.1 + 0.8 * np.exp(-(((band - 0.45) / 0.15) ** 2)), 0.5 * np.exp(-4 * band) + 0.02]
    )
    y, x = np.meshgrid(*[np.linspace(0, 1, options.side)] * 2, indexing="ij")
    centers = ((0.2, 0.2), (0.8, 0.3), (0.5, 0.9))
    heights = np.stack([np.exp(-((y - a) ** 2 + (x - b) ** 2) / 0.04) for a, b in centers], -1).reshape(-1, 3)
    abundances = (heights + 1e-4) / (heights + 1e-4).sum(1, keepdims=True)
    Y = (abundances @ spectra + 0.005 * rng.normal(size=(len(abundances), options.bands))).clip(0)
    return _scene(Y, spectra, abundances, (options.side, options.side), "synthetic")


def parts(options: HyperspectralUnmixingOptions) -> list[Part]:
    """NMF at a grown size and at three, two controls at three, and least squares with the true spectra."""
    return [Part(name) for name in (GROWN, FIXED, STARTED, SKLEARN, PURE, KNOWN)]


def run(options: HyperspectralUnmixingOptions, part: str, lab: Lab) -> Iterator[Metrics]:
    """Spectra and abundances, matched with the truth."""
    data = scene(options, lab)
    count = len(data.spectra)
    record: dict[str, float | str | list[list[float]]] = {"scene": data.name}
    lam = options.fraction * NMF(1.0).lambda_max(data.Y)
    pure = data.Y[successive_projections(data.Y, count)].T
    if part in (GROWN, FIXED, STARTED):
        model = NMF(
            lam,
            n_components=None if part == GROWN else count,
            tol=options.tol,
            max_iter=options.sweeps,
            effort=options.effort,
            random_state=lab.seed,
        )
        start = (_codes(data.Y, pure), pure) if part == STARTED else None
        with recorded():
            U, V = model.fit_transform(data.Y, start=start), model.components_.T
        record |= certified(model.certificate_)
    elif part == SKLEARN:
        from sklearn.decomposition import NMF as Sklearn

        other = Sklearn(count, init="nndsvda", max_iter=4 * options.sweeps, tol=1e-4, random_state=lab.seed)
        U, V = other.fit_transform(data.Y), other.components_.T
        judged = certify(data.Y, U, V, lam=lam, regularizer="nonnegative", tol=options.tol, effort=options.effort)
        record |= certified(judged)
    else:
        V = pure if part == PURE else data.spectra.T
        U = _codes(data.Y, V)
    yield record | {
        "rank": V.shape[1],
        **_scores(data, U, V),
        **(_shown(data, U, V, truth=part == FIXED) if part in SHOWN else {}),
    }


def successive_projections(Y: np.ndarray, count: int) -> np.ndarray:
    """Pixels chosen one after another as farthest from the span of the previous ones: pure pixels, if there are any.

    Araújo et al., 2001; Gillis & Vavasis, 2014.
    """
    rest, found = Y.copy(), []
    for _ in range(count):
        found.append(int((rest**2).sum(1).argmax()))
        direction = rest[found[-1]] / max(float(np.linalg.norm(rest[found[-1]])), 1e-300)
        rest = rest - np.outer(rest @ direction, direction)
    return np.array(found)


def _codes(Y: np.ndarray, V: np.ndarray) -> np.ndarray:
    from scipy.optimize import nnls

    return np.stack([nnls(V, row)[0] for row in Y])


def _matched(data: Scene, V: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Angles in degrees between true and found spectra, and the best matching."""
    from scipy.optimize import linear_sum_assignment

    truth = data.spectra.T / np.linalg.norm(data.spectra, axis=1)
    angles = np.degrees(np.arccos(np.clip(truth.T @ _unit(V), -1, 1)))
    which, match = linear_sum_assignment(angles)
    return angles, which, match


def _unit(V: np.ndarray) -> np.ndarray:
    return np.asarray(V / np.maximum(np.linalg.norm(V, axis=0), 1e-300))


def _shares(data: Scene, U: np.ndarray) -> np.ndarray:
    """Abundances, scaled such that each material's purest hundredth of pixels has abundance one."""
    shares = U * data.norms
    shares = shares / np.maximum(np.quantile(shares, 0.99, axis=0), 1e-12)
    return np.asarray(shares / np.maximum(shares.sum(1, keepdims=True), 1e-12))


def _scores(data: Scene, U: np.ndarray, V: np.ndarray) -> dict[str, float]:
    """Angles between matched spectra, and errors of the abundances."""
    angles, which, match = _matched(data, V)
    error = np.sqrt(((_shares(data, U)[:, match] - data.abundances[:, which]) ** 2).mean())
    return {
        "angle": float(angles[which, match].mean()),
        "abundance": float(error),
        "residual": 100 * float(np.linalg.norm(data.Y - U @ V.T)) / float(np.linalg.norm(data.Y)),
    }


def _shown(data: Scene, U: np.ndarray, V: np.ndarray, *, truth: bool) -> dict[str, str | list[list[float]]]:
    """Spectra and maps for the pictures."""
    _, which, match = _matched(data, V)
    unit, true, shares = _unit(V), _unit(data.spectra.T), _shares(data, U)
    shown: dict[str, str | list[list[float]]] = {"spectra": [[round(float(v), 4) for v in unit[:, i]] for i in match]}
    for i, j in zip(which, match, strict=True):
        shown[f"map {i}"] = encoded(shares[:, j].reshape(data.shape))
        if truth:
            shown[f"truth {i}"] = encoded(data.abundances[:, i].reshape(data.shape))
    if truth:
        shown["true"] = [[round(float(v), 4) for v in true[:, i]] for i in which]
    return shown


def compare(results: Results[HyperspectralUnmixingOptions]) -> list[Comparison]:
    """Angles and errors of the abundances."""
    rows = []
    for part in COMPARED:
        rows.append(Comparison(f"{part}: spectral angle", None, results.final(part, "angle"), "°", 2, "mean"))
        note = "root mean squared error; each pixel's abundances are divided by their sum"
        rows.append(Comparison(f"{part}: abundances", None, results.final(part, "abundance"), "", 4, note))
        rows.append(Comparison(f"{part}: components", None, results.final(part, "rank"), "", 0))
    rows.append(Comparison(f"{KNOWN}: abundances", None, results.final(KNOWN, "abundance"), "", 4, "an oracle"))
    return rows


def _materials(results: Results[HyperspectralUnmixingOptions]) -> Sequence[str]:
    return MATERIALS if last(results, FIXED, "scene") == "samson" else ("first", "second", "third")


def plots(results: Results[HyperspectralUnmixingOptions]) -> list[Plot]:
    """Spectra and maps beside the truth."""
    names = _materials(results)
    drawn = figure(9.0, 3.2)
    sentences = []
    for i, axes in enumerate(drawn.subplots(1, 3, sharey=True)):
        true = last(results, FIXED, "true")
        if true:
            axes.plot(true[i], color=COLORS[7], linewidth=3, label="truth")
        for number, part in enumerate(SHOWN):
            spectra = last(results, part, "spectra")
            if spectra and i < len(spectra):
                axes.plot(spectra[i], color=COLORS[number], linewidth=1.2, label=part)
                if not i:
                    sentences.append(f"{part} {results.final(part, 'angle')[0]:.1f}°")
        style(axes, "band", "" if i else "reflectance, unit norm", names[i])
    if sentences:
        drawn.legend(*drawn.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    alt = f"Spectra of the three materials; mean angles to the truth: {', '.join(sentences) or 'nothing measured yet'}"
    grid = [{f"truth: {name}": last(results, FIXED, f"truth {i}") for i, name in enumerate(names)}]
    grid += [{f"{part}:\n{name}": last(results, part, f"map {i}") for i, name in enumerate(names)} for part in SHOWN]
    maps = pictures(grid, "Abundances")
    return [Plot("Spectra", alt, drawn), *([maps] if maps else [])]


def findings(results: Results[HyperspectralUnmixingOptions]) -> Sequence[str]:
    """The methods by spectral angle, the size found, and the certificates."""
    sentences = []
    angles = {part: values[0] for part in COMPARED if (values := results.final(part, "angle"))}
    if angles:
        order = sorted(angles, key=lambda part: angles[part])
        listed = ", ".join(f"{part} {angles[part]:.1f}°" for part in order)
        sentences.append(f"Mean spectral angle on {last(results, order[0], 'scene')}: {listed}.")
    ranks = results.final(GROWN, "rank")
    if ranks:
        sentences.append(f"{GROWN}: {ranks[0]:.0f} components where the truth has three; the best three are compared.")
    return [*sentences, *statuses(results, (GROWN, FIXED, STARTED, SKLEARN))]


def claims(results: Results[HyperspectralUnmixingOptions]) -> list[Claim]:
    """Non-negative factors of a hyperspectral image."""
    text = "Non-negative factorisation: local descent ends at the global minimum (hyperspectral image)"
    return [certified_claim(results, text, (GROWN, FIXED), "Samson scene")]


experiment = Experiment(
    name="hyperspectral-unmixing",
    title="Unmixing a hyperspectral image",
    source="[Vidal2018], non-negative matrix factorisation; the Samson scene with its published ground truth",
    about=(
        "Every pixel's spectrum is a non-negative mixture of the materials' spectra. Non-negative factors with the "
        "penalty λΣ‖Uᵢ‖‖Vᵢ‖, at a grown size, at size three and from a good start, are matched with the ground "
        "truth. Controls are scikit-learn's NMF without penalty, whose factors are certified for our objective, "
        "and successive projections, which look for pure pixels. Abundances need not add up to one. A certificate "
        "bounds the objective; the experiment measures whether the minimum recovers the materials. For Samson, λ "
        "and the unit norm of the pixels were chosen on a part of the image with the ground truth in view, so that "
        "three components result: the number of components is no finding."
    ),
    presets={
        "smoke": Preset(
            HyperspectralUnmixingOptions("synthetic", side=12, bands=20, sweeps=100, effort=0.02), (0,), 0.04
        ),
        "laptop": Preset(HyperspectralUnmixingOptions(), (0,), 0.3),
        "paper": Preset(HyperspectralUnmixingOptions(sweeps=5000, effort=10.0), (0,), 5),
    },
    parts=parts,
    run=run,
    compare=compare,
    plots=plots,
    findings=findings,
    claims=claims,
    columns=("rank", "angle"),
)

"""NMF of faces: the number of parts found by the certificate, and certificates of scikit-learn's factors."""

import dataclasses
import warnings
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from minimand.errors import MissingExtra, OptionError
from minimand.factor import NMF, certify

from ...context import Lab
from ...drawing import COLORS, figure, logarithmic, style
from ...experiment import Claim, Comparison, Experiment, Metrics, Part, Plot, Preset, Results
from ...pictures import encoded, montage, pictures
from ._factor import arrays_of, certified, certified_claim, file_of, last, recorded, resized, statuses

OURS = "grown to the certificate"
SWEEPS = 2000
SOURCES = ("auto", "orl", "yale", "lfw", "digits")


@dataclasses.dataclass(frozen=True)
class NMFFacesOptions:
    """Images as rows of a non-negative matrix.

    Args:
        source: "orl" or "yale": faces/ of the data directory; "lfw": the hundred faces in scikit-image;
            "digits": scikit-learn's; "auto": the first of these that exists.
        limit: Number of images.
        height: Height after shrinking; images plus pixels should stay below 500 for the tight bound.
        width: Width after shrinking.
        fractions: Values of λ/λmax in decreasing order; the last is compared with scikit-learn.
        sizes: Sizes of scikit-learn's factorisations, in multiples of the size found.
        effort: Effort of the certificates: of our fits as a share of their work, of other factors 1 is five seconds.
        tol: The relative gap to certify.
    """

    source: str = "auto"
    limit: int = 100
    height: int = 20
    width: int = 16
    fractions: tuple[float, ...] = (0.5, 0.2, 0.1, 0.05, 0.03)
    sizes: tuple[float, ...] = (0.5, 1.0, 2.0)
    effort: float = 1.0
    tol: float = 1e-3


def faces(options: NMFFacesOptions, lab: Lab) -> tuple[np.ndarray, str]:
    """Images in 0 … 1, images × height × width, and the name of their source."""
    if options.source not in SOURCES:
        raise OptionError(f"source is one of {', '.join(SOURCES)}, got {options.source!r}")
    orl, yale = "faces/orl_400x112x92.npz", "faces/YaleB_32x32_ori.mat"
    names = {"orl": (orl,), "yale": (yale,), "auto": (orl, yale)}.get(options.source, ())
    path = file_of(lab, *names, required=options.source in ("orl", "yale")) if names else None
    if path is not None and path.suffix == ".npz":
        images, name = arrays_of(path, images=(None, None, None))[0] / 255.0, "orl"
    elif path is not None:
        # The publisher's file holds columns of each image one after the other.
        images, name = arrays_of(path, fea=(None, 1024))[0].reshape(-1, 32, 32).transpose(0, 2, 1) / 255.0, "yale"
    elif options.source == "digits":
        from sklearn.datasets import load_digits

        images, name = load_digits().images / 16.0, "digits"
    else:
        images, name = _bundled(), "lfw"
    chosen = images[: options.limit] if name in ("digits", "lfw") else images[_spread(len(images), options.limit)]
    return resized(chosen, options.height, options.width).clip(0, 1).astype(np.float64), name


def _spread(count: int, limit: int) -> np.ndarray:
    """Indices spread over the file, so that all persons are included."""
    return np.linspace(0, count - 1, min(limit, count)).round().astype(int)


def _bundled() -> np.ndarray:
    try:
        from skimage.data import lfw_subset
    except ModuleNotFoundError as error:
        raise MissingExtra(
            "the bundled faces are in the package scikit-image, which is not installed: "
            'pip install "minimand-papers[demo]", or choose source="digits"'
        ) from error
    images = np.asarray(lfw_subset(), dtype=np.float64)[:100]
    return images / images.max()


def other(size: float) -> str:
    """The name of scikit-learn's part."""
    return f"scikit-learn, {size:g} × the size"


def parts(options: NMFFacesOptions) -> list[Part]:
    """Our path over λ, then scikit-learn at its end."""
    return [Part(OURS), *(Part(other(size), needs=(OURS,)) for size in options.sizes)]


def run(options: NMFFacesOptions, part: str, lab: Lab) -> Iterator[Metrics]:
    """A path over λ with its certificates, or another library's factors at the last λ."""
    images, source = faces(options, lab)
    Y = images.reshape(len(images), -1)
    if part == OURS:
        yield from _path(options, Y, source, lab)
        return
    ours = lab.kept(OURS, "answer")
    lam, size = float(ours["lam"]), int(ours["size"])
    multiple = next(multiple for multiple in options.sizes if other(multiple) == part)
    wanted = max(1, round(multiple * size))
    W, V, sweeps = _sklearn(Y, lam, wanted, lab.seed)
    certificate = certify(Y, W, V, lam=lam, regularizer="nonnegative", tol=options.tol, effort=options.effort)
    # At any scaling of the pairs the penalty is that of the balanced ones.
    penalty = np.linalg.norm(W, axis=0) @ np.linalg.norm(V, axis=0)
    objective = float(0.5 * ((Y - W @ V.T) ** 2).sum() + lam * penalty)
    least = float(ours["objective"])
    yield {
        "objective": objective,
        "above": 100 * (objective - least) / objective,
        "rank": int((np.linalg.norm(W, axis=0) * np.linalg.norm(V, axis=0) > 1e-6 * np.linalg.norm(Y)).sum()),
        "given": wanted,
        "sweeps": sweeps,
        **certified(certificate),
        "parts": _sheet(W, V, options),
    }


def _path(options: NMFFacesOptions, Y: np.ndarray, source: str, lab: Lab) -> Iterator[Metrics]:
    model = NMF(1.0, tol=options.tol, effort=options.effort, random_state=lab.seed)
    top = model.lambda_max(Y)
    before = None
    for fraction in sorted(options.fractions, reverse=True):
        model = NMF(fraction * top, tol=options.tol, effort=options.effort, random_state=lab.seed)
        with recorded():
            U = model.fit_transform(Y, start=before)
        before = (U, model.components_.T) if model.n_components_ else None
        X = model.inverse_transform(U)
        yield {
            "fraction": fraction,
            "rank": model.n_components_,
            "objective": model.objective_,
            "error": 100 * float(np.linalg.norm(Y - X) / np.linalg.norm(Y)),
            **certified(model.certificate_),
        }
    V = model.components_.T
    answer = {"lam": model.lam_, "size": max(1, model.n_components_), "objective": model.objective_}
    lab.keep("answer", {key: torch.tensor(float(value), dtype=torch.float64) for key, value in answer.items()})
    shape = (-1, options.height, options.width)
    yield {
        "parts": _sheet(U, V, options),
        "examples": encoded(montage(1 - np.concatenate([Y[:8], X[:8]]).reshape(shape), 8)),
        "source": source,
        "zeros": 100 * float(np.less_equal(V, 1e-6 * V.max()).mean()) if V.size else 0.0,
    }


def _sheet(U: np.ndarray, V: np.ndarray, options: NMFFacesOptions) -> str:
    """The heaviest parts, dark where they are large."""
    order = np.argsort(-np.linalg.norm(U, axis=0) * np.linalg.norm(V, axis=0))[:24]
    return encoded(montage(V.T[order].reshape(-1, options.height, options.width), 8))


def _sklearn(Y: np.ndarray, lam: float, size: int, seed: int) -> tuple[np.ndarray, np.ndarray, int]:
    """scikit-learn's NMF on the same objective at a given size; the record has the number of sweeps."""
    from sklearn.decomposition import NMF as Sklearn
    from sklearn.exceptions import ConvergenceWarning

    rows, columns = Y.shape
    model = Sklearn(
        size,
        init="nndsvda" if size <= min(rows, columns) else "random",
        alpha_W=lam / columns,
        alpha_H=lam / rows,
        l1_ratio=0.0,
        max_iter=SWEEPS,
        tol=1e-6,
        random_state=seed,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        W = model.fit_transform(Y)
    return W, model.components_.T, int(model.n_iter_)


def compare(results: Results[NMFFacesOptions]) -> list[Comparison]:
    """Sizes, objectives and gaps."""
    rows = [
        Comparison(f"{OURS}: components", None, results.final(OURS, "rank"), "", 0),
        Comparison(f"{OURS}: gap at most", None, results.final(OURS, "gap"), "%", 3),
    ]
    for size in results.options.sizes:
        part = other(size)
        rows.append(Comparison(f"{part}: objective above ours", None, results.final(part, "above"), "%", 3))
        rows.append(Comparison(f"{part}: gap at most", None, results.final(part, "gap"), "%", 3))
    return rows


def plots(results: Results[NMFFacesOptions]) -> list[Plot]:
    """Size and gap over λ, the parts, and images with their reconstructions."""
    drawn = figure(8.0, 3.4)
    left, right = drawn.subplots(1, 2)
    ranks: list[float] = []
    for places, sizes, gaps in zip(
        *(results.curve(OURS, key).values() for key in ("fraction", "rank", "gap")), strict=True
    ):
        left.plot(places, sizes, "o-", color=COLORS[0])
        right.plot(places, np.maximum(gaps, 1e-6), "s-", color=COLORS[1])
        ranks = ranks or sizes
    right.axhline(100 * results.options.tol, color=COLORS[7], linewidth=0.8, linestyle=":")
    for axes, which in ((left, "x"), (right, "x"), (right, "y")):
        logarithmic(axes, which)
    style(left, "λ / λmax", "components", "Size chosen")
    style(right, "λ / λmax", "gap at most, %", "Distance to the global minimum")
    alt = f"Components along the path: {', '.join(f'{rank:.0f}' for rank in ranks) or 'nothing measured yet'}"
    both = {"ours": last(results, OURS, "parts")}
    both |= {other(size): last(results, other(size), "parts") for size in results.options.sizes if size <= 1}
    found = [
        pictures([both], "The heaviest parts at the smallest λ, dark where large"),
        pictures([{"images above, their reconstructions below": last(results, OURS, "examples")}], "Reconstructions"),
    ]
    return [Plot("Size and gap over λ", alt, drawn), *(plot for plot in found if plot)]


def findings(results: Results[NMFFacesOptions]) -> Sequence[str]:
    """The size found, the certificates, and scikit-learn's objectives."""
    sentences = []
    source, ranks = last(results, OURS, "source"), results.final(OURS, "rank")
    if source and ranks:
        zeros = results.final(OURS, "zeros")[0]
        sentences.append(
            f"On {source} {ranks[0]:.0f} parts are found at the smallest λ; {zeros:.0f} % of their entries are zero."
        )
    for size in results.options.sizes:
        above = results.final(other(size), "above")
        if above:
            word = "above" if above[0] > 0 else "below"
            stopped = results.final(other(size), "sweeps")[0] >= SWEEPS
            ending = f", stopped after {SWEEPS} sweeps" if stopped else ""
            sentences.append(f"{other(size)} ends {abs(above[0]):.3g} % {word} our objective{ending}.")
    return [*sentences, *statuses(results, [OURS, *(other(size) for size in results.options.sizes)])]


def claims(results: Results[NMFFacesOptions]) -> list[Claim]:
    """Non-negative factors grown to the certificate."""
    text = "Non-negative factorisation, Theorems 1 and 2: growth ends at the global minimum (faces)"
    return [certified_claim(results, text, [OURS], f"{results.options.limit or 'all'} images")]


experiment = Experiment(
    name="nmf-faces",
    title="Parts of faces, with a certificate",
    source="[Vidal2018], non-negative matrix factorisation and Theorems 1 and 2",
    about=(
        "Non-negative factors of a matrix of face images minimise ½‖Y − UVᵀ‖² + λΣ‖Uᵢ‖‖Vᵢ‖. The number of parts is "
        "found along a path of λ, and the doubly non-negative bound limits the distance to the global minimum over "
        "all sizes. scikit-learn's NMF minimises the same objective at given sizes; its factors get the same "
        "certificate."
    ),
    presets={
        "smoke": Preset(
            NMFFacesOptions(
                "digits", limit=20, height=8, width=8, fractions=(0.4, 0.25), sizes=(0.5, 1.0), effort=0.02
            ),
            (0,),
            0.05,
        ),
        "laptop": Preset(NMFFacesOptions(), (0,), 1.5),
        "paper": Preset(
            NMFFacesOptions(limit=400, height=28, width=23, fractions=(0.5, 0.2, 0.1, 0.05, 0.03, 0.02), effort=10.0),
            (0,),
            30,
        ),
    },
    parts=parts,
    run=run,
    compare=compare,
    plots=plots,
    findings=findings,
    claims=claims,
    columns=("fraction", "rank", "gap"),
)

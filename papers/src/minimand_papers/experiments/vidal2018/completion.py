"""Matrix completion: an image with missing pixels, and a table of ratings."""

import dataclasses
import time
from collections.abc import Generator, Iterator, Sequence

import numpy as np
import torch
from scipy import sparse

from minimand.factor import MatrixCompletion

from ...comparing import Difference, difference
from ...context import Lab
from ...data import psnr
from ...drawing import curves, logarithmic
from ...experiment import Claim, Comparison, Experiment, Metrics, Part, Plot, Preset, Results
from ...pictures import encoded, pictures
from .._reconstruction import photographs
from ._factor import certified, certified_claim, last, recorded, statuses

IMAGE, RATINGS = "image", "ratings"
OURS, MEANS, SMOOTH = "completion", "row and column means", "biharmonic"
COST = "cost of a sweep"
# Parts of the observed entries that choose λ.
HELD = 0.1


@dataclasses.dataclass(frozen=True)
class CompletionOptions:
    """A photograph and a table of ratings, both with entries missing.

    Args:
        photograph: Name of a photograph in scikit-image.
        side: Side of the photograph in pixels.
        observed: Fractions of the pixels that are known.
        users: Rows of the table of ratings.
        items: Columns of the table of ratings.
        rank: Rank of the ratings without noise.
        noise: Standard deviation of the noise; the ratings themselves have 1.
        known: Fraction of the ratings that is known.
        fractions: Values of λ/λmax, tried in decreasing order; a tenth of the known entries chooses one.
        sweeps: The largest number of sweeps.
        tol: The relative gap to certify.
        scales: Factors on a table of 500 × 400 ratings and its observed entries, to time a sweep.
    """

    photograph: str = "brick"
    side: int = 128
    observed: tuple[float, ...] = (0.3, 0.5)
    users: int = 400
    items: int = 300
    rank: int = 6
    noise: float = 0.3
    known: float = 0.2
    fractions: tuple[float, ...] = (0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005)
    sweeps: int = 300
    tol: float = 1e-3
    scales: tuple[int, ...] = (1, 2, 4, 8)


def tasks(options: CompletionOptions) -> dict[str, float]:
    """The fraction that is known in each task."""
    images = {f"{IMAGE}, {100 * part:g} % known": part for part in options.observed}
    return {**images, f"{RATINGS}, {100 * options.known:g} % known": options.known}


def name(task: str, method: str) -> str:
    """A part's name."""
    return f"{task}: {method}"


def methods(task: str) -> tuple[str, ...]:
    """The methods for a task; biharmonic inpainting is for images only."""
    return (OURS, MEANS, SMOOTH) if task.startswith(IMAGE) else (OURS, MEANS)


def parts(options: CompletionOptions) -> list[Part]:
    """Every method on every task."""
    return [*(Part(name(task, method)) for task in tasks(options) for method in methods(task)), Part(COST)]


def run(options: CompletionOptions, part: str, lab: Lab) -> Iterator[Metrics]:
    """One method on one task, or the cost of a sweep."""
    if part == COST:
        yield from (_cost(scale, lab) for scale in options.scales)
        return
    task, _, method = part.rpartition(": ")
    rng = np.random.default_rng(lab.seed)
    truth, Y = _image(options) if task.startswith(IMAGE) else _ratings(options, rng)
    seen = rng.random(Y.shape) < tasks(options)[task]
    if method == OURS:
        filled = yield from _completed(options, Y, seen, lab)
    elif method == MEANS:
        filled = _means(Y, seen)
    else:
        from skimage.restoration import inpaint_biharmonic

        filled = inpaint_biharmonic(np.where(seen, Y, 0.0), ~seen)
    hidden = ~seen
    error = float(np.sqrt(((filled - truth)[hidden] ** 2).mean()))
    record: dict[str, float | str] = {"rmse": error}
    if task.startswith(IMAGE):
        whole = torch.as_tensor(np.where(seen, Y, filled)).clamp(0, 1)
        record["psnr"] = float(psnr(whole, torch.as_tensor(truth)))
        record["filled"] = encoded(whole.numpy())
        if method == MEANS:
            record |= {"truth": encoded(truth), "holes": encoded(np.where(seen, Y, 0.0))}
    yield record


def _image(options: CompletionOptions) -> tuple[np.ndarray, np.ndarray]:
    pixels = photographs([options.photograph], options.side)[0][0].double().numpy()
    return pixels, pixels


def _ratings(options: CompletionOptions, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Tastes times traits, and the same with noise."""
    tastes, traits = rng.normal(size=(options.users, options.rank)), rng.normal(size=(options.items, options.rank))
    truth = tastes @ traits.T / options.rank**0.5
    return truth, truth + options.noise * rng.normal(size=truth.shape)


def _means(Y: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """Fill with the overall mean plus the deviations of the row and of the column."""
    center = Y[seen].mean()
    rest = np.where(seen, Y - center, 0.0)
    rows = rest.sum(1) / np.maximum(seen.sum(1), 1)
    rest = np.where(seen, rest - rows[:, None], 0.0)
    columns = rest.sum(0) / np.maximum(seen.sum(0), 1)
    filled: np.ndarray = center + rows[:, None] + columns[None, :]
    return filled


def _completed(
    options: CompletionOptions, Y: np.ndarray, seen: np.ndarray, lab: Lab
) -> Generator[Metrics, None, np.ndarray]:
    """A path over λ with warm starts; then a fit with the best λ on all known entries."""
    held = seen & (np.random.default_rng(lab.seed + 1).random(Y.shape) < HELD)
    center = Y[seen].mean()
    fitted = np.where(seen & ~held, Y - center, np.nan)
    top = MatrixCompletion(1.0).lambda_max(fitted)
    best, chosen, before = np.inf, max(options.fractions), None
    for fraction in sorted(options.fractions, reverse=True):
        model = _model(options, fraction * top, lab)
        with recorded():
            U = model.fit_transform(fitted, start=before)
        before = (U, model.components_.T) if model.n_components_ else None
        error = float(np.sqrt((((model.inverse_transform(U) + center) - Y)[held] ** 2).mean()))
        yield {"fraction": fraction, "size": model.n_components_, "held": error}
        if error < best:
            best, chosen = error, fraction
    model = _model(options, chosen * top, lab)
    with recorded():
        U = model.fit_transform(np.where(seen, Y - center, np.nan))
    filled: np.ndarray = model.inverse_transform(U) + center
    yield {"rank": model.n_components_, "chosen": chosen, **certified(model.certificate_)}
    return filled


def _cost(scale: int, lab: Lab) -> Metrics:
    """The processor's time for a sweep over a table with 20,000 · scale observed entries."""
    rng = np.random.default_rng(lab.seed)
    rows, columns = 500 * scale, 400 * scale
    count = 20_000 * scale
    places = rng.integers(rows, size=count), rng.integers(columns, size=count)
    values = (rng.normal(size=(rows, 10))[places[0]] * rng.normal(size=(columns, 10))[places[1]]).sum(1)
    Y = sparse.coo_array((values + 0.5 * rng.normal(size=count), places), shape=(rows, columns)).tocsr()
    _timed(Y, 2, lab)
    # Two fits that differ in their sweeps tell what one takes, the start and the certificate apart.
    short, long = (_timed(Y, sweeps, lab) for sweeps in (5, 20))
    spent = (long[0] - short[0]) / (long[1] - short[1])
    return {"entries": Y.nnz, "sweep_ms": 1e3 * spent, "entry_ns": 1e9 * spent / Y.nnz}


def _timed(Y: sparse.csr_array, sweeps: int, lab: Lab) -> tuple[float, int]:
    """The shortest time of three fits in seconds, and the number of sweeps."""
    found = []
    for _ in range(3):
        model = MatrixCompletion(15.0, n_components=10, max_iter=sweeps, random_state=lab.seed)
        begin = time.process_time()
        with recorded():
            model.fit(Y)
        found.append(time.process_time() - begin)
    return min(found), model.n_iter_


def _model(options: CompletionOptions, lam: float, lab: Lab) -> MatrixCompletion:
    return MatrixCompletion(lam, tol=options.tol, max_iter=options.sweeps, random_state=lab.seed)


def compare(results: Results[CompletionOptions]) -> list[Comparison]:
    """Errors on the entries that were not observed."""
    rows = []
    for task in tasks(results.options):
        for method in methods(task):
            part = name(task, method)
            if task.startswith(IMAGE):
                rows.append(Comparison(part, None, results.final(part, "psnr"), " dB"))
            else:
                note = "root mean squared error on hidden entries, against the ratings without noise, whose spread is 1"
                rows.append(Comparison(part, None, results.final(part, "rmse"), "", 3, note))
        part = name(task, OURS)
        rows.append(Comparison(f"{part}, rank", None, results.final(part, "rank"), "", 0))
        rows.append(Comparison(f"{part}, gap at most", None, results.final(part, "gap"), "%", 3))
    costs = [values[-1] / values[0] for values in results.curve(COST, "entry_ns").values() if values]
    note = f"{max(results.options.scales)} times the entries against the fewest; 1 is linear"
    return [*rows, Comparison("time of a sweep for each entry", None, costs, "×", note=note)]


def plots(results: Results[CompletionOptions]) -> list[Plot]:
    """The images, and the error along the path."""
    grid = []
    for task in tasks(results.options):
        if task.startswith(IMAGE):
            row = {
                "the image": last(results, name(task, MEANS), "truth"),
                task: last(results, name(task, MEANS), "holes"),
            }
            for method in methods(task):
                score = results.final(name(task, method), "psnr")
                label = f"{method}\n{score[0]:.1f} dB" if score else method
                row[label] = last(results, name(task, method), "filled")
            grid.append(row)
    shown = pictures(grid, "Images with holes, filled")
    ours = [name(task, OURS) for task in tasks(results.options)]
    title = "Choosing λ by what was held out"
    path = curves(results, ours, key="held", over="fraction", title=title, y="root mean squared error", x="λ / λmax")
    logarithmic(path.figure.axes[0], "x")
    title = "Cost of a sweep over a sparse table"
    cost = curves(results, [COST], key="sweep_ms", over="entries", title=title, y="ms", x="observed entries", log=True)
    logarithmic(cost.figure.axes[0], "x")
    return [*([shown] if shown else []), path, cost]


def findings(results: Results[CompletionOptions]) -> Sequence[str | Difference]:
    """Completion against each control, and its certificate."""
    sentences = []
    for task in tasks(results.options):
        for method in methods(task)[1:]:
            ours, control = name(task, OURS), name(task, method)
            if task.startswith(IMAGE):
                sentences.append(difference(results, ours, control, "psnr", unit=" dB"))
            else:
                sentences.append(difference(results, ours, control, "rmse", unit="", higher=False))
    return [*sentences, *statuses(results, [name(task, OURS) for task in tasks(results.options)])]


def claims(results: Results[CompletionOptions]) -> list[Claim]:
    """Completion as a factorisation ends at the global minimum."""
    parts = [name(task, OURS) for task in tasks(results.options)]
    text = "Matrix completion: local descent with growth ends at the global minimum"
    return [certified_claim(results, text, parts, "a photograph and synthetic ratings")]


experiment = Experiment(
    name="completion",
    title="Completing images and ratings",
    source="[Vidal2018], matrix completion",
    about=(
        "The nuclear norm on the observed entries, with λ chosen on a tenth of them, fills pixels of a photograph "
        "and entries of a synthetic table of ratings of low rank. Controls are row and column means and, for the "
        "image, biharmonic inpainting, which uses that neighbouring pixels are similar. Errors are measured on "
        "hidden entries. The time of a sweep over sparse tables of growing size should grow with the number of "
        "observed entries."
    ),
    presets={
        "smoke": Preset(
            CompletionOptions(
                side=24,
                observed=(0.5,),
                users=30,
                items=20,
                rank=2,
                known=0.5,
                fractions=(0.3, 0.1),
                sweeps=60,
                tol=0.01,
                scales=(1, 2),
            ),
            (0,),
            0.05,
        ),
        "laptop": Preset(CompletionOptions(), (0, 1, 2), 3),
        "paper": Preset(CompletionOptions(side=256, users=2000, items=1500), (0, 1, 2), 40),
    },
    parts=parts,
    run=run,
    compare=compare,
    plots=plots,
    findings=findings,
    claims=claims,
    columns=("size", "held", "rmse"),
)

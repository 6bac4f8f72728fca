"""A sparse dictionary for patches of a photograph: number of atoms, sparsity, and the minimum from two starts."""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from minimand.factor import SparseDictionary, certify

from ...context import Lab
from ...drawing import curves
from ...experiment import Claim, Comparison, Experiment, Metrics, Part, Plot, Preset, Results
from ...pictures import encoded, montage, pictures
from .._reconstruction import photographs
from ._factor import certified, certified_claim, last, recorded, statuses, thinned

SKLEARN = "scikit-learn's dictionary"
WARM = "from scikit-learn's dictionary"


@dataclasses.dataclass(frozen=True)
class DictionaryPatchesOptions:
    """Square patches of a photograph, without their means, as rows.

    Args:
        photograph: Name of a photograph in scikit-image.
        side: Side of the photograph after shrinking.
        patch: Side of a patch.
        count: Number of patches.
        fraction: λ over the λmax of each γ.
        gammas: Weights of the l1 norm of the codes; zero is the nuclear norm. The last is compared with scikit-learn.
        sweeps: The largest number of sweeps of local descent.
        r_max: The largest number of atoms.
        tol: The relative gap to certify.
    """

    photograph: str = "camera"
    side: int = 256
    patch: int = 8
    count: int = 400
    fraction: float = 0.1
    gammas: tuple[float, ...] = (0.0, 0.02, 0.1)
    sweeps: int = 1000
    r_max: int = 100
    tol: float = 1e-2

    def draw(self, seed: int) -> np.ndarray:
        """Patches with means of zero, those of least contrast left out."""
        image = photographs([self.photograph], self.side)[0][0].double().numpy()
        windows = np.lib.stride_tricks.sliding_window_view(image, (self.patch, self.patch)).reshape(-1, self.patch**2)
        chosen = np.random.default_rng(seed).choice(len(windows), min(4 * self.count, len(windows)), replace=False)
        patches = windows[np.sort(chosen)]
        patches = patches - patches.mean(1, keepdims=True)
        strongest = np.argsort(-np.linalg.norm(patches, axis=1), kind="stable")[: 2 * self.count : 2]
        return np.ascontiguousarray(patches[strongest])


def name(gamma: float) -> str:
    """A part's name."""
    return f"γ = {gamma:g}"


def parts(options: DictionaryPatchesOptions) -> list[Part]:
    """Every γ, then scikit-learn's dictionary of the last one's size, and descent from there."""
    final = name(options.gammas[-1])
    return [*(Part(name(gamma)) for gamma in options.gammas), Part(SKLEARN, (final,)), Part(WARM, (final, SKLEARN))]


def run(options: DictionaryPatchesOptions, part: str, lab: Lab) -> Iterator[Metrics]:
    """One dictionary with its codes."""
    Y = options.draw(lab.seed)
    gamma = next((gamma for gamma in options.gammas if name(gamma) == part), options.gammas[-1])
    if part == SKLEARN:
        lam, size = (float(lab.kept(name(gamma), "answer")[key]) for key in ("lam", "size"))
        U, V = _sklearn(Y, lam, gamma, round(size), lab.seed)
        lab.keep("factors", {"U": torch.as_tensor(U), "V": torch.as_tensor(V)})
        certificate = certify(Y, U, V, lam=lam, regularizer="sparse", gamma=gamma, tol=options.tol)
        yield {"objective": _objective(Y, U, V, lam, gamma), **certified(certificate), **_scores(options, Y, U, V)}
        return
    start = None
    if part == WARM:
        lam = float(lab.kept(name(gamma), "answer")["lam"])
        kept = lab.kept(SKLEARN, "factors")
        start = (kept["U"].cpu().numpy(), kept["V"].cpu().numpy())
    else:
        lam = options.fraction * SparseDictionary(1.0, gamma, random_state=lab.seed).lambda_max(Y)
    model = SparseDictionary(
        lam, gamma, r_max=options.r_max, tol=options.tol, max_iter=options.sweeps, random_state=lab.seed
    )
    with recorded():
        U = model.fit_transform(Y, start=start)
    V = model.components_.T
    answer = {"lam": lam, "size": float(max(1, model.n_components_))}
    lab.keep("answer", {key: torch.tensor(value, dtype=torch.float64) for key, value in answer.items()})
    yield from thinned(model.history_, max(model.objective_ - model.certificate_.gap, 1e-12))
    yield {"objective": model.objective_, **certified(model.certificate_), **_scores(options, Y, U, V)}


def _sklearn(Y: np.ndarray, lam: float, gamma: float, size: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Atoms of norm one with an l1 penalty on the codes: the objective of scikit-learn that is closest to ours."""
    from sklearn.decomposition import MiniBatchDictionaryLearning

    model = MiniBatchDictionaryLearning(
        size,
        alpha=lam * gamma,
        fit_algorithm="cd",
        transform_algorithm="lasso_cd",
        transform_alpha=lam * gamma,
        max_iter=20,
        random_state=seed,
    )
    U = model.fit_transform(Y)
    return np.asarray(U), np.asarray(model.components_.T)


def _objective(Y: np.ndarray, U: np.ndarray, V: np.ndarray, lam: float, gamma: float) -> float:
    charged = np.linalg.norm(V, axis=0) @ (np.linalg.norm(U, axis=0) + gamma * np.abs(U).sum(0))
    return float(0.5 * ((Y - U @ V.T) ** 2).sum() + lam * charged)


def _scores(options: DictionaryPatchesOptions, Y: np.ndarray, U: np.ndarray, V: np.ndarray) -> dict[str, float | str]:
    """Size, density of the codes, error, and the heaviest atoms."""
    weights = np.linalg.norm(U, axis=0) * np.linalg.norm(V, axis=0)
    order = np.argsort(-weights)[:32]
    used = weights > 1e-8 * max(float(weights.max(initial=0.0)), 1e-300)
    codes = np.abs(U[:, used])
    scores: dict[str, float | str] = {
        "rank": int(used.sum()),
        "density": 100 * float(np.greater(codes, 1e-8).mean()) if codes.size else 0.0,
        "error": 100 * float(np.linalg.norm(Y - U @ V.T)) / float(np.linalg.norm(Y)),
    }
    if V.shape[1]:
        scores["atoms"] = encoded(montage(V.T[order].reshape(-1, options.patch, options.patch), 8, signed=True))
    return scores


def compare(results: Results[DictionaryPatchesOptions]) -> list[Comparison]:
    """Sizes, densities, errors and gaps."""
    rows = []
    for part in (part.name for part in parts(results.options)):
        rows.append(Comparison(f"{part}: atoms", None, results.final(part, "rank"), "", 0))
        rows.append(Comparison(f"{part}: codes that are not zero", None, results.final(part, "density"), "%", 1))
        rows.append(Comparison(f"{part}: relative error", None, results.final(part, "error"), "%", 1))
        note = "scikit-learn minimises another objective" if part == SKLEARN else ""
        rows.append(Comparison(f"{part}: objective", None, results.final(part, "objective"), "", 4, note))
        rows.append(Comparison(f"{part}: gap at most", None, results.final(part, "gap"), "%", 2, note))
    return rows


def plots(results: Results[DictionaryPatchesOptions]) -> list[Plot]:
    """The atoms, and the descent from both starts."""
    names = [part.name for part in parts(results.options)]
    shown = pictures([{part: last(results, part, "atoms") for part in names}], "The heaviest atoms")
    y = "objective / proved lower bound − 1"
    both = [names[len(results.options.gammas) - 1], WARM]
    descent = curves(results, both, key="excess", over="sweep", title="Descent from two starts", y=y, log=True)
    return [*([shown] if shown else []), descent]


def findings(results: Results[DictionaryPatchesOptions]) -> Sequence[str]:
    """Sparsity over γ, whether both starts end at the same value, and the certificates."""
    sentences = []
    for gamma in results.options.gammas:
        part = name(gamma)
        ranks, density = results.final(part, "rank"), results.final(part, "density")
        if ranks:
            sentences.append(f"{part}: {ranks[0]:.0f} atoms; {density[0]:.0f} % of the codes' entries are not zero.")
    final = name(results.options.gammas[-1])
    gaps, ours = results.paired(WARM, final, "objective"), results.final(final, "objective")
    if gaps:
        word = "above" if gaps[0] > 0 else "below"
        sentences.append(
            f"Started {WARM} the objective ends {100 * abs(gaps[0]) / ours[0]:.2g} % {word} that of the fit from its "
            "own start."
        )
    return [*sentences, *statuses(results, [part.name for part in parts(results.options)])]


def claims(results: Results[DictionaryPatchesOptions]) -> list[Claim]:
    """Sparse dictionaries grown to the certificate."""
    parts = [name(gamma) for gamma in results.options.gammas]
    text = "Sparse dictionary learning: growth ends at the global minimum (γ = 0, 0.02, 0.1)"
    return [certified_claim(results, text, parts, f"{results.options.count} patches")]


experiment = Experiment(
    name="dictionary-patches",
    title="A sparse dictionary for patches of a photograph",
    source="[Vidal2018], sparse dictionary learning",
    about=(
        "½‖Y − UVᵀ‖² + λΣ‖Vᵢ‖(‖Uᵢ‖ + γ‖Uᵢ‖₁) determines the number of atoms; γ makes the codes sparse. The bound "
        "on the polar is loose for large γ, and so is the certificate. To test whether the minimum is global, "
        "descent also starts from a dictionary of scikit-learn, which minimises a related objective at a given "
        "size."
    ),
    presets={
        "smoke": Preset(
            DictionaryPatchesOptions(side=48, patch=4, count=24, fraction=0.3, gammas=(0.0, 0.05), sweeps=30, r_max=10),
            (0,),
            0.05,
        ),
        "laptop": Preset(DictionaryPatchesOptions(), (0,), 2),
        "paper": Preset(DictionaryPatchesOptions(side=512, count=2000, sweeps=3000, r_max=256), (0,), 30),
    },
    parts=parts,
    run=run,
    compare=compare,
    plots=plots,
    findings=findings,
    claims=claims,
    columns=("excess", "gap"),
)

"""Robust PCA of a video: frames as low rank plus sparse."""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from minimand.errors import OptionError
from minimand.factor import RobustPCA

from ...context import Lab
from ...data import psnr
from ...drawing import curves
from ...experiment import Claim, Comparison, Experiment, Metrics, Part, Plot, Preset, Results
from ...pictures import encoded, pictures
from .._reconstruction import photographs
from ._factor import (
    arrays_of,
    certified,
    certified_claim,
    file_of,
    last,
    measured,
    recorded,
    resized,
    statuses,
    thinned,
)

PURSUIT = "principal component pursuit"
NOISY = "with a noise term"
MEDIAN = "median over time"
VIDEOS = ("auto", "escalator", "shop", "synthetic")
THRESHOLD = 0.1


@dataclasses.dataclass(frozen=True)
class RPCAVideoOptions:
    """Frames as rows of a matrix.

    Args:
        video: "escalator" or "shop": video/ of the data directory; "synthetic": a square that crosses a photograph
            under changing light; "auto": the escalator if the file exists, else synthetic.
        frames: The largest number of frames.
        shrink: Factor by which frames are shrunk; synthetic frames are 128 pixels high before.
        noise: In the formulation with a noise term, residuals up to this size (of 0 … 1) count as noise.
        iterations: The largest number of iterations of ADMM.
        tol: The relative gap to certify.
    """

    video: str = "auto"
    frames: int = 100
    shrink: int = 2
    noise: float = 0.02
    iterations: int = 500
    tol: float = 1e-3


@dataclasses.dataclass(frozen=True)
class Clip:
    """Frames × height × width in 0 … 1, with the true background and motion if they are known."""

    frames: np.ndarray
    name: str
    background: np.ndarray | None = None
    moving: np.ndarray | None = None


def clip(options: RPCAVideoOptions, lab: Lab) -> Clip:
    """The video."""
    if options.video not in VIDEOS:
        raise OptionError(f"video is one of {', '.join(VIDEOS)}, got {options.video!r}")
    if options.video != "synthetic":
        name = "escalator" if options.video == "auto" else options.video
        path = file_of(lab, f"video/{name}_gray.npz", required=options.video != "auto")
        if path is not None:
            frames = arrays_of(path, frames=(None, None, None))[0][: options.frames] / 255.0
            height, width = (side // options.shrink for side in frames.shape[1:])
            return Clip(resized(frames, height, width), name)
    return synthetic(options.frames, 128 // options.shrink, lab.seed)


def synthetic(frames: int, side: int, seed: int) -> Clip:
    """A bright square crosses a photograph whose light fades in and out, with noise of 0.01."""
    rng = np.random.default_rng(seed)
    scene = photographs(["coffee"], side)[0][0].numpy()
    lamp = np.linspace(0, 1, side)[None, :] * np.ones((side, 1))
    background, moving = np.empty((frames, side, side)), np.zeros((frames, side, side), dtype=bool)
    size = max(2, side // 6)
    for i in range(frames):
        phase = i / max(frames - 1, 1)
        background[i] = scene * (0.5 + 0.35 * lamp * np.sin(2 * np.pi * phase))
        top, left = round((side - size) * (0.5 + 0.4 * np.sin(5 * phase))), round((side - size) * phase)
        moving[i, top : top + size, left : left + size] = True
    seen = np.where(moving, 0.95, background) + 0.01 * rng.normal(size=background.shape)
    return Clip(seen.clip(0, 1).astype(np.float32), "synthetic", background, moving)


def parts(options: RPCAVideoOptions) -> list[Part]:
    """Both formulations, and the control."""
    return [Part(PURSUIT), Part(NOISY), Part(MEDIAN)]


def run(options: RPCAVideoOptions, part: str, lab: Lab) -> Iterator[Metrics]:
    """One decomposition."""
    video = clip(options, lab)
    Y = video.frames.reshape(len(video.frames), -1)
    if part == MEDIAN:
        low = np.repeat(np.median(Y, axis=0, keepdims=True), len(Y), axis=0)
        yield {"rank": 1, **_scores(video, low, Y - low)}
        return
    gamma = None if part == PURSUIT else 1 / options.noise
    weight = max(Y.shape) ** 0.5
    model = RobustPCA(weight, gamma, tol=options.tol, max_iter=options.iterations, random_state=lab.seed)
    with recorded():
        model.fit(Y)
    least = model.objective_ - model.certificate_.gap
    yield from thinned(model.history_, least)
    yield {
        "rank": model.n_components_,
        "objective": model.objective_,
        **certified(model.certificate_),
        **_scores(video, model.low_rank_, model.sparse_),
    }


def _scores(video: Clip, low: np.ndarray, sparse: np.ndarray) -> dict[str, float | str]:
    """The share of moving pixels, errors against the ground truth if there is one, and one decomposed frame."""
    shape = video.frames.shape
    low, moved = low.reshape(shape), np.abs(sparse.reshape(shape)) > THRESHOLD
    scores: dict[str, float | str] = {"moving": 100 * float(moved.mean()), "video": video.name}
    if video.background is not None and video.moving is not None:
        clean = torch.as_tensor(video.background, dtype=torch.float32)
        scores["psnr"] = float(psnr(torch.as_tensor(low, dtype=torch.float32).clamp(0, 1), clean))
        both = float((moved & video.moving).sum())
        scores["f1"] = 100 * 2 * both / max(float(moved.sum() + video.moving.sum()), 1.0)
    frame = shape[0] // 4
    scores["frame"] = encoded(video.frames[frame])
    scores["background"] = encoded(low[frame])
    scores["foreground"] = encoded(np.abs(sparse.reshape(shape)[frame]), high=0.5)
    return scores


def compare(results: Results[RPCAVideoOptions]) -> list[Comparison]:
    """Ranks, gaps and, for the synthetic video, distances to the truth."""
    rows = []
    for part in (PURSUIT, NOISY, MEDIAN):
        rows.append(Comparison(f"{part}: rank of the background", None, results.final(part, "rank"), "", 0))
        if part != MEDIAN:
            rows.append(Comparison(f"{part}: gap at most", None, results.final(part, "gap"), "%", 3))
        note = f"pixels whose sparse part exceeds {THRESHOLD:g}"
        rows.append(Comparison(f"{part}: moving", None, results.final(part, "moving"), "%", 2, note))
        rows.append(Comparison(f"{part}: background", None, results.final(part, "psnr"), " dB", 2))
        rows.append(Comparison(f"{part}: F1 of what moves", None, results.final(part, "f1"), "%", 1))
    return measured(rows)


def plots(results: Results[RPCAVideoOptions]) -> list[Plot]:
    """One frame decomposed by each method, and the descent."""
    grid = []
    for part in (PURSUIT, NOISY, MEDIAN):
        keys = {"frame": "a frame", "background": f"background:\n{part}", "foreground": "what moves"}
        grid.append({label: last(results, part, key) for key, label in keys.items()})
    shown = pictures(grid, "One frame, its background and what moves")
    title = "Descent"
    y = "objective / lower bound − 1"
    descent = curves(results, [PURSUIT, NOISY], key="excess", over="sweep", title=title, y=y, x="iteration", log=True)
    return [*([shown] if shown else []), descent]


def findings(results: Results[RPCAVideoOptions]) -> Sequence[str]:
    """Ranks, certificates, and distances to the ground truth."""
    sentences = []
    name = last(results, PURSUIT, "video")
    for part in (PURSUIT, NOISY):
        ranks, moving = results.final(part, "rank"), results.final(part, "moving")
        if ranks and name:
            sentences.append(
                f"{part} on {name}: a background of rank {ranks[0]:.0f}, and {moving[0]:.1f} % of the pixels move."
            )
        gains = results.paired(part, MEDIAN, "psnr")
        if gains:
            word = "above" if gains[0] > 0 else "below"
            sentences.append(f"{part}: background {abs(gains[0]):.1f} dB {word} the {MEDIAN}, on the synthetic video.")
    return [*sentences, *statuses(results, (PURSUIT, NOISY))]


def claims(results: Results[RPCAVideoOptions]) -> list[Claim]:
    """Both formulations of robust PCA."""
    text = "Robust PCA, both formulations: the global minimum"
    return [certified_claim(results, text, (PURSUIT, NOISY), f"{results.options.frames} frames")]


experiment = Experiment(
    name="rpca-video",
    title="Robust principal components of a video",
    source="[Vidal2018], robust PCA",
    about=(
        "The frames of a video with a fixed camera are the rows of Y. The background has low rank even when the "
        "light changes; people are sparse. λ‖X‖* + ‖Y − X‖₁ with λ the root of the longer side, and the same with "
        "a noise term, are compared with the median over time. The synthetic video has a ground truth: a square "
        "crosses a photograph under changing light."
    ),
    presets={
        "smoke": Preset(RPCAVideoOptions("synthetic", frames=16, shrink=6, iterations=150), (0,), 0.04),
        "laptop": Preset(RPCAVideoOptions(), (0,), 1),
        "paper": Preset(RPCAVideoOptions(frames=200, shrink=1, iterations=2000, tol=1e-3), (0,), 40),
    },
    parts=parts,
    run=run,
    compare=compare,
    plots=plots,
    findings=findings,
    claims=claims,
    columns=("excess", "gap"),
)

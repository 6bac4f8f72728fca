"""Shared code of the factorisation experiments: data files, certificates as numbers, line plots."""

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from minimand.errors import DataError
from minimand.factor import Certificate

from ...claims import judge_certificates, scale
from ...context import Lab
from ...data import data_directory
from ...drawing import COLORS, figure, logarithmic, style
from ...experiment import Claim, Comparison, Metrics, Plot, Results
from ...untrusted import matlab_arrays, npz_array

__all__ = [
    "arrays_of",
    "certified",
    "certified_claim",
    "file_of",
    "last",
    "lines",
    "measured",
    "recorded",
    "resized",
    "statuses",
    "thinned",
]


def file_of(lab: Lab, *names: str, required: bool = False) -> Path | None:
    """The first of these files that the data directory holds, or None."""
    root = data_directory(lab.data_dir)
    for name in names:
        if (root / name).is_file():
            return root / name
    if required:
        raise DataError(f"none of {', '.join(names)} is in {root}; put it there, or choose the bundled data")
    return None


def arrays_of(path: Path, **shapes: tuple[int | None, ...]) -> list[np.ndarray]:
    """Arrays of finite numbers from an ``.npz`` or ``.mat`` file; ``None`` in a shape stands for any size."""
    try:
        found = [npz_array(path, name) for name in shapes] if path.suffix == ".npz" else matlab_arrays(path, [*shapes])
        for (name, shape), array in zip(shapes.items(), found, strict=True):
            fits = array.ndim == len(shape) and all(
                want in (None, got) for want, got in zip(shape, array.shape, strict=True)
            )
            if not fits or not array.size or not np.isfinite(array).all():
                raise ValueError(f"its {name} is {array.shape}, or not finite")
    except Exception as error:
        raise DataError(
            f"{path} is damaged, or not the publisher's file ({' '.join(str(error).split())}): "
            f"replace it, or choose the bundled data"
        ) from error
    return found


@contextlib.contextmanager
def recorded() -> Iterator[None]:
    """Silence the warning of an uncertified fit; the certificate is in the record."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".* stopped before its certificate")
        yield


def resized(images: np.ndarray, height: int, width: int) -> np.ndarray:
    """Images, number × height × width, shrunk to this size without aliasing."""
    if images.shape[1:] == (height, width):
        return images.astype(np.float32)
    pixels = torch.as_tensor(images.astype(np.float32))[:, None]
    small = F.interpolate(pixels, (height, width), mode="bilinear", antialias=True)
    return np.asarray(small[:, 0].numpy())


def certified(certificate: Certificate) -> dict[str, float | str]:
    """A certificate as entries of a record; the gap in per cent of the objective."""
    return {
        "status": str(certificate.status),
        "gap": 100 * min(certificate.relative_gap, 1e6),
        "polar": certificate.polar_lower,
        "method": certificate.method,
    }


def thinned(history: Sequence[float], least: float, count: int = 60) -> list[Metrics]:
    """Records of an objective's distance to its minimum, in at most ``count`` places."""
    places = sorted({round(i) for i in np.geomspace(1, max(len(history), 1), count)}) if history else []
    scale = max(abs(least), 1e-300)
    return [{"sweep": i, "excess": max((history[i - 1] - least) / scale, 1e-12)} for i in places]


def last(results: Results[Any], part: str, key: str) -> Any:
    """The last value that the first seed recorded under a key; None if there is none."""
    return next((values[-1] for values in results.curve(part, key).values() if values), None)


def statuses(results: Results[Any], parts: Sequence[str]) -> list[str]:
    """A sentence for every part that has a certificate."""
    sentences = []
    for part in parts:
        found = [values[-1] for values in results.curve(part, "status").values() if values]
        gaps = results.final(part, "gap")
        if found and gaps:
            counts = {status: found.count(status) for status in sorted(set(found))}
            which = ", ".join(f"{name} in {n} of {len(found)} seeds" for name, n in counts.items())
            which = which if len(counts) > 1 else found[0]
            sentences.append(f"{part}: {which}, at most {max(gaps):.3g} % of the objective above the global minimum.")
    return sentences


def certified_claim(results: Results[Any], text: str, parts: Sequence[str], *words: str) -> Claim:
    """The claim that a fit ends at the global minimum, judged by the certificates of these parts."""
    found = [(part, seed) for part in parts for seed, values in results.curve(part, "status").items() if values]
    status = [results.curve(part, "status")[seed][-1] for part, seed in found]
    gaps = [results.curve(part, "gap")[seed][-1] for part, seed in found]
    gap = max(gaps, default=0.0)
    digits = ".2g" if gap < 10 else ".0f"
    measured = f"certified in {status.count('CERTIFIED')} of {len(found)} fits, gap at most {gap:{digits}} %"
    verdict = judge_certificates(status, gaps)
    return Claim(text, "gap 0", measured if found else "–", scale(results, *words), verdict)


def lines(
    drawn: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    title: str,
    x: str,
    y: str,
    log: str = "",
    marks: Mapping[str, str] | None = None,
) -> Plot:
    """Lines of one seed with their labels; ``marks`` are matplotlib's styles by label."""
    page = figure()
    axes = page.subplots()
    sentences = []
    for number, (label, (places, values)) in enumerate(drawn.items()):
        if not len(values):
            continue
        mark = (marks or {}).get(label, "o-")
        axes.plot(places, values, mark, color=COLORS[number % len(COLORS)], label=label, markersize=4)
        sentences.append(f"{label} from {values[0]:.3g} to {values[-1]:.3g}")
    for axis in log:
        logarithmic(axes, axis)
    style(axes, x, y, title)
    if sentences:
        axes.legend(frameon=False)
    return Plot(title, f"{y} over {x}: {'; '.join(sentences) or 'nothing measured yet'}", page)


def measured(rows: Sequence[Comparison]) -> list[Comparison]:
    """The rows with measurements; all rows if nothing was measured."""
    found = [row for row in rows if len(row.measured)]
    return found or list(rows)

"""Shared code of the experiments on dropout for factorisation."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from minimand.factor import DropoutFactorization

from ...context import Lab
from ...drawing import COLORS, figure, style
from ...experiment import Metrics, Plot, Results

__all__ = ["MatrixOptions", "followed", "landmarks", "norm_plot"]


@dataclasses.dataclass(frozen=True)
class MatrixOptions:
    """A random matrix to factorise, drawn for each seed.

    Args:
        rows: Rows of the matrix.
        columns: Columns of the matrix.
        rank: Rank of the signal; 0: a full Gaussian matrix without signal.
        noise: Standard deviation of the noise.
    """

    rows: int = 100
    columns: int = 100
    rank: int = 0
    noise: float = 0.1

    def draw(self, lab: Lab) -> np.ndarray:
        """The matrix of this seed."""
        generator = lab.generator()

        def gauss(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        if not self.rank:
            return gauss(self.rows, self.columns).numpy()
        signal = gauss(self.rows, self.rank) @ gauss(self.rank, self.columns) / self.rank**0.5
        return (signal + self.noise * gauss(self.rows, self.columns)).numpy()


def landmarks(count: int, points: int = 60) -> list[int]:
    """Iterations to record, equally far apart on a logarithmic axis, the start and the end included."""
    spread = np.logspace(0, np.log10(max(count, 1)), points).astype(int).tolist()
    return sorted({0, count, *(k for k in spread if k <= count)})


def followed(Y: np.ndarray, model: DropoutFactorization) -> Iterator[Metrics]:
    """Fit; yields the objective, its excess over the global minimum and the norms of the terms over the iterations.

    The excess is relative to the minimum, or to ‖Y‖² if the minimum is zero up to rounding.
    """
    left = model.fit_transform(Y)
    whole = float((Y**2).sum())
    scale = model.optimum_ if model.optimum_ > 1e-12 * whole else whole

    def excess(value: float) -> float:
        return max(value - model.optimum_, 0.0) / scale

    for k in landmarks(len(model.history_) - 1):
        low, mean, high = (float(v) for v in model.norm_history_[k])
        value = float(model.history_[k])
        yield {"iteration": k, "objective": value, "excess": excess(value), "low": low, "mean": mean, "high": high}
    values = np.linalg.svd(left @ model.components_, compute_uv=False)
    norms = np.linalg.norm(left, axis=0) * np.linalg.norm(model.components_, axis=1)
    yield {
        "iteration": len(model.history_) - 1,
        "excess": excess(model.objective_),
        "optimum": float(model.optimum_),
        "unequal": float(norms.std() / norms.mean()) if norms.mean() > 0 else 0.0,
        "values": [round(float(v), 5) for v in values[:40]],
        "threshold": float(model.threshold_),
    }


def norm_plot(results: Results[Any], parts: Sequence[str], title: str) -> Plot:
    """The least, mean and largest norm of the terms over the iterations, of the first seed."""
    drawn = figure()
    axes = drawn.subplots()
    sentences = []
    for number, part in enumerate(parts):
        runs = {key: results.curve(part, key) for key in ("iteration", "low", "mean", "high")}
        seed = next((seed for seed, values in runs["mean"].items() if values), None)
        if seed is None:
            continue
        low, mean, high = (runs[key][seed] for key in ("low", "mean", "high"))
        at = [max(k, 0.8) for k in runs["iteration"][seed][: len(mean)]]
        axes.plot(at, mean, color=COLORS[number], label=part)
        axes.fill_between(at, low, high, color=COLORS[number], alpha=0.2, linewidth=0)
        sentences.append(f"{part}: from {low[-1]:.3g} to {high[-1]:.3g}")
    axes.set_xscale("log")
    style(axes, "iterations", "norm of a term: mean, least to largest", title)
    if sentences:
        axes.legend(frameon=False)
    return Plot(title, f"Norms of the terms; at the end {'; '.join(sentences) or 'nothing measured yet'}", drawn)

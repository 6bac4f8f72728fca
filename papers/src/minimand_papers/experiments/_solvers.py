"""Shared code of the experiments that train image classifiers: options, conversion, notes."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from torch import nn

from minimand.errors import OptionError, require_positive
from minimand.nn import SolverOptions, convert
from minimand.solvers import Solver
from minimand.solvers.base import require_count

from ..claims import ACCURACY, judge_gain, not_run, scale, signed
from ..context import Lab
from ..data import Augmentation, CropFlip, registry
from ..experiment import Claim, Results
from ..training import Loaders, loaders

__all__ = ["ImageOptions", "Steps", "chosen", "fine_tuning_claim", "from_zero", "solved", "trials"]

Steps = Literal["ours", "source"]


@dataclasses.dataclass(frozen=True)
class ImageOptions:
    """The images and their batches.

    Args:
        dataset: A name from ``minimand_papers.data.registry``: cifar10, cifar100, …
        batch: Images in a batch.
        augment: Crop and flip at random.
        limit: Use only this many images of each split; 0: all.
        enlarge: Repeat each pixel this many times in both directions.
    """

    dataset: str = "cifar10"
    batch: int = 128
    augment: bool = False
    limit: int = 0
    enlarge: int = 1

    def __post_init__(self) -> None:
        own = {field.name for field in dataclasses.fields(self)}
        counts = {"batch", "enlarge", "epochs", "start", "finetune", "iters", "finetune_iters", "trials"}
        for name in sorted(own & counts):
            require_count(name, getattr(self, name))
        if self.limit < 0:
            raise OptionError(f"limit is a number of images, or 0 for all, got {self.limit}")
        for name in sorted(own & {"width", "rate", "backprop_rate", "tau_theta"}):
            require_positive(name, getattr(self, name))
        if self.dataset not in registry:
            raise OptionError(f"there is no dataset named {self.dataset!r}; available: {', '.join(registry)}")

    def loaders(self, lab: Lab) -> Loaders:
        """Batches of the three splits."""
        augment: Augmentation | None = CropFlip() if self.augment else None
        return loaders(lab, self.dataset, self.batch, augment=augment, limit=self.limit or None, enlarge=self.enlarge)

    def paper(self, numbers: Mapping[str, float]) -> float | None:
        """The source's number for this dataset, if it has one."""
        return numbers.get(self.dataset)


def trials(results: Results[Any], part: str, *sentences: str) -> str:
    """A note: other remarks, then the spread of a stochastic network over its trials for each seed."""
    spreads = results.final(part, "trials_std")
    shown = [f"± {', '.join(f'{spread:.2f}' for spread in spreads)} over trials"] if spreads else []
    return "; ".join([*filter(None, sentences), *shown])


def solved(model: nn.Module, rules: Mapping[str, Solver], steps: Steps = "ours") -> nn.Module:
    """The network with the named blocks replaced by solvers; unchanged without rules."""
    made = {path: chosen(solver, steps) for path, solver in rules.items()}
    return convert(model, made, inplace=True) if rules else model


def chosen(solver: Solver, steps: Steps) -> SolverOptions:
    """A solver from zero with our step sizes, or by the source's protocol."""
    return SolverOptions.paper(solver) if steps == "source" else from_zero(solver)


def from_zero(solver: Solver) -> SolverOptions:
    """A solver whose iterations start from zero, and which samples in evaluation, too, as in the source."""
    return SolverOptions(solver, start="zero", eval_mode="stochastic")


def fine_tuning_claim(results: Results[Any], text: str, pair: tuple[str, str], dataset: str, size: float) -> Claim:
    """The source's gain of ``size`` points on a dataset, beside our gain over equal fine-tuning without the solver."""
    title, paper = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}[dataset], f"{size:+.2f} points"
    if dataset != results.options.dataset:
        return not_run(text, paper, f"no {title} data")
    gains = results.paired(*pair, "test")
    words = f"{results.options.epochs} of 300 epochs", f"width × {results.options.width:g}"
    measured = f"{signed(gains)} over equal fine-tuning without the solver"
    return Claim(text, paper, measured, scale(results, title, *words), judge_gain(gains, size, single=ACCURACY))

"""What an experiment is: options with presets, parts that yield metrics, the source's numbers, and pictures."""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from minimand.errors import OptionError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .context import Lab

__all__ = ["PRESETS", "Comparison", "Experiment", "Metrics", "Part", "Plot", "Preset", "Results"]

O = TypeVar("O")  # noqa: E741
Metrics = Mapping[str, Any]

PRESETS = ("smoke", "laptop", "paper")

# What the numbers of the bibliography stand for.
_SOURCES = {"000": "Bibi et al. 2019", "002": "Lin 2019", "003": "Vidal", "004": "Frerix et al. 2018"}


@dataclasses.dataclass(frozen=True)
class Part:
    """One run of an experiment: a row of its table, for one seed. It may need what other parts have kept."""

    name: str
    needs: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Preset(Generic[O]):
    """The options at one scale, the seeds, and about how many minutes all of it takes on one core."""

    options: O
    seeds: tuple[int, ...] = (0,)
    minutes: float = 1.0


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A row of the report: the source's number beside ours, one measurement a seed.

    Args:
        label: What was measured.
        paper: The source's number, None where it has none.
        measured: One number a seed.
        unit: Behind the numbers, for example "%".
        digits: Decimals shown.
        note: What a reader has to know of this row.
    """

    label: str
    paper: float | None
    measured: Sequence[float]
    unit: str = ""
    digits: int = 2
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Plot:
    """A picture of the report, with the text that stands for it."""

    title: str
    alt: str
    figure: "Figure"


@dataclasses.dataclass(frozen=True)
class Results(Generic[O]):
    """What was measured: for every part and seed the records that its run yielded, in order."""

    options: O
    preset: str
    records: Mapping[str, Mapping[int, Sequence[Metrics]]]

    def parts(self) -> list[str]:
        """The parts that have at least one record."""
        return [part for part, seeds in self.records.items() if any(seeds.values())]

    def curve(self, part: str, key: str) -> dict[int, list[Any]]:
        """The values of ``key`` over the records of a part that have it, for every seed."""
        seeds = self.records.get(part, {})
        return {seed: [record[key] for record in records if key in record] for seed, records in seeds.items()}

    def final(self, part: str, key: str) -> list[float]:
        """The last value of ``key`` for every seed that has one."""
        return [float(values[-1]) for values in self.curve(part, key).values() if values]

    def paired(self, part: str, other: str, key: str) -> list[float]:
        """The last values of ``part`` minus those of ``other``, for the seeds that both have."""
        ours, theirs = self.curve(part, key), self.curve(other, key)
        return [ours[seed][-1] - theirs[seed][-1] for seed in ours if ours[seed] and theirs.get(seed)]

    def chosen(self, groups: Mapping[str, Sequence[str]], key: str = "validation") -> "Results[O]":
        """A part a group: for every seed the records of the candidate that ended with the largest ``key``.

        So is a method tuned: its candidates are parts, and what is reported of it is one of them, picked by a
        measurement that is not the one reported. Seeds for which a candidate is missing are left out.
        """
        records: dict[str, dict[int, Sequence[Metrics]]] = {}
        for group, names in groups.items():
            ends = [{seed: values[-1] for seed, values in self.curve(name, key).items() if values} for name in names]
            records[group] = {}
            for seed in sorted(set.intersection(*map(set, ends))):
                reached = [found[seed] for found in ends]
                records[group][seed] = self.records[names[reached.index(max(reached))]][seed]
        return dataclasses.replace(self, records=records)


def _nothing(results: Results[Any]) -> Sequence[Any]:
    return ()


@dataclasses.dataclass(frozen=True)
class Experiment(Generic[O]):
    """A claim of a source that one command runs.

    Args:
        name: As on the command line.
        title: A line for the report.
        source: Paper, by its number in the bibliography, and table or figure.
        about: What is claimed, what is measured, and against which control; a paragraph.
        presets: ``smoke``, ``laptop`` and ``paper``, each with frozen-dataclass options of plain values.
        parts: The parts for given options; independent of each other but for ``needs``.
        run: Runs one part and yields its records. Whatever it draws at random comes from torch's seeded default
            generator or from ``lab.generator()``; a loop over ``lab.epochs`` makes it resumable.
        compare: The rows of the table, from what has been measured so far.
        plots: The pictures.
        findings: What the numbers say, in sentences, losses included.
        columns: The records' keys that the progress bar shows.
    """

    name: str
    title: str
    source: str
    about: str
    presets: Mapping[str, Preset[O]]
    parts: Callable[[O], Sequence[Part]]
    run: "Callable[[O, str, Lab], Iterator[Metrics]]"
    compare: Callable[[Results[O]], Sequence[Comparison]]
    plots: Callable[[Results[O]], Sequence[Plot]] = _nothing
    findings: Callable[[Results[O]], Sequence[str]] = _nothing
    columns: tuple[str, ...] = ("loss", "validation")

    @property
    def citation(self) -> str:
        """The source with its authors in the place of its number."""
        return re.sub(r"\b00\d\b", lambda number: _SOURCES.get(number[0], number[0]), self.source)

    def preset(self, name: str) -> Preset[O]:
        """The preset of this name."""
        if name not in self.presets:
            raise OptionError(f"{self.name} has no preset {name!r}; it has {', '.join(self.presets)}")
        return self.presets[name]

    def restore(self, preset: str, options: Mapping[str, Any]) -> O:
        """Options as they were stored; what a stored file does not name is as in the preset."""
        default = self.preset(preset).options
        known = {field.name for field in dataclasses.fields(default)}  # type: ignore[arg-type]
        unknown = sorted(set(options) - known)
        if unknown:
            raise OptionError(f"{self.name} has no option {', '.join(unknown)}: the results are of another version")
        return dataclasses.replace(default, **{key: _tuples(value) for key, value in options.items()})  # type: ignore[type-var]


def _tuples(value: Any) -> Any:
    """JSON's lists as the tuples they were."""
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value

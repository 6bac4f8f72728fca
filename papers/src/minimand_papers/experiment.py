"""The parts of an experiment: options with presets, runs that yield metrics, the source's numbers, claims, plots."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from minimand.errors import MissingExtra, OptionError

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from .comparing import Difference
    from .context import Lab

__all__ = [
    "PLACE",
    "PRESETS",
    "Claim",
    "Comparison",
    "Experiment",
    "Metrics",
    "Part",
    "Plot",
    "Preset",
    "Results",
    "Verdict",
    "columns",
]

O = TypeVar("O")  # noqa: E741
Metrics = Mapping[str, Any]

PRESETS = ("smoke", "laptop", "paper")
PLACE = ("part", "seed", "record")
"""The columns that say where a record belongs."""

Verdict = Literal["reproduced", "partly", "not", "not run"]


@dataclasses.dataclass(frozen=True)
class Part:
    """One run of an experiment for one seed, usually a row of its table.

    Args:
        name: The name.
        needs: Parts that run before it.
        seeded: Whether the seed matters; otherwise it runs for the first seed, whose records count for every seed.
    """

    name: str
    needs: tuple[str, ...] = ()
    seeded: bool = True


@dataclasses.dataclass(frozen=True)
class Preset(Generic[O]):
    """The options at one scale, the seeds, and the approximate time on one core in minutes."""

    options: O
    seeds: tuple[int, ...] = (0,)
    minutes: float = 1.0


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A row of the report: the source's number beside ours.

    Args:
        label: The quantity.
        paper: The source's number; None: the source gives none.
        measured: One number per seed.
        unit: Written behind the numbers, for example "%".
        digits: Decimals shown.
        note: A remark on this row.
    """

    label: str
    paper: float | None
    measured: Sequence[float]
    unit: str = ""
    digits: int = 2
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Claim:
    """A claim of the source beside our measurement; the rules for the verdict are those of ``minimand_papers.claims``.

    Args:
        text: The claim, beginning with its place in the source.
        paper: The source's number.
        measured: Our number with its spread.
        scale: Preset, data, reductions against the source, and the number of seeds; for a claim that was not run, the
            reason.
        verdict: ``reproduced``, ``partly``, ``not`` or ``not run``.
    """

    text: str
    paper: str
    measured: str
    scale: str
    verdict: Verdict


@dataclasses.dataclass(frozen=True)
class Plot:
    """A picture of the report with its text alternative."""

    title: str
    alt: str
    figure: "Figure"


@dataclasses.dataclass(frozen=True)
class Results(Generic[O]):
    """The records that each part yielded for each seed, in order."""

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
        """One part per group: for each seed the records of the candidate that ended with the largest ``key``.

        This is how a method is tuned. Its candidates are parts; one of them is chosen by ``key``, and another number
        of the chosen one is reported. Seeds for which a candidate is missing are left out.
        """
        records: dict[str, dict[int, Sequence[Metrics]]] = {}
        for group, names in groups.items():
            ends = [{seed: values[-1] for seed, values in self.curve(name, key).items() if values} for name in names]
            records[group] = {}
            for seed in sorted(set.intersection(*map(set, ends))):
                reached = [found[seed] for found in ends]
                records[group][seed] = self.records[names[reached.index(max(reached))]][seed]
        return dataclasses.replace(self, records=records)

    def rows(self) -> list[dict[str, Any]]:
        """Every record as one flat dictionary: its part, its seed, its number from 0 on (``record``), and its own keys.

        A record's own key with one of these three names is listed with an underscore behind it.

        >>> Results(None, "smoke", {"a": {0: [{"loss": 2.0}, {"loss": 1.0, "seed": "x"}]}}).rows()[1]
        {'part': 'a', 'seed': 0, 'record': 1, 'loss': 1.0, 'seed_': 'x'}
        """
        listed = [
            (part, seed, number, record)
            for part, seeds in self.records.items()
            for seed, records in seeds.items()
            for number, record in enumerate(records)
        ]
        keys = {key for *_, record in listed for key in record}
        own = {name: next(free for free in _underscored(name) if free not in keys) for name in PLACE}
        return [
            {**dict(zip(PLACE, place, strict=True)), **{own.get(key, key): value for key, value in record.items()}}
            for *place, record in listed
        ]

    def to_pandas(self) -> "DataFrame":
        """All records as a data frame in long form, one line per record with the columns of :meth:`rows`.

        A key that a record lacks is NaN there. It needs the package pandas.
        """
        try:
            from pandas import DataFrame
        except ImportError as error:
            raise MissingExtra('to_pandas needs pandas: pip install "minimand-papers[pandas]"') from error
        rows = self.rows()
        return DataFrame(rows, columns=columns(rows))


def columns(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The columns of a table of :meth:`Results.rows`, in the order in which they first occur."""
    return list(dict.fromkeys([*PLACE, *(key for row in rows for key in row)]))


def _underscored(name: str) -> Iterator[str]:
    return (name + "_" * count for count in itertools.count(1))


def _nothing(results: Results[Any]) -> Sequence[Any]:
    return ()


@dataclasses.dataclass(frozen=True)
class Experiment(Generic[O]):
    """An experiment that one command runs.

    Args:
        name: The name on the command line.
        title: One line for the report.
        source: Citation key and place, for example "[Bibi2019], Table 2".
        about: A paragraph: the claim, the measurement and the control.
        presets: ``smoke``, ``laptop`` and ``paper``, each with options in a frozen dataclass of plain values.
        parts: The parts for given options. They are independent except for ``needs``.
        run: Runs one part and yields its records. Random numbers come from torch's seeded default generator or from
            ``lab.generator()``. A loop over ``lab.epochs`` makes the part resumable.
        compare: The rows of the table.
        plots: The pictures.
        findings: Differences between parts and sentences, losses included.
        claims: The source's claims with a verdict on each.
        needs_data: The dataset without which the ``laptop`` and ``paper`` presets cannot run, if it is hard to get.
        columns: The keys of the records that the progress bar shows.
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
    findings: "Callable[[Results[O]], Sequence[str | Difference]]" = _nothing
    claims: Callable[[Results[O]], Sequence[Claim]] = _nothing
    needs_data: str = ""
    columns: tuple[str, ...] = ("loss", "validation")

    def preset(self, name: str) -> Preset[O]:
        """The preset of this name."""
        if name not in self.presets:
            raise OptionError(f"{self.name} has no preset {name!r}; it has {', '.join(self.presets)}")
        return self.presets[name]

    def restore(self, preset: str, options: Mapping[str, Any]) -> O:
        """Options from a result file; an option that the file lacks has the preset's value."""
        default = self.preset(preset).options
        known = {field.name for field in dataclasses.fields(default)}  # type: ignore[arg-type]
        unknown = sorted(set(options) - known)
        if unknown:
            raise OptionError(f"{self.name} has no option {', '.join(unknown)}: the results are from another version")
        return dataclasses.replace(default, **{key: _tuples(value) for key, value in options.items()})  # type: ignore[type-var]


def _tuples(value: Any) -> Any:
    """Lists, as JSON has them, become tuples again."""
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value

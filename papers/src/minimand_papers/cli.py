"""Run the experiments behind minimand and see the papers' numbers beside yours."""

import argparse
import dataclasses
import io
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from minimand.errors import DataError, MinimandError, OptionError

from .experiment import Experiment
from .progress import Display
from .registry import experiments, find
from .runner import RunSetting
from .runner import run as run_setting
from .sources import SOURCES

__all__ = ["main"]

PresetName = Literal["smoke", "laptop", "paper"]
# The presets whose time is listed; smoke takes seconds.
_LONG = ("laptop", "paper")
# From this many columns on a terminal has room for a column with the place in the source.
_WIDE = 140
# Words of torch's errors about sizes that no memory holds.
_TOO_LARGE = ("allocate memory", "verflow when unpacking", "overflowed")


@dataclasses.dataclass(frozen=True)
class Arguments:
    """How to run an experiment.

    Args:
        preset: The scale. smoke takes seconds and only tests that the code runs; laptop uses real data and a couple of
            cores; paper follows the source's protocol.
        data_dir: The directory with the datasets (default: MINIMAND_DATA, else the user's cache directory).
        out: The directory of all runs.
        seed: One or more seeds.
        resume: Continue an interrupted run; the numbers are those of an uninterrupted one. Without this option an
            earlier run is moved aside.
        continue_from: A result file of the same experiment and options; the parts that are finished there are taken
            from it and do not run again.
        jobs: Number of parallel processes (default: one per core).
        threads: Threads of each process.
        download: Download missing datasets.
        tensorboard: Also write TensorBoard logs.
    """

    preset: PresetName = "laptop"
    data_dir: Path | None = None
    out: Path = Path("runs")
    seed: tuple[int, ...] = (0,)
    resume: bool = False
    continue_from: Path | None = None
    jobs: int | None = None
    threads: int = 1
    download: bool = False
    tensorboard: bool = False


def list_() -> None:
    """List the experiments by source, with the approximate time of each preset on one core.

    Example: minimand list
    """
    from rich import box
    from rich.console import Console, Group
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    console = Console()
    wide = console.width >= _WIDE
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="Experiments by source, with their time on one core")
    table.add_column("experiment", no_wrap=True, style="bold")
    table.add_column("title" if wide else "title and place in the source")
    if wide:
        table.add_column("place in the source")
    for preset in _LONG:
        table.add_column(preset, justify="right", no_wrap=True)
    for source in SOURCES.values():
        table.add_section()
        empty = [""] * (len(table.columns) - 2)
        table.add_row(Text(source.key, style="bold cyan"), Text(source.short, style="cyan"), *empty)
        for experiment in experiments(source):
            times = (_duration(experiment.presets[preset].minutes) for preset in _LONG)
            place = Text(experiment.source, style="dim")
            about = [experiment.title, place] if wide else [Group(experiment.title, Padding(place, (0, 0, 0, 2)))]
            table.add_row(experiment.name, *about, *times)
    console.print(table)
    console.print("The preset smoke takes seconds. Options of an experiment: minimand run NAME --help", highlight=False)


def run(
    name: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="NAME")],
    arguments: tyro.conf.OmitArgPrefixes[Arguments] = Arguments(),  # noqa: B008
) -> None:
    """Run an experiment. minimand run NAME --help shows its own options.

    Example: minimand run solvers-lenet --preset laptop --data-dir ~/data --seed 0 1 2

    Args:
        name: A name from minimand list, or the path of a Python file that defines an experiment.
        arguments: How to run it.
    """
    _run([name])


def report(
    out: Path = Path("runs"),
    open: bool = False,
    file: Path | None = None,
    markdown: Path | None = None,
    csv: Path | None = None,
    experiment: tuple[Path, ...] = (),
) -> None:
    """Write one self-contained HTML page of all results: the paper's numbers beside ours, with plots.

    Example: minimand report --open

    Args:
        out: The directory of all runs.
        open: Open the page in a browser.
        file: The path of the page (default: report.html in the directory of all runs).
        markdown: Also write one Markdown page per source into this directory.
        csv: Also write two CSV files per result into this directory: every record, and the comparison with the source.
        experiment: Python files that define experiments of your own, whose results are to be shown, too. Their code is
            run; result files alone never run code.
    """
    from .report import write_pages, write_report, write_tables

    if not out.is_dir():
        raise OptionError(
            f"there is no directory {out}: run an experiment first (minimand list), or give another --out"
        )
    for option, folder in (("markdown", markdown), ("csv", csv)):
        if folder is not None and folder.is_file():
            raise OptionError(f"--{option} takes a directory, and {folder} is a file")
    own = [find(str(path)) for path in experiment]
    path = write_report(out, file, own=own)
    _say(f"Report: {path}")
    if markdown is not None:
        names = ", ".join(page.name for page in write_pages(out, markdown, own=own))
        _say(f"Pages:  {names} in {markdown}")
    if csv is not None:
        tables, problems = write_tables(out, csv, own=own)
        _say(f"Tables: {len(tables)} files in {csv}")
        for problem in problems:
            _complain(problem)
    if open:
        import webbrowser

        webbrowser.open(path.absolute().as_uri())


def demo(out: Path = Path("runs"), jobs: int | None = None, preset: PresetName = "laptop") -> None:
    """Convert a trained network and fine-tune it, train another with heavy dropout, and write the report.

    The first part trains a network on bundled digits, plans its conversion, converts it, which keeps its accuracy, and
    fine-tunes it beside two controls. The second trains networks at moderate and heavy dropout, plain and converted.

    Example: minimand demo

    Args:
        out: The directory of all runs.
        jobs: Number of parallel processes (default: one per core).
        preset: The scale; laptop takes a few minutes.
    """
    from rich.console import Console

    from .experiments.bibi2019.conversion_digits import preview
    from .report import write_report

    console = Console()
    shown: Any = find("conversion-digits").presets[preset].options
    _say(f"What convert would do with the network:\n{preview(shown)}\n")
    for name in ("layer-convergence", "conversion-digits", "dropout-digits"):
        path = run_setting(RunSetting(name, preset, out=out, jobs=jobs), Display(console))
        _summary(path, console)
    _say(f"Report: {write_report(out)}")


def bench(names: tyro.conf.Positional[tuple[str, ...]] = (), save: bool = False, label: str = "") -> None:
    """Measure run time against peers and the plain block. Run it in a checkout of the repository.

    Example: minimand bench layers

    Args:
        names: The benchmarks to run (default: all).
        save: Also write the results to benchmarks/results.
        label: Write them as NAME-LABEL.json, to keep results of several processors side by side.
    """
    sys.path.insert(0, str(Path.cwd()))
    try:
        from benchmarks.__main__ import main as run_benchmarks
    except ModuleNotFoundError as error:
        if error.name not in ("benchmarks", "benchmarks.__main__"):
            raise
        raise OptionError("there is no folder benchmarks here: run minimand bench in a checkout of minimand") from None
    run_benchmarks(names, save, label)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    commands: dict[str, Callable[..., Any]] = {
        "list": list_,
        "run": run,
        "report": report,
        "demo": demo,
        "bench": bench,
    }
    sys.stdout, sys.stderr = (stream or open(os.devnull, "w") for stream in (sys.stdout, sys.stderr))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A path may hold bytes that are no text, and a terminal may lack letters.
            stream.reconfigure(errors="backslashreplace")
    try:
        if given == ["--version"]:
            print(f"minimand {metadata.version('minimand')}")
        elif given[:1] == ["run"] and (ordered := _name_first(given[1:])):
            _run(ordered)
        else:
            tyro.extras.subcommand_cli_from_dict(commands, prog="minimand", description=__doc__, args=given)
        sys.stdout.flush()
    except MinimandError as error:
        _complain(error)
        raise SystemExit(2) from None
    except (OSError, MemoryError, OverflowError, RuntimeError, TypeError) as error:
        why = _machine(error)
        if why is None:
            raise
        _complain(why, *getattr(error, "__notes__", ()))
        _let_go_of_output()
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        again = shlex.join(["minimand", *given, *([] if "--resume" in given else ["--resume"])])
        hint = f"; continue with: {again}" if given[:1] == ["run"] else ""
        _complain(f"interrupted{hint}")
        raise SystemExit(130) from None


def _machine(error: Exception) -> str | None:
    """A sentence for an error of the machine: of its files, devices or memory; None for one of the program."""
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror or error}; make room or get permission there, or name another place"
    if isinstance(error, RuntimeError | TypeError) and not any(word in str(error) for word in _TOO_LARGE):
        return None
    return "a number among the options is too large for this machine; give a smaller one"


def _let_go_of_output() -> None:
    """Output that cannot be written must not be tried again when the program ends."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _name_first(given: list[str]) -> list[str] | None:
    """The arguments with the experiment's name moved to the front; None if no name is among them."""
    if given and not given[0].startswith("-"):
        return given
    known = {experiment.name for experiment in experiments()}
    place = next((i for i, word in enumerate(given) if word in known or word.endswith(".py")), None)
    return None if place is None else [given[place], *given[:place], *given[place + 1 :]]


def _say(text: str) -> None:
    """Print a line as it is, except for what could steer the terminal."""
    from rich.console import Console

    Console().print(_harmless(text), soft_wrap=True, markup=False)


def _harmless(text: str) -> str:
    """The text with blanks in the place of letters that are not shown, apart from line breaks and the bytes of file
    names that are not text."""
    kept = {"\n", *map(chr, range(0xDC80, 0xDD00))}
    return "".join(letter if letter.isprintable() or letter in kept else " " for letter in text)


def _complain(what: object, *notes: str) -> None:
    """Print a sentence, without what could steer the terminal: it may quote somebody's file."""
    text = ", ".join([str(what), *getattr(what, "__notes__", ()), *notes])
    print(f"minimand: {' '.join(_harmless(text).split())}", file=sys.stderr)


def _run(given: list[str]) -> None:
    """Parse the options of the run and of the experiment, with the defaults of the chosen preset, and run it."""
    from rich.console import Console

    experiment = find(given[0])
    # The preset decides the defaults of all other options, so it is read first.
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--preset", default=Arguments.preset)
    name = early.parse_known_args(given[1:])[0].preset
    preset = experiment.preset(name)
    whole = dataclasses.make_dataclass(
        "Run",
        [
            ("run", Annotated[Arguments, tyro.conf.arg(name="")], Arguments(preset=name, seed=preset.seeds)),
            ("experiment", Annotated[type(preset.options), tyro.conf.arg(name="")], preset.options),
        ],
        frozen=True,
    )
    parsed: Any = tyro.cli(
        whole,
        args=given[1:],
        prog=f"minimand run {given[0]}",
        description=f"{experiment.title} ({experiment.source}). {experiment.about}\n\n"
        f"Example: minimand run {given[0]} --preset smoke",
        config=(tyro.conf.OmitArgPrefixes,),
    )
    common = {field.name: getattr(parsed.run, field.name) for field in dataclasses.fields(Arguments)}
    seeds = common.pop("seed")
    setting = RunSetting(given[0], options=parsed.experiment, seeds=seeds, **common)
    main_process = int(os.environ.get("RANK", "0")) == 0
    console = Console()
    path = run_setting(setting, Display(console, quiet=not main_process))
    if main_process:
        _summary(path, console, [experiment])
        _say(f"Result: {path}")
        again = ["minimand", "report", "--out", str(setting.out)]
        _say(f"Page:   {shlex.join([*again, '--experiment', given[0]] if given[0].endswith('.py') else again)}")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # All is written. A process that ends the ordinary way after closing a process group can be aborted by torch.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _summary(path: Path, console: Any, own: Sequence[Experiment[Any]] = ()) -> None:
    """Print the experiment's table and findings."""
    from rich.markup import escape
    from rich.table import Table

    from .report.sections import complaint, section

    try:
        found = section(path.parent, pictures=False, own=own)
    except Exception as error:  # an experiment meets the values of somebody's file with whatever they lead to
        raise DataError(complaint(path.parent, error)) from error
    table = Table("", "paper", "measured", title=escape(f"{found.title} ({found.preset})"))
    for column in table.columns[1:]:
        column.justify = "right"
    for row in found.rows:
        table.add_row(*(escape(_harmless(text)) for text in (row.label, row.paper, row.measured)))
    notes = list(dict.fromkeys(row.note for row in found.rows if row.note))
    # A single note describes the whole table. Several are left to the page, which has a column for them.
    table.caption = escape(_harmless(notes[0])) if len(notes) == 1 else None
    console.print(table)
    for finding in [*found.differences, *found.findings]:
        console.print(_harmless(f"- {finding}"), highlight=False, markup=False)
    if any(difference.outcome == "open" for difference in found.differences):
        console.print("open: one or two seeds, or a 95 % interval that includes zero", style="dim", highlight=False)


def _duration(minutes: float) -> str:
    """A time in a readable unit.

    >>> _duration(0.2), _duration(90), _duration(280), _duration(100_000)
    ('< 1 min', '90 min', '4.7 h', '69 days')
    """
    if minutes < 1:
        return "< 1 min"
    if minutes < 120:
        return f"{minutes:.0f} min"
    hours = minutes / 60
    return f"{hours:.2g} h" if hours < 72 else f"{hours / 24:.0f} days"

"""Deep networks as optimisation: run the experiments of the papers, and see their numbers beside yours."""

import argparse
import dataclasses
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from minimand.errors import MinimandError, OptionError

from .progress import Display
from .registry import experiments, find
from .runner import Setting
from .runner import run as run_setting
from .store import atomically

__all__ = ["main"]

PresetName = Literal["smoke", "laptop", "paper"]
# Presets that take more than seconds.
_LONG = ("laptop", "paper")
# Columns of a terminal that has room for a column of sources; in a narrower one they stand below the titles.
_WIDE = 140


@dataclasses.dataclass(frozen=True)
class Arguments:
    """How to run it.

    Args:
        preset: The scale. smoke takes seconds and only shows that it runs; laptop uses real data and a couple of cores;
            paper follows the source's protocol.
        data_dir: Where datasets lie in their publishers' layouts (default: MINIMAND_DATA, else the user's cache).
        out: The directory of all runs.
        seed: One seed or several.
        resume: Go on with an interrupted run, to the same numbers. Without it an earlier run is moved aside.
        jobs: Parallel processes; by default one a core.
        threads: Threads of each process.
        download: Download datasets that are missing.
        tensorboard: Write TensorBoard logs, too.
    """

    preset: PresetName = "laptop"
    data_dir: Path | None = None
    out: Path = Path("runs")
    seed: tuple[int, ...] = (0,)
    resume: bool = False
    jobs: int | None = None
    threads: int = 1
    download: bool = False
    tensorboard: bool = False


def list_() -> None:
    """The experiments, their source, and about how long each preset takes on one core.

    Example: minimand list
    """
    from rich import box
    from rich.console import Console, Group
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    console = Console()
    wide = console.width >= _WIDE
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="Experiments, and their time on one core")
    table.add_column("experiment", no_wrap=True, style="bold")
    table.add_column("what" if wide else "what, and its source")
    if wide:
        table.add_column("source")
    for preset in _LONG:
        table.add_column(preset, justify="right", no_wrap=True)
    for experiment in experiments():
        known = experiment.presets
        times = (_duration(known[preset].minutes) if preset in known else "–" for preset in _LONG)
        source = Text(experiment.citation, style="dim")
        about = [experiment.title, source] if wide else [Group(experiment.title, Padding(source, (0, 0, 0, 2)))]
        table.add_row(experiment.name, *about, *times)
    console.print(table)
    console.print("The preset smoke takes seconds. More of one: minimand run NAME --help", highlight=False)


def run(
    name: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="NAME")],
    arguments: tyro.conf.OmitArgPrefixes[Arguments] = Arguments(),  # noqa: B008
) -> None:
    """Run an experiment; its own options are shown by minimand run NAME --help.

    Example: minimand run solvers-lenet --preset laptop --data-dir ~/data --seed 0 1 2

    Args:
        name: As in minimand list, or the path of a Python file that defines one.
        arguments: How to run it.
    """
    _run([name])


def report(
    out: Path = Path("runs"),
    open: bool = False,
    file: Path | None = None,
    markdown: Path | None = None,
) -> None:
    """One self-contained HTML page of all results: paper and measured side by side, with plots.

    Example: minimand report --open

    Args:
        out: The directory of all runs.
        open: Open the page in a browser.
        file: Where the page goes; by default report.html in the directory of all runs.
        markdown: Write the tables as Markdown to this file, too.
    """
    from rich.console import Console

    from .report import markdown as as_markdown
    from .report import write_report

    if not out.is_dir():
        raise OptionError(
            f"there is no directory {out}: run an experiment first (minimand list), or give another --out"
        )
    path = write_report(out, file)
    if markdown is not None:
        with atomically(markdown) as written:
            written.write(as_markdown(out).encode())
    Console().print(f"Report: {path}", soft_wrap=True)
    if open:
        import webbrowser

        webbrowser.open(path.absolute().as_uri())


def demo(out: Path = Path("runs"), jobs: int | None = None, preset: PresetName = "laptop") -> None:
    """The main job on bundled data: a network with heavy dropout, plain and converted; ends with the report.

    Example: minimand demo

    Args:
        out: The directory of all runs.
        jobs: Parallel processes; by default one a core.
        preset: The scale; laptop takes one to two minutes.
    """
    from rich.console import Console

    from .report import write_report

    console = Console()
    for name in ("layer-convergence", "dropout-digits"):
        path = run_setting(Setting(name, preset, out=out, jobs=jobs), Display(console))
        _summary(path, console)
    console.print(f"Report: {write_report(out)}", soft_wrap=True)


def bench(names: tyro.conf.Positional[tuple[str, ...]] = (), save: bool = False, label: str = "") -> None:
    """Ratios to peers and to the plain block; needs a checkout of the repository, whose benchmarks it runs.

    Example: minimand bench layers

    Args:
        names: The benchmarks to run; by default all.
        save: Also write the results to benchmarks/results.
        label: Write them beside those of another processor, as NAME-LABEL.json.
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
    if given == ["--version"]:
        print(f"minimand {metadata.version('minimand')}")
        return
    commands: dict[str, Callable[..., Any]] = {
        "list": list_,
        "run": run,
        "report": report,
        "demo": demo,
        "bench": bench,
    }
    try:
        if given[:1] == ["run"] and (ordered := _name_first(given[1:])):
            _run(ordered)
        else:
            tyro.extras.subcommand_cli_from_dict(commands, prog="minimand", description=__doc__, args=given)
    except MinimandError as error:
        _complain(error)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        again = shlex.join(["minimand", *given, *([] if "--resume" in given else ["--resume"])])
        hint = f"; go on with: {again}" if given[:1] == ["run"] else ""
        _complain(f"interrupted{hint}")
        raise SystemExit(130) from None


def _name_first(given: list[str]) -> list[str] | None:
    """The experiment's name, wherever it stands, before its options; None where there is none."""
    if given and not given[0].startswith("-"):
        return given
    known = {experiment.name for experiment in experiments()}
    place = next((i for i, word in enumerate(given) if word in known or word.endswith(".py")), None)
    return None if place is None else [given[place], *given[:place], *given[place + 1 :]]


def _complain(what: object) -> None:
    notes = getattr(what, "__notes__", [])
    print("minimand: " + ", ".join([str(what), *notes]), file=sys.stderr)


def _run(given: list[str]) -> None:
    """Options of the experiment, with the defaults of the chosen preset, and how to run it: one command line."""
    from rich.console import Console

    experiment = find(given[0])
    # The preset decides what the defaults of all other options are, so it is read first.
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
        description=f"{experiment.title} ({experiment.citation}). {experiment.about}\n\n"
        f"Example: minimand run {given[0]} --preset smoke",
        config=(tyro.conf.OmitArgPrefixes,),
    )
    common = {field.name: getattr(parsed.run, field.name) for field in dataclasses.fields(Arguments)}
    seeds = common.pop("seed")
    setting = Setting(given[0], options=parsed.experiment, seeds=seeds, **common)
    main_process = int(os.environ.get("RANK", "0")) == 0
    console = Console()
    path = run_setting(setting, Display(console, quiet=not main_process))
    if main_process:
        _summary(path, console)
        console.print(f"Result: {path}", soft_wrap=True)
        console.print(f"Page:   minimand report --out {setting.out}", soft_wrap=True)


def _summary(path: Path, console: Any) -> None:
    """The experiment's table and what it says."""
    from rich.table import Table

    from .report.sections import section

    found = section(path.parent, pictures=False)
    table = Table("", "paper", "measured", title=f"{found.title} ({found.preset})")
    for column in table.columns[1:]:
        column.justify = "right"
    for row in found.rows:
        table.add_row(row.label, row.paper, row.measured)
    notes = list(dict.fromkeys(row.note for row in found.rows if row.note))
    # One note for all is what was measured; many are for the page, which has a column for them.
    table.caption = notes[0] if len(notes) == 1 else None
    console.print(table)
    for finding in found.findings:
        console.print(f"- {finding}", highlight=False)


def _duration(minutes: float) -> str:
    """Of about how long it takes, in the unit that a person would use.

    >>> _duration(0.2), _duration(90), _duration(280), _duration(100_000)
    ('< 1 min', '90 min', '4.7 h', '69 days')
    """
    if minutes < 1:
        return "< 1 min"
    if minutes < 120:
        return f"{minutes:.0f} min"
    hours = minutes / 60
    return f"{hours:.2g} h" if hours < 72 else f"{hours / 24:.0f} days"

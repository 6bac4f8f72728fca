"""The results as tables in CSV, for spreadsheets and other programs: every record, and the rows of the comparison.

The files are UTF-8 with commas. Text is in quotation marks and numbers are not, so that
``csv.reader(file, quoting=csv.QUOTE_NONNUMERIC)`` tells them apart. An empty cell has no value.
"""

import csv
import io
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from minimand.errors import DataError

from ..comparing import mean_std
from ..experiment import Comparison, Experiment, Results, columns
from ..results import read_results
from ..store import as_json, atomically, encoded, slug
from .sections import complaint, folders

__all__ = ["COMPARISON", "comparison_table", "record_table", "write_tables"]

COMPARISON = ("quantity", "source", "mean", "std", "seeds", "unit", "note")
# No file system takes names of more than 255 bytes, and a letter has up to four.
_LONGEST = 55
# The most cells of a table. Records that have no key in common would need the square of their number.
_MOST = 1 << 22
# Where a spreadsheet would see a formula: at the beginning of a text and, if it separates cells by semicolons or tabs,
# behind these, possibly after blanks or quotation marks. The apostrophe is among them, so that the mark can be undone.
_FORMULA = re.compile(r"(^|[;\t\r\n])(?=[\s\"\x00-\x1f\ufeff]*[=+\-@＝＋－＠'])")


def write_tables(out: Path, folder: Path, *, own: Sequence[Experiment[Any]] = ()) -> tuple[list[Path], list[str]]:
    """Write two CSV files for every result below ``out``, and return their paths.

    ``NAME-PRESET-records.csv`` is :func:`record_table`, ``NAME-PRESET-comparison.csv`` is :func:`comparison_table`. The
    second list has a sentence for every result that cannot be read. ``own``: the experiments from files of the user.
    """
    texts: dict[str, str] = {}
    problems = []
    for directory in folders(out):
        try:
            experiment, results, _ = read_results(directory, own)
            records, comparison = record_table(results), comparison_table(experiment.compare(results))
        except Exception as error:  # an experiment meets the values of somebody's file with whatever they lead to
            problems.append(complaint(directory, error))
            continue
        stem = _unused(slug(f"{experiment.name}-{directory.name}")[:_LONGEST], texts)
        texts |= {f"{stem}-records.csv": records, f"{stem}-comparison.csv": comparison}
    for name, text in texts.items():
        with atomically(folder / name) as file:
            file.write(encoded(text))
    return [folder / name for name in texts], problems


def record_table(results: Results[Any]) -> str:
    """One line per record, with the columns of :meth:`Results.rows`; lists and other values are written as JSON.

    >>> print(record_table(Results(None, "smoke", {"=a, b": {0: [{"loss": -1.5}]}})), end="")
    "part","seed","record","loss"
    "'=a, b",0,0,-1.5
    """
    rows = results.rows()
    names = columns(rows)
    if len(names) * len(rows) > _MOST:
        raise DataError(f"a table of {len(rows):,} records with {len(names):,} columns has more than {_MOST:,} cells")
    return _csv([names, *([row.get(name) for name in names] for row in rows)])


def comparison_table(rows: Iterable[Comparison]) -> str:
    """One line per row of the comparison, with the number of seeds and without rounding.

    >>> print(comparison_table([Comparison("error", 2.5, [1.0, 3.0], "%")]), end="")
    "quantity","source","mean","std","seeds","unit","note"
    "error",2.5,2.0,1.4142135623730951,2,"%",""
    """
    return _csv([COMPARISON, *map(_comparison, rows)])


def _comparison(row: Comparison) -> list[Any]:
    values = list(row.measured)
    mean, spread = mean_std(values) if values else (None, None)
    several = len(values) > 1
    return [row.label, row.paper, mean, spread if several else None, len(values), row.unit.strip(), row.note]


def _csv(lines: Iterable[Iterable[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, quoting=csv.QUOTE_NONNUMERIC, lineterminator="\n").writerows(map(_cell, line) for line in lines)
    return text.getvalue()


def _cell(value: Any) -> str | int | float:
    """A number as it is; a text with an apostrophe wherever a spreadsheet would run it.

    >>> _cell(-1.5), _cell("-1.5"), _cell("a; =b"), _cell(None), _cell([1, True])
    (-1.5, "'-1.5", "a;' =b", '', '[1, true]')
    """
    if value is None:
        return ""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    return _FORMULA.sub(r"\1'", value if isinstance(value, str) else as_json(value))


def _unused(stem: str, names: Iterable[str]) -> str:
    """The stem, with a number behind it if a file has it already; some file systems ignore the case."""
    taken = {name.casefold() for name in names}
    candidates = [stem, *(f"{stem}-{number}" for number in range(2, len(taken) + 3))]
    return next(name for name in candidates if f"{name}-records.csv".casefold() not in taken)

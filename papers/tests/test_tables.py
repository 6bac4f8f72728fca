"""Law: tables hold the records: as CSV, which no spreadsheet runs, and as a data frame."""

import csv
import io
import json
import math
import os
import re
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minimand.errors import DataError, MissingExtra
from minimand_papers.cli import main
from minimand_papers.comparing import mean_std
from minimand_papers.experiment import PLACE, Comparison, Results
from minimand_papers.report import write_tables
from minimand_papers.report.tables import COMPARISON, comparison_table, record_table
from minimand_papers.results import RESULT, read_results
from minimand_papers.runner import RunSetting, run
from minimand_papers.store import read_json, write_json

NAMES = ["plain", "a, b", 'say "x"', "two\nlines", "\r\n", "τ=½", "=1+1", "-x", "'quoted", "", " ", "a;=1+1", "\t@x"]
VALUES = [1, -2, 0.1, -1e-300, math.nan, math.inf, -math.inf, True, "text", "-1.5", "=A1", [1, -2.5], {"a": ["x"]}]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs")
    run(RunSetting("layer-convergence", "smoke", out=out, jobs=1))
    run(RunSetting("dropout-digits", "smoke", out=out, jobs=1))
    return out


def results(records: dict[str, dict[int, list[dict[str, Any]]]]) -> Results[None]:
    return Results(None, "smoke", records)


def parsed(text: str) -> tuple[list[str], list[list[Any]]]:
    """The header and the cells. Numbers are floats, and the marks before formulas are undone."""
    head, *lines = csv.reader(io.StringIO(text, newline=""), quoting=csv.QUOTE_NONNUMERIC)
    return list(map(unmarked, head)), [list(map(unmarked, line)) for line in lines]


def unmarked(cell: Any) -> Any:
    return re.sub(r"(^|[;\t\r\n])'", r"\1", cell) if isinstance(cell, str) else cell


def records_of(text: str, like: Results[Any]) -> dict[str, dict[int, list[dict[str, Any]]]]:
    """The records of a table; the types of values other than numbers and texts are those of ``like``."""
    head, lines = parsed(text)
    assert tuple(head[:3]) == PLACE
    assert len(set(head)) == len(head)
    found: dict[str, dict[int, list[dict[str, Any]]]] = {}
    for part, seed, number, *cells in lines:
        listed = found.setdefault(part, {}).setdefault(int(seed), [])
        assert number == len(listed)
        origin = like.records[part][int(seed)][int(number)]
        record = {key: cell for key, cell in zip(head[3:], cells, strict=True) if cell != "" or key in origin}
        texts = {key for key, value in origin.items() if isinstance(value, int | float | str) and value is not True}
        listed.append({key: cell if key in texts else json.loads(cell) for key, cell in record.items()})
    return found


def same(one: Any, other: Any) -> bool:
    """Equality, whatever the order of keys, for which NaN equals itself."""
    return repr(_floats(one)) == repr(_floats(other))


def _floats(value: Any) -> Any:
    if isinstance(value, dict):
        return [(key, _floats(value[key])) for key in sorted(value)]
    if isinstance(value, list):
        return [_floats(item) for item in value]
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def odd() -> Results[None]:
    """Every name with every value; each record has a key that no other one has."""
    return results(
        {
            name: {seed: [{"loss": value, f"{name}{i}": i} for i, value in enumerate(VALUES)] for seed in (0, 7)}
            for name in NAMES
        }
    )


# CSV ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["layer-convergence", "dropout-digits"])
def test_records_come_back_from_the_file(runs: Path, tmp_path: Path, name: str) -> None:
    paths, problems = write_tables(runs, tmp_path)
    assert problems == []
    assert {path.name for path in paths} == {
        f"{experiment}-smoke-{kind}.csv"
        for experiment in ("layer-convergence", "dropout-digits")
        for kind in ("records", "comparison")
    }
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in paths}
    measured = read_results(runs / name / "smoke")[1]
    text = (tmp_path / f"{name}-smoke-records.csv").read_bytes().decode()
    assert same(records_of(text, measured), measured.records)


def test_rows_of_the_comparison_come_back_from_the_file(runs: Path, tmp_path: Path) -> None:
    write_tables(runs, tmp_path)
    experiment, measured, _ = read_results(runs / "dropout-digits" / "smoke")
    head, lines = parsed((tmp_path / "dropout-digits-smoke-comparison.csv").read_bytes().decode())
    assert tuple(head) == COMPARISON
    rows = experiment.compare(measured)
    assert len(lines) == len(rows) > 0
    for line, row in zip(lines, rows, strict=True):
        paper = "" if row.paper is None else row.paper
        assert line == [row.label, paper, *mean_std(row.measured), len(row.measured), row.unit.strip(), row.note]


def test_odd_names_and_values_come_back() -> None:
    given = odd()
    assert same(records_of(record_table(given), given), given.records)


def test_a_spread_needs_seeds_and_a_mean_a_number() -> None:
    rows = [Comparison("none", None, []), Comparison("one", 1.0, [2.0], " dB"), Comparison("inf", 1.0, [2.0, math.inf])]
    lines = parsed(comparison_table(rows))[1]
    assert lines[0] == ["none", "", "", "", 0, "", ""]
    assert lines[1] == ["one", 1, 2, "", 1, "dB", ""]
    assert repr(lines[2]) == repr(["inf", 1.0, math.inf, math.nan, 2.0, "", ""])


def test_keys_with_the_names_of_columns_keep_their_values() -> None:
    given = results({"a": {0: [{"part": "x", "seed": 1, "record": 2, "seed_": 3}]}})
    head, lines = parsed(record_table(given))
    assert head == ["part", "seed", "record", "part_", "seed__", "record_", "seed_"]
    assert lines == [["a", 0, 0, "x", 1, 2, 3]]


def test_records_without_a_common_key_do_not_fill_the_memory() -> None:
    records = [{f"k{number}": 1} for number in range(5_000)]
    with pytest.raises(DataError, match="5,000 records with 5,003 columns"):
        record_table(Results(None, "smoke", {"x": {0: records}}))


def test_no_records_are_a_header() -> None:
    assert record_table(results({})) == record_table(results({"a": {0: []}})) == '"part","seed","record"\n'


@given(st.text(st.sampled_from("=+-@＝'\"; ,\t\r\n\0\ufeffaé") | st.characters(codec="utf-8"), max_size=8))
def test_no_text_is_a_formula(text: str) -> None:
    written = record_table(results({text: {0: [{text or "x": text}]}}))
    for separator in ",;\t":
        for line in csv.reader(io.StringIO(written, newline=""), delimiter=separator):
            assert not [cell for cell in line if cell.lstrip(" \t\r\n\0\ufeff").startswith(tuple("=+-@＝＋－＠"))]
    head, lines = parsed(written)
    assert head[3] == (text or "x")
    assert lines == [[text, 0, 0, text]]


def test_numbers_stay_numbers() -> None:
    assert record_table(results({"a": {0: [{"loss": -1.5, "count": -2}]}})).endswith('"a",0,0,-1.5,-2\n')


def test_files_of_the_same_experiment_have_names_of_their_own(runs: Path, tmp_path: Path) -> None:
    stored = read_json(runs / "layer-convergence" / "smoke" / RESULT)
    for folder in ("a/smoke", "b/smoke", f"c/smoke-{'é' * 100}", f"d/smoke-{'é' * 100}x", "e/smoke-..=1"):
        write_json(tmp_path / "runs" / folder / RESULT, stored)
    paths, problems = write_tables(tmp_path / "runs", tmp_path / "tables")
    assert problems == []
    assert len(set(paths)) == 10
    assert {path.parent for path in paths} == {tmp_path / "tables"}
    assert len(list((tmp_path / "tables").iterdir())) == 10


# The command -------------------------------------------------------------------------------------


def test_the_command_writes_them_and_names_what_it_cannot_read(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored = read_json(runs / "layer-convergence" / "smoke" / RESULT)
    write_json(tmp_path / "a" / "smoke" / RESULT, stored)
    write_json(tmp_path / "b" / "smoke" / RESULT, stored | {"records": {"x": 1}})
    main(["report", "--out", str(tmp_path), "--csv", str(tmp_path / "tables")])
    said = capsys.readouterr()
    assert "Tables: 2 files in" in said.out
    assert re.fullmatch(r"minimand: .*b/smoke/result.json cannot be shown: .*\n", said.err)
    assert len(list((tmp_path / "tables").iterdir())) == 2


def test_help_says_what_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["report", "--help"])
    text = " ".join(re.sub(r"[│╭╮╰╯─]", " ", capsys.readouterr().out).split())
    assert "--csv" in text
    assert "every record" in text


@pytest.mark.parametrize("place", ["file", "below a file", "closed"])
def test_a_place_that_cannot_be_written_is_a_sentence(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "closed").mkdir()
    folder = {"file": "file", "below a file": "file/x", "closed": "closed/x"}[place]
    says = {"file": "--csv takes a directory", "below a file": "cannot be written (", "closed": "cannot be written ("}
    if place == "closed":
        (tmp_path / "closed").chmod(stat.S_IRUSR | stat.S_IXUSR)
        if os.access(tmp_path / "closed", os.W_OK):
            pytest.skip("this user may write everywhere")
    with pytest.raises(SystemExit) as stop:
        main(["report", "--out", str(runs), "--file", str(tmp_path / "page.html"), "--csv", str(tmp_path / folder)])
    said = capsys.readouterr().err
    assert stop.value.code == 2
    assert says[place] in said
    assert said.count("\n") == 1


def test_an_error_while_writing_leaves_the_old_file(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tables(runs, tmp_path)
    old = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(file: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match="No space left"):
        write_tables(runs, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == old


# pandas ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["smoke", "odd"])
def test_a_data_frame_has_the_records(runs: Path, case: str) -> None:
    pytest.importorskip("pandas")
    given: Results[Any] = odd() if case == "odd" else read_results(runs / "dropout-digits" / "smoke")[1]
    frame = given.to_pandas()
    assert tuple(frame.columns[:3]) == PLACE
    rows = given.rows()
    assert len(frame) == len(rows) == sum(len(r) for seeds in given.records.values() for r in seeds.values())
    for line, row in zip(frame.to_dict("records"), rows, strict=True):
        assert same({key: line.pop(key) for key in row}, row)
        assert all(isinstance(value, float) and math.isnan(value) for value in line.values())


def test_rows_are_the_records() -> None:
    given = odd()
    found: dict[str, dict[int, list[dict[str, Any]]]] = {}
    for row in given.rows():
        part, seed, number = (row.pop(name) for name in PLACE)
        listed = found.setdefault(part, {}).setdefault(seed, [])
        assert number == len(listed)
        listed.append(row)
    assert same(found, given.records)


def test_a_data_frame_without_records_has_the_columns() -> None:
    pytest.importorskip("pandas")
    assert tuple(results({}).to_pandas().columns) == PLACE


def test_pandas_reads_the_file() -> None:
    pandas = pytest.importorskip("pandas")
    frame = results({"a, b": {0: [{"loss": -1.5}, {"loss": math.inf, "test": 3}]}}).to_pandas()
    text = record_table(results({"a, b": {0: [{"loss": -1.5}, {"loss": math.inf, "test": 3}]}}))
    pandas.testing.assert_frame_equal(pandas.read_csv(io.StringIO(text)), frame)


def test_without_pandas_the_command_that_installs_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingExtra, match=r'pandas: pip install "minimand-papers\[pandas\]"'):
        results({}).to_pandas()

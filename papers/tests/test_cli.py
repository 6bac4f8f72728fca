"""Law: the command line helps: each command has an example, each mistake an answer, and demo ends in the report."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from minimand_papers.cli import main
from minimand_papers.registry import experiments
from minimand_papers.store import read_json

FILE = str(Path(__file__).parent / "cases" / "experiment_file.py")


def call(*arguments: str) -> None:
    main(arguments)


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    captured = capsys.readouterr()
    return int(stop.value.code or 0), captured.out + captured.err


@pytest.mark.parametrize("command", ["list", "run", "report", "demo", "bench"])
def test_every_command_helps_with_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = answer(capsys, command, "--help")
    assert status == 0
    assert f"Example: minimand {command}" in text


def test_help_of_an_experiment_shows_its_options_with_the_presets_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    status, text = answer(capsys, "run", "solvers-lenet", "--preset", "paper", "--help")
    assert status == 0
    assert "--epochs" in text
    assert "default: 300" in text
    assert "--data-dir" in text


def test_list_names_everything(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    call("list")
    text = capsys.readouterr().out
    assert all(experiment.name in text and experiment.source in text for experiment in experiments())


@pytest.mark.parametrize("columns", [80, 120])
def test_list_shows_the_sources_on_narrow_terminals(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    call("list")
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns
    # The middle column alone, its lines joined: what stands in the others is not between the words of a source.
    begin, end = lines[2].index("title"), lines[2].index("laptop")
    text = " ".join(" ".join(line[begin:end] for line in lines[4:]).split())
    assert all(experiment.source in text for experiment in experiments())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("run", "solver-lenet"), "did you mean solvers-lenet"),
        (("run", "nowhere.py"), "there is no file nowhere.py"),
        (("run", "solvers-lenet", "--preset", "huge"), "it has smoke, laptop, paper"),
        (("run", "solvers-lenet", "--preset", "smoke", "--epoch", "3"), "--epoch"),
        (("run", "solvers-lenet", "--preset", "smoke", "--dataset", "cifar11"), "there is no dataset named 'cifar11'"),
        (("run", "--preset", "huge", "solvers-lenet"), "it has smoke, laptop, paper"),
        (("run", "solvers-lenet", "--preset", "smoke", "--epochs", "-1"), "epochs"),
        (("run", "solvers-vgg", "--preset", "smoke", "--width", "-1"), "width"),
        (("run", "solvers-lenet", "--preset", "smoke", "--limit", "-5"), "limit"),
        (("run", "solvers-lenet", "--preset", "smoke", "--seed", "-1"), "seed"),
        (("run", "solvers-lenet", "--preset", "smoke", "--threads", "0"), "threads"),
        (("run", "solvers-lenet", "--preset", "smoke", "--threads", "1000000"), "threads must be at most"),
        (("run", "solvers-lenet", "--preset", "smoke", "--jobs", "1000000"), "jobs must be at most"),
        (("run", "solvers-lenet", "--preset", "smoke", "--seed", "99999999999999"), "0 to 2³² − 1, got 99999999999999"),
        (("run", "solvers-lenet", "--preset", "smoke", "--seed", "text"), "--seed"),
        (("run", "layer-convergence", "--preset", "smoke", "--jobs", "1", "--width", "9" * 30), "too large for this"),
        (("run", "layer-convergence", "--preset", "smoke", "--jobs", "1", "--width", "999999999999"), "too large"),
        (("run", "layer-convergence", "--preset", "smoke", "--out", __file__), "Not a directory; give another --out"),
        (("run", "layer-convergence", "--preset", "smoke", "--out", "x" * 300), "File name too long"),
        (("run", "évil\udcff\x1b[2J\n"), "there is no experiment named"),
        (("report", "--out", ".", "--file", "."), "cannot be written ("),
        (("report", "--out", ".", "--file", f"{__file__}/x.html"), "cannot be written (File exists)"),
        (("demo", "--preset", "smoke", "--out", __file__), "Not a directory; give another --out"),
        (("run", "solvers-dropout-rates", "--preset", "smoke", "--networks", "resnet"), "resnet"),
        (("run", "solvers-dropout-rates", "--preset", "smoke", "--p", "0.0", "1.0"), "1.0"),
        (("report", "--out", "nowhere"), "there is no directory nowhere"),
        (("report", "--out", ".", "--markdown", __file__), "--markdown takes a directory"),
        (("bench",), "there is no folder benchmarks here"),
    ],
)
def test_mistakes_are_answered(
    arguments: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "benchmarks"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if not (Path(p or ".") / "benchmarks").is_dir()])
    status, text = answer(capsys, *arguments)
    assert status == 2
    assert says in text
    assert "Traceback" not in text


def test_a_typo_in_a_file_is_named_with_its_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import torch\ndef x(:\n")
    status, text = answer(capsys, "run", str(tmp_path / "mine.py"))
    assert status == 2
    assert "mine.py, line 2: invalid syntax" in text
    assert "Traceback" not in text


def test_missing_data_say_where_they_should_lie(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ("--data-dir", str(tmp_path), "--out", str(tmp_path / "out"), "--jobs", "1")
    status, text = answer(capsys, "run", "solvers-lenet", "--preset", "laptop", *arguments)
    assert status == 2
    assert "cifar-10-batches-bin" in text


def test_options_may_stand_before_the_name(tmp_path: Path) -> None:
    call("run", "--preset", "smoke", "--out", str(tmp_path), "--jobs", "1", "--epochs", "1", "--seed", "3", FILE)
    assert read_json(tmp_path / "user-made" / "smoke" / "result.json")["seeds"] == [3]


def test_demo_ends_in_the_report(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    call("demo", "--preset", "smoke", "--out", str(tmp_path), "--jobs", "1")
    assert f"Report: {tmp_path / 'report.html'}" in capsys.readouterr().out.replace("\n", "")
    assert "dropout-digits" in (tmp_path / "report.html").read_text()


def test_a_run_by_path_ends_in_a_result_and_a_report(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    short = ("--epochs", "1", "--limit", "80", "--jobs", "1", "--seed", "4", "--tensorboard")
    call("run", FILE, "--preset", "smoke", "--out", str(tmp_path), *short)
    assert (tmp_path / "user-made" / "smoke" / "result.json").is_file()
    assert list(tmp_path.glob("**/events.out.tfevents*"))
    call("report", "--out", str(tmp_path), "--markdown", str(tmp_path / "pages"), "--experiment", FILE)
    assert "user-made" in (tmp_path / "pages" / "other.md").read_text()
    assert "A user" in (tmp_path / "report.html").read_text()
    assert "Report:" in capsys.readouterr().out


def test_what_is_said_does_not_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    text = answer(capsys, "report", "--out", "no\x1b[2Jwhere\nminimand: all is well\udcff")[1]
    assert text.isascii()
    assert "\x1b" not in text
    assert text.count("\n") == 1


def test_paths_are_printed_as_they_are(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a[/red]", "[bold]b", "é\udcff"):
        Path(name).mkdir(parents=True)
        call("report", "--out", name)
        printed = capsys.readouterr().out
        assert f"Report: {name}/report.html" == printed.encode("utf-8", "backslashreplace").decode().replace(
            "\\udcff", "\udcff"
        ).rstrip("\n")


@pytest.mark.parametrize("device", ["/dev/full", None])
def test_output_that_cannot_be_written_is_a_sentence(device: str | None, tmp_path: Path) -> None:
    out = open(device, "w") if device else None  # noqa: SIM115
    program = [sys.executable, "-m", "minimand_papers", "--version"]
    shell = ["sh", "-c", '"$@" >&-', "sh", *program] if device is None else program
    done = subprocess.run(shell, stdout=out, stderr=subprocess.PIPE, text=True)
    if out is not None:
        out.close()
    assert done.returncode == (2 if device else 0)
    assert done.stderr.count("\n") == (1 if device else 0), done.stderr


@pytest.mark.parametrize("seconds", [0.3, 0.8, 1.5])
def test_an_interruption_is_quiet_at_any_time(seconds: float) -> None:
    """While Python starts, while torch is imported, while the command runs."""
    program = [sys.executable, "-m", "minimand_papers", "list"]
    process = subprocess.Popen(program, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    said = process.communicate()[1]
    assert process.returncode in (0, 130, -signal.SIGINT)
    assert "Traceback" not in said

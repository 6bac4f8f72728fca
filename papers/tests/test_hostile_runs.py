"""Law: a run goes on in somebody's folder, on a full disk or beside lost files to its numbers or to one sentence."""

import io
import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from minimand.errors import DataError
from minimand_papers import cli
from minimand_papers.context import Lab
from minimand_papers.registry import find
from minimand_papers.report.sections import Row, Section
from minimand_papers.runner import RunSetting, run
from minimand_papers.untrusted import saved_tensors
from test_lab import numbers

COMMITTED = Path(__file__).parents[1] / "results"
FILE = str(Path(__file__).parent / "cases" / "experiment_file.py")
SMALL = find(FILE).presets["smoke"].options.__class__(epochs=2, limit=80)
PART = Path("user-made") / "smoke" / "seed-0" / "first"


def small(out: Path, *, resume: bool = False) -> Path:
    return run(RunSetting(FILE, "smoke", SMALL, (0,), out, jobs=1, resume=resume)).parent


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole")
    small(out)
    return out


@pytest.fixture
def halfway(whole: Path, tmp_path: Path) -> Path:
    """A folder as a run leaves it that is killed at the end of the first part's last epoch."""
    shutil.copytree(whole, tmp_path / "runs")
    shutil.rmtree(tmp_path / "runs" / "user-made" / "smoke" / "seed-0" / "second")
    (tmp_path / "runs" / PART / "done.json").unlink()
    return tmp_path / "runs"


class Evil:
    def __reduce__(self) -> tuple:
        return (os.mkdir, (os.environ["EVIL"],))


class Long:
    def __reduce__(self) -> tuple:
        return (bytearray, (1 << 40,))


class Tensor:
    def __reduce__(self) -> tuple:
        return (torch.Tensor, (1 << 20, 1 << 20))


Checkpoint = dict[str, Any]


def saved(change: Callable[[Checkpoint], Any]) -> Callable[[Path], None]:
    """Change what the checkpoint holds."""

    def damage(path: Path) -> None:
        checkpoint = torch.load(path, weights_only=True)
        changed = change(checkpoint)
        torch.save(checkpoint if changed is None else changed, path)

    return damage


def packed(path: Path) -> None:
    """The same members, deflated."""
    with zipfile.ZipFile(path) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)


def first_tensor(checkpoint: Checkpoint) -> tuple[dict[str, torch.Tensor], str]:
    tensors = checkpoint["states"]["model"]["tensors"]
    return tensors, next(iter(tensors))


def replaced(make: Callable[[torch.Tensor], Any]) -> Callable[[Path], None]:
    def change(checkpoint: Checkpoint) -> None:
        tensors, name = first_tensor(checkpoint)
        tensors[name] = make(tensors[name])

    return saved(change)


def momentum(value: Any) -> Callable[[Path], None]:
    return saved(lambda checkpoint: checkpoint["states"]["optimizer"]["state"][0].update(momentum_buffer=value))


CHECKPOINTS: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-2000]),
    "a text": lambda path: path.write_text("text"),
    "code": lambda path: torch.save({"states": Evil()}, path),
    "a bytearray of any length": lambda path: torch.save({"states": Long()}, path),
    "a tensor of any size": lambda path: torch.save({"states": Tensor()}, path),
    "one number many times": saved(lambda checkpoint: checkpoint.update(more=torch.zeros(1).half().expand(1 << 40))),
    "a pickle": lambda path: path.write_bytes(pickle.dumps(Evil())),
    "the old format": lambda path: torch.save({"states": {}}, path, _use_new_zipfile_serialization=False),
    "packed": packed,
    "a list": saved(lambda checkpoint: [1]),
    "nothing": saved(lambda checkpoint: {}),
    "no state": saved(lambda checkpoint: checkpoint["states"].clear()),
    "another state": saved(lambda checkpoint: checkpoint["states"].update(x={})),
    "a state of numbers": saved(lambda checkpoint: checkpoint["states"].update(model=3)),
    "another shape": replaced(lambda tensor: tensor[..., :1]),
    "another type": replaced(lambda tensor: tensor.double()),
    "no tensor": replaced(lambda tensor: "x"),
    "a huge view": replaced(lambda tensor: torch.zeros(1).expand(1 << 40)),
    "momentum of another shape": momentum(torch.zeros(3)),
    "momentum of text": momentum("x"),
    "a rate of text": saved(lambda checkpoint: checkpoint["states"]["optimizer"]["param_groups"][0].update(lr="x")),
    "no rate": saved(lambda checkpoint: checkpoint["states"]["optimizer"]["param_groups"][0].pop("lr")),
    "batches of text": saved(lambda checkpoint: checkpoint["states"].update(batches="x")),
    "too many epochs": saved(lambda checkpoint: checkpoint.update(epochs=10**9)),
    "epochs of text": saved(lambda checkpoint: checkpoint.update(epochs="1")),
    "no epochs": saved(lambda checkpoint: checkpoint.update(epochs=float("nan"))),
    "negative records": saved(lambda checkpoint: checkpoint.update(records=-1)),
    "too many records": saved(lambda checkpoint: checkpoint.update(records=99)),
    "endless seconds": saved(lambda checkpoint: checkpoint.update(seconds=float("inf"))),
    "no random state": saved(lambda checkpoint: checkpoint.update(random=[{}])),
    "a random state of zeros": saved(lambda checkpoint: checkpoint["random"][0].update(torch=torch.zeros(3))),
}


@pytest.mark.parametrize("case", CHECKPOINTS)
def test_a_hostile_checkpoint_is_a_sentence(
    halfway: Path, whole: Path, tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVIL", str(tmp_path / "evil"))
    CHECKPOINTS[case](halfway / PART / "checkpoint.pt")
    with pytest.raises(
        DataError, match=r"checkpoint\.pt is damaged or belongs to another .* leave out --resume"
    ) as caught:
        small(halfway, resume=True)
    assert "\n" not in str(caught.value)
    assert "weights_only" not in str(caught.value)
    assert not (tmp_path / "evil").exists()


def archive_of(members: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", method) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return made.getvalue()


def in_capitals(seen: dict[str, bytes], hidden: dict[str, bytes]) -> bytes:
    """torch finds its pickle by a name in capitals, too."""
    return archive_of({name.replace("data.pkl", "DATA.PKL"): content for name, content in hidden.items()})


def two_tables(seen: dict[str, bytes], hidden: dict[str, bytes]) -> bytes:
    """The table of contents that ends where the last record begins is Python's; torch's is where that record says."""
    # Bytes after the end of a pickle make the hidden part the longer one.
    longer = {name: content + os.urandom(1 << 14) * name.endswith("pkl") for name, content in hidden.items()}
    first, second = archive_of(longer, zipfile.ZIP_DEFLATED), archive_of(seen)
    (_, start), (size, begin) = (struct.unpack("<II", raw[-10:-2]) for raw in (first, second))
    table, at = bytearray(second[:-22]), begin
    while at < begin + size:
        (place,) = struct.unpack_from("<I", table, at + 42)
        # Python adds the length of what precedes its archive.
        struct.pack_into("<I", table, at + 42, len(first) - 22 + place - begin - (len(first) - 22 - start))
        at += 46 + sum(struct.unpack_from("<HHH", table, at + 28))
    return first[:-22] + bytes(table) + first[-22:-10] + struct.pack("<II", size, start) + bytes(2)


@pytest.mark.parametrize("disguise", [in_capitals, two_tables])
def test_torch_reads_what_was_checked(tmp_path: Path, disguise: Callable[..., bytes]) -> None:
    """A bytearray is what weights_only allows, and a few bytes make one of any length."""

    class Hidden:
        def __reduce__(self) -> tuple:
            return (bytearray, (1 << 20,))

    path, members = tmp_path / "checkpoint.pt", []
    for value in ({"x": torch.ones(3)}, {"x": Hidden(), "y": torch.ones(3)}):
        torch.save(value, path)
        with zipfile.ZipFile(path) as archive:
            members.append({info.filename: archive.read(info) for info in archive.infolist()})
    path.write_bytes(disguise(*members))
    try:
        found = saved_tensors(path, torch.device("cpu"))
    except ValueError:
        return
    assert not isinstance(found["x"], bytearray)


def test_the_remedy_of_a_damaged_checkpoint_works(halfway: Path, whole: Path) -> None:
    shutil.rmtree(halfway / PART)
    assert numbers(small(halfway, resume=True)) == numbers(whole / "user-made" / "smoke")


def header(fields: dict[str, Any], size: int | None = None) -> bytes:
    text = json.dumps(fields).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text


KEPT = {
    "empty": b"",
    "a pickle": pickle.dumps({"a": 1}),
    "an endless header": header({}, 1 << 62),
    "a header of zeros": bytes(100),
    "tensors beyond the end": header({"a": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}),
    "an unknown type": header({"a": {"dtype": "X9", "shape": [1], "data_offsets": [0, 4]}}) + bytes(4),
    "other tensors": header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}) + bytes(4),
}


@pytest.mark.parametrize("case", KEPT)
def test_hostile_tensors_of_another_part_are_a_sentence(tmp_path: Path, case: str) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "model.safetensors").write_bytes(KEPT[case])
    with pytest.raises(DataError, match=r"model\.safetensors is damaged or belongs to another") as caught:
        Lab(tmp_path / "second", 0).kept("first", "model", {"weight": torch.zeros(2, 2)})
    assert "\n" not in str(caught.value)


LOST: dict[str, tuple[Callable[[Path], object], str]] = {
    "records lost": (lambda part: (part / "metrics.jsonl").unlink(), r"has 0 of \d records; delete it"),
    "records cut": (lambda part: (part / "metrics.jsonl").write_bytes(b"{}\n"), r"has 1 of \d records; delete it"),
    "records of another kind": (
        lambda part: (part / "metrics.jsonl").write_bytes(b"[]\n"),
        r"metrics\.jsonl is damaged",
    ),
    "records of bytes": (lambda part: (part / "metrics.jsonl").write_bytes(b"\xff\n"), r"metrics\.jsonl is damaged"),
    "a time of text": (lambda part: (part / "done.json").write_text('{"seconds": "x"}'), r"done\.json has a str"),
    "an end of nothing": (lambda part: (part / "done.json").write_text("{}"), r"done\.json lacks seconds"),
    "tensors lost": (lambda part: (part / "model.safetensors").unlink(), r"model\.safetensors is missing"),
}


@pytest.mark.parametrize("case", LOST)
def test_lost_files_are_named(whole: Path, tmp_path: Path, case: str) -> None:
    shutil.copytree(whole, tmp_path / "runs")
    shutil.rmtree(tmp_path / "runs" / "user-made" / "smoke" / "seed-0" / "second")
    damage, says = LOST[case]
    damage(tmp_path / "runs" / PART)
    with pytest.raises(DataError, match=says):
        small(tmp_path / "runs", resume=True)
    shutil.rmtree(tmp_path / "runs" / PART)
    assert numbers(small(tmp_path / "runs", resume=True)) == numbers(whole / "user-made" / "smoke")


def test_records_are_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("mine")
    lab = Lab(tmp_path / "part", 0)
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "metrics.jsonl").symlink_to(tmp_path / "victim")
    with pytest.raises(DataError, match=r"metrics\.jsonl cannot be written"):
        lab.record({"x": 1})
    assert (tmp_path / "victim").read_text() == "mine"


def test_a_pipe_in_the_place_of_records_does_not_block(tmp_path: Path) -> None:
    lab = Lab(tmp_path / "part", 0)
    (tmp_path / "part").mkdir()
    os.mkfifo(tmp_path / "part" / "metrics.jsonl")
    with pytest.raises(DataError, match=r"metrics\.jsonl cannot be written"):
        lab.record({"x": 1})
    reader = os.open(tmp_path / "part" / "metrics.jsonl", os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(DataError, match="not a regular file"):
        lab.record({"x": 1})
    os.close(reader)


@pytest.mark.parametrize("value", ["x", None, [1], {"a": 1}, "\x1b[2J"])
def test_records_that_do_not_fit_are_a_sentence_of_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], value: object
) -> None:
    out = shutil.copytree(COMMITTED / "layer-convergence", tmp_path / "layer-convergence") / "laptop"
    content = json.loads((out / "result.json").read_text())
    for seeds in content["records"].values():
        for records in seeds.values():
            records[:] = [dict.fromkeys(record, value) for record in records]
    (out / "result.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"result\.json cannot be shown: its values do not fit"):
        cli._summary(out / "result.json", Console())
    assert capsys.readouterr().out == ""


def test_no_text_of_a_result_steers_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "a\x1b[2J\x07\x9b31m\u202eb"
    row = Row(text, text, text, 0.0, 0.0, 1, text)
    shown = Section("x", "a title", "", "", "smoke", {}, [], True, [row], [], [text], [], [], [], "")
    monkeypatch.setattr("minimand_papers.report.sections.section", lambda *_, **__: shown)
    cli._summary(Path("x/result.json"), Console())
    cli._say(text)
    out = capsys.readouterr().out
    assert "b" in out
    assert all(letter.isprintable() or letter == "\n" for letter in out)


@pytest.mark.parametrize("place", ["user-made", "user-made/smoke", "user-made/smoke/seed-0", str(PART)])
def test_a_file_in_the_place_of_a_folder_is_a_sentence(tmp_path: Path, place: str) -> None:
    (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / place).write_text("in the way")
    protocol = tmp_path / "user-made" / "smoke" / "protocol.json"
    if protocol.parent.is_dir():
        options = {"epochs": 2, "stochastic": True, "limit": 80}
        protocol.write_text(json.dumps({"options": options, "seeds": [0]}))
    with pytest.raises(ValueError, match=r"cannot write to|cannot be written"):
        small(tmp_path, resume=True)


# The command line, in a process of its own with a limit on the size of files, which ends a write as a full disk does

LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)
from minimand_papers.cli import main
main(sys.argv[2:])
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs a limit on the size of files")
@pytest.mark.parametrize(("limit", "jobs"), [(100, "1"), (1_000, "1"), (20_000, "2"), (60_000, "1")])
def test_a_full_disk_is_named_and_the_run_continues(whole: Path, tmp_path: Path, limit: int, jobs: str) -> None:
    more = ("--epochs", "2", "--limit", "80", "--seed", "0", "--jobs", jobs, "--out", str(tmp_path), "--resume")
    call = [sys.executable, "-c", LIMITED, str(limit), "run", FILE, "--preset", "smoke", *more]
    done = subprocess.run(call, capture_output=True, text=True)
    assert done.returncode == (0 if limit > 50_000 else 2), done.stderr
    if done.returncode:
        assert "cannot be written (File too large)" in done.stderr
        assert done.stderr.count("\n") == 1
    assert not list(tmp_path.glob("**/.*"))
    assert numbers(small(tmp_path, resume=True)) == numbers(whole / "user-made" / "smoke")


def test_what_is_written_is_read_again_whatever_its_letters(tmp_path: Path) -> None:
    lab = Lab(tmp_path, 0)
    lab.record({"\ud800": "\udcff <b>", "y": float("nan")})
    (record,) = lab._records
    assert record["\ud800"] == "\udcff <b>"

"""Law: result folders of others are data. Reading them runs no code and ends in a page or a sentence."""

import json
from pathlib import Path

import pytest

from minimand.errors import DataError, OptionError
from minimand_papers.report import write_report
from minimand_papers.results import read_results
from minimand_papers.runner import RunSetting, run

RESULT = {
    "experiment": "x",
    "file": None,
    "preset": "smoke",
    "options": {},
    "seeds": [0],
    "complete": True,
    "records": {},
}


def _folder(root: Path, content: object) -> Path:
    folder = root / "evil" / "smoke"
    folder.mkdir(parents=True)
    (folder / "result.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("key", ["file", "experiment"])
@pytest.mark.parametrize("ending", [".py", ".py.py"])
def test_no_code_is_imported(tmp_path: Path, key: str, ending: str) -> None:
    code = tmp_path / f"evil{ending}"
    code.write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    folder = _folder(tmp_path, RESULT | {key: str(code)})
    with pytest.raises(OptionError):
        read_results(folder)
    assert "cannot be shown" in write_report(tmp_path).read_text()
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("content", [[], {}, 3, "text", None, {"experiment": "solvers-lenet"}, [[[]]]])
def test_json_of_another_shape_is_a_sentence(tmp_path: Path, content: object) -> None:
    folder = _folder(tmp_path, content)
    with pytest.raises(DataError, match="run the experiment again"):
        read_results(folder)
    assert "cannot be shown" in write_report(tmp_path).read_text()


@pytest.mark.parametrize("content", ["[]", "{}", "[" * 100_000])
def test_a_protocol_of_another_shape_is_a_sentence(tmp_path: Path, content: str) -> None:
    folder = tmp_path / "layer-convergence" / "smoke"
    folder.mkdir(parents=True)
    (folder / "protocol.json").write_text(content)
    with pytest.raises(DataError, match=r"protocol\.json"):
        run(RunSetting("layer-convergence", "smoke", out=tmp_path, jobs=1, resume=True))

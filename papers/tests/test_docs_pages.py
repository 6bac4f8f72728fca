"""Law: the code on the pages of docs/papers runs and prints what its comments say."""

import contextlib
import doctest
import io
import re
import textwrap
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted((DOCS / "papers").rglob("*.rst"))


def _blocks(text: str) -> list[str]:
    """The bodies of ``.. code-block:: python``."""
    return [textwrap.dedent(body) for body in re.findall(r"^\.\. code-block:: python\n((?:\n| +.*\n?)*)", text, re.M)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_code_of_a_page_runs(page: Path) -> None:
    names: dict[str, object] = {}
    for block in _blocks(page.read_text()):
        expected = re.findall(r"^ *print\(.*\)  # (.*)$", block, re.M)
        with contextlib.redirect_stdout(io.StringIO()) as output:
            exec(compile(block, page.name, "exec"), names)
        printed = output.getvalue().splitlines()
        assert len(printed) == len(expected)
        for said, wanted in zip(printed, expected, strict=True):
            assert doctest.OutputChecker().check_output(f"{wanted}\n", f"{said}\n", doctest.ELLIPSIS), said


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_code_to_copy_has_no_prompts_and_named_files_exist(page: Path) -> None:
    text = page.read_text()
    assert not re.search(r"^ *(>>>|\$) ", text, re.M)
    for target in re.findall(r"literalinclude:: (\S+)", text):
        assert (page.parent / target).resolve().is_file(), target
    for path in re.findall(r"``(papers/[\w./-]+\.py)", text):
        assert (DOCS.parent / path).is_file(), path

"""Law: no forward ends the process; every network is converted, or refused in words. A crash is traced to its case."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .cases.anything import functions
from .cases.forwards import FORWARDS

#: Words of the machinery that no answer may use.
JARGON = re.compile(
    r"trac(ed|ing)|proxy|symbolic|graph|torch\.fx|__torch_function__|NoneType|object at 0x", re.IGNORECASE
)
REFUSED = {"parameters only", "scripted", "raises", "quantised", "layers inside vmap", "gradient of layers"}


def answers(names):
    """What plan and convert say about networks, in one process; where that ends early, one process for each."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.cases.anything"]
    root = Path(__file__).parent.parent
    done = subprocess.run(command, cwd=root, input=json.dumps(names), capture_output=True, text=True, timeout=300)
    found = dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))
    if done.returncode != 0 and len(names) > 1:
        return {name: answers([name]).get(name, "ended the process") for name in names}
    return found or {names[0]: f"ended the process with {done.returncode}: {done.stderr[-500:]}"}


@pytest.mark.parametrize("names", [list(FORWARDS), list(functions())], ids=["forwards", "functions"])
def test_every_network_is_converted_or_refused_in_words(names):
    found = answers(names)
    assert found.keys() == set(names)
    wrong = {name: text for name, text in found.items() if not text.startswith(("converted: ", "refused: "))}
    assert not wrong
    assert {name for name, text in found.items() if text.startswith("refused: ")} == REFUSED & set(names)
    assert not [text for text in found.values() if JARGON.search(text)]


def test_layers_around_a_function_are_converted():
    assert len(functions()) > 200

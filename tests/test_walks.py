"""The walks of docs/architecture.rst pass through the files that they name."""

import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import minimand
from minimand import LPOM, ProxProp, convert
from minimand.factor import NMF
from minimand.solvers import ProxSG

ROOT = Path(__file__).parents[1]
LIBRARY = Path(minimand.__file__).parent


def _convert() -> None:
    hidden = nn.Dropout(0.5), nn.Linear(8, 8), nn.ReLU()
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), *hidden, nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    solver_net = convert(model, {"3": ProxSG(iters=3)})
    solver_net(torch.randn(4, 8)).square().sum().backward()
    optimizer.step()


def _factorize() -> None:
    rng = np.random.default_rng(0)
    NMF(1.0).fit(rng.random((20, 3)) @ rng.random((3, 15)))


def _precondition() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    ProxProp(model).attach(optimizer)
    model(torch.randn(4, 8)).square().sum().backward()
    optimizer.step()


def _lift() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    LPOM(model).fit([(torch.randn(16, 8), torch.randint(0, 2, (16,)))], epochs=1)


WALKS = {
    "Convert, forward, backward, step": _convert,
    "NMF().fit": _factorize,
    "ProxProp.attach and a step": _precondition,
    "LPOM.fit": _lift,
}


def _named(title: str) -> set[str]:
    """The files of the library that the paragraph below a title names."""
    text = (ROOT / "docs" / "architecture.rst").read_text()
    (paragraph,) = re.findall(rf"^{re.escape(title)}\n~+\n\n(.*?)(?:\n\n|\Z)", text, re.MULTILINE | re.DOTALL)
    return set(re.findall(r"``src/minimand/([\w/]+\.py)``", paragraph))


def _executed(walk: Callable[[], None]) -> set[str]:
    """The files of the library with a function that the walk calls."""
    walk()  # modules that load on first use are loaded
    found: set[str] = set()

    def note(frame, event, argument) -> None:
        if event == "call":
            found.add(frame.f_code.co_filename)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        walk()
    finally:
        sys.setprofile(before)
    inside = (Path(name) for name in found if name.startswith(str(LIBRARY)))
    return {path.relative_to(LIBRARY).as_posix() for path in inside}


@pytest.mark.parametrize("title", WALKS)
def test_a_walk_passes_through_the_files_it_names(title: str) -> None:
    named = _named(title)
    assert len(named) > 5
    assert named - _executed(WALKS[title]) == set()


def test_a_factorisation_passes_through_few_files_and_the_page_names_all() -> None:
    executed = {name for name in _executed(_factorize) if name.startswith("factor/")}
    assert executed == _named("NMF().fit")
    assert len(executed) <= 17

"""Law: the package's parts load when they are used, and all that is promised is there."""

import subprocess
import sys

import pytest

import minimand


def test_importing_the_package_loads_nothing_else():
    code = (
        "import sys, minimand; print([name for name in sys.modules if name.partition('.')[0] in ('torch', 'sklearn')])"
    )
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"


def test_every_name_is_found_where_it_lives():
    for name in minimand.__all__:
        assert getattr(minimand, name).__name__ == name
    assert set(minimand.__all__) <= set(dir(minimand))
    for part in ("nn", "solvers", "train", "factor", "errors"):
        assert getattr(minimand, part).__name__ == f"minimand.{part}"
    with pytest.raises(AttributeError, match="no attribute 'Solver'"):
        _ = minimand.Solver


@pytest.mark.parametrize("part", ["adjoints", "operators", "solvers", "train", "factor", "homogeneous", "nn"])
def test_every_part_may_be_imported_first(part):
    """In a process of its own: in this one others have been loaded before."""
    code = f"from minimand.{part} import *"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)

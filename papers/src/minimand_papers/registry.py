"""Finding experiments by name: the modules in the sources' folders of ``experiments``, or a Python file."""

import difflib
import importlib
import importlib.util
import pkgutil
import sys
import zlib
from pathlib import Path
from typing import Any

from minimand.errors import OptionError

from .experiment import Experiment
from .sources import SOURCES, Publication

__all__ = ["experiments", "find", "find_named", "source_of"]


def _modules() -> dict[str, str]:
    from . import experiments as package

    found = {}
    for source in SOURCES:
        folder = importlib.import_module(f"{package.__name__}.{source}")
        names = (module.name for module in pkgutil.iter_modules(folder.__path__) if not module.name.startswith("_"))
        found.update({name.replace("_", "-"): f"{folder.__name__}.{name}" for name in names})
    return found


def experiments(source: Publication | None = None) -> list[Experiment[Any]]:
    """The experiments of a source, or of all sources, in the sources' order."""
    sources = SOURCES.values() if source is None else (source,)
    return [find(name) for listed in sources for name in listed.experiments]


def source_of(name: str) -> Publication | None:
    """The source whose experiment this is; None for a user's own."""
    return next((source for source in SOURCES.values() if name in source.experiments), None)


def find(name: str) -> Experiment[Any]:
    """The experiment of this name, or the one that a Python file defines as ``experiment``."""
    return _from_file(Path(name)) if name.endswith(".py") else find_named(name)


def find_named(name: str) -> Experiment[Any]:
    """The experiment of the package with this name; a name is never taken for a file."""
    modules = _modules()
    if name not in modules:
        near = difflib.get_close_matches(name, modules, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"available: {', '.join(sorted(modules))}"
        raise OptionError(f"there is no experiment named {name!r}; {hint}")
    return _checked(importlib.import_module(modules[name]), name)


def _from_file(path: Path) -> Experiment[Any]:
    if not path.is_file():
        raise OptionError(f"there is no file {path}; give an experiment's name (minimand list) or the path of its file")
    name = f"minimand_experiment_{path.stem}_{zlib.crc32(str(path.absolute()).encode()):08x}"
    if name in sys.modules:
        return _checked(sys.modules[name], str(path))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up by name.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        del sys.modules[name]
        raise OptionError(f"{error.filename}, line {error.lineno}: {error.msg}; mend the file") from None
    return _checked(module, str(path))


def _checked(module: Any, where: str) -> Experiment[Any]:
    experiment = getattr(module, "experiment", None)
    if not isinstance(experiment, Experiment):
        raise OptionError(f"{where} defines no experiment = Experiment(…); see CONTRIBUTING, “An experiment”")
    return experiment

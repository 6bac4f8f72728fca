"""The line of code from which a function of torch was called."""

import os
import sys

import torch

__all__ = ["calling_site"]

_TORCH = os.path.dirname(torch.__file__)
_HERE = os.path.dirname(__file__) + os.sep
#: Files whose functions stand between a call and the function mode.
_BETWEEN = frozenset(
    os.path.join(_TORCH, *name.split("/"))
    for name in (
        "overrides.py", "functional.py", "nn/functional.py", "_tensor.py", "_VF.py", "_jit_internal.py", "_ops.py",
        "utils/_device.py", "utils/_contextlib.py",
    )
)  # fmt: skip


def calling_site() -> tuple[str, int]:
    """File and line of the innermost frame outside of this package and of torch's dispatching code."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name = frame.f_code.co_filename
        if name not in _BETWEEN and not name.startswith(_HERE):
            break
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno

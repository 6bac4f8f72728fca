"""What a graph of a solver layer cannot hold, in words."""

import torch
from torch.jit._trace import is_tracing

from ..errors import CapabilityError
from .options import SolverOptions

__all__ = ["Unscripted", "require_exportable"]

_TRACE = "torch.jit.trace(torch.export.export(model, (x,)).module(), (x,))"


class Unscripted:
    """A module that ``torch.jit.script`` cannot compile."""

    def __prepare_scriptable__(self) -> None:
        raise CapabilityError(
            f"torch.jit.script cannot compile {type(self).__name__}, whose solver is Python; use "
            f"torch.export, or trace the exported program: {_TRACE}"
        )


def require_exportable(options: SolverOptions, training: bool) -> None:
    """Raise while ``torch.jit`` traces, and while a layer is exported that draws samples."""
    if is_tracing():
        raise CapabilityError(
            f"torch.jit.trace records sizes as tensors, which a solver layer cannot branch on; trace the exported "
            f"program instead: {_TRACE}"
        )
    if options.samples(training) and torch.compiler.is_exporting():
        mode = "in training mode" if training else f"with eval_mode={options.eval_mode!r}"
        raise CapabilityError(
            f"{type(options.solver).__name__} draws samples {mode}, which an exported program cannot repeat; call "
            f"model.eval() and set eval_mode='deterministic' before the export"
        )

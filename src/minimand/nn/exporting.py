"""What a graph of a solver layer cannot hold, in words."""

import torch
from torch.jit._trace import is_tracing

from ..errors import CapabilityError
from .options import SolverOptions

__all__ = ["require_exportable"]


def require_exportable(options: SolverOptions, training: bool) -> None:
    """Raise while ``torch.jit`` traces, and while a layer is exported that draws samples."""
    if is_tracing():
        raise CapabilityError(
            "torch.jit.trace records sizes as tensors, which a solver layer cannot branch on; trace the exported "
            "program instead: torch.jit.trace(torch.export.export(model, (x,)).module(), (x,))"
        )
    if options.samples(training) and torch.compiler.is_exporting():
        mode = "in training mode" if training else f"with eval_mode={options.eval_mode!r}"
        raise CapabilityError(
            f"{type(options.solver).__name__} draws samples {mode}, which an exported program cannot repeat; call "
            f"model.eval() and set eval_mode='deterministic' before the export"
        )

"""Heavy-ball and Nesterov forms of existing residual networks."""

import fnmatch
from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypeVar

from torch import nn

from ...arguments import checked
from ...errors import ConversionError, OptionError
from ..conversion.change import changed
from ..conversion.edit import Uneditable
from ..convert import check_unwrapped
from .coefficients import Coefficients
from .momentum import AlgorithmEdits
from .residual import ResidualSearch, ResidualStage, find_stages

__all__ = ["as_algorithm", "coefficient_parameters"]

M = TypeVar("M", bound=nn.Module)
_ALGORITHMS = ("heavy_ball", "nesterov")


def coefficient_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """The learned coefficients of a network, for a parameter group without weight decay, which would shrink skips.

    >>> from minimand.nn import OptimizationNet
    >>> net = OptimizationNet([nn.Linear(2, 2)] * 3, "heavy_ball", learnable=True)
    >>> len(list(coefficient_parameters(net)))
    3
    """
    for module in model.modules():
        if isinstance(module, Coefficients):
            yield from module.parameters()


@checked
def as_algorithm(
    model: M,
    algorithm: Literal["heavy_ball", "nesterov"],
    *,
    stages: str | Sequence[str] | None = None,
    constraint: Literal["sum"] | None = None,
    inplace: bool = False,
    example: Any = None,
) -> M:
    r"""Turn a residual network into its heavy-ball or Nesterov form, which initially computes the same function.

    A residual block computes :math:`x^+ = \sigma(F(x) + x)`. Its heavy-ball form is
    :math:`\sigma(F(x) + \beta_1 x + \beta_2 x_-)`, where :math:`x_-` is the input of the previous block. Nesterov's
    form evaluates the block at :math:`\beta_1 x + \beta_2 x_-`. Both start at :math:`\beta_1 = 1,\ \beta_2 = 0`, so the
    network's function changes only through training.

    A stage is a run of two or more residual updates of one shape: blocks that a forward calls one after the other, or
    additions in one forward. Momentum restarts in each stage. The additions, and the calls of the blocks, are edited in
    the source text of the forwards that make them, on these instances: the result is an instance of the same class with
    the same paths, Parameters and hooks, and :func:`~minimand.nn.revert` removes the coefficients. The coefficients are
    the child ``heavy_ball`` or ``nesterov`` of each block, or of the module whose forward makes the additions.

    Args:
        model: A network with residual blocks. Skips must be identities; a projection begins a new stage.
        algorithm: ``"heavy_ball"`` or ``"nesterov"``.
        stages: Patterns (fnmatch) on the paths of the stages, such as ``"layer[12]"``; None: all stages.
        constraint: ``"sum"`` keeps :math:`\beta_1 + \beta_2 = 1`. ``"positive"`` is not available, because
            :math:`\beta_2` starts at 0 and has no sign to keep.
        inplace: Change ``model`` itself and return it. Otherwise modules are copied and Parameters are shared.
        example: An input on which the network is read; None: inputs are made up.

    Raises:
        OptionError: For an unknown algorithm or constraint. The model is unchanged.
        ConversionError: If no stage is found; it lists the modules that were examined. The model is unchanged.

    Source: [Lin2019], eq. (16) and Nesterov's relaxation.

    >>> import torch
    >>> class Block(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.linear = nn.Linear(4, 4)
    ...     def forward(self, x):
    ...         return torch.relu(self.linear(x) + x)
    >>> model, x = nn.Sequential(*(Block() for _ in range(3))), torch.randn(2, 4)
    >>> tuned = as_algorithm(model, "heavy_ball")
    >>> torch.equal(tuned(x), model(x)), tuned[0].linear.weight is model[0].linear.weight
    (True, True)
    >>> [name for name, _ in tuned.named_parameters() if "heavy" in name][0]
    '0.heavy_ball.coefficients.weight'
    """
    if algorithm not in _ALGORITHMS:
        raise OptionError(f'algorithm must be "heavy_ball" or "nesterov", got {algorithm!r}')
    if constraint not in (None, "sum"):
        raise OptionError(
            f'constraint must be "sum" or None (not "positive": the coefficients start at (1, 0), and 0 has no sign), '
            f"got {constraint!r}"
        )
    many = list(stages) if isinstance(stages, list | tuple | set | frozenset) else [stages]
    if stages is not None and not (many and all(isinstance(pattern, str) for pattern in many)):
        raise OptionError(f"stages must be a pattern such as 'layer[12]', a list of them, or None, got {stages!r}")
    check_unwrapped(model, "as_algorithm")
    found = find_stages(model, example)
    forms = AlgorithmEdits(found, algorithm, constraint)
    for stage in _picked(found, stages):
        try:
            forms = forms.with_stage(stage)
        except Uneditable as reason:
            found.seen.append(f"{stage.path or 'the model'}: the forward cannot be edited, because {reason}")
            if stages is not None:
                raise ConversionError(f"{found.seen[-1]}. The model is unchanged") from None
    if not forms.edits:
        seen = "\n".join(f"  {line}" for line in found.seen) or "  only modules of torch"
        raise ConversionError(
            f"no residual stage was found: two or more consecutive residual updates x + F(x) with an identity skip and "
            f"an F that has parameters. The model is unchanged. Examined modules:\n{seen}"
        )
    result: M = changed(model, tuple(found.residuals), inplace, forms.apply)  # type: ignore[assignment]
    return result


def _picked(found: ResidualSearch, stages: str | Sequence[str] | None) -> list[ResidualStage]:
    """The stages that match the patterns; a pattern without a match is an error."""
    if not found.stages or stages is None:
        return found.stages
    patterns = [stages] if isinstance(stages, str) else stages
    there = ", ".join(f"{stage.path or 'the model itself'} ({len(stage)} updates)" for stage in found.stages)
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(stage.path, pattern) for stage in found.stages):
            raise ConversionError(f"{pattern!r} matches no residual stage; available: {there}. The model is unchanged")
    return [stage for stage in found.stages if any(fnmatch.fnmatchcase(stage.path, p) for p in patterns)]

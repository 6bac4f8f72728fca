"""Solver layers that take in the batch normalisation and the residual addition before their activation.

A batch normalisation is affine in the forward pass: it scales the rows of the operator and shifts the bias. Its
statistics are those of the batch in training and the running ones in evaluation. The skip of a residual block is added
to the bias ([Bibi2019], appendix J).
"""

from collections.abc import Mapping

from torch import Tensor, nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from ...errors import ShapeError
from ...operators.batchnorm import fold_batch_norm
from ...solvers import Problem
from ..convolutions import SolverConv1d, SolverConv2d, SolverConv3d, SolverConvTranspose1d, SolverConvTranspose2d
from ..layers import SolverLayer, SolverLinear

__all__ = [
    "BLOCKS",
    "SolverBlockConv1d",
    "SolverBlockConv2d",
    "SolverBlockConv3d",
    "SolverBlockConvTranspose1d",
    "SolverBlockConvTranspose2d",
    "SolverBlockLinear",
]


#: torch's older ways to compute a weight, before each call of a layer.
_WEIGHT_HOOKS = (BasePruningMethod, SpectralNorm, WeightNorm)


class BlockLayer(SolverLayer):
    """A solver layer whose operator and bias contain the batch normalisation and the skip after it.

    A forward that adds a skip calls :meth:`affine` where it called the layer, and the layer where it added the skip.
    """

    #: In a tuple, because it is registered elsewhere.
    norm: tuple[nn.Module | None]

    def affine(self, y: Tensor) -> Tensor:
        """``A y + b``, with a weight that hooks compute anew."""
        for hook in self._forward_pre_hooks.values():
            if isinstance(hook, _WEIGHT_HOOKS):
                hook(self, (y,))
        return self.operator(y).affine(y, self.bias)

    def forward(self, y: Tensor, skip: Tensor | None = None, affine: Tensor | None = None) -> Tensor:
        """Run the solver with a skip; ``affine`` is what :meth:`affine` returned."""
        return self.solved(y, skip, affine)

    def plain(self, y: Tensor, skip: Tensor | None = None, affine: Tensor | None = None) -> Tensor:
        """The plain block before its activation; ``affine`` is what :meth:`affine` returned."""
        out = self.normalized(self.affine(y) if affine is None else affine)
        return out if skip is None else out + skip

    def problem(self, y: Tensor, skip: Tensor | None = None, affine: Tensor | None = None) -> Problem:
        """The problem of the whole block; in training this updates the running statistics."""
        operator = self.operator(y)
        operator.check_input(y)
        affine = operator.affine(y, self.bias) if affine is None else affine
        weight = operator.weight
        bias: Tensor | None = self.bias
        if (norm := self.norm[0]) is not None:
            if y.dim() != 1 - operator.feature_dim:
                raise ShapeError(
                    f"a layer with batch normalisation takes an input of {1 - operator.feature_dim} dimensions, "
                    f"got {tuple(y.shape)}"
                )
            assert isinstance(norm, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d)
            scale, shift, _ = fold_batch_norm(norm, affine)
            weight = operator.scaled_outputs(scale)
            bias = shift if bias is None else shift + scale * bias
            affine = self.normalized(affine)
        operator = self._bounded(operator, weight)
        if skip is not None:
            affine = affine + skip
            bias = skip if bias is None else skip + operator.per_feature(bias)
        function = self.function.current(y.dim())
        return Problem(operator, function, y, bias, self.options.ridge, affine=affine).working()

    def normalized(self, affine: Tensor) -> Tensor:
        """``A y + b`` after the batch normalisation."""
        norm = self.norm[0]
        # The forward of the class: the one of the instance is now the identity.
        return affine if norm is None else type(norm).forward(norm, affine)


class SolverBlockLinear(BlockLayer, SolverLinear):
    """``Linear → BatchNorm1d → + skip → activation`` as a solver."""


class SolverBlockConv1d(BlockLayer, SolverConv1d):
    """``Conv1d → BatchNorm1d → + skip → activation`` as a solver."""


class SolverBlockConv2d(BlockLayer, SolverConv2d):
    """``Conv2d → BatchNorm2d → + skip → activation`` as a solver."""


class SolverBlockConv3d(BlockLayer, SolverConv3d):
    """``Conv3d → BatchNorm3d → + skip → activation`` as a solver."""


class SolverBlockConvTranspose1d(BlockLayer, SolverConvTranspose1d):
    """``ConvTranspose1d → BatchNorm1d → + skip → activation`` as a solver."""


class SolverBlockConvTranspose2d(BlockLayer, SolverConvTranspose2d):
    """``ConvTranspose2d → BatchNorm2d → + skip → activation`` as a solver."""


#: For each layer of torch its solver form, that of a block, and the batch normalisation of its outputs.
BLOCKS: Mapping[type[nn.Module], tuple[type[SolverLayer], type[BlockLayer], type[nn.Module]]] = {
    nn.Linear: (SolverLinear, SolverBlockLinear, nn.BatchNorm1d),
    nn.Conv1d: (SolverConv1d, SolverBlockConv1d, nn.BatchNorm1d),
    nn.Conv2d: (SolverConv2d, SolverBlockConv2d, nn.BatchNorm2d),
    nn.Conv3d: (SolverConv3d, SolverBlockConv3d, nn.BatchNorm3d),
    nn.ConvTranspose1d: (SolverConvTranspose1d, SolverBlockConvTranspose1d, nn.BatchNorm1d),
    nn.ConvTranspose2d: (SolverConvTranspose2d, SolverBlockConvTranspose2d, nn.BatchNorm2d),
}

"""The dropouts that correspond to stochastic solvers, as modules."""

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..arguments import checked
from ..errors import CapabilityError, OptionError, Sealed, ShapeError, require_real
from ..functions import from_activation
from ..norms.lipschitz import majorant
from ..solvers.sampling import Importance, Nice, Request, Sampling, sample_size

__all__ = ["AdditiveDropout", "ImportanceDropout"]


class _SampledDropout(Sealed, nn.Module):
    """A dropout with a drop rate, a feature dimension, and random weights of mean one."""

    _settable = ("p", "feature_dim", "generator")

    def __init__(self, p: float, layer: nn.Module | None, feature_dim: int) -> None:
        super().__init__()
        if not isinstance(layer, nn.Module | None):
            raise CapabilityError(f"layer must be the nn.Module that follows the dropout, got a {type(layer).__name__}")
        self.p, self.feature_dim = p, feature_dim
        self.generator: torch.Generator | None = None
        self._check_options()

    def _check_options(self) -> None:
        if isinstance(self.p, bool) or not isinstance(self.p, int | float) or not 0 <= self.p < 1:
            raise OptionError(f"p must lie in [0, 1), got {self.p!r}")
        if not isinstance(self.feature_dim, int) or self.feature_dim >= 0:
            raise OptionError(f"feature_dim counts from the end and must be negative, got {self.feature_dim!r}")

    def _check(self, y: Tensor) -> None:
        """Check the options, which may be set at any time, and that an input has the feature dimension."""
        self._check_options()
        require_real("the input", y)
        if y.dim() < -self.feature_dim or not y.shape[self.feature_dim]:
            raise ShapeError(
                f"feature_dim={self.feature_dim} does not exist or is empty in an input of shape {tuple(y.shape)}"
            )

    def _weights(self, like: Tensor, sampling: Sampling, scores: Tensor | None = None) -> Tensor:
        """One weight per sample and feature, shaped to broadcast against ``like``."""
        features = like.shape[self.feature_dim]
        lead = like.shape[: self.feature_dim]
        size = sample_size(1 - self.p, features)
        with torch.no_grad():
            sample = sampling.draw(Request(size, features, lead.numel(), like, self.generator, scores))
        assert sample.weight is not None
        return sample.weight.reshape(*lead, features, *(1,) * (-self.feature_dim - 1))

    def extra_repr(self) -> str:
        """The description that ``print`` shows."""
        return f"p={self.p}, feature_dim={self.feature_dim}"


@checked
class AdditiveDropout(_SampledDropout):
    r"""Additive dropout: zero-mean noise added to the input, as in mS2GD ([Bibi2019], Proposition 2).

    In training it maps :math:`y \mapsto y + (1 - w)\odot r` with τ-nice weights :math:`w`,
    :math:`\mathbb{E}\,w = 1`. In evaluation it is the identity. The reconstruction :math:`r` is :math:`A^\top x`,
    where x is the output of the layer that follows. With it,
    :math:`\operatorname{act}(A(\text{drop}(y, A^\top x) - A^\top x) + b + x)` is the second inner step of
    :class:`~minimand.solvers.SVRG` at unit step.

    Args:
        p: The share of features whose noise is :math:`+r`; the others get :math:`-\frac{p}{1-p} r`.
        layer: The linear layer that follows, from which :math:`r = A^\top\operatorname{act}(Ay + b)` is computed. None:
            every call needs a reconstruction.
        activation: The activation after the layer: a name or a module.
        feature_dim: The dimension of the features: −1, or −3 for the channels of images.

    >>> drop = AdditiveDropout(0.5)
    >>> y = torch.zeros(1, 4)
    >>> sorted(drop(y, torch.ones(1, 4))[0].tolist()), drop.eval()(y)[0].tolist()
    ([-1.0, -1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0])
    """

    def __init__(
        self,
        p: float = 0.5,
        layer: nn.Module | None = None,
        *,
        activation: str | nn.Module = "relu",
        feature_dim: int = -1,
    ) -> None:
        super().__init__(p, layer, feature_dim)
        # In a tuple, so that the layer is not registered as a child.
        self._layer = (layer, from_activation(activation))

    @checked
    def forward(self, y: Tensor, reconstruction: Tensor | None = None) -> Tensor:
        """Add the noise in training; return ``y`` in evaluation."""
        self._check(y)
        if not self.training or self.p == 0:
            return y
        layer, function = self._layer
        if reconstruction is None:
            if layer is None:
                raise OptionError(
                    "AdditiveDropout adds noise along the reconstruction Aᵀx of its input, which it does not know; "
                    "pass it, or name the layer that follows: AdditiveDropout(p, layer)"
                )
            if any(map(is_lazy, layer.parameters())):  # torch crashes if their memory is made inside of vjp
                raise OptionError("the layer after AdditiveDropout is lazy; call it once, which decides its sizes")
            # The layer is affine: its pullback is Aᵀ.
            z, pull, *_ = torch.func.vjp(layer, y)
            (reconstruction,) = pull(function.prox(z))
        if reconstruction.shape != y.shape:
            raise ShapeError(f"y has shape {tuple(y.shape)} but its reconstruction {tuple(reconstruction.shape)}")
        return y + (1 - self._weights(y, Nice())) * reconstruction


@checked
class ImportanceDropout(_SampledDropout):
    r"""Dropout that keeps an input with a probability proportional to its gradient norm ([Bibi2019], §5).

    It makes :math:`\tau = (1-p)n` draws with :math:`p_i \propto \|a_i\|\,|y_i|`, the norm of the i-th gradient at zero.
    Each draw has the weight :math:`1/(\tau p_i)`, so that the mean is y. Followed by the layer and its activation it is
    one step of :class:`~minimand.solvers.ProxSG` with importance sampling by gradients, from zero, with unit step.

    Args:
        p: The drop rate.
        layer: The layer that follows; it gives the column norms :math:`\|a_i\|`. None: all are equal.
        feature_dim: The dimension of the features: −1, or −3 for the channels of images.

    >>> drop = ImportanceDropout(0.5)
    >>> y = torch.tensor([[0.0, 0.0, 3.0, 0.0]])
    >>> drop(y).tolist()  # the only input that matters is always kept
    [[0.0, 0.0, 3.0, 0.0]]
    """

    def __init__(self, p: float = 0.5, layer: nn.Module | None = None, *, feature_dim: int = -1) -> None:
        super().__init__(p, layer, feature_dim)
        # In a tuple, so that the layer is not registered as a child.
        self._layer = (layer, None if layer is None else majorant(layer, None)[0])

    @checked
    def forward(self, y: Tensor) -> Tensor:
        """Sample and reweight the inputs in training; return ``y`` in evaluation."""
        self._check(y)
        if not self.training or self.p == 0:
            return y
        size = y.detach().float().square()
        if self.feature_dim < -1:
            size = size.flatten(self.feature_dim + 1).sum(-1)
        scores = size.reshape(-1, y.shape[self.feature_dim])
        layer, operator = self._layer
        if layer is not None and operator is not None:
            scores = scores * operator.with_weight(cast(Tensor, layer.weight)).input_norms_sq()
        return y * self._weights(y, Importance(), scores.sqrt())

"""The objective for which a fully connected layer is a gradient step."""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..arguments import checked
from ..errors import OptionError, Sealed, ShapeError, require_real
from . import curves
from .activations import from_activation
from .base import widened
from .monotone import Elementwise

__all__ = ["LayerObjective"]


@checked
class LayerObjective(Sealed):
    r"""The function for which the layer :math:`\varphi(Wx)` is a gradient step,

    .. math:: f(z) = \tfrac12\|z\|^2 - \sum_i \tilde\varphi\bigl((Uz)_i\bigr), \qquad
        \nabla f(z) = z - U\varphi(Uz), \qquad U = W^{1/2},\quad \tilde\varphi' = \varphi ,

    for a symmetric positive definite :math:`W`. In :math:`z = Ux` the unit gradient step :math:`z - \nabla f(z)` is
    :math:`x^+ = \varphi(Wx)`. φ need not be monotone, it only needs an antiderivative. If
    :math:`0 \le \varphi' \le 1` and :math:`W \preceq I`, f is convex and 1-smooth.

    Args:
        weight: W, symmetric positive definite.
        activation: A name, module or function that :func:`~minimand.functions.from_activation` accepts, or ``"silu"``
            (Swish), or ELU with any α.

    Raises:
        ShapeError: If W is not square.
        OptionError: If W is not symmetric positive definite.
        NotProximal: If the activation is unknown.

    Source: [Lin2019], Lemma 4 and the table of objectives. The table is corrected: leaky ReLU has α in place of α²,
    softsign has :math:`-t - \log(1-t)` below zero, and the constants give :math:`\tilde\varphi(0) = 0`.

    Example:
        >>> f = LayerObjective(torch.tensor([[0.5, 0.2], [0.2, 0.4]]), "tanh")
        >>> x = torch.tensor([[1.0, -2.0]])
        >>> z = f.lift(x)
        >>> torch.allclose(f.lower(z - f.gradient(z)), torch.tanh(x @ f.weight))
        True
    """

    def __init__(self, weight: Tensor, activation: str | nn.Module | Callable[..., Tensor] = "relu") -> None:
        if weight.dim() != 2 or weight.shape[0] != weight.shape[1]:
            raise ShapeError(f"LayerObjective needs a square weight, got shape {tuple(weight.shape)}")
        values, vectors = torch.linalg.eigh(weight.detach())
        tolerance = 8 * torch.finfo(weight.dtype).eps * float(values.abs().max()) * len(weight)
        asymmetry = float((weight - weight.mT).abs().max())
        if asymmetry > tolerance or float(values[0]) <= tolerance:
            raise OptionError(
                f"the weight must be symmetric positive definite, but its smallest eigenvalue is "
                f"{float(values[0]):.3g} and its asymmetry {asymmetry:.3g}; use W = AᵀA + εI"
            )
        self.weight = weight
        self.phi, self.integral = _curves(activation)
        self.root = (vectors * values.sqrt()) @ vectors.mT
        self.inverse_root = (vectors / values.sqrt()) @ vectors.mT

    @checked
    def value(self, z: Tensor) -> Tensor:
        """f(z), summed over the batch."""
        z = widened(z)
        return 0.5 * z.square().sum() - self.integral(z @ self.root.to(z.dtype)).sum()

    @checked
    def gradient(self, z: Tensor) -> Tensor:
        r"""The gradient :math:`z - U\varphi(Uz)`, row by row."""
        return z - self.phi(z @ self.root) @ self.root

    @checked
    def lift(self, x: Tensor) -> Tensor:
        """z = Ux, row by row."""
        require_real("x", x)
        return x @ self.root

    @checked
    def lower(self, z: Tensor) -> Tensor:
        """x = U⁻¹z, row by row."""
        return z @ self.inverse_root


def _curves(activation: str | nn.Module | Callable[..., Tensor]) -> tuple[Elementwise, Elementwise]:
    """The activation and its integral from 0."""
    if isinstance(activation, nn.ELU) and type(activation).forward is nn.ELU.forward and activation.alpha > 1:
        # Too steep for a prox, but its integral is known.
        alpha = float(activation.alpha)
        return functools.partial(F.elu, alpha=alpha), functools.partial(curves.elu_integral, alpha=alpha)
    name = activation.lower() if isinstance(activation, str) else None
    if name in ("silu", "swish") or type(activation) is nn.SiLU or activation is F.silu:
        return F.silu, curves.silu_integral
    function = from_activation(activation)
    return function.prox, function.primitive

"""The explicit regulariser of dropout for networks: a penalty that replaces sampling."""

import dataclasses
import math
from typing import Literal

import torch
from torch import Tensor, nn

from ..errors import CapabilityError, OptionError, Sealed, ShapeError, require_fitting
from ..factor.dropout import dropout_weight, require_rate
from ..linalg import gram
from ..network import sequence
from ..nn.dropout import AdditiveDropout, ImportanceDropout

__all__ = ["DropoutPenalty"]

Reduction = Literal["mean", "sum", "batchmean"]

_SIGNED = "sets units to a negative value and rescales all"
_SHARED = "drops whole channels, whose positions share a mask"
#: Dropouts whose noise is not an independent mask of every unit, and what it is.
_OTHER_NOISE: dict[type[nn.Module], str] = {
    nn.AlphaDropout: _SIGNED,
    nn.FeatureAlphaDropout: _SIGNED,
    nn.Dropout1d: _SHARED,
    nn.Dropout2d: _SHARED,
    nn.Dropout3d: _SHARED,
    AdditiveDropout: "adds its noise",
    ImportanceDropout: "drops units at unequal rates",
}


@dataclasses.dataclass(frozen=True)
class _Plan:
    """A network cut at its first dropout, as pairs of path and layer.

    The layers of ``head`` may be nonlinear, those of ``tail`` are affine. ``rates`` has one drop rate for each layer of
    ``tail``, that of its input; zero where nothing is dropped.
    """

    head: tuple[tuple[str, nn.Module], ...]
    tail: tuple[tuple[str, nn.Linear], ...]
    rates: tuple[float, ...]


class DropoutPenalty(Sealed):
    r"""The explicit regulariser of dropout under the squared loss, exactly.

    For a network f with dropout, and a fresh mask for every sample,

    .. math::

        \mathbb{E}\,\|y - f_{\text{dropout}}(x)\|^2
        = \|y - f(x)\|^2 + \operatorname{tr}\operatorname{Cov} f_{\text{dropout}}(x) ,

    and this penalty is the second term. For :math:`f(x) = U h(x)` with dropout of h it is

    .. math:: \lambda\sum_i \|u_i\|^2 \sum_n h_i(x_n)^2, \qquad \lambda = \frac{p}{1-p} ,

    where :math:`h_i = \max(v_i^\top x, 0)` for two-layer ReLU networks and :math:`h_i = v_i^\top x` for linear ones
    ([Vidal2018]; Mianjy, Arora and Vidal 2018). The penalty of several dropouts in a deep linear network is exact as
    well: with :math:`M_L = W_L^\top W_L` and
    :math:`M_{l} = W_{l}^\top(M_{l+1} + \lambda\operatorname{Diag} M_{l+1})W_{l}` every layer adds
    :math:`\lambda\sum_i (M_l)_{ii}\,\bar h_i^2`, where :math:`\bar h` are its inputs without noise.

    Any module without noise may precede the first dropout. Only linear layers, dropouts and identities may follow it,
    because a nonlinearity after a dropout has no closed form. Other modules after a dropout, other kinds of dropout,
    and dropouts inside modules that are not chains raise an error. A module of your own is a chain if its forward calls
    its layers in turn; :func:`minimand.network.sequence` finds out by running it on made-up inputs.

    Args:
        module: A chain of layers, such as a possibly nested ``nn.Sequential``. If it contains ``nn.Dropout`` or calls
            ``F.dropout``, these define where units are dropped; otherwise the inputs of every linear layer but the
            first are dropped.
        p: The drop rate. None: the rates of the ``nn.Dropout`` modules, of which there must be at least one.
        reduction: The reduction of the loss to which the penalty is added, as in ``nn.MSELoss``: ``"mean"`` over
            samples and outputs, ``"sum"``, or ``"batchmean"``: the sum over outputs, averaged over samples.

    >>> net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU(), nn.Linear(2, 1, bias=False))
    >>> with torch.no_grad():
    ...     _ = net[0].weight.copy_(torch.eye(2)), net[2].weight.copy_(torch.tensor([[3.0, 1.0]]))
    >>> DropoutPenalty(net, 0.5, reduction="sum")(torch.tensor([[1.0, -2.0]])).item()
    9.0

    In a training loop the penalty replaces the Dropout modules::

        loss = F.mse_loss(net(x), y) + penalty(x)
    """

    def __init__(self, module: nn.Module, p: float | None = None, *, reduction: Reduction = "mean") -> None:
        if p is not None:
            require_rate(p)
        if reduction not in ("mean", "sum", "batchmean"):
            raise OptionError(f'reduction must be "mean", "sum" or "batchmean", got {reduction!r}')
        self.reduction = reduction
        layers = [(part.path, part.module) for part in sequence(module)]
        _refuse_other_noise(layers)
        self._plan = _cut(layers, p)

    def __call__(self, x: Tensor) -> Tensor:
        """The penalty on a batch whose first dimension is the samples."""
        return self.output_and_penalty(x)[1]

    def output_and_penalty(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The network's output without noise, and the penalty, from one forward pass."""
        h = x
        for path, module in self._plan.head:
            h = _apply_layer(path, module, h)
        squares = []
        for path, layer in self._plan.tail:
            after = _apply_layer(path, layer, h)
            squares.append(h.reshape(-1, h.shape[-1]).square().sum(0))
            h = after
        rows = h.numel() // max(h.shape[-1], 1)
        scale = {"sum": 1.0, "batchmean": 1 / max(rows, 1), "mean": 1 / max(h.numel(), 1)}[self.reduction]
        return h, scale * self._covariance_trace(squares)

    def whitened(self) -> Tensor:
        r"""The expected penalty of a sample with white inputs: :math:`\mathbb{E}x = 0`, :math:`\mathbb{E}xx^\top = I`.

        For linear networks this is exact. For two layers without biases it is
        :math:`\lambda\sum_i\|u_i\|^2\|v_i\|^2`, a product of norms. With a ReLU before the dropout the inputs are
        assumed to be Gaussian, and the value is half of that.
        """
        plan = self._plan
        matrix, offset, rectified = _white_head(plan.head)
        squares = []
        for number, (_, layer) in enumerate(plan.tail):
            if rectified and number > 0 and plan.rates[number] > 0:
                raise CapabilityError(
                    "the whitened penalty of a ReLU followed by two dropouts depends on the joint distribution of the "
                    "units, which is unknown; call the penalty on data instead"
                )
            squares.append(_second_moments(matrix, offset, layer, rectified))
            if not rectified:
                matrix, offset = _composed(matrix, offset, layer)
        total = self._covariance_trace(squares)
        return total / layer.out_features if self.reduction == "mean" else total

    def _covariance_trace(self, squares: list[Tensor]) -> Tensor:
        """The trace of the output's covariance, accumulated from the last layer to the first."""
        weights = [layer.weight for _, layer in self._plan.tail]
        total = weights[-1].new_zeros(())
        inner: Tensor | None = None
        for weight, p, square in zip(weights[::-1], self._plan.rates[::-1], squares[::-1], strict=True):
            inner = gram(weight.mT) if inner is None else weight.mT @ inner @ weight
            lam = dropout_weight(p)
            diagonal = inner.diagonal()
            total = total + lam * (diagonal * square).sum()
            inner = inner + lam * torch.diag(diagonal)
        return total


def _apply_layer(path: str, layer: nn.Module, h: Tensor) -> Tensor:
    """The layer's output; a ShapeError with the layer's path if torch rejects the input."""
    try:
        out: Tensor = layer(h)
    except (RuntimeError, TypeError) as error:
        weight = next(layer.parameters(), None)
        where = path or type(layer).__name__
        # Other modules may begin with an embedding, which takes integers.
        if weight is not None and (isinstance(layer, nn.Linear) or h.is_floating_point()):
            require_fitting(where, h, weight, error)
        if isinstance(layer, nn.Linear) and h.shape[-1:] != (layer.in_features,):
            raise ShapeError(
                f"{where}: the input must have shape (..., {layer.in_features}), got {tuple(h.shape)}"
            ) from error
        raise
    return out


def _refuse_other_noise(layers: list[tuple[str, nn.Module]]) -> None:
    """Refuse dropouts of other kinds, and dropout where it cannot be cut out."""
    found = []
    for path, layer in layers:
        for inner, part in layer.named_modules():
            where = f"{'.'.join(filter(None, (path, inner))) or 'the module'} ({type(part).__name__})"
            if reason := next((why for kind, why in _OTHER_NOISE.items() if isinstance(part, kind)), ""):
                found.append(f"{where} {reason}")
            elif inner and isinstance(part, nn.Dropout):
                found.append(f"{where} lies inside a {type(layer).__name__}, which is no chain")
            elif isinstance(part, nn.RNNBase | nn.MultiheadAttention) and part.dropout > 0:
                found.append(f"{where} drops units of its own")
    if found:
        raise CapabilityError(
            f"the penalty is that of nn.Dropout between the layers of a chain: {'; '.join(found)}; sample, or use "
            f"nn.Dropout in an nn.Sequential"
        )


def _cut(layers: list[tuple[str, nn.Module]], p: float | None) -> _Plan:
    """Find the first dropout, and check that what follows is affine."""
    explicit = any(isinstance(layer, nn.Dropout) for _, layer in layers)
    if not explicit and p is None:
        raise OptionError("p is None, but the module holds no nn.Dropout whose rate could be taken; pass p")
    head: list[tuple[str, nn.Module]] = []
    tail: list[tuple[str, nn.Linear]] = []
    rates: list[float] = []
    pending: float = 0.0
    seen_linear = False
    for path, layer in layers:
        if isinstance(layer, nn.Dropout):
            # Two dropouts in a row keep a unit only if both do.
            pending = 1 - (1 - pending) * (1 - (layer.p if p is None else p))
            require_rate(pending, f"the drop rate of {path or 'the module'}")
            continue
        if isinstance(layer, nn.Linear):
            if not explicit and seen_linear and p is not None:
                pending = p
            seen_linear = True
        if not tail and pending == 0:
            head.append((path, layer))
        elif isinstance(layer, nn.Linear):
            tail.append((path, layer))
            rates.append(pending)
            pending = 0.0
        elif not isinstance(layer, nn.Identity):
            raise CapabilityError(
                f"{path or 'the module'} ({type(layer).__name__}) comes after a dropout; behind a nonlinearity the "
                f"penalty has no closed form, so put nn.Dropout only in front of the last linear layers, or sample"
            )
    if pending > 0:
        raise CapabilityError(
            "the module ends in a dropout; the penalty is that of a linear layer after it: add the layer"
        )
    if not tail and p:
        raise CapabilityError(
            f"p = {p:g}, but nothing is dropped: the module has no linear layer that follows another one of its "
            f"chain; put an nn.Dropout in front of its last linear layer"
        )
    if not tail:  # nothing is dropped: the last linear layer carries a penalty of zero
        path, last = head.pop() if head else ("", None)
        if not isinstance(last, nn.Linear):
            raise CapabilityError("the module does not end in a linear layer, whose inputs the penalty drops")
        tail, rates = [(path, last)], [0.0]
    return _Plan(tuple(head), tuple(tail), tuple(rates))


def _white_head(head: tuple[tuple[str, nn.Module], ...]) -> tuple[Tensor | None, Tensor | None, bool]:
    """Matrix and offset of the linear layers before the first dropout, and whether a ReLU follows them."""
    matrix, offset, rectified = None, None, False
    for _, layer in head:
        if isinstance(layer, nn.Linear) and not rectified:
            matrix, offset = _composed(matrix, offset, layer)
        elif isinstance(layer, nn.ReLU) and matrix is not None:
            rectified = True
        elif not isinstance(layer, nn.Identity):
            raise CapabilityError(
                f"the whitened penalty takes linear layers and a ReLU before the dropout, not {type(layer).__name__}; "
                f"call the penalty on data instead"
            )
    return matrix, offset, rectified


def _composed(matrix: Tensor | None, offset: Tensor | None, layer: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """Matrix and offset of an affine map followed by a layer; None is the identity and zero."""
    shifted = layer.bias if offset is None else layer.weight @ offset + (0 if layer.bias is None else layer.bias)
    return layer.weight if matrix is None else layer.weight @ matrix, shifted


def _second_moments(matrix: Tensor | None, offset: Tensor | None, layer: nn.Linear, rectified: bool) -> Tensor:
    """E h² of each input of the layer, for white inputs; after a ReLU, for white Gaussian inputs."""
    if matrix is None:
        return layer.weight.new_ones(layer.in_features)
    variance = matrix.square().sum(1)
    mean = torch.zeros_like(variance) if offset is None else offset
    if not rectified:
        return variance + mean.square()
    deviation = variance.clamp_min(torch.finfo(variance.dtype).tiny).sqrt()
    ratio = mean / deviation
    density = torch.exp(-0.5 * ratio.square()) / math.sqrt(2 * math.pi)
    return (variance + mean.square()) * torch.special.ndtr(ratio) + mean * deviation * density

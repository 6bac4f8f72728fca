"""The learned sparsifying transform of an unrolled network, and its shrinkage as a function with a prox."""

import copy
import dataclasses
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import OptionError, Sealed, ShapeError, require_positive
from ...functions import L1
from ...functions.base import Function, Step, widened
from ...norms import lipschitz
from ...solvers.base import require_count
from ...tracing import is_traced
from .probing import Probe, probe
from .single_channel import SingleChannelConv2d

__all__ = ["Architecture", "Shrinkage", "Transform", "soft_threshold"]


@dataclasses.dataclass(frozen=True)
class Architecture:
    """The size of a learned transform; the defaults are ISTA-Net's.

    Attributes:
        channels: The number of features of every convolution.
        depth: The number of convolutions in the analysis, and in the synthesis, with ReLUs between them.
        shuffle: The side s of the pixel squares that become channels before the first convolution. Every convolution
            becomes s² times cheaper with the same receptive field. It must divide the sides of the images.
        start: "solver": every phase initially is the data step, up to ``scale``. The filters of the first convolution
            have zero mean, so that the ReLUs respond to edges and textures and not to brightness; the other weights
            have He's initialisation. The plain form passes the image through a pair of channels of opposite sign for
            every pixel of a square, if there are enough channels. "xavier": as in the papers' code, which needs long
            training at small learning rates.
        scale: Factor on the initial weights of the last convolution; default: 0.01 with "solver" and 1 with
            "xavier". Training has to undo large initial weights first.
    """

    channels: int = 32
    depth: int = 2
    shuffle: int = 1
    start: Literal["solver", "xavier"] = "solver"
    scale: float | None = None

    def __post_init__(self) -> None:
        for name in ("channels", "depth", "shuffle"):
            require_count(name, getattr(self, name))
        if self.start not in ("solver", "xavier"):
            raise OptionError(f'start must be "solver" or "xavier", got {self.start!r}')
        if self.scale is not None:
            require_positive("scale", self.scale)


class Transform(Sealed, nn.Module):
    r"""A pair of convolutional maps :math:`\mathcal{F}, \tilde{\mathcal{F}}` with
    :math:`\tilde{\mathcal{F}}\mathcal{F} \approx I`.

    The plain form (ISTA-Net) acts on the image, the residual form (ISTA-Net+, FISTA-Net) on features
    :math:`\mathcal{D}x`:

    .. math::

        x \leftarrow \tilde{\mathcal{F}}(S_\theta(\mathcal{F}(r))), \qquad
        x \leftarrow r + \mathcal{G}\tilde{\mathcal{F}}(S_\theta(\mathcal{F}(\mathcal{D}r))) .

    No convolution has a bias, so zero maps to zero. ``Architecture.start`` selects the initialisation.

    Source: Zhang & Ghanem, *ISTA-Net*, CVPR 2018.
    """

    def __init__(self, architecture: Architecture, *, residual: bool) -> None:
        super().__init__()
        self.architecture = architecture
        pixels, channels = architecture.shuffle**2, architecture.channels
        outer = channels if residual else pixels
        self.expand = _convolution(pixels, channels) if residual else None
        self.analysis = nn.ModuleList(
            _convolution(channels if k else outer, channels) for k in range(architecture.depth)
        )
        self.synthesis = nn.ModuleList(
            _convolution(channels, outer if k + 1 == architecture.depth else channels)
            for k in range(architecture.depth)
        )
        self.reduce = _convolution(channels, pixels) if residual else None
        self._initialize()
        for weight in self.parameters():
            # oneDNN's 3 × 3 convolutions are 1.5 times as fast in this layout. contiguous() is not enough: a weight
            # with one input channel is in both layouts and keeps its strides, and the output would get the other one.
            weight.data = weight.data.to(memory_format=torch.channels_last)

    @torch.no_grad()
    def _initialize(self) -> None:
        chain = [self.expand, *self.analysis, *self.synthesis, self.reduce]
        weights = [layer.get_parameter("weight") for layer in chain if layer is not None]
        as_solver = self.architecture.start == "solver"
        for weight in weights:
            if as_solver:
                nn.init.kaiming_normal_(weight)
            else:
                nn.init.xavier_normal_(weight)
        scale = self.architecture.scale
        weights[-1].mul_((0.01 if as_solver else 1.0) if scale is None else scale)
        if as_solver:
            weights[0].sub_(weights[0].mean((1, 2, 3), keepdim=True))
            if self.reduce is None:
                _carry(weights[: len(weights) // 2], weights[len(weights) // 2 :])

    def features(self, image: Tensor) -> Tensor:
        """The input of the analysis: the image's pixel squares as channels, expanded in the residual form."""
        side = self.architecture.shuffle
        if side > 1:
            if image.shape[-1] % side or image.shape[-2] % side:
                raise ShapeError(
                    f"a transform with shuffle={side} takes images whose sides are multiples of {side}, "
                    f"got {tuple(image.shape[-2:])}; pad them or choose another shuffle"
                )
            image = F.pixel_unshuffle(image, side)
        return image if self.expand is None else self.expand(image)

    def analyze(self, features: Tensor) -> Tensor:
        """The coefficients."""
        return _chain(self.analysis, features)

    def synthesize(self, coefficients: Tensor) -> Tensor:
        """Back to features."""
        return _chain(self.synthesis, coefficients)

    def image(self, features: Tensor, before: Tensor) -> Tensor:
        """The image of synthesised features; the residual form adds it to the image ``before``."""
        change = features if self.reduce is None else self.reduce(features)
        if self.architecture.shuffle > 1:
            change = F.pixel_shuffle(change, self.architecture.shuffle)
        return change if self.reduce is None else before + change

    def is_prox(self) -> bool:
        r"""Whether :math:`\tilde{\mathcal{F}} S_\theta \mathcal{F}` is proved to be the prox of a convex function.

        This holds for one convolution :math:`\mathcal{F} = K` with :math:`\|K\| \le 1` and :math:`\tilde{\mathcal{F}}
        = K^\top`: then :math:`K^\top S_\theta K` is nonexpansive, and it is the gradient of the convex function
        :math:`\tfrac12\|(|Kx| - \theta)_+\|^2` (Moreau, 1965). The norm is bounded for images of every size.
        """
        if self.expand is not None or self.architecture.depth > 1:
            return False
        analysis, synthesis = (part[0].get_parameter("weight").detach() for part in (self.analysis, self.synthesis))
        if not torch.equal(synthesis, analysis.transpose(0, 1).flip(-1, -2)):
            return False
        sizes = analysis.double().abs().sum((-1, -2))
        # Schur's test is exact for a single tap, where a bound with room for rounding is above one.
        return float(sizes.sum(0).max() * sizes.sum(1).max()) <= 1 or float(lipschitz(self.analysis[0])) <= 1


def _convolution(inputs: int, outputs: int) -> nn.Conv2d:
    return SingleChannelConv2d(inputs) if outputs == 1 else nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)


def _carry(analysis: list[Tensor], synthesis: list[Tensor]) -> None:
    """Initialise so that synthesis after analysis is the identity plus the output of the other channels.

    A value passes the ReLUs as its positive and its negative part. Nothing changes if there are too few channels.
    """
    pixels, channels = analysis[0].shape[1], analysis[0].shape[0]
    parts = 2 if len(analysis) > 1 else 1
    if channels < parts * pixels:
        return
    signs = torch.tensor([1.0, -1.0][:parts])
    split = torch.kron(signs[:, None], torch.eye(pixels))
    through = [split, *[torch.eye(parts * pixels)] * (len(analysis) - 2), *[split.mT] * (parts - 1)]
    for weight, carried in zip(analysis + synthesis, through * 2, strict=True):
        rows, columns = carried.shape
        if weight is not analysis[0]:
            weight[:, :columns] = 0
        if weight is not synthesis[-1]:
            weight[:rows] = 0
        weight[:rows, :columns, 1, 1] = carried


def _chain(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for k, layer in enumerate(layers):
        # A convolution saves its input for backward, not its output, so the ReLU may overwrite the output.
        x = layer(F.relu(x, inplace=True) if k else x)
    return x


def soft_threshold(x: Tensor, threshold: Tensor) -> Tensor:
    r""":math:`\operatorname{sign}(x)\max(|x| - \theta, 0)` for a learned number θ of any sign.

    For :math:`\theta > 0` it is the prox of :math:`\theta\|\cdot\|_1`. Unconstrained training can reach a negative
    threshold, which moves coefficients away from zero and is not a prox. The papers' formula is used for it unchanged.

    >>> soft_threshold(torch.tensor([-3.0, 0.5]), torch.tensor(1.0))
    tensor([-2., 0.])
    >>> soft_threshold(torch.tensor([-3.0, 0.5]), torch.tensor(-1.0))
    tensor([-4.0000,  1.5000])
    """
    readable = threshold.device.type == "cpu" and not is_traced(threshold)
    if readable and float(threshold.detach()) > 0:
        return L1(1.0).prox(x, threshold)
    if readable:
        return x - threshold * torch.sign(x)
    kept = L1(1.0).prox(x, threshold.clamp_min(torch.finfo(threshold.dtype).tiny))
    return kept + F.relu(-threshold) * torch.sign(x)


class Shrunk(NamedTuple):
    """The intermediate results of one shrinkage."""

    point: Tensor
    features: Tensor
    coefficients: Tensor


class Shrinkage(Function):
    r"""The function :math:`\frac{\theta}{\eta}\|\mathcal{F}(x)\|_1` of one phase, with a learned approximation of its
    prox.

    ``prox`` is :math:`\tilde{\mathcal{F}}(S_\theta(\mathcal{F}(v)))`, which is exact if :math:`\tilde{\mathcal{F}} =
    \mathcal{F}^\top = \mathcal{F}^{-1}`. The threshold θ is learned directly, so the solver's step does not scale it.
    The weight of the penalty is θ/η.
    """

    def __init__(self, transform: Transform, threshold: Tensor, step: Tensor | float) -> None:
        self.transform, self.threshold, self.step = transform, threshold, step
        self._last: Shrunk | None = None

    def value(self, x: Tensor) -> Tensor:
        """The penalty at x, summed over the batch."""
        coefficients = self.transform.analyze(self.transform.features(x))
        return (self.threshold / self.step) * coefficients.abs().sum()

    def prox(self, x: Tensor, step: Step = 1.0) -> Tensor:
        """Analysis, soft threshold, synthesis."""
        features = self.transform.features(x)
        coefficients = self.transform.analyze(features)
        self._last = Shrunk(x, features, coefficients)
        return self.transform.image(self.transform.synthesize(soft_threshold(coefficients, self.threshold)), x)

    def symmetry(self) -> Tensor:
        r"""The residual :math:`\tilde{\mathcal{F}}\mathcal{F}(r) - r` of the last prox, in its features."""
        return self.transform.synthesize(self.last.coefficients) - self.last.features

    def probe(self) -> Probe:
        """Tests of the learned prox around the point of the last one, in float32 or float64."""
        point = widened(self.last.point.detach())
        same = point.dtype == self.last.point.dtype
        transform = self.transform if same else copy.deepcopy(self.transform).to(point.dtype)
        return probe(Shrinkage(transform, self.threshold.detach().to(point), self.step).prox, point)

    @property
    def last(self) -> Shrunk:
        """The intermediate results of the last prox."""
        if self._last is None:
            raise OptionError("no prox has been computed yet; call prox first")
        return self._last

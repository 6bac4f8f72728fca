"""A sum of parallel copies of a positively homogeneous network, whose number is found by growth."""

import copy
import math
import warnings
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from ..arguments import checked
from ..errors import OptionError, Sealed, require_positive
from ..factor.inputs import Units, raised, shifted
from ..factor.problem import INTERRUPTED, Certificate, Status
from ..linalg import without_autocast
from ..solvers.base import require_count
from ..solvers.iterate import iterate
from .bound import NO_BOUND, chain_bound, chain_gain, chain_layers
from .certificate import judge_residual
from .degree import probe_input, require_homogeneous, require_mode_independent
from .descending import data_units, minimize, minimize_batches, outputs, require_data, resize_for_checkpoint
from .losses import LOSSES
from .regularizers import balance, factor_norms, path_norm, product_of_norms, smooth_surrogate, weight_decay

__all__ = ["ParallelNetwork"]

_BY_NORMS: dict[str, Callable[[nn.Module], Tensor]] = {
    "product": product_of_norms,
    "surrogate": smooth_surrogate,
    "weight_decay": weight_decay,
}
_REGULARIZERS = (*_BY_NORMS, "path")


class ParallelNetwork(Sealed, nn.Module):
    r"""A sum of subnetworks :math:`\Phi(x) = \sum_{i=1}^r \phi(x; W_i)` with a regulariser that limits their number.

    .. math:: \min_{r, W}\; \ell(y, \Phi(X)) + \lambda\sum_{i=1}^r \theta(W_i),

    where ℓ is :math:`\tfrac12\|y - \Phi(X)\|^2` or the cross-entropy, summed over the samples.

    If φ and θ are positively homogeneous of the same degree, a local minimum that no additional subnetwork improves is
    global ([Vidal2018]; Haeffele and Vidal 2017). :meth:`fit` is the meta-algorithm: descend, search for a subnetwork
    with :math:`\langle R, \phi(X; W)\rangle > \lambda\theta(W)` for :math:`R = -\nabla\ell`, add it, descend again.

    The search is an ascent from random starts, so a failed search proves nothing. An upper bound on the polar is known
    for chains that begin with a linear layer or a convolution: :math:`\|R^\top X\|_F` of one linear layer and
    :math:`\|R^\top X\|` of several, which are both attained, and a product of norms with ReLUs, pooling or maxout. The
    status is ``CERTIFIED`` only if such a bound suffices. It is ``IMPROVABLE`` only if the subnetwork found lowers the
    objective f by more than ``tol`` · f. With the curvature κ of the loss (1, or ½ for the cross-entropy) it gains
    :math:`(p - \lambda)^2/(2\kappa\|\phi(X)\|^2)`, so its slope p must exceed λ by
    :math:`\|\phi(X)\|(2\kappa\,\mathrm{tol}\,f)^{1/2}`. Otherwise the status is ``UNDECIDED``.

    The subnetworks take the inputs' dtype and device. A state dict with any number of subnetworks can be loaded.

    Args:
        make_subnetwork: Returns a φ with new random weights. It must be positively homogeneous in its parameters, which
            is checked by scaling them: at construction if the first layer is linear, otherwise at the start of the fit.
            A sigmoid, a bias after the first layer, batch norm and dropout raise an error.
        lam: The weight of the regulariser.
        regularizer: ``"product"``: the product of the layers' norms. ``"surrogate"``: a smooth surrogate of the same
            degree. ``"path"``: the norm over all paths, of the same degree but without an upper bound on the polar.
            ``"weight_decay"``, for comparison: its degree is 2, so with more than two layers nothing is proved, the
            status is ``UNDECIDED``, and :meth:`fit` only descends.
        loss: ``"squared"``, or ``"cross_entropy"`` for outputs n_samples × n_classes and a y of labels or of rows of
            probabilities.
        initial: The number of random subnetworks from which :meth:`fit` starts.
        max_networks: The largest number of subnetworks.
        restarts: The number of starts of the search for a new subnetwork.
        descent: L-BFGS iterations of a local descent, and of each start of a search; passes over the data with
            ``batch_size``.
        batch_size: None: L-BFGS on all samples. A number: Adam on mini-batches of this size, and evaluations in parts
            of it, for data and networks that L-BFGS takes too long for. A descent then does not end at a local minimum,
            but gap and status hold at any point.
        rate: The rate of Adam, from which it falls linearly to zero.
        tol: The relative gap at which the status is ``CERTIFIED``.

    Attributes:
        subnetworks: The copies, a ``ModuleList``.
        certificate_: The certificate of :meth:`fit`'s result.
        direction_: The steepest additional subnetwork that :meth:`fit` found, with θ = 1; None before the fit. Its
            slope :math:`\langle R, \phi(X; W)\rangle` is ``certificate_.polar_lower``.
        history_: The objective after each round of :meth:`fit`.

    >>> _ = torch.manual_seed(0)
    >>> net = ParallelNetwork(lambda: nn.Sequential(nn.Linear(2, 1, bias=False), nn.Linear(1, 1, bias=False)), lam=0.1)
    >>> x = torch.eye(2)
    >>> _ = net.fit(x, torch.tensor([[1.0], [0.0]]))
    >>> [round(v, 3) + 0.0 for v in net.predict(x).flatten().tolist()], str(net.certificate_.status)
    ([0.9, 0.0], 'CERTIFIED')
    """

    _settable = ("certificate_", "history_", "lam", "tol")

    def __init__(
        self,
        make_subnetwork: Callable[[], nn.Module],
        lam: float,
        *,
        regularizer: Literal["product", "surrogate", "weight_decay", "path"] = "product",
        loss: Literal["squared", "cross_entropy"] = "squared",
        initial: int = 0,
        max_networks: int = 20,
        restarts: int = 8,
        descent: int = 200,
        batch_size: int | None = None,
        rate: float = 1e-2,
        tol: float = 1e-3,
    ) -> None:
        super().__init__()
        require_positive("lam", lam)
        require_positive("tol", tol)
        require_positive("rate", rate)
        if loss not in LOSSES:
            raise OptionError(f"loss must be one of {', '.join(LOSSES)}, got {loss!r}")
        if regularizer not in _REGULARIZERS:
            raise OptionError(f"regularizer must be one of {', '.join(_REGULARIZERS)}, got {regularizer!r}")
        for name, count in (("max_networks", max_networks), ("restarts", restarts), ("descent", descent)):
            require_count(name, count)
        if batch_size is not None:
            require_count("batch_size", batch_size)
        if isinstance(initial, bool) or not isinstance(initial, int) or not 0 <= initial <= max_networks:
            raise OptionError(f"initial must be a whole number from 0 to {max_networks = }, got {initial!r}")
        self.make_subnetwork = make_subnetwork
        self.lam, self.tol = lam, tol
        self._lam = lam  # in the units of a fit
        self.regularizer = regularizer
        self.initial, self.max_networks = initial, max_networks
        self.restarts, self.descent = restarts, descent
        self.batch_size, self.rate = batch_size, rate
        self.loss: str = loss
        self._ell = LOSSES[loss]
        self.subnetworks = nn.ModuleList()
        # Tuples keep the pattern and the direction from being registered as submodules.
        self._pattern = (make_subnetwork(),)
        self._layers: tuple[nn.Module, ...] | None = None
        self._found: tuple[nn.Module, float] | None = None
        self._degree: int | None = None
        require_mode_independent(self._pattern[0])
        frozen = [name for name, parameter in self._pattern[0].named_parameters() if not parameter.requires_grad]
        if frozen:
            raise OptionError(
                f"make_subnetwork returns frozen parameters ({', '.join(frozen)}), but growth scales every layer; call "
                f"requires_grad_(True) on them"
            )
        probe = probe_input(self._pattern[0])
        if probe is not None:
            self._degree = require_homogeneous(self._pattern[0], probe)
        self.certificate_: Certificate | None = None
        self.history_: list[float] = []
        self.register_load_state_dict_pre_hook(resize_for_checkpoint)

    @property
    def direction_(self) -> nn.Module | None:
        """The steepest additional subnetwork found; not a submodule."""
        return None if self._found is None else self._found[0]

    def forward(self, x: Tensor) -> Tensor:
        """The sum of the subnetworks' outputs."""
        if not self.subnetworks:
            return torch.zeros_like(outputs(self._copy(x), x))
        return torch.stack([net(x) for net in self.subnetworks]).sum(0)

    def predict(self, x: Tensor) -> Tensor:
        """The outputs, without gradients."""
        return outputs(self, x, self.batch_size)

    def penalty(self, x: Tensor | None = None) -> Tensor:
        r"""The term :math:`\lambda\sum_i\theta(W_i)` of the objective, for training loops.

        Only the path norm uses x, for the shape of the inputs, and only if the first layer is not linear.
        """
        if not self.subnetworks:
            return next(self._pattern[0].parameters()).new_zeros(())
        return self._lam * torch.stack([self._theta(net, x) for net in self.subnetworks]).sum()

    def objective(self, x: Tensor, y: Tensor) -> Tensor:
        r"""The loss, summed over the samples, plus the penalty."""
        found = self(x)
        return self._ell.value(found, self._ell.targets(y, found)) + self.penalty(x)

    @checked
    @without_autocast()
    def fit(self, x: Tensor, y: Tensor) -> "ParallelNetwork":
        """Grow from ``initial`` random subnetworks until a search finds no improvement or the result is certified; it
        warns if a search has found an improvement that was not used."""
        x, y = self._checked(x, y)
        degrees, halted, self._found = (self._degree or 1, self._penalty_degree), False, None
        units, inputs = data_units(self._pattern[0], x, y, *degrees, squared=self.loss == "squared")
        try:
            self._lam = units.weight(self.lam, float(y.abs().max()))
            self._fit(shifted(x, -inputs), shifted(y, -units.objective // 2))
        except KeyboardInterrupt:
            self.certificate_, halted = INTERRUPTED, True
        finally:
            self._lam = self.lam
        self._finish(units)
        if halted:
            raise KeyboardInterrupt("ParallelNetwork holds the subnetworks of its last descent, without a certificate")
        return self

    def _fit(self, x: Tensor, y: Tensor) -> None:
        self.subnetworks = nn.ModuleList(self._make(x) for _ in range(self.initial))
        self.history_ = []
        if self.initial:
            self._descend(x, y)
        self._assess(x, y)
        if self._degrees_match():
            iterate(lambda state, k: self._grow(x, y), True, self.max_networks, until=lambda state, k: not state)

    @property
    def _penalty_degree(self) -> int:
        """The degree of θ."""
        assert self._degree is not None
        return 2 if self.regularizer == "weight_decay" else self._degree

    def _finish(self, units: Units) -> None:
        """Return from the units of the fit; warn if it ended although a known subnetwork lowers the objective."""
        assert self.certificate_ is not None
        with torch.no_grad():
            for parameter in self.subnetworks.parameters():
                parameter.copy_(shifted(parameter, units.product // self._penalty_degree))
        self.certificate_ = self.certificate_.in_units(units)
        self.history_ = [raised(value, units.objective) for value in self.history_]
        self._found = self._found and (self._found[0], raised(self._found[1], units.polar))
        if self.certificate_.status is Status.IMPROVABLE:
            full = "max_networks" if len(self.subnetworks) >= self.max_networks else "descent, restarts"
            text = self.certificate_.shortfall("ParallelNetwork", self.tol, f"raise {full}, lam or tol")
            warnings.warn(text, stacklevel=5)

    def _make(self, like: Tensor) -> nn.Module:
        """A new subnetwork with the dtype and device of ``like``."""
        return self.make_subnetwork().to(like)

    def _copy(self, like: Tensor) -> nn.Module:
        return copy.deepcopy(self._pattern[0]).to(like)

    def _theta(self, net: nn.Module, x: Tensor | None) -> Tensor:
        if self.regularizer != "path":
            return _BY_NORMS[self.regularizer](net)
        example = probe_input(net) if x is None else x
        if example is None:
            raise OptionError(
                "the path norm needs inputs if the network does not begin with a linear layer; call penalty(x)"
            )
        return path_norm(net, example.to(next(net.parameters())))

    def _degrees_match(self) -> bool:
        """Whether the regulariser has the network's degree."""
        return self._penalty_degree == self._degree

    def _checked(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Check the data and return x and y in the dtype and on the device of x."""
        require_data(x, y, labels=self.loss == "cross_entropy")
        x, pattern = x.detach(), self._copy(x)
        y = self._ell.targets(y.detach().to(x.device), outputs(pattern, x, self.batch_size))
        if not bool((factor_norms(pattern) > 0).all()):
            raise OptionError(
                "make_subnetwork returns a layer of zeros, from which no ascent can start; draw its weights at random"
            )
        if self._degree is None:
            probe = torch.randn(min(len(x), 8), *x.shape[1:], generator=torch.Generator().manual_seed(0))
            self._degree = require_homogeneous(pattern, probe.to(x.device))
        self._layers = chain_layers(self._pattern[0], x.double())
        self._gain = chain_gain(self._layers)
        return x, y

    def _grow(self, x: Tensor, y: Tensor) -> bool:
        """One round: add the subnetwork of the last search, descend, assess. Returns whether to continue."""
        assert self._found is not None
        assert self.certificate_ is not None
        found, slope = self._found
        if self.certificate_.status is Status.CERTIFIED or slope <= self._lam * (1 + 1e-6):
            return False
        if len(self.subnetworks) >= self.max_networks:
            return False
        before, added = copy.deepcopy(self.subnetworks), copy.deepcopy(found)
        self._scale(added, (slope - self._lam) / (self._ell.curvature * self._square(found, x)))
        self.subnetworks.append(added)
        self._descend(x, y)
        last = self.history_[-1]
        if not self._value(x, y) < last:
            self.subnetworks = before
            return False
        self._assess(x, y)
        # A poor search may have gained little, so the gain that the next search promises counts as well.
        return max(last - self.history_[-1], self._predicted_gain(x)) > 1e-2 * self.tol * last

    def _predicted_gain(self, x: Tensor) -> float:
        r"""The least gain from adding the subnetwork found, :math:`(p - \lambda)_+^2/(2\kappa\|\phi(X)\|^2)`."""
        assert self._found is not None
        found, slope = self._found
        room = max(slope - self._lam, 0.0)
        return room**2 / (2 * self._ell.curvature * self._square(found, x)) if room > 0 else 0.0

    def _square(self, net: nn.Module, x: Tensor) -> float:
        return float(outputs(net, x, self.batch_size).square().sum())

    @torch.no_grad()
    def _value(self, x: Tensor, y: Tensor) -> float:
        return float(self._ell.value(self.predict(x), y) + self.penalty(x))

    @torch.no_grad()
    def _scale(self, net: nn.Module, factor: float) -> None:
        """Multiply the outputs and θ by ``factor``, distributed equally over the layers."""
        assert self._degree is not None
        for parameter in net.parameters():
            parameter.mul_(factor ** (1 / self._degree))

    def _descend(self, x: Tensor, y: Tensor) -> None:
        """Descend to a local minimum, remove zero subnetworks, and balance the others, which changes no output."""
        self._minimize(
            self.subnetworks, x, y, lambda x, y, share: self._ell.value(self(x), y) * share + self.penalty(x)
        )
        if self.regularizer == "weight_decay":
            return
        with torch.no_grad():
            sizes = [float(product_of_norms(net)) for net in self.subnetworks]
        kept = [net for net, size in zip(self.subnetworks, sizes, strict=True) if size > 1e-8 * max(sizes)]
        self.subnetworks = nn.ModuleList(kept)
        for net in kept:
            balance(net)

    def _minimize(self, net: nn.Module, x: Tensor, y: Tensor, value: Callable[[Tensor, Tensor, float], Tensor]) -> None:
        """Descend; the third argument of ``value`` is the number of samples per sample of its batch."""
        if self.batch_size is None:
            minimize(list(net.parameters()), lambda: value(x, y, 1.0), self.descent)
            return
        minimize_batches(
            net.parameters(),
            lambda part, other: value(part, other, len(x) / len(part)),
            (x, y),
            batch_size=self.batch_size,
            passes=self.descent,
            rate=self.rate,
        )

    def _assess(self, x: Tensor, y: Tensor) -> None:
        """Search for a new subnetwork, and compute the objective and the certificate in float64."""
        found = self._search(x, self._ell.residual(self.predict(x), y))
        X, Y = x.double(), y.double()
        nets, steepest = copy.deepcopy(self.subnetworks).double(), copy.deepcopy(found).double()
        with torch.no_grad():
            total = sum((outputs(net, X, self.batch_size) for net in nets), torch.zeros_like(Y))
            R = self._ell.residual(total, Y)
            penalty = sum(float(self._theta(net, X)) for net in nets)
            sizes = sum(float(product_of_norms(net)) for net in nets)
            slope = float((R * outputs(steepest, X, self.batch_size)).sum() / self._size(steepest, X))
        value = float(self._ell.value(total, Y)) + self._lam * penalty
        upper, method = self._upper_bound(X, R, slope)
        # If the degrees differ, a slope above λ does not imply a lower objective.
        image = self._square(found, x) ** 0.5 if self._degrees_match() else math.inf
        self._found = found, slope
        self.history_.append(value)
        # A bound on the rounding error of the outputs, for the networks that have a bound on the polar.
        widths = sum(parameter[0].numel() for parameter in found.parameters() if parameter.dim() > 1)
        error = float(Y.norm()) + math.hypot(float(X.norm()), len(X) ** 0.5) * sizes * self._gain
        error *= 2 * (widths + len(nets) + 8) * torch.finfo(torch.float64).eps
        polar, options = (slope, upper, method), {"lam": self._lam, "image": image, "tol": self.tol, "error": error}
        self.certificate_ = judge_residual(Y, R, value, polar=polar, loss=self._ell, **options)

    def _upper_bound(self, X: Tensor, R: Tensor, slope: float) -> tuple[float, str]:
        """An upper bound on the polar, and its method."""
        if not self._degrees_match():
            return math.inf, "degrees differ"
        upper, method = NO_BOUND if self.regularizer == "path" else chain_bound(self._layers, X, R)
        # A value that the slope found exceeds is not a bound.
        return (upper, method) if slope <= upper else NO_BOUND

    def _slope(self, net: nn.Module, x: Tensor, residual: Tensor) -> Tensor:
        r""":math:`\langle R, \phi(x; W)\rangle/\theta(W)`, invariant to rescaling of layers."""
        return (residual * net(x)).sum() / self._size(net, x)

    def _size(self, net: nn.Module, x: Tensor) -> Tensor:
        """The minimum of θ over rescalings of the layers."""
        return self._theta(net, x) if self.regularizer == "path" else product_of_norms(net)

    def _search(self, x: Tensor, residual: Tensor) -> nn.Module:
        """The steepest subnetwork found, balanced, with θ = 1."""
        found = [self._climb(self._make(x), x, residual) for _ in range(self.restarts)]

        @torch.no_grad()
        def slope(net: nn.Module) -> float:
            return float((residual * outputs(net, x, self.batch_size)).sum() / self._size(net, x))

        return max(found, key=slope)

    def _climb(self, net: nn.Module, x: Tensor, residual: Tensor) -> nn.Module:
        # Scaled to order one, so that the optimizer's tolerances are relative.
        size = float(residual.norm()) * float(x.norm()) or 1.0
        self._minimize(net, x, residual, lambda x, r, share: -self._slope(net, x, r) * share / size)
        balance(net)
        self._scale(net, 1 / float(self._size(net, x).detach()))
        return net

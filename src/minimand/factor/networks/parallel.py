"""Copies of a positively homogeneous network in parallel, as many as the data ask for."""

import copy
import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ...errors import OptionError, ShapeError, require_finite, require_positive
from ...operators.spectral import certified_norm_sq
from ...solvers.base import require_count
from ...solvers.iterate import iterate
from ..certificate import Certificate, Status, judge
from .homogeneous import probe_input, require_homogeneous
from .regularisers import factor_norms, product_of_norms, smooth_surrogate, weight_decay

__all__ = ["ParallelNetwork"]

_REGULARISERS: dict[str, Callable[[nn.Module], Tensor]] = {
    "product": product_of_norms,
    "surrogate": smooth_surrogate,
    "weight_decay": weight_decay,
}


class ParallelNetwork(nn.Module):
    r"""A sum of subnetworks :math:`\Phi(x) = \sum_{i=1}^r \phi(x; W_i)`, regularised so that its size can be learned.

    .. math:: \min_{r, W}\; \tfrac12\|y - \Phi(X)\|^2 + \lambda\sum_{i=1}^r \theta(W_i)

    Where φ and θ are positively homogeneous of the same degree, a local minimum to which no subnetwork can be added
    with profit is global (003; Haeffele and Vidal 2017). :meth:`fit` is the meta-algorithm: descend, look for a
    subnetwork with
    :math:`\langle R, \phi(X; W)\rangle > \lambda\theta(W)` for the residual R, add it, descend again.

    The search is an ascent from random starts, so it proves nothing when it fails. The upper bound is the norm
    :math:`\|X^\top R\|` for linear subnetworks, where it is attained, and :math:`\|R\|_F\|X\|` for chains of linear
    layers and ReLUs; others have none. The status is ``CERTIFIED`` only where such a bound suffices.

    Args:
        make_subnetwork: Makes one φ with fresh random weights. It must be positively homogeneous in its parameters,
            which is checked by scaling them; a sigmoid, or a bias behind the first layer, is refused.
        lam: The weight of the regulariser.
        regulariser: ``"product"`` of the layers' norms; its smooth ``"surrogate"`` of the same degree;
            ``"weight_decay"``, for contrast: its degree is 2, so with more than two layers nothing is proved and
            :meth:`fit` only descends.
        initial: How many random subnetworks :meth:`fit` starts from.
        max_networks: How many there may be.
        restarts: Starts of the search for a new one.
        descent: L-BFGS iterations of a local descent, and of each start of a search.
        tol: The relative gap at which the status is ``CERTIFIED``.

    Attributes:
        subnetworks: The copies, a ``ModuleList``.
        certificate_: What :meth:`fit` proved.
        history_: The objective after each round of :meth:`fit`.

    >>> _ = torch.manual_seed(0)
    >>> net = ParallelNetwork(lambda: nn.Sequential(nn.Linear(2, 1, bias=False), nn.Linear(1, 1, bias=False)), lam=0.1)
    >>> x = torch.eye(2)
    >>> _ = net.fit(x, torch.tensor([[1.0], [0.0]]))
    >>> [round(v, 3) + 0.0 for v in net.predict(x).flatten().tolist()], str(net.certificate_.status)
    ([0.9, 0.0], 'CERTIFIED')
    """

    def __init__(
        self,
        make_subnetwork: Callable[[], nn.Module],
        lam: float,
        *,
        regulariser: Literal["product", "surrogate", "weight_decay"] = "product",
        initial: int = 0,
        max_networks: int = 20,
        restarts: int = 8,
        descent: int = 200,
        tol: float = 1e-3,
    ) -> None:
        super().__init__()
        require_positive("lam", lam)
        require_positive("tol", tol)
        if regulariser not in _REGULARISERS:
            raise OptionError(f"regulariser is one of {', '.join(_REGULARISERS)}, got {regulariser!r}")
        for name, count in (("max_networks", max_networks), ("restarts", restarts), ("descent", descent)):
            require_count(name, count)
        self.make_subnetwork = make_subnetwork
        self.lam, self.tol = lam, tol
        self.regulariser = regulariser
        self.initial, self.max_networks = initial, max_networks
        self.restarts, self.descent = restarts, descent
        self.subnetworks = nn.ModuleList()
        # Held in a tuple: it is a pattern, not a part of the network.
        self._pattern = (make_subnetwork(),)
        self._degree: int | None = None
        probe = probe_input(self._pattern[0])
        if probe is not None:
            self._degree = require_homogeneous(self._pattern[0], probe)
        self.certificate_: Certificate | None = None
        self.history_: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        """The sum of the subnetworks' outputs."""
        if not self.subnetworks:
            with torch.no_grad():
                return torch.zeros_like(self._pattern[0](x))
        return torch.stack([net(x) for net in self.subnetworks]).sum(0)

    @torch.no_grad()
    def predict(self, x: Tensor) -> Tensor:
        """The outputs, without gradients."""
        return self(x)

    def penalty(self) -> Tensor:
        r""":math:`\lambda\sum_i\theta(W_i)`: what a training loop adds to its loss."""
        if not self.subnetworks:
            return next(self._pattern[0].parameters()).new_zeros(())
        return self.lam * torch.stack([_REGULARISERS[self.regulariser](net) for net in self.subnetworks]).sum()

    def objective(self, x: Tensor, y: Tensor) -> Tensor:
        r""":math:`\tfrac12\|y - \Phi(x)\|^2`, summed, plus the penalty."""
        return 0.5 * (y - self(x)).square().sum() + self.penalty()

    def fit(self, x: Tensor, y: Tensor) -> "ParallelNetwork":
        """Grow from ``initial`` random subnetworks until nothing found improves, or a bound certifies the result."""
        self._check(x, y)
        self.subnetworks = nn.ModuleList(self.make_subnetwork() for _ in range(self.initial))
        self.history_ = []
        if self.initial:
            self._descend(x, y)
        self._assess(x, y)
        if self.regulariser == "weight_decay" and self._degree != 2:
            return self
        iterate(lambda state, k: self._grow(x, y), True, self.max_networks, until=lambda state, k: not state)
        return self

    def _check(self, x: Tensor, y: Tensor) -> None:
        require_finite("x", x)
        require_finite("y", y)
        shape = tuple(self.forward(x).shape)
        if shape != tuple(y.shape):
            raise ShapeError(f"the subnetworks give outputs of shape {shape}, but y has {tuple(y.shape)}")
        if self._degree is None:
            self._degree = require_homogeneous(self._pattern[0], x[:8])

    def _grow(self, x: Tensor, y: Tensor) -> bool:
        """One round: add what the last search found, descend, assess. False when there is nothing to add."""
        found, slope = self._found
        assert self.certificate_ is not None
        if self.certificate_.status is Status.CERTIFIED or slope <= self.lam * (1 + 1e-6):
            return False
        if len(self.subnetworks) >= self.max_networks:
            return False
        before = copy.deepcopy(self.subnetworks)
        with torch.no_grad():
            size = (slope - self.lam) / float(found(x).square().sum())
            for parameter in found.parameters():
                parameter.mul_(size ** (1 / self._require_degree()))
        self.subnetworks.append(found)
        self._descend(x, y)
        value = float(self.objective(x, y).detach())
        if not value < self.history_[-1] * (1 - 1e-2 * self.tol):
            if not value < self.history_[-1]:
                self.subnetworks = before
            return False
        self._assess(x, y)
        return True

    def _require_degree(self) -> int:
        assert self._degree is not None
        return self._degree

    def _descend(self, x: Tensor, y: Tensor) -> None:
        """To a local minimum; then drop what is zero and balance the rest, which changes no output."""
        parameters = list(self.subnetworks.parameters())
        optimizer = torch.optim.LBFGS(
            parameters,
            max_iter=self.descent,
            line_search_fn="strong_wolfe",
            tolerance_grad=1e-9,
            tolerance_change=1e-14,
        )

        def closure() -> Tensor:
            optimizer.zero_grad()
            value = self.objective(x, y)
            value.backward()
            return value

        optimizer.step(closure)
        optimizer.zero_grad()
        if self.regulariser != "weight_decay":
            self._tidy()

    @torch.no_grad()
    def _tidy(self) -> None:
        sizes = [float(product_of_norms(net)) for net in self.subnetworks]
        kept = [net for net, size in zip(self.subnetworks, sizes, strict=True) if size > 1e-8 * max(sizes)]
        self.subnetworks = nn.ModuleList(kept)
        for net in kept:
            norms = factor_norms(net)
            mean = norms.log().mean().exp()
            layers = [layer for layer in net.modules() if list(layer.parameters(recurse=False))]
            for layer, norm in zip(layers, norms, strict=True):
                for parameter in layer.parameters(recurse=False):
                    parameter.mul_(mean / norm)

    def _assess(self, x: Tensor, y: Tensor) -> None:
        """Search for a new subnetwork, and write down what is known."""
        residual = (y - self.predict(x)).detach()
        self._found = self._search(x, residual)
        value = float(self.objective(x, y).detach())
        self.history_.append(value)
        matched = self.regulariser != "weight_decay" or self._degree == 2
        upper, method = _upper_bound(self._pattern[0], x, residual) if matched else (math.inf, "degrees differ")
        Y, R = y.double(), residual.double()
        inner, square = float((Y * R).sum()), float(R.square().sum())
        scale = inner / square if square > 0 else 0.0
        scale = max(min(scale, self.lam / upper), 0.0) if upper > 0 else max(scale, 0.0)
        excess = float(self._found[0](x).detach().norm()) * (2 * self.tol * value) ** 0.5
        self.certificate_ = judge(
            gap=value - (scale * inner - 0.5 * scale**2 * square),
            objective=value,
            polar_lower=self._found[1],
            polar_upper=max(upper, self._found[1]),
            lam=self.lam + excess,
            tol=self.tol,
            method=method,
        )

    def _search(self, x: Tensor, residual: Tensor) -> tuple[nn.Module, float]:
        r"""The steepest subnetwork found: :math:`\max\langle R, \phi(x; W)\rangle` with every layer of norm one."""
        best: tuple[nn.Module, float] | None = None
        for _ in range(self.restarts):
            trial = self._climb(self.make_subnetwork(), x, residual)
            if best is None or trial[1] > best[1]:
                best = trial
        assert best is not None
        return best

    def _climb(self, net: nn.Module, x: Tensor, residual: Tensor) -> tuple[nn.Module, float]:
        optimizer = torch.optim.LBFGS(net.parameters(), max_iter=self.descent, line_search_fn="strong_wolfe")
        # Scaled to be of order one, so that the optimizer's tolerances mean the same for all data.
        size = float(residual.norm()) * float(x.norm()) or 1.0

        def closure() -> Tensor:
            optimizer.zero_grad()
            value = -(residual * functional_call(net, _normalised(net), (x,))).sum() / size
            value.backward()
            return value

        optimizer.step(closure)
        optimizer.zero_grad()
        with torch.no_grad():
            for (_, parameter), value in zip(net.named_parameters(), _normalised(net).values(), strict=True):
                parameter.copy_(value)
            return net, float((residual * net(x)).sum())


def _normalised(net: nn.Module) -> dict[str, Tensor]:
    """The parameters with every layer's norm made one."""
    result: dict[str, Tensor] = {}
    for name, layer in net.named_modules():
        own = dict(layer.named_parameters(prefix=name, recurse=False))
        if own:
            norm = torch.linalg.vector_norm(torch.cat([p.flatten() for p in own.values()]))
            result |= {key: p / norm for key, p in own.items()}
    return result


def _upper_bound(pattern: nn.Module, x: Tensor, residual: Tensor) -> tuple[float, str]:
    """What no subnetwork of norm one can exceed, where the kind of network tells."""
    layers = [layer for layer in pattern.modules() if not isinstance(layer, nn.Sequential | nn.Identity | nn.Flatten)]
    linear = [layer for layer in layers if isinstance(layer, nn.Linear)]
    contracting = all(
        isinstance(layer, nn.Linear | nn.ReLU) or (isinstance(layer, nn.LeakyReLU) and abs(layer.negative_slope) <= 1)
        for layer in layers
    )
    if not contracting or not linear:
        return math.inf, "ascent from below, no bound from above"
    inputs, R = x.flatten(1).double(), residual.flatten(1).double()
    if linear[0].bias is not None:
        inputs = torch.cat([inputs, torch.ones_like(inputs[:, :1])], 1)
    room = 1 + 1e-12
    if len(linear) == len(layers):
        return room * math.sqrt(float(certified_norm_sq(R.mT @ inputs))), "spectral norm of the linear polar"
    return room * float(R.norm()) * math.sqrt(float(certified_norm_sq(inputs))), "ascent from below, norms from above"

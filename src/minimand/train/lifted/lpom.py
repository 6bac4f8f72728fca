"""Lifted proximal operator machines: block-coordinate descent on Fenchel–Young gaps."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import (
    CapabilityError,
    ChainError,
    MinimandError,
    NonFiniteError,
    NotProximal,
    OptionError,
    require_finite,
)
from ...network.nested import replace
from .base import Lifted, plain_tensor
from .blocks import GraphBlocks
from .chain import LayerChain, check_modules, parse
from .gradient import LiftedGraph, update_statistics
from .losses import LOSSES, Loss
from .maps import AffineMap
from .options import Recipe
from .runs import MonotoneRun, OptimizerRun, Run
from .sweeps import DualSweep, LPOMVariables
from .variables import plainly
from .weights import Direction, weight_direction

__all__ = ["LPOM"]

SWEEPS = ("gauss_seidel", "jacobi")
#: Adam's rate in the fast mode on networks that are not chains; it decays to zero.
GRAPH_RATE = 0.01


class LPOM(Lifted[LPOMVariables]):
    r"""Lifted proximal operator machine ([Lin2019]; Li, Fang, Lin, *LPOM*, AAAI 2019).

    With :math:`z_k = A_k X_k + b_k`, the activations :math:`X_1, …, X_n` become variables of

    .. math::

        F(W, X) = \ell(X_n, Y) + \sum_k \mu_k \bigl( \tilde f_k(X_{k+1}) + \tilde g_k(z_k) -
        \langle X_{k+1}, z_k\rangle \bigr), \qquad
        \tilde f = \int_{\varphi(0)} \varphi^{-1}, \quad \tilde g = \int_0 \varphi .

    Each term is a Fenchel–Young gap: it is non-negative, and zero exactly where :math:`X_{k+1} = \varphi_k(z_k)`. So F
    equals the loss at a forward pass. F is convex in each block :math:`X_k` and :math:`W_k` with the others fixed
    (Theorem 4). Blocks are minimised in turn from values of :math:`\varphi` only: no derivative, no inverse, no
    automatic differentiation.

    **Optimality conditions** ([Lin2019]): :math:`(\varphi(z_k) - X_{k+1})X_k^\top = 0` for the weights and
    :math:`\mu_{k-1}(\varphi^{-1}(X_k) - z_{k-1}) + \mu_k A_k^\top(\varphi(z_k) - X_{k+1}) \ni 0` for the
    activations. A forward pass that fits the targets satisfies both.

    **Variables carried**: the activations, as many as SGD keeps for backpropagation, and the z from which a sweep
    starts. There are no multipliers and no copies. [Lin2019] claims the memory of SGD. On 784-300-100-10 with batches
    of 128 we measure 1.37 times SGD's activations and one Gram matrix, because SGD keeps no z for ReLU and no inverses
    of preconditioners.

    **Monotone steps** (:meth:`step`). With :math:`r = \mu_k/\mu_{k-1}` and :math:`c = r\beta_k\|A_k\|^2`,
    where :math:`\beta_k` is the Lipschitz constant of :math:`\varphi_k`, the step on :math:`X_k` minimises a majoriser:

    .. math::

        X_k = \varphi_{k-1}(s), \quad s + c\,\varphi_{k-1}(s) = z_{k-1} + cX_k - rA_k^\top(\varphi_k(z_k) - X_{k+1}) .

    The step on the weights is :math:`W \leftarrow W - \beta^{-1}(\varphi(z) - X^+)^\top X(X^\top X + \varepsilon
    I)^{-1}`. It starts from an extrapolated point if that lowers F more, otherwise from W. With ``sweep="jacobi"`` all
    :math:`X_k` move at once from the old values, and :math:`c = r(\beta_k + 1)\|A_k\|^2 + 1` also majorises the
    bilinear coupling. F never rises. The fixed point of the slides (:math:`c = 0`) converges only for
    :math:`r\beta\|A\|^2 < 1`.

    **Mini-batches** (:meth:`fit`, mode ``"fast"``): see :class:`~minimand.train.lifted.sweeps.DualSweep`. The fast mode
    is not claimed to be monotone.

    **Gradients** (:meth:`backward`) for any optimizer of torch, and **graphs**: the model may be an acyclic graph of
    linear layers, convolutions, normalisations, poolings, additions, concatenations and monotone activations, with one
    or several outputs, and may end in an activation. On networks that are not chains :meth:`step` is the one of
    :class:`~minimand.train.lifted.blocks.GraphBlocks`. Masks of dropout, statistics of normalisations and the positions
    of maxima are those of the batch's forward pass. The blocks are convex while a parameter is used at most once
    between two activations. Elsewhere they need not be; a block then stays where no shorter step lowers the energy.

    Args:
        model: The network; trained in place. Other operations are refused with their path.
        mu: :math:`\mu`, one number for all layers or one per layer (on graphs: one per activation in the order of the
            forward pass, then one per output). None: 1 for :meth:`step`; for fast :meth:`fit` a geometric sequence with
            ratio ``recipe.ratio`` that is 1 at the output; for :meth:`backward` 1 at the output and tenfold with every
            activation further down.
        loss: ``"squared"`` (½‖·‖²) or ``"cross_entropy"``, summed over the batch; for several outputs also one name for
            each. Of outputs with more than two dimensions every position counts; their classes are in dimension 1.
        sweep: ``"gauss_seidel"``: one layer after the other, from output to input; ``"jacobi"``: all layers at once,
            for chains.
        recipe: Options of the mini-batch mode.
        example: An input on which a network that is not a chain can be read; None: one is made up.

    >>> import torch
    >>> net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
    >>> x = torch.tensor([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
    >>> y = torch.tensor([[0.0], [1.0], [1.0], [0.0]])
    >>> lpom = LPOM(net)
    >>> bool(abs(lpom.energy(x, y) - 0.5 * (net(x) - y).square().sum()) < 1e-6)
    True
    >>> energies = [lpom.step(x, y) for _ in range(20)]
    >>> energies == sorted(energies, reverse=True)
    True
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        mu: float | Sequence[float] | None = None,
        loss: str | Sequence[str] = "squared",
        sweep: str = "gauss_seidel",
        recipe: Recipe | None = None,
        example: Any = None,
    ) -> None:
        names = (loss,) if isinstance(loss, str) else tuple(loss)
        if not names or any(name not in LOSSES for name in names):
            raise OptionError(f"loss must be one of {', '.join(LOSSES)}, or one of them for each output, got {loss!r}")
        self.graph = LiftedGraph(model, names)
        self._example = example
        self._blocks: GraphBlocks | None = None
        super().__init__(model, mu=mu, loss=names[0], recipe=recipe)
        self._example = None
        if self.chain.layers and len(names) > 1:
            raise OptionError(f"loss has {len(names)} names, but the network has one output; give one")
        if sweep not in SWEEPS:
            raise OptionError(f"sweep must be one of {', '.join(SWEEPS)}, got {sweep!r}")
        if sweep == "jacobi" and not self.chain.layers:
            raise OptionError("sweep='jacobi' needs a chain of layers; use 'gauss_seidel' on this network")
        self.sweep = sweep
        self.dual = DualSweep(self.chain.layers)

    def _read(self, model: nn.Module) -> LayerChain:
        """The network as a chain; one without layers where it is a graph."""
        check_modules(model)
        self._terms_count = 0
        try:
            return parse(model)
        except (ChainError, NotProximal, CapabilityError):
            program = self.graph.program_of(self._example)
        self._terms_count = len(program.units) + len(program.heads)
        return LayerChain(())

    def _count(self) -> int:
        return self._terms_count or len(self.chain)

    @plainly
    def backward(self, x: Any, y: Any, *, reduction: str = "mean") -> float:
        r"""Add LPOM's gradient to ``.grad`` and return the network's loss. The weights do not move.

        After a forward pass every activation, from the outputs down, moves to the stationary point of its block while
        those below stay, :math:`X_v = \varphi_v(z_v + p_v/\mu_v)`. Here :math:`p_v` is the sum of the adjoints of the
        residuals above, each residual times its :math:`\mu`. The gradient of a weight is

        .. math:: \mu_k\bigl(\varphi_k(z_k) - X_{k+1}\bigr)X_k^\top .

        Only values of :math:`\varphi` are used. The residual times :math:`\mu_v` is carried, and the difference
        :math:`\mu_v(\varphi(z_v + p_v/\mu_v) - \varphi(z_v))` is computed without cancellation
        (:mod:`~minimand.train.lifted.changes`), so that small residuals do not underflow.

        **Limit.** The gradient tends to that of backpropagation as the ratios of upper to lower :math:`\mu` tend to 0
        and the output's :math:`\mu` to infinity. For the squared loss and an output without activation the second is
        not needed: at a finite :math:`\mu` the gradient times :math:`(1 + \mu)/\mu` has the limit. Through
        normalisations the adjoint of their derivative at the forward pass is taken, so that the limit holds there too.

        Gradients are added, as torch does: call ``optimizer.zero_grad()`` before. Running statistics are updated.

        Args:
            x: The inputs; a tuple for a network of several inputs.
            y: The targets; a tuple for a network of several outputs.
            reduction: ``"mean"``: loss and gradient are means over the samples, each of which counts the sum over its
                positions; ``"sum"``: sums.

        Raises:
            NonFiniteError: If loss or gradient are not finite; the message names the layer, and no ``.grad`` changes.

        >>> net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()
        >>> x, y = torch.randn(8, 2).double(), torch.randn(8, 1).double()
        >>> loss = LPOM(net, mu=(1e8, 1.0)).backward(x, y, reduction="sum")
        >>> ours = net[0].weight.grad.clone()
        >>> net.zero_grad()
        >>> (0.5 * (net(x) - y).square().sum()).backward()
        >>> torch.allclose(2 * ours, net[0].weight.grad, atol=1e-6)  # (1 + μ)/μ = 2
        True
        """
        x, y = (replace(given, Tensor, plain_tensor) for given in (x, y))
        return self.graph.backward(x, y, self._graph_mu(), reduction)

    def _graph_mu(self) -> tuple[float, ...] | None:
        """The given μ of the activations and outputs of the graph."""
        if self._given_mu is None or not self.chain.layers:
            return self._given_mu
        top = len(self.chain) - 1
        # Between two linear layers the graph has no variable.
        return tuple(m for k, m in enumerate(self._given_mu) if k == top or not self.chain.layers[k].unit.linear)

    def step(self, x: Any, y: Any) -> float:
        """Sweep once over all blocks, weights included, and return the energy afterwards; see :meth:`Lifted.step`."""
        return super().step(x, y) if self.chain.layers else self._graph_step(x, y)

    def energy(self, x: Any, y: Any) -> float:
        """The energy at the auxiliary variables of the last step's batch; for any other batch, at its forward pass."""
        return super().energy(x, y) if self.chain.layers else self._graph_energy(x, y)

    @plainly
    def _graph_step(self, x: Any, y: Any) -> float:
        fresh = not (self._blocks is not None and self._is_same_batch(x, y))
        blocks = self._graph_blocks(x, y) if fresh or self._blocks is None else self._blocks
        self._blocks = None
        kept = {name: parameter.detach().clone() for name, parameter in blocks.batch.parameters.items()}
        try:
            blocks.sweep()
            blocks.move_weights()
            terms = list(blocks.terms())
            worst = max(terms, key=lambda term: math.inf if math.isnan(term[1]) else term[1])
            if not math.isfinite(sum(value for _, value in terms)):
                raise NonFiniteError(f"{worst[0]} of the energy is {worst[1]}; lower mu or scale the inputs")
        except (MinimandError, torch.linalg.LinAlgError) as error:  # type: ignore[attr-defined]
            for name, parameter in blocks.batch.parameters.items():
                parameter.data.copy_(kept[name])
            raise NonFiniteError(f"step stopped and restored the weights from before it: {error}") from None
        if fresh:
            update_statistics(blocks.batch.tape)
        self._blocks = blocks
        self._remember(x, y)
        return sum(value for _, value in terms)

    @plainly
    def _graph_energy(self, x: Any, y: Any) -> float:
        same = self._blocks is not None and self._is_same_batch(x, y)
        return (self._blocks if same and self._blocks is not None else self._graph_blocks(x, y)).energy()

    def _graph_blocks(self, x: Any, y: Any) -> GraphBlocks:
        x, y = (replace(given, Tensor, plain_tensor) for given in (x, y))
        batch = self.graph.forward(x, y)
        return GraphBlocks(batch, self.graph.weights(batch.program, self._mu))

    def _run(self, mode: str, optimizer: torch.optim.Optimizer | None) -> Run:
        if self.chain.layers or optimizer is not None:
            return super()._run(mode, optimizer)
        if mode != "fast":
            return MonotoneRun(self)
        # A loss is summed over positions and features, and Adam's steps do not depend on its scale.
        made = torch.optim.Adam(self.model.parameters(), lr=GRAPH_RATE * self.recipe.rate)
        return OptimizerRun(self, made, decay=True)

    @plainly
    def _network_loss(self, x: Any, y: Any) -> float:
        return super()._network_loss(x, y) if self.chain.layers else self.graph.forward(plain_tensor(x), y).loss

    def _start(self, xs: list[Tensor], zs: list[Tensor], maps: list[AffineMap], loss: Loss) -> LPOMVariables:
        return LPOMVariables(xs, maps, loss, zs)

    def _terms(self, v: LPOMVariables) -> Iterator[Tensor]:
        yield v.loss.value(v.output)
        for k, affine in enumerate(v.maps):
            yield self.mu[k] * affine.layer.unit.gap(v.xs[k + 1], v.zs[k])

    def _sweep(self, v: LPOMVariables) -> None:
        if self.sweep == "jacobi":
            old = list(v.xs)
            v.xs[-1] = self._output(v, extra=1.0)
            v.xs[1:-1] = [self._majorized(v, k, old[k + 1], 1.0, 1.0) for k in range(1, len(v.maps))]
            v.zs[1:] = [affine.apply(x) for affine, x in zip(v.maps[1:], v.xs[1:-1], strict=True)]
            return
        v.xs[-1] = self._output(v)
        for k in range(len(v.maps) - 1, 0, -1):
            v.xs[k] = self._majorized(v, k, v.xs[k + 1])
            v.zs[k] = v.maps[k].apply(v.xs[k])

    def _output(self, v: LPOMVariables, extra: float = 0.0) -> Tensor:
        """The minimiser over the output; ``extra`` times μ weights the distance to its present value."""
        center = (v.zs[-1] + extra * v.output) / (1 + extra)
        return v.loss.prox(center, 1.0 / (self.mu[-1] * (1 + extra)))

    def _majorized(self, v: LPOMVariables, k: int, above: Tensor, coupling: float = 0.0, extra: float = 0.0) -> Tensor:
        r"""The minimiser over :math:`X_k` of the majoriser with :math:`c = r(\beta + coupling)\|A\|^2 + extra`."""
        affine, lower = v.maps[k], v.maps[k - 1].layer.unit
        upper = affine.layer.unit
        r = self.mu[k] / self.mu[k - 1]
        c = r * (upper.slope + coupling) * affine.norm_sq() + extra
        pull = affine.adjoint(upper.residual(above, v.zs[k]))
        return lower.resolve(v.zs[k - 1] + c * v.xs[k] + r * pull, c)

    def _residuals(self, v: LPOMVariables) -> Iterator[tuple[Tensor, Tensor]]:
        for k, affine in enumerate(v.maps):
            yield v.xs[k], affine.layer.unit.residual(v.xs[k + 1], v.zs[k])

    def _move_weights(self, v: LPOMVariables) -> None:
        """Step from the extrapolated weights if that lowers the layer's gap more than a step from the present ones."""
        now = [affine.layer.parameters() for affine in v.maps]
        weight = v.count / (v.count + 3)
        for k, affine in enumerate(v.maps):
            layer, target = affine.layer, v.xs[k + 1]
            if layer.frozen:
                continue
            self._regress(v, k, v.zs[k])
            v_plain = layer.parameters()
            z_plain = affine.apply(v.xs[k])
            if v.before is not None and weight > 0:
                ahead = now[k] + weight * (now[k] - v.before[k])
                layer.assign(ahead)
                self._regress(v, k, affine.apply(v.xs[k]))
                z_ahead = affine.apply(v.xs[k])
                if bool(layer.unit.gap(target, z_ahead) <= layer.unit.gap(target, z_plain)):
                    v.zs[k] = z_ahead
                    continue
                layer.assign(v_plain)
            v.zs[k] = z_plain
        self._move_norms(v)
        v.before = now
        v.count += 1

    def _move_norms(self, v: LPOMVariables) -> None:
        """One majorised step on scale and shift of every batch normalisation."""
        for k, affine in enumerate(v.maps):
            unit = affine.layer.unit
            residual = unit.residual(v.xs[k + 1], v.zs[k]) / unit.slope
            found = None if affine.layer.frozen else affine.norm_direction(v.xs[k], residual, self.step_ridge)
            if found is None:
                continue
            for parameter, change in zip(affine.layer.norm_parameters(), found, strict=True):
                require_finite(f"the normalisation's update of {affine.layer.path}", change)
                parameter.add_(change)
            v.maps[k] = affine.renormalized()
            v.zs[k] = v.maps[k].apply(v.xs[k])

    def _directions(self, v: LPOMVariables, damping: Sequence[float], block: int | None) -> list[Direction | None]:
        found = super()._directions(v, damping, block)
        for k, affine in enumerate(v.maps):
            direction = found[k]
            if direction is not None and affine.layer.norm_parameters():
                residual = affine.layer.unit.residual(v.xs[k + 1], v.zs[k])
                found[k] = direction._replace(norm=affine.norm_direction(v.xs[k], residual, damping[k]))
        return found

    def _regress(self, v: LPOMVariables, k: int, z: Tensor) -> None:
        """One majorised step from the layer's present parameters, at which its z is given."""
        affine = v.maps[k]
        unit = affine.layer.unit
        residual = unit.residual(v.xs[k + 1], z) / unit.slope
        direction = weight_direction(affine, v.xs[k], residual, self.step_ridge)
        affine.layer.assign(affine.layer.parameters() + direction.dense())

    def _minibatch(self, v: LPOMVariables, damping: Sequence[float]) -> list[Direction | None]:
        self.dual.run(v, self.mu, self.sweep, self.recipe.sweeps)
        return self._directions(v, damping, self.recipe.block)

    def _before_fit(self) -> None:
        super()._before_fit()
        self.dual.reset()

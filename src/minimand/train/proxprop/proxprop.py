"""Proximal backpropagation for any torch optimizer: one linear solve per layer and step, not a ``solve()``."""

import dataclasses
import logging
import math
import warnings
from collections.abc import Sequence
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ...errors import CapabilityError, NonFiniteError, OptionError, Sealed, ShapeError
from .directions import Attachment, GramCache
from .layers import CallWatch, LayerHooks, discover, is_trained
from .options import GramRule, ProxPropOptions, check_keys

__all__ = ["ProxProp"]

_KEY = "minimand.proxprop"
_log = logging.getLogger("minimand")


class ProxProp(Sealed):
    r"""Implicit instead of explicit gradient steps on the weights of linear layers, for any torch optimizer.

    A layer with inputs :math:`A` (one row per sample and position, or per patch of a convolution, with a column of ones
    for a trained bias) takes the proximal step

    .. math::
        \theta^+ = \operatorname*{argmin}_\theta \tfrac12\|A\theta^\top - z^{+}\|^2
        + \tfrac{1}{2\tau_\theta}\|\theta - \theta^k\|^2,

    whose direction is the preconditioned gradient :math:`G(A^\top A + I/\tau_\theta)^{-1}`. ``optimizer.step()`` writes
    it to ``.grad`` in place of the gradient :math:`G`, before the optimizer reads it. :math:`G` is ``.grad`` at that
    moment: accumulated, averaged over processes, unscaled, clipped. :math:`A^\top A` is the *sum* over all rows that
    contributed to ``.grad`` since the last step or ``zero_grad``, over micro-batches and processes.

    Args:
        model: A network with Linear or Conv1d to Conv3d layers. Other modules keep plain gradients; the log lists them.
            A parameter shared between layers raises an error; a layer that is called several times stacks its rows.
        tau_theta: :math:`\tau_\theta > 0`. Small values give nearly :math:`\tau_\theta` times the plain gradient.
            The attribute ``tau_theta`` can be set while training. The key ``tau_theta`` of a parameter group wins.
        method: ``"exact"`` or ``"auto"``: a Cholesky factor of the Gram matrix of rows or columns, whichever are fewer.
            ``"cg"``: conjugate gradients from zero for every output unit; every iterate descends (Proposition 5).
        cg_iters: The largest number of iterations of ``"cg"``.
        cg_tol: ``"cg"`` stops early once every unit's residual is at most this fraction of its gradient.
        gram: How a convolution's Gram matrix is computed: ``"exact"``, ``"subsampled"``, ``"cached"``, or a rule such
            as ``CachedGram(every=20)``. Linear layers always use the exact one.
        skip_last: Keep plain gradients for the last layer, as in the paper: the one that the forward pass calls last.
            It is found by a run on made-up inputs; if none runs, by the first pass that is differentiated.
        include: Patterns such as ``"blocks.*.fc"``: only layers whose path matches one are preconditioned.
        exclude: Patterns of layers that keep plain gradients.
        fused: Compute the direction in the backward pass, without the gradient if there are fewer rows than columns.
            ``.grad`` holds the direction right after ``backward``; clipping then clips the direction, and a penalty on
            a weight is added to it. A second backward pass before the step raises an error.
        process_group: The processes whose rows are summed. ``"auto"``: all; None: this process alone.

    Source: [Frerix2018], Algorithm 2, eqs. 7–16.

    >>> model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.ReLU(), nn.Linear(4, 2))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    >>> prox = ProxProp(model, tau_theta=2.0).attach(optimizer)
    >>> A = torch.randn(8, 3)
    >>> model(A).square().sum().backward()
    >>> G = model[0].weight.grad.clone()
    >>> optimizer.step()
    >>> torch.allclose(model[0].weight.grad @ (A.T @ A + torch.eye(3) / 2.0), G, rtol=1e-3)
    True
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        tau_theta: float = 1.0,
        method: Literal["auto", "exact", "cg"] = "auto",
        cg_iters: int = 3,
        cg_tol: float | None = None,
        gram: str | GramRule = "exact",
        skip_last: bool = True,
        include: str | Sequence[str] | None = None,
        exclude: str | Sequence[str] | None = None,
        fused: bool = False,
        process_group: dist.ProcessGroup | Literal["auto"] | None = "auto",
    ) -> None:
        options = ProxPropOptions(tau_theta, method, cg_iters, cg_tol, gram, skip_last, include, exclude, fused)
        if process_group not in ("auto", None) and not isinstance(process_group, dist.ProcessGroup):
            raise OptionError(f'process_group must be "auto", None or a process group, got {process_group!r}')
        if not isinstance(model, nn.Module):
            raise CapabilityError(f"ProxProp takes an nn.Module, got {type(model).__name__}")
        self._model, self._alone, self._shared = model, process_group is None, Attachment(options)
        self._group = None if isinstance(process_group, str) else process_group
        self._discover()
        self._caches = {path: GramCache() for path in self._layers}
        self._hooked: dict[str, LayerHooks] = {}
        self._skipped_grads: list[tuple[Tensor, Tensor]] = []
        self._handles, self._warned = list[Any](), set[str]()

    def _discover(self) -> None:
        self._layers, last, self._expected, self._others = discover(self._model, self._shared.options)
        self._shared.last, self._shared.latest, self._stepped = last, None, False
        self._shared.undecided = self._shared.options.skip_last and self._expected is None

    @property
    def tau_theta(self) -> float:
        r"""The present :math:`\tau_\theta`; a new value takes effect at the next step."""
        return self._shared.options.tau_theta

    @tau_theta.setter
    def tau_theta(self, value: float) -> None:
        self._shared.options = dataclasses.replace(self._shared.options, tau_theta=value)

    @property
    def layers(self) -> tuple[str, ...]:
        """The paths of the layers with proximal steps: trained ones that the forward pass calls.

        Until the first step these are the calls of a run on made-up inputs, or all layers if none runs.
        """
        called = {path for path, hooks in self._hooked.items() if hooks.called}
        called |= set() if self._stepped else set(self._layers) if self._expected is None else self._expected
        paths = called & self._layers.keys() - {self._shared.last}
        return tuple(path for path, (module, _) in self._layers.items() if path in paths and is_trained(module))

    @property
    def plain(self) -> dict[str, str]:
        """The modules with plain gradients, by path, with their types; includes the last layer."""
        listed = self.layers
        rest = {path: module for path, module in self._model.named_modules() if path not in listed}
        kinds = {path: type(module).__name__ for path, module in rest.items() if is_trained(module)}
        return kinds | ({} if self._shared.last is None else {self._shared.last: "the last layer"})

    def __repr__(self) -> str:
        state = "attached" if self._hooked else "not attached"
        return f"ProxProp(tau_theta={self.tau_theta:g}, layers={list(self.layers)}, {state})"

    def attach(self, optimizer: Optimizer) -> Self:
        """Register hooks on the layers and the optimizer, and return ``self``."""
        shared = self._shared
        if self._hooked:
            raise OptionError("this ProxProp is attached already; call detach() before attaching it again")
        if not isinstance(optimizer, Optimizer):
            raise CapabilityError(f"attach takes a torch.optim.Optimizer, got {type(optimizer).__name__}")
        hooks = optimizer._optimizer_step_pre_hooks.values()
        if any(isinstance(getattr(hook, "__self__", None), ProxProp) for hook in hooks):
            raise OptionError("this optimizer has a ProxProp already; detach it, or give one ProxProp all layers")
        self._discover()
        self._check_groups(optimizer)
        owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
        named = [(f"{path}.{n}", p) for path, (m, _) in self._layers.items() for n, p in m._parameters.items()]
        missing = [name.lstrip(".") for name, p in named if p is not None and p.requires_grad and id(p) not in owned]
        if missing:
            remedy = "build it from the model's parameters, or pass ProxProp the submodule that it trains"
            raise OptionError(f"the optimizer does not own {', '.join(missing)}; {remedy}")
        several = not self._alone and dist.is_available() and dist.is_initialized()
        shared.distributed = several and dist.get_world_size(self._group) > 1
        if shared.distributed and shared.options.fused:
            raise OptionError("fused=True works in one process only; use fused=False, which sums the Gram matrices")
        shared.optimizer = optimizer
        self._caches = {path: self._caches.get(path, GramCache()) for path in self._layers}
        for path, (module, known) in self._layers.items():
            self._hooked[path] = LayerHooks(path, module, known, shared, self._caches[path])
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_state_dict_post_hook(lambda _, state: state | {_KEY: self.state_dict()}),
            optimizer.register_load_state_dict_pre_hook(self._load_with),
        ]
        for path, other in self._others.items() if shared.undecided else ():
            self._handles.append(other.register_forward_pre_hook(CallWatch(shared, path)))
        if not self.layers:
            _log.warning(
                "ProxProp: no step is implicit until one is unfrozen: %s", ", ".join(map(_named, self._layers))
            )
        plain = [f"{path or 'the model'} ({kind})" for path, kind in self.plain.items() if path != shared.last]
        if plain:
            _log.warning("ProxProp: plain gradients for %s", ", ".join(plain))
        return self

    def _check_groups(self, optimizer: Optimizer) -> None:
        check_keys(optimizer, {path: m._parameters.values() for path, (m, _) in self._layers.items()})

    def detach(self) -> None:
        """Remove all hooks. In fused mode ``.grad`` keeps a direction that it holds."""
        for hook in (*self._hooked.values(), *self._handles):
            hook.remove()
        self._hooked, self._handles, self._skipped_grads, self._shared.optimizer = {}, [], [], None
        self._stepped = False

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._precondition(optimizer)
            return None

        def evaluate() -> Any:  # LBFGS evaluates several times per step.
            self._after_step(evaluated=True)
            loss = closure()
            self._precondition(optimizer)
            return loss

        return args[:1], {**kwargs, "closure": evaluate}

    @torch.no_grad()
    def _precondition(self, optimizer: Optimizer) -> None:
        self._check_groups(optimizer)
        hooked = [layer for layer in self._hooked.values() if not layer.is_last]
        active = [layer for layer in hooked if any(p.grad is not None for p in layer.trained.values())]
        for layer in active:
            layer.drop_stale()
            if self._shared.distributed:
                layer.rows = layer.rows or layer.new_rows()
                layer.rows.reduce(layer.module.weight.device, self._group)
        unseen = {layer.path for layer in active if layer.rows is None and not layer.called} - self._warned
        self._warned |= unseen
        if unseen:
            named = ", ".join(path or "the model" for path in sorted(unseen))
            _log.warning("ProxProp: plain gradients for %s, whose forward is never called", named)
        # A sum is cheaper than a test of all entries, but it may overflow: then test the entries.
        owned = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        doubtful = [p for p in owned if not torch.isfinite(p.grad.sum())]
        bad = {id(p) for p in doubtful if not torch.isfinite(p.grad.to_dense()).all()}
        origin = ""
        if bad:
            paths = [name.rpartition(".")[0] for name, p in self._model.named_parameters() if id(p) in bad]
            entered = [layer.path for layer in active if layer.rows and not math.isfinite(layer.rows.inputs)]
            origin = f"the gradient of {_named(paths[-1]) if paths else 'a parameter outside of the model'}"
            origin = f"the input of {_named(entered[0])}" if entered else origin
        for layer in active:
            try:
                if not origin and not self._shared.options.fused and layer.rows and layer.rows.count:
                    layer.precondition()
            except NonFiniteError:
                origin = f"the input of {_named(layer.path)}"
        if origin:
            why = f"{origin} holds NaN or Inf; lower the learning rate or clean the data"
            warnings.warn(f"ProxProp skips this step: {why}", RuntimeWarning, stacklevel=2)
            # Without gradients the optimizer changes neither parameters nor its state.
            for parameter in owned:
                self._skipped_grads.append((parameter, parameter.grad))
                parameter.grad = None

    def _after_step(self, *_: Any, evaluated: bool = False) -> None:
        """Put the gradients of a skipped step back, and discard all rows."""
        taken = not self._skipped_grads and not evaluated
        for parameter, grad in self._skipped_grads:
            parameter.grad = grad if parameter.grad is None else parameter.grad
        self._skipped_grads = []
        for layer in self._hooked.values():
            if taken and layer.rows is not None:
                vars(layer.cache).update(layer.rows.renewed)
            layer.forget()
        self._shared.steps, self._stepped = self._shared.steps + taken, self._stepped or taken

    def state_dict(self) -> dict[str, Any]:
        """Steps taken, τθ, cached Gram matrices, layers that need float64; without rows accumulated since the step."""
        grams = {path: (cache.mean, cache.rows) for path, cache in self._caches.items() if cache.mean is not None}
        kept = {"turn": self._shared.steps, "tau_theta": self.tau_theta, "layers": self._shapes(), "grams": grams}
        return kept | {"wide": [path for path, cache in self._caches.items() if cache.wide]}

    def _shapes(self) -> dict[str, list[int]]:
        """The shapes of the layers' weights, by which a saved state is matched to its network."""
        return {path: list(module.get_parameter("weight").shape) for path, (module, _) in self._layers.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state from :meth:`state_dict`, including τθ."""
        missing = sorted({"turn", "tau_theta", "grams"} - set(state if isinstance(state, dict) else ()))
        if missing:
            raise OptionError(f"the saved state lacks {', '.join(missing)}; pass the result of ProxProp.state_dict()")
        saved, own = state.get("layers", self._shapes()), self._shapes()
        if saved != own or not state["grams"].keys() <= own.keys():
            raise ShapeError(f"the saved state is from another network: its weights are {saved}, here they are {own}")
        self.tau_theta, self._shared.steps = float(state["tau_theta"]), int(state["turn"])
        for path, cache in self._caches.items():
            mean, cache.rows = state["grams"].get(path, (None, 0))
            cache.mean = None if mean is None else mean.clone().to(self._layers[path][0].get_parameter("weight").device)
            cache.metric, cache.wide = None, path in state.get("wide", ())

    def _load_with(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        if _KEY in state:
            self.load_state_dict(state[_KEY])
        return {key: value for key, value in state.items() if key != _KEY}


def _named(path: str) -> str:
    return f"layer '{path}'" if path else "the model"

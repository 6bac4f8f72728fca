"""Proximal backpropagation for any torch optimizer: one linear solve per layer and step, not a ``solve()``."""

import dataclasses
import itertools
import logging
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ...errors import CapabilityError, NonFiniteError, OptionError, Sealed, ShapeError
from .directions import Attachment, CallWatch, GramCache
from .layers import GraphHooks, LayerHooks, WeightUnit, local
from .maps import discover, is_trained
from .options import (
    IN_BACKWARD,
    GramRule,
    ProxPropOptions,
    Tau,
    TauSchedule,
    check_keys,
    check_optimizers,
    match,
    parameters_of,
    unwrapped,
)

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
        model: A network. Linear, convolutions, transposed convolutions, ``nn.MultiheadAttention`` (its projections),
            recurrent layers and cells, and the ``Conv1D`` of transformers are preconditioned. Other modules keep plain
            gradients; the log lists them. A layer that is called several times stacks its rows, and so do layers of
            the same kind that share weight and bias; a layer tied to an embedding keeps its plain gradient.
        tau_theta: :math:`\tau_\theta > 0`, absolute; or :class:`Relative`; or a dictionary of patterns of paths with
            such values, of which the last that matches counts (1.0 if none does). Small values give nearly
            :math:`\tau_\theta` times the plain gradient. The attribute ``tau_theta`` can be set while training, and
            :meth:`tau_schedule` is for torch's schedulers. The key ``tau_theta`` of a parameter group wins.
        method: ``"exact"`` or ``"auto"``: a Cholesky factor of the Gram matrix of rows or columns, whichever are fewer.
            ``"cg"``: conjugate gradients from zero for every output unit; every iterate descends (Proposition 5).
        cg_iters: The largest number of iterations of ``"cg"``.
        cg_tol: ``"cg"`` stops early once every unit's residual is at most this fraction of its gradient.
        gram: How a Gram matrix is computed: ``"exact"``, ``"subsampled"``, ``"cached"``, or a rule such as
            ``CachedGram(every=20)``. Subsampling concerns convolutions only; other layers use all rows.
        skip_last: Keep plain gradients for the last layer, as in the paper: the one that the forward pass calls last.
            It is found by a run on made-up inputs; if none runs, by the first pass that is differentiated.
        include: Patterns such as ``"blocks.*.fc"``: only layers whose path matches one are preconditioned.
        exclude: Patterns of layers that keep plain gradients.
        fused: Compute the direction in the backward pass, without the gradient if there are fewer rows than columns.
            ``.grad`` holds the direction right after ``backward``, and a penalty on a weight is added to it. A second
            backward pass before the step raises an error, and so does a step after anything else has changed
            ``.grad`` (clipping, unscaling). Linear layers and convolutions only: the others keep plain gradients.
        maps: Your own linear maps: ``{MyLinear: {"weight": "bias"}}`` says that the forward pass of ``MyLinear``
            multiplies rows by its parameter ``weight`` (outputs × inputs, or inputs × outputs) and adds ``bias``, or
            nothing (None).
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
        tau_theta: Tau | Mapping[str, Tau] = 1.0,
        method: Literal["auto", "exact", "cg"] = "auto",
        cg_iters: int = 3,
        cg_tol: float | None = None,
        gram: str | GramRule = "exact",
        skip_last: bool = True,
        include: str | Sequence[str] | None = None,
        exclude: str | Sequence[str] | None = None,
        fused: bool = False,
        maps: Mapping[type[nn.Module], Mapping[str, str | None]] | None = None,
        process_group: dist.ProcessGroup | Literal["auto"] | None = "auto",
    ) -> None:
        options = ProxPropOptions(
            tau_theta, method, cg_iters, cg_tol, gram, skip_last, include, exclude, fused, {} if maps is None else maps
        )
        if process_group not in ("auto", None) and not isinstance(process_group, dist.ProcessGroup):
            raise OptionError(f'process_group must be "auto", None or a process group, got {process_group!r}')
        if not isinstance(model, nn.Module):
            raise CapabilityError(f"ProxProp takes an nn.Module, got {type(model).__name__}")
        self._model, self._alone = model, process_group is None
        self._shared = Attachment(options, TauSchedule(options.tau_theta))
        self._group = None if isinstance(process_group, str) else process_group
        self._caches: dict[str, GramCache] = {}
        self._units: dict[str, WeightUnit] = {}
        self._hooks: list[LayerHooks | GraphHooks] = []
        self._skipped_grads: list[tuple[Tensor, Tensor]] = []
        self._handles, self._warned = list[Any](), set[str]()
        self._discover()

    def _discover(self) -> None:
        self._found = found = discover(self._model, self._shared.options)
        self._shared.last, self._shared.latest, self._stepped = found.last, None, False
        self._shared.undecided = self._shared.options.skip_last and found.called is None
        self._weights = found.units
        self._caches = {key: self._caches.get(key, GramCache()) for key in self._weights}

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles are not attached, like those of the model."""
        gone = {"_units": {}, "_hooks": [], "_handles": [], "_skipped_grads": [], "_stepped": False}
        return vars(self) | gone | {"_shared": dataclasses.replace(self._shared, optimizers=())}

    @property
    def tau_theta(self) -> Tau | dict[str, Tau]:
        r"""The present :math:`\tau_\theta`; a new value takes effect at the next step."""
        return self._shared.tau.value

    @tau_theta.setter
    def tau_theta(self, value: Tau | Mapping[str, Tau]) -> None:
        if isinstance(value, Mapping):
            last = self._found.last
            match(value, [*self._paths(), *self._found.others, *([] if last is None else [last])])
        self._shared.tau.replace(dataclasses.replace(self._shared.options, tau_theta=value).tau_theta)

    def tau_schedule(self) -> TauSchedule:
        r"""An optimizer whose learning rates are the values of :math:`\tau_\theta`, for torch's schedulers.

        The learning rate of its group is :math:`\tau_\theta`, or the factor of a :class:`Relative`; a dictionary has
        one group per pattern. Pass it to any scheduler, and call that scheduler's ``step`` after ``optimizer.step()``.

        >>> model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> prox = ProxProp(model, tau_theta=0.8)
        >>> scheduler = torch.optim.lr_scheduler.ExponentialLR(prox.tau_schedule(), gamma=0.5)
        >>> prox.tau_schedule().step()  # in training, ProxProp does this at every step
        >>> scheduler.step()
        >>> prox.tau_theta
        0.4
        """
        self._shared.tau.scheduled = True
        return self._shared.tau

    def _paths(self) -> list[str]:
        """The paths of the layers that could have proximal steps, in the order of registration."""
        inside = {candidate.path for some in self._found.graphs.values() for candidate in some}
        return [path for path, _ in self._model.named_modules() if path in inside or path in self._found.layers]

    @property
    def layers(self) -> tuple[str, ...]:
        """The paths of the layers with proximal steps: trained ones that the forward pass calls.

        Until the first step these are the calls of a run on made-up inputs, or all layers if none runs. A module with
        several weights, such as an LSTM, is listed once; the output projection of an attention has its own path.
        """
        called = {path for unit in self._units.values() if unit.called for path in unit.paths}
        hidden = [hook for hook in self._hooks if isinstance(hook, GraphHooks) and hook.opaque]
        opaque = {unit.path for hook in hidden for unit in hook.units}
        known = self._paths()
        called |= set() if self._stepped else set(known) if self._found.called is None else self._found.called
        trained = {path for path in known if is_trained(self._model.get_submodule(path))}
        return tuple(path for path in known if path in (called & trained) - opaque - {self._shared.last})

    @property
    def plain(self) -> dict[str, str]:
        """The modules with plain gradients, by path, with their types; includes the last layer."""
        listed, named = self.layers, self._model.named_modules()
        kinds = {path: type(module).__name__ for path, module in named if path not in listed and is_trained(module)}
        return kinds | ({} if self._shared.last is None else {self._shared.last: "the last layer"})

    def __repr__(self) -> str:
        tau = f"{self.tau_theta:g}" if isinstance(self.tau_theta, float | int) else f"{self.tau_theta}"
        return f"ProxProp(tau_theta={tau}, layers={list(self.layers)}, {'' if self._units else 'not '}attached)"

    def attach(self, *optimizers: Optimizer) -> Self:
        """Register hooks on the layers and the optimizers, and return ``self``.

        Several optimizers, such as Muon for the weights and AdamW for the biases, together own all parameters of the
        layers. The first step of one that owns a parameter of a layer replaces all gradients of that layer, so clip
        before it. Optimizers that accelerate or Lightning have wrapped are unwrapped.
        """
        shared = self._shared
        if self._units:
            raise OptionError("this ProxProp is attached already; call detach() before attaching it again")
        owners = tuple(map(unwrapped, optimizers))
        self._discover()
        check_optimizers(owners, self._weights.values())
        self._check_groups(owners)
        several = not self._alone and dist.is_available() and dist.is_initialized()
        shared.distributed, shared.optimizers = several and dist.get_world_size(self._group) > 1, owners
        if shared.distributed and shared.options.fused:
            raise OptionError("fused=True works in one process only; use fused=False, which sums the Gram matrices")
        self._hook()
        for optimizer in owners:
            self._handles.append(optimizer.register_step_pre_hook(self._before_step))
            self._handles.append(optimizer.register_step_post_hook(self._after_step))
        saving, loading = owners[0].register_state_dict_post_hook, owners[0].register_load_state_dict_pre_hook
        self._handles += [saving(lambda _, state: state | {_KEY: self.state_dict()}), loading(self._load_with)]
        for path, other in self._found.others.items() if shared.undecided else ():
            self._handles.append(other.register_forward_pre_hook(CallWatch(shared, path)))
        if not self.layers:
            _log.warning(
                "ProxProp: no step is implicit until one is unfrozen: %s", ", ".join(map(_named, self._paths()))
            )
        plain = [f"{path or 'the model'} ({kind})" for path, kind in self.plain.items() if path != shared.last]
        if plain:
            _log.warning("ProxProp: plain gradients for %s", ", ".join(plain))
        return self

    def _hook(self) -> None:
        """Replace the layers' forward passes."""
        found, shared, by_weight = self._found, self._shared, dict[int, WeightUnit]()
        for key, layer in self._weights.items():
            path = layer.path
            if path in found.layers and id(layer.weight) in by_weight:
                # Layers that share weight and bias stack their rows.
                unit = by_weight[id(layer.weight)]
                unit.paths.append(path)
            else:
                unit = WeightUnit(layer, shared, self._caches[key])
                by_weight[id(layer.weight)] = self._units[key] = unit
            if path in found.layers:
                self._hooks.append(LayerHooks(path, layer.module, unit))
        for path, some in found.graphs.items():
            module, units = self._model.get_submodule(path), [self._units[layer.key] for layer in some]
            self._hooks.append(GraphHooks(path, module, units, type(module) in shared.options.maps))

    def _check_groups(self, owners: tuple[Optimizer, ...]) -> None:
        owned = {id(p): layer.path for layer in self._weights.values() for p in layer.parameters.values()}
        check_keys(owners, owned | {id(p): unit.path for unit in self._units.values() for p in unit.sharded.values()})

    def detach(self) -> None:
        """Remove all hooks. In fused mode ``.grad`` keeps a direction that it holds."""
        for hook in (*self._hooks, *self._units.values(), *self._handles):
            hook.remove()
        self._units, self._hooks, self._handles, self._skipped_grads = {}, [], [], []
        self._shared.optimizers, self._stepped = (), False

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch._C._current_graph_task_id() != -1:
            raise CapabilityError(IN_BACKWARD)
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._precondition(optimizer)
            return None

        calls = itertools.count()

        def evaluate() -> Any:  # LBFGS evaluates several times per step; rows from before the step count in the first.
            if next(calls):
                self._after_step(optimizer, evaluated=True)
            loss = closure()
            self._precondition(optimizer)
            return loss

        return args[:1], {**kwargs, "closure": evaluate}

    def _of(self, optimizer: Optimizer) -> list[WeightUnit]:
        """The units of which the optimizer owns a parameter."""
        owned = parameters_of(optimizer)
        return [unit for unit in self._units.values() if owned.keys() & set(map(id, unit.held.values()))]

    @torch.no_grad()
    def _precondition(self, optimizer: Optimizer) -> None:
        self._check_groups(self._shared.optimizers)
        active = [unit for unit in self._of(optimizer) if not unit.is_last and not unit.unused and unit.stamps()]
        for unit in active:
            unit.drop_stale()
            unit.require_gradient()
            if self._shared.distributed and unit.map is not None:
                unit.rows = unit.rows or unit.new_rows()
                unit.rows.reduce(next(iter(unit.held.values())).device, self._group)
        self._warn([unit for unit in active if unit.rows is None])
        origin = self._bad_origin(active)
        for unit in active:
            try:
                if not origin and unit.rows and unit.rows.count:
                    unit.precondition()
            except NonFiniteError:
                origin = f"the Gram matrix of {_named(unit.path)}"
        if origin:
            why = f"{origin} holds NaN or Inf; lower the learning rate or clean the data"
            warnings.warn(f"ProxProp skips this step: {why}", RuntimeWarning, stacklevel=2)
            # Without gradients the optimizer changes neither parameters nor its state.
            for parameter in parameters_of(optimizer).values():
                self._skipped_grads += [] if parameter.grad is None else [(parameter, parameter.grad)]
                parameter.grad = None

    def _warn(self, units: list[WeightUnit]) -> None:
        """Log once which layers keep plain gradients because no rows of theirs are known."""
        for called, why in ((False, "forward is never called"), (True, ".grad was not filled by a backward pass")):
            unseen = {unit.path for unit in units if unit.called == called and unit.filled()} - self._warned
            self._warned |= unseen
            if unseen:
                listed = ", ".join(path or "the model" for path in sorted(unseen))
                _log.warning("ProxProp: plain gradients for %s, whose %s", listed, why)

    def _bad_origin(self, active: list[WeightUnit]) -> str:
        """Where the first NaN or Inf is, in words; empty if all gradients are finite."""
        # A sum is cheaper than a test of all entries, but it may overflow: then test the entries.
        every = parameters_of(*self._shared.optimizers)
        grads = {key: local(p.grad) for key, p in every.items() if p.grad is not None}
        bad = {
            key for key, g in grads.items() if not torch.isfinite(g.sum()) and not torch.isfinite(g.to_dense()).all()
        }
        origin = ""
        if bad:
            paths = [name.rpartition(".")[0] for name, p in self._model.named_parameters() if id(p) in bad]
            entered = [unit.path for unit in active if unit.rows and not math.isfinite(unit.rows.inputs)]
            origin = f"the gradient of {_named(paths[-1]) if paths else 'a parameter outside of the model'}"
            origin = f"the input of {_named(entered[0])}" if entered else origin
        if any(unit.sharded for unit in self._units.values()):
            # Every process sees its own shard, and all have to skip.
            device = next(iter(grads.values())).device if grads else torch.device("cpu")
            flag = torch.tensor(float(bool(bad)), device=device)
            dist.all_reduce(flag, group=self._group)
            origin = origin or ("a gradient on another process" if float(flag) else "")
        return origin

    def _after_step(self, optimizer: Optimizer, *_: Any, evaluated: bool = False) -> None:
        """Put the gradients of a skipped step back, and discard the rows."""
        taken = not self._skipped_grads and not evaluated
        for parameter, grad in self._skipped_grads:
            parameter.grad = grad if parameter.grad is None else parameter.grad
        self._skipped_grads = []
        owned = parameters_of(optimizer)
        for unit in self._of(optimizer):
            # The unit's first step counts; its other optimizers find the direction in place.
            if taken and unit.rows is not None:
                vars(unit.cache).update(unit.rows.renewed)
                unit.cache.steps += 1
                unit.used = unit.stamps()
            unit.unused = {} if evaluated else {key: at for key, at in unit.unused.items() if key not in owned}
            unit.forget()
        self._stepped = self._stepped or taken
        if taken:
            self._shared.tau.step()  # schedulers expect a step before theirs

    def state_dict(self) -> dict[str, Any]:
        """Steps taken, τθ, cached Gram matrices, layers that need float64; without rows accumulated since the step."""
        grams = {key: (c.mean, c.rows, c.rest) for key, c in self._caches.items() if c.mean is not None}
        turns = {key: cache.steps for key, cache in self._caches.items()}
        kept = {"turn": turns, "tau_theta": self.tau_theta, "layers": self._shapes(), "grams": grams}
        return kept | {"wide": [key for key, cache in self._caches.items() if cache.wide]}

    def _shapes(self) -> dict[str, list[int]]:
        """The shapes of the layers' weights, by which a saved state is matched to its network."""
        return {key: list(layer.weight.shape) for key, layer in self._weights.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state from :meth:`state_dict`, including τθ."""
        missing = sorted({"turn", "tau_theta", "grams"} - set(state if isinstance(state, dict) else ()))
        if missing:
            raise OptionError(f"the saved state lacks {', '.join(missing)}; pass the result of ProxProp.state_dict()")
        saved, own = state.get("layers", self._shapes()), self._shapes()
        if saved != own or not state["grams"].keys() <= own.keys():
            raise ShapeError(f"the saved state is from another network: its weights are {saved}, here they are {own}")
        self.tau_theta = state["tau_theta"]
        for key, cache in self._caches.items():
            cache.load(key, state, self._weights[key].weight.device, self._weights[key].map)

    def _load_with(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        if _KEY in state:
            self.load_state_dict(state[_KEY])
        return {key: value for key, value in state.items() if key != _KEY}


def _named(path: str) -> str:
    return f"layer '{path}'" if path else "the model"

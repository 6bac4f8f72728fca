"""Layers as linear maps of their weight and bias: which layers of a model they are, and how they are found."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from ...errors import CapabilityError, OptionError
from ...geometry import ConvGeometry
from ...network import read, role
from ...network.state import is_dtensor
from ...nn.layers import SolverLayer
from ...operators.patch_grams import patch_gram, row_gram
from ...operators.patches import patches, positions_as_rows
from .options import CachedGram, GramRule, ProxPropOptions, SubsampledGram, match

__all__ = [
    "Candidate",
    "DirectMap",
    "Discovery",
    "ProductMap",
    "TransposedConvMap",
    "WeightMap",
    "direct_map",
    "discover",
    "is_hooked",
    "is_trained",
]


class WeightMap:
    """The linear map from the weight and bias of a layer to its output, its input held fixed.

    ``dual``: whether rows and output gradients can be stored instead of the Gram matrix. ``transposed``: whether the
    weight is inputs × outputs.
    """

    outputs: int
    columns: int
    groups: int = 1
    transposed: bool = False
    geometry: ConvGeometry | None = None
    dual: bool = False

    def count(self, delta: Tensor) -> int:
        """The number of rows of a call with these output gradients."""
        return delta.numel() // self.outputs

    def matrix(self, part: Tensor) -> Tensor:
        """A gradient of the weight, or of the bias, as outputs × columns."""
        return part.mT if self.transposed and part.dim() > 1 else part.reshape(len(part), -1)

    def shaped(self, matrix: Tensor, like: Tensor) -> Tensor:
        """The inverse of :meth:`matrix`."""
        return matrix.mT if self.transposed and like.dim() > 1 else matrix.reshape(like.shape)

    def rows(self, x: Tensor) -> Tensor:
        """The rows that multiply the weight, rows × columns. Requires ``groups == 1``."""
        return x.reshape(-1, self.columns) if self.geometry is None else patches(x, self.geometry).squeeze(0)

    def deltas(self, delta: Tensor) -> Tensor:
        """Output gradients as rows × outputs."""
        return delta.reshape(-1, self.outputs) if self.geometry is None else positions_as_rows(delta)

    def gram(self, x: Tensor, ones: bool, rule: GramRule, steps: int, wide: bool) -> Tensor:
        """The Gram matrix of the rows, groups × n × n. The subsample rotates with the number of ``steps`` taken."""
        if self.geometry is None:
            return row_gram(self.rows(x), ones, wide)[None]
        rule = rule.of if isinstance(rule, CachedGram) else rule
        every = min(rule.every, len(x)) if isinstance(rule, SubsampledGram) else 1
        some = x[steps % every :: rule.every] if isinstance(rule, SubsampledGram) and every > 1 else x
        return patch_gram(some, self.geometry, ones, wide) * (len(x) / len(some))


class DirectMap(WeightMap):
    """The map of a Linear, of the Conv1D of transformers, or of a convolution."""

    def __init__(self, module: Any) -> None:
        self._outer: ConvGeometry | None = None
        self.transposed = _is_gpt(module)
        if self.transposed:
            self.columns, self.outputs = module.weight.shape
        elif isinstance(module, nn.Linear):
            self.outputs, self.columns = module.out_features, module.in_features
        else:
            self.groups, self.outputs, geometry = module.groups, module.out_channels, ConvGeometry.of(module)
            self.columns = module.in_channels // module.groups * math.prod(module.kernel_size)
            # Torch applies other modes, and uneven padding, in a separate step before the convolution.
            if module.padding_mode != "zeros" or any(before != after for before, after in geometry.padding):
                self._outer, geometry = geometry, geometry.without_padding()
            self.geometry = geometry
        self.dual = self.groups == 1

    def prepare(self, x: Tensor) -> Tensor:
        """Add a batch dimension, and the padding that torch applies before the convolution; differentiable."""
        if self.geometry is None:
            return x
        x = x if x.dim() == len(self.geometry.kernel) + 2 else x.unsqueeze(0)
        return x if self._outer is None else self._outer.pad(x)

    def apply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The layer's output, bit-identical to torch's."""
        if self.geometry is not None:
            return self.geometry.convolve(x, weight, bias)
        return F.linear(x, weight.mT if self.transposed else weight, bias)

    def gradients(
        self, x: Tensor, weight: Tensor, delta: Tensor, needed: tuple[bool, bool, bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Gradients with respect to input, weight and bias, in the dtype of ``delta``."""
        x, weight, g = x.to(delta.dtype), weight.to(delta.dtype), self.geometry
        if g is None:
            left, right = rows, inputs = self.deltas(delta), self.rows(x)
            if self.transposed:
                weight, left, right = weight.mT, inputs, rows
            ahead = delta @ weight if needed[0] else None
            return ahead, left.mT @ right if needed[1] else None, rows.sum(0) if needed[2] else None
        padding = [before for before, _ in g.padding]
        shape = (g.stride, padding, g.dilation, False, [0] * len(g.kernel), g.groups)
        found: Any = torch.ops.aten.convolution_backward(delta, x, weight, [self.outputs], *shape, needed)
        # It may compute more than it was asked for.
        return tuple(one if asked else None for one, asked in zip(found, needed, strict=True))  # type: ignore[return-value]


class ProductMap(WeightMap):
    """The map of a weight by which rows are multiplied, ``x @ W.mT``, or ``x @ W`` if ``transposed``."""

    def __init__(self, shape: tuple[int, ...], transposed: bool) -> None:
        self.transposed = transposed
        self.outputs, self.columns = shape[::-1] if transposed else shape


class TransposedConvMap(WeightMap):
    """The map of a transposed convolution: a convolution at stride 1, flipped, of its input with zeros in between."""

    def __init__(self, module: Any) -> None:
        kernel, groups = module.kernel_size, module.groups
        self.groups, self.outputs = groups, module.out_channels
        self.columns = module.in_channels // groups * math.prod(kernel)
        self.geometry = ConvGeometry.build(kernel, dilation=module.dilation, groups=groups)
        self.options = tuple(module.stride), tuple(module.padding), tuple(module.dilation), tuple(kernel)

    def spread(self, x: Tensor, output: tuple[int, ...]) -> Tensor:
        """The input with stride − 1 zeros between its entries, padded for an output map of this size."""
        out, pads = x, list[int]()
        for d, (stride, padding, dilation, kernel) in enumerate(zip(*self.options, strict=True)):
            size = (x.shape[d + 2] - 1) * stride + 1
            wide = out.new_zeros(*out.shape[: d + 2], size, *out.shape[d + 3 :])
            wide.narrow(d + 2, 0, size)[(slice(None),) * (d + 2) + (slice(None, None, stride),)] = out
            reach = dilation * (kernel - 1)
            pads = [reach - padding, output[d] + padding - size, *pads]
            out = wide
        return F.pad(out, pads)

    def matrix(self, part: Tensor) -> Tensor:
        """A gradient of the weight, or of the bias, as outputs × columns."""
        if part.dim() == 1:
            return part[:, None]
        grouped = part.unflatten(0, (self.groups, -1)).flip(tuple(range(3, part.dim() + 1)))
        return grouped.transpose(1, 2).reshape(self.outputs, -1)

    def shaped(self, matrix: Tensor, like: Tensor) -> Tensor:
        """The inverse of :meth:`matrix`."""
        if like.dim() == 1:
            return matrix[:, 0]
        shape = (self.groups, like.shape[1], like.shape[0] // self.groups, *like.shape[2:])
        return matrix.reshape(shape).transpose(1, 2).flip(tuple(range(3, like.dim() + 1))).reshape(like.shape)


def _is_gpt(module: nn.Module) -> bool:
    return f"{type(module).__module__}.{type(module).__qualname__}" == "transformers.pytorch_utils.Conv1D"


def direct_map(module: nn.Module) -> DirectMap | None:
    """The map of a Linear or convolution whose class does not override its forward; None for other modules."""
    if _is_gpt(module):
        return DirectMap(module)
    for kind in (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d):
        own = getattr(type(module), "_conv_forward", None) is getattr(kind, "_conv_forward", None)
        if isinstance(module, kind) and own and type(module).forward is kind.forward:
            return DirectMap(module)
    return None


class Candidate(NamedTuple):
    """A weight that one call multiplies rows by, with its bias, or some of their rows: one linear system.

    ``path`` and ``module`` are those of the owner. ``spans`` are the rows (start, stop) of weight and bias; None: all.
    ``map`` is None if the first call shows it.
    """

    path: str
    module: Any
    names: tuple[str, str | None] = ("weight", "bias")
    spans: tuple[tuple[int, int] | None, tuple[int, int] | None] = (None, None)
    map: WeightMap | None = None

    @property
    def key(self) -> str:
        """Its name: the path of a module with one weight, else with the weight's name and first row."""
        own = self.path if self.names[0] == "weight" else f"{self.path}.{self.names[0]}".lstrip(".")
        return own if self.spans[0] is None else f"{own}[{self.spans[0][0]}:{self.spans[0][1]}]"

    @property
    def parameters(self) -> dict[str, Tensor]:
        """By their paths: the weight, and the bias if there is one."""
        both = {f"{self.path}.{n}".lstrip("."): getattr(self.module, n) for n in self.names if n is not None}
        return {path: parameter for path, parameter in both.items() if parameter is not None}

    @property
    def weight(self) -> Tensor:
        """The whole weight of the module."""
        return next(iter(self.parameters.values()))


class Discovery(NamedTuple):
    """The layers to precondition, the last layer if it stays explicit, and the layers that the forward pass calls.

    ``graphs`` has the weights of modules whose products are found in the autograd graph, by the path of the module.
    ``called`` is None if no made-up input runs. Then the first pass that is differentiated shows which one of
    ``layers`` and ``others`` is last.
    """

    layers: dict[str, Candidate]
    graphs: dict[str, list[Candidate]]
    last: str | None
    called: set[str] | None
    others: dict[str, nn.Module]

    @property
    def units(self) -> dict[str, Candidate]:
        """All weights, by their keys."""
        return {one.key: one for some in (self.layers.values(), *self.graphs.values()) for one in some}


def candidates(path: str, module: nn.Module, maps: Mapping[type, Mapping[str, str | None]]) -> list[Candidate]:
    """The weights of a module other than a Linear or convolution that multiply rows; empty if there are none."""
    kind = type(module)
    if kind in maps:
        missing = [n for pair in maps[kind].items() for n in pair if n is not None and not hasattr(module, n)]
        if missing:
            own = ", ".join(module._parameters)
            raise OptionError(f"maps names {', '.join(missing)} of {kind.__name__}, but layer '{path}' has {own}")
        found = [Candidate(path, module, pair) for pair in maps[kind].items()]
    elif isinstance(module, nn.MultiheadAttention) and kind.forward is nn.MultiheadAttention.forward:
        e, packed = module.embed_dim, module.in_proj_weight is not None
        thirds = [(0, e), (e, 2 * e), (2 * e, 3 * e)]
        names = ["in_proj_weight"] * 3 if packed else [f"{name}_proj_weight" for name in "qkv"]
        bias, spans = "in_proj_bias", [(third if packed else None, third) for third in thirds]
        found = [Candidate(path, module, (name, bias), span) for name, span in zip(names, spans, strict=True)]
        found.append(Candidate(f"{path}.out_proj".lstrip("."), module.out_proj))
    elif isinstance(module, nn.LSTM | nn.GRU | nn.RNN | nn.RNNCellBase) and kind.forward in _RECURRENT:
        names = [name for name in module._parameters if name.startswith("weight")]
        pairs = ((n, b if hasattr(module, b := n.replace("weight", "bias")) else None) for n in names)
        found = [Candidate(path, module, pair) for pair in pairs]
    elif isinstance(module, _TRANSPOSED) and kind.forward in [known.forward for known in _TRANSPOSED]:
        found = [Candidate(path, module, map=TransposedConvMap(module))]
    else:
        found = []
    # A parametrisation computes a weight from other parameters.
    return [candidate for candidate in found if candidate.names[0] in candidate.module._parameters]


_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_RECURRENT = [kind.forward for kind in (nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell, nn.GRUCell, nn.RNNCell)]


def discover(model: nn.Module, options: ProxPropOptions) -> Discovery:
    """The layers to precondition; an error lists all unusable layers.

    A layer whose weight is used by other code than its own forward keeps plain gradients: its inputs are not seen.
    """
    graphs = {p: some for p, m in model.named_modules() if (some := candidates(p, m, options.maps))}
    inside = {c.path for some in graphs.values() for c in some}
    mapped = ((p, m, direct_map(m)) for p, m in model.named_modules() if p not in inside)
    direct = {path: Candidate(path, module, map=known) for path, module, known in mapped if known}
    if options.fused:
        graphs, inside = {}, set()
    modules = {path: layer.module for path, layer in direct.items()}
    order, elsewhere = _forward_pass(model, modules, graphs)
    foreign = (m for p, m in model.named_modules() if p not in direct and p not in inside)
    tied = {id(p) for module in foreign for p in module._parameters.values() if p is not None}
    elsewhere |= {path for path, m in modules.items() if any(id(p) in tied for p in m._parameters.values())}
    # A parametrisation computes weight or bias from other parameters.
    own = [p for p, m in modules.items() if p not in elsewhere and {"weight", "bias"} <= m._parameters.keys()]
    listed = [path for path, _ in model.named_modules() if path in inside.union(own)]
    given = (["*"] if options.include is None else options.include, options.exclude or [])
    include, exclude = (match([some] if isinstance(some, str) else some, listed) for some in given)
    if isinstance(options.tau_theta, Mapping):
        match(options.tau_theta, listed)
    kept = include - exclude
    last = order[-1] if options.skip_last and order and order[-1] in kept else None
    found = {path: direct[path] for path in own if path in kept - {last}}
    graphs = {p: left for p, some in graphs.items() if (left := [c for c in some if c.path in kept - {last}])}
    checked = [*found, *graphs]
    problems = [f"layer '{path}' {why}" for path in checked for why in _problems(model, path, path in graphs, direct)]
    if problems:
        raise CapabilityError("ProxProp cannot take this model: " + "; ".join(problems))
    others = {path: module for path, module in modules.items() if path not in found}
    alone = options.skip_last and not order and len(found) == 1 and not others and not graphs
    if (not found and not graphs) or alone:
        last = next(iter(found), last)
        why = f"include and exclude leave none of {', '.join(listed)}" if listed and not kept else "there is none"
        why = why if last is None else f"'{last}' is the only one and skip_last keeps it explicit"
        solvers = [path for path, module in model.named_modules() if isinstance(module, SolverLayer)]
        also = f" (of solver layers, here {', '.join(solvers)}, it takes none)" if solvers else ""
        raise OptionError(f"ProxProp needs an nn.Linear or nn.Conv1d to nn.Conv3d layer in the model, but {why}{also}")
    return Discovery(found, graphs, last, set(order) if order else None, others)


def _forward_pass(
    model: nn.Module, layers: dict[str, nn.Module], graphs: dict[str, list[Candidate]]
) -> tuple[list[str], set[str]]:
    """The layers in the order of their last calls, and those whose weight other modules use as well or instead.

    There is no order if the forward pass cannot be read.
    """
    # Running a layer that another ProxProp has replaced the forward of would count as a pass of that one.
    attached = any(is_hooked(module) for module in (*layers.values(), *map(model.get_submodule, graphs)))
    # A pass of a sharded model is a joint work of all processes.
    attached = attached or any(map(is_dtensor, model.parameters()))
    network = None if attached else read(model)
    if network is None or not network.complete:
        return [], set()
    calls = list[str]()
    for call in network.live:
        if call.path in layers and role(call) in ("linear", "conv"):
            calls.append(call.path)
        calls += [candidate.path for candidate in graphs.get(call.path, ())]
    tied = {name for shared in network.shared() if len(shared.names) > 1 for name in shared.names}
    weights = {f"{path}.weight" if path else "weight": path for path in layers}
    elsewhere = {
        weights[value.name]
        for value in network.values
        if value.source == "parameter" and value.name in weights.keys() - tied
        for call in network.readers(value)
        if network.is_live(call) and layers.get(call.path) is not layers[weights[value.name]]
    }
    return list(dict.fromkeys(reversed(calls)))[::-1], elsewhere


def is_hooked(module: nn.Module) -> bool:
    """Whether a ProxProp has replaced the module's forward pass."""
    return getattr(module.__dict__.get("forward"), "of_proxprop", False)


def _problems(model: nn.Module, path: str, graph: bool, direct: Mapping[str, Candidate]) -> list[str]:
    """What keeps a layer from proximal steps: shared or missing parameters, several devices, another forward."""
    problems, module = [], model.get_submodule(path)
    parameters = {name: p for name, p in module._parameters.items() if p is not None}
    devices = {p.device.type for p in parameters.values()}
    for name, parameter in parameters.items():
        modules = model.named_modules()
        holders = [(path, n) for path, m in modules for n, p in m._parameters.items() if p is parameter]
        if len(holders) > 1 and not _stackable([direct.get(where) for where, _ in holders]):
            where = ", ".join(f"{path}.{n}" for path, n in holders)
            problems.append(f"shares its {name} ({where}) with a layer of another kind; exclude both, or untie them")
    if "meta" in devices or any(isinstance(p, UninitializedParameter) for p in parameters.values()):
        problems.append("has no data: it is lazy or on the meta device (initialise it first)")
    elif len(devices) > 1:
        problems.append(f"is spread over the devices {', '.join(sorted(devices))} (move it to one)")
    elif any(p.is_inference() for p in parameters.values()):
        problems.append("was made in inference mode (build it outside of torch.inference_mode())")
    if any(p.is_complex() for p in parameters.values()):
        problems.append("has complex parameters (exclude it)")
    # Each process has to hold all columns of some output units, or everything.
    mixed = graph or _is_gpt(module) or getattr(module, "groups", 1) != 1
    for name, parameter in parameters.items():
        places: Any = getattr(parameter, "placements", ())
        if is_dtensor(parameter) and (mixed or not all(place.is_replicate() or place.is_shard(0) for place in places)):
            layout = ", ".join(map(str, places))
            why = "ProxProp takes DTensors that are sharded by output units, as FSDP does, of ungrouped layers"
            problems.append(f"has a {name} in the layout ({layout}): {why} (exclude it)")
    own_forward = module.__dict__.get("forward")
    # Copies of an attached module hold the forward of their class.
    if own_forward is not None and getattr(own_forward, "__func__", None) is not type(module).forward:
        other, own = "is attached to another ProxProp (detach that first)", "has a forward of its own (remove it)"
        problems.append(other if is_hooked(module) else own)
    return problems


def _stackable(holders: list[Candidate | None]) -> bool:
    """Whether all layers that hold a parameter are the same map with the same weight and bias."""
    keys = [one and (vars(one.map), [id(one.module._parameters.get(n)) for n in one.names]) for one in holders]
    return None not in keys and all(key == keys[0] for key in keys)


def is_trained(module: nn.Module) -> bool:
    """Whether a parameter of the module itself requires a gradient."""
    return any(parameter.requires_grad for parameter in module.parameters(recurse=False))

"""A suggestion of layers, solvers and iterations for a conversion within a budget of time."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..arguments import checked
from ..errors import ConversionError, MinimandError, OptionError
from ..functions import Zero
from ..network.nested import replace, tensors
from ..network.running import Inputs, bound
from ..network.state import preserved
from ..solvers import FISTA, ProxGD, ProxSG, Solver, solve, trace
from .conversion.change import apply
from .conversion.plan import LayerPlan, Plan, Rule, targets
from .conversion.planner import Planner, readings
from .convert import check_convertible
from .explain import fastest, kept
from .layers import SolverLayer
from .options import SolverOptions

__all__ = ["suggest"]

Loss = Callable[[Any], Tensor]

# Numbers of iterations to choose from; 1 is the plain layer.
_LADDER = (1, 2, 3, 4, 5, 6, 8, 10)
_REFERENCE_ITERATIONS = 100
_REPEATS, _MOST_REPEATS = 3, 12
_MEASURING = 0.05  # seconds of plain steps beyond which three are enough
# Samples on which convergence is measured.
_ROWS = 16


@checked
def suggest(model: nn.Module, batch: Any, *, budget: float = 3.0, loss: Loss | None = None) -> Plan:
    """Choose layers, solvers and iterations so that a training step takes at most ``budget`` times the plain one.

    For each layer that can be converted, the time of its solver and the share of the objective's gap that its
    iterations close are measured on the batch. Iterations go, one rung at a time, to the layer that closes the largest
    share of its gap for the time. Layers with a dropout before them get :class:`~minimand.solvers.ProxSG`, which
    samples in its place, others :class:`~minimand.solvers.ProxGD`. Finally the whole step is measured, and iterations
    are taken back while it exceeds the budget. Layers with neither an activation nor a dropout, such as the last one,
    are left. The plan prints as a table with the reasons; ``convert(model, suggest(model, batch))`` makes it so. The
    model stays as it is.

    Args:
        model: Any network.
        batch: A typical training input: a tensor, a tuple of positional or a dictionary of keyword arguments.
        budget: The time of a training step, forward and backward, relative to the plain network's; above 1.
        loss: A function of the output that returns a scalar; None: the sum of its squares.

    Raises:
        ConversionError: If the model does not run on the batch.

    >>> model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 4))
    >>> found = suggest(model, torch.randn(16, 32), budget=20.0)
    >>> set(found.converted) <= {"0", "3"}
    True
    """
    if isinstance(budget, bool) or not isinstance(budget, int | float) or not budget > 1:
        raise OptionError(f"budget must be above 1, the time of the plain step, got {budget!r}")
    check_convertible(model)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConversionError("suggest measures training steps, but no parameter of the model requires a gradient")
    found = list(tensors(bound(batch)))
    if not found:
        got = type(batch).__name__
        raise OptionError(f"batch is a tensor, or a tuple or dictionary of arguments with one, got {got}")
    if not any(tensor.numel() for tensor in found):
        raise OptionError("suggest measures time on a batch, but this one has no samples; give it a training batch")
    records = readings(model, batch)
    with torch.inference_mode(False), preserved(model):
        kinds = _kinds(model, records)
        trial = _planned(model, records, {path: _options(kind, 2) for path, kind in kinds.items()})
        linear = [path for path, layer in trial.converted.items() if _is_linear(layer)]
        if linear:
            kinds = {path: kind for path, kind in kinds.items() if path not in linear}
            trial = _planned(model, records, {path: _options(kind, 2) for path, kind in kinds.items()})
            trial.left |= dict.fromkeys(linear, "it has neither an activation nor a dropout")
        if not trial.converted:
            trial.summary = "No layer is converted: solvers gain only before an activation or after a dropout."
            return trial
        search = _Search(model, trial, bound(batch), loss or _squares)
        search.spend(float(budget))
    chosen = {path: count for path, count in search.counts.items() if count > 1}
    made = _planned(model, records, {path: _options(kinds[path], count) for path, count in chosen.items()})
    made.refused = trial.refused
    left = {path: why for path, why in trial.left.items() if path not in made.converted}
    made.left = left | {path: search.reason(path) for path in search.counts if path not in chosen}
    made.remarks = {path: search.reason(path) for path in chosen}
    made.summary = search.summary(float(budget))
    return made


def _options(kind: Solver, count: int) -> SolverOptions:
    changes: dict[str, Any] = {"iters": count}
    return SolverOptions(dataclasses.replace(kind, **changes))


def _kinds(model: nn.Module, records: Any) -> dict[str, Solver]:
    """A sampling solver for each layer that takes in a dropout, a deterministic one for the others."""
    sampled = _planned(model, records, {"*": SolverOptions(ProxSG(2))})
    kinds = {path: layer.options.solver for path, layer in sampled.converted.items()}
    known = {**kinds, **dict.fromkeys(sampled.refused, ProxGD(2))}
    return {path: kind if getattr(kind, "tau", None) is not None else ProxGD(2) for path, kind in known.items()}


def _is_linear(layer: LayerPlan) -> bool:
    return isinstance(layer.function, Zero) and not layer.options.solver.stochastic


def _planned(model: nn.Module, records: Any, rules: Mapping[str, SolverOptions]) -> Plan:
    made = Plan(model, lenient=True)
    found, _ = targets(made, {path: Rule(options) for path, options in rules.items()})
    Planner(made, found, records).run()
    return made


def _squares(output: Any) -> Tensor:
    found = [tensor for tensor in tensors(output) if tensor.is_floating_point() and tensor.requires_grad]
    if not found:
        raise OptionError("the output has no tensor with a gradient; give suggest a loss")
    return torch.stack([tensor.square().sum() for tensor in found]).sum()


@dataclasses.dataclass
class _Measured:
    """What a layer's iterations cost in seconds, and the share of the gap that each number of them closes."""

    plain: float
    second: float
    further: float
    closed: tuple[float, ...]

    def extra(self, count: int) -> float:
        """Seconds beyond the plain layer."""
        return 0.0 if count == 1 else max(self.second + (count - 2) * self.further - self.plain, 0.0)


class _Search:
    """Distributes a budget over the layers of a trial conversion."""

    def __init__(self, model: nn.Module, trial: Plan, inputs: Inputs, loss: Loss) -> None:
        self.net, self.inputs, self.loss = apply(trial, inplace=False), inputs, loss
        self.layers = {path: cast(SolverLayer, self.net.get_submodule(path)) for path in trial.converted}
        self.counts = dict.fromkeys(self.layers, 1)
        model.train()
        self.net.train()
        self.model, self.plain = model, self._step(model)
        # Short times vary more.
        self.repeats = min(max(_REPEATS, int(_MEASURING / max(self.plain, 1e-9))), _MOST_REPEATS)
        self.measured = {path: measured for path, measured in self._measure().items() if measured is not None}
        self.ratio = 1.0

    def spend(self, budget: float) -> None:
        """Add iterations while they fit, then take back what the measured step does not allow."""
        left = (budget - 1) * self.plain
        while rungs := [rung for path in self.measured if (rung := self._rung(path)) and rung[1] <= left]:
            path, cost, _ = max(rungs, key=lambda rung: rung[2] / max(rung[1], 1e-9))
            self.counts[path] = _LADDER[_LADDER.index(self.counts[path]) + 1]
            left -= cost
        while True:
            self._set(self.counts)
            self.ratio = self._ratio()
            if self.ratio <= budget or all(count == 1 for count in self.counts.values()):
                return
            some = [path for path, count in self.counts.items() if count > 1]
            worst = max(some, key=lambda path: self.measured[path].extra(self.counts[path]))
            self.counts[worst] = _LADDER[_LADDER.index(self.counts[worst]) - 1]

    def reason(self, path: str) -> str:
        """Why a layer has its iterations."""
        if path not in self.measured:
            return "the batch does not reach it"
        found, count = self.measured[path], self.counts[path]
        if count == 1:
            first, closed = 1e3 * found.extra(2), 100 * found.closed[2]
            return f"beyond the budget: a second iteration takes {first:.2g} ms and closes {closed:.0f} % of its gap"
        return f"closes {100 * found.closed[count]:.0f} % of its gap in {1e3 * found.extra(count):.2g} ms"

    def summary(self, budget: float) -> str:
        """The measured time of a step."""
        seconds = 1e3 * self.plain
        if all(count == 1 for count in self.counts.values()):
            return f"A plain training step takes {seconds:.3g} ms; no iteration fits (budget {budget:g} ×)."
        return f"A plain training step takes {seconds:.3g} ms, this one {self.ratio:.2g} × (budget {budget:g} ×)."

    def _rung(self, path: str) -> tuple[str, float, float] | None:
        """The next number of iterations of a layer: its cost and its gain."""
        now, found = self.counts[path], self.measured[path]
        if now == _LADDER[-1]:
            return None
        then = _LADDER[_LADDER.index(now) + 1]
        cost, gain = found.extra(then) - found.extra(now), found.closed[then] - found.closed[now]
        return (path, max(cost, 0.0), gain) if gain > 1e-3 else None

    def _set(self, counts: Mapping[str, int]) -> None:
        for path, count in counts.items():
            layer = self.layers[path]
            options = layer.options
            changes: dict[str, Any] = {"iters": max(count, 2)}
            solver, strength = dataclasses.replace(options.solver, **changes), 0.0 if count == 1 else 1.0
            vars(layer)["options"] = dataclasses.replace(options, solver=solver).with_strength(strength)

    def _ratio(self) -> float:
        """The time of a step relative to the plain one, measured in turns, so that other load counts for both."""
        times = [(self._step(self.net), self._step(self.model)) for _ in range(self.repeats)]
        return min(ours for ours, _ in times) / min(plain for _, plain in times)

    def _step(self, model: nn.Module) -> float:
        """Seconds of a training step."""
        parameters = [p for p in model.parameters() if p.requires_grad]

        def step() -> None:
            args, kwargs = replace(self.inputs, Tensor, lambda t: t.detach())
            value = self.loss(model(*args, **kwargs))
            torch.autograd.grad(value, parameters, allow_unused=True)

        with torch.enable_grad():
            try:
                step()
            except MinimandError:
                raise
            except Exception as error:
                first = (str(error).strip().splitlines() or [""])[0]
                raise ConversionError(
                    f"a training step of the model fails on the batch ({type(error).__name__}: {first}); give suggest "
                    f"a typical training batch, and a loss where the output is not a tensor"
                ) from error
            return fastest(step, _REPEATS)

    def _measure(self) -> dict[str, _Measured | None]:
        seen: dict[str, list[tuple[Any, ...]]] = {path: [] for path in self.layers}
        hooks = [
            layer.register_forward_pre_hook(lambda module, args, path=path: seen[path].append(args))
            for path, layer in self.layers.items()
        ]
        self._set(self.counts)
        args, kwargs = self.inputs
        with torch.no_grad():
            self.net(*args, **kwargs)
        for hook in hooks:
            hook.remove()
        return {path: self._layer(path, calls) if calls else None for path, calls in seen.items()}

    def _layer(self, path: str, calls: list[tuple[Any, ...]]) -> _Measured:
        layer = self.layers[path]
        given: list[Any] = [kept(layer, part) for part in calls[-1]]
        parts: list[Any] = [None if part is None else part.clone().requires_grad_() for part in given]
        y = parts[0]
        # A plain layer that was computed before its skip is added depends on neither its input nor its weight here.
        leaves = [t for t in (*parts, *layer.parameters()) if t is not None and t.requires_grad]

        def run() -> None:
            out = layer.forward(*parts)
            torch.autograd.grad(out, leaves, torch.ones_like(out), allow_unused=True)

        times = []
        for count in (1, 2, 6):
            self._set({path: count})
            with torch.enable_grad():
                run()
                times.append(len(calls) * fastest(run, self.repeats))
        self._set({path: 1})
        some = [part[:_ROWS] if isinstance(part, Tensor) and len(part) == len(y) else part for part in given]
        return _Measured(times[0], times[1], max(times[2] - times[1], 0.0) / 4, _closed(layer, some))


@torch.no_grad()
def _closed(layer: SolverLayer, given: list[Any]) -> tuple[float, ...]:
    """The share of the objective's gap that 1, 2, … iterations from the plain layer close; index 0 is unused."""
    problem = layer.problem(*given)
    start = problem.function.prox(problem.linear())
    first, most = float(problem.objective(start)), _LADDER[-1]
    objective = trace(problem, ProxGD(most - 1), x0=start).objective.tolist()
    best = min(float(solve(problem, FISTA(_REFERENCE_ITERATIONS), x0=start).objective), *objective)
    gap = first - best
    return (0.0, 0.0, *((first - value) / gap if gap > 0 else 0.0 for value in objective))

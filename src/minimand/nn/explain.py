"""Reports on the solver layers of a model: step, objective, optimality and cost on a batch."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..arguments import checked
from ..errors import CapabilityError
from ..network.running import bound
from ..network.state import preserved
from ..solvers import FISTA, Problem, Solver, solve, trace
from .layers import SolverLayer
from .table import table_lines

__all__ = ["Explanation", "LayerReport", "explain", "held_bytes"]

# FISTA iterations for the reference optimum.
_REFERENCE_ITERATIONS = 300
_REPEATS = 3
# The share of the plain block's norm below which an output has collapsed; above its inverse it has grown too large.
_COLLAPSED = 0.1


@dataclasses.dataclass(frozen=True)
class LayerReport:
    """The report on one solver layer for one batch.

    Attributes:
        path: The path of the layer in the model.
        layer: Its sizes and activation.
        solver: Its method and number of iterations.
        lipschitz: The bound on ‖A‖² from which the step is computed.
        step: The first step size; None if the method has none.
        objective: The objective at zero, after one iteration, after all iterations, and at the optimum.
        optimality: The norm of the gradient mapping at zero and after all iterations.
        suboptimality: The remaining gap of the objective to the optimum, relative to the gap at zero.
        converges: Whether the objective after all iterations is below that after one; None for one iteration.
        time_ratio: Time of forward and backward, relative to dropout → linear → activation.
        memory_ratio: Bytes held for the backward pass, relative to dropout → linear → activation.
        setup: Seconds of the first call for bounds on norms, which later calls reuse.
        scale: The norm of the output relative to that of the plain block.
        advice: A sentence, or an empty string.
    """

    path: str
    layer: str
    solver: str
    lipschitz: float
    step: float | None
    objective: tuple[float, float, float, float]
    optimality: tuple[float, float]
    suboptimality: float
    converges: bool | None
    time_ratio: float
    memory_ratio: float
    setup: float
    scale: float
    advice: str


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Reports on all solver layers. It prints as a table; ``as_dict`` returns plain numbers.

    ``uncalled`` lists the solver layers that the forward pass did not call.
    """

    layers: tuple[LayerReport, ...]
    uncalled: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Plain numbers by path."""
        return {report.path: dataclasses.asdict(report) for report in self.layers}

    def _notes(self) -> list[tuple[str, str]]:
        advice = [(r.path, r.advice) for r in self.layers if r.advice]
        return advice + [(path, "not called in this forward pass") for path in self.uncalled]

    def __str__(self) -> str:
        notes = [f"{path}: {note}" for path, note in self._notes()]
        return "\n".join(table_lines(_COLUMNS, self.layers) + notes)

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.table import Table

        table = Table(title="Solver layers: remaining gap and cost")
        for name in _COLUMNS:
            table.add_column(name, justify="left" if name in ("path", "layer", "solver") else "right")
        for r in self.layers:
            table.add_row(*(cell(r) for cell in _COLUMNS.values()))
        return Group(table, *(f"[bold]{path}[/bold]: {note}" for path, note in self._notes()))


_COLUMNS: dict[str, Callable[[LayerReport], str]] = {
    "path": lambda r: r.path,
    "layer": lambda r: r.layer,
    "solver": lambda r: r.solver,
    "L": lambda r: f"{r.lipschitz:.3g}",
    "step": lambda r: "—" if r.step is None else f"{r.step:.3g}",
    "objective 0 → 1 → K (best)": lambda r: "{:.4g} → {:.4g} → {:.4g} ({:.4g})".format(*r.objective),
    "optimality 0 → K": lambda r: "{:.2g} → {:.2g}".format(*r.optimality),
    "gap left": lambda r: f"{100 * r.suboptimality:.1f} %",
    "time": lambda r: f"{r.time_ratio:.1f}×",
    "memory": lambda r: f"{r.memory_ratio:.1f}×",
    "set-up": lambda r: f"{r.setup:.2g} s",
    "scale": lambda r: f"{r.scale:.2g}",
}


@checked
def explain(model: nn.Module, *inputs: Any, **options: Any) -> Explanation:
    r"""Run ``model(*inputs, **options)`` and report how well each solver layer solves its problem. As for
    :func:`~minimand.nn.plan`, a tuple alone stands for positional arguments and a dictionary for keyword arguments.

    The report lists, per layer: the bound L and the step; the objective at zero, after one iteration (the plain block,
    scaled where iterations start from zero) and after all iterations; the remaining gap to the optimum; time and memory
    relative to dropout → linear → activation; the seconds that the first call takes for bounds on norms; the norm of
    the output relative to the plain block's, with a warning where it has collapsed or grown tenfold; and advice if
    another choice reaches the same objective in fewer iterations. Mode, weights, gradients, buffers and the random
    state stay unchanged.

    >>> from minimand.nn import SolverLinear
    >>> net = nn.Sequential(SolverLinear(8, 4), nn.Linear(4, 2))
    >>> report = explain(net, torch.randn(16, 8))
    >>> report.layers[0].path, report.layers[0].converges
    ('0', True)
    """
    found = {path: module for path, module in model.named_modules() if isinstance(module, SolverLayer)}
    if not found:
        raise CapabilityError(
            f"{type(model).__name__} has no solver layer to explain; convert it first, "
            f'e.g. convert(model, {{"*": ProxGD(iters=10)}})'
        )
    if len(inputs) == 1 and not options:
        inputs, options = bound(inputs[0])
    with torch.inference_mode(False), preserved(model):
        calls = _calls(model, found, inputs, options)
        reports = [_report(path, found[path], *call) for path, call in calls.items()]
    return Explanation(tuple(reports), tuple(path for path in found if path not in calls))


def _calls(
    model: nn.Module, found: dict[str, SolverLayer], inputs: tuple[Any, ...], options: dict[str, Any]
) -> dict[str, tuple[Tensor, Tensor | None]]:
    """The input and, if given, the skip of each layer in one forward pass; leaves hooks on the layers."""
    seen: dict[str, tuple[Tensor, Tensor | None]] = {}

    def remember(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = dict(zip(("y", "skip"), args, strict=False)) | kwargs
            y, skip = (kept(found[path], given.get(name)) for name in ("y", "skip"))
            assert y is not None
            seen[path] = y, skip

        return hook

    for path, layer in found.items():
        layer.register_forward_pre_hook(remember(path), with_kwargs=True)
    with torch.no_grad():
        model(*inputs, **options)
    return seen


def kept(layer: SolverLayer, tensor: Tensor | None) -> Tensor | None:
    """A copy of what a layer is given, in the type of its weight, which an input under autocast need not have."""
    return None if tensor is None else tensor.detach().to(layer.operator().weight.dtype, copy=True)


def _report(path: str, layer: SolverLayer, y: Tensor, skip: Tensor | None) -> LayerReport:
    solver, _ = layer.options.resolved(layer.training)
    with torch.no_grad():
        problem = layer.problem(y, skip).bounded(inputs=solver.stochastic)
        zero = torch.zeros(problem.shape, dtype=problem.y.dtype, device=problem.y.device)
        start = float(problem.objective(zero))
        step = layer.options.paced(solver).first_step(problem)
        first_optimality = float(problem.optimality(zero))
        best = float(solve(problem, FISTA(_REFERENCE_ITERATIONS)).objective)
        x, plain = _solution(layer, problem, y, skip), problem.function.prox(problem.linear())
        if layer.start == "plain":
            found = problem.objective(plain), problem.objective(x), problem.optimality(x)
            first, last, optimality = map(float, found)
        else:
            run = trace(problem, solver)
            first, last, optimality = float(run.objective[0]), float(run.objective[-1]), float(run.optimality[-1])
        gap = max(start, first) - best
        left = (last - best) / gap if gap > 0 else 0.0
        advice = _weak(layer, left) or _advice(problem, solver, max(start, first), last, best, left)
        setup, scale = _setup(layer), _scale(x, plain)
        advice = "; ".join(filter(None, [_scaled(scale, step), advice]))
    time_ratio, memory_ratio = _costs(layer, y, skip)
    return LayerReport(
        path=path,
        layer=_describe(layer),
        solver=f"{type(solver).__name__}({solver.iterations})",
        lipschitz=float(problem.operator.norm_sq()),
        step=None if step is None else float(torch.as_tensor(step).max()) * _strength(layer),
        objective=(start, first, last, best),
        optimality=(first_optimality, optimality),
        suboptimality=max(left, 0.0),
        converges=None if solver.iterations == 1 else last <= first,
        time_ratio=time_ratio,
        memory_ratio=memory_ratio,
        setup=setup,
        scale=scale,
        advice=advice,
    )


def _setup(layer: SolverLayer) -> float:
    """The seconds of the first bounds on the layer's norms."""
    tracker, begin = layer.tracker.fresh(), time.perf_counter()
    tracker.bounds()
    return time.perf_counter() - begin


def _solution(layer: SolverLayer, problem: Problem, y: Tensor, skip: Tensor | None) -> Tensor:
    """The layer's output, after the activation that it may leave to the network."""
    out = layer.forward(y, skip)
    return problem.function.prox(out) if layer.returns == "preactivation" else out


def _scale(x: Tensor, plain: Tensor) -> float:
    """The norm of the layer's solution relative to that of the plain block; 1 where both are zero."""
    ours, theirs = (float(each.double().norm()) for each in (x, plain))
    return ours / theirs if theirs > 0 else 1.0 if ours == 0 else float("inf")


def _scaled(scale: float, step: float | Tensor | None) -> str:
    """A warning about an output of another size than the plain block's."""
    if scale < _COLLAPSED:
        lost = f"the output has {scale:.2g} of the plain block's norm, which weakens every layer after it"
        return f"{lost}; fine-tune before use, or convert fewer layers"
    if scale <= 1 / _COLLAPSED:
        return ""
    long = step is not None and float(torch.as_tensor(step).max()) > 1
    small = ", because small weights make long steps" if long else ""
    return f"the output has {scale:.2g} times the plain block's norm{small}; lower the strength"


def _strength(layer: SolverLayer) -> float:
    return float(torch.as_tensor(layer.strength).detach())


def _weak(layer: SolverLayer, left: float) -> str:
    """Advice for a layer that takes a share of its solver's steps."""
    strength = _strength(layer)
    if strength == 1 or not left >= 0.01:
        return ""
    return (
        f"at strength {strength:.2g} the layer stays near the plain one and leaves {100 * left:.0f}% of the gap; raise "
        f"it with set_strength while fine-tuning"
    )


def _describe(layer: SolverLayer) -> str:
    operator = layer.operator()
    return f"{operator.inputs}→{operator.outputs} {type(layer.function).__name__}"


def _advice(problem: Problem, solver: Solver, start: float, last: float, best: float, left: float) -> str:
    # Written so that NaN is caught as well.
    if not last <= start:
        return "the objective is above its value at zero, because the step is too long; use step='auto'"
    if isinstance(solver, FISTA) or left < 0.01:
        return ""
    share = f"{solver.iterations} iterations leave {100 * left:.0f}% of the gap"
    if solver.stochastic:
        quiet = float(solve(problem, solver.noiseless()).objective)
        if quiet < best + 0.5 * (last - best):
            return f"{share}, mostly because of sampling noise; a larger tau or a smaller decay lowers it"
        return f"{share}, with or without sampling noise; more iterations lower it"
    accelerated = trace(problem, FISTA(solver.iterations)).objective
    reached = int((accelerated > last).sum()) + 1
    if reached < solver.iterations:
        return f"{share}; FISTA(iters={reached}) reaches the same objective"
    return f"{share}; more iterations lower it"


def _costs(layer: SolverLayer, y: Tensor, skip: Tensor | None) -> tuple[float, float]:
    """Time and bytes held by the layer, relative to dropout → linear → activation on the same input."""

    def solved(y: Tensor) -> Tensor:
        # Not layer(y), which would run the user's hooks.
        return layer.forward(y, skip)

    def plain(y: Tensor) -> Tensor:
        out = layer.operator(y).affine(nn.functional.dropout(y, 0.5, True), layer.bias)
        return layer.function.prox(out if skip is None else out + skip)

    weights = [p for p in layer.parameters() if p.requires_grad]
    y = y.clone().requires_grad_()
    ratios = [
        measure(solved, y) / max(measure(plain, y), 1e-12)
        for measure in (lambda block, y: _seconds(block, y, weights), held_bytes)
    ]
    return ratios[0], ratios[1]


def _seconds(block: Callable[[Tensor], Tensor], y: Tensor, weights: Sequence[Tensor]) -> float:
    """The time of the fastest of a few forward and backward passes; ``.grad`` is not touched."""

    def run() -> None:
        out = block(y)
        torch.autograd.grad(out, [y, *weights], torch.ones_like(out), allow_unused=True)

    with torch.enable_grad():
        return fastest(run, _REPEATS)


def fastest(run: Callable[[], None], repeats: int) -> float:
    """The time of the fastest of several runs, in seconds.

    Without an accelerator, on which it would wait, a run takes no longer than its processor time. On a machine with
    other load that is far below the time of the clock.
    """
    clocks = (time.perf_counter,) if torch.accelerator.is_available() else (time.perf_counter, time.process_time)
    times = list[float]()
    for _ in range(repeats):
        begin = [clock() for clock in clocks]
        run()
        times += [clock() - before for clock, before in zip(clocks, begin, strict=True)]
    return min(times)


def held_bytes(block: Callable[[Tensor], Tensor], y: Tensor) -> float:
    """The bytes that stay allocated between the forward and the backward pass, without input and parameters.

    It counts the storages that the forward pass created and that are still alive after it, held by
    autograd, by a checkpoint, or by the output.
    """
    with torch.enable_grad(), _Storages() as made:
        out = block(y)
    assert out.requires_grad
    return float(sum(size for storage, size in made.storages.values() if not storage.expired()))


class _Storages(TorchDispatchMode):
    """Records every storage that an operation returns, without keeping it alive."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage())._cdata not in given:
                self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return out

"""ProxProp beside other optimizers, tuned on the same grid: accuracy, and time to reach an accuracy."""

import dataclasses
import importlib
import importlib.util
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from minimand.errors import OptionError

from ...comparing import Difference, difference, mean_std
from ...context import Lab
from ...drawing import bars
from ...experiment import Comparison, Experiment, Metrics, Part, Plot, Preset, Results
from ...training import accuracy
from ._proxprop import (
    BACKPROP,
    METHODS,
    UNIT,
    ProxPropImageOptions,
    Stepper,
    figures,
    fitted,
    mlp,
    nesterov,
    precondition,
)

SGD = "SGD"
PROXPROP = ("ProxProp (exact)", "ProxProp (cg3)")
_NO_KFAC = "K-FAC was not run: the package index has it only for TensorFlow 1 (kfac), not for PyTorch."
PACKAGES: Mapping[str, str] = {"SOAP": "pytorch_optimizer", "isaac": "isaac"}
PEERS = (SGD, "Adam", "Muon", *PROXPROP, "SOAP", "isaac")


@dataclasses.dataclass(frozen=True)
class ProxPropPeersOptions(ProxPropImageOptions):
    """The fully connected network by several optimizers, each with the best step size of one grid.

    Args:
        methods: SGD (Nesterov 0.95), Adam, Muon, ProxProp (exact), ProxProp (cg3), SOAP, isaac. The last two need
            the packages pytorch_optimizer and isaac (the extra "peers").
        epochs: Epochs of every method at its chosen step size.
        tuning_epochs: Epochs of every method at every step size of the grid.
        rates: The grid of step sizes, the same for all. For each seed the best by validation accuracy is chosen.
        target: The validation accuracy in per cent; the time to reach it is measured.
        width: A factor on the hidden widths.
        tau_theta: The proximal step τθ of ProxProp, for a mean loss and batches of 500.
        inputs: "standardised" or "unit" (pixels/255).
    """

    inputs: Literal["unit", "standardised", "both"] = "standardised"
    methods: tuple[str, ...] = PEERS
    epochs: int = 10
    tuning_epochs: int = 2
    rates: tuple[float, ...] = (3.0, 1.0, 0.3, 0.1, 0.03, 0.01, 3e-3, 1e-3, 3e-4)
    target: float = 42.0
    width: float = 0.25
    tau_theta: float = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.inputs == "both":
            raise OptionError("proxprop-peers runs one kind of inputs: standardised or unit")


class Muon(torch.optim.Optimizer):
    """torch.optim.Muon without weight decay, in the gradient's own precision.

    Torch's Muon orthogonalises in bfloat16. On a processor without such instructions one step of the network at
    quarter widths takes about a minute.
    """

    def __init__(self, parameters: list[nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Nesterov momentum, then Newton-Schulz iterations towards the nearest orthogonal matrix."""
        for group in self.param_groups:
            for parameter in group["params"]:
                mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                mean.lerp_(parameter.grad, 1 - group["momentum"])
                update = _orthogonal(parameter.grad.lerp(mean, group["momentum"]))
                rows, columns = parameter.shape
                parameter.sub_(update, alpha=group["lr"] * math.sqrt(max(1.0, rows / columns)))


def _orthogonal(matrix: Tensor, steps: int = 5) -> Tensor:
    """Quintic Newton-Schulz iterations with Muon's coefficients, on the smaller side."""
    a, b, c = 3.4445, -4.775, 2.0315
    x = matrix.mT if len(matrix) > matrix.shape[1] else matrix
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(steps):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x.mT if len(matrix) > matrix.shape[1] else x


class _Both:
    """Two optimizers that share the parameters of one network."""

    def __init__(self, first: torch.optim.Optimizer, second: torch.optim.Optimizer) -> None:
        self.pair = (first, second)

    def zero_grad(self) -> None:
        for optimizer in self.pair:
            optimizer.zero_grad()

    def step(self) -> None:
        for optimizer in self.pair:
            optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        return {str(place): optimizer.state_dict() for place, optimizer in enumerate(self.pair)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for place, optimizer in enumerate(self.pair):
            optimizer.load_state_dict(state_dict[str(place)])


def _installed(method: str) -> bool:
    return method not in PACKAGES or importlib.util.find_spec(PACKAGES[method]) is not None


def _methods(options: ProxPropPeersOptions) -> list[str]:
    """The requested methods whose packages are installed."""
    unknown = [method for method in options.methods if method not in PEERS]
    if unknown:
        raise OptionError(f"there is no method {', '.join(unknown)}; available: {', '.join(PEERS)}")
    return [method for method in options.methods if _installed(method)]


def _trial(method: str, rate: float) -> str:
    return f"{method}, τ = {rate:g}"


def parts(options: ProxPropPeersOptions) -> list[Part]:
    """Every method at every step size for a short while, then at its best."""
    methods = _methods(options)
    trials = [Part(_trial(method, rate)) for method in methods for rate in options.rates]
    needs = {method: tuple(_trial(method, rate) for rate in options.rates) for method in methods}
    return [*trials, *(Part(method, needs[method]) for method in methods)]


def curved(model: nn.Sequential) -> None:
    """Replace all linear layers except the last by isaac's layers with the same weights."""
    isaac = importlib.import_module("isaac")
    for place in [place for place, layer in enumerate(model) if isinstance(layer, nn.Linear)][:-1]:
        plain = model[place]
        # Its documentation's starting value.
        layer = isaac.Linear(plain.in_features, plain.out_features, la=1.0)
        layer.load_state_dict(plain.state_dict())
        model[place] = layer


def optimizer_of(method: str, model: nn.Sequential, rate: float, tau_theta: float) -> Stepper:
    """The method's optimizer, without weight decay."""
    if method == "Adam":
        return torch.optim.Adam(model.parameters(), lr=rate)
    if method == "SOAP":
        soap: Stepper = importlib.import_module("pytorch_optimizer").SOAP(model.parameters(), lr=rate, weight_decay=0.0)
        return soap
    if method == "Muon":
        matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
        rest = [parameter for parameter in model.parameters() if parameter.ndim != 2]
        return _Both(Muon(matrices, rate), torch.optim.SGD(rest, lr=rate, momentum=0.95, nesterov=True))
    optimizer = nesterov(model, rate)
    precondition(model, optimizer, method if method in METHODS else BACKPROP, tau_theta)
    return optimizer


def _chosen(options: ProxPropPeersOptions, method: str, lab: Lab) -> float:
    """The step size with the best validation accuracy; the smallest of several."""
    found = {rate: float(lab.kept(_trial(method, rate), "tuned")["validation"]) for rate in options.rates}
    return max(found, key=lambda rate: (found[rate], -rate))


def run(options: ProxPropPeersOptions, part: str, lab: Lab) -> Iterator[Metrics]:
    """Train one network from scratch: a trial of a step size, or at the chosen one."""
    data = options.loaders_for(lab, UNIT if options.inputs == "unit" else "")
    method, trial, number = part.partition(", τ = ")
    rate = float(number) if trial else _chosen(options, method, lab)
    model = mlp(data, options.width)
    if method == "isaac":
        curved(model)
    model.to(lab.device)
    optimizer = optimizer_of(method, model, rate, options.tau_theta)
    diverged = False
    for record in fitted(lab, model, optimizer, data, options.tuning_epochs if trial else options.epochs):
        diverged = bool(record.get("diverged", False))
        yield {**record, "rate": rate}
    if trial:
        reached = -math.inf if diverged else accuracy(lab, model, data.validation)
        lab.keep("tuned", {"validation": torch.tensor(reached)})


def _times(results: Results[ProxPropPeersOptions], method: str) -> list[float]:
    """The seconds of training until the target, for each seed that reached it."""
    reached, spent = results.curve(method, "validation"), results.curve(method, "training")
    found = []
    for seed, values in reached.items():
        first = next((at for at, value in enumerate(values) if value >= results.options.target), None)
        if first is not None:
            found.append(float(spent[seed][first]))
    return found


def compare(results: Results[ProxPropPeersOptions]) -> list[Comparison]:
    """Time to the target, test accuracy and final loss; the paper gives none of these."""
    methods = [method for method in results.options.methods if method in results.records or _installed(method)]
    rows = []
    for method in methods:
        rates = ", ".join(f"{rate:g}" for rate in results.final(method, "rate"))
        note = f"chosen step sizes: {rates}" if rates else ""
        rows.append(Comparison(f"{method}, test accuracy", None, results.final(method, "test"), "%", note=note))
    rows += [Comparison(f"{m}, full-batch loss", None, results.final(m, "loss"), digits=4) for m in methods]
    rows += [Comparison(f"{m}, time of training", None, results.final(m, "training"), " s") for m in methods]
    for method in methods:
        times, seeds = _times(results, method), len(results.final(method, "validation"))
        note = "" if len(times) == seeds else f"{seeds - len(times)} of {seeds} seeds did not reach it"
        # A method that never reached it has no time; the findings say so.
        if times:
            label = f"{method}, time to {results.options.target:g} % validation"
            rows.append(Comparison(label, None, times, " s", note=note))
    return rows


def plots(results: Results[ProxPropPeersOptions]) -> list[Plot]:
    """Loss and accuracy of the tuned methods over epochs and time, and the test accuracies as bars."""
    tuned = [method for method in results.options.methods if method in results.records]
    shown = [row for row in compare(results) if row.label.endswith("test accuracy")]
    return [*figures(results, tuned), bars(shown, title="Test accuracy", y="accuracy, %")]


def findings(results: Results[ProxPropPeersOptions]) -> Sequence[str | Difference]:
    """ProxProp against each other method, the times to the target, and the methods that were not run."""
    methods = [method for method in results.options.methods if results.final(method, "test")]
    sentences: list[str | Difference] = []
    for ours in (method for method in PROXPROP if method in methods):
        others = [method for method in methods if method not in PROXPROP]
        sentences += [difference(results, ours, other, quantity="test accuracy") for other in others]
    times = {method: _times(results, method) for method in methods}
    ordered = sorted((method for method in methods if times[method]), key=lambda m: mean_std(times[m])[0])
    if ordered:
        order = ", ".join(f"{method} {mean_std(times[method])[0]:.3g} s" for method in ordered)
        sentences.append(
            f"Mean training time to {results.options.target:g} % validation accuracy (seeds that reached it): {order}."
        )
    sentences += [f"{method} did not reach {results.options.target:g} %." for method in methods if not times[method]]
    grid = results.options.rates
    for method in methods:
        edge = {rate for rate in results.final(method, "rate") if rate in (max(grid), min(grid))}
        sentences += [
            f"{method} chose a step size at the edge of the grid, {rate:g}; a wider grid may give a better one."
            for rate in edge
        ]
    return [*sentences, *_left_out(results)]


def _left_out(results: Results[ProxPropPeersOptions]) -> list[str]:
    """The methods without a run, and why."""
    sentences = []
    for method, package in PACKAGES.items():
        if results.records and method in results.options.methods and method not in results.records:
            sentences.append(f"{method} was not run: the package {package} was not installed.")
    return [*sentences, _NO_KFAC]


experiment = Experiment(
    name="proxprop-peers",
    title="ProxProp beside other optimizers",
    source="[Frerix2018]; the comparison is ours",
    about=(
        "The fully connected network of [Frerix2018] by SGD with Nesterov momentum 0.95, Adam, Muon (in float32, "
        "biases by that SGD), SOAP, isaac and ProxProp, exact and by 3 conjugate gradient iterations, around that SGD. "
        "Every method tries the same grid of step sizes for a few epochs; the one with the best validation accuracy is "
        "then trained from scratch. Other settings are the packages' own, without weight decay. Test accuracy and "
        "the seconds of training steps until a validation accuracy are measured; times are only comparable when "
        "nothing else runs on the machine."
    ),
    presets={
        "smoke": Preset(
            ProxPropPeersOptions(
                "digits",
                batch=100,
                limit=300,
                epochs=5,
                tuning_epochs=2,
                rates=(1.0, 0.01),
                target=20.0,
                width=0.02,
            ),
            (0,),
            0.05,
        ),
        # More than half of the time is SOAP's and Muon's.
        "laptop": Preset(ProxPropPeersOptions(limit=10_000), (0, 1), 45),
        "paper": Preset(ProxPropPeersOptions(epochs=50, width=1.0, target=52.0), (0, 1), 6000),
    },
    parts=parts,
    run=run,
    compare=compare,
    plots=plots,
    findings=findings,
)

"""ProxProp beside other optimizers, tuned on the same grid: accuracy, and time to reach an accuracy."""

import dataclasses
import importlib
import importlib.util
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

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
    best_validation,
    equal_loss,
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


class Setting(NamedTuple):
    """A step size; for ProxProp also τθ and the last layer's step size as a fraction of the others'."""

    rate: float
    tau_theta: float = math.nan
    head: float = 1.0

    def words(self) -> str:
        """The setting as the end of a part's name."""
        own = "" if math.isnan(self.tau_theta) else f", τθ = {self.tau_theta:g}, last layer × {self.head:g}"
        return f", τ = {self.rate:g}{own}"


@dataclasses.dataclass(frozen=True)
class ProxPropPeersOptions(ProxPropImageOptions):
    """The fully connected network by several optimizers, each with the best step size of one grid.

    Args:
        methods: SGD (Nesterov 0.95), Adam, Muon, ProxProp (exact), ProxProp (cg3), SOAP, isaac. The last two need
            the packages pytorch_optimizer and isaac (the extra "peers").
        epochs: Epochs of every method at its chosen step size.
        tuning_epochs: Epochs of every method at every step size of the grid.
        rates: The grid of step sizes of all methods but ProxProp. For each seed the best setting by validation
            accuracy is chosen.
        implicit_rates: The step sizes τ of ProxProp. Its settings are these with every value of τθ and one head each.
        tau_theta: The proximal step τθ of ProxProp, for a mean loss and batches of 500.
        taus: The values of τθ that are tried, as multiples of ``tau_theta``.
        heads: The step sizes of ProxProp's explicit last layer, as fractions of τ.
        target: The validation accuracy in per cent; the time to reach it is measured.
        width: A factor on the hidden widths.
    """

    methods: tuple[str, ...] = PEERS
    epochs: int = 10
    tuning_epochs: int = 2
    rates: tuple[float, ...] = (3.0, 1.0, 0.3, 0.1, 0.03, 0.01, 3e-3, 1e-3, 3e-4)
    implicit_rates: tuple[float, ...] = (10.0, 3.0, 1.0)
    tau_theta: float = 0.05
    taus: tuple[float, ...] = (10.0, 1.0, 0.1)
    heads: tuple[float, ...] = (1.0, 0.3, 0.1)
    target: float = 42.0
    width: float = 0.25

    def settings(self, method: str) -> tuple["Setting", ...]:
        """The settings that are tried. ProxProp's are a Latin square: every pair of values of two arguments once."""
        if method not in PROXPROP:
            return tuple(Setting(rate) for rate in self.rates)
        return tuple(
            Setting(rate, tau * self.tau_theta, self.heads[(i + j) % len(self.heads)])
            for i, rate in enumerate(self.implicit_rates)
            for j, tau in enumerate(self.taus)
        )


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


def _trials(options: ProxPropPeersOptions, method: str, kind: str) -> dict[str, Setting]:
    """The names of the short runs of a method, with their settings."""
    return {method + setting.words() + kind: setting for setting in options.settings(method)}


def _tuned(options: ProxPropPeersOptions, methods: Sequence[str]) -> list[str]:
    """The names of the parts at the chosen settings."""
    return [method + kind for kind in options.kinds() for method in methods]


def parts(options: ProxPropPeersOptions) -> list[Part]:
    """Every method at every setting for a short while, then at its best."""
    pairs = [(method, kind) for kind in options.kinds() for method in _methods(options)]
    trials = [Part(trial) for pair in pairs for trial in _trials(options, *pair)]
    return [*trials, *(Part("".join(pair), tuple(_trials(options, *pair))) for pair in pairs)]


def curved(model: nn.Sequential) -> None:
    """Replace all linear layers except the last by isaac's layers with the same weights."""
    isaac = importlib.import_module("isaac")
    for place in [place for place, layer in enumerate(model) if isinstance(layer, nn.Linear)][:-1]:
        plain = model[place]
        # Its documentation's starting value.
        layer = isaac.Linear(plain.in_features, plain.out_features, la=1.0)
        layer.load_state_dict(plain.state_dict())
        model[place] = layer


def optimizer_of(method: str, model: nn.Sequential, rate: float, tau_theta: float, head: float = 1.0) -> Stepper:
    """The method's optimizer, without weight decay; ``head`` times the step size is that of ProxProp's last layer."""
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
    if head != 1:
        *_, last = (layer for layer in model if isinstance(layer, nn.Linear))
        own = list(last.parameters())
        optimizer.param_groups[0]["params"] = [p for p in model.parameters() if all(p is not q for q in own)]
        optimizer.add_param_group({"params": own, "lr": head * rate})
    precondition(model, optimizer, method if method in METHODS else BACKPROP, tau_theta)
    return optimizer


def _chosen(options: ProxPropPeersOptions, method: str, kind: str, lab: Lab) -> Setting:
    """The setting with the best validation accuracy; the smallest of several."""
    trials = _trials(options, method, kind)
    found = {trial: float(lab.kept(trial, "tuned")["validation"]) for trial in trials}
    return trials[max(trials, key=lambda trial: (found[trial], -trials[trial].rate))]


def run(options: ProxPropPeersOptions, part: str, lab: Lab) -> Iterator[Metrics]:
    """Train one network from scratch: a trial of a setting, or at the chosen one."""
    data, kind = options.loaders_for(lab, part), UNIT if part.endswith(UNIT) else ""
    method, trial, _ = part.removesuffix(UNIT).partition(", τ = ")
    setting = _trials(options, method, kind)[part] if trial else _chosen(options, method, kind, lab)
    model = mlp(data, options.width)
    if method == "isaac":
        curved(model)
    model.to(lab.device)
    optimizer = optimizer_of(method, model, *setting)
    diverged = False
    for record in fitted(lab, model, optimizer, data, options.tuning_epochs if trial else options.epochs):
        diverged = bool(record.get("diverged", False))
        yield {**record, "rate": setting.rate, "tau_theta": setting.tau_theta, "head": setting.head}
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


def _settings(results: Results[ProxPropPeersOptions], part: str) -> list[Setting]:
    """The chosen setting of every seed."""
    found = [results.final(part, key) for key in Setting._fields]
    return [Setting(*values) for values in itertools.zip_longest(*found, fillvalue=math.nan)]


def compare(results: Results[ProxPropPeersOptions]) -> list[Comparison]:
    """Accuracies, final loss, time of training, and time to the target; the paper gives none of these."""
    options, rows = results.options, list[Comparison]()
    tuned = [part for part in _tuned(options, options.methods) if part in results.records]
    tuned = tuned or _tuned(options, [method for method in options.methods if _installed(method)])
    for part in tuned:
        chosen = "; ".join(setting.words().removeprefix(", ") for setting in _settings(results, part))
        note = f"chosen: {chosen}" if chosen else ""
        rows.append(Comparison(f"{part}, test accuracy", None, results.final(part, "test"), "%", note=note))
    for part in tuned:
        best = best_validation(results, part)
        rows.append(Comparison(f"{part}, best validation accuracy", None, best, "%"))
    for part in (part for part in tuned if part.startswith(PROXPROP)):
        base = SGD + (UNIT if part.endswith(UNIT) else "")
        if found := equal_loss(results, part, base):
            rows.append(Comparison(f"{part}, validation accuracy at SGD's final loss", None, found, "%"))
    rows += [Comparison(f"{part}, full-batch loss", None, results.final(part, "loss"), digits=4) for part in tuned]
    rows += [Comparison(f"{part}, time of training", None, results.final(part, "training"), " s") for part in tuned]
    for part in tuned:
        times, seeds = _times(results, part), len(results.final(part, "validation"))
        note = "" if len(times) == seeds else f"{seeds - len(times)} of {seeds} seeds did not reach it"
        # A method that never reached it has no time; the findings say so.
        if times:
            label = f"{part}, time to {options.target:g} % validation"
            rows.append(Comparison(label, None, times, " s", note=note))
    return rows


def plots(results: Results[ProxPropPeersOptions]) -> list[Plot]:
    """Loss and accuracy of the tuned methods over epochs and time, and the test accuracies as bars."""
    tuned = [part for part in _tuned(results.options, results.options.methods) if part in results.records]
    shown = [row for row in compare(results) if row.label.endswith("test accuracy")]
    return [*figures(results, tuned), bars(shown, title="Test accuracy", y="accuracy, %")]


def findings(results: Results[ProxPropPeersOptions]) -> Sequence[str | Difference]:
    """ProxProp against each other method, the times to the target, and the methods that were not run."""
    sentences, options = list[str | Difference](), results.options
    for kind in options.kinds():
        methods = [method for method in options.methods if results.final(method + kind, "test")]
        for ours in (method for method in PROXPROP if method in methods):
            others = [method + kind for method in methods if method not in PROXPROP]
            sentences += [difference(results, ours + kind, other, quantity="test accuracy") for other in others]
        times = {method + kind: _times(results, method + kind) for method in methods}
        ordered = sorted((part for part in times if times[part]), key=lambda part: mean_std(times[part])[0])
        if ordered:
            order = ", ".join(f"{part} {mean_std(times[part])[0]:.3g} s" for part in ordered)
            sentences.append(
                f"Mean training time to {options.target:g} % validation accuracy (seeds that reached it): {order}."
            )
        sentences += [f"{part} did not reach {options.target:g} %." for part in times if not times[part]]
        for method in methods:
            grid = options.implicit_rates if method in PROXPROP else options.rates
            sentences += [
                f"{method + kind} chose a step size at the edge, {rate:g}; a wider grid may give a better one."
                for rate in {setting.rate for setting in _settings(results, method + kind)} & {max(grid), min(grid)}
            ]
    return [*sentences, *_left_out(results)]


def _left_out(results: Results[ProxPropPeersOptions]) -> list[str]:
    """The methods without a run, and why."""
    sentences = []
    for method, package in PACKAGES.items():
        ran = any(part in results.records for part in _tuned(results.options, [method]))
        if results.records and method in results.options.methods and not ran:
            sentences.append(f"{method} was not run: the package {package} was not installed.")
    return [*sentences, _NO_KFAC]


experiment = Experiment(
    name="proxprop-peers",
    title="ProxProp beside other optimizers",
    source="[Frerix2018]; the comparison is ours",
    about=(
        "The fully connected network of [Frerix2018] by SGD with Nesterov momentum 0.95, Adam, Muon (in float32, "
        "biases by that SGD), SOAP, isaac and ProxProp, exact and by 3 conjugate gradient iterations, around that SGD. "
        "Every method tries nine settings for a few epochs; the one with the best validation accuracy is then trained "
        "from scratch. They are nine step sizes; for ProxProp a Latin square of three values each of τ, τθ and the "
        "step size of its explicit last layer. Inputs are standardised or pixels/255, which the authors feed. Other "
        "settings are the packages' own, without weight decay. Test accuracy and "
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
                implicit_rates=(1.0,),
                taus=(10.0, 1.0),
                target=20.0,
                width=0.02,
            ),
            (0,),
            0.05,
        ),
        # More than half of the time is SOAP's and Muon's.
        "laptop": Preset(ProxPropPeersOptions(limit=10_000), (0, 1, 2, 3, 4), 230),
        "paper": Preset(ProxPropPeersOptions(epochs=50, width=1.0, target=52.0), (0, 1), 6000),
    },
    parts=parts,
    run=run,
    compare=compare,
    plots=plots,
    findings=findings,
)

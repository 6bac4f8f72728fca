"""Deep autoencoders, where optimisation is the bottleneck: time to a test error by ProxProp and other optimizers."""

import dataclasses
import importlib.util
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from minimand.errors import OptionError, require_positive
from minimand.train import ProxProp

from ...clock import Stopwatch
from ...comparing import Difference, difference, mean_std
from ...context import Lab
from ...data import Batches
from ...drawing import curves
from ...experiment import Comparison, Experiment, Metrics, Part, Plot, Preset, Results
from ...training import loaders
from .._solvers import ImageOptions
from ._proxprop import TrainingClock, nesterov
from .proxprop_peers import PACKAGES, optimizer_of

ADAM, PROXPROP, PROXPROP_ADAM = "Adam", "ProxProp", "ProxProp in Adam"
METHODS = (ADAM, "Muon", "SOAP", "isaac", PROXPROP, PROXPROP_ADAM)
# Hidden widths of the encoder, mirrored by the decoder, and the activation. "deep" is that of [Frerix2018]'s setting
# with a bottleneck, "narrow" the usual benchmark for second-order methods at half its widths.
ARCHITECTURES: Mapping[str, tuple[tuple[int, ...], type[nn.Module]]] = {
    "tanh 400-100-32": ((400, 100, 32), nn.Tanh),
    "sigmoid 500-250-125-30": ((500, 250, 125, 30), nn.Sigmoid),
    "ReLU 256-64-16": ((256, 64, 16), nn.ReLU),
}
_RATES = (0.1, 0.03, 0.01, 3e-3, 1e-3, 3e-4)
_PLAIN = tuple((rate, math.nan) for rate in _RATES)
_IMPLICIT = tuple(itertools.product((10.0, 3.0, 1.0), (0.1, 0.01)))
_IN_ADAM = tuple(itertools.product((1e-2, 3e-3, 1e-3), (0.1, 0.01)))
# Pairs of a step size τ and, for ProxProp, τθ. Every method has six.
CANDIDATES: Mapping[str, tuple[tuple[float, float], ...]] = {
    **{method: _PLAIN for method in METHODS if method not in (PROXPROP, PROXPROP_ADAM)},
    PROXPROP: _IMPLICIT,
    PROXPROP_ADAM: _IN_ADAM,
}


@dataclasses.dataclass(frozen=True)
class ProxPropAutoencoderOptions(ImageOptions):
    """Autoencoders of pixels/255 by several optimizers, each with the best of six settings.

    Args:
        methods: Adam, Muon, SOAP, isaac, ProxProp (around SGD with Nesterov momentum 0.95), ProxProp in Adam. SOAP and
            isaac need the packages pytorch_optimizer and isaac (the extra "peers").
        seconds: Training time of every method at its chosen setting.
        tuning_seconds: Training time of every method at each of its six settings.
        epochs: The largest number of epochs.
        narrow: A divisor of all widths.
    """

    dataset: str = "mnist"
    batch: int = 500
    methods: tuple[str, ...] = METHODS
    seconds: float = 10.0
    tuning_seconds: float = 2.5
    epochs: int = 1000
    narrow: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive("seconds", self.seconds)
        require_positive("tuning_seconds", self.tuning_seconds)
        unknown = [method for method in self.methods if method not in METHODS]
        if unknown:
            raise OptionError(f"there is no method {', '.join(unknown)}; available: {', '.join(METHODS)}")


def autoencoder(inputs: int, name: str, narrow: int = 1) -> nn.Sequential:
    """The named network; its output layer is linear.

    >>> [layer.out_features for layer in autoencoder(64, "ReLU 256-64-16") if isinstance(layer, nn.Linear)]
    [256, 64, 16, 64, 256, 64]
    """
    widths, activation = ARCHITECTURES[name]
    encoder = (inputs, *(max(2, width // narrow) for width in widths))
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise((*encoder, *encoder[-2::-1])):
        layers += [nn.Linear(before, after), activation()]
    return nn.Sequential(*layers[:-1])


def _installed(method: str) -> bool:
    return method not in PACKAGES or importlib.util.find_spec(PACKAGES[method]) is not None


def _part(name: str, method: str) -> str:
    return f"{name}: {method}"


def _trials(name: str, method: str) -> tuple[str, ...]:
    return tuple(f"{_part(name, method)}, setting {place + 1}" for place in range(len(CANDIDATES[method])))


def parts(options: ProxPropAutoencoderOptions) -> list[Part]:
    """Every network by every method: six short runs, then one at the setting with the lowest validation error.

    Networks follow one another, so that a result that is not complete compares all methods on some of them.
    """
    found = []
    for name in ARCHITECTURES:
        methods = [method for method in options.methods if _installed(method)]
        found += [Part(trial) for method in methods for trial in _trials(name, method)]
        found += [Part(_part(name, method), _trials(name, method)) for method in methods]
    return found


def _optimizer(method: str, model: nn.Sequential, rate: float, tau_theta: float) -> Any:
    if method not in (PROXPROP, PROXPROP_ADAM):
        return optimizer_of(method, model, rate, tau_theta)
    optimizer = nesterov(model, rate) if method == PROXPROP else torch.optim.Adam(model.parameters(), lr=rate)
    # The linear output layer is implicit, too: its plain gradient would bound the step size.
    ProxProp(model, tau_theta=tau_theta, skip_last=False, fused=True).attach(optimizer)
    return optimizer


def run(options: ProxPropAutoencoderOptions, part: str, lab: Lab) -> Iterator[Metrics]:
    """Train one network from scratch: a trial of a setting, or at the chosen one."""
    name, _, rest = part.partition(": ")
    method, trial, number = rest.partition(", setting ")
    place = int(number) - 1 if trial else _chosen(name, method, lab)
    rate, tau_theta = CANDIDATES[method][place]
    limit = options.limit or None
    data = loaders(lab, options.dataset, options.batch, limit=limit, enlarge=options.enlarge, unit=True)
    model = autoencoder(math.prod(data.shape), name, options.narrow)
    optimizer = _optimizer(method, model, rate, tau_theta)
    plain: dict[str, Batches] = {"train": data.train, "validation": data.validation, "test": data.test}
    clock, last = TrainingClock(), math.inf
    states: dict[str, Any] = {"model": model, "optimizer": optimizer, "batches": plain["train"], "clock": clock}
    for epoch in lab.epochs(options.epochs, **states):
        watch = Stopwatch()
        finite = _pass(lab, model, optimizer, plain["train"])
        clock.seconds += watch.seconds
        found = {key: _error(lab, model, plain[key]) if finite else math.nan for key in ("validation", "test")}
        last = found["validation"] if math.isfinite(found["validation"]) else math.inf
        yield {"epoch": epoch + 1, **found, "training": round(clock.seconds, 3), "rate": rate, "tau_theta": tau_theta}
        if clock.seconds >= (options.tuning_seconds if trial else options.seconds) or not math.isfinite(last):
            break
    if trial:
        lab.keep("tuned", {"validation": torch.tensor(last)})


def _chosen(name: str, method: str, lab: Lab) -> int:
    found = [float(lab.kept(trial, "tuned")["validation"]) for trial in _trials(name, method)]
    return found.index(min(found))


def _pass(lab: Lab, model: nn.Module, optimizer: Any, batches: Batches) -> bool:
    """One pass over the batches; False at the first loss that is not finite."""
    model.train()
    for images, _ in lab.track(batches):
        x = images.flatten(1)
        optimizer.zero_grad()
        loss = (model(x) - x).square().sum(1).mean() / 2
        if not math.isfinite(float(loss.detach())):
            return False
        loss.backward()
        optimizer.step()
    return True


@torch.no_grad()
def _error(lab: Lab, model: nn.Module, batches: Batches) -> float:
    """100 ‖output − input‖ / ‖input‖ over all images."""
    model.eval()
    sums = torch.zeros(2, device=lab.device, dtype=torch.float64)
    for images, _ in batches:
        x: Tensor = images.flatten(1)
        sums += torch.stack([(model(x) - x).double().square().sum(), x.double().square().sum()])
    wrong, size = lab.total(sums).tolist()
    return 100 * math.sqrt(wrong / size)


def _times(results: Results[ProxPropAutoencoderOptions], part: str, target: float) -> list[float]:
    """The seconds of training until the test error, for each seed that reached it."""
    errors, spent = results.curve(part, "test"), results.curve(part, "training")
    firsts = {seed: next((at for at, e in enumerate(values) if e <= target), None) for seed, values in errors.items()}
    return [float(spent[seed][at]) for seed, at in firsts.items() if at is not None]


def _target(results: Results[ProxPropAutoencoderOptions], name: str) -> float | None:
    """Adam's mean test error at the end of its time."""
    found = results.final(_part(name, ADAM), "test")
    return mean_std(found)[0] if found else None


def compare(results: Results[ProxPropAutoencoderOptions]) -> list[Comparison]:
    """Test errors at equal time, and the time to Adam's final error; the source has no autoencoder."""
    rows = []
    for name in ARCHITECTURES:
        target = _target(results, name)
        methods = [m for m in results.options.methods if _part(name, m) in results.records or _installed(m)]
        for method in methods:
            part = _part(name, method)
            rates, taus = results.final(part, "rate"), results.final(part, "tau_theta")
            chosen = [f"{r:g}" + ("" if math.isnan(t) else f" (τθ {t:g})") for r, t in zip(rates, taus, strict=True)]
            note = f"chosen step sizes: {', '.join(chosen)}" if chosen else ""
            rows.append(Comparison(f"{part}, test error", None, results.final(part, "test"), "%", note=note))
        for method in results.options.methods if target is not None else ():
            assert target is not None
            times, seeds = _times(results, _part(name, method), target), len(results.final(_part(name, method), "test"))
            note = "" if len(times) == seeds else f"{seeds - len(times)} of {seeds} seeds did not reach it"
            if times:
                rows.append(Comparison(f"{_part(name, method)}, time to {target:.2f} %", None, times, " s", note=note))
    return rows


def plots(results: Results[ProxPropAutoencoderOptions]) -> list[Plot]:
    """The test error over the training time, one picture per network."""
    drawn = []
    for name in ARCHITECTURES:
        shown = [_part(name, method) for method in results.options.methods]
        title = f"Test error over time, {name}"
        y, x = "relative test error, %", "seconds of training"
        drawn.append(curves(results, shown, key="test", over="training", title=title, y=y, x=x, log=True))
    return drawn


def findings(results: Results[ProxPropAutoencoderOptions]) -> Sequence[str | Difference]:
    """ProxProp against every other method at equal time, and who did not reach Adam's error."""
    sentences: list[str | Difference] = []
    for name in ARCHITECTURES:
        for ours in (PROXPROP, PROXPROP_ADAM):
            for other in (m for m in results.options.methods if m not in (PROXPROP, PROXPROP_ADAM)):
                pair = _part(name, ours), _part(name, other)
                sentences.append(difference(results, *pair, higher=False, quantity="test error at equal time"))
        target = _target(results, name)
        for part in (_part(name, method) for method in results.options.methods):
            if target is not None and results.final(part, "test") and not _times(results, part, target):
                sentences.append(f"{part} did not reach Adam's {target:.2f} %.")
    left = [
        m
        for m in results.options.methods
        if results.records and _part(next(iter(ARCHITECTURES)), m) not in results.records
    ]
    return [
        *sentences,
        *(f"{method} was not run: the package {PACKAGES[method]} was not installed." for method in left),
    ]


_SMOKE = ProxPropAutoencoderOptions("digits", 100, limit=200, seconds=60.0, tuning_seconds=60.0, epochs=2, narrow=16)

experiment = Experiment(
    name="proxprop-autoencoder",
    title="Time to a test error on deep autoencoders, beside other optimizers",
    source="[Frerix2018]; the comparison is ours",
    about=(
        "Three autoencoders of pixels/255 with a linear output and a squared loss, summed over pixels and "
        "averaged over the batch: tasks where optimisation, not generalisation, limits the error. Every method "
        "has six settings (a step size; for ProxProp three step sizes times two values of τθ), trained for a few "
        "seconds each, and is then trained from scratch at the setting with the lowest validation error, for the "
        "same processor time as all others. The error is ‖output − input‖/‖input‖ over the test images; the time "
        "is that of the training steps until the error that Adam ends with. Other settings are the packages' own, "
        "without weight decay."
    ),
    presets={
        "smoke": Preset(_SMOKE, (0,), 0.1),
        "laptop": Preset(ProxPropAutoencoderOptions(limit=10_000), (0, 1, 2, 3, 4), 60),
        "paper": Preset(ProxPropAutoencoderOptions(seconds=300.0, tuning_seconds=40.0), (0, 1, 2, 3, 4), 900),
    },
    parts=parts,
    run=run,
    compare=compare,
    plots=plots,
    findings=findings,
    columns=("validation", "test"),
)

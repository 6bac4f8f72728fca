"""A hidden layer grown on digits, where the polar is only bounded, against fixed widths and ridge regression."""

import dataclasses
import math
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from minimand.factor import ParallelReLU
from minimand.homogeneous.certificate import with_ones
from minimand.homogeneous.neurons import Neurons, descend
from minimand.solvers.linear import ridge_factor

from ...claims import judge_certificates, scale, signed
from ...comparing import Difference, difference
from ...context import Lab
from ...drawing import curves
from ...experiment import Claim, Comparison, Experiment, Metrics, Part, Plot, Preset, Results
from ._factor import recorded
from ._regularized import DigitsOptions

GROWN, FIXED, RIDGE = "grown", "fixed width", "ridge regression"


@dataclasses.dataclass(frozen=True)
class GrowReLUDigitsOptions(DigitsOptions):
    """Digits as regression on one-hot labels.

    Args:
        lam: The weight of the regulariser.
        neurons: The largest grown width, and the fixed width.
        grow: Neurons added per round.
        descent: L-BFGS iterations per round; the fixed width gets those of all rounds.
        rounds: The largest number of rounds.
    """

    dataset: str = "digits"
    samples: int = 800
    lam: float = 3.0
    neurons: int = 60
    grow: int = 4
    descent: int = 100
    rounds: int = 20


def parts(options: GrowReLUDigitsOptions) -> list[Part]:
    """The grown network and two controls."""
    return [Part(GROWN), Part(FIXED), Part(RIDGE)]


def run(options: GrowReLUDigitsOptions, part: str, lab: Lab) -> Iterator[Metrics]:
    """Fit one of them."""
    data = options.draw(lab)
    (x, labels), (test, answers), classes = data.train, data.test, data.classes
    scale = x.shape[1] ** 0.5
    x, test = x.double().cpu() / scale, test.double().cpu() / scale
    y = F.one_hot(labels.cpu(), classes).double()

    def right(outputs: Tensor) -> float:
        return 100 * float((outputs.argmax(1) == answers.cpu()).double().mean())

    if part == GROWN:
        model = ParallelReLU(
            options.lam,
            tol=1e-3,
            max_rounds=options.rounds,
            max_neurons=options.neurons,
            grow=options.grow,
            descent=options.descent,
            random_state=lab.seed,
        )
        with recorded():
            model.fit(x.numpy(), y.numpy())
        for k, (value, width) in enumerate(zip(model.history_, model.width_history_, strict=True)):
            yield {"round": k, "objective": float(value), "width": int(width)}
        proof = model.certificate_
        yield {
            "round": model.n_iter_,
            "objective": float(model.objective_),
            "width": model.n_neurons_,
            "status": str(proof.status),
            "polar": proof.polar_lower / options.lam,
            "bound": proof.polar_upper / options.lam,
            "test": right(torch.tensor(model.predict(test.numpy()))),
        }
        return
    X, T = with_ones(x), with_ones(test)
    if part == RIDGE:
        weights = ridge_factor(X.mT, options.lam / 10).solve((X.mT @ y).mT).mT
        yield {"test": right(T @ weights), "width": 0}
        return
    generator = lab.generator(1)
    start = [
        0.1 * torch.randn(options.neurons, n, generator=generator, dtype=torch.float64) for n in (X.shape[1], classes)
    ]
    W, V = descend(X, y, Neurons(*start), options.lam, options.descent * options.rounds)
    value = 0.5 * (y - torch.relu(X @ W.mT) @ V).square().sum() + options.lam * (W.norm(dim=1) * V.norm(dim=1)).sum()
    yield {"objective": float(value), "width": len(W), "test": right(torch.relu(T @ W.mT) @ V)}


def compare(results: Results[GrowReLUDigitsOptions]) -> list[Comparison]:
    """Accuracy, objective and width."""
    rows = [
        Comparison(f"{part}: test accuracy", None, results.final(part, "test"), "%") for part in (GROWN, FIXED, RIDGE)
    ]
    for key, digits in (("objective", 3), ("width", 0)):
        rows += [Comparison(f"{part}: {key}", None, results.final(part, key), "", digits) for part in (GROWN, FIXED)]
    return rows


def plots(results: Results[GrowReLUDigitsOptions]) -> list[Plot]:
    """The objective as it grows."""
    return [
        curves(results, [GROWN], key="objective", over="round", title="Objective as it grows", y="objective"),
        curves(results, [GROWN], key="width", over="round", title="Neurons as it grows", y="neurons"),
    ]


def findings(results: Results[GrowReLUDigitsOptions]) -> Sequence[str | Difference]:
    """Objective and accuracy against the controls, and the certificate's status."""
    sentences: list[str | Difference] = [
        difference(results, GROWN, FIXED, "objective", unit="", higher=False, quantity="objective")
    ]
    sentences += [difference(results, GROWN, other, quantity="test accuracy") for other in (FIXED, RIDGE)]
    for values in results.curve(GROWN, "status").values():
        if values:
            sentences.append(
                f"The certificate of the grown network is {values[-1]}: with many inputs the polar is only bounded."
            )
            break
    return sentences


def claims(results: Results[GrowReLUDigitsOptions]) -> list[Claim]:
    """The same in many dimensions, where the polar has no exact solution here."""
    status = [values[-1] for values in results.curve(GROWN, "status").values() if values]
    gaps = results.paired(GROWN, FIXED, "objective")
    text = "Theorem 2: growing a ReLU layer ends at the global minimum (64 inputs)"
    measured = (
        f"certified in {status.count('CERTIFIED')} of {len(status)}; objective {signed(gaps, '')} against a fixed width"
    )
    verdict = judge_certificates(status, [math.inf])
    words = scale(results, f"{results.options.samples} digits")
    return [Claim(text, "gap 0", measured if status else "–", words, verdict)]


experiment = Experiment(
    name="grow-relu-digits",
    title="A hidden layer grown on digits",
    source="[Vidal2018], Theorem 2, the meta-algorithm",
    about=(
        "Digits as regression on one-hot labels by one hidden layer of ReLUs, grown by ascent on the polar. With "
        "64 inputs the polar is NP-hard, so the fit is not certified. Controls: the same objective at a fixed "
        "width from a random start with as many iterations, and ridge regression without a hidden layer. The "
        "slides have no numbers."
    ),
    presets={
        "smoke": Preset(GrowReLUDigitsOptions(samples=80, neurons=6, grow=3, descent=15, rounds=2), (0,), 0.05),
        "laptop": Preset(GrowReLUDigitsOptions(), (0, 1, 2), 1.5),
        "paper": Preset(GrowReLUDigitsOptions(samples=0, neurons=200, rounds=50), (0, 1, 2), 60),
    },
    parts=parts,
    run=run,
    compare=compare,
    plots=plots,
    findings=findings,
    claims=claims,
    columns=("objective", "width"),
)

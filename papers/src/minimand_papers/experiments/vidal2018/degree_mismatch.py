"""Weight decay traps deep chains at zero; a regulariser of the network's own degree does not."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap

from minimand.homogeneous import product_of_norms, smooth_surrogate, weight_decay

from ...claims import combine, judge_bound, scale
from ...comparing import mean_std
from ...context import Lab
from ...drawing import bars
from ...experiment import Claim, Comparison, Experiment, Metrics, Part, Plot, Preset, Results, Verdict

REGULARIZERS: dict[str, Callable[[nn.Module], Tensor]] = {
    "weight decay": weight_decay,
    "product of norms": product_of_norms,
    "smooth surrogate": smooth_surrogate,
}


@dataclasses.dataclass(frozen=True)
class DegreeMismatchOptions:
    """A chain of linear layers that learns a linear map, from many starts.

    Args:
        depths: Numbers of layers K.
        width: Width of the layers.
        samples: Number of data points.
        starts: Number of random starts.
        scale: Norm of each layer at the start.
        lam: The weight of the regulariser.
        iterations: Iterations of gradient descent.
        rate: Step of gradient descent.
    """

    depths: tuple[int, ...] = (2, 3, 4)
    width: int = 4
    samples: int = 30
    starts: int = 20
    scale: float = 0.5
    lam: float = 5.0
    iterations: int = 3000
    rate: float = 1e-3


def parts(options: DegreeMismatchOptions) -> list[Part]:
    """Every regulariser at every depth."""
    return [Part(f"{name}, K = {depth}") for depth in options.depths for name in REGULARIZERS]


def run(options: DegreeMismatchOptions, part: str, lab: Lab) -> Iterator[Metrics]:
    """Count the starts that end at zero, and at the lowest objective found."""
    name, _, depth = part.partition(", K = ")
    x = torch.randn(options.samples, options.width, generator=lab.generator(), dtype=torch.float64)
    sizes = [options.width] * int(depth) + [1]
    nets = []
    for start in range(options.starts):
        torch.manual_seed(1000 * lab.seed + start)
        net = nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(sizes))).double()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.mul_(options.scale / parameter.norm())
        nets.append(net)
    outputs = descend(nets, x, x[:, :1], options, REGULARIZERS[name]) / x[:, 0].norm()
    yield {"trapped": 100 * float((outputs < 1e-2).double().mean()), "output": float(outputs.mean())}


class RegularizedChain(nn.Module):
    """The objective of a network, as a module: its parameters may be replaced."""

    def __init__(self, net: nn.Module, lam: float, regularizer: Callable[[nn.Module], Tensor]) -> None:
        super().__init__()
        self.net, self.lam, self.regularizer = net, lam, regularizer

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Half the squared error, and the regulariser."""
        return 0.5 * (y - self.net(x)).square().sum() + self.lam * self.regularizer(self.net)


def descend(
    nets: Sequence[nn.Module],
    x: Tensor,
    y: Tensor,
    options: DegreeMismatchOptions,
    regularizer: Callable[[nn.Module], Tensor],
) -> Tensor:
    """Gradient descent of all networks at once; returns the norms of their outputs at its end."""
    objective = RegularizedChain(nets[0], options.lam, regularizer)
    weights, _ = stack_module_state([RegularizedChain(net, options.lam, regularizer) for net in nets])
    gradient = vmap(grad(lambda weights: functional_call(objective, weights, (x, y))))
    weights = {name: weight.detach() for name, weight in weights.items()}
    for _ in range(options.iterations):
        weights = {name: weights[name] - options.rate * slope for name, slope in gradient(weights).items()}
    inner = {name.removeprefix("net."): weight for name, weight in weights.items()}
    outputs = vmap(lambda weights: functional_call(nets[0], weights, (x,)))(inner)
    return outputs.flatten(1).norm(dim=1)


def compare(results: Results[DegreeMismatchOptions]) -> list[Comparison]:
    """Shares of trapped runs."""
    return [
        Comparison(f"{part.name}: runs that end at zero", None, results.final(part.name, "trapped"), "%", 0)
        for part in parts(results.options)
    ]


def plots(results: Results[DegreeMismatchOptions]) -> list[Plot]:
    """The shares as bars."""
    return [bars(compare(results), title="Runs that end at zero", y="share, %")]


def findings(results: Results[DegreeMismatchOptions]) -> Sequence[str]:
    """Depth by depth."""
    sentences = []
    for depth in results.options.depths:
        shares = {name: results.final(f"{name}, K = {depth}", "trapped") for name in REGULARIZERS}
        if all(shares.values()):
            listed = ", ".join(f"{name} {_share(values)}" for name, values in shares.items())
            sentences.append(f"With {depth} layers the share of runs that end at zero is: {listed}.")
    return sentences


def _share(values: Sequence[float]) -> str:
    """The mean over the seeds, and the range if they differ."""
    spread = f" ({min(values):.0f} to {max(values):.0f}% by seed)" if max(values) > min(values) else ""
    return f"{mean_std(values)[0]:.0f}%{spread}"


def claims(results: Results[DegreeMismatchOptions]) -> list[Claim]:
    """Weight decay traps descent at zero for more than two layers; regularisers of the network's degree do not."""
    trapped = {
        (name, depth): results.final(f"{name}, K = {depth}", "trapped")
        for name in REGULARIZERS
        for depth in results.options.depths
    }
    deep = [depth for depth in results.options.depths if depth > 2]
    cells: list[Verdict] = [judge_bound([-v for v in trapped["weight decay", depth]], -50) for depth in deep]
    cells += [judge_bound(trapped[name, depth], 0) for name, depth in trapped if name != "weight decay" and depth > 2]
    shares = ", ".join(f"{_share(v)} at K = {depth}" for depth in deep if (v := trapped["weight decay", depth]))
    others = max((max(v) for (name, _), v in trapped.items() if name != "weight decay" and v), default=0.0)
    return [
        Claim(
            "Proper regularization: for K > 2 layers weight decay traps descent at zero, products of norms do not",
            "–",
            f"runs that end at zero: weight decay {shares}; others at most {others:.0f}%" if shares else "–",
            scale(results, f"{results.options.starts} starts, linear networks"),
            combine(cells) if all(trapped["weight decay", depth] for depth in deep) else "not run",
        )
    ]


experiment = Experiment(
    name="degree-mismatch",
    title="A regulariser of the wrong degree can trap descent at zero",
    source="[Vidal2018], Key Ingredient: Proper Regularization; Basic Regularization: Weight Decay",
    about=(
        "Near zero a chain of K linear layers is of order K and weight decay is of order 2, so for K > 2 zero is a "
        "local minimum for any data. The product of norms and its smooth surrogate have order K. Gradient descent "
        "runs from small random starts; the share of runs that end at the zero network is measured. The slides "
        "have no numbers."
    ),
    presets={
        "smoke": Preset(
            DegreeMismatchOptions(depths=(2, 3), samples=10, starts=2, scale=0.2, iterations=150, rate=1e-2, lam=2.0),
            (0,),
            0.05,
        ),
        "laptop": Preset(DegreeMismatchOptions(), (0, 1, 2, 3, 4), 2),
        "paper": Preset(DegreeMismatchOptions(starts=50), (0, 1, 2, 3, 4), 4),
    },
    parts=parts,
    run=run,
    compare=compare,
    plots=plots,
    findings=findings,
    claims=claims,
    columns=("trapped", "output"),
)

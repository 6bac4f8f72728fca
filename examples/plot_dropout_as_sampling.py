r"""
Dropout is sampling
===================

One step of proximal stochastic gradient with a τ-nice sample, from zero and with unit step, is
dropout → linear → ReLU ([Bibi2019], Proposition 1). More steps of the same solver average over masks, so that the
output depends less on which inputs were dropped.
"""

# %%
# One step is the block
# ---------------------
# The sample of the solver is the dropout mask, and the scale n/τ is dropout's 1/(1 − p).

import matplotlib.pyplot as plt
import torch

from minimand.nn import SolverLinear
from minimand.solvers import Nice, ProxSG
from minimand.solvers.sampling import Request

torch.manual_seed(0)
inputs, outputs, tau = 64, 48, 32
y = torch.randn(1, inputs)
layer = SolverLinear(inputs, outputs, solver=ProxSG(iters=1, tau=tau, step=1.0), ridge=0.0)
layer.generator = torch.Generator().manual_seed(1)

mask = Nice().draw(Request(tau, inputs, 1, y, torch.Generator().manual_seed(1))).weight
block = torch.relu(torch.nn.functional.linear(y * mask, layer.weight, layer.bias))
print("equal to the bit:", torch.equal(layer(y), block))
print("kept:", int(mask.count_nonzero()), "of", inputs, "with weight", mask.max().item())

# %%
# More steps, less noise
# ----------------------
# The same layer with 1, 3, 10, 30 and 100 iterations, 2,000 samples each, with the automatic step: the expected
# smoothness of the sampling, and a decay of 1/(1 + k/10). The spread is the standard deviation of the output over the
# samples relative to the norm of its mean.

from minimand.solvers import Harmonic

samples = 2000
counts = (1, 3, 10, 30, 100)
shares = {"τ = 58 (p ≈ 0.1)": 58, "τ = 32 (p = 0.5)": 32, "τ = 6 (p ≈ 0.9)": 6}
spread: dict[str, list[float]] = {}
clouds: dict[int, torch.Tensor] = {}
with torch.no_grad():
    for name, size in shares.items():
        spread[name] = []
        for iters in counts:
            layer.solver = ProxSG(iters=iters, tau=size, decay=Harmonic(10))
            draws = layer(y.expand(samples, -1))
            spread[name].append(float(draws.var(0).sum().sqrt() / draws.mean(0).norm()))
            if size == 32:
                clouds[iters] = draws

colors = ["#0072B2", "#E69F00", "#D55E00"]  # Okabe–Ito
figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 4.4), layout="constrained")
for (name, values), color, marker in zip(spread.items(), colors, "os^", strict=True):
    left.loglog(counts, values, color=color, marker=marker, label=name)
left.set(xlabel="iterations", ylabel="spread of the output / norm of its mean", title="All outputs")
left.set_xticks(counts, [str(c) for c in counts])
left.grid(alpha=0.3, which="both")
left.legend(frameon=False)

unit = int(clouds[100].mean(0).argmax())
parts = right.violinplot(
    [clouds[iters][:, unit].numpy() for iters in counts], range(len(counts)), widths=0.8, showextrema=False
)
for body in parts["bodies"]:
    body.set(facecolor="#E69F00", edgecolor="black", alpha=0.7)
for place, iters in enumerate(counts):
    low, middle, high = torch.quantile(clouds[iters][:, unit], torch.tensor([0.05, 0.5, 0.95])).tolist()
    right.plot([place, place], [low, high], color="black", linewidth=1)
    right.plot(place, middle, "o", color="black", markersize=4)
right.set_xticks(range(len(counts)), [str(c) for c in counts])
right.set(xlabel="iterations", ylabel="value", title="One output, τ = 32: 2,000 samples")
for axis in (left, right):
    axis.spines[["top", "right"]].set_visible(False)

# %%
# The bars show the 5th to the 95th percentile, the dots the medians. With more iterations the output also approaches
# the minimiser of the layer's problem, which is far from the result of one scaled step.

plt.show()

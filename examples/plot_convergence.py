r"""
Every solver on one layer's problem
===================================

A ReLU layer with weight :math:`A` and input :math:`y` is one step of a solver on

.. math:: \min_{x \ge 0}\; \tfrac12\|A^\top x - y\|^2 - \langle b, x\rangle + \tfrac\lambda2\|x\|^2 .

Here is how far each solver comes with more steps. The layer is the one of ``minimand run layer-convergence``:
64 → 128, He initialisation, on 256 of scikit-learn's handwritten digits.
"""

# %%
# Measure
# -------
# The gap is what is left of the way from the objective at zero to the optimum. Stochastic solvers see half of the
# inputs (coordinate descent: half of the outputs) in each step; their gap is a mean over three seeds.

import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch

from minimand_papers.experiments.bibi2019 import layer_convergence
from minimand_papers.runner import RunSetting, read_results, run

options = layer_convergence.LayerConvergenceOptions(iters=40)
with tempfile.TemporaryDirectory() as folder:
    path = run(RunSetting("layer-convergence", options=options, seeds=(0, 1, 2), jobs=1, out=Path(folder)))
    _, results, _ = read_results(path.parent)

methods = layer_convergence.solvers(40)
stochastic = {name for name, solver in methods.items() if solver.stochastic}
rows = {name: torch.tensor(list(results.curve(name, "gap").values())).mean(0) for name in methods}
for name, gap in rows.items():
    print(f"{name:20s}", *(f"after {k}: {100 * gap[k - 1]:4.1f} %" for k in (1, 10, 40)), sep="   ")

# %%
# Draw
# ----
# Prox-GD is in both panels, for comparison: it is what the stochastic solvers would do with all inputs at once.

colors = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00"]  # Okabe–Ito
markers = ["o", "s", "^", "D", "v"]
figure, axes = plt.subplots(1, 2, figsize=(10.5, 4.6), sharey=True, layout="constrained")
panels = [
    ("Deterministic", [name for name in rows if name not in stochastic and name != "Prox-GD"]),
    ("Stochastic", [name for name in rows if name in stochastic]),
]
for axis, (title, names) in zip(axes, panels, strict=True):
    k = torch.arange(1, 41)
    axis.semilogy(k, rows["Prox-GD"], color="black", linewidth=2, label="Prox-GD")
    for shift, (name, color, marker) in enumerate(zip(names, colors, markers, strict=False)):
        axis.semilogy(k, rows[name], color=color, marker=marker, markevery=(2 * shift, 10), markersize=6, label=name)
    axis.set(title=title, xlabel="iteration", xlim=(1, 40))
    axis.grid(alpha=0.3, which="both")
    axis.legend(frameon=False, loc="lower left")
    axis.spines[["top", "right"]].set_visible(False)
axes[0].set_ylabel("share of the gap that is left")

# %%
# The first iteration of Prox-GD, heavy ball and FISTA is the plain block, scaled by the step. Momentum gains the more,
# the longer it runs. ADMM spends more in an iteration: it solves a linear system, whose factor is formed once.
# Prox-SG stalls where the noise of its samples balances its decaying step. SVRG and coordinate descent do not stall,
# as their noise vanishes at the optimum; SVRG pays for it with a shorter step.

plt.show()

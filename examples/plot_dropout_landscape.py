"""
The loss surface of dropout
===========================

A linear autoencoder with one input, two hidden units and one output has four weights. With tied weights
:math:`u = v = (w_1, w_2)` there are two, and the loss with dropout, in expectation, is a surface:

.. math:: f(w) = (1 - w_1^2 - w_2^2)^2 + \\lambda(w_1^4 + w_2^4), \\qquad \\lambda = \\frac{p}{1-p} .

Without dropout a whole circle of weights is optimal. With any rate four minima remain, at which both units have the
same weight: the minima are *equalised*. A large rate also moves them towards zero ([Vidal2018], "Effect of Dropout Rate
on the Landscape").
"""

import matplotlib.pyplot as plt
import torch

from minimand.factor import dropout_optimum, equalize
from minimand.factor.dropout import dropout_objective

# %%
# The surface for three rates
# ---------------------------
# The white crosses are the global minima in closed form: the threshold gives the product, equalisation the weights.

Y = torch.ones(1, 1, dtype=torch.float64)
axis = torch.linspace(-1.3, 1.3, 121, dtype=torch.float64)


def surface_of(p: float) -> torch.Tensor:
    grid = torch.stack(torch.meshgrid(axis, axis, indexing="xy"), -1).unsqueeze(2)
    return torch.func.vmap(torch.func.vmap(lambda w: dropout_objective(Y, w, w, p)))(grid)


rates = {"no dropout": 0.0, "small rate, p = 0.2": 0.2, "large rate, p = 0.6": 0.6}

figure, panels = plt.subplots(1, 3, figsize=(12, 4.1), layout="constrained", sharey=True)
for panel, (name, p) in zip(panels, rates.items(), strict=True):
    surface = surface_of(p)
    shown = panel.contourf(axis, axis, surface, levels=torch.linspace(0, 2, 21).tolist(), cmap="cividis", extend="max")
    X, threshold, _ = dropout_optimum(Y, 2, p)
    U, V = equalize(torch.cat([X, 0 * X], 1), torch.tensor([[1.0, 0.0]], dtype=torch.float64))
    size = float(U.abs()[0, 0])
    if p == 0:
        panel.add_patch(plt.Circle((0, 0), 1.0, fill=False, color="white", linewidth=2, linestyle="--"))
    else:
        panel.plot([size, size, -size, -size], [size, -size, size, -size], "x", color="white", markersize=11, mew=3)
    panel.set(
        title=f"{name}\nminimum {float(surface.min()):.3f}, threshold {threshold:.3f}", xlabel="$w_1$", aspect="equal"
    )
panels[0].set_ylabel("$w_2$")
figure.colorbar(shown, ax=panels, label="expected loss", shrink=0.9)

# %%
# Sampled dropout converges to the same minima
# --------------------------------------------
# Gradient steps on sampled masks do not use the formula and end at the same points.

torch.manual_seed(0)
p, paths = 0.2, []
for start in ([1.25, 0.1], [-0.2, 1.2], [-0.1, -0.15]):
    w = torch.tensor(start, dtype=torch.float64)
    path = [w.tolist()]
    for k in range(2000):
        kept = (torch.rand(2) > p).double() / (1 - p)
        w = w + 0.02 / (1 + k / 500) * 4 * (1 - (kept * w * w).sum()) * kept * w
        path.append(w.tolist())
    paths.append(torch.tensor(path))

figure, panel = plt.subplots(figsize=(5.4, 4.8), layout="constrained")
surface = surface_of(p)
panel.contourf(axis, axis, surface, levels=torch.linspace(0, 2, 21).tolist(), cmap="cividis", extend="max")
for path, color in zip(paths, ("#E69F00", "#CC79A7", "#56B4E9"), strict=True):
    panel.plot(path[:, 0], path[:, 1], color=color, linewidth=0.7)
    panel.plot(*path[0], "o", color=color, markeredgecolor="white")
    panel.plot(*path[-500:].mean(0), "s", color=color, markeredgecolor="white", markersize=9)
panel.set(title="Dropout from three starts (circles) to equalised minima (squares)", xlabel="$w_1$", ylabel="$w_2$")
panel.title.set_fontsize(10)
plt.show()

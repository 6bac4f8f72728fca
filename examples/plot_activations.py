"""
Activations as proximal operators
=================================

A smooth activation is exactly the prox of a convex function at step 1. At other steps the prox of the same function has
another shape. The logarithmic barriers of [Bibi2019] approximate activations; the error depends on their weight.
"""

import matplotlib.pyplot as plt
import torch

from minimand.functions import LogBarrier, LogBox, LogUnit, from_activation

z = torch.linspace(-5, 5, 1001, dtype=torch.float64)

# %%
# The barriers against the activations
# ------------------------------------
# Each barrier is plotted with the weight of the paper and with the weight of the smallest maximal error. The barrier of
# the sigmoid is centred at ½ and shifted here; its first weight has the sigmoid's slope at the centre. The second row
# shows the errors.

panels = [
    ("softplus", LogBarrier, 0.0, 1.0, 0.381),
    ("tanh", LogBox, 0.0, 0.1, 0.0536),
    ("sigmoid", LogUnit, 0.5, 0.375, 0.236),
]
# Two lines of the same family in one hue, the exact activation in black behind them.
light, dark = "#8fb4d9", "#1f5fa8"
figure, axes = plt.subplots(2, 3, figsize=(11, 5.6), sharex=True, height_ratios=[2, 1], layout="constrained")
for (name, barrier, shift, given, best), (top, bottom) in zip(panels, axes.T, strict=True):
    exact = from_activation(name).prox(z)
    top.plot(z, exact, color="black", linewidth=3, alpha=0.35, label=name)
    for gamma, color, style in ((given, light, "--"), (best, dark, "-")):
        approximate = barrier(gamma).prox(z + shift)
        error = approximate - exact
        top.plot(z, approximate, style, color=color, label=f"{barrier.__name__}, γ = {gamma:.3g}")
        bottom.plot(z, error, style, color=color, label=f"largest {error.abs().max():.3f}")
    bottom.axhline(0, color="black", linewidth=0.8, alpha=0.35)
    top.legend(frameon=False, fontsize=9, loc="upper left")
    bottom.legend(frameon=False, fontsize=8)
    bottom.set_xlabel("a")
    for axis in (top, bottom):
        axis.spines[["top", "right"]].set_visible(False)
axes[0, 0].set_ylabel("prox(a)")
axes[1, 0].set_ylabel("error")
axes[0, 1].set_ylim(-1.1, 1.6)
axes[0, 2].set_ylim(-0.05, 1.35)
figure.suptitle("Logarithmic barriers approximate smooth activations")

# %%
# The step changes the shape
# --------------------------
# A solver with step η applies the prox of ηg. At η = 1 this is the activation. A small step barely changes arguments
# inside the activation's range; a large step moves them towards the minimiser of g.

figure, axes = plt.subplots(1, 3, figsize=(11, 3.4), layout="constrained")
steps = (0.05, 0.3, 1.0, 4.0, 20.0)
colors = plt.colormaps["viridis"](torch.linspace(0.05, 0.85, len(steps)).numpy())
for axis, name in zip(axes, ("softplus", "tanh", "elu"), strict=True):
    function = from_activation(name)
    for step, color in zip(steps, colors, strict=True):
        width = 2.6 if step == 1 else 1.4
        axis.plot(z, function.prox(z, step), color=color, linewidth=width, label=f"η = {step:g}")
    axis.set_title(name)
    axis.set_xlabel("a")
    axis.spines[["top", "right"]].set_visible(False)
axes[0].set_ylabel("prox at step η")
axes[0].legend(frameon=False, fontsize=9)

plt.show()

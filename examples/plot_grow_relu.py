"""
Growing a hidden layer to the global minimum
============================================

``ParallelReLU`` starts without neurons and adds the neurons that the polar finds, until a duality gap proves that no
network of any width is better. Training at a fixed width from random starts has no such proof and may end in a poor
local minimum.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch

from minimand.factor import ParallelReLU
from minimand.homogeneous.neurons import Neurons, descend

# %%
# Growth
# ------
# Forty noisy samples of a function of one variable.

random = np.random.default_rng(0)
x = np.sort(random.uniform(-2, 2, 40))
y = np.sin(3 * x) + 0.5 * x + 0.1 * random.normal(size=40)
model = ParallelReLU(lam=0.3, grow=1).fit(x[:, None], y)
print(model.certificate_)
print("neurons:", model.n_neurons_)

# %%
# Fixed widths
# ------------
# The same objective, minimised by L-BFGS from twenty random starts for each width.

X, Y = torch.tensor(np.c_[x, np.ones(40)]), torch.tensor(y)[:, None]
widths, ends = (1, 2, 4, 8, 16, 32), []
for width in widths:
    values = []
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        start = [torch.randn(width, k, generator=generator, dtype=torch.float64) for k in (2, 1)]
        W, V = descend(X, Y, Neurons(*start), 0.3, 300)
        fit = 0.5 * (Y - torch.relu(X @ W.mT) @ V).square().sum()
        values.append(float(fit + 0.3 * (W.norm(dim=1) * V.norm(dim=1)).sum()))
    ends.append(values)

figure, (first, second, third) = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
grid = np.linspace(-2.2, 2.2, 400)
first.plot(x, y, "o", color="#999999", markersize=4)
first.plot(grid, model.predict(grid[:, None]), color="#0072B2", linewidth=2)
first.set(xlabel="x", ylabel="y", title=f"{model.n_neurons_} neurons, {model.certificate_.status}")
rounds = np.arange(len(model.history_))
second.semilogy(rounds, model.gap_history_, "o-", color="#D55E00", label="relative gap")
second.set(xlabel="round", ylabel="relative gap", title="Proved gap")
for place, count in zip(rounds, model.width_history_, strict=True):
    second.annotate(
        str(count), (place, model.gap_history_[place]), textcoords="offset points", xytext=(5, 5), fontsize=8
    )
best = model.objective_
third.boxplot([np.maximum(np.array(v) / best - 1, 1e-9) for v in ends], tick_labels=[str(w) for w in widths])
third.axhline(model.certificate_.relative_gap, color="#0072B2", linestyle="--", label="grown: proved gap")
third.set(xlabel="width", ylabel="objective / best − 1", title="Twenty random starts", yscale="log")
third.legend(frameon=False)
for axes in (first, second, third):
    axes.spines[["top", "right"]].set_visible(False)
plt.show()

# %%
# The numbers at the dots are widths. Redundant neurons are merged or removed during growth.

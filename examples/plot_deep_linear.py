"""
Deep linear networks have no spurious minima
============================================

Baldi and Hornik (1989): for the squared loss, every local minimum of a linear network is global. The other critical
points are saddles, at which the network has found some of the singular directions but not all. Gradient descent slows
down near saddles and then escapes.
"""

import matplotlib.pyplot as plt
import torch
from torch import nn

torch.manual_seed(0)
values = torch.tensor([5.0, 3.0, 1.5, 0.5, 0.25], dtype=torch.float64)
Q, _ = torch.linalg.qr(torch.randn(5, 5, dtype=torch.float64))
P, _ = torch.linalg.qr(torch.randn(5, 5, dtype=torch.float64))
target = (Q * values) @ P.mT
hidden = 3
best = float(values[hidden:].square().sum())

# %%
# Ten starts, one value
# ---------------------
# A network 5 → 3 → 3 → 5 learns a matrix of rank 5. Its best approximation is the truncated singular value
# decomposition.

curves, ends = [], []
for seed in range(10):
    torch.manual_seed(seed)
    net = nn.Sequential(
        *(nn.Linear(a, b, bias=False) for a, b in ((5, hidden), (hidden, hidden), (hidden, 5)))
    ).double()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(0.5)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.025)
    curve = []
    for _ in range(2000):
        optimizer.zero_grad()
        loss = (net(torch.eye(5, dtype=torch.float64)) - target.mT).square().sum()
        loss.backward()
        optimizer.step()
        curve.append(loss.item())
    curves.append(curve)
    ends.append(curve[-1])
print("worst of ten starts over the global minimum:", max(ends) / best - 1)

figure, axes = plt.subplots(figsize=(7.5, 4.4), layout="constrained")
for curve in curves:
    axes.semilogx(range(1, len(curve) + 1), curve, color="#0072B2", alpha=0.5, linewidth=1)
for found in range(hidden + 1):
    level = float(values[found:].square().sum())
    name = "the global minimum" if found == hidden else f"saddle: {found} of {hidden} directions"
    axes.axhline(level, color="#D55E00" if found == hidden else "#999999", linestyle="--", linewidth=1)
    axes.annotate(name, (1, level), textcoords="offset points", xytext=(2, 3), fontsize=8)
axes.set(xlabel="iterations", ylabel="squared loss", title="Plateaus are saddles; every run ends at the global minimum")
axes.spines[["top", "right"]].set_visible(False)
plt.show()

r"""
Non-negative least squares as a layer
=====================================

A layer that unmixes: its output is :math:`\arg\min_{x \ge 0} \tfrac12\|A^\top x - y\|^2 + \tfrac\lambda2\|x\|^2`, and
the spectra A are learned through it by the implicit function theorem. The supervision is the mixing proportions of 200
samples.
"""

# %%
# Learn the spectra
# -----------------

import matplotlib.pyplot as plt
import torch

from minimand import solve
from minimand.adjoints import Implicit
from minimand.functions import NonNegative
from minimand.operators import Dense
from minimand.solvers import Problem

torch.manual_seed(0)
grid = torch.linspace(0, 1, 60, dtype=torch.float64)
true = torch.stack([torch.exp(-((grid - c) ** 2) / 0.008) for c in (0.25, 0.4, 0.7)])
mixture = torch.rand(200, 3, dtype=torch.float64) * (torch.rand(200, 3) < 0.6)
y = mixture @ true + 0.02 * torch.randn(200, 60, dtype=torch.float64)

spectra = (true + 0.3 * torch.randn(3, 60, dtype=torch.float64)).clamp_min(0.01).requires_grad_()
first = spectra.detach().clone()
optimizer = torch.optim.Adam([spectra], lr=0.02)
losses = []
for _ in range(120):
    optimizer.zero_grad()
    found = solve(Problem(Dense(spectra), NonNegative(), y, ridge=1e-3), tol=1e-8, adjoint=Implicit()).x
    loss = (found - mixture).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"error of the proportions: {losses[0]:.4f} at the start, {losses[-1]:.5f} after {len(losses)} steps")

# %%
# Draw
# ----

fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5))
for k, color in enumerate(("#0072B2", "#D55E00", "#009E73")):
    left.plot(grid, true[k], color=color, label="true" if k == 0 else None)
    left.plot(grid, first[k], ":", color=color, label="start" if k == 0 else None)
    left.plot(grid, spectra.detach()[k], "--", color=color, label="learned" if k == 0 else None)
left.set(xlabel="wavelength", ylabel="spectrum")
left.legend()
right.semilogy(losses, color="#0072B2")
right.set(xlabel="step of Adam", ylabel="squared error of the proportions")
fig.tight_layout()
plt.show()

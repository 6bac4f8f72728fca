r"""
A Lasso path as one batch
=========================

The solutions of :math:`\min_x \tfrac12\|Xx - y\|^2 + \lambda\|x\|_1` for many :math:`\lambda` are one batch: the
weight of :class:`~minimand.functions.L1` has one number per row. Every row stops when its own duality gap is small
enough.
"""

# %%
# Solve
# -----

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_diabetes

from minimand import solve
from minimand.functions import L1
from minimand.operators import Dense
from minimand.solvers import Problem

X, y = load_diabetes(return_X_y=True)
X, y = torch.from_numpy(X), torch.from_numpy(y - y.mean())[None]
most = float((y @ X).abs().max())
weights = most * torch.logspace(0, -3, 60, dtype=torch.float64)[:, None]
path = solve(Problem(Dense(X.mT.contiguous()), L1(weights), y.expand(60, -1)), tol=1e-8)
print(path.solver, f"gap {float(path.gap):.1e} of an objective of {float(path.objective):.4e}", sep="\n")

# %%
# Draw
# ----

colors = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00"]
fig, ax = plt.subplots(figsize=(7, 4))
for k, coefficients in enumerate(path.x.mT):
    ax.semilogx(weights[:, 0] / most, coefficients, color=colors[k % 5], linestyle="-" if k < 5 else "--")
ax.invert_xaxis()
ax.set(xlabel=r"$\lambda / \lambda_{\max}$", ylabel="coefficient", title="60 Lassos, one call")
fig.tight_layout()
plt.show()

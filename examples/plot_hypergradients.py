r"""
Group-sparse logistic regression tuned by hypergradients
========================================================

The weight of a group penalty is chosen by gradient descent on the loss of validation data, whose gradient in the weight
comes from the implicit function theorem:

.. math:: \min_\lambda\; \ell_{\text{val}}(x(\lambda)), \qquad
    x(\lambda) = \arg\min_x \textstyle\sum_i \log(1 + e^{-y_i a_i^\top x}) + \lambda\sum_G \|x_G\| .
"""

# %%
# Descend on the weight
# ---------------------
# The weight of :class:`~minimand.functions.GroupL2` is a tensor, which gradients reach.

import matplotlib.pyplot as plt
import torch

from minimand import solve
from minimand.adjoints import Implicit
from minimand.functions import GroupL2
from minimand.operators import Dense
from minimand.solvers import Logistic, Problem

torch.manual_seed(0)
groups = torch.arange(40) // 4
truth = torch.zeros(40, dtype=torch.float64)
truth[:8] = torch.randn(8, dtype=torch.float64)
X = torch.randn(400, 40, dtype=torch.float64)
y = torch.where(X @ truth + 1.5 * torch.randn(400, dtype=torch.float64) > 0, 1.0, -1.0).double()
train, val = slice(0, 120), slice(120, 400)


def validation(log_weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    problem = Problem(Dense(X[train].mT), GroupL2(log_weight.exp(), groups), y[None, train], datafit=Logistic())
    x = solve(problem, tol=1e-8, adjoint=Implicit()).x[0]
    return Logistic().values(X[val] @ x, y[val]).mean(), x.detach()


log_weight = torch.tensor(-1.0, dtype=torch.float64, requires_grad=True)
optimizer = torch.optim.Adam([log_weight], lr=0.2)
steps = []
for _ in range(20):
    optimizer.zero_grad()
    loss, x = validation(log_weight)
    loss.backward()
    steps.append((log_weight.item(), loss.item()))
    optimizer.step()
norms = torch.zeros(10, dtype=torch.float64).index_add(0, groups, x.square()).sqrt()
kept = int((norms > 1e-6).sum())
print(f"weight {log_weight.exp().item():.2f}, validation loss {loss.item():.4f}, {kept} of 10 groups kept")

# %%
# Draw
# ----

curve = torch.linspace(-1.5, 3.0, 15, dtype=torch.float64)
with torch.no_grad():
    values = [validation(each)[0].item() for each in curve]
fig, ax = plt.subplots(figsize=(6, 4))
ax.plot(curve.exp(), values, color="#0072B2", label="validation loss on a grid")
ax.plot(
    [torch.tensor(w).exp() for w, _ in steps],
    [v for _, v in steps],
    "o",
    color="#D55E00",
    label="steps by hypergradients",
)
ax.set(xscale="log", xlabel=r"weight $\lambda$", ylabel="validation loss")
ax.legend()
fig.tight_layout()
plt.show()

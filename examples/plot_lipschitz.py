r"""
Bounding a convolution from a few frequencies
=============================================

The squared norm of a convolution is the maximum over frequencies of the largest eigenvalue of its symbol,
:math:`\lambda_{\max}(G(\omega))`. At every frequency it is the maximum of trigonometric polynomials of low degree, so
that the theorem of Ehlich and Zeller bounds it everywhere by its values on a coarse grid.
"""

# %%
# The largest eigenvalue
# ----------------------
# A 3×3 layer with 16 channels. The dots are the 12×12 frequencies of the ``grid`` method.

import matplotlib.pyplot as plt
import torch
from torch import nn

from minimand.norms import lipschitz
from minimand.norms.symbol import Symbol
from minimand.operators import Conv2d

torch.manual_seed(0)
layer = nn.Conv2d(16, 16, 3, padding=1, bias=False).double()
symbol = Symbol(layer.weight.detach().unsqueeze(0))


def largest_eigenvalues(points: int) -> torch.Tensor:
    """The largest eigenvalue at all frequencies of a grid; the conjugate half is copied."""
    half = torch.cat([torch.linalg.eigvalsh(g[:, 0])[:, -1] for g in symbol.grams((points, points))])
    half = half * symbol.scale**2
    index = (symbol.frequencies((points, points)) * points / (2 * torch.pi)).round().long()
    full = torch.zeros(points, points, dtype=torch.float64)
    full[index[:, 0], index[:, 1]] = half
    full[-index[:, 0] % points, -index[:, 1] % points] = half
    return full


fine = largest_eigenvalues(96)
figure, axes = plt.subplots(figsize=(5, 4), layout="constrained")
image = axes.imshow(fine, origin="lower", extent=(0, 1, 0, 1), cmap="viridis")
dots = torch.cartesian_prod(torch.arange(12), torch.arange(12)) / 12
axes.plot(dots[:, 1], dots[:, 0], ".", color="white", markersize=3)
axes.set(title=r"$\lambda_{\max}(G(\omega))$", xlabel=r"$\omega_2 / 2\pi$", ylabel=r"$\omega_1 / 2\pi$")
figure.colorbar(image, ax=axes)
plt.show()

# %%
# The bounds
# ----------
# The norm grows with the map size towards the maximum over all frequencies. [Bibi2019], Lemma 2, takes a circular grid
# of the map's size, which is not an upper bound in general. The circle with room for the padding is one, and the
# certified grid bounds all map sizes at once.

sizes = [2, 3, 4, 5, 6, 8, 10, 12, 16]
truth, lemma, exact = [], [], []
for size in sizes:
    operator = Conv2d(layer.weight.detach(), (size, size), padding=1)
    n = 16 * size * size
    probe = torch.eye(n, dtype=torch.float64).reshape(n, 16, size, size) if size <= 8 else None
    if probe is not None:
        truth.append(float(torch.linalg.matrix_norm(operator.apply(probe).flatten(1), 2) ** 2))
    else:  # a long Lanczos run is the truth to five digits
        truth.append(float(lipschitz(operator, method="lanczos")) / 1.05)
    lemma.append(float(largest_eigenvalues(size).max()))
    exact.append(float(lipschitz(operator, method="exact")))

grid = float(lipschitz(layer, method="grid"))
figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
axes.axhline(grid, color="C3", label="grid: every size at once")
axes.plot(sizes, exact, "s-", color="C0", label="exact: circle with room for the padding")
axes.plot(sizes, truth, "ko-", label="truth")
axes.plot(sizes, lemma, "x--", color="C1", label="circle of the map's size")
axes.axhline(float(fine.max()), color="grey", linewidth=0.8, linestyle=":", label="all frequencies")
axes.set(xlabel="map size", title=r"$\|A\|^2$ and its bounds", ylim=(0, 1.15 * grid))
axes.legend(fontsize="small")
plt.show()

# %%
# For each map the certified bounds, relative to the truth:

for size, t, e in zip(sizes, truth, exact, strict=True):
    print(f"{size:3d} × {size:<3d} exact / truth {e / t:.3f}   grid / truth {grid / t:.3f}")

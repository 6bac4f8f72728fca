r"""
Bounding a convolution from a few frequencies
=============================================

The squared norm of a convolution is the maximum over frequencies of the largest eigenvalue of its symbol,
:math:`\lambda_{\max}(G(\omega))`. It is a landscape without kinks that a trigonometric polynomial of low degree
touches from below, so a coarse grid and the theorem of Ehlich and Zeller bound it everywhere.
"""

# %%
# The landscape
# -------------
# A 3×3 layer with 16 channels. The dots are the 12×12 frequencies at which the ``grid`` method looks.

import matplotlib.pyplot as plt
import torch
from torch import nn

from minimand.norms.symbol import Symbol
from minimand.operators import Conv2d, lipschitz

torch.manual_seed(0)
layer = nn.Conv2d(16, 16, 3, padding=1, bias=False).double()
symbol = Symbol(layer.weight.detach().unsqueeze(0))


def landscape(points: int) -> torch.Tensor:
    """The largest eigenvalue at all frequencies of a grid, the conjugate half filled in."""
    half = torch.cat([torch.linalg.eigvalsh(g[:, 0])[:, -1] for g in symbol.grams((points, points))])
    half = half * symbol.scale**2
    index = (symbol.frequencies((points, points)) * points / (2 * torch.pi)).round().long()
    full = torch.zeros(points, points, dtype=torch.float64)
    full[index[:, 0], index[:, 1]] = half
    full[-index[:, 0] % points, -index[:, 1] % points] = half
    return full


fine = landscape(96)
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
# The truth grows with the map towards the maximum over all frequencies. Lemma 2 of the paper takes a circular grid
# of the map's own size, which is no upper bound in general; the circle with room for the padding is, and the certified
# grid bounds every map at once.

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
    lemma.append(float(landscape(size).max()))
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

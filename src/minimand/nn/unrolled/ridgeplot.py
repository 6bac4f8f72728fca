"""A figure of a RidgeNet: its filters, potentials, scales and exponents."""

import math
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .ridgenet import RidgeNet

__all__ = ["drawn"]


@torch.no_grad()
def drawn(net: "RidgeNet") -> Any:
    """Filters in the order of their norm, the potentials over their features, and exponents against scales."""
    import matplotlib.pyplot as plt

    regularizer = net.regularizer()
    norms = regularizer.weight.flatten(1).norm(dim=1)
    order = norms.argsort(descending=True)
    weight, potential = regularizer.weight[order].double().cpu(), regularizer.potential
    figure, axes = plt.subplots(1, 3, figsize=(13, 4.2), layout="constrained", width_ratios=(1.3, 1, 1))
    axes[0].imshow(_mosaic(weight[:, 0]), cmap="PuOr", vmin=-1, vmax=1)
    part = ", first channel" if weight.shape[1] > 1 else ""
    axes[0].set_title(f"{len(order)} filters by their norm, each scaled to one{part}")
    axes[0].set_axis_off()
    t = torch.linspace(-0.1, 0.1, 401, dtype=torch.float64)
    scale, exponent = regularizer.scale.double().cpu(), regularizer.exponent.double().cpu()
    for rank, c in enumerate(order.tolist()):
        single = type(potential)(float(scale[c]), float(exponent[c]))
        axes[1].plot(t, single.values(t), color=plt.cm.viridis(rank / max(1, len(order) - 1)), linewidth=0.8)
    axes[1].set(title="potentials, dark: largest filters", xlabel="feature t", ylabel="ψ(t)")
    area = 14 + 60 * (norms / norms.max()).cpu().numpy()
    axes[2].scatter(scale.log10(), exponent, s=area, color="#0072B2", alpha=0.7)
    low, high = net.exponents
    axes[2].axhline(high, color="#D55E00", linewidth=1, label=f"limit of “{net.guarantee}”")
    axes[2].axhline(0.5, color="#999999", linewidth=1, linestyle="--", label="convex below")
    axes[2].set(title="larger dots: larger filters", xlabel="log₁₀ of the scale s", ylabel="exponent p")
    axes[2].set_ylim(low, 1.05 * high)
    axes[2].locator_params(axis="x", nbins=5)
    axes[2].legend(loc="lower right", fontsize=8)
    for axis in axes[1:]:
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"RidgeNet: {net.theorem}", fontsize=9)
    return figure


def _mosaic(filters: torch.Tensor) -> Any:
    """The filters side by side with a border."""
    count, size, _ = filters.shape
    columns = math.ceil(math.sqrt(1.5 * count))
    rows = -(-count // columns)
    page = torch.full((rows * (size + 1) + 1, columns * (size + 1) + 1), torch.nan, dtype=filters.dtype)
    for index, each in enumerate(filters):
        top, left = (index // columns) * (size + 1) + 1, (index % columns) * (size + 1) + 1
        page[top : top + size, left : left + size] = each / each.abs().max().clamp_min(1e-12)
    return page.numpy()

r"""
Implicit steps are stable at any step size
==========================================

Backpropagation takes explicit steps on quadratic functions whose curvature is the Gram matrix of a layer's inputs. It
diverges if the step is too large for the largest eigenvalue. Proximal backpropagation (Frerix et al. 2018) takes
implicit steps, which lower those functions at any step size :math:`\tau_\theta`. Here both train a network on the 1,797
digits of scikit-learn, with pixels from 0 to 16 that are not normalised, over eight orders of magnitude of the step.
"""

# %%
# The curvature
# -------------
# The eigenvalues of the first layer's Gram matrix, for one batch. The largest, which belongs to the mean digit, forces
# plain steps to be short. Because of the others, short steps learn slowly.

import math
import warnings

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

from minimand.train import ProxProp

source = load_digits()
images = torch.tensor(source.data, dtype=torch.float32)
labels = torch.tensor(source.target)
eigenvalues = torch.linalg.eigvalsh(images[:128].double().T @ images[:128].double())
print(f"largest {eigenvalues[-1]:.0f}, second {eigenvalues[-2]:.0f}, median {eigenvalues.median():.1f}")

# %%
# One run
# -------
# For small :math:`\tau_\theta` the direction :math:`G(A^\top A + I/\tau_\theta)^{-1}` is close to
# :math:`\tau_\theta G`. So a proximal run with learning rate 30 and step :math:`\tau_\theta` is compared with a plain
# run with learning rate :math:`30\,\tau_\theta`.

rate = 30.0


def final_loss(tau_theta: float, implicit: bool, epochs: int = 5) -> float:
    """The loss over all digits after training by SGD; infinite if it diverged."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 50), nn.ReLU(), nn.Linear(50, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=rate if implicit else rate * tau_theta)
    if implicit:
        ProxProp(model, tau_theta=tau_theta, skip_last=False).attach(optimizer)
    for _ in range(epochs):
        for batch in torch.randperm(len(images)).split(128):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            optimizer.step()
            if not math.isfinite(loss.item()) or loss.item() > 1e4:
                return math.inf
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model(images), labels))


lengths = [10.0**k for k in range(-5, 4)]
with warnings.catch_warnings():
    # Before a diverging run is stopped, ProxProp warns that it skips steps.
    warnings.simplefilter("ignore", RuntimeWarning)
    losses = {
        "explicit (BackProp)": [final_loss(length, implicit=False) for length in lengths],
        "implicit (ProxProp)": [final_loss(length, implicit=True) for length in lengths],
    }

# %%
# The ranges
# ----------
# Crosses at the upper edge are runs that diverged. With short steps the two agree, and both learn slowly. Explicit
# steps train well over about one order of magnitude and then diverge. Implicit steps learn faster and faster, until
# :math:`A^\top A` alone determines the direction. The learning rate remains to be chosen, and it can be too large,
# because the loss as a function of a layer's output is not quadratic.

figure, axes = plt.subplots(figsize=(6.5, 4), layout="constrained")
ceiling = 10.0
for (name, values), (color, marker) in zip(losses.items(), (("#555555", "o"), ("#0072B2", "^")), strict=True):
    shown = [min(value, ceiling) if math.isfinite(value) else math.nan for value in values]
    axes.plot(lengths, shown, marker=marker, color=color, label=name)
    lost = [length for length, value in zip(lengths, values, strict=True) if not math.isfinite(value)]
    axes.plot(lost, [ceiling] * len(lost), "x", color=color)
axes.axhline(math.log(10), color="grey", linewidth=0.8, linestyle=":")
axes.annotate("chance", (lengths[-1], math.log(10)), textcoords="offset points", xytext=(-36, 4), color="grey")
axes.set(
    xscale="log",
    yscale="log",
    xlabel=r"step $\tau_\theta$ (explicit: learning rate / 30)",
    ylabel="loss after 5 epochs",
)
axes.set_title("Digits with pixels from 0 to 16, batch 128")
axes.legend(fontsize="small")
plt.show()

# %%
# How many of the nine steps end below a loss of 0.5:

for name, values in losses.items():
    good = [length for length, value in zip(lengths, values, strict=True) if value < 0.5]
    span = f"from {min(good):.2g} to {max(good):.2g}" if good else ""
    print(f"{name:22s} {len(good)} {span}")

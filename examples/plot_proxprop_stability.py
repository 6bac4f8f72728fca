r"""
Step sizes under proximal backpropagation
=========================================

Backpropagation takes explicit steps on quadratic functions whose curvature is the Gram matrix of a layer's inputs, so
it diverges where the step exceeds what the largest eigenvalue allows. Proximal backpropagation (Frerix et al. 2018)
takes implicit steps, which lower those functions at any length. This is a small version of the paper's Table 1, on the
1,797 digits that come with scikit-learn: the loss after a few epochs, over four orders of magnitude of the step size.
"""

# %%
# The curvature
# -------------
# The eigenvalues of the first layer's Gram matrix, for one batch. The largest, which belongs to the mean digit, is the
# reason why plain steps have to be short.

import math
import warnings

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

from minimand.train import ProxProp

source = load_digits()
images = torch.tensor(source.data, dtype=torch.float32) / 16
labels = torch.tensor(source.target)
eigenvalues = torch.linalg.eigvalsh(images[:128].double().T @ images[:128].double())
print(f"largest {eigenvalues[-1]:.0f}, second {eigenvalues[-2]:.0f}, median {eigenvalues.median():.2f}")

# %%
# One run
# -------
# The two lines that ProxProp needs are the first two of the ``if``; the loop does not know of it.


def final_loss(step_size: float, options: dict | None, epochs: int = 6) -> float:
    """The loss over all digits after training with Nesterov momentum; infinite if it diverged."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 200), nn.ReLU(), nn.Linear(200, 100), nn.ReLU(), nn.Linear(100, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=step_size, momentum=0.9, nesterov=True)
    if options is not None:
        ProxProp(model, **options).attach(optimizer)
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


methods = {
    "BackProp": None,
    "ProxProp": {},
    "ProxProp, last layer too": {"skip_last": False},
}
step_sizes = [10 ** (k / 2) for k in range(-5, 4)]
with warnings.catch_warnings():
    # A diverging run is stopped; until then ProxProp warns that it skips steps.
    warnings.simplefilter("ignore", RuntimeWarning)
    losses = {name: [final_loss(size, options) for size in step_sizes] for name, options in methods.items()}

# %%
# The ranges
# ----------
# Crosses at the upper edge are runs that diverged. A proximal step is shorter than a plain one of the same nominal
# size, so its curves lie further to the right and fall later; they also fall further before they turn. The last
# layer stays explicit by default, as in the paper, and is then what limits the step.

figure, axes = plt.subplots(figsize=(6.5, 4), layout="constrained")
ceiling = 10.0
styles = (("#555555", "o"), ("#0072B2", "^"), ("#E69F00", "s"))
for (name, values), (colour, marker) in zip(losses.items(), styles, strict=True):
    shown = [min(value, ceiling) if math.isfinite(value) else math.nan for value in values]
    axes.plot(step_sizes, shown, marker=marker, color=colour, label=name)
    lost = [size for size, value in zip(step_sizes, values, strict=True) if not math.isfinite(value)]
    axes.plot(lost, [ceiling] * len(lost), "x", color=colour)
axes.axhline(math.log(10), color="grey", linewidth=0.8, linestyle=":")
axes.annotate("chance", (step_sizes[0], math.log(10)), textcoords="offset points", xytext=(0, 4), color="grey")
axes.set(xscale="log", yscale="log", xlabel="step size τ", ylabel="loss after 6 epochs")
axes.set_title("Digits, batch 128, momentum 0.9")
axes.legend(fontsize="small")
plt.show()

# %%
# How many of the nine step sizes end below a loss of 0.3:

for name, values in losses.items():
    good = [size for size, value in zip(step_sizes, values, strict=True) if value < 0.3]
    span = f"from {min(good):.2g} to {max(good):.2g}" if good else ""
    print(f"{name:28s} {len(good)} {span}")

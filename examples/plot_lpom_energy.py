r"""
Training without backpropagation
================================

LPOM treats the activations of a network as variables and minimises

.. math::

    F(W, X) = \ell(X_n, Y) + \sum_k \mu_k\bigl(\tilde f(X_{k+1}) + \tilde g(z_k) - \langle X_{k+1}, z_k\rangle\bigr)

block by block. Each term of the sum is zero where a layer's equation holds. No derivative of an activation is
used. The example shows the energy on scikit-learn's digits, and compares the accuracy of mini-batch training with
random features.
"""

# %%
# The energy falls
# ----------------
# A network 64-30-30-10 on one full batch of 400 digits, in double precision. The first value is the loss at the
# forward pass. The first 1,500 digits are for training, the others for testing.

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

from minimand.train import LPOM

digits = load_digits()
pixels, target = torch.tensor(digits.data, dtype=torch.float32), torch.tensor(digits.target)
pixels = (pixels - pixels[:1500].mean()) / pixels[:1500].std()
x, y, x_test, y_test = pixels[:1500], target[:1500], pixels[1500:], target[1500:]


def network(activation):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 30), activation(), nn.Linear(30, 30), activation(), nn.Linear(30, 10))


activations = {"ReLU": nn.ReLU, "tanh": nn.Tanh, "sigmoid": nn.Sigmoid, "ELU": nn.ELU}
images, labels = x[:400].double(), y[:400]
energies = {}
for name, activation in activations.items():
    lpom = LPOM(network(activation).double(), loss="cross_entropy")
    energies[name] = [lpom.energy(images, labels), *(lpom.step(images, labels) for _ in range(25))]
    rises = sum(b > a for a, b in zip(energies[name], energies[name][1:], strict=False))
    print(f"{name:8s} {energies[name][0]:7.1f} → {energies[name][-1]:6.1f}   rose {rises} times")

# %%
# Mini-batches
# ------------
# The control keeps the hidden layers random and fits the last layer by ridge regression.


def accuracy(net):
    with torch.no_grad():
        return 100 * float((net(x_test).argmax(1) == y_test).float().mean())


def random_features(net, ridge):
    with torch.no_grad():
        hidden = nn.functional.pad(net[:-1](x), (0, 1), value=1.0)
        normal = hidden.mT @ hidden + ridge * torch.eye(hidden.shape[1])
        weights = torch.linalg.solve(normal, hidden.mT @ nn.functional.one_hot(y).float())
        last = nn.Linear(30, 10)
        last.weight.copy_(weights[:-1].mT)
        last.bias.copy_(weights[-1])
    return nn.Sequential(*net[:-1], last)


net = network(nn.ReLU)
control = max(accuracy(random_features(net, ridge)) for ridge in (1e-2, 1.0, 100.0))
batches = list(zip(x.split(64)[:-1], y.split(64)[:-1], strict=True))
reached = [accuracy(net), *(accuracy(net) for _ in LPOM(net).training(batches, 15))]
print(f"LPOM {reached[-1]:.1f} %, random features {control:.1f} %")

# %%
# Figure
# ------

colors = ["#0072B2", "#D55E00", "#009E73", "#CC79A7"]  # Okabe–Ito
figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 4.2), layout="constrained")
for (name, values), color, marker in zip(energies.items(), colors, "os^D", strict=True):
    left.semilogy(values, color=color, marker=marker, markevery=5, label=name)
left.set(title="Energy of a full batch", xlabel="step", ylabel="F")
left.legend(frameon=False)
right.plot(reached, color=colors[0], marker="o", label="LPOM, mini-batches")
right.axhline(control, color="black", linestyle="--", label="random features + ridge")
right.set(title="Test accuracy, 64-30-30-10", xlabel="epoch", ylabel="per cent", ylim=(0, 100))
right.legend(frameon=False, loc="lower right")
for axis in (left, right):
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
plt.show()

r"""
A network is an algorithm
=========================

The layer :math:`\varphi(Wx)` with a symmetric positive definite :math:`W` is a gradient step on

.. math::

    f(z) = \tfrac12\|z\|^2 - \sum_i \tilde\varphi\bigl((W^{1/2}z)_i\bigr), \qquad
    z = W^{1/2}x,\quad \tilde\varphi' = \varphi .

So a feed-forward network is gradient descent, and a skip connection is a momentum term. This example runs four
algorithms as networks: first on the objective that they minimise, then trained on digits. Last it gives an existing
residual network momentum.
"""

# %%
# Layers are iterations
# ---------------------
# All layers share one weight, so that there is one objective. ``iterates`` returns the output of the network after each
# of its blocks.

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

from minimand.functions import LayerObjective
from minimand.nn import OptimizationNet, as_algorithm, coefficient_parameters

torch.manual_seed(0)
algorithms = {"gd": "gradient descent", "heavy_ball": "heavy ball, ½", "nesterov": "Nesterov", "admm": "ADMM"}
q = torch.linalg.qr(torch.randn(50, 50, dtype=torch.float64)).Q
weight = q * torch.linspace(0.05, 0.998, 50, dtype=torch.float64) @ q.T
objective = LayerObjective(weight, "tanh")


class Layer(nn.Module):
    def forward(self, x):
        return torch.tanh(x @ weight)


x = torch.randn(1, 50, dtype=torch.float64)
best = objective.value(torch.zeros_like(x))  # tanh is odd and W ⪯ I: the minimiser is zero
gaps = {}
for algorithm in algorithms:
    points = OptimizationNet([Layer()] * 100, algorithm).iterates(x)
    gaps[algorithm] = [float(objective.value(objective.lift(point)) - best) for point in points]

colors = dict(zip(algorithms, ["#000000", "#0072B2", "#D55E00", "#009E73"], strict=True))  # Okabe–Ito
styles = dict(zip(algorithms, ["-", "--", "-.", ":"], strict=True))
figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
for algorithm, name in algorithms.items():
    axis.semilogy(gaps[algorithm], color=colors[algorithm], linestyle=styles[algorithm], linewidth=2, label=name)
t = torch.arange(2, 101)
axis.semilogy(t, 2 * objective.lift(x).square().sum() / t**2, color="#999999", linewidth=1, label="bound of Theorem 3")
axis.set(xlabel="layer", ylabel="f − f*", xlim=(0, 100))
axis.grid(alpha=0.3)
axis.spines[["top", "right"]].set_visible(False)
axis.legend(frameon=False)

# %%
# With momentum the objective is lower after the same number of layers. ADMM has two streams that have to agree, and its
# steps are half as long.
#
# Training
# --------
# Blocks with different weights have no common objective; only the structure of the algorithm remains. Four networks
# with the same blocks and the same initial weights are trained on scikit-learn's digits. The coefficients of the heavy
# ball, Nesterov's method and ADMM are learned, starting from the algorithm's values.

images, labels = load_digits(return_X_y=True)
images = torch.tensor(images, dtype=torch.float32) / 16 - 0.3
labels = torch.tensor(labels)
order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
train, test = order[:1200], order[1200:]


def network(algorithm):
    torch.manual_seed(1)
    blocks = [nn.Sequential(nn.Linear(48, 48), nn.BatchNorm1d(48), nn.ReLU()) for _ in range(10)]
    return nn.Sequential(
        nn.Linear(64, 48), OptimizationNet(blocks, algorithm, learnable=algorithm != "gd"), nn.Linear(48, 10)
    )


def fit(net, epochs=12):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for epoch in range(epochs):
        net.train()
        total = 0.0
        for batch in train[torch.randperm(1200, generator=torch.Generator().manual_seed(epoch))].split(60):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(images[batch]), labels[batch])
            loss.backward()
            optimizer.step()
            total += float(loss.detach()) / 20
        losses.append(total)
    net.eval()
    with torch.no_grad():
        return losses, 100 * float((net(images[test]).argmax(1) == labels[test]).float().mean())


figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
for algorithm, name in algorithms.items():
    losses, accuracy = fit(network(algorithm))
    axis.semilogy(range(1, 13), losses, color=colors[algorithm], linestyle=styles[algorithm], linewidth=2, label=name)
    print(f"{name:18s} test accuracy {accuracy:.1f} %")
axis.set(xlabel="epoch", ylabel="training loss", xlim=(1, 12))
axis.grid(alpha=0.3)
axis.spines[["top", "right"]].set_visible(False)
axis.legend(frameon=False)

# %%
# One seed does not show which is better; ``minimand run structure-cifar`` compares them over several seeds.
#
# An existing network
# -------------------
# ``as_algorithm`` finds the residual blocks of a network and adds the previous iterate to their skip connections, with
# a coefficient that starts at zero. The function is the same to the bit until training changes the coefficients.


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(48, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 48))

    def forward(self, x):
        return torch.relu(x + self.body(x))


mine = nn.Sequential(nn.Linear(64, 48), *(Block() for _ in range(4)), nn.Linear(48, 10))
fit(mine, epochs=6)
tuned = as_algorithm(mine, "heavy_ball")
print("same function:", torch.equal(tuned.eval()(images), mine.eval()(images)))
_, accuracy = fit(tuned, epochs=6)
print(f"after fine-tuning: {accuracy:.1f} %, with β₁ and β₂")
for k, pair in enumerate(coefficient_parameters(tuned)):
    print(f"  block {k}:", ", ".join(f"{float(value):+.3f}" for value in pair.detach()))

plt.show()

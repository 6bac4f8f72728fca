"""
Dropout equalises
=================

All terms of a dropout optimum have the same norm. ``equalize`` turns any factors into equalised ones with the same
product. Training with dropout converges to equalised factors, more slowly with more terms ([Vidal2018], "Any
Factorization Can Be Equalized").
"""

import matplotlib.pyplot as plt
import numpy as np
import torch

from minimand.factor import DropoutFactorization, equalize

# %%
# One rotation
# ------------
# Factors of a 40 × 30 matrix whose norms differ by two orders of magnitude, before and after equalisation. For 13
# terms it takes twelve Givens rotations.

torch.manual_seed(0)
U = torch.randn(40, 13, dtype=torch.float64) * torch.logspace(-1, 1, 13, dtype=torch.float64)
V = torch.randn(30, 13, dtype=torch.float64)
left, right = equalize(U, V)
print("product off by", float((left @ right.mT - U @ V.mT).abs().max()))

before, after = U.norm(dim=0) * V.norm(dim=0), left.norm(dim=0) * right.norm(dim=0)
print("norms differ by", float(after.max() - after.min()))

figure, axes = plt.subplots(figsize=(6.5, 4), layout="constrained")
place = np.arange(13)
axes.bar(place - 0.2, before, 0.4, color="#0072B2", label="before")
axes.bar(place + 0.2, after, 0.4, color="#E69F00", label="after")
axes.set(xlabel="term", ylabel=r"$\|U_i\|\,\|V_i\|$", title="The same product, equalised", yscale="log")
axes.legend(frameon=False)
axes.spines[["top", "right"]].set_visible(False)

# %%
# Dropout training converges to equal norms
# ------------------------------------------
# Norms of the terms while sampled dropout factorises a 24 × 16 matrix with 4 and with 16 terms. The dashed lines are
# :math:`\|X\|_*/r` of the closed form.

Y = torch.randn(24, 16, dtype=torch.float64).numpy()
counts = np.unique(np.logspace(0, 3.2, 14).astype(int))
figure, axes = plt.subplots(figsize=(6.5, 4), layout="constrained")
for terms, color in ((4, "#0072B2"), (16, "#D55E00")):
    curves = []
    for count in counts:
        model = DropoutFactorization(terms, 0.5, method="dropout", max_iter=int(count), random_state=0)
        left = model.fit_transform(Y)
        curves.append(np.linalg.norm(left, axis=0) * np.linalg.norm(model.components_, axis=1))
    axes.plot(counts, curves, color=color, linewidth=0.9, alpha=0.8)
    best = DropoutFactorization(terms, 0.5)
    left = best.fit_transform(Y)
    level = np.linalg.norm(left[:, 0]) * np.linalg.norm(best.components_[0])
    axes.axhline(level, color=color, linestyle="--", label=f"{terms} terms")
axes.set(xlabel="iterations", ylabel=r"$\|U_i\|\,\|V_i\|$", title="Dropout training", xscale="log")
axes.legend(frameon=False)
axes.spines[["top", "right"]].set_visible(False)
plt.show()

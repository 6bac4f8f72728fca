r"""
How many parts? Non-negative factorisation with a proof
=======================================================

Images of handwritten digits are sums of strokes. The weight :math:`\lambda` determines how many: the penalty
:math:`\lambda\sum_i\|U_i\|\|V_i\|` limits the number of columns, the algorithm adds columns until the polar of the
residual allows no more, and the certificate bounds the distance to the global minimum over *all* sizes.
"""

# %%
# The first picture: rank and gap over λ
# --------------------------------------
# A hundred digits of 8 × 8 pixels from scikit-learn. Each fit starts from the one before, at a larger λ. The gap is an
# upper bound. If many components overlap, the relaxation behind it is not tight, and the status is UNDECIDED.

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits
from sklearn.decomposition import NMF as SklearnNMF

from minimand.factor import NMF, certify

Y = load_digits().data[:100] / 16.0
model = NMF(lam=1.0, tol=2e-3, effort=0.2, random_state=0)
top = model.lambda_max(Y)
path = model.path(Y, top * np.geomspace(0.5, 0.12, 6))

figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
left.semilogx(path.lams / top, path.ranks, "o-", color="C0")
left.set(xlabel=r"$\lambda / \lambda_{\max}$", ylabel="components", title="size chosen")
right.loglog(path.lams / top, np.maximum(path.gaps, 1e-8), "s-", color="C1")
right.axhline(2e-3, color="grey", linewidth=0.8, linestyle=":")
right.set(xlabel=r"$\lambda / \lambda_{\max}$", ylabel="relative gap", title="gap to the global minimum, at most")
plt.show()
for fitted in path:
    print(f"λ/λmax {fitted.lam / top:.2f}: {fitted.n_components_:3d} components, {fitted.certificate_}")

# %%
# The parts
# ---------
# The sixteen largest components at the smallest λ of the path.

fitted = path[-1]
order = np.argsort(-np.linalg.norm(fitted.components_, axis=1))[:16]
figure, axes = plt.subplots(2, 8, figsize=(8, 2.2), layout="constrained")
for axis in axes.flat:
    axis.axis("off")
for axis, i in zip(axes.flat, order, strict=False):
    axis.imshow(fitted.components_[i].reshape(8, 8), cmap="gray_r")
plt.show()

# %%
# Other libraries' factors
# ------------------------
# scikit-learn minimises the same objective at a given size. ``certify`` bounds the distance of each result to the
# global minimum: the gap stays large until there are enough components.

lam = path[3].lam
sizes = [1, 2, 3, 4, 6, 8, 12]
gaps, objectives = [], []
for size in sizes:
    other = SklearnNMF(
        size, init="nndsvda", alpha_W=lam / Y.shape[1], alpha_H=lam / Y.shape[0], l1_ratio=0.0, max_iter=5000, tol=1e-4
    )
    W = other.fit_transform(Y)
    H = other.components_
    found = certify(Y, W, H.T, lam=lam, regularizer="nonnegative", effort=0.1)
    gaps.append(found.gap)
    fit = 0.5 * np.square(Y - W @ H).sum()
    objectives.append(fit + lam * (np.linalg.norm(W, axis=0) * np.linalg.norm(H, axis=1)).sum())
    print(f"{size:3d} components: objective {objectives[-1]:8.3f}, {found.status}, gap ≤ {found.gap:.3f}")

figure, axes = plt.subplots(figsize=(6, 3.4), layout="constrained")
axes.plot(sizes, objectives, "o-", color="C0", label="scikit-learn")
axes.plot(sizes, np.array(objectives) - gaps, "v--", color="C1", label="proved lower bound")
axes.axhline(path[3].objective_, color="black", linewidth=0.8, label=f"ours, {path[3].n_components_} components")
axes.set(xlabel="components given", ylabel="objective", title=rf"$\lambda$ = {lam:.2f}")
axes.legend()
plt.show()

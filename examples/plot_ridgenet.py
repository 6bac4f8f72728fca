r"""
A learned objective with a proof
================================

RidgeNet reconstructs an image by minimising one learned function,

.. math:: \min_x\; \sum_c\sum_i \psi_c((Wx)_{c,i}) \quad\text{subject to}\quad \Phi x = y ,

with a solver whose steps are certified: the function never rises, and the iterates converge. Here a small network is
trained for some seconds on photographs, from a quarter of the measurements, and compared with total variation.
"""

# %%
# Photographs and measurements
# ----------------------------
# From scikit-image: six for training, one for choosing the classical weight, one for testing. Every block of 16 × 16
# pixels gives 64 numbers.

import time

import matplotlib.pyplot as plt
import torch
from skimage import color, data, transform

from minimand.nn import RidgeNet, RidgeTrainer, diagnose, smooth_tv_reconstruction
from minimand.operators import BlockSensing, orthonormal_gaussian
from minimand_papers.data import psnr, random_crops

torch.manual_seed(0)
torch.set_num_threads(1)


def photograph(name: str, side: int = 160) -> torch.Tensor:
    pixels = getattr(data, name)()
    gray = color.rgb2gray(pixels[..., :3]) if pixels.ndim == 3 else pixels / 255.0
    shorter = min(gray.shape)
    square = gray[:shorter, :shorter]
    return torch.tensor(transform.resize(square, (side, side), anti_aliasing=True), dtype=torch.float32)[None]


training = [photograph(name) for name in ("coffee", "astronaut", "chelsea", "rocket", "coins", "page")]
validation, test = photograph("brick", 96), photograph("camera", 160)
phi = orthonormal_gaussian(64, 256, generator=torch.Generator().manual_seed(0))

# %%
# Train
# -----
# The trainer knows the rates of the filters, scales, exponents and phases.

net = RidgeNet(phi, phases=6, filters=24, size=5, guarantee="convergent")
trainer = RidgeTrainer(net, steps=160, rate=2.0)
crop = BlockSensing(phi, (32, 32))
begin = time.perf_counter()
for _ in range(trainer.steps):
    x = random_crops(training, 4, 32)
    trainer.step(crop.apply(x), x)
net.eval()
print(f"{trainer.steps} steps in {time.perf_counter() - begin:.0f} s")

# %%
# The classical control
# ---------------------
# Its weight is chosen on the validation photograph, on a grid that extends until a further weight gains nothing. The
# measurements are exact, so that small weights are all alike.


def classical(image: torch.Tensor, weight: float) -> torch.Tensor:
    operator = BlockSensing(phi, (image.shape[-2], image.shape[-1]))
    y = operator.apply(image[None])
    start = net._sensor.start(operator, y)
    return smooth_tv_reconstruction(y, operator, weight, start=start, tol=1e-4, iterations=150).clamp(0, 1)[0]


scores = {w: float(psnr(classical(validation, w), validation)) for w in (3e-4, 1e-3, 3e-3)}
gain = 1.0
while gain > 0.01:
    best = max(scores, key=lambda w: scores[w])
    further = best / 3 if best == min(scores) else 3 * best
    scores[further] = float(psnr(classical(validation, further), validation))
    gain = scores[further] - scores[best]
print("total variation:", ", ".join(f"{w:.1g}: {score:.2f} dB" for w, score in sorted(scores.items())))

# %%
# Compare
# -------

operator = BlockSensing(phi, (160, 160))
y = operator.apply(test[None])
answers = {
    "linear start": net._sensor.start(operator, y)[0].clamp(0, 1),
    "total variation": classical(test, best),
    "RidgeNet": net(y)[0].clamp(0, 1),
}
figure, axes = plt.subplots(2, 4, figsize=(13, 6.6), layout="constrained")
window = (slice(45, 105), slice(55, 115))
for axis, (title, image) in zip(axes[:, 0], {"photograph": test[0], "detail": test[0][window]}.items(), strict=True):
    axis.imshow(image.numpy(), cmap="gray", vmin=0, vmax=1)
    axis.set_title(title)
for column, (name, image) in enumerate(answers.items(), 1):
    score = float(psnr(image, test))
    print(f"{name:18s} {score:.2f} dB")
    axes[0, column].imshow(image[0][window].numpy(), cmap="gray", vmin=0, vmax=1)
    axes[0, column].set_title(f"{name}\n{score:.2f} dB")
    error = axes[1, column].imshow((image - test)[0][window].numpy(), cmap="PuOr", vmin=-0.2, vmax=0.2)
    axes[1, column].set_title("error")
figure.colorbar(error, ax=axes[1, 1:], shrink=0.8, label="reconstruction − photograph")
for axis in axes.flat:
    axis.set_axis_off()

# %%
# The objective over the iterations
# ---------------------------------
# It never rises, from the learned phases and from other starts. The learned phases save most of the iterations.

figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
starts = {"learned phases": None, "linear start": net._sensor.start(operator, y), "noise": torch.rand(1, 1, 160, 160)}
for (name, x0), line in zip(starts.items(), ("-", "--", ":"), strict=True):
    found = net.descended(y, x0=x0, tol=1e-6, iterations=120)
    axis.plot([float(found.start), *found.history], line, label=name)
axis.set(xlabel="certified iterations", ylabel="objective", yscale="log")
axis.grid(alpha=0.3)
axis.legend(title="from")

# %%
# What was learned, and what is proved
# ------------------------------------

net.plot()
print(diagnose(net, y))
plt.show()

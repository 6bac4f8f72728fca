r"""
Uncertainty of a reconstruction (experimental)
==============================================

A RidgeNet with exponents below one defines a density :math:`e^{-U}`, with

.. math:: U(x) = \frac{\|\Phi x - y\|^2}{2\sigma^2} + \frac{R(x)}T .

Langevin steps with the certified step size sample it. Half of the pixels of noisy images are missing here. The
temperature T is fitted on validation images, so that 90 % intervals cover 90 % of their pixels, and the coverage is
measured on other images. The sampler has a bias, and the network was not trained for this density: the figures are
measurements, not a guarantee.
"""

import matplotlib.pyplot as plt
import torch
from skimage import color, data, transform

from minimand.nn import RidgeNet, RidgeTrainer
from minimand.nn.unrolled import langevin
from minimand.operators import Inpainting
from minimand_papers.data import random_crops

torch.manual_seed(0)
torch.set_num_threads(1)
SIGMA, SIDE = 0.05, 32


def photograph(name: str, side: int = 128) -> torch.Tensor:
    pixels = getattr(data, name)()
    gray = color.rgb2gray(pixels[..., :3]) if pixels.ndim == 3 else pixels / 255.0
    shorter = min(gray.shape)
    square = gray[:shorter, :shorter]
    return torch.tensor(transform.resize(square, (side, side), anti_aliasing=True), dtype=torch.float32)[None]


training = [photograph(name) for name in ("coffee", "astronaut", "chelsea", "rocket")]
mask = Inpainting((torch.rand(SIDE, SIDE) < 0.5).float())


def measured(images: list[torch.Tensor], count: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = random_crops(images, count, SIDE)
    y = mask.apply(x)
    return y + SIGMA * mask.apply(torch.randn_like(y)), x


# %%
# Train
# -----

net = RidgeNet(mask, phases=4, filters=16, size=5, guarantee="convergent", noise=SIGMA)
trainer = RidgeTrainer(net, steps=120, rate=2.0)
for _ in range(trainer.steps):
    trainer.step(*measured(training, 4))
net.eval()

# %%
# Fit the temperature
# -------------------
# On crops of a validation photograph, by the coverage of mean ± 1.645 standard deviations.


def coverage(images: list[torch.Tensor], temperature: float) -> float:
    y, x = measured(images, 4)
    found = langevin(net, y, temperature=temperature, samples=60, burn=60, thin=3)
    return float(((x - found.mean).abs() <= 1.645 * found.std).float().mean())


own = float(net.log_temperature.detach().exp())
factors = (0.1, 0.3, 1.0, 3.0, 10.0)
covered = {factor: coverage([photograph("coins")], factor * own) for factor in factors}
best = min(covered, key=lambda factor: abs(covered[factor] - 0.9))
print("coverage on validation:", {f"{factor:g} T": round(share, 3) for factor, share in covered.items()})

# %%
# Test
# ----

test = [photograph("camera")]
print(f"coverage on test: {coverage(test, best * own):.3f} at {best:g} T (aim: 0.9)")
y, x = measured(test, 1)
found = langevin(net, y, temperature=best * own, samples=100, burn=60, thin=3)
figure, axes = plt.subplots(1, 4, figsize=(12, 3.4), layout="constrained")
pictures = {
    "measured": (y, "gray", 1.0),
    "posterior mean": (found.mean, "gray", 1.0),
    "standard deviation": (found.std, "viridis", float(found.std.max())),
    "|error|": ((found.mean - x).abs(), "viridis", float(found.std.max())),
}
for axis, (title, (image, colors, most)) in zip(axes, pictures.items(), strict=True):
    shown = axis.imshow(image[0, 0].numpy(), cmap=colors, vmin=0, vmax=most)
    axis.set_title(title)
    axis.set_axis_off()
figure.colorbar(shown, ax=axes[2:], shrink=0.8)
plt.show()

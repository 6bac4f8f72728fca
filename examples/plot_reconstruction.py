r"""
Unrolled and classical reconstruction
=====================================

A camera takes a quarter of the measurements: every block of 33 × 33 pixels gives 272 numbers :math:`y = \Phi x`.
This example compares three reconstructions of a test photograph: the best linear one, the classical sparse one (FISTA
on cosines with cycle-spinning), and an unrolled solver with a learned transform, ISTA-Net+ with few channels, which is
trained here for some seconds.
"""

# %%
# Photographs
# -----------
# From scikit-image: six for training, one for choosing the classical weight, one for testing.

import time

import matplotlib.pyplot as plt
import torch
from skimage import color, data, transform

from minimand.nn import Architecture, ISTANet, diagnose, least_squares_start, sparse_reconstruction
from minimand.operators import BlockDCT, BlockSensing, orthonormal_gaussian, pad_to_blocks, to_blocks
from minimand.solvers import FISTA
from minimand_papers.data import psnr, random_crops, ssim

torch.manual_seed(0)
torch.set_num_threads(1)


def photograph(name: str, side: int = 231) -> torch.Tensor:
    pixels = getattr(data, name)()
    gray = color.rgb2gray(pixels[..., :3]) if pixels.ndim == 3 else pixels / 255.0
    shorter = min(gray.shape)
    square = gray[:shorter, :shorter]
    return torch.tensor(transform.resize(square, (side, side), anti_aliasing=True), dtype=torch.float32)[None]


training = [photograph(name) for name in ("coffee", "astronaut", "chelsea", "rocket", "coins", "page")]
validation, test = photograph("brick", 132), photograph("camera", 198)

# %%
# Measure
# -------
# Φ has orthonormal rows. The linear start Q is the least-squares fit of blocks to their measurements.

phi = orthonormal_gaussian(272, 1089, generator=torch.Generator().manual_seed(0))
blocks = torch.cat([to_blocks(random_crops(training, 20, 33)) for _ in range(60)])
start = least_squares_start(phi, blocks, ridge=1e-3)


def measured(image: torch.Tensor) -> tuple[BlockSensing, torch.Tensor]:
    padded = pad_to_blocks(image[None])
    operator = BlockSensing(phi, (padded.shape[-2], padded.shape[-1]))
    return operator, operator.apply(padded)


# %%
# The classical control
# ---------------------
# Its only parameter, the weight of the penalty, is chosen on the validation photograph. The solver starts from the
# linear reconstruction. The measurements are exact, so small weights are best.


def classical(image: torch.Tensor, weight: float, iters: int) -> torch.Tensor:
    operator, y = measured(image)
    frame = BlockDCT((operator.input_shape[-2], operator.input_shape[-1]), block=11, count=9)
    first = BlockSensing(start.mT.contiguous(), frame.size).adjoint(y)
    return sparse_reconstruction(y, operator, frame, weight, FISTA(iters), start=first).clamp(0, 1)[0]


scores = {w: float(psnr(classical(validation, w, 40), validation)) for w in (0.0003, 0.001, 0.003, 0.01)}
best = max(scores, key=lambda w: scores[w])
print("classical weights:", ", ".join(f"{w}: {score:.2f} dB" for w, score in scores.items()))

# %%
# Train
# -----
# The network works on whole images, across the borders of the blocks. Its steps and thresholds are constrained to those
# of a convergent solver.

net = ISTANet(phi, 4, plus=True, architecture=Architecture(channels=12), constrained=True, initial=start)
steps = 320
optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps, pct_start=0.1)
crop = BlockSensing(phi, (66, 66))
begin = time.perf_counter()
for _ in range(steps):
    x = random_crops(training, 4, 66)
    loss = net.loss(crop.apply(x), x, symmetry=0.0)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
    optimizer.step()
    schedule.step()
print(f"{steps} steps in {time.perf_counter() - begin:.0f} s")

# %%
# Compare
# -------

operator, y = measured(test)
with torch.no_grad():
    learned = net.eval()(y).clamp(0, 1)[0]
    linear = net.start(net.problem(y)).clamp(0, 1)[0]
answers = {"best linear": linear, "FISTA, cosines": classical(test, best, 80), "ISTA-Net+": learned}

figure, axes = plt.subplots(2, 4, figsize=(13, 6.6), layout="constrained")
window = (slice(60, 120), slice(75, 135))
axes[0, 0].imshow(test[0].numpy(), cmap="gray", vmin=0, vmax=1)
axes[0, 0].set_title("photograph")
axes[1, 0].imshow(test[0][window].numpy(), cmap="gray", vmin=0, vmax=1)
axes[1, 0].set_title("detail")
for column, (name, image) in enumerate(answers.items(), 1):
    score, similarity = float(psnr(image, test)), float(ssim(image, test))
    print(f"{name:18s} {score:.2f} dB, SSIM {similarity:.3f}")
    axes[0, column].imshow(image[0][window].numpy(), cmap="gray", vmin=0, vmax=1)
    axes[0, column].set_title(f"{name}\n{score:.2f} dB, SSIM {similarity:.3f}")
    error = axes[1, column].imshow((image - test)[0][window].numpy(), cmap="PuOr", vmin=-0.2, vmax=0.2)
    axes[1, column].set_title("error")
figure.colorbar(error, ax=axes[1, 1:], shrink=0.8, label="reconstruction − photograph")
for axis in axes.flat:
    axis.set_axis_off()

# %%
# Diagnosis
# ---------
# Every phase has a step in :math:`(0, 2/\|\Phi\|^2)` and a threshold above zero, as a convergent solver has. The
# learned maps are not proxes, so that nothing is proved of more phases. The report says on what they were tested.

report = diagnose(net, y)
print(report)
report.plot()
plt.show()

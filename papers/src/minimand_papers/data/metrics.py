"""PSNR and SSIM by scikit-image's definitions, differentiable, on any device."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from minimand.errors import OptionError, ShapeError, require_finite, require_positive

__all__ = ["psnr", "ssim"]


def psnr(image: Tensor, reference: Tensor, *, data_range: float = 1.0) -> Tensor:
    r"""The peak signal-to-noise ratio :math:`10\log_{10}(R^2/\text{mean squared error})` in dB, over all entries.

    It equals ``skimage.metrics.peak_signal_noise_ratio(reference, image, data_range=R)``. The mean over a test set is
    the mean of the values of its images. The image is not clipped: do so first, where the protocol says so.

    >>> round(float(psnr(torch.full((8, 8), 0.6), torch.full((8, 8), 0.5))), 3)
    20.0
    """
    image, reference = _pair(image, reference, data_range)
    error = F.mse_loss(image, reference)
    return 10 * torch.log10(data_range**2 / error)


def ssim(image: Tensor, reference: Tensor, *, data_range: float = 1.0, window: int = 7) -> Tensor:
    r"""The structural similarity, with means over a square window and sample covariances.

    .. math:: \frac{(2\mu_x\mu_y + c_1)(2\sigma_{xy} + c_2)}{(\mu_x^2 + \mu_y^2 + c_1)(\sigma_x^2 + \sigma_y^2 + c_2)},
              \qquad c_1 = (0.01R)^2,\; c_2 = (0.03R)^2,

    averaged over all windows that lie inside. It equals ``skimage.metrics.structural_similarity(image, reference,
    data_range=R)``; leading dimensions (batch, channels) are averaged over. Source: Wang et al., IEEE TIP 2004.

    >>> x = torch.rand(16, 16)
    >>> round(float(ssim(x, x)), 6)
    1.0
    """
    image, reference = _pair(image, reference, data_range)
    if window % 2 == 0 or window < 3:
        raise OptionError(f"the window's side must be an odd number ≥ 3, got {window}")
    if image.dim() < 2 or min(image.shape[-2:]) < window:
        raise ShapeError(
            f"images of {tuple(image.shape)} are smaller than the window of {window} × {window}; choose a smaller one"
        )
    x, y = (t.reshape(-1, 1, *t.shape[-2:]) for t in (image, reference))

    def mean(t: Tensor) -> Tensor:
        return F.avg_pool2d(t, window, stride=1)

    sample = window**2 / (window**2 - 1)
    mean_x, mean_y = mean(x), mean(y)
    variance_x = sample * (mean(x * x) - mean_x * mean_x)
    variance_y = sample * (mean(y * y) - mean_y * mean_y)
    covariance = sample * (mean(x * y) - mean_x * mean_y)
    first, second = (0.01 * data_range) ** 2, (0.03 * data_range) ** 2
    top = (2 * mean_x * mean_y + first) * (2 * covariance + second)
    bottom = (mean_x**2 + mean_y**2 + first) * (variance_x + variance_y + second)
    return (top / bottom).mean()


def _pair(image: Tensor, reference: Tensor, data_range: float) -> tuple[Tensor, Tensor]:
    """Check both images and convert them to float64, in which small variances are accurate."""
    require_positive("data_range", data_range)
    if image.shape != reference.shape:
        raise ShapeError(f"the image has shape {tuple(image.shape)} and the reference {tuple(reference.shape)}")
    require_finite("the image", image)
    require_finite("the reference", reference)
    low, high = (float(end) for end in torch.aminmax(reference.detach())) if reference.numel() else (math.nan,) * 2
    if not (low >= -1e-3 * data_range and high <= (1 + 1e-3) * data_range):
        raise OptionError(
            f"the reference has values from {low:.4g} to {high:.4g}, outside 0 … {data_range:g}; give the range of the "
            f"pixels as data_range (255 for bytes) or scale both images"
        )
    double = torch.float32 if image.device.type == "mps" else torch.float64
    return image.to(double), reference.to(double)

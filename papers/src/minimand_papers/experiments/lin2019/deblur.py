"""Deblurring of photographs with reflected borders."""

from minimand.operators import gaussian_blur

from .._restoration import Task, restoration

TASK = Task(lambda size: gaussian_blur(size, 1.6, padding_mode="reflect"))

experiment = restoration(
    "deblur",
    "Deblurring by a learned objective",
    "Photographs are blurred by a Gaussian of 1.6 pixels, with reflected borders.",
    TASK,
)

"""Super-resolution of photographs."""

from minimand.operators import downsampling

from .._restoration import Task, restoration

FACTOR = 2
TASK = Task(lambda size: downsampling(size, FACTOR), FACTOR)

experiment = restoration(
    "superres",
    "Super-resolution by a learned objective",
    "Every square of 2 × 2 pixels of a photograph is measured by its mean.",
    TASK,
)

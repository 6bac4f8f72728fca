"""The networks of the papers, for images of 32 × 32 and the like, plain: ``convert`` makes them solvers."""

from .alexnet import AlexNet
from .lenet import LeNet
from .vgg import VGG16

__all__ = ["VGG16", "AlexNet", "LeNet"]

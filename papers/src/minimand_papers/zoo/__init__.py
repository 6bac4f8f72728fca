"""The plain networks of the papers; ``convert`` turns their blocks into solvers."""

from .alexnet import AlexNet
from .densenet import AGDNet, AGDNet121, DenseNet, DenseNet121
from .fastnet import FastNet
from .lenet import LeNet
from .plain import BasicResNet, PatchTransformer, Perceptron
from .proxprop import ProxPropConvNet, ProxPropMLP
from .resnet import DMRNet, HBNet, HBNet34, ResNet, ResNet34
from .vgg import VGG16

__all__ = [
    "VGG16",
    "AGDNet",
    "AGDNet121",
    "AlexNet",
    "BasicResNet",
    "DMRNet",
    "DenseNet",
    "DenseNet121",
    "FastNet",
    "HBNet",
    "HBNet34",
    "LeNet",
    "PatchTransformer",
    "Perceptron",
    "ProxPropConvNet",
    "ProxPropMLP",
    "ResNet",
    "ResNet34",
]

"""Networks as others write them, to be converted: a multilayer perceptron, a residual network, a transformer."""

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["BasicResNet", "PatchTransformer", "Perceptron"]


class Perceptron(nn.Sequential):
    """Two hidden layers of ReLU with dropout before them and before the output.

    >>> Perceptron(10, (3, 32, 32))(torch.randn(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """

    def __init__(self, classes: int, shape: tuple[int, ...], hidden: int = 512, dropout: float = 0.5) -> None:
        inputs = torch.Size(shape).numel()
        super().__init__(
            nn.Flatten(),
            nn.Linear(inputs, hidden),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(hidden, classes),
        )


class _Residual(nn.Module):
    """Two convolutions with batch normalisation, and the input added before the last ReLU."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """The residual block."""
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return F.relu(out + self.shortcut(x))


class BasicResNet(nn.Module):
    """The CIFAR ResNet of 6n + 2 layers (He et al., 2015), with projections where the map is halved; n = 3 has 20.

    >>> BasicResNet(10, (3, 32, 32), n=1)(torch.randn(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """

    def __init__(self, classes: int, shape: tuple[int, ...], n: int = 3, width: int = 16, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv = nn.Conv2d(shape[0], width, 3, 1, 1, bias=False)
        self.bn = nn.BatchNorm2d(width)
        widths = [width, *[width] * n, *[2 * width] * n, *[4 * width] * n]
        blocks = [_Residual(a, b, 2 if b > a else 1) for a, b in itertools.pairwise(widths)]
        self.blocks = nn.Sequential(*blocks)
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(4 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """The logits."""
        x = self.blocks(F.relu(self.bn(self.conv(x))))
        return self.fc(self.dropout(x.mean((2, 3))))


class _Encoder(nn.Module):
    """Self-attention and a network of two layers with ReLU, each normalised first and added."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        """The encoder block."""
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, width)
        x = x + self.dropout(self.out(attended))
        hidden = F.relu(self.fc1(self.norm2(x)))
        return x + self.fc2(self.dropout(hidden))


class PatchTransformer(nn.Module):
    """A small vision transformer with ReLU: patches, a learned position, encoder blocks, the mean of the tokens.

    >>> PatchTransformer(10, (3, 32, 32), depth=1)(torch.randn(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """

    def __init__(
        self,
        classes: int,
        shape: tuple[int, ...],
        width: int = 64,
        depth: int = 3,
        patch: int = 4,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        tokens = (shape[-2] // patch) * (shape[-1] // patch)
        self.patches = nn.Conv2d(shape[0], width, patch, patch)
        self.position = nn.Parameter(0.02 * torch.randn(tokens, width))
        self.blocks = nn.Sequential(*(_Encoder(width, 4, dropout) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """The logits."""
        x = self.patches(x).flatten(2).transpose(1, 2) + self.position
        return self.head(self.norm(self.blocks(x)).mean(1))

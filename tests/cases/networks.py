"""Small networks in the style of user code."""

import torch
import torch.nn.functional as F
from torch import nn


class Functional(nn.Module):
    """Everything but the parameters is in the forward."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3, padding=1)
        self.conv2 = nn.Conv2d(4, 6, 3, stride=2, padding=1)
        self.fc1 = nn.Linear(6 * 16, 12)
        self.fc2 = nn.Linear(12, 8)
        self.fc3 = nn.Linear(8, 5)

    def forward(self, x):
        assert x.shape[1] == 1, "grey images"
        x = F.relu(self.conv1(x))
        x = F.leaky_relu(self.conv2(x), 0.1, inplace=True)
        x = F.dropout(x, 0.25, training=self.training)
        x = x.view(x.size(0), -1)
        x = torch.tanh(self.fc1(x))
        x = F.dropout(x, p=0.5, training=self.training)
        x = self.fc2(x).relu()
        return F.log_softmax(self.fc3(x), dim=1)

    def classify(self, x):
        return self(x).argmax(1)


class VGG(nn.Module):
    """The shape of VGG16: features and classifier as Sequentials, dropout before the linear layers."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(4, 4, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Sequential(
            nn.Linear(64, 16),
            nn.ReLU(inplace=True),
            nn.Dropout(0.4),
            nn.Linear(16, 12),
            nn.ReLU(inplace=True),
            nn.Dropout(),
            nn.Linear(12, 5),
        )

    def forward(self, x):
        return self.classifier(torch.flatten(self.features(x), 1))


class Residual(nn.Module):
    def __init__(self, inputs, outputs, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x):
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    """The shape of ResNet18: one shared ReLU per block, batch normalisation, residual blocks."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = nn.Sequential(Residual(4, 4), Residual(4, 6, 2))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(6, 5)

    def forward(self, x):
        x = self.relu(self.bn1(self.conv1(x)))
        return self.fc(torch.flatten(self.avgpool(self.layer1(x)), 1))


class Shared(nn.Module):
    """One activation and one dropout module with several calls, one of them not after a layer."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 5)
        self.act, self.drop = nn.Tanh(), nn.Dropout(0.3)

    def forward(self, x):
        x = self.act(self.fc1(self.drop(x)))
        x = self.act(x + 1)
        return self.fc3(self.drop(self.act(self.fc2(self.drop(x)))))


class Branching(nn.Module):
    """A branch on data, which cannot be traced, around parts that can be traced."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Dropout(0.2), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        self.drop, self.fc, self.act = nn.Dropout(0.3), nn.Linear(8, 5), nn.Sigmoid()

    def forward(self, x):
        if x.sum() > 0:
            x = x + 1
        return self.act(self.fc(self.drop(self.body(x))))


class Decoder(nn.Module):
    """All padding modes, transposed convolutions, and a residual addition of one."""

    def __init__(self):
        super().__init__()
        self.wrap = nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular")
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout2d(0.25)
        self.mirror = nn.Conv2d(4, 6, 3, stride=2, padding=1, padding_mode="reflect", bias=False)
        self.up = nn.ConvTranspose2d(6, 4, 4, stride=2, padding=1, groups=2)
        self.up_norm = nn.BatchNorm2d(4)
        self.edge = nn.Conv2d(4, 4, 3, padding="same", padding_mode="replicate")
        self.line = nn.ConvTranspose1d(4, 2, 3, stride=2, output_padding=1)

    def forward(self, x):
        skip = torch.relu(self.norm(self.wrap(x)))
        x = torch.tanh(self.mirror(self.drop(skip)))
        x = torch.relu(self.up_norm(self.up(x)) + skip)
        x = torch.relu(self.edge(x) + x)
        return torch.sigmoid(self.line(x.mean(-1)))


class Volume(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv3d(1, 4, 3, padding=1, bias=False), nn.BatchNorm3d(4)
        self.drop, self.second = nn.Dropout3d(0.5), nn.Conv3d(4, 2, 2, stride=2, padding_mode="circular", padding=1)

    def forward(self, x):
        x = F.relu(self.norm(self.first(x)))
        return F.elu(self.second(self.drop(x)))


class Attention(nn.Module):
    """Layers inside one of torch's modules."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.fc = nn.Linear(8, 5)

    def forward(self, x):
        return self.fc(self.encoder(x))


class Encoder(nn.Module):
    """A transformer of torch's own modules; in evaluation they have a fused path that calls no layer."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.decoder = nn.TransformerDecoderLayer(8, 2, 12, batch_first=True)
        self.fc = nn.Linear(8, 5)

    def forward(self, x):
        x = self.encoder(x)
        return self.fc(self.decoder(x, x))


#: A network, and the shape of its input.
NETWORKS = {
    "functional": (Functional, (3, 1, 8, 8)),
    "vgg": (VGG, (3, 3, 8, 8)),
    "resnet": (ResNet, (3, 3, 8, 8)),
    "shared": (Shared, (3, 8)),
    "branching": (Branching, (3, 8)),
    "decoder": (Decoder, (3, 3, 8, 8)),
    "volume": (Volume, (2, 1, 4, 4, 4)),
    "attention": (Attention, (3, 4, 8)),
    "encoder": (Encoder, (3, 4, 8)),
}

"""Architectures in small: attention, recurrent, convolutional and residual networks."""

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import rnn

from .listing import listed, tokens


class SelfAttention(nn.Module):
    def __init__(self, width, heads, block):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.attn_dropout, self.resid_dropout = nn.Dropout(0.1), nn.Dropout(0.1)
        self.register_buffer("bias", torch.tril(torch.ones(block, block)).view(1, 1, block, block))
        self.heads = heads

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)
        q, k, v = (t.view(B, T, self.heads, C // self.heads).transpose(1, 2) for t in (q, k, v))
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        y = self.attn_dropout(F.softmax(att, dim=-1)) @ v
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C)))


class NewGELU(nn.Module):
    def forward(self, x):
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class GPTBlock(nn.Module):
    """minGPT: a lambda holds the modules of the feed-forward part."""

    def __init__(self, width=8, heads=2, block=6):
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(width), SelfAttention(width, heads, block), nn.LayerNorm(width)
        self.mlp = nn.ModuleDict(
            {"c_fc": nn.Linear(width, 16), "c_proj": nn.Linear(16, width), "act": NewGELU(), "dropout": nn.Dropout(0.1)}
        )
        m = self.mlp
        self.mlpf = lambda x: m["dropout"](m["c_proj"](m["act"](m["c_fc"](x))))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlpf(self.ln_2(x))


@listed("gpt", tokens(2, 5))
class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe, self.drop = nn.Embedding(11, 8), nn.Embedding(6, 8), nn.Dropout(0.1)
        self.h = nn.ModuleList([GPTBlock(), GPTBlock()])
        self.ln_f, self.lm_head = nn.LayerNorm(8), nn.Linear(8, 11, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, idx, targets=None):
        pos = torch.arange(0, idx.size(1), dtype=torch.long, device=idx.device).unsqueeze(0)
        x = self.drop(self.wte(idx) + self.wpe(pos))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
        return logits, loss


@listed("rnn loop", (2, 5, 4))
class RNNLoop(nn.Module):
    def __init__(self):
        super().__init__()
        self.i2h, self.h2h, self.out = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        h = torch.zeros(x.size(0), 6, dtype=x.dtype)
        outputs = []
        for t in range(x.size(1)):
            h = torch.tanh(self.i2h(x[:, t]) + self.h2h(h))
            outputs.append(self.out(h))
        return torch.stack(outputs, 1), h


@listed("rnn iterating over its input", (2, 5, 4))
class Iterating(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.GRUCell(4, 6), nn.Linear(6, 2)

    def forward(self, x):
        h = x.new_zeros(x.shape[0], 6)
        for step in x.transpose(0, 1):
            h = self.cell(step, h)
        return self.head(h)


@listed("lstm", (2, 5, 4))
class LSTM(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 6, num_layers=2, batch_first=True, dropout=0.2, bidirectional=True)
        self.fc = nn.Linear(12, 3)

    def forward(self, x):
        out, (_, _) = self.lstm(x)
        return self.fc(out[:, -1, :])


@listed("packed gru", (2, 5, 4), opaque="into Python")
class PackedGRU(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru, self.fc = nn.GRU(4, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, x):
        lengths = torch.full((x.size(0),), x.size(1), dtype=torch.long)
        packed = rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        out, _ = self.gru(packed)
        out, _ = rnn.pad_packed_sequence(out, batch_first=True)
        return self.fc(out)


@listed("vae", (4, 1, 8, 8))
class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(64, 16), nn.Linear(16, 3), nn.Linear(16, 3)
        self.fc3, self.fc4 = nn.Linear(3, 16), nn.Linear(16, 64)

    def forward(self, x):
        h = F.relu(self.fc1(x.view(-1, 64)))
        mu, logvar = self.fc21(h), self.fc22(h)
        std = torch.exp(0.5 * logvar)
        z = mu + torch.randn_like(std) * std
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z)))), mu, logvar


@listed("u-net", (2, 3, 16, 16))
class UNet(nn.Module):
    def __init__(self):
        super().__init__()

        def double(i, o):
            return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU(inplace=True))

        self.down1, self.down2, self.pool = double(3, 4), double(4, 8), nn.MaxPool2d(2)
        self.up, self.conv, self.out = nn.ConvTranspose2d(8, 4, 2, stride=2), double(8, 4), nn.Conv2d(4, 2, 1)

    def forward(self, x):
        a = self.down1(x)
        b = self.up(self.down2(self.pool(a)))
        dy, dx = a.size(2) - b.size(2), a.size(3) - b.size(3)
        b = F.pad(b, [dx // 2, dx - dx // 2, dy // 2, dy - dy // 2])
        return self.out(self.conv(torch.cat([a, b], dim=1)))


class BasicBlock(nn.Module):
    def __init__(self, inputs, outputs, stride=1):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)
        self.conv2, self.bn2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
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


@listed("resnet", (2, 3, 16, 16))
class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1, self.relu = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)
        self.layer1 = nn.Sequential(BasicBlock(4, 4), BasicBlock(4, 8, 2))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d((1, 1)), nn.Linear(8, 5)

    def forward(self, x):
        x = self.layer1(self.relu(self.bn1(self.conv1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


@listed("densenet", (2, 3, 8, 8))
class DenseNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv2d(3 + 4 * i, 4, 3, padding=1) for i in range(3)])
        self.norms = nn.ModuleList([nn.BatchNorm2d(3 + 4 * i) for i in range(3)])
        self.classifier = nn.Linear(15, 5)

    def forward(self, x):
        features = [x]
        for norm, layer in zip(self.norms, self.layers, strict=True):
            features.append(layer(F.relu(norm(torch.cat(features, 1)))))
        return self.classifier(torch.cat(features, 1).mean([2, 3]))


class InvertedResidual(nn.Module):
    def __init__(self, width, hidden, stride):
        super().__init__()
        self.use_res_connect = stride == 1
        self.conv = nn.Sequential(
            nn.Conv2d(width, hidden, 1, bias=False),
            nn.BatchNorm2d(hidden),
            nn.ReLU6(inplace=True),
            nn.Conv2d(hidden, hidden, 3, stride, 1, groups=hidden, bias=False),
            nn.BatchNorm2d(hidden),
            nn.Hardswish(inplace=True),
        )
        self.se = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(hidden, 2, 1), nn.ReLU(), nn.Conv2d(2, hidden, 1))
        self.project = nn.Sequential(nn.Conv2d(hidden, width, 1, bias=False), nn.BatchNorm2d(width))

    def forward(self, x):
        h = self.conv(x)
        h = self.project(h * F.hardsigmoid(self.se(h)))
        return x + h if self.use_res_connect else h


@listed("mobilenet", (2, 3, 16, 16))
def mobilenet():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, 2, 1),
        InvertedResidual(4, 8, 1),
        InvertedResidual(4, 8, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.2, inplace=True),
        nn.Linear(4, 5),
    )


@listed("vit", (2, 3, 32, 32))
class ViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(3, 8, 8, 8)
        self.cls_token, self.pos_embed = nn.Parameter(torch.zeros(1, 1, 8)), nn.Parameter(torch.randn(1, 17, 8))
        self.norm1, self.qkv, self.proj = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.norm2, self.fc1, self.fc2, self.head = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 5)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1) + self.pos_embed
        B, N, C = x.shape
        q, k, v = self.qkv(self.norm1(x)).reshape(B, N, 3, 2, C // 2).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, N, C)
        x = x + self.proj(y)
        x = x + self.fc2(F.gelu(self.fc1(self.norm2(x)), approximate="tanh"))
        return self.head(x[:, 0])


@listed("mixer", (2, 4, 6))
class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(6), nn.LayerNorm(6)
        self.tokens = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Dropout(0.1), nn.Linear(8, 4))
        self.channels = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Dropout(0.1), nn.Linear(8, 6))

    def forward(self, x):
        x = x + self.tokens(self.norm1(x).mT).mT
        return x + self.channels(self.norm2(x))


@listed("siamese", lambda: (torch.randn(2, 4), torch.randn(2, 4)))
class Siamese(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
        self.head = nn.Linear(3, 1)

    def forward(self, a, b):
        return self.head(torch.abs(self.encoder(a) - self.encoder(b)))


@listed("tied autoencoder", (2, 6))
class TiedAutoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(6, 3)
        self.bias = nn.Parameter(torch.zeros(6))

    def forward(self, x):
        return F.linear(torch.sigmoid(self.encoder(x)), self.encoder.weight.t(), self.bias)


@listed("transformer encoder", (2, 5, 8))
class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.fc = nn.Linear(8, 5)

    def forward(self, x):
        return self.fc(self.encoder(x).mean(1))


@listed("frozen transformer encoder in evaluation", (2, 5, 8))
def frozen_encoder():
    return Encoder().requires_grad_(False).eval()


@listed("attention", (2, 5, 8))
class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
        self.fc = nn.Linear(8, 5)

    def forward(self, x):
        return self.fc(self.attention(x, x, x, need_weights=False)[0])


@listed("transformer", lambda: (torch.randn(2, 5, 8), torch.randn(2, 3, 8)))
def transformer():
    return nn.Transformer(8, 2, 1, 1, 16, batch_first=True)


@listed("functional", (2, 1, 8, 8))
class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.fc1, self.fc2 = nn.Conv2d(1, 4, 3), nn.Linear(36, 12), nn.Linear(12, 5)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv(x)), 2)
        x = x.view(-1, self.num_flat_features(x))
        x = F.dropout(torch.tanh(self.fc1(x)), p=0.5, training=self.training)
        return F.log_softmax(self.fc2(x), dim=1)

    def num_flat_features(self, x):
        count = 1
        for size in x.size()[1:]:
            count *= size
        return count


@listed("convolution in one dimension", (2, 3, 32))
def audio():
    return nn.Sequential(
        nn.Conv1d(3, 4, 5, padding="same"), nn.GroupNorm(2, 4), nn.GLU(1), nn.AdaptiveMaxPool1d(4), nn.Flatten(1),
        nn.Linear(8, 3), nn.Softmax(-1),
    )  # fmt: skip

"""Small networks with forwards of many kinds, as other people write them."""

import math
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, rnn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class ForwardCase:
    """A network and its inputs. ``opaque`` is a part of the reason why a record cannot tell all; None if it can.

    ``guessable``: inputs made up from the first layers run. ``exact``: recomputing is exact though a part is opaque.
    """

    make: Callable[[], nn.Module]
    example: Callable[[], Any]
    opaque: str | None = None
    guessable: bool = True
    exact: bool = True


FORWARDS: dict[str, ForwardCase] = {}


def listed(name, example, **options):
    """Add a class or function that makes a network to the cases; ``example`` is a shape or a function."""

    def add(make):
        made = example if callable(example) else lambda: torch.randn(example)
        FORWARDS[name] = ForwardCase(make, made, **options)
        return make

    return add


def quietly(function):
    """Call torch's older functions without the warnings that they are old."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function()


def tokens(*shape):
    return lambda: torch.randint(0, 11, shape)


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


def _double(module, args):
    return (args[0] * 2,)


def _shift(module, args, output):
    return output + 1


@listed("hooks", (2, 4))
def hooked():
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    net[0].register_forward_pre_hook(_double)
    net[2].register_forward_hook(_shift)
    return net


@listed("old weight norm", (2, 4), opaque="in training only")
def old_weight_norm():
    first = quietly(lambda: nn.utils.weight_norm(nn.Linear(4, 4)))
    return nn.Sequential(first, nn.ReLU(), nn.utils.spectral_norm(nn.Linear(4, 2)))


@listed("parametrizations", (2, 4), opaque="in training only")
def parametrized():
    return nn.Sequential(
        parametrizations.weight_norm(nn.Linear(4, 4)), nn.ReLU(), parametrizations.spectral_norm(nn.Linear(4, 2))
    )


@listed("in place", (2, 4))
class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        h = F.relu_(self.a(x))
        left, right = h.chunk(2, 1)
        left.mul_(2)
        h.add_(self.b(h))
        h[:, 0] = 0.0
        h[:, 1:3] += right
        x += 1
        return torch.nn.functional.relu(self.c(h), inplace=True) + x


@listed("keywords and dictionaries", lambda: {"pixels": torch.randn(2, 4), "mask": torch.ones(2, 4)}, guessable=False)
class Keywords(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, *, pixels, mask=None, scale=2.0):
        h = self.fc(pixels if mask is None else pixels * mask)
        return {"logits": h * scale, "hidden": [h], "nothing": None}


@listed("batch dictionary", lambda: ({"image": torch.randn(2, 4), "id": ["a", "b"]},), guessable=False)
class BatchDictionary(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, batch):
        batch["logits"] = self.fc(batch.pop("image"))
        return batch


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


@listed("scripted part", (2, 4), opaque="torch.jit")
def scripted():
    middle = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    return nn.Sequential(nn.Linear(4, 4), quietly(lambda: torch.jit.script(middle)), nn.Linear(4, 2))


@listed("scripted", (2, 4), opaque="torch.jit")
def all_scripted():
    return quietly(lambda: torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))))


def _affine(x: torch.Tensor) -> torch.Tensor:
    return x * 2 + 1


@listed("scripted function", (2, 4), opaque="does not see", exact=False)
class ScriptedFunction(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)
        self.function = quietly(lambda: torch.jit.script(_affine))

    def forward(self, x):
        return self.b(self.function(self.a(x)))


@listed("checkpointed", (2, 4))
class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.ReLU()), nn.Linear(4, 2)

    def forward(self, x):
        h = checkpoint(self.a, x, use_reentrant=False)
        return self.b(checkpoint(self.a, h.requires_grad_() if h.is_leaf else h, use_reentrant=True))


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        h = self.a(x)
        return self.b(h) if h.sum() > 0 else self.b(-h) * 3


@listed("branch on data", (2, 4), opaque="into Python", exact=False)
def branching():
    return Branching()


@listed("number from data", (2, 4), opaque="into Python", exact=False)
class ReadingData(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return self.fc(x) / max(float(x.abs().max()), 1e-6)


@listed("mixture of experts", (6, 4), opaque="depends on the data", exact=False)
class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(4, 3), nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def forward(self, x):
        choice = self.gate(x).argmax(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows = (choice == i).nonzero().squeeze(-1)
            if rows.numel() > 0:
                out.index_add_(0, rows, expert(x[rows]))
        return out


@listed("raises", (2, 4), opaque="raises NotImplementedError", exact=False, guessable=False)
class Raising(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        self.touched = self.fc(x)
        self.fc.weight.data.zero_()
        raise NotImplementedError("not yet")


@listed("catches what a part raises", (2, 4))
class Catching(nn.Module):
    def __init__(self):
        super().__init__()
        self.bad, self.fc = Raising(), nn.Linear(4, 2)

    def forward(self, x):
        try:
            x = self.bad(x)
        except NotImplementedError:
            x = x * 2
        return self.fc(x)


@listed("assigns data", (2, 4), opaque="assigns .data")
class AssigningData(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        h = self.a(x)
        h.data = h.data.clamp(min=0)
        return self.b(h)


@listed("out argument", (2, 4))
class OutArgument(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        result = torch.empty(x.shape[0], 4)
        torch.add(self.fc(x), 1.0, out=result)
        return result


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, grad):
        return -grad


class Clip(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clamp(-1, 1) * 2

    @staticmethod
    def backward(ctx, grad):
        return grad


@listed("autograd functions", (2, 4))
class CustomFunctions(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.b(Reverse.apply(Clip.apply(self.a(x))))


@listed("stateful", (2, 4))
class Stateful(nn.Module):
    """Buffers, plain tensors, lists, counters and caches that every forward changes."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("average", torch.zeros(4))
        self.memory, self.history, self.count, self.cache = torch.zeros(2, 4), [], 0, {}

    def forward(self, x):
        h = self.fc(x)
        self.average.mul_(0.9).add_(0.1 * h.detach().mean(0))
        self.memory.add_(h.detach())
        self.history.append(h)
        self.count += 1
        if "mask" not in self.cache:
            self.cache["mask"] = torch.tensor([1.0, 0.0, 1.0, 0.0])
        self.last = h
        self.register_buffer("late", torch.zeros(1), persistent=False)
        self.fc.register_forward_hook(_shift)
        return h * self.cache["mask"] + self.average + self.memory


@listed("max norm embedding", tokens(2, 5))
class MaxNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.fc = nn.Embedding(11, 4, max_norm=0.5), nn.Linear(4, 2)

    def forward(self, x):
        return self.fc(self.embedding(x).sum(1))


_TABLE = torch.linspace(0, 1, 4)


@listed("tensors from outside", (2, 4))
class Closure(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.scale, self.shifts = nn.Linear(4, 4), torch.tensor(2.0), [torch.ones(4)]
        late = torch.full((4,), 3.0)
        self.add = lambda x: x + late

    def forward(self, x):
        return self.add(self.fc(x) * self.scale + self.shifts[0] + _TABLE)


@listed("drop path", (4, 4), opaque="in training only")
class DropPath(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def path(self, x):
        if not self.training:
            return x
        mask = x.new_empty(x.shape[0], 1).bernoulli_(0.8)
        return x * mask / 0.8

    def forward(self, x):
        x = x + self.path(F.relu(self.a(x)))
        return self.head(x + self.path(F.relu(self.b(x))))


@listed("layer drop", (2, 4), opaque="draws from random", exact=False)
class LayerDrop(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList([nn.Linear(4, 4) for _ in range(8)]), nn.Linear(4, 2)

    def forward(self, x):
        for layer in self.layers:
            if random.random() < 0.5:
                x = layer(x)
        return self.head(x)


@listed("energy", (2, 4))
class Energy(nn.Module):
    """The forward is a gradient of another network."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Softplus(), nn.Linear(8, 1))

    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (force,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
        return -force


@listed("autocast inside", (2, 4))
class Autocast(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            h = self.a(x)
        with torch.no_grad():
            scale = h.float().abs().mean()
        return self.b(h.float() / scale)


@listed("quantised", (2, 4))
def quantised():
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    return quietly(lambda: torch.ao.quantization.quantize_dynamic(net, {nn.Linear}))


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


@listed("nested outputs", (2, 4))
class NestedOutputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(4, 4), nn.Linear(4, 2), nn.Dropout(0.3)

    def forward(self, x):
        h = self.drop(self.a(x))
        return h, {"skip": [x + h, (self.b(h), "text", 3)]}


@listed("double precision", lambda: torch.randn(2, 4, dtype=torch.float64))
def double_precision():
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.PReLU(), nn.Linear(4, 2)).double()


@listed("vmap inside", (2, 4), opaque="does not see", exact=False)
class Vmapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.b(torch.vmap(lambda row: row / row.norm())(self.a(x)))


@listed("parameters only", lambda: (), guessable=True)
class Parameters(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))

    def forward(self):
        return torch.linalg.matrix_exp(self.weight - self.weight.T)


@listed("convolution in one dimension", (2, 3, 32))
def audio():
    return nn.Sequential(
        nn.Conv1d(3, 4, 5, padding="same"), nn.GroupNorm(2, 4), nn.GLU(1), nn.AdaptiveMaxPool1d(4), nn.Flatten(1),
        nn.Linear(8, 3), nn.Softmax(-1),
    )  # fmt: skip


@listed("two dropouts and a skip in evaluation", (2, 4))
def evaluation():
    class Skip(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop, self.fc = nn.Dropout(0.5), nn.Linear(4, 4)

        def forward(self, x):
            return x + self.fc(self.drop(self.drop(x)).contiguous())

    return nn.Sequential(Skip(), nn.Identity(), Skip()).eval()

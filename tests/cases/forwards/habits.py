"""Ways to write a forward: hooks, in-place changes, dictionaries, state, tensors from outside."""

import copy
from dataclasses import dataclass

import torch
import torch.fx
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from .listing import listed, quietly, tokens


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


@listed("generated forward", (2, 4))
def generated():
    return torch.fx.symbolic_trace(Residual())


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return F.relu(x + self.b(F.relu(self.a(x))))


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


@listed("checkpointed", (2, 4))
class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.ReLU()), nn.Linear(4, 2)

    def forward(self, x):
        h = checkpoint(self.a, x, use_reentrant=False)
        return self.b(checkpoint(self.a, h.requires_grad_() if h.is_leaf else h, use_reentrant=True))


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


@dataclass(frozen=True)
class Batch:
    x: torch.Tensor
    scale: float = 2.0


@listed("dataclasses", lambda: (Batch(torch.randn(2, 4)),), guessable=False)
class Dataclasses(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, batch):
        batch.x.add_(1)
        return Batch(self.fc(batch.x) * batch.scale)


@listed("generators", (2, 4))
class Generators(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.own, self.others = nn.Linear(4, 4), torch.Generator(), (torch.Generator(),)

    def forward(self, x):
        h = self.fc(x) + torch.randn(4, generator=self.own)
        return h * torch.rand(4, generator=self.others[0])


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


@listed("parameters only", lambda: (), guessable=True)
class Parameters(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))

    def forward(self):
        return torch.linalg.matrix_exp(self.weight - self.weight.T)


@listed("two dropouts and a skip in evaluation", (2, 4))
def evaluation():
    class Skip(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop, self.fc = nn.Dropout(0.5), nn.Linear(4, 4)

        def forward(self, x):
            return x + self.fc(self.drop(self.drop(x)).contiguous())

    return nn.Sequential(Skip(), nn.Identity(), Skip()).eval()


@listed("copies itself", (2, 4))
class Copying(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        fast = copy.deepcopy(self.fc)
        return self.fc(x) + fast(x).detach()


@listed("distributions", (2, 4))
class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor, self.log_std = nn.Linear(4, 2), nn.Parameter(torch.zeros(2))

    def forward(self, x):
        return torch.distributions.Normal(self.actor(x), self.log_std.exp(), validate_args=False)


@listed("calls forward directly", (2, 4))
class Direct(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.b.forward(F.silu(self.a.forward(x)))


@listed("diffusion", lambda: (torch.randn(2, 3, 32, 32), torch.tensor([1, 5])))
class Diffusion(nn.Module):
    def __init__(self):
        super().__init__()
        self.inc, self.out = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1)
        self.time = nn.Sequential(nn.Linear(6, 8), nn.SiLU(), nn.Linear(8, 8))
        self.norm = nn.GroupNorm(2, 8)

    def forward(self, x, t):
        frequencies = torch.exp(-torch.arange(3, device=x.device) * 0.5)
        angles = t[:, None].float() * frequencies[None]
        emb = self.time(torch.cat([angles.sin(), angles.cos()], -1))
        return self.out(F.silu(self.norm(self.inc(x)) + emb[:, :, None, None]))

"""Law: whatever the layer, the passes and the edits of ``.grad``, a step leaves the direction of a dense solve."""

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from minimand.train import ProxProp, Relative

EDITS = (None, "scale", "penalty", "decay", "clip", "clamp", "noise", "hook", "between")


def _layer(draw):
    kind, bias, groups = draw.choice(["linear", "sequence", "conv1", "conv2"]), draw.random() < 0.6, 1
    inputs, outputs = draw.choice([1, 2, 5, 9]), draw.choice([1, 1, 3, 8])
    if kind in ("linear", "sequence"):
        layer: nn.Module = nn.Linear(inputs, outputs, bias)
        shape: tuple[int, ...] = (inputs,) if kind == "linear" else (draw.randint(1, 4), inputs)
    else:
        groups, size = draw.choice([1, 1, 2]), draw.randint(6, 9)
        cls, dims = (nn.Conv1d, 1) if kind == "conv1" else (nn.Conv2d, 2)
        how = {"stride": draw.randint(1, 2), "padding": draw.randint(0, 2), "dilation": draw.randint(1, 2)}
        layer = cls(inputs * groups, outputs * groups, draw.randint(1, 3), groups=groups, bias=bias, **how)
        shape = (inputs * groups,) + (size,) * dims
    frozen = draw.choice([None, None, None, "bias", "weight"]) if bias else None
    if frozen:
        getattr(layer, frozen).requires_grad_(False)
    return layer.to(draw.choice([torch.float32, torch.float64])), shape


def _rows(layer, x):
    """The rows that multiply the weight, for each group."""
    if isinstance(layer, nn.Linear):
        return [x.reshape(-1, x.shape[-1])]
    # A signal is an image of one line.
    line = isinstance(layer, nn.Conv1d)
    kernel, stride, dilation = ((1,) * line + how for how in (layer.kernel_size, layer.stride, layer.dilation))
    padding = (0,) * line + layer.padding
    found = F.unfold(x[:, :, None] if line else x, kernel, dilation, padding, stride).mT
    return list(found.flatten(0, 1).chunk(layer.groups, 1))


def _matrix(layer, parts):
    """Parts for the trained parameters as outputs × columns."""
    return torch.cat([part.reshape(layer.weight.shape[0], -1) for part in parts], 1).double()


def _expected(layer, gradient, batches, tau):
    groups = []
    for rows in [torch.cat(some).double() for some in zip(*(_rows(layer, x) for x in batches), strict=True)]:
        ones = [torch.ones(len(rows), 1, dtype=torch.float64)] * bool(
            layer.bias is not None and layer.bias.requires_grad
        )
        whole = torch.cat([rows] * layer.weight.requires_grad + ones, 1)
        groups.append(whole.T @ whole)
    mean = sum(float(gram.diagonal().mean()) for gram in groups) / len(groups)
    ridge = (mean / tau.factor if isinstance(tau, Relative) else 1 / tau) * torch.eye(
        len(groups[0]), dtype=torch.float64
    )
    parts = gradient.chunk(len(groups))
    return torch.cat([torch.linalg.solve(gram + ridge, part.T).T for gram, part in zip(groups, parts, strict=True)])


def _edit(name, parameters):
    for parameter in parameters:
        grad = parameter.grad
        if name == "scale":
            grad.div_(1024.0)
        elif name == "decay":
            grad.add_(parameter.detach(), alpha=0.3)
        elif name == "clamp":  # unseen by version counters
            grad.data.clamp_(-0.1, 0.1)
        elif name == "noise":
            parameter.grad = grad + torch.randn_like(grad)
    if name == "clip":
        nn.utils.clip_grad_norm_(parameters, 0.01)


def _pass(layer, shape, draw, calls, penalty):
    parameters, batches, loss = [p for p in layer.parameters() if p.requires_grad], [], 0.0
    for _ in range(calls):
        x = torch.randn(draw.randint(1, 5), *shape, dtype=layer.weight.dtype) * 10 ** draw.uniform(-1, 1)
        y = layer(x)
        loss = loss + (y * torch.randn_like(y)).sum() + 0.1 * y.square().sum()
        batches.append(x)
    (loss + sum(p.square().sum() for p in parameters) if penalty else loss).backward()
    return batches


@pytest.mark.parametrize("block", range(5))
def test_random_steps(block):
    for seed in range(60 * block, 60 * block + 60):
        draw = random.Random(seed)
        torch.manual_seed(seed)
        layer, shape = _layer(draw)
        parameters = [p for p in layer.parameters() if p.requires_grad]
        edit, tau = draw.choice(EDITS), draw.choice([0.1, 1.0, 10.0, Relative(0.5), Relative(20.0)])
        handles = [p.register_hook(lambda g: 1.7 * g + 0.01) for p in parameters] if edit == "hook" else []
        optimizer = torch.optim.SGD(parameters, lr=0.0)
        prox = ProxProp(layer, tau_theta=tau, skip_last=False).attach(optimizer)
        for step in range(2):
            optimizer.zero_grad(set_to_none=draw.random() < 0.5)
            batches = []
            for part in range(draw.randint(1, 3)):
                batches += _pass(layer, shape, draw, draw.randint(1, 2), edit == "penalty")
                if edit == "between" and part == 0:
                    _edit("clamp", parameters)
            _edit(edit, parameters)
            gradient = _matrix(layer, [p.grad for p in parameters])
            optimizer.step()
            found, expected = _matrix(layer, [p.grad for p in parameters]), _expected(layer, gradient, batches, tau)
            apart = torch.linalg.vector_norm(found - expected) / torch.linalg.vector_norm(expected)
            assert apart < (1e-3 if layer.weight.dtype == torch.float32 else 1e-9), (seed, step, edit, layer)
        prox.detach()
        for handle in handles:
            handle.remove()


def test_random_fused_steps():
    for seed in range(150):
        draw = random.Random(seed)
        torch.manual_seed(seed)
        layer, shape = _layer(draw)
        parameters, tau = [p for p in layer.parameters() if p.requires_grad], draw.choice([0.1, 10.0, Relative(0.5)])
        state = draw.getstate(), torch.get_rng_state()
        _pass(layer, shape, draw, 1, False)
        gradient = _matrix(layer, [p.grad for p in parameters])
        layer.zero_grad()
        draw.setstate(state[0])
        torch.set_rng_state(state[1])
        prox = ProxProp(layer, tau_theta=tau, skip_last=False, fused=True).attach(torch.optim.SGD(parameters, lr=0.0))
        batches = _pass(layer, shape, draw, 1, False)
        found, expected = _matrix(layer, [p.grad for p in parameters]), _expected(layer, gradient, batches, tau)
        apart = torch.linalg.vector_norm(found - expected) / torch.linalg.vector_norm(expected)
        assert apart < (1e-3 if layer.weight.dtype == torch.float32 else 1e-9), (seed, layer)
        prox.detach()

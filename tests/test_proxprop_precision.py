"""Laws: a float32 direction is within a thousandth of a float64 solve, also under autocast; memory stays bounded."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minimand.operators import patch_grams as grams
from minimand.train import CachedGram
from tests.test_proxprop_training import BOTH, _batch, _grads, _loss, _net, _start


def _images(count, size, top, seed=0):
    """Smooth positive images in [0, top] with three channels and strongly correlated pixels, like photographs."""
    maps = torch.randn(count, 3, size + 8, size + 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    for _ in range(3):
        maps = F.avg_pool2d(maps, 3, stride=1, padding=1)
    maps = maps[..., 4:-4, 4:-4]
    return (top * (0.5 + 0.15 * maps / maps.std()).clamp(0, 1)).float()


CASES = {
    "linear, primal": (lambda: nn.Linear(108, 9), lambda top: _images(1500, 6, top).flatten(1)),
    "linear, dual": (lambda: nn.Linear(108, 9), lambda top: _images(60, 6, top).flatten(1)),
    "conv": (lambda: nn.Conv2d(3, 5, 5, padding=2), lambda top: _images(40, 12, top)),
    "conv, stride 2": (lambda: nn.Conv2d(3, 5, 5, stride=2), lambda top: _images(60, 12, top)),
}


def _rows(layer, x):
    if isinstance(layer, nn.Conv2d):
        x = F.unfold(x, layer.kernel_size, padding=layer.padding, stride=layer.stride).mT.flatten(0, 1)
    return torch.cat([x.double(), torch.ones(len(x), 1, dtype=torch.float64)], 1)


@BOTH
@pytest.mark.parametrize("tau", [1.0, 100.0])
@pytest.mark.parametrize("top", [1.0, 255.0])
@pytest.mark.parametrize("name", CASES)
def test_float32_stays_within_a_thousandth_of_float64(name, top, tau, fused):
    """The oracle solves for the float32 gradient with a float64 Gram matrix."""
    make, images = CASES[name]
    torch.manual_seed(0)
    layer, x = make(), images(top)
    out = layer(x)
    delta = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)) / len(x)
    out.backward(delta)
    A = _rows(layer, x)
    metric = A.T @ A + torch.eye(A.shape[1], dtype=torch.float64) / tau
    if name == "linear, dual":
        # There the direction is made from δ, not from the rounded gradient.
        G = delta.double().T @ A
    else:
        G = torch.cat([layer.weight.grad.flatten(1), layer.bias.grad[:, None]], 1).double()
    exact = torch.linalg.solve(metric, G.T).T
    layer.zero_grad()
    prox, optimizer = _start(layer, tau_theta=tau, fused=fused, skip_last=False)
    layer(x).backward(delta)
    optimizer.step()
    got = torch.cat([layer.weight.grad.flatten(1), layer.bias.grad[:, None]], 1).double()
    assert (got - exact).norm() < 1e-3 * exact.norm()
    prox.detach()


@BOTH
@pytest.mark.parametrize("top", [1.0, 1e3, 1e6])
def test_a_cached_metric_of_few_rows_is_the_exact_one_for_these_rows(top, fused):
    """A part of the gradient outside of the span of the rows, which rounding leaves, is not amplified."""
    made = {}
    for gram in ("exact", CachedGram(every=1, decay=0.0, rank=64)):
        torch.manual_seed(0)
        layer, x = nn.Linear(40, 8), top * torch.randn(12, 40)
        prox, optimizer = _start(layer, gram=gram, skip_last=False, fused=fused)
        layer(x).backward(torch.randn(12, 8))
        optimizer.step()
        made[gram] = layer.weight.grad
        prox.detach()
    exact, cached = made.values()
    assert (cached - exact).norm() < 1e-2 * exact.norm()


@BOTH
@pytest.mark.parametrize("method", ["exact", "cg"])
@pytest.mark.parametrize("rows", [4, 40])
def test_autocast_around_the_backward_pass_and_the_step_changes_nothing(rows, method, fused):
    """With the forward pass under autocast, backward and step inside or outside of it are bit-identical."""
    found = []
    for inside in (False, True):
        net, (x, y) = _net(dtype=torch.float32), _batch(rows, dtype=torch.float32)
        prox, optimizer = _start(net, fused=fused, method=method)
        for parts in (1,) if fused else (1, 2):
            optimizer.zero_grad()
            for i in range(parts):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = _loss(net, x[i::parts], y[i::parts])
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
                    loss.backward()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
                optimizer.step()
            found.append(_grads(net))
        prox.detach()
    torch.testing.assert_close(found[: len(found) // 2], found[len(found) // 2 :], rtol=0, atol=0)


@pytest.mark.parametrize("edit", [1.0, 0.3])
def test_under_autocast_rounded_gradients_do_not_spoil_the_direction(edit):
    """With few rows τθ would amplify the gradient's bfloat16 rounding. The direction is solved from δ instead."""
    found = []
    for fused in (True, False):
        net, (x, y) = _net(dtype=torch.float32), _batch(4, dtype=torch.float32)
        prox, optimizer = _start(net, fused=fused, tau_theta=1e4)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            _loss(net, x, y).backward()
        for parameter in net.parameters() if not fused else ():
            parameter.grad *= edit
        optimizer.step()
        found.append([edit * grad for grad in _grads(net)] if fused else _grads(net))
        prox.detach()
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


class _Largest(TorchDispatchMode):
    """The largest number of entries in the output of any operation."""

    entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.entries = max(self.entries, tensor.untyped_storage().nbytes() // tensor.element_size())
        return out


@BOTH
@pytest.mark.parametrize("gram", ["exact", "subsampled"])
@pytest.mark.parametrize("stride", [1, 2])
def test_the_unfolded_batch_never_stands_in_memory_whole(monkeypatch, stride, gram, fused):
    monkeypatch.setattr(grams, "_BLOCK", 1 << 14)
    torch.manual_seed(0)
    layer, x = nn.Conv2d(3, 4, 5, stride=stride, padding=2), torch.rand(64, 3, 16, 16)
    prox, optimizer = _start(layer, gram=gram, fused=fused, skip_last=False)
    unfolded = F.unfold(x, 5, padding=2, stride=stride).numel()
    with _Largest() as largest:
        layer(x).square().sum().backward()
        optimizer.step()
    assert largest.entries <= 2 * max(1 << 14, x.numel(), layer(x).numel()) < unfolded / 2
    prox.detach()


def _held(prox):
    """The number of entries that each layer stores."""
    found = {}
    for path, layer in prox._units.items():
        rows = layer.rows
        factor = None if rows is None or rows.metric is None else vars(rows.metric).get("_factor")
        mine = [] if rows is None else [rows.gram, rows.a, rows.delta, factor and factor.factor]
        found[path] = sum(t.numel() for t in {id(t): t for t in mine if t is not None}.values())
    return found


@BOTH
def test_what_is_held_between_backward_and_step(fused):
    """Many rows: the Gram matrix, its factor. Few rows: input, with ones, and δ. Nothing if fused, or after."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 2))
    prox, optimizer = _start(net, fused=fused)
    net(torch.rand(10, 6)).square().sum().backward()
    assert _held(prox) == ({"0": 0, "2": 0} if fused else {"0": 2 * 7 * 7, "2": 10 * (21 + 30)})
    optimizer.step()
    assert all(layer.rows is None and not layer._pending for layer in prox._units.values())
    prox.detach()

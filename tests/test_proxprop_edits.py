"""Law: whatever happens to .grad before the step, the step preconditions .grad as it then is."""

import pytest
import torch
from torch import nn

from tests.test_proxprop import TAU, _attached, _expected, _grads, _jacobian, _layer, _loss, _plain_gradient, _textbook
from tests.test_proxprop_training import BOTH

NAMES = pytest.mark.parametrize("name", ["linear", "linear, many rows", "conv2d", "conv2d, few patches"])


def _metric(layer, x):
    J = _jacobian(layer, x)
    return J.T @ J + torch.eye(J.shape[1], dtype=J.dtype) / TAU


def _units(layer):
    """The indices of each output unit's weights and bias."""
    outputs, width = len(layer.weight), layer.weight[0].numel()
    return [[*range(u * width, (u + 1) * width), outputs * width + u] for u in range(outputs)]


def _scale(parameters, factor):
    for parameter in parameters:
        parameter.grad *= factor


def _one_entry(layer):
    layer.weight.grad.view(-1)[3] += 1e-6


def _none(layer):
    layer.bias.grad = None


EDITS = {
    "nothing": lambda layer: None,
    "clipped norm": lambda layer: nn.utils.clip_grad_norm_(layer.parameters(), 0.01),
    "clipped values": lambda layer: nn.utils.clip_grad_value_(layer.parameters(), 0.5),
    "negated": lambda layer: _scale(layer.parameters(), -1.0),
    "scaled weight": lambda layer: _scale([layer.weight], 3.0),
    "scaled unit": lambda layer: layer.weight.grad[1].mul_(2.0),
    "weight decay": lambda layer: layer.weight.grad.add_(layer.weight.detach(), alpha=0.1),
    "one entry": _one_entry,
    "other tensor": lambda layer: setattr(layer.weight, "grad", torch.randn_like(layer.weight)),
    "nearly zero": lambda layer: _scale(layer.parameters(), 1e-12),
    "without bias": _none,
}


@NAMES
@pytest.mark.parametrize("method", ["exact", "cg"])
@pytest.mark.parametrize("edit", EDITS)
def test_the_step_preconditions_what_the_optimizer_receives(name, method, edit):
    layer, x = _layer(name)
    M = _metric(layer, x)
    prox, optimizer = _attached(layer, method=method, cg_iters=2)
    _loss(layer(x)).backward()
    EDITS[edit](layer)
    received = torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten().clone()
                          for p in layer.parameters()])  # fmt: skip
    optimizer.step()
    expected = torch.linalg.solve(M, received)
    if method == "cg":
        for mine in _units(layer):
            expected[mine] = torch.from_numpy(_textbook(M[mine][:, mine].numpy(), received[mine].numpy(), 2))
    size = layer.weight.numel()
    close = {"rtol": 1e-7, "atol": 1e-9 * float(expected.abs().max())}
    torch.testing.assert_close(layer.weight.grad.flatten(), expected[:size], **close)
    if edit == "without bias":
        assert layer.bias.grad is None
    else:
        torch.testing.assert_close(layer.bias.grad, expected[size:], **close)
    prox.detach()


def _add(extra):
    return lambda grad: grad + extra


def _double_in_place(parameter):
    with torch.no_grad():
        parameter.grad.mul_(2.0)


@NAMES
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", ["adds", "in place", "post", "reads"])
def test_hooks_on_a_weight_edit_the_gradient(name, when, kind):
    """Hooks registered before or after ProxProp receive and change the plain gradient."""
    layer, x = _layer(name)
    gradient, size, seen = _plain_gradient(layer, x), layer.weight.numel(), []
    extra = torch.randn_like(layer.weight)

    def hook():
        if kind == "post":
            layer.weight.register_post_accumulate_grad_hook(_double_in_place)
        elif kind == "adds":
            layer.weight.register_hook(_add(extra))
        else:
            layer.weight.register_hook(lambda grad: seen.append(grad.mul_(2.0) if kind == "in place" else grad.clone()))

    if when == "before":
        hook()
    prox, optimizer = _attached(layer)
    if when == "after":
        layer(x)
        hook()
    _loss(layer(x)).backward()
    if kind == "reads":
        torch.testing.assert_close(seen[0].flatten(), gradient[:size])
    elif kind == "adds":
        gradient[:size] += extra.flatten()
    else:
        gradient[:size] *= 2
    torch.testing.assert_close(_grads(layer), gradient)
    optimizer.step()
    torch.testing.assert_close(_grads(layer), torch.linalg.solve(_metric(layer, x), gradient))
    prox.detach()


@pytest.mark.parametrize("place", [0, 1, 2])
@NAMES
@pytest.mark.parametrize("method", ["exact", "cg"])
@BOTH
def test_empty_batches_contribute_nothing(name, place, fused, method):
    layer, x = _layer(name)
    prox, optimizer = _attached(layer, fused=fused, method=method, cg_iters=30)
    batches = [x]
    if not fused:
        batches.insert(min(place, 1), x[:0])
    for micro in batches[:1] if place == 2 else batches:
        _loss(layer(micro)).backward()
    optimizer.step()
    torch.testing.assert_close(_grads(layer), _expected(layer, x), rtol=1e-5, atol=1e-7)
    optimizer.zero_grad()
    _loss(layer(x[:0])).backward()
    optimizer.step()
    assert not _grads(layer).any()
    prox.detach()


@pytest.mark.parametrize("name", ["linear", "linear, many rows"])
def test_conjugate_gradients_stop_at_the_tolerance(name):
    """CG stops at the first iterate at which every unit's residual is below the tolerance, and equals textbook CG."""
    layer, x = _layer(name)
    M = _metric(layer, x)
    gradient, units = _plain_gradient(layer, x), _units(layer)

    def iterate(k):
        found = torch.zeros_like(gradient)
        for mine in units:
            found[mine] = torch.from_numpy(_textbook(M[mine][:, mine].numpy(), gradient[mine].numpy(), k))
        return found

    def small(direction, tol):
        residual = gradient - M @ direction
        return all(residual[mine].norm() <= tol * gradient[mine].norm() for mine in units)

    for tol in (0.5, 0.05, 1e-3):
        k = next(k for k in range(1, 9) if small(iterate(k), tol))
        prox, optimizer = _attached(layer, method="cg", cg_iters=50, cg_tol=tol)
        optimizer.zero_grad()
        _loss(layer(x)).backward()
        optimizer.step()
        torch.testing.assert_close(_grads(layer), iterate(k), rtol=1e-6, atol=1e-9)
        prox.detach()

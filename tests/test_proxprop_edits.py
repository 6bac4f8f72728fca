"""Law: .grad holds the direction of the gradient that the optimizer receives, after any changes to it."""

import pytest
import torch

from tests.test_proxprop import TAU, _attached, _expected, _grads, _jacobian, _layer, _loss, _plain_gradient, _textbook
from tests.test_proxprop_training import BOTH

NAMES = pytest.mark.parametrize("name", ["linear", "linear, many rows", "conv2d"])


def _solved(layer, x, gradient, tau=TAU):
    J = _jacobian(layer, x)
    return torch.linalg.solve(J.T @ J + torch.eye(J.shape[1], dtype=J.dtype) / tau, gradient)


def _add(extra):
    return lambda grad: grad + extra


def _double_in_place(parameter):
    with torch.no_grad():
        parameter.grad.mul_(2.0)


@BOTH
@NAMES
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", ["adds", "in place", "post", "reads"])
def test_hooks_on_a_weight_edit_the_gradient(name, when, kind, fused):
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
    prox, optimizer = _attached(layer, fused=fused)
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
    torch.testing.assert_close(_grads(layer), _solved(layer, x, gradient))
    prox.detach()


@NAMES
@pytest.mark.parametrize("method", ["exact", "cg"])
@pytest.mark.parametrize("edit", ["scaled", "added", "unscaled"])
@pytest.mark.parametrize("then", ["detach", "backward"])
def test_a_direction_edited_before_it_is_taken_back(name, method, edit, then):
    """Fused: a scaled direction is the direction of the scaled gradient; an added term is kept as a direction."""
    layer, x = _layer(name)
    J = _jacobian(layer, x)
    plain = _plain_gradient(layer, x)
    prox, optimizer = _attached(layer, method=method, cg_iters=2)
    extra = torch.randn_like(layer.weight)
    if edit == "unscaled":
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scaler.scale(8 * _loss(layer(x))).backward()
        scaler.unscale_(optimizer)
    else:
        _loss(layer(x)).backward()
    expected = plain.clone()
    if edit == "added":
        layer.weight.grad += extra
        change = torch.cat([extra.flatten(), torch.zeros(len(plain) - extra.numel())])
        expected += J.T @ (J @ change) + change / TAU
    else:
        factor = 8.0
        if edit == "scaled":
            for parameter in layer.parameters():
                parameter.grad *= factor
        expected *= factor
    if then == "detach":
        prox.detach()
        torch.testing.assert_close(_grads(layer), expected)
        return
    _loss(layer(x)).backward()
    torch.testing.assert_close(_grads(layer), expected + plain)
    prox.detach()


@BOTH
@pytest.mark.parametrize("name", ["linear", "linear, many rows", "conv2d", "conv2d, groups"])
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("method", ["exact", "cg"])
def test_empty_batches_contribute_nothing(name, place, fused, method):
    layer, x = _layer(name)
    prox, optimizer = _attached(layer, fused=fused, method=method, cg_iters=30)
    batches = [x]
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
    J = _jacobian(layer, x)
    M = J.T @ J + torch.eye(J.shape[1], dtype=J.dtype) / TAU
    gradient, outputs, width = _plain_gradient(layer, x), len(layer.weight), layer.weight[0].numel()
    units = [[*range(u * width, (u + 1) * width), outputs * width + u] for u in range(outputs)]

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

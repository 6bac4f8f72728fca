"""Laws of the hooks: which rows count, in common ways of training."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from minimand.errors import CapabilityError
from minimand.train import ProxProp

TAU = 0.5


def _net(seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 5), nn.ReLU(), nn.Linear(5, 3)).to(dtype)


def _batch(rows=7, seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 6, generator=g, dtype=dtype), torch.randint(3, (rows,), generator=g)


def _loss(net, x, y):
    return nn.functional.cross_entropy(net(x), y)


def _grads(net):
    return [p.grad.clone() for p in net.parameters()]


def _plain(net, x, y):
    other = copy.deepcopy(net)
    other.zero_grad()
    _loss(other, x, y).backward()
    return _grads(other)


def _expected(net, x, y, tau=TAU):
    """Directions by dense linear algebra, from the activations of a copy."""
    found, other = _plain(net, x, y), copy.deepcopy(net)
    a, index = x, 0
    with torch.no_grad():
        for module in other[:-1]:
            if isinstance(module, nn.Linear):
                A = torch.cat([a, a.new_ones(len(a), 1)], 1).double()
                G = torch.cat([found[index], found[index + 1][:, None]], 1).double()
                D = torch.linalg.solve(A.T @ A + torch.eye(A.shape[1], dtype=A.dtype) / tau, G.T).T.to(x.dtype)
                found[index], found[index + 1] = D[:, :-1], D[:, -1]
                index += 2
            a = module(a)
    return found


def _start(net, lr=0.0, optimizer=None, **options):
    optimizer = optimizer or torch.optim.SGD(net.parameters(), lr=lr)
    return ProxProp(net, **({"tau_theta": TAU} | options)).attach(optimizer), optimizer


BOTH = pytest.mark.parametrize("fused", [True, False])


@BOTH
def test_forwards_that_are_not_differentiated_leave_nothing(fused):
    net, (x, y), (other, _) = _net(), _batch(), _batch(11, seed=5)
    prox, optimizer = _start(net, fused=fused)
    net(other)
    with torch.no_grad():
        net(other)
    net.eval()(other).detach()
    net.train()
    out = net(other)
    needs = other.clone().requires_grad_()
    torch.autograd.grad(net(needs).sum(), needs)
    loss = _loss(net, x, y)
    net(other)
    loss.backward()
    net(other)
    optimizer.step()
    torch.testing.assert_close(_grads(net), _expected(net, x, y))
    assert out.requires_grad
    prox.detach()


@BOTH
@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("whose", ["optimizer", "model"])
def test_skipped_steps_leave_nothing(fused, to_none, whose):
    net, (x, y), (other, labels) = _net(), _batch(), _batch(11, seed=5)
    prox, optimizer = _start(net, fused=fused)
    for _ in range(2):
        _loss(net, other, labels).backward()
        (optimizer if whose == "optimizer" else net).zero_grad(set_to_none=to_none)
    _loss(net, x, y).backward()
    optimizer.step()
    torch.testing.assert_close(_grads(net), _expected(net, x, y))
    prox.detach()


def test_rows_of_a_dead_gradient_still_count():
    """A first micro-batch whose gradient is zero is not a zero_grad."""
    net, (x, y), (other, _) = _net(), _batch(), _batch(4, seed=5)
    prox, optimizer = _start(net)
    (0.0 * net(other)).sum().backward()
    _loss(net, x, y).backward()
    optimizer.step()
    A = torch.cat([torch.cat([other, x]), torch.ones(11, 1)], 1)
    G = _plain(net, x, y)
    D = torch.linalg.solve(A.T @ A + torch.eye(7) / TAU, torch.cat([G[0], G[1][:, None]], 1).T).T
    torch.testing.assert_close(net[0].weight.grad, D[:, :-1])
    prox.detach()


@BOTH
def test_steps_follow_one_another(fused):
    """Ten steps with momentum equal ten steps of the optimizer on directions computed separately."""
    net, reference = _net(), _net()
    prox, optimizer = _start(net, optimizer=torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9), fused=fused)
    by_hand = torch.optim.SGD(reference.parameters(), lr=0.3, momentum=0.9)
    for seed in range(10):
        x, y = _batch(5 + seed, seed)
        for parameter, direction in zip(reference.parameters(), _expected(reference, x, y), strict=True):
            parameter.grad = direction
        by_hand.step()
        optimizer.zero_grad()
        _loss(net, x, y).backward()
        optimizer.step()
    torch.testing.assert_close(list(net.parameters()), list(reference.parameters()))
    prox.detach()


@pytest.mark.parametrize("rows", [4, 12])
def test_gradient_scaling_and_clipping(rows):
    """The optimizer receives unscaled gradients, and clipping acts on gradients."""
    net, (x, y) = _net(), _batch(rows)
    prox, optimizer = _start(net)
    scaler = torch.amp.GradScaler("cpu", init_scale=1000.0)
    scaler.scale(_loss(net, x, y)).backward()
    scaler.unscale_(optimizer)
    before = _grads(net)
    limit = 0.3 * float(torch.linalg.vector_norm(torch.stack([g.norm() for g in before])))
    nn.utils.clip_grad_norm_(net.parameters(), limit)
    scaler.step(optimizer)
    scaler.update()
    expected = _expected(net, x, y)
    torch.testing.assert_close(before, _plain(net, x, y))
    torch.testing.assert_close(_grads(net), [0.3 * g for g in expected], rtol=1e-4, atol=1e-7)
    prox.detach()


def test_a_step_that_the_scaler_skips_leaves_nothing():
    net, (x, y) = _net(), _batch()
    prox, optimizer = _start(net)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    bad = x.clone()
    bad[0] = torch.inf
    for inputs in (bad, x):
        optimizer.zero_grad()
        scaler.scale(_loss(net, inputs, y)).backward()
        scaler.step(optimizer)
        scaler.update()
    torch.testing.assert_close(_grads(net), _expected(net, x, y), rtol=1e-5, atol=1e-8)
    prox.detach()


def test_an_edited_gradient_is_what_is_preconditioned():
    net, (x, y) = _net(), _batch(4)
    extra = torch.randn_like(net[0].weight)
    prox, optimizer = _start(net)
    _loss(net, x, y).backward()
    net[0].weight.grad += extra
    before = net[0].weight.grad.clone()
    optimizer.step()
    A = torch.cat([x, torch.ones(4, 1)], 1)
    G = torch.cat([before, _plain(net, x, y)[1][:, None]], 1)
    expected = torch.linalg.solve(A.T @ A + torch.eye(7) / TAU, G.T).T
    torch.testing.assert_close(net[0].weight.grad, expected[:, :-1])
    prox.detach()


@pytest.mark.parametrize("call", [lambda o, c: o.step(c), lambda o, c: o.step(closure=c)])
@BOTH
def test_closures(fused, call):
    net, (x, y) = _net(), _batch()
    expected = _expected(net, x, y)
    before = [p.detach().clone() for p in net.parameters()]
    prox, optimizer = _start(net, lr=0.1, fused=fused)

    def closure():
        optimizer.zero_grad()
        loss = _loss(net, x, y)
        loss.backward()
        return loss

    assert call(optimizer, closure) > 0
    torch.testing.assert_close(list(net.parameters()), [p - 0.1 * d for p, d in zip(before, expected, strict=True)])
    lbfgs = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=4)
    prox.detach()
    prox.attach(lbfgs)
    start = _loss(net, x, y).item()
    optimizer = lbfgs
    lbfgs.step(closure)
    assert _loss(net, x, y).item() < start
    prox.detach()


@pytest.mark.parametrize("rows", [4, 40])
@pytest.mark.parametrize("inside", [False, True])
def test_rows_from_before_a_closure_count(inside, rows):
    """Lightning passes a closure that does nothing, or the last micro-batch of an accumulated gradient."""
    net, (x, y) = _net(), _batch(rows)
    prox, optimizer = _start(net)
    expected = _expected(net, x, y)
    cut = rows // 2 if inside else rows

    def backward(some):
        (_loss(net, x[some], y[some]) * len(x[some]) / rows).backward()

    backward(slice(cut))
    optimizer.step(lambda: backward(slice(cut, None)) if inside else None)
    torch.testing.assert_close(_grads(net), expected)
    prox.detach()


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.RMSprop, torch.optim.AdamW])
def test_any_optimizer_with_parameter_groups(make):
    net, reference, (x, y) = _net(), _net(), _batch()

    def build(model):
        return make([{"params": model[:2].parameters(), "lr": 1e-2}, {"params": model[2:].parameters(), "lr": 1e-3}])

    prox, optimizer = _start(net, optimizer=build(net))
    by_hand = build(reference)
    for parameter, direction in zip(reference.parameters(), _expected(reference, x, y), strict=True):
        parameter.grad = direction
    by_hand.step()
    _loss(net, x, y).backward()
    optimizer.step()
    torch.testing.assert_close(list(net.parameters()), list(reference.parameters()))
    prox.detach()


@BOTH
def test_detach_restores_plain_gradients_to_the_bit(fused):
    net, (x, y) = _net(dtype=torch.float32), _batch(dtype=torch.float32)
    plain = _plain(net, x, y)
    prox, optimizer = _start(net, fused=fused)
    for _ in range(2):
        optimizer.zero_grad()
        _loss(net, x, y).backward()
        optimizer.step()
        prox.detach()
        net.zero_grad()
        _loss(net, x, y).backward()
        torch.testing.assert_close(_grads(net), plain, rtol=0, atol=0)
        assert not any("forward" in module.__dict__ for module in net.modules())
        prox.attach(optimizer)
    net.zero_grad()
    _loss(net, x, y).backward()
    held = _grads(net)
    prox.detach()
    torch.testing.assert_close(held, _expected(net, x, y) if fused else plain, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(_grads(net), held, rtol=0, atol=0)


@BOTH
def test_a_graph_from_before_detach_gives_plain_gradients(fused):
    net, (x, y) = _net(), _batch()
    prox, _ = _start(net, fused=fused)
    loss = _loss(net, x, y)
    prox.detach()
    loss.backward()
    torch.testing.assert_close(_grads(net), _plain(net, x, y))


@BOTH
def test_bf16_autocast(fused):
    net, (x, y) = _net(dtype=torch.float32), _batch(40, dtype=torch.float32)
    prox, optimizer = _start(net, fused=fused)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = _loss(net, x, y)
    loss.backward()
    optimizer.step()
    for got, want in zip(_grads(net), _expected(net, x, y), strict=True):
        assert got.dtype == torch.float32
        assert (got - want).norm() < 0.05 * want.norm()
    prox.detach()


@BOTH
def test_half_precision_models(fused):
    net, (x, y) = _net(dtype=torch.bfloat16), _batch(40, dtype=torch.bfloat16)
    prox, optimizer = _start(net, fused=fused)
    _loss(net, x, y).backward()
    optimizer.step()
    assert all(p.grad.dtype == torch.bfloat16 and torch.isfinite(p.grad).all() for p in net.parameters())
    prox.detach()


@pytest.mark.parametrize(("order", "fused"), [("attach first", False), ("compile first", True)])
def test_torch_compile(fused, order):
    torch.compiler.reset()
    net, (x, y) = _net(), _batch()
    compiled = torch.compile(net, backend="aot_eager")
    if order == "compile first":
        compiled(x)
    prox, optimizer = _start(net, fused=fused)
    for _ in range(2):
        optimizer.zero_grad()
        nn.functional.cross_entropy(compiled(x), y).backward()
        optimizer.step()
    torch.testing.assert_close(_grads(net), _expected(net, x, y))
    prox.detach()
    net.zero_grad()
    nn.functional.cross_entropy(compiled(x), y).backward()
    torch.testing.assert_close(_grads(net), _plain(net, x, y))


@pytest.mark.parametrize("reentrant", [True, False])
@BOTH
def test_activation_checkpointing(fused, reentrant):
    net, (x, y) = _net(), _batch()
    prox, optimizer = _start(net, fused=fused)
    out = checkpoint(net[:4], x.clone().requires_grad_(), use_reentrant=reentrant)
    nn.functional.cross_entropy(net[4](out), y).backward()
    optimizer.step()
    torch.testing.assert_close(_grads(net), _expected(net, x, y))
    prox.detach()


@BOTH
def test_gradient_penalties_differentiate_twice(fused):
    net, (x, y) = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double(), _batch(20)

    def loss(model):
        needs = x.clone().requires_grad_()
        out = model(needs)
        (slope,) = torch.autograd.grad(out.square().sum(), needs, create_graph=True)
        return nn.functional.cross_entropy(out, y) + 0.1 * slope.square().sum()

    plain = copy.deepcopy(net)
    loss(plain).backward()
    prox, optimizer = _start(net, fused=fused)
    if fused:
        with pytest.raises(CapabilityError, match="layer '0': fused=True does not take"):
            loss(net).backward()
        prox.detach()
        return
    loss(net).backward()
    optimizer.step()
    A = torch.cat([x, torch.ones(20, 1)], 1)
    G = torch.cat([plain[0].weight.grad, plain[0].bias.grad[:, None]], 1)
    D = torch.linalg.solve(A.T @ A + torch.eye(7) / TAU, G.T).T
    torch.testing.assert_close(net[0].weight.grad, D[:, :-1])
    prox.detach()


def test_backward_twice():
    """A second backward raises torch's error; with retain_graph the rows count twice, like the gradient."""
    net, (x, y) = _net(), _batch()
    prox, optimizer = _start(net)
    loss = _loss(net, x, y)
    loss.backward(retain_graph=True)
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    optimizer.step()
    A = torch.cat([x, torch.ones(7, 1)], 1)
    G = _plain(net, x, y)
    D = torch.linalg.solve(2 * A.T @ A + torch.eye(7) / TAU, 2 * torch.cat([G[0], G[1][:, None]], 1).T).T
    torch.testing.assert_close(net[0].weight.grad, D[:, :-1])
    prox.detach()


def test_transforms_of_torch_func_have_plain_gradients():
    net, (x, _) = _net(), _batch()
    plain = copy.deepcopy(net)
    prox, _ = _start(net)
    parameters = {name: p.detach() for name, p in net.named_parameters()}

    def gradient(model):
        loss = lambda p: torch.func.functional_call(model, p, (x,)).square().sum()  # noqa: E731
        return torch.func.grad(loss)(parameters)

    torch.testing.assert_close(gradient(net), gradient(plain))
    prox.detach()


# --- fused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to_none", [True, False])
def test_fused_takes_one_backward_pass_per_step(to_none):
    net, (x, y) = _net(), _batch()
    prox, optimizer = _start(net, fused=True)
    for step in (True, False):
        optimizer.zero_grad(set_to_none=to_none)
        _loss(net, x, y).backward()
        with pytest.raises(CapabilityError, match="layer '2': fused=True takes one backward pass per step"):
            _loss(net, x, y).backward()
        optimizer.zero_grad(set_to_none=to_none)
        _loss(net, x, y).backward()
        if step:
            optimizer.step()
        torch.testing.assert_close(_grads(net), _expected(net, x, y))
    needs = x.clone().requires_grad_()
    torch.autograd.grad(net(needs).sum(), needs)
    optimizer.step()
    torch.testing.assert_close(_grads(net), _expected(net, x, y))
    prox.detach()


TOUCHED = {
    "clipped": lambda net: nn.utils.clip_grad_norm_(net.parameters(), 1e9),
    "in place": lambda net: net[0].bias.grad.add_(1.0),
    "replaced": lambda net: setattr(net[0].weight, "grad", 2 * net[0].weight.grad),
    "removed": lambda net: setattr(net[0].bias, "grad", None),
    "unscaled": lambda net: torch._foreach_mul_([p.grad for p in net.parameters()], 0.5),
}


@pytest.mark.parametrize("several", [True, False])
@pytest.mark.parametrize("name", TOUCHED)
def test_fused_takes_gradients_that_nothing_else_touches(name, several):
    """Whoever has edited a gradient has edited a direction: an error, whichever optimizer steps first."""
    net, (x, y) = _net(), _batch()
    groups = [[p for p in net.parameters() if p.ndim == d] for d in (1, 2)] if several else [net.parameters()]
    optimizers = [torch.optim.SGD(group, lr=0.1, momentum=0.9, nesterov=True) for group in groups]
    prox = ProxProp(net, tau_theta=TAU, fused=True).attach(*optimizers)
    for _ in range(2):
        _loss(net, x, y).backward()
        TOUCHED[name](net)
        with pytest.raises(CapabilityError, match=r"layer '0': fused=True .* something changed \.grad after"):
            optimizers[0].step()
        net.zero_grad()
        _loss(net, x, y).backward()
        net[4].weight.grad.mul_(2.0)  # the last layer, which has a plain gradient
        for optimizer in optimizers:
            optimizer.step()
        net.zero_grad()
    prox.detach()


def test_fused_takes_one_call_per_layer():
    net, (x, _) = _net(), _batch()
    prox, _ = _start(net, fused=True)
    with pytest.raises(CapabilityError, match="layer '2': fused=True does not take a second call"):
        (net(x).sum() + net(x).square().sum()).backward()
    prox.detach()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("method", ["exact", "cg"])
@pytest.mark.parametrize("rows", [4, 8, 40])
def test_default_and_fused_give_the_same_direction(rows, method, dtype):
    found = []
    for fused in (True, False):
        net, (x, y) = _net(dtype=dtype), _batch(rows, dtype=dtype)
        prox, optimizer = _start(net, fused=fused, method=method)
        _loss(net, x, y).backward()
        optimizer.step()
        found.append(_grads(net))
        prox.detach()
    torch.testing.assert_close(*found, rtol=1e-5 if dtype == torch.float32 else 1e-12, atol=1e-8)


# --- tau_theta ------------------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("rows", [4, 40])
def test_tau_theta_can_be_set_while_training(fused, rows):
    net, (x, y) = _net(), _batch(rows)
    prox, optimizer = _start(net, fused=fused)
    for tau in (0.5, 0.1, 3.0):
        optimizer.zero_grad()
        if fused:
            prox.tau_theta = tau
        _loss(net, x, y).backward()
        prox.tau_theta = tau
        optimizer.step()
        torch.testing.assert_close(_grads(net), _expected(net, x, y, tau))
    assert prox.tau_theta == 3.0
    for wrong in (0.0, -1.0, float("nan"), "1"):
        with pytest.raises(ValueError, match="tau_theta"):
            prox.tau_theta = wrong
    prox.detach()


@BOTH
def test_the_tau_theta_of_a_parameter_group_wins(fused):
    net, (x, y) = _net(), _batch()
    groups = [{"params": net[0].parameters(), "tau_theta": 0.1}, {"params": net[1:].parameters()}]
    prox, optimizer = _start(net, optimizer=torch.optim.SGD(groups, lr=0.0), fused=fused)
    for tau in (0.1, 2.0):
        optimizer.param_groups[0]["tau_theta"] = tau
        optimizer.zero_grad()
        _loss(net, x, y).backward()
        optimizer.step()
        expected = _expected(net, x, y, tau)[:2] + _expected(net, x, y)[2:]
        torch.testing.assert_close(_grads(net), expected)
    prox.detach()
    optimizer.param_groups[0]["tau_theta"] = -1.0
    with pytest.raises(ValueError, match="tau_theta of a parameter group"):
        prox.attach(optimizer)

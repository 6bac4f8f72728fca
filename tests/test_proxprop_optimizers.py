"""Laws: several optimizers, wrapped ones, and those that step inside of the backward pass."""

import copy

import pytest
import torch
from torch import nn

from minimand.errors import MinimandError
from minimand.train import CachedGram, ExactGram, ProxProp
from tests.test_proxprop_training import BOTH, TAU, _batch, _expected, _grads, _loss, _net, _plain


def _pair(net, first=torch.optim.SGD, second=torch.optim.SGD, **options):
    """One optimizer for the weights, one for the biases."""
    weights = [p for p in net.parameters() if p.dim() > 1]
    biases = [p for p in net.parameters() if p.dim() == 1]
    return first(weights, **options), second(biases, lr=0.1)


@BOTH
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_several_optimizers_share_the_direction_of_a_layer(order, fused):
    net, (x, y) = _net(), _batch()
    pair = _pair(net, lr=0.1)
    prox = ProxProp(net, tau_theta=TAU, fused=fused).attach(*pair)
    for _ in range(3):
        for optimizer in pair:
            optimizer.zero_grad()
        _loss(net, x, y).backward()
        expected = _expected(net, x, y)
        for place in order:
            pair[place].step()
        torch.testing.assert_close(_grads(net), expected)
    prox.detach()
    net.zero_grad()
    _loss(net, x, y).backward()
    torch.testing.assert_close(_grads(net), _plain(net, x, y), rtol=0, atol=0)


def test_muon_for_matrices_beside_adamw():
    net, (x, y) = _net(dtype=torch.float32), _batch(dtype=torch.float32)
    plain = copy.deepcopy(net)
    pair = _pair(net, torch.optim.Muon, torch.optim.AdamW, lr=0.01)
    prox = ProxProp(net, tau_theta=TAU, gram=CachedGram(every=2, of=ExactGram())).attach(*pair)
    mirror = _pair(plain, torch.optim.Muon, torch.optim.AdamW, lr=0.01)
    for step in range(3):
        for optimizer in (*pair, *mirror):
            optimizer.zero_grad()
        _loss(net, x, y).backward()
        for optimizer in pair:
            optimizer.step()
        for mine, other in zip(net.parameters(), plain.parameters(), strict=True):
            other.grad = mine.grad.clone()
        for optimizer in mirror:
            optimizer.step()
        torch.testing.assert_close(list(net.parameters()), list(plain.parameters()), rtol=0, atol=0)
        # A step of both optimizers is one step of the layer.
        assert set(prox.state_dict()["turn"].values()) == {step + 1}
    prox.detach()


def test_nan_stops_all_optimizers():
    net, (x, y) = _net(), _batch()
    pair = _pair(net, torch.optim.Adam, lr=0.1)
    prox = ProxProp(net).attach(*pair)
    before = [p.detach().clone() for p in net.parameters()]
    x[2, 3] = torch.nan
    _loss(net, x, y).backward()
    for optimizer, origin in zip(pair, ("input of layer '0'", "gradient of layer '4'"), strict=True):
        with pytest.warns(RuntimeWarning, match=f"skips this step: the {origin}"):
            optimizer.step()
        assert not optimizer.state
    torch.testing.assert_close(list(net.parameters()), before, rtol=0, atol=0)
    prox.detach()


def test_one_of_two_optimizers_alone_is_one_sentence():
    net, (x, y) = _net(), _batch()
    pair = _pair(net, lr=0.1)
    prox = ProxProp(net, tau_theta=TAU).attach(*pair)
    _loss(net, x, y).backward()
    pair[0].step()
    pair[0].zero_grad()
    _loss(net, x, y).backward()
    with pytest.raises(MinimandError, match="another optimizer has used a part of its direction; step all of them"):
        pair[0].step()
    net.zero_grad()
    _loss(net, x, y).backward()
    expected = _expected(net, x, y)
    for optimizer in pair:
        optimizer.step()
    torch.testing.assert_close(_grads(net), expected)
    prox.detach()


class _Wrapped(torch.optim.Optimizer):
    """As in accelerate: a subclass of Optimizer that has the optimizer, and does not call Optimizer.__init__."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self, closure=None):
        self.optimizer.step(closure)

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)


class _Handle:
    """As in Lightning: no subclass; the optimizer is a property."""

    def __init__(self, optimizer):
        self._optimizer = optimizer

    @property
    def optimizer(self):
        return self._optimizer

    def step(self, closure=None, **kwargs):
        return self._optimizer.step(closure, **kwargs)


@pytest.mark.parametrize("wrap", [_Wrapped, _Handle, lambda o: _Wrapped(_Wrapped(o))])
def test_wrapped_optimizers_are_unwrapped(wrap):
    net, (x, y) = _net(), _batch()
    inner = torch.optim.SGD(net.parameters(), lr=0.0)
    outer = wrap(inner)
    prox = ProxProp(net, tau_theta=TAU).attach(outer)
    if isinstance(outer, _Handle):

        def closure():
            inner.zero_grad()
            loss = _loss(net, x, y)
            loss.backward()
            return loss

        outer.step(closure)
    else:
        _loss(net, x, y).backward()
        outer.step()
    torch.testing.assert_close(_grads(net), _expected(net, x, y))
    prox.detach()


def test_an_optimizer_in_backward_is_refused():
    net, (x, y) = _net(), _batch()
    single = {p: torch.optim.SGD([p], lr=0.1) for p in net.parameters()}
    prox = ProxProp(net, skip_last=False).attach(*single.values())
    for p in net.parameters():
        p.register_post_accumulate_grad_hook(lambda p: single[p].step())
    with pytest.raises(
        MinimandError, match=r"inside of the backward pass.*call optimizer.step\(\) after loss.backward"
    ):
        _loss(net, x, y).backward()
    prox.detach()
    other = _net()
    for p in other.parameters():  # as torch.distributed.optim does
        p._in_backward_optimizers = [torch.optim.SGD([p], lr=0.1)]
    with pytest.raises(MinimandError, match="inside of the backward pass"):
        ProxProp(other).attach(torch.optim.SGD(other.parameters(), lr=0.1))


def test_bad_sets_of_optimizers_are_refused():
    net = _net()
    weights, biases = _pair(net, lr=0.1)
    prox = ProxProp(net)
    strange = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    for owners, why in {
        (): "attach needs the optimizer of the layers",
        (weights, weights): "attach got an optimizer twice",
        (weights,): r"the optimizer does not own 0\.bias, 2\.bias; build it",
        (weights, biases, strange): "the optimizer SGD owns no parameter of a layer; leave it out",
        (weights, strange, net): "attach takes torch.optim.Optimizers, got Sequential",
    }.items():
        with pytest.raises(MinimandError, match=why):
            prox.attach(*owners)
    assert not any("forward" in module.__dict__ for module in net.modules())
    prox.attach(weights, biases)
    with pytest.raises(MinimandError, match="attached already"):
        prox.attach(weights, biases)
    prox.detach()

"""Law: a mistake in ProxProp's arguments, state or use is one sentence; nothing is silently another method."""

import pytest
import torch
from torch import nn

from minimand.errors import MinimandError
from minimand.train import CachedGram, ProxProp, Relative
from tests.test_proxprop_training import BOTH, _batch, _expected, _grads, _loss, _net, _start


def test_patterns_are_strings():
    with pytest.raises(MinimandError, match=r"keys of tau_theta are patterns of paths, such as '0', got 0"):
        ProxProp(_net(), tau_theta={0: 1.0})


@BOTH
@pytest.mark.parametrize("tau", [1.0, Relative(1.0), {"0": 1.0, "*": 2.0}])
def test_a_schedule_that_ends_at_zero(fused, tau):
    net, (x, y) = _net(), _batch()
    prox, optimizer = _start(net, tau_theta=tau, fused=fused)
    torch.optim.lr_scheduler.LambdaLR(prox.tau_schedule(), lambda _: 0.0)

    def step():
        _loss(net, x, y).backward()
        optimizer.step()

    with pytest.raises(MinimandError, match=r"(scheduler|Relative) must be a finite number > 0, got 0"):
        step()


def test_fused_does_not_add_a_direction_to_a_gradient():
    net, (x, y) = _net(), _batch()
    _loss(net, x, y).backward()
    prox, optimizer = _start(net, fused=True)
    with pytest.raises(MinimandError, match=r"one backward pass per step: \.grad holds a gradient from before"):
        _loss(net, x, y).backward()
    for to_none in (True, False):
        optimizer.zero_grad(set_to_none=to_none)
        _loss(net, x, y).backward()
        torch.testing.assert_close(_grads(net), _expected(net, x, y))
    prox.detach()


def _pass_and_step(net, x, y, optimizer):
    _loss(net, x, y).backward()
    optimizer.step()


@BOTH
def test_a_gradient_is_not_added_to_the_direction_of_the_last_step(fused):
    net, (x, y) = _net(), _batch()
    prox, optimizer = _start(net, fused=fused)
    _loss(net, x, y).backward()
    optimizer.step()
    with pytest.raises(MinimandError, match=r"holds the direction of the last step; call zero_grad\(\) after it"):
        _pass_and_step(net, x, y, optimizer)
    for to_none in (True, False):
        optimizer.zero_grad(set_to_none=to_none)
        expected = _expected(net, x, y)
        _loss(net, x, y).backward()
        optimizer.step()
        torch.testing.assert_close(_grads(net), expected)
    prox.detach()


def test_the_own_state_is_loaded_whatever_the_last_layer_is():
    """A pattern that only the explicit last layer matches is accepted at first; so it is in a state."""
    net = _net()
    prox = ProxProp(net, tau_theta={"0": 0.5, "4": 0.1})
    assert prox.layers[-1] != "4"
    prox.load_state_dict(prox.state_dict())
    assert prox.tau_theta == {"0": 0.5, "4": 0.1}


def test_a_damaged_state():
    state = ProxProp(_net()).state_dict()
    for key, value in (("turn", {}), ("turn", "x"), ("grams", {"0": 3}), ("grams", {"0": ("x", 3)})):
        with pytest.raises(MinimandError, match="the saved state of layer '0' is damaged"):
            ProxProp(_net()).load_state_dict(state | {key: value})
    with pytest.raises(MinimandError, match="the saved Gram matrix of layer '0' has 3 columns, not 6"):
        ProxProp(_net()).load_state_dict(state | {"grams": {"0": (torch.eye(3)[None], 4)}})
    for rank in (0, 1.5, True):
        with pytest.raises(MinimandError, match="rank of a CachedGram must be a whole number"):
            CachedGram(rank=rank)
    for of in ("exact", CachedGram(), 3):
        with pytest.raises(MinimandError, match="of= of a CachedGram must be ExactGram"):
            CachedGram(of=of)


class _Own(nn.Linear):
    def forward(self, x):
        return x @ self.weight.mT


def test_layers_that_are_not_taken():
    complex_ = nn.Sequential(nn.Linear(3, 3, dtype=torch.cfloat), nn.Linear(3, 3))
    with pytest.raises(MinimandError, match="layer '0' has complex parameters"):
        ProxProp(complex_)
    assert ProxProp(complex_, exclude="0", skip_last=False).layers == ("1",)
    with pytest.raises(MinimandError, match="maps names kernel of _Own, but layer '0' has weight, bias"):
        ProxProp(nn.Sequential(_Own(3, 3), nn.Linear(3, 2)), maps={_Own: {"kernel": None}})
    for options in ({"include": []}, {"include": "0", "exclude": "0"}):
        with pytest.raises(MinimandError, match="include and exclude leave none of 0, 2, 4"):
            ProxProp(_net(), **options)


class _Language(nn.Module):
    """An embedding tied to the last layer, in a model that no made-up input runs through."""

    def __init__(self):
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens, *, scale):
        return self.head(torch.tanh(self.body(self.embed(tokens) * scale)))


@pytest.mark.parametrize("skip_last", [False, True])
def test_a_layer_tied_to_an_embedding_keeps_its_plain_gradient(skip_last):
    torch.manual_seed(0)
    net, tokens = _Language().double(), torch.randint(7, (5, 3))
    prox, optimizer = _start(net, skip_last=skip_last)
    net(tokens, scale=1.0).square().sum().backward()
    tied, body = net.embed.weight.grad.clone(), net.body.weight.grad.clone()
    optimizer.step()
    assert prox.layers == ("body",)
    torch.testing.assert_close(net.embed.weight.grad, tied, rtol=0, atol=0)
    assert not torch.allclose(net.body.weight.grad, body)
    prox.detach()

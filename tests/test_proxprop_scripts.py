"""Law: ordinary training scripts work under ProxProp, or one sentence says why they do not."""

import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, prune

from minimand.errors import MinimandError
from minimand.train import ProxProp, Relative
from tests.test_proxprop_training import _batch, _expected, _grads, _loss, _net, _start


def _layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), nn.Sequential(nn.Linear(3, 6), nn.Linear(6, 1))


@pytest.mark.parametrize("to_none", [True, False])
def test_an_adversarial_loop_needs_no_further_zero_grad(to_none):
    """The generator's pass adds gradients to the discriminator's directions, which are zeroed before they are used."""
    generator, critic = _layers()
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (generator, critic)]
    proxes = [ProxProp(net).attach(optimizer) for net, optimizer in zip((generator, critic), optimizers, strict=True)]
    for _ in range(3):
        noise, real = torch.randn(7, 4), torch.randn(7, 3)
        fake = generator(noise)

        optimizers[1].zero_grad(set_to_none=to_none)
        (F.softplus(critic(fake.detach())) + F.softplus(-critic(real))).mean().backward()
        found = torch.cat([critic[0].weight.grad, critic[0].bias.grad[:, None]], 1)
        rows = torch.cat([torch.cat([fake.detach(), real]), torch.ones(14, 1)], 1)
        expected = torch.linalg.solve(rows.T @ rows + torch.eye(4), found.T).T
        optimizers[1].step()
        torch.testing.assert_close(critic[0].weight.grad, expected[:, :-1])

        optimizers[0].zero_grad(set_to_none=to_none)
        F.softplus(-critic(fake)).mean().backward()
        optimizers[0].step()
    # Without zero_grad, the sum of a direction and a gradient would be the discriminator's next gradient.
    with pytest.raises(MinimandError, match=r"holds the direction of the last step; call zero_grad\(\) after it"):
        optimizers[1].step()
    for prox in proxes:
        prox.detach()


@pytest.mark.parametrize("change", [parametrizations.weight_norm, lambda m: prune.random_unstructured(m, "weight", 1)])
def test_a_layer_that_is_parametrised_after_attaching_is_one_sentence(change):
    net, (x, y) = _net(), _batch()
    prox, _ = _start(net)
    change(net[2])
    with pytest.raises(MinimandError, match=r"layer '2': its weight is not a parameter any more .* attach again"):
        _loss(net, x, y).backward()
    prox.detach()
    net(x)


def test_gradients_that_no_backward_pass_filled_are_logged(caplog):
    net, (x, y) = _net(), _batch()
    prox, optimizer = _start(net)
    for _ in range(2):
        found = torch.autograd.grad(_loss(net, x, y), list(net.parameters()))
        for parameter, gradient in zip(net.parameters(), found, strict=True):
            parameter.grad = gradient.clone()
        with caplog.at_level(logging.WARNING, "minimand"):
            optimizer.step()
        torch.testing.assert_close(_grads(net), list(found), rtol=0, atol=0)
    said = [record.getMessage() for record in caplog.records if "not filled by a backward pass" in record.getMessage()]
    assert said == ["ProxProp: plain gradients for 0, 2, whose .grad was not filled by a backward pass"]
    optimizer.zero_grad()
    _loss(net, x, y).backward()
    expected = _expected(net, x, y)
    optimizer.step()
    torch.testing.assert_close(_grads(net), expected)
    prox.detach()


def test_available_layers_are_listed_once():
    with pytest.raises(MinimandError, match=r"no layer matches 9; available: '0', '2', '4'$"):
        ProxProp(_net()).tau_theta = {"9": 1.0}


@pytest.mark.parametrize("fused", [False, True])
def test_gradients_zeroed_through_data_are_zero(fused):
    net, (x, y) = _net(), _batch()
    prox, optimizer = _start(net, fused=fused)
    for _ in range(3):
        expected = _expected(net, x, y)
        _loss(net, x, y).backward()
        optimizer.step()
        torch.testing.assert_close(_grads(net), expected)
        for parameter in net.parameters():
            parameter.grad.data.zero_()
    prox.detach()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_attached_network_can_be_traced():
    net, (x, _) = _net(), _batch()
    prox, _ = _start(net)
    torch.testing.assert_close(torch.jit.trace(net, x)(x), net(x), rtol=0, atol=0)
    prox.detach()


def test_tensors_are_no_factor():
    with pytest.raises(MinimandError, match="the factor of Relative must be a number, got a tensor"):
        Relative(torch.tensor(3.0))


def test_no_pattern_leaves_the_default():
    net = _net()
    prox = ProxProp(net, tau_theta={})
    assert prox.tau_theta == 1.0
    prox.tau_theta = {"0": 0.5}
    prox.tau_theta = {}
    assert prox.tau_theta == 1.0


def test_finite_inputs_that_overflow_are_not_called_infinite():
    net, x = _net().float(), _batch()[0].float()
    prox, optimizer = _start(net)
    (1e-30 * net(1e25 * x).sum()).backward()
    with pytest.warns(RuntimeWarning, match="the Gram matrix of layer '0' holds NaN or Inf"):
        optimizer.step()
    prox.detach()

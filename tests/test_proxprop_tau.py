"""Laws of τθ: relative to the Gram matrix, by pattern, by parameter group, and driven by torch's schedulers."""

import io

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from minimand.errors import MinimandError
from minimand.train import CachedGram, ExactGram, ProxProp, Relative, paper_tau_theta
from tests.test_proxprop import LAYERS, Still, _jacobian, _layer, _loss, _plain_gradient
from tests.test_proxprop_training import BOTH, _batch, _expected, _grads, _net
from tests.test_proxprop_training import _loss as _cross_entropy

FACTOR = 3.0


def _direction(layer, x, scale=1.0, **options):
    """The direction of a summed loss; ``scale`` multiplies the loss."""
    optimizer = Still(layer.parameters())
    prox = ProxProp(layer, **({"tau_theta": Relative(FACTOR), "skip_last": False} | options)).attach(optimizer)
    layer.zero_grad()
    (scale * _loss(layer(x))).backward()
    optimizer.step()
    prox.detach()
    return torch.cat([p.grad.flatten() for p in layer.parameters()])


@BOTH
@pytest.mark.parametrize("name", [name for name in LAYERS if "same" not in name])
def test_relative_is_a_share_of_the_mean_diagonal(name, fused):
    """The oracle is the Jacobian: the mean diagonal of JᵀJ is that of the Gram matrix."""
    layer, x = _layer(name)
    J = _jacobian(layer, x)
    M = J.T @ J
    damped = M + torch.eye(len(M), dtype=M.dtype) * M.diagonal().mean() / FACTOR
    torch.testing.assert_close(_direction(layer, x, fused=fused), torch.linalg.solve(damped, _plain_gradient(layer, x)))


@pytest.mark.parametrize("options", [{}, {"method": "cg", "cg_iters": 2}, {"gram": CachedGram(of=ExactGram())}])
@pytest.mark.parametrize("rows", [4, 30])
def test_what_relative_is_invariant_to(rows, options):
    """Repeated rows and the reduction scale the direction only; so do the inputs, where there is no bias."""
    torch.manual_seed(0)
    layer, x = nn.Linear(6, 3, bias=False).double(), torch.randn(rows, 6, dtype=torch.float64)
    plain = _direction(layer, x, **options)
    torch.testing.assert_close(
        _direction(layer, x.repeat(3, 1), **options), plain
    )  # G and AᵀA are three times as large
    torch.testing.assert_close(_direction(layer, x, 1 / rows, **options), plain / rows)
    # Inputs times s with weights over s compute the same function; so does the step: D(sx)·sA = D(x)·A.
    scaled = nn.Linear(6, 3, bias=False).double()
    with torch.no_grad():
        scaled.weight.copy_(layer.weight / 5)
    torch.testing.assert_close(5 * _direction(scaled, 5 * x, **options), plain)
    absolute = _direction(layer, x.repeat(3, 1), tau_theta=1.0, **options)
    assert not torch.allclose(absolute, _direction(layer, x, tau_theta=1.0, **options))
    # A ones column does not scale.
    biased = nn.Linear(6, 3).double()
    first = _direction(biased, x, **options)
    with torch.no_grad():
        biased.weight /= 5
    assert not torch.allclose(5 * _direction(biased, 5 * x, **options)[:18], first[:18])


def test_a_gram_of_zeros_has_a_direction():
    layer = nn.Linear(3, 2, bias=False)
    assert not _direction(layer, torch.zeros(2, 3)).any()
    assert not _direction(layer, torch.zeros(9, 3)).any()


@BOTH
def test_patterns_choose_tau_theta(fused):
    net, (x, y) = _net(), _batch()
    optimizer = Still(net.parameters())
    prox = ProxProp(net, tau_theta={"*": 0.2, "2": 3.0}, fused=fused).attach(optimizer)
    assert prox.tau_theta == {"*": 0.2, "2": 3.0}
    for values in ((0.2, 3.0), (0.7, 1.0)):
        optimizer.zero_grad()
        _cross_entropy(net, x, y).backward()
        optimizer.step()
        want = [*_expected(net, x, y, values[0])[:2], *_expected(net, x, y, values[1])[2:]]
        torch.testing.assert_close(_grads(net), want)
        prox.tau_theta = {"0": 0.7}  # no pattern for '2': the default
    for wrong in ({"fc": 1.0}, {"0": -1.0}, {"0": "large"}, Relative):
        with pytest.raises(MinimandError, match=r"tau_theta|no layer matches fc; available: '0', '2'"):
            prox.tau_theta = wrong
    prox.detach()
    with pytest.raises(MinimandError, match="no layer matches fc"):
        ProxProp(net, tau_theta={"fc": 1.0})
    for wrong in (0.0, -1.0, float("inf"), float("nan"), "1"):
        with pytest.raises(MinimandError, match="factor of Relative"):
            Relative(wrong)


@BOTH
def test_torch_schedulers_drive_tau_theta(fused):
    net, (x, y) = _net(), _batch()
    optimizer = Still(net.parameters())
    prox = ProxProp(net, tau_theta=0.8, fused=fused).attach(optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(prox.tau_schedule(), 1, gamma=0.5)
    for tau in (0.8, 0.4, 0.2):
        assert prox.tau_theta == pytest.approx(tau)
        optimizer.zero_grad()
        _cross_entropy(net, x, y).backward()
        optimizer.step()
        torch.testing.assert_close(_grads(net), _expected(net, x, y, tau))
        scheduler.step()
    prox.tau_theta = 0.6
    scheduler.step()
    assert prox.tau_theta == pytest.approx(0.3)
    with pytest.raises(MinimandError, match="same patterns"):
        prox.tau_theta = {"0": 0.1}
    prox.detach()
    both = ProxProp(net, tau_theta={"0": Relative(2.0), "2": 1.0})
    both.tau_schedule().param_groups[0]["lr"] = 5.0
    assert both.tau_theta == {"0": Relative(5.0), "2": 1.0}


def test_checkpoints_keep_every_form_of_tau_theta():
    for value in (0.3, Relative(4.0), {"0": Relative(2.0), "2": 0.5}):
        net = _net()
        groups = [{"params": net[0].parameters(), "tau_theta": Relative(7.0)}, {"params": net[2:].parameters()}]
        optimizer = torch.optim.SGD(groups, lr=0.1)
        prox = ProxProp(net, tau_theta=value).attach(optimizer)
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        prox.tau_theta = 1.0
        optimizer.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
        assert prox.tau_theta == value
        assert optimizer.param_groups[0]["tau_theta"] == Relative(7.0)
        prox.detach()


@given(scale=st.floats(0.1, 10.0), seed=st.integers(0, 10))
def test_the_papers_tau_theta_at_another_input_scale(scale, seed):
    """Without a bias, inputs times s take the paper's step in function space at the converted τθ."""
    torch.manual_seed(seed)
    layer, x = nn.Linear(6, 3, bias=False).double(), torch.randn(5, 6, dtype=torch.float64)
    moved = _direction(layer, x, tau_theta=0.05).reshape(3, 6) @ x.T
    with torch.no_grad():
        layer.weight /= scale
    tau, factor = paper_tau_theta(0.05, input_scale=scale)
    again = _direction(layer, scale * x, tau_theta=tau).reshape(3, 6) @ (scale * x.T)
    torch.testing.assert_close(factor * again, moved)
    with pytest.raises(ValueError, match="input_scale"):
        paper_tau_theta(0.05, input_scale=-scale)

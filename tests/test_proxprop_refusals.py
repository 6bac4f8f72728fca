"""Laws: errors and skipped steps name the layer and the reason; modules with plain gradients are logged once."""

import copy
import logging

import pytest
import torch
from torch import nn

from minimand.errors import MinimandError
from minimand.train import CachedGram, ProxProp
from tests.test_proxprop_training import BOTH, _batch, _expected, _grads, _loss, _net, _start


@BOTH
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nan_skips_the_step_and_leaves_the_state(fused, value):
    net, (x, y) = _net(), _batch()
    prox, optimizer = _start(net, optimizer=torch.optim.Adam(net.parameters(), lr=0.1), fused=fused)
    _loss(net, x, y).backward()
    optimizer.step()
    weights, state = [p.detach().clone() for p in net.parameters()], copy.deepcopy(optimizer.state_dict())
    bad = x.clone()
    bad[2, 3] = value
    optimizer.zero_grad()
    _loss(net, bad, y).backward()
    with pytest.warns(RuntimeWarning, match="input of layer '0'"):
        optimizer.step()
    torch.testing.assert_close(list(net.parameters()), weights, rtol=0, atol=0)
    torch.testing.assert_close(optimizer.state_dict()["state"], state["state"], rtol=0, atol=0)
    assert all(p.grad is not None for p in net.parameters())
    optimizer.zero_grad()
    _loss(net, x, y).backward()
    expected = _expected(net, x, y)
    optimizer.step()
    torch.testing.assert_close(_grads(net), expected)
    prox.detach()


class _Root(nn.Module):
    """NaN for negative entries in the middle of a network; the derivative at NaN is NaN as well."""

    def forward(self, x):
        return x.sqrt()


@BOTH
@pytest.mark.parametrize("gram", ["exact", "cached"])
def test_the_warning_names_the_layer_where_nan_enters(fused, gram):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv1d(2, 3, 2), nn.ReLU(), nn.Conv1d(3, 4, 2), nn.Identity(), nn.Conv1d(4, 3, 2),
                        nn.Flatten(), nn.Linear(9, 2))  # fmt: skip
    prox, optimizer = _start(net, fused=fused, gram=gram)
    x = torch.rand(5, 2, 6)
    net(x).square().sum().backward()
    optimizer.step()
    net[3] = _Root()
    with torch.no_grad():
        net[2].bias.fill_(-10.0)
    optimizer.zero_grad()
    net(x).square().sum().backward()
    with pytest.warns(RuntimeWarning, match="input of layer '4'"):
        optimizer.step()
    prox.detach()


@BOTH
def test_a_nan_gradient_alone_skips_the_step_too(fused):
    """NaN in the gradient of a plain layer, of a preconditioned layer, and of a parameter outside the model."""
    net, (x, y) = _net(), _batch()
    outside = nn.Parameter(torch.ones(2, dtype=torch.float64))
    prox, optimizer = _start(net, optimizer=torch.optim.SGD([*net.parameters(), outside], lr=0.1), fused=fused)
    before = [p.detach().clone() for p in net.parameters()]

    def step(edit, message):
        optimizer.zero_grad()
        _loss(net, x, y).backward()
        edit()
        with pytest.warns(RuntimeWarning, match=message):
            optimizer.step()

    step(lambda: net[4].weight.grad[0].fill_(torch.nan), "the gradient of layer '4'")
    step(lambda: net[2].bias.grad.fill_(torch.inf), "the gradient of layer '2'")
    step(lambda: setattr(outside, "grad", torch.full_like(outside, torch.nan)), "a parameter outside of the model")
    torch.testing.assert_close(list(net.parameters()), before, rtol=0, atol=0)
    prox.detach()


class _Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.head(self.second(self.first(x)))


def test_shared_weights_are_refused():
    with pytest.raises(MinimandError, match=r"layer 'first' shares its weight \(first.weight, second.weight\)"):
        ProxProp(_Tied())


def test_patterns_choose_layers():
    net = _net()
    assert ProxProp(net, include="2").layers == ("2",)
    assert ProxProp(net, exclude=["[1-9]"], skip_last=False).layers == ("0",)
    assert "2" in ProxProp(net, exclude="2").plain
    with pytest.raises(ValueError, match="no layer matches fc; available: '0', '2', '4'"):
        ProxProp(net, include=["0", "fc"])


def test_bad_options_are_refused():
    net = _net()
    for options in (
        {"tau_theta": 0.0}, {"tau_theta": -1.0}, {"tau_theta": float("nan")}, {"method": "newton"}, {"cg_iters": 0},
        {"gram": "guess"}, {"gram": [1]}, {"fused": "no"}, {"skip_last": None}, {"process_group": "x"}, {"cg_tol": 0.0},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=next(iter(options))) as caught:
            ProxProp(net, **options)
        assert isinstance(caught.value, MinimandError)
    with pytest.raises(ValueError, match="saved state lacks grams, tau_theta, turn"):
        ProxProp(net).load_state_dict({})
    for wrong in (lambda: CachedGram(every=0), lambda: CachedGram(decay=1.0), lambda: ProxProp(nn.ReLU())):
        with pytest.raises(ValueError):
            wrong()
    with pytest.raises(ValueError, match="skip_last"):
        ProxProp(nn.Linear(2, 2))
    with pytest.raises(TypeError):
        ProxProp(lambda x: x)


def test_bad_attachments_are_refused():
    net = _net()
    prox, optimizer = _start(net)
    with pytest.raises(ValueError, match="attached already"):
        prox.attach(optimizer)
    with pytest.raises(TypeError, match="another ProxProp"):
        ProxProp(net)
    other = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer.add_param_group({"params": other.parameters()})
    with pytest.raises(ValueError, match="has a ProxProp already"):
        ProxProp(other).attach(optimizer)
    prox.detach()
    prox.detach()
    ProxProp(other).attach(optimizer).detach()
    with pytest.raises(ValueError, match=r"does not own 0\.weight"):
        prox.attach(torch.optim.SGD(_net().parameters(), lr=0.1))
    with pytest.raises(ValueError, match=r"does not own 0\.bias"):
        prox.attach(torch.optim.SGD([p for n, p in net.named_parameters() if n != "0.bias"], lr=0.1))
    with pytest.raises(TypeError, match="Optimizer"):
        prox.attach(net)
    assert not any("forward" in module.__dict__ for module in net.modules())
    net[0].bias = nn.Parameter(net[0].bias.to("meta"))
    with pytest.raises(TypeError, match="layer '0' has no data: it is lazy or on the meta device"):
        ProxProp(net)
    with pytest.raises(TypeError, match="lazy"):
        ProxProp(nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 3)))


class _Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Linear(6, 4), nn.LayerNorm(4)
        self.attention, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3)

    def forward(self, x):
        h = self.norm(self.embed(x))
        return self.head(self.attention(h, h, h)[0])


class _Unreadable(_Attention):
    """No made-up input runs through it."""

    def forward(self, x, *, scale):
        return super().forward(x * scale)


def test_a_weight_that_others_use_keeps_plain_gradients():
    prox = ProxProp(_Spare(), skip_last=False)
    assert prox.layers == ("head", "body")
    assert {"raw", "spare"} <= prox.plain.keys()


def test_the_user_is_told_once_what_stays_plain(caplog):
    net, x = _Unreadable(), torch.randn(2, 5, 6)
    plain = copy.deepcopy(net)
    plain(x, scale=1.0).square().sum().backward()
    with caplog.at_level(logging.WARNING, "minimand"):
        prox, optimizer = _start(net, fused=True)
        for _ in range(2):
            optimizer.zero_grad()
            net(x, scale=1.0).square().sum().backward()
            optimizer.step()
    text = [record.getMessage() for record in caplog.records]
    assert len(text) == 1
    assert "norm (LayerNorm), attention (MultiheadAttention), attention.out_proj" in text[0]
    assert prox.layers == ("embed",)
    assert prox.plain["attention.out_proj"] == "NonDynamicallyQuantizableLinear"
    assert prox.plain["head"] == "the last layer"
    torch.testing.assert_close(net.attention.out_proj.weight.grad, plain.attention.out_proj.weight.grad)
    assert not torch.allclose(net.embed.weight.grad, plain.embed.weight.grad)
    prox.detach()


def test_a_normalized_head_is_the_last_layer():
    net = _net()
    nn.utils.parametrizations.weight_norm(net[4])
    assert ProxProp(net).layers == ("0", "2")


class _Unused(nn.Linear):
    """A single layer whose weight is used, but whose forward is not called."""

    def __call__(self, x):
        return x @ self.weight.T


def test_a_bare_layer_has_a_name_in_the_log(caplog):
    layer = _Unused(3, 2)
    with caplog.at_level(logging.WARNING, "minimand"):
        prox, optimizer = _start(layer, skip_last=False)
        layer(torch.rand(4, 3)).sum().backward()
        optimizer.step()
    assert "for the model, whose forward is never called" in caplog.records[-1].getMessage()
    prox.detach()


class _Spare(nn.Module):
    """One layer is never called, and one is used by its weight only."""

    def __init__(self):
        super().__init__()
        self.head, self.body, self.spare, self.raw = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        return self.head(torch.relu(nn.functional.linear(torch.relu(self.body(x)), self.raw.weight)))


class _Branch(_Spare):
    """The spare layer is called by large batches only."""

    def forward(self, x):
        return super().forward(self.spare(x) if len(x) > 6 else x)


ZOO = {
    "chain": (lambda: _net().float(), (5, 6)),
    "attention": (_Attention, (2, 5, 6)),
    "transformer": (lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), (2, 5, 4)),
    "spare": (_Spare, (5, 4)),
    "branch": (_Branch, (8, 4)),
    "normed": (lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 4),
                                     nn.Linear(4, 2)), (5, 4)),
    "frozen": (lambda: nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4), nn.Linear(4, 2)), (5, 4)),
}  # fmt: skip


@pytest.mark.parametrize("skip_last", [False, True])
@pytest.mark.parametrize("name", ZOO)
def test_exactly_the_listed_layers_are_preconditioned(name, skip_last):
    """Compared with plain gradients, layer by layer; what is neither listed nor called is listed as plain."""
    torch.manual_seed(0)
    build, shape = ZOO[name]
    net = build()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    prox = ProxProp(net, tau_theta=3.0, skip_last=skip_last).attach(optimizer)
    x = torch.rand(shape)
    for rows in (x[:5], x, x):
        optimizer.zero_grad()
        net(rows).square().sum().backward()
        before = {path: p.grad.clone() for path, p in net.named_parameters() if p.grad is not None}
        optimizer.step()
        changed = {path.rpartition(".")[0] for path, p in net.named_parameters() if path in before
                   and not torch.equal(p.grad, before[path])}  # fmt: skip
        assert changed <= set(prox.layers)
    assert changed == set(prox.layers)
    trained = {
        path
        for path, module in net.named_modules()
        if any(p.requires_grad for p in module._parameters.values() if p is not None)
    }
    assert set(prox.plain) == trained - changed
    prox.detach()


def test_keys_of_parameter_groups_without_effect_are_refused():
    def attach(make, **options):
        net = _net()
        return ProxProp(net, **options).attach(torch.optim.SGD(make(net), lr=0.1))

    for key in ("tau", "taus", "method", "cg_iters", "cg_tol", "gram", "skip_last", "include"):
        with pytest.raises(ValueError, match=f"ProxProp ignores the key '{key}' of a parameter group"):
            attach(lambda net, key=key: [{"params": net.parameters(), key: 1}])
    with pytest.raises(ValueError, match="without a layer that ProxProp steps"):
        attach(lambda net: [{"params": net[:4].parameters()}, {"params": net[4].parameters(), "tau_theta": 0.1}])
    attach(lambda net: [{"params": net[:4].parameters()}, {"params": net[4].parameters(), "tau_theta": 0.1}],
           skip_last=False).detach()  # fmt: skip
    with pytest.raises(ValueError, match="layer '0' has one tau_theta, but its weight and bias are in groups with two"):
        attach(lambda net: [{"params": net[0].weight, "tau_theta": 0.1}, {"params": [*net.parameters()][1:]}])
    net, (x, y) = _net(), _batch()
    prox, optimizer = _start(net)
    optimizer.param_groups[0]["method"] = "cg"
    _loss(net, x, y).backward()
    with pytest.raises(ValueError, match="ignores the key 'method'"):
        optimizer.step()
    del optimizer.param_groups[0]["method"]
    optimizer.param_groups[0]["initial_lr"] = 0.1  # as schedulers do
    optimizer.step()
    prox.detach()


@BOTH
def test_inference_mode_is_one_sentence(fused):
    net, (x, y) = _net(), _batch()
    prox, optimizer = _start(net, fused=fused)
    loss = _loss(net, x, y)
    with torch.inference_mode(), pytest.raises(MinimandError, match="the backward pass runs in inference mode"):
        loss.backward()
    with torch.inference_mode():
        made, built = x * 1, _net()
        assert torch.equal(net(x), copy.deepcopy(net)(x))
    with pytest.raises(MinimandError, match="input of layer '0' was made in inference mode"):
        net(made)
    with pytest.raises(MinimandError, match="layer '0' was made in inference mode"):
        ProxProp(built)
    optimizer.zero_grad()
    _loss(net, x, y).backward()
    expected = _expected(net, x, y)
    with torch.inference_mode():
        optimizer.step()
    torch.testing.assert_close(_grads(net), expected)
    prox.detach()

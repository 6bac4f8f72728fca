"""Law: attention, recurrent layers, transposed convolutions and a user's maps get the directions of their own rows.

Maps that are linear in all their parameters are compared with [Frerix2018], Proposition 2, by a dense Jacobian. For the
others the rows of every weight are computed by hand, in float64.
"""

import copy
import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from minimand.errors import MinimandError
from minimand.train import CachedGram, ProxProp
from tests.test_proxprop import TAU, Still, _expected, _grads, _loss, _plain_gradient


class Conv1D(nn.Module):
    """As in transformers: the weight has inputs × outputs."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf, self.weight, self.bias = nf, nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.randn(nf))

    def forward(self, x):
        out = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return out.view((*x.size()[:-1], self.nf))


class Own(nn.Module):
    """A user's linear map without torch's names."""

    def __init__(self):
        super().__init__()
        self.kernel, self.shift = nn.Parameter(torch.randn(3, 5)), nn.Parameter(torch.randn(3))

    def forward(self, x):
        return x @ self.kernel.T + self.shift


Known = type("Conv1D", (Conv1D,), {"__module__": "transformers.pytorch_utils"})
MAPS = {Conv1D: {"weight": "bias"}, Own: {"kernel": "shift"}}
LINEAR = {
    "Conv1D, registered": (lambda: Conv1D(4, 5), (2, 3, 5)),
    "Conv1D, by its name": (lambda: Known(4, 5), (2, 7, 5)),
    "own": (Own, (4, 5)),
    "transposed 1d": (lambda: nn.ConvTranspose1d(3, 2, 3, stride=2, padding=1, output_padding=1), (2, 3, 4)),
    "transposed 2d": (lambda: nn.ConvTranspose2d(2, 3, (2, 3), stride=(1, 3)), (2, 2, 3, 4)),
    "transposed, groups": (lambda: nn.ConvTranspose2d(4, 6, 3, groups=2, padding=2, dilation=2), (2, 4, 5, 4)),
    "transposed, much padding": (lambda: nn.ConvTranspose2d(2, 2, 2, stride=2, padding=2, bias=False), (3, 2, 5, 5)),
    "transposed 3d": (lambda: nn.ConvTranspose3d(2, 2, 2, stride=2), (2, 2, 2, 2, 2)),
}


def _start(net, **options):
    optimizer = Still(net.parameters())
    return ProxProp(net, **({"tau_theta": TAU, "skip_last": False, "maps": MAPS} | options)).attach(
        optimizer
    ), optimizer


@pytest.mark.parametrize("name", LINEAR)
def test_linear_maps_have_the_direction_of_proposition_2(name):
    torch.manual_seed(0)
    make, shape = LINEAR[name]
    layer, x = make().double(), torch.randn(shape, dtype=torch.float64)
    expected, gradient = _expected(layer, x), _plain_gradient(layer, x)
    prox, optimizer = _start(layer)
    for _ in range(2):
        optimizer.zero_grad()
        _loss(layer(x)).backward()
        torch.testing.assert_close(_grads(layer), gradient)
        optimizer.step()
        torch.testing.assert_close(_grads(layer), expected)
    assert prox.layers == ("",)
    # Accumulated halves are the whole batch.
    optimizer.zero_grad()
    for part in x.split(1):
        _loss(layer(part)).backward()
    optimizer.step()
    torch.testing.assert_close(_grads(layer), expected)
    prox.detach()
    layer.zero_grad()
    _loss(layer(x)).backward()
    torch.testing.assert_close(_grads(layer), gradient, rtol=0, atol=0)


def _direction(weight, bias, rows, tau=TAU):
    """The direction of one weight with its bias, from dense linear algebra; gradients are read from .grad."""
    rows = rows.reshape(-1, weight.shape[1])
    A = torch.cat([rows, rows.new_ones(len(rows), bias is not None)], 1)
    G = torch.cat([weight, bias[:, None]], 1) if bias is not None else weight
    D = torch.linalg.solve(A.T @ A + torch.eye(A.shape[1], dtype=A.dtype) / tau, G.T).T
    return (D[:, :-1], D[:, -1]) if bias is not None else (D, None)


ATTENTION = {
    "self": ({}, lambda q, k, v: (q, q, q)),
    "memory": ({}, lambda q, k, v: (q, k, k)),
    "three inputs": ({}, lambda q, k, v: (q, k, v)),
    "other sizes": ({"kdim": 3, "vdim": 5}, lambda q, k, v: (q, k[..., :3].contiguous(), v[..., :5].contiguous())),
    "no bias": ({"bias": False}, lambda q, k, v: (q, k, v)),
}


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("name", ATTENTION)
def test_the_projections_of_attention(name, weights):
    torch.manual_seed(0)
    options, choose = ATTENTION[name]
    net = nn.MultiheadAttention(6, 2, batch_first=True, **options).double()
    given = [torch.randn(3, n, 6, dtype=torch.float64) for n in (4, 5, 5)]
    q, k, v = choose(*given)
    mask = torch.rand(q.shape[1], k.shape[1]) > 0.8
    mask[:, 0] = False
    prox, optimizer = _start(net)
    assert prox.layers == ("", "out_proj")
    _loss(net(q, k, v, need_weights=weights, attn_mask=mask)[0]).backward()
    before = {n: p.grad.clone() for n, p in net.named_parameters()}
    optimizer.step()
    packed = net.in_proj_weight is not None
    kinds = net.in_proj_weight.chunk(3) if packed else (net.q_proj_weight, net.k_proj_weight, net.v_proj_weight)
    biases = (None,) * 3 if net.in_proj_bias is None else net.in_proj_bias.chunk(3)
    heads = []
    for place, (x, weight, bias) in enumerate(zip((q, k, v), kinds, biases, strict=True)):
        out = nn.functional.linear(x, weight, bias)
        heads.append(out.unflatten(-1, (2, 3)).transpose(1, 2))
        name = "in_proj_weight" if packed else f"{'qkv'[place]}_proj_weight"
        part = (lambda t, place=place: t.chunk(3)[place]) if packed else (lambda t: t)
        grad = None if bias is None else before["in_proj_bias"].chunk(3)[place]
        D, d = _direction(part(before[name]), grad, x)
        torch.testing.assert_close(part(net.get_parameter(name).grad), D)
        if d is not None:
            torch.testing.assert_close(net.in_proj_bias.grad.chunk(3)[place], d)
    scores = (heads[0] @ heads[1].mT / math.sqrt(3)).masked_fill(mask, -torch.inf).softmax(-1)
    rows = (scores @ heads[2]).transpose(1, 2).flatten(2)
    D, d = _direction(before["out_proj.weight"], before.get("out_proj.bias"), rows)
    torch.testing.assert_close(net.out_proj.weight.grad, D)
    if d is not None:
        torch.testing.assert_close(net.out_proj.bias.grad, d)
    prox.detach()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_the_weights_of_recurrent_layers(kind, dtype):
    """Rows of the input weight are the inputs, rows of the recurrent weight the states before, at all time steps."""
    torch.manual_seed(0)
    net, x = kind(4, 5, 2).to(dtype), torch.randn(6, 3, 4, dtype=dtype)
    first = copy.deepcopy(net)
    prox, optimizer = _start(net)
    _loss(net(x)[0]).backward()
    before = {n: p.grad.clone().double() for n, p in net.named_parameters()}
    optimizer.step()
    # The states of the lower of the two layers.
    lower = kind(4, 5).to(dtype)
    lower.load_state_dict({n: p for n, p in first.state_dict().items() if n.endswith("l0")})
    with torch.no_grad():
        states = {"l0": lower(x)[0], "l1": first(x)[0]}
    for layer, inputs in (("l0", x), ("l1", states["l0"])):
        previous = torch.cat([torch.zeros_like(states[layer][:1]), states[layer][:-1]])
        for name, rows in (("ih", inputs), ("hh", previous)):
            D, d = _direction(before[f"weight_{name}_{layer}"], before[f"bias_{name}_{layer}"], rows.double())
            close = {"rtol": 1e-3, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-7, "atol": 1e-9}
            torch.testing.assert_close(getattr(net, f"weight_{name}_{layer}").grad.double(), D, **close)
            torch.testing.assert_close(getattr(net, f"bias_{name}_{layer}").grad.double(), d, **close)
    assert prox.layers == ("",)
    prox.detach()


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_a_cell_stacks_the_rows_of_its_calls(kind):
    torch.manual_seed(0)
    cell, xs = kind(4, 5).double(), torch.randn(3, 2, 4, dtype=torch.float64)
    prox, optimizer = _start(cell)
    state, hidden, outs = None, [torch.zeros(2, 5, dtype=torch.float64)], []
    for x in xs:
        state = cell(x, state)
        outs.append(state[0] if isinstance(state, tuple) else state)
        hidden.append(outs[-1].detach())
    _loss(torch.stack(outs)).backward()
    before = {n: p.grad.clone() for n, p in cell.named_parameters()}
    optimizer.step()
    for name, rows in (("ih", xs), ("hh", torch.stack(hidden[:-1]))):
        D, d = _direction(before[f"weight_{name}"], before[f"bias_{name}"], rows)
        torch.testing.assert_close(getattr(cell, f"weight_{name}").grad, D)
        torch.testing.assert_close(getattr(cell, f"bias_{name}").grad, d)
    prox.detach()


class _Tied(nn.Module):
    def __init__(self, kind=lambda: nn.Linear(4, 4)):
        super().__init__()
        self.first, self.second = kind(), kind()
        self.second.weight, self.second.bias = self.first.weight, self.first.bias

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


@pytest.mark.parametrize("rows", [2, 9])
def test_layers_that_share_their_parameters_stack_their_rows(rows):
    torch.manual_seed(0)
    net, x = _Tied().double(), torch.randn(rows, 4, dtype=torch.float64)
    prox, optimizer = _start(net)
    assert prox.layers == ("first", "second")
    _loss(net(x)).backward()
    G, g = net.first.weight.grad.clone(), net.first.bias.grad.clone()
    optimizer.step()
    stacked = torch.cat([x, torch.tanh(net.first(x)).detach()])
    D, d = _direction(G, g, stacked)
    torch.testing.assert_close(net.first.weight.grad, D)
    torch.testing.assert_close(net.first.bias.grad, d)
    prox.detach()


@pytest.mark.parametrize("rows", [3, 12])
def test_a_linear_layer_caches_its_gram(rows):
    """Every second step the mean per row moves by half; the metric is that mean times the rows of the step."""
    torch.manual_seed(0)
    net = nn.Linear(4, 3).double()
    prox, optimizer = _start(net, gram=CachedGram(every=2, decay=0.5))
    mean = None
    for step in range(5):
        x = torch.randn(rows + step, 4, dtype=torch.float64)
        A = torch.cat([x, x.new_ones(len(x), 1)], 1)
        if step % 2 == 0:
            fresh = A.T @ A / len(A)
            mean = fresh if mean is None else 0.5 * mean + 0.5 * fresh
        optimizer.zero_grad()
        _loss(net(x)).backward()
        G = torch.cat([net.weight.grad, net.bias.grad[:, None]], 1)
        optimizer.step()
        M = mean * len(x) + torch.eye(5, dtype=torch.float64) / TAU
        D = torch.linalg.solve(M, G.T).T
        torch.testing.assert_close(torch.cat([net.weight.grad, net.bias.grad[:, None]], 1), D)
    prox.detach()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("options", [{}, {"fused": True}, {"method": "cg", "cg_iters": 30}])
def test_few_rows_are_cached_by_their_largest_eigenvalues(options, bias):
    """Kept: ``rank`` eigenpairs of the mean; all other directions have the mean of the rows' other eigenvalues."""
    torch.manual_seed(0)
    net = nn.Linear(9, 3, bias=bias).double()
    prox, optimizer = _start(net, gram=CachedGram(every=2, decay=0.25, rank=2), **options)
    old, rest = None, 0.0
    for step in range(5):
        x = torch.randn(4 + step, 9, dtype=torch.float64)
        A = torch.cat([x, x.new_ones(len(x), 1)], 1) if bias else x.clone()
        if step % 2 == 0:
            mean = A.T @ A / len(A) if old is None else 0.75 * A.T @ A / len(A) + 0.25 * old
            sizes, vectors = torch.linalg.eigh(mean)
            others = len(A) - 2 if old is None else len(A)
            rest, V = 0.25 * rest + float(sizes[:-2].sum() / others), vectors[:, -2:]
            old = V * sizes[-2:] @ V.T
        optimizer.zero_grad()
        _loss(net(x)).backward()
        other = copy.deepcopy(net)
        other.zero_grad()
        _loss(other(x)).backward()
        G = torch.cat([p.grad.reshape(3, -1) for p in other.parameters()], 1)
        optimizer.step()
        eye = torch.eye(9 + bias, dtype=torch.float64)
        D = torch.linalg.solve(len(x) * (old + rest * (eye - V @ V.T)) + eye / TAU, G.T).T
        torch.testing.assert_close(torch.cat([p.grad.reshape(3, -1) for p in net.parameters()], 1), D)
    prox.detach()


def test_a_cached_gram_follows_the_number_of_rows():
    """From few rows to many the kept eigenpairs become a whole matrix, and few rows are added to that."""
    torch.manual_seed(0)
    net, mean = nn.Linear(5, 3, bias=False).double(), None
    prox, optimizer = _start(net, gram=CachedGram(every=1))
    for rows in (3, 4, 9, 2, 7):
        x = torch.randn(rows, 5, dtype=torch.float64)
        mean = x.T @ x / rows if mean is None else 0.5 * x.T @ x / rows + 0.5 * mean
        optimizer.zero_grad()
        for part in x.split(2):
            _loss(net(part)).backward()
        G = net.weight.grad.clone()
        optimizer.step()
        D = torch.linalg.solve(rows * mean + torch.eye(5, dtype=torch.float64) / TAU, G.T).T
        torch.testing.assert_close(net.weight.grad, D)
    prox.detach()


WAYS = {
    "einsum": lambda x, W: torch.einsum("oi,...i->...o", W, x),
    "einsum, the weight behind": lambda x, W: torch.einsum("...i,oi->...o", x, W),
    "einsum, inputs × outputs": lambda x, W: torch.einsum("...i,io->...o", x, W),
    "tensordot": lambda x, W: torch.tensordot(x, W, dims=([-1], [1])),
    "from the left": lambda x, W: (W @ x.reshape(-1, x.shape[-1]).T).T.reshape(*x.shape[:-1], len(W)),
    "batch of one": lambda x, W: (x.reshape(1, -1, x.shape[-1]) @ W[None].mT).reshape(*x.shape[:-1], len(W)),
    "permuted": lambda x, W: x @ W.permute(-1, 0),
}


class _Written(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.name, self.shift = name, nn.Parameter(torch.randn(3))
        self.kernel = nn.Parameter(torch.randn(5, 3) if "inputs" in name else torch.randn(3, 5))

    def forward(self, x):
        return WAYS[self.name](x, self.kernel) + self.shift


@pytest.mark.parametrize("shape", [(4, 5), (9, 5), (2, 3, 5)])
@pytest.mark.parametrize("name", WAYS)
def test_the_ways_to_write_a_product(name, shape):
    torch.manual_seed(0)
    layer, x = _Written(name).double(), torch.randn(shape, dtype=torch.float64)
    prox, optimizer = _start(layer, maps={_Written: {"kernel": "shift"}})
    _loss(layer(x)).backward()
    turned = (lambda W: W.mT) if "inputs" in name else (lambda W: W)
    D, d = _direction(turned(layer.kernel.grad).clone(), layer.shift.grad.clone(), x)
    optimizer.step()
    torch.testing.assert_close([turned(layer.kernel.grad), layer.shift.grad], [D, d])
    prox.detach()


class _Reshaped(Own):
    def forward(self, x):
        return (x @ self.kernel.reshape(5, 3)) + self.shift


class _Power(Own):
    def forward(self, x):
        return x @ (self.kernel**2).T + self.shift


def test_what_is_no_product_is_one_sentence():
    net = nn.Sequential(_Power(), nn.Linear(3, 2))
    prox, _ = _start(net, maps={_Power: {"kernel": "shift"}})
    with pytest.raises(MinimandError, match=r"layer '0': Pow is no product of rows and a weight; leave its class out"):
        net(torch.randn(4, 5))
    prox.detach()
    net = nn.Sequential(_Reshaped(), nn.Linear(3, 2))
    prox, _ = _start(net, maps={_Reshaped: {"kernel": "shift"}})
    with pytest.raises(MinimandError, match=r"layer '0': Mm is no product of rows and a weight"):
        net(torch.randn(4, 5))
    prox.detach()
    for maps in ([Own], {"Own": {"kernel": "shift"}}, {Own: ["kernel"]}):
        with pytest.raises(MinimandError, match="maps must be a dictionary of module classes"):
            ProxProp(net, maps=maps)


def test_checkpoints_of_attention_are_right_or_one_sentence():
    torch.manual_seed(0)
    net, x = nn.MultiheadAttention(4, 2).double(), torch.randn(3, 2, 4, dtype=torch.float64, requires_grad=True)
    prox, optimizer = _start(net)
    _loss(net(x, x, x)[0]).backward()
    optimizer.step()
    expected = _grads(net)
    optimizer.zero_grad()
    _loss(checkpoint(lambda x: net(x, x, x)[0], x, use_reentrant=True)).backward()
    optimizer.step()
    torch.testing.assert_close(_grads(net), expected)
    with pytest.raises(MinimandError, match="activation checkpoints without reentry"):
        checkpoint(lambda x: net(x, x, x)[0], x, use_reentrant=False)
    prox.detach()


@pytest.mark.parametrize("rows", [3, 12])
@pytest.mark.parametrize("fused", [True, False])
def test_conv1d_of_transformers_is_a_linear_layer(fused, rows):
    """Fused, in checkpoints that recompute, with few rows and many: what nn.Linear with the transposed weight does."""
    torch.manual_seed(0)
    mine, x = Known(4, 5).double(), torch.randn(1, rows, 5, dtype=torch.float64, requires_grad=True)
    other = nn.Linear(5, 4).double()
    other.load_state_dict({"weight": mine.weight.detach().mT, "bias": mine.bias.detach()})
    found = []
    for layer in (mine, other):
        prox, optimizer = _start(layer, fused=fused)
        for _ in range(2):
            optimizer.zero_grad()
            _loss(checkpoint(layer, x, use_reentrant=False)).backward()
            optimizer.step()
        found.append([layer.weight.grad, layer.bias.grad])
        assert prox.layers == ("",)
        prox.detach()
    torch.testing.assert_close([found[0][0].mT, found[0][1]], found[1])


def test_fused_leaves_other_layers_plain():
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ConvTranspose2d(3, 2, 3)), torch.randn(2, 2, 5, 5)
    _loss(copy.deepcopy(net)(x)).backward()
    prox, _ = _start(net, fused=True)
    assert prox.layers == ("0",)
    assert prox.plain == {"1": "ConvTranspose2d"}
    prox.detach()

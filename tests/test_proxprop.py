"""Law: after a step, .grad holds G(AᵀA + I/τθ)⁻¹ for every kind of layer and every method of computation.

The oracle is [Frerix2018], Proposition 2, as printed: the Jacobian J of a layer's output with respect to its
parameters, formed column by column, and a dense solve with JᵀJ + I/τθ.
"""

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from minimand.geometry import ConvGeometry
from minimand.operators.patch_grams import patch_gram
from minimand.operators.patches import patches
from minimand.train import CachedGram, ExactGram, ProxProp, SubsampledGram

TAU = 0.7


class Still(torch.optim.SGD):
    """SGD with learning rate zero, so that a step changes only .grad."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.0)


LAYERS = {
    "linear": (lambda: nn.Linear(6, 4), (5, 6)),
    "linear, many rows": (lambda: nn.Linear(6, 4), (40, 6)),
    "linear, no bias": (lambda: nn.Linear(6, 4, bias=False), (5, 6)),
    "linear, few outputs": (lambda: nn.Linear(6, 1), (40, 6)),
    "linear, vector": (lambda: nn.Linear(6, 4), (6,)),
    "linear, leading dimensions": (lambda: nn.Linear(6, 4), (2, 3, 5, 6)),
    "conv1d": (lambda: nn.Conv1d(3, 4, 3, stride=2, padding=1), (3, 3, 9)),
    "conv1d, dilated": (lambda: nn.Conv1d(2, 4, 3, dilation=2, padding=2), (6, 2, 7)),
    "conv2d": (lambda: nn.Conv2d(2, 3, 3, padding=1), (4, 2, 5, 6)),
    "conv2d, no bias": (lambda: nn.Conv2d(2, 3, 3, bias=False), (4, 2, 5, 6)),
    "conv2d, one image": (lambda: nn.Conv2d(2, 3, 3), (2, 5, 6)),
    "conv2d, few patches": (lambda: nn.Conv2d(4, 3, 3), (2, 4, 4, 3)),
    "conv2d, stride": (lambda: nn.Conv2d(2, 3, 3, stride=2, padding=(1, 2)), (5, 2, 7, 6)),
    "conv2d, mixed stride": (lambda: nn.Conv2d(2, 3, (2, 3), stride=(1, 2), dilation=(2, 1)), (5, 2, 7, 6)),
    "conv2d, groups": (lambda: nn.Conv2d(4, 6, 3, groups=2, padding=1), (3, 4, 5, 5)),
    "conv2d, depthwise": (lambda: nn.Conv2d(4, 4, 3, groups=4), (3, 4, 5, 5)),
    "conv2d, same, even kernel": (lambda: nn.Conv2d(2, 3, 2, padding="same"), (4, 2, 5, 5)),
    "conv2d, circular": (lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), (4, 2, 5, 5)),
    "conv2d, reflect": (lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), (4, 2, 5, 5)),
    "conv3d": (lambda: nn.Conv3d(2, 2, 2, padding=1), (3, 2, 3, 4, 3)),
}


def _layer(name):
    make, shape = LAYERS[name]
    torch.manual_seed(0)
    return make().double(), torch.randn(shape, dtype=torch.float64)


def _jacobian(layer, x):
    """Columns: the output for each unit vector of (weight, bias), minus the output at zero."""
    columns = []
    parameters = list(layer.parameters())
    with torch.no_grad():
        plain = copy.deepcopy(layer)
        for which, parameter in enumerate(parameters):
            for i in range(parameter.numel()):
                for p in plain.parameters():
                    p.zero_()
                list(plain.parameters())[which].view(-1)[i] = 1.0
                columns.append(plain(x).flatten())
    return torch.stack(columns, 1)


def _flat(tensors):
    return torch.cat([t.flatten() for t in tensors])


def _plain_gradient(layer, x, weight=None):
    plain = copy.deepcopy(layer)
    plain.zero_grad()
    _loss(plain(x)).backward()
    return _flat([p.grad for p in plain.parameters() if p.requires_grad])


def _loss(out):
    return (out.sin() + 0.3 * out.square()).sum()


def _expected(layer, x, tau=TAU):
    J = _jacobian(layer, x)
    M = J.T @ J + torch.eye(J.shape[1], dtype=J.dtype) / tau
    return torch.linalg.solve(M, _plain_gradient(layer, x))


def _attached(layer, **options):
    options = {"tau_theta": TAU, "skip_last": False} | options
    optimizer = Still(layer.parameters())
    return ProxProp(layer, **options).attach(optimizer), optimizer


def _grads(layer):
    return _flat([p.grad for p in layer.parameters()])


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", LAYERS)
def test_the_step_leaves_the_direction_of_proposition_2(name, fused):
    layer, x = _layer(name)
    expected = _expected(layer, x)
    gradient = _plain_gradient(layer, x)
    prox, optimizer = _attached(layer, fused=fused)
    out = layer(x)
    torch.testing.assert_close(out, type(layer).forward(copy.deepcopy(layer), x), rtol=0, atol=0)
    _loss(out).backward()
    torch.testing.assert_close(_grads(layer), expected if fused else gradient)
    optimizer.step()
    torch.testing.assert_close(_grads(layer), expected)
    prox.detach()


def _textbook(M, b, k):
    x, r = np.zeros_like(b), b.copy()
    p = r.copy()
    for _ in range(k):
        Mp = M @ p
        alpha = (r @ r) / (p @ Mp)
        x, new = x + alpha * p, r - alpha * Mp
        p, r = new + (new @ new) / (r @ r) * p, new
    return x


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("changed", [False, True])
@pytest.mark.parametrize("k", [1, 3, 6])
@pytest.mark.parametrize("name", ["linear", "linear, many rows", "conv2d", "conv2d, few patches", "conv2d, groups"])
def test_cg_is_the_textbook_method_for_each_output_unit(name, k, changed, fused):
    """One system per output unit, for its weights and its bias. ``changed``: the gradient is edited first."""
    layer, x = _layer(name)
    J = _jacobian(layer, x)
    M = (J.T @ J + torch.eye(J.shape[1], dtype=J.dtype) / TAU).numpy()
    prox, optimizer = _attached(layer, method="cg", cg_iters=k, fused=fused)
    gradient = _plain_gradient(layer, x)
    _loss(layer(x)).backward()
    if changed and not fused:
        extra = torch.randn_like(layer.weight)
        layer.weight.grad += extra
        gradient[: extra.numel()] += extra.flatten()
    optimizer.step()
    outputs, width = len(layer.weight), layer.weight[0].numel()
    for unit in range(outputs):
        mine = [*range(unit * width, (unit + 1) * width), outputs * width + unit]
        expected = _textbook(M[np.ix_(mine, mine)], gradient[mine].numpy(), k)
        np.testing.assert_allclose(_grads(layer)[mine].numpy(), expected, rtol=1e-7, atol=1e-10)
    prox.detach()


@pytest.mark.parametrize("name", ["linear", "linear, many rows", "conv2d", "conv2d, few patches"])
@pytest.mark.parametrize("parts", [2, 3])
def test_accumulation_equals_the_full_batch(name, parts):
    layer, x = _layer(name)
    expected = _expected(layer, x)
    prox, optimizer = _attached(layer)
    for micro in x.chunk(parts):
        _loss(layer(micro)).backward()
    torch.testing.assert_close(_grads(layer), _plain_gradient(layer, x))
    optimizer.step()
    torch.testing.assert_close(_grads(layer), expected)
    prox.detach()


class _Siamese(nn.Module):
    """One layer, called once for each half of the input, and registered at two places."""

    def __init__(self, layer):
        super().__init__()
        self.left = self.right = layer

    def forward(self, x):
        return torch.cat([self.left(x[:2]), self.right(x[2:])])


@pytest.mark.parametrize("siamese", [True, False])
@pytest.mark.parametrize("name", ["linear", "linear, many rows", "conv2d"])
def test_the_rows_of_several_calls_are_stacked(name, siamese):
    """Two passes of a model in one graph, and two calls of a layer in one pass."""
    layer, x = _layer(name)
    model = _Siamese(layer) if siamese else layer
    prox, optimizer = _attached(model)
    (_loss(model(x)) if siamese else _loss(model(x[:2])) + _loss(model(x[2:]))).backward()
    optimizer.step()
    torch.testing.assert_close(_grads(layer), _expected(layer, x))
    prox.detach()


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", ["linear", "linear, many rows", "conv2d"])
def test_a_penalty_on_the_weight_is_part_of_the_gradient(name, fused):
    """Fused, the penalty's gradient is added to the direction, because nothing else may touch .grad."""
    layer, x = _layer(name)
    J = _jacobian(layer, x)
    M = J.T @ J + torch.eye(J.shape[1], dtype=J.dtype) / TAU
    gradient = _plain_gradient(layer, x)
    penalty = torch.zeros_like(gradient)
    penalty[: layer.weight.numel()] = 3 * layer.weight.detach().flatten()
    prox, optimizer = _attached(layer, fused=fused)
    (_loss(layer(x)) + 1.5 * layer.weight.square().sum()).backward()
    optimizer.step()
    expected = torch.linalg.solve(M, gradient) + penalty if fused else torch.linalg.solve(M, gradient + penalty)
    torch.testing.assert_close(_grads(layer), expected)
    prox.detach()


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("frozen", ["weight", "bias"])
@pytest.mark.parametrize("name", ["linear", "linear, many rows", "conv2d", "conv2d, groups"])
def test_a_frozen_part_is_no_unknown(name, frozen, fused):
    layer, x = _layer(name)
    getattr(layer, frozen).requires_grad_(False)
    size = layer.weight.numel()
    J = _jacobian(layer, x)
    J = J[:, size:] if frozen == "weight" else J[:, :size]
    M = J.T @ J + torch.eye(J.shape[1], dtype=J.dtype) / TAU
    gradient = _plain_gradient(layer, x)
    prox, optimizer = _attached(layer, fused=fused)
    _loss(layer(x)).backward()
    optimizer.step()
    got = layer.bias.grad if frozen == "weight" else layer.weight.grad
    torch.testing.assert_close(got.flatten(), torch.linalg.solve(M, gradient))
    assert getattr(layer, frozen).grad is None
    prox.detach()


def test_a_layer_unfrozen_after_attaching_is_preconditioned():
    layer, x = _layer("linear")
    layer.requires_grad_(False)
    prox, optimizer = _attached(layer)
    layer(x)
    layer.requires_grad_(True)
    _loss(layer(x)).backward()
    optimizer.step()
    torch.testing.assert_close(_grads(layer), _expected(layer, x))
    prox.detach()


@given(
    rows=st.integers(1, 12),
    inputs=st.integers(1, 8),
    outputs=st.integers(1, 8),
    tau=st.floats(1e-3, 1e3),
    fused=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_shape_and_tau(rows, inputs, outputs, tau, fused, seed):
    torch.manual_seed(seed)
    layer, x = nn.Linear(inputs, outputs).double(), torch.randn(rows, inputs, dtype=torch.float64)
    A = torch.cat([x, torch.ones(rows, 1)], 1)
    prox, optimizer = _attached(layer, tau_theta=tau, fused=fused)
    delta = torch.randn(rows, outputs, dtype=torch.float64)
    layer(x).backward(delta)
    optimizer.step()
    got = torch.cat([layer.weight.grad, layer.bias.grad[:, None]], 1)
    expected = torch.linalg.solve(A.T @ A + torch.eye(inputs + 1) / tau, A.T @ delta).T
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-9 * float(expected.abs().max()))
    prox.detach()


# --- the Gram matrices of convolutions ------------------------------------------------------------------------------


def _geometry(dims, kernel, stride, padding, dilation=1, groups=1):
    return ConvGeometry.build((kernel,) * dims, None, stride, padding, dilation, groups)


@given(
    kernel=st.integers(1, 4),
    stride=st.integers(1, 3),
    padding=st.integers(0, 3),
    dilation=st.integers(1, 2),
    groups=st.sampled_from([1, 2]),
    dims=st.integers(1, 3),
)
def test_patch_grams_are_products_of_patches(kernel, stride, padding, dilation, groups, dims):
    geometry = _geometry(dims, kernel, stride, padding, dilation, groups)
    x = torch.randn(2, 2, *(8, 7, 7)[:dims], dtype=torch.float64)
    rows = patches(x, geometry)
    assert rows.shape[1] == 2 * math.prod(geometry.with_size(tuple(x.shape[2:])).output())
    rows = torch.cat([rows, rows.new_ones(*rows.shape[:2], 1)], -1)
    torch.testing.assert_close(patch_gram(x, geometry, True), rows.mT @ rows)
    torch.testing.assert_close(patch_gram(x, geometry, False), (rows.mT @ rows)[:, :-1, :-1])


def test_blocks_of_the_batch_add_up(monkeypatch):
    from minimand.operators import patch_grams as module

    x = torch.randn(7, 3, 6, 6, dtype=torch.float64)
    for stride in (1, 2):
        geometry = _geometry(2, 3, stride, 1)
        whole = patch_gram(x, geometry, True)
        monkeypatch.setattr(module, "_BLOCK", 1)
        torch.testing.assert_close(patch_gram(x, geometry, True), whole)
        monkeypatch.undo()


def _directions(layer, batches, gram):
    copied = copy.deepcopy(layer)
    prox, optimizer = _attached(copied, gram=gram, tau_theta=1e-2)
    found = []
    for x in batches:
        optimizer.zero_grad()
        _loss(copied(x)).backward()
        optimizer.step()
        found.append(_grads(copied).clone())
    prox.detach()
    return found


def _images(count, seed=0):
    """Smooth random maps with non-zero mean, whose patches are correlated like those of photographs."""
    g = torch.Generator().manual_seed(seed)
    noise = torch.randn(count, 3, 20, 20, generator=g, dtype=torch.float64)
    return nn.functional.avg_pool2d(noise, 5, stride=1) * 3 + 0.5


def _cosine(u, v):
    return float(torch.nn.functional.cosine_similarity(u, v, dim=0))


def test_cheaper_grams_keep_most_of_the_direction():
    torch.manual_seed(0)
    layer = nn.Conv2d(3, 8, 5, padding=2).double()
    batches = [_images(64, seed) for seed in range(6)]
    exact = _directions(layer, batches, "exact")
    rules = ((SubsampledGram(0.125), 0.85), (CachedGram(every=3), 0.9))
    for rule, least in rules:
        for got, want in zip(_directions(layer, batches, rule), exact, strict=True):
            assert _cosine(got, want) > least, rule
    whole = _directions(layer, batches, SubsampledGram(1.0))
    torch.testing.assert_close(whole, exact)
    torch.testing.assert_close(
        _directions(layer, batches, CachedGram(every=1, decay=0.0, of=SubsampledGram(1.0))), exact
    )


def test_a_cached_gram_is_an_average_per_row():
    torch.manual_seed(0)
    layer = nn.Conv2d(3, 4, 3).double()
    batches = [_images(n, seed) for seed, n in enumerate((8, 8, 4, 8, 6))]
    found = _directions(layer, batches, CachedGram(every=2, decay=0.25, of=ExactGram()))
    geometry = _geometry(2, 3, 1, 0)
    mean = None
    for turn, (x, got) in enumerate(zip(batches, found, strict=True)):
        count = len(x) * 14 * 14
        if turn % 2 == 0:
            fresh = patch_gram(x, geometry, True)[0] / count
            mean = fresh if mean is None else 0.25 * mean + 0.75 * fresh
        gradient = _plain_gradient(layer, x)
        G = torch.cat([gradient[: layer.weight.numel()].view(4, -1), gradient[layer.weight.numel() :, None]], 1)
        D = torch.linalg.solve(count * mean + torch.eye(len(mean)) / 1e-2, G.T).T
        torch.testing.assert_close(got, torch.cat([D[:, :-1].flatten(), D[:, -1]]))


def test_a_subsample_takes_turns():
    torch.manual_seed(0)
    layer = nn.Conv2d(3, 4, 3).double()
    x = _images(8)
    first, second, *_, again = _directions(layer, [x] * 5, SubsampledGram(0.25))
    assert not torch.allclose(first, second)
    torch.testing.assert_close(first, again)


# --- copies ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["attached", "detached"])
@pytest.mark.parametrize("how", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_and_pickles_of_the_model_are_plain(how, when):
    layer, x = _layer("linear")
    model = nn.Sequential(layer, nn.ReLU(), nn.Linear(4, 2).double())
    prox, _ = _attached(model, skip_last=True)
    _loss(model(x)).backward()
    if when == "detached":
        prox.detach()
    other = how(model)
    other.zero_grad()
    _loss(other(x)).backward()
    plain = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    plain.load_state_dict(model.state_dict())
    _loss(plain(x)).backward()
    torch.testing.assert_close(_grads(other), _grads(plain), rtol=0, atol=0)
    assert when == "attached" or not any("forward" in m.__dict__ for m in other.modules())
    # A copy can have a ProxProp of its own, or a copy of the first one.
    J = _jacobian(layer, x)
    M = J.T @ J + torch.eye(J.shape[1], dtype=J.dtype) / TAU
    expected = torch.linalg.solve(M, _flat([p.grad for p in plain[0].parameters()]))
    for again in (ProxProp(other, tau_theta=TAU), how((model, prox))[1]):
        net = again._model
        optimizer = Still(net.parameters())
        again.attach(optimizer)
        optimizer.zero_grad()
        _loss(net(x)).backward()
        optimizer.step()
        torch.testing.assert_close(_flat([p.grad for p in net[0].parameters()]), expected)
        again.detach()
    if when == "attached":
        prox.detach()

"""The penalty is the expectation over dropout masks, in value and in gradient."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from minimand.errors import CapabilityError, OptionError
from minimand.factor import DropoutPenalty
from minimand.nn import AdditiveDropout, ImportanceDropout


def _linear(*sizes: int, bias: bool = False) -> list[nn.Linear]:
    return [nn.Linear(a, b, bias=bias).double() for a, b in itertools.pairwise(sizes)]


def _two_layer_relu(bias: bool) -> tuple[nn.Sequential, nn.Sequential]:
    first, second = _linear(3, 4, 2, bias=bias)
    return nn.Sequential(first, nn.ReLU(), second), nn.Sequential(first, nn.ReLU(), nn.Dropout(0.3), second)


def _deep_linear(bias: bool) -> tuple[nn.Sequential, nn.Sequential]:
    first, second, third = _linear(3, 4, 3, 2, bias=bias)
    return nn.Sequential(first, second, third), nn.Sequential(first, nn.Dropout(0.3), second, nn.Dropout(0.3), third)


def _input_and_hidden(bias: bool) -> tuple[nn.Sequential, nn.Sequential]:
    first, second = _linear(3, 4, 2, bias=bias)
    net = nn.Sequential(nn.Dropout(0.3), first, nn.Dropout(0.3), second)
    return net, net


def _relu_then_linear(bias: bool) -> tuple[nn.Sequential, nn.Sequential]:
    first, second, third = _linear(3, 4, 2, 2, bias=bias)
    net = nn.Sequential(first, nn.ReLU(), nn.Dropout(0.3), nn.Sequential(second, nn.Dropout(0.3)), third)
    return net, net


NETWORKS = [_two_layer_relu, _deep_linear, _input_and_hidden, _relu_then_linear]


class _Masks:
    """Dropout modules with given instead of random masks."""

    def __init__(self, net: nn.Sequential) -> None:
        self.dropouts = [m for m in net.modules() if isinstance(m, nn.Dropout)]
        self.masks: list[torch.Tensor] = []
        self.handles = [m.register_forward_hook(self._hook(i)) for i, m in enumerate(self.dropouts)]

    def _hook(self, i: int):
        def hook(module: nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
            return inputs[0] * self.masks[i] / (1 - module.p)

        return hook


def _expected(net: nn.Sequential, x: torch.Tensor, y: torch.Tensor, widths: list[int]) -> torch.Tensor:
    """E‖y − f(x)‖² over all masks, with one mask per batch; one mask per sample has the same expectation."""
    masks = _Masks(net)
    total = x.new_zeros(())
    for bits in itertools.product((0.0, 1.0), repeat=sum(widths)):
        row = torch.tensor(bits, dtype=x.dtype)
        masks.masks = list(row.split(widths))
        kept = row.sum().item()
        probability = 0.7**kept * 0.3 ** (len(bits) - kept)
        total = total + probability * (y - net(x)).square().sum()
    for handle in masks.handles:
        handle.remove()
    return total


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("make", NETWORKS, ids=lambda f: f.__name__.strip("_"))
def test_value_and_gradient_are_the_expectation_over_all_masks(make, bias: bool) -> None:
    plain, dropped = make(bias)
    x, y = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
    widths = {"_two_layer_relu": [4], "_deep_linear": [4, 3], "_input_and_hidden": [3, 4], "_relu_then_linear": [4, 2]}
    expected = _expected(dropped, x, y, widths[make.__name__])
    penalty = DropoutPenalty(plain, 0.3, reduction="sum")
    output, extra = penalty.output_and_penalty(x)
    value = (y - output).square().sum() + extra
    assert value.item() == pytest.approx(expected.item(), rel=1e-12)
    assert torch.allclose(penalty(x), extra)
    parameters = list(plain.parameters())
    for mine, theirs in zip(
        torch.autograd.grad(value, parameters), torch.autograd.grad(expected, parameters), strict=True
    ):
        assert torch.allclose(mine, theirs, rtol=1e-10, atol=1e-12)


def test_the_closed_form_of_the_slides() -> None:
    first, second = _linear(3, 4, 2)
    x = torch.randn(6, 3, dtype=torch.float64)
    for middle, act in ((nn.ReLU(), torch.relu), (nn.Identity(), lambda t: t)):
        got = DropoutPenalty(nn.Sequential(first, middle, second), 0.25, reduction="sum")(x)
        hidden = act(x @ first.weight.T).square().sum(0)
        want = (0.25 / 0.75) * (second.weight.square().sum(0) * hidden).sum()
        assert torch.allclose(got, want)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_it_is_added_to_the_mean_squared_error_of_torch(reduction: str) -> None:
    torch.manual_seed(0)
    first, second = _linear(3, 3, 2, bias=True)
    net = nn.Sequential(first, nn.ReLU(), nn.Dropout(0.5), second)
    x, y = torch.randn(2, 3, dtype=torch.float64), torch.randn(2, 2, dtype=torch.float64)
    net.train()
    with torch.no_grad():
        many, target = x.repeat(100_000, 1), y.repeat(100_000, 1)
        sampled = F.mse_loss(net(many), target, reduction="mean")
        net.eval()
        exact = F.mse_loss(net(x), y, reduction=reduction) + DropoutPenalty(net, reduction=reduction)(x)
    assert exact.item() == pytest.approx(sampled.item() * (1 if reduction == "mean" else y.numel()), rel=1e-2)


def test_white_inputs_give_the_product_of_norms() -> None:
    first, second = _linear(4, 5, 3)
    product = (first.weight.square().sum(1) * second.weight.square().sum(0)).sum()
    linear = DropoutPenalty(nn.Sequential(first, second), 0.5, reduction="sum")
    assert torch.allclose(linear.whitened(), product)
    relu = DropoutPenalty(nn.Sequential(first, nn.ReLU(), second), 0.5, reduction="sum")
    assert torch.allclose(relu.whitened(), product / 2)
    # Exactly white data: ±√n times the axes.
    x = torch.cat([torch.eye(4), -torch.eye(4)]).double() * 2
    assert torch.allclose(DropoutPenalty(nn.Sequential(first, second), 0.5, reduction="batchmean")(x), product)


@pytest.mark.parametrize("bias", [False, True])
def test_whitened_is_the_mean_over_white_data(bias: bool) -> None:
    torch.manual_seed(1)
    for net in (nn.Sequential(*_linear(3, 4, 3, 2, bias=bias)), _two_layer_relu(bias)[0], _input_and_hidden(bias)[1]):
        penalty = DropoutPenalty(net, 0.3, reduction="batchmean")
        with torch.no_grad():
            sampled = penalty(torch.randn(400_000, 3, dtype=torch.float64))
            assert penalty.whitened().item() == pytest.approx(sampled.item(), rel=2e-2)


def test_training_on_the_penalty_reaches_the_closed_form() -> None:
    """A linear autoencoder on white data reaches the optimum of dropout without sampling masks."""
    from minimand.factor import dropout_optimum

    torch.manual_seed(0)
    Y = torch.randn(6, 5, dtype=torch.float64)
    V, U = nn.Linear(5, 4, bias=False).double(), nn.Linear(4, 6, bias=False).double()
    net = nn.Sequential(V, U)
    penalty = DropoutPenalty(net, 0.4, reduction="sum")
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=150, line_search_fn="strong_wolfe", tolerance_change=1e-14)
    x = torch.eye(5, dtype=torch.float64)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(net(x), Y.mT, reduction="sum") + penalty(x)
        loss.backward()
        return loss

    optimizer.step(closure)
    X, _, _ = dropout_optimum(Y, 4, 0.4)
    assert torch.allclose(U.weight @ V.weight, X, atol=1e-4)


def test_no_dropout_no_penalty() -> None:
    net = nn.Sequential(*_linear(3, 4, 2))
    assert DropoutPenalty(net, 0.0)(torch.randn(5, 3, dtype=torch.float64)).item() == 0.0


def test_refusals_name_the_layer() -> None:
    first, second, third = _linear(3, 4, 4, 2)
    with pytest.raises(CapabilityError, match=r"3 \(ReLU\) comes after a dropout"):
        DropoutPenalty(nn.Sequential(first, nn.Dropout(), second, nn.ReLU(), third), 0.5)
    with pytest.raises(CapabilityError, match="comes after a dropout"):
        DropoutPenalty(nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), third), 0.5)
    with pytest.raises(CapabilityError, match="ends in a dropout"):
        DropoutPenalty(nn.Sequential(first, nn.Dropout()), 0.5)
    with pytest.raises(CapabilityError, match="no linear layer"):
        DropoutPenalty(nn.ReLU(), 0.5)
    with pytest.raises(OptionError, match="p is None"):
        DropoutPenalty(nn.Sequential(first, second), None)
    with pytest.raises(OptionError, match="reduction"):
        DropoutPenalty(nn.Sequential(first, second), 0.5, reduction="none")
    with pytest.raises(CapabilityError, match="Tanh"):
        DropoutPenalty(nn.Sequential(first, nn.Tanh(), second), 0.5).whitened()


def test_a_module_that_comes_twice_counts_twice() -> None:
    first, second, third = _linear(3, 4, 4, 2)
    shared, x = nn.Dropout(0.3), torch.randn(5, 3, dtype=torch.float64)
    once = DropoutPenalty(nn.Sequential(first, shared, second, shared, third))
    apart = DropoutPenalty(nn.Sequential(first, nn.Dropout(0.3), second, nn.Dropout(0.3), third))
    assert once(x).item() == apart(x).item()
    relu = nn.ReLU()
    with pytest.raises(CapabilityError, match=r"4 \(ReLU\) comes after a dropout"):
        DropoutPenalty(nn.Sequential(first, relu, nn.Dropout(), second, relu, third))


@pytest.mark.parametrize(
    "layer",
    [
        nn.AlphaDropout(0.3),
        nn.FeatureAlphaDropout(0.3),
        nn.Dropout1d(0.3),
        nn.Dropout2d(0.3),
        nn.Dropout3d(0.3),
        AdditiveDropout(0.3),
        ImportanceDropout(0.3),
    ],
    ids=lambda layer: type(layer).__name__,
)
@pytest.mark.parametrize("p", [None, 0.3])
def test_noise_of_other_kinds_is_refused_by_name(layer: nn.Module, p: float | None) -> None:
    """Other dropouts have another covariance: sampling shows that the penalty of nn.Dropout is wrong for them."""
    first, second = _linear(3, 4, 2)
    name = type(layer).__name__
    with pytest.raises(CapabilityError, match=rf"1 \({name}\) "):
        DropoutPenalty(nn.Sequential(first, layer, nn.Dropout(0.3), second), p)
    with pytest.raises(CapabilityError, match=rf"0\.1 \({name}\) "):
        DropoutPenalty(nn.Sequential(nn.Sequential(first, layer), second), p)


class _Block(nn.Module):
    def __init__(self, drop: nn.Module) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(3, 4).double(), drop

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(torch.relu(self.linear(x)))


class _Residual(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x)


@pytest.mark.parametrize("p", [None, 0.3])
def test_dropout_where_it_cannot_be_cut_out_is_refused(p: float | None) -> None:
    (last,) = _linear(4, 2)
    with pytest.raises(CapabilityError, match=r"1\.0 \(Dropout\) lies inside a _Residual"):
        DropoutPenalty(nn.Sequential(nn.Linear(3, 4), _Residual(nn.Dropout(0.3)), nn.Dropout(0.3), last), p)
    with pytest.raises(CapabilityError, match=r"0 \(LSTM\) drops units of its own"):
        DropoutPenalty(nn.Sequential(nn.LSTM(3, 4, 2, dropout=0.3), nn.Dropout(0.3), last), p)


def test_a_block_without_noise_may_come_first() -> None:
    (last,) = _linear(4, 2)
    block = _Block(nn.Identity())
    net = nn.Sequential(block, nn.Dropout(0.25), last)
    x = torch.randn(6, 3, dtype=torch.float64)
    want = (0.25 / 0.75) * (last.weight.square().sum(0) * block(x).square().sum(0)).sum()
    assert torch.allclose(DropoutPenalty(net, reduction="sum")(x), want)


@pytest.mark.parametrize("p", [None, 0.3])
def test_a_forward_that_calls_its_layers_in_turn_is_a_chain(p: float | None) -> None:
    (last,) = _linear(4, 2)
    block, x = _Block(nn.Dropout(0.3)), torch.randn(6, 3, dtype=torch.float64)
    plain = nn.Sequential(block.linear, nn.ReLU(), nn.Dropout(0.3), nn.Dropout(0.2), last)
    net = nn.Sequential(block, nn.Dropout(0.2), last)
    assert DropoutPenalty(net, p)(x).item() == DropoutPenalty(plain, p)(x).item()
    implicit = nn.Sequential(_Block(nn.Identity()), last)
    plain = nn.Sequential(implicit[0].linear, nn.ReLU(), last)
    assert DropoutPenalty(implicit, 0.4)(x).item() == DropoutPenalty(plain, 0.4)(x).item()


class _Functional(_Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(torch.relu(self.linear(x)), 0.3, self.training)


@pytest.mark.parametrize("training", [True, False])
def test_functional_dropout_counts(training: bool) -> None:
    (last,) = _linear(4, 2)
    net, x = nn.Sequential(_Functional(nn.Identity()), last).train(training), torch.randn(6, 3, dtype=torch.float64)
    plain = nn.Sequential(net[0].linear, nn.ReLU(), nn.Dropout(0.3), last)
    assert DropoutPenalty(net)(x).item() == DropoutPenalty(plain)(x).item()


def test_a_rate_that_drops_nothing_is_refused() -> None:
    (last,) = _linear(4, 2)
    for net in (
        last,
        nn.Sequential(nn.Conv1d(1, 2, 3), nn.Flatten(), last),
    ):
        with pytest.raises(CapabilityError, match="nothing is dropped"):
            DropoutPenalty(net, 0.3)
        assert DropoutPenalty(net, 0.0)._plan.rates == (0.0,)

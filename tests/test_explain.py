"""Law: ``explain`` names every solver layer, reports correct numbers, and leaves the model unchanged."""

import pytest
import torch
from torch import nn

from minimand import convert, explain
from minimand.errors import CapabilityError
from minimand.nn import SolverConv2d, SolverLinear
from minimand.solvers import ADMM, FISTA, ProxGD, ProxSG, solve


@pytest.fixture
def net():
    return nn.Sequential(
        SolverConv2d(3, 4, 3, padding=1, solver=ProxSG(5)),
        nn.BatchNorm2d(4),
        nn.Flatten(),
        nn.Sequential(nn.Dropout(), SolverLinear(4 * 36, 32, solver=ProxGD(5))),
        SolverLinear(32, 32, solver=ADMM(4)),
        nn.Linear(32, 10),
    )


def test_every_layer_is_named_with_its_numbers(net):
    x = torch.randn(8, 3, 6, 6)
    report = explain(net, x)
    assert [r.path for r in report.layers] == ["0", "3.1", "4"]
    text = str(report)
    for r in report.layers:
        assert r.path in text
        assert f"{r.lipschitz:.3g}" in text
    assert set(report.as_dict()) == {"0", "3.1", "4"}
    assert report.layers[2].step is None
    first = net[0].problem(x)
    solution = solve(first, FISTA(300))
    assert report.layers[0].objective[0] == pytest.approx(float(0.5 * x.square().sum()), rel=1e-5)
    assert report.layers[0].objective[3] == pytest.approx(float(solution.objective), rel=1e-3)


@pytest.mark.parametrize("training", [True, False])
def test_nothing_is_changed(net, training):
    net.train(training)
    x = torch.randn(8, 3, 6, 6)
    net(x).sum().backward()
    state = {k: v.clone() for k, v in net.state_dict().items() if "running" not in k and "num_batches" not in k}
    gradients = [p.grad.clone() for p in net.parameters()]
    modes = [m.training for m in net.modules()]
    rng = torch.get_rng_state()
    hooks = [len(m._forward_pre_hooks) for m in net.modules()]
    everything = {k: v.clone() for k, v in net.state_dict().items()}
    explain(net, x)
    assert torch.equal(torch.get_rng_state(), rng)
    assert modes == [m.training for m in net.modules()]
    assert hooks == [len(m._forward_pre_hooks) for m in net.modules()]
    for (name, old), new in zip(everything.items(), net.state_dict().values(), strict=True):
        assert torch.equal(old, new), name
    for old, parameter in zip(gradients, net.parameters(), strict=True):
        assert torch.equal(old, parameter.grad)
    assert state


def test_advice():
    torch.manual_seed(0)
    layer = SolverLinear(64, 128, solver=ProxGD(30))
    (report,) = explain(nn.Sequential(layer), torch.randn(16, 64)).layers
    assert report.suboptimality > 0.01
    assert "FISTA(iters=" in report.advice
    reached = int(report.advice.split("FISTA(iters=")[1].split(")")[0])
    assert reached < 30
    layer.solver = ProxGD(30, step=50.0)
    (report,) = explain(nn.Sequential(layer), torch.randn(16, 64)).layers
    assert report.converges is False
    assert "too long" in report.advice


def test_a_model_without_solver_layers_is_refused_with_the_remedy():
    with pytest.raises(CapabilityError, match="convert"):
        explain(nn.Linear(3, 3), torch.randn(2, 3))


def test_blocks_with_batch_norm_and_a_skip_are_explained():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)

        def forward(self, x):
            return torch.relu(self.norm(self.conv(x)) + x)

    net = convert(nn.Sequential(Block(), Block()), {"*.conv": ProxGD(8)})
    x = torch.randn(6, 4, 5, 5)
    net(x).sum().backward()
    before = {name: value.clone() for name, value in net.named_buffers()}
    report = explain(net, x)
    assert [r.path for r in report.layers] == ["0.conv", "1.conv"]
    assert all(r.converges for r in report.layers)
    for name, value in net.named_buffers():
        assert torch.equal(value, before[name]), name


class Fork(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = SolverLinear(8, 4), SolverLinear(8, 4, solver=ProxSG(4))

    def forward(self, x, *, left=True):
        return self.a(skip=torch.zeros(len(x), 4), y=x) if left else self.b(x)


def test_layers_that_are_not_called_are_named_and_keywords_are_passed_on():
    x = torch.randn(6, 8)
    left, right = explain(Fork(), x), explain(Fork(), x, left=False)
    assert [r.path for r in left.layers] == ["a"]
    assert left.uncalled == ("b",)
    assert "b: not called" in str(left)
    assert [r.path for r in right.layers] == ["b"]
    # The keywords came in another order: the input is still the input.
    assert left.layers[0].objective[0] == pytest.approx(float(0.5 * x.square().sum()), rel=1e-5)


def test_inference_mode_empty_batches_and_half_precision():
    net, x = nn.Sequential(SolverLinear(8, 4)), torch.randn(3000, 8)
    with torch.inference_mode():
        assert explain(net, x).layers[0].converges
    assert explain(net, x[:0]).layers[0].objective[0] == 0
    (report,) = explain(net.half(), x.half()).layers
    assert report.objective[2] < report.objective[0] < float("inf")


class _Mixed(nn.Sequential):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x).float()


def test_a_forward_under_autocast_is_explained():
    """Its second layer gets bfloat16 for a weight in float32."""
    net = convert(_Mixed(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2)), ProxGD(4))
    assert [layer.path for layer in explain(net, torch.randn(3, 8)).layers] == ["0", "2"]


def test_the_report_is_of_the_solver_that_runs():
    layer = SolverLinear(16, 16, solver=ProxSG(6), eval_mode="deterministic").eval()
    x = torch.randn(8, 16)
    first, second = (explain(nn.Sequential(layer), x).layers[0].objective for _ in range(2))
    assert first == second
    noiseless = SolverLinear(16, 16, solver=ProxSG(2, tau=1.0))
    assert "mostly because of sampling noise" not in explain(nn.Sequential(noiseless), x).layers[0].advice


def test_hooks_of_the_user_fire_once():
    layer = SolverLinear(8, 4)
    calls = []
    layer.register_forward_hook(lambda *_: calls.append(1))
    explain(nn.Sequential(layer), torch.randn(3, 8))
    assert len(calls) == 1


def test_set_up_and_scale_are_reported_and_a_collapse_is_a_warning():
    """Of a diagonal weight c·I from zero in one step, the output is the plain block's times 1/(c² + λ)."""
    net = nn.Sequential(*(SolverLinear(4, 4, bias=False, solver=ProxGD(1), ridge=0.0) for _ in range(2)))
    with torch.no_grad():
        for layer, size in zip(net, (1.0, 5.0), strict=True):
            layer.weight.copy_(size * torch.eye(4))
    small, large = explain(net, torch.rand(3, 4)).layers
    assert small.scale == pytest.approx(1, rel=1e-2)
    assert large.scale == pytest.approx(1 / 25, rel=1e-2)
    assert 0 < small.setup < 10
    assert "plain block's norm" not in small.advice
    assert "0.04 of the plain block's norm" in large.advice
    with torch.no_grad():
        net[1].weight.copy_(0.2 * torch.eye(4))
    assert (
        "25 times the plain block's norm, because small weights make long steps"
        in explain(net, torch.rand(3, 4)).layers[1].advice
    )


def test_the_step_of_the_default_strength_is_at_most_its_share_of_one():
    net = convert(nn.Sequential(nn.Linear(4, 4)), ProxGD(5)).eval()
    with torch.no_grad():
        net[0].weight.mul_(0.01)
    assert explain(net, torch.rand(3, 4)).layers[0].step == pytest.approx(net[0].strength)
    net[0].strength = 0.5
    assert explain(net, torch.rand(3, 4)).layers[0].step > 100


def test_a_tuple_holds_positional_and_a_dictionary_keyword_arguments():
    x = torch.randn(6, 8)
    for inputs, expected in (((x,), "a"), ({"x": x}, "a"), ({"x": x, "left": False}, "b")):
        assert [r.path for r in explain(Fork(), inputs).layers] == [expected]

"""Laws: a residual network becomes another algorithm, initially computes the same function, and can be trained."""

import copy
import io

import pytest
import torch
from torch import nn

from minimand.errors import ConversionError, OptionError
from minimand.nn import as_algorithm, coefficient_parameters, convert, revert
from minimand.solvers import ProxGD

from .cases.networks import Residual

ALGORITHMS = ["heavy_ball", "nesterov"]


class Usual(nn.Module):
    """As torchvision writes it."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.layer1 = nn.Sequential(*(Residual(4, 4) for _ in range(3)))
        self.layer2 = nn.Sequential(Residual(4, 8, 2), Residual(8, 8), Residual(8, 8))
        self.layer3 = nn.Sequential(Residual(8, 8, 2), Residual(8, 8))
        self.fc = nn.Linear(8, 5)

    def forward(self, x):
        x = self.layer3(self.layer2(self.layer1(self.stem(x))))
        return self.fc(x.mean((2, 3)))

    def hello(self):
        return "mine"


class Listed(nn.Module):
    """A loop over a ModuleList."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.blocks = nn.ModuleList(Residual(4, 4) for _ in range(4))

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


class Inline(nn.Module):
    """Additions in one forward, on either side, with dropout by the mode."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(3, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.norm = nn.LayerNorm(6)

    def forward(self, x):
        x = self.embed(x.flatten(2).mean(2))
        for k, layer in enumerate(self.layers):
            branch = torch.tanh(layer(self.norm(x)))
            branch = nn.functional.dropout(branch, 0.2, self.training)
            x = x + branch if k % 2 else torch.relu(branch + x)
        return x


class Tied(nn.Module):
    """One block, run three times."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.block = Residual(4, 4)

    def forward(self, x):
        x = self.block(self.stem(x))
        return self.block(self.block(x))


NETS = {"usual": Usual, "list": Listed, "inline": Inline, "tied": Tied}
COEFFICIENTS = {"usual": 5, "list": 4, "inline": 3, "tied": 1}


def _pair(name, algorithm, **options):
    torch.manual_seed(0)
    net = NETS[name]()
    return net, as_algorithm(net, algorithm, **options), torch.randn(4, 3, 8, 8)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("name", NETS)
def test_the_function_is_the_same_at_first(name, algorithm):
    net, other, x = _pair(name, algorithm)
    for mode in (True, False):
        net.train(mode)
        other.train(mode)
        state = copy.deepcopy(net.state_dict())
        torch.manual_seed(1)
        expected = net(x)
        net.load_state_dict(state)  # running statistics are shared
        torch.manual_seed(1)
        torch.testing.assert_close(other(x), expected, atol=0, rtol=0)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("name", NETS)
def test_parameters_keep_their_identity_and_all_learn(name, algorithm):
    net, other, x = _pair(name, algorithm)
    assert type(other) is type(net)
    theirs = dict(other.named_parameters())
    assert all(theirs[path] is parameter for path, parameter in net.named_parameters())
    new = list(coefficient_parameters(other))
    assert len(new) == COEFFICIENTS[name]
    assert set(theirs.values()) == {*net.parameters(), *new}
    other(x).square().sum().backward()
    assert all(parameter.grad is not None for parameter in other.parameters())


def _set(net, current, past):
    with torch.no_grad():
        for parameter in coefficient_parameters(net):
            parameter.copy_(torch.tensor([current, past]))


def test_heavy_ball_is_inside_the_block():
    """relu(F(x) + β₁x + β₂x₋), where x₋ is the input of the previous block; each stage starts with x₋ = x."""
    net, other, x = _pair("usual", "heavy_ball")
    for module in (net, other):
        module.eval()
    _set(other, 0.8, -0.3)

    def branch(block, y):
        return block.bn2(block.conv2(torch.relu(block.bn1(block.conv1(y)))))

    y = net.stem(x)
    for stage in (net.layer1, net.layer2, net.layer3):
        previous = None
        for block in stage:
            if block.downsample is not None or stage is net.layer3:
                y = block(y)
                continue
            before = y if previous is None else previous
            y, previous = torch.relu(branch(block, y) + 0.8 * y - 0.3 * before), y
    torch.testing.assert_close(other(x), net.fc(y.mean((2, 3))), atol=1e-5, rtol=1e-5)


def test_nesterov_is_the_block_ahead():
    net, other, x = _pair("list", "nesterov")
    for module in (net, other):
        module.eval()
    _set(other, 1.4, -0.4)
    y = previous = net.stem(x)
    for block in net.blocks:
        y, previous = block(1.4 * y - 0.4 * previous), y
    torch.testing.assert_close(other(x), y, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_additions_in_one_forward(algorithm):
    net, other, x = _pair("inline", algorithm)
    for module in (net, other):
        module.eval()
    _set(other, 0.9, 0.2)
    y = previous = net.embed(x.flatten(2).mean(2))
    for k, layer in enumerate(net.layers):
        mixed = 0.9 * y + 0.2 * previous
        point = y if algorithm == "heavy_ball" else mixed
        total = torch.tanh(layer(net.norm(point))) + mixed
        y, previous = total if k % 2 else torch.relu(total), y
    torch.testing.assert_close(other(x), y)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_result_is_a_module_like_any_other(algorithm):
    _, other, x = _pair("usual", algorithm)
    other.eval()
    assert other.hello() == "mine"
    assert len(other.layer1) == 3
    _set(other, 0.9, 0.1)
    expected = other(x)
    torch.testing.assert_close(copy.deepcopy(other)(x), expected)
    fresh = as_algorithm(Usual(), algorithm).eval()
    fresh.load_state_dict(other.state_dict())
    torch.testing.assert_close(fresh(x), expected)
    buffer = io.BytesIO()
    torch.save(other, buffer)
    buffer.seek(0)
    torch.testing.assert_close(torch.load(buffer, weights_only=False)(x), expected)
    torch.testing.assert_close(torch.export.export(other, (x,)).module()(x), expected)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(other, fullgraph=True, backend="eager")(x), expected)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("name", NETS)
def test_revert_takes_the_coefficients_out_again(name, algorithm):
    net, other, x = _pair(name, algorithm)
    back = revert(other)
    assert [path for path, _ in back.named_parameters()] == [path for path, _ in net.named_parameters()]
    torch.testing.assert_close(back.eval()(x), net.eval()(x), atol=0, rtol=0)


def test_in_place_and_by_stage():
    net = Usual()
    assert as_algorithm(net, "heavy_ball", stages="layer1", inplace=True) is net
    names = [path for path, _ in net.named_parameters() if "heavy_ball" in path]
    assert names == [f"layer1.{k}.heavy_ball.coefficients.weight" for k in range(3)]
    as_algorithm(net, "nesterov", stages=["layer[23]"], inplace=True)
    assert sum("nesterov" in path for path, _ in net.named_parameters()) == 2
    with pytest.raises(ConversionError, match=r"layer1\.0 \(Residual\): already has its heavy_ball form"):
        as_algorithm(net, "nesterov", stages="layer1")


def test_hooks_on_blocks_still_fire():
    net, seen = Usual(), []
    net.layer1[1].register_forward_hook(lambda *_: seen.append(1))
    other = as_algorithm(net, "heavy_ball")
    seen.clear()
    other(torch.randn(2, 3, 8, 8))
    assert seen == [1]


def test_sums_can_be_kept():
    net = as_algorithm(Listed(), "heavy_ball", constraint="sum")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        net(torch.randn(2, 3, 8, 8)).square().mean().backward()
        optimizer.step()
    weight = net.blocks[2].heavy_ball.coefficients.weight.detach()
    assert float(weight.sum()) == pytest.approx(1.0, abs=1e-5)
    assert float(weight[1]) != 0


def test_solver_layers_and_momentum_go_together():
    net, x = Listed().eval(), torch.randn(2, 3, 8, 8)
    both = as_algorithm(convert(net, {"stem": ProxGD(iters=3)}), "heavy_ball")
    assert torch.isfinite(both(x)).all()
    again = convert(as_algorithm(net, "heavy_ball"), {"stem": ProxGD(iters=3)})
    torch.testing.assert_close(again(x), both(x))


def test_dtype_and_learning_follow_the_model():
    other = as_algorithm(Inline().double(), "heavy_ball")
    assert all(p.dtype == torch.float64 for p in coefficient_parameters(other))


class Scaled(nn.Module):
    """A block with optional arguments, whose branch is a bare Parameter."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(0.3 * torch.randn(4, 4))

    def forward(self, x, scale=0.5, shift=0.1):
        return torch.tanh(x + scale * (x @ self.weight + shift))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_arguments_with_defaults_keep_them(algorithm):
    net = nn.Sequential(*(Scaled() for _ in range(3))).double()
    other, x = as_algorithm(net, algorithm), torch.randn(5, 4, dtype=torch.float64)
    torch.testing.assert_close(other(x), net(x), atol=0, rtol=0)
    _set(other, 0.8, 0.3)
    y = previous = x
    for block in net:
        mixed = 0.8 * y + 0.3 * previous
        point = y if algorithm == "heavy_ball" else mixed
        y, previous = torch.tanh(mixed + 0.5 * (point @ block.weight + 0.1)), y
    torch.testing.assert_close(other(x), y)


class Twice(nn.Module):
    """Two additions to the argument, one of them in place, as in a transformer's block."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, scale=1.0):
        x = x + torch.tanh(self.first(x)) * scale
        x += self.second(x)
        return x


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_additions_to_an_argument(algorithm):
    net, x = Twice().double(), torch.randn(5, 4, dtype=torch.float64)
    other = as_algorithm(net, algorithm)
    torch.testing.assert_close(other(x), net(x), atol=0, rtol=0)
    _set(other, 0.8, 0.3)
    y = previous = x
    for branch in (lambda v: torch.tanh(net.first(v)), net.second):
        mixed = 0.8 * y + 0.3 * previous
        y, previous = mixed + branch(y if algorithm == "heavy_ball" else mixed), y
    torch.testing.assert_close(other(x), y)


# Bad input -----------------------------------------------------------------------------------------------------------


class Unread(nn.Module):
    """A forward that needs an example."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Scaled() for _ in range(3))

    def forward(self, *, x):
        for block in self.blocks:
            x = block(x)
        return x


def test_a_network_that_cannot_be_run_needs_an_example():
    with pytest.raises(ConversionError, match=r"no residual stage.*\n  no made-up input runs .* pass an example"):
        as_algorithm(Unread(), "heavy_ball")
    other = as_algorithm(Unread(), "heavy_ball", example={"x": torch.randn(2, 4)})
    assert len(list(coefficient_parameters(other))) == 3
    with pytest.raises(ConversionError, match="does not run on the example"):
        as_algorithm(Unread(), "heavy_ball", example={"x": torch.randn(2, 5)})


def test_a_network_without_a_stage_gets_the_list_of_examined_modules():
    net = nn.Sequential(nn.Sequential(Residual(4, 4), nn.ReLU()), Residual(4, 6, 2))
    before = list(net.state_dict())
    with pytest.raises(ConversionError) as caught:
        as_algorithm(net, "heavy_ball")
    text = str(caught.value)
    assert "0.0 (Residual): a residual block" in text
    assert "1 (Residual): has no residual addition of its input" in text
    assert "the model (Sequential): has no residual addition of its input" in text
    assert list(net.state_dict()) == before


def _add(x, branch):
    return x + branch


class Helped(nn.Module):
    """Blocks whose addition is in a function, out of reach of an edit."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return _add(x, self.layer(x))


def test_a_forward_that_cannot_be_edited_is_named():
    net = nn.Sequential(Helped(), Helped())
    with pytest.raises(ConversionError, match=r"_add in test_blocks_adaptation.py is not a method of a module"):
        as_algorithm(net, "heavy_ball")
    x = torch.randn(3, 4)
    assert torch.equal(as_algorithm(net, "nesterov")(x), net(x))  # the blocks stay as they are


class Conditioned(nn.Module):
    """Blocks that are called with a second argument."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Scaled() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x, 0.2)
        return x


def test_blocks_that_are_called_with_more_than_their_input_are_named():
    with pytest.raises(ConversionError) as caught:
        as_algorithm(Conditioned(), "heavy_ball")
    text = str(caught.value)
    assert "blocks.1 (Scaled): a residual block" in text
    assert "blocks: the forward cannot be edited, because Conditioned.forward calls it with more than its input" in text


@pytest.mark.parametrize("constraint", ["positive", "unit"])
@pytest.mark.parametrize("inplace", [False, True])
def test_a_bad_constraint_leaves_the_model_as_it_is(constraint, inplace):
    net, x = Usual().eval(), torch.randn(2, 3, 8, 8)
    before, names, forward = net(x), list(net.state_dict()), net.layer1.forward
    with pytest.raises(OptionError, match=r'"sum" or None.*"positive"'):
        as_algorithm(net, "heavy_ball", constraint=constraint, inplace=inplace)
    assert list(net.state_dict()) == names
    assert net.layer1.forward == forward
    torch.testing.assert_close(net(x), before, atol=0, rtol=0)


@pytest.mark.parametrize("stages", [[], 5, [3]])
def test_stages_must_be_patterns(stages):
    with pytest.raises(OptionError, match="stages must be a pattern"):
        as_algorithm(Usual(), "heavy_ball", stages=stages)


def test_plain_networks_have_no_stage():
    with pytest.raises(ConversionError, match="no residual stage"):
        as_algorithm(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), "nesterov")
    with pytest.raises(ConversionError, match="no residual stage"):
        as_algorithm(nn.Linear(2, 2), "nesterov")


def test_other_algorithms_and_patterns_are_refused():
    with pytest.raises(OptionError, match='must be "heavy_ball" or "nesterov"'):
        as_algorithm(Usual(), "admm")
    with pytest.raises(ConversionError, match=r"'head' matches no residual stage.*layer1 \(3 updates\)"):
        as_algorithm(Usual(), "heavy_ball", stages="head")
    with pytest.raises(ConversionError, match=r"convert model\.module"):
        as_algorithm(nn.DataParallel(Usual()), "heavy_ball")
    with pytest.raises(ConversionError, match="takes an nn"):
        as_algorithm("net", "heavy_ball")


def test_a_taken_name_is_refused():
    net = Listed()
    net.blocks[0].heavy_ball = 3
    with pytest.raises(ConversionError, match=r"blocks\.0 already has an attribute 'heavy_ball'"):
        as_algorithm(net, "heavy_ball")

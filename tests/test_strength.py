"""The plain start: at strength 0 a converted network is the plain one; from there it moves towards the solution."""

import copy
import dataclasses

import pytest
import torch
from torch import nn

from minimand.adjoints import Checkpoint, Implicit, JacobianFree, Unroll
from minimand.errors import CapabilityError, ConversionError, OptionError, ShapeError
from minimand.functions import from_activation
from minimand.nn import SolverConv2d, SolverLinear, SolverOptions, convert, revert, sample, set_strength, warm_start
from minimand.solvers import ADMM, FISTA, RCD, SVRG, HeavyBall, ProxGD, ProxSG, Solver, solve

SOLVERS = (ProxGD(6), FISTA(6), HeavyBall(6), ADMM(6), ProxSG(6), SVRG(2, 3), RCD(6))
STEPPED = (ProxGD(6), FISTA(6), HeavyBall(6))
ACTIVATIONS = {"relu": nn.ReLU, "tanh": nn.Tanh, "sigmoid": nn.Sigmoid, "softplus": nn.Softplus, "none": nn.Identity}


def name(solver):
    return type(solver).__name__


def network(activation=nn.ReLU, dtype=torch.float32):
    layers = (nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6), activation(), nn.Dropout2d(0.25))
    layers += (nn.Conv2d(6, 5, 3), activation(), nn.Flatten(), nn.Dropout(0.5), nn.Linear(80, 7), activation())
    net = nn.Sequential(*layers, nn.Dropout(0.5), nn.Linear(7, 3)).to(dtype)
    net(torch.randn(20, 2, 6, 6, dtype=dtype))
    return net


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("solver", SOLVERS, ids=name)
def test_at_strength_zero_a_converted_network_is_the_plain_one_to_the_bit(solver, dtype):
    x = torch.randn(4, 2, 6, 6, dtype=dtype)
    for kind in ACTIVATIONS.values():
        plain = network(kind, dtype).eval()
        converted = convert(plain, SolverOptions(solver, strength=0.0), unsupported="skip").eval()
        assert any(isinstance(module, SolverLinear) for module in converted.modules())
        assert torch.equal(converted(x), plain(x))
        assert torch.equal(revert(converted)(x), plain(x))


@pytest.mark.parametrize("solver", [ProxGD(6), ADMM(6)], ids=name)
def test_at_strength_zero_training_is_that_of_the_plain_network(solver):
    plain, x = network(dtype=torch.float64), torch.randn(4, 2, 6, 6, dtype=torch.float64)
    converted = convert(copy.deepcopy(plain), SolverOptions(solver, strength=0.0))
    outputs = []
    for model in (plain, converted):
        torch.manual_seed(0)
        outputs.append(model(x))
        outputs[-1].square().sum().backward()
    assert torch.equal(*outputs)
    for ours, theirs in zip(converted.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-12)
    assert torch.equal(plain[1].running_var, converted[1].running_var)


def test_a_stochastic_solver_samples_in_the_first_iteration_as_dropout_does():
    y = torch.ones(2000, 10, dtype=torch.float64)
    plain = nn.Sequential(nn.Dropout(0.2), nn.Linear(10, 1, bias=False)).double()
    for solver in (ProxSG(5), SVRG(1, 5)):
        output = convert(plain, SolverOptions(solver, strength=0.0)).train()(y)
        weight = plain[1].weight
        torch.testing.assert_close(output.mean(), weight.sum(), rtol=0, atol=0.1)
        # τ-nice: 8 of 10 inputs, each divided by 0.8.
        expected = 10 / 9 * 0.25 * (weight - weight.mean()).square().sum()
        torch.testing.assert_close(output.var(), expected, rtol=0.15, atol=1e-3)


@pytest.mark.parametrize("activation", ["relu", "tanh", "sigmoid", "softplus"])
@pytest.mark.parametrize("solver", STEPPED, ids=name)
def test_the_other_iterations_are_a_solve_from_the_plain_layer_at_a_share_of_the_step(solver, activation):
    torch.manual_seed(1)
    layer = SolverLinear(8, 6, activation=activation, solver=solver, dtype=torch.float64)
    layer.start, layer.strength = "plain", 0.3
    y = torch.randn(5, 8, dtype=torch.float64)
    problem = layer.problem(y)
    step = 0.3 * float(1 / problem.smoothness())
    start = from_activation(activation).prox(nn.functional.linear(y, layer.weight, layer.bias))
    rest = dataclasses.replace(solver, iters=solver.iters - 1, step=step)
    torch.testing.assert_close(layer(y), solve(problem, rest, x0=start).x, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("rho", [0.5, 1.0, 2.0])
def test_admm_moves_its_preactivations_by_the_strength(rho):
    """By dense linear algebra: v = x + u goes to v + α (z − x), where z solves the ridge system."""
    layer = SolverLinear(8, 6, solver=ADMM(4, rho=rho), ridge=0.1, dtype=torch.float64)
    layer.start, layer.strength = "plain", 0.3
    y, weight = torch.randn(5, 8, dtype=torch.float64), layer.weight
    linear = y @ weight.T + layer.bias
    x = linear.relu()
    u = (linear - x) / rho
    inverse = torch.linalg.inv(weight @ weight.T + (0.1 + rho) * torch.eye(6, dtype=torch.float64))
    for _ in range(3):
        v = x + u + 0.3 * ((linear + rho * (x - u)) @ inverse - x)
        x, u = v.relu(), v - v.relu()
    torch.testing.assert_close(layer(y), x, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("shared", [False, True])
def test_coordinate_descent_moves_its_preactivations_by_the_strength(shared):
    """With all outputs in every sample, z goes to z + γ (x − η∇f(x) − z)."""
    layer = SolverLinear(8, 6, solver=RCD(4, tau=1.0, step=0.2, shared_sample=shared), ridge=0.1, dtype=torch.float64)
    layer.start, layer.strength = "plain", 0.3
    y, weight = torch.randn(5, 8, dtype=torch.float64), layer.weight
    linear = y @ weight.T + layer.bias
    z = linear
    for _ in range(3):
        x = z.relu()
        z = z + 0.3 * (x + 0.2 * (linear - x @ weight @ weight.T - 0.1 * x) - z)
    torch.testing.assert_close(layer(y), z.relu(), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("relaxation", [0.4, 1.0, 1.6])
def test_relaxed_methods_reach_the_minimum(relaxation):
    layer = SolverLinear(7, 5, ridge=0.3, dtype=torch.float64)
    problem = layer.problem(torch.randn(4, 7, dtype=torch.float64))
    best = solve(problem, FISTA(3000)).x
    torch.testing.assert_close(solve(problem, ADMM(800, relaxation=relaxation)).x, best, rtol=1e-6, atol=1e-7)
    if relaxation <= 1:
        torch.testing.assert_close(solve(problem, RCD(6000, relaxation=relaxation)).x, best, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("solver", SOLVERS, ids=name)
@pytest.mark.parametrize("returns", ["solution", "preactivation"])
def test_a_small_strength_is_a_small_change(solver, returns):
    y = torch.randn(5, 8, dtype=torch.float64)
    for activation in ("relu", "tanh", "softplus"):
        options = SolverOptions(solver, start="plain", eval_mode="deterministic")
        plain = nn.Linear(8, 6, dtype=torch.float64)
        if returns == "preactivation" and solver.updates_some and activation == "softplus":
            with pytest.raises(CapabilityError, match="never returns"):
                SolverLinear.from_plain(plain, activation, options, returns)
            continue
        layer = SolverLinear.from_plain(plain, activation, options, returns).eval()
        outputs = []
        for strength in (0.0, 1e-6, 1e-5):
            layer.strength = strength
            output = layer(y)
            outputs.append(output if returns == "solution" else layer.function.prox(output))
        small, large = (torch.norm(output - outputs[0]) for output in outputs[1:])
        assert 0 < small < 1e-3
        torch.testing.assert_close(large / small, 10 * torch.ones_like(small), rtol=0.05, atol=0)


@pytest.mark.parametrize("adjoint", [None, Checkpoint()], ids=["Unroll", "Checkpoint"])
@pytest.mark.parametrize("solver", SOLVERS, ids=name)
def test_a_learned_strength_has_its_gradient(solver, adjoint):
    """Against central differences in float64, with equal samples."""
    kinds = {SolverLinear: nn.Linear(6, 5), SolverConv2d: nn.Conv2d(2, 3, 3)}
    inputs = (torch.randn(4, 6, dtype=torch.float64), torch.randn(3, 2, 5, 5, dtype=torch.float64))
    for (kind, plain), y in zip(kinds.items(), inputs, strict=True):
        options = SolverOptions(solver, start="plain", learn_strength=True, strength=0.2)
        options = options if adjoint is None else dataclasses.replace(options, adjoint=adjoint)
        layer = kind.from_plain(plain.double(), "tanh", options)
        cotangent = torch.randn_like(layer(y))

        def loss(strength, layer=layer, y=y, cotangent=cotangent):
            layer.strength = strength
            torch.manual_seed(3)
            return (layer(y) * cotangent).sum()

        loss(0.2).backward()
        with torch.no_grad():
            expected = (loss(0.2 + 1e-5) - loss(0.2 - 1e-5)) / 2e-5
        torch.testing.assert_close(layer._parameters["strength"].grad, expected, rtol=1e-5, atol=1e-7)


def test_a_learned_strength_is_one_more_parameter_clamped_and_dropped_by_revert():
    plain = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))
    net = convert(plain, SolverOptions(ProxGD(4), learn_strength=True, strength=0.1))
    assert set(net.state_dict()) - set(plain.state_dict()) == {"0.strength", "2.strength"}
    copied = copy.deepcopy(net)
    copied.load_state_dict(net.state_dict())
    optimizer = torch.optim.SGD([net[0].strength, net[2].strength], lr=100.0)
    for _ in range(3):
        optimizer.zero_grad()
        net(torch.randn(4, 6)).square().sum().backward()
        optimizer.step()
    net(torch.randn(4, 6))
    assert all(0 <= float(net[i].strength.detach()) <= 1 for i in (0, 2))
    set_strength(net, 0.0)
    x = torch.randn(4, 6)
    assert torch.equal(net.eval()(x), plain.eval()(x))
    net.train()(x).sum().backward()
    assert float(net[0].strength.grad) != 0, "a strength of zero has a gradient, so that it can grow"
    assert set(revert(net).state_dict()) == set(plain.state_dict())
    assert dict(convert(plain, ProxGD(4)).named_parameters()).keys() == dict(plain.named_parameters()).keys()


def test_defaults_of_conversion_and_of_layers():
    converted = convert(nn.Sequential(nn.Linear(4, 3), nn.ReLU()), ProxSG(4))[0]
    assert (converted.start, converted.eval_mode) == ("plain", "deterministic")
    assert 0 < converted.strength < 0.2
    layer = SolverLinear(4, 3, solver=ProxSG(4))
    assert (layer.start, layer.eval_mode, layer.strength) == ("zero", "stochastic", 1.0)
    implicit = convert(nn.Sequential(nn.Linear(4, 3), nn.ReLU()), SolverOptions(ProxGD(30), adjoint=Implicit()))
    assert implicit[0].start == "zero"


def test_the_protocol_of_the_paper():
    options = SolverOptions.paper(ProxSG(5, decay=0.9))
    assert (options.start, options.ridge, options.eval_mode) == ("zero", 1e-3, "stochastic")
    layer = convert(nn.Sequential(nn.Linear(6, 5), nn.ReLU()), options)[0]
    before = layer.solver.first_step(layer.problem(torch.randn(2, 6)))
    with torch.no_grad():
        layer.weight.mul_(3)
    assert layer.solver.first_step(layer.problem(torch.randn(2, 6))) == before, "L is kept during an epoch"
    layer.train()
    after = layer.solver.first_step(layer.problem(torch.randn(2, 6)))
    assert after == pytest.approx(before / 9, rel=0.02)
    exact = 1 / (torch.linalg.matrix_norm(layer.weight.detach().double(), 2).square() + 1e-3)
    assert after == pytest.approx(float(exact), rel=0.02)
    assert after <= exact


@pytest.mark.parametrize("solver", SOLVERS, ids=name)
def test_samples_that_have_converged_stop(solver):
    torch.manual_seed(0)
    many = dataclasses.replace(solver, **({"outer": 40} if name(solver) == "SVRG" else {"iters": 400}))
    layer = SolverLinear(6, 4, solver=many, ridge=0.5, eval_mode="deterministic", dtype=torch.float64).eval()
    # Rows of very different difficulty, and one at its solution already.
    y = torch.cat([torch.randn(6, 6), torch.zeros(1, 6), 1e3 * torch.randn(2, 6)]).double()
    with torch.no_grad():
        whole = layer(y)
        layer.tol = 1e-6
        early = layer(y)
        one_by_one = torch.cat([layer(row) for row in y.split(1)])
    torch.testing.assert_close(early, one_by_one, rtol=1e-9, atol=1e-9)
    scale = whole.norm(dim=1, keepdim=True).clamp_min(1e-9)
    assert float(((early - whole) / scale).abs().max()) < 1e-4
    assert layer(y).requires_grad


def test_few_iterations_are_made_where_few_are_needed(monkeypatch):
    layer = SolverLinear(6, 4, solver=ProxGD(1000), ridge=1.0, dtype=torch.float64, eval_mode="deterministic").eval()
    layer.tol = 1e-3
    rows: list[int] = []
    advance = ProxGD.advance

    def counted(self, problem, state, k, generator):
        rows.append(len(problem.y))
        return advance(self, problem, state, k, generator)

    monkeypatch.setattr(ProxGD, "advance", counted)
    with torch.no_grad():
        layer(torch.randn(20, 6, dtype=torch.float64))
    assert sum(rows) < 20 * 200


def test_a_warm_start_continues_where_the_last_call_ended():
    for layer in (SolverLinear(8, 6, solver=ProxGD(5)), convert(nn.Sequential(nn.Linear(8, 6)), ProxGD(5))[0]):
        layer = layer.double().eval()
        layer.strength = 1.0
        y = torch.randn(4, 8, dtype=torch.float64)
        best = solve(layer.problem(y), FISTA(4000)).x
        with torch.no_grad(), warm_start(layer):
            for _ in range(400):
                last = layer(y)
            assert layer(torch.randn(3, 8, dtype=torch.float64)).shape == (3, 6)
        torch.testing.assert_close(last, best, rtol=1e-5, atol=1e-6)
        assert not torch.allclose(layer(y), best, rtol=1e-5, atol=1e-6)


def test_sample_draws_passes_and_leaves_everything_as_it_was():
    net = convert(nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3)), {"1": ProxSG(5)})
    net.append(nn.Dropout(0.5))
    x = torch.randn(700, 8)
    net.train()
    state, modes = torch.get_rng_state(), [module.training for module in net.modules()]
    outputs = sample(net, x, n=3)
    assert outputs.shape == (3, 700, 3)
    assert float(outputs.detach().std(0).mean()) > 0
    assert torch.equal(torch.get_rng_state(), state)
    assert [m.training for m in net.modules()] == modes
    assert net[1].eval_mode == "deterministic"
    assert torch.equal(sample(net, x, n=3), outputs)
    # The passes of one batch are independent, and have the mean of single passes.
    net.eval()
    many = sample(net, x[:2], n=4000)
    assert many.shape == (4000, 2, 3)
    half = many[:2000].mean(0) - many[2000:].mean(0)
    assert float(half.detach().abs().max()) < 0.2

    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, *, image, scale):
            return self.net(image) * scale

    assert sample(Named(), {"image": x[:2], "scale": torch.tensor(2.0)}, n=4).shape == (4, 2, 3)


def test_sample_makes_single_passes_where_a_model_takes_no_larger_batch():
    class Fixed(nn.Module):
        def __init__(self, output):
            super().__init__()
            self.net, self.output = nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 3)), output

        def forward(self, x):
            return self.output(self.net(x) + torch.zeros(2, 3))

    x = torch.randn(2, 8)
    for output, shape in ((nn.Identity(), (5, 2, 3)), (torch.sum, (5,))):
        model = convert(Fixed(output), ProxSG(3), example=x)
        outputs = sample(model, x, n=5)
        assert outputs.shape == shape
        assert (outputs.std(0) > 0).all()
    with pytest.raises(ShapeError, match=r"net.1: .*\(\.\.\., 8\), got"):
        sample(model, torch.randn(2, 7))


class _Wordless(Solver):
    iterations = 3

    def init(self, problem, x0):
        return x0

    def advance(self, problem, state, k, generator):
        return state


def test_wrong_strengths_and_combinations_get_a_sentence():
    net = convert(nn.Sequential(nn.Linear(4, 3), nn.ReLU()), ProxGD(3))
    for value in (-0.1, 1.5, float("nan"), True, "much"):
        with pytest.raises((OptionError, CapabilityError), match="strength"):
            set_strength(net, value)
        with pytest.raises(OptionError, match="strength"):
            net[0].strength = value
    with pytest.raises(ConversionError, match="no solver layer"):
        set_strength(nn.Linear(2, 2), 0.5)
    for adjoint in (Implicit(), JacobianFree()):
        with pytest.raises(OptionError, match="minimiser"):
            SolverOptions(ProxGD(3), adjoint=adjoint, start="plain")
        with pytest.raises(OptionError, match="minimiser"):
            SolverOptions(ProxGD(3), adjoint=adjoint, strength=0.5)
    with pytest.raises(OptionError, match="start is one of plain, zero"):
        SolverOptions(start="warm")
    with pytest.raises(OptionError, match="stochastic solver layer or a Dropout"):
        sample(net, torch.randn(2, 4))
    with pytest.raises(OptionError, match="one tensor"):
        sample(_Pair(), torch.randn(2, 4))
    with pytest.raises(CapabilityError, match="no step"):
        _Wordless().weakened(0.5)


class _Pair(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Dropout(0.5))

    def forward(self, x):
        return x, x


# What a review found -------------------------------------------------------------------------------------------------


def small():
    return nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 5)).double().eval()


def test_a_warm_start_of_a_weak_solver_follows_the_input():
    """Its memory is what the iterations added to the plain layer, not the result for the frame before."""
    net, frames = convert(small(), ProxGD(10)).eval(), torch.randn(2, 64, 20, dtype=torch.float64)
    with torch.no_grad():
        cold = net(frames[1])
        with warm_start(net):
            net(frames[0])
            warm = net(frames[1])
    assert float((warm - cold).norm() / cold.norm()) < 0.4


@pytest.mark.parametrize("adjoint", [Unroll(), Checkpoint()], ids=name)
@pytest.mark.parametrize("tol", [None, 1e-3])
def test_a_warm_start_of_one_iteration_makes_it(adjoint, tol):
    layer = SolverLinear(6, 4, solver=ProxGD(1), adjoint=adjoint, dtype=torch.float64).eval()
    layer.tol = tol
    a, b = torch.randn(2, 3, 6, dtype=torch.float64)
    with torch.no_grad(), warm_start(layer):
        first, second = layer(a), layer(b)
    expected = solve(layer.problem(b), ProxGD(1), x0=first).x
    torch.testing.assert_close(second, expected)


def test_warm_starts_nest():
    layer = SolverLinear(6, 4, solver=ProxGD(3)).eval()
    with torch.no_grad(), warm_start(layer):
        layer(torch.randn(2, 6))
        memory = layer._memory
        with warm_start(layer):
            assert layer._memory == []
        assert layer._memory is memory
    assert layer._memory is None


def test_samples_do_not_stop_early_where_a_gradient_is_needed():
    net = small().requires_grad_(False)
    x = torch.randn(4, 20, dtype=torch.float64)
    learned = convert(net, {"0": SolverOptions(ProxGD(10), learn_strength=True, tol=1e-3)}).eval()
    learned[0].strength.requires_grad_()
    learned(x).sum().backward()
    assert learned[0].strength.grad is not None
    sloped = nn.Sequential(nn.Linear(20, 30), nn.PReLU(), nn.Linear(30, 5)).double().eval()
    sloped[0].requires_grad_(False)
    grads = []
    for tol in (None, 1e-3):
        made = convert(sloped, {"0": SolverOptions(ProxGD(10), strength=1.0, tol=tol)}).eval()
        grads.append(torch.autograd.grad(made(x).sum(), sloped[1].weight)[0])
    torch.testing.assert_close(*grads)


def test_passes_of_a_shared_sample_differ():
    net = convert(nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 3)), ProxSG(5, shared_sample=True))
    outputs = sample(net, torch.randn(4, 8), n=10)
    assert float(outputs.std(0).max()) > 0
    assert not outputs.requires_grad


def test_the_papers_step_is_renewed_by_a_checkpoint_and_by_eval():
    x = torch.randn(4, 8)
    for between in (lambda net: net, lambda net: net.eval()):
        net = convert(nn.Sequential(nn.Linear(8, 12), nn.ReLU()), SolverOptions.paper(ProxGD(20))).train()
        net(x)
        between(net)(x)
        net.load_state_dict({key: 10 * value for key, value in net.state_dict().items()})
        assert float(net(x).detach().norm()) < 100


def test_a_default_strength_follows_the_start_and_the_solver():
    net = convert(small(), ProxGD(10))
    net[0].start = "zero"
    assert net[0].strength == 1.0
    net[2].solver = ProxGD(19)
    assert net[2].strength == pytest.approx(0.3 / 18 / 2)
    net[2].strength = 0.05
    net[2].solver = ProxGD(5)
    assert net[2].strength == 0.05
    for wrong in ("start", "eval_mode", "solver"):
        with pytest.raises(OptionError, match="cannot be None"):
            setattr(net[2], wrong, None)


def test_momentum_counts_in_the_default_strength():
    plain, ball, nesterov = (convert(small(), solver)[0].strength for solver in (ProxGD(30), HeavyBall(30), FISTA(30)))
    assert plain > max(ball, nesterov)
    net, x = small(), torch.randn(64, 20, dtype=torch.float64)
    with torch.no_grad():
        changes = [(convert(net, s)(x) - net(x)).norm() for s in (ProxGD(30), HeavyBall(30), FISTA(30), ADMM(30))]
    assert max(changes) < 1.5 * changes[0], "the change is about the same for all methods"


def test_strength_zero_from_zero_is_refused_and_nothing_is_changed():
    with pytest.raises(OptionError, match="takes no step"):
        SolverOptions(ProxGD(5), start="zero", strength=0.0)
    rules = {"0": ProxGD(5), "2": SolverOptions(ProxGD(5), start="zero")}
    net = convert(small(), rules)
    with pytest.raises(OptionError, match=r"^2: strength 0 takes no step"):
        set_strength(net, 0.0)
    assert net[0].strength > 0
    mixed = convert(small(), {"0": ProxGD(5), "2": SolverOptions(ProxGD(50), adjoint=Implicit())})
    set_strength(mixed, 0.5)
    assert (mixed[0].strength, mixed[2].strength) == (0.5, 1.0)


def test_a_checkpoint_of_before_loads_strictly_where_the_strength_is_learned():
    plain = small()
    net = convert(small(), SolverOptions(ProxGD(4), learn_strength=True, strength=0.2))
    net.load_state_dict(plain.state_dict())
    assert torch.equal(net[0].weight, plain[0].weight)
    assert float(net[0].strength.detach()) == pytest.approx(0.2)
    for wrong in (None, "much", nn.Parameter(torch.ones(()))):
        with pytest.raises(OptionError, match="strength"):
            convert(small(), ProxGD(4))[0].strength = wrong


class _ZeroGain(nn.Module):
    """A residual block whose last normalisation starts with gain zero, as in many networks of others."""

    def __init__(self, gain):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        nn.init.constant_(self.norm.weight, gain)

    def forward(self, x):
        return torch.relu(x + self.norm(self.conv(x)))


@pytest.mark.parametrize("solver", [*SOLVERS, RCD(6, tau=1), ProxSG(6, sampling="importance")], ids=name)
def test_at_the_default_strength_a_network_keeps_its_scale_however_small_its_weights_are(solver):
    """Automatic steps are at most that of the plain layer, and the default strengths sum to 0.3 over all of them."""
    x = torch.rand(3, 4, 6, 6, dtype=torch.float64)
    for gain in (0.0, 1e-4, 1e-2):
        dense = (nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 5))
        plain = nn.Sequential(*(_ZeroGain(gain) for _ in range(5)), nn.AdaptiveAvgPool2d(4), nn.Flatten(), *dense)
        plain = plain.double().eval()
        with torch.no_grad():
            plain[7].weight.mul_(0.01)
            expected, found = plain(x), convert(plain, solver).eval()(x)
        assert torch.norm(found - expected) < 0.35 * torch.norm(expected)


def test_a_given_strength_is_a_share_of_the_solvers_own_step_however_long_it_is():
    layer = convert(nn.Sequential(nn.Linear(6, 4, dtype=torch.float64), nn.ReLU()), ProxGD(5))[0].eval()
    y = torch.rand(3, 6, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.mul_(0.01)
        layer.strength = 0.2
        problem = layer.problem(y)
        step = 0.2 * float(1 / problem.smoothness())
        rest = solve(problem, ProxGD(4, step=step), x0=torch.relu(layer.plain(y))).x
        assert step > 1
        torch.testing.assert_close(torch.relu(layer(y)), rest, rtol=1e-9, atol=1e-9)


class _Repeating(nn.Module):
    """A layer that a sample passes several times, or copies of it that it passes once each."""

    def __init__(self, copies, beside=False):
        super().__init__()
        self.parts, self.beside = nn.ModuleList([nn.Linear(8, 8)] * 6), beside
        if copies:
            self.parts = copy.deepcopy(nn.ModuleList([nn.Sequential(part) for part in self.parts]))
            for part in self.parts:
                part[0].load_state_dict(self.parts[0][0].state_dict())

    def forward(self, x):
        if self.beside:
            return torch.stack([torch.relu(part(x)) for part in self.parts]).mean(0)
        for part in self.parts:
            x = torch.relu(part(x))
        return x


def test_a_layer_counts_as_often_as_a_sample_passes_it():
    net, x = _Repeating(copies=False), torch.rand(3, 8)
    found = convert(net, ProxGD(10), example=x)
    assert found.parts[0].strength == pytest.approx(0.3 / 9 / 6)
    unrolled = _Repeating(copies=True)
    assert convert(unrolled, ProxGD(10), example=x).parts[0][0].strength == pytest.approx(found.parts[0].strength)
    beside = convert(_Repeating(copies=False, beside=True), ProxGD(10), example=x)
    assert beside.parts[0].strength == pytest.approx(0.3 / 9)

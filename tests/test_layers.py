"""Laws of solver layers: they equal the block they replace, track their weights, and sample as documented."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from minimand import lipschitz
from minimand.adjoints import Checkpoint, Implicit, JacobianFree, Unroll
from minimand.errors import CapabilityError, OptionError, ShapeError
from minimand.nn import (
    AdditiveDropout,
    ImportanceDropout,
    SolverConv1d,
    SolverConv2d,
    SolverConv3d,
    SolverConvTranspose1d,
    SolverConvTranspose2d,
    SolverLinear,
    SolverOptions,
)
from minimand.solvers import FISTA, SVRG, Importance, Nice, ProxGD, ProxSG, Solver, Spectral, WorkingSet
from minimand.solvers.sampling import Request

from .cases import solvers

SOLVERS = [case.brief for case in solvers.ALL]
STOCHASTIC = [case.solver for case in solvers.STOCHASTIC]
KINDS = {
    "linear": (lambda **o: SolverLinear(12, 6, **o), (5, 12)),
    "conv1d": (lambda **o: SolverConv1d(4, 6, 3, padding=1, **o), (2, 4, 9)),
    "conv2d": (lambda **o: SolverConv2d(4, 6, 3, stride=2, padding=1, **o), (2, 4, 7, 8)),
    "grouped": (lambda **o: SolverConv2d(4, 6, 3, groups=2, dilation=2, **o), (2, 4, 9, 9)),
    "circular": (lambda **o: SolverConv2d(4, 6, 3, padding=1, padding_mode="circular", **o), (2, 4, 4, 5)),
    "reflect": (lambda **o: SolverConv1d(4, 6, 3, padding=1, padding_mode="reflect", **o), (2, 4, 6)),
    "conv3d": (lambda **o: SolverConv3d(4, 6, 2, padding_mode="replicate", padding=1, **o), (2, 4, 3, 2, 3)),
    "transposed1d": (lambda **o: SolverConvTranspose1d(4, 6, 3, stride=2, output_padding=1, **o), (2, 4, 4)),
    "transposed2d": (lambda **o: SolverConvTranspose2d(4, 6, 3, stride=2, padding=1, groups=2, **o), (2, 4, 3, 4)),
}


def plain_of(layer):
    kind = getattr(nn, type(layer).__name__.removeprefix("Solver"))
    plain = kind(
        *(getattr(layer, name) for name in layer._sizes[:2]), **{n: getattr(layer, n) for n in layer._sizes[2:]}
    )
    plain.weight, plain.bias = layer.weight, layer.bias
    return plain


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("act", ["relu", "tanh", "leaky_relu", "softplus", "identity"])
def test_one_unit_step_is_the_plain_block_to_the_bit(kind, act):
    make, shape = KINDS[kind]
    layer, y = make(activation=act, solver=ProxGD(1, step=1.0), ridge=0.0), torch.randn(shape)
    act_function = {"identity": lambda v: v, "softplus": F.softplus, "leaky_relu": F.leaky_relu}.get(act) or getattr(
        torch, act
    )
    assert torch.equal(layer(y), act_function(plain_of(layer)(y)))


@pytest.mark.parametrize("kind", KINDS)
def test_one_sampled_unit_step_is_dropout_then_the_block_to_the_bit(kind):
    make, shape = KINDS[kind]
    layer, y = make(solver=ProxSG(1, tau=0.5, step=1.0)), torch.randn(shape)
    layer.generator = torch.Generator().manual_seed(3)
    features = shape[1]
    draw = Nice().draw(Request(features // 2, features, shape[0], y, torch.Generator().manual_seed(3)))
    mask = draw.weight.reshape(*draw.weight.shape, *(1,) * (len(shape) - 2))
    assert torch.equal(layer(y), torch.relu(plain_of(layer)(y * mask)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("solver", SOLVERS, ids=str)
def test_state_dict_is_weight_and_bias_and_loads_strictly(kind, solver):
    make, shape = KINDS[kind]
    layer = make(solver=solver)
    layer(torch.randn(shape))
    assert list(layer.state_dict()) == ["weight", "bias"]
    other = make(solver=solver)
    other.load_state_dict(layer.state_dict(), strict=True)
    assert [name for name, _ in layer.named_parameters()] == ["weight", "bias"]


@pytest.mark.parametrize("change", ["in place", "data", "load_state_dict", "optimizer", "swap"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_weight_is_never_used_with_an_old_step(kind, change):
    make, shape = KINDS[kind]
    layer, y = make(solver=ProxGD(30)), torch.randn(shape)
    layer(y)
    big = {name: 30 * value for name, value in layer.state_dict().items()}
    if change == "in place":
        with torch.no_grad():
            layer.weight.mul_(30)
    elif change == "data":
        layer.weight.data = layer.weight.data * 30
    elif change == "load_state_dict":
        layer.load_state_dict(big)
    elif change == "optimizer":
        optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
        layer.weight.grad = -29 * layer.weight.detach()
        optimizer.step()
    else:
        layer.weight = nn.Parameter(30 * layer.weight.detach())
    problem = layer.problem(y)
    assert problem.operator.norm_sq() >= lipschitz(layer, y.shape[2:] or None, method="lanczos") / 1.1
    assert problem.objective(layer(y)) <= problem.objective(torch.zeros(problem.shape))


@pytest.mark.parametrize("solver", STOCHASTIC, ids=str)
def test_eval_modes(solver):
    layer, y = SolverLinear(12, 6, solver=solver, mean_passes=400), torch.randn(3, 12)
    layer.eval()
    assert not torch.equal(layer(y), layer(y)), "stochastic evaluation samples"
    draws = torch.stack([layer(y) for _ in range(400)])
    layer.eval_mode = "mean"
    error = (layer(y) - draws.mean(0)).abs()
    assert (error <= 6 * draws.std(0) * (2 / 400) ** 0.5 + 1e-6).all(), "the mean estimates the expected output"
    layer.eval_mode = "deterministic"
    assert torch.equal(layer(y), layer(y))
    layer.train()
    assert not torch.equal(layer(y), layer(y)), "training always samples"


def test_deterministic_evaluation_takes_full_gradients_with_the_training_step():
    layer, y = SolverLinear(12, 6, solver=ProxSG(5, decay=1.0), eval_mode="deterministic").eval(), torch.randn(3, 12)
    step = float(layer.solver.first_step(layer.problem(y)))
    other = SolverLinear.from_plain(nn.Linear(12, 6), "relu", SolverOptions(ProxGD(5, step=step)))
    other.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer(y), other(y))


@pytest.mark.parametrize("solver", [case.brief for case in solvers.STOCHASTIC], ids=str)
def test_rows_draw_their_own_samples_unless_shared(solver):
    y = torch.randn(1, 12).expand(6, -1)
    own = SolverLinear(12, 6, solver=solver)(y)
    assert not torch.allclose(own, own[:1].expand_as(own))
    shared = SolverLinear(12, 6, solver=solver, shared_sample=True)(y)
    torch.testing.assert_close(shared, shared[:1].expand_as(shared))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("adjoint", [Checkpoint(), Checkpoint(every=1)], ids=str)
@pytest.mark.parametrize("solver", SOLVERS, ids=str)
def test_checkpointed_layers_have_the_unrolled_gradient(solver, adjoint, kind):
    make, shape = KINDS[kind]
    layer, y = make(solver=solver).double(), torch.randn(shape, dtype=torch.float64)
    gradients = []
    for way in (Unroll(), adjoint):
        layer.adjoint = way
        torch.manual_seed(1)
        gradients.append(torch.autograd.grad(layer(y).square().sum(), list(layer.parameters())))
    torch.testing.assert_close(*gradients, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)], ids=["32", "64"])
def test_gradients_equal_naive_unrolled_autograd(kind, dtype, tolerance):
    """The fast paths (one Gram matrix, fused products) against the plain update."""
    make, shape = KINDS[kind]
    layer, y = make(solver=ProxGD(8)).to(dtype), torch.randn(64, *shape[1:], dtype=dtype, requires_grad=True)
    operator, step = layer.operator(y), float(layer.solver.first_step(layer.problem(y)))
    x = torch.zeros(operator.apply(y).shape, dtype=dtype)
    for _ in range(8):
        gradient = plain_of(layer)(operator.adjoint(x) - y) + 1e-3 * x
        if layer.bias is not None:
            gradient = gradient - 2 * operator.per_feature(layer.bias)
        x = torch.relu(x - step * gradient)
    leaves = [y, *layer.parameters()]
    expected = torch.autograd.grad(x.square().sum(), leaves)
    got = torch.autograd.grad(layer(y).square().sum(), leaves)
    for a, b in zip(got, expected, strict=True):
        assert (a - b).norm() <= tolerance * b.norm()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("solver", SOLVERS, ids=str)
def test_copies_pickles_and_casts(kind, solver):
    make, shape = KINDS[kind]
    layer, y = make(solver=solver), torch.randn(shape)
    layer.generator = torch.Generator().manual_seed(0)
    layer(y)

    def answer(module):
        torch.manual_seed(2)
        return module(y.to(module.weight.dtype))

    layer.generator = None
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(answer(twin), answer(layer))
    twin.double()
    assert answer(twin).dtype == torch.float64
    twin.weight.data.add_(1.0)
    assert not torch.equal(twin.weight.float(), layer.weight)


@pytest.mark.parametrize("solver", SOLVERS, ids=str)
def test_compiled_training_matches_eager_and_follows_the_weight(solver):
    torch._dynamo.reset()
    layer, y = SolverLinear(12, 6, solver=solver), torch.randn(5, 12)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    for _ in range(3):
        loss = (compiled(y) - 1).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    truth = torch.linalg.matrix_norm(layer.weight.detach().double(), 2) ** 2
    bound = layer.tracker.bounds(layer.weight).total
    assert truth <= bound <= 1.5 * truth
    if not solver.stochastic:
        torch.testing.assert_close(compiled(y), layer(y))


@pytest.mark.parametrize("kind", KINDS)
def test_layers_export(kind):
    make, shape = KINDS[kind]
    layer, y = make(solver=FISTA(3)).eval(), torch.randn(shape)
    expected = layer(y)
    torch.testing.assert_close(torch.export.export(layer, (y,)).module()(y), expected)


def test_ensembles_by_vmap():
    layers = [SolverLinear(12, 6, solver=ProxGD(4)) for _ in range(3)]
    y = torch.randn(5, 12)
    parameters, _ = torch.func.stack_module_state(layers)
    for layer in layers:
        layer(y)

    def call(weights, y):
        return torch.func.functional_call(layers[0], weights, (y,))

    together = torch.func.vmap(call, in_dims=(0, None))(parameters, y)
    assert together.shape == (3, 5, 6)
    # The bound of a traced weight is the anchor's plus the drift: a shorter, safe step, not the same iterates.
    for layer, x in zip(layers, together, strict=True):
        problem = layer.problem(y)
        assert problem.objective(x) < problem.objective(torch.zeros_like(x))


@pytest.mark.parametrize("conv", [False, True])
def test_autocast_and_channels_last(conv):
    layer = SolverConv2d(4, 6, 3, padding=1) if conv else SolverLinear(12, 6)
    y = torch.randn(2, 4, 8, 8) if conv else torch.randn(5, 12)
    exact = layer(y)
    if conv:
        again = layer.to(memory_format=torch.channels_last)(y.to(memory_format=torch.channels_last))
        torch.testing.assert_close(again, exact, atol=1e-5, rtol=1e-5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(layer(y).float(), exact, atol=0.05, rtol=0.05)


def test_torch_gradient_checkpointing_of_a_sampled_layer():
    layer, y = SolverLinear(12, 6, solver=ProxSG(4)), torch.randn(5, 12, requires_grad=True)
    torch.manual_seed(0)
    a = torch.autograd.grad(layer(y).square().sum(), list(layer.parameters()))
    torch.manual_seed(0)
    x = torch.utils.checkpoint.checkpoint(layer, y, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(x.square().sum(), list(layer.parameters())), a)


def test_implicit_and_jacobian_free_layers_train():
    for adjoint in (Implicit(), JacobianFree()):
        layer, y = SolverLinear(12, 6, solver=FISTA(100), adjoint=adjoint, ridge=0.1), torch.randn(20, 12)
        target = torch.rand(20, 6)
        optimizer = torch.optim.Adam(layer.parameters(), lr=0.02)
        losses = []
        for _ in range(60):
            loss = (layer(y) - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < 0.8 * losses[0]


def test_a_skip_connection_is_a_bias_that_depends_on_the_input():
    layer = SolverConv2d(4, 4, 3, padding=1, solver=ProxGD(1, step=1.0), ridge=0.0)
    y = torch.randn(2, 4, 6, 6)
    plain = F.conv2d(y, layer.weight, layer.bias, padding=1)
    torch.testing.assert_close(layer(y, skip=y), torch.relu(plain + y))
    layer.solver = ProxGD(20)
    problem = layer.problem(y, y)
    assert problem.objective(layer(y, skip=y)) < problem.objective(torch.relu(plain + y) / float(problem.smoothness()))


def test_bad_layers_and_inputs():
    with pytest.raises(OptionError, match="eval_mode"):
        SolverLinear(4, 3, eval_mode="sometimes")
    with pytest.raises(OptionError, match="ridge"):
        SolverLinear(4, 3, ridge=-1.0)
    with pytest.raises(OptionError, match="solver"):
        SolverLinear(4, 3, solver="sgd")
    with pytest.raises(CapabilityError, match="draws new samples"):
        SolverLinear(4, 3, solver=ProxSG(), adjoint=Implicit())
    with pytest.raises(ShapeError, match="padding_mode='reflect' with a padding of 2 needs a map of 3 or more, got 2"):
        SolverConv2d(3, 3, 3, padding=2, padding_mode="reflect")(torch.randn(1, 3, 5, 2))
    with pytest.raises(OptionError, match=r"output_padding must be smaller than the stride, got \(1, 1\)"):
        SolverConvTranspose2d(3, 3, 3, output_padding=1, dilation=2)
    with pytest.raises(ShapeError, match=r"4.*\(2, 5\)"):
        SolverLinear(4, 3)(torch.randn(2, 5))


@pytest.mark.parametrize("p", [0.0, 0.25, 0.5, 0.75])
def test_dropouts_are_unbiased_and_silent_in_evaluation(p):
    y = torch.randn(1, 8).expand(4000, -1)
    after = nn.Linear(8, 3)
    for drop in (AdditiveDropout(p, after), ImportanceDropout(p), ImportanceDropout(p, after)):
        noisy = drop(y)
        assert ((noisy.mean(0) - y[0]).abs() <= 5 * noisy.std(0) / 4000**0.5 + 1e-6).all()
        assert torch.equal(drop.eval()(y), y)


def test_additive_dropout_is_the_second_inner_step_of_svrg():
    layer = SolverLinear(12, 6, solver=SVRG(1, 2, tau=0.5, step=1.0), ridge=0.0)
    y = torch.randn(5, 12)
    drop = AdditiveDropout(0.5)
    layer.generator, drop.generator = (torch.Generator().manual_seed(9) for _ in range(2))
    block = plain_of(layer)
    x = torch.relu(block(y))
    back = x @ layer.weight
    torch.testing.assert_close(layer(y), torch.relu(block(drop(y, back) - back) + x))


@pytest.mark.parametrize("conv", [False, True])
def test_additive_dropout_in_a_sequence_adds_noise_along_the_reconstruction(conv):
    """The noise does not vanish where the input does, and its size is Aᵀact(Ay + b), by dense algebra."""
    plain = nn.Conv2d(4, 3, 3, stride=2, padding=1) if conv else nn.Linear(4, 3)
    drop = AdditiveDropout(0.5, plain, activation="tanh", feature_dim=-3 if conv else -1)
    y = torch.zeros(6, 4, 5, 5) if conv else torch.zeros(6, 4)
    zeros = torch.zeros_like(y).requires_grad_()
    (back,) = torch.autograd.grad(plain(zeros), zeros, torch.tanh(plain(y)))
    noise = (drop(y) - y).detach()
    torch.testing.assert_close(noise.abs(), back.abs())
    torch.testing.assert_close(noise / back, (noise / back).sign())
    assert (noise / back).flatten(2).unique(dim=-1).shape[-1] == 1 if conv else True
    weight = plain.weight
    nn.Sequential(drop, plain, nn.Tanh())(y).sum().backward()
    assert weight.grad.abs().sum() > 0
    assert len(list(drop.parameters())) == 0


def test_additive_dropout_without_a_reconstruction_is_refused():
    model = nn.Sequential(AdditiveDropout(0.5), nn.Linear(4, 2))
    with pytest.raises(OptionError, match="name the layer that follows"):
        model(torch.ones(3, 4))
    assert model.eval()(torch.ones(3, 4)).shape == (3, 2)


@pytest.mark.parametrize("conv", [False, True])
def test_importance_dropout_is_one_step_of_prox_sg(conv):
    solver = ProxSG(1, tau=0.5, step=1.0, sampling=Importance(by="gradients"))
    layer = SolverConv2d(8, 4, 3, solver=solver) if conv else SolverLinear(8, 4, solver=solver)
    plain = nn.Conv2d(8, 4, 3) if conv else nn.Linear(8, 4)
    plain.load_state_dict(layer.state_dict())
    y = torch.randn(3, 8, 5, 5) if conv else torch.randn(3, 8)
    drop = ImportanceDropout(0.5, plain, feature_dim=-3 if conv else -1)
    layer.generator, drop.generator = (torch.Generator().manual_seed(4) for _ in range(2))
    torch.testing.assert_close(layer(y), torch.relu(plain(drop(y))), atol=1e-5, rtol=1e-4)


def test_bad_dropouts():
    with pytest.raises(OptionError, match="p must"):
        AdditiveDropout(1.0)
    with pytest.raises(OptionError, match="feature_dim"):
        ImportanceDropout(0.5, feature_dim=1)
    with pytest.raises(ShapeError, match="reconstruction"):
        AdditiveDropout()(torch.ones(2, 3), torch.ones(2, 4))
    for drop in (AdditiveDropout(), ImportanceDropout()):
        drop.p = 1.5
        with pytest.raises(OptionError, match=r"p must lie in \[0, 1\), got 1.5"):
            drop(torch.ones(2, 3))
        drop.p, drop.feature_dim = 0.5, -4
        with pytest.raises(ShapeError, match="feature_dim=-4 does not exist"):
            drop(torch.ones(2, 3), *[torch.ones(2, 3)] * isinstance(drop, AdditiveDropout))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("solver", [case.solver for case in solvers.DETERMINISTIC], ids=str)
def test_equal_weights_give_equal_answers_in_evaluation(kind, solver):
    """A loaded checkpoint predicts the same as the trained network, whatever the history of the weight."""
    make, shape = KINDS[kind]
    layer, y = make(solver=solver), torch.randn(shape)
    layer(y)
    with torch.no_grad():
        layer.weight.mul_(1.03)
    layer(y)
    other = make(solver=solver)
    other.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer.eval()(y), other.eval()(y), atol=0, rtol=0)


def test_shared_samples_can_be_switched_off_again():
    y = torch.randn(1, 12).expand(6, -1)
    layer = SolverLinear(12, 6, solver=ProxSG(3), shared_sample=True)
    layer.shared_sample = False
    x = layer(y)
    assert not torch.allclose(x, x[:1].expand_as(x))


@pytest.mark.parametrize("kind", KINDS)
def test_single_samples_without_a_batch_dimension(kind):
    make, shape = KINDS[kind]
    layer, y = make(solver=ProxGD(3)), torch.randn(shape)
    torch.testing.assert_close(layer(y[0]), layer(y)[0], atol=1e-5, rtol=1e-4)


def test_a_sample_that_does_not_fit_is_refused_when_the_layer_is_made():
    with pytest.raises(OptionError, match="between 1 and 3"):
        SolverLinear(3, 2, solver=ProxSG(tau=5))


def test_importance_dropout_compiles():
    torch._dynamo.reset()
    drop = torch.compile(ImportanceDropout(0.5, nn.Linear(8, 3)), fullgraph=True, backend="aot_eager")
    assert drop(torch.randn(4, 8)).shape == (4, 8)


@pytest.mark.parametrize("solver", [Spectral(5), WorkingSet()], ids=repr)
def test_solvers_that_cannot_be_unrolled_need_another_adjoint(solver: Solver) -> None:
    with pytest.raises(CapabilityError, match="adjoint=Implicit"):
        SolverLinear(4, 4, solver=solver)
    layer = SolverLinear(4, 4, solver=Spectral(50), adjoint=Implicit())
    layer(torch.randn(3, 4)).sum().backward()
    assert layer.weight.grad is not None

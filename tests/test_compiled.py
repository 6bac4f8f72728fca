"""Laws: compiled graphs and exported programs have the bounds and outputs of eager calls, also after a change."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from minimand.errors import CapabilityError
from minimand.nn import SolverConv1d, SolverConv2d, SolverLayer, SolverLinear, convert
from minimand.norms import tracker as tracking
from minimand.operators import Conv2d, Dense, LinearOperator, LipschitzTracker, operator
from minimand.solvers import FISTA, ProxGD, ProxSG, Solver
from tests.cases import solvers
from tests.cases.operators import ALL, AnyCase, UserCase, dense_matrix, norm_sq

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same'")
# Their bound is computed by products with them, outside of the graph.
BREAKING = ("downsampling", "projections", "tomography", "sparse", "scipy", "physics")
# Their products are computed by NumPy, from the values of tensors.
NOT_EXPORTED = ("scipy",)


class _Products(nn.Module):
    """An operator's products and bounds."""

    def __init__(self, made: LinearOperator, index: list[int] | None = None) -> None:
        super().__init__()
        self.made, self.index = made, index
        self.weight = nn.Parameter(made.weight.detach().clone()) if made.has_weight else None

    def present(self) -> LinearOperator:
        present = self.made if self.weight is None else self.made.with_weight(self.weight)
        return present if self.index is None else present.restrict(torch.tensor(self.index))

    def forward(self, y: Tensor) -> tuple[Tensor, ...]:
        present = self.present()
        bounds = present.norm_sq(), present.input_norms_sq(), present.output_norms_sq()
        x = present.apply(y)
        return x, present.adjoint(x), *bounds


def _check(model: _Products, fullgraph: bool, exported: bool = True) -> None:
    torch._dynamo.reset()
    y = torch.randn(2, *model.present().input_shape, dtype=model.made.dtype)
    if exported:
        program = torch.export.export(model, (y,)).module()
        torch.testing.assert_close(program(y), model(y))
        torch.testing.assert_close(program(1 - y), model(1 - y))
    else:
        with pytest.raises(CapabilityError, match=r"^torch\.export and is_grads_batched cannot"):
            torch.export.export(model, (y,))
    compiled = torch.compile(model, backend="eager", fullgraph=fullgraph)
    for _ in range(2):
        y = torch.randn_like(y)
        torch.testing.assert_close(compiled(y), model(y))
        if model.weight is not None:
            model.weight.data = 3 * torch.randn_like(model.weight)
            with torch.no_grad():
                program.weight.copy_(model.weight)
            torch.testing.assert_close(program(y), model(y))


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
def test_every_operator_brings_its_own_bound(case: AnyCase) -> None:
    _check(_Products(case.operator(torch.float32)), case.name not in BREAKING, case.name not in NOT_EXPORTED)


@pytest.mark.parametrize("groups", [1, 2])
def test_parts_in_which_a_channel_occurs_twice(groups: int) -> None:
    model = _Products(Conv2d(torch.randn(4, 4 // groups, 3, 3), (5, 5), groups=groups), [2, 0, 2, 2])
    torch._dynamo.reset()
    y = torch.randn(2, 4, 5, 5)
    found, expected = torch.compile(model, backend="aot_eager", fullgraph=True)(y), model(y)
    torch.testing.assert_close(found[:2], expected[:2])
    # A graph has the bound of all channels, times the largest number of copies.
    truth = norm_sq(dense_matrix(Dense(dense_matrix(model.present().core)))) if groups > 1 else expected[2]
    assert truth <= found[2] <= 9 * expected[2]
    assert (found[3] >= 0.7 * expected[3]).all()


def test_operators_of_the_modules_own_tensors() -> None:
    """A compiled graph breaks and follows them; an exported program would hold the bound of the first of them."""

    class Solve(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.matrix = nn.Parameter(torch.randn(4, 5))

        def forward(self, y: Tensor) -> Tensor:
            made = operator(lambda y: y @ self.matrix.mT, lambda x: x @ self.matrix, (5,), (4,))
            return made.apply(y) / made.norm_sq()

    torch._dynamo.reset()
    model, y = Solve(), torch.randn(3, 5)
    compiled = torch.compile(model, backend="aot_eager")
    for scale in (1.0, 3.0):
        model.matrix.data.mul_(scale)
        torch.testing.assert_close(compiled(y), model(y))
    with pytest.raises(CapabilityError, match="give the operator norm_sq"):
        torch.export.export(model, (y,))


class _Tripled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 3 * weight


def _in_place(layer: SolverLayer, weight: Tensor) -> None:
    with torch.no_grad():
        layer.weight.copy_(weight)


def _data(layer: SolverLayer, weight: Tensor) -> None:
    layer.weight.data = weight.clone()


def _parameter(layer: SolverLayer, weight: Tensor) -> None:
    layer.weight = nn.Parameter(weight.clone())


def _assign(layer: SolverLayer, weight: Tensor) -> None:
    layer.load_state_dict({**layer.state_dict(), "weight": weight.clone()}, assign=True)


def _parametrize(layer: SolverLayer, weight: Tensor) -> None:
    nn.utils.parametrize.register_parametrization(layer, "weight", _Tripled())
    with torch.no_grad():
        layer.parametrizations.weight.original.copy_(weight)


CHANGES = {_in_place: 3.0, _data: 30.0, _parameter: 0.1, _assign: 5.0, _parametrize: 1.0}


def _passes(call: Callable[[Tensor], Tensor], y: Tensor) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    y = y.clone().requires_grad_()
    out = call(y)
    return out, torch.autograd.grad(out.square().sum(), y)[0]


def _follows(layer: SolverLayer, y: Tensor, backend: str = "eager") -> None:
    """The compiled layer equals a twin that runs eagerly, from one change to the next."""
    torch._dynamo.reset()
    twin, compiled = copy.deepcopy(layer), torch.compile(layer, backend=backend, fullgraph=True)
    for training in (layer.training, not layer.training):
        layer.train(training), twin.train(training)
        torch.testing.assert_close(_passes(compiled, y), _passes(twin, y), rtol=1e-3, atol=1e-5)
    for change, scale in CHANGES.items():
        weight = scale * torch.randn_like(layer.weight)
        change(layer, weight)
        change(twin, weight)
        torch.testing.assert_close(_passes(compiled, y), _passes(twin, y), rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(layer.tracker.bounds(), twin.tracker.bounds(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("solver", [case.of(2) for case in solvers.ALL], ids=str)
def test_compiled_layers_follow_their_weight(solver: Solver) -> None:
    _follows(SolverLinear(8, 6, solver=solver).train(solver.stochastic), torch.randn(4, 8))


def test_compiled_convolutions_follow_their_weight() -> None:
    _follows(SolverConv1d(3, 4, 3, solver=ProxSG(iters=2)), torch.randn(2, 3, 6))
    _follows(SolverConv2d(3, 4, 3, padding=1, solver=ProxGD(iters=2)), torch.randn(2, 3, 6, 6), "aot_eager")


def test_compiled_bounds_follow_the_weight() -> None:
    torch._dynamo.reset()
    layer = SolverLinear(8, 6, solver=ProxSG(iters=2)).eval()
    compiled = torch.compile(lambda: layer.tracker.bounds(), backend="aot_eager")
    for change, scale in CHANGES.items():
        change(layer, scale * torch.randn_like(layer.weight))
        fresh = LipschitzTracker(layer.operator(), inputs=True, outputs=True).eval()
        torch.testing.assert_close(compiled(), fresh.bounds(), rtol=1e-5, atol=0)


def test_compiled_layers_follow_their_type() -> None:
    torch._dynamo.reset()
    layer, y = SolverLinear(8, 6, solver=FISTA(iters=3)).eval(), torch.randn(4, 8)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    for dtype in (torch.float32, torch.float64, torch.float32):
        layer.to(dtype)
        torch.testing.assert_close(compiled(y.to(dtype)), copy.deepcopy(layer)(y.to(dtype)))
    layer.weight.data, layer.bias.data = 3 * layer.weight.data.double(), layer.bias.data.double()
    torch.testing.assert_close(compiled(y.double()), layer(y.double()))


def _dense() -> tuple[nn.Module, Tensor]:
    return SolverLinear(8, 6, solver=ProxGD(iters=3)), torch.randn(4, 8)


def _sampled() -> tuple[nn.Module, Tensor]:
    return SolverLinear(8, 6, solver=ProxSG(iters=3), eval_mode="deterministic"), torch.randn(4, 8)


def _conv() -> tuple[nn.Module, Tensor]:
    return SolverConv2d(2, 3, 3, solver=FISTA(iters=2)), torch.randn(2, 2, 6, 6)


def _parametrized() -> tuple[nn.Module, Tensor]:
    layer = SolverLinear(8, 6, solver=ProxGD(iters=3))
    nn.utils.parametrize.register_parametrization(layer, "weight", _Tripled())
    return layer, torch.randn(4, 8)


def _normalized() -> tuple[nn.Module, Tensor]:
    """The weight is that of the convolution times the scale of the batch normalisation."""
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU())
    with torch.no_grad():
        model[1].running_var.uniform_(0.1, 4)
        model[1].weight.uniform_(0.5, 2)
    return convert(model, {"0": ProxGD(iters=3)}), torch.randn(2, 2, 6, 6)


EXPORTED = [_dense, _sampled, _conv, _parametrized, _normalized]


@pytest.mark.parametrize("strict", [False, True], ids=["plain", "strict"])
@pytest.mark.parametrize("make", EXPORTED, ids=lambda make: make.__name__[1:])
def test_an_exported_program_holds_the_bound_of_the_weight_at_export(
    make: Callable[[], tuple[nn.Module, Tensor]], strict: bool
) -> None:
    """Of a layer that never ran, and of one whose weight has changed since."""
    model, y = make()
    model.eval()
    for _ in range(2):
        program = torch.export.export(model, (y,), strict=strict).module()
        torch.testing.assert_close(program(y), copy.deepcopy(model)(y), rtol=1e-4, atol=1e-5)
        model(y)
        with torch.no_grad():
            next(model.parameters()).mul_(3)


class _Bound(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.tracker = LipschitzTracker(Dense(weight.to("meta")))

    def forward(self, y: Tensor) -> Tensor:
        return y + self.tracker.bounds(self.weight).total


@pytest.mark.parametrize("strict", [False, True], ids=["plain", "strict"])
def test_the_weight_of_an_exported_program_may_change(strict: bool) -> None:
    """Its bound gets loose, but never too small."""
    model = _Bound(torch.randn(6, 5)).eval()
    program = torch.export.export(model, (torch.zeros(()),), strict=strict).module()
    for scale in (1.0, -1.0, 7.0, 0.01):
        with torch.no_grad():
            program.weight.copy_(scale * model.weight)
        truth = norm_sq(program.weight.detach().double())
        assert program(torch.zeros(())).double() >= truth
        if scale == 1:
            torch.testing.assert_close(program(torch.zeros(())), model(torch.zeros(())), rtol=1e-5, atol=0)


def test_an_export_that_cannot_read_the_weight_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the layer ran before; a looser bound is then still one."""
    monkeypatch.setattr(tracking, "traced_values", lambda *tensors: None)
    model, y = _Bound(torch.randn(6, 5)).eval(), torch.zeros(())
    with pytest.raises(CapabilityError, match="run the layer once"):
        torch.export.export(model, (y,))
    expected = model(y)
    torch.testing.assert_close(torch.export.export(model, (y,)).module()(y), expected, rtol=1e-5, atol=0)


def test_user_cases_are_listed_above() -> None:
    """The graphs of users' operators break where they have no bound, and only there."""
    assert set(BREAKING) <= {case.name for case in ALL if isinstance(case, UserCase)}

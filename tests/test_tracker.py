"""The tracked bound is never below the truth, whatever happens to the weight, and seldom far above it."""

import copy
import io
import math
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F

from minimand.errors import CapabilityError, NonFiniteError, OptionError
from minimand.nn import SolverConv1d, SolverConv2d, SolverLayer, SolverLinear, convert
from minimand.norms import convolution, kernel, spectral
from minimand.norms.kernel import Bounds, Kernel
from minimand.norms.tracker import _formula
from minimand.operators import Conv2d, Dense, LinearOperator, LipschitzTracker
from minimand.solvers import ProxGD, ProxSG
from tests.cases.operators import OPERATORS, OperatorCase, dense_matrix, norm_sq

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same'")
every_operator = pytest.mark.parametrize("case", OPERATORS, ids=lambda case: case.name)


def _assert_bounded(operator: LinearOperator, tracker: LipschitzTracker, weight: Tensor) -> float:
    """The bounds hold for the weight, and for every input and output; the ratio to the truth."""
    bounds = tracker.bounds(weight)
    current = operator.with_weight(weight.detach())
    matrix = dense_matrix(current).reshape(*current.output_shape, *current.input_shape)
    rows, flat_out, flat_in = (
        len(current.output_shape),
        math.prod(current.output_shape),
        math.prod(current.input_shape),
    )
    truth = norm_sq(matrix.reshape(flat_out, flat_in))
    assert bounds.total.double() >= truth
    assert not bounds.total.requires_grad
    for i, bound in enumerate(() if bounds.inputs is None else bounds.inputs):
        assert bound.double() >= norm_sq(matrix.select(rows, i).reshape(flat_out, -1))
    for j, bound in enumerate(() if bounds.outputs is None else bounds.outputs):
        assert bound.double() >= norm_sq(matrix.select(0, j).reshape(-1, flat_in))
    return float(bounds.total.double() / truth.clamp_min(1e-300))


def _drifted(tracker: LipschitzTracker, weight: Tensor) -> Bounds:
    """The bounds by the drift from the present reference, without a renewal."""
    return _formula(Kernel(weight, tracker._geometry), tracker.reference, tracker.parts)


def _rank_one(weight: Tensor) -> None:
    weight.data.add_(0.05 * torch.ones_like(weight))


def _one_entry(weight: Tensor) -> None:
    weight.data.view(-1)[0] += 0.3


def _tiny(weight: Tensor) -> None:
    weight.data.mul_(1 + 1e-7)


def _along(weight: Tensor) -> None:
    """In the direction in which a norm grows by as much as the weight moves, within the tolerance."""
    left, values, right = torch.linalg.svd(weight.data.flatten(1), full_matrices=False)
    weight.data.add_(0.08 * values[0] * torch.outer(left[:, 0], right[0]).reshape(weight.shape))


EDITS: dict[str, Callable[[Tensor], object]] = {
    "rank one": _rank_one,
    "along": _along,
    "one entry": _one_entry,
    "rounding": _tiny,
    "grow": lambda w: w.data.mul_(1.05),
    "explode": lambda w: w.data.mul_(50.0),
    "shrink": lambda w: w.data.mul_(0.02),
    "flip": lambda w: w.data.neg_(),
    "noise": lambda w: w.data.add_(0.02 * torch.randn_like(w)),
    "zero": lambda w: w.data.zero_(),
    "replace": lambda w: w.data.copy_(torch.randn_like(w)),
}


@every_operator
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_never_below_the_truth_after_any_edit(case: OperatorCase, dtype: torch.dtype) -> None:
    operator = case.operator(dtype)
    # Without bounds of parts the drift is computed in another way.
    tracker, whole = LipschitzTracker(operator, inputs=True, outputs=True), LipschitzTracker(operator)
    for name in [*EDITS, *reversed(EDITS), "rank one", "rank one", "noise", "noise"]:
        EDITS[name](operator.weight)
        _assert_bounded(operator, tracker, operator.weight)
        _assert_bounded(operator, whole, operator.weight)
        assert tracker.bound() == tracker.bounds().total


@every_operator
def test_the_drift_alone_is_a_bound(case: OperatorCase) -> None:
    """From a zero anchor that is never refreshed: √r‖W‖_F ≥ ‖A‖, also for the kernel that attains it best."""
    operator = case.operator()
    tracker = LipschitzTracker(operator, inputs=True, outputs=True)
    flat = _drifted(tracker, operator.weight)
    ones = torch.ones_like(operator.weight)
    flat_ones = _drifted(tracker, ones)
    assert flat.total >= norm_sq(dense_matrix(operator))
    assert flat_ones.total >= norm_sq(dense_matrix(operator.with_weight(ones)))
    assert flat.inputs is not None
    assert (flat.inputs >= operator.input_norms_sq() / 1.3).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-25, 1e-18, 1e-8, 1e8, 1e18])
@pytest.mark.parametrize("shape", [(40, 40), (40, 56), (24, 12), (4, 3, 3, 3)], ids=str)
def test_scales_at_which_squares_vanish_or_overflow(shape: tuple[int, ...], scale: float, dtype: torch.dtype) -> None:
    """Small moves of tiny and of huge weights, along the top direction, where a lost drift would show."""
    weight = (torch.randn(shape, dtype=torch.float64) * scale).to(dtype)
    operator: LinearOperator = Dense(weight) if len(shape) == 2 else Conv2d(weight, (5, 5))
    tracker = LipschitzTracker(operator, inputs=True, outputs=True)
    plain = LipschitzTracker(operator)
    for _ in range(12):
        ratio = _assert_bounded(operator, tracker, weight)
        _assert_bounded(operator, plain, weight)
        assert tracker.bounds(weight).total.double() <= plain.bounds(weight).total.double() * 1.001 + 1e-37
        if torch.finfo(dtype).tiny < scale**2 < 1e30:
            assert ratio < 1.5
        weight.mul_(1.02)
    if dtype != torch.bfloat16:
        assert tracker.refreshes < 12


@pytest.mark.parametrize("kind", ["near tie", "repeated", "rank one", "swap"])
def test_a_renewal_in_training_forgets_no_direction(kind: str) -> None:
    """The top singular vector changes altogether between two renewals."""
    n = 40
    u, v = (torch.linalg.qr(torch.randn(n, n, dtype=torch.float64)).Q for _ in range(2))
    values = torch.linspace(0.2, 0.5, n, dtype=torch.float64)
    weight = torch.zeros(n, n)
    tracker = LipschitzTracker(Dense(weight))
    ratios = []
    for k in range(n):
        now = values.clone()
        if kind == "near tie":
            now[k], now[k - 1] = 1 + 1e-7, 1.0
        elif kind == "repeated":
            now[: k + 1] = 1.0
        elif kind == "swap":
            now[k] = 1.0
        weight.copy_(torch.outer(u[k], v[k]) if kind == "rank one" else u @ torch.diag(now) @ v.T)
        ratios.append(_assert_bounded(Dense(weight), tracker, weight))
    assert max(ratios) < 1.5


def test_in_evaluation_the_bound_depends_on_the_weight_alone() -> None:
    weight = torch.randn(40, 40)
    path = [torch.randn(40, 40), 3 * weight, weight + 0.1, weight]
    tracker = LipschitzTracker(Dense(weight))
    for point in path[:-1]:
        tracker.bounds(point)
    fresh = LipschitzTracker(Dense(weight)).eval()
    assert tracker.eval().bounds(weight).total == fresh.bounds(weight).total
    count = tracker.refreshes
    tracker.bounds(weight)
    assert tracker.refreshes == count


@pytest.mark.parametrize("kind", ["dense", "conv", "strided"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_training_run(kind: str, momentum: float) -> None:
    x, labels = torch.randn(256, 1, 6, 6), torch.randint(0, 4, (256,))
    x += labels[:, None, None, None] / 2
    if kind == "dense":
        body = nn.Sequential(nn.Flatten(), nn.Linear(36, 48), nn.ReLU(), nn.Linear(48, 48))
        operator: LinearOperator = Dense(body[3].weight)
        features = 48
    else:
        stride = 2 if kind == "strided" else 1
        body = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Identity(), nn.Conv2d(8, 8, 3, stride, 1))
        operator = Conv2d(body[3].weight, (6, 6), stride=stride, padding=1)
        features = 8 * (6 // stride) ** 2
    net = nn.Sequential(body, nn.ReLU(), nn.Flatten(), nn.Linear(features, 4))
    tracker = LipschitzTracker(operator)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=momentum)
    ratios = []
    for step in range(60):
        ratios.append(_assert_bounded(operator, tracker, operator.weight))
        batch = slice(64 * (step % 4), 64 * (step % 4) + 64)
        optimizer.zero_grad()
        F.cross_entropy(net(x[batch]), labels[batch]).backward()
        optimizer.step()
    assert max(ratios) < 1.5
    assert tracker.refreshes < 60


def test_load_state_dict_and_another_shape() -> None:
    layer, other = nn.Linear(6, 5), nn.Linear(6, 5)
    tracker = LipschitzTracker(Dense(layer.weight))
    tracker.bound()
    other.weight.data.mul_(7)
    layer.load_state_dict(other.state_dict())
    _assert_bounded(Dense(layer.weight), tracker, layer.weight)
    _assert_bounded(Dense(layer.weight), tracker, torch.randn(9, 4))
    _assert_bounded(Dense(layer.weight), tracker, torch.randn(9, 4, dtype=torch.float64))


@pytest.mark.parametrize("types", [[torch.float64, torch.float32], [torch.bfloat16], [torch.float16, torch.float32]])
def test_casting_keeps_the_bound_without_a_refresh(types: list[torch.dtype]) -> None:
    weight = torch.randn(6, 5, dtype=torch.float64)
    tracker = LipschitzTracker(Dense(weight), inputs=True, outputs=True).refresh()
    for dtype in types:
        weight = weight.to(dtype)
        tracker.to(dtype)
    count = tracker.refreshes
    bounds = _drifted(tracker, weight)
    assert bounds.total.double() >= norm_sq(weight.double())
    assert tracker.refreshes == count
    _assert_bounded(Dense(weight), tracker, weight)


def test_state_is_copied_but_never_saved() -> None:
    weight = torch.randn(4, 4)
    tracker = LipschitzTracker(Dense(weight.to("meta"))).refresh(weight)
    assert not tracker.state_dict()
    for twin in (copy.deepcopy(tracker), pickle.loads(pickle.dumps(tracker))):
        assert twin.bounds(weight).total == tracker.bounds(weight).total
        twin.bounds(weight * 10)
    assert tracker.bounds(weight).total < 1.01 * norm_sq(weight.double())


def test_manual_refresh_is_the_papers_rule_with_its_risk() -> None:
    weight = torch.eye(3)
    tracker = LipschitzTracker(Dense(weight), refresh="manual")
    first = tracker.bound()
    weight.mul_(2)
    assert tracker.bound() == first  # below the truth: that is the risk
    assert tracker.refresh().bound() >= 4


class _Layer(nn.Module):
    """What a solver layer does with its tracker."""

    def __init__(self, weight: Tensor, operator: LinearOperator) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.operator = operator
        self.tracker = LipschitzTracker(operator, inputs=True, outputs=True)

    def forward(self, y: Tensor) -> tuple[Tensor, Tensor]:
        bound = self.tracker.bounds(self.weight).total
        return self.operator.with_weight(self.weight).apply(y) / bound, bound


def _layers() -> list[tuple[_Layer, Tensor]]:
    dense, conv = torch.randn(6, 5), torch.randn(4, 2, 3, 3)
    return [
        (_Layer(dense, Dense(dense.to("meta"))), torch.randn(3, 5)),
        (_Layer(conv, Conv2d(conv.to("meta"), (6, 6), 2, 1, groups=1)), torch.randn(3, 2, 6, 6)),
    ]


def test_compiled_training_refreshes_without_a_graph_break() -> None:
    for layer, y in _layers():
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.3)
        for _ in range(4):
            out, bound = compiled(y)
            truth = norm_sq(dense_matrix(layer.operator.with_weight(layer.weight.detach())))
            assert truth <= bound.double() <= 1.7 * truth
            optimizer.zero_grad()
            (out - 1).square().sum().backward()
            optimizer.step()
            layer.weight.data.mul_(1.5)


def test_exported_the_formula_remains() -> None:
    for layer, y in _layers():
        layer(y)
        exported = torch.export.export(layer, (y,)).module()
        torch.testing.assert_close(exported(y), layer(y))


def test_vmap_over_an_ensemble() -> None:
    layers = [_layers()[0][0] for _ in range(3)]
    y = _layers()[0][1]
    expected = torch.stack([layer(y)[0] for layer in layers])
    params, buffers = torch.func.stack_module_state(layers)

    def call(p: dict[str, Tensor], b: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(layers[0], (p, b), (y,))[0]

    torch.testing.assert_close(torch.func.vmap(call)(params, buffers), expected, rtol=1e-3, atol=1e-4)


def test_autocast_leaves_the_bound_alone() -> None:
    weight = torch.randn(8, 8)
    tracker = LipschitzTracker(Dense(weight))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _assert_bounded(Dense(weight), tracker, weight)
        assert tracker.bound().dtype == torch.float32


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_diverged_weight_is_named(value: float) -> None:
    weight = torch.eye(3)
    tracker = LipschitzTracker(Dense(weight))
    tracker.bound()
    weight[0, 0] = value
    with pytest.raises(NonFiniteError, match="weight"):
        tracker.bound()


def test_bad_trackers_are_refused() -> None:
    with pytest.raises(OptionError, match="drift"):
        LipschitzTracker(Dense(torch.eye(2)), refresh="epoch")
    part = Conv2d(torch.randn(4, 1, 3, 3), (5, 5), groups=4).restrict(torch.tensor([0]))
    with pytest.raises(CapabilityError, match="GroupedPart"):
        LipschitzTracker(part)


class _Scaled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 50 * weight


def _assign(layer: SolverLayer, large: Tensor) -> None:
    layer.load_state_dict({**layer.state_dict(), "weight": large}, assign=True)


def _in_place(layer: SolverLayer, large: Tensor) -> None:
    with torch.no_grad():
        layer.weight.copy_(large)


def _as_vector(layer: SolverLayer, large: Tensor) -> None:
    nn.utils.vector_to_parameters(torch.cat([large.flatten(), layer.bias.detach()]), layer.parameters())


def _step(layer: SolverLayer, large: Tensor) -> None:
    layer.weight.grad = layer.weight.detach() - large
    torch.optim.SGD([layer.weight], lr=1.0).step()


def _emptied(layer: SolverLayer, large: Tensor) -> None:
    bias = layer.bias.detach()
    layer.to_empty(device="cpu").load_state_dict({"weight": large, "bias": bias})


def _from_meta(layer: SolverLayer, large: Tensor) -> None:
    bias = layer.bias.detach()
    layer.to("meta").load_state_dict({"weight": large, "bias": bias}, assign=True)


def _parametrized(layer: SolverLayer, large: Tensor) -> None:
    nn.utils.parametrize.register_parametrization(layer, "weight", _Scaled())


def _normalized(layer: SolverLayer, large: Tensor) -> None:
    nn.utils.parametrizations.weight_norm(layer)
    layer.parametrizations.weight.original0.data.mul_(50)


CHANGES: dict[str, Callable[[SolverLayer, Tensor], object]] = {
    "in place": _in_place,
    "data": lambda layer, large: setattr(layer.weight, "data", large),
    "in place on data": lambda layer, large: layer.weight.data.copy_(large),
    "new Parameter": lambda layer, large: setattr(layer, "weight", nn.Parameter(large)),
    "load": lambda layer, large: layer.load_state_dict({**layer.state_dict(), "weight": large}),
    "assign": _assign,
    "optimizer": _step,
    "vector": _as_vector,
    "swap": lambda layer, large: torch.utils.swap_tensors(layer.weight, nn.Parameter(large)),
    "to_empty": _emptied,
    "meta": _from_meta,
    "parametrisation": _parametrized,
    "weight norm": _normalized,
    "double": lambda layer, large: (_in_place(layer, large), layer.double()),
    "half": lambda layer, large: (_in_place(layer, large), layer.half()),
    "half and back": lambda layer, large: (_in_place(layer, large), layer.half().float()),
    "bfloat16 data": lambda layer, large: setattr(layer.weight, "data", large.bfloat16()),
}
KINDS: dict[str, Callable[[], SolverLayer]] = {
    "dense": lambda: SolverLinear(6, 4),
    "dense, sampled": lambda: SolverLinear(6, 4, solver=ProxSG(iters=2)),
    "conv1d": lambda: SolverConv1d(2, 3, 3),
    "conv2d": lambda: SolverConv2d(2, 3, 3),
}


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("how", list(CHANGES))
def test_a_layers_tracker_bounds_the_weight_it_has_now(how: str, training: bool, kind: str) -> None:
    """Also where the caller has kept the tracker from before the change."""
    layer = KINDS[kind]().train(training)
    kept = layer.tracker
    kept.bound()
    CHANGES[how](layer, 20 * torch.randn_like(layer.weight))
    size = (6,) * (layer.weight.dim() - 2)
    operator = layer.operator(torch.empty(1, 2, *size)) if size else layer.operator()
    truth = norm_sq(dense_matrix(operator))
    for tracker in (lambda: kept, lambda: layer.tracker):
        bounds = tracker().bounds()
        # The bound of a convolution holds for every size, and this map is small. Half precision rounds up.
        assert truth <= bounds.total.double() <= truth * (1.1 if not size else 4)
        if bounds.inputs is not None:
            columns = operator.weight.detach().double().square().sum(0)
            assert (bounds.inputs.double() >= columns).all()


@pytest.mark.parametrize("kind", list(KINDS))
def test_functional_calls_with_other_weights(kind: str) -> None:
    """By themselves, and under the transforms of torch.func, where a bound is a custom operator."""

    class Bound(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = KINDS[kind]().eval()

        def forward(self) -> Tensor:
            return self.layer.tracker.bound()

    model = Bound()
    model()
    weights = torch.stack([scale * torch.randn_like(model.layer.weight) for scale in (30.0, 0.1, 3.0)])

    def bound(weight: Tensor) -> Tensor:
        return torch.func.functional_call(model, {"layer.weight": weight}, ())

    def fresh(weight: Tensor) -> Tensor:
        layer = copy.deepcopy(model.layer)
        layer.weight = nn.Parameter(weight)
        return layer.tracker.bound()

    expected = torch.stack([fresh(weight) for weight in weights])
    torch.testing.assert_close(torch.stack([bound(weight) for weight in weights]), expected)
    torch.testing.assert_close(torch.stack([torch.func.vjp(bound, weight)[0] for weight in weights]), expected)
    torch.testing.assert_close(torch.func.vmap(bound)(weights), expected)
    torch.testing.assert_close(torch.func.vmap(lambda w: torch.func.vjp(bound, w)[0])(weights), expected)
    assert model() == fresh(model.layer.weight.detach())


def test_a_layer_that_never_ran_under_torch_func() -> None:
    """Its value is the one of an ordinary call, and so is its gradient."""
    y = torch.randn(3, 6)
    layer = SolverLinear(6, 4)
    twin, parameters = copy.deepcopy(layer), dict(layer.named_parameters())
    value, pull = torch.func.vjp(lambda p: torch.func.functional_call(layer, p, (y,)), parameters)
    expected = twin(y)
    torch.testing.assert_close(value, expected)
    gradient = torch.autograd.grad(expected.sum(), twin.weight)[0]
    torch.testing.assert_close(pull(torch.ones_like(value))[0]["weight"], gradient)


def test_a_function_follows_what_an_operator_cannot() -> None:
    layer = nn.Linear(5, 4)
    tracker = LipschitzTracker(lambda: Dense(layer.weight))
    tracker.bound()
    layer.weight = nn.Parameter(50 * torch.randn(4, 5))
    assert tracker.bound() >= norm_sq(layer.weight.detach().double())


def test_a_weight_of_another_shape_with_as_many_entries() -> None:
    """The entries are equal, but not the norm."""
    tall = torch.randn(9, 4)
    wide = tall.reshape(4, 9)
    first, second = sorted((tall, wide), key=lambda weight: float(norm_sq(weight.double())))
    tracker = LipschitzTracker(Dense(first))
    tracker.bound()
    _assert_bounded(Dense(second), tracker, second)


def test_copies_follow_their_own_layer() -> None:
    layer = SolverLinear(5, 4)
    held = layer.tracker
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), _saved(layer)):
        twin.weight = nn.Parameter(50 * torch.randn(4, 5))
        assert twin._tracker.bound() >= norm_sq(twin.weight.detach().double())
        assert held.bound() <= 1.01 * norm_sq(layer.weight.detach().double())
    for tracker in (copy.deepcopy(held), pickle.loads(pickle.dumps(held)), _saved(held)):
        assert tracker.bound() == held.bound()


def _saved(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_a_bound_in_inference_mode_serves_training() -> None:
    torch._dynamo.reset()
    layer, y = SolverLinear(5, 4), torch.randn(3, 5)
    with torch.inference_mode():
        layer(y)
    assert not layer._tracker.reference.is_inference()
    layer.weight.data.mul_(3)
    torch.compile(layer, backend="aot_eager", fullgraph=True)(y).sum().backward()


@pytest.mark.parametrize("refresh", ["drift", "manual"])
def test_a_tracker_that_never_ran_in_a_compiled_graph(refresh: str) -> None:
    torch._dynamo.reset()
    weight = torch.randn(5, 4)
    tracker = LipschitzTracker(Dense(weight), refresh=refresh)
    found = torch.compile(lambda w: tracker.bounds(w).total, backend="aot_eager", fullgraph=True)(weight)
    assert norm_sq(weight.double()) <= found.double() <= 1.01 * norm_sq(weight.double())


def test_layers_without_values_have_shapes() -> None:
    for layer, shape in ((SolverLinear(5, 4), (2, 5)), (SolverConv2d(2, 3, 3), (2, 2, 6, 6))):
        expected = layer(torch.randn(shape)).shape
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert layer(torch.randn(shape)).shape == expected
        assert layer.to("meta")(torch.empty(shape, device="meta")).shape == expected


@pytest.mark.parametrize("wrong", [torch.ones(3, 3), nn.Linear(3, 3), None])
def test_what_is_no_operator_is_refused_in_a_sentence(wrong: object) -> None:
    with pytest.raises(CapabilityError, match=r"takes a Dense or a convolution"):
        LipschitzTracker(wrong)


@pytest.mark.parametrize("options", [{"padding": 1}, {"stride": 2}, {"groups": 2}, {"dilation": 2}], ids=str)
@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_a_quick_bound_is_never_below_the_truth(monkeypatch, options, scale):
    monkeypatch.setattr(convolution, "QUICK", 0)
    weight = scale * torch.randn(6, 4 // options.get("groups", 1), 3, 3)
    operator = Conv2d(weight, (7, 7), **options)
    tracker = LipschitzTracker(Conv2d(weight, None, **options), inputs=True, outputs=True).train()
    assert _assert_bounded(operator, tracker, weight) <= 9


def test_a_quick_bound_is_replaced_once_the_weight_moves_and_never_used_in_evaluation(monkeypatch):
    monkeypatch.setattr(convolution, "QUICK", 0)
    A = Conv2d(torch.randn(6, 4, 3, 3), None, padding=1)
    tracker, exact = LipschitzTracker(A).train(), LipschitzTracker(A).eval().bound()
    quick = tracker.bound()
    assert quick > 1.2 * exact
    assert tracker.bound() == quick
    assert tracker.eval().bound() == exact
    assert tracker.train().bound() == exact
    tracker = LipschitzTracker(A).train()
    assert tracker.bound() == quick
    A.weight.mul_(1.01)
    assert exact <= tracker.bound() < 1.1 * exact
    assert tracker.refreshes == 2


@pytest.mark.parametrize("options", [{"padding": 1}, {"stride": 2}, {"padding": 1, "padding_mode": "reflect"}], ids=str)
def test_a_tracker_that_stays_quick_is_bounded_and_depends_on_the_weight_alone_in_evaluation(monkeypatch, options):
    monkeypatch.setattr(convolution, "QUICK", 0)
    weight = torch.randn(6, 4, 3, 3)
    tracker = LipschitzTracker(Conv2d(weight, None, **options), refresh="quick", inputs=True, outputs=True)
    fresh = LipschitzTracker(Conv2d(weight, None, **options), refresh="quick", inputs=True, outputs=True).eval()
    for mode in (True, False, True):
        tracker.train(mode)
        for factor in (1.0, 1.01, 3.0, 0.2):
            weight.mul_(factor)
            _assert_bounded(Conv2d(weight, (7, 7), **options), tracker, weight)
    assert tracker.eval().bound() == fresh.bound()


@pytest.mark.parametrize("shape", [(40, 60), (60, 40), (50, 50)], ids=str)
@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
@pytest.mark.parametrize("rank", [1, 50])
def test_a_quick_bound_of_a_dense_weight_is_between_the_truth_and_the_number_of_strips(monkeypatch, shape, scale, rank):
    monkeypatch.setattr(kernel, "QUICK", 0)
    monkeypatch.setattr(spectral, "STRIP", 4)
    monkeypatch.setattr(spectral, "COLUMNS", 16)
    weight = scale * torch.randn(shape[0], rank) @ torch.randn(rank, shape[1])
    tracker = LipschitzTracker(Dense(weight), refresh="quick", inputs=True, outputs=True)
    for mode in (True, False, True):
        tracker.train(mode)
        for factor in (1.0, 1.01, 3.0):
            weight.mul_(factor)
            _assert_bounded(Dense(weight), tracker, weight)
    exact = norm_sq(weight.double())
    assert tracker.eval().bound().double() <= 1.1 * spectral.STRIPS * exact
    assert LipschitzTracker(Dense(weight)).train().bound().double() <= 1.01 * exact


def test_the_norm_of_a_large_dense_weight_takes_a_part_of_its_gram_matrix(monkeypatch):
    def products(policy: str) -> int:
        count, plain = [0], spectral.gram_matrix
        with monkeypatch.context() as patch:
            patch.setattr(spectral, "gram_matrix", lambda m: count.append(len(m) * m.numel()) or plain(m))
            LipschitzTracker(Dense(weight), refresh=policy).eval().bound()
        return sum(count)

    weight = torch.randn(1024, 1024)
    assert (products("drift"), products("quick")) == (1024**3, 1024**3 // 4)


def test_layers_with_a_plain_start_have_quick_bounds_and_equal_outputs_for_equal_weights(monkeypatch):
    monkeypatch.setattr(convolution, "QUICK", 0)
    net = convert(nn.Sequential(nn.Conv2d(3, 5, 3, padding=1), nn.ReLU()), ProxGD(4))
    other, x = copy.deepcopy(net), torch.randn(2, 3, 6, 6)
    net.train()
    for _ in range(3):
        with torch.no_grad():
            net[0].weight.add_(0.001)
        net(x)
    other.load_state_dict(net.state_dict())
    assert torch.equal(net.eval()(x), other.eval()(x))
    assert net[0].tracker.policy == "quick"
    assert SolverConv2d(3, 5, 3).tracker.policy == "drift"

"""Constrained networks keep the parameters of convergent solvers. The diagnosis claims what is proved or measured."""

import copy
import itertools
from collections.abc import Callable

import matplotlib.pyplot as plt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from minimand import lipschitz
from minimand.nn import (
    ADMMNet,
    Architecture,
    FISTANet,
    ISTANet,
    UnrolledNet,
    diagnose,
)
from minimand.nn.unrolled import Transform
from minimand.nn.unrolled.parameters import Interval, MonotoneSlope, Positive, Softplus, assign, constrain
from minimand.nn.unrolled.probing import probe
from minimand.operators import orthonormal_gaussian

SMALL = Architecture(channels=3)
NETS: dict[str, Callable[..., UnrolledNet]] = {
    "ista": ISTANet,
    "fista": FISTANet,
    "fista learned": lambda *a, **k: FISTANet(*a, momentum="learned", **k),
    "admm": ADMMNet,
}
every_net = pytest.mark.parametrize("build", NETS.values(), ids=NETS)


def _phi(scale: float = 1.0) -> Tensor:
    return scale * orthonormal_gaussian(5, 16, generator=torch.Generator().manual_seed(0))


def _measured(phi: Tensor, rows: int = 3) -> Tensor:
    return torch.rand(rows, 16) @ phi.mT


def _numbers(net: UnrolledNet) -> list[nn.Parameter]:
    return [p for name, p in net.named_parameters() if not name.startswith("transforms.")]


@every_net
@given(seed=st.integers(0, 1000), spread=st.sampled_from([1.0, 10.0, 100.0]))
def test_constrained_numbers_are_those_of_a_convergent_solver(
    build: Callable[..., UnrolledNet], seed: int, spread: float
) -> None:
    """For all values of the parameters."""
    net = build(_phi(), 4, architecture=SMALL, constrained=True)
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in _numbers(net):
            p.copy_(spread * torch.randn(p.shape, generator=g))
        settings = net.settings()
    assert [net.faults(setting) for setting in settings] == [[]] * 4
    if isinstance(net, FISTANet):
        steps = torch.stack([s.step for s in settings])
        thresholds = torch.stack([s.threshold for s in settings])
        assert (steps.diff() <= 0).all()
        assert (thresholds.diff() <= 0).all()
        if net.momentum == "learned":
            momenta = torch.stack([s.momentum for s in settings if s.momentum is not None])
            assert (momenta.diff() >= 0).all()


@every_net
def test_free_and_constrained_networks_start_from_the_same_numbers(build: Callable[..., UnrolledNet]) -> None:
    free, bound = (build(_phi(), 3, architecture=SMALL, constrained=c) for c in (False, True))
    for one, two in zip(free.settings(), bound.settings(), strict=True):
        torch.testing.assert_close(one.threshold, two.threshold, rtol=1e-4, atol=1e-6)
        if not isinstance(free, FISTANet):
            torch.testing.assert_close(one.step, two.step, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("parametrisation", "values"),
    [
        (Interval(0.0, 2.0), [0.001, 0.5, 1.999]),
        (Interval(-1.0, 3.0), [-0.9, 0.0, 2.5]),
        (Positive(), [1e-4, 0.01, 5.0]),
        (Positive(0.01), [1e-4, 0.01, 5.0]),
        (MonotoneSlope(-1.0), [-3.0, -0.01]),
    ],
)
def test_parametrisations_invert(parametrisation: nn.Module, values: list[float]) -> None:
    module = nn.Module()
    module.register_parameter("value", nn.Parameter(torch.tensor(values, dtype=torch.float64)))
    constrain(module, "value", parametrisation)
    torch.testing.assert_close(module.value, torch.tensor(values, dtype=torch.float64), rtol=1e-3, atol=1e-5)
    assign(module, "value", torch.tensor(values[:1], dtype=torch.float64))
    assert module.value.shape == (1,)


@pytest.mark.parametrize(
    ("parametrisation", "value", "slope"),
    [
        (Interval(0.0, 2.0), 1.0, 1.0),
        (Interval(-1.0, 9.0), 4.0, 1.0),
        (Interval(0.0, 2e-4), 1e-4, 2e-4),
        (Positive(0.01), 0.01, 0.63),
        (Positive(0.01), 0.05, 1.0),
    ],
)
def test_constrained_values_move_about_as_fast_as_free_ones(
    parametrisation: Interval | Positive, value: float, slope: float
) -> None:
    free = parametrisation.right_inverse(torch.tensor(value, dtype=torch.float64)).requires_grad_()
    (found,) = torch.autograd.grad(parametrisation(free), free)
    assert float(found) == pytest.approx(slope, abs=0.01)


def test_schedules_are_softplus_lines() -> None:
    schedule = Softplus(-0.5, 0.3)
    expected = [float(nn.functional.softplus(torch.tensor(-0.5 * k + 0.3))) for k in range(4)]
    assert schedule(4).tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("build", "name", "value", "fault"),
    [
        (ISTANet, "step", 2.5, "step 2.5 outside"),
        (ISTANet, "step", -0.12, "step -0.12 outside"),
        (ISTANet, "threshold", -0.019, "negative threshold -0.019"),
        (ADMMNet, "penalty", -1.0, "penalty -1 is not positive"),
        (ADMMNet, "rate", 1.7, "multiplier's step 1.7"),
        (ADMMNet, "threshold", -0.5, "negative threshold"),
    ],
)
def test_free_networks_are_told_when_they_leave(
    build: Callable[..., UnrolledNet], name: str, value: float, fault: str
) -> None:
    phi = _phi()
    net = build(phi, 3, architecture=SMALL)
    y = _measured(phi)
    assert diagnose(net, y).in_range
    with torch.no_grad():
        getattr(net, name)[1] = value
    report = diagnose(net, y)
    assert not report.in_range
    assert report.convergent is False
    assert [bool(phase.faults) for phase in report.phases] == [False, True, False]
    assert fault in report.phases[1].faults[0]
    assert fault in str(report)


@pytest.mark.parametrize("value", [0.0, float("inf"), float("nan")])
def test_a_penalty_at_the_ends_is_no_solver(value: float) -> None:
    net = ADMMNet(_phi(), 2, architecture=SMALL)
    with torch.no_grad():
        net.penalty[0] = value
    (fault,) = net.faults(net.settings()[0])
    assert "not positive and finite" in fault
    assert diagnose(net, _measured(_phi())).convergent is False


@pytest.mark.parametrize("build", [FISTANet, ADMMNet, ISTANet])
def test_a_threshold_that_is_no_number_is_a_fault(build: Callable[..., UnrolledNet]) -> None:
    net = build(_phi(), 2, architecture=SMALL)
    setting = net.settings()[0]._replace(threshold=torch.tensor(float("nan")))
    assert "threshold nan" in net.faults(setting)[0]


@every_net
def test_a_state_brings_the_norm_of_its_own_phi(build: Callable[..., UnrolledNet]) -> None:
    """Steps are compared with the norm of the current Φ, not of the one at construction."""
    net = build(_phi(), 2, architecture=SMALL)
    with pytest.warns(UserWarning, match="not orthonormal"):
        other = build(_phi(3.0), 2, architecture=SMALL)
    net.load_state_dict(other.state_dict())
    assert net.lipschitz == other.lipschitz
    y = _measured(_phi(3.0))
    torch.testing.assert_close(net(y), other(y))
    if isinstance(net, ISTANet):
        with torch.no_grad():
            net.step.fill_(0.5)
        assert not diagnose(net, y).in_range


@every_net
@pytest.mark.parametrize("edit", ["in place", "data", "buffer"])
def test_the_norm_follows_every_change_of_phi(build: Callable[..., UnrolledNet], edit: str) -> None:
    """Also in the forward pass: FISTA-Net divides its steps by the norm."""
    net, y = build(_phi(), 2, architecture=SMALL, constrained=True), _measured(_phi(3.0))
    if edit == "in place":
        net.phi.mul_(3)
    elif edit == "data":
        net.phi.data.mul_(3)
    else:
        net.phi = 3 * net.phi
    truth = float(torch.linalg.matrix_norm(net.phi.double(), 2)) ** 2
    assert truth <= net.lipschitz <= 1.01 * truth
    report = diagnose(net, y)
    assert report.lipschitz == net.lipschitz
    assert report.in_range is not isinstance(net, ISTANet)  # whose steps were bounded for the old phi
    if isinstance(net, FISTANet):
        assert max(float(setting.step.detach()) for setting in net.settings()) < 2 / truth


def _set_taps(net: UnrolledNet, analysis: float, synthesis: float) -> None:
    """Single taps: the maps multiply by these numbers before and after the shrinkage."""
    with torch.no_grad():
        for weight in net.transforms.parameters():
            weight.zero_()
        for transform in net.transforms:
            assert isinstance(transform, Transform)
            transform.analysis[0].get_parameter("weight")[0, 0, 1, 1] = analysis
            transform.synthesis[0].get_parameter("weight")[0, 0, 1, 1] = synthesis


ONE = Architecture(channels=1, depth=1)


def test_a_map_that_only_turns_signs_is_no_prox() -> None:
    """Synthesis after analysis is −I: it preserves distances, and 400 phases oscillate."""
    phi = _phi()
    net = ISTANet(phi, 400, architecture=ONE, constrained=True, shared=True)
    net.step, net.threshold = torch.full((400,), 1e-3), torch.full((400,), 1e-5)
    _set_taps(net, 1.0, -1.0)
    with torch.no_grad():
        *_, first, second = (result.x for result in net.trajectory(_measured(phi)))
        assert float((first + second).norm()) < 0.1 * float((first - second).norm())
    report = diagnose(_cut(net, 3), _measured(phi))
    assert report.nonexpansive
    assert report.in_range
    assert report.convergent is False
    assert [phase.reflection for phase in report.phases] == pytest.approx([3.0] * 3, rel=1e-4)
    assert "not firmly nonexpansive" in str(report)


def test_a_tiny_batch_hides_nothing() -> None:
    """A threshold of one hides a gain of 36² from images of tiny contrast."""
    phi = _phi()
    net = ISTANet(phi, 2, architecture=ONE, constrained=True)
    _set_taps(net, 36.0, 36.0)
    net.threshold = torch.full((2,), 1.0)
    for y in (_measured(phi), 1e-4 * _measured(phi), torch.zeros(2, 5), torch.zeros(0, 5)):
        report = diagnose(net, y)
        assert report.phases[0].gain == pytest.approx(1296, rel=1e-3)
        assert not report.nonexpansive
        assert report.convergent is False


@pytest.mark.parametrize("kind", ["orthonormal", "contraction", "rotation", "reflection", "stretch"])
def test_the_probe_measures_the_three_norms_of_a_linear_map(kind: str) -> None:
    """Against dense algebra, for maps of 4 × 4 images."""
    g = torch.Generator().manual_seed(3)
    q, _ = torch.linalg.qr(torch.randn(16, 16, generator=g, dtype=torch.float64))
    values = torch.linspace(0, 1, 16, dtype=torch.float64)
    matrix = {
        "orthonormal": q[:, :7] @ q[:, :7].mT,
        "contraction": q @ torch.diag(values) @ q.mT,
        "rotation": q,
        "reflection": -torch.eye(16, dtype=torch.float64),
        "stretch": 5 * q @ torch.diag(values) @ q.mT,
    }[kind]
    points = torch.randn(5, 1, 4, 4, generator=g, dtype=torch.float64)
    found = probe(lambda x: (x.flatten(1) @ matrix.mT).reshape(x.shape), points)
    eye = torch.eye(16, dtype=torch.float64)
    for name, part in {"gain": matrix, "reflection": 2 * matrix - eye, "asymmetry": matrix - matrix.mT}.items():
        truth = float(torch.linalg.matrix_norm(part, 2))
        assert 0.8 * truth - 1e-12 <= getattr(found, name) <= truth * (1 + 1e-9) + 1e-12
    assert bool(found.departures()) is (kind not in ("orthonormal", "contraction"))


def test_the_probe_keeps_nan() -> None:
    found = probe(lambda x: x * float("nan"), torch.ones(2, 1, 3, 3))
    assert len(found.departures()) == 2


@pytest.mark.parametrize("plus", [False, True])
def test_the_gain_is_at_least_the_norm_of_the_jacobians_at_the_iterates(plus: bool) -> None:
    phi = _phi().double()
    net = ISTANet(phi, 2, plus, architecture=SMALL)
    y = torch.rand(2, 16).double() @ phi.mT
    report = diagnose(net, y)
    for phase, result in zip(report.phases, net.trajectory(y), strict=True):
        for sample in result.shrinkage.last.point.detach().split(1):
            jacobian = torch.autograd.functional.jacobian(result.shrinkage.prox, sample).reshape(16, 16)
            assert phase.gain >= 0.9 * float(torch.linalg.matrix_norm(jacobian, 2))


def test_the_diagnosis_says_on_what_it_tested() -> None:
    report = diagnose(ISTANet(_phi(), 2, architecture=SMALL), _measured(_phi(), rows=2))
    first = report.phases[0]
    assert (first.pairs, first.jacobians) == (3 * (2 + 3 * 3), 2 + 3)
    assert f"{first.pairs} random pairs of images and {first.jacobians} Jacobians" in str(report)
    assert report.as_dict()["tested"] == report.tested


def _exact(kind: str) -> ISTANet:
    """Analysis K with ‖K‖ ≤ 1 and synthesis Kᵀ."""
    net = ISTANet(_phi(), 300, architecture=Architecture(channels=4, depth=1, shuffle=2), shared=True)
    (transform,) = net.transforms
    assert isinstance(transform, Transform)
    analysis, synthesis = (part[0].get_parameter("weight") for part in (transform.analysis, transform.synthesis))
    kernel = torch.randn(4, 4, 3, 3, generator=torch.Generator().manual_seed(1))
    if kind == "tap":
        kernel = torch.zeros(4, 4, 3, 3)
        kernel[:, :, 1, 1] = torch.eye(4)
    else:
        conv = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        conv.weight.data.copy_(kernel)
        kernel /= 1.001 * float(lipschitz(conv)) ** 0.5
    with torch.no_grad():
        analysis.copy_(kernel)
        synthesis.copy_(kernel.transpose(0, 1).flip(-1, -2))
        net.step.fill_(1.9)
    return net


@pytest.mark.parametrize("kind", ["tap", "filters"])
def test_what_is_called_a_convergent_solver_converges(kind: str) -> None:
    """One convolution and its transpose: proved, and the steps between the phases vanish."""
    net, y = _exact(kind), _measured(_phi())
    assert net.guarantee is not None
    report = diagnose(_cut(net, 2), y)
    assert report.convergent is True
    assert "a convergent solver, proved" in str(report)
    with torch.no_grad():
        images = [result.x for result in net.trajectory(y)]
    moves = [float((b - a).norm()) for a, b in itertools.pairwise(images)]
    assert moves[-1] < 0.05 * moves[0]
    # A gradient step below 2/L and then a prox is nonexpansive, so that the moves never grow.
    assert all(b <= a * (1 + 1e-5) + 1e-6 for a, b in itertools.pairwise(moves))


def _cut(net: ISTANet, phases: int) -> ISTANet:
    """The first phases."""
    other = copy.deepcopy(net)
    for name in ("step", "threshold"):
        assign(other, name, getattr(net, name).detach()[:phases])
    other.__dict__["phases"] = phases
    return other


@pytest.mark.parametrize("change", ["step", "longer step", "threshold", "negative", "synthesis", "norm", "phi"])
def test_nothing_is_proved_once_a_condition_fails(change: str) -> None:
    net = _cut(_exact("filters"), 3)
    (transform,) = net.transforms
    assert isinstance(transform, Transform)
    weights = [part[0].get_parameter("weight") for part in (transform.analysis, transform.synthesis)]
    with torch.no_grad():
        if change == "step":
            net.step[1] = 1.5
        elif change == "longer step":
            net.step.fill_(2.1)
        elif change == "threshold":
            net.threshold[2] = 0.5
        elif change == "negative":
            net.threshold.fill_(-0.1)
        elif change == "synthesis":
            weights[1][0, 0, 0, 0] += 1e-3
        elif change == "norm":
            for weight in weights:
                weight.mul_(1.2)
        else:
            net.phi.mul_(1.1)
    assert net.guarantee is None
    report = diagnose(net, _measured(_phi()))
    assert report.convergent is not True
    assert "a convergent solver, proved" not in str(report)


@every_net
def test_learned_transforms_are_only_measured(build: Callable[..., UnrolledNet]) -> None:
    """No network with a learned transform is called a convergent solver, constrained or not."""
    for constrained in (False, True):
        net = build(_phi(), 2, architecture=Architecture(channels=3, scale=1e-6), constrained=constrained)
        report = diagnose(net, _measured(_phi()))
        assert net.guarantee is None
        assert report.convergent is not True
        if not any(phase.departures for phase in report.phases):
            assert report.convergent is None
            assert "measured, not proved" in str(report)


def test_numbers_alone_make_no_solver() -> None:
    """A residual transform of identities doubles its input: its parameters are those of a solver, but it diverges."""
    phi = _phi()
    net = ISTANet(phi, 60, plus=True, architecture=Architecture(channels=1, depth=1), constrained=True)
    with torch.no_grad():
        for weight in net.transforms.parameters():
            weight.zero_()
            weight[0, 0, 1, 1] = 1.0
    report = diagnose(net, _measured(phi))
    assert report.in_range
    assert report.convergent is False
    assert report.phases[0].gain == pytest.approx(2.0, rel=1e-3)
    assert not report.nonexpansive
    assert report.phases[-1].residual > 1e3
    assert "increases distances up to 2-fold" in str(report)


def test_fista_needs_the_shorter_step() -> None:
    phi = _phi()
    net = FISTANet(phi, 3, architecture=SMALL)
    with torch.no_grad():
        net.step_schedule.offset.fill_(1.5)
    report = diagnose(net, _measured(phi))
    assert report.phases[0].faults
    assert 1 < report.phases[0].step < 2


def test_a_small_learned_momentum_allows_longer_steps() -> None:
    phi = _phi()
    net = FISTANet(phi, 3, architecture=SMALL, momentum="learned")
    assert net.momentum_schedule is not None
    with torch.no_grad():
        net.step_schedule.slope.zero_()
        net.step_schedule.offset.fill_(1.2)
        net.momentum_schedule.slope.fill_(0.02)
    assert 1.4 < diagnose(net, _measured(phi)).phases[-1].step < 1.5
    assert diagnose(net, _measured(phi)).in_range
    with torch.no_grad():
        net.momentum_schedule.slope.fill_(0.5)
    assert [not r.faults for r in diagnose(net, _measured(phi)).phases] == [True, False, False]


@every_net
def test_the_diagnosis_is_true(build: Callable[..., UnrolledNet]) -> None:
    """Residual, objective and symmetry, computed here from the images; nothing about the network changes."""
    phi = _phi()
    net = build(phi, 3, architecture=SMALL).train()
    y, before = _measured(phi), copy.deepcopy(net.state_dict())
    report = diagnose(net, y)
    with torch.no_grad():
        for phase, result in zip(report.phases, net.trajectory(y), strict=True):
            x = result.x.flatten(1)
            residual = x @ phi.mT - y
            assert phase.residual == pytest.approx(float(residual.norm() / y.norm()), rel=1e-4)
            transform = result.shrinkage.transform
            penalty = transform.analyze(transform.features(result.x)).abs().sum()
            weight = result.setting.threshold / result.setting.step
            objective = (0.5 * residual.square().sum() + weight * penalty) / 3
            assert phase.objective == pytest.approx(float(objective), rel=1e-4)
            assert phase.symmetry > 0
    assert net.training
    assert all(p.grad is None for p in net.parameters())
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    assert report.start == pytest.approx(0.0, abs=1e-4)
    assert len(report.as_dict()["phases"]) == 3
    text = str(report)
    assert text.count("\n") >= 5
    assert "convergent" in text


def test_an_exact_transform_never_raises_the_objective() -> None:
    """With F = F̃ = I and steps within the limits, the diagnosis shows descent, as the theory says."""
    phi = _phi()
    net = ISTANet(phi, 8, architecture=Architecture(channels=1, depth=1), constrained=True)
    with torch.no_grad():
        for weight in net.transforms.parameters():
            weight.zero_()
            weight[0, 0, 1, 1] = 1.0
    report = diagnose(net, _measured(phi))
    objectives = [phase.objective for phase in report.phases]
    assert all(b <= a * (1 + 1e-5) for a, b in itertools.pairwise(objectives))
    assert max(phase.symmetry for phase in report.phases) < 1e-6
    assert report.nonexpansive
    assert report.as_dict()["nonexpansive"]
    assert report.convergent is True


def test_the_picture() -> None:
    net = ISTANet(_phi(), 3, architecture=SMALL)
    with torch.no_grad():
        net.step[1] = 3.0
    figure = diagnose(net, _measured(_phi())).plot()
    assert [axis.get_title() for axis in figure.axes] == [
        "step",
        "threshold",
        "relative residual",
        "objective per sample",
    ]
    plt.close(figure)


def test_rows_that_are_not_orthonormal_scale_the_steps_and_say_so() -> None:
    with pytest.warns(UserWarning, match=r"not orthonormal.*scaled by 1/‖Φ‖²"):
        net = ISTANet(_phi(3.0), 2, architecture=SMALL, constrained=True)
    assert net.lipschitz == pytest.approx(9.0, rel=0.01)
    assert net.settings()[0].step.item() == pytest.approx(1 / 9, rel=0.02)
    assert diagnose(net, _measured(_phi(3.0))).in_range

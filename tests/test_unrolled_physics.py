"""RidgeNet with anyone's operator: training beats the tuned classical control, and bad input is named."""

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import scipy.sparse.linalg
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from scipy.optimize import minimize
from torch import Tensor

from minimand.errors import CapabilityError, NonFiniteError, OperatorError, OptionError, ShapeError
from minimand.nn import ADMMNet, FISTANet, ISTANet, RidgeNet, RidgeTrainer, smooth_tv_reconstruction
from minimand.nn.unrolled import langevin
from minimand.operators import (
    Inpainting,
    LinearOperator,
    MultiCoilFourier,
    as_operator,
    cartesian_mask,
    check_operator,
    downsampling,
    gaussian_blur,
    operator,
    orthonormal_gaussian,
    parallel_beam,
)
from minimand.solvers import Datafit, Huber, Poisson, Quadratic

SIDE = 16


class Physics:
    """An operator of another library: a blur of any image, with its adjoint."""

    def A(self, x: Tensor) -> Tensor:
        return (x + x.roll(1, -1) + x.roll(1, -2)) / 3

    def A_adjoint(self, y: Tensor) -> Tensor:
        return (y + y.roll(-1, -1) + y.roll(-1, -2)) / 3


def _scipy() -> LinearOperator:
    matrix = np.random.default_rng(0).normal(size=(100, SIDE * SIDE)) / SIDE
    return as_operator(scipy.sparse.linalg.aslinearoperator(matrix), (1, SIDE, SIDE))


def _coils() -> LinearOperator:
    mask = cartesian_mask((SIDE, SIDE), 0.5, generator=torch.Generator().manual_seed(0))
    across = torch.linspace(-1, 1, SIDE)
    maps = [torch.exp(-((across - c) ** 2))[None] * torch.exp(1j * across[:, None] * c) for c in (-1.0, 1.0)]
    return MultiCoilFourier(mask, torch.stack(maps).to(torch.complex64))


def _holes() -> LinearOperator:
    return Inpainting((torch.rand(3, SIDE, SIDE, generator=torch.Generator().manual_seed(0)) < 0.5).float())


def _callables() -> LinearOperator:
    return operator(lambda x: x.cumsum(-1) / SIDE, lambda y: y.flip(-1).cumsum(-1).flip(-1) / SIDE,
                    (1, SIDE, SIDE), (1, SIDE, SIDE))  # fmt: skip


#: The operator and the option "channels".
OPERATORS: dict[str, tuple[Callable[[], LinearOperator], str]] = {
    "callables": (_callables, "apart"),
    "physics": (lambda: as_operator(Physics(), (1, SIDE, SIDE)), "apart"),
    "scipy": (_scipy, "apart"),
    "colour apart": (_holes, "apart"),
    "colour together": (_holes, "together"),
    "coils": (_coils, "apart"),
    "reflected blur": (lambda: gaussian_blur((SIDE, SIDE), 1.0, padding_mode="reflect"), "apart"),
    "binning": (lambda: downsampling((SIDE, SIDE), 2), "apart"),
    "tomography": (lambda: parallel_beam(SIDE, [k * math.pi / 8 for k in range(8)]), "apart"),
}


def _images(count: int, channels: int) -> Tensor:
    """Stripes and edges, alike in all channels."""
    across = torch.rand(count, 1, 1, SIDE).round().repeat_interleave(SIDE, 2)
    down = torch.rand(count, 1, SIDE, 1).round().repeat_interleave(SIDE, 3)
    return F.avg_pool2d((across + down) / 2, 3, 1, 1) * torch.linspace(1, 0.5, channels)[None, :, None, None]


def _tuned(error: Callable[[float], float]) -> float:
    """The best weight, on a grid that grows until it is an interior point."""
    errors = {w: error(w) for w in (1e-4, 1e-3, 1e-2)}
    for _ in range(6):
        best = min(errors, key=lambda w: errors[w])
        if min(errors) < best < max(errors):
            return best
        further = best / 10 if best == min(errors) else 10 * best
        errors[further] = error(further)
    raise AssertionError(f"no interior point: {errors}")


@pytest.mark.parametrize("name", OPERATORS)
def test_a_short_training_beats_the_tuned_classical_control(name: str) -> None:
    torch.manual_seed(0)
    make, channels = OPERATORS[name]
    phi, sigma = make(), 0.02
    check_operator(phi)
    count = phi.input_shape[0]

    def draw(size: int) -> tuple[Tensor, Tensor]:
        x = _images(size, count)
        y = phi.apply(x)
        return y + sigma * torch.randn_like(y), x

    net = RidgeNet(phi, 4, 8 * (count if channels == "together" else 1), 3, noise=sigma, channels=channels)
    trainer = RidgeTrainer(net, 40, rate=3.0)
    for _ in range(40):
        trainer.step(*draw(4))
    (tuning, truth), (y, x) = draw(2), draw(4)
    weight = _tuned(lambda w: float(F.mse_loss(smooth_tv_reconstruction(tuning, phi, w, tol=1e-4), truth)))
    control = float(F.mse_loss(smooth_tv_reconstruction(y, phi, weight, tol=1e-4), x))
    learned = float(F.mse_loss(net.eval()(y, tol=1e-4), x))
    assert learned < control
    history = net.descended(y).history
    assert all(after <= before for before, after in itertools.pairwise(history))


@pytest.mark.parametrize("kind", ["matrix", "operator"])
def test_a_matrix_measures_images_of_the_shape_that_is_given(kind: str) -> None:
    matrix, image = torch.randn(20, 72), torch.rand(2, 2, 4, 9)
    flat = matrix if kind == "matrix" else operator(lambda y: y @ matrix.mT, lambda x: x @ matrix, (72,), (20,))
    net = RidgeNet(as_operator(flat, (2, 4, 9)), 2, 8, 3, noise=0.1).eval()
    y = image.flatten(1) @ matrix.mT
    assert net(y).shape == image.shape
    torch.testing.assert_close(net.fidelity(y).operator.apply(image), y)


def test_the_networks_of_the_papers_take_a_matrix_for_images() -> None:
    image = torch.rand(2, 1, 8, 9)
    phi = as_operator(orthonormal_gaussian(30, 72), (1, 8, 9))
    for kind in (ISTANet, FISTANet, ADMMNet):
        assert kind(phi, 2)(phi.apply(image)).shape == image.shape


def test_a_physics_takes_images_of_any_size() -> None:
    net = RidgeNet(Physics(), 2, 8, 3, noise=0.05).eval()
    for size in ((8, 8), (9, 14)):
        x = torch.rand(2, 1, *size)
        assert net(Physics().A(x)).shape == x.shape


class Module(torch.nn.Module):
    """A physics that is a module, as deepinv's are."""

    def __init__(self, trained: bool = False) -> None:
        super().__init__()
        self.register_buffer("gains", torch.linspace(0.5, 1, 12))
        self.shift = torch.nn.Parameter(torch.ones(()), requires_grad=trained)

    def A(self, x: Tensor) -> Tensor:
        return x * self.gains

    A_adjoint = A


def test_a_physics_is_not_part_of_the_network() -> None:
    """It is neither trained nor converted nor saved, and its bounds follow its values."""
    physics, x = Module(), torch.rand(2, 1, 12, 12)
    net = RidgeNet(physics, 2, 8, 3, noise=0.1).eval()
    known = set(RidgeNet(Physics(), 2, 8, 3, noise=0.1).state_dict())
    assert set(net.state_dict()) == known
    net.double()(physics.A(x).double())
    assert physics.gains.dtype == torch.float32
    net.float()
    for change in (lambda: physics.gains.mul_(3), lambda: setattr(physics, "gains", torch.full((12,), 7.0))):
        net(physics.A(x))
        change()
        assert net.fidelity(physics.A(x)).norm_sq >= float(physics.gains.max()) ** 2
    assert net.fidelity(physics.A(x)).tight == pytest.approx(49)  # and so do closed forms


class ByNumpy(Physics):
    """Products whose derivatives torch does not see."""

    def A(self, x: Tensor) -> Tensor:
        return torch.from_numpy(super().A(x.detach()).double().numpy())

    def A_adjoint(self, y: Tensor) -> Tensor:
        return torch.from_numpy(super().A_adjoint(y.detach()).double().numpy())


def test_a_physics_that_hides_its_derivative_is_differentiated_by_its_adjoint() -> None:
    x, found = torch.rand(2, 1, 9, 8, dtype=torch.float64), []
    for physics in (Physics(), ByNumpy()):
        torch.manual_seed(0)
        net = RidgeNet(physics, 2, 8, 3, noise=0.1).double()
        loss = net.loss(physics.A(x), x)
        found.append(torch.autograd.grad(loss, list(net.parameters()), allow_unused=True, create_graph=True))
    torch.testing.assert_close(found[1], found[0])
    A = as_operator(ByNumpy(), (1, 4, 5))
    point, tangent = torch.rand(2, 2, 1, 4, 5, dtype=torch.float64)
    assert torch.autograd.gradgradcheck(lambda x: A.apply(x).square(), point.requires_grad_())
    with forward_ad.dual_level():
        image = A.apply(forward_ad.make_dual(point.detach(), tangent))
        torch.testing.assert_close(forward_ad.unpack_dual(image).tangent, A.apply(tangent))


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_a_physics_computes_in_the_type_of_the_measurements_or_a_wider_one(kind: torch.dtype) -> None:
    for physics in (Physics(), ByNumpy()):
        x = torch.rand(2, 1, 9, 8)
        net = RidgeNet(physics, 2, 8, 3, noise=0.1).eval()
        wide = net(physics.A(x).float())
        half = net.to(kind)(physics.A(x).to(kind))
        assert half.dtype == kind
        torch.testing.assert_close(half.float(), wide, atol=0.05, rtol=0)


def test_the_control_reaches_the_optimum_of_cvxpy() -> None:
    import cvxpy as cp

    torch.manual_seed(0)
    phi = Inpainting((torch.rand(6, 6) < 0.7).double())
    y = phi.apply(torch.rand(1, 1, 6, 6, dtype=torch.float64))
    w, eps = 0.1, 0.05
    x = cp.Variable((6, 6))
    zero = np.zeros((6, 1))
    steps = [cp.hstack([x[:, 1:], zero]) - x, cp.vstack([x[1:, :], zero.T]) - x]
    tv = sum(cp.norm(cp.vstack([np.full(36, eps), cp.vec(d, order="F")]), axis=0) for d in steps)
    fit = cp.sum_squares(cp.multiply(phi.weight[0].numpy(), x) - y[0, 0].numpy())
    cp.Problem(cp.Minimize(0.5 * fit + w * cp.sum(tv))).solve(solver=cp.CLARABEL)
    ours = smooth_tv_reconstruction(y, phi, w, smoothing=eps, tol=1e-10, iterations=20000)
    np.testing.assert_allclose(ours[0, 0].numpy(), x.value, atol=2e-4)


# Other losses


@pytest.mark.parametrize("datafit", [Huber(0.02), Poisson(0.5)], ids=["huber", "poisson"])
def test_other_losses_descend_to_the_minimum_of_scipy(datafit: Datafit) -> None:
    torch.manual_seed(0)
    phi = gaussian_blur((9, 9), 0.8)
    phi = phi.with_weight(phi.weight.double())
    y = phi.apply(torch.rand(1, 1, 9, 9, dtype=torch.float64))
    net = RidgeNet(phi, 2, 8, 3, "convex", noise=0.1, datafit=datafit).eval()
    with torch.no_grad():
        net.log_scale.fill_(-2.0)
        net.log_temperature.fill_(math.log(0.02))
        R, weight = net.regularizer(), float(net.data_weight())

    def objective(flat):
        x = torch.tensor(flat).reshape(1, 1, 9, 9)
        t = phi.apply(x)
        slope = R.gradient(x) + weight * phi.adjoint(datafit.gradient(t, y))
        return float(R.value(x) + weight * datafit.values(t, y).sum()), slope.flatten().numpy()

    options = {"maxiter": 20000, "maxfun": 40000, "ftol": 1e-16, "gtol": 1e-11}
    oracle = minimize(objective, np.zeros(81), jac=True, method="L-BFGS-B", options=options)
    found = net.descended(y, x0=torch.zeros_like(y), tol=0.0, iterations=4000)
    history = [float(found.start), *found.history]
    assert all(after <= before for before, after in itertools.pairwise(history))
    assert float(found.objective) == pytest.approx(float(oracle.fun), rel=1e-5)
    assert net.loss(y, y).requires_grad


# Sampling


def test_samples_of_a_square_have_the_gaussian_posteriors_moments() -> None:
    torch.manual_seed(0)
    phi = Inpainting((torch.rand(8, 8) < 0.6).double())
    net = RidgeNet(phi, 2, 8, 3, "convex", noise=0.1).eval()
    with torch.no_grad():
        net.parametrizations.exponent.original.fill_(-50.0)  # the exponent zero
        net.log_temperature.fill_(math.log(0.02))
    y = phi.apply(torch.rand(1, 1, 8, 8, dtype=torch.float64))
    identity = torch.eye(64, dtype=torch.float64).reshape(-1, 1, 8, 8)
    with torch.no_grad():
        W = net.regularizer().operator((8, 8)).apply(identity).flatten(1)
    P = phi.apply(identity).flatten(1)
    precision = P @ P.mT / 0.1**2 + W @ W.mT / 0.02
    mean = torch.linalg.solve(precision, P @ y.flatten() / 0.1**2)
    found = langevin(net, y.expand(32, -1, -1, -1), samples=300, thin=4, generator=torch.Generator().manual_seed(0))
    assert found.samples == 300
    spread = torch.linalg.inv(precision).diagonal().sqrt()
    sampled = (found.std.square().mean(0) + found.mean.var(0)).sqrt().flatten()
    # The bias of unadjusted steps is of the order of the step; sampling adds a few per cent.
    assert float((sampled / spread).log().abs().max()) < 0.35
    assert float(((found.mean.mean(0).flatten() - mean) / spread).abs().max()) < 0.5


def test_samples_follow_the_loss_of_the_network() -> None:
    """Huber's loss with a wide threshold is the square; with a narrow one an outlier moves the mean less."""
    phi, y = Inpainting(torch.ones(9, 9)), torch.full((1, 1, 9, 9), 0.5)
    y[..., 4, 4] = 5.0
    means = {}
    for name, datafit in {"square": Quadratic(), "wide": Huber(1e3), "narrow": Huber(0.1)}.items():
        net = RidgeNet(phi, 2, 8, 3, "convex", noise=0.1, datafit=datafit).eval()
        generator = torch.Generator().manual_seed(0)
        means[name] = langevin(net, y, samples=40, burn=40, thin=1, generator=generator).mean
    torch.testing.assert_close(means["wide"], means["square"], atol=0.01, rtol=0)
    assert float(means["square"][..., 4, 4]) > 4
    assert float(means["narrow"][..., 4, 4]) < 2


# Bad input


def _blocks(**options: object) -> RidgeNet:
    return RidgeNet(orthonormal_gaussian(8, 25), 2, 8, 3, **options)


class Wrong(Physics):
    def A_adjoint(self, y: Tensor) -> Tensor:
        return 1.1 * super().A_adjoint(y)


class InPlace(Physics):
    def A(self, x: Tensor) -> Tensor:
        return x.mul_(0.5)


class Coupled(Physics):
    def A(self, x: Tensor) -> Tensor:
        return x - x.mean(0, keepdim=True)

    A_adjoint = A


class Complex(Physics):
    def A(self, x: Tensor) -> Tensor:
        return torch.fft.fft2(x)


def _by_physics(physics: object) -> object:
    return RidgeNet(physics, 2, 8, 3, noise=0.1)(torch.rand(2, 1, 9, 9))


BAD = {
    "in place": (lambda: _by_physics(InPlace()), OperatorError, "arguments in place"),
    "samples together": (lambda: _by_physics(Coupled()), OperatorError, "independently of each other"),
    "complex products": (lambda: _by_physics(Complex()), CapabilityError, "apply .* complex numbers.*view_as_real"),
    "learned physics": (lambda: RidgeNet(Module(True), noise=0.1), CapabilityError, "parameter of phi .*gradients"),
    "adjoint": (
        lambda: RidgeNet(as_operator(Wrong(), (1, 9, 9)), 2, 8, 3, noise=0.1),
        OperatorError,
        r"on random probe 1 .*relative mismatch of 0\.\d+",
    ),
    "adjoint of a physics": (
        lambda: RidgeNet(Wrong(), 2, 8, 3, noise=0.1)(torch.rand(1, 1, 9, 9)),
        OperatorError,
        "random probe 1",
    ),
    "length": (lambda: _blocks()(torch.ones(2, 9)), ShapeError, r"8 rows.*\(2, 9\)"),
    "type": (lambda: _blocks()(torch.ones(2, 8).double()), OptionError, "float64.*float32"),
    "integers": (lambda: _blocks()(torch.ones(2, 8).long()), CapabilityError, "real floating-point"),
    "complex": (lambda: _blocks()(torch.ones(2, 8).cfloat()), CapabilityError, "complex.*view_as_real"),
    "arrays": (lambda: _blocks().eval()(np.ones((2, 8))), CapabilityError, "got a ndarray"),
    "tail": (lambda: _blocks().loss(torch.ones(2, 8), torch.ones(2, 25), tail=-1), OptionError, "tail"),
    "one sample": (lambda: langevin(_blocks(noise=0.1), torch.ones(2, 8), samples=1), OptionError, "at least 2"),
    "generator": (
        lambda: langevin(_blocks(noise=0.1), torch.ones(2, 8), generator=0),
        CapabilityError,
        "generator=",
    ),
    "nan": (lambda: _blocks()(torch.full((2, 8), math.nan)), NonFiniteError, "y "),
    "bytes": (lambda: _blocks()(255 * torch.ones(2, 8)), OptionError, "255"),
    "small image": (
        lambda: RidgeNet(Inpainting(torch.ones(5, 5)), 2)(torch.ones(1, 1, 5, 5)),
        ShapeError,
        "5 × 5 is smaller than the filters of 7 × 7",
    ),
    "another size": (
        lambda: RidgeNet(Inpainting(torch.ones(9, 9)), 2)(torch.ones(1, 1, 9, 8)),
        ShapeError,
        r"\(B, 1, 9, 9\).*using",
    ),
    "range": (lambda: _blocks(guarantee="convex", exponents=(0.2, 0.8)), OptionError, r"'convex'.*\(0, 0.5\)"),
    "guarantee": (lambda: _blocks(guarantee="always"), OptionError, "'convex', 'convergent', 'descent'"),
    "not orthonormal": (
        lambda: RidgeNet(torch.randn(8, 25), 2, 8, 3),
        OptionError,
        r"orthonormal rows.*differs .* by \d.*noise=σ",
    ),
    "loss": (lambda: _blocks(datafit=Huber(0.1)), OptionError, "needs a noise level"),
    "negative counts": (
        lambda: _blocks(noise=1.0, datafit=Poisson(1.0))(-torch.ones(2, 8)),
        ValueError,
        "y",
    ),
    "noise": (lambda: _blocks(noise=-0.1), OptionError, "noise"),
    "even filters": (lambda: RidgeNet(orthonormal_gaussian(8, 25), 2, 8, 4), OptionError, "odd"),
    "channels": (lambda: _blocks(channels="mixed"), OptionError, "apart"),
    "vectors": (lambda: RidgeNet(as_operator(scipy.sparse.eye(9)), 2), ShapeError, r"as_operator\(phi, input_shape"),
    "no operator": (lambda: RidgeNet("camera"), CapabilityError, "no linear operator"),
    "shape of a physics": (lambda: as_operator(Physics()), ShapeError, "input_shape is needed"),
    "sizes of a matrix": (lambda: as_operator(torch.eye(9), (1, 2, 4)), ShapeError, "8 entries.*9 columns"),
    "no transpose": (
        lambda: RidgeNet(as_operator(scipy.sparse.linalg.LinearOperator((4, 9), lambda x: x[:4]), (1, 3, 3)), 2, 8, 3),
        CapabilityError,
        "those with its transpose need rmatvec",
    ),
    "frozen": (lambda: RidgeTrainer(_blocks().requires_grad_(False), 10), OptionError, "requires gradients"),
    "sizes": (lambda: as_operator(scipy.sparse.eye(9), (1, 2, 4)), ShapeError, "8 entries.*9 columns"),
    "start": (lambda: _blocks().solve(torch.ones(2, 8), x0=torch.ones(3)), ShapeError, "x0"),
    "target": (lambda: _blocks().loss(torch.ones(2, 8), torch.ones(2, 24)), ShapeError, "target"),
    "tolerance": (lambda: _blocks().solve(torch.ones(2, 8), tol=-1.0), OptionError, "tol"),
    "improper density": (
        lambda: langevin(_blocks(noise=0.1, guarantee="descent"), torch.ones(2, 8)),
        OptionError,
        "exponents of 1 or more",
    ),
    "density of exact measurements": (lambda: langevin(_blocks(), torch.ones(2, 8)), CapabilityError, "noise=σ"),
    "other channels": (
        lambda: RidgeNet(_holes(), 2, 8, 3, channels="together").using(Inpainting(torch.ones(9, 9))),
        ShapeError,
        "3 channels",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named_in_one_sentence(name: str) -> None:
    call, error, words = BAD[name]
    with pytest.raises(error, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)

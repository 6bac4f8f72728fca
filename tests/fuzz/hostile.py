"""Campaign: every public function answers a hostile value, or raises an error of ``minimand.errors``.

``CALLS`` lists a valid call of every public function and class. A case replaces one argument of one call by a value
of ``hostile(kind of the argument)``: NaN, infinite, empty, of another type, shape, device or layout, or of no use.
"""

import contextlib
import copy
import math
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from minimand import adjoints, factor, functions, homogeneous, network, norms, operators, solvers, train
from minimand import nn as mnn
from minimand.errors import MinimandError
from minimand.train.lifted import Recipe

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Call:
    """A function and valid arguments, made anew for each call."""

    function: Callable[..., Any]
    arguments: Callable[[], Arguments]


def _x(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _rows(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).uniform(0.1, 1.0, shape)


def _mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Dropout(), nn.Linear(5, 3), nn.ReLU(), nn.Linear(3, 2))


def _chain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))


def _residual() -> nn.Module:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = x + torch.relu(self.a(x))
            return x + torch.relu(self.b(x))

    return Residual()


def _homogeneous() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 1, bias=False), nn.ReLU(), nn.Linear(1, 2, bias=False))


def _prox(function: Callable[..., functions.Function], **options: Any) -> Call:
    """The constructor, the prox and the value at once, so that an option and a point are both replaced."""

    def run(x: Tensor, step: Any, **options: Any) -> Any:
        made = function(**options)
        return made.prox(x, step), made.value(x)

    return Call(run, lambda: {"x": _x(3, 4, 4), "step": 0.5, **options})


def _applied(make: Callable[..., Any], arguments: Callable[[], Arguments]) -> Call:
    """An operator's constructor, its maps and its bound."""

    def run(y: Tensor | None = None, x: Tensor | None = None, **options: Any) -> Any:
        made = make(**options)
        y = _x(2, *made.input_shape) if y is None else y
        x = _x(2, *made.output_shape) if x is None else x
        return made.apply(y), made.adjoint(x), made.norm_sq()

    def valid() -> Arguments:
        given = arguments()
        made = make(**given)
        return {**given, "y": _x(2, *made.input_shape), "x": _x(2, *made.output_shape)}

    return Call(run, valid)


def _layer(make: Callable[..., nn.Module], shape: tuple[int, ...], **options: Any) -> Call:
    def run(y: Tensor, **options: Any) -> Any:
        return make(**options)(y)

    return Call(run, lambda: {"y": _x(*shape), **options})


def _fitted(make: Callable[..., Any], data: Callable[[], Any], **options: Any) -> Call:
    def run(Y: Any, **options: Any) -> Any:
        estimator = make(**options)
        fitted = estimator.fit(Y)
        return fitted.transform(Y), getattr(fitted, "certificate_", None)

    return Call(run, lambda: {"Y": data(), **options})


def _trained(make: Callable[..., Any], **options: Any) -> Call:
    def run(model: nn.Module, x: Tensor, y: Tensor, **options: Any) -> Any:
        method = make(model, **options)
        return method.step(x, y), method.energy(x, y), method.fit([(x, y)], 1)

    return Call(run, lambda: {"model": _chain(), "x": _x(6, 4), "y": torch.arange(6) % 2, **options})


def _proxprop(model: nn.Module, x: Tensor, lr: float = 0.1, **options: Any) -> Any:
    prox = train.ProxProp(model, **options)
    try:
        model(x)
    except Exception:  # torch's own words, which an attached network keeps
        return None
    optimizer = torch.optim.SGD(model.parameters(), lr)
    prox.attach(optimizer)
    model(x).square().mean().backward()
    optimizer.step()
    return prox.state_dict()


def _solve(y: Tensor, weight: Tensor, bias: Tensor, ridge: Any, solver: Any, adjoint: Any, **options: Any) -> Any:
    problem = solvers.Problem(operators.Dense(weight), functions.NonNegative(), y, bias, ridge)
    return solvers.solve(problem, solver, adjoint=adjoint, **options)


def _problem() -> solvers.Problem:
    return solvers.Problem(operators.Dense(_x(3, 4)), functions.NonNegative(), _x(5, 4), _x(3), 0.1)


def _datafit(make: Callable[..., solvers.Datafit], **options: Any) -> Call:
    def run(y: Tensor, weight: Tensor, **options: Any) -> Any:
        problem = solvers.Problem(
            operators.Dense(weight), functions.NonNegative(), y, ridge=0.1, datafit=make(**options)
        )
        return solvers.solve(problem, solvers.ProxGD(3))

    return Call(run, lambda: {"y": torch.ones(5, 4), "weight": _x(3, 4).abs(), **options})


def _working_set(y: Tensor, weight: Tensor, iters: Any, strength: Any) -> Any:
    with torch.no_grad():
        problem = solvers.Problem(operators.Dense(weight), functions.L1(strength), y)
        return solvers.solve(problem, solvers.WorkingSet(iters), tol=1e-3)


def _searched(make: Callable[..., Any], data: Callable[[], Any]) -> Call:
    def run(Y: Any, **options: Any) -> Any:
        return make(**options).fit(Y).lam_

    return Call(run, lambda: {"Y": data(), "lams": [0.3, 0.1], "cv": 2, "tol": 1e-1, "max_iter": 5, "random_state": 0})


def _optimization(x: Tensor, **options: Any) -> Any:
    return mnn.OptimizationNet([nn.Linear(4, 4), nn.Linear(4, 4)], **options)(x)


def _unrolled(make: Callable[..., Any]) -> Call:
    def run(phi: Any, y: Tensor, phases: Any, **options: Any) -> Any:
        net = make(phi, phases, architecture=mnn.Architecture(channels=4), **options)
        return net(y), mnn.diagnose(net, y)

    return Call(
        run,
        lambda: {
            "phi": operators.orthonormal_gaussian(4, 16),
            "y": _x(2, 4),
            "phases": 2,
            "constrained": True,
            "shared": False,
        },
    )


def _parallel(X: Any, y: Any, **options: Any) -> Any:
    return factor.ParallelNetwork(_homogeneous, descent=5, restarts=2, max_networks=2, **options).fit(X, y)


def _relu(X: Any, y: Any, **options: Any) -> Any:
    return factor.ParallelReLU(max_rounds=2, descent=10, **options).fit(X, y).predict(X)


def _penalty(model: Any, x: Any, p: Any) -> Any:
    return factor.DropoutPenalty(model, p)(x)


def _warm(model: nn.Module) -> Any:
    with mnn.warm_start(model):
        return None


def _tracked(operator: Any, **options: Any) -> Any:
    return norms.LipschitzTracker(operator, **options).bound()


def _users(apply: Any, adjoint: Any, input_shape: Any, output_shape: Any, norm_sq: Any, y: Any) -> Any:
    made = operators.operator(apply, adjoint, input_shape, output_shape, norm_sq)
    operators.check_operator(made)
    return made.apply(y), made.norm_sq()


CONV = {"input_size": (5, 6), "stride": 1, "padding": 1, "dilation": 1, "groups": 1}
SOLVERS = [solvers.ProxGD(2), solvers.FISTA(2), solvers.ADMM(2), solvers.ProxSG(2), solvers.SVRG(1, 2), solvers.RCD(2)]
SOLVERS += [solvers.HeavyBall(2)]
LAYER: Arguments = {"bias": True, "activation": "relu", "ridge": 1e-3, "eval_mode": "stochastic", "mean_passes": 2}
LAYER |= {"shared_sample": False, "adjoint": adjoints.Unroll()}

CALLS: dict[str, Call] = {
    "L1": _prox(functions.L1, weight=0.3),
    "Ball": _prox(functions.Ball, radius=0.3),
    "Box": _prox(functions.Box, low=-0.3, high=0.4),
    "GroupL2": _prox(functions.GroupL2, weight=0.3),
    "LeakyHinge": _prox(functions.LeakyHinge, slope=0.1),
    "LogBarrier": _prox(functions.LogBarrier, gamma=0.3),
    "LogBox": _prox(functions.LogBox, gamma=0.3),
    "LogUnit": _prox(functions.LogUnit, gamma=0.3),
    "Maximum": _prox(functions.Maximum),
    "NonNegative": _prox(functions.NonNegative),
    "NuclearNorm": _prox(functions.NuclearNorm, weight=0.3),
    "PositiveSemidefinite": _prox(functions.PositiveSemidefinite),
    "Simplex": _prox(functions.Simplex),
    "SpectralBall": _prox(functions.SpectralBall, radius=0.3),
    "SquaredHinge": _prox(functions.SquaredHinge, gamma=0.3, shift=0.1),
    "Charbonnier": _prox(functions.Charbonnier, scale=0.3, exponent=0.4),
    "ElasticNet": _prox(functions.ElasticNet, weight=0.3, curvature=0.2),
    "Isotonic": _prox(functions.Isotonic),
    "L1Ball": _prox(functions.L1Ball, radius=0.3),
    "MaxNorm": _prox(functions.MaxNorm, weight=0.3),
    "TotalVariation": _prox(functions.TotalVariation, weight=0.3),
    "TotalVariation2d": _prox(functions.TotalVariation2d, weight=0.3),
    "SimplexEntropy": _prox(functions.SimplexEntropy),
    "check_function": Call(
        functions.check_function, lambda: {"function": functions.L1(0.3), "shape": (3, 4), "trials": 2}
    ),
    "Zero": _prox(functions.Zero),
    "Monotone": _prox(functions.Monotone, phi=torch.tanh),
    "from_activation": _prox(functions.from_activation, act="tanh"),
    "LayerObjective": Call(
        lambda x, **options: functions.LayerObjective(**options).lift(x),
        lambda: {"x": _x(2, 3), "weight": torch.eye(3), "activation": "relu"},
    ),
    "Dense": _applied(operators.Dense, lambda: {"weight": _x(3, 4)}),
    "Conv2d": _applied(operators.Conv2d, lambda: {"weight": _x(2, 3, 3, 3), **CONV}),
    "Conv3d": _applied(operators.Conv3d, lambda: {"weight": _x(2, 3, 2, 2, 2), "input_size": (3, 3, 4)}),
    "ConvTranspose1d": _applied(operators.ConvTranspose1d, lambda: {"weight": _x(3, 2, 3), "input_size": 5}),
    "ConvTranspose2d": _applied(operators.ConvTranspose2d, lambda: {"weight": _x(3, 2, 3, 3), "input_size": (4, 5)}),
    "Conv1d": _applied(operators.Conv1d, lambda: {"weight": _x(2, 3, 3), **CONV, "input_size": 7}),
    "BlockSensing": _applied(operators.BlockSensing, lambda: {"weight": _x(2, 4), "input_size": (4, 6)}),
    "Inpainting": _applied(operators.Inpainting, lambda: {"mask": torch.ones(1, 4, 5)}),
    "SubsampledFourier": _applied(operators.SubsampledFourier, lambda: {"mask": torch.ones(4, 5)}),
    "MultiCoilFourier": _applied(
        operators.MultiCoilFourier, lambda: {"mask": torch.ones(4, 5), "sensitivities": _x(3, 2, 4, 5)}
    ),
    "downsampling": _applied(operators.downsampling, lambda: {"input_size": (4, 6), "factor": 2, "channels": 2}),
    "parallel_beam": _applied(operators.parallel_beam, lambda: {"size": 4, "angles": [0.0, 0.7], "detectors": 5}),
    "as_operator": _applied(
        operators.as_operator,
        lambda: {"source": _x(6, 4).to_sparse(), "input_shape": (1, 2, 2), "output_shape": (2, 3), "dtype": None},
    ),
    "BlockDCT": _applied(operators.BlockDCT, lambda: {"input_size": (4, 6), "block": 2, "count": 1}),
    "Wavelet": _applied(operators.Wavelet, lambda: {"input_size": (4, 6), "levels": 1, "family": "haar"}),
    "gaussian_blur": _applied(operators.gaussian_blur, lambda: {"input_size": (6, 6), "sigma": 0.7}),
    "operator": Call(
        _users,
        lambda: {
            "apply": lambda y: 2 * y,
            "adjoint": lambda x: 2 * x,
            "input_shape": (3,),
            "output_shape": (3,),
            "norm_sq": 4.0,
            "y": _x(2, 3),
        },
    ),
    "Transposed": Call(
        lambda operator, y: operators.Transposed(operator).apply(y),
        lambda: {"operator": operators.Dense(_x(3, 4)), "y": _x(2, 3)},
    ),
    "Composed": Call(
        lambda outer, inner: operators.Composed(outer, inner).norm_sq(),
        lambda: {
            "outer": operators.BlockDCT((3, 6), block=3),
            "inner": operators.Transposed(operators.BlockSensing(_x(5, 9), (3, 6))),
        },
    ),
    "cartesian_mask": Call(operators.cartesian_mask, lambda: {"size": (8, 8), "ratio": 0.3, "center": 0.1}),
    "radial_mask": Call(operators.radial_mask, lambda: {"size": (8, 8), "ratio": 0.3}),
    "to_blocks": Call(operators.to_blocks, lambda: {"image": _x(2, 1, 4, 4), "block": 2}),
    "from_blocks": Call(operators.from_blocks, lambda: {"rows": _x(8, 4), "size": (4, 4)}),
    "pad_to_blocks": Call(operators.pad_to_blocks, lambda: {"image": _x(2, 1, 5, 4), "block": 2}),
    "orthonormal_gaussian": Call(operators.orthonormal_gaussian, lambda: {"rows": 2, "columns": 4}),
    "lipschitz": Call(norms.lipschitz, lambda: {"target": nn.Conv2d(2, 3, 3), "input_size": (5, 5), "method": "auto"}),
    "randomized_norm_sq": Call(
        norms.randomized_norm_sq,
        lambda: {
            "apply": lambda y: 2 * y,
            "adjoint": lambda x: 2 * x,
            "input_shape": (3,),
            "output_shape": (3,),
            "failure": 1e-6,
        },
    ),
    "certified_norm_sq": Call(norms.certified_norm_sq, lambda: {"matrix": _x(3, 4), "rtol": 1e-3}),
    "LipschitzTracker": Call(
        _tracked, lambda: {"operator": operators.Dense(_x(3, 4)), "refresh": "drift", "tolerance": 0.1}
    ),
    "solve": Call(
        _solve,
        lambda: {
            "y": _x(5, 4),
            "weight": _x(3, 4),
            "bias": _x(3),
            "ridge": 0.1,
            "solver": solvers.ProxGD(3),
            "adjoint": adjoints.Unroll(),
            "x0": _x(5, 3).abs(),
            "tol": 1e-3,
        },
    ),
    "Huber": _datafit(solvers.Huber, delta=0.5),
    "Logistic": _datafit(solvers.Logistic),
    "Poisson": _datafit(solvers.Poisson, background=0.5),
    "Quadratic": _datafit(solvers.Quadratic),
    "SquaredHingeLoss": _datafit(solvers.SquaredHingeLoss),
    "check_datafit": Call(
        solvers.check_datafit, lambda: {"datafit": solvers.Huber(0.5), "y": _x(5), "trials": 2, "generator": None}
    ),
    "trace": Call(solvers.trace, lambda: {"problem": _problem(), "solver": solvers.ProxGD(3), "x0": _x(5, 3).abs()}),
    "conjugate_gradient": Call(
        solvers.conjugate_gradient,
        lambda: {"apply": lambda v: 2 * v, "target": _x(2, 3), "iterations": 2, "sample_dims": 1, "tol": 1e-3},
    ),
    "ProxGD": Call(solvers.ProxGD, lambda: {"iters": 3, "step": 0.1}),
    "FISTA": Call(solvers.FISTA, lambda: {"iters": 3, "step": 0.1, "restart": True}),
    "HeavyBall": Call(solvers.HeavyBall, lambda: {"iters": 3, "step": 0.1, "momentum": 0.4}),
    "ADMM": Call(solvers.ADMM, lambda: {"iters": 3, "rho": 0.5, "cg_iters": 3}),
    "ProxSG": Call(solvers.ProxSG, lambda: {"iters": 3, "tau": 0.5, "step": 0.1, "decay": 0.9, "sampling": "nice"}),
    "SVRG": Call(solvers.SVRG, lambda: {"outer": 1, "inner": 3, "tau": 2, "step": 0.1, "sampling": "nice"}),
    "RCD": Call(solvers.RCD, lambda: {"iters": 3, "tau": 0.5, "step": 0.1}),
    "WorkingSet": Call(_working_set, lambda: {"y": _x(1, 4), "weight": _x(6, 4), "iters": 5, "strength": 0.3}),
    "Exponential": Call(solvers.Exponential, lambda: {"rate": 0.5}),
    "Harmonic": Call(solvers.Harmonic, lambda: {"horizon": 5.0}),
    "Importance": Call(solvers.Importance, lambda: {"by": "columns"}),
    "Checkpoint": Call(adjoints.Checkpoint, lambda: {"every": 2}),
    "Implicit": Call(adjoints.Implicit, lambda: {"iters": 5, "tol": 1e-5, "method": "cg"}),
    **{
        f"SolverLinear, {type(solver).__name__}": _layer(
            mnn.SolverLinear, (5, 4), in_features=4, out_features=3, solver=solver, **LAYER
        )
        for solver in SOLVERS
    },
    "SolverConv2d": _layer(
        mnn.SolverConv2d, (2, 3, 5, 6), in_channels=3, out_channels=2, kernel_size=3, stride=1, padding=1, **LAYER
    ),
    "SolverConv1d": _layer(
        mnn.SolverConv1d, (2, 3, 6), in_channels=3, out_channels=2, kernel_size=3, dilation=1, groups=1, **LAYER
    ),
    "AdditiveDropout": _layer(mnn.AdditiveDropout, (5, 4), p=0.5, layer=nn.Linear(4, 3), feature_dim=-1),
    "ImportanceDropout": _layer(mnn.ImportanceDropout, (5, 4), p=0.5, feature_dim=-1),
    "SolverConv3d": _layer(mnn.SolverConv3d, (2, 3, 4, 4, 4), in_channels=3, out_channels=2, kernel_size=2, **LAYER),
    "SolverConvTranspose1d": _layer(
        mnn.SolverConvTranspose1d, (2, 3, 6), in_channels=3, out_channels=2, kernel_size=3, stride=2, **LAYER
    ),
    "SolverConvTranspose2d": _layer(
        mnn.SolverConvTranspose2d, (2, 3, 4, 5), in_channels=3, out_channels=2, kernel_size=3, padding=1, **LAYER
    ),
    "set_strength": Call(
        mnn.set_strength, lambda: {"model": mnn.convert(_mlp(), {"3": solvers.ProxGD(2)}), "value": 0.5}
    ),
    "sample": Call(mnn.sample, lambda: {"model": mnn.convert(_mlp(), {"3": solvers.ProxSG(2)}), "x": _x(5, 4), "n": 2}),
    "suggest": Call(mnn.suggest, lambda: {"model": _mlp(), "batch": _x(5, 4), "budget": 50.0, "loss": None}),
    "warm_start": Call(_warm, lambda: {"model": mnn.convert(_mlp(), {"3": solvers.ProxGD(2)})}),
    "SolverOptions": Call(
        mnn.SolverOptions,
        lambda: {
            "solver": solvers.ProxGD(2),
            "ridge": 0.1,
            "eval_mode": "mean",
            "mean_passes": 2,
            "start": "plain",
            "strength": 0.5,
            "learn_strength": False,
            "refresh": "drift",
            "tol": 0.1,
        },
    ),
    "convert": Call(mnn.convert, lambda: {"model": _mlp(), "rules": {"3": solvers.ProxGD(2)}, "inplace": False}),
    "plan": Call(
        lambda model, rules, example: str(mnn.plan(model, rules, example=example)),
        lambda: {"model": _mlp(), "rules": {"3": solvers.ProxGD(2)}, "example": _x(2, 4)},
    ),
    "Rule": Call(mnn.Rule, lambda: {"options": solvers.ProxGD(2), "activation": "auto", "dropout": "auto"}),
    "revert": Call(mnn.revert, lambda: {"model": mnn.convert(_mlp(), {"3": solvers.ProxGD(2)}), "inplace": False}),
    "explain": Call(
        lambda model, x: str(mnn.explain(model, x)),
        lambda: {"model": mnn.convert(_mlp(), {"3": solvers.ProxGD(2)}), "x": _x(5, 4)},
    ),
    "as_algorithm": Call(mnn.as_algorithm, lambda: {"model": _residual(), "algorithm": "heavy_ball"}),
    "OptimizationNet": Call(
        _optimization, lambda: {"x": _x(5, 4), "algorithm": "heavy_ball", "learnable": False, "channels": None}
    ),
    "HeavyBallUpdate": Call(mnn.HeavyBallUpdate, lambda: {"current": 0.5, "past": -0.5}),
    "NesterovUpdate": Call(mnn.NesterovUpdate, lambda: {"momentum": 0.5}),
    "Learning": Call(mnn.Learning, lambda: {"kind": "scalar", "constraint": "sum"}),
    "Architecture": Call(mnn.Architecture, lambda: {"channels": 4, "depth": 2, "shuffle": 1, "start": "solver"}),
    "ISTANet": _unrolled(mnn.ISTANet),
    "FISTANet": _unrolled(mnn.FISTANet),
    "ADMMNet": _unrolled(mnn.ADMMNet),
    "RidgeNet": Call(
        lambda y, **options: mnn.RidgeNet(**options)(y),
        lambda: {
            "y": _x(2, 4),
            "phi": operators.orthonormal_gaussian(4, 16),
            "phases": 2,
            "filters": 4,
            "size": 3,
            "guarantee": "convex",
            "noise": None,
            "channels": "apart",
            "exponents": None,
            "initial": None,
            "datafit": solvers.Quadratic(),
        },
    ),
    "RidgeTrainer": Call(
        lambda y, target, **options: mnn.RidgeTrainer(**options).step(y, target),
        lambda: {
            "y": _x(2, 4),
            "target": _x(2, 16),
            "net": mnn.RidgeNet(operators.orthonormal_gaussian(4, 16), phases=2, filters=4, size=3),
            "steps": 4,
            "rate": 0.5,
        },
    ),
    "smooth_tv_reconstruction": Call(
        mnn.smooth_tv_reconstruction,
        lambda: {
            "y": _x(2, 1, 4, 4),
            "phi": operators.Inpainting(torch.ones(1, 4, 4)),
            "weight": 0.1,
            "smoothing": 0.1,
            "start": _x(2, 1, 4, 4),
            "tol": 1e-2,
            "iterations": 5,
        },
    ),
    "least_squares_start": Call(
        mnn.least_squares_start, lambda: {"phi": _x(4, 16), "blocks": _x(20, 16), "ridge": 1e-6}
    ),
    "sparse_reconstruction": Call(
        mnn.sparse_reconstruction,
        lambda: {
            "y": _x(2, 1, 4, 4),
            "phi": operators.Inpainting(torch.ones(1, 4, 4)),
            "frame": operators.Wavelet((4, 4), levels=1, family="haar"),
            "weight": 0.1,
            "solver": solvers.FISTA(3),
        },
    ),
    "read": Call(network.read, lambda: {"model": _mlp(), "example": _x(2, 4)}),
    "sequence": Call(network.sequence, lambda: {"model": _mlp(), "example": _x(2, 4)}),
    "ProxProp": Call(
        _proxprop,
        lambda: {
            "model": _mlp(),
            "x": _x(6, 4),
            "tau_theta": 0.5,
            "method": "exact",
            "cg_iters": 3,
            "gram": "exact",
            "skip_last": True,
            "include": None,
            "exclude": None,
            "fused": False,
        },
    ),
    "SubsampledGram": Call(train.SubsampledGram, lambda: {"fraction": 0.5}),
    "CachedGram": Call(train.CachedGram, lambda: {"every": 2, "decay": 0.5}),
    "Relative": Call(
        lambda factor, x: _proxprop(_mlp(), x, tau_theta=train.Relative(factor)),
        lambda: {"factor": 2.0, "x": _x(6, 4)},
    ),
    "descent_angle": Call(train.descent_angle, lambda: {"direction": [_x(3)], "gradient": [_x(3) + 0.5]}),
    "metric_range": Call(train.metric_range, lambda: {"rows": _x(5, 3), "tau_theta": 0.5, "bias": True}),
    "penalty_energy": Call(
        train.penalty_energy,
        lambda: {
            "model": _chain(),
            "x": _x(6, 4),
            "y": _x(6, 2),
            "loss": nn.functional.mse_loss,
            "a": [_x(6, 5)],
            "z": [_x(6, 5)],
            "gamma": 0.5,
            "rho": 0.5,
        },
    ),
    "penalty_sweep": Call(
        train.penalty_sweep,
        lambda: {
            "model": _chain(),
            "x": _x(6, 4),
            "y": _x(6, 2),
            "loss": nn.functional.mse_loss,
            "tau": 0.1,
            "tau_theta": 0.5,
        },
    ),
    "paper_tau_theta": Call(train.paper_tau_theta, lambda: {"tau_theta": 0.5, "paper_rows": 500, "rows": 64}),
    "LPOM": _trained(train.LPOM, mu=0.5, loss="squared", sweep="gauss_seidel"),
    "MAC": _trained(train.MAC, mu=0.5, loss="squared", x_step="gauss_newton", growth=1.0),
    "BlockPenalty": _trained(train.BlockPenalty, mu=0.5, loss="cross_entropy"),
    "SplitADMM": _trained(train.SplitADMM, mu=0.5, splitting="output", warm=0),
    "LiftedReLU": _trained(train.LiftedReLU, mu=0.5),
    "Recipe": Call(
        Recipe, lambda: {"ratio": 9.0, "damping": 5.0, "momentum": 0.9, "rate": 1.0, "sweeps": 1, "block": 64}
    ),
    "NMF": _fitted(factor.NMF, lambda: _rows(6, 5), lam=0.3, tol=1e-2, max_iter=20, n_components=2),
    "LowRank": _fitted(factor.LowRank, lambda: _rows(6, 5), lam=0.3, tol=1e-2, max_iter=20),
    "NMFCV": _searched(factor.NMFCV, lambda: _rows(6, 5)),
    "LowRankCV": _searched(factor.LowRankCV, lambda: _rows(6, 5)),
    "MatrixCompletionCV": _searched(factor.MatrixCompletionCV, lambda: _rows(6, 5)),
    "Share": Call(
        lambda Y, value: factor.LowRank(factor.Share(value), max_iter=20).fit(Y),
        lambda: {"Y": _rows(6, 5), "value": 0.3},
    ),
    "SparseDictionary": _fitted(factor.SparseDictionary, lambda: _rows(6, 5), lam=0.3, gamma=0.1, max_iter=20),
    "RobustPCA": _fitted(factor.RobustPCA, lambda: _rows(6, 5), lam=0.3, gamma=1.0, max_iter=20),
    "MatrixCompletion": _fitted(factor.MatrixCompletion, lambda: _rows(6, 5), lam=0.3, max_iter=20),
    "DropoutFactorization": _fitted(factor.DropoutFactorization, lambda: _rows(6, 5), n_components=2, p=0.5),
    "CPTensor": Call(
        lambda Y, **options: factor.CPTensor(**options).fit(Y).factors_,
        lambda: {"Y": _rows(4, 3, 3), "lam": 0.3, "max_iter": 20, "n_components": 2},
    ),
    "certify": Call(
        factor.certify,
        lambda: {"Y": _rows(6, 5), "U": _rows(6, 2), "V": _rows(5, 2), "lam": 0.3, "regularizer": "l2", "tol": 1e-3},
    ),
    "certify_tensor": Call(
        factor.certify_tensor,
        lambda: {"Y": _rows(4, 3, 3), "factors": [_rows(4, 2), _rows(3, 2), _rows(3, 2)], "lam": 0.3},
    ),
    "factorize": Call(
        factor.factorize, lambda: {"Y": _rows(6, 5), "lam": 0.3, "regularizer": "nonnegative", "max_iter": 20}
    ),
    "dropout_optimum": Call(factor.dropout_optimum, lambda: {"Y": _rows(6, 5), "rank": 3, "p": 0.5}),
    "equalize": Call(factor.equalize, lambda: {"U": _rows(6, 3), "V": _rows(5, 3)}),
    "nuclear_squared": Call(factor.nuclear_squared, lambda: {"X": _rows(6, 5)}),
    "ParallelReLU": Call(_relu, lambda: {"X": _rows(8, 1), "y": _rows(8), "lam": 0.1, "tol": 1e-3}),
    "ParallelNetwork": Call(_parallel, lambda: {"X": _x(6, 4), "y": _x(6, 2), "lam": 0.5, "tol": 1e-2}),
    "DropoutPenalty": Call(
        _penalty, lambda: {"model": nn.Sequential(_chain(), nn.Dropout(), nn.Linear(2, 2)), "x": _x(6, 4), "p": 0.5}
    ),
    "certify_relu": Call(
        homogeneous.certify_relu,
        lambda: {"X": _rows(8, 1), "y": _rows(8), "weights": _rows(2, 2), "outputs": _rows(2), "lam": 0.3},
    ),
    "homogeneity_degree": Call(homogeneous.homogeneity_degree, lambda: {"module": _homogeneous(), "x": _x(3, 4)}),
    "path_norm": Call(homogeneous.path_norm, lambda: {"module": _homogeneous(), "example": _x(3, 4), "order": 2.0}),
    "product_of_norms": Call(homogeneous.product_of_norms, lambda: {"module": _homogeneous()}),
    "smooth_surrogate": Call(homogeneous.smooth_surrogate, lambda: {"module": _homogeneous()}),
    "weight_decay": Call(homogeneous.weight_decay, lambda: {"module": _homogeneous()}),
    "factor_norms": Call(homogeneous.factor_norms, lambda: {"module": _homogeneous()}),
}


class _Strange:
    """An object of no use, whose description fails."""

    def __repr__(self) -> str:
        return "_Strange()"


def _with(values: Any, entry: float) -> Any:
    values = values.clone() if isinstance(values, Tensor) else np.array(values, dtype=float)
    if isinstance(values, Tensor) and not values.is_floating_point():
        values = values.float()
    if values.size if isinstance(values, np.ndarray) else values.numel():
        values.reshape(-1)[0] = entry
    return values


TENSORS: dict[str, Callable[[Any], Any]] = {
    "NaN": lambda t: _with(t, math.nan),
    "infinite": lambda t: _with(t, math.inf),
    "huge": lambda t: _with(t, 3e38),
    "tiny": lambda t: t * 1e-38,
    "scaled up": lambda t: t * 1e30,
    "zero": lambda t: t * 0,
    "no rows": lambda t: t[:0],
    "no columns": lambda t: t[..., :0],
    "one entry less": lambda t: t[..., :-1],
    "one row less": lambda t: t[:-1],
    "a dimension more": lambda t: t[None],
    "two dimensions more": lambda t: t[None, None],
    "a dimension less": lambda t: t[0],
    "one number": lambda t: t.reshape(-1)[0],
    "whole numbers": lambda t: torch.as_tensor(t).to(torch.int64),
    "booleans": lambda t: torch.as_tensor(t) > 0,
    "complex": lambda t: torch.as_tensor(t).to(torch.complex64),
    "another precision": lambda t: torch.as_tensor(t).to(torch.float16),
    "double": lambda t: torch.as_tensor(t).double(),
    "on no device": lambda t: torch.as_tensor(t).to("meta"),
    "sparse": lambda t: torch.as_tensor(t).to_sparse(),
    "an array": lambda t: np.asarray(t),
    "an array of objects": lambda t: np.asarray(t).astype(object),
    "an array of strings": lambda t: np.asarray(t).astype(str),
    "a list": lambda t: np.asarray(t).tolist(),
    "not contiguous": lambda t: torch.as_tensor(t).mT.contiguous().mT if torch.as_tensor(t).dim() > 1 else t,
    "one value expanded": lambda t: torch.as_tensor(t).reshape(-1)[:1].expand(torch.as_tensor(t).shape),
    "in a graph": lambda t: torch.as_tensor(t).float().clone().requires_grad_() * 1.0,
}
OTHERS: dict[str, Any] = {
    "None": None,
    "text": "nonsense",
    "empty text": "",
    "bytes": b"bytes",
    "a list": [],
    "a dictionary": {},
    "a function": math.sin,
    "a class": nn.ReLU,
    "an object": _Strange(),
    "true": True,
    "NaN": math.nan,
    "infinity": math.inf,
    "minus infinity": -math.inf,
    "minus one": -1,
    "zero": 0,
    "a fraction": Fraction(1, 3),
    "complex": 1 + 2j,
    "huge": 1e308,
    "tiny": 5e-324,
    "half": 0.5,
    "a tensor of NaN": torch.tensor(math.nan),
    "a tensor": torch.tensor(0.5),
    "two numbers": torch.tensor([0.5, 0.5]),
    "an array": np.array(0.5),
    "a numpy number": np.float64(0.5),
    "a numpy integer": np.int64(2),
    "a pair": (2, 2),
    "a negative pair": (-1, 2),
    "a module": nn.Identity(),
    "an empty network": nn.Sequential(),
    "a network without linear maps": nn.Sequential(nn.ReLU()),
    "a lazy layer": nn.LazyLinear(3),
    "a network without data": _chain().to("meta"),
    "a network in half precision": _chain().half(),
    "a network of NaN": _chain().apply(lambda m: m.weight.data.fill_(math.nan) if hasattr(m, "weight") else None),
}


def places() -> list[tuple[str, str, str]]:
    """Every (call, argument, hostile value)."""
    found = []
    for name, call in CALLS.items():
        for argument, value in call.arguments().items():
            kinds = list(OTHERS)
            if isinstance(value, Tensor | np.ndarray):
                kinds += [f"data: {kind}" for kind in TENSORS]
            found += [(name, argument, kind) for kind in kinds]
    return found


def cases() -> st.SearchStrategy[tuple[str, str, str]]:
    return st.sampled_from(places())


def check(case: tuple[str, str, str]) -> None:
    """The call answers, or raises an error of the library that has one line."""
    name, argument, kind = case
    call = CALLS[name]
    arguments = call.arguments()
    if kind.startswith("data: "):
        try:
            arguments[argument] = TENSORS[kind.removeprefix("data: ")](arguments[argument])
        except Exception:  # this value does not have the form, such as a row less of a number
            return
    else:
        arguments[argument] = copy.deepcopy(OTHERS[kind])  # a call may change it, such as a lazy layer
    with contextlib.suppress(MinimandError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            call.function(**arguments)
        except (TypeError, ValueError) as error:
            # Estimators check data by scikit-learn's own functions, whose errors its users know.
            if "sklearn" not in "".join(frame.filename for frame in traceback.extract_tb(error.__traceback__)):
                raise

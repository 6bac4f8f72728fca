"""Law: nothing is accepted and ignored. An attribute of a public class can be set with effect, or it cannot be set."""

import copy
import dataclasses
import enum
import importlib
import inspect
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import minimand
from minimand.adjoints import Checkpoint
from minimand.errors import MinimandError, ReadOnlyError
from minimand.functions import LayerObjective
from minimand.homogeneous import DropoutPenalty, ParallelNetwork
from minimand.nn import (
    AdditiveDropout,
    ADMMNet,
    Architecture,
    FISTANet,
    ImportanceDropout,
    ISTANet,
    OptimizationNet,
    RidgeNet,
    RidgeTrainer,
    SolverConv1d,
    SolverConv2d,
    SolverConv3d,
    SolverConvTranspose1d,
    SolverConvTranspose2d,
    SolverLinear,
    convert,
)
from minimand.nn.blocks import Coefficients, Learning, Transition, TwoStreamBlock
from minimand.nn.unrolled import CycleSpinning, Shrinkage, Transform
from minimand.norms import LipschitzTracker
from minimand.operators import (
    BlockDCT,
    BlockSensing,
    Composed,
    Conv1d,
    Conv2d,
    Conv3d,
    ConvTranspose1d,
    ConvTranspose2d,
    Dense,
    Inpainting,
    MultiCoilFourier,
    SubsampledFourier,
    Transposed,
    Wavelet,
    orthonormal_gaussian,
)
from minimand.solvers import ProxGD, ProxSG
from minimand.train import LPOM, MAC, BlockPenalty, LiftedReLU, ProxProp, SplitADMM

FOLDER = Path(minimand.__file__).parent
PACKAGES = sorted({".".join(("minimand", *p.parent.relative_to(FOLDER).parts)) for p in FOLDER.rglob("*/__init__.py")})


def _public() -> dict[str, type]:
    found = {}
    for package in map(importlib.import_module, PACKAGES):
        for value in (getattr(package, name) for name in getattr(package, "__all__", ())):
            if inspect.isclass(value):
                found[value.__name__] = value
    return found


def _kind(kind: Any) -> str:
    """Exceptions, enumerations, named tuples and abstract bases hold no options. scikit-learn sets them before fit."""
    if issubclass(kind, BaseException | enum.Enum | tuple) or inspect.isabstract(kind):
        return "exempt"
    if any(base.__module__.startswith("sklearn") for base in kind.__mro__):
        return "exempt"
    return "record" if dataclasses.is_dataclass(kind) else "object"


PUBLIC = _public()
RECORDS = {name: kind for name, kind in PUBLIC.items() if _kind(kind) == "record"}


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def _phi() -> Tensor:
    return orthonormal_gaussian(4, 16, generator=torch.Generator().manual_seed(0))


def _seeded(build: Callable[..., Any], *args: Any, **defaults: Any) -> Callable[..., Any]:
    def built(**options: Any) -> Any:
        torch.manual_seed(0)
        return build(*args, **(defaults | options))

    return built


def _image(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def _seen(*shape: int) -> Callable[[Any], Tensor]:
    """What an operator or a module makes of an input."""

    def observe(made: Any) -> Tensor:
        torch.manual_seed(1)
        call = made if isinstance(made, nn.Module) else made.apply
        result: Tensor = call(_image(*shape)).detach()
        return result

    return observe


@dataclasses.dataclass(frozen=True)
class Case:
    """An object, the attributes that have an effect when they are set, with other values, and how the effect is seen.

    ``again`` builds the object with one other value; default: ``build`` with this option.
    """

    build: Callable[..., Any]
    effective: dict[str, Any] = dataclasses.field(default_factory=dict)
    observe: Callable[[Any], Tensor] = lambda made: torch.zeros(())
    again: Callable[[str, Any], Any] | None = None

    def rebuilt(self, name: str) -> Any:
        """The object that was built with the other value."""
        value = self.effective[name]
        return self.build(**{name: value}) if self.again is None else self.again(name, value)


def _layer(kind: type, *sizes: int) -> Callable[..., Any]:
    build = _seeded(kind, *sizes, solver=ProxSG(4, tau=0.5))
    return lambda **options: build(**options).eval()


def _ridge() -> RidgeNet:
    return RidgeNet(_phi(), phases=2, filters=4, size=3)


def _ridge_steps(trainer: RidgeTrainer) -> Tensor:
    torch.manual_seed(1)
    return torch.tensor([trainer.step(_image(3, 16) @ _phi().mT, _image(3, 16)) for _ in range(4)])


def _transform(seed: int) -> Transform:
    torch.manual_seed(seed)
    return Transform(Architecture(channels=2, depth=1), residual=False)


def _shrinkage(**options: Any) -> Shrinkage:
    return Shrinkage(**({"transform": _transform(0), "threshold": torch.tensor(0.1), "step": 1.0} | options))


def _additive(drop: AdditiveDropout) -> Tensor:
    torch.manual_seed(1)
    return drop(_image(4, 4), _image(4, 4) + 1)


def _weighted(build: Callable[[Tensor], Any], weight: Tensor, *shape: int) -> Case:
    """An operator whose weight can be replaced by one of the same shape."""
    return Case(lambda: build(weight), {"weight": 2 * weight}, _seen(*shape), lambda _, value: build(value))


OPTIONS = {
    "solver": ProxGD(3), "adjoint": Checkpoint(), "ridge": 0.5, "eval_mode": "mean", "shared_sample": True,
    "mean_passes": 3,
}  # fmt: skip
SMALL = {"phases": 2, "architecture": Architecture(channels=2)}
DENSE, KERNEL = _image(3, 4), _image(2, 2, 3, 3)
CONV = Conv2d(KERNEL, (4, 4))

CASES: dict[str, Case] = {
    "SolverLinear": Case(_layer(SolverLinear, 4, 3), OPTIONS, _seen(5, 4)),
    "SolverConv2d": Case(_layer(SolverConv2d, 4, 3, 3), OPTIONS, _seen(2, 4, 5, 5)),
    "SolverConv1d": Case(_layer(SolverConv1d, 4, 3, 3), OPTIONS, _seen(2, 4, 5)),
    "SolverConv3d": Case(_layer(SolverConv3d, 4, 3, 2), OPTIONS, _seen(2, 4, 3, 3, 3)),
    "SolverConvTranspose1d": Case(_layer(SolverConvTranspose1d, 4, 3, 3), OPTIONS, _seen(2, 4, 5)),
    "SolverConvTranspose2d": Case(_layer(SolverConvTranspose2d, 4, 3, 3), OPTIONS, _seen(2, 4, 5, 5)),
    "AdditiveDropout": Case(AdditiveDropout, {"p": 0.25, "feature_dim": -2}, _additive),
    "ImportanceDropout": Case(ImportanceDropout, {"p": 0.25, "feature_dim": -2}, _seen(4, 4)),
    "OptimizationNet": Case(lambda: OptimizationNet([nn.Linear(2, 2)])),
    "Coefficients": Case(lambda: Coefficients([1.0, 0.5], Learning())),
    "Transition": Case(lambda: Transition(nn.Linear(2, 3), nn.Linear(2, 3))),
    "TwoStreamBlock": Case(lambda: TwoStreamBlock(nn.Linear(2, 3), nn.Linear(2, 3))),
    "ISTANet": Case(lambda: ISTANet(_phi(), **SMALL)),
    "FISTANet": Case(lambda: FISTANet(_phi(), **SMALL)),
    "ADMMNet": Case(lambda: ADMMNet(_phi(), **SMALL)),
    "RidgeNet": Case(_ridge, observe=_seen(2, 4)),
    "RidgeTrainer": Case(lambda: RidgeTrainer(_ridge(), steps=4), observe=_ridge_steps),
    "Transform": Case(lambda: _transform(0)),
    "CycleSpinning": Case(lambda: CycleSpinning(BlockDCT((8, 8)), 0.1)),
    "Shrinkage": Case(
        _shrinkage,
        {"transform": _transform(1), "threshold": torch.tensor(0.5), "step": 2.0},
        lambda f: f.prox(_image(2, 1, 4, 4)).detach().sum() + f.value(_image(2, 1, 4, 4)).detach(),
    ),
    "LayerObjective": Case(lambda: LayerObjective(torch.eye(2))),
    "DropoutPenalty": Case(lambda: DropoutPenalty(_net(), 0.5)),
    "ParallelNetwork": Case(
        lambda lam=0.1, tol=1e-3: ParallelNetwork(lambda: nn.Linear(2, 1, bias=False), lam, tol=tol),
        {"lam": 0.2, "tol": 1e-2},
        lambda net: torch.tensor([net.lam, net.tol]),
    ),
    "LipschitzTracker": Case(
        lambda **o: LipschitzTracker(o.get("operator", Dense(DENSE))).eval(),
        {"operator": Dense(2 * DENSE)},
        lambda tracker: tracker.bound(),
    ),
    "Dense": _weighted(Dense, DENSE, 2, 4),
    "Conv2d": _weighted(lambda w: Conv2d(w, (4, 4)), KERNEL, 2, 4, 4),
    "Conv1d": _weighted(lambda w: Conv1d(w, 4), KERNEL[..., 0], 2, 4),
    "Conv3d": _weighted(lambda w: Conv3d(w, (4, 4, 4)), KERNEL[..., None], 2, 4, 4, 4),
    "ConvTranspose1d": Case(
        lambda operator=None: ConvTranspose1d(KERNEL[..., 0] if operator is None else operator.weight, 4),
        {"operator": Conv1d(2 * KERNEL[..., 0], 6)},
        _seen(2, 4),
    ),
    "ConvTranspose2d": Case(
        lambda operator=None: ConvTranspose2d(KERNEL if operator is None else operator.weight, (4, 4)),
        {"operator": Conv2d(2 * KERNEL, (6, 6))},
        _seen(2, 4, 4),
    ),
    "Composed": Case(
        lambda **o: Composed(**({"outer": Conv2d(KERNEL, (2, 2), padding=1), "inner": CONV} | o)),
        {"outer": Conv2d(3 * KERNEL, (2, 2), padding=1), "inner": Conv2d(2 * KERNEL, (4, 4))},
        _seen(2, 4, 4),
    ),
    "Transposed": Case(
        lambda **o: Transposed(o.get("operator", Dense(DENSE))), {"operator": Dense(2 * DENSE)}, _seen(2, 3)
    ),
    "BlockSensing": _weighted(lambda w: BlockSensing(w, (4, 4)), DENSE, 1, 4, 4),
    "Inpainting": _weighted(Inpainting, torch.ones(1, 4, 4), 1, 4, 4),
    "SubsampledFourier": _weighted(SubsampledFourier, torch.ones(4, 4), 1, 4, 4),
    "MultiCoilFourier": _weighted(lambda w: MultiCoilFourier(torch.ones(4, 4), w), _image(3, 2, 4, 4), 1, 2, 4, 4),
    "BlockDCT": Case(lambda: BlockDCT((8, 8))),
    "Wavelet": Case(lambda: Wavelet((8, 8), levels=1)),
    "ProxProp": Case(lambda **o: ProxProp(_net(), **o), {"tau_theta": 0.1}, lambda p: torch.tensor(p.tau_theta)),
    "LPOM": Case(lambda: LPOM(_net())),
    "MAC": Case(lambda: MAC(_net())),
    "BlockPenalty": Case(lambda: BlockPenalty(_net())),
    "LiftedReLU": Case(lambda: LiftedReLU(_net())),
    "SplitADMM": Case(lambda: SplitADMM(_net())),
}
#: A base class, and LayerParallel, which needs a process group: tests/test_lifted_parallel.py.
ELSEWHERE = {"LayerParallel", "Regularizer"}
#: Results, counters, a generator of random numbers, and the path in error messages; a frame's weight has its precision.
STATE = {"generator", "path", "refreshes", "history_", "certificate_", "training", "weight"}


def test_every_public_class_is_a_case() -> None:
    objects = {name for name, kind in PUBLIC.items() if _kind(kind) == "object"}
    assert objects - ELSEWHERE == set(CASES)


@pytest.mark.parametrize("name", RECORDS)
def test_records_are_frozen(name: str) -> None:
    parameters: Any = getattr(RECORDS[name], "__dataclass_params__")  # noqa: B009 -- mypy does not know it
    assert parameters.frozen
    blank = object.__new__(RECORDS[name])
    for field in [*(field.name for field in dataclasses.fields(RECORDS[name])), "unknown"]:
        with pytest.raises(AttributeError):
            setattr(blank, field, 1)


def _own(made: Any) -> set[str]:
    """The public attributes and the arguments of the constructor, without what torch manages."""
    taken = inspect.signature(type(made).__init__).parameters
    managed = {"self", "args", "kwargs"}
    if isinstance(made, nn.Module):
        managed |= {*made._parameters, *made._buffers, *made._modules, *vars(nn.Linear(1, 1))}
    return {name for name in (*vars(made), *taken) if not name.startswith("_")} - managed


@pytest.mark.parametrize("name", CASES)
def test_what_has_no_effect_cannot_be_set(name: str) -> None:
    case = CASES[name]
    made = case.build()
    own = _own(made) - STATE - set(case.effective)
    before = case.observe(case.build())
    refused = set()
    for attribute in own:
        try:
            setattr(made, attribute, getattr(made, attribute, 1))
        except AttributeError:
            refused.add(attribute)
    # Operators of hot loops are plain objects, whose derived attributes are read at every product.
    allowed = {"geometry"} if name in ("Conv1d", "Conv2d", "Conv3d") else set()
    assert own - refused == allowed
    torch.testing.assert_close(case.observe(made), before)


@pytest.mark.parametrize(("name", "attribute"), [(n, a) for n, case in CASES.items() for a in case.effective])
def test_what_can_be_set_has_the_effect_of_the_constructor(name: str, attribute: str) -> None:
    case = CASES[name]
    made = case.build()
    case.observe(made)
    setattr(made, attribute, case.effective[attribute])
    torch.testing.assert_close(case.observe(made), case.observe(case.rebuilt(attribute)), rtol=0, atol=0)


CLOSED = ["ProxProp", "LPOM", "MAC", "DropoutPenalty", "CycleSpinning", "LayerObjective", "BlockDCT"]


@pytest.mark.parametrize("name", CLOSED)
def test_misspelt_attributes_are_refused(name: str) -> None:
    made = CASES[name].build()
    with pytest.raises(
        ReadOnlyError, match=rf"^{name}\.misspelt cannot be set after construction; build another {name}"
    ):
        made.misspelt = 1


@pytest.mark.parametrize("copied", [lambda m: m, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_layers_refuse_options_of_their_records_and_take_names_of_the_user(copied: Callable[[Any], Any]) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    for layer in map(copied, (SolverLinear(3, 4), convert(model, {"0": ProxGD(3)}).get_submodule("0"))):
        for name in ("iters", "step", "in_features", "options", "activation", "function"):
            with pytest.raises(ReadOnlyError, match="or set one of: adjoint, eval_mode"):
                setattr(layer, name, 1)
        layer.note = "mine"
        layer.note = "mine still"
        layer.weight = nn.Parameter(torch.zeros(4, 3))
        layer.extra = nn.Linear(1, 1)
        assert not layer.train().eval().training
        layer.solver = ProxSG(5, tau=0.5)
        with pytest.raises(ReadOnlyError, match=r"SolverLinear\.tau cannot be set"):
            layer.tau = 0.1


@pytest.mark.parametrize("name", ["strenght", "eval_mod", "solvers", "ridgee", "generater"])
def test_layers_refuse_names_that_are_nearly_their_own(name: str) -> None:
    with pytest.raises(ReadOnlyError, match=f"SolverLinear.{name} would have no effect; did you mean"):
        setattr(SolverLinear(3, 2), name, 0.5)


@pytest.mark.parametrize("name", ["tol", "iterations", "tail"])
def test_modules_refuse_names_of_arguments_of_their_methods(name: str) -> None:
    with pytest.raises(ReadOnlyError, match=rf"^RidgeNet\.{name} would have no effect; it is an argument of \w+"):
        setattr(CASES["RidgeNet"].build(), name, 1e-6)


def test_a_subclass_of_the_users_sets_its_own_attributes() -> None:
    class Scaled(SolverLinear):
        def __init__(self) -> None:
            super().__init__(3, 4)
            self.scale = 2.0

        def forward(self, y: Tensor, *, factor: float = 1.0) -> Tensor:
            return factor * super().forward(y)

    layer = Scaled()
    layer.factor = 3.0  # an argument of the user's own method
    with pytest.raises(ReadOnlyError):
        layer.in_features = 4
    assert layer.scale == 2.0


def test_derived_operators_do_not_take_a_weight() -> None:
    for operator in (Transposed(Dense(DENSE)), Composed(Conv2d(KERNEL, (2, 2), padding=1), CONV)):
        with pytest.raises(ReadOnlyError, match="use with_weight"):
            operator.weight = 2 * operator.weight
        assert isinstance(operator.with_weight(2 * operator.weight), type(operator))


def test_read_only_is_an_error_of_both_worlds() -> None:
    assert issubclass(ReadOnlyError, MinimandError)
    assert issubclass(ReadOnlyError, AttributeError)

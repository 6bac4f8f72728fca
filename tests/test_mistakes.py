"""Law: a plausible mistake raises, before any work, an error of one sentence with the place and the remedy."""

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import minimand
from minimand import LPOM, ProxProp, SolverConv2d, SolverLinear, convert, explain
from minimand.arguments import checked
from minimand.errors import MinimandError
from minimand.factor import (
    NMF,
    DropoutFactorization,
    DropoutPenalty,
    LowRank,
    MatrixCompletion,
    ParallelNetwork,
    ParallelReLU,
    factorize,
)
from minimand.functions import L1
from minimand.nn import AdditiveDropout, ImportanceDropout, ISTANet, OptimizationNet, SolverOptions, revert
from minimand.solvers import Problem, ProxGD
from minimand.train import MAC, SubsampledGram

X, LABELS = torch.randn(12, 8), torch.arange(12) % 3
ROWS = np.abs(np.random.default_rng(0).normal(size=(6, 5)))


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))


def _empty() -> nn.Linear:
    layer = nn.Linear(8, 1)
    layer.weight = nn.Parameter(torch.ones(0, 8))
    return layer


def _frozen() -> nn.Sequential:
    return _net().requires_grad_(False)


def _broken_weight() -> Tensor:
    net = convert(_net(), {"2": ProxGD()})
    net[2].weight.data.fill_(float("nan"))
    return net(X)


def _another_state() -> None:
    ProxProp(_net()).load_state_dict(ProxProp(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))).state_dict())


def _with_nan(values: Any) -> Any:
    values = values.clone() if isinstance(values, Tensor) else values.copy()
    values[0, 0] = float("nan")
    return values


def _attached(net: nn.Module, x: Any, autocast: bool = False) -> Tensor:
    ProxProp(net).attach(torch.optim.SGD(net.parameters(), 0.1))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        return net(x)


def _subnetwork() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 1, bias=False), nn.ReLU(), nn.Linear(1, 3, bias=False))


def _blocks() -> OptimizationNet:
    return OptimizationNet([nn.Linear(8, 8), nn.Linear(8, 8)], "heavy_ball")


BOTH = "the input is torch.float64 .* torch.float32; convert"
MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "another dtype": (lambda: SolverLinear(8, 6)(X.double()), "SolverLinear: the input is torch.float64 .* convert"),
    "a convolution's": (lambda: SolverConv2d(1, 2, 3)(torch.ones(2, 1, 6, 6).double()), "SolverConv2d: .* convert"),
    "a function for the bias": (lambda: SolverLinear(8, 6, L1(0.1)), r"SolverLinear\(bias=…\) takes True or False"),
    "an array": (lambda: SolverLinear(8, 6)(np.ones((2, 8))), "got a ndarray; convert"),
    "whole numbers": (lambda: SolverLinear(8, 6)(torch.ones(2, 8).int()), "torch.int32; convert"),
    "a converted layer's": (lambda: explain(convert(_net(), {"0": ProxGD()}), X.double()), "^0: .* convert"),
    "a shape": (lambda: convert(_net(), {"0": ProxGD()})(X[:, :3]), r"^0: .*\(\.\.\., 8\), got \(12, 3\)"),
    "a weight of NaN": (_broken_weight, "^2: the weight holds 18 NaN"),
    "a class": (lambda: SolverLinear(8, 6, activation=nn.ReLU), r"ReLU is a class; .* nn.ReLU\(\)"),
    "data for a loader": (lambda: LPOM(_net()).fit((X, LABELS), 1), r"pairs \(x, y\).*wrap"),
    "a tensor for a loader": (lambda: MAC(_net()).fit(X, 1), r"pairs \(x, y\).*wrap"),
    "triples": (lambda: LPOM(_net()).fit([(X, LABELS, LABELS)], 1), "got a tuple of 3"),
    "no loader": (lambda: LPOM(_net()).fit(None, 1), "got a NoneType"),
    "dictionaries": (lambda: LPOM(_net()).fit([{"x": X}], 1), "got a dict"),
    "nothing to fit": (lambda: LPOM(_frozen()).fit([(X, LABELS)], 1), r"every layer is frozen \(0, 2\)"),
    "nothing to step": (lambda: LPOM(_frozen()).step(X, LABELS), "every layer is frozen"),
    "NaN in a batch": (lambda: LPOM(_net()).fit([(_with_nan(X), LABELS)], 1), "^the input x holds 1 NaN(?!.*Recipe)"),
    "solver layers": (lambda: LPOM(convert(_net(), {"0": ProxGD()})), r"^0 \(SolverLinear\) .*revert"),
    "solver layers, too": (lambda: ProxProp(convert(_net(), {"0": ProxGD()})), "of solver layers, here 0"),
    "no network": (lambda: LPOM("net"), "takes an nn.Module, got a str"),
    "another state": (_another_state, "from another network"),
    "missing entries": (lambda: LowRank(0.5).fit(_with_nan(ROWS)), "Y contains NaN, 1 of its 30 .* MatrixCompletion"),
    "negative entries": (lambda: NMF(0.1).fit(-ROWS), "^Negative values in data passed to NMF: clip or shift them$"),
    "a penalty's dtype": (lambda: DropoutPenalty(_net(), 0.5)(X.double()), f"^0: {BOTH}"),
    "a penalty's shape": (lambda: DropoutPenalty(_net(), 0.5)(X[:, :3]), r"^0: .*\(\.\.\., 8\), got \(12, 3\)"),
    "a penalty's array": (lambda: DropoutPenalty(_net(), 0.5)(X.numpy()), "^0: .* got a ndarray; convert"),
    "a tapped layer's dtype": (lambda: _attached(_net(), X.double()), f"^0: {BOTH}"),
    "a tapped layer's, evaluated": (lambda: torch.no_grad()(_attached)(_net(), X.double()), f"^0: {BOTH}"),
    "a tapped layer's, autocast": (lambda: _attached(_net(), X.double(), autocast=True), f"^0: {BOTH}"),
    "a tapped convolution's": (
        lambda: _attached(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Conv2d(2, 2, 3)), torch.ones(2, 1, 6, 6).double()),
        f"^0: {BOTH}",
    ),
    "whole numbers, tapped": (lambda: _attached(_net(), torch.ones(2, 8).int()), "^0: .* torch.int32; convert"),
    "a block's dtype": (lambda: _blocks()(X.double()), rf"^blocks\.0 \(Linear\): {BOTH}"),
    "a block's array": (lambda: _blocks()(X.numpy()), "takes a tensor, got a ndarray; convert"),
    "an array for LPOM": (lambda: LPOM(_net()).step(X.numpy(), LABELS), "got a ndarray; convert"),
    "no weight": (lambda: LowRank(0).fit(ROWS), r"^lam must be .* > 0, got 0.*Share\(0\.1\) .* lambda_max\(Y\)"),
    "a weight in words": (lambda: NMF("auto").fit(ROWS), r"got 'auto'; .* lambda_max"),
    "no weight on a path": (lambda: LowRank(1.0).path(ROWS, [1.0, 0.0]), "^lams must be .* got 0.*lambda_max"),
    "no weight to factorize": (lambda: factorize(ROWS, lam=0), "^lam must be .* got 0.*lambda_max"),
    "missing, in a tensor": (
        lambda: LowRank(0.1).fit(_with_nan(torch.tensor(ROWS))),
        "Y contains NaN, 1 of its 30 .* Matrix",
    ),
    "missing, with dropout": (lambda: DropoutFactorization(2).fit(_with_nan(ROWS)), "X contains NaN, 1 .* MatrixComp"),
    "missing, for neurons": (lambda: ParallelReLU(0.1).fit(_with_nan(ROWS), ROWS[:, 0]), "X contains NaN, .*leave out"),
    "infinite entries": (lambda: MatrixCompletion(0.1).fit(ROWS * np.inf), "^Input Y contains infinity; mark missing"),
    "half precision": (lambda: ParallelNetwork(_subnetwork, 0.1).fit(X.half(), X[:, :3]), r"float16.* \.float\(\)"),
    "frozen subnetworks": (
        lambda: ParallelNetwork(lambda: _subnetwork().requires_grad_(False), 0.1),
        r"\(0\.weight, 2\.weight\).*requires_grad_\(True\)",
    ),
    "a lazy layer after dropout": (lambda: AdditiveDropout(0.5, nn.LazyLinear(3))(X), "is lazy; call it once"),
    "text for dropout": (lambda: ImportanceDropout()("x"), "the input must be a tensor .* got a str"),
    "a function after dropout": (lambda: AdditiveDropout(0.5, torch.sin), "layer must be the nn.Module"),
    "another device": (lambda: SolverLinear(8, 6)(X.to("meta")), "SolverLinear: the input is on meta .* on cpu; move"),
    "a penalty's device": (lambda: DropoutPenalty(_net(), 0.5)(X.to("meta")), "^0: the input is on meta .* move one"),
    "no outputs": (
        lambda: SolverLinear.from_plain(_empty(), "relu", SolverOptions()),
        r"needs inputs and outputs, .*\(0, 8\)",
    ),
    "data without values": (lambda: LowRank(0.1).fit(X.to("meta")), "^Y is on the meta device and has no data; move"),
    "a batch without values": (lambda: LPOM(_net()).step(X.to("meta"), LABELS), "^x is on the meta device"),
    "sparse labels": (lambda: LPOM(_net()).step(X, LABELS.to_sparse()), "^the target y is sparse .* to_dense"),
    "a pattern of bytes": (lambda: ProxProp(_net(), include=b"0"), "include must be None, a pattern or a list of pa"),
    "nothing to revert": (lambda: revert("net"), r"^revert\(model=…\) takes a Module, got a str"),
    "a growth in words": (lambda: MAC(_net(), growth="fast"), r"^MAC\(growth=…\) takes a number, got a str"),
    "a fraction in words": (lambda: SubsampledGram("all"), r"^SubsampledGram\(fraction=…\) takes a number, got a str"),
    "neither true nor false": (lambda: ISTANet(torch.eye(4), 2, shared=X), r"shared=…\) takes True or False, got a T"),
    "inputs of another size": (lambda: explain(convert(_net(), {"2": ProxGD()}), X.T), r"^explain .*inputs \(8, 12\)"),
    "a measuring number": (lambda: ISTANet(torch.tensor(1.0)), r"phi must be a matrix .* shape \(\)"),
    "a measuring array": (lambda: ISTANet(np.ones((2, 4))), "torch.as_tensor"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_answered_by_a_sentence(name):
    call, words = MISTAKES[name]
    with pytest.raises(MinimandError) as caught:
        call()
    message = str(caught.value)
    assert re.search(words, message), message
    assert "\n" not in message


def test_an_unknown_option_is_named_with_the_class():
    with pytest.raises(TypeError, match=r"SolverLinear\.__init__\(\) got an unexpected keyword argument 'start'"):
        SolverLinear(4, 3, start="plain")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_autocast_takes_is_not_refused(dtype):
    plain = _net()
    with torch.autocast("cpu", torch.bfloat16):
        expected = plain(X.to(dtype))
    assert torch.equal(_attached(plain, X.to(dtype), autocast=True), expected)


class _Own(RuntimeError):
    """An exception of the user's."""


class _Casting(nn.Linear):
    """Takes every dtype, and fails for another reason."""

    def forward(self, x):
        super().forward(x.to(self.weight.dtype))
        raise _Own("of the module")


def _hooked() -> nn.Linear:
    def fail(*_):
        raise _Own("of the hook")

    layer = nn.Linear(8, 8)
    layer.register_forward_pre_hook(lambda layer, inputs: inputs[0].float())
    layer.register_forward_hook(fail)
    return layer


@pytest.mark.parametrize(
    "call",
    [
        lambda: DropoutPenalty(nn.Sequential(_Casting(8, 8), nn.Dropout(), nn.Linear(8, 3)))(X.double()),
        lambda: DropoutPenalty(nn.Sequential(_hooked(), nn.Dropout(), nn.Linear(8, 3)))(X.double()),
        lambda: _attached(nn.Sequential(_hooked(), nn.Linear(8, 3)), X.double()),
        lambda: OptimizationNet([_Casting(8, 8)], "heavy_ball")(X.double()),
        lambda: OptimizationNet([_hooked()], "heavy_ball")(X),
    ],
    ids=["a penalty's module", "a penalty's hook", "a tapped layer's hook", "a block", "a block's hook"],
)
def test_errors_of_the_user_s_modules_and_hooks_come_through(call):
    """The dtypes of input and weight differ, but the module converts them, so they are not the cause."""
    with pytest.raises(_Own, match=r"^of the (module|hook)$"):
        call()


def test_errors_of_another_kind_stay_torch_s():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        _attached(_net(), X[:, :3])


def test_a_lack_of_memory_stays_torch_s():
    @checked
    def full(x: Tensor) -> None:
        raise torch.OutOfMemoryError("out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        full(X)


def test_a_frozen_layer_is_not_listed_and_alone_is_warned_of(caplog):
    net = _net()
    net[0].requires_grad_(False)
    prox = ProxProp(net).attach(torch.optim.SGD(net.parameters(), 0.1))
    assert prox.layers == ()
    assert "until one is unfrozen: layer '0'" in caplog.text
    net[0].requires_grad_(True)
    assert prox.layers == ("0",)


def _flags() -> list[Any]:
    """Every argument of the public API that is True or False."""
    homes = (minimand.nn, minimand.operators, minimand.solvers, minimand.train, minimand.functions)
    calls = {call for home in homes for call in (getattr(home, name) for name in home.__all__) if callable(call)}
    # A problem is checked when it is solved, and its flag is the library's own.
    calls = {call for call in calls if not inspect.isabstract(call) and call is not Problem}
    found = [(call, name) for call in calls for name, each in _parameters(call).items() if each.annotation is bool]
    return [pytest.param(*each, id=f"{each[0].__name__}-{each[1]}") for each in sorted(found, key=str)]


def _parameters(call: Any) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(call).parameters


@pytest.mark.parametrize(("call", "flag"), _flags())
def test_a_flag_is_true_or_false(call, flag):
    """Every object is true or false to Python, so that one in the wrong place would be taken, and ignored."""
    needed = [n for n, each in _parameters(call).items() if each.default is each.empty and n != flag]
    with pytest.raises(MinimandError, match=f"{flag}.*True or False"):
        call(**dict.fromkeys(needed), **{flag: "no"})

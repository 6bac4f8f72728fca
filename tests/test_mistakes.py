"""Law: a plausible mistake is answered by one sentence that says what, where and what to do, before any work."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from minimand import LPOM, ProxProp, SolverConv2d, SolverLinear, convert, explain
from minimand.errors import MinimandError
from minimand.factor import NMF, LowRank
from minimand.nn import ISTANet
from minimand.solvers import ProxGD
from minimand.train import MAC

X, LABELS = torch.randn(12, 8), torch.arange(12) % 3
ROWS = np.abs(np.random.default_rng(0).normal(size=(6, 5)))


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))


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


MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "another dtype": (lambda: SolverLinear(8, 6)(X.double()), "SolverLinear: the input is torch.float64 .* convert"),
    "a convolution's": (lambda: SolverConv2d(1, 2, 3)(torch.ones(2, 1, 6, 6).double()), "SolverConv2d: .* convert"),
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
    "another state": (_another_state, "of another network"),
    "missing entries": (lambda: LowRank(0.5).fit(_with_nan(ROWS)), "Y contains NaN, 1 of its 30 .* MatrixCompletion"),
    "negative entries": (lambda: NMF(0.1).fit(-ROWS), "^Negative values in data passed to NMF: clip or shift them$"),
    "a measuring array": (lambda: ISTANet(np.ones((2, 4))), "torch.as_tensor"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_answered_by_a_sentence(name):
    call, words = MISTAKES[name]
    with pytest.raises(MinimandError) as caught:
        call()
    said = str(caught.value)
    assert re.search(words, said), said
    assert "\n" not in said


def test_a_frozen_layer_is_not_listed_and_alone_is_warned_of(caplog):
    net = _net()
    net[0].requires_grad_(False)
    prox = ProxProp(net).attach(torch.optim.SGD(net.parameters(), 0.1))
    assert prox.layers == ()
    assert "until one is thawed: layer '0'" in caplog.text
    net[0].requires_grad_(True)
    assert prox.layers == ("0",)

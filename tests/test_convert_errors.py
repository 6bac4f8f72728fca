"""A conversion that fails lists every problem with its path and leaves the model unchanged."""

import pytest
import torch
from torch import nn

from minimand.errors import ConversionError
from minimand.functions import Zero
from minimand.network.record import Call
from minimand.nn import Rule, convert, plan
from minimand.solvers import ProxGD, ProxSG

from .cases.conversion import ONE, forwarding
from .cases.networks import VGG


def test_every_problem_is_listed_with_its_path_and_nothing_changes():
    model = nn.ModuleDict(
        {
            "a": nn.Sequential(nn.Linear(6, 6), nn.ReLU()),
            "b": nn.Sequential(nn.Linear(6, 6), nn.GELU()),
            "c": nn.Sequential(nn.ConvTranspose2d(1, 1, 3, output_padding=1, dilation=2), nn.ReLU()),
            "d": nn.Sequential(nn.Linear(6, 6), nn.SiLU()),
            "e": nn.Sequential(nn.Dropout(1.0), nn.Linear(6, 6)),
            "f": nn.Sequential(nn.AlphaDropout(), nn.Linear(6, 6)),
            "g": nn.Sequential(nn.Linear(6, 6), nn.ReLU()),
            "i": nn.Sequential(nn.LazyLinear(6)),
            "j": nn.Linear(6, 6),
        }
    )
    convert(model["a"], {"0": ProxGD()}, inplace=True)
    before = {path: (module, type(module), dict(vars(module))) for path, module in model.named_modules()}
    rules = {"?.*": ProxSG(), "g.*": ProxSG(tau=7), "nothing.*": ProxGD(), "*.1": ProxGD(), "j": ProxGD()}
    with pytest.raises(ConversionError) as caught:
        convert(model, rules | {"g.0": ProxSG(tau=7), "e.1": ProxSG(), "f.1": ProxSG()}, inplace=True)
    lines = [line.strip() for line in str(caught.value).splitlines()]
    expected = {
        "a.0": "already",
        "b.0": "GELU",
        "c.0": "output_padding must be smaller",
        "d.0": "SiLU",
        "e.1": "p=1",
        "f.1": "AlphaDropout",
        "g.0": "6 features",
        "i.0": "run the model once",
        "j": "no forward calls it",
        "nothing.*": "no such layer",
    }
    for path, reason in expected.items():
        assert any(line.startswith(f"{path}: ") and reason in line for line in lines), (path, lines)
    assert len(lines) == 1 + len(expected)
    for path, module in model.named_modules():
        known, kind, state = before[path]
        assert module is known
        assert type(module) is kind
        assert vars(module) == state


def test_a_layer_that_no_forward_calls_is_refused_with_the_remedy():
    model = VGG()
    model.extra = nn.Linear(4, 4)
    with pytest.raises(ConversionError, match=r"extra: no forward calls it.* remove it.* as the last rule, 'extra': "):
        convert(model, {"*": ProxGD(iters=2)})
    rule = Rule(ProxGD(iters=2), activation=None, dropout=None)
    assert convert(model, {"*": ProxGD(iters=2), "extra": rule}).extra.function == Zero()


def test_a_double_conversion_is_an_error():
    converted = convert(VGG(), {"classifier.0": ProxGD()})
    with pytest.raises(ConversionError, match=r"classifier\.0: is a solver layer already .* revert"):
        convert(converted, {"classifier.*": ProxGD()})


def test_an_output_that_is_needed_before_the_activation_is_an_error():
    model = forwarding(lambda self, x: (z := self.fc(x)) * torch.sigmoid(z))
    with pytest.raises(ConversionError, match="fc: its output goes to sigmoid, but also to mul"):
        convert(model, {"fc": ONE})


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Linear(2, 2), r"nn\.Sequential\(model\)"),
        (nn.DataParallel(VGG()), r"model\.module"),
        ("net", "takes an nn.Module"),
    ],
)
def test_what_has_no_layers_of_its_own_is_refused(model, message):
    with pytest.raises(ConversionError, match=message):
        convert(model, {"*": ProxGD()})


def test_a_compiled_model_is_refused():
    with pytest.raises(ConversionError, match="the model is compiled"):
        convert(torch.compile(VGG(), backend="eager"), {"*": ProxGD()})
    model = VGG()
    model.compile(backend="eager")
    with pytest.raises(
        ConversionError, match=r"the model is compiled in place; .* then call compile\(\) of the result"
    ):
        convert(model, {"*": ProxGD()})
    model = VGG()
    model.features = torch.compile(model.features, backend="eager")
    with pytest.raises(ConversionError, match="features is compiled"):
        convert(model, {"classifier.*": ProxGD()})


@pytest.mark.parametrize("rules", [{}, {"*": "relu"}, {"*": None}, [ProxGD()]])
def test_rules_are_checked(rules):
    with pytest.raises(ConversionError, match=r"a rule is a solver|rules is empty"):
        convert(VGG(), rules)


class _Doubling(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def test_a_layer_with_another_forward_is_named_in_full():
    with pytest.raises(ConversionError, match=r"0: .*errors._Doubling overrides the forward of torch.nn.Linear,"):
        convert(nn.Sequential(_Doubling(3, 3)), ProxGD())


class _Inspecting(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x):
        assert isinstance(self.fc, nn.Linear)
        return self.fc(x)


def test_a_changed_model_that_does_not_run_names_the_module():
    model = nn.Sequential(nn.Linear(3, 3), _Inspecting())
    with pytest.raises(ConversionError, match=r"unchanged: AssertionError.* \(in 1, _Inspecting\); leave out"):
        convert(model, ProxGD())
    assert type(convert(model, {"0": ProxGD()})[1].fc) is nn.Linear


def test_planning_is_linear_in_the_number_of_layers(monkeypatch):
    searched = []
    plain = Call.produces.fget
    monkeypatch.setattr(Call, "produces", property(lambda call: searched.append(call) or plain(call)))
    for count in (10, 20):
        plan(nn.Sequential(*(nn.Linear(3, 3) for _ in range(count))), ProxGD())
    assert len(searched) <= 8 * 20

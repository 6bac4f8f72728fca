"""Law: blocks, shapes, coefficients and options that do not fit raise an error of one sentence that names them."""

import pytest
import torch
from torch import nn

from minimand.errors import MinimandError, OptionError, ShapeError
from minimand.nn import HeavyBallUpdate, Learning, NesterovUpdate, OptimizationNet, Transition
from minimand.nn.blocks import AcceleratedUpdate, ADMMUpdate, DenseUpdate, MergeUpdate, TwoStreamBlock

UPDATES = [HeavyBallUpdate(), NesterovUpdate(0.3), AcceleratedUpdate(), ADMMUpdate(), MergeUpdate()]


def test_unknown_algorithms_are_listed_against_the_known():
    with pytest.raises(OptionError, match="'gd', 'heavy_ball', 'nesterov', 'admm'"):
        OptimizationNet([nn.Linear(2, 2)], "adam")


@pytest.mark.parametrize("update", [*UPDATES, DenseUpdate()], ids=str)
def test_shapes_that_differ_in_a_stage_are_named_with_their_block(update):
    flat = isinstance(update, DenseUpdate)
    odd = nn.Flatten(0) if flat else nn.Linear(4, 3)
    net = OptimizationNet([nn.Linear(4, 4), odd], update)
    if flat:
        net = OptimizationNet([nn.Conv2d(4, 4, 1), nn.Conv2d(8, 4, 3)], update)
    with pytest.raises(ShapeError, match=r"blocks\.1.*Transition"):
        net(torch.randn(2, 4, 5, 5) if flat else torch.randn(2, 4))


@pytest.mark.parametrize("learnable", [False, "channel"])
def test_what_torch_refuses_is_named_with_its_block(learnable):
    net = OptimizationNet([nn.Linear(4, 4), nn.Linear(5, 4)], "heavy_ball", learnable=learnable, channels=4)
    with pytest.raises(ShapeError, match=r"blocks\.1 \(Linear\).*\(2, 4\)"):
        net(torch.randn(2, 4))
    other = OptimizationNet([nn.Linear(4, 4)] * 2, "heavy_ball", learnable="channel", channels=3)
    with pytest.raises(ShapeError, match=r"blocks\.0 \(Linear\).*\(2, 4\)"):
        other(torch.randn(2, 4))


def test_errors_of_shapes_say_what_to_do():
    two = Transition(nn.Linear(4, 3), nn.Linear(4, 2))
    with pytest.raises(ShapeError, match=r"blocks\.1 maps \(2, 4\) to \(2, 3\), but its shortcut.*\(2, 2\)"):
        OptimizationNet([nn.Linear(4, 4), two], "heavy_ball")(torch.randn(2, 4))
    grown = [nn.Conv2d(2, 4, 1), nn.Conv2d(6, 3, 1)]
    images = torch.randn(2, 2, 5, 5)
    assert OptimizationNet(grown, DenseUpdate())(images).shape[1] == 9
    with pytest.raises(ShapeError, match=r"blocks\.1 \(Conv2d\) returns 3 channels after iterates of 4"):
        OptimizationNet(grown, DenseUpdate(), learnable=True)(images)
    for update in (HeavyBallUpdate(), ADMMUpdate(), DenseUpdate()):
        with pytest.raises(ShapeError, match=r"blocks\.0 \(LSTM\) returns a tuple"):
            OptimizationNet([nn.LSTM(4, 4)], update)(torch.randn(2, 4))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: OptimizationNet([], "gd"), "empty"),
        (lambda: OptimizationNet(nn.Linear(2, 2), "gd"), "list of modules"),
        (lambda: OptimizationNet([torch.relu], "gd"), "blocks.0 is not a module"),
        (lambda: OptimizationNet([TwoStreamBlock(nn.Identity(), nn.Identity())], "gd"), "one stream"),
        (lambda: OptimizationNet([Transition(nn.Linear(2, 3))], "heavy_ball"), "give it a shortcut"),
        (lambda: OptimizationNet([Transition(nn.Linear(2, 3), nn.Linear(2, 3))], "gd"), "does not use"),
        (lambda: OptimizationNet([nn.Identity()], "heavy_ball", learnable="channel"), "channels="),
        (lambda: OptimizationNet([nn.Identity()], "heavy_ball", learnable="channel", channels=[2, 3]), "2 for 1"),
        (lambda: OptimizationNet([nn.Identity()], "heavy_ball", learnable="always"), "learnable must be"),
        (lambda: OptimizationNet([nn.Identity()], "gd")(torch.ones(3)), "batch"),
        (lambda: Learning("rows"), "channel"),
        (lambda: Learning("scalar", "unit"), "constraint"),
        (lambda: AcceleratedUpdate("other"), "start_at"),
        (lambda: NesterovUpdate("foo"), 'finite number or "auto"'),
        (lambda: NesterovUpdate(None), 'finite number or "auto"'),
        (lambda: NesterovUpdate(float("nan")), 'finite number or "auto"'),
        (lambda: HeavyBallUpdate(1.0, float("inf")), "past must be a finite number"),
        (lambda: DenseUpdate("x"), "past must be a finite number"),
        (lambda: MergeUpdate(memory=None), "memory must be a finite number"),
    ],
)
def test_bad_input_is_one_sentence(call, words):
    with pytest.raises(MinimandError, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)

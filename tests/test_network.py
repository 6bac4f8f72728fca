"""Law: a record recomputes the network to the bit or says why not, and reading leaves the network as it was."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from minimand.network import read, role

from .cases.forwards import FORWARDS

LAYERS = (nn.Linear, nn.modules.conv._ConvNd)
BOTH = pytest.mark.parametrize("case", FORWARDS.values(), ids=FORWARDS.keys())


def made(case):
    torch.manual_seed(0)
    return case.make()


def as_tuple(example):
    return example if isinstance(example, tuple) else (example,)


def state_of(model):
    """All that reading must restore, in a form that can be compared."""
    attributes = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            items = value.items() if isinstance(value, dict) else value
            content = tuple(map(id, items)) if isinstance(value, list) else None
            content = tuple((k, id(v)) for k, v in items) if isinstance(value, dict) else content
            content = value.tolist() if isinstance(value, torch.Tensor) else content
            attributes[path, name] = id(value), content
        attributes[path, "training"] = module.training
    tensors = [*model.parameters(), *model.buffers()]
    return {
        "attributes": attributes,
        "bytes": [(id(t), t.detach().clone().flatten().tolist(), t._version, t.requires_grad) for t in tensors],
        "gradients": [id(p.grad) for p in model.parameters()],
        "torch": torch.get_rng_state().tolist(),
        "python": random.getstate(),
        "numpy": np.random.get_state()[1].tolist(),  # noqa: NPY002
    }


@BOTH
@pytest.mark.parametrize("given", [True, False], ids=["example", "made up"])
def test_record_recomputes_the_network_or_is_opaque(case, given):
    model = made(case)
    network = read(model, case.example() if given else None)
    if not given and not case.guessable:
        assert not network.complete
        assert any("pass an example" in str(part) for part in network.opaque())
        return
    assert network.guessed is not given
    reasons = [str(part) for part in network.opaque()]
    assert [reason for reason in reasons if case.opaque is None or case.opaque in reason] or case.opaque is None
    assert case.opaque is not None or not reasons
    if case.exact and given:
        for _ in range(2):
            assert network.verify(case.example())


@BOTH
def test_reading_leaves_the_network_as_it_was(case):
    model, example = made(case), case.example()
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
    inputs = [t.clone() for t in torch.utils._pytree.tree_leaves(example) if isinstance(t, torch.Tensor)]
    before = state_of(model)
    network = read(model, example)
    assert state_of(model) == before
    if network.complete:
        network.verify(example)
        assert state_of(model) == before
    read(model)
    assert state_of(model) == before
    after = [t for t in torch.utils._pytree.tree_leaves(example) if isinstance(t, torch.Tensor)]
    assert all(map(torch.equal, inputs, after))


@BOTH
def test_every_call_of_a_layer_is_found(case):
    model = made(case)
    network = read(model, case.example())
    if not network.complete or any(word in str(network.opaque()) for word in ("torch.jit", "inside a transform")):
        return
    counts, handles = {}, []
    for path, module in model.named_modules():
        if isinstance(module, LAYERS):

            def count(module, args, output, path=path):
                if module is model.get_submodule(path):
                    counts[path] = counts.get(path, 0) + 1

            handles.append(module.register_forward_hook(count))
    example = case.example()
    with torch.no_grad():  # some forwards cannot be differentiated
        model(**example) if isinstance(example, dict) else model(*as_tuple(example))
    if "random" in str(network.opaque()):
        return
    for path, expected in counts.items():
        found = [call for call in network.calls if call.path == path and role(call) in ("linear", "conv")]
        assert len(found) == expected, path


@pytest.mark.parametrize("ending", [SystemExit("expects batches of 7"), GeneratorExit(), StopIteration()])
def test_a_forward_that_ends_the_program_is_recorded_as_one_that_raises(ending: BaseException) -> None:
    class Ending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.a(x)
            raise ending

    network = read(Ending(), torch.ones(2, 3))
    assert not network.complete
    assert type(ending).__name__ in " ".join(network.reasons)


class _TwoWidths(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(6, 4), nn.Linear(3, 4)

    def forward(self, a, b):
        return self.one(a) + self.two(b)


def test_inputs_of_different_widths_are_made_up():
    network = read(_TwoWidths())
    assert network.complete
    assert [value.shape[-1] for value in network.inputs] == [6, 3]

"""Laws of torch's transformers: their linear layers are solved in every mode, though a fused path reads the weights."""

import copy

import pytest
import torch
from torch import nn

from minimand.errors import ConversionError
from minimand.nn import convert, plan, revert
from minimand.solvers import ProxGD, ProxSG

from .cases.conversion import ONE, solver_layers
from .cases.networks import Encoder

X = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(0))
FEEDFORWARD = {f"encoder.layers.{i}.linear{j}" for i in (0, 1) for j in (1, 2)}
LAYERS = FEEDFORWARD | {"decoder.linear1", "decoder.linear2", "fc"}


def built(**options):
    torch.manual_seed(0)
    model = Encoder()
    if options:
        model.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, **options), 2)
    return model.eval()


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("options", [{}, {"norm_first": True}, {"bias": False}], ids=str)
@pytest.mark.parametrize("inplace", [False, True])
def test_a_unit_step_is_the_plain_network_and_the_fused_path_is_not_taken(options, inplace):
    model = built(**options)
    with torch.no_grad():
        fused = model(X)
    plain, before = model(X), copy.deepcopy(model.state_dict())
    converted = convert(model, {"*": ONE}, example=X, inplace=inplace)
    assert set(solver_layers(converted)) == LAYERS
    assert torch.equal(converted(X), plain)
    with torch.no_grad():
        assert torch.equal(converted(X), converted(X.clone()))
        torch.testing.assert_close(converted(X), fused, rtol=1e-4, atol=1e-5)
        several = convert(revert(converted), {"*": ProxGD(iters=20)}, example=X)
        assert (several(X) - fused).abs().max() > 1e-3  # the fused path would be the plain network
        torch.testing.assert_close(several(X), several.requires_grad_()(X).detach())
    assert converted.state_dict().keys() == before.keys()
    back = revert(converted, inplace=inplace)
    with torch.no_grad():
        assert torch.equal(back(X), fused)
    assert [layer.activation_relu_or_gelu for layer in back.encoder.layers] == [1, 1]
    assert back.encoder.use_nested_tensor == built(**options).encoder.use_nested_tensor


def test_one_converted_layer_of_several_is_enough():
    model = built()
    converted = convert(model, {"encoder.layers.1.linear1": ProxGD(iters=20)}, example=X)
    with torch.no_grad():
        torch.testing.assert_close(converted(X), converted.requires_grad_()(X).detach(), rtol=1e-4, atol=1e-5)
        assert (converted(X) - model(X)).abs().max() > 1e-4
    assert converted.encoder.layers[0].activation_relu_or_gelu == 1


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_masked_sequences_do_not_become_nested():
    model = built().encoder
    converted = convert(model, {"layers.1.*": ONE}, example=X)
    mask = torch.tensor([[False, False, False, True]] * 3)
    with torch.no_grad():
        found, fused = (net(X, src_key_padding_mask=mask) for net in (converted, model))
    torch.testing.assert_close(found[:, :3], fused[:, :3], rtol=1e-4, atol=1e-5)


def test_the_dropout_inside_is_sampled_in_training():
    converted = convert(built().train(), {"*.linear2": ProxSG(iters=2)}, example=X)
    assert {layer.solver.tau for layer in solver_layers(converted).values()} == {0.9}
    converted(X).sum().backward()
    assert all(layer.weight.grad is not None for layer in solver_layers(converted).values())


def test_gelu_is_refused_by_path_and_the_projection_is_left():
    model = built(activation="gelu")
    steps = plan(model, {"*": ProxGD(iters=2)}, example=X)
    assert set(steps.refused) == {f"encoder.layers.{i}.linear1" for i in (0, 1)}
    assert all("GELU is not monotone" in why for why in steps.refused.values())
    assert all("uses its weight without calling it" in steps.left[path] for path in steps.left)
    attention = ["encoder.layers.0.self_attn", "encoder.layers.1.self_attn", "decoder.self_attn"]
    assert set(steps.left) == {f"{path}.out_proj" for path in (*attention, "decoder.multihead_attn")}
    with pytest.raises(ConversionError, match=r"encoder\.layers\.0\.linear1: GELU"):
        convert(model, {"*": ProxGD()}, example=X)
    skipped = convert(model, {"*": ProxGD(iters=2)}, example=X, unsupported="skip")
    assert set(solver_layers(skipped)) == LAYERS - set(steps.refused)
